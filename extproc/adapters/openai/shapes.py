"""How each API lays out its prompt: one function a path, from checked body to canonical prompt.

Order is the order in which most chat templates render: system text, then tools, then the turns. The three chat APIs
share it, as engines turn Responses and Messages calls into chats. What a client may change from turn to turn without
changing the prompt (``cache_control``, ids and states of items) is left out; fields we do not know are left alone.
"""

from collections.abc import Callable, Mapping
from typing import Any

from extproc.adapters.openai.fields import listed, text, wrong
from extproc.adapters.openai.prompt import Media, Prompt

_SYSTEM = frozenset({"system", "developer"})
_TEXT = frozenset({"text", "input_text", "output_text"})
_MEDIA: dict[str, Media] = {
    "image_url": "image",
    "input_image": "image",
    "image": "image",
    "image_pil": "image",
    "image_embeds": "image",
    "video_url": "image",
    "file": "image",
    "input_file": "image",
    "document": "image",
    "input_audio": "audio",
    "audio_url": "audio",
    "audio_embeds": "audio",
}
"""Kinds of parts that become a policy-given number of tokens; a file or video counts as one image."""
_RENDERED = ("name", "tool_calls", "tool_call_id", "function_call")
"""Fields of a message that templates render beside its content."""
_PASSING = frozenset({"cache_control", "id", "status"})
"""Fields of a part or item that never reach the prompt."""


def _chat(body: Mapping[str, Any], prompt: Prompt) -> None:
    _turns(body, listed(body, "messages"), "messages", prompt)


def _messages(body: Mapping[str, Any], prompt: Prompt) -> None:
    turns = listed(body, "messages")
    if (system := body.get("system")) is not None:
        prompt.head("system")
        _content(system, "system", prompt)
    _turns(body, turns, "messages", prompt)


def _responses(body: Mapping[str, Any], prompt: Prompt) -> None:
    if (before := text(body, "previous_response_id")) is not None:
        # The engine puts a history in front that only it knows.
        prompt.data(before)
    if (instructions := text(body, "instructions")) is not None:
        prompt.head("system")
        prompt.text(instructions)
    given = body.get("input")
    if type(given) is str:
        given = [{"role": "user", "content": given}]
    elif given is not None and type(given) is not list:
        wrong("input", "must be a string or a list of items")
    _turns(body, given or listed(body, "input"), "input", prompt)


def _completion(body: Mapping[str, Any], prompt: Prompt) -> int:
    if body.get("prompt") is None and body.get("prompt_embeds") is not None:
        return 1
    return _prompts(body, "prompt", prompt)


def _embedding(body: Mapping[str, Any], prompt: Prompt) -> int:
    if body.get("input") is None and body.get("messages") is not None:
        _chat(body, prompt)
        return 1
    return _prompts(body, "input", prompt)


SHAPES: dict[str, Callable[[Mapping[str, Any], Prompt], int | None]] = {
    "/v1/chat/completions": _chat,
    "/v1/completions": _completion,
    "/v1/embeddings": _embedding,
    "/v1/responses": _responses,
    "/v1/messages": _messages,
}
"""Path → writer of its prompt, which returns how many prompts the call holds (``None``: one)."""


def _prompts(body: Mapping[str, Any], field: str, prompt: Prompt) -> int:
    """Write a string, a list of strings, token ids or a list of token ids."""
    given = body.get(field)
    if type(given) is str:
        prompt.another(given)
        return 1
    given = listed(body, field)
    match given[0]:
        case str():
            prompt.expect(len(given), field)
            for at, one in enumerate(given):
                if type(one) is not str:
                    wrong(f"{field}[{at}]", "must be a string like the first")
                prompt.another(one)
        case list():
            prompt.expect(len(given), field)
            for at, one in enumerate(given):
                if type(one) is not list:
                    wrong(f"{field}[{at}]", "must be a list of token ids like the first")
                prompt.another_of_ids(one, f"{field}[{at}]")
        case _:
            prompt.another_of_ids(given, field)
            return 1
    return len(given)


