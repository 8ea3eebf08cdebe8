"""What the dispatcher decides, one sentence a test."""

from collections import Counter
from typing import Any

import numpy as np
import pytest

from extproc.dispatcher import Dispatcher
from extproc.flights import LOG_GRACE_S
from extproc.model import Admit, Ending, Fleet, Outcome, Reason, Refuse, Request, State, Verdict, Wait
from extproc.placement import in_subset
from extproc.policy import Policy
from tests.builders import CHAT, a_policy, a_request
from tests.fleets import a_fleet, instances_of

DONE = Outcome(Ending.COMPLETED, 200, ttft_s=0.1, duration_s=0.2, output_tokens=5)
OTHER = "other-model"
LONG = tuple(range(1, 157))
"""Blocks of a 10,000-token prompt, about half a second of prefill."""


def sites(*more: dict[str, Any], a: int = 2, b: int = 2, **b_fields: Any) -> dict[str, Any]:
    """Fleet of home ``a`` (eu) and ``b`` (us), as many instances each as said."""

    def site(name: str, port: int, count: int, region: str, **fields: Any) -> dict[str, Any]:
        static = [{"name": f"{name}-{i}", "address": f"10.0.0.1:{port + i}"} for i in range(count)]
        instances = [{"models": [CHAT], "static": static}]
        return {"name": name, "jurisdictions": [region], "instances": instances} | fields

    return {
        "models": {CHAT: {}, OTHER: {}},
        "sites": [site("a", 100, a, "eu"), site("b", 200, b, "us", **b_fields), *more],
    }


def third(**fields: Any) -> dict[str, Any]:
    static = [{"name": "c-0", "address": "10.0.0.1:300"}]
    instances = [{"models": [CHAT], "static": static}]
    return {"name": "c", "jurisdictions": ["eu"], "rtt_ms": 30, "instances": instances} | fields


class World:
    """A dispatcher at second 0, all instances ready."""

    def __init__(self, policy: Policy | None = None, seed: int = 0, **fleet: Any) -> None:
        self.policy = policy or a_policy(fleet=sites())
        self.dispatcher = Dispatcher(self.policy, np.random.default_rng(seed))
        self.now = 0.0
        self.see(**fleet)
        self._offered = 0

    def see(self, **fleet: Any) -> list[tuple[str, Verdict]]:
        return list(self.dispatcher.observe(a_fleet(self.policy, **fleet), self.now))

    def offer(self, **fields: Any) -> Verdict:
        self._offered += 1
        base = {"id": f"r{self._offered}", "arrived": self.now}
        return self.dispatcher.offer(a_request(**base | fields), self.now)

    def admit(self, **fields: Any) -> Admit:
        verdict = self.offer(**fields)
        assert isinstance(verdict, Admit), verdict
        return verdict

    def refuse(self, **fields: Any) -> Refuse:
        verdict = self.offer(**fields)
        assert isinstance(verdict, Refuse), verdict
        return verdict

    def wait(self, **fields: Any) -> Wait:
        verdict = self.offer(**fields)
        assert isinstance(verdict, Wait), verdict
        return verdict

    def end(self, name: str, outcome: Outcome = DONE) -> dict[str, Verdict]:
        return dict(self.dispatcher.settle(name, outcome, self.now))

    def tick(self, passed: float = 0.0) -> dict[str, Verdict]:
        self.now += passed
        return dict(self.dispatcher.tick(self.now))


# --- WHERE ------------------------------------------------------------------------------------------------------------


def test_home_is_preferred_within_the_margin() -> None:
    world = World(seed=1)
    chosen = Counter(world.admit(prompt_tokens=100, output_budget=1).site for _ in range(8))
    assert chosen == {"a": 8}, "a few requests in flight are no reason to leave"


def test_a_request_leaves_home_when_it_pays() -> None:
    busy = {"waiting": 40.0}
    world = World(a_0=busy, a_1=busy)
    verdict = world.admit()
    assert (verdict.site, verdict.cluster) == ("b", "site-b")
    assert verdict.hosts[0].startswith("10.0.0.1:20")


def test_the_network_is_part_of_what_leaving_costs() -> None:
    busy = {"waiting": 4.0}  # about 165 ms
    near = World(a_policy(fleet=sites(rtt_ms=20)), a_0=busy, a_1=busy)
    far = World(a_policy(fleet=sites(rtt_ms=200)), a_0=busy, a_1=busy)
    assert near.admit().site == "b"
    assert far.admit().site == "a"
    assert near.admit().why["network"] == pytest.approx(0.02)


def test_the_margin_keeps_traffic_home() -> None:
    busy = {"waiting": 4.0}
    patient = World(a_policy(fleet=sites(), fleetmind={"margin_ms": 400}), a_0=busy, a_1=busy)
    eager = World(a_policy(fleet=sites(), fleetmind={"margin_ms": 0}), a_0=busy, a_1=busy)
    assert (patient.admit().site, eager.admit().site) == ("a", "b")


