"""A decider under test: in this process, or behind a socket with its dispatcher in the same loop."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np

from extproc.adapters.dispatcher_socket import DispatcherSocket
from extproc.adapters.remote_decider import RemoteDecider
from extproc.adapters.waiting_room import WaitingRoom
from extproc.dispatcher import Dispatcher
from extproc.model import Admit, Final, Fleet, Refuse, Request
from extproc.policy import Policy
from tests.builders import a_policy, a_request
from tests.fleets import a_fleet
from tests.polling import eventually


def the_policy(max_in_flight: int = 1, **files: Any) -> Policy:
    """Two instances at home in the eu, two in the us; one request each unless told."""
    classes = [{"name": "standard", "longest_wait_ms": 20_000, "max_waiting": 1000}]
    slomax = {"max_in_flight": max_in_flight, "classes": classes}
    tenants = {"tenants": {"eu": {"jurisdictions": ["eu"]}}}
    return a_policy(slomax=slomax, tenants=tenants, **files)


@dataclass
class Clock:
    """Seconds that pass when told."""

    now: float = 100.0

    def __call__(self) -> float:
        return self.now


def a_room(policy: Policy, clock: Callable[[], float], fleet: Fleet | None = None) -> WaitingRoom:
    room = WaitingRoom(Dispatcher(policy, np.random.default_rng(0)), clock)
    room.observe(fleet or a_fleet(policy))
    return room


async def verdict_of(found: Final | Awaitable[Final]) -> Final:
    """Return the verdict however it was given; raises :class:`TimeoutError` after ten seconds."""
    if isinstance(found, Admit | Refuse):
        return found
    async with asyncio.timeout(10):
        return await found


@contextlib.asynccontextmanager
async def running(*coroutines: Any) -> AsyncIterator[None]:
    """Run *coroutines* meanwhile; they are cancelled and awaited at the end."""
    tasks = [asyncio.ensure_future(one) for one in coroutines]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        for task in tasks:
            with contextlib.suppress(asyncio.CancelledError):
                await task


@dataclass
class Gateway:
    """One dispatcher that can be started and stopped, and workers that know its socket."""

    path: Path
    policy: Policy = field(default_factory=the_policy)
    clock: Clock = field(default_factory=Clock)

    def __post_init__(self) -> None:
        self._stack = contextlib.AsyncExitStack()
        self._door: contextlib.AsyncExitStack | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()
        await self._stack.aclose()

    async def start(self, *, seen: bool = True) -> DispatcherSocket:
        """Start an empty dispatcher; with *seen* it has its first snapshot already."""
        self.room = a_room(self.policy, self.clock, None if seen else Fleet(at=0.0, blind=True))
        self.socket = DispatcherSocket(self.room)
        self._door = contextlib.AsyncExitStack()
        await self._door.enter_async_context(running(self.socket.serve(self.path)))
        await eventually(self.path.exists)
        return self.socket

    async def stop(self) -> None:
        """End the dispatcher and every connection to it."""
        if self._door is not None:
            await self._door.aclose()
            self._door = None

    async def worker(self, *, connected: bool = True) -> "Worker":
        """Start a worker; with *connected* it has heard the dispatcher."""
        local = a_room(self.policy, self.clock)
        one = Worker(RemoteDecider(self.path, local, self.clock), local, contextlib.AsyncExitStack())
        await one.stack.enter_async_context(running(one.decider.run()))
        self._stack.push_async_callback(one.die)
        if connected:
            await eventually(lambda: one.decider.connected)
        return one

    def request(self, name: str, **fields: Any) -> Request:
        return a_request(id=name, **{"arrived": self.clock()} | fields)


@dataclass
class Worker:
    decider: RemoteDecider
    local: WaitingRoom
    stack: contextlib.AsyncExitStack

    async def die(self) -> None:
        """End its connection, as its process's death would."""
        await self.stack.aclose()

    def alone(self) -> int:
        """Return what its own dispatcher has in flight."""
        return self.local.dispatcher.total_in_flight()
