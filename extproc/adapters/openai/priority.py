"""Write the engine priority into a body and leave every other byte as it came."""

import re

import orjson

_TOKEN = re.compile(rb'"(?:[^"\\]++|\\.)*+"|[{}\[\],:]', re.DOTALL)
"""Strings and punctuation of valid JSON; possessive, so that a long string costs no stack."""
_KEY = b'"priority"'


def with_priority(body: bytes, priority: int) -> bytes:
    """Return *body*, a JSON object that :class:`Reader` has accepted, with its top-level ``priority`` set.

    What is there is replaced (each time, where the key is doubled), else it is added at the end, where it also wins
    over a key that is spelled with escapes. Anything but an object is returned as it is.
    """
    number = str(priority).encode()
    if _KEY in body and (spans := _values(body)):
        pieces: list[bytes] = []
        done = 0
        for start, end in spans:
            pieces += body[done:start], number
            done = end
        return b"".join((*pieces, body[done:]))
    closing = body.rfind(b"}")
    if closing < 0 or not body.lstrip().startswith(b"{"):
        return body
    before = body[:closing]
    comma = b"" if before.strip() == b"{" else b","
    return b"".join((before, comma, _KEY, b":", number, body[closing:]))


def _values(body: bytes) -> list[tuple[int, int]]:
    """Return where the values of the top-level keys ``priority`` start and end."""
    spans: list[tuple[int, int]] = []
    depth, key, start = 0, b"", -1
    for token in _TOKEN.finditer(body):
        word = token[0]
        if word in b"{[":
            depth += 1
        elif depth == 1 and word == b":":
            start = token.end()
        elif depth == 1 and word in b",}":
            if start >= 0 and orjson.loads(key) == "priority":
                spans.append(_trimmed(body, start, token.start()))
            key, start = b"", -1
        elif start < 0:
            key = word
        if word in b"}]":
            depth -= 1
    return spans


def _trimmed(body: bytes, start: int, end: int) -> tuple[int, int]:
    """Leave the white space around a value out."""
    value = body[start:end]
    return end - len(value.lstrip()), start + len(value.rstrip())
