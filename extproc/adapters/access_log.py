"""Envoy's access log → first tokens and endings.

Entries are joined by the id in metadata ``tokenfleet``; entries without one are not ours. The log is lossy by nature (a
collector that is away loses entries silently), so in-flight counts never depend on it: it only closes the books.
"""

from typing import Any

import grpc
from envoy.data.accesslog.v3 import accesslog_pb2
from envoy.service.accesslog.v3 import als_pb2, als_pb2_grpc

from extproc.adapters.envoy_config import names
from extproc.model import Ending, Outcome
from extproc.ports import Decider

_CUT_BY_CLIENT = ("downstream_connection_termination", "downstream_remote_reset", "downstream_protocol_error")
_TIMED_OUT = (
    "stream_idle_timeout",
    "upstream_request_timeout",
    "duration_timeout",
    "upstream_max_stream_duration_reached",
)
_CUT_BY_ENGINE = (
    "upstream_remote_reset",
    "upstream_connection_failure",
    "upstream_connection_termination",
    "upstream_protocol_error",
    "upstream_retry_limit_exceeded",
    "no_healthy_upstream",
    "upstream_overflow",
)


class AccessLog(als_pb2_grpc.AccessLogServiceServicer):  # type: ignore[misc] # the base is untyped
    """The gRPC access log service."""

    def __init__(self, decider: Decider) -> None:
        self._decider = decider
        self.entries = 0

    async def StreamAccessLogs(self, _: Any, context: grpc.aio.ServicerContext) -> als_pb2.StreamAccessLogsResponse:  # noqa: ANN401, N802 - gRPC's own names
        """Take entries until Envoy ends the stream."""
        while (message := await context.read()) is not grpc.aio.EOF:
            for entry in message.http_logs.log_entry:
                self._take(entry)
        return als_pb2.StreamAccessLogsResponse()

    def _take(self, entry: accesslog_pb2.HTTPAccessLogEntry) -> None:
        self.entries += 1
        own = entry.common_properties.metadata.filter_metadata.get(names.NAMESPACE)
        request_id = own.fields["id"].string_value if own is not None and "id" in own.fields else ""
        if not request_id:
            return
        if not entry.common_properties.intermediate_log_entry:
            self._decider.settle(request_id, outcome_of(entry))
        elif (ttft_s := _tag_s(entry, "ttft_us")) is not None:
            self._decider.first_token(request_id, ttft_s)


def outcome_of(entry: accesslog_pb2.HTTPAccessLogEntry) -> Outcome:
    """Return what a final entry says of the ending."""
    common, response = entry.common_properties, entry.response
    usage = common.metadata.filter_metadata.get(names.USAGE_NAMESPACE)
    fields = usage.fields if usage is not None else {}
    status = response.response_code.value if response.HasField("response_code") else 0
    return Outcome(
        ending=_ending(common.response_flags, status, "stream_error" in fields),
        status=status,
        served=_served(common),
        attempts=common.upstream_request_attempt_count,
        ttft_s=_tag_s(entry, "ttft_us"),
        duration_s=common.duration.ToNanoseconds() / 1e9 if common.HasField("duration") else None,
        prompt_tokens=_tokens(fields, "prompt_tokens"),
        cached_tokens=_tokens(fields, "cached_tokens"),
        output_tokens=_tokens(fields, "completion_tokens"),
        body_bytes=response.response_body_bytes,
    )


def _ending(flags: accesslog_pb2.ResponseFlags, status: int, error_in_stream: bool) -> Ending:
    if any(getattr(flags, name) for name in _CUT_BY_CLIENT):
        return Ending.CANCELLED
    if any(getattr(flags, name) for name in _TIMED_OUT):
        return Ending.TIMED_OUT
    if any(getattr(flags, name) for name in _CUT_BY_ENGINE) or status >= 500 or status == 0 or error_in_stream:
        return Ending.FAILED
    return Ending.REJECTED if status >= 400 else Ending.COMPLETED


def _served(common: accesslog_pb2.AccessLogCommon) -> str | None:
    if not common.upstream_remote_address.HasField("socket_address"):
        return None
    socket = common.upstream_remote_address.socket_address
    host = f"[{socket.address}]" if ":" in socket.address else socket.address
    return f"{host}:{socket.port_value}"


def _tag_s(entry: accesslog_pb2.HTTPAccessLogEntry, name: str) -> float | None:
    """Return a microseconds tag in seconds; Envoy writes ``-`` for a moment that never came."""
    text = entry.common_properties.custom_tags.get(name, "")
    return int(text) / 1e6 if text.isdecimal() else None


def _tokens(fields: Any, name: str) -> int | None:  # noqa: ANN401 - a protobuf map
    if name not in fields or fields[name].WhichOneof("kind") != "number_value":
        return None
    value = fields[name].number_value
    return int(value) if 0 <= value < 1e12 else None
