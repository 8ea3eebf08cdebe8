"""How far the simulated engine is from measured hardware: ``python -m loadtest.fidelity``.

Each measured row (``loadtest/traces/silicon.md``) is replayed as the benchmark that made it: so many requests kept in
flight, all started at once, ten times that number in all, means reported. The source does not say how lengths vary;
exactly equal ones would keep all requests in lock-step, which the measured TTFT contradict, so they vary by ±10 %.

Rows whose requests together exceed the KV cache wait for room, not for compute; they are counted and not judged.
``--fit`` fits the timing anew to half of the rows (``fit``) and judges it on the other half (``held``); the shipped
``front_ms`` were fitted to the same half by :func:`fit_front`, the other numbers of the shipped profiles to all rows.
"""

import csv
import gzip
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from extproc.model import Floats, Profile
from loadtest.engine.core import Core
from loadtest.engine.profiles import read_profiles, shipped_profiles
from loadtest.engine.request import EngineRequest, Timing

ROWS = Path(__file__).parent / "traces" / "silicon.csv.gz"
SPREAD = 0.1
WAVES = 10
SETUPS = {
    "glm-5-fp8-h200x8-sglang": "zhipuai/GLM-5",
    "deepseek-r1-fp8-h200x8-sglang": "deepseek-ai/DeepSeek-R1",
    "llama-3.1-70b-fp8-h100x4-vllm": "meta-llama/Llama-3.1-70B",
    "qwen3-32b-h100x4-vllm": "Qwen/Qwen3-32B",
}


@dataclass(frozen=True, slots=True)
class Row:
    """One measurement: tokens in and out, requests in flight, milliseconds."""

    isl: int
    osl: int
    concurrency: int
    ttft_ms: float
    tpot_ms: float

    def fits(self, profile: Profile) -> bool:
        """Return whether the KV cache holds all requests in flight at once."""
        return self.concurrency * (self.isl + self.osl) <= profile.kv_tokens


@dataclass(frozen=True, slots=True)
class Comparison:
    """A row beside its simulation; errors are fractions of the measured value."""

    row: Row
    ttft_ms: float
    tpot_ms: float
    held: bool

    @property
    def ttft_error(self) -> float:
        """Signed."""
        return self.ttft_ms / self.row.ttft_ms - 1

    @property
    def tpot_error(self) -> float:
        """Signed."""
        return self.tpot_ms / self.row.tpot_ms - 1


def read_rows(path: Path = ROWS) -> dict[str, list[Row]]:
    """Return the measured rows by profile name."""
    names = {model: name for name, model in SETUPS.items()}
    rows: dict[str, list[Row]] = {name: [] for name in SETUPS}
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        for one in csv.DictReader(lines):
            row = Row(
                isl=int(one["isl"]),
                osl=int(one["osl"]),
                concurrency=int(one["batch_size"]),
                ttft_ms=float(one["silicon_ttft_ms"]),
                tpot_ms=float(one["silicon_tpot_ms"]),
            )
            rows[names[one["model_path"]]].append(row)
    return rows


def closed_loop(profile: Profile, row: Row, seed: int = 0) -> list[Timing]:
    """Keep ``row.concurrency`` requests in flight, ``WAVES`` times as many in all; return their timings."""
    core, rng = Core(profile), np.random.default_rng(seed)
    total = WAVES * row.concurrency
    isl = np.rint(row.isl * rng.uniform(1 - SPREAD, 1 + SPREAD, total)).astype(int).tolist()
    osl = np.rint(row.osl * rng.uniform(1 - SPREAD, 1 + SPREAD, total)).astype(int).tolist()
    todo = iter([EngineRequest(i, n, m) for i, (n, m) in enumerate(zip(isl, osl, strict=True))])
    for _ in range(row.concurrency):
        core.submit(next(todo), 0.0)
    done: list[Timing] = []
    while (now := core.wake()) is not None:
        ended = [event for event in core.advance(now) if isinstance(event, Timing)]
        done += ended
        for _ in ended:
            if request := next(todo, None):
                core.submit(request, now)
    return done


def simulate(profile: Profile, row: Row) -> tuple[float, float]:
    """Return mean TTFT and mean TPOT of *row*'s benchmark, in milliseconds."""
    done = closed_loop(profile, row)
    ttft = fmean(one.ttft for one in done if one.ttft is not None)
    return 1000 * ttft, 1000 * fmean(one.tpot for one in done if one.tpot is not None)


def halves(rows: Sequence[Row]) -> tuple[list[Row], list[Row]]:
    """Split *rows* at random, always alike, into those to fit and those to judge by."""
    mixed = [rows[i] for i in np.random.default_rng(7).permutation(len(rows))]
    return mixed[::2], mixed[1::2]


