"""A gRPC server that does what the request's own headers tell it, and engines that do likewise.

What is proved with them is Envoy's part alone: that the configuration does with an answer what it should.
"""

import asyncio
import json
import socket
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import grpc
import trustme
from aiohttp import web
from envoy.config.core.v3 import base_pb2
from envoy.data.accesslog.v3 import accesslog_pb2
from envoy.service.accesslog.v3 import als_pb2, als_pb2_grpc
from envoy.service.ext_proc.v3 import external_processor_pb2 as ext
from envoy.service.ext_proc.v3 import external_processor_pb2_grpc as ext_grpc
from google.protobuf import struct_pb2
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

T = TypeVar("T")
PLAN = "t-plan"
"""Header with a JSON object: cluster, hosts, groups, id, why, retries, hold, gate, refuse, abort, set, body."""
ID_HEADER = "x-tokenfleet-request-id"
OVERWRITE = base_pb2.HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD
PIECE = 62_000
OPTIONS = [
    ("grpc.max_receive_message_length", 64 << 20),
    # By default gRPC refuses some streams at random once 1,000 are waiting to be accepted, and all beyond 3,000.
    ("grpc.server.max_pending_requests", 1_000_000),
    ("grpc.server.max_pending_requests_hard_limit", 1_000_000),
    ("grpc.server_max_unrequested_time_in_server", 3600),
]


def answering(**script: Any) -> bytes:
    """Return the body that tells an engine what to answer: ``chunks`` (texts, and seconds to sleep) or ``json``."""
    return json.dumps({"told": True} | script).encode()


def steering(**plan: Any) -> dict[str, str]:
    return {PLAN: json.dumps(plan)}


@dataclass
class Seen:
    """One ext_proc stream, as the server saw it."""

    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    metadata: dict[str, Any] = field(default_factory=dict)
    duplex: bool = False
    others: list[str] = field(default_factory=list)
    opened: float = 0.0
    ended: float | None = None


class Scripted:
    """ext_proc, access log and health on one address."""

    def __init__(self) -> None:
        self.streams: list[Seen] = []
        self.logged: list[tuple[str, accesslog_pb2.HTTPAccessLogEntry]] = []
        self.gate = asyncio.Event()
        self.server: grpc.aio.Server | None = None
        self.address = ""

    async def start(
        self, address: str = "127.0.0.1:0", tls: trustme.LeafCert | None = None, ca: trustme.CA | None = None
    ) -> "Scripted":
        """Listen; with *tls*, only for clients whose certificate *ca* has signed."""
        self.server = grpc.aio.server(options=OPTIONS)
        ext_grpc.add_ExternalProcessorServicer_to_server(self, self.server)
        als_pb2_grpc.add_AccessLogServiceServicer_to_server(self, self.server)
        alive = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(alive, self.server)
        await alive.set("", health_pb2.HealthCheckResponse.SERVING)
        if tls and ca:
            pair = (tls.private_key_pem.bytes(), tls.cert_chain_pems[0].bytes())
            credentials = grpc.ssl_server_credentials([pair], ca.cert_pem.bytes(), require_client_auth=True)
            port = self.server.add_secure_port(address, credentials)
        else:
            port = self.server.add_insecure_port(address)
        self.address = address if address.startswith("unix:") else f"127.0.0.1:{port}"
        await self.server.start()
        return self

    async def stop(self) -> None:
        assert self.server
        await self.server.stop(0)

    def entries(self, request_id: str) -> list[accesslog_pb2.HTTPAccessLogEntry]:
        """Return the entries of one request, found by the id in our metadata."""
        return [one for name, one in self.logged if name == "tokenfleet" and own(one).get("id") == request_id]

    async def StreamAccessLogs(self, requests: Any, _context: Any) -> als_pb2.StreamAccessLogsResponse:  # noqa: N802 - gRPC's name
        name = ""
        async for message in requests:
            name = message.identifier.log_name or name
            self.logged += [(name, entry) for entry in message.http_logs.log_entry]
        return als_pb2.StreamAccessLogsResponse()

    async def Process(self, requests: Any, context: Any) -> AsyncIterator[ext.ProcessingResponse]:  # noqa: N802 - gRPC's name
        seen = Seen(opened=time.monotonic())
        self.streams.append(seen)
        try:
            async for message in requests:
                async for answer in self._answer(seen, message, context):
                    yield answer
        finally:
            seen.ended = time.monotonic()

    async def _answer(self, seen: Seen, message: Any, context: Any) -> AsyncIterator[ext.ProcessingResponse]:
        kind = message.WhichOneof("request")
        if message.HasField("protocol_config"):
            seen.duplex = message.protocol_config.request_body_mode == 4
        if kind == "request_headers":
            seen.headers = {one.key: one.raw_value.decode() for one in message.request_headers.headers.headers}
            seen.metadata = {name: dict(value) for name, value in message.metadata_context.filter_metadata.items()}
            if message.request_headers.end_of_stream:
                yield await self._decided(seen, context)
            elif not seen.duplex:
                yield ext.ProcessingResponse(request_headers=ext.HeadersResponse())
        elif kind == "request_body":
            seen.body += message.request_body.body
            if message.request_body.end_of_stream or not seen.duplex:
                decided = await self._decided(seen, context)
                yield decided
                if seen.duplex and decided.WhichOneof("response") != "immediate_response":
                    for piece in echoed(seen.body):
                        yield piece
        else:
            seen.others.append(kind)

    async def _decided(self, seen: Seen, context: Any) -> ext.ProcessingResponse:
        plan = json.loads(seen.headers.get(PLAN, "{}"))
        await asyncio.sleep(plan.get("hold", 0))
        if plan.get("gate"):
            await self.gate.wait()
        if plan.get("abort"):
            await context.abort(grpc.StatusCode.INTERNAL, "as told")
        if status := plan.get("refuse"):
            refusal = ext.ImmediateResponse(body=b'{"error":"as told"}', details="tokenfleet_refused")
            refusal.status.code = status
            refusal.headers.CopyFrom(mutation({"content-type": "application/json", "retry-after": "7"}))
            return ext.ProcessingResponse(immediate_response=refusal)
        common = ext.CommonResponse(header_mutation=mutation(wanted_headers(plan)), clear_route_cache=True)
        if "body" in plan:
            seen.body = plan["body"].encode()
            if not seen.duplex:
                common.body_mutation.body = seen.body
        metadata = struct_pb2.Struct()
        metadata.update(wanted_metadata(plan))
        ended_in_headers = seen.duplex or not seen.body
        if ended_in_headers:
            return ext.ProcessingResponse(
                request_headers=ext.HeadersResponse(response=common), dynamic_metadata=metadata
            )
        return ext.ProcessingResponse(request_body=ext.BodyResponse(response=common), dynamic_metadata=metadata)


