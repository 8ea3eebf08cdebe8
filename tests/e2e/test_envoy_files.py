"""What the generated configuration makes a real Envoy do, with a scripted server in place of ours."""

import asyncio
import io
import json
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest
import pytest_asyncio
import trustme
from ruamel.yaml import YAML

from extproc.adapters import eds_files
from extproc.adapters.envoy_config import Mesh, MutualTls, write
from extproc.policy import Policy
from tests.builders import CHAT, a_policy
from tests.e2e.envoy_process import EnvoyProcess, an_envoy
from tests.e2e.scripted import Engine, Scripted, answering, dead_address, own, steering, until, usage

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="module")]

VARIANTS = [
    pytest.param({"style": style, "body_mode": mode}, id=f"{style}-{mode}")
    for style in ("cluster-header", "priority-group")
    for mode in ("buffered", "full-duplex")
]
CHAT_PATH = "/v1/chat/completions"
LIMIT = 300_000
USAGE_CHUNK = (
    'data: {"choices":[],"usage":{"prompt_tokens":12,"completion_tokens":3,'
    '"prompt_tokens_details":{"cached_tokens":8}}}\n\n'
)
ANTHROPIC_START = (
    'event: message_start\ndata: {"message":{"usage":{"input_tokens":11,"cache_read_input_tokens":100,'
    '"cache_creation_input_tokens":0,"output_tokens":1}}}\n\n'
)
RESPONSES_END = (
    'event: response.completed\ndata: {"response":{"output":"' + "x" * 30_000 + '","usage":{"input_tokens":50,'
    '"input_tokens_details":{"cached_tokens":0},"output_tokens":2},"user":null}}\n\n'
)


def a_mesh(server: Scripted, **fields: Any) -> Mesh:
    return replace(Mesh(host="127.0.0.1", port=0, admin_port=0, servers=(server.address,)), **fields)


def policy_of(sites: dict[str, list[str]], **gateway: Any) -> Policy:
    def site(name: str) -> dict[str, Any]:
        listed = [{"name": f"{name}{i}", "address": one} for i, one in enumerate(sites[name])]
        return {"name": name, "instances": [{"models": [CHAT], "static": listed}]}

    fleet = {"home": "a", "models": {CHAT: {}}, "sites": [site(name) for name in sites]}
    return a_policy(fleet=fleet, gateway={"max_body_bytes": LIMIT} | gateway)


@dataclass
class Lab:
    envoy: EnvoyProcess
    server: Scripted
    engines: dict[str, Engine]
    dead: str
    style: str
    http: aiohttp.ClientSession

    def at(self, *names: str) -> list[str]:
        return [self.dead if name == "dead" else self.engines[name].address for name in names]

    def to(self, *sites: str, hosts: list[str], **more: Any) -> dict[str, str]:
        """Return the headers that make the server steer to *hosts*, attempt by attempt in *sites*."""
        return steering(
            cluster=f"site-{sites[0]}", hosts=self.at(*hosts), groups=[f"site-{one}" for one in sites], **more
        )

    async def post(
        self, headers: dict[str, str] | None = None, path: str = CHAT_PATH, body: bytes = b'{"a":1}'
    ) -> tuple[int, dict[str, str], Any]:
        async with self.http.post(self.envoy.url + path, data=io.BytesIO(body), headers=headers) as answer:
            text = await answer.read()
            told = {key.lower(): value for key, value in answer.headers.items()}
            return answer.status, told, json.loads(text) if "json" in answer.content_type else text


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def people() -> AsyncIterator[tuple[Scripted, dict[str, Engine], aiohttp.ClientSession]]:
    """One scripted server, four engines and a client for the whole module."""
    server = await Scripted().start()
    engines = {name: await Engine(name).start() for name in ("a0", "a1", "b0", "b1")}
    async with aiohttp.ClientSession() as http:
        yield server, engines, http
    for engine in engines.values():
        await engine.stop()
    await server.stop()


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=VARIANTS)
async def lab(
    request: pytest.FixtureRequest, people: Any, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Lab]:
    """One Envoy for each variant of the configuration; the site ``a`` also lists an address that refuses."""
    server, engines, http = people
    dead = dead_address()
    sites = {"a": [engines["a0"].address, engines["a1"].address, dead], "b": [engines[n].address for n in ("b0", "b1")]}
    config = write(policy_of(sites), a_mesh(server, **request.param))
    with an_envoy(config, tmp_path_factory.mktemp("envoy")) as envoy:
        lab = Lab(envoy, server, engines, dead, request.param["style"], http)
        yield lab


