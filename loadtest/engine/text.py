"""Prompts as tokens and KV block names, answers as words: a stand-in for a tokenizer and a model.

Four bytes are a token, in prompts and in answers, so that an answer repeated in the next prompt fills the same blocks.
Everything follows from the prompt's bytes: the same prompt gets the same answer and the same length.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import xxhash

TOKEN_BYTES = 4
WORDS = (
    " the and for all can one out day get has her his how new now old see two way who did its let put say she too use"
    " sun sea sky ice air oak elm fox owl bee run sit eat fly row sew dig win ask add key map pen ink box cup jar pot"
)
"""Each a space and three letters: one token."""
LONGEST = 1024
SHORTEST = 16


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt's bytes, a whole number of tokens."""

    data: bytes

    @property
    def tokens(self) -> int:
        """At least one."""
        return max(1, len(self.data) // TOKEN_BYTES)

    @property
    def seed(self) -> int:
        """64 bits that stand for the prompt."""
        return int(xxhash.xxh3_64_intdigest(self.data))


def pad(data: bytes) -> bytes:
    """Return *data* filled up with spaces to whole tokens."""
    return data + b" " * (-len(data) % TOKEN_BYTES)


def chat_prompt(messages: Sequence[tuple[str, str]]) -> Prompt:
    """Return the prompt for (role, text) pairs.

    Every role begins on a token's border, so that one conversation's prompts are prefixes of each other.
    """
    parts = [pad(f"\n<{role}>".encode()) + pad(text.encode()) for role, text in messages]
    return Prompt(b"".join(parts) + pad(b"\n<assistant>"))


def token_prompt(ids: Sequence[int]) -> Prompt:
    """Return the prompt for token ids."""
    return Prompt(b"".join((one & 0xFFFFFFFF).to_bytes(TOKEN_BYTES, "little") for one in ids))


def natural_length(prompt: Prompt, choice: int = 0) -> int:
    """Return the answer's length where the caller sets no limit: log-uniform from 16 to 1,024 tokens."""
    share: float = xxhash.xxh3_64_intdigest(choice.to_bytes(8, "little"), prompt.seed) / 2**64
    return round(SHORTEST * math.exp(share * math.log(LONGEST / SHORTEST)))


def words(prompt: Prompt, count: int, choice: int = 0) -> list[str]:
    """Return an answer of *count* tokens."""
    state = prompt.seed ^ choice
    known = len(WORDS) // TOKEN_BYTES
    chosen = []
    for _ in range(count):
        state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
        first = (state >> 33) % known * TOKEN_BYTES
        chosen.append(WORDS[first : first + TOKEN_BYTES])
    return chosen


def block_names(data: bytes, block_tokens: int, parent: int | None = None) -> tuple[int, ...]:
    """Return a name for each whole block of *data*; it stands for that block and, through *parent*, all before."""
    size = block_tokens * TOKEN_BYTES
    name = 0 if parent is None else parent
    names = []
    for start in range(0, len(data) - size + 1, size):
        name = xxhash.xxh3_64_intdigest(data[start : start + size], name)
        names.append(name)
    return tuple(names)
