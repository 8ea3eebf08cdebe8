"""A core in real time: wall seconds are virtual seconds times the time scale.

The clock is the system's own, not the loop's: uvloop's stands still within an iteration and counts milliseconds. The
core's steps end at exact virtual times; a timer that fires late delivers its tokens late but never shifts the steps
after it. One event loop owns an instance, so its synchronous methods need no lock.
"""

import asyncio
from collections.abc import Callable, Hashable
from time import monotonic

from loadtest.engine.core import Core
from loadtest.engine.request import EngineRequest, FirstToken, Timing


class Stream:
    """Tokens of one request as they come. The reader waits on *changed*, shared by the choices of one call."""

    def __init__(self, request: EngineRequest, changed: asyncio.Event) -> None:
        self.request = request
        self.tokens = 0
        self.cached_tokens = 0
        self.timing: Timing | None = None
        self.changed = changed


class LiveCore:
    """Runs *core* against the event loop's clock.

    Parameters
    ----------
    scale
        Wall seconds per virtual second; 0.1 runs ten times as fast as the hardware.
    ended
        Called with each request's timing, aborted ones included.
    stepped
        Called with the number of steps just done and their tokens.
    """

    def __init__(
        self, core: Core, scale: float, ended: Callable[[Timing], None], stepped: Callable[[int, int], None]
    ) -> None:
        if scale <= 0:
            raise ValueError("the time scale must be positive")
        self.core = core
        self._scale = scale
        self._ended = ended
        self._stepped = stepped
        self._loop = asyncio.get_running_loop()
        self._zero = monotonic()
        self._frozen: float | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._streams: dict[Hashable, Stream] = {}
        self._empty = asyncio.Event()
        self._empty.set()

    @property
    def live(self) -> int:
        """Requests inside the engine."""
        return len(self._streams)

    async def drained(self) -> None:
        """Wait until no request is inside."""
        await self._empty.wait()

    def now(self) -> float:
        """Return virtual seconds since the start; they stand still while frozen."""
        return (monotonic() - self._zero) / self._scale if self._frozen is None else self._frozen

    def submit(self, request: EngineRequest, changed: asyncio.Event) -> Stream:
        """Start *request*; *changed* is set whenever it has news. Raises like :meth:`Core.submit`."""
        now = self.now()
        self._advance(now)
        self.core.submit(request, now)
        stream = self._streams[request.id] = Stream(request, changed)
        self._empty.clear()
        self._arm()
        return stream

    def abort(self, request_id: Hashable) -> None:
        """Drop a request at once; nothing happens if it has ended."""
        now = self.now()
        self._advance(now)
        if timing := self.core.abort(request_id, now):
            self._end(timing)
        self._arm()

    def freeze(self) -> None:
        """Stop time, as a stopped process does."""
        if self._frozen is None:
            self._advance(self.now())
            self._frozen = self.now()
            self._arm()

    def thaw(self) -> None:
        """Let time go on from where it stopped."""
        if self._frozen is not None:
            self._zero = monotonic() - self._frozen * self._scale
            self._frozen = None
            self._arm()

    def set_slowdown(self, factor: float) -> None:
        """Make every step from the next on *factor* times as long."""
        self._advance(self.now())
        self.core.slowdown = factor
        self._arm()

    def close(self) -> None:
        """Stop for good."""
        if self._timer:
            self._timer.cancel()

    def _tick(self) -> None:
        self._advance(self.now())
        self._arm()

    def _arm(self) -> None:
        """Call back when the step under way ends."""
        if self._timer:
            self._timer.cancel()
        wake = None if self._frozen is not None else self.core.wake()
        if wake is None:
            self._timer = None
        else:
            delay = self._zero + wake * self._scale - monotonic()
            self._timer = self._loop.call_later(max(0.0, delay), self._tick)

    def _advance(self, now: float) -> None:
        steps, tokens = self.core.totals.steps, self._computed()
        for event in self.core.advance(now):
            if isinstance(event, FirstToken):
                self._streams[event.id].cached_tokens = event.cached_tokens
            else:
                self._end(event)
        if self.core.totals.steps == steps:
            return
        self._stepped(self.core.totals.steps - steps, self._computed() - tokens)
        for request_id, stream in self._streams.items():
            tokens = self.core.generated(request_id)
            if tokens != stream.tokens:
                stream.tokens = tokens
                stream.changed.set()

    def _computed(self) -> int:
        return self.core.totals.prefilled + self.core.totals.generated

    def _end(self, timing: Timing) -> None:
        stream = self._streams.pop(timing.id)
        if not self._streams:
            self._empty.set()
        stream.tokens, stream.cached_tokens, stream.timing = timing.output_tokens, timing.cached_tokens, timing
        stream.changed.set()
        self._ended(timing)
