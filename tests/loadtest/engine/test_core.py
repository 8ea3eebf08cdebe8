"""The engine core in virtual time: steps of 10 ms + 0.5 ms a request, 40 ms per 1,000 prompt tokens, blocks of 4."""

from collections import Counter
from collections.abc import Hashable, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from extproc.model import Profile
from loadtest.engine.core import Core
from loadtest.engine.request import EngineEvent, EngineRequest, FirstToken, Timing


def a_core(order: Any = "fcfs", **fields: Any) -> Core:
    base: dict[str, Any] = {
        "a_ms": 10.0,
        "c_ms": 0.5,
        "d_ms": 0.0,
        "e_ms": 40.0,
        "kv_tokens": 400,
        "block_tokens": 4,
        "batch_tokens": 64,
        "max_running": 8,
    }
    return Core(Profile(name="test", **base | fields), order)


def a_prompt(request_id: Any, prompt: int = 16, output: int = 1, family: str = "", **fields: Any) -> EngineRequest:
    """Names of one *family* are prefixes of each other; without one they are the request's own."""
    names = tuple((family or request_id, i) for i in range(prompt // 4))
    return EngineRequest(request_id, prompt, output, names, **fields)


def run(core: Core) -> list[EngineEvent]:
    return list(events(core))


def events(core: Core) -> Iterator[EngineEvent]:
    while (now := core.wake()) is not None:
        yield from core.advance(now)


def timings(core: Core) -> dict[Any, Timing]:
    return {one.id: one for one in run(core) if isinstance(one, Timing)}


def test_a_lone_request_prefills_in_one_step_and_then_gets_a_token_a_step() -> None:
    core = a_core()
    core.submit(a_prompt("r", prompt=50, output=4), now=1.0)
    first, done = run(core)
    assert isinstance(first, FirstToken)
    assert isinstance(done, Timing)
    assert first.at == done.first_token == pytest.approx(1.0 + 0.010 + 0.0005 + 0.002)
    assert done.ttft == pytest.approx(0.0125)
    assert done.tpot == pytest.approx(0.0105)
    assert (done.output_tokens, done.ending, done.started) == (4, "completed", 1.0)


def test_a_long_prompt_is_prefilled_in_chunks_of_the_budget() -> None:
    core = a_core()
    core.submit(a_prompt("r", prompt=150), now=0.0)
    assert timings(core)["r"].ttft == pytest.approx(3 * 0.0105 + 150 * 0.00004)
    assert core.totals.steps == 3


def test_decoding_requests_keep_their_token_a_step_while_another_prefills_what_is_left_of_the_budget() -> None:
    core = a_core()
    core.submit(a_prompt("old", prompt=4, output=50), now=0.0)
    core.advance(0.005)
    core.submit(a_prompt("new", prompt=126), now=0.005)
    assert core.generated("old") == 0
    core.advance(0.03)
    assert core.generated("old") == 2  # its first token, and one beside the newcomer's first chunk of 63
    assert core.generated("new") == 0
    core.advance(0.04)
    assert core.generated("old") == 3


def test_the_quadratic_term_charges_a_chunk_for_what_stands_before_it() -> None:
    core = a_core(quad_ms=1000.0)
    core.submit(a_prompt("r", prompt=128), now=0.0)
    linear = 2 * 0.0105 + 128 * 0.00004
    pairs = 64 * 32 + 64 * (64 + 32)
    assert timings(core)["r"].ttft == pytest.approx(linear + pairs * 1000 / 1e6 / 1000)


def test_kv_tokens_make_each_decode_step_a_little_longer() -> None:
    core = a_core(d_ms=100.0)
    core.submit(a_prompt("r", prompt=10, output=3), now=0.0)
    timing = timings(core)["r"]
    assert timing.finished - (timing.first_token or 0) == pytest.approx(2 * 0.0105 + (10 + 11) * 0.0001)


def test_what_stands_in_front_of_the_engine_delays_the_first_token_and_nothing_else() -> None:
    core = a_core(front_ms=100.0, front_ms_per_1k=1000.0)
    core.submit(a_prompt("r", prompt=50, output=3), now=1.0)
    timing = timings(core)["r"]
    assert timing.started == pytest.approx(1.15)
    assert timing.tpot == pytest.approx(0.0105)


def test_a_prompt_seen_before_is_not_computed_again_but_for_its_last_block() -> None:
    core = a_core()
    core.submit(a_prompt("one", prompt=40, family="p"), now=0.0)
    run(core)
    core.submit(a_prompt("two", prompt=40, family="p"), now=1.0)
    timing = timings(core)["two"]
    assert timing.cached_tokens == 36  # the last token must be computed, and blocks are whole
    assert timing.ttft == pytest.approx(0.0105 + 4 * 0.00004)


def test_a_match_ends_at_the_first_gap() -> None:
    core = a_core()
    core.submit(EngineRequest("one", 16, 1, ("a", "b", "c", "d")), now=0.0)
    run(core)
    core.submit(EngineRequest("two", 17, 1, ("a", "x", "c", "d")), now=1.0)
    assert timings(core)["two"].cached_tokens == 4


def test_an_answer_is_found_again_in_the_next_prompt() -> None:
    core = a_core()
    core.submit(EngineRequest("one", 10, 8, ("a", "b"), output_blocks=("c", "d")), now=0.0)
    run(core)
    core.submit(EngineRequest("two", 21, 1, ("a", "b", "c", "d", "e")), now=1.0)
    assert timings(core)["two"].cached_tokens == 16  # 17 tokens have KV: the last one was never fed back


def test_the_least_recently_used_prefix_is_evicted_first_and_its_end_before_its_beginning() -> None:
    core = a_core(kv_tokens=40)
    for request_id, family in (("1", "old"), ("2", "new"), ("3", "old")):
        core.submit(a_prompt(request_id, prompt=16, family=family), now=10.0 * int(request_id))
        run(core)
    core.submit(a_prompt("4", prompt=20), now=40.0)  # 2 blocks are empty, 3 must go
    run(core)
    kept = [core.pool.match([(family, i) for i in range(4)]) for family in ("old", "new")]
    assert kept == [4, 1]


def test_blocks_of_a_live_request_are_shared_not_copied() -> None:
    core = a_core()
    core.submit(a_prompt("one", prompt=40, output=100, family="p"), now=0.0)
    core.advance(0.1)
    alone = core.pool.live
    core.submit(a_prompt("two", prompt=41, output=100, family="p"), now=0.1)
    core.advance(0.14)
    assert core.pool.holders(("p", 9)) == 2
    assert core.pool.live < alone + 4


def test_when_blocks_run_out_the_latest_is_preempted_and_computed_anew() -> None:
    core = a_core(kv_tokens=80)
    core.submit(a_prompt("first", prompt=32, output=20), now=0.0)
    core.submit(a_prompt("second", prompt=32, output=20), now=0.0)
    done = timings(core)
    assert done["first"].preemptions == 0
    assert done["second"].preemptions == 1
    assert done["second"].output_tokens == 20
    assert 0 < done["second"].wasted_tokens < 52  # its named prompt blocks were partly still there
    assert core.totals.wasted == done["second"].wasted_tokens
    assert (done["second"].first_token or 0) < done["first"].finished < done["second"].finished


def test_under_priority_order_the_lower_number_runs_first_and_is_preempted_last() -> None:
    core = a_core("priority", max_running=1)
    for request_id, priority in (("running", 0), ("low", 5), ("high", -1), ("middle", 0)):
        core.submit(a_prompt(request_id, priority=priority), now=0.0)
        core.advance(0.001)
    assert [one.id for one in run(core) if isinstance(one, Timing)] == ["running", "high", "middle", "low"]
    core = a_core("priority", kv_tokens=80)
    core.submit(a_prompt("unimportant", prompt=32, output=20, priority=9), now=0.0)
    core.submit(a_prompt("important", prompt=32, output=20, priority=1), now=0.0)
    done = timings(core)
    assert (done["important"].preemptions, done["unimportant"].preemptions) == (0, 1)


def test_without_priority_order_requests_run_as_they_came() -> None:
    core = a_core(max_running=1)
    for request_id, priority in (("a", 5), ("b", 1), ("c", 0)):
        core.submit(a_prompt(request_id, priority=priority), now=0.0)
    assert [one.id for one in run(core) if isinstance(one, Timing)] == ["a", "b", "c"]


def test_an_abort_frees_blocks_at_once_and_lets_the_next_one_in() -> None:
    core = a_core(max_running=1)
    core.submit(a_prompt("gone", prompt=40, output=300), now=0.0)
    core.submit(a_prompt("next"), now=0.0)
    core.advance(0.1)
    assert core.pool.live > 10
    timing = core.abort("gone", 0.1)
    assert timing is not None
    assert (timing.ending, core.pool.live) == ("aborted", 0)
    assert timing.wasted_tokens == 40 + timing.output_tokens == core.totals.wasted
    assert core.abort("gone", 0.1) is None
    assert timings(core)["next"].ending == "completed"


def test_a_waiting_request_can_be_aborted_before_it_ran() -> None:
    core = a_core(max_running=1)
    core.submit(a_prompt("running", output=5), now=0.0)
    core.submit(a_prompt("waiting"), now=0.0)
    core.advance(0.001)
    timing = core.abort("waiting", 0.001)
    assert timing is not None
    assert (timing.started, timing.first_token, timing.wasted_tokens) == (None, None, 0)
    assert list(timings(core)) == ["running"]


def test_a_slow_engine_takes_its_factor_longer() -> None:
    core = a_core()
    core.slowdown = 4.0
    core.submit(a_prompt("r", prompt=50, output=2), now=0.0)
    assert timings(core)["r"].tpot == pytest.approx(0.042)


@pytest.mark.parametrize(
    "request_", [a_prompt("r", prompt=0), a_prompt("r", output=0), a_prompt("r", prompt=300, output=102)]
)
def test_what_can_never_run_is_refused(request_: EngineRequest) -> None:
    core = a_core()
    with pytest.raises(ValueError, match=r"token|KV"):
        core.submit(request_, now=0.0)
    core.submit(a_prompt("r", prompt=300, output=101), now=0.0)
    with pytest.raises(ValueError, match="already"):
        core.submit(a_prompt("r"), now=0.0)


def test_a_thousand_decode_steps_take_a_handful_of_calls() -> None:
    core = a_core(kv_tokens=100_000)
    for i in range(8):
        core.submit(a_prompt(i, output=5000), now=0.0)
    calls = 0
    while (now := core.wake()) is not None:
        core.advance(now)
        calls += 1
    assert core.totals.generated == 40_000
    assert calls < 50


# --- what must always hold --------------------------------------------------------------------------------------------

ARRIVAL = st.tuples(
    st.floats(0, 0.3),  # seconds since the last
    st.integers(1, 40),  # prompt
    st.integers(1, 30),  # output
    st.integers(0, 2),  # family
    st.integers(-1, 1),  # priority
    st.booleans(),  # whether its answer has names
    st.none() | st.floats(0, 0.5),  # aborted so much later
)
CORES = st.fixed_dictionaries(
    {
        "order": st.sampled_from(["fcfs", "priority"]),
        "kv_tokens": st.sampled_from([72, 100, 400]),
        "block_tokens": st.sampled_from([1, 4]),
        "batch_tokens": st.sampled_from([8, 64]),
        "max_running": st.sampled_from([1, 3, 8]),
        "front_ms": st.sampled_from([0.0, 30.0]),
        "d_ms": st.sampled_from([0.0, 50.0]),
    }
)


def play(core: Core, arrivals: list[Any], *, stepwise: bool) -> list[EngineEvent]:
    """Feed *arrivals*; *stepwise* advances to every wake, else only to arrivals and aborts."""
    block, now = core.profile.block_tokens, 0.0
    moments: list[tuple[float, EngineRequest | int]] = []
    for i, (gap, prompt, output, family, priority, named, abort) in enumerate(arrivals):
        now += gap
        whole = [(family, k) for k in range((prompt + output) // block)]
        split = prompt // block
        answer = tuple(whole[split:]) if named else ()
        moments.append((now, EngineRequest(i, prompt, output, tuple(whole[:split]), answer, priority)))
        if abort is not None:
            moments.append((now + abort, i))
    seen: list[EngineEvent] = []
    for now, what in sorted(moments, key=lambda moment: moment[0]):
        while stepwise and (wake := core.wake()) is not None and wake <= now:
            seen += core.advance(wake)
        seen += core.advance(now)
        assert 0 <= core.pool.live <= core.pool.capacity
        if isinstance(what, EngineRequest):
            core.submit(what, now)
        elif timing := core.abort(what, now):
            seen.append(timing)
    while (wake := core.wake()) is not None:
        seen += core.advance(wake if stepwise else wake + 1.0)
    return seen


def a_random_core(fields: dict[str, Any]) -> Core:
    return a_core(**fields | {"max_running": min(fields["max_running"], fields["batch_tokens"])})


@settings(deadline=None)
@given(CORES, st.lists(ARRIVAL, min_size=1, max_size=25))
def test_every_request_ends_exactly_once_and_no_block_stays_held(fields: dict[str, Any], arrivals: list[Any]) -> None:
    core = a_random_core(fields)
    seen = play(core, arrivals, stepwise=True)
    ended = [one for one in seen if isinstance(one, Timing)]
    assert Counter(one.id for one in ended) == Counter(range(len(arrivals)))
    outputs: dict[Hashable, int] = {i: arrival[2] for i, arrival in enumerate(arrivals)}
    assert all(one.output_tokens == outputs[one.id] for one in ended if one.ending == "completed")
    assert (core.running, core.waiting, core.pool.live) == (0, 0, 0)
    assert not any(core.pool.holders((family, k)) for family in range(3) for k in range(70))
    core.pool.grow(core.pool.capacity)  # every block can be had again


@settings(deadline=None)
@given(CORES, st.lists(ARRIVAL, min_size=1, max_size=25))
def test_many_steps_at_once_come_to_the_same_as_one_by_one(fields: dict[str, Any], arrivals: list[Any]) -> None:
    leaping, walking = a_random_core(fields), a_random_core(fields)
    at_once, one_by_one = (play(c, arrivals, stepwise=s) for c, s in ((leaping, False), (walking, True)))
    assert leaping.totals == walking.totals
    assert [(type(one), one.id) for one in at_once] == [(type(one), one.id) for one in one_by_one]
    for one, other in zip(at_once, one_by_one, strict=True):
        assert moment(one) == pytest.approx(moment(other), abs=1e-9)


def moment(event: EngineEvent) -> float:
    return event.at if isinstance(event, FirstToken) else event.finished