def test_a_full_home_sends_the_request_away_at_any_price() -> None:
    world = World(a_policy(fleet=sites(rtt_ms=9000), slomax={"max_in_flight": 1}))
    assert [world.admit().site for _ in range(4)] == ["a", "a", "b", "b"]


@pytest.mark.parametrize("bound", ["tenant", "header"])
def test_residency_is_never_broken_however_busy_home_is(bound: str) -> None:
    policy = a_policy(
        fleet=sites(), tenants={"tenants": {"eu": {"jurisdictions": ["eu"]}}}, slomax={"max_in_flight": 1}
    )
    world = World(policy, a_0={"waiting": 500.0}, a_1={"waiting": 500.0})
    fields: dict[str, Any] = {"tenant": "eu"} if bound == "tenant" else {"residency": frozenset({"eu"})}
    verdicts = [world.offer(**fields) for _ in range(3)]
    assert [isinstance(one, Admit) and one.site for one in verdicts] == ["a", "a", False]
    assert isinstance(verdicts[2], Wait), "it waits for home rather than leave"
    world.see(missing=("a-0", "a-1"))
    assert world.refuse(**fields).reason is Reason.RESIDENCY


def test_a_header_cannot_widen_what_the_tenant_may() -> None:
    policy = a_policy(fleet=sites(), tenants={"tenants": {"eu": {"jurisdictions": ["eu"]}}})
    refuse = World(policy).refuse(tenant="eu", residency=frozenset({"us"}))
    assert refuse.reason is Reason.RESIDENCY


def test_sites_and_models_that_a_tenant_may_not_use_are_refused() -> None:
    tenants = {"nowhere": {"sites": []}, "other": {"models": [OTHER]}, "away": {"denied_sites": ["a"]}}
    world = World(a_policy(fleet=sites(), tenants={"tenants": tenants}))
    assert world.refuse(tenant="nowhere").reason is Reason.NOT_ALLOWED
    assert world.refuse(tenant="other").reason is Reason.NOT_ALLOWED
    assert world.admit(tenant="away").site == "b"


def test_an_unknown_model_is_told_so() -> None:
    refuse = World().refuse(model="no-such-model")
    assert refuse.reason is Reason.UNKNOWN_MODEL
    assert "no-such-model" in refuse.detail
    assert refuse.retry_after_s is None


def test_a_known_model_without_a_ready_instance_is_told_when_to_come_back() -> None:
    world = World()
    assert world.refuse(model=OTHER).reason is Reason.NO_INSTANCE
    world.see(states=dict.fromkeys(("a-0", "a-1", "b-0", "b-1"), State.STARTING))
    refuse = world.refuse()
    assert refuse.reason is Reason.NO_INSTANCE
    assert refuse.retry_after_s is not None
    assert refuse.retry_after_s > 0


@pytest.mark.parametrize("state", [State.STARTING, State.DRAINING, State.LOST])
def test_only_ready_instances_take_new_requests(state: State) -> None:
    world = World(states={"a-0": state})
    for _ in range(6):
        verdict = world.admit()
        assert "10.0.0.1:100" not in verdict.hosts, "nor a retry"
        assert len(verdict.hosts) == (1 if verdict.site == "a" else 2)


def test_a_draining_site_takes_no_new_request() -> None:
    world = World(a_policy(fleet=sites(draining=True)), missing=("a-0", "a-1"))
    assert world.refuse().reason is Reason.NO_INSTANCE


def test_before_anything_is_known_of_the_fleet_nobody_is_ready() -> None:
    fresh = Dispatcher(a_policy(fleet=sites()), np.random.default_rng(0))
    verdict = fresh.offer(a_request(), 0.0)
    assert isinstance(verdict, Refuse)
    assert verdict.reason is Reason.NO_INSTANCE
    unknown = fresh.offer(a_request(id="r2", model="no-such-model"), 0.0)
    assert isinstance(unknown, Refuse)
    assert unknown.reason is Reason.UNKNOWN_MODEL


# --- an upstream picker's subset --------------------------------------------------------------------------------------


def test_a_subset_narrows_the_choice() -> None:
    world = World()
    verdict = world.admit(subset=frozenset({"10.0.0.1:101", "10.0.0.1:201"}))
    assert verdict.hosts == ("10.0.0.1:101",)
    assert world.admit(subset=frozenset({"10.0.0.1:201"})).hosts == ("10.0.0.1:201",)
    assert len(world.admit(subset=frozenset({"10.0.0.1"})).hosts) == 2, "a bare address stands for all its ports"


