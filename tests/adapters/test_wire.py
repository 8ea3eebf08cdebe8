"""Frames between worker and dispatcher, however the socket cuts them."""

import asyncio
import struct
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import pytest
import uvloop

from extproc.adapters import wire
from extproc.model import Admit, Ending, Outcome, Reason, Refuse
from tests.builders import a_request
from tests.polling import eventually

ADMIT = Admit("a-0", "a", "site-a", ("h:1", "h:2"), "standard", ("site-a", "site-b"), {"queue": 0.5}, steer=False)
REFUSE = Refuse(Reason.LINE_FULL, "full", 2.0, "standard", alone=True)
REQUEST = a_request(
    blocks=(1, 2**64 - 1), residency=frozenset({"eu"}), subset=frozenset(), wanted_class="gold", deadline_s=0.5
)
SAID: list[wire.Message] = [
    wire.Offer(REQUEST),
    wire.Adopt(REQUEST, ADMIT),
    wire.FirstToken("r1", 0.25),
    wire.Settle("r1", Outcome(Ending.COMPLETED, 200, "h:1", 2, 0.1, 0.2, 10, 4, 5, 99)),
    wire.Settle("r1", Outcome()),
    wire.Admitted("r1", ADMIT),
    wire.Refused("r1", REFUSE),
    wire.Beat(),
]


class Ear:
    """One end of a link without a socket."""

    def __init__(self) -> None:
        self.heard: list[wire.Message] = []
        self.batches: list[int] = []
        self.lost = 0
        self.link = wire.Link(self._take, self._gone)

    def _take(self, _: wire.Link, messages: Sequence[wire.Message]) -> None:
        self.heard += messages
        self.batches.append(len(messages))

    def _gone(self, _: wire.Link) -> None:
        self.lost += 1


class Wire(asyncio.Transport):
    """A transport that keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.frames = 0
        self.aborted = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written += bytes(data)
        self.frames += 1

    def abort(self) -> None:
        self.aborted = True


def framed(messages: list[wire.Message]) -> bytes:
    body = msgspec.msgpack.encode(messages)
    return struct.pack(">I", len(body)) + body


async def test_everything_said_arrives_as_it_was_said() -> None:
    mouth, ear, line = Ear(), Ear(), Wire()
    mouth.link.connection_made(line)
    for message in SAID:
        mouth.link.send(message)
    assert line.written == b"", "nothing leaves before the turn of the loop is over"
    await asyncio.sleep(0)
    assert line.frames == 1, "what is said in one turn travels in one frame"
    ear.link.data_received(line.written)
    assert ear.heard == SAID
    mouth.link.send(wire.Beat())
    await asyncio.sleep(0)
    assert line.frames == 2


def test_frames_may_be_cut_at_every_byte() -> None:
    data = framed(SAID[:3]) + framed(SAID[3:]) + framed([])
    for cut in range(len(data) + 1):
        ear = Ear()
        ear.link.data_received(data[:cut])
        ear.link.data_received(data[cut:])
        assert ear.heard == SAID
    ear = Ear()
    for i in range(len(data)):
        ear.link.data_received(data[i : i + 1])
    assert ear.heard == SAID
    assert ear.batches == [3, 5, 0]


@pytest.mark.parametrize(
    "garbage",
    [
        struct.pack(">I", 3) + b"\xff\xff\xff",
        struct.pack(">I", 0),
        b"GET / HTTP/1.1\r\n\r\n",
        struct.pack(">I", 0xFFFFFFFF),
        framed([]).replace(b"\x90", b"\xc0"),
        struct.pack(">I", 10) + msgspec.msgpack.encode([{"type": "Nonsense"}])[:10].ljust(10, b"\0"),
    ],
)
def test_what_is_no_frame_closes_the_link_and_nothing_after_it_is_heard(garbage: bytes) -> None:
    ear, line = Ear(), Wire()
    ear.link.connection_made(line)
    ear.link.data_received(framed([wire.Beat()]) + garbage + framed(SAID))
    assert line.aborted
    assert ear.heard == [wire.Beat()]


def test_an_oversize_frame_closes_the_link_before_it_is_read() -> None:
    ear, line = Ear(), Wire()
    ear.link.connection_made(line)
    ear.link.data_received(struct.pack(">I", 64 * 1024 * 1024 + 1))
    assert line.aborted


async def test_thousands_of_long_requests_said_at_once_are_several_frames_that_are_all_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(wire, "_LARGEST", 4 * 1024 * 1024)
    mouth, ear, line = Ear(), Ear(), Wire()
    mouth.link.connection_made(line)
    long = tuple(range(2**63, 2**63 + 500))
    said: list[wire.Message] = [wire.Offer(a_request(id=f"r{i}", blocks=long)) for i in range(2_000)]
    for message in said:
        mouth.link.send(message)
    await asyncio.sleep(0)
    assert len(line.written) > 4 * 1024 * 1024, "more than one frame may hold"
    ear.link.data_received(line.written)
    assert [one.request.id for one in ear.heard if isinstance(one, wire.Offer)] == [f"r{i}" for i in range(2_000)]


async def test_who_speaks_into_a_lost_link_is_not_heard_and_breaks_nothing() -> None:
    mouth, line = Ear(), Wire()
    mouth.link.send(wire.Beat())
    mouth.link.close()
    mouth.link.connection_made(line)
    mouth.link.send(wire.Beat())
    mouth.link.connection_lost(None)
    await asyncio.sleep(0)
    mouth.link.send(wire.Beat())
    await asyncio.sleep(0)
    assert (line.written, mouth.lost) == (b"", 1)


async def over_a_socket(path: Path) -> None:
    loop = asyncio.get_running_loop()
    here, there = Ear(), Ear()
    greeted = wire.Link(there._take, there._gone, lambda link: link.send(wire.Beat()))
    server = await loop.create_unix_server(lambda: greeted, str(path))
    _, _ = await loop.create_unix_connection(lambda: here.link, str(path))
    here.link.send(SAID[0])
    await eventually(lambda: there.heard == SAID[:1] and here.heard == [wire.Beat()])
    here.link.close()
    await eventually(lambda: there.lost == 1 and here.lost == 1)
    server.close()


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_both_ends_hear_each_other_on_the_loop_that_production_runs(
    loop: Callable[[], asyncio.AbstractEventLoop], tmp_path: Path
) -> None:
    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(over_a_socket(tmp_path / "s"))


def test_a_verdict_s_message_is_of_its_kind() -> None:
    assert wire.verdict_message("r", ADMIT) == wire.Admitted("r", ADMIT)
    assert wire.verdict_message("r", REFUSE) == wire.Refused("r", REFUSE)
