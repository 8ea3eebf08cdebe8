"""The gRPC server of one process: ext_proc, access log, health and reflection on one port or socket."""

import asyncio

import grpc
from envoy.service.accesslog.v3 import als_pb2, als_pb2_grpc
from envoy.service.ext_proc.v3 import external_processor_pb2, external_processor_pb2_grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from extproc.adapters.access_log import AccessLog
from extproc.adapters.server import Processor
from extproc.settings import Tls

_EXT_PROC = external_processor_pb2.DESCRIPTOR.services_by_name["ExternalProcessor"].full_name
_ALS = als_pb2.DESCRIPTOR.services_by_name["AccessLogService"].full_name
_SLACK = 1024 * 1024
"""Bytes of a message beside the body that it carries."""
_SURGE = 1_000_000
"""Streams that may wait to be taken up: more than Envoy's circuit breaker lets through."""


POLL_S = 0.05
LAST_WORDS_S = 0.2
"""Once no exchange is left, access-log entries on their way have so long to arrive; Envoy sends them every 50 ms."""


class GrpcServer:
    """Built, started and drained once."""

    def __init__(self, processor: Processor, address: str, tls: Tls | None) -> None:
        """*address* is ``host:port`` or ``unix:/path``; raises :class:`OSError` if it cannot be had."""
        self._processor = processor
        self._health = health.aio.HealthServicer()
        self._server = grpc.aio.server(
            options=[
                # gRPC's own limit of 4 MiB would turn a larger body into a 500.
                ("grpc.max_receive_message_length", processor.policy.gateway.max_body_bytes + _SLACK),
                ("grpc.max_send_message_length", processor.policy.gateway.max_body_bytes + _SLACK),
                # From 1,000 streams not yet taken up, gRPC would cancel some at random, and Envoy answer 503: a surge
                # of held requests is our everyday work, and the line is where it is bounded.
                ("grpc.server.max_pending_requests", _SURGE),
                ("grpc.server.max_pending_requests_hard_limit", _SURGE),
                ("grpc.so_reuseport", 0),  # two servers on one port would share it silently
                ("grpc.http2.min_ping_interval_without_data_ms", 1000),
                ("grpc.keepalive_permit_without_calls", 1),
                ("grpc.server_max_unrequested_time_in_server", 3600),
            ]
        )
        external_processor_pb2_grpc.add_ExternalProcessorServicer_to_server(processor, self._server)
        als_pb2_grpc.add_AccessLogServiceServicer_to_server(AccessLog(processor.decider), self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        names = (_EXT_PROC, _ALS, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._server)
        self.address = self._bind(address, tls)

    def _bind(self, address: str, tls: Tls | None) -> str:
        try:
            if tls is None:
                port = self._server.add_insecure_port(address)
            else:
                credentials = grpc.ssl_server_credentials(
                    [(tls.key.read_bytes(), tls.certificate.read_bytes())],
                    tls.ca.read_bytes(),
                    require_client_auth=True,
                )
                port = self._server.add_secure_port(address, credentials)
        except RuntimeError as error:
            raise OSError(f"cannot listen on {address}: {error}") from error
        return address if address.startswith("unix:") else f"{address.rpartition(':')[0]}:{port}"

    async def start(self) -> None:
        """Listen; health stays not serving until :meth:`serving`."""
        await self._health.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
        await self._server.start()

    async def serving(self) -> None:
        """Tell health checks that requests are welcome."""
        for name in ("", _EXT_PROC):
            await self._health.set(name, health_pb2.HealthCheckResponse.SERVING)

    async def drain(self, seconds: float) -> None:
        """Take nothing new, close routed streams clean, give held ones *seconds* to be decided, then end."""
        await self._health.enter_graceful_shutdown()
        self._processor.drain()
        stopping = asyncio.ensure_future(self._server.stop(seconds))
        while self._processor.stats.open_streams and not stopping.done():
            await asyncio.wait([stopping], timeout=POLL_S)
        # What is still open is the access log, which never ends by itself.
        await self._server.stop(min(seconds, LAST_WORDS_S))
        await stopping