@pytest.mark.parametrize("subset", [frozenset(), frozenset({"10.9.9.9:1"})])
def test_a_subset_that_names_nobody_is_refused(subset: frozenset[str]) -> None:
    refuse = World().refuse(subset=subset)
    assert refuse.reason is Reason.SUBSET
    assert refuse.retry_after_s


@pytest.mark.parametrize(
    ("address", "subset", "fits"),
    [
        ("10.0.0.1:80", {"10.0.0.1:80"}, True),
        ("10.0.0.1:80", {"10.0.0.1"}, True),
        ("10.0.0.1:80", {"10.0.0.1:8"}, False),
        ("10.0.0.1:80", {"0.0.0.1"}, False),
        ("[::1]:80", {"[::1]:80"}, True),
        ("[::1]:80", {"[::1]"}, True),
        ("[::1]:80", {"::1"}, True),
        ("[::1]:80", {"::2"}, False),
        ("10.0.0.1:80", set(), False),
    ],
)
def test_addresses_of_a_subset(address: str, subset: set[str], fits: bool) -> None:
    assert in_subset(address, subset) is fits


# --- WHICH ------------------------------------------------------------------------------------------------------------


def test_our_own_requests_count_at_once() -> None:
    world = World()
    assert {world.admit(prompt_tokens=5000).instance for _ in range(2)} == {"a-0", "a-1"}


def test_a_first_token_makes_an_instance_attractive_again() -> None:
    world = World(a_policy(fleet=sites(b=1), fleetmind={"margin_ms": 5000}))
    first = world.admit(id="long", prompt_tokens=20_000)
    other = world.admit(id="short", prompt_tokens=10_000)
    assert first.instance != other.instance
    assert world.dispatcher.prefill_in_flight() == 30_000.0
    world.dispatcher.first_token("long", world.now)
    assert world.dispatcher.prefill_in_flight() == 10_000.0
    assert world.admit(prompt_tokens=10_000).instance == first.instance


def test_a_cached_prefix_is_preferred_when_prefill_dominates() -> None:
    world = World()
    first = world.admit(id="first", prompt_tokens=10_000, blocks=LONG)
    world.end("first")
    for _ in range(4):
        again = world.admit(id="again", prompt_tokens=10_000, blocks=LONG)
        assert again.instance == first.instance
        assert again.why["prefill"] < 0.1 * first.why["prefill"]
        world.end("again")


def test_a_cached_prefix_is_left_when_its_queue_costs_more() -> None:
    world = World()
    first = world.admit(id="first", prompt_tokens=10_000, blocks=LONG)
    world.end("first")
    busy = {"waiting": 30.0}
    world.see(**{first.instance.replace("-", "_"): busy})
    again = world.admit(prompt_tokens=10_000, blocks=LONG)
    assert again.instance != first.instance
    assert again.site == "a"


def test_an_instance_that_restarts_has_forgotten_its_prefixes() -> None:
    world = World()
    first = world.admit(id="first", prompt_tokens=10_000, blocks=LONG)
    world.end("first")
    for state in (State.READY, State.DRAINING):
        world.see(states={first.instance: state})
        assert len(LONG) - 8 < world.dispatcher.index_blocks() <= len(LONG)
    world.see(states={first.instance: State.LOST})
    assert world.dispatcher.index_blocks() == 0


def test_a_blind_fleet_keeps_its_prefixes() -> None:
    world = World()
    world.admit(blocks=LONG)
    world.see(blind=True, states={"a-0": State.STARTING, "a-1": State.STARTING})
    assert len(LONG) - 8 < world.dispatcher.index_blocks() <= len(LONG)


def test_a_prefix_expires() -> None:
    world = World(a_policy(fleet=sites(), tokenpilot={"index_ttl_s": 10}))
    world.admit(blocks=LONG)
    world.tick(10.0)
    assert len(LONG) - 8 < world.dispatcher.index_blocks() <= len(LONG)
    world.tick(0.1)
    assert world.dispatcher.index_blocks() == 0


def test_blind_it_is_least_request_by_our_own_counts_among_the_living() -> None:
    world = World(
        a_policy(fleet=sites(a=3, b=1), fleetmind={"margin_ms": 60_000}),
        blind=True,
        states={"a-2": State.LOST},
        a_0={"waiting": 500.0},
    )
    chosen = Counter(world.admit().instance for _ in range(10))
    assert chosen == {"a-0": 5, "a-1": 5}, "telemetry of long ago counts for nothing, what was lost stays lost"


def test_near_equal_picks_spread_by_chance_and_equal_seeds_agree() -> None:
    def first_picks(seed: int) -> list[str]:
        return [World(seed=seed * 100 + i).admit().instance for i in range(20)]

    assert set(first_picks(1)) == {"a-0", "a-1"}
    assert first_picks(1) == first_picks(1)

    def a_run(seed: int) -> list[str]:
        world = World(seed=seed)
        return [world.admit(prompt_tokens=100 + i).instance for i in range(30)]

    assert a_run(5) == a_run(5)


