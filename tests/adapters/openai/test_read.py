from typing import Any

import orjson
import pytest

from extproc.adapters.openai import BadRequest, Reader
from extproc.adapters.openai.prompt import Prompt, Scale
from extproc.model import Request
from extproc.policy import ModelSpec
from tests.adapters.openai.calling import CHAT_PATH, PATHS, READER, accepted, read_raw, the_headers
from tests.builders import CHAT, a_policy

WORDS = "word " * 800  # 4,000 bytes, 1,000 tokens of 4 bytes each
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
AUDIO = {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}


def of_user(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


def test_a_chat_completion_becomes_one_request() -> None:
    body = {"model": CHAT, "messages": of_user(WORDS), "max_tokens": 50, "n": 2, "stream": True, "priority": -3}
    raw = orjson.dumps(body)
    request = READER.read("id-1", the_headers("/v1/chat/completions?api-version=1"), {}, raw, 12.5)
    assert isinstance(request, Request)
    assert request.blocks
    assert request == Request(
        id="id-1",
        model=CHAT,
        tenant="default",
        task="chat",
        api="openai",
        path=CHAT_PATH,
        prompt_tokens=1004,
        output_budget=50,
        choices=2,
        stream=True,
        priority=-3,
        blocks=request.blocks,
        block_tokens=64,
        body_bytes=len(raw),
        arrived=12.5,
    )


def test_a_memoryview_reads_like_bytes() -> None:
    raw = orjson.dumps({"model": CHAT, "messages": of_user(WORDS)})
    assert READER.read("r1", the_headers(), {}, memoryview(raw), 7.0) == read_raw(raw)


@pytest.mark.parametrize(
    ("path", "fields", "tokens"),
    [
        (CHAT_PATH, {"messages": of_user(WORDS)}, 1004),
        (CHAT_PATH, {"messages": of_user([{"type": "text", "text": WORDS}])}, 1004),
        (CHAT_PATH, {"messages": of_user([WORDS])}, 1004),
        (CHAT_PATH, {"messages": of_user([IMAGE])}, 804),
        (CHAT_PATH, {"messages": of_user([IMAGE, IMAGE])}, 1604),
        (CHAT_PATH, {"messages": of_user([AUDIO])}, 504),
        (CHAT_PATH, {"messages": of_user([{"type": "file", "file": {"file_id": "f"}}])}, 804),
        (CHAT_PATH, {"messages": of_user(None)}, 4),
        (CHAT_PATH, {"messages": [{"role": "system", "content": WORDS}, *of_user(WORDS)]}, 2008),
        ("/v1/completions", {"prompt": WORDS}, 1000),
        ("/v1/completions", {"prompt": ""}, 1),
        ("/v1/completions", {"prompt": [WORDS]}, 1000),
        ("/v1/completions", {"prompt": list(range(777))}, 777),
        ("/v1/completions", {"prompt": [[1, 2, 3], [4], [5, 6]]}, 6),
        ("/v1/embeddings", {"input": WORDS}, 1000),
        ("/v1/embeddings", {"input": [5] * 31}, 31),
        ("/v1/embeddings", {"input": [[5] * 31, [6] * 9]}, 40),
        ("/v1/embeddings", {"input": ..., "messages": of_user(WORDS)}, 1004),
        ("/v1/responses", {"input": WORDS}, 1004),
        ("/v1/responses", {"input": of_user([{"type": "input_text", "text": WORDS}])}, 1004),
        ("/v1/responses", {"input": of_user([{"type": "input_image", "image_url": "https://a/b.png"}])}, 804),
        ("/v1/responses", {"instructions": WORDS, "input": WORDS}, 2008),
        ("/v1/messages", {"messages": of_user(WORDS)}, 1004),
        ("/v1/messages", {"system": WORDS, "messages": of_user(WORDS)}, 2008),
        ("/v1/messages", {"system": [{"type": "text", "text": WORDS}], "messages": of_user(WORDS)}, 2008),
        ("/v1/messages", {"messages": of_user([{"type": "image", "source": {"type": "base64", "data": "AA"}}])}, 804),
        (
            "/v1/messages",
            {"messages": of_user([{"type": "document", "source": {"type": "text", "data": WORDS}}])},
            1004,
        ),
    ],
)
def test_prompt_tokens_are_estimated_from_what_the_engine_will_see(
    path: str, fields: dict[str, Any], tokens: int
) -> None:
    assert accepted(path, **fields).prompt_tokens == tokens


@pytest.mark.parametrize(
    ("path", "fields", "at_least"),
    [
        (CHAT_PATH, {"tools": [{"type": "function", "function": {"name": "f", "description": WORDS}}]}, 1004),
        (CHAT_PATH, {"functions": [{"name": "f", "description": WORDS}]}, 1004),
        (
            CHAT_PATH,
            {"messages": [{"role": "assistant", "content": None, "tool_calls": [{"function": {"arguments": WORDS}}]}]},
            1004,
        ),
        (CHAT_PATH, {"messages": [{"role": "tool", "tool_call_id": "c", "content": WORDS}]}, 1004),
        ("/v1/responses", {"tools": [{"type": "function", "name": "f", "description": WORDS}]}, 1004),
        ("/v1/responses", {"input": [{"type": "function_call", "name": "f", "arguments": WORDS}]}, 1004),
        ("/v1/responses", {"input": [{"type": "function_call_output", "call_id": "c", "output": WORDS}]}, 1004),
        (
            "/v1/responses",
            {"input": [{"type": "function_call_output", "output": [{"type": "input_image", "image_url": "u"}]}]},
            804,
        ),
        ("/v1/messages", {"tools": [{"name": "f", "description": WORDS, "input_schema": {}}]}, 1004),
        ("/v1/messages", {"messages": of_user([{"type": "tool_use", "name": "f", "input": {"a": WORDS}}])}, 1004),
        ("/v1/messages", {"messages": of_user([{"type": "tool_result", "tool_use_id": "c", "content": WORDS}])}, 1004),
        (
            "/v1/messages",
            {"messages": of_user([{"type": "tool_result", "content": [{"type": "image", "source": {}}]}])},
            804,
        ),
        ("/v1/messages", {"messages": of_user([{"type": "thinking", "thinking": WORDS}])}, 1004),
    ],
)
def test_tools_calls_and_results_count(path: str, fields: dict[str, Any], at_least: int) -> None:
    assert at_least <= accepted(path, **fields).prompt_tokens <= at_least + 40


def test_the_model_says_how_long_its_tokens_are() -> None:
    fleet = {"models": {CHAT: {"bytes_per_token": 2.0, "image_tokens": 100, "audio_tokens": 10}}}
    reader = Reader(a_policy(fleet=fleet))
    assert accepted("/v1/completions", reader, prompt=WORDS).prompt_tokens == 2000
    assert accepted(reader=reader, messages=of_user([IMAGE, AUDIO])).prompt_tokens == 114


@pytest.mark.parametrize(
    ("path", "fields", "budget"),
    [
        (CHAT_PATH, {}, None),
        (CHAT_PATH, {"max_tokens": None}, None),
        (CHAT_PATH, {"max_tokens": 9}, 9),
        (CHAT_PATH, {"max_completion_tokens": 8}, 8),
        (CHAT_PATH, {"max_completion_tokens": 8, "max_tokens": 9}, 8),
        ("/v1/completions", {"max_tokens": 0}, 0),
        ("/v1/completions", {"max_completion_tokens": 8}, None),
        ("/v1/responses", {"max_output_tokens": 7}, 7),
        ("/v1/responses", {"max_tokens": 9}, None),
        ("/v1/messages", {"max_tokens": 6}, 6),
        ("/v1/embeddings", {}, 0),
    ],
)
def test_the_output_budget_is_what_the_api_calls_it(path: str, fields: dict[str, Any], budget: int | None) -> None:
    assert accepted(path, **fields).output_budget == budget


@pytest.mark.parametrize(
    ("path", "fields", "choices"),
    [
        (CHAT_PATH, {"n": None}, 1),
        (CHAT_PATH, {"n": 3}, 3),
        ("/v1/completions", {"prompt": ["a", "b", "c"], "n": 2}, 6),
        ("/v1/completions", {"prompt": [[1], [2]]}, 2),
        ("/v1/completions", {"prompt": [1, 2]}, 1),
        ("/v1/completions", {"prompt": None, "prompt_embeds": "AAAA"}, 1),
        ("/v1/embeddings", {"input": ["a", "b"]}, 2),
        ("/v1/messages", {"n": 3}, 1),
    ],
)
def test_choices_are_prompts_times_n(path: str, fields: dict[str, Any], choices: int) -> None:
    assert accepted(path, **fields).choices == choices


@pytest.mark.parametrize("path", PATHS)
def test_stream_and_priority_are_read_on_every_path(path: str) -> None:
    request = accepted(path, stream=True, priority=5)
    assert (request.stream, request.priority) == (True, 5)
    request = accepted(path, stream=None, priority=None)
    assert (request.stream, request.priority) == (False, None)


def test_an_alias_becomes_the_models_own_name_and_an_unknown_model_stays() -> None:
    reader = Reader(a_policy(fleet={"models": {CHAT: {"aliases": ["gpt-x"]}}}))
    assert accepted(reader=reader, model="gpt-x").model == CHAT
    assert accepted(reader=reader, model="some-adapter").model == "some-adapter"


@pytest.mark.parametrize("path", PATHS)
def test_unknown_fields_are_left_alone(path: str) -> None:
    odd: dict[str, Any] = {"x": {"y": [1, 2.5, None]}, "metadata": 5, "temperature": "hot", "logit_bias": []}
    assert accepted(path, **odd).model == CHAT


def test_of_a_doubled_key_the_last_counts() -> None:
    request = read_raw(b'{"model":"a","model":"b","messages":[{"role":"user","content":"x"}],"n":2,"n":3}')
    assert isinstance(request, Request)
    assert (request.model, request.choices) == ("b", 3)


def test_a_prompt_over_the_limit_names_its_field() -> None:
    reader = Reader(a_policy(gateway={"max_prompt_tokens": 1000}))
    assert accepted("/v1/completions", reader, prompt=WORDS).prompt_tokens == 1000
    bad = read_raw(orjson.dumps({"model": CHAT, "prompt": WORDS + "more"}), "/v1/completions", reader)
    assert isinstance(bad, BadRequest)
    assert (bad.status, bad.param, bad.code) == (400, "prompt", "context_length_exceeded")


def test_a_small_body_of_many_images_does_not_become_gigabytes() -> None:
    reader = Reader(a_policy(gateway={"max_prompt_tokens": 10_000}))
    raw = orjson.dumps({"model": CHAT, "messages": of_user([{"type": "image"}] * 90_000)})
    bad = read_raw(raw, reader=reader)
    assert isinstance(bad, BadRequest)
    assert bad.code == "context_length_exceeded"


def test_media_over_the_limit_take_no_memory() -> None:
    prompt = Prompt(Scale.of(ModelSpec(image_tokens=1000), 64), most_tokens=10_000)
    for _ in range(50):
        prompt.media({"type": "image"}, "image")
    assert 10_000 < prompt.close().tokens <= 11_000


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (CHAT_PATH, {"messages": [{"role": "user"}] * 100_001}, "messages"),
        (CHAT_PATH, {"messages": of_user([""] * 100_001)}, "messages[0].content"),
        (CHAT_PATH, {"tools": [{}] * 100_001}, "tools"),
        ("/v1/completions", {"prompt": [""] * 100_001}, "prompt"),
    ],
)
def test_absurdly_many_pieces_are_refused(path: str, fields: dict[str, Any], param: str) -> None:
    bad = read_raw(orjson.dumps({"model": CHAT, "messages": of_user("x"), **fields}), path)
    assert isinstance(bad, BadRequest)
    assert (bad.status, bad.param) == (400, param)


def test_a_hundred_thousand_tokens_are_read() -> None:
    request = accepted(messages=of_user("word " * 80_000))
    assert request.prompt_tokens == 100_004
    assert len(request.blocks) == 100_004 // 64
    assert accepted("/v1/completions", prompt=list(range(100_000))).prompt_tokens == 100_000


def test_a_body_of_ten_megabytes_is_read_within_the_limit() -> None:
    assert accepted(messages=of_user("x" * 10_000_000)).prompt_tokens == 2_500_004
