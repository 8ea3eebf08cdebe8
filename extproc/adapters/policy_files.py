"""The policy folder → :class:`extproc.policy.Policy`, or everything that is wrong with it.

Each problem has its file, its line where one is known, the path of the key and a sentence. A folder is read whole or
not at all. ``fleet.yaml`` must be there; every other file may be missing and then says what its defaults say.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from extproc import policy as written
from extproc.adapters import policy_advice, policy_sentences, yaml_lines
from extproc.policy import Fault, Faults, FleetPolicy, Policy, ProfileSpec, StaticInstance

FILES: Mapping[str, type[BaseModel]] = {
    "gateway": written.Gateway,
    "fleet": FleetPolicy,
    "tenants": written.Tenants,
    "slomax": written.SloMaxPolicy,
    "fleetmind": written.FleetMindPolicy,
    "tokenpilot": written.TokenPilotPolicy,
}
REQUIRED = "fleet"

_WORD = re.compile(r"[\w-]+")
T = TypeVar("T")
_INSTANCES = tuple[StaticInstance, ...]


class Problem(NamedTuple):
    """One thing wrong, in the words of the file."""

    file: Path
    line: int | None
    """Counts from 1; ``None`` where no line is to blame, as with a missing file."""
    where: str
    """Path of the key, such as ``sites[1].rtt_ms``; empty for the file as a whole."""
    message: str

    def __str__(self) -> str:
        """Return ``file:line: where: message``."""
        place = str(self.file) if self.line is None else f"{self.file}:{self.line}"
        return ": ".join(part for part in (place, self.where, self.message) if part)


class PolicyError(Exception):
    """The folder cannot be used; ``problems`` holds every reason."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(map(str, self.problems)))


@dataclass(frozen=True, slots=True)
class Checked:
    """What was found in a folder: ``policy`` is there exactly when ``problems`` is empty."""

    policy: Policy | None
    problems: tuple[Problem, ...]
    warnings: tuple[Problem, ...] = ()
    """Lawful, and probably not meant."""


def load(folder: Path) -> Policy:
    """Return the folder's policy; raises :class:`PolicyError` with every problem."""
    found = examine(folder)
    if found.policy is None:
        raise PolicyError(found.problems)
    return found.policy


def problems(folder: Path) -> tuple[Problem, ...]:
    """Return everything that keeps the folder from being used."""
    return examine(folder).problems


def instances(path: Path) -> tuple[StaticInstance, ...]:
    """Return the list in a file that ``fleet.yaml`` names as ``file``; raises :class:`PolicyError`."""
    source = _Source(path)
    listed = source.read(_INSTANCES)
    if listed is None:
        raise PolicyError(source.problems)
    return listed


def examine(folder: Path) -> Checked:
    """Read and check the whole folder; never raises for what is written there."""
    if not folder.is_dir():
        return Checked(None, (Problem(folder, None, "", "there is no such folder"),))
    read = _Folder(folder)
    found = read.problems()
    if found:
        return Checked(None, tuple(sorted(found, key=lambda one: (one.file, one.line or 0))))
    policy = Policy(**read.parts)
    advice = [read.problem(fault) for fault in policy_advice.advise(policy)]
    return Checked(policy, (), (*advice, *read.absent_lists()))


@dataclass(slots=True)
class _Source:
    """One file: its text, what it says, and what is wrong with it."""

    path: Path
    parsed: yaml_lines.Parsed = field(default_factory=yaml_lines.Parsed)
    problems: list[Problem] = field(default_factory=list)

    def read(self, kind: type[T]) -> T | None:
        """Return the file as *kind*, or ``None`` when it has problems."""
        try:
            self.parsed = yaml_lines.parse(self.path.read_bytes())
        except OSError as error:
            self._add(None, (), f"the file cannot be read: {error.strerror}")
            return None
        for wrong in self.parsed.wrong:
            self._add(wrong.line, wrong.place, wrong.sentence)
        if self.parsed.wrong and self.parsed.data is None:
            return None
        found = self._validate(kind)
        return None if self.parsed.wrong else found

    def _validate(self, kind: type[T]) -> T | None:
        data = self.parsed.data
        if data is None:  # an empty file
            data = [] if kind is _INSTANCES else {}
        try:
            # JSON mode is strict about types (the text "80" is no number) and yet takes a list for a set.
            return TypeAdapter(kind).validate_json(json.dumps(data), strict=True)
        except ValidationError as error:
            for one in _primary(error.errors()):
                for place, message in _said(one, kind):
                    self.at(place, message)
            return None

    def at(self, place: yaml_lines.Place, message: str) -> None:
        """Add a problem at a key."""
        self._add(self.parsed.line(self.parsed.find(place)), self.parsed.find(place), message)

    def _add(self, line: int | None, place: yaml_lines.Place, message: str) -> None:
        self.problems.append(Problem(self.path, line, dotted(place), message))


