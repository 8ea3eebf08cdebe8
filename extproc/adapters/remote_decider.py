"""A worker's side of the socket: the dispatcher of this gateway, or this worker alone while it is away.

Alone means from the worker's own last snapshot, under the same residency, permission and bounds, with its own counts;
each such verdict is marked, counted and logged. When the dispatcher is back, held requests are offered again with their
first arrival time and running ones are announced, and the worker's own dispatcher forgets them.
"""

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import structlog

from extproc.adapters import wire
from extproc.adapters.waiting_room import WaitingRoom
from extproc.model import Admit, Final, Fleet, Outcome, Refuse, Request

log: structlog.stdlib.BoundLogger = structlog.get_logger()

SILENCE_S = 2.0
"""A dispatcher that says nothing for this long (it beats four times a second) is away, even with its socket open.

The kernel accepts connections for a process that is stopped, so a new connection counts only once it has spoken.
"""
_RETRY_S = 0.2


@dataclass(slots=True)
class RemoteStats:
    """Counts of this worker."""

    alone: int = 0
    losses: int = 0


class RemoteDecider:
    """A :class:`extproc.ports.Decider` behind a Unix socket. *local* decides while it is away."""

    def __init__(self, path: Path, local: WaitingRoom, clock: Callable[[], float]) -> None:
        self.stats = RemoteStats()
        self._path = path
        self._local = local
        self._clock = clock
        self._link: wire.Link | None = None
        self._dialled: wire.Link | None = None
        """A connection that has not spoken yet."""
        self._heard = 0.0
        self._asked: dict[str, tuple[Request, asyncio.Future[Final]]] = {}
        self._running: dict[str, tuple[Request, Admit]] = {}

    @property
    def connected(self) -> bool:
        """Whether the dispatcher is there."""
        return self._link is not None

    def offer(self, request: Request) -> Final | asyncio.Future[Final]:
        """Return the verdict, or a future of it."""
        if self._link is None:
            return self._offer_alone(request)
        future: asyncio.Future[Final] = asyncio.get_running_loop().create_future()
        self._asked[request.id] = (request, future)
        self._link.send(wire.Offer(request))
        return future

    def first_token(self, request_id: str, ttft_s: float) -> None:
        """Pass on the first token."""
        if self._link is None:
            self._local.first_token(request_id, ttft_s)
        else:
            self._link.send(wire.FirstToken(request_id, ttft_s))

    def settle(self, request_id: str, outcome: Outcome) -> None:
        """Pass on the ending."""
        self._running.pop(request_id, None)
        asked = self._asked.pop(request_id, None)
        if asked is not None:
            asked[1].cancel()
        if self._link is None:
            self._local.settle(request_id, outcome)
        else:
            self._link.send(wire.Settle(request_id, outcome))

    def fleet(self) -> Fleet:
        """Return this worker's own snapshot."""
        return self._local.fleet()

    async def run(self) -> None:
        """Keep the connection until cancelled; then close it."""
        loop = asyncio.get_running_loop()
        try:
            while True:
                with contextlib.suppress(OSError):
                    _, link = await loop.create_unix_connection(self._dial, str(self._path))
                    await self._watch(link)
                await asyncio.sleep(_RETRY_S)
        finally:
            last, self._link, self._dialled = self._link or self._dialled, None, None
            if last is not None:
                last.close()

    def _dial(self) -> wire.Link:
        self._dialled, self._heard = wire.Link(self._take, self._lost), self._clock()
        return self._dialled

    async def _watch(self, link: wire.Link) -> None:
        """Return when *link* is gone, or has been silent for too long."""
        while link in (self._link, self._dialled):
            await asyncio.sleep(_RETRY_S)
            if self._clock() - self._heard > SILENCE_S:
                log.warning("dispatcher is silent", silent_s=SILENCE_S)
                link.close()
                self._lost(link)

    def _connected(self, link: wire.Link) -> None:
        self._link, self._dialled = link, None
        for request, admit in self._running.values():
            self._local.withdraw(request.id)
            link.send(wire.Adopt(request, admit))
        for request, _ in self._asked.values():
            self._local.withdraw(request.id)
            link.send(wire.Offer(request))
        log.info("dispatcher connected", announced=len(self._running), offered=len(self._asked))

    def _lost(self, link: wire.Link) -> None:
        if self._dialled is link:
            self._dialled = None
        if self._link is not link:
            return
        self._link = None
        self.stats.losses += 1
        log.warning("dispatcher is away; deciding alone", held=len(self._asked), running=len(self._running))
        for request, admit in self._running.values():
            self._local.adopt(request, admit)
        for request, future in list(self._asked.values()):
            found = self._offer_alone(request, future)
            if isinstance(found, Admit | Refuse) and not future.done():
                future.set_result(found)

    def _take(self, link: wire.Link, messages: Sequence[wire.Message]) -> None:
        if link is self._dialled:
            self._connected(link)
        if link is not self._link:
            return
        self._heard = self._clock()
        for message in messages:
            match message:
                case wire.Admitted(request_id, verdict) | wire.Refused(request_id, verdict):
                    self._answer(request_id, verdict)
                case _:
                    pass

    def _answer(self, request_id: str, verdict: Final) -> None:
        asked = self._asked.pop(request_id, None)
        if asked is None or asked[1].done():
            return  # its client has gone, and the settlement is on its way
        if isinstance(verdict, Admit) and verdict.steer:
            self._running[request_id] = (asked[0], verdict)
        asked[1].set_result(verdict)

    def _offer_alone(
        self, request: Request, future: asyncio.Future[Final] | None = None
    ) -> Final | asyncio.Future[Final]:
        """Decide here; whoever waits on *future* need not know who answers."""
        found = self._local.offer(request)
        if isinstance(found, Admit | Refuse):
            return self._alone(request, found)
        waits = future or asyncio.get_running_loop().create_future()
        self._asked[request.id] = (request, waits)
        found.add_done_callback(lambda held: self._granted_alone(request, held))
        return waits

    def _granted_alone(self, request: Request, held: asyncio.Future[Final]) -> None:
        asked = self._asked.get(request.id)
        if held.cancelled() or asked is None or asked[1].done() or self._link is not None:
            return  # with the dispatcher back it was offered there
        asked[1].set_result(self._alone(request, held.result()))

    def _alone(self, request: Request, verdict: Final) -> Final:
        self.stats.alone += 1
        self._asked.pop(request.id, None)
        marked = replace(verdict, alone=True)
        if isinstance(marked, Admit) and marked.steer:
            self._running[request.id] = (request, marked)
        return marked
