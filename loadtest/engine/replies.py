"""Answers in the words of four APIs, streamed and whole, as vLLM 0.32 writes them where it serves the API."""

# ruff: noqa: ARG002 - each API needs some of what the Protocol hands to all

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import orjson

Finish = Literal["stop", "length"]
DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one call, all choices together."""

    prompt: int
    cached: int
    output: int

    def openai(self) -> dict[str, Any]:
        """Return the ``usage`` object of chat and completions."""
        return {
            "prompt_tokens": self.prompt,
            "total_tokens": self.prompt + self.output,
            "completion_tokens": self.output,
            "prompt_tokens_details": {"cached_tokens": self.cached},
        }


@dataclass(frozen=True, slots=True)
class Choice:
    """A finished answer."""

    index: int
    text: str
    finish: Finish


class Reply(Protocol):
    """One API's way to answer; each frame is a whole server-sent event."""

    def opening(self, choices: int, usage: Usage) -> bytes:
        """Return what comes with the first token."""
        ...

    def token(self, index: int, text: str, finish: Finish | None) -> bytes:
        """Return one token; *finish* with the last of its choice."""
        ...

    def closing(self, choices: Sequence[Choice], usage: Usage, include_usage: bool) -> bytes:
        """Return what follows the last token."""
        ...

    def whole(self, choices: Sequence[Choice], usage: Usage) -> dict[str, Any]:
        """Return the body of an answer that is not streamed."""
        ...


def frame(data: Any, event: str | None = None) -> bytes:  # noqa: ANN401 - JSON
    """Return a server-sent event."""
    head = b"" if event is None else f"event: {event}\n".encode()
    return head + b"data: " + orjson.dumps(data) + b"\n\n"


def error_body(status: int, message: str, kind: str, param: str | None = None) -> dict[str, Any]:
    """Return vLLM's error object."""
    return {"error": {"message": message, "type": kind, "param": param, "code": status}}


@dataclass(frozen=True, slots=True)
class ChatReply:
    """``/v1/chat/completions``."""

    id: str
    model: str
    created: int

    def opening(self, choices: int, usage: Usage) -> bytes:
        """Return what comes with the first token."""
        delta = {"role": "assistant", "content": ""}
        return b"".join(self._chunk([_choice(i, None, delta=delta)]) for i in range(choices))

    def token(self, index: int, text: str, finish: Finish | None) -> bytes:
        """Return one token."""
        return self._chunk([_choice(index, finish, delta={"content": text})])

    def closing(self, choices: Sequence[Choice], usage: Usage, include_usage: bool) -> bytes:
        """Return what follows the last token."""
        return (self._chunk([], usage=usage.openai()) if include_usage else b"") + DONE

    def whole(self, choices: Sequence[Choice], usage: Usage) -> dict[str, Any]:
        """Return the body of an answer that is not streamed."""
        listed = [_choice(c.index, c.finish, message={"role": "assistant", "content": c.text}) for c in choices]
        return self._object("chat.completion", listed) | {"usage": usage.openai()}

    def _chunk(self, choices: list[dict[str, Any]], **more: object) -> bytes:
        return frame(self._object("chat.completion.chunk", choices) | more)

    def _object(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": f"chatcmpl-{self.id}",
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }


@dataclass(frozen=True, slots=True)
class CompletionReply:
    """``/v1/completions``."""

    id: str
    model: str
    created: int

    def opening(self, choices: int, usage: Usage) -> bytes:
        """Return what comes with the first token."""
        return b""

    def token(self, index: int, text: str, finish: Finish | None) -> bytes:
        """Return one token."""
        return frame(self._object([_choice(index, finish, text=text)]))

    def closing(self, choices: Sequence[Choice], usage: Usage, include_usage: bool) -> bytes:
        """Return what follows the last token."""
        return (frame(self._object([]) | {"usage": usage.openai()}) if include_usage else b"") + DONE

    def whole(self, choices: Sequence[Choice], usage: Usage) -> dict[str, Any]:
        """Return the body of an answer that is not streamed."""
        listed = [_choice(one.index, one.finish, text=one.text) for one in choices]
        return self._object(listed) | {"usage": usage.openai()}

    def _object(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": f"cmpl-{self.id}",
            "object": "text_completion",
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }


