"""One ext_proc stream as a state table. No protobuf, no I/O.

::

    START ──headers──▶ BODY ──whole body──▶ DECIDING ──admit──▶ ROUTED ──closed──▶ (settled)
      │                 │                      │ refuse, unreadable ──▶ DONE
      └─ other path, local reply ──▶ PASSING   └ closed ──▶ (cancelled)

Envoy fails *open* on a clean close before the routing answer and cuts a running response on an abort after it, so a
broken session aborts before ROUTED and closes clean from there on. Invariant: a session that asked is either answered,
cancelled or settled, exactly once.

Two ways of bodies: buffered (the whole body in one message, the routing answer is the body's response) and full duplex
(the headers' response is held back until the body has ended, then the body is echoed).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

from extproc.model import Admit, Final, Refuse

ECHO_BYTES = 62_000
"""Most bytes of a body in one echoed message; Envoy resets the stream above 64 KiB."""


class State(Enum):
    """Where the stream is."""

    START = auto()
    BODY = auto()
    DECIDING = auto()
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
    """Request headers. *inference* is false on paths that are not ours to route."""

    inference: bool
    end_of_stream: bool = False
    duplex: bool = False
    duplex_response: bool = False


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
    """A message of the response side; *data* and *end_of_stream* for a body, *duplex* when it opens the stream."""

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
class Closed:
    """Envoy ended the stream: the HTTP exchange is over, or the client has gone."""


@dataclass(frozen=True, slots=True)
class Broken:
    """Something of ours failed."""


Event = Headers | Body | Trailers | Response | Decided | Unreadable | Closed | Broken


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


Action = Continue | Echo | Ask | Steer | Turn | NotFound | Explain | Cancel | Settle | Abort | Close

_CONTINUE = {phase: Continue(phase) for phase in Phase}


class Session:
    """The state of one stream. *refuse_others* answers 404 on paths that are not ours, else they pass."""

    def __init__(self, *, refuse_others: bool = False) -> None:
        self.state = State.START
        self._refuse_others = refuse_others
        self._duplex = False
        self._duplex_response = False
        self._pieces: list[bytes] = []
        self._answers = Phase.REQUEST_HEADERS
        self._trailers = False

    def handle(self, event: Event) -> Sequence[Action]:
        """Advance by one event and return what the shell must do, in order."""
        match self.state, event:
            case _, Closed() | Broken():
                return self._end(event)
            case State.START, Headers():
                return self._begin(event)
            case State.BODY, Body():
                return self._collect(event)
            case State.BODY, Trailers() if self._duplex:
                self._trailers = True
                return self._ask()
            case State.DECIDING, Decided(Admit() as admit, body):
                self.state = State.ROUTED
                return self._route(admit, body)
            case State.DECIDING, Decided(Refuse() as refuse):
                self.state = State.DONE
                return [Turn(refuse)]
            case State.DECIDING, Unreadable():
                self.state = State.DONE
                return [Explain()]
            case ((State.START | State.BODY | State.DECIDING) as was, Response() as said):
                self.state = State.PASSING  # a local reply of an earlier filter
                self._duplex_response |= said.duplex
                return [*([Cancel()] if was is State.DECIDING else []), *self._pass(said)]
            case State.ROUTED, (Trailers() | Response()) as said:
                return self._pass(said)
            case State.PASSING, (Body() | Trailers() | Response()) as said:
                return self._pass(said)
            case _:
                raise ProtocolError(f"{type(event).__name__} in {self.state.name}")

    def _begin(self, event: Headers) -> Sequence[Action]:
        self._duplex, self._duplex_response = event.duplex, event.duplex_response
        if not event.inference:
            self.state = State.DONE if self._refuse_others else State.PASSING
            return [NotFound() if self._refuse_others else _CONTINUE[Phase.REQUEST_HEADERS]]
        if event.end_of_stream:
            return self._ask()
        self.state = State.BODY
        return [] if self._duplex else [_CONTINUE[Phase.REQUEST_HEADERS]]

    def _collect(self, event: Body) -> Sequence[Action]:
        if not self._duplex:
            self._answers = Phase.REQUEST_BODY
            self.state = State.DECIDING
            return [Ask(event.data)]
        self._pieces.append(event.data)
        return self._ask() if event.end_of_stream else []

    def _ask(self) -> Sequence[Action]:
        self.state = State.DECIDING
        return [Ask(b"".join(self._pieces))]

    def _route(self, admit: Admit, replaced: bytes | None) -> Sequence[Action]:
        actions: list[Action] = [Steer(self._answers, admit, replaced)]
        if self._pieces:
            body = b"".join(self._pieces) if replaced is None else replaced
            self._pieces = []
            actions += _echoed(Phase.REQUEST_BODY, body, not self._trailers)
        if self._trailers:
            actions.append(_CONTINUE[Phase.REQUEST_TRAILERS])
        return actions

    def _pass(self, event: Body | Trailers | Response) -> Sequence[Action]:
        match event:
            case Body(data, last):
                return _echoed(Phase.REQUEST_BODY, data, last) if self._duplex else [_CONTINUE[Phase.REQUEST_BODY]]
            case Trailers():
                return [_CONTINUE[Phase.REQUEST_TRAILERS]]
            case Response(Phase.RESPONSE_BODY, data, last) if self._duplex_response:
                return _echoed(Phase.RESPONSE_BODY, data, last)
            case Response(phase):
                return [_CONTINUE[phase]]

    def _end(self, event: Closed | Broken) -> Sequence[Action]:
        was, self.state = self.state, State.DONE
        held: list[Action] = [Cancel()] if was is State.DECIDING else [Settle()] if was is State.ROUTED else []
        if isinstance(event, Closed):
            return held
        answered = was in (State.ROUTED, State.PASSING, State.DONE)
        return [*held, Close() if answered else Abort()]


def _echoed(phase: Phase, data: bytes, last: bool) -> list[Action]:
    starts = range(0, max(len(data), 1), ECHO_BYTES)
    return [Echo(phase, data[start : start + ECHO_BYTES], last and start == starts[-1]) for start in starts]