def fit(profile: Profile, rows: Sequence[Row]) -> Profile:
    """Return *profile* with its timing fitted to *rows*: steps by least squares on TPOT, then ``front`` on TTFT.

    In a closed loop of C requests each of the others prefills once while one decodes its *osl* tokens, so
    ``tpot = a + c·C + d·C·(isl + osl/2)/1000 + e·isl·(C − 1)/(1000·osl)``.
    """
    terms = np.array(
        [
            [1, r.concurrency, r.concurrency * (r.isl + r.osl / 2) / 1000, r.isl * (r.concurrency - 1) / 1000 / r.osl]
            for r in rows
        ]
    )
    a, c, d, e = _least_squares(terms / np.array([[r.tpot_ms] for r in rows]))
    fitted = replace(profile, a_ms=a, c_ms=c, d_ms=d, e_ms=e, front_ms=0.0, front_ms_per_1k=0.0)
    return fit_front(fitted, rows)


def fit_front(profile: Profile, rows: Sequence[Row]) -> Profile:
    """Return *profile* with the ``front`` that leaves the least mean of absolute relative TTFT errors over *rows*."""
    bare = replace(profile, front_ms=0.0, front_ms_per_1k=0.0)
    simulated = np.array([simulate(bare, row)[0] for row in rows])
    measured, thousands = (np.array([getattr(row, key) for row in rows]) for key in ("ttft_ms", "isl"))
    grid = [(base, slope) for base in np.arange(0, 400, 5.0) for slope in np.arange(0, 100, 2.5)]
    front = [simulated + base + slope * thousands / 1000 for base, slope in grid]
    best = int(np.argmin([np.abs(guess / measured - 1).mean() for guess in front]))
    return replace(profile, front_ms=float(grid[best][0]), front_ms_per_1k=float(grid[best][1]))


def _least_squares(terms: Floats) -> list[float]:
    """Return the non-negative factors that bring each row of *terms* nearest to 1, dropping negative ones in turn."""
    kept = list(range(terms.shape[1]))
    while True:
        found = np.linalg.lstsq(terms[:, kept], np.ones(len(terms)), rcond=None)[0]
        if (found >= 0).all():
            return [float(found[kept.index(i)]) if i in kept else 0.0 for i in range(terms.shape[1])]
        kept.pop(int(np.argmin(found)))


def compare(profile: Profile, rows: Sequence[Row]) -> list[Comparison]:
    """Simulate every row of *rows* that fits the KV cache."""
    fitting = [row for row in rows if row.fits(profile)]
    held = halves(fitting)[1]
    return [Comparison(row, *simulate(profile, row), held=row in held) for row in fitting]


def errors(compared: Iterable[Comparison]) -> dict[str, float | int]:
    """Return the median absolute errors."""
    some = list(compared)
    return {
        "rows": len(some),
        "ttft": round(median(abs(one.ttft_error) for one in some), 4),
        "tpot": round(median(abs(one.tpot_error) for one in some), 4),
    }


def report(refit: bool) -> dict[str, Any]:
    """Compare every set-up; return what ``build/fidelity.json`` holds."""
    profiles, out = read_profiles(shipped_profiles()), {}
    for name, rows in read_rows().items():
        profile = profiles[name]
        if refit:
            profile = fit(profile, halves([row for row in rows if row.fits(profile)])[0])
        compared = compare(profile, rows)
        out[name] = {
            "profile": asdict(profile),
            "all": errors(compared),
            "fit": errors(one for one in compared if not one.held),
            "held": errors(one for one in compared if one.held),
            "saturated_rows": sum(not row.fits(profile) for row in rows),
            "rows": [asdict(one) for one in compared],
        }
    return {"simulated": True, "refit": refit, "spread": SPREAD, "waves": WAVES, "setups": out}


def main(
    out: Annotated[Path, typer.Option(help="Where to write the figures.")] = Path("build/fidelity.json"),
    fit: Annotated[bool, typer.Option("--fit", help="Fit to half of the rows instead of using the profiles.")] = False,
    verbose: Annotated[bool, typer.Option("--rows", help="Print every row.")] = False,
) -> None:
    """Compare the simulated engine with measured hardware."""
    figures = report(fit)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(figures, indent=1) + "\n")
    console = Console(width=120)
    console.print(_summary(figures))
    if verbose:
        console.print(_rows(figures))
    console.print(f"simulated; median absolute error against measured rows; figures in {out}")


def _summary(figures: dict[str, Any]) -> Table:
    table = Table("profile", "rows", "TPOT", "TPOT held", "TTFT", "TTFT held", "saturated, not judged")
    for name, one in figures["setups"].items():
        shares = [f"{100 * one[part][key]:.1f} %" for key in ("tpot", "ttft") for part in ("all", "held")]
        table.add_row(name, str(one["all"]["rows"]), *shares, str(one["saturated_rows"]))
    return table


def _rows(figures: dict[str, Any]) -> Table:
    table = Table("profile", "isl", "osl", "in flight", "TTFT ms", "simulated", "TPOT ms", "simulated", "held")
    for name, one in figures["setups"].items():
        for each in one["rows"]:
            row = each["row"]
            times = (row["ttft_ms"], each["ttft_ms"], row["tpot_ms"], each["tpot_ms"])
            sizes = (str(row[key]) for key in ("isl", "osl", "concurrency"))
            table.add_row(name, *sizes, *(f"{ms:.1f}" for ms in times), "yes" if each["held"] else "")
    return table


if __name__ == "__main__":
    typer.run(main)