def test_two_hosts_are_given_also_when_the_second_has_no_room() -> None:
    world = World(a_policy(fleet=sites(), slomax={"max_in_flight": 1}))
    world.admit()
    assert len(world.admit().hosts) == 2


def test_no_more_hosts_are_given_than_the_policy_says() -> None:
    many = World(a_policy(fleet=sites(a=6), tokenpilot={"hosts": 4}))
    one = World(a_policy(fleet=sites(a=6), tokenpilot={"hosts": 1}))
    assert len(many.admit().hosts) == 4
    assert len(one.admit().hosts) == 1


def test_the_verdict_says_why_and_why_is_what_was_compared() -> None:
    world = World()
    verdict = world.admit(prompt_tokens=2000)
    assert set(verdict.why) == {"queue", "prefill", "decode", "network", "held"}
    assert verdict.why["held"] == verdict.why["network"] == 0.0
    assert verdict.why["prefill"] > 0
    assert verdict.predicted_s() == pytest.approx(sum(verdict.why.values()))


# --- failing instances ------------------------------------------------------------------------------------------------

BROKEN = Outcome(Ending.FAILED, 503)


def failed(world: World, times: int) -> str:
    """Fail whatever is chosen, until one instance has failed *times* times; return it."""
    seen: Counter[str] = Counter()
    for i in range(50):
        verdict = world.admit(id=f"f{i}")
        if verdict.instance == "a-0":
            seen["a-0"] += 1
            world.end(f"f{i}", Outcome(Ending.FAILED, 503, served=verdict.hosts[0]))
            if seen["a-0"] == times:
                return "a-0"
        else:
            world.end(f"f{i}")
    raise AssertionError("a-0 was never chosen")


def test_an_instance_rests_after_failures_in_a_row_and_is_probed_afterwards() -> None:
    world = World(a_policy(fleet=sites(), tokenpilot={"fail_after": 2, "rest_ms": 5000}))
    failed(world, 2)
    assert world.dispatcher.resting(world.now) == ["a-0"]
    for i in range(20):
        assert world.admit(id=f"x{i}").instance != "a-0"
        world.end(f"x{i}")
    world.now += 5.0
    assert world.dispatcher.resting(world.now) == []
    failed(world, 1)
    assert world.dispatcher.resting(world.now) == ["a-0"], "the probe failed"


def test_one_failure_is_no_reason_to_rest() -> None:
    world = World()
    failed(world, 1)
    assert world.dispatcher.resting(world.now) == []


def test_a_resting_instance_is_the_last_host_where_there_is_no_other_second() -> None:
    world = World()
    failed(world, 2)
    verdict = world.admit()
    assert (verdict.instance, verdict.hosts) == ("a-1", ("10.0.0.1:101", "10.0.0.1:100"))
    three = World(a_policy(fleet=sites(a=3)))
    failed(three, 2)
    assert "10.0.0.1:100" not in three.admit().hosts


def test_when_all_rest_somebody_is_tried_all_the_same() -> None:
    world = World(missing=("b-0", "b-1", "a-1"))
    failed(world, 2)
    assert world.admit().instance == "a-0"


def test_attempts_before_the_one_that_served_count_against_the_hosts_tried() -> None:
    world = World(a_policy(fleet=sites(), tokenpilot={"fail_after": 1}))
    verdict = world.admit(id="r")
    world.end("r", Outcome(Ending.COMPLETED, 200, served=verdict.hosts[1], attempts=2))
    assert world.dispatcher.resting(world.now) == [verdict.instance]


def test_whoever_served_gets_the_credit() -> None:
    policy = a_policy(fleet=sites())
    world = World(policy)
    world.admit(id="r", prompt_tokens=10_000, blocks=LONG)
    world.end("r", Outcome(Ending.COMPLETED, 200, served="10.0.0.1:201", attempts=2, ttft_s=0.1, output_tokens=3))
    assert {key[2] for key in world.dispatcher.accounts.counts} == {"b"}
    names = {one.address: one.name for one in instances_of(policy)}
    verdict = world.admit(prompt_tokens=10_000, blocks=LONG)
    assert verdict.instance == names["10.0.0.1:201"] == "b-1", "the prefix is there now"
    assert verdict.why["prefill"] < 0.05


# --- WHEN -------------------------------------------------------------------------------------------------------------

ONE = {"max_in_flight": 1}


def busy(**slomax: Any) -> World:
    """Every instance has its one request: r1 to r4."""
    world = World(a_policy(fleet=sites(), slomax=ONE | slomax))
    for _ in range(4):
        world.admit()
    return world


