"""Who has which prefix blocks.

Inverted: block hash → set of slots as the bits of an int, so that a lookup costs by blocks, not blocks × instances.
Only contiguous prefixes count: an engine cannot use block 3 without block 2. Each slot is bounded by what its engine
can hold and forgets its least recently used blocks first, the deep end of a chain before its head.

A block's hash is chained and so stands for all blocks before it: the deep part of a long prompt needs no mark at each.
The first ``_DENSE`` blocks are marked singly, behind them every ``_STRIDE``-th one. A match that ends there is short by
less than a stride, a few hundred tokens behind thousands; noting 100,000 tokens takes 0.1 ms instead of 1 ms.

Recency is kept by chain, not by block: a *touch* is one use of a chain, a block belongs to its latest touch, and what
is forgotten is looked for in the oldest touch.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

_DENSE = 64
_STRIDE = 8
_STALE = 3
"""Blocks that later touches have taken over, per block that the slot can hold, before they are cleared away."""


@dataclass(slots=True)
class _Touch:
    """One use of a chain; its first *left* marks have not been looked at."""

    number: int
    at: float
    marks: tuple[int, ...]
    left: int


@dataclass(slots=True)
class _Slot:
    """*latest*: mark → twice the number of its touch, and 1 where it stands for a stride of blocks, not for one.

    *touches* from the oldest, *touched* the marks in them; *held* the blocks that all marks stand for.
    """

    latest: dict[int, int] = field(default_factory=dict)
    touches: deque[_Touch] = field(default_factory=deque)
    touched: int = 0
    held: int = 0


class PrefixIndex:
    """Blocks believed cached, by slot. Times are seconds on the caller's clock."""

    def __init__(self, ttl_s: float) -> None:
        self._ttl_s = ttl_s
        self._holders: dict[int, int] = {}
        self._slots: dict[int, _Slot] = {}
        self._touches = 0
        self._blocks = 0

    def __len__(self) -> int:
        """Return distinct blocks, as far as marks stand for them."""
        return self._blocks

    def match(self, blocks: Sequence[int]) -> dict[int, int]:
        """Return slot → number of leading *blocks* that it holds; slots without any are left out."""
        found: dict[int, int] = {}
        alive = -1
        holders = self._holders
        marks = _marks(blocks)
        for place, mark in enumerate(marks):
            still = holders.get(mark, 0) & alive
            if still != alive:
                if place:
                    _note(found, alive & ~still, _depth(place))
                alive = still
                if not alive:
                    return found
        if alive > 0:
            _note(found, alive, _depth(len(marks)))
        return found

    def holds(self, slot: int, blocks: Sequence[int]) -> bool:
        """Tell whether *slot* is believed to hold all of *blocks*, as far as their marks tell."""
        unmarked = _STRIDE - 1 if len(blocks) > _DENSE else 0
        return len(blocks) - self.match(blocks).get(slot, 0) <= unmarked

    def insert(self, slot: int, blocks: Sequence[int], now: float, capacity: int) -> None:
        """Note that *slot* holds *blocks*, of which it can hold *capacity* in all."""
        one = self._slots.setdefault(slot, _Slot())
        marks = _marks(blocks[:capacity])
        if marks:
            self._touches += 1
            self._hold(slot, marks[:_DENSE], 1)
            self._hold(slot, marks[_DENSE:], _STRIDE)
            _belong(one, marks, 2 * self._touches)
            one.touches.append(_Touch(self._touches, now, marks, len(marks)))
            one.touched += len(marks)
        while one.held > capacity:
            self._forget_oldest(slot, one, one.held - capacity)
        if one.touched > (_STALE + 1) * capacity:
            _tidy(one)

    def discard(self, slot: int, blocks: Sequence[int]) -> None:
        """Take back that *slot* holds *blocks*."""
        one = self._slots.get(slot)
        if one is None:
            return
        for block in blocks:
            if (stamp := one.latest.pop(block, None)) is not None:
                one.held -= _worth(stamp)
                self._release(slot, block, _worth(stamp))

    def forget(self, slot: int) -> None:
        """Drop everything of *slot* (its engine restarted)."""
        one = self._slots.pop(slot, None)
        for mark, stamp in () if one is None else one.latest.items():
            self._release(slot, mark, _worth(stamp))

    def expire(self, now: float) -> None:
        """Drop what was last used longer ago than the time to live."""
        for slot, one in self._slots.items():
            while one.touches and now - one.touches[0].at > self._ttl_s:
                self._forget_oldest(slot, one, one.held + 1)

    def _hold(self, slot: int, marks: tuple[int, ...], blocks_each: int) -> None:
        holders, bit = self._holders, 1 << slot
        before = len(holders)
        for mark in marks:
            holders[mark] = holders.get(mark, 0) | bit
        self._blocks += blocks_each * (len(holders) - before)

    def _forget_oldest(self, slot: int, one: _Slot, least: int) -> None:
        """Drop at least *least* blocks of the oldest touch, the deep end first, and the touch once it has none left."""
        touch, latest, left = one.touches[0], one.latest, one.touches[0].left
        while left and least > 0:
            left -= 1
            mark = touch.marks[left]
            stamp = latest.get(mark, 0)
            if stamp >> 1 == touch.number:
                del latest[mark]
                blocks = _worth(stamp)
                one.held -= blocks
                least -= blocks
                self._release(slot, mark, blocks)
        touch.left = left
        if not left:
            one.touches.popleft()
            one.touched -= len(touch.marks)

    def _release(self, slot: int, mark: int, blocks: int) -> None:
        left = self._holders[mark] & ~(1 << slot)
        if left:
            self._holders[mark] = left
        else:
            del self._holders[mark]
            self._blocks -= blocks


def _note(found: dict[int, int], bits: int, depth: int) -> None:
    while bits:
        low = bits & -bits
        found[low.bit_length() - 1] = depth
        bits ^= low


def _worth(stamp: int) -> int:
    """Return how many blocks a mark with this stamp stands for."""
    return _STRIDE if stamp & 1 else 1


def _marks(blocks: Sequence[int]) -> tuple[int, ...]:
    if len(blocks) < _DENSE + _STRIDE:
        return tuple(blocks[:_DENSE])
    return (*blocks[:_DENSE], *blocks[_DENSE + _STRIDE - 1 :: _STRIDE])


def _depth(marks: int) -> int:
    """Return how many blocks the first *marks* marks of a chain stand for."""
    return marks if marks <= _DENSE else _DENSE + _STRIDE * (marks - _DENSE)


def _belong(one: _Slot, marks: tuple[int, ...], stamp: int) -> None:
    """Let all *marks* belong to the touch of *stamp*, and count the blocks of those that are new."""
    latest = one.latest
    before = len(latest)
    latest.update(dict.fromkeys(marks[:_DENSE], stamp))
    between = len(latest)
    latest.update(dict.fromkeys(marks[_DENSE:], stamp + 1))
    one.held += between - before + _STRIDE * (len(latest) - between)


def _tidy(one: _Slot) -> None:
    """Keep of each touch the marks that still belong to it."""
    kept: deque[_Touch] = deque()
    for touch in one.touches:
        marks = tuple(mark for mark in touch.marks[: touch.left] if one.latest.get(mark, 0) >> 1 == touch.number)
        if marks:
            kept.append(_Touch(touch.number, touch.at, marks, len(marks)))
    one.touches, one.touched = kept, sum(len(touch.marks) for touch in kept)
