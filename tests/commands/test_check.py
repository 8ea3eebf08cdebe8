"""``tokenfleet check`` as a person or a pipeline meets it."""

import json
import shutil
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from extproc.adapters import policy_table
from extproc.commands.check import check

SHIPPED = Path(__file__).parents[2] / "policies"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(SHIPPED, tmp_path / "policies"))


def run(*arguments: str) -> Result:
    app = typer.Typer()
    app.command()(check)
    return CliRunner().invoke(app, arguments)


def flat(result: Result) -> str:
    return " ".join(result.output.split())


def test_a_good_folder_is_summed_up_and_exits_with_0(folder: Path) -> None:
    result = run("--policy", str(folder))
    assert result.exit_code == 0
    assert (
        "2 sites: paris (home), virginia; 6 listed instances; 2 models: qwen3-32b, llama-3.1-70b; "
        "4 classes: batch, long-context, chat, standard; 3 tenants: acme, globex, batchworks."
    ) in flat(result)


def test_a_broken_folder_lists_every_problem_and_exits_with_1(folder: Path) -> None:
    text = (folder / "fleet.yaml").read_text()
    (folder / "fleet.yaml").write_text(text.replace("rtt_ms: 80", "rtt_m: 80"))
    (folder / "gateway.yaml").write_text("debug: maybe\n")
    result = run("--policy", str(folder))
    line = text[: text.index("rtt_ms: 80")].count("\n") + 1
    assert result.exit_code == 1
    assert f"{folder}/fleet.yaml:{line}: sites[1].rtt_m: unknown key; did you mean rtt_ms?" in result.output
    assert f"{folder}/gateway.yaml:1: debug: must be true or false" in result.output
    assert "2 problems; the folder cannot be used" in flat(result)


def test_a_place_in_brackets_is_not_taken_for_markup(folder: Path) -> None:
    (folder / "slomax.yaml").write_text("classes:\n  - {name: '[red]'}\n")
    assert "slomax.yaml:2: classes[0].name: must be" in run("--policy", str(folder)).output


def test_json_is_for_programs(folder: Path) -> None:
    (folder / "tokenpilot.yaml").write_text("hosts: 0\n")
    result = run("--policy", str(folder), "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout) == {
        "ok": False,
        "problems": [
            {"file": f"{folder}/tokenpilot.yaml", "line": 1, "where": "hosts", "message": "must be at least 1, not 0"}
        ],
        "warnings": [],
        "summary": None,
    }


def test_warnings_fail_only_a_strict_check(folder: Path) -> None:
    (folder / "tenants.yaml").write_text("tenants: {x: {jurisdictions: [jp]}}\n")
    (folder / "slomax.yaml").unlink()
    lenient, strict = run("--policy", str(folder)), run("--policy", str(folder), "--strict")
    assert (lenient.exit_code, strict.exit_code) == (0, 1)
    assert "warning" in lenient.output
    assert "no site that serves qwen3-32b, llama-3.1-70b is lawful for this tenant" in lenient.output
    assert len(json.loads(run("--policy", str(folder), "--json").stdout)["warnings"]) == 1


def test_a_shadow_share_is_said_aloud(folder: Path) -> None:
    (folder / "gateway.yaml").write_text("steer_percent: 5\n")
    assert "Only 5 % are steered." in flat(run("--policy", str(folder)))


def test_instances_found_at_run_time_are_named(folder: Path) -> None:
    (folder / "fleet.yaml").write_text(
        "home: a\nmodels: {qwen3-32b: {}}\nsites:\n  - name: a\n    instances: [{models: [qwen3-32b], dns: 'e:80'}]\n"
    )
    for name in ("tenants.yaml", "slomax.yaml"):
        (folder / name).unlink()
    assert "1 site: a (home); 0 listed instances and those of e:80; 1 model" in flat(run("--policy", str(folder)))


def test_the_folder_may_come_from_the_environment(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "gateway.yaml").write_text("debug: maybe\n")
    monkeypatch.setenv("TOKENFLEET_POLICY", str(folder))
    assert run().exit_code == 1


def test_schema_covers_every_file() -> None:
    schema = json.loads(run("--schema").stdout)
    assert schema.keys() == policy_table.TABLES.keys()
    assert schema["gateway"]["additionalProperties"] is False
    assert schema["gateway"]["properties"]["steer_percent"]["maximum"] == 100
    assert schema["fleet"]["required"] == ["home", "models", "sites"]


def test_markdown_renews_the_tables_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "README.md"
    path.write_text("before\n<!-- keys: fleetmind -->\nstale\n<!-- end -->\nafter\n")
    assert run("--markdown", str(path)).exit_code == 0
    text = path.read_text()
    assert text.startswith("before\n<!-- keys: fleetmind -->\n| key |")
    assert text.endswith("<!-- end -->\nafter\n")
    assert "`margin_ms` | ms, ≥ 0, ≤ 600000 | `50` |" in text
    assert "stale" not in text
