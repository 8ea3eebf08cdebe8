"""The simulated engine against measured rows; ``python -m loadtest.fidelity`` prints the whole comparison."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from extproc.model import Profile
from loadtest.engine.profiles import read_profile, read_profiles, shipped_profiles
from loadtest.fidelity import SETUPS, Row, closed_loop, compare, errors, fit_front, halves, main, read_rows, simulate

ROWS = read_rows()


@pytest.mark.parametrize("name", list(SETUPS))
def test_time_per_token_is_within_a_tenth_of_the_hardwares(name: str) -> None:
    judged = compare(read_profiles(shipped_profiles())[name], ROWS[name])
    assert len(judged) >= 13
    assert errors(judged)["tpot"] <= 0.10
    assert errors(one for one in judged if one.held)["tpot"] <= 0.10
    assert errors(judged)["ttft"] <= 0.25


@pytest.mark.parametrize(
    ("name", "isl", "osl", "concurrency", "ttft_ms", "tpot_ms", "ttft_off"),
    [
        ("llama-3.1-70b-fp8-h100x4-vllm", 8192, 1024, 16, 731.5, 21.06, 0.15),
        ("llama-3.1-70b-fp8-h100x4-vllm", 1024, 8192, 64, 261.4, 23.41, 0.1),
        ("qwen3-32b-h100x4-vllm", 4096, 512, 32, 633.5, 22.03, 0.2),
        ("deepseek-r1-fp8-h200x8-sglang", 8192, 1024, 8, 502.6, 14.37, 0.6),
        ("glm-5-fp8-h200x8-sglang", 1024, 8192, 32, 319.3, 31.28, 0.6),
    ],
)
def test_some_measured_rows_are_met(
    name: str, isl: int, osl: int, concurrency: int, ttft_ms: float, tpot_ms: float, ttft_off: float
) -> None:
    row = next(one for one in ROWS[name] if (one.isl, one.osl, one.concurrency) == (isl, osl, concurrency))
    assert (row.ttft_ms, row.tpot_ms) == pytest.approx((ttft_ms, tpot_ms), rel=0.01)
    ttft, tpot = simulate(read_profile(shipped_profiles() / f"{name}.yaml"), row)
    assert tpot == pytest.approx(tpot_ms, rel=0.10)
    assert ttft == pytest.approx(ttft_ms, rel=ttft_off)  # one constant cannot say all that SGLang does to a TTFT


def test_a_full_kv_cache_shows_as_waiting_as_it_did_on_the_hardware() -> None:
    name = "glm-5-fp8-h200x8-sglang"
    profile = read_profile(shipped_profiles() / f"{name}.yaml")
    full = [row for row in ROWS[name] if not row.fits(profile)]
    assert len(full) == 2
    for row in full:
        assert row.ttft_ms > 15_000
        assert simulate(profile, row)[0] == pytest.approx(row.ttft_ms, rel=0.5)


def test_the_closed_loop_keeps_its_concurrency() -> None:
    profile = Profile("test", 10.0, 0.1, 0.0, 10.0)
    done = closed_loop(profile, Row(isl=100, osl=20, concurrency=4, ttft_ms=1, tpot_ms=1))
    assert len(done) == 40
    moments = sorted([(one.arrived, 1) for one in done] + [(one.finished, -1) for one in done])
    inside = 0
    for _, change in moments:
        inside += change
        assert inside <= 4


@pytest.mark.parametrize("name", list(SETUPS))
def test_the_shipped_front_is_what_half_of_the_rows_give(name: str) -> None:
    profile = read_profile(shipped_profiles() / f"{name}.yaml")
    fitted = fit_front(profile, halves([row for row in ROWS[name] if row.fits(profile)])[0])
    assert (fitted.front_ms, fitted.front_ms_per_1k) == (profile.front_ms, profile.front_ms_per_1k)


def test_the_default_profile_is_a_measured_one() -> None:
    profiles = read_profiles(shipped_profiles())
    default = profiles.pop("default")
    assert any(_same(default, profile) for profile in profiles.values())


def _same(one: Profile, other: Profile) -> bool:
    return all(getattr(one, key) == getattr(other, key) for key in Profile.__slots__ if key != "name")


def test_the_command_writes_its_figures_and_says_that_they_are_simulated(tmp_path: Path) -> None:
    import typer

    app = typer.Typer()
    app.command()(main)
    result = CliRunner().invoke(app, ["--out", str(tmp_path / "fidelity.json")])
    assert result.exit_code == 0, result.output
    assert "simulated" in result.output
    figures = json.loads((tmp_path / "fidelity.json").read_text())
    assert figures["simulated"] is True
    assert set(figures["setups"]) == set(SETUPS)
    assert figures["setups"]["qwen3-32b-h100x4-vllm"]["all"]["rows"] == 30
