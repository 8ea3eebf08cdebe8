import json
import random
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.adapters.openai import Reader
from extproc.model import Request
from tests.adapters.openai.calling import CHAT_PATH, PATHS, READER, accepted, read_raw
from tests.builders import CHAT, a_policy

SMALL = Reader(a_policy(tokenpilot={"block_tokens": 8}))  # 32 bytes a block
LONG = "The quick brown fox jumps over the lazy dog. " * 40
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "look_up", "description": LONG[:300]}}


def blocks(path: str = CHAT_PATH, reader: Reader = SMALL, **fields: Any) -> tuple[int, ...]:
    return accepted(path, reader, **fields).blocks


def turn(role: str, content: Any, **fields: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **fields}


def shared(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    """Blocks that both chains begin with."""
    for at, (left, right) in enumerate(zip(one, other, strict=False)):
        if left != right:
            return at
    return min(len(one), len(other))


@pytest.mark.parametrize("block_tokens", [8, 64, 1000])
@pytest.mark.parametrize("bytes_per_token", [2.0, 3.7, 4.0])
def test_only_whole_blocks_are_hashed(block_tokens: int, bytes_per_token: float) -> None:
    models = {CHAT: {"bytes_per_token": bytes_per_token}}
    reader = Reader(a_policy(tokenpilot={"block_tokens": block_tokens}, fleet={"models": models}))
    size = round(block_tokens * bytes_per_token)
    for length, whole in ((size - 1, 0), (size, 1), (3 * size - 1, 2), (3 * size, 3)):
        assert len(blocks("/v1/completions", reader, prompt="x" * length)) == whole
    assert len(blocks("/v1/completions", reader, prompt=[7] * (2 * block_tokens + 1))) == 2


def test_equal_blocks_at_unequal_places_hash_unequal() -> None:
    chain = blocks("/v1/completions", prompt="x" * 3200)
    assert len(set(chain)) == 100
    assert all(0 <= one < 2**64 for one in chain)


def test_a_growing_conversation_keeps_its_chain() -> None:
    turns = [turn("system", LONG), turn("user", LONG + "one")]
    earlier = blocks(messages=turns, tools=[TOOL])
    for role, content in (("assistant", "An answer."), ("user", "And then?"), ("assistant", LONG), ("user", "x")):
        turns.append(turn(role, content))
        later = blocks(messages=turns, tools=[TOOL])
        assert later[: len(earlier)] == earlier
        earlier = later


def test_a_growing_conversation_of_parts_keeps_its_chain_in_every_chat_api() -> None:
    image: dict[str, Any] = {
        "type": "image",
        "source": {"type": "base64", "data": "AAAA"},
        "cache_control": {"type": "ephemeral"},
    }
    for path, field in ((CHAT_PATH, "messages"), ("/v1/responses", "input"), ("/v1/messages", "messages")):
        first: dict[str, Any] = {field: [turn("user", [{"type": "text", "text": LONG}, image])]}
        grown: dict[str, Any] = {field: [*first[field], turn("assistant", "Yes."), turn("user", LONG)]}
        earlier, later = blocks(path, **first), blocks(path, **grown)
        assert len(earlier) > 100
        assert later[: len(earlier)] == earlier


def test_tools_stand_behind_the_system_text_and_before_the_turns() -> None:
    plain = [turn("system", LONG), turn("user", LONG)]
    other_user = [turn("system", LONG), turn("user", "Else. " + LONG)]
    other_system = [turn("system", "Else. " + LONG), turn("user", LONG)]
    chain = blocks(messages=plain, tools=[TOOL])
    system = len(LONG) // 32
    both = system + 300 // 32
    assert shared(chain, blocks(messages=other_user, tools=[TOOL])) >= both
    assert system <= shared(chain, blocks(messages=plain)) < both
    assert shared(chain, blocks(messages=other_system, tools=[TOOL])) == 0


def test_the_chat_apis_lay_the_same_text_out_alike() -> None:
    chat = blocks(messages=[turn("system", LONG), turn("user", LONG)])
    assert blocks("/v1/messages", system=LONG, messages=[turn("user", LONG)]) == chat
    assert blocks("/v1/messages", system=[{"type": "text", "text": LONG}], messages=[turn("user", LONG)]) == chat
    assert blocks("/v1/responses", instructions=LONG, input=LONG) == chat
    assert blocks("/v1/responses", instructions=LONG, input=[turn("user", LONG, type="message", id="m1")]) == chat
    assert blocks(messages=[turn("system", LONG), turn("user", [{"type": "text", "text": LONG}])]) == chat


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"prompt": LONG}, {"prompt": [LONG]}),
        ({"prompt": list(range(99))}, {"prompt": [list(range(99))]}),
    ],
)
def test_a_list_of_one_prompt_is_that_prompt(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert blocks("/v1/completions", **one) == blocks("/v1/completions", **other)


def test_several_prompts_begin_with_the_first_ones_blocks() -> None:
    first = blocks("/v1/completions", prompt=LONG)
    assert blocks("/v1/completions", prompt=[LONG, "b" * 64])[: len(first)] == first
    ids = blocks("/v1/completions", prompt=[1] * 80)
    assert blocks("/v1/completions", prompt=[[1] * 80, [2] * 80])[:10] == ids
    assert blocks("/v1/completions", prompt=[[1] * 80, [2] * 80]) != blocks(
        "/v1/completions", prompt=[1] * 80 + [2] * 80
    )


@pytest.mark.parametrize(
    ("change", "path"),
    [
        ({"model": "other"}, CHAT_PATH),
        ({"cache_salt": "a"}, CHAT_PATH),
        ({"messages": [turn("assistant", LONG)]}, CHAT_PATH),
        ({"messages": [turn("user", LONG, name="ann")]}, CHAT_PATH),
        ({"messages": [turn("user", LONG), turn("assistant", None, tool_calls=[TOOL])]}, CHAT_PATH),
        ({"previous_response_id": "resp_1"}, "/v1/responses"),
    ],
)
def test_what_changes_the_prompt_changes_the_chain(change: dict[str, Any], path: str) -> None:
    same: dict[str, Any] = {"messages": [turn("user", LONG)], "input": LONG}
    assert blocks(path, **same) != blocks(path, **same | change)


@pytest.mark.parametrize(
    "change",
    [
        {"stream": True},
        {"max_tokens": 5},
        {"temperature": 0.1},
        {"user": "ann"},
        {"messages": [turn("user", LONG, id="m", status="done", annotations=[])]},
        {"messages": [turn("user", [{"type": "text", "text": LONG, "cache_control": {"type": "ephemeral"}}])]},
    ],
)
def test_what_does_not_change_the_prompt_leaves_the_chain(change: dict[str, Any]) -> None:
    same: dict[str, Any] = {"messages": [turn("user", LONG)]}
    assert blocks(**same) == blocks(**same | change)


def test_the_texts_of_one_message_are_joined_by_line_feeds() -> None:
    parts = [{"type": "text", "text": LONG}, {"type": "text", "text": LONG}]
    assert blocks(messages=[turn("user", parts)]) == blocks(messages=[turn("user", f"{LONG}\n{LONG}")])


def test_a_cache_marker_on_an_image_changes_nothing() -> None:
    image: dict[str, Any] = {"type": "image", "source": {"type": "base64", "data": "AAAA"}}
    marked = image | {"cache_control": {"type": "ephemeral"}}
    plain = blocks("/v1/messages", messages=[turn("user", [image])])
    assert blocks("/v1/messages", messages=[turn("user", [marked])]) == plain


def test_an_image_is_known_by_its_content() -> None:
    def chain(url: str) -> tuple[int, ...]:
        image = {"type": "image_url", "image_url": {"url": url}}
        return blocks(messages=[turn("user", [{"type": "text", "text": LONG}, image, LONG])])

    assert chain("data:image/png;base64,AAAA") == chain("data:image/png;base64,AAAA")
    parted = shared(chain("data:image/png;base64,AAAA"), chain("data:image/png;base64,AAAB"))
    assert parted == (len(LONG) + 16) // 32


def test_a_cache_marker_on_the_last_tool_changes_nothing() -> None:
    marked = {**TOOL, "cache_control": {"type": "ephemeral"}}
    assert blocks("/v1/messages", tools=[marked]) == blocks("/v1/messages", tools=[TOOL])


def test_the_salt_of_a_gateway_changes_every_block() -> None:
    policy = a_policy()
    fields: dict[str, Any] = {"messages": [turn("user", LONG)]}
    one, other = blocks(reader=Reader(policy), **fields), blocks(reader=Reader(policy, "s"), **fields)
    assert one == blocks(reader=Reader(policy, salt=""), **fields)
    assert not set(one) & set(other)


# --- properties -------------------------------------------------------------------------------------------------------

NAMES = st.sampled_from(["alpha", "beta", "type", "description", "a"])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=8,
)
PARTS = st.one_of(
    st.builds(lambda text: {"type": "text", "text": text}, st.text(max_size=80)),
    st.builds(lambda url: {"type": "image_url", "image_url": {"url": url, "detail": "low"}}, st.text(max_size=20)),
    st.builds(lambda value: {"type": "tool_use", "input": value}, JSON),
)
CONTENTS = st.text(max_size=120) | st.lists(PARTS, max_size=3)
TURNS = st.builds(turn, st.sampled_from(["system", "user", "assistant", "tool"]), CONTENTS)
BODIES = st.fixed_dictionaries(
    {"model": st.just(CHAT), "messages": st.lists(TURNS, min_size=1, max_size=5)},
    optional={"tools": st.lists(st.dictionaries(NAMES, JSON, max_size=3), max_size=3), "cache_salt": st.text()},
)


