"""The listener: hygiene first, then the filters, then the answers that Envoy gives by itself."""

from datetime import timedelta
from importlib.resources import files

from envoy_data_plane.envoy.config.accesslog.v3 import AccessLogFilter, ExtensionFilter, ResponseFlagFilter
from envoy_data_plane.envoy.config.common.mutation_rules.v3 import (
    HeaderMutation,
    HeaderMutationRemoveOnMatch,
    HeaderMutationRules,
)
from envoy_data_plane.envoy.config.core.v3 import (
    Address,
    DataSource,
    GrpcService,
    GrpcServiceEnvoyGrpc,
    HeaderValue,
    HeaderValueOption,
    RetryPolicy,
    RetryPolicyRetryHostPredicate,
    SocketAddress,
    SubstitutionFormatString,
    TypedExtensionConfig,
)
from envoy_data_plane.envoy.config.listener.v3 import Filter, FilterChain, Listener
from envoy_data_plane.envoy.extensions.access_loggers.filters.cel.v3 import ExpressionFilter
from envoy_data_plane.envoy.extensions.filters.http.buffer.v3 import Buffer
from envoy_data_plane.envoy.extensions.filters.http.ext_proc.v3 import (
    ExternalProcessor,
    MetadataOptions,
    MetadataOptionsMetadataNamespaces,
    ProcessingMode,
    ProcessingModeBodySendMode,
    ProcessingModeHeaderSendMode,
)
from envoy_data_plane.envoy.extensions.filters.http.lua.v3 import Lua
from envoy_data_plane.envoy.extensions.filters.http.router.v3 import Router
from envoy_data_plane.envoy.extensions.filters.network.http_connection_manager.v3 import (
    HttpConnectionManager,
    HttpConnectionManagerHcmAccessLogOptions,
    HttpFilter,
    LocalReplyConfig,
    ResponseMapper,
)
from envoy_data_plane.envoy.extensions.http.early_header_mutation.header_mutation.v3 import (
    HeaderMutation as EarlyHeaderMutation,
)
from envoy_data_plane.envoy.extensions.retry.host.previous_hosts.v3 import PreviousHostsPredicate
from envoy_data_plane.envoy.type.matcher.v3 import RegexMatcher, StringMatcher
from envoy_data_plane.envoy.type.v3 import HttpStatus, StatusCode
from envoy_data_plane.google.protobuf import Any, Struct

from extproc.adapters.envoy_config import access_logs, names
from extproc.adapters.envoy_config.mesh import Mesh, hold_s
from extproc.adapters.envoy_config.routes import BUFFER_FILTER, EXT_PROC_FILTER, routes
from extproc.policy import Policy

PERIOD = timedelta(milliseconds=500)
"""Time between two access-log entries of a running request: how soon a first token is known before the end."""
OURS_TO_SET = (
    f"^(x-tokenfleet-[a-z0-9-]+|{names.ENDPOINT}|{names.RETRIES_HEADER}|content-type|content-length|retry-after)$"
)
TOO_LARGE = "The request body is larger than this gateway accepts."
NO_ROUTER = "The router is not reachable. Try again."
TOO_SLOW = "No instance answered in time."
NO_INSTANCE = "No instance could be reached. Try again."


def listener(policy: Policy, mesh: Mesh) -> Listener:
    """Return the one listener, with the whole of the HTTP configuration in it."""
    chain = Filter(name="envoy.filters.network.http_connection_manager", typed_config=Any.pack(_http(policy, mesh)))
    return Listener(
        name="tokenfleet",
        address=Address(socket_address=SocketAddress(address=mesh.host, port_value=mesh.port)),
        per_connection_buffer_limit_bytes=1_048_576,
        filter_chains=[FilterChain(filters=[chain])],
    )


def _http(policy: Policy, mesh: Mesh) -> HttpConnectionManager:
    logs = [access_logs.of_requests()]
    if mesh.access_log:
        logs.append(access_logs.to_file(mesh.access_log))
    return HttpConnectionManager(
        stat_prefix="tokenfleet",
        use_remote_address=True,
        generate_request_id=True,
        normalize_path=True,
        merge_slashes=True,
        early_header_mutation_extensions=[_hygiene()],
        stream_idle_timeout=timedelta(seconds=hold_s(policy) + 30),
        request_timeout=timedelta(seconds=mesh.upload_s),
        request_headers_timeout=timedelta(seconds=10),
        access_log=logs,
        access_log_options=HttpConnectionManagerHcmAccessLogOptions(access_log_flush_interval=PERIOD),
        local_reply_config=_own_answers(),
        route_config=routes(policy, mesh),
        http_filters=_filters(policy, mesh),
    )


def _hygiene() -> TypedExtensionConfig:
    """Return what removes, before a route is picked and before we see the request, headers that no client may set."""
    removed = [
        HeaderMutation(remove_on_match=HeaderMutationRemoveOnMatch(key_matcher=StringMatcher(prefix=prefix)))
        for prefix in (*names.OWN_PREFIXES, *names.STEERING_PREFIXES)
    ]
    return TypedExtensionConfig(
        name="envoy.http.early_header_mutation.header_mutation",
        typed_config=Any.pack(EarlyHeaderMutation(mutations=removed)),
    )