def test_a_request_that_finds_no_room_waits_and_goes_when_a_place_is_free() -> None:
    world = busy()
    assert world.wait(id="w") == Wait("standard", 30.0)
    assert world.dispatcher.waiting() == {"standard": 1}
    world.now = 2.5
    granted = world.end("r1", Outcome())
    admit = granted["w"]
    assert isinstance(admit, Admit)
    assert admit.why["held"] == 2.5
    assert world.dispatcher.total_in_flight() == 4


def test_the_line_is_in_order_of_arrival_also_for_who_comes_again() -> None:
    world = busy()
    world.now = 5.0
    world.wait(id="later", arrived=5.0)
    world.wait(id="first", arrived=1.0)
    assert list(world.end("r1")) == ["first"]
    assert list(world.end("r2")) == ["later"]


def test_a_model_without_room_holds_no_other_up() -> None:
    policy = a_policy(fleet=sites(a=1, b=1), slomax=ONE)
    world = World(policy, a_0={"models": (CHAT, OTHER)}, b_0={"models": (CHAT,)})
    world.admit(id="chat-1", tenant="x")
    world.admit(id="chat-2")
    assert world.dispatcher.in_flight() == {"a-0": 1, "b-0": 1}
    world.wait(id="w-other", model=OTHER)
    world.wait(id="w-chat")
    granted = {one for name in ("chat-1", "chat-2") for one in world.end(name)}
    assert granted == {"w-other", "w-chat"}


def test_a_higher_class_goes_first_however_late_it_came() -> None:
    world = busy(
        classes=[
            {"name": "gold", "priority": 5, "when": {"tiers": ["gold"]}},
            {"name": "standard"},
        ]
    )
    world.wait(id="old")
    world.now = 1.0
    world.wait(id="new", tier="gold")
    assert list(world.end("r1")) == ["new"]


def test_a_lower_class_may_be_asked_for_and_a_higher_one_may_not() -> None:
    classes = [{"name": "gold", "priority": 5, "when": {"tiers": ["gold"]}}, {"name": "standard"}]
    world = World(a_policy(fleet=sites(), slomax={"classes": classes}))
    assert world.admit(tier="gold", wanted_class="standard").klass == "standard"
    assert world.admit(wanted_class="gold").klass == "standard"


def test_a_wait_ends_at_its_deadline_and_not_before() -> None:
    world = busy(classes=[{"name": "standard", "longest_wait_ms": 2000}])
    world.wait(id="w")
    assert world.tick(1.999) == {}
    refuse = world.tick(0.001)["w"]
    assert isinstance(refuse, Refuse)
    assert (refuse.reason, refuse.klass) == (Reason.DEADLINE, "standard")
    assert refuse.retry_after_s
    assert world.dispatcher.waiting() == {"standard": 0}
    assert world.end("r1") == {}


def test_a_caller_s_deadline_shortens_its_wait() -> None:
    world = busy()
    assert world.wait(id="w", deadline_s=0.5).until == 0.5
    assert world.wait(id="x", deadline_s=90.0).until == 30.0
    assert list(world.tick(0.5)) == ["w"]


def test_who_comes_again_after_its_deadline_is_refused() -> None:
    world = busy()
    world.now = 31.0
    assert world.refuse(arrived=0.5).reason is Reason.DEADLINE


def test_a_full_line_refuses_and_each_class_has_its_own() -> None:
    classes = [
        {"name": "gold", "priority": 5, "when": {"tiers": ["gold"]}, "max_waiting": 1},
        {"name": "standard", "max_waiting": 2},
    ]
    world = busy(classes=classes)
    world.wait()
    world.wait()
    refuse = world.refuse()
    assert refuse.reason is Reason.LINE_FULL
    assert refuse.retry_after_s is not None
    assert refuse.retry_after_s >= 1.0
    world.wait(tier="gold")
    assert world.refuse(tier="gold").reason is Reason.LINE_FULL


def test_a_line_of_no_length_holds_nobody() -> None:
    world = busy(classes=[{"name": "standard", "max_waiting": 0}])
    assert world.refuse().reason is Reason.LINE_FULL


def test_a_held_request_waits_on_while_no_instance_is_ready() -> None:
    world = busy()
    world.wait(id="w")
    lost = dict.fromkeys(("a-0", "a-1", "b-0", "b-1"), State.LOST)
    assert world.see(states=lost) == []
    assert world.end("r1") == {}
    ((name, verdict),) = world.see()
    assert name == "w"
    assert isinstance(verdict, Admit)


