"""The HTTP front, in this process, on a free port."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from extproc.model import Profile
from loadtest.engine.core import Core
from loadtest.engine.http import application
from loadtest.engine.instance import Instance
from loadtest.engine.request import EngineRequest, Timing

MODEL = "chat-model"
RECORDED = Path(__file__).parents[2] / "data" / "metrics" / "vllm-0.32.0-busy.prom"
FAST: dict[str, Any] = {"a_ms": 1.0, "c_ms": 0.01, "d_ms": 0.0, "e_ms": 1.0, "kv_tokens": 64_000}
SLOW_S = 20.0
"""Longest a test waits for something that ought to be there at once."""


class Client:
    """Talks to one instance."""

    def __init__(self, session: aiohttp.ClientSession, instance: Instance, port: int) -> None:
        self.session, self.instance, self.port = session, instance, port

    def post(self, path: str, body: Any, **headers: str) -> Any:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.session.post(f"http://127.0.0.1:{self.port}{path}", data=data, headers=headers)

    def get(self, path: str) -> Any:
        return self.session.get(f"http://127.0.0.1:{self.port}{path}")

    async def ask(self, body: Any, path: str = "/v1/chat/completions", **headers: str) -> tuple[int, Any]:
        async with self.post(path, body, **headers) as response:
            return response.status, await response.json()

    async def events(self, body: Any, path: str = "/v1/chat/completions") -> list[Any]:
        """Return the events of a stream: JSON, or the text of ``[DONE]``."""
        async with self.post(path, body | {"stream": True}) as response:
            assert response.status == 200
            text = (await response.read()).decode()
        lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
        return [line if line == "[DONE]" else json.loads(line) for line in lines]

    async def fault(self, **fault: Any) -> None:
        async with self.post("/fault", fault) as response:
            assert response.status == 200, await response.text()


@asynccontextmanager
async def an_engine(profile: dict[str, Any] | None = None, **options: Any) -> AsyncIterator[Client]:
    instance = Instance("a-0", MODEL, Profile(name="test", **FAST | (profile or {})), **options)
    runner = web.AppRunner(application(instance), handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    async with aiohttp.ClientSession() as session:
        try:
            yield Client(session, instance, runner.addresses[0][1])
        finally:
            instance.close()
            await runner.cleanup()


async def soon(true: Callable[[], bool]) -> None:
    """Wait until *true*."""
    async with asyncio.timeout(SLOW_S):
        while not true():  # noqa: ASYNC110 - the engine has no event for this
            await asyncio.sleep(0.01)


def chat(text: str = "hello", **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": text}], "max_tokens": 4} | fields


# --- answers ----------------------------------------------------------------------------------------------------------


async def test_a_stream_is_a_role_then_tokens_then_usage_then_done() -> None:
    async with an_engine() as engine:
        *chunks, usage, done = await engine.events(chat(stream_options={"include_usage": True}))
    assert done == "[DONE]"
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 4
    assert usage["usage"]["total_tokens"] == usage["usage"]["prompt_tokens"] + 4
    choices = [chunk["choices"][0] for chunk in chunks]
    assert choices[0]["delta"] == {"role": "assistant", "content": ""}
    assert [len(one["delta"]["content"]) for one in choices[1:]] == [4] * 4
    assert [one["finish_reason"] for one in choices] == [None] * 4 + ["length"]


async def test_without_include_usage_there_is_no_usage_chunk() -> None:
    async with an_engine() as engine:
        *chunks, done = await engine.events(chat())
    assert done == "[DONE]"
    assert all(chunk["choices"] and "usage" not in chunk for chunk in chunks)


async def test_a_whole_answer_says_the_same_as_the_streamed_one() -> None:
    async with an_engine() as engine:
        status, whole = await engine.ask(chat("same"))
        streamed = await engine.events(chat("same"))
    assert status == 200
    text = "".join(one["choices"][0]["delta"]["content"] for one in streamed[:-1])
    assert whole["choices"][0]["message"]["content"] == text
    assert whole["usage"]["completion_tokens"] == 4


async def test_without_a_limit_the_answer_ends_by_itself_and_always_alike() -> None:
    async with an_engine() as engine:
        answers = [(await engine.ask(chat(max_tokens=None)))[1] for _ in range(2)]
        _, other = await engine.ask(chat("something else", max_tokens=None))
    lengths = [one["usage"]["completion_tokens"] for one in answers]
    assert lengths[0] == lengths[1] != other["usage"]["completion_tokens"]
    assert 16 <= lengths[0] <= 1024
    assert answers[0]["choices"][0]["finish_reason"] == "stop"


async def test_max_completion_tokens_and_n_are_honoured() -> None:
    async with an_engine() as engine:
        _, answer = await engine.ask(chat(max_tokens=None, max_completion_tokens=3, n=2))
        *chunks, _ = await engine.events(chat(n=2))
    assert [one["index"] for one in answer["choices"]] == [0, 1]
    assert answer["choices"][0]["message"] != answer["choices"][1]["message"]
    assert answer["usage"]["completion_tokens"] == 6
    assert {chunk["choices"][0]["index"] for chunk in chunks} == {0, 1}


async def test_a_repeated_prompt_is_found_in_the_cache_in_whole_blocks() -> None:
    async with an_engine() as engine:
        counts = [(await engine.ask(chat("word " * 100)))[1]["usage"] for _ in range(2)]
    cached = [one["prompt_tokens_details"]["cached_tokens"] for one in counts]
    assert cached[0] == 0
    assert cached[1] == (counts[1]["prompt_tokens"] - 1) // 16 * 16 > 100


async def test_the_next_turn_of_a_conversation_finds_the_answer_before_it_in_the_cache() -> None:
    async with an_engine() as engine:
        first = chat("tell me", max_tokens=200)
        _, answer = await engine.ask(first)
        turns = [*first["messages"], answer["choices"][0]["message"], {"role": "user", "content": "more"}]
        _, second = await engine.ask(chat() | {"messages": turns})
    usage = second["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] >= answer["usage"]["total_tokens"] - 16


async def test_completions_take_texts_and_token_ids() -> None:
    async with an_engine() as engine:
        many = {"model": MODEL, "prompt": ["one", "two"], "n": 2, "max_tokens": 2}
        _, texts = await engine.ask(many, "/v1/completions")
        _, ids = await engine.ask({"model": MODEL, "prompt": [1, 2, 3]}, "/v1/completions")
        *_, usage, _ = await engine.events(many | {"stream_options": {"include_usage": True}}, "/v1/completions")
    assert [one["index"] for one in texts["choices"]] == [0, 1, 2, 3]
    assert texts["usage"] == usage["usage"]
    assert texts["usage"]["prompt_tokens"] == 2  # one token each, however many choices
    assert (ids["usage"]["prompt_tokens"], ids["usage"]["completion_tokens"]) == (3, 16)


async def test_responses_and_messages_speak_their_own_words() -> None:
    async with an_engine() as engine:
        body = {"model": MODEL, "input": "hello", "max_output_tokens": 3}
        _, response = await engine.ask(body, "/v1/responses")
        streamed = await engine.events(body, "/v1/responses")
        _, message = await engine.ask(chat(), "/v1/messages")
        events = await engine.events(chat(), "/v1/messages")
    assert response["output"][0]["content"][0]["text"] == "".join(one.get("delta", "") for one in streamed)
    assert streamed[-1]["response"]["usage"]["output_tokens"] == 3
    assert message["stop_reason"] == "max_tokens"
    assert message["usage"]["output_tokens"] == 4
    assert [one["type"] for one in events] == [
        "message_start",
        "content_block_start",
        *["content_block_delta"] * 4,
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]


async def test_an_embedding_depends_on_its_text_and_has_length_one() -> None:
    async with an_engine() as engine:
        _, answer = await engine.ask({"model": MODEL, "input": ["a", "b", "a"]}, "/v1/embeddings")
    a, b, again = (one["embedding"] for one in answer["data"])
    assert a == again != b
    assert sum(x * x for x in a) == pytest.approx(1)


async def test_the_models_the_health_and_the_instances_name_are_told() -> None:
    async with an_engine() as engine:
        async with engine.get("/v1/models") as models:
            assert [one["id"] for one in (await models.json())["data"]] == [MODEL]
        async with engine.get("/health") as health:
            assert (health.status, health.headers["x-engine-instance"]) == (200, "a-0")


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b"{", None),
        (b"[1]", None),
        (b"", None),
        ({"model": MODEL}, "messages"),
        ({"model": MODEL, "messages": [{"role": "user", "content": 3}]}, "content"),
        (chat(max_tokens=-1), "max_tokens"),
        (chat(max_tokens="many"), "max_tokens"),
        (chat(n=0), "n"),
        (chat(max_tokens=64_000), None),
        ({"messages": []}, "messages"),
    ],
)
async def test_a_bad_body_is_refused_in_openai_shape(body: Any, param: str | None) -> None:
    async with an_engine() as engine:
        status, answer = await engine.ask(body)
        assert engine.instance.live.live == 0
    assert (status, answer["error"]["code"], answer["error"]["type"]) == (400, 400, "BadRequestError")
    assert answer["error"]["param"] == param


async def test_an_unknown_model_is_not_found() -> None:
    async with an_engine() as engine:
        status, answer = await engine.ask(chat(model="other"))
    assert status == 404
    assert answer["error"] | {"message": ""} == {"message": "", "type": "NotFoundError", "param": "model", "code": 404}


async def test_a_full_queue_refuses_at_once() -> None:
    async with an_engine({"a_ms": 1000.0, "max_running": 1}, max_queued=1) as engine:
        first = asyncio.ensure_future(engine.ask(chat()))
        await soon(lambda: engine.instance.live.core.running == 1)
        second = asyncio.ensure_future(engine.ask(chat()))
        await soon(lambda: engine.instance.live.core.waiting == 1)
        status, _ = await engine.ask(chat())
        assert status == 503
        for task in (first, second):
            task.cancel()


async def test_everything_is_503_while_loading() -> None:
    async with an_engine(load_s=3600) as engine:
        for path in ("/health", "/metrics", "/v1/models"):
            async with engine.get(path) as response:
                assert response.status == 503
        assert (await engine.ask(chat()))[0] == 503
        await engine.fault(kind="loading", seconds=0.01)
        engine.instance._ready_at = 0.0
        await soon(lambda: not engine.instance.loading)
        assert (await engine.ask(chat()))[0] == 200


# --- order of things --------------------------------------------------------------------------------------------------


async def test_headers_leave_before_the_first_token() -> None:
    async with an_engine({"a_ms": 3_600_000.0}) as engine, asyncio.timeout(SLOW_S):
        response = await engine.post("/v1/chat/completions", chat(stream=True))
        assert response.status == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        assert engine.instance.live.live == 1
        response.close()


async def test_a_client_that_goes_away_frees_its_request() -> None:
    async with an_engine({"a_ms": 10.0}) as engine:
        for stream in (True, False):
            asking = asyncio.ensure_future(engine.ask(chat(max_tokens=10_000, stream=stream)))
            generated = engine.instance.live.core.totals.generated
            await soon(lambda: engine.instance.live.core.totals.generated > generated + 2)  # noqa: B023 - awaited here
            asking.cancel()
            await soon(lambda: engine.instance.live.live == 0)
            assert engine.instance.live.core.pool.live == 0
        assert engine.instance.live.core.totals.aborted == 2
        assert engine.instance.live.core.totals.wasted > 0


async def test_a_priority_header_wins_over_the_body() -> None:
    async with an_engine({"a_ms": 30.0, "max_running": 1}) as engine:
        running = asyncio.ensure_future(engine.ask(chat(max_tokens=10)))
        await soon(lambda: engine.instance.live.core.running == 1)
        order: list[str] = []

        async def ask(name: str, body: Any, **headers: str) -> None:
            await engine.ask(body, **headers)
            order.append(name)

        waiting = []
        for name, body, headers in (
            ("body", chat(priority=1), {}),
            ("header", chat(priority=9), {"x-vllm-priority": "-5"}),
        ):
            waiting.append(asyncio.ensure_future(ask(name, body, **headers)))
            await soon(lambda: engine.instance.live.core.waiting == len(waiting))
        await asyncio.gather(running, *waiting)
        status, _ = await engine.ask(chat(), **{"x-vllm-priority": "high"})
    assert order == ["header", "body"]
    assert status == 400


async def test_what_reached_the_engine_can_be_looked_at() -> None:
    async with an_engine() as engine:
        await engine.ask(chat(), "/v1/chat/completions?x=1", **{"X-Some": "thing"})
        async with engine.get("/calls") as response:
            (call,) = (await response.json())["calls"]
    assert (call["path"], call["headers"]["x-some"]) == ("/v1/chat/completions?x=1", "thing")


# --- faults -----------------------------------------------------------------------------------------------------------


async def test_a_draining_engine_stays_healthy_ends_its_streams_and_takes_nothing_new() -> None:
    async with an_engine({"a_ms": 20.0}) as engine:
        running = asyncio.ensure_future(engine.ask(chat(max_tokens=20)))
        await soon(lambda: engine.instance.live.core.running == 1)
        await engine.fault(kind="drain")
        async with engine.get("/health") as health:
            assert health.status == 200
        status, answer = await engine.ask(chat())
        assert (status, answer["error"]["message"]) == (500, "cannot schedule new futures after shutdown")
        assert (await running)[0] == 200


async def test_an_error_comes_inside_the_200() -> None:
    async with an_engine({"a_ms": 20.0}) as engine:
        await engine.fault(kind="error_in_stream", after_tokens=2, times=1)
        *chunks, error, done = await engine.events(chat(max_tokens=50))
        assert (error["error"]["code"], done) == (500, "[DONE]")
        assert 2 <= len(chunks) - 1 < 50
        assert engine.instance.live.live == 0
        assert (await engine.ask(chat()))[0] == 200


async def test_a_reset_cuts_the_stream() -> None:
    async with an_engine({"a_ms": 20.0}) as engine:
        await engine.fault(kind="reset", after_tokens=2)
        with pytest.raises(aiohttp.ClientError):
            await engine.events(chat(max_tokens=50))
        await soon(lambda: engine.instance.live.live == 0)


async def test_a_503_hits_as_many_calls_as_asked_and_leaves_health_alone() -> None:
    async with an_engine() as engine:
        await engine.fault(kind="503", times=2)
        async with engine.get("/health") as health:
            assert health.status == 200
        assert [(await engine.ask(chat()))[0] for _ in range(3)] == [503, 503, 200]


async def test_a_hung_engine_answers_nothing_until_it_goes_on_where_it_was() -> None:
    async with an_engine({"a_ms": 20.0}) as engine:
        running = asyncio.ensure_future(engine.ask(chat(max_tokens=10)))
        await soon(lambda: engine.instance.live.core.running == 1)
        await engine.fault(kind="hang")
        health = asyncio.ensure_future(engine.session.get(f"http://127.0.0.1:{engine.port}/health"))
        stopped = engine.instance.live.now()
        done, _ = await asyncio.wait([running, health], timeout=0.5)
        assert not done
        assert engine.instance.live.now() == stopped
        await engine.fault(kind="none")
        assert (await running)[0] == 200
        (await health).release()


async def test_a_slow_engine_makes_longer_steps() -> None:
    async with an_engine({"a_ms": 1.0}) as engine:
        await engine.fault(kind="slow", factor=100)
        began = time.monotonic()
        await engine.ask(chat(max_tokens=3))
        assert time.monotonic() - began >= 0.3


async def test_stale_metrics_stand_still() -> None:
    async with an_engine() as engine:
        await engine.fault(kind="stale_metrics")
        before = await text_of(engine.get("/metrics"))
        await engine.ask(chat())
        assert await text_of(engine.get("/metrics")) == before
        await engine.fault(kind="none")
        assert await text_of(engine.get("/metrics")) != before


async def test_an_unknown_fault_is_refused() -> None:
    async with an_engine() as engine, engine.post("/fault", {"kind": "fire"}) as response:
        assert response.status == 400


async def text_of(asked: Awaitable[aiohttp.ClientResponse]) -> str:
    response = await asked
    async with response:
        return await response.text()


# --- metrics ----------------------------------------------------------------------------------------------------------


def series(text: str) -> set[tuple[str, tuple[str, ...]]]:
    """Return (name, label names) of every vLLM series but ``_created`` ones, which scrapers ignore."""
    found = set()
    for line in text.splitlines():
        if line.startswith("vllm:"):
            name, _, labels = line.rpartition(" ")[0].partition("{")
            if not name.endswith("_created") and name != "vllm:cache_config_info":
                found.add((name, tuple(sorted(part.partition("=")[0] for part in labels.rstrip("}").split(",")))))
    return found


async def test_metrics_have_the_names_and_labels_of_vllm() -> None:
    async with an_engine() as engine:
        await engine.ask(chat())
        text = await text_of(engine.get("/metrics"))
    assert series(text) == series(RECORDED.read_text())
    assert 'block_size="16"' in text
    assert 'num_gpu_blocks="4000"' in text


async def test_metrics_count_what_runs_waits_and_was_found() -> None:
    async with an_engine({"a_ms": 50.0, "max_running": 1}) as engine:
        await engine.ask(chat("word " * 100, max_tokens=1))
        asking = [asyncio.ensure_future(engine.ask(chat("word " * 100, max_tokens=1000))) for _ in range(3)]
        await soon(lambda: engine.instance.live.core.waiting == 2)
        text = await text_of(engine.get("/metrics"))
        for one in asking:
            one.cancel()
        await soon(lambda: engine.instance.live.live == 0)
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    labels = f'{{engine="0",model_name="{MODEL}"}}'
    assert values[f"vllm:num_requests_running{labels}"] == "1.0"
    assert values[f"vllm:num_requests_waiting{labels}"] == "2.0"
    assert 0 < float(values[f"vllm:kv_cache_usage_perc{labels}"]) < 0.1
    assert float(values[f"vllm:prefix_cache_hits_total{labels}"]) >= 112
    assert values[f"vllm:time_to_first_token_seconds_count{labels}"] == "1.0"


# --- time -------------------------------------------------------------------------------------------------------------


async def test_the_front_agrees_with_virtual_time() -> None:
    """Six calls over 0.4 s: the engine's times equal those of a core fed the same arrivals, and reach the client."""
    sizes = {"a_ms": 25.0, "c_ms": 1.0, "d_ms": 5.0, "e_ms": 100.0, "kv_tokens": 64_000, "batch_tokens": 512}
    ended: list[Timing] = []
    async with an_engine(sizes) as engine:
        live, submitted = engine.instance.live, list[tuple[EngineRequest, float]]()
        core, submit, report = live.core, live.core.submit, live._ended

        def noting(request: EngineRequest, now: float) -> None:
            submitted.append((request, now))
            submit(request, now)

        def ending(timing: Timing) -> None:
            ended.append(timing)
            report(timing)

        core.submit = noting  # type: ignore[method-assign]
        live._ended = ending
        clients = await asyncio.gather(*(one_call(engine, i) for i in range(6)))
    alone, expected = Core(core.profile, core.order), list[Timing]()
    for request, now in submitted:
        expected += [event for event in alone.advance(now) if isinstance(event, Timing)]
        alone.submit(request, now)
    expected += [event for event in alone.advance(1e9) if isinstance(event, Timing)]
    assert [one.id for one in ended] == [one.id for one in expected]
    for real, virtual in zip(ended, expected, strict=True):
        assert (real.first_token, real.finished) == pytest.approx((virtual.first_token, virtual.finished))
    by_size = {timing.output_tokens: timing for timing in expected}
    late = [ttft - (by_size[n].ttft or 0) for n, ttft, _ in clients]
    assert min(late) > -0.01
    assert median(late) < 0.05
    assert median(tpot / (by_size[n].tpot or 1) for n, _, tpot in clients) == pytest.approx(1, abs=0.15)


async def one_call(engine: Client, number: int) -> tuple[int, float, float]:
    """Return tokens, TTFT and TPOT as a client sees them."""
    await asyncio.sleep(0.08 * number)
    tokens, began, arrivals = 10 + number, time.monotonic(), list[float]()
    body = chat(f"{number} " * 300, max_tokens=tokens, stream=True)
    async with engine.post("/v1/chat/completions", body) as response:
        async for line in response.content:
            if b'"content":" ' in line:
                arrivals.append(time.monotonic())
    assert len(arrivals) == tokens
    return tokens, arrivals[0] - began, (arrivals[-1] - arrivals[0]) / (tokens - 1)


async def test_the_time_scale_shortens_everything_alike() -> None:
    async with an_engine({"a_ms": 1000.0}, scale=0.01) as engine:
        began = time.monotonic()
        await engine.ask(chat(max_tokens=30))
        assert 0.3 <= time.monotonic() - began < 10  # 30 s of virtual time
        text = await text_of(engine.get("/metrics"))
    total = next(line for line in text.splitlines() if line.startswith("vllm:e2e_request_latency_seconds_sum"))
    assert 0.29 <= float(total.rsplit(" ", 1)[1]) < 10
