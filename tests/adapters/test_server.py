"""Our gRPC server in this process, its client playing Envoy: what is said, and how the stream ends.

A clean end before the answer lets a request through unrouted; an abort after it cuts a running response.
"""

import asyncio
import io
import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb
from envoy.service.ext_proc.v3 import external_processor_pb2_grpc

from extproc.adapters import envoy, logs, openai
from extproc.adapters.grpc_server import GrpcServer
from extproc.adapters.server import Processor, Stream
from extproc.model import Admit, Final, Fleet, Outcome, Reason, Refuse, Request
from tests.builders import CHAT, a_policy
from tests.polling import eventually

ADMIT = Admit("a-0", "a", "site-a", ("127.0.0.1:9000", "127.0.0.1:9001"), "standard", why={"queue": 0.5})
REFUSE = Refuse(Reason.LINE_FULL, "the line is full", 2.0, "standard")
BODY = json.dumps({"model": CHAT, "messages": [{"role": "user", "content": "hello"}]}).encode()
DUPLEX = 4  # ProcessingMode.BodySendMode.FULL_DUPLEX_STREAMED
PATIENCE_S = 20.0


@dataclass
class Fake:
    """A decider that says what it is told to, later if *held*, and books what is given back."""

    verdict: Final | None = ADMIT
    offered: list[Request] = field(default_factory=list)
    settled: list[str] = field(default_factory=list)
    held: dict[str, asyncio.Future[Final]] = field(default_factory=dict)

    def offer(self, request: Request) -> Final | asyncio.Future[Final]:
        self.offered.append(request)
        if self.verdict is not None:
            return self.verdict
        return self.held.setdefault(request.id, asyncio.get_running_loop().create_future())

    def first_token(self, request_id: str, ttft_s: float) -> None:
        raise AssertionError(f"the stream knows of no token: {request_id} {ttft_s}")

    def settle(self, request_id: str, outcome: Outcome) -> None:
        self.settled.append(f"{request_id} {outcome.ending or 'over'}")

    def fleet(self) -> Fleet:
        return Fleet(at=0.0)


@dataclass
class Exchange:
    """One HTTP exchange, as Envoy tells of it."""

    call: Any

    async def say(self, **fields: Any) -> None:
        await self.call.write(pb.ProcessingRequest(**fields))

    async def headers(self, path: str = "/v1/chat/completions", method: str = "POST", **more: Any) -> None:
        duplex, end = more.pop("duplex", False), more.pop("end_of_stream", False)
        listed = {":method": method, ":path": path, "accept": "*/*"} | more
        headers = [{"key": key.replace("_", "-"), "raw_value": value.encode()} for key, value in listed.items()]
        modes = {"request_body_mode": DUPLEX if duplex else 2}
        await self.say(request_headers={"headers": {"headers": headers}, "end_of_stream": end}, protocol_config=modes)

    async def body(self, data: bytes = BODY, *, last: bool = True) -> None:
        await self.say(request_body={"body": data, "end_of_stream": last})

    async def hear(self) -> pb.ProcessingResponse:
        """Return the next answer; none is a failure."""
        async with asyncio.timeout(PATIENCE_S):
            said = await self.call.read()
        assert said is not grpc.aio.EOF, f"the stream ended: {await self.call.code()}"
        return said

    async def ending(self) -> grpc.StatusCode:
        """Return how the server ended the stream, which must have nothing more to say."""
        async with asyncio.timeout(PATIENCE_S):
            try:
                assert await self.call.read() is grpc.aio.EOF
            except grpc.aio.AioRpcError as error:
                return error.code()
            code = await self.call.code()
            assert isinstance(code, grpc.StatusCode)
            return code

    async def close(self) -> None:
        """End the exchange from Envoy's side."""
        await self.call.done_writing()


@dataclass
class World:
    decider: Fake
    processor: Processor
    server: GrpcServer
    open: Callable[[], Exchange]

    async def routed(self) -> Exchange:
        """Return an exchange that has its routing answer."""
        exchange = self.open()
        await exchange.headers()
        await exchange.hear()
        await exchange.body()
        assert (await exchange.hear()).HasField("request_body")
        return exchange


