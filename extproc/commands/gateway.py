"""The processes of a gateway: everything in one, or workers around one dispatcher. Adapters are put together here."""

import asyncio
import contextlib
import gc
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import structlog
from aiohttp import web
from prometheus_client import CollectorRegistry

from extproc import settings
from extproc.adapters import admin as admin_port
from extproc.adapters import eds_files, metrics
from extproc.adapters.discovery import Discovery
from extproc.adapters.dispatcher_socket import DispatcherSocket
from extproc.adapters.fleet_view import FleetView
from extproc.adapters.grpc_server import GrpcServer
from extproc.adapters.memory_store import MemoryStore
from extproc.adapters.redis_store import RedisAccess, RedisStore
from extproc.adapters.remote_decider import RemoteDecider
from extproc.adapters.server import Processor
from extproc.adapters.telemetry.collector import Collector
from extproc.adapters.waiting_room import WaitingRoom
from extproc.commands.collect import lay_out
from extproc.dispatcher import Dispatcher
from extproc.policy import Policy
from extproc.ports import Decider, Store

log: structlog.stdlib.BoundLogger = structlog.get_logger()

FIRST_VIEW_S = 5.0
"""Health checks stay red so long at most while the first snapshot has not come."""


@dataclass(frozen=True, slots=True)
class Shell:
    """What every process of a gateway needs."""

    policy: Policy
    folder: Path
    redis: RedisAccess | None
    admin: tuple[str, int]
    eds: Path | None = None
    tls: settings.Tls | None = None
    drain_s: float = 20.0


async def alone(shell: Shell, address: str) -> None:
    """Do everything in one process."""
    room = WaitingRoom(Dispatcher(shell.policy, np.random.default_rng()), time.monotonic)
    store = _store(shell)
    view = FleetView(shell.policy, store, room.observe)
    tasks = [room.run()]
    if shell.redis is None:
        if shell.eds is not None:
            lay_out(shell.policy, shell.eds)
        tasks.append(_collecting(shell, store))
    figures = metrics.DispatcherFigures(lambda: room.dispatcher, time.monotonic)
    await _serve(shell, address, room, room, view, store, tasks, [figures], {})


async def work(shell: Shell, address: str, socket: Path) -> None:
    """Do the protocol work; decide only while the dispatcher is away."""
    local = WaitingRoom(Dispatcher(shell.policy, np.random.default_rng()), time.monotonic)
    store = _store(shell)
    decider = RemoteDecider(socket, local, time.monotonic)
    view = FleetView(shell.policy, store, local.observe)
    figures = metrics.Figures(
        lambda: [
            ("tokenfleet_worker_dispatcher_connected", "1 while the dispatcher is there", float(decider.connected)),
            ("tokenfleet_worker_verdicts_alone", "Verdicts given while it was away", decider.stats.alone),
            ("tokenfleet_worker_dispatcher_losses", "Times it went away", decider.stats.losses),
        ]
    )
    debug = {"dispatcher": lambda: "connected" if decider.connected else "away"}
    tasks = [local.run(), decider.run()]
    # What is decided and ends alone is in this worker's books only; what the dispatcher takes over leaves them.
    books = metrics.DispatcherFigures(lambda: local.dispatcher, time.monotonic)
    await _serve(shell, address, decider, local, view, store, tasks, [figures, books], debug)


async def dispatch(shell: Shell, socket: Path) -> None:
    """Own the line, the counts and the books."""
    room = WaitingRoom(Dispatcher(shell.policy, np.random.default_rng()), time.monotonic)
    store = _store(shell)
    view = FleetView(shell.policy, store, room.observe)
    door = DispatcherSocket(room)
    registry = CollectorRegistry(auto_describe=False)
    registry.register(metrics.DispatcherFigures(lambda: room.dispatcher, time.monotonic))
    registry.register(_view_figures(view, lambda: [("tokenfleet_workers", "Workers connected", door.workers())]))
    app = admin_port.application(
        registry,
        lambda: _not_ready(view),
        lambda: _describe(room, view, {"workers": door.workers, "owned": door.owned}),
    )
    async with _listening(app, shell) as port, _tasks(view.run(), room.run(), _opened(door, view, socket)) as failed:
        log.info("dispatching", socket=str(socket), admin=port)
        await _until_stopped(failed)
    await store.close()


