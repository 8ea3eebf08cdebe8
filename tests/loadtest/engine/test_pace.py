import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.model import Profile
from loadtest.engine.pace import decode_s, decode_steps, step_s


def a_pace(**fields: float) -> Profile:
    return Profile(**{"name": "test", "a_ms": 10.0, "c_ms": 0.5, "d_ms": 2.0, "e_ms": 40.0} | fields)  # type: ignore[arg-type]


def test_a_step_is_the_sum_of_its_terms() -> None:
    assert step_s(a_pace(), running=4, kv_tokens=3000, chunks=[(500, 0), (1000, 2000)]) == pytest.approx(
        (10 + 4 * 0.5 + 3 * 2 + 1.5 * 40) / 1000
    )
    pairs = 500 * 250 + 1000 * (2000 + 500)
    plain, long = (step_s(a_pace(quad_ms=q), 4, 3000, [(500, 0), (1000, 2000)]) for q in (0.0, 2.0))
    assert long - plain == pytest.approx(2 * pairs / 1e6 / 1000)


@given(st.integers(1, 200), st.integers(1, 64), st.integers(0, 100_000), st.floats(0, 5))
def test_a_run_of_decode_steps_is_the_sum_of_the_steps_and_can_be_inverted(n: int, b: int, kv: int, d: float) -> None:
    profile = a_pace(d_ms=d)
    total = decode_s(profile, n, b, kv)
    assert total == pytest.approx(sum(step_s(profile, b, kv + i * b) for i in range(n)))
    assert decode_steps(profile, total, b, kv) == pytest.approx(n)
