"""The table of one ext_proc stream, in the orders that Envoy really sends."""

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from extproc import session as table
from extproc.model import Admit, Reason, Refuse
from extproc.session import (
    Abort,
    Answered,
    Ask,
    Body,
    Broken,
    Cancel,
    Close,
    Closed,
    Continue,
    Decided,
    Echo,
    Explain,
    Headers,
    NotFound,
    Phase,
    ProtocolError,
    Response,
    Session,
    Settle,
    State,
    Steer,
    TooLarge,
    Trailers,
    Turn,
    Unreadable,
)
from tests.session_playbook import Playbook

ADMIT = Admit("a-0", "a", "site-a", ("127.0.0.1:9000",), "standard")
REFUSE = Refuse(Reason.LINE_FULL, "full", 1.0)
BUFFERED = Headers(inference=True)
DUPLEX = Headers(inference=True, duplex=True)
OTHER = Headers(inference=False)
OTHER_DUPLEX = Headers(inference=False, duplex=True, duplex_response=True)
ANSWERED = Answered()
WHOLE = Body(b"{}", end_of_stream=True)

GO_ON = {phase: Continue(phase) for phase in Phase}


# --- buffered ---------------------------------------------------------------------------------------------------------


def test_a_buffered_body_is_decided_and_routed_in_its_own_response() -> None:
    with Playbook() as play:
        play >> BUFFERED << GO_ON[Phase.REQUEST_HEADERS]
        play >> WHOLE << Ask(b"{}")
        play >> Decided(ADMIT) << Steer(Phase.REQUEST_BODY, ADMIT)
        play >> Response(Phase.RESPONSE_TRAILERS) << GO_ON[Phase.RESPONSE_TRAILERS]
        play >> Closed() << Settle()


def test_a_buffered_body_without_end_of_stream_is_whole_too_since_trailers_follow_it() -> None:
    with Playbook() as play:
        play >> BUFFERED << GO_ON[Phase.REQUEST_HEADERS]
        play >> Body(b"{}", end_of_stream=False) << Ask(b"{}")
        play >> Decided(ADMIT) << Steer(Phase.REQUEST_BODY, ADMIT)
        play >> Trailers() << GO_ON[Phase.REQUEST_TRAILERS]
        play >> Closed() << Settle()


def test_a_replaced_buffered_body_goes_with_the_routing_answer() -> None:
    with Playbook() as play:
        play >> BUFFERED << GO_ON[Phase.REQUEST_HEADERS]
        play >> WHOLE << Ask(b"{}")
        play >> Decided(ADMIT, b"new") << Steer(Phase.REQUEST_BODY, ADMIT, b"new")


@pytest.mark.parametrize("headers", [Headers(True, end_of_stream=True), Headers(True, True, True, True)])
def test_headers_that_end_the_stream_are_decided_at_once(headers: Headers) -> None:
    with Playbook() as play:
        play >> headers << Ask(b"")
        play >> Decided(ADMIT) << Steer(Phase.REQUEST_HEADERS, ADMIT)
        play >> Closed() << Settle()


def test_a_refusal_ends_the_stream_and_leaves_nothing_to_settle() -> None:
    with Playbook() as play:
        play >> BUFFERED << GO_ON[Phase.REQUEST_HEADERS]
        play >> WHOLE << Ask(b"{}")
        play >> Decided(REFUSE) << Turn(REFUSE)
        play >> Closed()
    assert play.session.state is State.DONE


def test_an_unreadable_request_is_explained() -> None:
    with Playbook() as play:
        play >> BUFFERED << GO_ON[Phase.REQUEST_HEADERS]
        play >> Body(b"{", end_of_stream=True) << Ask(b"{")
        play >> Unreadable() << Explain()
        play >> Closed()


def test_responses_of_a_routed_request_pass_and_are_settled_once() -> None:
    with Playbook() as play:
        play >> BUFFERED << GO_ON[Phase.REQUEST_HEADERS]
        play >> WHOLE << Ask(b"{}")
        play >> Decided(ADMIT) << Steer(Phase.REQUEST_BODY, ADMIT)
        play >> Response(Phase.RESPONSE_HEADERS) << GO_ON[Phase.RESPONSE_HEADERS]
        play >> Response(Phase.RESPONSE_BODY, b"tokens") << GO_ON[Phase.RESPONSE_BODY]
        play >> Response(Phase.RESPONSE_TRAILERS) << GO_ON[Phase.RESPONSE_TRAILERS]
        play >> Closed() << Settle()
        play >> Closed()


