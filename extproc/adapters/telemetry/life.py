"""The life of one instance: answers in, state and reading out. Pure.

starting ─good─▶ ready ─too long without, or refused twice─▶ lost ─good─▶ ready; *loading* (503) leads back to starting
from anywhere. An instance that never answered well is starting, however long it fails. Draining is a ready instance
whose discovery says so.
"""

from extproc.adapters.telemetry.dialect import Numbers
from extproc.model import Instance, Reading, State

_REFUSALS = 2
"""Connections refused in a row that mean the process is gone: one may be a restart of the listener alone."""


class Life:
    """What is known of one instance. Times are wall-clock seconds."""

    def __init__(self, instance: Instance, lost_after_s: float, last: Reading | None = None) -> None:
        """Start blank, or from *last*, the reading that an earlier collector left of this very instance."""
        self.instance = instance
        self.error: str | None = None
        self._lost_after_s = lost_after_s
        self._numbers = Numbers()
        self._models: tuple[str, ...] | None = None
        self._tried_at: float | None = None
        self._good_at: float | None = None
        self._loading = False
        self._refusals = 0
        if last is not None and last.state in {State.READY, State.DRAINING}:
            self._inherit(last)

    def answered(self, at: float, numbers: Numbers, error: str | None = None) -> None:
        """Note a good scrape; *error* where the instance serves but publishes no numbers."""
        self._tried_at = self._good_at = at
        self._numbers, self.error = numbers, error
        self._loading, self._refusals = False, 0

    def serves(self, models: tuple[str, ...] | None) -> None:
        """Note what the engine's model list says; ``None`` if it has none."""
        self._models = models

    def loading(self, at: float, error: str) -> None:
        """Note that the instance says it is not ready."""
        self._tried_at, self.error = at, error
        self._loading, self._refusals = True, 0

    def failed(self, at: float, error: str, *, refused: bool = False) -> None:
        """Note a scrape without an answer; *refused* if nothing listens."""
        self._tried_at, self.error = at, error
        self._refusals = self._refusals + 1 if refused else 0

    def state(self, now: float) -> State:
        """Return the state at *now*."""
        if self._good_at is None or self._loading:
            return State.STARTING
        if self._refusals >= _REFUSALS or now - self._good_at > self._lost_after_s:
            return State.LOST
        return State.DRAINING if self.instance.draining else State.READY

    def reading(self, now: float) -> Reading | None:
        """Return the row for the store; ``None`` before anything was tried, so that nothing known is overwritten."""
        at = self._tried_at if self._good_at is None else self._good_at
        if at is None:
            return None
        says = self._numbers
        return Reading(
            instance=self.instance,
            state=self.state(now),
            at=at,
            waiting=says.waiting,
            running=says.running,
            kv_usage=says.kv_usage,
            prefix_hits=says.prefix_hits,
            prefix_queries=says.prefix_queries,
            block_tokens=says.block_tokens,
            kv_blocks=says.kv_blocks,
            models=self._named(),
            error=self.error,
        )

    def _named(self) -> tuple[str, ...] | None:
        if self._models is None and not self._numbers.adapters:
            return None
        return tuple(dict.fromkeys((*(self._models or ()), *self._numbers.adapters)))

    def _inherit(self, last: Reading) -> None:
        self._good_at, self._models = last.at, last.models
        self._numbers = Numbers(
            waiting=last.waiting,
            running=last.running,
            kv_usage=last.kv_usage,
            prefix_hits=last.prefix_hits,
            prefix_queries=last.prefix_queries,
            block_tokens=last.block_tokens,
            kv_blocks=last.kv_blocks,
        )
