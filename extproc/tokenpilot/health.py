"""Which instances to leave alone for a while, judged by how our own requests end.

Telemetry sees a dead engine only at its next scrape and Envoy's host list ignores health, so failures count here at
once. After *fail_after* failures in a row an instance rests; when the rest is over the next request is the probe: its
failure rests the instance again, its success forgets everything.
"""


class Health:
    """Failures in a row and rests, by slot."""

    def __init__(self, fail_after: int, rest_s: float) -> None:
        self._fail_after = fail_after
        self._rest_s = rest_s
        self._failures: dict[int, int] = {}
        self._until: dict[int, float] = {}

    def failed(self, slot: int, now: float) -> None:
        """Count a failure."""
        self._failures[slot] = self._failures.get(slot, 0) + 1
        if self._failures[slot] >= self._fail_after:
            self._until[slot] = now + self._rest_s

    def served(self, slot: int) -> None:
        """Forget what was: it works."""
        self._failures.pop(slot, None)
        self._until.pop(slot, None)

    def resting(self, now: float) -> list[int]:
        """Return the slots to leave alone."""
        return [slot for slot, until in self._until.items() if now < until]
