import hashlib
from typing import Any

import pytest

from extproc.adapters.openai import BadRequest, Reader
from extproc.model import Request
from tests.adapters.openai.calling import PATHS, READER, read_raw
from tests.builders import a_policy

VALID = b'{"model":"chat-model","messages":[{"role":"user","content":"Hi"}],"prompt":"Hi","input":"Hi"}'
KEY = "sk-acme-1"
TENANTS: dict[str, Any] = {
    "tenants": {
        "acme": {"tier": "gold", "api_key_sha256": [hashlib.sha256(KEY.encode()).hexdigest()]},
        "globex": {"tier": "silver"},
    },
    "default": {"tier": "bronze"},
}
ALL_TRUSTED = {"jwt": {}, "tenant_header": "X-Tenant", "api_keys": True}
CLAIM = {"envoy.filters.http.jwt_authn": {"payload": {"tenant": "globex"}}}


def a_reader(trust: dict[str, Any] | None = None, **gateway: Any) -> Reader:
    return Reader(a_policy(gateway={"trust": trust or {}, **gateway}, tenants=TENANTS))


def a_request(reader: Reader = READER, headers: dict[str, str] | None = None, metadata: Any = None) -> Request:
    request = read_raw(VALID, reader=reader, headers=headers, metadata=metadata)
    assert isinstance(request, Request), request
    return request


def who(reader: Reader, headers: dict[str, str] | None = None, metadata: Any = None) -> tuple[str, str]:
    request = a_request(reader, headers, metadata)
    return request.tenant, request.tier


@pytest.mark.parametrize(
    "headers",
    [
        {"authorization": f"Bearer {KEY}"},
        {"authorization": f"bearer  {KEY} "},
        {"x-api-key": KEY},
        {"authorization": "Bearer other", "x-api-key": KEY},
        {"authorization": "Basic abc", "x-api-key": KEY},
    ],
)
def test_an_api_key_names_its_tenant(headers: dict[str, str]) -> None:
    assert who(a_reader(), headers) == ("acme", "gold")


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": KEY},
        {"authorization": f"Basic {KEY}"},
        {"authorization": "Bearer"},
        {"authorization": "Bearer "},
        {"authorization": f"Bearer {KEY}x"},
        {"x-api-key": KEY.upper()},
        {"x-api-key": "\udcff\ud800"},
        {"x-api-key": hashlib.sha256(KEY.encode()).hexdigest()},
        {"x-tenant": "acme"},
    ],
)
def test_any_other_caller_is_the_default_tenant(headers: dict[str, str]) -> None:
    assert who(a_reader(), headers, CLAIM) == ("default", "bronze")


def test_a_key_means_nothing_where_keys_are_not_trusted() -> None:
    assert who(a_reader({"api_keys": False}), {"x-api-key": KEY})[0] == "default"


def test_a_trusted_header_names_the_tenant() -> None:
    reader = a_reader({"tenant_header": "X-Tenant"})
    assert who(reader, {"x-tenant": " globex "}) == ("globex", "silver")
    assert who(reader, {"x-tenant": "nobody"}) == ("default", "bronze")


def test_a_verified_claim_names_the_tenant() -> None:
    assert who(a_reader({"jwt": {}}), metadata=CLAIM) == ("globex", "silver")
    elsewhere = {"jwt": {"namespace": "jwt", "path": ["a", "b", "c"]}}
    assert who(a_reader(elsewhere), metadata={"jwt": {"a": {"b": {"c": "acme"}}}})[0] == "acme"


@pytest.mark.parametrize(
    "metadata",
    [
        {},
        {"envoy.filters.http.jwt_authn": None},
        {"envoy.filters.http.jwt_authn": {"payload": "globex"}},
        {"envoy.filters.http.jwt_authn": {"payload": {"tenant": 5.0}}},
        {"envoy.filters.http.jwt_authn": {"payload": {"tenant": ["globex"]}}},
        {"envoy.filters.http.jwt_authn": {"payload": {"tenant": ""}}},
        {"other": {"payload": {"tenant": "globex"}}},
    ],
)
def test_a_claim_that_is_no_name_does_not_answer(metadata: dict[str, Any]) -> None:
    assert who(a_reader({"jwt": {}}), metadata=metadata)[0] == "default"


