"""Who waits at the gateway, and in which order they are looked at.

One queue per class and model, so that a model without room never blocks another one. Queues are looked at by class
priority, then by the first arrival in them; inside a queue the first to arrive is first, also when a request is offered
again after a broken connection, since its first arrival time comes with it.
"""

import heapq
from collections.abc import Iterator
from dataclasses import dataclass

from sortedcontainers import SortedDict

from extproc.model import Request
from extproc.policy import ClassSpec


@dataclass(frozen=True, slots=True)
class Waiting:
    """A request in the line. *until* is when its wait ends."""

    request: Request
    klass: ClassSpec
    until: float
    order: tuple[float, int]


class Line:
    """Held requests. Every operation is O(log n)."""

    def __init__(self) -> None:
        self._by_id: dict[str, Waiting] = {}
        self._queues: dict[tuple[str, str], SortedDict[tuple[float, int], Waiting]] = {}
        self._per_class: dict[str, int] = {}
        self._expiry: list[tuple[float, str]] = []
        self._count = 0

    def __len__(self) -> int:
        return len(self._by_id)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._by_id

    def get(self, request_id: str) -> Waiting | None:
        """Return how this request waits; ``None`` when it does not."""
        return self._by_id.get(request_id)

    def of_class(self, name: str) -> int:
        """Return how many of this class wait."""
        return self._per_class.get(name, 0)

    def counts(self) -> dict[str, int]:
        """Return class → waiting."""
        return dict(self._per_class)

    def add(self, request: Request, klass: ClassSpec, until: float) -> Waiting:
        """Let *request* wait until *until* at most."""
        self._count += 1
        one = Waiting(request, klass, until, (request.arrived, self._count))
        self._by_id[request.id] = one
        self._queues.setdefault((klass.name, request.model), SortedDict())[one.order] = one
        self._per_class[klass.name] = self._per_class.get(klass.name, 0) + 1
        heapq.heappush(self._expiry, (until, request.id))
        return one

    def remove(self, request_id: str) -> Waiting | None:
        """Take a request out; ``None`` when it does not wait."""
        one = self._by_id.pop(request_id, None)
        if one is None:
            return None
        key = (one.klass.name, one.request.model)
        queue = self._queues[key]
        del queue[one.order]
        if not queue:
            del self._queues[key]
        self._per_class[one.klass.name] -= 1
        return one

    def heads(self, look_ahead: int) -> Iterator[list[Waiting]]:
        """Yield the first *look_ahead* of each queue, in the order in which they are looked at."""
        order = sorted(self._queues.values(), key=lambda q: (-q.peekitem(0)[1].klass.priority, q.keys()[0]))
        for queue in order:
            yield list(queue.values()[:look_ahead])

    def expired(self, now: float) -> list[Waiting]:
        """Take out and return those whose wait is over, the longest overdue first."""
        over = []
        while self._expiry and self._expiry[0][0] <= now:
            until, request_id = heapq.heappop(self._expiry)
            one = self._by_id.get(request_id)
            if one is not None and one.until == until:
                self.remove(request_id)
                over.append(one)
        return over
