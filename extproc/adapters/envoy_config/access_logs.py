"""What Envoy tells us of each request, over gRPC, and operators in a file."""

from datetime import timedelta

from envoy_data_plane.envoy.config.accesslog.v3 import AccessLog, AccessLogFilter, LogTypeFilter
from envoy_data_plane.envoy.config.core.v3 import (
    ApiVersion,
    GrpcService,
    GrpcServiceEnvoyGrpc,
    SubstitutionFormatString,
)
from envoy_data_plane.envoy.data.accesslog.v3 import AccessLogType
from envoy_data_plane.envoy.extensions.access_loggers.file.v3 import FileAccessLog
from envoy_data_plane.envoy.extensions.access_loggers.grpc.v3 import CommonGrpcAccessLogConfig, HttpGrpcAccessLogConfig
from envoy_data_plane.envoy.type.tracing.v3 import CustomTag
from envoy_data_plane.google.protobuf import Any, Struct

from extproc.adapters.envoy_config.names import EXT_PROC_CLUSTER, LOG_NAME, TAGS

FLUSH = timedelta(milliseconds=50)
BATCH_BYTES = 16_384
LINE = {
    "time": "%START_TIME%",
    "id": "%DYNAMIC_METADATA(tokenfleet:id)%",
    "method": "%REQ(:METHOD)%",
    "path": "%REQ(X-ENVOY-ORIGINAL-PATH?:PATH)%",
    "status": "%RESPONSE_CODE%",
    "flags": "%RESPONSE_FLAGS%",
    "details": "%RESPONSE_CODE_DETAILS%",
    "cluster": "%UPSTREAM_CLUSTER%",
    "instance": "%UPSTREAM_HOST%",
    "attempts": "%UPSTREAM_REQUEST_ATTEMPT_COUNT%",
    "duration_ms": "%DURATION%",
    **TAGS,
}


def of_requests() -> AccessLog:
    """Return the log of requests: an entry at the end, and one each half second while it runs."""
    common = CommonGrpcAccessLogConfig(
        log_name=LOG_NAME,
        grpc_service=GrpcService(envoy_grpc=GrpcServiceEnvoyGrpc(cluster_name=EXT_PROC_CLUSTER)),
        transport_api_version=ApiVersion.V3,
        buffer_flush_interval=FLUSH,
        buffer_size_bytes=BATCH_BYTES,
        custom_tags=[CustomTag(tag=tag, value=text) for tag, text in TAGS.items()],
    )
    config = HttpGrpcAccessLogConfig(common_config=common)
    return AccessLog(name="envoy.access_loggers.http_grpc", typed_config=Any.pack(config))


def to_file(path: str) -> AccessLog:
    """Return a JSON log of ended requests."""
    line = SubstitutionFormatString(json_format=Struct.from_dict(LINE))
    ended = LogTypeFilter(types=[AccessLogType.DownstreamEnd])
    return AccessLog(
        name="envoy.access_loggers.file",
        filter=AccessLogFilter(log_type_filter=ended),
        typed_config=Any.pack(FileAccessLog(path=path, log_format=line)),
    )
