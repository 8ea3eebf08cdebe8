"""Which KV blocks are live, which are idle but still hold a known prefix, and which goes first when room is needed.

A block is *live* while a request holds it, else *idle*; an idle one keeps its name (the hash of the prefix it ends)
until it is the least recently used and its room is needed. Unnamed blocks are counted, not listed: nobody can match
them, so only their number and their place in the eviction order matter.

Invariant: ``empty + idle + live == capacity`` and every live name has at least one holder.
"""

from collections import OrderedDict
from collections.abc import Hashable, Sequence


class BlockPool:
    """KV blocks of one engine.

    Parameters
    ----------
    capacity
        Blocks in all.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.evictions = 0
        self.releases = 0
        """Times that blocks were given back; a request that did not fit is worth another look when this changes."""
        self._empty = capacity
        self._holders: dict[Hashable, int] = {}
        self._unnamed = 0
        self._idle: OrderedDict[Hashable, int] = OrderedDict()
        self._idle_blocks = 0

    @property
    def available(self) -> int:
        """Blocks that can be had now: empty or idle."""
        return self._empty + self._idle_blocks

    @property
    def live(self) -> int:
        """Blocks that requests hold; the engine's ``kv_cache_usage_perc`` counts these alone."""
        return self.capacity - self.available

    def holders(self, name: Hashable) -> int:
        """Return how many requests hold the block *name*; 0 when it is idle or unknown."""
        return self._holders.get(name, 0)

    def match(self, names: Sequence[Hashable]) -> int:
        """Return how many of *names*, counted from the first without a gap, are cached."""
        for index, name in enumerate(names):
            if name not in self._holders and name not in self._idle:
                return index
        return len(names)

    def idle_among(self, names: Sequence[Hashable]) -> int:
        """Return how many of *names* are idle: taking them uses up room, sharing a live one does not."""
        return sum(name in self._idle for name in names)

    def share(self, names: Sequence[Hashable]) -> None:
        """Hold the cached blocks *names*, each once more."""
        for name in names:
            if self._idle.pop(name, 0):
                self._idle_blocks -= 1
                self._holders[name] = 1
            else:
                self._holders[name] += 1

    def grow(self, count: int) -> None:
        """Make *count* unnamed blocks live, evicting the least recently used idle ones as needed."""
        if count > self.available:
            raise ValueError(f"{count} blocks wanted, {self.available} available")
        while self._empty < count:
            self._evict(count - self._empty)
        self._empty -= count
        self._unnamed += count

    def name(self, name: Hashable) -> bool:
        """Name one live unnamed block; ``False`` (and the block stays unnamed) when another copy of it is live.

        An idle copy gives way and its block becomes empty: the prefix is as fresh as its latest use.
        """
        if name in self._holders:
            return False
        if self._idle.pop(name, 0):
            self._idle_blocks -= 1
            self._empty += 1
        self._unnamed -= 1
        self._holders[name] = 1
        return True

    def release(self, names: Sequence[Hashable], unnamed: int) -> None:
        """Give back one request's blocks: *unnamed* ones and *names* (first to last).

        The end of a prefix becomes evictable before its beginning, as in vLLM.
        """
        self.releases += 1
        if unnamed:
            self._idle[object()] = unnamed
            self._idle_blocks += unnamed
            self._unnamed -= unnamed
        for name in reversed(names):
            left = self._holders[name] - 1
            if left:
                self._holders[name] = left
            else:
                del self._holders[name]
                self._idle[name] = 1
                self._idle_blocks += 1

    def clear(self) -> None:
        """Forget every idle block, as a restart does."""
        self._empty += self._idle_blocks
        self._idle.clear()
        self._idle_blocks = 0

    def _evict(self, wanted: int) -> None:
        key, size = self._idle.popitem(last=False)
        taken = min(size, wanted)
        if taken < size:
            self._idle[key] = size - taken
            self._idle.move_to_end(key, last=False)
        self._idle_blocks -= taken
        self._empty += taken
        self.evictions += taken