@asynccontextmanager
async def a_world(folder: Path, decider: Fake | None = None, **gateway: Any) -> AsyncIterator[World]:
    decider = decider or Fake()
    processor = Processor(a_policy(gateway=gateway), decider, lambda: 1.0)
    server = GrpcServer(processor, f"unix:{folder}/s", None)
    await server.start()
    try:
        async with grpc.aio.insecure_channel(server.address) as channel:
            stub = external_processor_pb2_grpc.ExternalProcessorStub(channel)
            yield World(decider, processor, server, lambda: Exchange(stub.Process()))
    finally:
        await server.drain(0.1)


@pytest.fixture
def short(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("s")


def header(mutation: pb.HeaderMutation, name: str) -> str | None:
    return {one.header.key: one.header.raw_value.decode() for one in mutation.set_headers}.get(name)


def error(said: pb.ProcessingResponse) -> tuple[int, Any]:
    assert said.HasField("immediate_response")
    return said.immediate_response.status.code, json.loads(said.immediate_response.body)["error"]


# --- the ways that go well --------------------------------------------------------------------------------------------


async def test_a_buffered_request_is_routed_and_settled_when_envoy_closes(short: Path) -> None:
    async with a_world(short) as world:
        exchange = await world.routed()
        assert world.decider.settled == []
        await exchange.close()
        assert await exchange.ending() is grpc.StatusCode.OK
        (request,) = world.decider.offered
        assert world.decider.settled == [f"{request.id} over"]
        assert request.model == CHAT


async def test_the_routing_answer_carries_the_id_that_was_offered(short: Path) -> None:
    async with a_world(short) as world:
        exchange = world.open()
        await exchange.headers(end_of_stream=False)
        await exchange.hear()
        await exchange.body()
        common = (await exchange.hear()).request_body.response
        assert header(common.header_mutation, "x-tokenfleet-request-id") == world.decider.offered[0].id
        assert header(common.header_mutation, "x-tokenfleet-cluster") == "site-a"
        await exchange.close()
        await exchange.ending()


async def test_a_full_duplex_request_gets_its_answer_then_its_whole_body(short: Path) -> None:
    content = "x" * 150_000
    body = json.dumps({"model": CHAT, "messages": [{"role": "user", "content": content}]}).encode()
    async with a_world(short) as world:
        exchange = world.open()
        await exchange.headers(duplex=True)
        await exchange.body(body[:60_000], last=False)
        await exchange.body(body[60_000:], last=True)
        assert (await exchange.hear()).HasField("request_headers")
        echoed, last = b"", False
        while not last:
            piece = (await exchange.hear()).request_body.response.body_mutation.streamed_response
            echoed, last = echoed + piece.body, piece.end_of_stream
        assert echoed == body
        await exchange.close()
        assert await exchange.ending() is grpc.StatusCode.OK


async def test_a_refusal_answers_the_client_and_ends_the_stream_clean(short: Path) -> None:
    async with a_world(short, Fake(REFUSE)) as world:
        exchange = world.open()
        await exchange.headers()
        await exchange.hear()
        await exchange.body()
        status, told = error(await exchange.hear())
        assert (status, told["code"]) == (429, "line_full")
        assert await exchange.ending() is grpc.StatusCode.OK
        assert world.decider.settled == []


async def test_a_held_request_is_answered_when_it_is_decided(short: Path) -> None:
    async with a_world(short, Fake(None)) as world:
        exchange = world.open()
        await exchange.headers()
        await exchange.hear()
        await exchange.body()
        await eventually(lambda: len(world.decider.held) == 1)
        assert world.processor.held() == 1
        (future,) = world.decider.held.values()
        future.set_result(ADMIT)
        assert (await exchange.hear()).HasField("request_body")
        await eventually(lambda: world.processor.held() == 0)
        await exchange.close()
        await exchange.ending()
        assert world.decider.settled == [f"{world.decider.offered[0].id} over"]


async def test_a_client_that_leaves_while_held_is_cancelled(short: Path) -> None:
    async with a_world(short, Fake(None)) as world:
        exchange = world.open()
        await exchange.headers()
        await exchange.hear()
        await exchange.body()
        await eventually(lambda: len(world.decider.held) == 1)
        exchange.call.cancel()
        await eventually(lambda: world.decider.settled == [f"{world.decider.offered[0].id} cancelled"])
        await eventually(lambda: world.processor.stats.open_streams == 0)


@pytest.mark.parametrize(
    ("other_paths", "method", "passes"),
    [("pass", "GET", True), ("pass", "POST", False), ("refuse", "GET", False)],
)
async def test_on_other_paths_only_safe_methods_pass(short: Path, other_paths: str, method: str, passes: bool) -> None:
    async with a_world(short, other_paths=other_paths) as world:
        exchange = world.open()
        await exchange.headers("/v1/rerank", method, end_of_stream=True)
        said = await exchange.hear()
        assert said.HasField("request_headers") is passes
        if not passes:
            assert error(said)[0] == 404
            assert await exchange.ending() is grpc.StatusCode.OK
        assert world.processor.stats.passed == int(passes)


async def test_ids_differ_and_those_of_another_process_cannot_be_told_from_them(short: Path) -> None:
    async with a_world(short) as world:
        for _ in range(3):
            await world.routed()
        ids = [request.id for request in world.decider.offered]
        assert len(set(ids)) == 3
        other = Processor(world.processor.policy, world.decider, lambda: 1.0)
        assert next(other._ids)[:16] != ids[0][:16]


def test_every_header_that_the_reader_looks_at_is_kept() -> None:
    policy = a_policy(
        gateway={"trust": {"tenant_header": "X-Tenant", "api_keys": True}, "debug": True},
        tenants={"tenants": {"t": {"api_key_sha256": ["0" * 64]}}},
    )
    reader = openai.Reader(policy)
    asked: set[str] = set()

    class Headers(dict[str, str]):
        def get(self, key: str, default: Any = None) -> Any:
            asked.add(key)
            return super().get(key, default)

    found = reader.read("r", Headers({":method": "POST", ":path": "/v1/chat/completions"}), {}, BODY, 0.0)
    assert isinstance(found, Request)
    assert asked == reader.headers


# --- what breaks ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("duplex", [False, True])
@pytest.mark.parametrize("verdict", [ADMIT, REFUSE])
async def test_an_answer_that_cannot_be_built_aborts_and_gives_back_the_place(
    short: Path, monkeypatch: pytest.MonkeyPatch, verdict: Final, duplex: bool
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("broken on demand")

    monkeypatch.setattr(envoy, "steer", broken)
    monkeypatch.setattr(envoy, "answer", broken)
    async with a_world(short, Fake(verdict)) as world:
        exchange = world.open()
        await exchange.headers(duplex=duplex)
        if not duplex:
            await exchange.hear()
        await exchange.body()
        assert await exchange.ending() is grpc.StatusCode.INTERNAL
        assert len(world.decider.settled) == int(verdict is ADMIT)
        assert world.processor.stats.broken == 1


async def test_a_body_that_cannot_be_echoed_aborts_though_the_routing_answer_is_out(
    short: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("broken on demand")

    monkeypatch.setattr(envoy, "echo", broken)
    async with a_world(short) as world:
        exchange = world.open()
        await exchange.headers(duplex=True)
        await exchange.body()
        assert (await exchange.hear()).HasField("request_headers")
        assert await exchange.ending() is grpc.StatusCode.INTERNAL
        assert len(world.decider.settled) == 1


async def test_a_path_whose_first_answer_breaks_does_not_pass(short: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("broken on demand")

    monkeypatch.setattr(envoy, "proceed", broken)
    async with a_world(short) as world:
        exchange = world.open()
        await exchange.headers("/v1/models", "GET", end_of_stream=True)
        assert await exchange.ending() is grpc.StatusCode.INTERNAL


async def test_what_breaks_after_the_answer_closes_clean(short: Path) -> None:
    async with a_world(short) as world:
        exchange = await world.routed()
        await exchange.body()  # has no place here
        assert await exchange.ending() is grpc.StatusCode.OK
        assert world.processor.stats.broken == 1
        assert len(world.decider.settled) == 1


# --- a body without end -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
async def test_a_streamed_body_is_refused_while_it_still_comes(short: Path, path: str) -> None:
    async with a_world(short, max_body_bytes=1024) as world:
        exchange = world.open()
        await exchange.headers(path, duplex=True)
        await exchange.body(b"x" * 1000, last=False)
        await exchange.body(b"x" * 1000, last=False)
        said = await exchange.hear()
        status, told = error(said)
        assert status == 413
        assert told["type"] == ("request_too_large" if path == "/v1/messages" else "invalid_request_error")
        assert await exchange.ending() is grpc.StatusCode.OK
        assert world.processor.stats.unreadable == {413: 1}
        assert world.decider.offered == []


# --- draining ---------------------------------------------------------------------------------------------------------


async def test_draining_closes_a_parked_routed_stream_clean_and_keeps_its_place(short: Path) -> None:
    async with a_world(short) as world:
        exchange = await world.routed()
        await eventually(lambda: all(one._parked for one in world.processor._streams))
        world.processor.drain()
        assert await exchange.ending() is grpc.StatusCode.OK
        assert world.decider.settled == []


async def test_draining_waits_until_the_whole_body_is_echoed(short: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = "x" * 300_000
    body = json.dumps({"model": CHAT, "messages": [{"role": "user", "content": content}]}).encode()
    response = Stream._response
    echoes = 0

    def drained_meanwhile(stream: Stream, action: Any) -> pb.ProcessingResponse:
        nonlocal echoes
        if type(action).__name__ == "Echo":
            echoes += 1
            if echoes == 2:  # the first is being written or was
                asyncio.get_running_loop().call_soon(stream._processor.drain)
        return response(stream, action)

    monkeypatch.setattr(Stream, "_response", drained_meanwhile)
    async with a_world(short) as world:
        exchange = world.open()
        await exchange.headers(duplex=True)
        await exchange.body(body)
        await exchange.hear()
        echoed, last = b"", False
        while not last:
            piece = (await exchange.hear()).request_body.response.body_mutation.streamed_response
            echoed, last = echoed + piece.body, piece.end_of_stream
        assert echoed == body
        assert await exchange.ending() is grpc.StatusCode.OK
        assert world.processor.draining


async def test_draining_waits_for_the_rest_of_a_body_that_passes_through(short: Path) -> None:
    async with a_world(short) as world:
        exchange = world.open()
        await exchange.headers("/v1/models", "GET", duplex=True)
        await exchange.hear()
        await eventually(lambda: all(one._parked for one in world.processor._streams))
        world.processor.drain()
        await exchange.body(b"one", last=False)
        first = (await exchange.hear()).request_body.response.body_mutation.streamed_response
        assert (first.body, first.end_of_stream) == (b"one", False)
        await exchange.body(b"two", last=True)
        second = (await exchange.hear()).request_body.response.body_mutation.streamed_response
        assert (second.body, second.end_of_stream) == (b"two", True)
        assert await exchange.ending() is grpc.StatusCode.OK


async def test_draining_leaves_a_held_request_its_wait(short: Path) -> None:
    async with a_world(short, Fake(None)) as world:
        exchange = world.open()
        await exchange.headers()
        await exchange.hear()
        await exchange.body()
        await eventually(lambda: len(world.decider.held) == 1)
        world.processor.drain()
        (future,) = world.decider.held.values()
        future.set_result(ADMIT)
        assert (await exchange.hear()).HasField("request_body")
        assert await exchange.ending() is grpc.StatusCode.OK


# --- the verdict's line -----------------------------------------------------------------------------------------------


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> io.BytesIO:
    stream = io.BytesIO()
    direct = logs.Direct()
    direct.configure(stream)
    monkeypatch.setattr(logs, "direct", direct)
    return stream


@pytest.mark.parametrize(
    ("verdict", "fields"),
    [
        (ADMIT, {"verdict": "admit", "site": "a", "instance": "a-0", "hosts": list(ADMIT.hosts), "why": ADMIT.why}),
        (REFUSE, {"verdict": "refuse", "reason": "line_full", "retry_after_s": 2.0}),
    ],
)
async def test_a_verdict_is_one_line_of_json(
    short: Path, lines: io.BytesIO, verdict: Final, fields: Mapping[str, Any]
) -> None:
    async with a_world(short, Fake(verdict)) as world:
        exchange = world.open()
        await exchange.headers()
        await exchange.hear()
        await exchange.body()
        await exchange.hear()
        (line,) = lines.getvalue().splitlines()
        told = json.loads(line)
        common = {"event": "verdict", "level": "info", "model": CHAT, "klass": "standard", "alone": False}
        assert told.items() >= (common | {"id": world.decider.offered[0].id, "tenant": "default"}).items()
        assert {key: told[key] for key in fields} == fields
        assert told["timestamp"].endswith("Z")
