"""Engines that answer at once (or never): ``python -m loadtest.bench.upstream --model NAME …``, a port for each.

Just enough HTTP/1.1 for Envoy and the collector, and fast, so that the engine's time does not hide the router's. The
query ``?chunks=N`` makes the answer a stream of so many chunks.
"""

import asyncio
import json
import re
from functools import partial
from typing import Annotated, cast

import typer
import uvloop

from extproc.adapters.processes import die_with_parent

_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_CHUNKS = re.compile(rb"[?&]chunks=(\d+)")
_USAGE = {"prompt_tokens": 500, "completion_tokens": 9, "total_tokens": 509}
_METRICS = """\
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{{engine="0",model_name="{model}"}} {running}
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{{engine="0",model_name="{model}"}} 0.0
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{{engine="0",model_name="{model}"}} 0.1
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{{block_size="16",engine="0",num_gpu_blocks="30000"}} 1.0
"""


class Engine:
    """One port: a model, and the requests on it."""

    def __init__(self, model: str, hang: bool) -> None:
        self.model = model
        self.hang = hang
        self.running = 0
        text = {"role": "assistant", "content": "It depends on what was promised."}
        choice = {"index": 0, "message": text, "finish_reason": "stop"}
        whole = {"id": "chatcmpl-1", "object": "chat.completion", "model": model, "choices": [choice], "usage": _USAGE}
        self.whole = reply(json.dumps(whole).encode())
        delta = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "model": model, "choices": [{"index": 0}]}
        self.chunk = _chunk(delta)
        self.last = _chunk(delta | {"choices": [], "usage": _USAGE}) + b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"
        self.models = reply(json.dumps({"object": "list", "data": [{"id": model, "object": "model"}]}).encode())

    def metrics(self) -> bytes:
        """Return what vLLM's ``/metrics`` says, as far as anybody asks."""
        return reply(_METRICS.format(model=self.model, running=float(self.running)).encode(), b"text/plain")


def reply(body: bytes, kind: bytes = b"application/json", status: bytes = b"200 OK") -> bytes:
    """Return an HTTP response."""
    return b"HTTP/1.1 %b\r\ncontent-type: %b\r\ncontent-length: %d\r\n\r\n%b" % (status, kind, len(body), body)


def _chunk(event: object) -> bytes:
    data = b"data: " + json.dumps(event).encode() + b"\n\n"
    return b"%x\r\n%b\r\n" % (len(data), data)


class Connection(asyncio.Protocol):
    """One connection: a request at a time."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._transport: asyncio.Transport | None = None
        self._head = b""
        self._first_line = b""
        self._left = 0
        self._busy = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are no subclasses of asyncio's

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio's own signature
        """Forget what ran here."""
        self._transport = None
        self._done()

    def data_received(self, data: bytes) -> None:
        """Count a body's bytes off, or look for the end of a head."""
        while data:
            if self._left:
                used = min(self._left, len(data))
                self._left -= used
                data = data[used:]
            else:
                whole = self._head + data
                end = whole.find(b"\r\n\r\n")
                if end < 0:
                    self._head = whole
                    return
                self._head, data = b"", whole[end + 4 :]
                self._first_line = whole[: whole.find(b"\r\n")]
                length = _LENGTH.search(whole, 0, end)
                self._left = int(length[1]) if length else 0
            if not self._left:
                self._answer()

    def _answer(self) -> None:
        method, path, _ = self._first_line.split(b" ", 2)
        if method == b"POST" and path.startswith(b"/v1/"):
            self._infer(path)
        elif path == b"/metrics":
            self._write(self._engine.metrics())
        elif path == b"/v1/models":
            self._write(self._engine.models)
        elif path == b"/health":
            self._write(reply(b"", b"text/plain"))
        else:
            self._write(reply(b"{}", status=b"404 Not Found"))

    def _infer(self, path: bytes) -> None:
        self._engine.running += 1
        self._busy = True
        if self._engine.hang:
            return
        chunks = _CHUNKS.search(path)
        if chunks is None:
            self._write(self._engine.whole)
            self._done()
            return
        head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        self._write(head)
        self._stream(int(chunks[1]) - 1)

    def _stream(self, left: int) -> None:
        """Write one chunk a turn of the loop: each is a packet of its own, as an engine's tokens are."""
        if left <= 0:
            self._write(self._engine.last)
            self._done()
            return
        self._write(self._engine.chunk)
        asyncio.get_running_loop().call_soon(self._stream, left - 1)

    def _write(self, data: bytes) -> None:
        if self._transport is not None:
            self._transport.write(data)

    def _done(self) -> None:
        if self._busy:
            self._busy = False
            self._engine.running -= 1


async def _serve(models: list[str], hang: bool) -> None:
    loop = asyncio.get_running_loop()
    ports = []
    for model in models:
        engine = Engine(model, hang)
        server = await loop.create_server(partial(Connection, engine), "127.0.0.1", 0)
        ports.append(server.sockets[0].getsockname()[1])
    print(json.dumps({"ready": True, "ports": ports}), flush=True)  # noqa: T201 - what the parent waits for
    await asyncio.Event().wait()


def main(
    model: Annotated[list[str], typer.Option(help="An engine with this model; again for each.")],
    hang: Annotated[bool, typer.Option("--hang", help="Take requests and never answer.")] = False,
) -> None:
    """Listen on a free port for each model until killed."""
    die_with_parent()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(model, hang))


if __name__ == "__main__":
    typer.run(main)
