"""What is said to Envoy, read again with an independent codec; what Envoy says, read from its bytes."""

from typing import Any

import pytest
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb
from envoy_data_plane.envoy.config.core.v3 import HeaderValueOptionHeaderAppendAction as AppendAction
from envoy_data_plane.envoy.service.ext_proc.v3 import (
    CommonResponse,
    HeaderMutation,
    HeadersResponse,
    ImmediateResponse,
    ProcessingResponse,
)

from extproc.adapters import envoy
from extproc.adapters.envoy_config import names
from extproc.model import Admit
from extproc.session import Body, Echo, Event, Headers, Phase, Response, Trailers

ADMIT = Admit("a-0", "a", "site-a", ("10.0.0.1:80", "[::1]:81"), "standard", why={"queue": 0.8, "prefill": 0.3})
FIELDS = {
    Phase.REQUEST_HEADERS: "request_headers",
    Phase.REQUEST_BODY: "request_body",
    Phase.REQUEST_TRAILERS: "request_trailers",
    Phase.RESPONSE_HEADERS: "response_headers",
    Phase.RESPONSE_BODY: "response_body",
    Phase.RESPONSE_TRAILERS: "response_trailers",
}


def again(response: pb.ProcessingResponse) -> ProcessingResponse:
    return ProcessingResponse.parse(response.SerializeToString())


def set_headers(mutation: HeaderMutation | None) -> dict[str, str]:
    """Return header → value; every one must be overwritten and given raw, once."""
    found: dict[str, str] = {}
    for option in mutation.set_headers if mutation else ():
        assert option.append_action is AppendAction.OVERWRITE_IF_EXISTS_OR_ADD, "the default appends to a spoofed one"
        assert option.header is not None
        assert option.header.value == "", "raw_value only"
        assert option.header.key not in found
        found[option.header.key] = option.header.raw_value.decode("latin-1")
    return found


def namespaces(response: pb.ProcessingResponse) -> dict[str, Any]:
    return dict(again(response).dynamic_metadata.to_dict()) if again(response).dynamic_metadata else {}


def common_of(response: pb.ProcessingResponse, phase: Phase) -> CommonResponse:
    parsed = again(response)
    assert [name for name in FIELDS.values() if getattr(parsed, name) is not None] == [FIELDS[phase]]
    common = getattr(parsed, FIELDS[phase]).response
    assert isinstance(common, CommonResponse)
    return common


# --- the routing answer -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("phase", [Phase.REQUEST_HEADERS, Phase.REQUEST_BODY])
def test_the_routing_answer_names_cluster_hosts_retries_and_id_in_headers(phase: Phase) -> None:
    common = common_of(envoy.steer(phase, ADMIT, "id-1"), phase)
    assert set_headers(common.header_mutation) == {
        "x-tokenfleet-request-id": "id-1",
        "x-tokenfleet-cluster": "site-a",
        "x-gateway-destination-endpoint": "10.0.0.1:80,[::1]:81",
        "x-envoy-max-retries": "1",
    }
    assert common.clear_route_cache
    assert common.body_mutation is None


def test_the_hosts_stand_in_metadata_as_in_the_header() -> None:
    assert namespaces(envoy.steer(Phase.REQUEST_BODY, ADMIT, "id-1")) == {
        "envoy.lb": {"x-gateway-destination-endpoint": "10.0.0.1:80,[::1]:81"},
        "tokenfleet": {"id": "id-1"},
    }


def test_one_host_allows_no_retry() -> None:
    one = Admit("a-0", "a", "site-a", ("10.0.0.1:80",), "standard")
    common = common_of(envoy.steer(Phase.REQUEST_BODY, one, "id-1"), Phase.REQUEST_BODY)
    assert set_headers(common.header_mutation)["x-envoy-max-retries"] == "0"


def test_why_is_told_only_when_asked_for() -> None:
    said = namespaces(envoy.steer(Phase.REQUEST_BODY, ADMIT, "id-1", why="queue 0.8s"))
    assert said["tokenfleet"] == {"id": "id-1", "why": "queue 0.8s"}


