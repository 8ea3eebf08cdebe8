from typing import Any

import pytest

from extproc.accounting import TTFT_BOUNDS_S, Accounts, Counts, on_target
from extproc.model import Ending, Outcome, Reason, Request
from extproc.policy import ClassSpec
from tests.builders import CHAT, a_request

KLASS = ClassSpec(name="standard", ttft_ms=1000, tpot_ms=50)
ANY = ClassSpec(name="any")


def an_outcome(**fields: Any) -> Outcome:
    base: dict[str, Any] = {
        "ending": Ending.COMPLETED,
        "status": 200,
        "ttft_s": 0.5,
        "duration_s": 1.0,
        "output_tokens": 11,
    }
    return Outcome(**base | fields)


def ended(outcome: Outcome, request: Request | None = None, accounts: Accounts | None = None) -> Counts:
    accounts = accounts or Accounts()
    accounts.end(request or a_request(), KLASS, "a", 0.25, outcome)
    (counts,) = accounts.counts.values()
    return counts


@pytest.mark.parametrize(
    ("fields", "met"),
    [
        ({}, True),
        ({"ttft_s": 1.0, "duration_s": 1.5}, True),
        ({"ttft_s": 1.001, "duration_s": 1.5}, False),
        ({"duration_s": 0.5 + 0.05 * 10}, True),
        ({"duration_s": 0.5 + 0.051 * 10}, False),
        ({"ttft_s": None}, False),
        ({"duration_s": None}, False),
        ({"output_tokens": 1, "duration_s": None}, True),
        ({"output_tokens": 1, "ttft_s": 2.0}, False),
    ],
)
def test_on_target_is_ttft_and_mean_tpot_within_the_class_s_targets(fields: dict[str, Any], met: bool) -> None:
    outcome = an_outcome(**fields)
    assert on_target(KLASS, outcome, outcome.output_tokens or 0) is met


def test_a_class_without_targets_is_always_on_target() -> None:
    assert on_target(ANY, an_outcome(ttft_s=None, duration_s=None), 1000)


def test_tokens_of_a_completed_request_are_on_target_or_late() -> None:
    good, late = ended(an_outcome()), ended(an_outcome(ttft_s=3.0, duration_s=4.0))
    assert (good.on_target, good.on_target_tokens, good.late, good.late_tokens) == (1, 11, 0, 0)
    assert (late.on_target, late.on_target_tokens, late.late, late.late_tokens) == (0, 0, 1, 11)
    assert good.endings == late.endings == {"completed": 1}


@pytest.mark.parametrize("ending", [one for one in Ending if one is not Ending.COMPLETED])
def test_tokens_of_a_request_that_never_completed_are_wasted(ending: Ending) -> None:
    counts = ended(an_outcome(ending=ending))
    assert (counts.on_target, counts.late, counts.wasted_tokens) == (0, 0, 11)
    assert counts.endings == {str(ending): 1}


def test_an_ending_that_nobody_knows_is_abandoned() -> None:
    assert ended(Outcome()).endings == {"abandoned": 1}


def test_a_refusal_was_offered_and_missed() -> None:
    accounts = Accounts()
    accounts.refuse(a_request(), "standard", Reason.LINE_FULL, 0.5)
    accounts.refuse(a_request(), "standard", Reason.LINE_FULL, 0.0)
    counts = accounts.counts["standard", "default", "", CHAT]
    assert (counts.offered, counts.on_target, counts.held_s) == (2, 0, 0.5)
    assert counts.refused == {"line_full": 2}


def test_books_are_kept_by_class_tenant_site_and_model() -> None:
    accounts = Accounts()
    accounts.end(a_request(tenant="x"), KLASS, "a", 0.0, an_outcome())
    accounts.end(a_request(tenant="x"), ANY, "b", 0.0, an_outcome())
    assert set(accounts.counts) == {("standard", "x", "a", CHAT), ("any", "x", "b", CHAT)}


def test_usage_and_times_are_summed() -> None:
    counts = ended(an_outcome(prompt_tokens=100, cached_tokens=64))
    assert (counts.prompt_tokens, counts.cached_tokens, counts.held_s, counts.ttft_s) == (100, 64, 0.25, 0.5)
    assert counts.ttft_buckets[TTFT_BOUNDS_S.index(0.5)] == 1
    assert sum(counts.ttft_buckets) == 1
    assert ended(an_outcome(ttft_s=1e9)).ttft_buckets[-1] == 1
    assert sum(ended(an_outcome(ttft_s=None)).ttft_buckets) == 0


def test_without_usage_tokens_are_estimated_from_the_answer_s_bytes() -> None:
    unknown = an_outcome(ending=Ending.CANCELLED, output_tokens=None, body_bytes=2400)
    assert ended(unknown, a_request(stream=True)).wasted_tokens == 10
    assert ended(unknown, a_request(stream=False)).wasted_tokens == round(2400 / 4.5)
    assert ended(unknown, a_request(task="embedding")).wasted_tokens == 0


def test_an_error_s_text_is_no_output() -> None:
    refused = an_outcome(ending=Ending.REJECTED, status=400, output_tokens=None, body_bytes=5000)
    broken = an_outcome(ending=Ending.FAILED, status=503, output_tokens=None, body_bytes=5000)
    assert ended(refused).wasted_tokens == ended(broken).wasted_tokens == 0


def test_bytes_per_token_are_learned_by_model_and_kind_of_answer() -> None:
    accounts = Accounts()
    streamed = a_request(stream=True)
    for _ in range(200):
        accounts.end(streamed, KLASS, "a", 0.0, an_outcome(output_tokens=10, body_bytes=1000))
    (counts,) = accounts.counts.values()
    before = counts.wasted_tokens
    accounts.end(streamed, KLASS, "a", 0.0, an_outcome(ending=Ending.CANCELLED, output_tokens=None, body_bytes=1000))
    assert counts.wasted_tokens - before == 10
    whole = Accounts()
    whole.end(
        a_request(stream=False), KLASS, "a", 0.0, an_outcome(ending=Ending.CANCELLED, output_tokens=None, body_bytes=45)
    )
    assert next(iter(whole.counts.values())).wasted_tokens == 10


def test_an_answer_without_tokens_or_bytes_teaches_nothing() -> None:
    accounts = Accounts()
    accounts.end(a_request(), KLASS, "a", 0.0, an_outcome(output_tokens=0, body_bytes=999))
    accounts.end(a_request(), KLASS, "a", 0.0, an_outcome(output_tokens=9, body_bytes=0))
    accounts.end(a_request(), KLASS, "a", 0.0, an_outcome(ending=Ending.FAILED, output_tokens=None, body_bytes=45))
    assert next(iter(accounts.counts.values())).wasted_tokens == 10


def test_models_that_do_not_exist_are_one_label() -> None:
    accounts = Accounts()
    for i in range(5000):
        accounts.refuse(a_request(model=f"invented-{i}"), "standard", Reason.UNKNOWN_MODEL, 0.0)
    ((key, counts),) = accounts.counts.items()
    assert key == ("standard", "default", "", "")
    assert counts.refused == {Reason.UNKNOWN_MODEL: 5000}