@dataclass(frozen=True, slots=True)
class ResponseReply:
    """``/v1/responses``: one answer, the events a text client needs."""

    id: str
    model: str
    created: int

    def opening(self, choices: int, usage: Usage) -> bytes:
        """Return what comes with the first token."""
        return self._event("response.created", response=self._object("in_progress", [], None))

    def token(self, index: int, text: str, finish: Finish | None) -> bytes:
        """Return one token."""
        return self._event("response.output_text.delta", item_id=f"msg_{self.id}", output_index=index, delta=text)

    def closing(self, choices: Sequence[Choice], usage: Usage, include_usage: bool) -> bytes:
        """Return what follows the last token."""
        return self._event("response.completed", response=self._object("completed", choices, usage))

    def whole(self, choices: Sequence[Choice], usage: Usage) -> dict[str, Any]:
        """Return the body of an answer that is not streamed."""
        return self._object("completed", choices, usage)

    def _object(self, status: str, choices: Sequence[Choice], usage: Usage | None) -> dict[str, Any]:
        counts = usage and {
            "input_tokens": usage.prompt,
            "input_tokens_details": {"cached_tokens": usage.cached},
            "output_tokens": usage.output,
            "total_tokens": usage.prompt + usage.output,
        }
        output = [
            {
                "id": f"msg_{self.id}",
                "type": "message",
                "role": "assistant",
                "status": status,
                "content": [{"type": "output_text", "text": one.text, "annotations": []}],
            }
            for one in choices
        ]
        return {
            "id": f"resp_{self.id}",
            "object": "response",
            "created_at": self.created,
            "model": self.model,
            "status": status,
            "output": output,
            "usage": counts,
        }

    def _event(self, kind: str, **fields: object) -> bytes:
        return frame({"type": kind} | fields, kind)


@dataclass(frozen=True, slots=True)
class MessageReply:
    """``/v1/messages`` (Anthropic). Cached prompt tokens are told apart from ``input_tokens``."""

    id: str
    model: str
    created: int

    def opening(self, choices: int, usage: Usage) -> bytes:
        """Return what comes with the first token."""
        block = {"type": "text", "text": ""}
        return self._event("message_start", message=self._object([], None, usage)) + self._event(
            "content_block_start", index=0, content_block=block
        )

    def token(self, index: int, text: str, finish: Finish | None) -> bytes:
        """Return one token."""
        return self._event("content_block_delta", index=index, delta={"type": "text_delta", "text": text})

    def closing(self, choices: Sequence[Choice], usage: Usage, include_usage: bool) -> bytes:
        """Return what follows the last token."""
        delta = {"stop_reason": _STOP_REASONS[choices[0].finish], "stop_sequence": None}
        return (
            self._event("content_block_stop", index=0)
            + self._event("message_delta", delta=delta, usage=_anthropic(usage))
            + self._event("message_stop")
        )

    def whole(self, choices: Sequence[Choice], usage: Usage) -> dict[str, Any]:
        """Return the body of an answer that is not streamed."""
        blocks = [{"type": "text", "text": one.text} for one in choices]
        return self._object(blocks, _STOP_REASONS[choices[0].finish], usage)

    def _object(self, content: list[dict[str, str]], stop_reason: str | None, usage: Usage) -> dict[str, Any]:
        return {
            "id": f"msg_{self.id}",
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": content,
            "stop_reason": stop_reason,
            "stop_sequence": None,
            "usage": _anthropic(usage),
        }

    def _event(self, kind: str, **fields: object) -> bytes:
        return frame({"type": kind} | fields, kind)


REPLIES: dict[str, Callable[[str, str, int], Reply]] = {
    "/v1/chat/completions": ChatReply,
    "/v1/completions": CompletionReply,
    "/v1/responses": ResponseReply,
    "/v1/messages": MessageReply,
}

_STOP_REASONS: dict[Finish, str] = {"stop": "end_turn", "length": "max_tokens"}


def _anthropic(usage: Usage) -> dict[str, int]:
    return {
        "input_tokens": usage.prompt - usage.cached,
        "cache_read_input_tokens": usage.cached,
        "output_tokens": usage.output,
    }


def _choice(index: int, finish: Finish | None, **content: object) -> dict[str, Any]:
    return {"index": index, **content, "logprobs": None, "finish_reason": finish}
