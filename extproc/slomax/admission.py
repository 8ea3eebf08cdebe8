"""Whether a request that cannot run at once may wait.

Room is counted per instance: an instance with ``max_in_flight`` requests takes no more, because beyond it a request
would only wait inside the engine, where it can no longer be moved, re-ordered or cancelled for free.
"""

from extproc.model import Bools, Ints, Reason, Refuse
from extproc.policy import ClassSpec, SloMaxPolicy


def has_room(in_flight: Ints, policy: SloMaxPolicy) -> Bools:
    """Return by row whether one more request may be sent."""
    return in_flight < policy.max_in_flight


def refusal_when_full(klass: ClassSpec, waiting: int, drain_s: float) -> Refuse | None:
    """Return a refusal when the class's line is full, else ``None``; *drain_s* is when trying again can help."""
    if waiting < klass.max_waiting:
        return None
    return Refuse(
        Reason.LINE_FULL,
        f"every instance is busy and {waiting} requests of class {klass.name} are already waiting",
        retry_after_s=max(1.0, drain_s),
        klass=klass.name,
    )


def refusal_at_deadline(klass: ClassSpec, waited_s: float) -> Refuse:
    """Return the refusal of a request whose wait is over."""
    return Refuse(
        Reason.DEADLINE,
        f"no instance had room within {waited_s:.3g} s",
        retry_after_s=max(1.0, klass.longest_wait_ms / 1000 / 2),
        klass=klass.name,
    )
