"""Our own failures, with our real server in this process: before the routing answer and after it, in either mode."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from extproc import session as table
from extproc.adapters import envoy
from extproc.adapters.server import Stream
from extproc.model import Ending, Outcome
from extproc.session import State
from tests.e2e.rig import BODY, BREAK, a_rig
from tests.polling import eventually

pytestmark = pytest.mark.e2e


@pytest.fixture
def short(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("b")


async def test_a_failure_before_the_routing_answer_never_lets_the_request_through(short: Path) -> None:
    async with a_rig(short) as rig:
        async with rig.post(**{"x-tenant": BREAK}) as answer:
            assert answer.status == 503
            assert "data: one" not in await answer.text()
        assert rig.processor.stats.broken >= 1
        async with rig.post() as healthy:
            assert healthy.status == 200
            rig.go_on.set()
            await healthy.read()


@pytest.mark.parametrize("body_mode", ["buffered", "full-duplex"])
async def test_a_routing_answer_that_cannot_be_built_never_lets_the_request_through(
    short: Path, monkeypatch: pytest.MonkeyPatch, body_mode: str
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("broken on demand")

    monkeypatch.setattr(envoy, "steer", broken)
    async with a_rig(short, mesh={"body_mode": body_mode}) as rig:
        rig.go_on.set()
        async with rig.post() as answer:
            assert answer.status == 503
            await answer.read()
        assert rig.bodies == [], "no engine has seen it"
        assert rig.room.dispatcher.total_in_flight() == 0, "its place is free"


async def test_draining_in_the_middle_of_an_echoed_body_lets_it_arrive_whole(
    short: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    response = Stream._response
    drained = False

    def drains_meanwhile(stream: Stream, action: table.Action) -> object:
        nonlocal drained
        if isinstance(action, table.Echo) and not drained:
            drained = True
            asyncio.get_running_loop().call_soon(stream._processor.drain)
        return response(stream, action)

    monkeypatch.setattr(Stream, "_response", drains_meanwhile)
    body = BODY | {"user": "x" * 400_000}
    async with a_rig(short, mesh={"body_mode": "full-duplex"}) as rig:
        rig.go_on.set()
        async with rig.http.post(f"{rig.url}/v1/chat/completions", json=body) as answer:
            assert answer.status == 200
            assert "[DONE]" in await answer.text()
        assert [json.loads(one) for one in rig.bodies] == [body]
        await eventually(lambda: rig.processor.stats.open_streams == 0)


async def test_a_streamed_body_that_is_too_large_is_refused_in_the_shape_of_the_api(short: Path) -> None:
    gateway = {"max_body_bytes": 100_000}
    async with a_rig(short, mesh={"body_mode": "full-duplex"}, gateway=gateway) as rig:

        async def endless() -> AsyncIterator[bytes]:
            for _ in range(40):
                yield b" " * 10_000
                await asyncio.sleep(0)

        async with rig.http.post(f"{rig.url}/v1/chat/completions", data=endless()) as answer:
            assert answer.status == 413
            assert (await answer.json())["error"]["code"] == "request_too_large"
        assert rig.bodies == []
        assert rig.processor.stats.broken == 0


async def test_with_failure_mode_allow_the_same_failure_takes_the_fallback(short: Path) -> None:
    async with a_rig(short, mesh={"failure_mode_allow": True}) as rig:
        rig.go_on.set()
        async with rig.post(**{"x-tenant": BREAK}) as answer:
            assert answer.status == 200
            assert "[DONE]" in await answer.text()


@pytest.mark.parametrize("failure_mode_allow", [False, True])
async def test_a_failure_after_the_routing_answer_lets_the_response_finish(
    short: Path, monkeypatch: pytest.MonkeyPatch, failure_mode_allow: bool
) -> None:
    read = Stream._read

    async def breaks_once_routed(stream: Stream) -> Any:
        if stream.session.state is State.ROUTED:
            raise RuntimeError("broken on demand")
        return await read(stream)

    monkeypatch.setattr(Stream, "_read", breaks_once_routed)
    async with a_rig(short, mesh={"failure_mode_allow": failure_mode_allow}) as rig, rig.post() as answer:
        assert await answer.content.readline() == b"data: one\n"
        await eventually(lambda: rig.processor.stats.broken == 1)
        assert rig.room.dispatcher.total_in_flight() == 0, "its place is free"
        rig.go_on.set()
        assert "[DONE]" in await answer.text()


async def test_draining_closes_a_routed_stream_clean_and_its_response_finishes(short: Path) -> None:
    async with a_rig(short) as rig, rig.post() as answer:
        assert await answer.content.readline() == b"data: one\n"
        await rig.server.drain(5.0)
        assert rig.processor.stats.open_streams == 0
        rig.go_on.set()
        assert "[DONE]" in await answer.text()


async def test_draining_lets_a_held_request_be_decided_first(short: Path) -> None:
    slomax = {"max_in_flight": 1, "classes": [{"name": "standard", "longest_wait_ms": 20000}]}
    async with a_rig(short, slomax=slomax) as rig:
        rig.go_on.set()
        async with rig.post() as first:  # opens the stream of the access log, which tells of the second's end
            await first.read()
        counts = rig.room.dispatcher.accounts.counts
        await eventually(lambda: sum(one.offered for one in counts.values()) == 1)
        rig.go_on.clear()
        running = await rig.post()
        await running.content.readline()
        held = asyncio.ensure_future(rig.http.post(f"{rig.url}/v1/chat/completions", json=BODY))
        await eventually(lambda: rig.processor.held() == 1)
        draining = asyncio.ensure_future(rig.server.drain(10.0))
        await eventually(lambda: rig.processor.draining)
        assert not held.done()
        rig.go_on.set()
        await running.read()
        answer = await held
        assert answer.status == 200
        assert "[DONE]" in await answer.text()
        await draining


async def test_an_ending_is_booked_once_whoever_else_tells_of_it(short: Path) -> None:
    async with a_rig(short) as rig:
        rig.go_on.set()
        async with rig.post() as answer:
            assert answer.status == 200
            await answer.read()
        counts = rig.room.dispatcher.accounts.counts
        await eventually(lambda: sum(one.endings.get(Ending.COMPLETED, 0) for one in counts.values()) == 1)
        rig.room.settle("nobody", Outcome(Ending.COMPLETED))
        assert sum(one.offered for one in counts.values()) == 1
