"""The table, the aims beside it, and the JSON."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table as Printed

from loadtest.bench.held import Held
from loadtest.bench.slices import Figures, Table

BASE, NOOP, OURS = "direct", "noop", "tokenfleet"
WORKERS, PLAIN = "tokenfleet-workers", "tokenfleet-no-usage"
THROUGHPUT, ADDED_P50, PER_CORE, BYTES_EACH = 0.85, 1.3, 150.0, 50 * 1024


@dataclass(frozen=True, slots=True)
class Aim:
    """What was aimed at, and what was found."""

    what: str
    aim: str
    found: str
    met: bool


def per_core(figures: Figures) -> float:
    """Return requests a second that one core of Python carries; ``inf`` where Python has no part."""
    spent = figures.python_cpu_us_per_request
    return 1e6 / spent if spent else float("inf")


def aims(overhead: Table, held: Held | None) -> Iterator[Aim]:
    """Yield each aim of the issue with what was found; cells that were not run say nothing."""
    for cell, arms in overhead.items():
        if cell.size == "2KB":
            share = arms[OURS].requests_per_s / arms[NOOP].requests_per_s
            if cell.clients > 1:
                yield Aim(
                    f"2 KB, {cell.clients} clients: throughput", "≥ 85 % of no-op", f"{share:.0%}", share >= THROUGHPUT
                )
            else:
                added = [arms[one].p50_ms - arms[BASE].p50_ms for one in (OURS, NOOP)]
                ratio = added[0] / added[1] if added[1] > 0 else float("inf")
                found = f"{ratio:.2f} × ({added[0]:.2f} ms, no-op {added[1]:.2f} ms)"
                yield Aim("2 KB, 1 client: added p50", "≤ 1.3 × no-op", found, ratio <= ADDED_P50)
        if cell.size == "400KB":
            rate = per_core(arms[OURS])
            what = f"400 KB, {cell.clients} clients: requests/s per Python core"
            yield Aim(what, "≥ 150", f"{rate:.0f}", rate >= PER_CORE)
    if held is not None:
        what = f"memory of each of {held.requests} held requests"
        yield Aim(what, "≤ 50 KB", f"{held.bytes_each / 1024:.1f} KB", held.bytes_each <= BYTES_EACH)
        yield Aim("requests left when their clients had gone", "0", str(held.left_after), not held.left_after)


def to_json(overhead: Table, hop: Table, usage: Table, held: Held | None, about: Mapping[str, Any]) -> dict[str, Any]:
    """Return the issue's shape, and what was measured beside it."""
    return {
        "overhead": _nested(overhead),
        "held": None if held is None else asdict(held),
        "hop": _nested(hop),
        "usage_filter": _nested(usage),
        "aims": [asdict(one) for one in aims(overhead, held)],
        "about": dict(about),
    }


def _nested(table: Table) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for cell, arms in table.items():
        name = f"clients_{cell.clients}"
        for arm, figures in arms.items():
            rounded = {key: round(value, 3) for key, value in asdict(figures).items()}
            tree.setdefault(cell.size, {}).setdefault(arm, {})[name] = rounded
    return tree


def show(console: Console, overhead: Table, hop: Table, usage: Table, held: Held | None) -> None:
    """Print everything."""
    console.print(_table("What a request costs", overhead))
    if hop:
        console.print(_table("What the hop costs: one process, or two workers around a dispatcher", hop))
    if usage:
        console.print(_table("What reading token counts costs in Envoy", usage))
        for line in _usage_lines(usage):
            console.print(line, highlight=False)
    _show_aims(console, aims(overhead, held))


def _table(title: str, table: Table) -> Printed:
    printed = Printed(title=title, title_justify="left")
    printed.add_column("body")
    printed.add_column("clients", justify="right")
    printed.add_column("arm")
    for head in ("requests/s", "p50 ms", "p99 ms", "added p50", "Python µs", "Envoy µs", "per Python core"):
        printed.add_column(head, justify="right")
    for cell, arms in table.items():
        base = arms.get(BASE)
        for arm, one in arms.items():
            added = f"{one.p50_ms - base.p50_ms:.2f}" if base is not None and arm != BASE else ""
            python = one.python_cpu_us_per_request
            printed.add_row(
                cell.size + (" streamed" if "chunks" in cell.path else ""),
                str(cell.clients),
                arm,
                f"{one.requests_per_s:.0f}",
                f"{one.p50_ms:.2f}",
                f"{one.p99_ms:.2f}",
                added,
                f"{python:.0f}" if python else "",
                f"{one.envoy_cpu_us_per_request:.0f}",
                f"{per_core(one):.0f}" if python else "",
            )
        printed.add_section()
    return printed


def _usage_lines(usage: Table) -> Iterator[str]:
    for cell, arms in usage.items():
        with_it, without = (arms[one].envoy_cpu_us_per_request for one in (OURS, PLAIN))
        share = (with_it - without) / with_it
        kind = "streamed" if "chunks" in cell.path else "whole"
        cost = f"{with_it - without:.0f} µs, {share:.0%} of Envoy's {with_it:.0f} µs"
        yield f"usage filter, {cell.size} {kind} answer: {cost}"


def _show_aims(console: Console, found: Iterable[Aim]) -> None:
    printed = Printed(title="Aims", title_justify="left")
    for head in ("what", "aim", "found", ""):
        printed.add_column(head)
    for one in found:
        printed.add_row(one.what, one.aim, one.found, "[green]pass" if one.met else "[red]miss")
    console.print(printed)
