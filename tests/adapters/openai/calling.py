"""Calls as Envoy hands them over; every part has a default but the one under test."""

from collections.abc import Mapping
from typing import Any

import orjson

from extproc.adapters.openai import BadRequest, Reader
from extproc.model import Request
from tests.builders import CHAT, a_policy

CHAT_PATH = "/v1/chat/completions"
PATHS = (CHAT_PATH, "/v1/completions", "/v1/embeddings", "/v1/responses", "/v1/messages")
READER = Reader(a_policy())


def a_body(path: str = CHAT_PATH, **fields: Any) -> dict[str, Any]:
    """A small valid body; a field given as ``...`` is left out."""
    prompt: dict[str, Any] = {
        "/v1/completions": {"prompt": "Hello"},
        "/v1/embeddings": {"input": "Hello"},
        "/v1/responses": {"input": "Hello"},
    }.get(path, {"messages": [{"role": "user", "content": "Hello"}]})
    return {key: value for key, value in ({"model": CHAT} | prompt | fields).items() if value is not ...}


def the_headers(path: str = CHAT_PATH, **fields: str) -> dict[str, str]:
    return {":method": "POST", ":path": path} | {key.replace("_", "-"): value for key, value in fields.items()}


def read_raw(
    body: bytes,
    path: str = CHAT_PATH,
    reader: Reader = READER,
    headers: Mapping[str, str] | None = None,
    metadata: Mapping[str, Any] | None = None,
) -> Request | BadRequest:
    return reader.read("r1", the_headers(path) | dict(headers or {}), metadata or {}, body, 7.0)


def accepted(path: str = CHAT_PATH, reader: Reader = READER, **fields: Any) -> Request:
    request = read_raw(orjson.dumps(a_body(path, **fields)), path, reader)
    assert isinstance(request, Request), request
    return request


def refused(path: str = CHAT_PATH, reader: Reader = READER, **fields: Any) -> BadRequest:
    bad = read_raw(orjson.dumps(a_body(path, **fields)), path, reader)
    assert isinstance(bad, BadRequest), bad
    return bad