@pytest.fixture(autouse=True)
def healthy(people: Any) -> Iterator[None]:
    yield
    for engine in people[1].values():
        engine.status = 200
        engine.requests.clear()


# --- steering ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a0", "a1", "b0", "b1"])
async def test_a_request_runs_on_the_instance_and_in_the_site_that_it_was_told(lab: Lab, name: str) -> None:
    for _ in range(3):
        status, _, told = await lab.post(lab.to(name[0], hosts=[name]))
        assert (status, told["served"], told["bytes"]) == (200, name, 7)


async def test_a_request_without_a_body_is_steered_too(lab: Lab) -> None:
    headers = lab.to("b", hosts=["b1"])
    async with lab.http.get(lab.envoy.url + "/v1/models", headers=headers) as answer:
        assert (await answer.json())["served"] == "b1"


async def test_an_unsteered_request_goes_home(lab: Lab) -> None:
    served = {(await lab.post())[2]["served"] for _ in range(8)}
    assert served == {"a0", "a1"}


async def test_a_refused_connection_moves_to_the_next_host_of_the_list(lab: Lab) -> None:
    for name in ("a1", "a0"):
        status, _, told = await lab.post(lab.to("a", "a", hosts=["dead", name]))
        assert (status, told["served"]) == (200, name)


@pytest.mark.parametrize("failure", [500, 503])
async def test_an_engine_that_answers_5xx_is_left_for_the_next_host(lab: Lab, failure: int) -> None:
    lab.engines["a0"].status = failure
    status, _, told = await lab.post(lab.to("a", "a", hosts=["a0", "a1"]))
    assert (status, told["served"]) == (200, "a1")
    assert len(lab.engines["a0"].requests) == 1


async def test_a_mistake_of_the_caller_is_not_tried_again(lab: Lab) -> None:
    lab.engines["a0"].status = 400
    status, _, told = await lab.post(lab.to("a", "a", hosts=["a0", "a1"]))
    assert (status, told["served"]) == (400, "a0")
    assert not lab.engines["a1"].requests


async def test_the_server_may_bound_the_retries_of_one_request(lab: Lab) -> None:
    lab.engines["a0"].status = 503
    status, _, told = await lab.post(lab.to("a", "a", hosts=["a0"], retries=0))
    assert (status, told["served"]) == (503, "a0")
    assert not lab.engines["a1"].requests


async def test_only_priority_groups_move_a_retry_to_another_site(lab: Lab) -> None:
    lab.engines["a0"].status = 503
    _, _, told = await lab.post(lab.to("a", "b", hosts=["a0", "b0"]))
    assert told["served"] == ("b0" if lab.style == "priority-group" else "a1")


async def test_an_unknown_site_is_a_503_in_the_shape_of_an_error(lab: Lab) -> None:
    status, headers, told = await lab.post(lab.to("nowhere", hosts=["a0"]))
    assert (status, told["error"]["code"]) == (503, "instance_unavailable")
    assert headers["retry-after"] == "1"


async def test_the_body_reaches_the_engine_unharmed(lab: Lab) -> None:
    body = json.dumps({"text": "x" * 200_000}).encode()
    _, _, told = await lab.post(lab.to("a", hosts=["a0"]), body=body)
    assert told["bytes"] == len(body)
    assert lab.engines["a0"].requests[-1][1] == body
    assert lab.server.streams[-1].body == body


async def test_a_body_that_the_server_replaced_reaches_the_engine_whole(lab: Lab) -> None:
    for body in ('{"priority":5,"longer":true}', "{}"):
        _, _, told = await lab.post(lab.to("a", hosts=["a0"], body=body))
        assert told["bytes"] == len(body)
        assert lab.engines["a0"].requests[-1][1] == body.encode()


async def test_without_groups_the_header_alone_names_the_site(lab: Lab) -> None:
    plan = {"cluster": "site-b", "hosts": lab.at("b1")}
    for _ in range(3):
        _, _, told = await lab.post(steering(**plan))
        assert told["served"] == "b1"
    lab.engines["b1"].status = 503
    _, _, told = await lab.post(steering(**plan, retries=1))
    assert told["served"] == "b0"


