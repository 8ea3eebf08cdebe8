"""Envoy's protobuf messages ⇄ session events and actions.

upb messages (``xds-protos``): a message costs microseconds. ``raw_value`` only, ``append_action`` always set (the
default appends, and a client's spoofed header would survive), ``clear_route_cache`` only beside a header mutation
(alone Envoy ignores it).
"""

from collections.abc import Container, Iterable, Mapping
from functools import cache, lru_cache
from typing import Any

from envoy.config.core.v3 import base_pb2
from envoy.extensions.filters.http.ext_proc.v3 import processing_mode_pb2
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb
from google.protobuf import struct_pb2

from extproc.adapters.envoy_config import names
from extproc.model import Admit
from extproc.session import Body, Echo, Event, Headers, Phase, Response, Trailers

_DUPLEX = processing_mode_pb2.ProcessingMode.FULL_DUPLEX_STREAMED
_OVERWRITE = base_pb2.HeaderValueOption.HeaderAppendAction.OVERWRITE_IF_EXISTS_OR_ADD
_FIELDS = {
    Phase.REQUEST_HEADERS: "request_headers",
    Phase.REQUEST_BODY: "request_body",
    Phase.REQUEST_TRAILERS: "request_trailers",
    Phase.RESPONSE_HEADERS: "response_headers",
    Phase.RESPONSE_BODY: "response_body",
    Phase.RESPONSE_TRAILERS: "response_trailers",
}


def _continue(phase: Phase) -> pb.ProcessingResponse:
    response = pb.ProcessingResponse()
    getattr(response, _FIELDS[phase]).SetInParent()
    return response


_CONTINUES = {phase: _continue(phase) for phase in Phase}
"""Shared: nobody changes a response after it is built."""


def headers_of(message: pb.HttpHeaders, wanted: Container[str]) -> dict[str, str]:
    """Return header → value, of the *wanted*; of a repeated header the last."""
    return {
        key: one.raw_value.decode("latin-1") or one.value
        for one in message.headers.headers
        if (key := one.key) in wanted
    }


def metadata_of(request: pb.ProcessingRequest) -> dict[str, Any]:
    """Return the forwarded dynamic metadata as plain mappings."""
    if not request.HasField("metadata_context"):
        return {}
    return {name: plain(struct) for name, struct in request.metadata_context.filter_metadata.items()}


def plain(struct: struct_pb2.Struct) -> dict[str, Any]:
    """Return a Struct as a dict; nesting is bounded by protobuf's own limit."""
    return {key: _value(value) for key, value in struct.fields.items()}


def _value(value: struct_pb2.Value) -> Any:  # noqa: ANN401 - a JSON value is anything
    match value.WhichOneof("kind"):
        case "struct_value":
            return plain(value.struct_value)
        case "list_value":
            return [_value(one) for one in value.list_value.values]
        case "null_value" | None:
            return None
        case kind:
            return getattr(value, kind)


_headers = cache(Headers)


def decode(request: pb.ProcessingRequest, *, inference: bool = False, refused: bool = False) -> Event:
    """Return the event that this message is; *inference* and *refused* are the shell's judgement of request headers."""
    kind = request.WhichOneof("request")
    match kind:
        case "request_headers":
            modes = request.protocol_config
            return _headers(
                inference,
                request.request_headers.end_of_stream,
                modes.request_body_mode == _DUPLEX,
                modes.response_body_mode == _DUPLEX,
                refused,
            )
        case "request_body":
            piece = request.request_body
            return Body(piece.body, piece.end_of_stream)
        case "request_trailers":
            return Trailers()
        case "response_body":
            return Response(Phase.RESPONSE_BODY, request.response_body.body, request.response_body.end_of_stream)
        case "response_headers":
            duplex = request.protocol_config.response_body_mode == _DUPLEX  # told in the first message alone
            return Response(Phase.RESPONSE_HEADERS, b"", request.response_headers.end_of_stream, duplex)
        case "response_trailers":
            return Response(Phase.RESPONSE_TRAILERS)
        case _:
            raise ValueError("a ProcessingRequest without a request")


