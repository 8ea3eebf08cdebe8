import numpy as np

from extproc.model import Reason
from extproc.policy import ClassSpec, SloMaxPolicy
from extproc.slomax.admission import has_room, refusal_at_deadline, refusal_when_full

FEW = ClassSpec(name="few", max_waiting=2, longest_wait_ms=8000)


def test_an_instance_has_room_below_its_bound_and_none_at_it() -> None:
    room = has_room(np.array([0, 1, 2, 3]), SloMaxPolicy(max_in_flight=2))
    assert room.tolist() == [True, True, False, False]


def test_a_line_is_full_at_its_bound_and_says_when_to_come_back() -> None:
    assert refusal_when_full(FEW, 1, 5.0) is None
    refuse = refusal_when_full(FEW, 2, 5.0)
    assert refuse is not None
    assert (refuse.reason, refuse.klass, refuse.retry_after_s) == (Reason.LINE_FULL, "few", 5.0)


def test_nobody_is_told_to_come_back_within_a_second() -> None:
    refuse = refusal_when_full(FEW, 2, 0.1)
    assert refuse is not None
    assert refuse.retry_after_s == 1.0


def test_a_wait_that_is_over_is_told_how_long_it_was() -> None:
    refuse = refusal_at_deadline(FEW, 8.0)
    assert (refuse.reason, refuse.klass, refuse.retry_after_s) == (Reason.DEADLINE, "few", 4.0)
    assert "8 s" in refuse.detail
