"""Who has which prefix blocks.

Inverted: block hash → set of slots as the bits of an int, so that a lookup costs by blocks, not blocks × instances.
Only contiguous prefixes count: an engine cannot use block 3 without block 2. Each slot is bounded by what its engine
can hold and forgets its least recently used blocks first, the deep end of a chain before its head.

Recency is kept by chain, not by block: a *touch* is one use of a chain, a block belongs to its latest touch, and what
is forgotten is looked for in the oldest touch. So a use costs a few bulk operations however long the chain is.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

_STALE = 3
"""Blocks that later touches have taken over, per block that the slot can hold, before they are cleared away."""


@dataclass(slots=True)
class _Touch:
    """One use of a chain; its first *left* blocks have not been looked at."""

    number: int
    at: float
    blocks: tuple[int, ...]
    left: int


@dataclass(slots=True)
class _Slot:
    """*latest*: block → number of the touch that it belongs to. *touches* from the oldest, *touched* their blocks."""

    latest: dict[int, int] = field(default_factory=dict)
    touches: deque[_Touch] = field(default_factory=deque)
    touched: int = 0


class PrefixIndex:
    """Blocks believed cached, by slot. Times are seconds on the caller's clock."""

    def __init__(self, ttl_s: float) -> None:
        self._ttl_s = ttl_s
        self._holders: dict[int, int] = {}
        self._slots: dict[int, _Slot] = {}
        self._touches = 0

    def __len__(self) -> int:
        return len(self._holders)

    def match(self, blocks: Sequence[int]) -> dict[int, int]:
        """Return slot → number of leading *blocks* that it holds; slots without any are left out."""
        found: dict[int, int] = {}
        alive = -1
        holders = self._holders
        depth = 0
        for depth, block in enumerate(blocks):
            still = holders.get(block, 0) & alive
            if still != alive:
                if depth:
                    _note(found, alive & ~still, depth)
                alive = still
                if not alive:
                    return found
        if alive > 0:
            _note(found, alive, depth + 1)
        return found

    def insert(self, slot: int, blocks: Sequence[int], now: float, capacity: int) -> None:
        """Note that *slot* holds *blocks*, of which it can hold *capacity* in all."""
        one = self._slots.setdefault(slot, _Slot())
        chain = tuple(blocks[:capacity])
        if chain:
            self._hold(slot, chain)
            self._touches += 1
            one.latest.update(dict.fromkeys(chain, self._touches))
            one.touches.append(_Touch(self._touches, now, chain, len(chain)))
            one.touched += len(chain)
        while len(one.latest) > capacity:
            self._forget_oldest(slot, one, len(one.latest) - capacity)
        if one.touched > (_STALE + 1) * capacity:
            _tidy(one)

    def discard(self, slot: int, blocks: Sequence[int]) -> None:
        """Take back that *slot* holds *blocks*."""
        one = self._slots.get(slot)
        if one is None:
            return
        for block in blocks:
            if one.latest.pop(block, None) is not None:
                self._release(slot, block)

    def forget(self, slot: int) -> None:
        """Drop everything of *slot* (its engine restarted)."""
        one = self._slots.pop(slot, None)
        for block in () if one is None else one.latest:
            self._release(slot, block)

    def expire(self, now: float) -> None:
        """Drop what was last used longer ago than the time to live."""
        for slot, one in self._slots.items():
            while one.touches and now - one.touches[0].at > self._ttl_s:
                self._forget_oldest(slot, one, one.touches[0].left)

    def _hold(self, slot: int, chain: tuple[int, ...]) -> None:
        holders, bit = self._holders, 1 << slot
        for block in chain:
            holders[block] = holders.get(block, 0) | bit

    def _forget_oldest(self, slot: int, one: _Slot, most: int) -> None:
        """Drop at most *most* blocks of the oldest touch, the deep end first; drop the touch once it has none left."""
        touch, latest, holders, others = one.touches[0], one.latest, self._holders, ~(1 << slot)
        blocks, number, left = touch.blocks, touch.number, touch.left
        while left and most:
            left -= 1
            block = blocks[left]
            if latest.get(block) == number:
                del latest[block]
                if still := holders[block] & others:
                    holders[block] = still
                else:
                    del holders[block]
                most -= 1
        touch.left = left
        if not touch.left:
            one.touches.popleft()
            one.touched -= len(touch.blocks)

    def _release(self, slot: int, block: int) -> None:
        left = self._holders[block] & ~(1 << slot)
        if left:
            self._holders[block] = left
        else:
            del self._holders[block]


def _note(found: dict[int, int], bits: int, depth: int) -> None:
    while bits:
        low = bits & -bits
        found[low.bit_length() - 1] = depth
        bits ^= low


def _tidy(one: _Slot) -> None:
    """Keep of each touch the blocks that still belong to it."""
    kept: deque[_Touch] = deque()
    for touch in one.touches:
        blocks = tuple(block for block in touch.blocks[: touch.left] if one.latest.get(block) == touch.number)
        if blocks:
            kept.append(_Touch(touch.number, touch.at, blocks, len(blocks)))
    one.touches, one.touched = kept, sum(len(touch.blocks) for touch in kept)