def proceed(phase: Phase) -> pb.ProcessingResponse:
    """Return the answer that changes nothing."""
    return _CONTINUES[phase]


def echo(action: Echo) -> pb.ProcessingResponse:
    """Return a piece of body, sent on."""
    response = pb.ProcessingResponse()
    streamed = getattr(response, _FIELDS[action.phase]).response.body_mutation.streamed_response
    streamed.body = action.data
    streamed.end_of_stream = action.end_of_stream
    return response


def steer(
    phase: Phase, admit: Admit, request_id: str, *, why: str | None = None, body: bytes | None = None
) -> pb.ProcessingResponse:
    """Return the routing answer.

    Envoy may retry as often as there are hosts left, and no further: beyond the list it would fall back to a host that
    nobody chose. With hosts in several clusters each attempt is told its cluster (``priority_group``, Envoy 1.40). In
    shadow mode only the id is noted. *body* replaces the request's (with another length than the header's
    Envoy refuses it); a streamed one is replaced by its echo.
    """
    response = pb.ProcessingResponse()
    in_body = phase is Phase.REQUEST_BODY
    if admit.steer:
        response.CopyFrom(_route(in_body, admit.cluster, admit.hosts, admit.clusters))
    common = (response.request_body if in_body else response.request_headers).response
    own = response.dynamic_metadata.fields[names.NAMESPACE].struct_value.fields
    own["id"].string_value = request_id
    if why is not None:
        own["why"].string_value = why
    headers = common.header_mutation.set_headers
    _set_header(headers, names.REQUEST_ID_HEADER, request_id)
    if body is not None:
        _set_header(headers, "content-length", str(len(body)))
        if in_body:
            common.body_mutation.body = body
    common.clear_route_cache = True
    return response


@lru_cache(maxsize=4096)
def _route(in_body: bool, cluster: str, hosts: tuple[str, ...], clusters: tuple[str, ...]) -> pb.ProcessingResponse:
    """Return what routing answers with these hosts have in common, to be copied: building it costs several copies."""
    response = pb.ProcessingResponse()
    common = (response.request_body if in_body else response.request_headers).response
    metadata = response.dynamic_metadata.fields
    listed = ",".join(hosts)
    headers = common.header_mutation.set_headers
    _set_header(headers, names.CLUSTER_HEADER, cluster)
    _set_header(headers, names.ENDPOINT, listed)
    _set_header(headers, names.RETRIES_HEADER, str(len(hosts) - 1))
    metadata[names.LB_NAMESPACE].struct_value.fields[names.ENDPOINT].string_value = listed
    if clusters:
        groups = metadata[names.PRIORITY_NAMESPACE].struct_value.fields["priority_groups"].list_value
        for one in clusters:
            _add_group(groups, one)
    return response


def _add_group(groups: struct_pb2.ListValue, cluster: str) -> None:
    group = groups.values.add().struct_value.fields
    group["name"].string_value = cluster
    one = group["clusters"].list_value.values.add().struct_value.fields
    one["cluster_name"].string_value = cluster
    one["weight"].number_value = 100


def answer(status: int, headers: Iterable[tuple[str, str]], body: bytes, details: str) -> pb.ProcessingResponse:
    """Return a reply to the client in place of the upstream's."""
    response = pb.ProcessingResponse()
    immediate = response.immediate_response
    immediate.status.code = status
    immediate.body = body
    immediate.details = details
    for name, value in headers:
        _set_header(immediate.headers.set_headers, name, value)
    return response


def _set_header(headers: Any, name: str, value: str) -> None:  # noqa: ANN401 - a repeated field
    option = headers.add(append_action=_OVERWRITE)
    header = option.header
    header.key = name
    header.raw_value = value.encode("latin-1", "replace")


def explain(why: Mapping[str, float], instance: str, site: str, klass: str) -> str:
    """Return the verdict read aloud: one line, terms in seconds."""
    terms = ", ".join(f"{name} {seconds:.3f}s" for name, seconds in why.items())
    return f"class={klass} site={site} instance={instance} {terms}"
