"""A continuous-batching inference engine in virtual time.

Each step decodes one token of every decoding request and spends what is left of the token budget on prefill chunks:
first of requests already running, then of waiting ones, in order. What a step does is settled when it begins, so a
request that arrives meanwhile waits for the next. When KV blocks run out the request that would run last is preempted
and computed anew later. This is vLLM's V1 scheduler without speculation, adapters and images.

Nothing here reads a clock. The caller moves time with :meth:`Core.advance`, before every :meth:`Core.submit` and
:meth:`Core.abort` at the same ``now``. A run of steps that only decode is advanced in one go: cost grows with requests
and prefill chunks, not with output tokens. Invariant: each request submitted ends in exactly one :class:`Timing`, and
with none left no block is live.
"""

import math
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Literal

from extproc.model import Profile
from loadtest.engine.blocks import BlockPool
from loadtest.engine.decoders import Decoders
from loadtest.engine.line import Line
from loadtest.engine.pace import decode_s, decode_steps, step_s
from loadtest.engine.request import Ending, EngineEvent, EngineRequest, FirstToken, Progress, Timing, Totals

Order = Literal["fcfs", "priority"]


@dataclass(slots=True)
class _Step:
    """A step under way."""

    end: float
    chunks: list[tuple[Progress, int]]


