"""The collector: one task an instance, one tick that writes what all of them know.

Tasks share nothing but the HTTP session, so a hung instance delays no other. The store may go away and come back; the
instances are watched meanwhile and the next tick writes everything.
"""

import asyncio
import time
import zlib
from collections.abc import Callable, Mapping, Sequence

import aiohttp
import structlog

from extproc.adapters.discovery import Discovery, Found, clusters
from extproc.adapters.telemetry import scrape
from extproc.adapters.telemetry.life import Life
from extproc.adapters.telemetry.scrape import Good, Loading, Silent
from extproc.model import Instance, Reading, State
from extproc.policy import Policy
from extproc.ports import Store, StoreAway

Mirror = Callable[[Mapping[str, Sequence[str]]], None]
"""Writes Envoy cluster → addresses where Envoy watches; raises :class:`OSError`."""

VET_S = 10.0
"""Time between two questions for health and loaded models; they are also asked after anything went wrong."""

_ASK_AGAIN_S = 1.0
"""A busy engine may be slow to list its models; until it does, discovery is believed."""

_log = structlog.get_logger()


class Collector:
    """Watches the fleet until cancelled."""

    def __init__(
        self,
        policy: Policy,
        discovery: Discovery,
        store: Store,
        *,
        mirror: Mirror | None = None,
        wall: Callable[[], float] = time.time,
        vet_s: float = VET_S,
    ) -> None:
        """*mirror* is told of every change in which instances exist."""
        self._policy = policy
        self._telemetry = policy.fleet.telemetry
        self._store = store
        self._discovery = discovery
        self._mirror = mirror
        self._wall = wall
        self._vet_s = vet_s
        self._lives: dict[str, Life] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._told: dict[str, State] = {}
        self._gone: set[str] = set()
        self._mirrored: Mapping[str, Sequence[str]] = {}
        self._unmirrored: Mapping[str, Sequence[str]] | None = None
        self._before: dict[str, Reading] = {}
        self._away: str | None = None
        self._broken: str | None = None
        self._group: asyncio.TaskGroup
        self._session: aiohttp.ClientSession

    async def run(self) -> None:
        """Watch until cancelled."""
        limit = aiohttp.ClientTimeout(total=self._telemetry.timeout_ms / 1000)
        connector = aiohttp.TCPConnector(limit=0)
        async with (
            aiohttp.ClientSession(timeout=limit, connector=connector, cookie_jar=aiohttp.DummyCookieJar()) as session,
            asyncio.TaskGroup() as group,
        ):
            self._session, self._group = session, group
            await self._recall()
            group.create_task(self._discovery.run(self._found))
            while True:
                await asyncio.sleep(self._telemetry.scrape_ms / 1000)
                await self._tick()

    async def _recall(self) -> None:
        """Start from what an earlier collector left, so that a restart makes no ready instance look new."""
        try:
            self._before = {reading.instance.name: reading for reading in await self._store.read()}
        except StoreAway as error:
            self._note_store(str(error))

    def _found(self, found: Found) -> None:
        now = {one.name: one for one in found.instances}
        for name in self._lives.keys() - now.keys():
            self._forget(name)
            self._gone.add(name)
        for name, instance in now.items():
            self._gone.discard(name)
            if (life := self._lives.get(name)) is not None and life.instance.address == instance.address:
                life.instance = instance
            else:
                self._watch(instance)
        self._unmirrored = clusters(self._policy, found)

    def _watch(self, instance: Instance) -> None:
        self._forget(instance.name)
        last = self._before.pop(instance.name, None)
        same = last if last is not None and last.instance.address == instance.address else None
        life = Life(instance, self._telemetry.lost_after_ms / 1000, same)
        self._lives[instance.name] = life
        self._tasks[instance.name] = self._group.create_task(self._follow(life))

    def _forget(self, name: str) -> None:
        self._lives.pop(name, None)
        self._told.pop(name, None)
        if (task := self._tasks.pop(name, None)) is not None:
            task.cancel()

    async def _follow(self, life: Life) -> None:
        """Scrape one instance at a fixed pace, beginning at a point of the period that its name gives."""
        loop = asyncio.get_running_loop()
        period = self._telemetry.scrape_ms / 1000
        due = loop.time() + period * (zlib.crc32(life.instance.name.encode()) % 1000) / 1000
        vet_at = due
        while True:
            await asyncio.sleep(due - loop.time())
            pause = await self._scrape(life, vet=loop.time() >= vet_at)
            if pause is not None:
                vet_at = loop.time() + pause
            due = max(due + period, loop.time())

    async def _scrape(self, life: Life, *, vet: bool) -> float | None:
        """Ask once; return after how many seconds to vet again, ``None`` to leave that as planned."""
        pause = self._vet_s if vet else None
        answer = await scrape.numbers(self._session, life.instance)
        if vet and isinstance(answer, Good):
            well = await scrape.health(self._session, life.instance)
            answer = answer if isinstance(well, Good) else well
            if isinstance(answer, Good):
                pause = await self._ask_models(life)
        match answer:
            case Good(numbers, error):
                life.answered(self._wall(), numbers, error)
            case Loading(error):
                life.loading(self._wall(), error)
            case Silent(error, refused):
                life.failed(self._wall(), error, refused=refused)
        return pause if isinstance(answer, Good) else 0.0

    async def _ask_models(self, life: Life) -> float:
        """Return after how many seconds to ask again."""
        try:
            life.serves(await scrape.models(self._session, life.instance))
        except TimeoutError:
            return min(_ASK_AGAIN_S, self._vet_s)  # what it said before stands
        return self._vet_s

    async def _tick(self) -> None:
        now = self._wall()
        readings = [reading for life in self._lives.values() if (reading := life.reading(now)) is not None]
        self._note_states(readings)
        self._write_mirror()
        gone = tuple(self._gone)
        try:
            await self._store.write(readings, self._telemetry.expire_ms / 1000)
            if gone:
                await self._store.drop(gone)
        except StoreAway as error:
            self._note_store(str(error))
        else:
            self._gone -= set(gone)
            self._note_store(None)

    def _write_mirror(self) -> None:
        """Write the files if they differ from what was written; a failure is tried again at the next tick."""
        wanted, self._unmirrored = self._unmirrored, None
        if self._mirror is None or wanted is None or wanted == self._mirrored:
            return
        try:
            self._mirror(wanted)
        except (OSError, ValueError) as error:
            self._unmirrored = wanted
            if str(error) != self._broken:
                self._broken = str(error)
                _log.error("mirror_failed", error=self._broken)
        else:
            self._mirrored, self._broken = wanted, None
            _log.info("mirror_written", instances={name: len(rows) for name, rows in wanted.items()})

    def _note_states(self, readings: Sequence[Reading]) -> None:
        for reading in readings:
            name, before = reading.instance.name, self._told.get(reading.instance.name)
            if reading.state is not before:
                self._told[name] = reading.state
                _log.info("instance_state", instance=name, state=reading.state, before=before, error=reading.error)

    def _note_store(self, error: str | None) -> None:
        if (error is None) != (self._away is None):
            if error is None:
                _log.info("store_back")
            else:
                _log.warning("store_away", error=error)
        self._away = error
