import json

import pytest

from loadtest.bench.bodies import SIZES, bodies


@pytest.mark.parametrize("size", SIZES.values())
def test_a_body_has_its_size_and_is_a_chat_of_several_messages(size: int) -> None:
    for body in bodies(size):
        written = body.numbered(7)
        assert len(written) == len(body) == size
        messages = json.loads(written)["messages"]
        assert len(messages) >= 3
        assert [one["role"] for one in messages[:2]] == ["system", "user"]


def test_no_two_bodies_begin_alike() -> None:
    body = next(bodies(2000))
    first, second = (json.loads(body.numbered(number))["messages"][0]["content"] for number in (1, 2))
    assert first[:24] != second[:24]


def test_templates_differ_and_come_again_with_the_same_seed() -> None:
    assert len({body.numbered(1) for body in bodies(2000)}) > 1
    assert list(bodies(2000)) == list(bodies(2000)) != list(bodies(2000, seed=2))
