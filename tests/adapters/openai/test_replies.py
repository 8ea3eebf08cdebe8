import math

import orjson
import pytest

from extproc.adapters.openai import BadRequest, refusal, reply_for
from extproc.model import Api, Reason, Refuse

STATUSES = {
    Reason.UNKNOWN_MODEL: 404,
    Reason.NO_INSTANCE: 503,
    Reason.NOT_ALLOWED: 403,
    Reason.RESIDENCY: 403,
    Reason.DEADLINE: 429,
    Reason.LINE_FULL: 429,
    Reason.SUBSET: 503,
    Reason.BAD_REQUEST: 400,
}


@pytest.mark.parametrize("reason", Reason)
@pytest.mark.parametrize("api", ["openai", "anthropic"])
def test_every_reason_has_its_status_and_says_so(reason: Reason, api: Api) -> None:
    reply = refusal(api, Refuse(reason, "A sentence."))
    headers = dict(reply.headers)
    assert reply.status == STATUSES[reason]
    assert headers["content-type"] == "application/json"
    assert headers["x-tokenfleet-reason"] == reason.value
    assert ("retry-after" in headers) == (reason in {Reason.NO_INSTANCE, Reason.DEADLINE, Reason.LINE_FULL})
    assert orjson.loads(reply.body)["error"]["message"] == "A sentence."
    assert reason.value in reply.details
    assert " " not in reply.details


def test_a_refusal_speaks_openai() -> None:
    reply = refusal("openai", Refuse(Reason.UNKNOWN_MODEL, "No such model."))
    assert orjson.loads(reply.body) == {
        "error": {
            "message": "No such model.",
            "type": "invalid_request_error",
            "param": "model",
            "code": "model_not_found",
        }
    }


def test_a_refusal_speaks_anthropic() -> None:
    reply = refusal("anthropic", Refuse(Reason.LINE_FULL, "Come back later."))
    assert orjson.loads(reply.body) == {
        "type": "error",
        "error": {"type": "rate_limit_error", "message": "Come back later."},
    }


@pytest.mark.parametrize(
    ("wait_s", "seconds"),
    [(None, "1"), (0.0, "1"), (-3.0, "1"), (0.2, "1"), (1.0, "1"), (1.01, "2"), (30.0, "30"), (1e9, "3600")],
)
def test_retry_after_is_whole_seconds_and_at_least_one(wait_s: float | None, seconds: str) -> None:
    reply = refusal("openai", Refuse(Reason.LINE_FULL, "Full.", retry_after_s=wait_s))
    assert dict(reply.headers)["retry-after"] == seconds


@pytest.mark.parametrize("wait_s", [math.inf, math.nan])
def test_a_retry_after_that_is_no_number_still_makes_a_header(wait_s: float) -> None:
    reply = refusal("openai", Refuse(Reason.DEADLINE, "Late.", retry_after_s=wait_s))
    assert dict(reply.headers)["retry-after"].isdigit()


def test_a_sentence_that_cannot_be_utf8_still_makes_a_body() -> None:
    reply = refusal("openai", Refuse(Reason.NOT_ALLOWED, "class \udcff"))
    assert orjson.loads(reply.body)["error"]["message"] == "class ?"


@pytest.mark.parametrize(
    ("status", "openai", "anthropic"),
    [
        (400, "invalid_request_error", "invalid_request_error"),
        (401, "authentication_error", "authentication_error"),
        (404, "invalid_request_error", "not_found_error"),
        (413, "invalid_request_error", "request_too_large"),
        (415, "invalid_request_error", "invalid_request_error"),
    ],
)
def test_a_mistake_names_its_field_in_the_apis_own_shape(status: int, openai: str, anthropic: str) -> None:
    reply = reply_for(BadRequest(status, "n is wrong", "n", "odd", "openai"))
    assert reply.status == status
    assert dict(reply.headers) == {"content-type": "application/json", "x-tokenfleet-reason": "bad_request"}
    assert orjson.loads(reply.body) == {"error": {"message": "n is wrong", "type": openai, "param": "n", "code": "odd"}}
    body = orjson.loads(reply_for(BadRequest(status, "n is wrong", "n", None, "anthropic")).body)
    assert body == {"type": "error", "error": {"type": anthropic, "message": "n is wrong"}}
