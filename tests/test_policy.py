"""The policy models by themselves."""

from typing import Any

import pytest
from pydantic import ValidationError

from extproc.policy import Fault, Faults, FleetPolicy, Instances, Tenants, Trust, crossing
from tests.builders import CHAT, a_policy

GROUP: dict[str, Any] = {"models": ["m"], "dns": "engines:8000"}


def a_fleet(**fields: Any) -> FleetPolicy:
    base: dict[str, Any] = {"home": "a", "models": {"m": {}}, "sites": [{"name": "a", "instances": [GROUP]}]}
    return FleetPolicy.model_validate(base | fields)


def faults(error: ValidationError) -> list[Fault]:
    return [fault for one in error.errors() for fault in one["ctx"]["error"].faults]


def test_every_name_of_a_model_leads_to_its_own_name() -> None:
    fleet = a_fleet(models={"m": {"aliases": ["org/m", "m-latest"]}})
    assert fleet.canonical == {"m": "m", "org/m": "m", "m-latest": "m"}


def test_a_rule_between_keys_reports_every_fault() -> None:
    with pytest.raises(ValidationError) as caught:
        a_fleet(home="z", models={"m": {"aliases": ["m"]}}, sites=[{"name": "a", "instances": [GROUP]}] * 2)
    assert [fault.path for fault in faults(caught.value)] == [
        ("sites", 1, "name"),
        ("home",),
        ("models", "m", "aliases", 0),
    ]


def test_faults_are_one_sentence_each() -> None:
    assert str(Faults([Fault(("a",), "one"), Fault(("b",), "two")])) == "one; two"


def test_a_path_between_files_starts_with_the_file() -> None:
    fleet = a_fleet()
    tenants = Tenants.model_validate({"tenants": {"x": {"sites": ["q"]}}})
    found = {fault.path: fault.sentence for fault in crossing(fleet, tenants, profiles=["h100"])}
    assert found == {
        ("fleet", "sites", 0, "instances", 0, "profile"): "there is no profile default; profiles/ has h100",
        ("tenants", "tenants", "x", "sites", "q"): "there is no site q; fleet.yaml has a",
    }


def test_what_could_not_be_read_is_not_compared() -> None:
    assert list(crossing(a_fleet())) == []


def test_the_whole_policy_is_compared_when_it_is_built() -> None:
    with pytest.raises(ValidationError, match="there is no site moon"):
        a_policy(tenants={"default": {"denied_sites": ["moon"]}})


def test_the_default_rules_hold_for_a_tenant_that_is_not_named() -> None:
    tenants = a_policy(tenants={"default": {"tier": "low"}, "tenants": {"x": {"models": [CHAT]}}}).tenants
    assert (tenants.of("y").tier, tenants.of("x").tier) == ("low", "standard")


@pytest.mark.parametrize("address", ["[::1]:80", "[fe80::1]:65535", "10.0.0.1:1"])
def test_an_address_is_an_ip_and_a_port(address: str) -> None:
    group = Instances.model_validate({"models": ["m"], "static": [{"name": "x", "address": address}]})
    assert group.static is not None
    assert group.static[0].address == address


@pytest.mark.parametrize("address", ["host:80", "::1:80", "[10.0.0.1]:80", "10.0.0.1", "10.0.0.1:0", "1.2.3.4:٣", ":1"])
def test_anything_else_is_not_an_address(address: str) -> None:
    with pytest.raises(ValidationError):
        Instances.model_validate({"models": ["m"], "static": [{"name": "x", "address": address}]})


def test_a_header_is_compared_in_lower_case() -> None:
    assert Trust(tenant_header="X-Tenant").tenant_header == "x-tenant"