async def _serve(
    shell: Shell,
    address: str,
    decider: Decider,
    room: WaitingRoom,
    view: FleetView,
    store: Store,
    tasks: list[Coroutine[Any, Any, None]],
    figures: Iterable[Any],
    debug: Mapping[str, Callable[[], Any]],
) -> None:
    """Serve gRPC and the admin port until a signal, then drain."""
    processor = Processor(shell.policy, decider, time.monotonic)
    server = GrpcServer(processor, address, shell.tls)
    registry = CollectorRegistry(auto_describe=False)
    for one in (*figures, metrics.StreamFigures(processor.stats), _view_figures(view, list)):
        registry.register(one)
    app = admin_port.application(registry, lambda: _not_ready(view), lambda: _describe(room, view, debug))
    await server.start()
    async with _listening(app, shell) as port, _tasks(view.run(), *tasks) as failed:
        await _first_view(view)
        _spare_the_collector()
        await server.serving()
        log.info("serving", address=server.address, admin=port)
        await _until_stopped(failed)
        log.info("draining", held=processor.held(), seconds=shell.drain_s)
        await server.drain(shell.drain_s)
    await store.close()
    log.info("stopped")


# --- pieces ----------------------------------------------------------------------------------------------------------


def _store(shell: Shell) -> Store:
    return MemoryStore() if shell.redis is None else RedisStore(shell.redis)


async def _collecting(shell: Shell, store: Store) -> None:
    mirror = None if shell.eds is None else partial(eds_files.write, shell.eds)
    await Collector(shell.policy, Discovery(shell.policy, shell.folder), store, mirror=mirror).run()


async def _opened(door: DispatcherSocket, view: FleetView, socket: Path) -> None:
    """Let workers in once the fleet is known: until then they decide better alone."""
    await _first_view(view)
    await door.serve(socket)


async def _first_view(view: FleetView) -> None:
    """Give the first snapshot a moment, so that the first request does not find an unknown fleet."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(FIRST_VIEW_S):
            while view.age_s == float("inf"):  # noqa: ASYNC110 - the view has no event, and start-up is no hot path
                await asyncio.sleep(0.02)


def _spare_the_collector() -> None:
    """Leave what has been loaded to start with out of every garbage collection, and collect less often.

    A held request is some fifty objects, none of them in a cycle: by default each burst would walk all of them again
    and again, about a tenth of this process's time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)


def _not_ready(view: FleetView) -> str | None:
    return "no instance has been heard of yet" if view.age_s == float("inf") else None


def _view_figures(view: FleetView, more: Callable[[], list[tuple[str, str, float]]]) -> metrics.Figures:
    return metrics.Figures(
        lambda: [
            ("tokenfleet_store_away", "1 while the telemetry store cannot be reached", float(view.away)),
            ("tokenfleet_telemetry_age_seconds", "Age of the newest reading", view.age_s),
            *more(),
        ]
    )


def _describe(room: WaitingRoom, view: FleetView, more: Mapping[str, Callable[[], Any]]) -> dict[str, Any]:
    described = admin_port.describe(room.dispatcher, time.monotonic())
    return described | {"store_away": view.away} | {name: value() for name, value in more.items()}


@contextlib.asynccontextmanager
async def _listening(app: web.Application, shell: Shell) -> AsyncIterator[int]:
    runner, port = await admin_port.listen(app, *shell.admin)
    try:
        yield port
    finally:
        await runner.cleanup()


@contextlib.asynccontextmanager
async def _tasks(*coroutines: Coroutine[Any, Any, None]) -> AsyncIterator[asyncio.Future[None]]:
    """Run *coroutines* meanwhile; the future given fails with the first of them that does."""
    together = asyncio.gather(*coroutines)
    failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def _report(done: asyncio.Future[Any]) -> None:
        if not done.cancelled() and not failed.done() and (error := done.exception()) is not None:
            failed.set_exception(error)

    together.add_done_callback(_report)
    try:
        yield failed
    finally:
        together.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await together
        failed.cancel()


def signalled() -> asyncio.Event:
    """Return what SIGTERM and Ctrl-C set."""
    stop = asyncio.Event()
    for name in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(name, stop.set)
    return stop


async def _until_stopped(failed: Awaitable[None]) -> None:
    """Wait for a signal; raise what broke if something does first."""
    stopping = asyncio.ensure_future(signalled().wait())
    breaking = asyncio.ensure_future(failed)
    await asyncio.wait({stopping, breaking}, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if breaking.done():
        breaking.result()
    breaking.cancel()