def test_a_held_request_waits_on_while_nobody_of_its_subset_is_ready() -> None:
    world = busy()
    world.wait(id="w", subset=frozenset({"10.0.0.1:100"}))
    assert world.see(states={"a-0": State.LOST}) == []
    assert {one for i in range(1, 5) for one in world.end(f"r{i}")} == set()
    assert [name for name, _ in world.see()] == ["w"]


def test_a_held_request_waits_on_for_its_own_site_while_another_has_room() -> None:
    world = busy()
    world.wait(id="w", residency=frozenset({"eu"}))
    assert world.see(states={"a-0": State.LOST, "a-1": State.STARTING}) == []
    free = {one for i in range(1, 5) for one in world.end(f"r{i}")}
    assert free == set()
    assert [name for name, _ in world.see()] == ["w"]


def test_a_held_request_is_told_when_it_may_no_longer_go_anywhere() -> None:
    world = busy()
    world.wait(id="w", residency=frozenset({"eu"}))
    world.see(missing=("a-0", "a-1"))
    refuse = dict(world.tick()) | world.end("r3")
    verdict = refuse["w"]
    assert isinstance(verdict, Refuse)
    assert verdict.reason is Reason.RESIDENCY


def test_a_held_request_that_is_cancelled_leaves_the_line() -> None:
    world = busy()
    world.wait(id="w")
    assert world.end("w", Outcome(Ending.CANCELLED)) == {}
    assert world.end("w", Outcome(Ending.CANCELLED)) == {}
    assert world.end("r1") == {}
    endings = [counts.endings for counts in world.dispatcher.accounts.counts.values()]
    assert {"cancelled": 1} in endings


def test_a_stream_that_ends_while_held_is_a_cancellation() -> None:
    world = busy()
    world.wait(id="w")
    world.end("w", Outcome())
    assert [counts.endings for counts in world.dispatcher.accounts.counts.values()] == [{"cancelled": 1}]


def test_new_instances_take_who_waits() -> None:
    world = World(a_policy(fleet=sites(), slomax=ONE), missing=("a-1", "b-0", "b-1"))
    world.admit()
    world.wait(id="w")
    granted = dict(world.see())
    assert isinstance(granted["w"], Admit)


# --- who comes again --------------------------------------------------------------------------------------------------


def test_who_is_offered_again_while_held_keeps_its_place() -> None:
    world = busy()
    waits = world.wait(id="w")
    world.wait(id="v")
    assert world.wait(id="w", arrived=9.0) == waits
    assert world.dispatcher.waiting() == {"standard": 2}
    assert list(world.end("r1")) == ["w"]
    assert list(world.end("r2")) == ["v"]


def test_who_is_offered_again_while_running_keeps_its_instance() -> None:
    world = World()
    verdict = world.admit(id="r")
    assert world.offer(id="r") is verdict
    assert world.dispatcher.total_in_flight() == 1
    world.end("r")
    assert world.dispatcher.total_in_flight() == 0


def test_who_comes_back_after_its_place_was_freed_is_counted_once_and_never_lost() -> None:
    world = World()
    world.admit(id="r")
    world.end("r", Outcome())
    assert world.dispatcher.total_in_flight() == 0
    world.admit(id="r")
    world.tick(LOG_GRACE_S + 1)
    assert world.dispatcher.running() == ["r"], "the books of its first life are not its own any more"
    world.end("r")
    assert world.dispatcher.total_in_flight() == 0
    (counts,) = world.dispatcher.accounts.counts.values()
    assert (counts.offered, counts.endings) == (1, {"completed": 1})


def an_admit(instance: str = "a-1", address: str = "10.0.0.1:101") -> Admit:
    return Admit(instance, "a", "site-a", (address,), "standard", alone=True)


def test_what_runs_already_is_taken_over() -> None:
    world = World()
    request = a_request(id="r", prompt_tokens=700, blocks=(1, 2))
    for _ in range(2):
        world.dispatcher.adopt(request, an_admit(), world.now)
    assert world.dispatcher.in_flight() == {"a-0": 0, "a-1": 1, "b-0": 0, "b-1": 0}
    assert world.dispatcher.prefill_in_flight() == 700.0
    world.end("r")
    assert world.dispatcher.total_in_flight() == 0
    (key,) = world.dispatcher.accounts.counts
    assert key == ("standard", "default", "a", CHAT)


def test_what_runs_is_taken_over_before_the_first_snapshot_too() -> None:
    fresh = Dispatcher(a_policy(fleet=sites()), np.random.default_rng(0))
    fresh.adopt(a_request(id="r"), an_admit(), 0.0)
    assert fresh.total_in_flight() == 1
    fresh.observe(a_fleet(a_policy(fleet=sites())), 0.1)
    assert fresh.in_flight()["a-1"] == 1
    fresh.settle("r", DONE, 0.2)
    assert fresh.total_in_flight() == 0


