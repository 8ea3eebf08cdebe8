from hypothesis import given
from hypothesis import strategies as st

from extproc.fleetmind.cost import network_s
from extproc.fleetmind.eligibility import barred, may_use_model
from extproc.model import Fleet, Reason, Site
from extproc.policy import FleetMindPolicy, Tenant
from tests.builders import CHAT, a_policy, a_request
from tests.fleets import a_fleet

REGIONS = st.frozensets(st.sampled_from(["eu", "de", "us"]))


def a_site(jurisdictions: frozenset[str] = frozenset({"eu"}), rtt_ms: float = 0.0) -> Site:
    policy = a_policy()
    spec = policy.fleet.sites[0].model_copy(update={"jurisdictions": jurisdictions, "rtt_ms": rtt_ms})
    fleet: Fleet = a_fleet(policy.model_copy(update={"fleet": policy.fleet.model_copy(update={"sites": (spec,)})}))
    return fleet.sites[0]


def test_nobody_is_bound_who_is_not_told_so() -> None:
    assert barred(a_request(), Tenant(), a_site(frozenset())) is None


def test_a_tenant_s_data_stay_in_its_jurisdictions() -> None:
    bound = Tenant(jurisdictions=frozenset({"eu"}))
    assert barred(a_request(), bound, a_site(frozenset({"eu", "de"}))) is None
    assert barred(a_request(), bound, a_site(frozenset({"us"}))) is Reason.RESIDENCY
    assert barred(a_request(), bound, a_site(frozenset())) is Reason.RESIDENCY


def test_a_caller_can_only_narrow() -> None:
    bound = Tenant(jurisdictions=frozenset({"eu"}))
    asks_us = a_request(residency=frozenset({"us"}))
    assert barred(asks_us, bound, a_site(frozenset({"us"}))) is Reason.RESIDENCY
    assert barred(asks_us, bound, a_site(frozenset({"eu"}))) is Reason.RESIDENCY
    assert barred(a_request(residency=frozenset({"de"})), bound, a_site(frozenset({"eu"}))) is Reason.RESIDENCY
    assert barred(a_request(residency=frozenset({"de"})), bound, a_site(frozenset({"eu", "de"}))) is None


def test_a_tenant_bound_to_nowhere_may_go_nowhere() -> None:
    assert barred(a_request(), Tenant(jurisdictions=frozenset()), a_site()) is Reason.RESIDENCY
    assert barred(a_request(residency=frozenset()), Tenant(), a_site()) is Reason.RESIDENCY


def test_sites_may_be_listed_or_denied_and_denied_wins() -> None:
    assert barred(a_request(), Tenant(sites=frozenset({"a"})), a_site()) is None
    assert barred(a_request(), Tenant(sites=frozenset({"b"})), a_site()) is Reason.NOT_ALLOWED
    assert barred(a_request(), Tenant(sites=frozenset()), a_site()) is Reason.NOT_ALLOWED
    assert barred(a_request(), Tenant(denied_sites=frozenset({"a"})), a_site()) is Reason.NOT_ALLOWED
    both = Tenant(sites=frozenset({"a"}), denied_sites=frozenset({"a"}))
    assert barred(a_request(), both, a_site()) is Reason.NOT_ALLOWED


@given(site=REGIONS, tenant=st.none() | REGIONS, asked=st.none() | REGIONS)
def test_a_header_never_opens_a_site(
    site: frozenset[str], tenant: frozenset[str] | None, asked: frozenset[str] | None
) -> None:
    rules, place = Tenant(jurisdictions=tenant), a_site(site)
    if barred(a_request(), rules, place) is not None:
        assert barred(a_request(residency=asked), rules, place) is not None
    if tenant is not None and not tenant & site:
        assert barred(a_request(residency=asked), rules, place) is Reason.RESIDENCY


def test_a_model_may_be_kept_from_a_tenant() -> None:
    assert may_use_model(Tenant(), CHAT)
    assert may_use_model(Tenant(models=frozenset({CHAT})), CHAT)
    assert not may_use_model(Tenant(models=frozenset()), CHAT)


def test_the_network_has_a_price() -> None:
    assert network_s(a_site(rtt_ms=80.0), FleetMindPolicy(network_weight=2.0)) == 0.16
