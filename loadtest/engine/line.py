"""Requests that wait for the batch, in the order in which they may enter it.

One that has just arrived is still *in front* (HTTP, tokenising) and joins the queue when it is ready.
"""

from collections.abc import Hashable, Iterator
from heapq import heappop, heappush

from loadtest.engine.request import Progress


class Line:
    """A queue by ``Progress.order``; a preempted request keeps its place and so comes before later arrivals."""

    def __init__(self) -> None:
        self._members: dict[Hashable, Progress] = {}
        self._heap: list[tuple[tuple[int, int], Hashable]] = []
        self._front: list[tuple[float, tuple[int, int], Hashable]] = []

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[Progress]:
        return iter(self._members.values())

    def __contains__(self, request_id: Hashable) -> bool:
        return request_id in self._members

    def __getitem__(self, request_id: Hashable) -> Progress:
        return self._members[request_id]

    def arrive(self, progress: Progress, ready: float) -> None:
        """Add a new request that may be scheduled from *ready* on."""
        self._members[progress.request.id] = progress
        heappush(self._front, (ready, progress.order, progress.request.id))

    def admit_ready(self, now: float) -> None:
        """Queue those that are ready by *now*."""
        while self._front and self._front[0][0] <= now:
            _, order, request_id = heappop(self._front)
            heappush(self._heap, (order, request_id))

    def next_ready(self) -> float | None:
        """Return when the next one in front will be ready."""
        while self._front and not self._is_current(*self._front[0][1:]):
            heappop(self._front)
        return self._front[0][0] if self._front else None

    def push(self, progress: Progress) -> None:
        """Queue one that was in the batch before."""
        self._members[progress.request.id] = progress
        heappush(self._heap, (progress.order, progress.request.id))

    def first(self) -> Progress | None:
        """Return who is next."""
        while self._heap:
            order, request_id = self._heap[0]
            if self._is_current(order, request_id):
                return self._members[request_id]
            heappop(self._heap)
        return None

    def remove(self, request_id: Hashable) -> Progress | None:
        """Take *request_id* out, wherever it stands; ``None`` if it does not wait."""
        return self._members.pop(request_id, None)

    def _is_current(self, order: tuple[int, int], request_id: Hashable) -> bool:
        progress = self._members.get(request_id)
        return progress is not None and progress.order == order