def test_in_shadow_mode_only_the_id_is_noted() -> None:
    shadow = Admit("a-0", "a", "site-a", ("10.0.0.1:80",), "standard", ("site-a",), steer=False)
    response = envoy.steer(Phase.REQUEST_BODY, shadow, "id-1")
    common = common_of(response, Phase.REQUEST_BODY)
    assert set_headers(common.header_mutation) == {"x-tokenfleet-request-id": "id-1"}
    assert namespaces(response) == {"tokenfleet": {"id": "id-1"}}


def test_with_hosts_in_several_clusters_each_attempt_is_told_its_own() -> None:
    crossing = Admit("a-0", "a", "site-a", ("h:1", "h:2", "h:3"), "standard", ("site-a", "site-a", "site-b"))
    said = namespaces(envoy.steer(Phase.REQUEST_BODY, crossing, "id-1"))
    assert said[names.PRIORITY_NAMESPACE] == {
        "priority_groups": [
            {"name": cluster, "clusters": [{"cluster_name": cluster, "weight": 100.0}]}
            for cluster in ("site-a", "site-a", "site-b")
        ]
    }


def test_a_replaced_buffered_body_tells_its_length() -> None:
    common = common_of(envoy.steer(Phase.REQUEST_BODY, ADMIT, "id-1", body=b"longer"), Phase.REQUEST_BODY)
    assert common.body_mutation is not None
    assert common.body_mutation.body == b"longer"
    assert set_headers(common.header_mutation)["content-length"] == "6"


def test_a_body_replaced_by_its_echo_is_not_in_the_answer_to_the_headers() -> None:
    common = common_of(envoy.steer(Phase.REQUEST_HEADERS, ADMIT, "id-1", body=b"longer"), Phase.REQUEST_HEADERS)
    assert common.body_mutation is None
    assert set_headers(common.header_mutation)["content-length"] == "6"


# --- the other answers ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("phase", list(Phase))
def test_going_on_changes_nothing(phase: Phase) -> None:
    parsed = again(envoy.proceed(phase))
    assert [name for name in FIELDS.values() if getattr(parsed, name) is not None] == [FIELDS[phase]]
    assert parsed.dynamic_metadata is None
    assert parsed.mode_override is None
    part = getattr(parsed, FIELDS[phase])
    if isinstance(part, HeadersResponse):
        assert part.response is None, "clear_route_cache stands only beside a header mutation"


@pytest.mark.parametrize("phase", [Phase.REQUEST_BODY, Phase.RESPONSE_BODY])
@pytest.mark.parametrize(("data", "last"), [(b"piece", False), (b"\x00\xff", True), (b"", True)])
def test_an_echo_is_a_streamed_piece(phase: Phase, data: bytes, last: bool) -> None:
    common = common_of(envoy.echo(Echo(phase, data, last)), phase)
    assert common.header_mutation is None
    assert not common.clear_route_cache
    assert common.body_mutation is not None
    streamed = common.body_mutation.streamed_response
    assert streamed is not None
    assert (streamed.body, streamed.end_of_stream) == (data, last)


def test_an_answer_of_our_own_carries_status_headers_body_and_details() -> None:
    response = envoy.answer(429, [("content-type", "application/json"), ("retry-after", "2")], b'{"e":1}', "line_full")
    immediate = again(response).immediate_response
    assert isinstance(immediate, ImmediateResponse)
    assert immediate.status is not None
    assert int(immediate.status.code) == 429
    assert (immediate.body, immediate.details) == (b'{"e":1}', "line_full")
    assert set_headers(immediate.headers) == {"content-type": "application/json", "retry-after": "2"}


def test_a_header_value_that_is_no_latin_is_replaced_not_raised() -> None:
    immediate = again(envoy.answer(400, [("x-tokenfleet-reason", "naïve ☃")], b"", "d")).immediate_response
    assert immediate is not None
    assert set_headers(immediate.headers) == {"x-tokenfleet-reason": "naïve ?"}


def test_a_verdict_is_read_aloud() -> None:
    said = envoy.explain({"queue": 0.8, "prefill": 0.3004}, "a-0", "a", "standard")
    assert said == "class=standard site=a instance=a-0 queue 0.800s, prefill 0.300s"


# --- what Envoy says --------------------------------------------------------------------------------------------------

DUPLEX = 4  # ProcessingMode.BodySendMode.FULL_DUPLEX_STREAMED in Envoy's API


