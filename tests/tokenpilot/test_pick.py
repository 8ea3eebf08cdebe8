from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from extproc.tokenpilot.pick import best, mixed, pick, spares


def a_draw(
    total: list[float], near: float = 0.0, count: int = 3, seed: int = 0, closed: tuple[int, ...] = ()
) -> list[int]:
    rows = np.ones(len(total), dtype=bool)
    rows[list(closed)] = False
    return pick(np.array(total), rows, near, np.random.default_rng(seed), count)


def test_the_best_is_first_and_the_next_best_follow() -> None:
    assert a_draw([3.0, 1.0, 2.0, 4.0]) == [1, 2, 0]
    assert a_draw([3.0, 1.0, 2.0], closed=(1,)) == [2, 0]
    assert a_draw([3.0], closed=(0,)) == []


def test_near_equals_are_drawn_and_all_come_first_sometimes() -> None:
    drawn = Counter(a_draw([1.0, 1.005, 1.01, 2.0], near=0.02, seed=seed)[0] for seed in range(300))
    assert set(drawn) == {0, 1, 2}
    assert min(drawn.values()) > 60


def test_equal_seeds_give_equal_picks() -> None:
    assert a_draw([1.0] * 50, seed=7) == a_draw([1.0] * 50, seed=7)


def test_what_is_worse_than_near_is_never_drawn() -> None:
    assert {a_draw([1.0, 1.03, 9.0], near=0.02, seed=seed)[0] for seed in range(50)} == {0}


@given(
    st.lists(st.floats(0, 100), min_size=1, max_size=20),
    st.integers(1, 6),
    st.integers(0, 99),
    st.floats(0, 1),
    st.data(),
)
def test_a_pick_is_distinct_open_and_near_the_best(
    total: list[float], count: int, seed: int, near: float, data: st.DataObject
) -> None:
    closed = tuple(data.draw(st.sets(st.integers(0, len(total) - 1))))
    ranked = a_draw(total, near, count, seed, closed)
    open_rows = [row for row in range(len(total)) if row not in closed]
    assert len(ranked) == len(set(ranked)) == min(count, len(open_rows))
    assert set(ranked) <= set(open_rows)
    if ranked:
        cheapest = min(total[row] for row in open_rows)
        assert total[ranked[0]] <= cheapest * (1 + near) + 1e-6
        behind = [total[row] for row in ranked[1:]]
        assert behind == sorted(behind)


def test_spares_fill_up_from_who_is_fit_best_first() -> None:
    total = np.array([4.0, 3.0, 2.0, 1.0])
    fit = np.array([True, True, False, True])
    assert spares(total, fit, [3], 3) == [1, 0]
    assert spares(total, fit, [3], 2) == [1]
    assert spares(total, fit, [3], 1) == []
    assert spares(total, fit, [3, 1], 1) == []


def test_the_best_of_a_site_is_its_cheapest_open_row() -> None:
    assert best(np.array([1.0, 3.0, 2.0]), np.array([False, True, True])) == 2


def test_the_chosen_site_keeps_the_first_two_places_where_it_has_two() -> None:
    assert mixed([1, 2, 3], [8, 9], 3) == [1, 2, 8]
    assert mixed([1, 2, 3], [8], 4) == [1, 2, 3, 8]
    assert mixed([1], [8, 9], 3) == [1, 8, 9]
    assert mixed([1, 2], [8, 9], 2) == [1, 2]
    assert mixed([1, 2], [8], 1) == [1]
    assert mixed([1, 2, 3], [], 3) == [1, 2, 3]
