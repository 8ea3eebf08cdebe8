"""One ext_proc stream as a state table. No protobuf, no I/O.

::

    START ──headers──▶ BODY ──whole body──▶ DECIDING ──admit──▶ ANSWERING ──answered──▶ ROUTED ──closed──▶ (settled)
      │                 └ too large ──┐        │ └ refuse, unreadable ──▶ ANSWERING ──answered──▶ DONE
      │                               └────────┼─────────────────────────────▲
      └ other path, local reply ──▶ ANSWERING ─┼─answered──▶ PASSING
                                               └ closed ──▶ (cancelled)

Envoy fails *open* on a clean close before the routing answer and cuts a running response on an abort after it. So what
breaks while Envoy still needs us (before the whole answer is *written*, or while a body streams through us) aborts;
what breaks when it needs nothing more closes clean (:attr:`Session.at_rest`). Invariant: a session that asked is
either answered, cancelled or settled, exactly once.

Two ways of bodies: buffered (the whole body in one message, the routing answer is the body's response) and full duplex
(the headers' response is held back until the body has ended, then the body is echoed).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from extproc.model import Admit, Final, Refuse

ECHO_BYTES = 62_000
"""Most bytes of a body in one echoed message; Envoy resets the stream above 64 KiB."""


class State(Enum):
    """Where the stream is."""

    START = auto()
    BODY = auto()
    DECIDING = auto()
    ANSWERING = auto()
    """What Envoy waits for is being built and written."""
    ROUTED = auto()
    PASSING = auto()
    DONE = auto()


class Phase(Enum):
    """Which message of Envoy's a response answers."""

    REQUEST_HEADERS = auto()
    REQUEST_BODY = auto()
    REQUEST_TRAILERS = auto()
    RESPONSE_HEADERS = auto()
    RESPONSE_BODY = auto()
    RESPONSE_TRAILERS = auto()


class ProtocolError(Exception):
    """Envoy sent something that has no place in this state."""


# --- events -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Headers:
    """Request headers. *inference* is false on paths that are not ours to route; *refused* on those that none may go.

    *duplex* and *duplex_response* tell that the request's and the response's body stream through us.
    """

    inference: bool
    end_of_stream: bool = False
    duplex: bool = False
    duplex_response: bool = False
    refused: bool = False


@dataclass(frozen=True, slots=True)
class Body:
    """A piece of the request's body: the whole of it when buffered."""

    data: bytes
    end_of_stream: bool


@dataclass(frozen=True, slots=True)
class Trailers:
    """Request trailers."""


@dataclass(frozen=True, slots=True)
class Response:
    """A message of the response side; *data* for a body, *duplex* when it opens the stream."""

    phase: Phase
    data: bytes = b""
    end_of_stream: bool = False
    duplex: bool = False


@dataclass(frozen=True, slots=True)
class Decided:
    """The decider has answered; *body* replaces the request's own if given."""

    verdict: Final
    body: bytes | None = None


@dataclass(frozen=True, slots=True)
class Unreadable:
    """The request could not be read; the shell has the answer."""


@dataclass(frozen=True, slots=True)
class Answered:
    """Every action so far has been carried out: Envoy's side of gRPC has the whole answer."""


@dataclass(frozen=True, slots=True)
class Closed:
    """Envoy ended the stream: the HTTP exchange is over, or the client has gone."""


@dataclass(frozen=True, slots=True)
class Broken:
    """Something of ours failed."""


Event = Headers | Body | Trailers | Response | Decided | Unreadable | Answered | Closed | Broken


# --- actions ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Continue:
    """Answer the message of this phase without a change."""

    phase: Phase


@dataclass(frozen=True, slots=True)
class Echo:
    """Send a piece of body on (full duplex)."""

    phase: Phase
    data: bytes
    end_of_stream: bool


@dataclass(frozen=True, slots=True)
class Ask:
    """Read the request from its headers and this body, and have it decided."""

    body: bytes


@dataclass(frozen=True, slots=True)
class Steer:
    """Give the routing answer as the response to *phase*; *body* replaces the request's, in full duplex by its echo."""

    phase: Phase
    admit: Admit
    body: bytes | None = None


@dataclass(frozen=True, slots=True)
class Turn:
    """Answer the client with this refusal."""

    refuse: Refuse


