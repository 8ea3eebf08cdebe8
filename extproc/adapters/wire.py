"""What worker and dispatcher say to each other over a Unix socket.

A frame is four bytes of length and a msgpack list of messages: whatever is said in one turn of the event loop travels
in one frame, so that a busy socket batches by itself. A request is a few hundred bytes plus its block hashes.
"""

import asyncio
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import cast

import msgspec

from extproc.model import Admit, Final, Outcome, Refuse, Request

_LENGTH = struct.Struct(">I")
_LARGEST = 64 * 1024 * 1024
"""Bytes of a frame above which its sender is taken for something else."""
_FULL = 1024 * 1024
"""Bytes above which what is said in one turn travels in several frames."""


class Offer(msgspec.Struct, frozen=True, tag=True):
    """Decide on this request; also sent again for one that is held when the connection is new."""

    request: Request


class Adopt(msgspec.Struct, frozen=True, tag=True):
    """Take over a request that runs already."""

    request: Request
    admit: Admit


class FirstToken(msgspec.Struct, frozen=True, tag=True):
    """The request's first token has come."""

    id: str
    ttft_s: float


class Settle(msgspec.Struct, frozen=True, tag=True):
    """The request has ended."""

    id: str
    outcome: Outcome


class Admitted(msgspec.Struct, frozen=True, tag=True):
    """The request may run."""

    id: str
    admit: Admit


class Refused(msgspec.Struct, frozen=True, tag=True):
    """The request is told no."""

    id: str
    refuse: Refuse


class Beat(msgspec.Struct, frozen=True, tag=True):
    """The dispatcher is alive."""


Message = Offer | Adopt | FirstToken | Settle | Admitted | Refused | Beat


def verdict_message(request_id: str, verdict: Final) -> Message:
    """Return the message that carries *verdict*."""
    return Admitted(request_id, verdict) if isinstance(verdict, Admit) else Refused(request_id, verdict)


class Link(asyncio.Protocol):
    """One end of a connection.

    *on_messages* gets what arrived, *on_lost* is called once when it is gone, *on_made* once when it stands.
    """

    def __init__(
        self,
        on_messages: Callable[["Link", Sequence[Message]], None],
        on_lost: Callable[["Link"], None],
        on_made: Callable[["Link"], None] | None = None,
    ) -> None:
        self._on_messages = on_messages
        self._on_lost = on_lost
        self._on_made = on_made
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(list[Message])
        self._transport: asyncio.Transport | None = None
        self._incoming = bytearray()
        self._outgoing: list[Message] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        # uvloop's transports do not derive from asyncio's classes, so a check of the type would refuse them.
        self._transport = cast("asyncio.Transport", transport)
        if self._on_made is not None:
            self._on_made(self)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio's own signature
        """Tell the owner."""
        self._transport = None
        self._on_lost(self)

    def data_received(self, data: bytes) -> None:
        """Hand over every whole frame."""
        self._incoming += data
        while len(self._incoming) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._incoming)
            if length > _LARGEST:
                self.close()
                return
            end = _LENGTH.size + length
            if len(self._incoming) < end:
                return
            frame = bytes(self._incoming[_LENGTH.size : end])
            del self._incoming[:end]
            try:
                messages = self._decoder.decode(frame)
            except msgspec.DecodeError:
                self.close()
                return
            self._on_messages(self, messages)

    def send(self, message: Message) -> None:
        """Send *message* with everything else said in this turn of the loop; nothing when the connection is gone."""
        if self._transport is None:
            return
        if not self._outgoing:
            asyncio.get_running_loop().call_soon(self._flush)
        self._outgoing.append(message)

    def close(self) -> None:
        """End the connection."""
        if self._transport is not None:
            self._transport.abort()

    def _flush(self) -> None:
        messages, self._outgoing = self._outgoing, []
        for body in self._bodies(messages):
            if self._transport is not None:
                self._transport.write(_LENGTH.pack(len(body)) + body)

    def _bodies(self, messages: Sequence[Message]) -> Iterator[bytes]:
        """Yield frames in order; thousands of held requests offered again at once do not fit one."""
        body = self._encoder.encode(messages)
        if len(body) <= _FULL or len(messages) == 1:
            yield body
            return
        half = len(messages) // 2
        yield from self._bodies(messages[:half])
        yield from self._bodies(messages[half:])
