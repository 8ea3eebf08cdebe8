from typing import Any

import orjson
import pytest

from extproc.adapters.openai import BadRequest, Reader
from extproc.model import Request
from tests.adapters.openai.calling import CHAT_PATH, PATHS, accepted, read_raw, refused
from tests.builders import CHAT, a_policy

VALID = b'{"model":"chat-model","messages":[{"role":"user","content":"Hi"}],"prompt":"Hi","input":"Hi"}'


def deep(levels: int, opening: bytes = b"[", closing: bytes = b"]") -> bytes:
    return VALID[:-1] + b',"x":' + opening * levels + b"1" + closing * levels + b"}"


def test_the_valid_body_of_this_table_is_valid() -> None:
    for path in PATHS:
        assert isinstance(read_raw(VALID, path), Request)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b" ",
        b"hello",
        b"model=a&prompt=b",
        VALID[:-1],
        VALID[:40],
        VALID + b"}",
        VALID.replace(b'"Hi"', b"'Hi'"),
        VALID[:-1] + b',"temperature":NaN}',
        VALID[:-1] + b',"temperature":Infinity}',
        VALID[:-1] + b',"temperature":1e999}',
        VALID[:-1] + b',"max_tokens":0x10}',
        VALID[:-1] + b',"x":"\xff"}',
        VALID[:-1] + b',"x":"\xed\xa0\x80"}',
        VALID[:-1] + b',"x":"\\ud800"}',
        b"\xef\xbb\xbf" + VALID,
        VALID.decode().encode("utf-16"),
        b"\x1f\x8b\x08\x00\x00\x00\x00\x00",
        b"null",
        b"[]",
        b'"a string"',
        b"5",
        b"true",
        b"[" + VALID + b"]",
        deep(1000),
        deep(1000, b'{"a":', b"}"),
        deep(1023),
        deep(5000),
        b"[" * 100_000,
        b'{"a":' * 100_000,
    ],
    ids=lambda body: repr(body[-24:]),
)
def test_what_is_no_json_object_is_a_400(path: str, body: bytes) -> None:
    bad = read_raw(body, path)
    assert isinstance(bad, BadRequest)
    assert bad.status == 400
    assert bad.message
    assert bad.api == ("anthropic" if path == "/v1/messages" else "openai")


def test_nesting_that_a_real_schema_may_have_is_taken() -> None:
    assert isinstance(read_raw(deep(200)), Request)
    assert isinstance(read_raw(deep(253)), Request)
    assert isinstance(read_raw(deep(254)), BadRequest)


NUMBERS: list[tuple[str, str]] = [
    (CHAT_PATH, "max_tokens"),
    (CHAT_PATH, "max_completion_tokens"),
    (CHAT_PATH, "n"),
    ("/v1/completions", "max_tokens"),
    ("/v1/completions", "n"),
    ("/v1/responses", "max_output_tokens"),
    ("/v1/messages", "max_tokens"),
]


@pytest.mark.parametrize(("path", "field"), NUMBERS)
@pytest.mark.parametrize(
    "value", ["-1", "1e308", "-1e308", "1.5", "2.0", "true", "false", '"5"', "[]", "{}", "2147483648", "9" * 40]
)
def test_an_absurd_number_is_a_400_that_names_its_field(path: str, field: str, value: str) -> None:
    body = VALID[:-1] + f',"{field}":{value}}}'.encode()
    bad = read_raw(body, path)
    assert isinstance(bad, BadRequest)
    assert (bad.status, bad.param) == (400, field)
    assert field in bad.message


@pytest.mark.parametrize(("path", "field"), [pair for pair in NUMBERS if pair != ("/v1/completions", "max_tokens")])
def test_zero_is_refused_where_it_makes_no_sense(path: str, field: str) -> None:
    zero: dict[str, Any] = {field: 0}
    assert refused(path, **zero).param == field


def test_the_largest_numbers_are_taken() -> None:
    assert accepted(max_tokens=2**31 - 1, n=16_384, priority=-(2**31) + 1).choices == 16_384
    assert refused(n=16_385).param == "n"


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("model", [..., None, "", 5, True, [], {}, "m" * 257]),
        ("stream", ["true", 1, 0, [], {}]),
        ("priority", [1.0, True, "1", [], 2**31, -(2**31), 1e308]),
        ("cache_salt", [5, [], {}, True]),
    ],
)
def test_a_wrong_type_is_a_400_that_names_its_field(path: str, field: str, values: list[Any]) -> None:
    for value in values:
        bad = refused(path, **{field: value})
        assert (bad.status, bad.param) == (400, field), value


NOT_TURNS: list[Any] = [..., None, "Hi", 5, True, {}, []]
NOT_PROMPTS: list[Any] = [..., None, 5, 1.5, True, {}, []]