# --- hygiene ----------------------------------------------------------------------------------------------------------


async def test_headers_that_no_client_may_set_reach_neither_us_nor_the_engine(lab: Lab) -> None:
    spoofed = {
        "x-tokenfleet-cluster": "site-b",
        "X-TokenFleet-Request-Id": "spoofed",
        "x-gateway-destination-endpoint": lab.engines["b0"].address,
        "x-envoy-max-retries": "50",
        "x-envoy-retry-on": "5xx",
        "x-envoy-upstream-rq-timeout-ms": "1",
    }
    _, answered, told = await lab.post(spoofed)
    assert told["served"] in {"a0", "a1"}
    assert "x-tokenfleet-request-id" not in answered
    received = lab.engines[told["served"]].requests[-1][0]
    assert not spoofed.keys() & lab.server.streams[-1].headers.keys()
    assert not {name.lower() for name in spoofed} & received.keys()


async def test_headers_that_a_client_may_set_reach_us(lab: Lab) -> None:
    await lab.post({"tokenfleet-class": "batch"})
    assert lab.server.streams[-1].headers["tokenfleet-class"] == "batch"


async def test_the_server_cannot_rewrite_the_path_or_the_authorization(lab: Lab) -> None:
    headers = lab.to("a", hosts=["a0"], set={":path": "/admin", "authorization": "stolen", "x-tokenfleet-note": "yes"})
    _, _, told = await lab.post(headers)
    received = lab.engines["a0"].requests[-1][0]
    assert (told["path"], received.get("authorization"), received["x-tokenfleet-note"]) == (CHAT_PATH, None, "yes")


async def test_why_and_id_are_answered_only_where_the_server_gave_them(lab: Lab) -> None:
    _, without, _ = await lab.post(lab.to("a", hosts=["a0"]))
    assert not [name for name in without if name.startswith("x-tokenfleet-")]
    _, answered, _ = await lab.post(lab.to("a", hosts=["a0"], id="r-7", why="queue=0.8"))
    assert (answered["x-tokenfleet-request-id"], answered["x-tokenfleet-why"]) == ("r-7", "queue=0.8")


async def test_an_own_refusal_passes_unchanged(lab: Lab) -> None:
    status, headers, told = await lab.post(steering(refuse=429))
    assert (status, headers["retry-after"], told) == (429, "7", {"error": "as told"})
    status, _, told = await lab.post(steering(refuse=503))
    assert (status, told) == (503, {"error": "as told"})


async def test_a_body_over_the_limit_is_a_413_in_the_shape_of_an_error(lab: Lab) -> None:
    streams = len(lab.server.streams)
    status, _, told = await lab.post(body=b"x" * (LIMIT + 100_000))
    assert (status, told["error"]["code"], told["type"]) == (413, "request_too_large", "error")
    assert not [one for one in lab.server.streams[streams:] if one.body]
    status, _, _ = await lab.post(body=b"x" * (LIMIT - 1000))
    assert status == 200


async def test_an_abort_of_the_server_is_a_503_in_the_shape_of_an_error(lab: Lab) -> None:
    status, headers, told = await lab.post(steering(abort=True))
    assert (status, told["error"]["code"], headers["retry-after"]) == (503, "router_unavailable", "1")


async def test_a_route_can_go_around_us(lab: Lab) -> None:
    streams = len(lab.server.streams)
    _, _, told = await lab.post(path="/unrouted" + CHAT_PATH)
    assert told["path"] == CHAT_PATH
    async with lab.http.get(lab.envoy.url + "/health") as answer:
        assert answer.status == 200
    assert len(lab.server.streams) == streams


async def test_the_stream_to_us_ends_when_the_exchange_ends(lab: Lab) -> None:
    headers, body = lab.to("a", hosts=["a0"]), answering(chunks=["data: 1\n\n", 0.3, "data: [DONE]\n\n"])
    async with lab.http.post(lab.envoy.url + CHAT_PATH, data=body, headers=headers) as answer:
        await answer.content.readany()
        seen = lab.server.streams[-1]
        assert seen.ended is None
        await answer.read()
    await until(lambda: seen.ended)


# --- what the access log tells ----------------------------------------------------------------------------------------


async def entry_of(lab: Lab, request_id: str) -> Any:
    def ended() -> list[Any]:
        return [one for one in lab.server.entries(request_id) if not periodic(one)]

    return (await until(ended))[0]


