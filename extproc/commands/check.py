"""``tokenfleet check``: tell whether a policy folder is fit for use, and what it says."""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from extproc import settings
from extproc.adapters import policy_files, policy_table
from extproc.adapters.policy_files import Checked, Problem
from extproc.policy import Policy


def check(
    policy: settings.PolicyFolder = settings.DEFAULT_POLICY,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of lines.")] = False,
    schema: Annotated[
        bool, typer.Option("--schema", help="Print the JSON Schema of each file, for editors, and check nothing.")
    ] = False,
    markdown: Annotated[
        Path | None, typer.Option(help="Renew the key tables between the markers of this file, and check nothing.")
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Count warnings as problems.")] = False,
) -> None:
    """Check a policy folder: every problem with its file, line and a sentence.

    Exits with 0 when the folder can be used and with 1 when it cannot. Warnings are lawful and probably not meant.
    """
    if schema:
        typer.echo(json.dumps({name: kind.model_json_schema() for name, kind in policy_table.TABLES.items()}, indent=2))
        return
    if markdown is not None:
        markdown.write_text(policy_table.rewritten(markdown.read_text(encoding="utf-8")), encoding="utf-8")
        return
    folder = settings.policy_folder(policy)
    found = policy_files.examine(folder)
    if as_json:
        typer.echo(json.dumps(_report(found), indent=2))
    else:
        _tell(found, folder)
    if found.problems or (strict and found.warnings):
        raise typer.Exit(1)


def _report(found: Checked) -> dict[str, object]:
    return {
        "ok": not found.problems,
        "problems": [_entry(problem) for problem in found.problems],
        "warnings": [_entry(warning) for warning in found.warnings],
        "summary": None if found.policy is None else _summary(found.policy),
    }


def _entry(problem: Problem) -> dict[str, object]:
    return {**problem._asdict(), "file": str(problem.file)}


def _tell(found: Checked, folder: Path) -> None:
    console = Console(soft_wrap=True, highlight=False)  # a line that is cut cannot be clicked or searched for
    for problem in found.problems:
        console.print(f"[red]error[/]    {escape(str(problem))}")
    for warning in found.warnings:
        console.print(f"[yellow]warning[/]  {escape(str(warning))}")
    if found.policy is None:
        console.print(f"[red]{_count(len(found.problems), 'problem')}[/]; the folder cannot be used")
    else:
        console.print(f"[green]ok[/]       {escape(str(folder))}: {escape(_summary(found.policy))}")


def _summary(policy: Policy) -> str:
    fleet = policy.fleet
    sites = ", ".join(f"{site.name} (home)" if site.name == fleet.home else site.name for site in fleet.sites)
    listed = sum(len(group.static or ()) for _, group in fleet.groups)
    sought = [group.dns or group.file or "" for _, group in fleet.groups if group.static is None]
    instances = _count(listed, "listed instance")
    if sought:
        instances += f" and those of {', '.join(sought)}"
    classes = ", ".join(one.name for one in policy.slomax.classes)
    tenants = ", ".join(policy.tenants.tenants) or "none by name"
    steered = "" if policy.gateway.steer_percent == 100 else f" Only {policy.gateway.steer_percent:g} % are steered."
    return (
        f"{_count(len(fleet.sites), 'site')}: {sites}; {instances}; "
        f"{_count(len(fleet.models), 'model')}: {', '.join(fleet.models)}; "
        f"{_count(len(policy.slomax.classes), 'class')}: {classes}; "
        f"{_count(len(policy.tenants.tenants), 'tenant')}: {tenants}.{steered}"
    )


def _count(number: int, noun: str) -> str:
    plural = "es" if noun.endswith("s") else "s"
    return f"{number} {noun}{'' if number == 1 else plural}"