def _filters(policy: Policy, mesh: Mesh) -> list[HttpFilter]:
    # The route's own limit refuses nothing below the connection's 1 MiB, and nothing at all when bodies are streamed.
    limit = Buffer(max_request_bytes=policy.gateway.max_body_bytes)
    chain = [
        HttpFilter(name=BUFFER_FILTER, typed_config=Any.pack(limit)),
        HttpFilter(name=EXT_PROC_FILTER, typed_config=Any.pack(_ext_proc(policy, mesh))),
    ]
    if mesh.usage:
        source = files(__package__).joinpath("usage.lua").read_text(encoding="utf-8")
        lua = Lua(default_source_code=DataSource(inline_string=source))
        chain.append(HttpFilter(name="envoy.filters.http.lua", typed_config=Any.pack(lua)))
    chain.append(HttpFilter(name="envoy.filters.http.router", typed_config=Any.pack(Router())))
    return chain


def _ext_proc(policy: Policy, mesh: Mesh) -> ExternalProcessor:
    if mesh.failure_mode_allow and mesh.body_mode == "full-duplex":
        raise ValueError("in full-duplex mode Envoy cannot go on without us; failure_mode_allow needs buffered bodies")
    jwt = policy.gateway.trust.jwt
    verified = jwt.namespace if jwt else "envoy.filters.http.jwt_authn"
    return ExternalProcessor(
        grpc_service=GrpcService(
            envoy_grpc=GrpcServiceEnvoyGrpc(cluster_name=names.EXT_PROC_CLUSTER),
            retry_policy=_another_worker(),
        ),
        failure_mode_allow=mesh.failure_mode_allow,
        status_on_error=HttpStatus(code=StatusCode.ServiceUnavailable),
        message_timeout=timedelta(seconds=hold_s(policy)),
        processing_mode=_mode(mesh),
        mutation_rules=HeaderMutationRules(disallow_all=True, allow_expression=RegexMatcher(regex=OURS_TO_SET)),
        metadata_options=MetadataOptions(
            forwarding_namespaces=MetadataOptionsMetadataNamespaces(untyped=[verified, names.SUBSET_NAMESPACE]),
            receiving_namespaces=MetadataOptionsMetadataNamespaces(
                untyped=[names.LB_NAMESPACE, names.NAMESPACE, names.PRIORITY_NAMESPACE]
            ),
        ),
    )


def _another_worker() -> RetryPolicy:
    """Return what Envoy does while a worker has not answered at all: ask another one."""
    another = RetryPolicyRetryHostPredicate(
        name="envoy.retry_host_predicates.previous_hosts", typed_config=Any.pack(PreviousHostsPredicate())
    )
    return RetryPolicy(
        retry_on="connect-failure,refused-stream,reset,unavailable",
        num_retries=3,
        retry_host_predicate=[another],
        host_selection_retry_max_attempts=5,
    )


def _mode(mesh: Mesh) -> ProcessingMode:
    send, skip = ProcessingModeHeaderSendMode.SEND, ProcessingModeHeaderSendMode.SKIP
    duplex = mesh.body_mode == "full-duplex"
    return ProcessingMode(
        request_header_mode=send,
        request_body_mode=ProcessingModeBodySendMode.FULL_DUPLEX_STREAMED
        if duplex
        else ProcessingModeBodySendMode.BUFFERED,
        request_trailer_mode=send if duplex else skip,
        response_header_mode=skip,
        response_body_mode=ProcessingModeBodySendMode.NONE,
        # Engines send no trailers; waiting for them keeps our stream open until the exchange ends.
        response_trailer_mode=send,
    )


def _own_answers() -> LocalReplyConfig:
    """Return how Envoy words what it refuses by itself; our own refusals match none of these and pass unchanged."""
    return LocalReplyConfig(
        mappers=[
            _answer(_details("request_payload_too_large"), "invalid_request_error", "request_too_large", TOO_LARGE),
            _answer(_details("ext_proc_error"), "api_error", "router_unavailable", NO_ROUTER, retry_after_s=1),
            _answer(_flags("UT", "SI", "DT"), "api_error", "timed_out", TOO_SLOW),
            _answer(
                _flags("UH", "UF", "UC", "UO", "UR", "LR", "NC"),
                "api_error",
                "instance_unavailable",
                NO_INSTANCE,
                retry_after_s=1,
            ),
        ]
    )


def _details(prefix: str) -> AccessLogFilter:
    expression = ExpressionFilter(expression=f'response.code_details.startsWith("{prefix}")')
    cel = ExtensionFilter(name="envoy.access_loggers.extension_filters.cel", typed_config=Any.pack(expression))
    return AccessLogFilter(extension_filter=cel)


def _flags(*flags: str) -> AccessLogFilter:
    return AccessLogFilter(response_flag_filter=ResponseFlagFilter(flags=list(flags)))


def _answer(
    when: AccessLogFilter, kind: str, code: str, message: str, retry_after_s: int | None = None
) -> ResponseMapper:
    """Return one mapper. The body is an error for clients of either API: each finds its own keys."""
    body = {"type": "error", "error": {"type": kind, "code": code, "message": message}}
    retry = HeaderValueOption(header=HeaderValue(key="retry-after", value=str(retry_after_s)))
    return ResponseMapper(
        filter=when,
        body_format_override=SubstitutionFormatString(json_format=Struct.from_dict(body)),
        headers_to_add=[retry] if retry_after_s is not None else [],
    )
