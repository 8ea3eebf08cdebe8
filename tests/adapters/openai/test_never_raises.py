"""Whatever arrives is a Request or a BadRequest, and a BadRequest makes a reply."""

from typing import Any

import msgspec
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from extproc.adapters.openai import BadRequest, Reader, reply_for
from extproc.model import Request
from tests.adapters.openai.calling import PATHS, READER, a_body, read_raw
from tests.builders import a_policy

FIELDS = (
    "model",
    "messages",
    "prompt",
    "input",
    "system",
    "instructions",
    "tools",
    "functions",
    "role",
    "content",
    "text",
    "type",
    "source",
    "output",
    "tool_calls",
    "image_url",
    "name",
    "id",
)
KINDS = ("text", "image_url", "input_audio", "tool_result", "document", "message", "function_call_output", "system")
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=10)
    | st.sampled_from(KINDS),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(FIELDS), inner, max_size=4),
    max_leaves=20,
)
FEW = settings(max_examples=15)
SOME = settings(max_examples=40)
READERS = (
    READER,
    Reader(a_policy(gateway={"trust": {"jwt": {}, "tenant_header": "x-tenant"}, "debug": True})),
    Reader(a_policy(tenants={"unknown": "refuse"})),
)
HEADER_NAMES = (
    "authorization",
    "x-api-key",
    "x-tenant",
    "content-encoding",
    "tokenfleet-class",
    "tokenfleet-deadline-ms",
    "tokenfleet-residency",
    "tokenfleet-debug",
    ":path",
    ":method",
)
ANY_TEXT = st.text(st.characters(codec=None), max_size=20)
METADATA_NAMES = st.sampled_from(
    [
        "envoy.lb.subset_hint",
        "x-gateway-destination-endpoint-subset",
        "envoy.filters.http.jwt_authn",
        "payload",
        "tenant",
    ]
)


def check(outcome: object) -> None:
    assert isinstance(outcome, Request | BadRequest)
    if isinstance(outcome, BadRequest):
        assert 400 <= outcome.status < 500
        assert orjson.loads(reply_for(outcome).body)["error"]["message"] == outcome.message
    else:
        assert outcome.prompt_tokens >= 1
        assert outcome.choices >= 1
        msgspec.msgpack.encode(outcome)  # it can cross to the dispatcher


@pytest.mark.parametrize("path", PATHS)
@given(body=st.binary(max_size=200))
@SOME
def test_any_bytes(path: str, body: bytes) -> None:
    check(read_raw(body, path))


@pytest.mark.parametrize("path", PATHS)
@given(value=JSON)
@SOME
def test_any_json(path: str, value: Any) -> None:
    check(read_raw(orjson.dumps(value), path))


@pytest.mark.parametrize("path", PATHS)
@given(cut=st.integers(0, 200), junk=st.binary(max_size=4))
@SOME
def test_a_damaged_body(path: str, cut: int, junk: bytes) -> None:
    body = orjson.dumps(a_body(path, tools=[{"type": "function"}], max_tokens=5))
    check(read_raw(body[:cut] + junk + body[cut + len(junk) :], path))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "field",
    [
        *("model", "messages", "prompt", "input", "system", "instructions", "tools", "functions", "cache_salt", "n"),
        *("max_tokens", "max_completion_tokens", "max_output_tokens", "stream", "priority", "previous_response_id"),
    ],
)
@given(value=JSON)
@FEW
def test_any_json_in_every_field(path: str, field: str, value: Any) -> None:
    check(read_raw(orjson.dumps(a_body(path) | {field: value}), path))


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages"])
@given(turns=st.lists(st.fixed_dictionaries({"role": JSON | st.just("user"), "content": JSON}), min_size=1, max_size=3))
@SOME
def test_any_json_in_every_message(path: str, turns: list[Any]) -> None:
    check(read_raw(orjson.dumps(a_body(path, messages=turns, input=turns)), path))


@given(
    parts=st.lists(
        st.fixed_dictionaries(
            {"type": st.sampled_from(KINDS) | JSON},
            optional={"text": JSON, "content": JSON, "source": JSON, "tool_use_id": JSON, "image_url": JSON},
        ),
        max_size=4,
    )
)
@SOME
def test_any_json_in_every_part(parts: list[Any]) -> None:
    for path in PATHS:
        body = a_body(path, messages=[{"role": "user", "content": parts}], system=parts, input=parts)
        check(read_raw(orjson.dumps(body), path))


@given(
    headers=st.dictionaries(st.sampled_from(HEADER_NAMES), ANY_TEXT, max_size=6),
    metadata=st.dictionaries(METADATA_NAMES, st.dictionaries(METADATA_NAMES, JSON | JSON.map(lambda x: {"tenant": x}))),
    reader=st.sampled_from(READERS),
)
def test_any_headers_and_metadata(headers: dict[str, str], metadata: dict[str, Any], reader: Reader) -> None:
    body = orjson.dumps(a_body())
    check(reader.read("r1", {":method": "POST", ":path": PATHS[0]} | headers, metadata, body, 0.0))
    check(reader.read("r1", headers, metadata, body, 0.0))