# --- full duplex ------------------------------------------------------------------------------------------------------


def test_a_duplex_body_is_collected_then_steered_then_echoed() -> None:
    with Playbook() as play:
        play >> DUPLEX
        play >> Body(b"ab", end_of_stream=False)
        play >> Body(b"cd", end_of_stream=True) << Ask(b"abcd")
        play >> Decided(ADMIT) << Steer(Phase.REQUEST_HEADERS, ADMIT) << Echo(Phase.REQUEST_BODY, b"abcd", True)
        play >> Closed() << Settle()


def test_an_empty_duplex_body_is_echoed_as_one_empty_last_piece() -> None:
    with Playbook() as play:
        play >> DUPLEX
        play >> Body(b"", end_of_stream=True) << Ask(b"")
        play >> Decided(ADMIT) << Steer(Phase.REQUEST_HEADERS, ADMIT) << Echo(Phase.REQUEST_BODY, b"", True)


def test_request_trailers_end_a_duplex_body() -> None:
    with Playbook() as play:
        play >> DUPLEX
        play >> Body(b"abcd", end_of_stream=False)
        play >> Trailers() << Ask(b"abcd")
        play >> Decided(ADMIT) << Steer(Phase.REQUEST_HEADERS, ADMIT)
        play << Echo(Phase.REQUEST_BODY, b"abcd", False) << GO_ON[Phase.REQUEST_TRAILERS]
        play >> Closed() << Settle()


def test_trailers_without_any_duplex_body_echo_no_body() -> None:
    with Playbook() as play:
        play >> DUPLEX
        play >> Trailers() << Ask(b"")
        play >> Decided(ADMIT) << Steer(Phase.REQUEST_HEADERS, ADMIT) << GO_ON[Phase.REQUEST_TRAILERS]


@pytest.mark.parametrize(
    ("size", "pieces"),
    [(62_000, [62_000]), (62_001, [62_000, 1]), (124_000, [62_000] * 2), (150_000, [62_000] * 2 + [26_000])],
)
def test_a_long_duplex_body_is_echoed_in_pieces_and_only_the_last_ends_it(size: int, pieces: list[int]) -> None:
    body = bytes(i % 251 for i in range(size))
    session = Session()
    session.handle(DUPLEX)
    session.handle(Body(body[:1000], end_of_stream=False))
    session.handle(Body(body[1000:], end_of_stream=True))
    steer, *echoes = session.handle(Decided(ADMIT))
    assert steer == Steer(Phase.REQUEST_HEADERS, ADMIT)
    said = [one for one in echoes if isinstance(one, Echo)]
    assert [len(one.data) for one in said] == pieces
    assert b"".join(one.data for one in said) == body
    assert [one.end_of_stream for one in said] == [False] * (len(pieces) - 1) + [True]


def test_a_long_duplex_body_before_trailers_ends_in_no_piece() -> None:
    session = Session()
    session.handle(DUPLEX)
    session.handle(Body(b"x" * 70_000, end_of_stream=False))
    session.handle(Trailers())
    _, *echoes, last = session.handle(Decided(ADMIT))
    assert [isinstance(one, Echo) and one.end_of_stream for one in echoes] == [False, False]
    assert last == GO_ON[Phase.REQUEST_TRAILERS]


def test_a_replaced_duplex_body_is_echoed_in_place_of_the_client_s() -> None:
    with Playbook() as play:
        play >> DUPLEX
        play >> Body(b"old", end_of_stream=True) << Ask(b"old")
        play >> Decided(ADMIT, b"newer") << Steer(Phase.REQUEST_HEADERS, ADMIT, b"newer")
        play << Echo(Phase.REQUEST_BODY, b"newer", True)


def test_a_duplex_refusal_echoes_nothing() -> None:
    with Playbook() as play:
        play >> DUPLEX
        play >> WHOLE << Ask(b"{}")
        play >> Decided(REFUSE) << Turn(REFUSE)


