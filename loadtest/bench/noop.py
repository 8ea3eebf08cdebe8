"""The baseline: an ext_proc server that reads and continues. ``python -m loadtest.bench.noop --listen unix:/path``.

What any ext_proc server in Python pays: gRPC, the event loop, the whole body in a message, a shared answer out. Same
loop, same reads and writes and same options as ours, and nothing else.
"""

import asyncio
from typing import Annotated, Any

import grpc
import typer
import uvloop
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb
from envoy.service.ext_proc.v3 import external_processor_pb2_grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

_LARGEST = 17 * 1024 * 1024
_SURGE = 1_000_000


def _continue(name: str) -> pb.ProcessingResponse:
    response = pb.ProcessingResponse()
    getattr(response, name).SetInParent()
    return response


_ANSWERS = {
    name: _continue(name)
    for name in ("request_headers", "request_body", "request_trailers", "response_headers", "response_trailers")
}


class Noop(external_processor_pb2_grpc.ExternalProcessorServicer):  # type: ignore[misc] # the base is untyped
    """Continues."""

    async def Process(self, _: Any, context: grpc.aio.ServicerContext) -> None:  # noqa: ANN401, N802 - gRPC's own names
        """Serve one HTTP exchange."""
        while (message := await context.read()) is not grpc.aio.EOF:
            await context.write(_ANSWERS[message.WhichOneof("request")])


async def _serve(address: str) -> None:
    server = grpc.aio.server(
        options=[
            ("grpc.max_receive_message_length", _LARGEST),
            ("grpc.max_send_message_length", _LARGEST),
            ("grpc.server.max_pending_requests", _SURGE),
            ("grpc.server.max_pending_requests_hard_limit", _SURGE),
            ("grpc.so_reuseport", 0),
            ("grpc.http2.min_ping_interval_without_data_ms", 1000),
            ("grpc.keepalive_permit_without_calls", 1),
        ]
    )
    external_processor_pb2_grpc.add_ExternalProcessorServicer_to_server(Noop(), server)
    checked = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(checked, server)
    server.add_insecure_port(address)
    await checked.set("", health_pb2.HealthCheckResponse.SERVING)
    await server.start()
    await server.wait_for_termination()


def main(listen: Annotated[str, typer.Option(help="unix:/path or host:port")]) -> None:
    """Serve until killed."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(listen))


if __name__ == "__main__":
    typer.run(main)