@dataclass(frozen=True, slots=True)
class NotFound:
    """Answer the client that there is no such path."""


@dataclass(frozen=True, slots=True)
class Explain:
    """Answer the client with what is wrong with its request."""


@dataclass(frozen=True, slots=True)
class TooLarge:
    """Answer the client that its body has more than *most* bytes."""

    most: int


@dataclass(frozen=True, slots=True)
class Cancel:
    """Stop asking: nobody waits for the answer."""


@dataclass(frozen=True, slots=True)
class Settle:
    """The exchange is over; free the place."""


@dataclass(frozen=True, slots=True)
class Abort:
    """End the stream with an error status: Envoy must not go on unrouted."""


@dataclass(frozen=True, slots=True)
class Close:
    """End the stream clean: Envoy lets the response finish."""


Action = Continue | Echo | Ask | Steer | Turn | NotFound | Explain | TooLarge | Cancel | Settle | Abort | Close

_CONTINUE: dict[Phase, Sequence[Action]] = {phase: (Continue(phase),) for phase in Phase}
_OPEN = (State.START, State.BODY, State.DECIDING)
_SERVED = (State.ROUTED, State.PASSING)


class Session:
    """The state of one stream. A streamed body of more than *most_bytes* is refused as soon as it is seen to be."""

    def __init__(self, *, most_bytes: int = 16_777_216) -> None:
        self.state = State.START
        self._then = State.DONE  # where ANSWERING leads
        self._most = most_bytes
        self._duplex = self._duplex_response = False
        self._inbound = self._outbound = False  # a body streams through us and has not ended
        self._pieces: list[bytes] = []
        self._size = 0
        self._answers = Phase.REQUEST_HEADERS
        self._trailers = False

    @property
    def at_rest(self) -> bool:
        """Whether Envoy needs nothing more of us: a clean close now lets the exchange finish."""
        return self.state in _SERVED and not self._inbound and not self._outbound

    def handle(self, event: Event) -> Sequence[Action]:
        """Advance by one event and return what the shell must do, in order.

        In ANSWERING the shell says :class:`Answered` once all of it is done. An :class:`Ask` comes alone.
        """
        return _ON[type(event)](self, event)

    def _on_headers(self, event: Headers) -> Sequence[Action]:
        if self.state is not State.START:
            raise self._misplaced(event)
        self._duplex, self._duplex_response = event.duplex, event.duplex_response
        if event.inference:
            if event.end_of_stream:
                return self._ask(b"")
            self.state = State.BODY
            return () if self._duplex else _CONTINUE[Phase.REQUEST_HEADERS]
        if event.refused:
            return self._answer(State.DONE, (NotFound(),))
        self._inbound = event.duplex and not event.end_of_stream
        return self._answer(State.PASSING, _CONTINUE[Phase.REQUEST_HEADERS])

    def _on_body(self, event: Body) -> Sequence[Action]:
        if self.state is State.BODY:
            if self._duplex:
                return self._collect(event)
            self._answers = Phase.REQUEST_BODY
            return self._ask(event.data)
        if self.state is State.PASSING:
            if not self._duplex:
                return _CONTINUE[Phase.REQUEST_BODY]
            self._inbound &= not event.end_of_stream
            return self._answer(State.PASSING, _echoed(Phase.REQUEST_BODY, event.data, event.end_of_stream))
        return self._late(event)

    def _collect(self, event: Body) -> Sequence[Action]:
        self._size += len(event.data)
        if self._size > self._most:
            self._pieces = []
            return self._answer(State.DONE, (TooLarge(self._most),))
        self._pieces.append(event.data)
        return self._ask_whole() if event.end_of_stream else ()

    def _on_trailers(self, event: Trailers) -> Sequence[Action]:
        if self.state is State.BODY and self._duplex:
            self._trailers = True
            return self._ask_whole()
        if self.state in _SERVED:
            streamed, self._inbound = self._inbound, False
            said = _CONTINUE[Phase.REQUEST_TRAILERS]
            return self._answer(self.state, said) if streamed else said
        return self._late(event)

    def _on_decided(self, event: Decided) -> Sequence[Action]:
        if self.state is not State.DECIDING:
            raise self._misplaced(event)
        verdict = event.verdict
        if isinstance(verdict, Admit):
            return self._answer(State.ROUTED, self._route(verdict, event.body))
        return self._answer(State.DONE, (Turn(verdict),))

    def _on_unreadable(self, event: Unreadable) -> Sequence[Action]:
        if self.state is not State.DECIDING:
            raise self._misplaced(event)
        return self._answer(State.DONE, (Explain(),))

    def _on_response(self, event: Response) -> Sequence[Action]:
        was = self.state
        if was in _SERVED:
            return self._respond(was, event)
        if was not in _OPEN:
            raise self._misplaced(event)
        self._pieces = []  # a local reply of an earlier filter: the request goes nowhere
        self._duplex_response |= event.duplex
        said = self._answer(State.PASSING, self._respond(State.PASSING, event))
        return (Cancel(), *said) if was is State.DECIDING else said

    def _respond(self, state: State, event: Response) -> Sequence[Action]:
        """Pass one message of the response on. Unless its body streams through us, Envoy can do without our answer."""
        if not self._duplex_response:
            return _CONTINUE[event.phase]
        self._outbound = event.phase is not Phase.RESPONSE_TRAILERS and not event.end_of_stream
        if event.phase is not Phase.RESPONSE_BODY:
            return self._answer(state, _CONTINUE[event.phase])
        return self._answer(state, _echoed(event.phase, event.data, event.end_of_stream))

    def _on_answered(self, event: Answered) -> Sequence[Action]:
        if self.state is not State.ANSWERING:
            raise self._misplaced(event)
        self.state = self._then
        return ()

    def _on_end(self, event: Closed | Broken) -> Sequence[Action]:
        was, at_rest = self.state, self.at_rest
        self.state = State.DONE
        held: Sequence[Action] = ()
        if was is State.DECIDING:
            held = (Cancel(),)
        elif was is State.ROUTED or (was is State.ANSWERING and self._then is State.ROUTED):
            held = (Settle(),)
        if isinstance(event, Closed):
            return held
        return (*held, Close() if at_rest or was is State.DONE else Abort())

    def _answer(self, then: State, actions: Sequence[Action]) -> Sequence[Action]:
        self.state, self._then = State.ANSWERING, then
        return actions

    def _ask(self, body: bytes) -> Sequence[Action]:
        self.state = State.DECIDING
        return (Ask(body),)

    def _ask_whole(self) -> Sequence[Action]:
        body = b"".join(self._pieces)
        self._pieces = [body] if self._pieces else []  # one copy, however long it is held
        return self._ask(body)

    def _route(self, admit: Admit, replaced: bytes | None) -> Sequence[Action]:
        steer = Steer(self._answers, admit, replaced)
        if not self._duplex:
            return (steer,)
        actions: list[Action] = [steer]
        if self._pieces:
            body = self._pieces.pop() if replaced is None else replaced
            self._pieces = []
            actions += _echoed(Phase.REQUEST_BODY, body, not self._trailers)
        if self._trailers:
            actions += _CONTINUE[Phase.REQUEST_TRAILERS]
        return actions

    def _late(self, event: Body | Trailers) -> Sequence[Action]:
        """Ignore what was under way when we refused."""
        if self.state is State.DONE or (self.state is State.ANSWERING and self._then is State.DONE):
            return ()
        raise self._misplaced(event)

    def _misplaced(self, event: Event) -> ProtocolError:
        return ProtocolError(f"{type(event).__name__} in {self.state.name}")


_ON: dict[type[Event], Callable[[Session, Any], Sequence[Action]]] = {
    Headers: Session._on_headers,  # noqa: SLF001 - the table of the class above
    Body: Session._on_body,  # noqa: SLF001
    Trailers: Session._on_trailers,  # noqa: SLF001
    Response: Session._on_response,  # noqa: SLF001
    Decided: Session._on_decided,  # noqa: SLF001
    Unreadable: Session._on_unreadable,  # noqa: SLF001
    Answered: Session._on_answered,  # noqa: SLF001
    Closed: Session._on_end,  # noqa: SLF001
    Broken: Session._on_end,  # noqa: SLF001
}


def _echoed(phase: Phase, data: bytes, last: bool) -> Sequence[Action]:
    starts = range(0, max(len(data), 1), ECHO_BYTES)
    return [Echo(phase, data[start : start + ECHO_BYTES], last and start == starts[-1]) for start in starts]
