"""On-target, late and wasted: what the fleet's output was worth.

A request is on target iff it completed, its TTFT and its mean TPOT are within its class's targets. Attainment is
on-target requests over all offered ones: refused, cancelled and failed requests are misses. Tokens of a completed
request that missed a target are late; tokens of one that never completed are wasted. Without ``usage`` from the engine,
output tokens are estimated from the answer's bytes by a ratio learned from answers that had it.
"""

from dataclasses import dataclass, field

from extproc.model import Ending, Outcome, Reason, Request
from extproc.policy import ClassSpec

TTFT_BOUNDS_S = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
_FIRST_BYTES_PER_TOKEN = {True: 240.0, False: 4.5}
"""By ``stream``: bytes of an answer per output token before anything is learned (a vLLM chunk is about 240 bytes)."""
_LEARNING = 0.05


@dataclass(slots=True)
class Counts:
    """Sums of one (class, tenant, site, model)."""

    offered: int = 0
    on_target: int = 0
    late: int = 0
    refused: dict[str, int] = field(default_factory=dict)
    endings: dict[str, int] = field(default_factory=dict)
    on_target_tokens: int = 0
    late_tokens: int = 0
    wasted_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    held_s: float = 0.0
    ttft_s: float = 0.0
    ttft_buckets: list[int] = field(default_factory=lambda: [0] * (len(TTFT_BOUNDS_S) + 1))


Key = tuple[str, str, str, str]


class Accounts:
    """All counts. Invariant: offered = refused + endings + what is still held or in flight."""

    def __init__(self) -> None:
        self.counts: dict[Key, Counts] = {}
        self.shadow: dict[tuple[str, str], int] = {}
        """(class, what would have been done) → requests outside the steered share; they are in no other count."""
        self._bytes_per_token: dict[tuple[str, bool], float] = {}

    def refuse(self, request: Request, klass: str, reason: str, held_s: float) -> None:
        """Count a refusal; a refused request was offered and missed."""
        # A model that does not exist is the caller's own word: it must not become a label.
        model = "" if reason == Reason.UNKNOWN_MODEL else request.model
        one = self._of(klass, request.tenant, "", model)
        one.offered += 1
        one.held_s += held_s
        one.refused[reason] = one.refused.get(reason, 0) + 1

    def end(self, request: Request, klass: ClassSpec, site: str, held_s: float, outcome: Outcome) -> bool:
        """Count an ending and tell whether it was on target. *site* is empty for a request that never ran."""
        one = self._of(klass.name, request.tenant, site, request.model)
        ending = outcome.ending or Ending.ABANDONED
        tokens = self._output_tokens(request, outcome)
        one.offered += 1
        one.held_s += held_s
        one.endings[ending] = one.endings.get(ending, 0) + 1
        one.prompt_tokens += outcome.prompt_tokens or 0
        one.cached_tokens += outcome.cached_tokens or 0
        if outcome.ttft_s is not None:
            one.ttft_s += outcome.ttft_s
            one.ttft_buckets[_bucket(outcome.ttft_s)] += 1
        if ending is not Ending.COMPLETED:
            one.wasted_tokens += tokens
            return False
        if on_target(klass, outcome, tokens):
            one.on_target += 1
            one.on_target_tokens += tokens
            return True
        one.late += 1
        one.late_tokens += tokens
        return False

    def note_shadow(self, klass: str, would: str) -> None:
        """Count a request outside the steered share."""
        self.shadow[klass, would] = self.shadow.get((klass, would), 0) + 1

    def _of(self, klass: str, tenant: str, site: str, model: str) -> Counts:
        return self.counts.setdefault((klass, tenant, site, model), Counts())

    def _output_tokens(self, request: Request, outcome: Outcome) -> int:
        key = (request.model, request.stream)
        ratio = self._bytes_per_token.get(key, _FIRST_BYTES_PER_TOKEN[request.stream])
        if outcome.output_tokens is None:
            generated = request.task != "embedding" and outcome.status < 400  # an error's text is no output
            return round(outcome.body_bytes / ratio) if generated else 0
        if outcome.output_tokens > 0 and outcome.body_bytes > 0:
            seen = outcome.body_bytes / outcome.output_tokens
            self._bytes_per_token[key] = ratio + _LEARNING * (seen - ratio)
        return outcome.output_tokens


def on_target(klass: ClassSpec, outcome: Outcome, tokens: int) -> bool:
    """Tell whether a completed request met the targets; an unknown time misses a target that exists."""
    if klass.ttft_s is not None and (outcome.ttft_s is None or outcome.ttft_s > klass.ttft_s):
        return False
    if klass.tpot_s is None or tokens < 2:
        return True
    if outcome.ttft_s is None or outcome.duration_s is None:
        return False
    return (outcome.duration_s - outcome.ttft_s) / (tokens - 1) <= klass.tpot_s


def _bucket(ttft_s: float) -> int:
    return next((i for i, bound in enumerate(TTFT_BOUNDS_S) if ttft_s <= bound), len(TTFT_BOUNDS_S))
