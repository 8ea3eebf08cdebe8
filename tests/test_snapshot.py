"""Readings → fleet."""

import time
from typing import Any

import numpy as np
import pytest

from extproc.adapters.discovery import listed
from extproc.model import Fleet, Instance, Reading, Site, State
from extproc.policy import FleetPolicy
from extproc.snapshot import build
from tests.builders import CHAT, a_policy, a_profile, a_reading, an_instance

NOW = 1000.0
POLICY = a_policy()
FLEET = POLICY.fleet
BOUND = FLEET.telemetry.lost_after_ms / 1000


def built(*readings: Reading, known: tuple[Instance, ...] = (), now: float = NOW, fleet: FleetPolicy = FLEET) -> Fleet:
    return build(fleet, known, readings, now)


def read(name: str, age: float = 0.0, about: dict[str, Any] | None = None, **fields: Any) -> Reading:
    """One reading of an instance, of which *about* sets what discovery says."""
    return a_reading(an_instance(name, name[0], **(about or {})), at=NOW - age, **fields)


def site(fleet: Fleet, name: str = "a") -> Site:
    return next(one for one in fleet.sites if one.name == name)


def states(fleet: Fleet, name: str = "a") -> list[State]:
    return list(site(fleet, name).states)


def serving(fleet: Fleet, model: str) -> list[str]:
    rows = site(fleet)
    return [one.name for one, has in zip(rows.instances, rows.serves.get(model, ()), strict=False) if has]


def test_rows_are_in_order_of_name_and_hold_what_was_read() -> None:
    fleet = built(read("a-1", waiting=3.0, running=5.0, kv_usage=0.5), read("a-0", age=1.0, waiting=1.0), read("b-0"))
    rows = site(fleet)
    assert [one.name for one in rows.instances] == ["a-0", "a-1"]
    assert rows.waiting.tolist() == [1.0, 3.0]
    assert rows.running.tolist() == [0.0, 5.0]
    assert rows.kv_usage.tolist() == [0.0, 0.5]
    assert rows.age_s.tolist() == [1.0, 0.0]
    assert [one.name for one in site(fleet, "b").instances] == ["b-0"]


def test_sites_carry_what_the_policy_says_of_them_in_its_order() -> None:
    spec = {"jurisdictions": ["de", "eu"], "rtt_ms": 80, "cluster": "frankfurt", "draining": True}
    groups = [{"models": [CHAT], "static": [{"name": "x", "address": "127.0.0.1:1"}]}]
    other = [{"models": [CHAT], "static": [{"name": "y", "address": "127.0.0.1:2"}]}]
    policy = a_policy(
        fleet={"home": "z", "sites": [{"name": "z", "instances": groups}, {"name": "f", "instances": other} | spec]}
    )
    fleet = build(policy.fleet, listed(policy), [], NOW)
    assert [(one.name, one.cluster) for one in fleet.sites] == [("z", "site-z"), ("f", "frankfurt")]
    far = fleet.sites[1]
    assert (far.jurisdictions, far.network_s, far.draining) == (frozenset({"de", "eu"}), 0.08, True)


def test_an_unread_instance_of_the_policy_is_starting_with_unknown_age() -> None:
    fleet = built(read("a-0"), known=listed(POLICY))
    assert states(fleet) == [State.READY, State.STARTING]
    assert site(fleet).age_s[1] == np.inf
    assert states(fleet, "b") == [State.STARTING, State.STARTING]


def test_a_readings_own_description_wins_over_the_policys() -> None:
    moved = a_reading(an_instance("a-0", "a", address="10.9.9.9:1"), at=NOW)
    assert site(built(moved, known=listed(POLICY))).instances[0].address == "10.9.9.9:1"


def test_a_reading_of_a_site_that_the_policy_lacks_is_left_out() -> None:
    fleet = built(read("a-0"), a_reading(an_instance("z-0", "z", models=("other",)), at=NOW))
    assert [len(one.instances) for one in fleet.sites] == [1, 0]
    assert "other" not in fleet.models


def test_an_empty_fleet_is_blind_and_has_empty_rows() -> None:
    fleet = built()
    assert fleet.blind
    assert all(len(one.waiting) == 0 and one.serves == {} for one in fleet.sites)


def test_without_any_reading_nothing_is_ready_and_the_fleet_is_blind() -> None:
    fleet = built(known=listed(POLICY))
    assert fleet.blind
    assert states(fleet) == [State.STARTING, State.STARTING]


@pytest.mark.parametrize("state", [State.STARTING, State.LOST, State.DRAINING])
def test_other_states_stand_as_read(state: State) -> None:
    assert states(built(read("a-0", state=state), read("a-1"))) == [state, State.READY]


def test_a_ready_instance_is_lost_when_its_reading_is_much_older_than_the_newest() -> None:
    assert states(built(read("a-0", age=BOUND - 0.01), read("a-1"))) == [State.READY, State.READY]
    assert states(built(read("a-0", age=BOUND + 0.01), read("a-1"))) == [State.LOST, State.READY]
    assert states(built(read("a-0", age=BOUND + 0.01, state=State.DRAINING), read("a-1")))[0] is State.LOST