def test_a_duplex_response_body_is_echoed_in_pieces_that_envoy_takes() -> None:
    with Playbook() as play:
        play >> Headers(inference=True, end_of_stream=True, duplex_response=True) << Ask(b"")
        play >> Decided(ADMIT) << Steer(Phase.REQUEST_HEADERS, ADMIT)
        play >> Response(Phase.RESPONSE_HEADERS) << GO_ON[Phase.RESPONSE_HEADERS]
        play >> Response(Phase.RESPONSE_BODY, b"a", False) << Echo(Phase.RESPONSE_BODY, b"a", False)
        play >> Response(Phase.RESPONSE_BODY, b"x" * 62_001, True)
        play << Echo(Phase.RESPONSE_BODY, b"x" * 62_000, False) << Echo(Phase.RESPONSE_BODY, b"x", True)
        play >> Closed() << Settle()


# --- paths that are not ours ------------------------------------------------------------------------------------------


def test_another_path_passes_with_its_body_when_buffered() -> None:
    with Playbook() as play:
        play >> OTHER << GO_ON[Phase.REQUEST_HEADERS]
        play >> WHOLE << GO_ON[Phase.REQUEST_BODY]
        play >> Trailers() << GO_ON[Phase.REQUEST_TRAILERS]
        play >> Response(Phase.RESPONSE_HEADERS) << GO_ON[Phase.RESPONSE_HEADERS]
        play >> Response(Phase.RESPONSE_BODY, b"x") << GO_ON[Phase.RESPONSE_BODY]
        play >> Closed()


def test_another_path_passes_piece_by_piece_in_full_duplex() -> None:
    with Playbook() as play:
        play >> OTHER_DUPLEX << GO_ON[Phase.REQUEST_HEADERS]
        play >> Body(b"a", end_of_stream=False) << Echo(Phase.REQUEST_BODY, b"a", False)
        play >> Body(b"y" * 62_001, end_of_stream=True)
        play << Echo(Phase.REQUEST_BODY, b"y" * 62_000, False) << Echo(Phase.REQUEST_BODY, b"y", True)
        play >> Response(Phase.RESPONSE_BODY, b"z", True) << Echo(Phase.RESPONSE_BODY, b"z", True)
        play >> Closed()


def test_another_path_without_a_body_passes() -> None:
    with Playbook() as play:
        play >> Headers(inference=False, end_of_stream=True) << GO_ON[Phase.REQUEST_HEADERS]
        play >> Closed()


@pytest.mark.parametrize("duplex", [False, True])
@pytest.mark.parametrize("end", [False, True])
def test_another_path_is_refused_when_the_shell_says_so(duplex: bool, end: bool) -> None:
    with Playbook() as play:
        play >> Headers(inference=False, end_of_stream=end, duplex=duplex, refused=True) << NotFound()
        play >> Closed()
    assert play.session.state is State.DONE


# --- too large --------------------------------------------------------------------------------------------------------


def test_a_streamed_body_is_refused_as_soon_as_it_is_too_large_and_the_rest_is_ignored() -> None:
    with Playbook(Session(most_bytes=5)) as play:
        play >> DUPLEX
        play >> Body(b"abc", end_of_stream=False)
        play >> Body(b"def", end_of_stream=False) << TooLarge(5)
        play >> Body(b"ghi", end_of_stream=False)
        play >> Body(b"", end_of_stream=True)
        play >> Trailers()
        play >> Closed()


def test_a_streamed_body_of_just_the_bound_is_taken() -> None:
    with Playbook(Session(most_bytes=5)) as play:
        play >> DUPLEX
        play >> Body(b"abc", end_of_stream=False)
        play >> Body(b"de", end_of_stream=True) << Ask(b"abcde")
        play >> Decided(ADMIT) << Steer(Phase.REQUEST_HEADERS, ADMIT) << Echo(Phase.REQUEST_BODY, b"abcde", True)
        play >> Closed() << Settle()


