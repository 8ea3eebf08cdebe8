"""Our real server in this process, behind a real Envoy, before an engine that answers when told to."""

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
from aiohttp import web

from extproc.adapters import admin
from extproc.adapters.envoy_config import Mesh, write
from extproc.adapters.grpc_server import GrpcServer
from extproc.adapters.server import Processor
from extproc.adapters.waiting_room import WaitingRoom
from extproc.dispatcher import Dispatcher
from extproc.model import Final, Request
from extproc.snapshot import build
from tests.builders import CHAT, a_policy, a_reading, an_instance
from tests.e2e.envoy_process import an_envoy

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
    bodies: list[bytes]
    """Bodies that the engine got."""

    def post(self, **headers: str) -> "aiohttp.client._RequestContextManager":
        return self.http.post(f"{self.url}/v1/chat/completions", json=BODY, headers=headers)


@asynccontextmanager
async def a_rig(folder: Path, *, mesh: Mapping[str, Any] | None = None, **files: Any) -> AsyncIterator[Rig]:
    go_on = asyncio.Event()

    bodies: list[bytes] = []

    async def engine(request: web.Request) -> web.StreamResponse:
        bodies.append(await request.read())
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
        gateway = {"trust": {"tenant_header": "x-tenant"}} | files.pop("gateway", {})
        policy = a_policy(
            gateway=gateway,
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
        where = Mesh(host="127.0.0.1", port=0, admin_port=0, servers=(server.address,), **(mesh or {}))
        envoy = await asyncio.to_thread(stack.enter_context, an_envoy(write(policy, where), folder / "envoy"))
        http = await stack.enter_async_context(aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=20)))
        yield Rig(envoy.url, room, processor, server, http, go_on, bodies)
        go_on.set()