def periodic(entry: Any) -> bool:
    return bool(entry.common_properties.intermediate_log_entry)


async def test_an_ended_request_is_logged_with_its_tags_and_metadata(lab: Lab) -> None:
    chunks = [0.15, "data: 1\n\n", 0.05, USAGE_CHUNK, "data: [DONE]\n\n"]
    headers = lab.to("a", "a", hosts=["dead", "a0"], id=f"log-{lab.envoy.port}", why="w", hold=0.1)
    await lab.post(headers, body=answering(chunks=chunks))
    entry = await entry_of(lab, f"log-{lab.envoy.port}")
    common = entry.common_properties
    tags = dict(common.custom_tags)
    assert own(entry) == {"id": f"log-{lab.envoy.port}", "why": "w"}
    assert usage(entry) == {"prompt_tokens": 12, "completion_tokens": 3, "cached_tokens": 8}
    assert tags.keys() == {"ttft_us"}
    assert int(tags["ttft_us"]) > 250_000, "the hold, and the engine's first token"
    assert common.upstream_request_attempt_count == 2
    assert entry.response.response_code.value == 200
    upstream = common.upstream_remote_address.socket_address
    assert f"{upstream.address}:{upstream.port_value}" == lab.engines["a0"].address
    assert common.upstream_cluster == "site-a"


async def test_the_count_of_attempts_tells_which_hosts_of_the_list_failed(lab: Lab) -> None:
    name = f"try-{lab.envoy.port}"
    lab.engines["a1"].status = 503
    await lab.post(lab.to("a", "a", "a", hosts=["dead", "a1", "a0"], id=name))
    common = (await entry_of(lab, name)).common_properties
    assert common.upstream_request_attempt_count == 3
    socket = common.upstream_remote_address.socket_address
    assert [f"{socket.address}:{socket.port_value}"] == lab.at("a0")
    assert {one for one, _ in lab.server.logged} == {"tokenfleet"}, "one log, and no other"


async def test_a_running_request_is_logged_each_half_second_with_its_first_token(lab: Lab) -> None:
    name = f"running-{lab.envoy.port}"
    chunks = [0.1, "data: 1\n\n", 1.5, "data: [DONE]\n\n"]
    call = asyncio.ensure_future(lab.post(lab.to("a", hosts=["a0"], id=name), body=answering(chunks=chunks)))
    found = await until(lambda: [one for one in lab.server.entries(name) if periodic(one)])
    assert not call.done()
    assert int(dict(found[0].common_properties.custom_tags)["ttft_us"]) > 100_000
    assert found[0].response.response_body_bytes == len("data: 1\n\n")
    await call


async def test_a_cancelled_request_is_logged_with_what_it_had(lab: Lab) -> None:
    name = f"cancel-{lab.envoy.port}"
    chunks = ["data: 1\n\n", 5, "data: [DONE]\n\n"]
    headers, body = lab.to("a", hosts=["a0"], id=name), answering(chunks=chunks)
    async with lab.http.post(lab.envoy.url + CHAT_PATH, data=body, headers=headers) as answer:
        await answer.content.readany()
        answer.close()
    entry = await entry_of(lab, name)
    assert entry.common_properties.response_flags.downstream_connection_termination
    assert int(dict(entry.common_properties.custom_tags)["ttft_us"]) > 0


