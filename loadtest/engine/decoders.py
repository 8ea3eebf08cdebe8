"""The decoding requests, counted together: each step gives every one of them a token.

Steps that decode are numbered by *ticks*; a request's tokens and blocks follow from the tick at which it joined, so a
step, or a thousand of them, costs the same whatever the batch. A request needs a new KV block once every
``block_tokens`` ticks; ``_phases`` counts the requests by the tick, modulo the block, at which they do.
"""

from heapq import heappop, heappush

from loadtest.engine.request import Progress


class Decoders:
    """The decoding part of the batch."""

    def __init__(self, block_tokens: int) -> None:
        self.count = 0
        self.kv_tokens = 0
        """Tokens in the KV cache of all, as of the last finished tick."""
        self._block = block_tokens
        self._begun = 0
        self._done = 0
        self._phases = [0] * block_tokens
        self._members: dict[tuple[int, int], Progress] = {}
        self._ends: list[tuple[int, tuple[int, int]]] = []

    def join(self, progress: Progress) -> None:
        """Add a request whose prefill has just ended; only between steps."""
        progress.joined = self._done
        progress.ends = self._done + progress.request.output_tokens - progress.generated
        self._phases[(progress.joined - progress.kv) % self._block] += 1
        self.count += 1
        self.kv_tokens += progress.kv
        self._members[progress.order] = progress
        heappush(self._ends, (progress.ends, progress.order))

    def leave(self, progress: Progress) -> None:
        """Take a request out, at any time, and settle its counts."""
        del self._members[progress.order]
        self._phases[(progress.joined - progress.kv) % self._block] -= 1
        self.count -= 1
        self.kv_tokens -= self.kv_of(progress)
        progress.held = self.blocks_of(progress)
        progress.kv, progress.generated = self.kv_of(progress), self.generated_of(progress)
        progress.joined = -1

    def kv_of(self, progress: Progress) -> int:
        """Return the tokens that a member has in the KV cache."""
        return progress.kv + self._done - progress.joined

    def generated_of(self, progress: Progress) -> int:
        """Return the tokens that a member has produced."""
        return progress.generated + self._done - progress.joined

    def blocks_of(self, progress: Progress) -> int:
        """Return the blocks that a member holds, the one for the step under way included."""
        return -(-(progress.kv + self._begun - progress.joined) // self._block)

    def need(self, ticks: int) -> int:
        """Return the blocks that the next *ticks* ticks take."""
        whole, rest = divmod(ticks, self._block)
        first = self._begun % self._block
        wrapped = max(0, first + rest - self._block)
        part = sum(self._phases[first : first + rest]) + sum(self._phases[:wrapped])
        return whole * self.count + part

    def begin(self, ticks: int = 1) -> None:
        """Begin the next *ticks*; their blocks are taken."""
        self._begun += ticks

    def finish(self) -> list[Progress]:
        """End all ticks begun; return the members that have all their tokens, in order of arrival, still members."""
        self.kv_tokens += self.count * (self._begun - self._done)
        self._done = self._begun
        finished: list[Progress] = []
        while self._first_end() == self._done:
            progress = self._members[heappop(self._ends)[1]]
            if progress not in finished[-1:]:  # one that left and joined again may be listed twice
                finished.append(progress)
        return finished

    def ticks_left(self) -> int:
        """Return the ticks until the next member has all its tokens; there must be a member."""
        return self._first_end() - self._done

    def _first_end(self) -> int:
        """Return the earliest end, forgetting those of requests that have left; −1 when there is none."""
        while self._ends:
            end, order = self._ends[0]
            if order in self._members and self._members[order].ends == end:
                return end
            heappop(self._ends)
        return -1