def test_what_runs_is_taken_over_again_after_its_place_was_freed() -> None:
    world = World()
    verdict = world.admit(id="r")
    world.end("r", Outcome())
    world.dispatcher.adopt(a_request(id="r"), verdict, world.now)
    assert world.dispatcher.in_flight()[verdict.instance] == 1
    world.tick(LOG_GRACE_S + 1)
    assert world.dispatcher.running() == ["r"]


def test_who_runs_elsewhere_leaves_the_line() -> None:
    world = busy()
    world.wait(id="w")
    world.dispatcher.adopt(a_request(id="w"), an_admit(), world.now)
    assert world.dispatcher.waiting() == {"standard": 0}
    assert world.dispatcher.total_in_flight() == 5
    assert world.end("r1") == {}


def test_what_is_withdrawn_leaves_no_word() -> None:
    world = busy()
    world.wait(id="w")
    assert world.dispatcher.withdraw("r1") is None
    held = world.dispatcher.withdraw("w")
    assert isinstance(held, Request)
    assert held.id == "w"
    assert world.dispatcher.withdraw("nobody") is None
    assert world.dispatcher.total_in_flight() == 3
    assert world.dispatcher.accounts.counts == {}


def test_an_instance_that_leaves_with_requests_in_flight_leaves_no_count_behind() -> None:
    world = World(missing=("b-0", "b-1"))
    for i in range(6):
        world.admit(id=f"r{i}")
    world.see(missing=("a-0",))
    assert world.dispatcher.total_in_flight() == 6
    for i in range(6):
        world.end(f"r{i}")
    assert world.dispatcher.total_in_flight() == 0
    world.see()
    assert set(world.dispatcher.in_flight().values()) == {0}


# --- shadow -----------------------------------------------------------------------------------------------------------


def test_what_is_not_steered_is_decided_and_takes_no_place() -> None:
    world = World()
    verdict = world.admit(steer=False, blocks=(1, 2, 3))
    assert (verdict.steer, verdict.would, verdict.site) == (False, "admit", "a")
    assert world.dispatcher.total_in_flight() == 0
    assert world.dispatcher.index_blocks() == 0
    assert world.dispatcher.accounts.shadow == {("standard", "admit"): 1}
    assert world.dispatcher.accounts.counts == {}


@pytest.mark.parametrize(
    ("fields", "would"),
    [
        ({}, "wait"),
        ({"model": "no-such-model"}, "unknown_model"),
        ({"residency": frozenset({"mars"})}, "residency"),
    ],
)
def test_what_is_not_steered_is_never_held_or_refused(fields: dict[str, Any], would: str) -> None:
    world = busy()
    verdict = world.admit(steer=False, **fields)
    assert (verdict.steer, verdict.would, verdict.hosts) == (False, would, ())
    assert world.dispatcher.waiting() == {}
    assert world.dispatcher.accounts.counts == {}


# --- the line across queues -------------------------------------------------------------------------------------------


def test_those_bound_to_a_full_site_do_not_keep_others_waiting() -> None:
    world = World(a_policy(fleet=sites(), slomax=ONE))
    american = [f"r{i}" for i in range(1, 5) if world.admit().site == "b"]
    for i in range(40):
        world.wait(id=f"eu{i}", residency=frozenset({"eu"}))
    world.wait(id="any")
    assert set(world.end(american[0])) == {"any"}


def test_a_newcomer_waits_behind_those_who_are_alike() -> None:
    world = busy()
    world.wait(id="first")
    world.dispatcher._ledger.requests[0] = 0  # a place that nobody has told the line of yet
    world.wait(id="second")
    assert list(world.tick()) == ["first"]


# --- retries that may change the site ---------------------------------------------------------------------------------


def crossing(fleet: dict[str, Any] | None = None, **files: Any) -> Policy:
    return a_policy(gateway={"cross_site_retries": True}, fleet=fleet or sites(third(), rtt_ms=80), **files)


def sites_of(verdict: Admit) -> str:
    """Letters of the sites of the hosts: ``aab``."""
    return "".join({"1": "a", "2": "b", "3": "c"}[host.rpartition(":")[2][0]] for host in verdict.hosts)


def test_without_it_every_host_is_of_the_chosen_site() -> None:
    verdict = World(a_policy(fleet=sites(third()))).admit()
    assert (sites_of(verdict), verdict.clusters) == ("aa", ())


def test_the_best_of_the_other_sites_follows_the_first_two_the_cheapest_site_first() -> None:
    verdict = World(crossing(tokenpilot={"hosts": 4})).admit()
    assert sites_of(verdict) == "aacb"
    assert verdict.clusters == ("site-a", "site-a", "site-c", "site-b")
    assert (verdict.cluster, verdict.site) == ("site-a", "a")


