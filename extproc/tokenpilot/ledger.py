"""What this gateway itself has in flight, by slot: added at once, exact, never waiting for a scrape.

Telemetry only adds what others send: ``others = reported - own``, never below zero. A scrape lags, so *own* is the
larger of our count now and at the last snapshot: a request that came or went in between is not taken for a stranger's.
"""

import numpy as np

from extproc.model import Floats, Ints
from extproc.tokenpilot.rows import Rows


class Ledger:
    """Counts by slot. Invariant: none is negative, and all are zero when nothing is in flight."""

    def __init__(self) -> None:
        self.requests = np.zeros(0, dtype=np.int64)
        self.prefill = np.zeros(0)
        """Uncached prompt tokens of requests that have no first token yet."""
        self.tokens = np.zeros(0)
        """Prompt and expected output tokens: what these requests will hold in the KV cache."""
        self._last = np.zeros(0, dtype=np.int64)

    def grow(self, slots: int) -> None:
        """Make room for *slots* slots."""
        more = slots - len(self.requests)
        if more > 0:
            self.requests = np.pad(self.requests, (0, more))
            self.prefill = np.pad(self.prefill, (0, more))
            self.tokens = np.pad(self.tokens, (0, more))
            self._last = np.pad(self._last, (0, more))

    def place(self, slot: int, prefill: float, tokens: float) -> None:
        """Count one more request."""
        self.requests[slot] += 1
        self.prefill[slot] += prefill
        self.tokens[slot] += tokens

    def begun(self, slot: int, prefill: float) -> None:
        """Take off the prefill of a request that has its first token."""
        self.prefill[slot] = max(0.0, self.prefill[slot] - prefill)

    def free(self, slot: int, prefill: float, tokens: float) -> None:
        """Count one request less; *prefill* is 0 once :meth:`begun`."""
        self.requests[slot] -= 1
        self.prefill[slot] = max(0.0, self.prefill[slot] - prefill)
        self.tokens[slot] = max(0.0, self.tokens[slot] - tokens)
        if self.requests[slot] == 0:  # sums of floats drift; nothing in flight is exactly nothing
            self.prefill[slot] = self.tokens[slot] = 0.0

    def others(self, rows: Rows) -> tuple[Floats, Floats]:
        """Return by row what strangers have (running, waiting) there, and remember our counts for the next call."""
        own: Ints = np.maximum(self.requests, self._last)[rows.slots]
        self._last = self.requests.copy()
        strangers = np.maximum(rows.waiting + rows.running - own, 0.0)
        waiting = np.minimum(rows.waiting, strangers)
        return strangers - waiting, waiting