def test_what_is_under_way_while_the_refusal_is_written_is_ignored() -> None:
    session = Session(most_bytes=1)
    session.handle(DUPLEX)
    assert session.handle(Body(b"ab", end_of_stream=False)) == (TooLarge(1),)
    assert session.handle(Body(b"cd", end_of_stream=True)) == ()


# --- when a clean close harms nobody ----------------------------------------------------------------------------------

FIRST = Body(b"a", end_of_stream=False)
ANSWER = Response(Phase.RESPONSE_HEADERS)
LAST = Response(Phase.RESPONSE_BODY, b"x", end_of_stream=True)


@pytest.mark.parametrize(
    ("events", "at_rest"),
    [
        ((), False),
        ((BUFFERED,), False),
        ((BUFFERED, WHOLE), False),
        ((BUFFERED, WHOLE, Decided(ADMIT)), False),
        ((BUFFERED, WHOLE, Decided(ADMIT), ANSWERED), True),
        ((BUFFERED, WHOLE, Decided(ADMIT), ANSWERED, ANSWER), True),
        ((BUFFERED, WHOLE, Decided(REFUSE)), False),
        ((DUPLEX, WHOLE, Decided(ADMIT)), False),
        ((DUPLEX, WHOLE, Decided(ADMIT), ANSWERED), True),
        ((OTHER,), False),
        ((OTHER, ANSWERED), True),
        ((OTHER_DUPLEX, ANSWERED), False),
        ((OTHER_DUPLEX, ANSWERED, FIRST, ANSWERED), False),
        ((OTHER_DUPLEX, ANSWERED, FIRST, ANSWERED, WHOLE), False),
        ((OTHER_DUPLEX, ANSWERED, FIRST, ANSWERED, WHOLE, ANSWERED), True),
        ((OTHER_DUPLEX, ANSWERED, FIRST, ANSWERED, Trailers(), ANSWERED), True),
        ((Headers(False, True, True, True), ANSWERED), True),
        ((Headers(False, True, True, True), ANSWERED, ANSWER, ANSWERED), False),
        ((Headers(False, True, True, True), ANSWERED, ANSWER, ANSWERED, Response(Phase.RESPONSE_BODY)), False),
        ((Headers(False, True, True, True), ANSWERED, ANSWER, ANSWERED, LAST, ANSWERED), True),
        ((ANSWER, ANSWERED), True),
    ],
)
def test_a_session_is_at_rest_once_envoy_needs_nothing_more_of_it(
    events: tuple[table.Event, ...], at_rest: bool
) -> None:
    session = at(*events)()
    assert session.at_rest is at_rest
    if session.state is not State.DONE:
        assert session.handle(Broken())[-1] == (Close() if at_rest else Abort())


# --- local replies ----------------------------------------------------------------------------------------------------


def test_a_local_reply_of_an_earlier_filter_may_come_first() -> None:
    with Playbook() as play:
        play >> Response(Phase.RESPONSE_HEADERS) << GO_ON[Phase.RESPONSE_HEADERS]
        play >> Response(Phase.RESPONSE_BODY, b"too large", True) << GO_ON[Phase.RESPONSE_BODY]
        play >> Closed()


def test_a_local_reply_that_opens_a_duplex_stream_is_echoed() -> None:
    with Playbook() as play:
        play >> Response(Phase.RESPONSE_HEADERS, duplex=True) << GO_ON[Phase.RESPONSE_HEADERS]
        play >> Response(Phase.RESPONSE_BODY, b"too large", True) << Echo(Phase.RESPONSE_BODY, b"too large", True)
        play >> Closed()


def test_a_local_reply_while_the_body_comes_asks_nobody() -> None:
    with Playbook() as play:
        play >> BUFFERED << GO_ON[Phase.REQUEST_HEADERS]
        play >> Response(Phase.RESPONSE_HEADERS) << GO_ON[Phase.RESPONSE_HEADERS]
        play >> Closed()


def test_a_local_reply_while_held_cancels() -> None:
    with Playbook() as play:
        play >> BUFFERED << GO_ON[Phase.REQUEST_HEADERS]
        play >> WHOLE << Ask(b"{}")
        play >> Response(Phase.RESPONSE_HEADERS) << Cancel() << GO_ON[Phase.RESPONSE_HEADERS]
        play >> Response(Phase.RESPONSE_TRAILERS) << GO_ON[Phase.RESPONSE_TRAILERS]
        play >> Closed()