ANSWERS = {
    "whole chat": (
        "json",
        {"choices": [{"message": {"content": '"usage": {"prompt_tokens": 99}'}}]}
        | {"usage": {"prompt_tokens": 5, "completion_tokens": 6, "prompt_tokens_details": None}},
        {"prompt_tokens": 5, "completion_tokens": 6},
    ),
    "whole Anthropic": (
        "json",
        {"content": [{"type": "tool_use", "input": {"usage": {"input_tokens": 77}}}]}
        | {"usage": {"input_tokens": 5, "cache_read_input_tokens": 40, "cache_creation_input_tokens": 2}}
        | {"usage": {"input_tokens": 5, "cache_read_input_tokens": 40, "output_tokens": 9}},
        {"prompt_tokens": 45, "completion_tokens": 9, "cached_tokens": 40},
    ),
    "whole Responses": (
        "json",
        {"usage": {"input_tokens": 50, "input_tokens_details": {"cached_tokens": 48}, "output_tokens": 2}}
        | {"user": None, "metadata": {"usage": "mine"}},
        {"prompt_tokens": 50, "completion_tokens": 2, "cached_tokens": 48},
    ),
    "streamed Anthropic": (
        "chunks",
        [
            ANTHROPIC_START,
            *["event: content_block_delta\ndata: {}\n\n" * 40] * 8,
            'event: message_delta\ndata: {"usage":{"output_tokens":15}}\n\n',
            'event: message_stop\ndata: {"type":"message_stop"}\n\n',
        ],
        {"prompt_tokens": 111, "completion_tokens": 15, "cached_tokens": 100},
    ),
    "streamed Responses": (
        "chunks",
        [
            'event: response.output_text.delta\ndata: {"delta":"hi"}\n\n',
            RESPONSES_END,
        ],
        {"prompt_tokens": 50, "completion_tokens": 2, "cached_tokens": 0},
    ),
    "usage torn in two": (
        "chunks",
        ["data: 1\n\n", USAGE_CHUNK[:60], 0.05, USAGE_CHUNK[60:], 0.02, "data: [DONE]\n\n"],
        {"prompt_tokens": 12, "completion_tokens": 3, "cached_tokens": 8},
    ),
    "an error within a 200": (
        "chunks",
        ["data: 1\n\n", 'data: {"error": {"message": "EngineCore died", "code": 500}}\n\n', "data: [DONE]\n\n"],
        {"stream_error": True},
    ),
    "no usage": ("chunks", ['data: {"usage":null}\n\n', "data: [DONE]\n\n"], {}),
}


@pytest.mark.parametrize("shape", ANSWERS)
async def test_token_counts_are_read_from_every_shape_of_answer(lab: Lab, shape: str) -> None:
    kind, answer, expected = ANSWERS[shape]
    name = f"{shape}-{lab.envoy.port}"
    await lab.post(lab.to("a", hosts=["a0"], id=name), body=answering(**{kind: answer}))
    assert usage(await entry_of(lab, name)) == expected
    assert lab.envoy.stat("http.tokenfleet.lua.errors") == 0


async def test_an_answer_without_token_counts_costs_envoy_no_more_than_one_with_them(lab: Lab) -> None:
    envoy = psutil.Process(lab.envoy.process.pid)
    piece = 'data: {"choices":[{"delta":{"content":"word "}}]}\n\n' * 160

    async def seconds(*ends: str) -> float:
        body = answering(chunks=[piece, 0.02, piece, 0.02, *ends])
        begun = envoy.cpu_times().user
        await asyncio.gather(*(lab.post(lab.to("a", hosts=["a0"]), body=body) for _ in range(20)))
        return float(envoy.cpu_times().user - begun)

    await seconds()
    counted, uncounted = await seconds(USAGE_CHUNK), await seconds("data: [DONE]\n\n")
    assert uncounted < 3 * counted + 0.3, (counted, uncounted)


# --- other configurations ---------------------------------------------------------------------------------------------


@pytest.fixture
def run(people: Any, tmp_path: Path) -> Iterator[Any]:
    """Start more Envoys, each its own configuration; all end with the test."""
    server, engines, http = people
    sites = {site: [engines[f"{site}{i}"].address for i in range(2)] for site in ("a", "b")}
    with ExitStack() as stack:

        def start(gateway: dict[str, Any] | None = None, **mesh: Any) -> Lab:
            folder = tmp_path / f"envoy-{time.monotonic_ns()}"
            config = write(policy_of(sites, **(gateway or {})), a_mesh(server, **mesh))
            return Lab(stack.enter_context(an_envoy(config, folder)), server, engines, "", "", http)

        yield start


@pytest.mark.parametrize("mode", ["buffered", "full-duplex"])
async def test_without_a_server_requests_are_refused(run: Any, mode: str) -> None:
    lab = run(servers=(dead_address(),), body_mode=mode)
    status, headers, told = await lab.post()
    assert (status, told["error"]["code"], headers["retry-after"]) == (503, "router_unavailable", "1")


async def test_without_a_server_requests_go_home_if_envoy_may_do_without_us(run: Any) -> None:
    lab = run(servers=(dead_address(),), failure_mode_allow=True)
    status, _, told = await lab.post()
    assert (status, told["served"] in {"a0", "a1"}) == (200, True)


