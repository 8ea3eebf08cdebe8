"""What can go wrong with an instance, on demand: the body of ``POST /fault``. A new fault replaces the old one."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Kind = Literal["none", "slow", "hang", "503", "reset", "error_in_stream", "stale_metrics", "loading", "drain"]


class Fault(BaseModel):
    """A fault and its measure.

    ========================  ==========================================================================================
    none                      healthy again
    slow                      every step takes *factor* times as long
    hang                      connections are accepted, nothing is answered, nothing moves: a stopped process
    503                       inference calls get 503 at once; ``/health`` and ``/metrics`` go on
    reset                     the connection is reset after *after_tokens* tokens
    error_in_stream           after *after_tokens* tokens an error inside the 200, as when vLLM's engine core dies
    stale_metrics             ``/metrics`` repeats what it said when the fault was set
    loading                   503 everywhere, for *seconds* if given
    drain                     what SIGTERM does, to one instance
    ========================  ==========================================================================================
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    kind: Kind = "none"
    factor: Annotated[float, Field(gt=0, le=10_000)] = 4.0
    after_tokens: Annotated[int, Field(ge=0)] = 3
    seconds: Annotated[float, Field(gt=0)] | None = None
    """The fault ends by itself after so many wall seconds."""
    times: Annotated[int, Field(ge=1)] | None = None
    """503, reset, error_in_stream: so many calls are hit, then the fault ends."""
