import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.adapters.openai import with_priority


@pytest.mark.parametrize(
    ("body", "altered"),
    [
        (b"{}", b'{"priority":7}'),
        (b" { } \n", b' { ,"priority":7} \n'.replace(b",", b"")),
        (b'{"a":1}', b'{"a":1,"priority":7}'),
        (
            b'{ "a": 1.0e2,\n "b": "{\\"priority\\":1}" }\n',
            b'{ "a": 1.0e2,\n "b": "{\\"priority\\":1}" ,"priority":7}\n',
        ),
        (b'{"priority":1}', b'{"priority":7}'),
        (b'{"a":[{"priority":1}], "priority" : -12 ,"z":0}', b'{"a":[{"priority":1}], "priority" : 7 ,"z":0}'),
        (b'{"priority":[1,{"x":2}],"z":0}', b'{"priority":7,"z":0}'),
        (b'{"priority":"a,b}","z":0}', b'{"priority":7,"z":0}'),
        (b'{"priority":null,"priority": 3 }', b'{"priority":7,"priority": 7 }'),
        (b'{"a":{"priority":1}}', b'{"a":{"priority":1},"priority":7}'),
        (b'{"a":"priority"}', b'{"a":"priority","priority":7}'),
        (b'{"priority":1,"priorit\\u0079":2}', b'{"priority":7,"priorit\\u0079":7}'),
        (b'{"priorit\\u0079":2}', b'{"priorit\\u0079":2,"priority":7}'),
        (b'{"a":"{"}', b'{"a":"{","priority":7}'),
        (b"[1]", b"[1]"),
        (b"[{}]", b"[{}]"),
        (b"", b""),
        (b"null", b"null"),
    ],
)
def test_only_the_priority_changes(body: bytes, altered: bytes) -> None:
    assert with_priority(body, 7) == altered


def test_numbers_keep_their_digits() -> None:
    body = b'{"seed":123456789012345678901234567890,"temperature":0.10}'
    assert with_priority(body, -2) == body[:-1] + b',"priority":-2}'


def test_a_long_string_costs_no_stack() -> None:
    body = b'{"a":"' + b'\\"x' * 200_000 + b'","priority":1}'
    assert with_priority(body, 2) == body[:-2] + b"2}"


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text() | st.sampled_from(['"priority":', "{", "}", ',"', "\\"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text() | st.just("priority"), inner, max_size=3),
    max_leaves=12,
)


@given(
    st.dictionaries(st.text() | st.just("priority"), VALUES, max_size=5),
    st.integers(-100, 100),
    st.sampled_from([None, 0, 2]),
    st.booleans(),
)
def test_any_object_differs_in_its_priority_alone(
    value: dict[str, Any], priority: int, indent: int | None, ascii_only: bool
) -> None:
    body = json.dumps(value, indent=indent, ensure_ascii=ascii_only).encode()
    assert json.loads(with_priority(body, priority)) == value | {"priority": priority}
