"""Our own failures, with our real server in this process: before the routing answer and after it, in either mode."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
from aiohttp import web

from extproc.adapters import admin
from extproc.adapters.envoy_config import Mesh, write
from extproc.adapters.grpc_server import GrpcServer
from extproc.adapters.server import Processor, Stream
from extproc.adapters.waiting_room import WaitingRoom
from extproc.dispatcher import Dispatcher
from extproc.model import Ending, Final, Outcome, Request
from extproc.session import State
from extproc.snapshot import build
from tests.builders import CHAT, a_policy, a_reading, an_instance
from tests.e2e.envoy_process import an_envoy
from tests.polling import eventually

pytestmark = pytest.mark.e2e

BREAK = "break-before"
BODY = {"model": CHAT, "messages": [{"role": "user", "content": "hello"}], "stream": True}


class Fragile(WaitingRoom):
    """Breaks on demand: on the offer of one tenant's requests."""

    def offer(self, request: Request) -> Final | asyncio.Future[Final]:
        if request.tenant == BREAK:
            raise RuntimeError("broken on demand")
        return super().offer(request)


@dataclass
class Rig:
    url: str
    room: Fragile
    processor: Processor
    server: GrpcServer
    http: aiohttp.ClientSession
    go_on: asyncio.Event

    def post(self, **headers: str) -> "aiohttp.client._RequestContextManager":
        return self.http.post(f"{self.url}/v1/chat/completions", json=BODY, headers=headers)


@asynccontextmanager
async def a_rig(folder: Path, *, failure_mode_allow: bool = False, **files: Any) -> AsyncIterator[Rig]:
    go_on = asyncio.Event()

    async def engine(request: web.Request) -> web.StreamResponse:
        await request.read()
        answer = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await answer.prepare(request)
        await answer.write(b"data: one\n\n")
        await go_on.wait()
        await answer.write(b"data: [DONE]\n\n")
        return answer

    async with AsyncExitStack() as stack:
        app = web.Application()
        app.router.add_route("*", "/{tail:.*}", engine)
        runner, port = await admin.listen(app, "127.0.0.1", 0)
        stack.push_async_callback(runner.cleanup)
        static = [{"name": "a-0", "address": f"127.0.0.1:{port}"}]
        policy = a_policy(
            gateway={"trust": {"tenant_header": "x-tenant"}},
            tenants={"tenants": {BREAK: {}}},
            fleet={"sites": [{"name": "a", "instances": [{"models": [CHAT], "static": static}]}]},
            **files,
        )
        room = Fragile(Dispatcher(policy, np.random.default_rng(1)), time.monotonic)
        instance = an_instance("a-0", "a", address=f"127.0.0.1:{port}")
        room.observe(build(policy.fleet, [instance], [a_reading(instance, at=time.time())], time.time()))
        ticking = asyncio.ensure_future(room.run())
        stack.callback(ticking.cancel)
        processor = Processor(policy, room, time.monotonic)
        server = GrpcServer(processor, f"unix:{folder}/s", None)
        await server.start()
        await server.serving()
        stack.push_async_callback(server.drain, 0.1)
        mesh = Mesh(
            host="127.0.0.1", port=0, admin_port=0, servers=(server.address,), failure_mode_allow=failure_mode_allow
        )
        envoy = await asyncio.to_thread(stack.enter_context, an_envoy(write(policy, mesh), folder / "envoy"))
        http = await stack.enter_async_context(aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=20)))
        yield Rig(envoy.url, room, processor, server, http, go_on)
        go_on.set()


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


async def test_with_failure_mode_allow_the_same_failure_takes_the_fallback(short: Path) -> None:
    async with a_rig(short, failure_mode_allow=True) as rig:
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
    async with a_rig(short, failure_mode_allow=failure_mode_allow) as rig, rig.post() as answer:
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
    async with a_rig(short, slomax=slomax) as rig, rig.post() as running:
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
