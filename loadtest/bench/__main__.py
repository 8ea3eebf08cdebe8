"""``python -m loadtest.bench``: run everything, print the table, write the JSON."""

import asyncio
import json
import os
import platform
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from loadtest.bench import held, meshes, parts, report, slices
from loadtest.bench.bodies import SIZES
from loadtest.bench.slices import Cell, Plan

CLIENTS = (1, 32)
OVERHEAD = [Cell(size, clients) for size in SIZES for clients in CLIENTS]
HOP = [Cell("2KB", 1), Cell("2KB", 32), Cell("400KB", 32)]
USAGE = [Cell("2KB", 32), Cell("2KB", 1, "/v1/chat/completions?chunks=64")]
FULL = (Plan(5, 1.5), Plan(4, 1.5))
QUICK = (Plan(2, 0.7), Plan(2, 0.7))


def main(
    quick: Annotated[bool, typer.Option("--quick", help="About a minute; noisier.")] = False,
    out: Annotated[Path, typer.Option(help="JSON to write.")] = Path("build/bench.json"),
    requests: Annotated[
        int, typer.Option("--held", min=0, help="Requests to hold at once; 0 for none.")
    ] = held.REQUESTS,
    rounds: Annotated[int | None, typer.Option(min=1, help="Slices of each arm in each cell.")] = None,
    seconds: Annotated[float | None, typer.Option(min=0.1, help="Length of a slice.")] = None,
    extras: Annotated[bool, typer.Option(help="Also the workers' hop and the usage filter.")] = True,
) -> None:
    """Measure what a request costs, through the real Envoy: direct, a no-op ext_proc, ours."""
    console = Console(width=None if sys.stdout.isatty() else 140)
    first, second = (Plan(rounds or plan.rounds, seconds or plan.seconds) for plan in (QUICK if quick else FULL))
    plans = (first, second)
    try:
        with tempfile.TemporaryDirectory(prefix="tokenfleet-bench-") as folder:
            found = asyncio.run(_run(Path(folder), plans, requests, extras, console))
    except parts.Failed as error:
        console.print(f"[bold red]stopped:[/] {error}", highlight=False)
        raise typer.Exit(1) from None
    overhead, hop, usage, memory = found
    report.show(console, overhead, hop, usage, memory)
    about = {"quick": quick, "plans": [asdict(one) for one in plans], "cpus": os.cpu_count()} | {
        "python": platform.python_version(),
        "machine": platform.machine(),
        "load_average": os.getloadavg(),
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(report.to_json(overhead, hop, usage, memory, about), indent=1) + "\n", encoding="utf-8")
    console.print(f"written to {out}")


async def _run(
    folder: Path, plans: tuple[Plan, Plan], requests: int, extras: bool, console: Console
) -> tuple[slices.Table, slices.Table, slices.Table, held.Held | None]:
    parts.allow_many_files()
    main_plan, extra_plan = plans
    total = main_plan.rounds * len(OVERHEAD) * 3
    total += extra_plan.rounds * 2 * (len(HOP) + len(USAGE)) if extras else 0
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("starting", total=total + 1)

        def step(what: str) -> None:
            progress.update(task, description=what, advance=1)

        first = folder / "cost"
        first.mkdir()
        overhead, hop, usage = await _cost(parts.Parts(first), plans, extras, step)
        if not requests:
            return overhead, hop, usage, None
        second = folder / "held"
        second.mkdir()
        memory = await held.measure(second, requests, lambda what: progress.update(task, description=what))
        return overhead, hop, usage, memory


async def _cost(
    running: parts.Parts, plans: tuple[Plan, Plan], extras: bool, step: slices.Step
) -> tuple[slices.Table, slices.Table, slices.Table]:
    main_plan, extra_plan = plans
    try:
        names = parts.shipped_instances()
        engines = await running.engines(*names.values())
        policies = running.folder / "policies"
        policy = parts.lay_out(policies, dict(zip(names, engines, strict=True)))
        redis = await running.redis()
        await running.collector(policies, redis)
        noop, noop_pid = await running.noop()
        server = await running.server(policies, redis)
        pids = server.pids()
        ours = await running.envoy(report.OURS, meshes.config(policy, server.addresses), pids)
        arms = [
            await running.envoy(report.BASE, meshes.config(policy, (), meshes.DIRECT)),
            await running.envoy(report.NOOP, meshes.config(policy, (noop,), meshes.BARE), (noop_pid,)),
            ours,
        ]
        generator = await running.generator()
        overhead = await slices.run(generator, arms, OVERHEAD, main_plan, step)
        running.alive()
        if not extras:
            return overhead, {}, {}
        without = meshes.config(policy, server.addresses, frozenset({"usage"}))
        plain = await running.envoy(report.PLAIN, without, pids)
        usage = await slices.run(generator, [ours, plain], USAGE, extra_plan, step)
        several = await running.server(policies, redis, workers=2)
        spread = await running.envoy(report.WORKERS, meshes.config(policy, several.addresses), several.pids())
        hop = await slices.run(generator, [ours, spread], HOP, extra_plan, step)
        running.alive()
        return overhead, hop, usage
    finally:
        await running.stop()


if __name__ == "__main__":
    typer.run(main)
