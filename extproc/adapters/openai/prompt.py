"""The canonical prompt: bytes that stand for what the engine will see, about ``bytes_per_token`` for each token.

Two bodies that render to the same prompt give the same bytes, whatever their spacing and key order, and a conversation
that grows at its end only appends. So the length estimates the tokens, and hashes of whole blocks, each chained to the
one before, tell how much of a prompt two requests share. Images and audio are filled up with their content's hash to
the tokens that the policy counts for them. Bytes 0xFE and 0xFF, which UTF-8 never holds, mark what is not text.
"""

import math
from array import array
from dataclasses import dataclass
from typing import Any, Literal

import orjson
import xxhash

from extproc.adapters.openai.fields import Wrong, wrong
from extproc.policy import ModelSpec

_HEAD_TOKENS = 4
"""Tokens of a chat template around one message: ChatML has 5, Llama 3 and gpt-oss 4."""
_MOST_PIECES = 100_000
"""Messages, parts, tools and prompts of one call: about 50 ms of work, far above any real conversation."""
_USUAL_ROLES = ("system", "developer", "user", "assistant", "tool")
_NEXT_ID = b"\xff\xff\xff\xff"
"""Stands between two token-id prompts of one call: an id that no vocabulary reaches."""

Media = Literal["image", "audio"]


@dataclass(frozen=True, slots=True)
class Scale:
    """How one model's prompts are measured, in bytes of canonical prompt."""

    bytes_per_token: float
    block_tokens: int
    media: dict[str, int]
    heads: dict[str, bytes]
    """The usual roles' message heads."""

    @classmethod
    def of(cls, spec: ModelSpec, block_tokens: int) -> "Scale":
        """Return the scale of a model."""
        per = spec.bytes_per_token
        media = {"image": round(spec.image_tokens * per), "audio": round(spec.audio_tokens * per)}
        return cls(per, block_tokens, media, {role: _head(role, per) for role in _USUAL_ROLES})


def _head(role: str, bytes_per_token: float) -> bytes:
    return (b"\xff" + role.encode()).ljust(round(_HEAD_TOKENS * bytes_per_token), b"\xfe")


class Prompt:
    """A canonical prompt being written. A call's prompt is text or token ids, never both."""

    __slots__ = ("_left", "_marks", "_media_left", "_pieces", "_scale", "_unit")

    def __init__(self, scale: Scale, most_tokens: int) -> None:
        self._scale = scale
        self._pieces: list[bytes] = []
        self._left = _MOST_PIECES
        self._media_left = most_tokens * scale.bytes_per_token
        self._unit = scale.bytes_per_token
        self._marks = 0
        """Token ids in the canonical prompt that are ours, not the caller's."""

    def expect(self, pieces: int, param: str) -> None:
        """Say that so many pieces follow; too many are the caller's mistake."""
        self._left -= pieces
        if self._left < 0:
            raise Wrong(f"{param} is too long: at most {_MOST_PIECES} messages, parts and tools are taken", param)

    def head(self, role: str) -> None:
        """Begin a message."""
        self._pieces.append(self._scale.heads.get(role) or _head(role, self._scale.bytes_per_token))

    def text(self, text: str) -> None:
        """Add text as it stands."""
        self._pieces.append(text.encode())

    def data(self, value: Any) -> None:  # noqa: ANN401 - any JSON value
        """Add a JSON value that templates render as JSON (tools, tool calls)."""
        self._pieces.append(b"\xfe" + orjson.dumps(value, option=orjson.OPT_SORT_KEYS))

    def media(self, part: dict[str, Any], kind: Media) -> None:
        """Add an image or audio part."""
        if self._media_left < 0:
            return  # the prompt is over its limit already; a small body could name gigabytes of images
        digest = xxhash.xxh3_128_digest(orjson.dumps(part, option=orjson.OPT_SORT_KEYS))
        length = max(self._scale.media[kind], len(digest))
        self._media_left -= length
        self._pieces.append((digest * (length // len(digest) + 1))[:length])

    def another(self, text: str) -> None:
        """Add one of several text prompts of the same call."""
        if self._pieces:
            self._pieces.append(b"\xff")
        self._pieces.append(text.encode())

    def another_of_ids(self, ids: list[Any], param: str) -> None:
        """Add one of several prompts given as token ids, which are counted exactly."""
        if set(map(type, ids)) != {int}:
            wrong(param, "must be text or token ids, which are integers")
        if self._pieces:
            self._pieces.append(_NEXT_ID)
            self._marks += 1
        try:
            self._pieces.append(array("I", ids).tobytes())
        except OverflowError:
            wrong(param, "has a token id that is negative or too large")
        self._unit = len(_NEXT_ID)

    def close(self) -> "Measured":
        """Return the whole prompt, measured."""
        whole = b"".join(self._pieces)
        tokens = math.ceil(len(whole) / self._unit) - self._marks
        return Measured(max(tokens, 1), whole, max(round(self._scale.block_tokens * self._unit), 1))


@dataclass(frozen=True, slots=True)
class Measured:
    """A canonical prompt, whole."""

    tokens: int
    whole: bytes
    block_bytes: int

    def blocks(self, root: int) -> tuple[int, ...]:
        """Return the chained 64-bit hashes of the whole blocks; *root* is what the first one is chained to."""
        whole, size, above, digest = self.whole, self.block_bytes, root, xxhash.xxh3_64_intdigest
        chain = []
        for start in range(0, len(whole) - size + 1, size):
            above = digest(whole[start : start + size], above)
            chain.append(above)
        return tuple(chain)


def root(salt: str, model: str, cache_salt: str | None) -> int:
    """Return what a prompt's first block is chained to: prompts share blocks only under one model and cache salt."""
    return xxhash.xxh3_64_intdigest(orjson.dumps((salt, model, cache_salt)))
