"""Refusals and mistakes → HTTP answers in the shape of the API that was called.

Shapes: OpenAI ``{"error": {message, type, param, code}}``; Anthropic ``{"type": "error", "error": {type, message}}``.
"""

import math
from dataclasses import dataclass

import orjson

from extproc.model import Api, Reason, Refuse


@dataclass(frozen=True, slots=True)
class BadRequest:
    """A call that makes no request: an HTTP *status*, a sentence, and the field or header at fault."""

    status: int
    message: str
    param: str | None
    code: str | None
    api: Api


@dataclass(frozen=True, slots=True)
class Reply:
    """A whole HTTP answer; *details* is a word for the access log."""

    status: int
    headers: tuple[tuple[str, str], ...]
    body: bytes
    details: str


_STATUS = {
    Reason.UNKNOWN_MODEL: 404,
    Reason.NO_INSTANCE: 503,
    Reason.NOT_ALLOWED: 403,
    Reason.RESIDENCY: 403,
    Reason.DEADLINE: 429,
    Reason.LINE_FULL: 429,
    Reason.SUBSET: 503,
    Reason.BAD_REQUEST: 400,
}
_AGAIN = frozenset({Reason.NO_INSTANCE, Reason.DEADLINE, Reason.LINE_FULL})
"""Reasons that pass by themselves."""
_LONGEST_RETRY_S = 3600
_OPENAI_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
    503: "server_error",
}
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def reply_for(bad: BadRequest) -> Reply:
    """Return the answer to a call that could not be read."""
    body = _body(bad.api, bad.status, bad.message, bad.param, bad.code)
    return _reply(bad.status, Reason.BAD_REQUEST, body)


def refusal(api: Api, refuse: Refuse) -> Reply:
    """Return the answer to a request that is told no; ``retry-after`` where trying again can help."""
    status = _STATUS[refuse.reason]
    param, code = ("model", "model_not_found") if refuse.reason is Reason.UNKNOWN_MODEL else (None, refuse.reason.value)
    wait = refuse.retry_after_s
    if wait is None and refuse.reason in _AGAIN:
        wait = 1.0
    return _reply(status, refuse.reason, _body(api, status, refuse.detail, param, code), wait)


def _reply(status: int, reason: Reason, body: bytes, wait_s: float | None = None) -> Reply:
    headers = [("content-type", "application/json"), ("x-tokenfleet-reason", reason.value)]
    if wait_s is not None:
        headers.append(("retry-after", str(_whole_seconds(wait_s))))
    return Reply(status, tuple(headers), body, f"tokenfleet_{reason.value}")


def _whole_seconds(wait_s: float) -> int:
    """Round up, to 1 at least; what is no number of seconds becomes 1."""
    return math.ceil(min(wait_s, _LONGEST_RETRY_S)) if wait_s > 1 else 1


def _body(api: Api, status: int, message: str, param: str | None, code: str | None) -> bytes:
    message = message.encode(errors="replace").decode()
    if api == "anthropic":
        kind = _ANTHROPIC_TYPES.get(status, "invalid_request_error")
        return orjson.dumps({"type": "error", "error": {"type": kind, "message": message}})
    kind = _OPENAI_TYPES.get(status, "invalid_request_error")
    return orjson.dumps({"error": {"message": message, "type": kind, "param": param, "code": code}})
