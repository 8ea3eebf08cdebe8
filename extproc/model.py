"""The nouns. Frozen, without behaviour but arithmetic.

Seconds and tokens everywhere; times are seconds on the one clock that the shell passes in as ``now``.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

Task = Literal["chat", "completion", "embedding"]
Api = Literal["openai", "anthropic"]


@dataclass(frozen=True, slots=True)
class Request:
    """One call of a client, as far as a decision needs it. It never carries prompt text."""

    id: str
    model: str
    tenant: str
    tier: str = "standard"
    task: Task = "chat"
    api: Api = "openai"
    path: str = "/v1/chat/completions"
    prompt_tokens: int = 1
    output_budget: int | None = None
    """Most output tokens a choice may have; ``None`` where the caller set no limit."""
    choices: int = 1
    stream: bool = False
    priority: int | None = None
    blocks: tuple[int, ...] = ()
    """Chained 64-bit hashes of the prompt's whole prefix blocks, first to last."""
    block_tokens: int = 64
    """Estimated prompt tokens that one of ``blocks`` stands for."""
    body_bytes: int = 0
    wanted_class: str | None = None
    """From ``tokenfleet-class``: a wish, judged by SLOMax."""
    deadline_s: float | None = None
    """From ``tokenfleet-deadline-ms``: a wish, judged by SLOMax."""
    residency: frozenset[str] | None = None
    """From ``tokenfleet-residency``: jurisdictions that the caller narrows to."""
    subset: frozenset[str] | None = None
    """Addresses that an upstream picker allows (Gateway API); ``None`` allows all."""
    debug: bool = False
    steer: bool = True
    """False outside the share that the policy steers: decided, logged and counted, never held, refused or charged."""
    arrived: float = 0.0


class State(StrEnum):
    """Life of an instance as its telemetry tells it."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class Profile:
    """Timing of one (hardware, model, engine): ``step_ms = a + c·running + d·kv/1000 + e·prefill/1000``.

    Fitted to measured rows; see ``policies/profiles``. *quad* adds ``quad·n·(p + n/2)/1e6`` ms for *n* new tokens
    behind *p* cached ones, where the linear form ends (about 8k tokens).
    """

    name: str
    a_ms: float
    c_ms: float
    d_ms: float
    e_ms: float
    quad_ms: float = 0.0
    kv_tokens: int = 500_000
    block_tokens: int = 16
    batch_tokens: int = 8192
    """Token budget of one engine step (chunked prefill)."""
    max_running: int = 256
    front_ms: float = 0.0
    """Before a request's first step, once: HTTP, scheduling, whatever a measured TTFT holds beside the steps."""
    front_ms_per_1k: float = 0.0
    """The same for each 1,000 prompt tokens, cached or not (tokenising)."""

    def front_s(self, prompt_tokens: int) -> float:
        """Return the seconds that a prompt spends before the engine can schedule it."""
        return (self.front_ms + self.front_ms_per_1k * prompt_tokens / 1000) / 1000

    def prefill_rate(self) -> float:
        """Return tokens a second of an otherwise idle engine whose steps are full of prefill."""
        return self.batch_tokens / ((self.a_ms + self.e_ms * self.batch_tokens / 1000) / 1000)


@dataclass(frozen=True, slots=True)
class Instance:
    """One engine endpoint as discovery describes it."""

    name: str
    site: str
    address: str
    """``ip:port``, IPv6 in brackets: what Envoy's cluster lists."""
    models: tuple[str, ...]
    profile: Profile
    dialect: str = "auto"
    """Which engine's metric names to expect: auto, vllm, sglang, llamacpp, trtllm, tgi."""
    draining: bool = False
    """Set by whoever lists the instance; telemetry can only add to it."""


@dataclass(frozen=True, slots=True)
class Reading:
    """What the collector knows of one instance: one row in the telemetry store.

    Numbers that an engine does not publish are ``None``; a missing one never spoils the others.
    """

    instance: Instance
    state: State
    at: float
    """Wall-clock seconds (``time.time``) of the last good scrape, or of the last attempt when there was none."""
    waiting: float | None = None
    running: float | None = None
    kv_usage: float | None = None
    """Share of KV blocks held by live requests, 0..1."""
    prefix_hits: float | None = None
    prefix_queries: float | None = None
    """Cumulative tokens since the engine started."""
    block_tokens: int | None = None
    kv_blocks: int | None = None
    models: tuple[str, ...] | None = None
    """Models and adapters that the engine itself says it serves; ``None`` when it did not say."""
    error: str | None = None