# --- cancelled and broken at every state ------------------------------------------------------------------------------


def at(*events: table.Event) -> Callable[[], Session]:
    def made() -> Session:
        session = Session()
        for event in events:
            session.handle(event)
        return session

    return made


STATES: dict[str, tuple[Callable[[], Session], list[table.Action], table.Action]] = {
    "start": (at(), [], Abort()),
    "body": (at(BUFFERED), [], Abort()),
    "duplex body": (at(DUPLEX, Body(b"x", end_of_stream=False)), [], Abort()),
    "deciding": (at(BUFFERED, WHOLE), [Cancel()], Abort()),
    "duplex deciding": (at(DUPLEX, WHOLE), [Cancel()], Abort()),
    "routing": (at(BUFFERED, WHOLE, Decided(ADMIT)), [Settle()], Abort()),
    "duplex routing": (at(DUPLEX, WHOLE, Decided(ADMIT)), [Settle()], Abort()),
    "routed": (at(BUFFERED, WHOLE, Decided(ADMIT), ANSWERED), [Settle()], Close()),
    "duplex routed": (at(DUPLEX, WHOLE, Decided(ADMIT), ANSWERED), [Settle()], Close()),
    "streaming": (
        at(BUFFERED, WHOLE, Decided(ADMIT), ANSWERED, Response(Phase.RESPONSE_HEADERS)),
        [Settle()],
        Close(),
    ),
    "beginning to pass": (at(OTHER), [], Abort()),
    "passing": (at(OTHER, ANSWERED), [], Close()),
    "passing a body": (at(OTHER_DUPLEX, ANSWERED, Body(b"x", end_of_stream=False), ANSWERED), [], Abort()),
    "refusing": (at(BUFFERED, WHOLE, Decided(REFUSE)), [], Abort()),
    "explaining": (at(BUFFERED, WHOLE, Unreadable()), [], Abort()),
    "refusing a path": (at(Headers(inference=False, refused=True)), [], Abort()),
    "refused": (at(BUFFERED, WHOLE, Decided(REFUSE), ANSWERED), [], Close()),
    "replying": (at(BUFFERED, WHOLE, Response(Phase.RESPONSE_HEADERS)), [], Abort()),
    "replied to": (at(BUFFERED, WHOLE, Response(Phase.RESPONSE_HEADERS), ANSWERED), [], Close()),
}


@pytest.mark.parametrize("name", STATES)
def test_a_client_that_goes_away_gives_back_what_was_held(name: str) -> None:
    made, held, _ = STATES[name]
    session = made()
    assert list(session.handle(Closed())) == held
    assert session.state is State.DONE
    assert list(session.handle(Closed())) == []


@pytest.mark.parametrize("name", STATES)
def test_what_breaks_before_the_answer_aborts_and_after_it_closes_clean(name: str) -> None:
    made, held, ending = STATES[name]
    session = made()
    assert list(session.handle(Broken())) == [*held, ending]
    assert session.state is State.DONE


@pytest.mark.parametrize(
    ("before", "event"),
    [
        ((), WHOLE),
        ((), Trailers()),
        ((), Decided(ADMIT)),
        ((), Unreadable()),
        ((BUFFERED,), BUFFERED),
        ((BUFFERED,), Decided(ADMIT)),
        ((BUFFERED,), Trailers()),
        ((BUFFERED, WHOLE), WHOLE),
        ((BUFFERED, WHOLE), Trailers()),
        ((BUFFERED, WHOLE), BUFFERED),
        ((BUFFERED, WHOLE, Decided(ADMIT)), WHOLE),
        ((BUFFERED, WHOLE, Decided(ADMIT)), Response(Phase.RESPONSE_HEADERS)),
        ((BUFFERED, WHOLE, Decided(ADMIT), ANSWERED), Decided(ADMIT)),
        ((BUFFERED, WHOLE, Decided(ADMIT), ANSWERED), Decided(REFUSE)),
        ((BUFFERED, WHOLE, Decided(ADMIT), ANSWERED), Unreadable()),
        ((BUFFERED, WHOLE, Decided(ADMIT), ANSWERED), WHOLE),
        ((BUFFERED, WHOLE, Decided(ADMIT), ANSWERED), BUFFERED),
        ((BUFFERED, WHOLE, Decided(ADMIT), ANSWERED), ANSWERED),
        ((OTHER, ANSWERED), Decided(ADMIT)),
        ((OTHER, ANSWERED), OTHER),
        ((BUFFERED, WHOLE, Decided(REFUSE), ANSWERED), Response(Phase.RESPONSE_HEADERS)),
        ((BUFFERED,), ANSWERED),
        ((Closed(),), BUFFERED),
    ],
)
def test_what_has_no_place_is_a_protocol_error(before: tuple[table.Event, ...], event: table.Event) -> None:
    session = at(*before)()
    with pytest.raises(ProtocolError):
        session.handle(event)