def test_instances_are_not_lost_one_by_one_when_the_collector_stops() -> None:
    readings = [read("a-0", age=0.0), read("a-1", age=0.25), read("b-0", age=2.0)]
    for later in (0.0, BOUND - 0.1, BOUND + 0.1, 100 * BOUND):
        fleet = built(*readings, now=NOW + later)
        assert states(fleet) == [State.READY, State.READY]
        assert states(fleet, "b") == [State.READY]
        assert fleet.blind == (later > BOUND)


def test_blind_last_known_states_stand_and_old_numbers_steer_nobody() -> None:
    readings = [
        read("a-0", waiting=9.0, running=9.0, kv_usage=0.9),
        read("a-1", state=State.LOST),
        read("a-2", state=State.STARTING),
        read("a-3", about={"draining": True}),
    ]
    seen, blind = built(*readings), built(*readings, now=NOW + BOUND + 1)
    assert (seen.blind, blind.blind) == (False, True)
    assert states(blind) == states(seen) == [State.READY, State.LOST, State.STARTING, State.DRAINING]
    assert site(seen).waiting[0] == 9.0
    for numbers in (site(blind).waiting, site(blind).running, site(blind).kv_usage):
        assert not numbers.any()
    assert site(blind).age_s[0] == BOUND + 1
    assert serving(blind, CHAT) == serving(seen, CHAT)


def test_one_instance_that_hangs_does_not_make_a_fleet_blind() -> None:
    assert not built(read("a-0", age=100.0), read("a-1")).blind


def test_a_reading_from_a_clock_ahead_has_no_age() -> None:
    fleet = built(read("a-0", age=-5.0))
    assert site(fleet).age_s.tolist() == [0.0]
    assert not fleet.blind


def test_listed_as_draining_drains_a_ready_instance_and_changes_no_other_state() -> None:
    fleet = built(
        read("a-0", about={"draining": True}), read("a-1", about={"draining": True}, state=State.STARTING), read("a-2")
    )
    assert states(fleet) == [State.DRAINING, State.STARTING, State.READY]


def test_unpublished_numbers_count_as_zero() -> None:
    rows = site(built(read("a-0", waiting=None, running=None, kv_usage=None), read("a-1", waiting=2.0)))
    assert rows.waiting.tolist() == [0.0, 2.0]
    assert rows.waiting.dtype == rows.running.dtype == rows.kv_usage.dtype == rows.age_s.dtype == np.float64


def test_an_engine_that_names_no_models_serves_what_discovery_claims() -> None:
    assert serving(built(read("a-0", models=None)), CHAT) == ["a-0"]


def test_an_engines_own_list_narrows_what_discovery_claims() -> None:
    claimed = (CHAT, "embedder")
    fleet = built(read("a-0", about={"models": claimed}, models=("embedder",)), read("a-1", about={"models": claimed}))
    assert serving(fleet, CHAT) == ["a-1"]
    assert serving(fleet, "embedder") == ["a-0", "a-1"]


def test_adapters_that_an_engine_names_are_served_where_they_are_loaded_only() -> None:
    fleet = built(read("a-0", models=(CHAT, "lora-x")), read("a-1", models=(CHAT,)))
    assert serving(fleet, "lora-x") == ["a-0"]
    assert serving(fleet, CHAT) == ["a-0", "a-1"]
    assert "lora-x" in fleet.models


def test_adapters_alone_do_not_take_the_base_model_away() -> None:
    assert serving(built(read("a-0", models=("lora-x",))), CHAT) == ["a-0"]


def test_an_engine_that_answers_under_a_path_is_believed_to_serve_what_discovery_claims() -> None:
    fleet = built(read("a-0", models=("/models/weights",)))
    assert serving(fleet, CHAT) == ["a-0"]


def test_an_engine_that_names_an_alias_serves_the_model() -> None:
    policy = a_policy(fleet={"models": {CHAT: {"aliases": ["short"]}}})
    fleet = built(read("a-0", models=("short",)), fleet=policy.fleet)
    assert serving(fleet, CHAT) == ["a-0"]
    assert "short" not in fleet.models


def test_models_of_the_policy_are_known_though_nobody_serves_them() -> None:
    policy = a_policy(fleet={"models": {CHAT: {}, "rare": {}}})
    fleet = built(read("a-0"), fleet=policy.fleet)
    assert fleet.models == {CHAT, "rare"}
    assert "rare" not in site(fleet).serves


def test_unlike_hardware_keeps_its_own_profile() -> None:
    fast, slow = a_profile(name="fast", a_ms=1.0), a_profile(name="slow", a_ms=9.0)
    rows = site(built(read("a-0", about={"profile": fast}), read("a-1", about={"profile": slow})))
    assert [one.profile.a_ms for one in rows.instances] == [1.0, 9.0]


def test_a_thousand_instances_take_milliseconds() -> None:
    readings = [read(f"a-{i:04}", models=(CHAT, f"lora-{i % 10}")) for i in range(1000)]
    best = min(_timed(readings) for _ in range(5))
    assert best < 0.05  # 2 ms on an idle core; the bound only tells milliseconds from a quadratic


def _timed(readings: list[Reading]) -> float:
    began = time.perf_counter()
    fleet = built(*readings)
    assert len(site(fleet).instances) == 1000
    return time.perf_counter() - began
