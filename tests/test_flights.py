"""Placed once, freed once, closed once; the credit goes to whoever served."""

from typing import Any

import pytest

from extproc.accounting import Accounts
from extproc.flights import LOG_GRACE_S, Flight, Flights
from extproc.model import Admit, Ending, Outcome
from extproc.policy import ClassSpec
from extproc.tokenpilot.health import Health
from extproc.tokenpilot.ledger import Ledger
from extproc.tokenpilot.prefix import PrefixIndex
from extproc.tokenpilot.rows import Rows, Slots
from tests.builders import CHAT, a_policy, a_request
from tests.fleets import a_fleet, instances_of

POLICY = a_policy()
INSTANCES = instances_of(POLICY)
A0, A1, B0, B1 = (one.address for one in INSTANCES)
KLASS = ClassSpec(name="standard")
BLOCKS = (11, 12, 13)
DONE = Outcome(Ending.COMPLETED, 200, ttft_s=0.1, duration_s=0.2, output_tokens=5)


class World:
    def __init__(self) -> None:
        self.slots, self.ledger, self.index = Slots(), Ledger(), PrefixIndex(600.0)
        self.health, self.accounts = Health(1, 5.0), Accounts()
        self.flights = Flights(self.slots, self.ledger, self.index, self.health, self.accounts)
        self.rows = Rows.of(a_fleet(POLICY), self.slots)
        self.ledger.grow(len(self.slots))

    def launch(self, name: str = "r1", hosts: tuple[str, ...] = (A0, A1), matched: int = 0, **admit: Any) -> None:
        request = a_request(id=name, blocks=BLOCKS)
        verdict = Admit("a-0", "a", "site-a", hosts, "standard", **admit)
        self.flights.launch(Flight(request, KLASS, verdict, 0, 900.0, 1200.0, matched, 0.0), self.rows, 0.0)

    def end(self, outcome: Outcome, name: str = "r1", now: float = 1.0) -> bool:
        return self.flights.end(name, outcome, self.rows, now)

    def counts(self) -> tuple[int, float, float]:
        ledger = self.ledger
        return int(ledger.requests.sum()), float(ledger.prefill.sum()), float(ledger.tokens.sum())

    def sites(self) -> dict[str, dict[str, int]]:
        return {site: dict(counts.endings) for (_, _, site, _), counts in self.accounts.counts.items()}


def test_a_flight_takes_its_place_and_gives_all_of_it_back() -> None:
    world = World()
    world.launch()
    assert world.counts() == (1, 900.0, 1200.0)
    assert world.end(DONE)
    assert world.counts() == (0, 0.0, 0.0)
    assert not world.end(DONE)
    assert world.sites() == {"a": {"completed": 1}}


def test_the_first_token_ends_the_prefill_once() -> None:
    world = World()
    world.launch("r1")
    world.launch("r2")
    assert world.flights.begin("r1")
    assert not world.flights.begin("r1")
    assert not world.flights.begin("nobody")
    assert world.counts() == (2, 900.0, 2400.0)
    world.end(DONE, "r1")
    assert world.counts() == (1, 900.0, 1200.0)


def test_the_end_of_the_stream_frees_the_place_and_the_log_closes_the_books() -> None:
    world = World()
    world.launch()
    assert world.end(Outcome())
    assert world.counts() == (0, 0.0, 0.0)
    assert world.accounts.counts == {}
    assert world.flights.running() == []
    assert not world.end(Outcome())
    assert not world.flights.begin("r1")
    assert not world.end(DONE)
    assert world.sites() == {"a": {"completed": 1}}
    assert world.counts() == (0, 0.0, 0.0)


def test_the_log_may_come_before_the_end_of_the_stream() -> None:
    world = World()
    world.launch()
    assert world.end(DONE)
    assert not world.end(Outcome())
    world.flights.close_unlogged(world.rows, 1e6)
    assert world.sites() == {"a": {"completed": 1}}


def test_books_without_a_log_entry_are_closed_after_a_grace_and_not_before() -> None:
    world = World()
    world.launch()
    world.end(Outcome(), now=1.0)
    world.flights.close_unlogged(world.rows, 1.0 + LOG_GRACE_S)
    assert world.sites() == {}
    world.flights.close_unlogged(world.rows, 1.01 + LOG_GRACE_S)
    assert world.sites() == {"a": {"abandoned": 1}}
    assert not world.end(DONE)
    assert world.sites() == {"a": {"abandoned": 1}}


def test_who_runs_is_never_closed_for_want_of_a_log_entry() -> None:
    world = World()
    world.launch()
    world.flights.close_unlogged(world.rows, 1e6)
    assert world.flights.running() == ["r1"]


@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("freed", [False, True])
def test_a_withdrawn_flight_leaves_nothing_and_no_word(begun: bool, freed: bool) -> None:
    world = World()
    world.launch()
    if begun:
        world.flights.begin("r1")
    if freed:
        world.end(Outcome())
    world.flights.withdraw("r1")
    world.flights.withdraw("r1")
    world.flights.close_unlogged(world.rows, 1e6)
    assert world.counts() == (0, 0.0, 0.0)
    assert world.sites() == {}
    assert world.flights.placed("r1") is None


