"""What is allowed in a policy and probably not meant, each with its place.

The same predicates that decide about requests are asked here, so that advice and decisions cannot disagree.
"""

from collections import Counter
from collections.abc import Iterator

from extproc import snapshot
from extproc.fleetmind import eligibility
from extproc.model import Request, Site
from extproc.policy import Fault, FleetPolicy, Instances, Policy, SloMaxPolicy, Tenant, When


def advise(policy: Policy) -> Iterator[Fault]:
    """Yield a fault for each doubt; paths start with the file, as in :func:`extproc.policy.crossing`."""
    yield from _nowhere_to_go(policy)
    yield from _never_matched(policy.slomax)
    yield from _matches_nothing(policy)
    yield from _alone(policy.fleet)
    yield from _times(policy.fleet)


def _nowhere_to_go(policy: Policy) -> Iterator[Fault]:
    """Find models that a tenant may use and no site lawful for it serves: every such request is refused."""
    sites = {site.name: site for site in snapshot.build(policy.fleet, (), (), 0.0).sites}
    served = _serving(policy.fleet)
    for at, tenant in policy.tenants.places:
        # A model that nobody serves is one doubt of the fleet, not one of each tenant.
        lost = [
            model
            for model in policy.fleet.models
            if served[model]
            and eligibility.may_use_model(tenant, model)
            and not any(_lawful(tenant, sites[name]) for name in served[model])
        ]
        if lost:
            key = "jurisdictions" if tenant.jurisdictions is not None else "sites"
            yield Fault(("tenants", *at, key), f"no site that serves {', '.join(lost)} is lawful for this tenant")
    for model in policy.fleet.models:
        if not served[model]:
            yield Fault(("fleet", "models", model), "no site serves this model")


def _serving(fleet: FleetPolicy) -> dict[str, set[str]]:
    served: dict[str, set[str]] = {model: set() for model in fleet.models}
    for site in fleet.sites:
        for group in site.instances:
            for model in _models(group):
                served[model].add(site.name)
    return served


def _models(group: Instances) -> set[str]:
    if group.static is None:
        return set(group.models)
    return {model for one in group.static for model in one.models or group.models}


def _lawful(tenant: Tenant, site: Site) -> bool:
    return eligibility.barred(Request(id="", model="", tenant=""), tenant, site) is None


def _never_matched(slomax: SloMaxPolicy) -> Iterator[Fault]:
    open_end: str | None = None
    for i, klass in enumerate(slomax.classes):
        if open_end is not None:
            sentence = f"no request reaches this class by rule: {open_end}, before it, has no conditions"
            yield Fault(("slomax", "classes", i), sentence)
        elif klass.when == When():
            open_end = klass.name


def _matches_nothing(policy: Policy) -> Iterator[Fault]:
    tiers = {tenant.tier for _, tenant in policy.tenants.places}
    for i, klass in enumerate(policy.slomax.classes):
        for key, known in (("tiers", tiers), ("models", policy.fleet.models.keys())):
            for name in sorted((getattr(klass.when, key) or frozenset()) - known):
                yield Fault(("slomax", "classes", i, "when", key, name), f"{_NONE_SUCH[key]} {name}")
        for low, high in (("min_prompt_tokens", "max_prompt_tokens"), ("min_output_budget", "max_output_budget")):
            least, most = getattr(klass.when, low), getattr(klass.when, high)
            if least is not None and most is not None and least > most:
                yield Fault(("slomax", "classes", i, "when", low), f"no request is in this class: above {high}")


_NONE_SUCH = {"tiers": "no tenant has the tier", "models": "fleet.yaml has no model"}


def _alone(fleet: FleetPolicy) -> Iterator[Fault]:
    """Find sites and models with one written instance, whose failed requests have no second host."""
    written = [(i, site.instances) for i, site in enumerate(fleet.sites) if all(g.static for g in site.instances)]
    for i, groups in written:
        if sum(len(group.static or ()) for group in groups) == 1:
            yield Fault(("fleet", "sites", i, "instances"), "the only instance here: a failed request has no second")
    if len(written) == len(fleet.sites):  # how many instances the other sources find is known only at run time
        serving = Counter(
            model
            for _, group in fleet.groups
            for one in group.static or ()
            for model in set(one.models or group.models)
        )
        for model in (model for model in fleet.models if serving[model] == 1):
            yield Fault(("fleet", "models", model), "one instance in all serves this: a failed request has no second")


def _times(fleet: FleetPolicy) -> Iterator[Fault]:
    times = fleet.telemetry
    for key, than in (("lost_after_ms", "scrape_ms"), ("expire_ms", "lost_after_ms")):
        if getattr(times, key) <= getattr(times, than):
            yield Fault(("fleet", "telemetry", key), f"not longer than {than}: instances are lost between readings")
