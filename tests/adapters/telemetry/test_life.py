"""States of one instance, told answer by answer."""

from typing import Any

import pytest

from extproc.adapters.telemetry.dialect import Numbers
from extproc.adapters.telemetry.life import Life
from extproc.model import State
from tests.builders import a_reading, an_instance

LOST_AFTER = 3.0


def a_life(**fields: Any) -> Life:
    return Life(an_instance(**fields), LOST_AFTER)


def state(life: Life, now: float) -> State:
    reading = life.reading(now)
    assert reading is not None
    return reading.state


def test_nothing_is_said_before_anything_was_tried() -> None:
    assert a_life().reading(0.0) is None


def test_an_instance_that_never_answered_is_starting_however_long_it_fails() -> None:
    life = a_life()
    for at in range(20):
        life.failed(float(at), "connection refused", refused=True)
    reading = life.reading(20.0)
    assert reading is not None
    assert (reading.state, reading.at, reading.error) == (State.STARTING, 19.0, "connection refused")


def test_a_good_answer_makes_it_ready_with_what_it_said() -> None:
    life = a_life()
    life.loading(1.0, "503")
    assert state(life, 1.0) is State.STARTING
    life.answered(2.0, Numbers(waiting=3, running=4, kv_usage=0.5, prefix_hits=1, prefix_queries=2, kv_blocks=9))
    reading = life.reading(2.5)
    assert reading is not None
    assert (reading.state, reading.at, reading.error) == (State.READY, 2.0, None)
    assert (reading.waiting, reading.running, reading.kv_usage, reading.kv_blocks) == (3, 4, 0.5, 9)


def test_one_that_fails_is_ready_until_its_last_good_answer_is_too_old() -> None:
    life = a_life()
    life.answered(10.0, Numbers(waiting=1))
    life.failed(12.0, "timeout")
    assert state(life, 13.0) is State.READY
    reading = life.reading(13.01)
    assert reading is not None
    assert (reading.state, reading.at, reading.waiting) == (State.LOST, 10.0, 1)


def test_two_refusals_in_a_row_lose_it_at_once_and_one_does_not() -> None:
    life = a_life()
    life.answered(10.0, Numbers())
    life.failed(10.1, "refused", refused=True)
    assert state(life, 10.1) is State.READY
    life.failed(10.2, "timeout")
    life.failed(10.3, "refused", refused=True)
    assert state(life, 10.3) is State.READY
    life.failed(10.4, "refused", refused=True)
    assert state(life, 10.4) is State.LOST


def test_a_lost_one_that_answers_is_ready_again() -> None:
    life = a_life()
    life.answered(0.0, Numbers())
    life.failed(1.0, "refused", refused=True)
    life.failed(1.1, "refused", refused=True)
    life.answered(1.2, Numbers())
    assert state(life, 1.2) is State.READY
    life.failed(1.3, "refused", refused=True)
    assert state(life, 1.3) is State.READY


def test_a_ready_one_that_says_it_loads_is_starting_and_not_lost_by_age() -> None:
    life = a_life()
    life.answered(0.0, Numbers())
    life.loading(1.0, "503")
    assert state(life, 100.0) is State.STARTING
    life.answered(101.0, Numbers())
    assert state(life, 101.0) is State.READY


def test_one_listed_as_draining_drains_while_it_answers() -> None:
    life = a_life(draining=True)
    life.failed(0.0, "timeout")
    assert state(life, 0.0) is State.STARTING
    life.answered(1.0, Numbers())
    assert state(life, 1.0) is State.DRAINING
    assert state(life, 5.0) is State.LOST


@pytest.mark.parametrize(
    ("listed", "adapters", "models"),
    [
        (None, (), None),
        (("m", "n"), (), ("m", "n")),
        (None, ("lora",), ("lora",)),
        (("m",), ("lora",), ("m", "lora")),
        (("m", "lora"), ("lora",), ("m", "lora")),
        ((), (), ()),
    ],
)
def test_models_are_those_listed_and_the_adapters_at_work(
    listed: tuple[str, ...] | None, adapters: tuple[str, ...], models: tuple[str, ...] | None
) -> None:
    life = a_life()
    life.serves(listed)
    life.answered(0.0, Numbers(adapters=adapters))
    reading = life.reading(0.0)
    assert reading is not None
    assert reading.models == models


@pytest.mark.parametrize("before", [State.READY, State.DRAINING])
def test_a_restarted_collector_goes_on_from_the_last_reading(before: State) -> None:
    last = a_reading(state=before, at=10.0, waiting=3.0, running=2.0, kv_usage=0.5, models=("m",), block_tokens=16)
    life = Life(last.instance, LOST_AFTER, last)
    reading = life.reading(11.0)
    assert reading is not None
    assert (reading.state, reading.at, reading.waiting, reading.models) == (State.READY, 10.0, 3.0, ("m",))
    life.failed(11.0, "timeout")
    assert state(life, 12.0) is State.READY
    assert state(life, 13.5) is State.LOST


@pytest.mark.parametrize("before", [State.STARTING, State.LOST])
def test_a_last_reading_that_was_not_well_is_not_gone_on_from(before: State) -> None:
    last = a_reading(state=before, at=10.0)
    assert Life(last.instance, LOST_AFTER, last).reading(11.0) is None
