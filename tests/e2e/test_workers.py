"""Two workers around one dispatcher: who dies, who takes over, and what is given back."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio

from tests.e2e.calls import Client, a_body, a_client
from tests.e2e.gateway import Gateway, a_gateway
from tests.polling import eventually

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="module")]


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    with a_gateway(tmp_path_factory.mktemp("workers"), workers=2) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="module")
async def client(gateway: Gateway) -> AsyncIterator[Client]:
    await eventually(lambda: gateway.debug().get("workers") == 2, 20)
    async with a_client(gateway) as one:
        yield one
    await eventually(lambda: gateway.in_flight() == 0)
    await eventually(lambda: all(gateway.debug(page)["in_flight"] == 0 for page in (1, 2)))


async def test_both_workers_serve_and_one_dispatcher_counts(client: Client) -> None:
    gateway = client.gateway
    answers = await asyncio.gather(*(client.post(a_body(f"{i} birds", max_tokens=2)) for i in range(40)))
    assert {one.status for one in answers} == {200}
    streams = [gateway.metric("tokenfleet_streams_total", page) for page in (1, 2)]
    assert min(streams) > 5, streams
    await eventually(lambda: gateway.metric("tokenfleet_requests_ended_total", ending="completed") >= 40)
    assert all(not one["alone"] for one in gateway.verdicts())


async def test_a_killed_worker_frees_what_it_held_and_is_started_again(client: Client) -> None:
    gateway = client.gateway
    victim = gateway.pids("worker")[0]
    streams = [asyncio.ensure_future(client.post(a_body(f"{i} x", max_tokens=1000, stream=True))) for i in range(8)]
    await eventually(lambda: gateway.in_flight() == 8)
    os.kill(victim, signal.SIGKILL)
    ended = await asyncio.gather(*streams, return_exceptions=True)
    cut = [one for one in ended if isinstance(one, BaseException) or "[DONE]" not in one.text]
    assert 0 < len(cut) < 8, "Envoy cuts the dead worker's responses, and no other"
    await eventually(lambda: gateway.in_flight() == 0)
    await eventually(lambda: gateway.debug().get("workers") == 2, 20)
    assert victim not in gateway.pids("worker")


async def test_workers_decide_alone_while_the_dispatcher_is_away_and_announce_what_runs(client: Client) -> None:
    gateway = client.gateway
    async with client.stream(a_body("long", max_tokens=3000)) as running:
        await eventually(lambda: gateway.in_flight() == 1)
        os.kill(gateway.pids("dispatcher")[0], signal.SIGKILL)
        answers = [await client.post(a_body(f"{i} fish", max_tokens=2)) for i in range(6)]
        assert {one.status for one in answers} == {200}
        assert any(one["alone"] for one in gateway.verdicts())
        bound = await client.post(a_body(), headers={"x-tenant": "euro", "tokenfleet-residency": "us"})
        assert bound.status == 403, "alone does not mean unlawful"
        # The new dispatcher learns of the request that runs.
        await eventually(lambda: gateway.debug().get("workers") == 2, 20)
        await eventually(lambda: gateway.in_flight() == 1)
        assert sum(gateway.metric("tokenfleet_worker_verdicts_alone", page) for page in (1, 2)) >= 1
        assert running.status == 200
    await eventually(lambda: gateway.in_flight() == 0)


async def test_a_frozen_dispatcher_is_away_too(client: Client) -> None:
    gateway = client.gateway
    frozen = gateway.pids("dispatcher")[0]
    os.kill(frozen, signal.SIGSTOP)
    try:
        async with asyncio.timeout(15):
            assert (await client.post(a_body())).status == 200
    finally:
        os.kill(frozen, signal.SIGCONT)
    await eventually(lambda: gateway.debug().get("workers") == 2, 20)

    async def decided() -> bool:
        await client.post(a_body())
        return not gateway.verdicts()[-1]["alone"]

    await eventually(decided, 20)


async def test_an_ordered_stop_lets_answers_finish_and_decides_nothing_alone(client: Client) -> None:
    gateway = client.gateway
    streams = [asyncio.ensure_future(client.post(a_body(f"{i} y", max_tokens=150, stream=True))) for i in range(20)]
    await eventually(lambda: gateway.in_flight() == 20)
    before = len(gateway.verdicts())
    began = time.monotonic()
    await asyncio.to_thread(gateway.stop, "server")
    assert time.monotonic() - began < 15
    answers = await asyncio.gather(*streams)
    assert all(one.text.rstrip().endswith("data: [DONE]") for one in answers)
    assert gateway.verdicts()[before:] == []
    lost = [line for line in gateway.log("server").read_text().splitlines() if "deciding alone" in line]
    stopped = gateway.log("server").read_text().rpartition('"event":"draining"')[2]
    assert "deciding alone" not in stopped, lost[-1]
    await asyncio.to_thread(gateway.start_server)

    async def served() -> bool:
        return (await client.post(a_body())).status == 200

    await eventually(served)
