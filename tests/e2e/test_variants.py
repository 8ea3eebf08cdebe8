"""Choices of an operator: retries that change the site, shadow mode, mutual TLS, refused paths."""

import asyncio
import signal
from pathlib import Path

import grpc
import pytest
import trustme
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from tests.e2e.calls import a_body, a_client
from tests.e2e.gateway import OTHER, a_gateway
from tests.polling import eventually

pytestmark = pytest.mark.e2e


@pytest.mark.parametrize("body_mode", ["buffered", "full-duplex"])
async def test_with_priority_groups_a_retry_moves_to_the_next_lawful_site(tmp_path: Path, body_mode: str) -> None:
    files = {"gateway": {"cross_site_retries": True}}
    with a_gateway(tmp_path, files=files, style="priority-group", body_mode=body_mode) as gateway:
        async with a_client(gateway) as client:
            assert (await client.post(a_body())).instance.startswith("a-")
            # The only instance of its model in the home site fails: the next attempt is in the other site.
            gateway.fault("a-2", kind="503")
            answer = await client.post(a_body(model=OTHER))
            assert answer.status == 200
            assert answer.instance == "b-2"
            bound = await client.post(a_body(model=OTHER), headers={"x-tenant": "euro"})
            assert bound.status == 503, "never where the data may not go"
            # Engines killed between pick and connect: the whole home site, before any scrape has told.
            gateway.stop("engines-a", signal.SIGKILL)
            moved = await client.post(a_body())
            assert moved.status == 200
            assert moved.instance.startswith("b-")
            await eventually(
                lambda: gateway.metric("tokenfleet_requests_ended_total", site="b", ending="completed") >= 2
            )
            await eventually(lambda: gateway.in_flight() == 0)


async def test_in_shadow_mode_everything_is_decided_and_only_the_share_is_steered(tmp_path: Path) -> None:
    with a_gateway(tmp_path, files={"gateway": {"steer_percent": 0}}) as gateway:
        async with a_client(gateway) as client:
            # Bound to site b, yet not steered: the fallback of the configuration, home's least request, serves it.
            answers = [await client.post(a_body(f"{i} dogs"), headers={"x-tenant": "states"}) for i in range(8)]
            assert {one.instance[0] for one in answers} == {"a"}
            verdicts = gateway.verdicts()
            assert [(one["verdict"], one["site"]) for one in verdicts] == [("shadow", "b")] * 8
            assert gateway.metric("tokenfleet_verdicts_total", verdict="shadow") == 8
            assert gateway.metric("tokenfleet_shadow_verdicts_total", would="admit") == 8
            assert gateway.in_flight() == 0, "what is not steered takes no place"
            # What would be refused is answered by an engine, in the engine's own words.
            unknown = await client.post(a_body(model="no-such-model"))
            assert (unknown.status, unknown.instance[0]) == (404, "a")
            unlawful = await client.post(a_body(), headers={"x-tenant": "euro", "tokenfleet-residency": "us"})
            assert unlawful.status == 200
            garbled = await client.post(b"not json")
            assert garbled.instance.startswith("a-")
            elsewhere = await client.post(a_body(), "/v1/unheard-of")
            assert elsewhere.instance.startswith("a-")
            assert gateway.metric("tokenfleet_shadow_verdicts_total", would="unknown_model") == 1
            assert gateway.metric("tokenfleet_shadow_verdicts_total", would="residency") == 1


async def test_in_shadow_mode_nobody_is_held(tmp_path: Path) -> None:
    slomax = {"max_in_flight": 1, "classes": [{"name": "standard", "longest_wait_ms": 20000}]}
    with a_gateway(tmp_path, files={"gateway": {"steer_percent": 0}, "slomax": slomax}) as gateway:
        async with a_client(gateway) as client:
            calls = [client.post(a_body(f"{i} owls", max_tokens=50)) for i in range(12)]
            assert {one.status for one in await asyncio.gather(*calls)} <= {200, 404}
            assert gateway.metric("tokenfleet_held_seconds_total") == 0


async def test_other_paths_are_refused_where_the_policy_says_so(tmp_path: Path) -> None:
    with a_gateway(tmp_path, files={"gateway": {"other_paths": "refuse"}}) as gateway:
        async with a_client(gateway) as client:
            answer = await client.call("GET", "/v1/something")
            assert answer.status == 404
            assert answer.json["error"]["code"] == "not_found"
            assert (await client.post(a_body())).status == 200
            # Health and reflection are beside ext_proc, on the same socket.
            async with grpc.aio.insecure_channel(gateway.sockets[0]) as channel:
                health = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
                assert health.status == health_pb2.HealthCheckResponse.SERVING
                asked = reflection_pb2.ServerReflectionRequest(list_services="")
                call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(iter([asked]))
                listed = {one.name async for told in call for one in told.list_services_response.service}
                assert "envoy.service.ext_proc.v3.ExternalProcessor" in listed


async def test_envoy_and_the_server_trust_each_other_by_certificate(tmp_path: Path) -> None:
    ca = trustme.CA()
    files: dict[str, dict[str, Path]] = {}
    for name in ("server", "envoy"):
        leaf = ca.issue_cert(f"{name}.test")
        files[name] = {
            "certificate": tmp_path / f"{name}.crt",
            "key": tmp_path / f"{name}.key",
            "ca": tmp_path / "ca.crt",
        }
        leaf.cert_chain_pems[0].write_to_path(str(files[name]["certificate"]))
        leaf.private_key_pem.write_to_path(str(files[name]["key"]))
    ca.cert_pem.write_to_path(str(tmp_path / "ca.crt"))
    with a_gateway(tmp_path / "g", tls=files) as gateway:
        async with a_client(gateway) as client:
            assert (await client.post(a_body())).status == 200
            host = gateway.sockets[0]
            async with grpc.aio.insecure_channel(host) as channel:
                with pytest.raises(grpc.aio.AioRpcError):
                    await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=5)


async def test_cancelled_while_starting_to_decide_leaves_nothing(tmp_path: Path) -> None:
    with a_gateway(tmp_path) as gateway:
        async with a_client(gateway) as client:
            for delay in (0.0, 0.001, 0.002, 0.004, 0.008):
                calls = [asyncio.ensure_future(client.post(a_body(f"{i}", max_tokens=500))) for i in range(10)]
                await asyncio.sleep(delay)
                for call in calls:
                    call.cancel()
            await eventually(lambda: gateway.in_flight() == 0)
            assert gateway.debug()["prefill_tokens_in_flight"] == 0
            assert sum(gateway.debug()["held"].values()) == 0
            assert (await client.post(a_body())).status == 200
