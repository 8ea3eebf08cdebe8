"""Who runs when, and what the slices add up to.

Arms take turns, one slice each, and the round is repeated: drift of the machine hits all of them. Rates and CPU are
medians over an arm's slices, latencies are of all its requests together.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from loadtest.bench.load import Order, Slice
from loadtest.bench.parts import Arm, Failed, Generator


@dataclass(frozen=True, slots=True)
class Cell:
    """A size of body and a number of clients; *path* where it is not the usual one."""

    size: str
    clients: int
    path: str = "/v1/chat/completions"


@dataclass(frozen=True, slots=True)
class Plan:
    """How long."""

    rounds: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Figures:
    """What one arm does in one cell."""

    p50_ms: float
    p99_ms: float
    requests_per_s: float
    python_cpu_us_per_request: float
    envoy_cpu_us_per_request: float


Table = dict[Cell, dict[str, Figures]]
Step = Callable[[str], None]


async def run(generator: Generator, arms: Sequence[Arm], cells: Sequence[Cell], plan: Plan, step: Step) -> Table:
    """Return the figures of every arm in every cell. *step* is told each slice's name before it runs."""
    taken: dict[tuple[Cell, str], list[Slice]] = {}
    for turn in range(plan.rounds):
        for cell in cells:
            for arm in rotated(arms, turn):
                step(f"{cell.size}, {cell.clients} clients, {arm.name}")
                order = Order(arm.port, cell.size, cell.clients, plan.seconds, cell.path, watch=arm.watch())
                found = await generator.run(order)
                if found.failed:
                    raise Failed(f"{arm.name} at {cell.size} did not answer every request: {found.failed}")
                taken.setdefault((cell, arm.name), []).append(found)
    return {cell: {arm.name: figures(taken[cell, arm.name]) for arm in arms} for cell in cells}


def rotated(arms: Sequence[Arm], turn: int) -> list[Arm]:
    """Return *arms* with another one first each turn: none always follows the same."""
    first = turn % len(arms)
    return [*arms[first:], *arms[:first]]


def figures(slices: Sequence[Slice]) -> Figures:
    """Return one arm's figures in one cell; raises :class:`Failed` if nothing was answered."""
    latencies = sorted(one for part in slices for one in part.latencies_us)
    parts = [part for part in slices if part.requests]
    if not parts:
        raise Failed("no request was answered within its slice; make the slices longer")
    return Figures(
        p50_ms=percentile(latencies, 50) / 1000,
        p99_ms=percentile(latencies, 99) / 1000,
        requests_per_s=median(part.requests / part.seconds for part in parts),
        python_cpu_us_per_request=_cpu_us(parts, "python"),
        envoy_cpu_us_per_request=_cpu_us(parts, "envoy"),
    )


def percentile(ordered: Sequence[int], percent: float) -> float:
    """Return the nearest-rank percentile of *ordered* values."""
    rank = max(0, min(len(ordered) - 1, -(-len(ordered) * percent // 100) - 1))
    return float(ordered[int(rank)])


def _cpu_us(parts: Iterable[Slice], who: str) -> float:
    return median(part.cpu_s.get(who, 0.0) * 1e6 / part.requests for part in parts)
