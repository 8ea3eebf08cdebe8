from typing import Any

import pytest

from extproc.policy import ClassSpec, SloMaxPolicy, When
from extproc.slomax.classify import classify, holds, longest_wait_s
from tests.builders import CHAT, a_request

POLICY = SloMaxPolicy(
    classes=(
        ClassSpec(name="gold", priority=10, when=When(tiers=frozenset({"gold"}))),
        ClassSpec(name="embedding", priority=5, when=When(tasks=frozenset({"embedding"}))),
        ClassSpec(name="standard", priority=0, longest_wait_ms=4000),
        ClassSpec(name="other", priority=0, when=When(tiers=frozenset({"nobody"}))),
        ClassSpec(name="batch", priority=-10, when=When(max_output_budget=1, tiers=frozenset({"nobody"}))),
        ClassSpec(name="rest"),
    )
)


def named(**fields: Any) -> str:
    return classify(a_request(**fields), POLICY).name


def test_the_first_class_whose_conditions_hold_wins() -> None:
    assert named(tier="gold", task="embedding") == "gold"
    assert named(task="embedding") == "embedding"
    assert named() == "standard"


def test_a_wish_for_a_lower_class_is_granted() -> None:
    assert named(tier="gold", wanted_class="batch") == "batch"
    assert named(wanted_class="batch") == "batch"


def test_a_wish_for_an_equal_class_is_granted() -> None:
    assert named(wanted_class="other") == "other"


def test_a_wish_for_a_higher_or_unknown_class_is_not() -> None:
    assert named(wanted_class="gold") == "standard"
    assert named(wanted_class="embedding") == "standard"
    assert named(wanted_class="no-such-class") == "standard"


@pytest.mark.parametrize(
    ("when", "fits", "fails"),
    [
        ({"tasks": {"chat"}}, {"task": "chat"}, {"task": "completion"}),
        ({"tiers": {"gold"}}, {"tier": "gold"}, {"tier": "standard"}),
        ({"models": {CHAT}}, {"model": CHAT}, {"model": "other"}),
        ({"min_prompt_tokens": 10}, {"prompt_tokens": 10}, {"prompt_tokens": 9}),
        ({"max_prompt_tokens": 10}, {"prompt_tokens": 10}, {"prompt_tokens": 11}),
        ({"min_output_budget": 10}, {"output_budget": 10}, {"output_budget": 9}),
        ({"min_output_budget": 0}, {"output_budget": 0}, {"output_budget": None}),
        ({"max_output_budget": 10}, {"output_budget": 10}, {"output_budget": 11}),
        ({"max_output_budget": 10}, {"output_budget": 0}, {"output_budget": None}),
        ({"stream": True}, {"stream": True}, {"stream": False}),
        ({"stream": False}, {"stream": False}, {"stream": True}),
    ],
)
def test_a_condition_holds_up_to_its_bound(when: dict[str, Any], fits: dict[str, Any], fails: dict[str, Any]) -> None:
    condition = When.model_validate(when)
    assert holds(condition, a_request(**fits))
    assert not holds(condition, a_request(**fails))


def test_every_condition_given_must_hold() -> None:
    both = When(tiers=frozenset({"gold"}), stream=True)
    assert holds(both, a_request(tier="gold", stream=True))
    assert not holds(both, a_request(tier="gold"))
    assert not holds(both, a_request(stream=True))


def test_a_caller_may_shorten_its_wait_and_never_lengthen_it() -> None:
    standard = POLICY.by_name["standard"]
    assert longest_wait_s(a_request(), standard) == 4.0
    assert longest_wait_s(a_request(deadline_s=0.5), standard) == 0.5
    assert longest_wait_s(a_request(deadline_s=60.0), standard) == 4.0
