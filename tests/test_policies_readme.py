"""``policies/README.md`` lists every key as the models have it."""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from extproc.adapters import policy_files, policy_table

FOLDER = Path(__file__).parents[1] / "policies"
README = (FOLDER / "README.md").read_text(encoding="utf-8")


def sections() -> dict[str, list[list[str]]]:
    """Return the rows of each marked table as the README prints them."""
    found = re.findall(r"<!-- keys: (\w+) -->\n(.*?)<!-- end -->", README, re.DOTALL)
    return {
        name: [re.split(r"(?<!\\) \| ", line.strip("| ")) for line in text.splitlines()[2:]] for name, text in found
    }


def leaves(schema: dict[str, Any], whole: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield every key of a JSON Schema, which pydantic writes itself, independent of our own walk."""
    for one in (schema, *schema.get("anyOf", ())):
        target = whole["$defs"][one["$ref"].rpartition("/")[2]] if "$ref" in one else one
        for name, inner in target.get("properties", {}).items():
            yield f"{prefix}{name}"
            yield from leaves(inner, whole, f"{prefix}{name}.")
        if "items" in target:
            yield from leaves(target["items"], whole, f"{prefix.removesuffix('.')}[].")
        for inner in target.get("patternProperties", {}).values():
            yield from leaves(inner, whole, f"{prefix}NAME.")
        if isinstance(target.get("additionalProperties"), dict):
            yield from leaves(target["additionalProperties"], whole, f"{prefix}NAME.")


def test_every_file_has_its_table() -> None:
    assert sections().keys() == policy_table.TABLES.keys()


@pytest.mark.parametrize(("name", "model"), policy_table.TABLES.items())
def test_every_key_is_listed(name: str, model: type[BaseModel]) -> None:
    schema = model.model_json_schema()
    listed = {row[0].strip("`") for row in sections()[name]}
    keys = set(leaves(schema, schema))
    told_elsewhere = {key for key in keys if key.startswith("tenants.NAME.")} if name == "tenants" else set()
    assert listed == keys - told_elsewhere
    assert {key.replace("tenants.NAME", "default") for key in told_elsewhere} <= listed


def test_the_tables_say_what_the_models_say() -> None:
    assert policy_table.rewritten(README) == README, "run: tokenfleet check --markdown policies/README.md"


@pytest.mark.parametrize(
    ("name", "key", "takes", "default"),
    [
        ("gateway", "steer_percent", "%, ≥ 0, ≤ 100", "`100`"),
        ("gateway", "trust.jwt.path", "list: text", "`payload`; `tenant`"),
        ("fleet", "home", "text", "**required**"),
        ("fleet", "telemetry.scrape_ms", "ms, > 0, ≤ 86400000", "`250`"),
        ("tenants", "unknown", "`default` · `refuse`", "`default`"),
        ("slomax", "classes[].when.min_prompt_tokens", "whole tokens, ≥ 0", "none"),
        ("tokenpilot", "index_ttl_s", "s, > 0, ≤ 86400", "`600`"),
        ("profiles", "e_ms", "ms, > 0", "**required**"),
    ],
)
def test_a_row_has_unit_bounds_and_default(name: str, key: str, takes: str, default: str) -> None:
    rows = {row[0].strip("`"): row for row in sections()[name]}
    assert rows[key][1:3] == [takes, default]


def test_every_key_has_a_meaning() -> None:
    assert [row[0] for rows in sections().values() for row in rows if len(row) != 4 or len(row[3]) < 12] == []


def test_the_residency_example_is_a_good_policy_and_keeps_its_promise(tmp_path: Path) -> None:
    blocks = re.findall(r"```yaml\n# (\w+)\.yaml\n(.*?)```", README, re.DOTALL)
    assert [name for name, _ in blocks] == ["fleet", "tenants"]
    for name, text in blocks:
        (tmp_path / f"{name}.yaml").write_text(text, encoding="utf-8")
    shutil.copytree(FOLDER / "profiles", tmp_path / "profiles")
    found = policy_files.examine(tmp_path)
    assert (found.problems, found.warnings) == ((), ())
    assert found.policy is not None
    lawful = {
        name: [site.name for site in found.policy.fleet.sites if tenant.jurisdictions & site.jurisdictions]
        for name, tenant in found.policy.tenants.tenants.items()
        if tenant.jurisdictions is not None
    }
    assert lawful == {"acme": ["paris", "frankfurt"], "clinic": ["frankfurt"]}


def test_the_watched_list_of_the_readme_is_a_good_one(tmp_path: Path) -> None:
    (text,) = re.findall(r"```yaml\n(- .*?)```", README, re.DOTALL)
    (tmp_path / "list.yaml").write_text(text, encoding="utf-8")
    assert [one.draining for one in policy_files.instances(tmp_path / "list.yaml")] == [False, True]


def test_links_to_sections_lead_somewhere() -> None:
    heads = {
        re.sub(r"[^\w -]", "", head).replace(" ", "-").lower()
        for head in re.findall(r"^## (.+)$", README, re.MULTILINE)
    }
    assert set(re.findall(r"\]\(#([^)]+)\)", README)) <= heads