# --- properties -------------------------------------------------------------------------------------------------------

EVENTS = st.one_of(
    st.builds(Headers, *[st.booleans()] * 5),
    st.builds(Body, st.binary(max_size=4), st.booleans()),
    st.just(Trailers()),
    st.builds(
        Response,
        st.sampled_from([Phase.RESPONSE_HEADERS, Phase.RESPONSE_BODY, Phase.RESPONSE_TRAILERS]),
        st.just(b"x"),
        st.booleans(),
        st.booleans(),
    ),
    st.sampled_from([Decided(ADMIT), Decided(REFUSE), Decided(ADMIT, b"new"), Unreadable()]),
    st.sampled_from([Closed(), Broken()]),
)
ENDS = (Turn, Explain, Cancel, Settle)


@given(st.lists(st.tuples(EVENTS, st.booleans()), max_size=12))
@settings(max_examples=600, deadline=None)
def test_whatever_comes_in_whatever_order_an_ask_ends_exactly_once(events: list[tuple[table.Event, bool]]) -> None:
    """The flag beside an event tells whether the shell can write what follows from it."""
    session = Session(most_bytes=6)
    said: list[table.Action] = []
    for event, writes in events:
        try:
            said += session.handle(event)
            if session.state is State.ANSWERING:
                said += session.handle(ANSWERED if writes else Broken())
                assert writes or said[-1] == Abort(), "an answer that was not written fails closed"
        except ProtocolError:
            at_rest = session.at_rest
            said += session.handle(Broken())  # what the server does
            assert said[-1] == (Close() if at_rest else Abort()), "before the answer a clean close would fail open"
        if session.state is State.DONE:
            break
    said += session.handle(Closed())
    asks = [i for i, one in enumerate(said) if isinstance(one, Ask)]
    ends = [i for i, one in enumerate(said) if isinstance(one, ENDS)]
    steers = [i for i, one in enumerate(said) if isinstance(one, Steer)]
    cancels = [i for i, one in enumerate(said) if isinstance(one, Cancel)]
    assert len(asks) <= 1
    assert len(ends) == len(asks)
    assert all(end > ask for ask, end in zip(asks, ends, strict=True))
    assert len(steers) <= 1
    assert not (steers and cancels), "no routing answer once cancelled"
    assert len(steers) == sum(isinstance(one, Settle) for one in said), "what was steered is settled, nothing else"
    assert sum(isinstance(one, NotFound | TooLarge | Turn | Explain) for one in said) <= 1


@given(st.lists(st.binary(max_size=100_000), max_size=4), st.booleans())
@settings(max_examples=60, deadline=None)
def test_what_is_echoed_is_what_was_sent(pieces: list[bytes], trailers: bool) -> None:
    session = Session()
    session.handle(DUPLEX)
    for piece in pieces:
        session.handle(Body(piece, end_of_stream=False))
    (ask,) = session.handle(Trailers() if trailers else Body(b"end", end_of_stream=True))
    body = b"".join(pieces) + (b"" if trailers else b"end")
    assert ask == Ask(body)
    echoes = [one for one in session.handle(Decided(ADMIT)) if isinstance(one, Echo)]
    assert b"".join(one.data for one in echoes) == body
    assert all(len(one.data) <= 62_000 for one in echoes)
    assert sum(one.end_of_stream for one in echoes) == int(not trailers)
