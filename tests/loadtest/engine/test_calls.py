from typing import Any

from loadtest.engine.calls import MEDIA_TOKENS, read_chat


def a_chat(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": list(parts)}]}


def an_image(data: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}


def test_an_image_counts_the_same_whatever_its_bytes() -> None:
    text = {"type": "text", "text": "what is this?"}
    small, large = (read_chat(a_chat(text, an_image("A" * size))).prompts[0] for size in (10, 1_000_000))
    assert small.tokens == large.tokens
    assert small.tokens - read_chat(a_chat(text)).prompts[0].tokens == MEDIA_TOKENS


def test_equal_images_are_equal_prompts_and_others_are_not() -> None:
    one, same, other = (read_chat(a_chat(an_image(data))).prompts[0] for data in ("AA", "AA", "AB"))
    assert one == same != other
