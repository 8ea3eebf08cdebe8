from math import inf

import pytest

from extproc.fleetmind.choose import choose, others
from extproc.policy import FleetMindPolicy

POLICY = FleetMindPolicy(margin_ms=50)


@pytest.mark.parametrize(
    ("cost", "chosen"),
    [
        ({"home": 1.0, "away": 1.0}, "home"),
        ({"home": 1.0, "away": 0.951}, "home"),
        ({"home": 1.0, "away": 0.949}, "away"),
        ({"home": inf, "away": 9.0}, "away"),
        ({"home": 9.0, "away": inf}, "home"),
        ({"away": 2.0, "far": 1.0}, "far"),
        ({"home": inf, "away": 1.0, "b": 1.0}, "away"),
        ({"home": inf, "away": inf}, None),
        ({}, None),
    ],
)
def test_home_unless_another_site_is_better_by_more_than_the_margin(cost: dict[str, float], chosen: str | None) -> None:
    assert choose(cost, "home", POLICY) == chosen


def test_home_wins_a_tie_without_a_margin_wherever_its_name_sorts() -> None:
    none = FleetMindPolicy(margin_ms=0)
    assert choose({"a": 1.0, "m": 1.0, "z": 1.0}, "m", none) == "m"


def test_the_others_follow_cheapest_first_and_only_where_there_is_room() -> None:
    assert others({"home": 1.0, "c": 2.0, "b": 3.0, "full": inf, "a": 2.0}, "home") == ["a", "c", "b"]
    assert others({"home": 1.0}, "home") == []
