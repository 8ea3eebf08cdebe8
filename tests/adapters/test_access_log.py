"""Envoy's entries → first tokens and endings, through the real gRPC service."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from envoy.data.accesslog.v3 import accesslog_pb2
from envoy.service.accesslog.v3 import als_pb2, als_pb2_grpc
from google.protobuf import struct_pb2

from extproc.adapters.access_log import AccessLog, outcome_of
from extproc.model import Ending, Final, Fleet, Outcome, Request
from tests.polling import eventually


class Told:
    """A decider that keeps what it is told."""

    def __init__(self) -> None:
        self.first: list[tuple[str, float]] = []
        self.settled: dict[str, Outcome] = {}

    def offer(self, request: Request) -> Final | asyncio.Future[Final]:
        raise AssertionError(f"an access log offers nothing: {request}")

    def first_token(self, request_id: str, ttft_s: float) -> None:
        self.first.append((request_id, ttft_s))

    def settle(self, request_id: str, outcome: Outcome) -> None:
        self.settled[request_id] = outcome

    def fleet(self) -> Fleet:
        return Fleet(at=0.0)


def an_entry(
    request_id: str | None = "id-1",
    *,
    status: int = 200,
    flags: str | None = None,
    usage: dict[str, Any] | None = None,
    tags: dict[str, str] | None = None,
    served: tuple[str, int] | None = ("10.0.0.1", 8000),
    attempts: int = 1,
    intermediate: bool = False,
    seconds: float | None = 1.5,
    body_bytes: int = 0,
) -> accesslog_pb2.HTTPAccessLogEntry:
    entry = accesslog_pb2.HTTPAccessLogEntry()
    common = entry.common_properties
    if request_id is not None:
        common.metadata.filter_metadata["tokenfleet"].update({"id": request_id})
    if usage is not None:
        common.metadata.filter_metadata["tokenfleet.usage"].update(usage)
    for name, value in (tags or {}).items():
        common.custom_tags[name] = value
    if served is not None:
        common.upstream_remote_address.socket_address.address = served[0]
        common.upstream_remote_address.socket_address.port_value = served[1]
    if flags is not None:
        setattr(common.response_flags, flags, True)
    if seconds is not None:
        common.duration.FromNanoseconds(round(seconds * 1e9))
    common.upstream_request_attempt_count = attempts
    common.intermediate_log_entry = intermediate
    if status:
        entry.response.response_code.value = status
    entry.response.response_body_bytes = body_bytes
    return accesslog_pb2.HTTPAccessLogEntry.FromString(entry.SerializeToString())


# --- endings ----------------------------------------------------------------------------------------------------------

FLAGS = {
    "downstream_connection_termination": Ending.CANCELLED,
    "downstream_remote_reset": Ending.CANCELLED,
    "downstream_protocol_error": Ending.CANCELLED,
    "stream_idle_timeout": Ending.TIMED_OUT,
    "upstream_request_timeout": Ending.TIMED_OUT,
    "duration_timeout": Ending.TIMED_OUT,
    "upstream_max_stream_duration_reached": Ending.TIMED_OUT,
    "upstream_remote_reset": Ending.FAILED,
    "upstream_connection_failure": Ending.FAILED,
    "upstream_connection_termination": Ending.FAILED,
    "upstream_protocol_error": Ending.FAILED,
    "upstream_retry_limit_exceeded": Ending.FAILED,
    "no_healthy_upstream": Ending.FAILED,
    "upstream_overflow": Ending.FAILED,
}


@pytest.mark.parametrize(("flag", "ending"), FLAGS.items())
@pytest.mark.parametrize("status", [0, 200, 503])
def test_a_flag_tells_who_cut_it_whatever_the_status(flag: str, ending: Ending, status: int) -> None:
    assert outcome_of(an_entry(flags=flag, status=status)).ending is ending


@pytest.mark.parametrize(
    ("status", "ending"),
    [
        (200, Ending.COMPLETED),
        (204, Ending.COMPLETED),
        (307, Ending.COMPLETED),
        (400, Ending.REJECTED),
        (429, Ending.REJECTED),
        (500, Ending.FAILED),
        (503, Ending.FAILED),
        (0, Ending.FAILED),
    ],
)
def test_without_a_flag_the_status_tells(status: int, ending: Ending) -> None:
    outcome = outcome_of(an_entry(status=status))
    assert (outcome.ending, outcome.status) == (ending, status)


def test_a_client_that_left_is_no_failure_of_the_engine_it_left() -> None:
    entry = an_entry(flags="downstream_connection_termination", status=0)
    entry.common_properties.response_flags.upstream_remote_reset = True
    assert outcome_of(entry).ending is Ending.CANCELLED


def test_an_error_inside_a_stream_that_began_with_200_is_a_failure() -> None:
    assert outcome_of(an_entry(usage={"stream_error": "overloaded"})).ending is Ending.FAILED


# --- figures ----------------------------------------------------------------------------------------------------------


def test_everything_known_of_an_ending_is_read() -> None:
    entry = an_entry(
        usage={"prompt_tokens": 100, "completion_tokens": 20, "cached_tokens": 64},
        tags={"ttft_us": "250000"},
        attempts=2,
        body_bytes=4096,
    )
    assert outcome_of(entry) == Outcome(
        ending=Ending.COMPLETED,
        status=200,
        served="10.0.0.1:8000",
        attempts=2,
        ttft_s=0.25,
        duration_s=1.5,
        prompt_tokens=100,
        cached_tokens=64,
        output_tokens=20,
        body_bytes=4096,
    )


def test_what_nobody_said_is_unknown() -> None:
    bare = outcome_of(accesslog_pb2.HTTPAccessLogEntry())
    assert bare == Outcome(ending=Ending.FAILED, attempts=0)


def test_no_attempt_is_none() -> None:
    assert outcome_of(an_entry(attempts=0, served=None, status=503)).attempts == 0


@pytest.mark.parametrize("text", ["-", "", "-5", "1.5", "abc", "²", " 12"])
def test_a_moment_that_never_came_is_unknown(text: str) -> None:
    assert outcome_of(an_entry(tags={"ttft_us": text})).ttft_s is None


@pytest.mark.parametrize("garbled", ["12", None, True, {"a": 1}, [3], -1, float("nan"), float("inf"), 1e300])
def test_garbled_usage_is_unknown_and_spoils_nothing_else(garbled: Any) -> None:
    entry = an_entry(usage={"completion_tokens": garbled, "prompt_tokens": 7})
    outcome = outcome_of(entry)
    assert (outcome.output_tokens, outcome.prompt_tokens, outcome.ending) == (None, 7, Ending.COMPLETED)


def test_no_tokens_is_a_number_too() -> None:
    assert outcome_of(an_entry(usage={"completion_tokens": 0})).output_tokens == 0


def test_an_ipv6_instance_is_named_as_the_fleet_names_it() -> None:
    assert outcome_of(an_entry(served=("fd00::1", 80))).served == "[fd00::1]:80"


def test_an_upstream_without_an_ip_is_nobody_known() -> None:
    entry = an_entry(served=None)
    entry.common_properties.upstream_remote_address.pipe.path = "/run/engine.sock"
    assert outcome_of(entry).served is None


# --- the service ------------------------------------------------------------------------------------------------------


@pytest.fixture
async def service(tmp_path: Path) -> AsyncIterator[tuple[Told, AccessLog, als_pb2_grpc.AccessLogServiceStub]]:
    told = Told()
    log = AccessLog(told)
    server = grpc.aio.server()
    als_pb2_grpc.add_AccessLogServiceServicer_to_server(log, server)
    address = f"unix:{tmp_path}/als.sock"
    server.add_insecure_port(address)
    await server.start()
    async with grpc.aio.insecure_channel(address) as channel:
        yield told, log, als_pb2_grpc.AccessLogServiceStub(channel)
    await server.stop(0)


def a_batch(*entries: accesslog_pb2.HTTPAccessLogEntry) -> als_pb2.StreamAccessLogsMessage:
    message = als_pb2.StreamAccessLogsMessage()
    message.http_logs.log_entry.extend(entries)
    return message


async def test_a_running_request_s_entries_tell_its_first_token_and_its_last_one_the_ending(
    service: tuple[Told, AccessLog, Any],
) -> None:
    told, log, stub = service
    call = stub.StreamAccessLogs()
    await call.write(a_batch(an_entry(tags={"ttft_us": "-"}, intermediate=True, status=0)))
    await call.write(a_batch(an_entry(tags={"ttft_us": "250000"}, intermediate=True)))
    await eventually(lambda: bool(told.first))
    assert told.first == [("id-1", 0.25)]
    assert told.settled == {}
    await call.write(a_batch(an_entry(), an_entry("id-2", status=503)))
    await eventually(lambda: len(told.settled) == 2)
    assert told.settled["id-1"].ending is Ending.COMPLETED
    assert told.settled["id-2"].ending is Ending.FAILED
    await call.done_writing()
    assert isinstance(await call, als_pb2.StreamAccessLogsResponse)
    assert log.entries == 4


async def test_entries_that_are_not_ours_are_ignored(service: tuple[Told, AccessLog, Any]) -> None:
    told, log, stub = service
    nameless = an_entry("")
    numbered = an_entry(None)
    numbered.common_properties.metadata.filter_metadata["tokenfleet"].fields["id"].CopyFrom(
        struct_pb2.Value(number_value=5)
    )
    call = stub.StreamAccessLogs()
    await call.write(a_batch(an_entry(None), nameless, numbered, an_entry("ours")))
    await call.done_writing()
    await call
    assert list(told.settled) == ["ours"]
    assert log.entries == 4