def a_message(**fields: Any) -> pb.ProcessingRequest:
    return pb.ProcessingRequest.FromString(pb.ProcessingRequest(**fields).SerializeToString())


@pytest.mark.parametrize(
    ("fields", "event"),
    [
        ({"request_headers": {}}, Headers(inference=True)),
        ({"request_headers": {"end_of_stream": True}}, Headers(inference=True, end_of_stream=True)),
        (
            {"request_headers": {}, "protocol_config": {"request_body_mode": DUPLEX}},
            Headers(inference=True, duplex=True),
        ),
        (
            {"request_headers": {}, "protocol_config": {"request_body_mode": 2, "response_body_mode": DUPLEX}},
            Headers(inference=True, duplex_response=True),
        ),
        ({"request_body": {"body": b"ab", "end_of_stream": True}}, Body(b"ab", end_of_stream=True)),
        ({"request_body": {}}, Body(b"", end_of_stream=False)),
        ({"request_trailers": {}}, Trailers()),
        ({"response_headers": {}}, Response(Phase.RESPONSE_HEADERS)),
        (
            {"response_headers": {}, "protocol_config": {"response_body_mode": DUPLEX}},
            Response(Phase.RESPONSE_HEADERS, duplex=True),
        ),
        ({"response_headers": {"end_of_stream": True}}, Response(Phase.RESPONSE_HEADERS, end_of_stream=True)),
        ({"response_body": {"body": b"x", "end_of_stream": True}}, Response(Phase.RESPONSE_BODY, b"x", True)),
        ({"response_trailers": {}}, Response(Phase.RESPONSE_TRAILERS)),
    ],
)
def test_every_message_is_an_event(fields: dict[str, Any], event: Event) -> None:
    assert envoy.decode(a_message(**fields), inference=True) == event


def test_headers_on_a_path_that_is_refused_say_so() -> None:
    assert envoy.decode(a_message(request_headers={}), refused=True) == Headers(inference=False, refused=True)


def test_a_routing_answer_is_not_changed_by_the_next_one_to_the_same_hosts() -> None:
    first = envoy.steer(Phase.REQUEST_BODY, ADMIT, "id-1", why="long", body=b"replaced")
    before = first.SerializeToString(deterministic=True)
    second = envoy.steer(Phase.REQUEST_BODY, ADMIT, "id-2")
    assert first.SerializeToString(deterministic=True) == before
    assert namespaces(second)["tokenfleet"] == {"id": "id-2"}
    common = common_of(second, Phase.REQUEST_BODY)
    assert common.body_mutation is None
    assert set_headers(common.header_mutation)["x-tokenfleet-request-id"] == "id-2"


def test_a_message_that_says_nothing_is_an_error() -> None:
    with pytest.raises(ValueError, match="without a request"):
        envoy.decode(pb.ProcessingRequest())


def test_wanted_headers_are_read_raw_the_last_of_a_repeated_one() -> None:
    message = a_message(
        request_headers={
            "headers": {
                "headers": [
                    {"key": ":path", "raw_value": b"/v1"},
                    {"key": "x", "raw_value": b"first"},
                    {"key": "x", "raw_value": b"\xe9"},
                    {"key": "old", "value": "of an old Envoy"},
                    {"key": "empty"},
                    {"key": "unwanted", "raw_value": b"x"},
                ]
            }
        }
    )
    assert envoy.headers_of(message.request_headers, {":path", "x", "old", "empty", "absent"}) == {
        ":path": "/v1",
        "x": "é",
        "old": "of an old Envoy",
        "empty": "",
    }


def test_metadata_is_plain_values() -> None:
    message = pb.ProcessingRequest()
    assert envoy.metadata_of(message) == {}
    claims = message.metadata_context.filter_metadata["jwt"]
    claims.update({"payload": {"tenant": "x", "n": 1.5, "yes": True, "none": None, "list": ["a", {"b": 2.0}]}})
    assert envoy.metadata_of(pb.ProcessingRequest.FromString(message.SerializeToString())) == {
        "jwt": {"payload": {"tenant": "x", "n": 1.5, "yes": True, "none": None, "list": ["a", {"b": 2.0}]}}
    }