@pytest.mark.parametrize("mode", ["buffered", "full-duplex"])
async def test_ten_megabytes_pass_within_the_limit(run: Any, mode: str) -> None:
    lab = run(gateway={"max_body_bytes": 16_777_216}, body_mode=mode)
    body = b"x" * 10_000_000
    _, _, told = await lab.post(lab.to("b", hosts=["b0"]), body=body)
    assert (told["served"], told["bytes"]) == ("b0", len(body))
    status, _, told = await lab.post(lab.to("b", hosts=["b0"]), body=b"x" * 17_000_000)
    assert (status, told["error"]["code"]) == (413, "request_too_large")


MAY = [("buffered", False), ("buffered", True), ("full-duplex", False)]
"""Envoy cannot do without us in the fourth case: the body of the request is in our hands."""


@pytest.mark.parametrize(("mode", "allow"), MAY)
async def test_what_a_dying_server_holds_is_refused_unless_envoy_may_do_without_us(
    run: Any, mode: str, allow: bool
) -> None:
    server = await Scripted().start()
    lab = run(servers=(server.address,), body_mode=mode, failure_mode_allow=allow)
    call = asyncio.ensure_future(lab.post(lab.to("b", hosts=["b0"], gate=True)))
    await until(lambda: server.streams and server.streams[-1].body)
    await server.stop()
    status, _, told = await call
    if allow:
        assert (status, told["served"] in {"a0", "a1"}) == (200, True)
    else:
        assert (status, told["error"]["code"]) == (503, "router_unavailable")


@pytest.mark.parametrize(("mode", "allow"), MAY)
async def test_a_server_that_dies_during_an_answer_cuts_it_unless_envoy_may_do_without_us(
    run: Any, mode: str, allow: bool
) -> None:
    server = await Scripted().start()
    lab = run(servers=(server.address,), body_mode=mode, failure_mode_allow=allow)
    body = answering(chunks=["data: 1\n\n", 1.0, "end"])
    async with lab.http.post(lab.envoy.url + CHAT_PATH, data=body, headers=lab.to("b", hosts=["b0"])) as answer:
        await answer.content.readany()
        await server.stop()
        if allow:
            assert await answer.read() == b"end"
        else:
            with pytest.raises(aiohttp.ClientPayloadError):
                await answer.read()


async def test_a_dead_server_beside_a_living_one_costs_no_request(run: Any, people: Any) -> None:
    lab = run(servers=(dead_address(), people[0].address))
    answers = await asyncio.gather(*(lab.post(lab.to("b", hosts=["b1"])) for _ in range(60)))
    assert {(status, told["served"]) for status, _, told in answers} == {(200, "b1")}


async def test_a_server_on_a_unix_socket_is_reached(run: Any, tmp_path: Path) -> None:
    server = await Scripted().start(f"unix:{tmp_path / 'w0.sock'}")
    try:
        lab = run(servers=(server.address,))
        _, _, told = await lab.post(lab.to("b", hosts=["b0"]))
        assert told["served"] == "b0"
    finally:
        await server.stop()


async def test_a_server_with_mutual_tls_is_reached_and_no_other(run: Any, tmp_path: Path) -> None:
    authority, stranger = trustme.CA(), trustme.CA()
    files = tls_files(authority, tmp_path / "envoy")
    server = await Scripted().start(tls=authority.issue_cert("tokenfleet.test"), ca=authority)
    impostor = await Scripted().start(tls=stranger.issue_cert("tokenfleet.test"), ca=authority)
    try:
        lab = run(servers=(server.address,), tls=MutualTls(*files, "tokenfleet.test"))
        _, _, told = await lab.post(lab.to("b", hosts=["b0"]))
        assert told["served"] == "b0"
        for address, name in ((impostor.address, "tokenfleet.test"), (server.address, "other.test")):
            status, _, _ = await run(servers=(address,), tls=MutualTls(*files, name)).post()
            assert status == 503
    finally:
        await server.stop()
        await impostor.stop()


def tls_files(authority: trustme.CA, folder: Path) -> tuple[Path, Path, Path]:
    """Return the files of Envoy's certificate, its key, and the authority."""
    folder.mkdir()
    mine = authority.issue_cert("envoy.test")
    files = (folder / "cert.pem", folder / "key.pem", folder / "ca.pem")
    mine.cert_chain_pems[0].write_to_path(files[0])
    mine.private_key_pem.write_to_path(files[1])
    authority.cert_pem.write_to_path(files[2])
    return files


