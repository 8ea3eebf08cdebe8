"""Who has which prefix blocks.

Inverted: block hash → set of slots as the bits of an int, so that a lookup costs by blocks, not blocks × instances.
Only contiguous prefixes count: an engine cannot use block 3 without block 2. Each slot is bounded by what its engine
can hold and forgets its least recently used blocks first, the deep end of a chain before its head.
"""

from collections import OrderedDict
from collections.abc import Sequence


class PrefixIndex:
    """Blocks believed cached, by slot. Times are seconds on the caller's clock."""

    def __init__(self, ttl_s: float) -> None:
        self._ttl_s = ttl_s
        self._holders: dict[int, int] = {}
        self._used: dict[int, OrderedDict[int, float]] = {}

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
        used = self._used.setdefault(slot, OrderedDict())
        bit = 1 << slot
        holders = self._holders
        for block in reversed(blocks[:capacity]):  # heads last: they become the most recently used
            if block in used:
                used.move_to_end(block)
            else:
                holders[block] = holders.get(block, 0) | bit
            used[block] = now
        while len(used) > capacity:
            self._release(slot, used.popitem(last=False)[0])

    def discard(self, slot: int, blocks: Sequence[int]) -> None:
        """Take back that *slot* holds *blocks*."""
        used: dict[int, float] = self._used.get(slot, OrderedDict())
        for block in blocks:
            if used.pop(block, None) is not None:
                self._release(slot, block)

    def forget(self, slot: int) -> None:
        """Drop everything of *slot* (its engine restarted)."""
        for block in self._used.pop(slot, ()):
            self._release(slot, block)

    def expire(self, now: float) -> None:
        """Drop what was last used longer ago than the time to live."""
        for slot, used in self._used.items():
            while used and now - next(iter(used.values())) > self._ttl_s:
                self._release(slot, used.popitem(last=False)[0])

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
