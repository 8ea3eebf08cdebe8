"""Which class a request is in: the first whose conditions all hold.

A caller may ask for a class of lower or equal priority than the rules give, never for a higher one, and for an earlier
deadline never at all: a wish can only make a request cheaper to serve.
"""

from extproc.model import Request
from extproc.policy import ClassSpec, SloMaxPolicy, When


def classify(request: Request, policy: SloMaxPolicy) -> ClassSpec:
    """Return the class of *request*; the policy's last class has no conditions, so there always is one."""
    ruled = next(one for one in policy.classes if holds(one.when, request))
    wanted = policy.by_name.get(request.wanted_class or "")
    return wanted if wanted is not None and wanted.priority <= ruled.priority else ruled


def holds(when: When, request: Request) -> bool:
    """Tell whether every condition given holds."""
    budget = request.output_budget
    return (
        (when.tasks is None or request.task in when.tasks)
        and (when.tiers is None or request.tier in when.tiers)
        and (when.models is None or request.model in when.models)
        and (when.min_prompt_tokens is None or request.prompt_tokens >= when.min_prompt_tokens)
        and (when.max_prompt_tokens is None or request.prompt_tokens <= when.max_prompt_tokens)
        and (when.min_output_budget is None or (budget is not None and budget >= when.min_output_budget))
        and (when.max_output_budget is None or (budget is not None and budget <= when.max_output_budget))
        and (when.stream is None or request.stream is when.stream)
    )


def longest_wait_s(request: Request, klass: ClassSpec) -> float:
    """Return how long the request may be held: the class's bound, or the caller's own when that is shorter.

    Waiting less is a caller's right; waiting longer is no advantage over anybody, but is bounded by the class so that a
    line cannot be filled with requests that never leave.
    """
    bound = klass.longest_wait_ms / 1000
    return bound if request.deadline_s is None else min(bound, request.deadline_s)
