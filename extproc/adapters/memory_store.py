"""Readings in this process: for one process alone, and for tests."""

import time
from collections.abc import Callable, Sequence

from extproc.model import Reading


class MemoryStore:
    """A :class:`extproc.ports.Store` that is never away."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """*clock* gives seconds and never runs backwards."""
        self._clock = clock
        self._rows: dict[str, tuple[float, Reading]] = {}

    async def write(self, readings: Sequence[Reading], expire_s: float) -> None:
        """See :class:`extproc.ports.Store`."""
        until = self._clock() + expire_s
        self._rows |= {reading.instance.name: (until, reading) for reading in readings}

    async def drop(self, names: Sequence[str]) -> None:
        """See :class:`extproc.ports.Store`."""
        for name in names:
            self._rows.pop(name, None)

    async def read(self) -> Sequence[Reading]:
        """See :class:`extproc.ports.Store`."""
        now = self._clock()
        self._rows = {name: row for name, row in self._rows.items() if row[0] > now}
        return [self._rows[name][1] for name in sorted(self._rows)]

    async def close(self) -> None:
        """See :class:`extproc.ports.Store`."""
