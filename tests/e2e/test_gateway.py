"""The main job, end to end: real Envoy, real Redis, simulated engines, one worker, in both ways of bodies."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from tests.e2e.calls import CHAT, Answer, Client, a_body, a_client
from tests.e2e.gateway import MODEL, OTHER, Gateway, a_gateway
from tests.polling import eventually

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="module")]

DEBUG = {"tokenfleet-debug": "1"}


@pytest.fixture(scope="module", params=["buffered", "full-duplex"])
def gateway(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    with a_gateway(tmp_path_factory.mktemp("gateway"), body_mode=request.param) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="module")
async def client(gateway: Gateway) -> AsyncIterator[Client]:
    async with a_client(gateway) as one:
        yield one


async def test_a_chat_completion_streams_from_the_instance_that_the_verdict_names(client: Client) -> None:
    body = a_body(stream=True, stream_options={"include_usage": True})
    answer = await client.post(body, headers=DEBUG)
    assert answer.status == 200
    assert answer.events[-1]["usage"]["completion_tokens"] == 8
    assert answer.text.rstrip().endswith("data: [DONE]")
    assert f"instance={answer.instance} " in answer.why
    assert "site=a " in answer.why
    for term in ("queue", "prefill", "decode", "network", "held"):
        assert f"{term} " in answer.why
    verdict = client.gateway.verdicts()[-1]
    assert verdict["instance"] == answer.instance
    assert verdict["id"] == answer.headers["x-tokenfleet-request-id"]
    assert len(verdict["hosts"]) == 2


async def test_why_is_not_told_to_whoever_does_not_ask(client: Client) -> None:
    assert (await client.post(a_body())).why == ""


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 4}),
        ("/v1/completions?verbose=1", {"model": MODEL, "prompt": ["One", "two"], "max_tokens": 4}),
        ("/v1/embeddings", {"model": MODEL, "input": "some text"}),
        ("/v1/responses", {"model": MODEL, "input": "some text", "max_output_tokens": 4}),
        ("/v1/messages", {"model": MODEL, "max_tokens": 4, "messages": [{"role": "user", "content": "hello"}]}),
        (CHAT, a_body(model="chat-alias")),
    ],
)
async def test_every_kind_of_call_reaches_an_engine(client: Client, path: str, body: dict[str, Any]) -> None:
    answer = await client.post(body, path)
    # An engine knows the model by its own name alone: the alias is the router's, and the body is never altered.
    assert answer.instance.startswith("a-")
    assert answer.status == (404 if body["model"] == "chat-alias" else 200), answer.text


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (b"not json", "body"),
        (b'{"model": "chat-model", "messages": [{"role": "user", "con', "body"),
        (b"", "body"),
        (b"[1, 2]", "object"),
        (json.dumps(a_body(max_tokens=-5)).encode(), "max_tokens"),
        (json.dumps(a_body(max_tokens="many")).encode(), "max_tokens"),
        (json.dumps(a_body()).replace("8,", "1e308,").encode(), "max_tokens"),
        (json.dumps(a_body()).replace("8,", "NaN,").encode(), "body"),
        (json.dumps(a_body(messages="hello")).encode(), "messages"),
        (json.dumps(a_body(messages=None)).encode(), "messages"),
        (json.dumps(a_body(model=7)).encode(), "model"),
        (json.dumps(a_body(n=0)).encode(), "n"),
        (json.dumps(a_body(stream="yes")).encode(), "stream"),
        (b'{"model": "chat-model", "messages": ' + b"[" * 1000 + b"]" * 1000 + b"}", "nested"),
    ],
)
async def test_bad_bodies_are_refused_in_the_shape_of_the_api_and_name_the_field(
    client: Client, body: bytes, field: str
) -> None:
    answer = await client.post(body)
    assert answer.status == 400, answer.text
    error = answer.json["error"]
    assert error["type"] == "invalid_request_error"
    assert field in f"{error['param']} {error['message']}".lower()


async def test_anthropic_callers_get_anthropic_errors(client: Client) -> None:
    answer = await client.post({"model": MODEL, "max_tokens": -1, "messages": []}, "/v1/messages")
    assert answer.status == 400
    assert answer.json["type"] == "error"


async def test_an_unknown_model_is_404(client: Client) -> None:
    answer = await client.post(a_body(model="no-such-model"))
    assert answer.status == 404
    assert answer.json["error"]["code"] == "model_not_found"
    assert answer.headers["x-tokenfleet-reason"] == "unknown_model"


async def test_a_body_over_the_limit_is_413(client: Client) -> None:
    answer = await client.post(b'{"model": "chat-model", "messages": "' + b"x" * 17_000_000 + b'"}')
    assert answer.status == 413
    assert "error" in answer.json


async def test_routing_headers_of_a_client_are_ignored(client: Client) -> None:
    forged = {
        "x-gateway-destination-endpoint": client.gateway.addresses["b-0"],
        "x-tokenfleet-cluster": "site-b",
        "x-tokenfleet-why": "forged",
    }
    answer = await client.post(a_body(), headers=forged)
    assert answer.status == 200
    assert answer.instance.startswith("a-")
    assert answer.why == ""


@pytest.mark.parametrize(
    ("method", "path"), [("GET", "/v1/models"), ("GET", CHAT), ("OPTIONS", CHAT), ("GET", "/nowhere")]
)
async def test_other_requests_pass_and_never_hang(client: Client, method: str, path: str) -> None:
    async with asyncio.timeout(10):
        answer = await client.call(method, path)
    assert answer.status == (200 if path == "/v1/models" else answer.status)
    assert answer.status in (200, 404, 405)
    assert answer.headers.get("x-engine-instance"), "an engine answered, not the gateway"


async def test_a_hundred_thousand_tokens_and_ten_megabytes_work(client: Client) -> None:
    long = " ".join(f"word{i}" for i in range(40_000))[:400_000]
    assert (await client.post(a_body(long, max_tokens=2))).status == 200
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 10_000_000}}
    huge = a_body(max_tokens=2, messages=[{"role": "user", "content": [{"type": "text", "text": "what?"}, image]}])
    answer = await client.post(huge)
    assert answer.status == 200, answer.text[:300]


async def test_a_tenant_bound_to_a_jurisdiction_is_served_there_only(client: Client) -> None:
    for tenant, site in (("euro", "a"), ("states", "b")):
        answers = [await client.post(a_body(), headers={"x-tenant": tenant}) for _ in range(3)]
        assert {one.instance[0] for one in answers} == {site}
    narrowed = await client.post(a_body(), headers={"tokenfleet-residency": "us"})
    assert narrowed.instance.startswith("b-")
    none_left = await client.post(a_body(), headers={"x-tenant": "euro", "tokenfleet-residency": "us"})
    assert none_left.status == 403
    assert none_left.headers["x-tokenfleet-reason"] == "residency"


async def test_the_instance_that_has_the_prefix_is_chosen_again(client: Client) -> None:
    story = "Once there was a router who knew where every prefix was cached. " * 150
    first = await client.post(a_body(story))
    again = [await client.post(a_body(story, stream=False)) for _ in range(4)]
    assert {one.instance for one in again} == {first.instance}
    assert again[-1].json["usage"]["prompt_tokens_details"]["cached_tokens"] > 1000


async def test_an_instance_that_answers_503_is_passed_over_and_counted_to_the_one_that_served(client: Client) -> None:
    gateway = client.gateway
    before = gateway.metric("tokenfleet_requests_ended_total", ending="completed", model=OTHER)
    gateway.fault("a-2", kind="503")
    try:
        # The only instance of its model in the home site fails: no other host in its cluster may be guessed at.
        alone = await client.post(a_body(model=OTHER))
        assert alone.status == 503
        gateway.fault("a-0", kind="503")
        answers: list[Answer] = []
        while "a-0" not in gateway.resting():  # the access log tells who failed; two in a row and the instance rests
            answers.append(await client.post(a_body(f"question {len(answers)}")))
            assert len(answers) < 40
        answers.append(await client.post(a_body("the last question")))
        assert gateway.verdicts()[-1]["instance"] == "a-1"
    finally:
        gateway.fault("a-2", kind="none")
        gateway.fault("a-0", kind="none")
    assert {one.status for one in answers} == {200}
    assert {one.instance for one in answers} == {"a-1"}
    await eventually(lambda: gateway.in_flight() == 0)
    assert gateway.metric("tokenfleet_requests_ended_total", ending="completed", model=OTHER) == before


async def test_in_flight_counts_return_to_zero_after_every_kind_of_ending(client: Client) -> None:
    gateway = client.gateway
    async with client.stream(a_body(max_tokens=400)):
        await eventually(lambda: gateway.in_flight() == 1)
    await eventually(lambda: gateway.in_flight() == 0)
    gateway.fault("a-0", kind="reset")
    gateway.fault("a-1", kind="reset")
    try:
        with pytest.raises(aiohttp.ClientError):
            await client.post(a_body(max_tokens=200, stream=True))
    finally:
        gateway.fault("a-0", kind="none")
        gateway.fault("a-1", kind="none")
    await client.post(a_body())
    await eventually(lambda: gateway.in_flight() == 0)
    await eventually(lambda: gateway.metric("tokenfleet_requests_ended_total", ending="cancelled") >= 1)
    await eventually(lambda: gateway.metric("tokenfleet_requests_ended_total", ending="failed") >= 1)
    assert gateway.metric("tokenfleet_wasted_tokens_total") > 0
    assert gateway.debug()["prefill_tokens_in_flight"] == 0


async def test_the_books_know_ttft_tokens_and_cached_tokens(client: Client) -> None:
    gateway = client.gateway
    names = ("tokenfleet_on_target_tokens_total", "tokenfleet_ttft_seconds_count", "tokenfleet_cached_tokens_total")
    before = [gateway.metric(name, tenant="bookkeeper") for name in names]
    text = "A prefix of some length that is asked twice. " * 40
    body = a_body(text, max_tokens=5, stream=True, stream_options={"include_usage": True})
    for _ in range(2):
        await client.post(body, headers={"x-tenant": "bookkeeper"})
    await eventually(lambda: gateway.metric(names[1], tenant="bookkeeper") == before[1] + 2)
    assert gateway.metric(names[0], tenant="bookkeeper") == before[0] + 10
    assert gateway.metric(names[2], tenant="bookkeeper") > before[2]


async def test_the_first_token_ends_the_prefill_of_a_running_request(client: Client) -> None:
    async with client.stream(a_body("hello " * 200, max_tokens=400)):
        # Envoy reports a running response every half second.
        await eventually(lambda: client.gateway.debug()["prefill_tokens_in_flight"] == 0)
        assert client.gateway.in_flight() == 1
    await eventually(lambda: client.gateway.in_flight() == 0)


async def test_many_at_once_all_answer_and_leave_nothing_behind(client: Client) -> None:
    await eventually(lambda: not client.gateway.resting())
    answers = await asyncio.gather(*(client.post(a_body(f"{i} bottles", max_tokens=3)) for i in range(60)))
    assert {one.status for one in answers} == {200}
    assert {one.instance for one in answers} >= {"a-0", "a-1"}
    await eventually(lambda: client.gateway.in_flight() == 0)
