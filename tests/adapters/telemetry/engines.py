"""Tiny engines on loopback for the collector's tests."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from aiohttp import web

METRICS = Path(__file__).parents[2] / "data" / "metrics"
VLLM_BUSY = (METRICS / "vllm-0.32.0-busy.prom").read_text()
LLAMA_BUSY = (METRICS / "llamacpp-xllamacpp-2026.10.11549-busy.prom").read_text()


@dataclass
class Engine:
    """Answers as its fields say."""

    page: str | bytes = VLLM_BUSY
    page_status: int = 200
    path: str = "/metrics"
    health_status: int = 200
    models: list[str] | None = field(default_factory=lambda: ["chat-model"])
    models_body: str | None = None
    going: asyncio.Event = field(default_factory=asyncio.Event)
    """Cleared, it holds every answer back: the engine hangs."""
    models_hang: bool = False
    asked: list[str] = field(default_factory=list)
    port: int = 0
    _runner: web.AppRunner | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def __post_init__(self) -> None:
        self.going.set()

    async def start(self) -> None:
        app = web.Application()
        app.router.add_get("/{what:.*}", self._answer)
        self._runner = web.AppRunner(app, shutdown_timeout=0.01)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    def count(self, path: str) -> int:
        return self.asked.count(path)

    async def _answer(self, request: web.Request) -> web.Response:
        self.asked.append(request.path)
        await self.going.wait()
        if request.path == self.path:
            body = self.page if isinstance(self.page, bytes) else self.page.encode()
            return web.Response(body=body, status=self.page_status)
        if request.path == "/health":
            return web.Response(status=self.health_status)
        if request.path == "/v1/models" and self.models_hang:
            await asyncio.Event().wait()
        if request.path == "/v1/models" and self.models_body is not None:
            return web.Response(text=self.models_body)
        if request.path == "/v1/models" and self.models is not None:
            return web.json_response({"object": "list", "data": [{"id": name, "root": "x"} for name in self.models]})
        return web.Response(status=404)


@asynccontextmanager
async def engines(*made: Engine) -> AsyncIterator[None]:
    try:
        for one in made:
            await one.start()
        yield
    finally:
        for one in made:
            one.going.set()
            await one.stop()