async def test_a_changed_endpoint_file_is_picked_up(run: Any, tmp_path: Path) -> None:
    folder = tmp_path / "eds"
    eds_files.write(folder, {"site-a": [], "site-b": []})
    lab = run(eds=folder)
    status, _, told = await lab.post(lab.to("a", hosts=["a0"]))
    assert (status, told["error"]["code"]) == (503, "instance_unavailable")
    eds_files.write(folder, {"site-a": lab.at("a0", "a1")})
    await until(lambda: f"{lab.engines['a1'].address}::health_flags" in lab.envoy.get("/clusters"))
    assert (await lab.post(lab.to("a", hosts=["a1"])))[2]["served"] == "a1"
    eds_files.write(folder, {"site-a": lab.at("a0")})
    await until(lambda: f"{lab.engines['a1'].address}::health_flags" not in lab.envoy.get("/clusters"))
    # Told a host that its cluster no longer lists, Envoy falls back to one that it does.
    assert (await lab.post(lab.to("a", hosts=["a1"])))[2]["served"] == "a0"


async def test_a_hold_outlasts_the_time_that_an_engine_may_be_silent(run: Any) -> None:
    lab = run(stall_s=0.5)
    status, _, told = await lab.post(lab.to("b", hosts=["b0"], hold=1.5))
    assert (status, told["served"]) == (200, "b0")


async def test_an_engine_that_goes_silent_is_cut(run: Any) -> None:
    lab = run(stall_s=0.5)
    chunks = ["data: 1\n\n", 8, "data: [DONE]\n\n"]
    begun = time.monotonic()
    with pytest.raises(aiohttp.ClientPayloadError):
        await lab.post(lab.to("a", hosts=["a0"]), body=answering(chunks=chunks))
    assert time.monotonic() - begun < 5


async def test_the_file_log_holds_one_line_a_request(run: Any, tmp_path: Path) -> None:
    path = tmp_path / "access.json"
    lab = run(access_log=str(path))
    await lab.post(lab.to("b", hosts=["b0"], id="filed"))

    def lines() -> list[Any]:
        return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]

    line = (await until(lines, 15))[0]
    assert (line["id"], line["status"], line["cluster"]) == ("filed", 200, "site-b")


@pytest.mark.parametrize(("mode", "signalled"), [("buffered", True), ("full-duplex", False)])
async def test_where_no_trailers_can_be_asked_for_only_a_buffered_body_keeps_the_in_flight_signal(
    people: Any, tmp_path: Path, mode: Any, signalled: bool
) -> None:
    server, engines, http = people
    told = YAML(typ="safe").load(write(policy_of({"a": [engines["a0"].address]}), a_mesh(server, body_mode=mode)))
    manager = told["static_resources"]["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"]
    [ours] = [one["typed_config"] for one in manager["http_filters"] if one["name"].endswith("ext_proc")]
    # What Envoy Gateway writes: an EnvoyExtensionPolicy has no words for trailers.
    ours["processing_mode"]["response_trailer_mode"] = "SKIP"
    with an_envoy(json.dumps(told), tmp_path) as envoy:
        body = answering(chunks=["data: 1\n\n", 1.0, "data: [DONE]\n\n"])
        plan = steering(cluster="site-a", hosts=[engines["a0"].address])
        async with http.post(envoy.url + CHAT_PATH, data=body, headers=plan) as answer:
            await answer.content.readany()
            seen = server.streams[-1]
            if signalled:
                await asyncio.sleep(0.3)
                assert seen.ended is None
            else:
                await until(lambda: seen.ended, 0.8)
            await answer.read()
        await until(lambda: seen.ended)


@pytest.mark.parametrize("mode", ["buffered", "full-duplex"])
async def test_more_requests_than_envoys_default_allows_can_be_held(run: Any, mode: str) -> None:
    lab, held = run(body_mode=mode), 1200
    lab.server.gate.clear()
    streams = len(lab.server.streams)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
        many = replace(lab, http=http)
        calls = [asyncio.ensure_future(many.post(steering(refuse=429, gate=True))) for _ in range(held)]
        await until(lambda: len([one for one in lab.server.streams[streams:] if one.body]) == held, 30)
        assert not [one for one in calls if one.done()]
        lab.server.gate.set()
        answers = await asyncio.gather(*calls)
    assert {status for status, _, _ in answers} == {429}
