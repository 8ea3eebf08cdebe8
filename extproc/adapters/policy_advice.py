"""What is allowed in a policy and probably not meant, each with its place.

The same predicates that decide about requests are asked here, so that advice and decisions cannot disagree.
"""

from collections.abc import Iterator

from extproc import snapshot
from extproc.fleetmind import eligibility
from extproc.model import Request, Site
from extproc.policy import Fault, FleetPolicy, Policy, SloMaxPolicy, Tenant, When


def advise(policy: Policy) -> Iterator[Fault]:
    """Yield a fault for each doubt; paths start with the file, as in :func:`extproc.policy.crossing`."""
    yield from _nowhere_to_go(policy)
    yield from _never_matched(policy.slomax)
    yield from _matches_nothing(policy)
    yield from _alone(policy.fleet)


def _nowhere_to_go(policy: Policy) -> Iterator[Fault]:
    """Find models that a tenant may use and no site lawful for it serves: every such request is refused."""
    sites = {site.name: site for site in snapshot.build(policy.fleet, (), (), 0.0).sites}
    served = _serving(policy.fleet)
    for at, tenant in policy.tenants.places:
        lost = [
            model
            for model in policy.fleet.models
            if eligibility.may_use_model(tenant, model)
            and not any(_lawful(tenant, sites[name]) for name in served[model])
        ]
        # A model that nobody serves is one doubt of the fleet, not one of each tenant.
        lost = [model for model in lost if served[model]]
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
            for model in {*group.models, *(model for one in group.static or () for model in one.models)}:
                served[model].add(site.name)
    return served


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


_NONE_SUCH = {"tiers": "no tenant has the tier", "models": "fleet.yaml has no model"}


def _alone(fleet: FleetPolicy) -> Iterator[Fault]:
    """Find sites whose written list leaves no second host for a model."""
    for i, site in enumerate(fleet.sites):
        if any(group.static is None for group in site.instances):
            continue  # how many there are is known only at run time
        served = [one.models or group.models for group in site.instances for one in group.static or ()]
        for model in sorted({model for models in served for model in models}):
            if sum(model in models for models in served) == 1:
                sentence = f"only one instance serves {model} here: a failed request has no second host"
                yield Fault(("fleet", "sites", i, "instances"), sentence)
