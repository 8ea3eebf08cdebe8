"""The tables of ``policies/README.md``: every key with its unit, default and meaning, from the policy models.

A table stands between ``<!-- keys: FILE -->`` and ``<!-- end -->``; all other text belongs to people.
"""

import re
import types
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from extproc.adapters.policy_files import FILES
from extproc.adapters.policy_sentences import bare
from extproc.policy import ProfileSpec

TABLES: Mapping[str, type[BaseModel]] = {**FILES, "profiles": ProfileSpec}

_UNITS = (
    ("_ms", "ms"),
    ("_s", "s"),
    ("_percent", "%"),
    ("max_body_bytes", "bytes"),
    ("_tokens", "tokens"),
    ("_output_budget", "tokens"),
    ("bytes_per_token", "bytes/token"),
)
_WORDS: Mapping[Any, str] = {bool: "true or false", int: "whole number", float: "number", str: "text"}
_MARKED = re.compile(r"(?P<head><!-- keys: (?P<name>\w+) -->\n).*?(?P<tail><!-- end -->)", re.DOTALL)


class Row(NamedTuple):
    """One key; ``[]`` stands for each item of a list, ``NAME`` for each key of a mapping."""

    key: str
    takes: str
    default: str
    meaning: str


def rewritten(text: str) -> str:
    """Return *text* with every marked table as the models have it now."""
    return _MARKED.sub(lambda found: f"{found['head']}{table(found['name'])}{found['tail']}", text)


def table(name: str) -> str:
    """Return the Markdown table of one file; raises ``KeyError`` for an unknown one."""
    lines = ["| key | takes | default | meaning |", "|---|---|---|---|"]
    lines += [f"| `{row.key}` | {row.takes} | {row.default} | {row.meaning} |" for row in rows(TABLES[name])]
    return "\n".join(lines) + "\n"


def rows(section: type[BaseModel]) -> list[Row]:
    """Return every key of *section* and of the sections in it, in the order of the model."""
    return list(_rows(section, "", {}))


def _rows(section: type[BaseModel], prefix: str, told: dict[type[BaseModel], str]) -> Iterator[Row]:
    for name, field in section.model_fields.items():
        key = f"{prefix}{name}"
        inner, suffix = _inner(field.annotation)
        meaning = (field.description or "").replace("|", "\\|")
        known = told.get(inner) if inner else None
        if known:
            meaning += f" Keys as in `{known}`."
        yield Row(key, _takes(name, field), _default(field), meaning)
        if inner and not known:
            told[inner] = f"{key}{suffix}"
            yield from _rows(inner, f"{key}{suffix}.", told)


def _inner(annotation: object) -> tuple[type[BaseModel] | None, str]:
    """Return the section that a key holds, if any, and how its keys are written after the key."""
    kind, suffix = bare(annotation), ""
    if get_origin(kind) is dict:
        kind, suffix = bare(get_args(kind)[1]), ".NAME"
    elif get_origin(kind) in {tuple, frozenset}:
        kind, suffix = bare(get_args(kind)[0]), "[]"
    return (kind, suffix) if isinstance(kind, type) and issubclass(kind, BaseModel) else (None, "")


def _takes(name: str, field: FieldInfo) -> str:
    words = _words(field.annotation)
    if words in {"number", "whole number"}:
        unit = next((unit for suffix, unit in _UNITS if name.endswith(suffix)), words)
        words = f"whole {unit}" if words == "whole number" and unit != words else unit
    return words + _bounds(field)


def _words(annotation: object) -> str:
    kind = bare(annotation)
    origin, arguments = get_origin(kind), get_args(kind)
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return "section"
    if origin is Literal:
        return " · ".join(f"`{one}`" for one in arguments)
    if origin is dict:
        return "mapping of sections"
    if origin in {tuple, frozenset}:
        inner = _words(arguments[0])
        return "list of sections" if inner == "section" else f"list: {inner}"
    return _WORDS[kind]


def _bounds(field: FieldInfo) -> str:
    """Return the range, wherever the annotation keeps it."""
    found: dict[str, float] = {}
    for constraint in (*field.metadata, *_metadata(field.annotation)):
        for part in (constraint, *getattr(constraint, "metadata", ())):
            found |= {key: getattr(part, key) for key in ("ge", "gt", "le", "lt") if hasattr(part, key)}
    low = _edge("≥", found.get("ge")) or _edge(">", found.get("gt"))
    high = _edge("≤", found.get("le")) or _edge("<", found.get("lt"))
    text = ", ".join(part for part in (low, high) if part)
    return f", {text}" if text else ""


def _metadata(annotation: object) -> Iterator[object]:
    if get_origin(annotation) is Annotated:
        yield from get_args(annotation)[1:]
    elif get_origin(annotation) in {Union, types.UnionType}:
        for one in get_args(annotation):
            yield from _metadata(one)


def _edge(sign: str, value: float | None) -> str:
    return "" if value is None else f"{sign} {_number(value)}"


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "**required**"
    return _written(field.get_default(call_default_factory=True))


def _written(value: object) -> str:
    match value:
        case None:
            return "none"
        case bool():
            return f"`{str(value).lower()}`"
        case int() | float():
            return f"`{_number(value)}`"
        case str():
            return f"`{value}`"
        case BaseModel():
            set_keys = value.model_dump(exclude_defaults=True)
            return ", ".join(f"{key}: {_written(one)}" for key, one in set_keys.items()) or "its own defaults"
        case tuple() | frozenset() if value:
            return "; ".join(_written(one) for one in value)
        case tuple() | frozenset():
            return "`[]`"
        case dict():
            return "`{}`"
        case _:
            raise TypeError(type(value).__name__)


def _number(value: float) -> str:
    return f"{int(value)}" if value == int(value) else f"{value:g}"
