"""Chats of a given size, no two alike: each starts with a number of its own, so that no prefix is ever found cached."""

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass

SIZES = {"2KB": 2_000, "40KB": 40_000, "400KB": 400_000}
"""Bytes of a body; 400 KB are 100,000 tokens at four bytes each."""
MODEL = "qwen3-32b"
_NUMBER = "@@number@@"
_WORDS = [
    "the",
    "engine",
    "keeps",
    "every",
    "request",
    "that",
    "it",
    "has",
    "begun",
    "while",
    "a",
    "second",
    "queue",
    "waits",
    "for",
    "memory",
    "and",
    "the",
    "operator",
    "reads",
    "what",
    "was",
    "measured",
    "yesterday",
    "against",
    "what",
    "was",
    "promised",
    "to",
    "the",
    "customer",
    "in",
    "Lyon",
    "because",
    "latency",
    "is",
    "a",
    "budget",
    "that",
    "somebody",
    "spends",
    "whether",
    "or",
    "not",
    "anyone",
    "is",
    "counting",
    "so",
    "we",
    "count",
    "tokens",
    "seconds",
    "bytes",
    "and",
    "watts",
    "for",
    "each",
    "answer",
]
_TEMPLATES = 8


@dataclass(frozen=True, slots=True)
class Body:
    """A body with a place for its number."""

    before: bytes
    after: bytes

    def __len__(self) -> int:
        return len(self.before) + 16 + len(self.after)

    def numbered(self, number: int) -> bytes:
        """Return the body whose first message holds *number*."""
        return b"%b%016d%b" % (self.before, number, self.after)


def bodies(size: int, seed: int = 1) -> Iterator[Body]:
    """Yield some templates of *size* bytes each: a system prompt, turns of unequal length, a question."""
    for i in range(_TEMPLATES):
        yield _body(size, random.Random(f"{size}-{seed}-{i}"))


def _body(size: int, rng: random.Random) -> Body:
    system = {"role": "system", "content": f"Case {_NUMBER}. You answer briefly and name your source."}
    messages = [system]
    document = {"model": MODEL, "messages": messages, "max_tokens": 128, "temperature": 0.7}
    while (left := size - _length(document)) > 0:
        role = "user" if len(messages) % 2 else "assistant"
        messages.append({"role": role, "content": ""})
        room = size - _length(document)
        if room <= 0:
            messages.pop()
            system["content"] += "." * left
            break
        messages[-1]["content"] = _prose(rng, min(room, int(size * rng.uniform(0.15, 0.5))))
    before, _, after = json.dumps(document).encode().partition(_NUMBER.encode())
    return Body(before, after)


def _length(document: object) -> int:
    return len(json.dumps(document)) - len(_NUMBER) + 16


def _prose(rng: random.Random, length: int) -> str:
    words: list[str] = []
    total = 0
    while total < length:
        words.append(rng.choice(_WORDS))
        total += len(words[-1]) + 1
    return " ".join(words)[:length].rstrip().ljust(length, ".")