@dataclass(frozen=True)
class Site:
    """One data centre in a snapshot: rows of equal length, one an instance, in the order of ``instances``."""

    name: str
    cluster: str
    jurisdictions: frozenset[str]
    network_s: float
    """Round trip from this gateway; 0 at home."""
    draining: bool
    instances: tuple[Instance, ...]
    states: tuple[State, ...]
    waiting: Floats
    running: Floats
    kv_usage: Floats
    age_s: Floats
    """Seconds since each reading was taken; ``inf`` where there is none."""
    serves: Mapping[str, Bools]
    """Model → rows that have it loaded."""


@dataclass(frozen=True)
class Fleet:
    """The whole fleet at one moment; replaced whole, never patched."""

    at: float
    sites: tuple[Site, ...] = ()
    blind: bool = False
    """Nothing recent is known of any instance (collector or store away): decide by own counts alone."""
    models: frozenset[str] = frozenset()
    """Every model that the policy or an instance names, loaded or not."""


class Reason(StrEnum):
    """Why a request is told no."""

    UNKNOWN_MODEL = "unknown_model"
    NO_INSTANCE = "no_instance"
    NOT_ALLOWED = "not_allowed"
    RESIDENCY = "residency"
    DEADLINE = "deadline"
    LINE_FULL = "line_full"
    SUBSET = "subset"
    BAD_REQUEST = "bad_request"


@dataclass(frozen=True, slots=True)
class Admit:
    """Run now: the first of *hosts*, the others in order if it fails."""

    instance: str
    site: str
    cluster: str
    hosts: tuple[str, ...]
    """Addresses, at least two where two exist, all lawful for this request."""
    klass: str
    clusters: tuple[str, ...] = ()
    """The Envoy cluster of each host, where retries may change the site; empty keeps them in ``cluster``."""
    why: Mapping[str, float] = field(default_factory=dict)
    """Term → seconds; ``held`` is the wait at the gateway."""
    steer: bool = True
    """False in shadow mode: not enforced; ``would`` says what would have been done, and there may be no hosts."""
    would: str = ""
    """In shadow mode: ``admit``, ``wait``, or the reason of a refusal."""
    alone: bool = False
    """Decided by a worker whose dispatcher is away."""

    @property
    def address(self) -> str:
        """The chosen instance's address."""
        return self.hosts[0]

    def predicted_s(self) -> float:
        """Return the sum of ``why``."""
        return sum(self.why.values())


@dataclass(frozen=True, slots=True)
class Wait:
    """Held at the gateway until somebody settles or *until* passes."""

    klass: str
    until: float


@dataclass(frozen=True, slots=True)
class Refuse:
    """Told no. *detail* is a sentence for the caller; *retry_after_s* where trying again can help."""

    reason: Reason
    detail: str
    retry_after_s: float | None = None
    klass: str = ""
    alone: bool = False


Verdict = Admit | Wait | Refuse
Final = Admit | Refuse


class Ending(StrEnum):
    """How a request left."""

    COMPLETED = "completed"
    CANCELLED = "cancelled"
    """The client went away, while held or while streaming."""
    FAILED = "failed"
    """The engine answered 5xx, reset the stream, or could not be reached."""
    TIMED_OUT = "timed_out"
    REJECTED = "rejected"
    """The engine answered 4xx: the caller's fault, not the engine's."""
    ABANDONED = "abandoned"
    """Our own stream broke; the outcome is unknown."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What is known of an ending. ``ending=None`` frees the place now and leaves the rest to the access log."""

    ending: Ending | None = None
    status: int = 0
    served: str | None = None
    """Address of the instance that really answered."""
    attempts: int = 1
    """Hosts that were tried, the one that served included; the admitted list says which. 0: none was."""
    ttft_s: float | None = None
    duration_s: float | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None
    body_bytes: int = 0