def _primary(errors: list[ErrorDetails]) -> Iterator[ErrorDetails]:
    """Leave out "too short" for lists whose items, all there, were themselves refused."""
    for one in errors:
        if not (one["type"] == "too_short" and one["input"]):
            yield one


def _said(error: ErrorDetails, kind: object) -> Iterator[tuple[yaml_lines.Place, str]]:
    place = tuple(step for step in error["loc"] if step != "[key]")
    cause = error.get("ctx", {}).get("error")
    if isinstance(cause, Faults):
        for fault in cause.faults:
            yield (*place, *fault.path), fault.sentence
    else:
        yield place, policy_sentences.sentence(error, kind)


class _Folder:
    """All files of one folder, each read once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.sources = {name: _Source(folder / f"{name}.yaml") for name in FILES}
        self.parts: dict[str, Any] = {}
        for name, source in self.sources.items():
            if source.path.exists() or source.path.is_symlink():
                part = source.read(FILES[name])
            elif name == REQUIRED:
                source.problems.append(Problem(source.path, None, "", "the file is missing"))
                continue
            else:
                part = FILES[name]()
            if part is not None:
                self.parts[name] = part
        self.profiles = {path.stem: _Source(path) for path in sorted((folder / "profiles").glob("*.yaml"))}
        read = {name: source.read(ProfileSpec) for name, source in self.profiles.items()}
        self.parts["profiles"] = {name: profile for name, profile in read.items() if profile is not None}

    def problems(self) -> list[Problem]:
        """Return what is wrong within files, between files, and with the files there are."""
        within = [one for source in (*self.sources.values(), *self.profiles.values()) for one in source.problems]
        return [*within, *self._between(), *self._strays(), *self._lists()]

    def problem(self, fault: Fault) -> Problem:
        """Return *fault*, whose path starts with the file, with its line."""
        source = self.sources[str(fault.path[0])]
        place = source.parsed.find(fault.path[1:])
        return Problem(source.path, source.parsed.line(place), dotted(place), fault.sentence)

    @property
    def fleet(self) -> FleetPolicy | None:
        fleet = self.parts.get("fleet")
        return fleet if isinstance(fleet, FleetPolicy) else None

    def _between(self) -> Iterator[Problem]:
        if self.fleet is None:
            return
        # A profile whose file is broken is known all the same: its own problem is told, not a second one.
        known = self.profiles.keys()
        for fault in written.crossing(self.fleet, self.parts.get("tenants"), known):
            yield self.problem(fault)

    def _listed(self) -> Iterator[tuple[tuple[str | int, ...], Path]]:
        for at, group in () if self.fleet is None else self.fleet.groups:
            if group.file is not None:
                yield ("fleet", *at, "file"), self.folder / group.file

    def _lists(self) -> Iterator[Problem]:
        for path in sorted({path for _, path in self._listed() if path.exists()}):
            source = _Source(path)
            source.read(_INSTANCES)
            yield from source.problems

    def absent_lists(self) -> Iterator[Problem]:
        """Warn of watched files that are not there yet."""
        for place, path in self._listed():
            if not path.exists():
                yield self.problem(Fault(place, "the file is not there yet; its instances come when it does"))

    def _strays(self) -> Iterator[Problem]:
        """Refuse misspelled files: ``tennants.yaml`` would leave every tenant at the defaults, unbound."""
        known = {f"{name}.yaml" for name in FILES}
        lists = {path.resolve() for _, path in self._listed()}
        for path in sorted([*self.folder.glob("*.yaml"), *self.folder.glob("*.yml")]):
            near = policy_sentences.nearest(path.name, known)
            if path.name not in known and path.resolve() not in lists and near is not None:
                yield Problem(path, None, "", f"unknown file; did you mean {near}?")


def dotted(place: yaml_lines.Place) -> str:
    """Return a path as people write it: ``sites[1].rtt_ms``; a key that is no plain word is quoted."""
    text = ""
    for step in place:
        if isinstance(step, int):
            text += f"[{step}]"
        else:
            text += ("." if text else "") + (step if _WORD.fullmatch(step) else json.dumps(step))
    return text
