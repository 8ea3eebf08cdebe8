"""A validation error of pydantic → a plain sentence for the person who wrote the file.

A sentence says what is allowed. It repeats a value that was written only where the value is one of a fixed set or a
number, so that no secret put in the wrong place reaches a terminal or a log.
"""

import difflib
import re
import types
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic_core import ErrorDetails

from extproc.policy import DNS, HEADER, JURISDICTION, LABEL, NAME, SHA256

FORMS = {
    NAME: "must be letters, digits and . _ : / @ -, beginning with a letter or digit",
    LABEL: "must be letters, digits and . _ -, beginning with a letter or digit",
    JURISDICTION: "must be lower-case letters, digits and -, such as eu or de",
    HEADER: "must be the name of an HTTP header",
    SHA256: "must be the SHA-256 of an API key in 64 lower-case hex digits (printf %s KEY | sha256sum), never the key",
    DNS: "must be `name:port`",
}

_SHAPES = {
    "model_type": "must be a mapping of keys",
    "dict_type": "must be a mapping of keys",
    "tuple_type": "must be a list",
    "frozen_set_type": "must be a list",
    "list_type": "must be a list",
    "string_type": "must be text; put it in quotes",
    "int_type": "must be a whole number",
    "int_parsing": "must be a whole number",
    "int_parsing_size": "the number is too large",
    "float_type": "must be a number",
    "float_parsing": "must be a number",
    "bool_type": "must be true or false",
    "finite_number": "must be a finite number",
}

_BOUNDS: dict[str, Callable[[dict[str, Any]], str]] = {
    "greater_than_equal": lambda ctx: f"must be at least {_number(ctx['ge'])}",
    "greater_than": lambda ctx: f"must be more than {_number(ctx['gt'])}",
    "less_than_equal": lambda ctx: f"must be at most {_number(ctx['le'])}",
    "less_than": lambda ctx: f"must be less than {_number(ctx['lt'])}",
    "too_short": lambda ctx: f"needs at least {ctx['min_length']} {'entry' if ctx['min_length'] == 1 else 'entries'}",
    "too_long": lambda ctx: f"takes at most {ctx['max_length']} entries",
    "string_too_short": lambda ctx: f"needs at least {ctx['min_length']} characters",
    "string_too_long": lambda ctx: f"takes at most {ctx['max_length']} characters",
}


def sentence(error: ErrorDetails, root: object) -> str:
    """Return what is wrong and what is allowed; *root* is the type that was validated."""
    kind, ctx, value = error["type"], error.get("ctx", {}), error["input"]
    path = error["loc"]
    if kind == "extra_forbidden":
        return _unknown(str(path[-1]), _keys(root, path[:-1]))
    if kind == "missing":
        return f"the key is missing{_meaning(root, path)}"
    if value is None and (kind in _SHAPES or kind == "literal_error"):
        return "has no value; write one or remove the key"
    if kind in {"literal_error", "enum"}:
        return one_of(value, re.findall(r"'([^']*)'", ctx["expected"]))
    if kind == "string_pattern_mismatch":
        return FORMS.get(ctx["pattern"], f"does not have the form {ctx['pattern']}")
    if kind in _BOUNDS:
        return _BOUNDS[kind](ctx) + (f", not {_number(value)}" if isinstance(value, int | float) else "")
    return _SHAPES.get(kind) or str(ctx.get("error", error["msg"]))


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:,g}"


def one_of(value: object, allowed: Sequence[str]) -> str:
    """Return the sentence for a value outside a fixed set."""
    hint = f"; did you mean {near}?" if isinstance(value, str) and (near := nearest(value, allowed)) else ""
    return f"must be one of {', '.join(allowed)}{hint}"


def nearest(word: str, known: Iterable[str]) -> str | None:
    """Return the known word that *word* was probably meant to be."""
    lower = {one.lower(): one for one in known}
    found = difflib.get_close_matches(word.lower(), lower, n=1, cutoff=0.6)
    return lower[found[0]] if found else None


def _unknown(key: str, known: Sequence[str]) -> str:
    near = nearest(key, known)
    return "unknown key; " + (f"did you mean {near}?" if near else f"known here: {', '.join(known)}")


def _keys(root: object, path: Sequence[str | int]) -> Sequence[str]:
    section = section_at(root, path)
    return [] if section is None else list(section.model_fields)


def _meaning(root: object, path: Sequence[str | int]) -> str:
    section = section_at(root, path[:-1])
    described = None if section is None else section.model_fields[str(path[-1])].description
    return f": {described}" if described else ""


def section_at(root: object, path: Sequence[str | int]) -> type[BaseModel] | None:
    """Return the model that stands at *path* below the type *root*."""
    here = bare(root)
    for step in path:
        here = _step(here, step)
    return here if isinstance(here, type) and issubclass(here, BaseModel) else None


def _step(kind: object, step: str | int) -> object:
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        field = kind.model_fields.get(str(step))
        return None if field is None else bare(field.annotation)
    arguments = get_args(kind)
    if not arguments:
        return None
    return bare(arguments[1] if get_origin(kind) is dict else arguments[0])


def bare(kind: object) -> object:
    """Return the type without ``Annotated`` and ``| None``."""
    while True:
        if get_origin(kind) is Annotated:
            kind = get_args(kind)[0]
        elif get_origin(kind) in {Union, types.UnionType} and len(some := _without_none(kind)) == 1:
            kind = some[0]
        else:
            return kind


def _without_none(kind: object) -> list[object]:
    return [one for one in get_args(kind) if one is not type(None)]
