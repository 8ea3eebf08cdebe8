"""Requests that wait for the batch, in the order in which they may enter it."""

from collections.abc import Hashable, Iterator
from heapq import heappop, heappush

from loadtest.engine.request import Progress


class Line:
    """A queue by ``Progress.order``; a preempted request keeps its place and so comes before later arrivals."""

    def __init__(self) -> None:
        self._members: dict[Hashable, Progress] = {}
        self._heap: list[tuple[tuple[int, int], Hashable]] = []

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[Progress]:
        return iter(self._members.values())

    def __contains__(self, request_id: Hashable) -> bool:
        return request_id in self._members

    def __getitem__(self, request_id: Hashable) -> Progress:
        return self._members[request_id]

    def push(self, progress: Progress) -> None:
        """Add *progress*."""
        self._members[progress.request.id] = progress
        heappush(self._heap, (progress.order, progress.request.id))

    def first(self) -> Progress | None:
        """Return who is next."""
        while self._heap:
            order, request_id = self._heap[0]
            progress = self._members.get(request_id)
            if progress is not None and progress.order == order:
                return progress
            heappop(self._heap)
        return None

    def remove(self, request_id: Hashable) -> Progress | None:
        """Take *request_id* out, wherever it stands; ``None`` if it does not wait."""
        return self._members.pop(request_id, None)
