"""What a client asks for, out of the bodies of five APIs. Only what the simulation needs is looked at."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import xxhash

from loadtest.engine.text import TOKEN_BYTES, Prompt, chat_prompt, pad, token_prompt

Body = Mapping[str, Any]
MEDIA_TOKENS = 800
"""Prompt tokens of an image, a sound or a file: about one picture of 1,024 pixels, whatever its bytes."""


class BadCallError(ValueError):
    """A body that the engine refuses with 400; *param* is the field at fault."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


@dataclass(frozen=True, slots=True)
class Call:
    """One call: *choices* answers to each of *prompts*."""

    model: str
    prompts: tuple[Prompt, ...]
    choices: int = 1
    limit: int | None = None
    """Output tokens of a choice; without it the answer ends by itself."""
    stream: bool = False
    include_usage: bool = False
    priority: int = 0


def read_chat(body: Body) -> Call:
    """Read ``/v1/chat/completions``."""
    limit = _count(body, "max_completion_tokens") or _count(body, "max_tokens")
    return _call(body, (chat_prompt(_messages(body, "messages", _tools(body))),), limit)


def read_completion(body: Body) -> Call:
    """Read ``/v1/completions``: a text, token ids, or a list of either. 16 tokens are the API's own default."""
    return _call(body, _prompts(body, "prompt"), _count(body, "max_tokens") or 16)


def read_embedding(body: Body) -> Call:
    """Read ``/v1/embeddings``."""
    return Call(_model(body), _prompts(body, "input"), limit=1, priority=_integer(body, "priority") or 0)


def read_response(body: Body) -> Call:
    """Read ``/v1/responses``."""
    start = _tools(body)
    if isinstance(body.get("instructions"), str):
        start = [*start, ("system", body["instructions"])]
    if isinstance(body.get("input"), str):
        messages = [*start, ("user", body["input"])]
    else:
        messages = _messages(body, "input", start)
    return _call(body, (chat_prompt(messages),), _count(body, "max_output_tokens"))


def read_message(body: Body) -> Call:
    """Read ``/v1/messages`` (Anthropic), where ``max_tokens`` is required."""
    start = _tools(body)
    if body.get("system"):
        start = [*start, ("system", _text(body["system"]))]
    limit = _count(body, "max_tokens")
    if limit is None:
        raise BadCallError("max_tokens: field required", "max_tokens")
    return _call(body, (chat_prompt(_messages(body, "messages", start)),), limit)


READERS: dict[str, Callable[[Body], Call]] = {
    "/v1/chat/completions": read_chat,
    "/v1/completions": read_completion,
    "/v1/responses": read_response,
    "/v1/messages": read_message,
}


def _call(body: Body, prompts: tuple[Prompt, ...], limit: int | None) -> Call:
    options = body.get("stream_options")
    return Call(
        model=_model(body),
        prompts=prompts,
        choices=_count(body, "n") or 1,
        limit=limit,
        stream=body.get("stream") is True,
        include_usage=isinstance(options, dict) and options.get("include_usage") is True,
        priority=_integer(body, "priority") or 0,
    )


def _model(body: Body) -> str:
    if not isinstance(body.get("model"), str):
        raise BadCallError("model must be a string", "model")
    return str(body["model"])


def _tools(body: Body) -> list[tuple[str, str]]:
    """Return the tool list as the part of the prompt that it becomes."""
    return [("tools", json.dumps(body["tools"], ensure_ascii=False))] if body.get("tools") else []


def _messages(body: Body, key: str, start: list[tuple[str, str]]) -> list[tuple[str, str]]:
    items = body.get(key)
    if not isinstance(items, list) or not items or not all(isinstance(one, dict) for one in items):
        raise BadCallError(f"{key} must be a list of at least one message", key)
    return [*start, *((str(one.get("role", one.get("type", "user"))), _text(one.get("content"))) for one in items)]


def _text(content: object) -> str:
    """Return the text of a message's content; a part that is no text becomes ``MEDIA_TOKENS`` tokens of its hash."""
    if content is None or isinstance(content, str):
        return content or ""
    if isinstance(content, list):
        texts = (one.get("text") if isinstance(one, dict) else None for one in content)
        return "".join(text if isinstance(text, str) else _media(one) for text, one in zip(texts, content, strict=True))
    raise BadCallError("content must be a string or a list of parts", "content")


def _media(part: object) -> str:
    name = f"{xxhash.xxh3_64_intdigest(json.dumps(part).encode()):016x}"
    return name * (MEDIA_TOKENS * TOKEN_BYTES // len(name))


def _prompts(body: Body, key: str) -> tuple[Prompt, ...]:
    match body.get(key):
        case str(text):
            return (Prompt(pad(text.encode())),)
        case [int(), *_] as ids if all(type(one) is int for one in ids):
            return (token_prompt(ids),)
        case [_, *_] as many if all(isinstance(one, (str, list)) for one in many):
            return tuple(prompt for one in many for prompt in _prompts({key: one}, key))
        case _:
            raise BadCallError(f"{key} must be a string, a list of token ids, or a list of either", key)


def _integer(body: Body, key: str) -> int | None:
    value = body.get(key)
    if value is not None and type(value) is not int:
        raise BadCallError(f"{key} must be an integer", key)
    return value


def _count(body: Body, key: str) -> int | None:
    value = _integer(body, key)
    if value is not None and value < 1:
        raise BadCallError(f"{key} must be at least 1, got {value}", key)
    return value