def shuffled(value: Any, seed: int) -> Any:
    """The same JSON value with the keys of every object in another order."""
    if isinstance(value, dict):
        keys = random.Random(seed).sample(list(value), len(value))
        return {key: shuffled(value[key], seed) for key in keys}
    return [shuffled(one, seed) for one in value] if isinstance(value, list) else value


@given(
    BODIES, st.integers(), st.sampled_from([None, 1, 7]), st.booleans(), st.sampled_from([CHAT_PATH, "/v1/messages"])
)
def test_spacing_key_order_and_escapes_do_not_change_the_request(
    body: dict[str, Any], seed: int, indent: int | None, ascii_only: bool, path: str
) -> None:
    plain = read_raw(orjson.dumps(body), path, SMALL)
    other = json.dumps(shuffled(body, seed), indent=indent, ensure_ascii=ascii_only).encode()
    written = read_raw(other, path, SMALL)
    assert isinstance(plain, Request)
    assert isinstance(written, Request)
    assert (written.blocks, written.prompt_tokens) == (plain.blocks, plain.prompt_tokens)


@given(BODIES, st.lists(TURNS.filter(lambda one: one["role"] != "system"), min_size=1, max_size=3))
def test_more_turns_keep_every_whole_block(body: dict[str, Any], more: list[dict[str, Any]]) -> None:
    body["messages"].insert(len(body["messages"]), turn("user", "."))
    before = read_raw(orjson.dumps(body), reader=SMALL)
    after = read_raw(orjson.dumps(body | {"messages": body["messages"] + more}), reader=SMALL)
    assert isinstance(before, Request)
    assert isinstance(after, Request)
    assert after.blocks[: len(before.blocks)] == before.blocks
    assert after.prompt_tokens > before.prompt_tokens


@given(st.text(min_size=64, max_size=400), st.data())
def test_a_changed_character_changes_every_later_block_and_no_earlier_one(text: str, data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(text) - 1))
    changed = text[:at] + chr(ord("a") + (text[at] == "a")) + text[at + 1 :]
    one, other = blocks("/v1/completions", prompt=text), blocks("/v1/completions", prompt=changed)
    intact = len(text[:at].encode()) // 32
    assert one[:intact] == other[:intact]
    assert not set(one[intact:]) & set(other[intact:])


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=100), st.data())
def test_a_changed_token_changes_every_later_block_and_no_earlier_one(ids: list[int], data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(ids) - 1))
    changed = [*ids[:at], ids[at] ^ 1, *ids[at + 1 :]]
    one, other = blocks("/v1/completions", prompt=ids), blocks("/v1/completions", prompt=changed)
    assert len(one) == len(other) == len(ids) // 8
    assert one[: at // 8] == other[: at // 8]
    assert not set(one[at // 8 :]) & set(other[at // 8 :])


@pytest.mark.parametrize("path", PATHS)
def test_reading_twice_gives_the_same_request(path: str) -> None:
    assert accepted(path, READER) == accepted(path, READER)
