"""What the engine is asked for, what it keeps of it while it runs, and what it says about it at the end.

Times are seconds of the engine's virtual clock, sizes are tokens.
"""

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Literal

Ending = Literal["completed", "aborted"]


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One generation. *output_tokens* is its true length: the engine stops there, as a model would at its end token."""

    id: Hashable
    prompt_tokens: int
    output_tokens: int = 1
    blocks: tuple[Hashable, ...] = ()
    """Chained names of the prompt's whole KV blocks, first to last."""
    output_blocks: tuple[Hashable, ...] = ()
    """Names of the blocks that the answer will fill, from the one that holds the prompt's last part; where a later
    prompt repeats them they are found. Without names they take room in the cache and match nothing."""
    priority: int = 0
    """Lower runs first, under priority order only."""


@dataclass(frozen=True, slots=True)
class FirstToken:
    """The first output token left the engine."""

    id: Hashable
    at: float
    cached_tokens: int = 0
    """Prompt tokens found in the prefix cache."""


@dataclass(frozen=True, slots=True)
class Timing:
    """How a request went; made once, at its end."""

    id: Hashable
    ending: Ending
    arrived: float
    started: float | None
    """Begin of the first step that it took part in; ``None`` if it never ran."""
    first_token: float | None
    finished: float
    prompt_tokens: int
    cached_tokens: int
    """Prompt tokens found in the prefix cache when it first started."""
    output_tokens: int
    preemptions: int
    wasted_tokens: int
    """Tokens computed in vain: all of them if it was aborted, those computed again if it was preempted."""

    @property
    def ttft(self) -> float | None:
        """Seconds from arrival to the first token."""
        return None if self.first_token is None else self.first_token - self.arrived

    @property
    def tpot(self) -> float | None:
        """Mean seconds between output tokens; ``None`` with fewer than two."""
        if self.first_token is None or self.output_tokens < 2:
            return None
        return (self.finished - self.first_token) / (self.output_tokens - 1)


EngineEvent = FirstToken | Timing


@dataclass(slots=True)
class Totals:
    """Counts since the engine started, in tokens where not said otherwise."""

    steps: int = 0
    prompt: int = 0
    cached: int = 0
    prefilled: int = 0
    generated: int = 0
    wasted: int = 0
    preemptions: int = 0
    completed: int = 0
    """Requests."""
    aborted: int = 0
    """Requests."""


@dataclass(slots=True, eq=False)
class Progress:
    """A request inside the engine.

    While it decodes, *kv*, *generated* are as of the tick *joined*; :class:`~loadtest.engine.decoders.Decoders` adds
    the ticks since.
    """

    request: EngineRequest
    order: tuple[int, int]
    """Place in every queue: (priority or 0, number of arrival)."""
    arrived: float
    names: tuple[Hashable, ...]
    target: int
    """Tokens to prefill: the prompt, plus what was generated before a preemption."""
    started: float | None = None
    first_token: float | None = None
    kv: int = 0
    generated: int = 0
    cached: int = 0
    held: int = 0
    """Blocks held while prefilling; a decoding request's follow from *kv*."""
    owned: list[Hashable] = field(default_factory=list)
    """Named blocks among those held, first to last."""
    named: int = 0
    """Blocks, from the first, whose name has been given or found taken."""
    joined: int = -1
    """Tick at which it began to decode; −1 while it waits or prefills."""
    ends: int = -1
    """Tick at which it will have all its tokens."""
    preemptions: int = 0
    prefilled: int = 0
    """Tokens prefilled for it so far, again after a preemption included."""
    lost: int = 0
    """Tokens whose KV was dropped by the last preemption."""
    wasted: int = 0

    @property
    def decoding(self) -> bool:
        """Whether its prefill is done and each step yields a token."""
        return self.joined >= 0

    def timing(self, now: float, ending: Ending) -> Timing:
        """Return the account of a request that is not decoding any more."""
        return Timing(
            id=self.request.id,
            ending=ending,
            arrived=self.arrived,
            started=self.started,
            first_token=self.first_token,
            finished=now,
            prompt_tokens=self.request.prompt_tokens,
            cached_tokens=self.cached,
            output_tokens=self.generated,
            preemptions=self.preemptions,
            wasted_tokens=self.wasted,
        )