class Core:
    """One engine.

    Parameters
    ----------
    profile
        Timing and sizes; ``kv_tokens // block_tokens`` blocks, at most ``max_running`` requests in a step.
    order
        ``fcfs`` ignores priorities, as vLLM does by default.
    slowdown
        Factor on every step's time; may be changed between calls.
    """

    def __init__(self, profile: Profile, order: Order = "fcfs", slowdown: float = 1.0) -> None:
        if profile.a_ms + profile.c_ms <= 0:
            raise ValueError("a step must take time: a_ms and c_ms are both 0")
        if profile.max_running > profile.batch_tokens:
            raise ValueError("every running request needs a token of the budget: max_running > batch_tokens")
        self.profile = profile
        self.order: Order = order
        self.slowdown = slowdown
        self.totals = Totals()
        self.pool = BlockPool(profile.kv_tokens // profile.block_tokens)
        self._clock = 0.0
        self._arrivals = 0
        self._waiting = Line()
        self._running: dict[Hashable, Progress] = {}
        self._prefilling: dict[Hashable, Progress] = {}
        self._decoders = Decoders(profile.block_tokens)
        self._step: _Step | None = None
        self._nameable: dict[Hashable, Progress] = {}
        """Decoding requests with blocks still to be named."""
        self._blocked: tuple[tuple[int, int], int] | None = None
        """First of the line and the pool's count of releases when it did not fit."""
        self._events: list[EngineEvent] = []

    # --- what can be seen ---------------------------------------------------------------------------------------------

    @property
    def waiting(self) -> int:
        """Requests that are not running."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """Requests in the batch."""
        return len(self._running)

    @property
    def kv_usage(self) -> float:
        """Share of blocks that live requests hold."""
        return self.pool.live / self.pool.capacity

    @property
    def backlog_tokens(self) -> int:
        """Prompt tokens not computed yet, as if none were cached."""
        return sum(p.target for p in self._waiting) + sum(p.target - p.kv for p in self._prefilling.values())

    @property
    def step_end(self) -> float | None:
        """When the step under way ends; ``None`` between steps."""
        return self._step.end if self._step else None

    def generated(self, request_id: Hashable) -> int:
        """Return the tokens that the live request *request_id* has produced."""
        return self._generated(self._live(request_id))

    def has_started(self, request_id: Hashable) -> bool:
        """Return whether the live request *request_id* has been scheduled at least once."""
        return self._live(request_id).started is not None

    # --- what can be done ---------------------------------------------------------------------------------------------

    def submit(self, request: EngineRequest, now: float) -> None:
        """Queue *request*.

        Raises
        ------
        ValueError
            The request can never fit into the KV cache, is empty, or its id is in use.
        """
        if request.prompt_tokens < 1 or request.output_tokens < 1:
            raise ValueError("a request has at least one prompt token and one output token")
        if self._blocks_for(request.prompt_tokens + request.output_tokens - 1) > self.pool.capacity:
            raise ValueError(f"prompt and answer exceed the KV cache of {self.profile.kv_tokens} tokens")
        if request.id in self._waiting or request.id in self._running:
            raise ValueError(f"request {request.id!r} is in the engine already")
        self._arrivals += 1
        rank = request.priority if self.order == "priority" else 0
        names = request.blocks[: request.prompt_tokens // self.profile.block_tokens] + request.output_blocks
        progress = Progress(request, (rank, self._arrivals), now, names, request.prompt_tokens)
        self._waiting.arrive(progress, now + self.profile.front_s(request.prompt_tokens))

    def abort(self, request_id: Hashable, now: float) -> Timing | None:
        """Drop a request and free its blocks at once; ``None`` if it has ended already.

        A step under way keeps its length: the GPU is not interrupted.
        """
        if progress := self._waiting.remove(request_id):
            return self._end(progress, now, "aborted")
        if progress := self._running.get(request_id):
            self._leave(progress)
            return self._end(progress, now, "aborted")
        return None

    def advance(self, until: float) -> list[EngineEvent]:
        """Finish every step that ends by *until* and begin the one that *until* falls into.

        Returns what happened, in order.
        """
        while True:
            if self._step is None:
                ready = self._look_in_front()
                if self._clock >= until or not (self._running or self._waiting):
                    break
                if self._decode_many(until if ready is None else min(until, ready)):
                    continue
                self._begin()
            if self._step is None or self._step.end > until:
                break
            self._finish(self._step)
        events, self._events = self._events, []
        return events

    def wake(self) -> float | None:
        """Return when :meth:`advance` is next worth calling if nothing is submitted; never later than the next event.

        ``None`` when idle. It may be early; then nothing happens and the next answer is later.
        """
        if self._step is not None:
            return self._step.end
        ready = self._look_in_front()
        if not (self._running or self._waiting):
            return None
        soonest = math.nextafter(self._clock, math.inf)
        steps = self._steady_steps()
        if steps == 0:
            return soonest
        end = self._clock + self._decode_s(steps)
        return end if ready is None else min(end, max(ready, soonest))

    # --- a step -------------------------------------------------------------------------------------------------------

    def _look_in_front(self) -> float | None:
        """Queue who is ready when the next step may begin; return when the next one after that will be."""
        if not self._running and not self._waiting.first() and (ready := self._waiting.next_ready()) is not None:
            self._clock = max(self._clock, ready)
        self._waiting.admit_ready(self._clock)
        return self._waiting.next_ready()

    def _begin(self) -> None:
        """Settle what the next step does."""
        preempted = self._grow_decoders()
        budget = self.profile.batch_tokens - self._decoders.count
        chunks: list[tuple[Progress, int]] = []
        for progress in list(self._prefilling.values()):
            new = min(progress.target - progress.kv, budget)
            if new and self._is_prefilling(progress):
                preempted |= self._grow(progress, new)
                chunks.append((progress, new))
                budget -= new
        while budget and not preempted and (first := self._admissible()):
            new = self._admit(first, budget)
            if new:
                chunks.append((first, new))
            budget -= new
        chunks = [(p, new) for p, new in chunks if self._is_prefilling(p)]
        self._step = _Step(self._clock + self._step_s(chunks), chunks)

    def _finish(self, step: _Step) -> None:
        """Collect what the step under way has computed."""
        self._clock, self._step = step.end, None
        self.totals.steps += 1
        self.totals.generated += self._decoders.count
        self._complete(self._decoders.finish())
        for progress, new in step.chunks:
            if self._is_prefilling(progress):
                self._prefilled(progress, new)

    def _decode_many(self, until: float) -> bool:
        """Do at once the decode steps that end by *until* and need no decision; ``False`` if there is none."""
        most = self._steady_steps()
        if not most:
            return False
        seconds = (until - self._clock) / self.slowdown
        fit = decode_steps(self.profile, seconds, self._decoders.count, self._decoders.kv_tokens)
        steps = most if fit >= most else int(fit)
        while steps < most and self._clock + self._decode_s(steps + 1) <= until:
            steps += 1
        while steps and self._clock + self._decode_s(steps) > until:
            steps -= 1
        if not steps:
            return False
        self._clock += self._decode_s(steps)
        self.totals.steps += steps
        self.totals.generated += steps * self._decoders.count
        self.pool.grow(self._decoders.need(steps))
        self._decoders.begin(steps)
        self._complete(self._decoders.finish())
        return True

    def _steady_steps(self) -> int:
        """Return how many of the next steps only decode the same requests; the last of them may end one."""
        if self._prefilling or not self._decoders.count or self._admissible():
            return 0
        steps = self._decoders.ticks_left()
        while steps and self._decoders.need(steps) > self.pool.available:
            steps //= 2
        return steps

    def _step_s(self, chunks: list[tuple[Progress, int]]) -> float:
        running = self._decoders.count + len(chunks)
        kv_tokens = self._decoders.kv_tokens + sum(p.kv for p, _ in chunks)
        return self.slowdown * step_s(self.profile, running, kv_tokens, ((new, p.kv) for p, new in chunks))

    def _decode_s(self, steps: int) -> float:
        return self.slowdown * decode_s(self.profile, steps, self._decoders.count, self._decoders.kv_tokens)

    # --- who runs -----------------------------------------------------------------------------------------------------

    def _admissible(self) -> Progress | None:
        """Return the first of the waiting unless the batch is full or it is known not to fit."""
        if len(self._running) >= self.profile.max_running:
            return None
        first = self._waiting.first()
        if first is None or self._blocked == (first.order, self.pool.releases):
            return None
        return first

    def _admit(self, progress: Progress, budget: int) -> int:
        """Move the first of the waiting into the batch; return the size of its first chunk, 0 if it does not fit."""
        block = self.profile.block_tokens
        for decoding in self._nameable.values():
            self._name(decoding, self._decoders.kv_of(decoding))
        # The last token is always computed: its output is the first token.
        whole = progress.names[: (progress.target - 1) // block]
        found = whole[: self.pool.match(whole)]
        new = min(progress.target - len(found) * block, budget)
        held = self._blocks_for(len(found) * block + new)
        if held - len(found) + self.pool.idle_among(found) > self.pool.available:
            self._blocked = (progress.order, self.pool.releases)
            return 0
        self.pool.share(found)
        self.pool.grow(held - len(found))
        progress.owned, progress.named, progress.held = list(found), len(found), held
        progress.kv = len(found) * block
        self._started(progress)
        return new

    def _started(self, progress: Progress) -> None:
        request_id = progress.request.id
        self._waiting.remove(request_id)
        self._running[request_id] = self._prefilling[request_id] = progress
        if progress.started is None:
            progress.started, progress.cached = self._clock, progress.kv
            self.totals.prompt += progress.request.prompt_tokens
            self.totals.cached += progress.cached
        elif again := max(0, progress.lost - progress.kv):
            progress.wasted += again
            self.totals.wasted += again

    def _grow_decoders(self) -> bool:
        """Take the blocks for one more token of each decoding request; return whether somebody had to go."""
        preempted = False
        while self._decoders.need(1) > self.pool.available:
            self._preempt(self._last())
            preempted = True
        self.pool.grow(self._decoders.need(1))
        self._decoders.begin(1 if self._decoders.count else 0)
        return preempted

    def _grow(self, progress: Progress, new: int) -> bool:
        """Take the blocks for *new* more prompt tokens; return whether somebody, maybe *progress* itself, had to go."""
        held = self._blocks_for(progress.kv + new)
        preempted = False
        while held - progress.held > self.pool.available:
            victim = self._last()
            self._preempt(victim)
            preempted = True
            if victim is progress:
                return True
        self.pool.grow(held - progress.held)
        progress.held = held
        return preempted

    def _last(self) -> Progress:
        """Return who runs last: the latest to start, or under priority order the least important, latest to arrive."""
        if self.order == "fcfs":
            return next(reversed(self._running.values()))
        return max(self._running.values(), key=lambda progress: progress.order)

    def _preempt(self, progress: Progress) -> None:
        self._leave(progress)
        progress.lost, progress.kv, progress.held = progress.kv, 0, 0
        progress.target = progress.request.prompt_tokens + progress.generated
        progress.preemptions += 1
        self.totals.preemptions += 1
        self._waiting.push(progress)

    # --- what becomes of it -------------------------------------------------------------------------------------------

    def _prefilled(self, progress: Progress, new: int) -> None:
        """Count a chunk; at the end of the prefill its first token appears."""
        progress.kv += new
        progress.prefilled += new
        self.totals.prefilled += new
        self._name(progress, progress.kv)
        if progress.kv < progress.target:
            return
        progress.generated += 1
        self.totals.generated += 1
        if progress.first_token is None:
            progress.first_token = self._clock
            self._events.append(FirstToken(progress.request.id, self._clock, progress.cached))
        if progress.generated == progress.request.output_tokens:
            self._complete([progress])
            return
        del self._prefilling[progress.request.id]
        self._decoders.join(progress)
        if progress.named < len(progress.names):
            self._nameable[progress.request.id] = progress

    def _complete(self, finished: list[Progress]) -> None:
        for progress in finished:
            self._leave(progress)
            self._events.append(self._end(progress, self._clock, "completed"))

    def _leave(self, progress: Progress) -> None:
        """Take a request out of the batch and give its blocks back."""
        request_id = progress.request.id
        del self._running[request_id]
        self._prefilling.pop(request_id, None)
        self._nameable.pop(request_id, None)
        if progress.decoding:
            self._decoders.leave(progress)
            self._name(progress, progress.kv)
        self.pool.release(progress.owned, progress.held - len(progress.owned))
        progress.owned, progress.named = [], 0

    def _name(self, progress: Progress, kv_tokens: int) -> None:
        """Name the blocks that are full now, so that others find them."""
        full = min(kv_tokens // self.profile.block_tokens, len(progress.names))
        for name in progress.names[progress.named : full]:
            if self.pool.name(name):
                progress.owned.append(name)
        progress.named = max(progress.named, full)

    def _end(self, progress: Progress, now: float, ending: Ending) -> Timing:
        if ending == "completed":
            self.totals.completed += 1
        else:
            self.totals.aborted += 1
            computed = progress.prefilled + progress.generated
            self.totals.wasted += computed - progress.wasted
            progress.wasted = computed
        return progress.timing(now, ending)

    def _generated(self, progress: Progress) -> int:
        return self._decoders.generated_of(progress) if progress.decoding else progress.generated

    def _live(self, request_id: Hashable) -> Progress:
        return self._running.get(request_id) or self._waiting[request_id]

    def _is_prefilling(self, progress: Progress) -> bool:
        return self._prefilling.get(progress.request.id) is progress

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.profile.block_tokens)
