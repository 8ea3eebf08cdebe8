"""The dispatcher of this process, with a clock and futures around it.

One event loop owns it; between two awaits nobody else touches the dispatcher. Invariant: a held request's future is
resolved exactly once, by a verdict or by its cancellation.
"""

import asyncio
from collections.abc import Callable, Iterable

from extproc.dispatcher import Dispatcher, Granted
from extproc.model import Admit, Final, Fleet, Outcome, Request, Wait

TICK_S = 0.05


class WaitingRoom:
    """A :class:`extproc.ports.Decider` in this process. *clock* is monotonic seconds."""

    def __init__(self, dispatcher: Dispatcher, clock: Callable[[], float]) -> None:
        self.dispatcher = dispatcher
        self._clock = clock
        self._held: dict[str, asyncio.Future[Final]] = {}

    def offer(self, request: Request) -> Final | asyncio.Future[Final]:
        """Return the verdict at once, or a future of it while the request is held."""
        verdict = self.dispatcher.offer(request, self._clock())
        if not isinstance(verdict, Wait):
            return verdict
        held = self._held.get(request.id)
        if held is None or held.done():
            held = self._held[request.id] = asyncio.get_running_loop().create_future()
        return held

    def adopt(self, request: Request, admit: Admit) -> None:
        """Take over a request that runs already."""
        self._leave(request.id)
        self.dispatcher.adopt(request, admit, self._clock())

    def withdraw(self, request_id: str) -> None:
        """Let somebody else own this request from now on."""
        self._leave(request_id)
        self.dispatcher.withdraw(request_id)

    def first_token(self, request_id: str, ttft_s: float) -> None:  # noqa: ARG002 - learning will want it
        """Note that a request's prefill is over."""
        self._deliver(self.dispatcher.first_token(request_id, self._clock()))

    def settle(self, request_id: str, outcome: Outcome) -> None:
        """End a request, held or running."""
        self._leave(request_id)
        self._deliver(self.dispatcher.settle(request_id, outcome, self._clock()))

    def observe(self, fleet: Fleet) -> None:
        """Replace the snapshot."""
        self._deliver(self.dispatcher.observe(fleet, self._clock()))

    def fleet(self) -> Fleet:
        """Return the snapshot that decisions are made from."""
        return self.dispatcher.fleet

    def tick(self) -> None:
        """Let time pass."""
        self._deliver(self.dispatcher.tick(self._clock()))

    async def run(self) -> None:
        """Tick until cancelled."""
        while True:
            await asyncio.sleep(TICK_S)
            self.tick()

    def _leave(self, request_id: str) -> None:
        held = self._held.pop(request_id, None)
        if held is not None:
            held.cancel()

    def _deliver(self, granted: Iterable[Granted]) -> None:
        for request_id, verdict in granted:
            future = self._held.pop(request_id, None)
            if future is not None and not future.done():
                future.set_result(verdict)