def test_the_chosen_site_keeps_two_places_and_gives_up_the_others() -> None:
    assert sites_of(World(crossing(sites(third(), a=5, rtt_ms=80))).admit()) == "aac"
    assert sites_of(World(crossing(sites(third(), a=5, rtt_ms=80), tokenpilot={"hosts": 5})).admit()) == "aaacb"
    assert sites_of(World(crossing(tokenpilot={"hosts": 2})).admit()) == "aa"
    assert sites_of(World(crossing(tokenpilot={"hosts": 1})).admit()) == "a"


def test_a_site_of_one_instance_has_its_second_host_elsewhere() -> None:
    verdict = World(crossing(sites(a=1))).admit()
    assert (sites_of(verdict), verdict.clusters) == ("ab", ("site-a", "site-b"))


def test_away_from_home_the_retry_may_come_back() -> None:
    loaded = {"waiting": 60.0}
    verdict = World(crossing(sites(rtt_ms=10)), a_0=loaded, a_1=loaded).admit()
    assert (verdict.cluster, sites_of(verdict)) == ("site-b", "bba")


def test_a_site_s_best_is_the_one_that_is_handed_out() -> None:
    verdict = World(crossing(sites()), b_0={"waiting": 9.0}).admit()
    assert verdict.hosts[2] == "10.0.0.1:201"


def test_a_site_without_room_is_no_place_to_retry() -> None:
    world = World(crossing(sites(a=2, b=1), slomax={"max_in_flight": 1}), missing=("a-1",))
    assert sites_of(world.admit(subset=frozenset({"10.0.0.1:200"}))) == "b"
    assert sites_of(world.admit()) == "a"


def test_an_instance_without_room_is_no_place_to_retry_however_cheap() -> None:
    world = World(crossing(sites(), slomax={"max_in_flight": 1}))
    full = world.admit(id="full", prompt_tokens=10_000, blocks=LONG, subset=frozenset({"10.0.0.1:200"}))
    world.dispatcher.first_token("full", world.now)
    assert full.instance == "b-0"
    verdict = world.admit(prompt_tokens=100, output_budget=1, blocks=LONG[:1])
    assert verdict.hosts[2] == "10.0.0.1:201", "the other one has the prefix and no room"


@pytest.mark.parametrize(
    ("fields", "lawful"),
    [
        ({"tenant": "eu"}, "ac"),
        ({"residency": frozenset({"eu"})}, "ac"),
        ({"tenant": "not-c"}, "ab"),
        ({"tenant": "home"}, "a"),
        ({"subset": frozenset({"10.0.0.1:100", "10.0.0.1:300"})}, "ac"),
    ],
)
def test_no_unlawful_site_is_ever_in_the_list(fields: dict[str, Any], lawful: str) -> None:
    tenants = {"eu": {"jurisdictions": ["eu"]}, "not-c": {"denied_sites": ["c"]}, "home": {"sites": ["a"]}}
    world = World(crossing(tokenpilot={"hosts": 16}, tenants={"tenants": tenants}))
    for _ in range(20):
        verdict = world.admit(**fields)
        assert set(sites_of(verdict)) == set(lawful)
        assert [cluster[-1] for cluster in verdict.clusters] == list(sites_of(verdict))


def test_a_site_that_drains_or_is_not_ready_is_not_in_the_list() -> None:
    draining = World(crossing(sites(third(draining=True), rtt_ms=80)))
    assert sites_of(draining.admit()) == "aab"
    assert sites_of(World(crossing(), states={"c-0": State.DRAINING}).admit()) == "aab"


def test_a_resting_instance_of_another_site_is_not_in_the_list() -> None:
    world = World(crossing(sites(third(), rtt_ms=80)))
    for i in range(2):
        verdict = world.admit(id=f"x{i}")
        world.end(f"x{i}", Outcome(Ending.COMPLETED, 200, served=verdict.hosts[0]))
        world.admit(id=f"y{i}", subset=frozenset({"10.0.0.1:300"}))
        world.end(f"y{i}", BROKEN)
    assert world.dispatcher.resting(world.now) == ["c-0"]
    assert sites_of(world.admit()) == "aab"


def test_who_served_in_another_site_is_credited_there() -> None:
    world = World(crossing())
    verdict = world.admit(id="r")
    world.end("r", Outcome(Ending.COMPLETED, 200, served=verdict.hosts[2], attempts=3))
    assert {key[2] for key in world.dispatcher.accounts.counts} == {"c"}


def test_a_fleet_without_sites_or_instances_refuses() -> None:
    world = World()
    world.dispatcher.observe(Fleet(at=0.0, models=frozenset({CHAT})), 0.0)
    assert world.refuse().reason is Reason.NO_INSTANCE
    assert world.refuse(model="no-such-model").reason is Reason.UNKNOWN_MODEL
