"""YAML 1.2's core schema, with lines, from whatever bytes there are."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.adapters.yaml_lines import Data, parse

PIECES = ["%YAML 1.1\n", "---", "\n", "  ", "- ", ": ", "? ", "a", "b", "&a ", "*a ", "!!x ", "|\n", "'", '"']
PIECES += ["\\x4", "\\ud800", "\\U00110000", "[", "]", "{", "}", ",", "#", "<<", "~", "\t", "é", "\ufeff", "1e9"]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("no", "no"),
        ("'no'", "no"),
        ("true", True),
        ("False", False),
        ("'true'", "true"),
        ("~", None),
        ("null", None),
        ("", None),
        ("12", 12),
        ("-0012", -12),
        ("0o17", 15),
        ("0xFf", 255),
        ("1_000", "1_000"),
        ("0b11", "0b11"),
        ("1:30", "1:30"),
        ("2026-01-01", "2026-01-01"),
        ("1e3", 1000.0),
        (".5", 0.5),
        ("-.inf", float("-inf")),
        ("12 # words", 12),
        ("!!str 12", "12"),
    ],
)
def test_a_plain_scalar_is_what_yaml_1_2_says(text: str, value: Data) -> None:
    parsed = parse(f"key: {text}\n".encode())
    assert parsed.wrong == []
    assert parsed.data == {"key": value}
    assert type(parsed.data["key"]) is type(value)


def test_every_key_and_item_has_its_line() -> None:
    parsed = parse(b"a:\n  b:\n    - 1\n    - c: 2\n\nd: {e: 3,\n  f: 4}\n")
    assert parsed.lines == {
        (): 1,
        ("a",): 1,
        ("a", "b"): 2,
        ("a", "b", 0): 3,
        ("a", "b", 1): 4,
        ("a", "b", 1, "c"): 4,
        ("d",): 6,
        ("d", "e"): 6,
        ("d", "f"): 7,
    }


def test_what_is_not_written_down_has_the_line_of_what_should_hold_it() -> None:
    parsed = parse(b"\na:\n  b: 1\n")
    assert parsed.line(("a", "missing", "deeper")) == 2
    assert parsed.line(("missing",)) == 2


def test_an_item_may_be_found_by_its_value() -> None:
    assert parse(b"a: [x, y]\n").find(("a", "y")) == ("a", 1)


def test_a_byte_order_mark_is_no_part_of_the_first_key() -> None:
    assert parse("\ufeffa: 1\n".encode()).data == {"a": 1}


@given(
    st.binary(max_size=60) | st.lists(st.sampled_from(PIECES), max_size=14).map(lambda parts: "".join(parts).encode())
)
def test_no_bytes_make_it_raise(raw: bytes) -> None:
    parsed = parse(raw)
    assert parsed.data is None or not [wrong for wrong in parsed.wrong if "twice" not in wrong.sentence]
