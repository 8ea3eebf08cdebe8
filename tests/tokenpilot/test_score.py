"""Rows, ledger and prices: predicted seconds of a tiny fleet, worked out by hand."""

from typing import Any

import numpy as np
import pytest

from extproc.model import Fleet, State
from extproc.policy import Weights
from extproc.tokenpilot import latency, score
from extproc.tokenpilot.ledger import Ledger
from extproc.tokenpilot.rows import Rows, Slots
from extproc.tokenpilot.workload import Work, estimate
from tests.builders import a_policy, a_request
from tests.fleets import a_fleet, instances_of

POLICY = a_policy()
# The policy's profile: a=10 ms, c=0.1 ms, d=0, e=40 ms/1000 tokens, batches of 8192 tokens.
STEP_S = 0.010 + 0.040 * 8.192
RATE = 8192 / STEP_S


class World:
    def __init__(self, fleet: Fleet | None = None) -> None:
        self.slots = Slots()
        self.ledger = Ledger()
        self.see(fleet or a_fleet(POLICY))

    def see(self, fleet: Fleet) -> None:
        self.rows = Rows.of(fleet, self.slots)
        self.ledger.grow(len(self.slots))
        self.strangers = self.ledger.others(self.rows)

    def price(self, work: Work, cached: tuple[float, ...] = (0.0,) * 4, **weights: Any) -> score.Scores:
        load = score.load_of(self.rows, self.ledger, self.strangers, 1000.0)
        return score.score(self.rows, load, work, np.array(cached), Weights(**weights))


def test_an_idle_fleet_costs_its_prefill_and_its_decode() -> None:
    prices = World().price(Work(prompt=1000, output=100))
    assert prices.why(0) == pytest.approx({"queue": 0.0, "prefill": 0.010 + 0.040, "decode": 100 * 0.0101})
    assert prices.total.tolist() == pytest.approx([0.050 + 1.01] * 4)


def test_a_prompt_takes_whole_steps() -> None:
    """One step for 8,192 tokens, two for one more; a short prompt waits for its step all the same."""
    prefill = [float(World().price(Work(tokens, 0)).terms["prefill"][0]) for tokens in (10, 8192, 8193)]
    assert prefill == pytest.approx([0.010 + 0.040 * 0.01, STEP_S, 2 * 0.010 + 0.040 * 8.193])


def test_time_outside_the_steps_is_part_of_the_first_token() -> None:
    profile = {"source": "t", "a_ms": 10, "c_ms": 0, "d_ms": 0, "e_ms": 40, "front_ms": 5, "front_ms_per_1k": 2}
    prefill = (
        World(a_fleet(a_policy(profiles={"default": profile}))).price(Work(1000, 0), (500.0, 0, 0, 0)).terms["prefill"]
    )
    assert prefill[:2].tolist() == pytest.approx([0.010 + 0.020 + 0.007, 0.010 + 0.040 + 0.007])


def test_cached_tokens_are_not_computed_again_but_one_always_is() -> None:
    prices = World().price(Work(1000, 0), (640.0, 1000.0, 5000.0, 0.0))
    assert prices.uncached.tolist() == [360.0, 1.0, 1.0, 1000.0]
    assert prices.terms["prefill"][0] == pytest.approx(0.010 + 0.040 * 0.36)


def test_our_own_prefill_is_queue_at_once_and_gone_with_the_first_token() -> None:
    world = World()
    world.ledger.place(world.slots.of(world.rows.instances[0]), 2000.0, 2256.0)
    queue = world.price(Work(100, 10)).terms["queue"]
    assert queue[0] == pytest.approx(2000 / (8192 / (STEP_S + 0.0001)), rel=1e-3)
    assert queue[1] == 0.0
    world.ledger.begun(0, 2000.0)
    prices = world.price(Work(100, 10))
    assert prices.terms["queue"][0] == 0.0
    assert prices.terms["decode"][0] > prices.terms["decode"][1], "it decodes still"


def test_a_full_batch_adds_the_turn_for_a_place() -> None:
    few = a_policy(
        profiles={"default": {"source": "t", "a_ms": 10, "c_ms": 0, "d_ms": 0, "e_ms": 40, "max_running": 4}}
    )
    world = World(a_fleet(few, a_0={"running": 4.0}, a_1={"running": 3.0}))
    queue = world.price(Work(100, 50)).terms["queue"]
    assert queue[0] == pytest.approx(1 * 50 * 0.010 / 4)
    assert queue[1] == 0.0


def test_strangers_waiting_are_prefill_ahead_of_us() -> None:
    world = World(a_fleet(POLICY, a_0={"waiting": 3.0}))
    assert world.price(Work(100, 10)).terms["queue"][0] == pytest.approx(3000 / RATE, rel=1e-3)


