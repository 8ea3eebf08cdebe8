"""The load generator, a process of its own: ``python -m loadtest.bench.load``.

It reads an :class:`Order` a line from standard input and answers each with a :class:`Slice` line. A closed loop: every
client sends its next request when the last answer is whole. CPU of the processes named is read at the beginning and end
of the measured time itself, so that starting and stopping do not count.
"""

import asyncio
import re
import sys
import time
from collections.abc import Iterator
from itertools import cycle
from typing import cast

import msgspec
import psutil
import uvloop

from loadtest.bench.bodies import SIZES, Body, bodies

_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_CHUNKED_END = b"0\r\n\r\n"
_OK = b"HTTP/1.1 200 "
STUCK_S = 20.0


class Order(msgspec.Struct, frozen=True):
    """What to run. *watch*: a name → process ids whose CPU is summed under it."""

    port: int
    size: str
    clients: int
    seconds: float
    path: str = "/v1/chat/completions"
    warm_s: float = 0.15
    watch: dict[str, list[int]] = {}


class Slice(msgspec.Struct, frozen=True):
    """What came of it. *failed*: status line → count."""

    requests: int
    seconds: float
    latencies_us: list[int]
    cpu_s: dict[str, float]
    failed: dict[str, int]


class Numbers:
    """Numbers that no body of this process has had before."""

    def __init__(self) -> None:
        self._last = time.time_ns() // 1000

    def next(self) -> int:
        """Return one."""
        self._last += 1
        return self._last


class Client(asyncio.Protocol):
    """One keep-alive connection. It stops, and *done* is set, at the first answer after *stop* is true."""

    def __init__(self, run: "Run") -> None:
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._run = run
        self._transport: asyncio.Transport | None = None
        self._answer = b""
        self._need = -1
        self._sent = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the first request."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are no subclasses of asyncio's
        self._send()

    def connection_lost(self, exc: Exception | None) -> None:
        """Count a connection that was cut."""
        if not self.done.done():
            self._run.fail(f"connection lost: {exc}")
            self.done.set_result(None)

    def data_received(self, data: bytes) -> None:
        """Look whether the answer is whole."""
        self._answer = answer = self._answer + data if self._answer else data
        if self._need < 0:
            end = answer.find(b"\r\n\r\n")
            if end < 0:
                return
            length = _LENGTH.search(answer, 0, end)
            self._need = end + 4 + int(length[1]) if length else 0
        if len(answer) < self._need or (not self._need and not answer.endswith(_CHUNKED_END)):
            return
        self._run.note(answer, self._sent)
        self._answer, self._need = b"", -1
        if self._run.stopped:
            self.done.set_result(None)
            self.close()
        else:
            self._send()

    def close(self) -> None:
        """End the connection."""
        if self._transport is not None:
            self._transport.abort()

    def _send(self) -> None:
        request = self._run.request()
        self._sent = time.perf_counter()
        if self._transport is not None:
            self._transport.write(request)


class Run:
    """The clients of one order and what they have seen."""

    def __init__(self, order: Order, templates: Iterator[Body], numbers: Numbers) -> None:
        self.stopped = False
        self.latencies_us: list[int] = []
        self.failed: dict[str, int] = {}
        self._templates = templates
        self._numbers = numbers
        head = f"POST {order.path} HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\n"
        self._head = f"{head}authorization: Bearer sk-demo-globex\r\ncontent-length: ".encode()

    def request(self) -> bytes:
        """Return the next request."""
        body = next(self._templates)
        return b"%b%d\r\n\r\n%b" % (self._head, len(body), body.numbered(self._numbers.next()))

    def note(self, answer: bytes, sent: float) -> None:
        """Take a whole answer."""
        if answer.startswith(_OK):
            self.latencies_us.append(round((time.perf_counter() - sent) * 1e6))
        else:
            self.fail(answer[: answer.find(b"\r\n")].decode("latin-1"))

    def fail(self, what: str) -> None:
        """Count a failure."""
        self.failed[what] = self.failed.get(what, 0) + 1


class Generator:
    """Runs orders one after another."""

    def __init__(self) -> None:
        self._templates = {name: cycle(list(bodies(size))) for name, size in SIZES.items()}
        self._numbers = Numbers()

    async def run(self, order: Order) -> Slice:
        """Return the slice that *order* asks for."""
        run = Run(order, self._templates[order.size], self._numbers)
        loop = asyncio.get_running_loop()
        made = [loop.create_connection(lambda: Client(run), "127.0.0.1", order.port) for _ in range(order.clients)]
        clients = [client for _, client in await asyncio.gather(*made)]
        await asyncio.sleep(order.warm_s)
        run.latencies_us.clear()
        before, began = cpu_s(order.watch), time.perf_counter()
        await asyncio.sleep(order.seconds)
        latencies, run.latencies_us = run.latencies_us, []
        after, seconds = cpu_s(order.watch), time.perf_counter() - began
        run.stopped = True
        _, stuck = await asyncio.wait([client.done for client in clients], timeout=STUCK_S)
        if stuck:
            run.failed["no answer"] = len(stuck)
        for client in clients:
            client.close()
        cpu = {name: after[name] - before[name] for name in before}
        return Slice(len(latencies), seconds, latencies, cpu, run.failed)


def cpu_s(watch: dict[str, list[int]]) -> dict[str, float]:
    """Return user and system seconds of each group of processes."""
    sums = {}
    for name, pids in watch.items():
        times = [psutil.Process(pid).cpu_times() for pid in pids]
        sums[name] = sum(one.user + one.system for one in times)
    return sums


def main() -> None:
    """Answer orders until standard input ends."""
    generator = Generator()
    decoder, encoder = msgspec.json.Decoder(Order), msgspec.json.Encoder()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        for line in sys.stdin.buffer:
            found = runner.run(generator.run(decoder.decode(line)))
            sys.stdout.buffer.write(encoder.encode(found) + b"\n")
            sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