@pytest.mark.parametrize(
    ("path", "field", "values"),
    [
        (CHAT_PATH, "messages", NOT_TURNS),
        ("/v1/messages", "messages", NOT_TURNS),
        ("/v1/completions", "prompt", NOT_PROMPTS),
        ("/v1/embeddings", "input", NOT_PROMPTS),
        ("/v1/responses", "input", NOT_PROMPTS),
        ("/v1/responses", "instructions", [5, [], {}]),
        ("/v1/responses", "previous_response_id", [5, [], {}]),
        ("/v1/messages", "system", [5, {}, True]),
        (CHAT_PATH, "tools", [5, {}, "f", True]),
        (CHAT_PATH, "functions", [5, {}, "f", True]),
        ("/v1/completions", "prompt", [[1, True], [1, 2.0], [1, "a"], [-1], [2**32], [1, None], [{}], [1, [2]]]),
    ],
)
def test_a_prompt_of_the_wrong_type_is_a_400_that_names_its_field(path: str, field: str, values: list[Any]) -> None:
    for value in values:
        bad = refused(path, **{field: value})
        assert (bad.status, bad.param) == (400, field), value


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (CHAT_PATH, {"messages": [{"role": "user", "content": "a"}, "b"]}, "messages[1]"),
        (CHAT_PATH, {"messages": [{"content": "a"}]}, "messages[0].role"),
        (CHAT_PATH, {"messages": [{"role": 5, "content": "a"}]}, "messages[0].role"),
        (CHAT_PATH, {"messages": [{"role": [], "content": "a"}]}, "messages[0].role"),
        (CHAT_PATH, {"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        (CHAT_PATH, {"messages": [{"role": "user", "content": {"text": "a"}}]}, "messages[0].content"),
        (CHAT_PATH, {"messages": [{"role": "user", "content": ["a", 5]}]}, "messages[0].content[1]"),
        (CHAT_PATH, {"messages": [{"role": "user", "content": [{"type": []}]}]}, "messages[0].content[0].type"),
        (CHAT_PATH, {"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        (CHAT_PATH, {"messages": [{"role": "user", "content": [{}]}]}, "messages[0].content[0].text"),
        (CHAT_PATH, {"tools": [{}, 5]}, "tools[1]"),
        ("/v1/responses", {"input": [{"content": "a"}]}, "input[0].role"),
        ("/v1/responses", {"input": [{"type": "message", "content": "a"}]}, "input[0].role"),
        ("/v1/responses", {"input": [{"type": "x", "output": [5]}]}, "input[0].output[0]"),
        ("/v1/messages", {"system": [5]}, "system[0]"),
        (
            "/v1/messages",
            {"messages": [{"role": "user", "content": [{"type": "tool_result", "content": [{"type": "text"}]}]}]},
            "messages[0].content[0].content[0].text",
        ),
        (
            "/v1/messages",
            {"messages": [{"role": "user", "content": [{"type": "tool_result", "content": 5}]}]},
            "messages[0].content[0].content",
        ),
        ("/v1/completions", {"prompt": ["a", 5]}, "prompt[1]"),
        ("/v1/completions", {"prompt": [[1], "a"]}, "prompt[1]"),
        ("/v1/completions", {"prompt": [[1], [True]]}, "prompt[1]"),
        ("/v1/embeddings", {"input": [[1], []]}, "input[1]"),
    ],
)
def test_an_error_inside_a_prompt_says_where(path: str, fields: dict[str, Any], param: str) -> None:
    bad = refused(path, **fields)
    assert (bad.status, bad.param) == (400, param)
    assert bad.message.startswith(param)


def test_a_body_over_the_limit_is_a_413() -> None:
    reader = Reader(a_policy(gateway={"max_body_bytes": 1024}))
    body = orjson.dumps({"model": CHAT, "messages": [{"role": "user", "content": "x" * 2000}]})
    for path, api in ((CHAT_PATH, "openai"), ("/v1/messages", "anthropic")):
        bad = read_raw(body, path, reader)
        assert isinstance(bad, BadRequest)
        assert (bad.status, bad.api) == (413, api)
    exact = body.replace(b"x" * 2000, b"x" * (2000 - len(body) + 1024))
    assert len(exact) == 1024
    assert isinstance(read_raw(exact, CHAT_PATH, reader), Request)


@pytest.mark.parametrize("encoding", ["gzip", "GZIP", "br", "zstd", "deflate", "gzip, identity", "x"])
def test_a_compressed_body_is_a_415_that_says_so(encoding: str) -> None:
    bad = read_raw(VALID, headers={"content-encoding": encoding})
    assert isinstance(bad, BadRequest)
    assert (bad.status, bad.param) == (415, "content-encoding")


@pytest.mark.parametrize("encoding", ["", "identity", " Identity "])
def test_an_identity_encoding_is_none(encoding: str) -> None:
    assert isinstance(read_raw(VALID, headers={"content-encoding": encoding}), Request)


def test_a_path_that_is_no_call_is_a_404() -> None:
    bad = read_raw(VALID, "/v1/models")
    assert isinstance(bad, BadRequest)
    assert bad.status == 404


def test_no_message_repeats_what_the_caller_wrote() -> None:
    secret = "hunter2-" * 20
    for fields in ({"model": {"a": secret}}, {"messages": [secret]}, {"max_tokens": secret}, {"n": [secret]}):
        assert "hunter2" not in refused(**fields).message
    bad = read_raw(b'{"model": "' + secret.encode())
    assert isinstance(bad, BadRequest)
    assert "hunter2" not in bad.message