def test_what_telemetry_reports_of_our_own_is_not_counted_twice() -> None:
    world = World()
    for _ in range(3):
        world.ledger.place(0, 0.0, 100.0)
    world.see(a_fleet(POLICY, a_0={"running": 5.0}))
    running, waiting = world.strangers
    assert (running[0], waiting[0]) == (2.0, 0.0)
    world.see(a_fleet(POLICY, a_0={"running": 1.0, "waiting": 1.0}))
    assert world.strangers[0][0] + world.strangers[1][0] == 0.0


def test_a_request_that_has_just_ended_is_no_stranger_at_the_next_look() -> None:
    world = World()
    world.ledger.place(0, 0.0, 100.0)
    world.see(a_fleet(POLICY, a_0={"running": 1.0}))
    world.ledger.free(0, 0.0, 100.0)
    world.see(a_fleet(POLICY, a_0={"running": 1.0}))
    assert world.strangers[0][0] == 0.0, "the scrape lags"
    world.see(a_fleet(POLICY, a_0={"running": 1.0}))
    assert world.strangers[0][0] == 1.0


def test_a_weight_is_a_plain_ratio() -> None:
    world = World()
    plain, heavy = world.price(Work(1000, 100)), world.price(Work(1000, 100), prefill=3.0, decode=0.0)
    assert heavy.terms["prefill"].tolist() == pytest.approx((plain.terms["prefill"] * 3).tolist())
    assert heavy.terms["decode"].tolist() == [0.0] * 4


def test_long_prompts_pay_for_attention_also_behind_cached_tokens() -> None:
    quad = a_policy(profiles={"default": {"source": "t", "a_ms": 10, "c_ms": 0, "d_ms": 0, "e_ms": 40, "quad_ms": 2.0}})
    world = World(a_fleet(quad))
    load = score.load_of(world.rows, world.ledger, world.strangers, 1000.0)
    seconds = latency.prefill_s(world.rows, load, np.full(4, 1000.0), np.array([0.0, 4000.0, 0.0, 0.0]))
    assert seconds[0] - 0.050 == pytest.approx(2.0 * 1000 * 500 / 1e6 / 1e3)
    assert seconds[1] - 0.050 == pytest.approx(2.0 * 1000 * 4500 / 1e6 / 1e3)


def test_blind_prices_are_least_request_by_our_own_counts() -> None:
    world = World(a_fleet(POLICY, blind=True, a_0={"running": 50.0, "waiting": 9.0}))
    world.ledger.place(1, 0.0, 10.0)
    world.ledger.place(2, 0.0, 10.0)
    world.ledger.place(2, 0.0, 10.0)
    prices = score.score_blind(world.rows, world.ledger, Work(1000, 10))
    assert np.argsort(prices.total, kind="stable").tolist() == [0, 3, 1, 2]


def test_rows_are_sites_end_to_end_and_ready_is_what_telemetry_allows() -> None:
    states = {"a-0": State.STARTING, "a-1": State.DRAINING, "b-0": State.LOST}
    assert World(a_fleet(POLICY, states=states)).rows.ready.tolist() == [False, False, False, True]
    blind = World(a_fleet(POLICY, states=states, blind=True)).rows
    assert blind.ready.tolist() == [True, False, False, True], "nobody knows better of one that was starting"
    assert blind.starts == (0, 2, 4)
    assert blind.site_of.tolist() == [0, 0, 1, 1]


def test_a_slot_outlives_the_row_and_is_never_given_twice() -> None:
    world = World()
    first, *_, last = instances_of(POLICY)
    slot = world.slots.of(last)
    world.see(a_fleet(POLICY, missing=("a-0",)))
    assert world.rows.slots.tolist() == [1, 2, 3]
    world.see(a_fleet(POLICY))
    assert world.slots.of(last) == slot == 3
    assert world.slots.at(first.address) == 0
    assert world.slots.at("10.0.0.1:1") is None


def test_an_instance_may_be_known_before_it_is_seen() -> None:
    slots = Slots()
    *_, last = instances_of(POLICY)
    assert slots.known(last.name, last.address) == 0
    rows = Rows.of(a_fleet(POLICY), slots)
    assert rows.slots.tolist() == [1, 2, 3, 0]
    assert slots.at(last.address) == 0


def test_a_ledger_with_nothing_in_flight_is_exactly_zero() -> None:
    ledger = Ledger()
    ledger.grow(1)
    for share in (0.1, 0.2, 0.3):
        ledger.place(0, share, share)
    for share in (0.3, 0.1, 0.2):
        ledger.free(0, share, share)
    assert (ledger.requests[0], ledger.prefill[0], ledger.tokens[0]) == (0, 0.0, 0.0)


def test_work_is_the_prompt_once_and_the_output_of_every_choice() -> None:
    assert estimate(a_request(prompt_tokens=10, choices=3), 100) == Work(10, 300)
    assert estimate(a_request(prompt_tokens=10, output_budget=20, choices=2), 100) == Work(10, 40)
    assert estimate(a_request(prompt_tokens=10, output_budget=5000), 100) == Work(10, 100)
    assert estimate(a_request(prompt_tokens=10, output_budget=0), 100).total == 10
    assert estimate(a_request(task="embedding", prompt_tokens=10), 100) == Work(10, 0)