def wanted_headers(plan: Mapping[str, Any]) -> dict[str, str]:
    told = dict(plan.get("set", {}))
    if "body" in plan:
        # Buffered, Envoy answers 503 by itself when the length that it was told is not the new body's.
        told["content-length"] = str(len(plan["body"].encode()))
    if "cluster" in plan:
        told["x-tokenfleet-cluster"] = plan["cluster"]
    if "hosts" in plan:
        told["x-gateway-destination-endpoint"] = ",".join(plan["hosts"])
    if "id" in plan:
        told[ID_HEADER] = plan["id"]
    if "retries" in plan:
        told["x-envoy-max-retries"] = str(plan["retries"])
    return told


def wanted_metadata(plan: Mapping[str, Any]) -> dict[str, Any]:
    told: dict[str, Any] = {"tokenfleet": {key: plan[key] for key in ("id", "why") if key in plan}}
    if "hosts" in plan:
        told["envoy.lb"] = {"x-gateway-destination-endpoint": ",".join(plan["hosts"])}
    if "groups" in plan:
        groups = [{"name": one, "clusters": [{"cluster_name": one, "weight": 1}]} for one in plan["groups"]]
        told["tokenfleet.priority"] = {"priority_groups": groups}
    return told


def mutation(headers: Mapping[str, str]) -> ext.HeaderMutation:
    options = [
        base_pb2.HeaderValueOption(
            header=base_pb2.HeaderValue(key=key, raw_value=value.encode()), append_action=OVERWRITE
        )
        for key, value in headers.items()
    ]
    return ext.HeaderMutation(set_headers=options)


def echoed(body: bytes) -> list[ext.ProcessingResponse]:
    pieces = [body[at : at + PIECE] for at in range(0, len(body), PIECE)] or [b""]
    made = []
    for number, piece in enumerate(pieces):
        answer = ext.ProcessingResponse()
        streamed = answer.request_body.response.body_mutation.streamed_response
        streamed.body = piece
        streamed.end_of_stream = number == len(pieces) - 1
        made.append(answer)
    return made


def own(entry: accesslog_pb2.HTTPAccessLogEntry) -> dict[str, Any]:
    """Return our own metadata of an entry."""
    return dict(entry.common_properties.metadata.filter_metadata["tokenfleet"])


def usage(entry: accesslog_pb2.HTTPAccessLogEntry) -> dict[str, Any]:
    return dict(entry.common_properties.metadata.filter_metadata["tokenfleet.usage"])


@dataclass
class Engine:
    """An upstream that says its name, answers a status when told, and streams when asked."""

    name: str
    address: str = ""
    status: int = 200
    requests: list[tuple[dict[str, str], bytes]] = field(default_factory=list)
    _runner: web.AppRunner | None = None

    async def start(self) -> "Engine":
        app = web.Application(client_max_size=64 << 20)
        app.router.add_route("*", "/{tail:.*}", self._serve)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.address = f"127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def stop(self) -> None:
        assert self._runner
        await self._runner.cleanup()

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        self.requests.append(({key.lower(): value for key, value in request.headers.items()}, body))
        if self.status != 200:
            return web.json_response({"served": self.name, "error": "as told"}, status=self.status)
        script = json.loads(body) if body[:7] == b'{"told"' else {}
        if "chunks" in script:
            return await self._stream(request, script["chunks"])
        told = {"served": self.name, "path": request.path, "bytes": len(body)}
        return web.json_response(told | script.get("json", {}))

    async def _stream(self, request: web.Request, chunks: Sequence[float | str]) -> web.StreamResponse:
        """Send strings as chunks, and sleep for numbers; headers leave at once."""
        answer = web.StreamResponse(headers={"content-type": "text/event-stream", "t-served": self.name})
        await answer.prepare(request)
        for one in chunks:
            if isinstance(one, str):
                await answer.write(one.encode())
            else:
                await asyncio.sleep(one)
        return answer


def dead_address() -> str:
    """Return an address that refuses connections; nothing else is given the port soon."""
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{holder.getsockname()[1]}"


async def until(found: Callable[[], T], seconds: float = 10.0) -> T:
    """Wait until *found* returns something true, and return it."""
    end = time.monotonic() + seconds
    while not (value := found()):
        assert time.monotonic() < end, "it did not happen in time"
        await asyncio.sleep(0.02)
    return value