def test_sources_are_asked_in_order_claim_header_key() -> None:
    reader = a_reader(ALL_TRUSTED)
    headers = {"x-tenant": "nobody", "x-api-key": KEY}
    assert who(reader, headers, CLAIM)[0] == "globex"
    assert who(reader, headers)[0] == "default"
    assert who(reader, {"x-api-key": KEY})[0] == "acme"


@pytest.mark.parametrize("path", PATHS)
def test_an_unknown_tenant_gets_401_where_the_policy_says_so(path: str) -> None:
    reader = Reader(a_policy(tenants={**TENANTS, "unknown": "refuse"}))
    bad = read_raw(b"", path, reader, {"x-api-key": "wrong-key"})
    assert isinstance(bad, BadRequest)
    assert bad.status == 401
    assert bad.api == ("anthropic" if path == "/v1/messages" else "openai")
    assert "wrong-key" not in repr(bad)
    assert isinstance(read_raw(VALID, path, reader, {"x-api-key": KEY}), Request)


@pytest.mark.parametrize(
    ("header", "value", "field", "meaning"),
    [
        ("tokenfleet-class", "interactive", "wanted_class", "interactive"),
        ("tokenfleet-class", " batch ", "wanted_class", "batch"),
        ("tokenfleet-deadline-ms", "1500", "deadline_s", 1.5),
        ("tokenfleet-deadline-ms", " 0.5 ", "deadline_s", 0.0005),
        ("tokenfleet-deadline-ms", "86400000", "deadline_s", 86_400.0),
        ("tokenfleet-residency", "EU, de", "residency", frozenset({"eu", "de"})),
        ("tokenfleet-residency", "eu", "residency", frozenset({"eu"})),
    ],
)
def test_a_client_header_is_read(header: str, value: str, field: str, meaning: object) -> None:
    assert getattr(a_request(), field) is None
    assert getattr(a_request(headers={header: value}), field) == meaning


@pytest.mark.parametrize(
    ("header", "values"),
    [
        ("tokenfleet-class", ["", " ", "a b", "ü", "x" * 201, "a\nb", "\udcff", '"a"']),
        (
            "tokenfleet-deadline-ms",
            ["", "0", "0.0", "-5", "nan", "inf", "1e3", "1_000", "86400001", "5s", "9" * 400, "5,5", "٥", "+5"],
        ),
        (
            "tokenfleet-residency",
            ["", ",", "eu,", "eu,,de", "eu de", "eu;de", "x" * 33, "*", "\udcff", ",".join(f"r{i}" for i in range(33))],
        ),
    ],
)
def test_a_client_header_that_cannot_be_read_is_a_400_that_names_it(header: str, values: list[str]) -> None:
    for value in values:
        bad = read_raw(VALID, headers={header: value})
        assert isinstance(bad, BadRequest), value
        assert (bad.status, bad.param) == (400, header)


@pytest.mark.parametrize(
    ("value", "asked"), [("1", True), ("yes", True), ("", False), ("0", False), ("False", False), (" ", False)]
)
def test_debug_is_granted_only_where_the_policy_allows_it(value: str, asked: bool) -> None:
    assert a_request(a_reader(debug=True), {"tokenfleet-debug": value}).debug is asked
    assert a_request(a_reader(), {"tokenfleet-debug": value}).debug is False


@pytest.mark.parametrize(
    ("hint", "subset"),
    [
        (["10.0.0.1:80", " 10.0.0.2 "], {"10.0.0.1:80", "10.0.0.2"}),
        ("10.0.0.1:80, 10.0.0.2,", {"10.0.0.1:80", "10.0.0.2"}),
        ("[::1]:80", {"[::1]:80"}),
        ([], set()),
        ("", set()),
        (" , ", set()),
        (None, set()),
        (5.0, set()),
        ([5.0, None, {}], set()),
        ({"a": "10.0.0.1"}, set()),
    ],
)
def test_a_subset_hint_narrows_and_one_that_names_nobody_allows_nobody(hint: Any, subset: set[str]) -> None:
    metadata = {"envoy.lb.subset_hint": {"x-gateway-destination-endpoint-subset": hint}}
    assert a_request(metadata=metadata).subset == frozenset(subset)


@pytest.mark.parametrize("metadata", [{}, {"envoy.lb.subset_hint": {}}, {"envoy.lb.subset_hint": "10.0.0.1"}])
def test_without_a_subset_hint_every_instance_is_allowed(metadata: dict[str, Any]) -> None:
    assert a_request(metadata=metadata).subset is None
