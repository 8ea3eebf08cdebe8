from typing import Any

import pytest

from loadtest.bench.load import Order, Slice
from loadtest.bench.parts import Arm, Failed
from loadtest.bench.slices import Cell, Plan, figures, percentile, rotated, run


def a_slice(requests: int = 10, **fields: Any) -> Slice:
    cpu_s = {"python": 0.01, "envoy": 0.02}
    base: dict[str, Any] = {"seconds": 1.0, "latencies_us": [1000] * requests, "cpu_s": cpu_s, "failed": {}}
    return Slice(requests=requests, **base | fields)


class Scripted:
    """A generator that remembers its orders."""

    def __init__(self, **fields: Any) -> None:
        self.ports: list[int] = []
        self.fields = fields

    async def run(self, order: Order) -> Slice:
        self.ports.append(order.port)
        return a_slice(order.port, **self.fields)


ARMS = [Arm("a", 1, 0), Arm("b", 2, 0), Arm("c", 3, 0)]
CELL = Cell("2KB", 1)


def test_a_percentile_is_the_nearest_rank() -> None:
    ordered = list(range(1, 101))
    assert [percentile(ordered, one) for one in (1, 50, 99, 100)] == [1, 50, 99, 100]
    assert percentile([5], 99) == 5


def test_rates_and_cpu_are_medians_so_that_one_bad_slice_moves_nothing() -> None:
    bad = a_slice(1, cpu_s={"python": 5.0, "envoy": 5.0})
    found = figures([a_slice(), bad, a_slice()])
    assert found.requests_per_s == 10
    assert found.python_cpu_us_per_request == pytest.approx(1000)
    assert found.envoy_cpu_us_per_request == pytest.approx(2000)


def test_latencies_are_of_all_slices_together() -> None:
    found = figures([a_slice(latencies_us=[1000] * 90), a_slice(latencies_us=[9000] * 10)])
    assert (found.p50_ms, found.p99_ms) == (1.0, 9.0)


def test_nothing_answered_is_no_figure() -> None:
    with pytest.raises(Failed):
        figures([a_slice(0)])


async def test_arms_take_turns_and_none_is_always_first() -> None:
    generator = Scripted()
    steps: list[str] = []
    table = await run(generator, ARMS, [CELL], Plan(3, 0.1), steps.append)  # type: ignore[arg-type]
    assert generator.ports == [1, 2, 3, 2, 3, 1, 3, 1, 2]
    assert {name: one.requests_per_s for name, one in table[CELL].items()} == {"a": 1, "b": 2, "c": 3}
    assert len(steps) == 9
    assert [arm.name for arm in rotated(ARMS, 4)] == ["b", "c", "a"]


async def test_an_answer_that_is_no_200_ends_the_run() -> None:
    generator = Scripted(failed={"HTTP/1.1 503 Service Unavailable": 1})
    with pytest.raises(Failed, match="503"):
        await run(generator, ARMS, [CELL], Plan(1, 0.1), lambda _: None)  # type: ignore[arg-type]
