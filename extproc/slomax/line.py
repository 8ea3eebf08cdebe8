"""Who waits at the gateway, and in which order they are looked at.

A queue holds requests that are *alike*: of one class, and alike in all that decides where they may run (model, tenant,
residency, subset). Where the first of a queue finds no room, those behind it find none either; other queues do not wait
for it. Looked at by class priority, then by arrival across all queues of that priority. The first to arrive is first
also when a request is offered again after a broken connection, since its first arrival time comes with it.
"""

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from sortedcontainers import SortedDict

from extproc.model import Request
from extproc.policy import ClassSpec

Like = tuple[str, str, str, frozenset[str] | None, frozenset[str] | None]
"""Class, model, tenant, residency, subset."""

_MOST_QUEUES = 256
"""Queues looked at on one change, the longest waiting first: callers may send any residency."""
_SLACK = 1024
"""Entries of requests that have left, which the list of deadlines may keep beside as many as wait."""


def like(request: Request, klass: ClassSpec) -> Like:
    """Return what decides where *request* may run, and its class."""
    return (klass.name, request.model, request.tenant, request.residency, request.subset)


@dataclass(frozen=True, slots=True)
class Waiting:
    """A request in the line. *until* is when its wait ends."""

    request: Request
    klass: ClassSpec
    until: float
    order: tuple[float, int]
    like: Like


class Line:
    """Held requests. Every operation is O(log n)."""

    def __init__(self) -> None:
        self._by_id: dict[str, Waiting] = {}
        self._queues: dict[Like, SortedDict[tuple[float, int], Waiting]] = {}
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
        one = Waiting(request, klass, until, (request.arrived, self._count), like(request, klass))
        self._by_id[request.id] = one
        self._queues.setdefault(one.like, SortedDict())[one.order] = one
        self._per_class[klass.name] = self._per_class.get(klass.name, 0) + 1
        heapq.heappush(self._expiry, (until, request.id))
        return one

    def remove(self, request_id: str) -> Waiting | None:
        """Take a request out; ``None`` when it does not wait."""
        one = self._by_id.pop(request_id, None)
        if one is None:
            return None
        queue = self._queues[one.like]
        del queue[one.order]
        if not queue:
            del self._queues[one.like]
        self._per_class[one.klass.name] -= 1
        if len(self._expiry) > 2 * len(self._by_id) + _SLACK:
            self._expiry = [(waiting.until, name) for name, waiting in self._by_id.items()]
            heapq.heapify(self._expiry)
        return one

    def has_like(self, request: Request, klass: ClassSpec) -> bool:
        """Tell whether somebody waits who may run exactly where *request* may."""
        return bool(self._by_id) and like(request, klass) in self._queues

    def heads(self, look_ahead: int, worth: Callable[[str], bool]) -> Iterator[Waiting]:
        """Yield those to be looked at, in order: the first *look_ahead* of each queue whose model is *worth* it."""
        models = {model: worth(model) for model in {name for _, name, *_ in self._queues}}
        firsts = [queue.peekitem(0)[1] for key, queue in self._queues.items() if models[key[1]]]
        firsts.sort(key=lambda one: (-one.klass.priority, one.order))
        by_priority: dict[int, list[list[Waiting]]] = {}
        for first in firsts[:_MOST_QUEUES]:
            queue = self._queues[first.like]
            by_priority.setdefault(first.klass.priority, []).append(list(queue.values()[:look_ahead]))
        for queues in by_priority.values():
            yield from heapq.merge(*queues, key=lambda one: one.order)

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