def _turns(body: Mapping[str, Any], turns: list[Any], field: str, prompt: Prompt) -> None:
    """Write messages and items, the tools behind the leading system messages."""
    prompt.expect(len(turns), field)
    leading = True
    for at, turn in enumerate(turns):
        if type(turn) is not dict:
            wrong(f"{field}[{at}]", "must be an object")
        role = turn.get("role")
        if leading and (type(role) is not str or role not in _SYSTEM):
            leading = False
            _tools(body, prompt)
        if role is None and field == "input" and _is_item(turn):
            _item(turn, f"{field}[{at}]", prompt)
            continue
        if type(role) is not str:
            wrong(f"{field}[{at}].role", "is missing" if role is None else "must be a string")
        prompt.head(role)
        _content(turn.get("content"), field, prompt, at)
        if len(turn) > 2:
            _beside(turn, prompt)
    if leading:
        _tools(body, prompt)


def _beside(turn: dict[str, Any], prompt: Prompt) -> None:
    for name in _RENDERED:
        if value := turn.get(name):
            prompt.data({name: value})


def _tools(body: Mapping[str, Any], prompt: Prompt) -> None:
    for field in ("tools", "functions"):
        tools = body.get(field)
        if tools is None:
            continue
        if type(tools) is not list:
            wrong(field, "must be a list")
        prompt.expect(len(tools), field)
        for at, tool in enumerate(tools):
            if type(tool) is not dict:
                wrong(f"{field}[{at}]", "must be an object")
            prompt.data(_bare(tool, frozenset({"cache_control"})))


def _is_item(turn: dict[str, Any]) -> bool:
    """Return whether this is an item of a Responses call that is no message."""
    kind = turn.get("type")
    return type(kind) is str and kind != "message"


def _item(item: dict[str, Any], where: str, prompt: Prompt) -> None:
    """Write a function call, its output, reasoning."""
    prompt.head("item")
    output = item.get("output")
    if type(output) is list:
        prompt.data({"call_id": item.get("call_id"), "type": item.get("type")})
        _content(output, f"{where}.output", prompt)
    else:
        prompt.data(_bare(item))


def _content(value: Any, field: str, prompt: Prompt, at: int | None = None) -> None:  # noqa: ANN401 - any JSON value
    """Write a content: text, or parts. *field*, or the content of its *at*-th message, is what an error names."""
    if type(value) is str:
        prompt.text(value)
    elif value is not None:
        where = field if at is None else f"{field}[{at}].content"
        if type(value) is not list:
            wrong(where, "must be a string or a list of parts")
        _parts(value, where, prompt)


def _parts(parts: list[Any], where: str, prompt: Prompt, *, nested: bool = False) -> None:
    prompt.expect(len(parts), where)
    after_text = False
    for at, part in enumerate(parts):
        if type(part) is str:
            spoken: str | None = part
        elif type(part) is dict:
            spoken = _spoken(part, where, at)
        else:
            wrong(f"{where}[{at}]", "must be a content part")
        if spoken is None:
            _unspoken(part, f"{where}[{at}]", prompt, nested=nested)
        else:
            # Engines join the texts of one message with line feeds.
            prompt.text("\n" + spoken if after_text else spoken)
        after_text = spoken is not None


def _spoken(part: dict[str, Any], where: str, at: int) -> str | None:
    """Return the text of a text part, ``None`` for any other part."""
    kind = part.get("type")
    if kind is not None and type(kind) is not str:
        wrong(f"{where}[{at}].type", "must be a string")
    if kind is not None and kind not in _TEXT:
        return None
    value = part.get("text")
    if type(value) is not str:
        wrong(f"{where}[{at}].text", "must be a string")
    return value


def _unspoken(part: dict[str, Any], where: str, prompt: Prompt, *, nested: bool) -> None:
    """Write a part that is no text; a tool's result may hold parts itself, one level deep."""
    kind = part["type"]
    source = part.get("source")
    if kind == "tool_result" and not nested:
        prompt.data({"tool_use_id": part.get("tool_use_id")})
        content = part.get("content")
        if type(content) is list:
            _parts(content, f"{where}.content", prompt, nested=True)
        else:
            _content(content, f"{where}.content", prompt)
    elif (
        kind == "document" and type(source) is dict and type(source.get("data")) is str and source.get("type") == "text"
    ):
        prompt.text(source["data"])
    elif kind in _MEDIA:
        prompt.media(_bare(part), _MEDIA[kind])
    else:
        prompt.data(_bare(part))


def _bare(value: dict[str, Any], passing: frozenset[str] = _PASSING) -> dict[str, Any]:
    return value if passing.isdisjoint(value) else {key: one for key, one in value.items() if key not in passing}