# --- credit -----------------------------------------------------------------------------------------------------------


def holders(world: World) -> dict[int, int]:
    return world.index.match(BLOCKS)


def test_the_prompt_is_believed_cached_from_the_admission_on() -> None:
    world = World()
    world.launch()
    assert holders(world) == {0: 3}
    world.end(DONE)
    assert holders(world) == {0: 3}


def test_another_instance_that_served_gets_prefix_and_site_and_the_first_gets_the_failure() -> None:
    world = World()
    world.launch(hosts=(A0, A1, B0))
    world.end(Outcome(Ending.COMPLETED, 200, served=B0, attempts=3, ttft_s=0.1, output_tokens=5))
    assert holders(world) == {2: 3}
    assert world.sites() == {"b": {"completed": 1}}
    assert world.health.resting(1.0) == [0, 1]


def test_a_prefix_that_was_there_before_stays_when_another_served() -> None:
    world = World()
    world.index.insert(0, BLOCKS[:2], 0.0, 100)
    world.launch(matched=2)
    world.end(Outcome(Ending.COMPLETED, 200, served=A1, attempts=2))
    assert holders(world) == {0: 2, 1: 3}


def test_a_success_wakes_who_served() -> None:
    world = World()
    world.health.failed(0, 0.0)
    world.launch()
    world.end(DONE)
    assert world.health.resting(1.0) == []


@pytest.mark.parametrize(
    ("outcome", "resting"),
    [
        (Outcome(Ending.FAILED, 503, served=A0), [0]),
        (Outcome(Ending.FAILED, 503), [0]),
        (Outcome(Ending.FAILED, 503, served=A1, attempts=2), [0, 1]),
        (Outcome(Ending.FAILED, 503, attempts=2), [0, 1]),
        (Outcome(Ending.FAILED, 503, attempts=9), [0, 1]),
        (Outcome(Ending.FAILED, 503, attempts=0), []),
        (Outcome(Ending.FAILED, 503, served="10.9.9.9:1"), []),
        (Outcome(Ending.FAILED, 200, served=A0, ttft_s=0.1), [0]),
        (Outcome(Ending.COMPLETED, 200, served=A0, attempts=2), []),
        (Outcome(Ending.REJECTED, 400, served=A0), []),
        (Outcome(Ending.CANCELLED), []),
        (Outcome(Ending.TIMED_OUT, 504, served=A0), [0]),
        (Outcome(Ending.TIMED_OUT, 504, attempts=0), []),
        (Outcome(Ending.TIMED_OUT, 200, served=A0, ttft_s=0.1), []),
        (Outcome(Ending.ABANDONED), []),
    ],
)
def test_failures_are_counted_against_the_hosts_that_failed(outcome: Outcome, resting: list[int]) -> None:
    world = World()
    world.launch()
    world.end(outcome)
    assert sorted(world.health.resting(1.0)) == resting


@pytest.mark.parametrize(
    ("outcome", "kept"),
    [
        (Outcome(Ending.CANCELLED), False),
        (Outcome(Ending.CANCELLED, 200, ttft_s=0.1), True),
        (Outcome(Ending.FAILED, 503), False),
        (Outcome(Ending.TIMED_OUT, 504), False),
        (Outcome(Ending.COMPLETED, 200), True),
        (Outcome(Ending.COMPLETED, 200, served="10.9.9.9:1"), False),
        (Outcome(Ending.ABANDONED), True),
    ],
)
def test_a_prompt_that_was_never_computed_is_not_believed_cached(outcome: Outcome, kept: bool) -> None:
    world = World()
    world.launch()
    world.end(outcome)
    assert holders(world) == ({0: 3} if kept else {})


def test_blocks_that_a_cut_request_took_back_return_with_the_one_that_completes() -> None:
    world = World()
    world.launch("cut")
    world.launch("whole", matched=3)
    world.end(Outcome(Ending.CANCELLED), "cut")
    assert holders(world) == {}
    world.end(DONE, "whole")
    assert holders(world) == {0: 3}


def test_an_instance_that_left_the_snapshot_still_gives_its_place_back() -> None:
    world = World()
    world.launch()
    world.rows = Rows.of(a_fleet(POLICY, missing=("a-0",)), world.slots)
    world.end(DONE)
    assert world.counts() == (0, 0.0, 0.0)
    assert set(world.accounts.counts) == {("standard", "default", "a", CHAT)}


def test_prefixes_are_bounded_by_what_the_engine_can_hold() -> None:
    world = World()
    request = a_request(id="long", blocks=tuple(range(1, 20_001)), block_tokens=64)
    verdict = Admit("a-0", "a", "site-a", (A0,), "standard")
    world.flights.launch(Flight(request, KLASS, verdict, 0, 1.0, 1.0, 0, 0.0), world.rows, 0.0)
    holds = 500_000 // 64
    assert holds - 8 < world.index.match(request.blocks)[0] <= holds
