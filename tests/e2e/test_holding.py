"""Held requests: one place an instance, so that whoever comes third waits at the gateway."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio

from tests.e2e.calls import Client, a_body, a_client
from tests.e2e.gateway import Gateway, a_gateway
from tests.polling import eventually

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="module")]

SLOMAX = {
    "max_in_flight": 1,
    "classes": [
        {"name": "urgent", "priority": 5, "longest_wait_ms": 20000, "when": {"tiers": ["gold"]}},
        {"name": "standard", "longest_wait_ms": 20000, "max_waiting": 3},
    ],
}
TENANTS = {"tenants": {"euro": {"jurisdictions": ["eu"]}, "vip": {"tier": "gold", "jurisdictions": ["eu"]}}}
EURO = {"x-tenant": "euro"}
LONG = a_body("a long story", max_tokens=2000)


@pytest.fixture(scope="module", params=[1, 2], ids=["one-worker", "two-workers"])
def gateway(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    files = {"slomax": SLOMAX, "tenants": TENANTS}
    with a_gateway(tmp_path_factory.mktemp("holding"), files=files, workers=request.param) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="module")
async def client(gateway: Gateway) -> AsyncIterator[Client]:
    await eventually(lambda: gateway.in_flight() == 0)
    async with a_client(gateway) as one:
        yield one
    await eventually(lambda: gateway.in_flight() == 0)
    assert sum(gateway.debug()["held"].values()) == 0


def held(gateway: Gateway) -> int:
    return sum(gateway.debug()["held"].values())


async def test_a_held_request_runs_when_a_place_is_free(client: Client) -> None:
    gateway = client.gateway
    async with client.stream(LONG, EURO), client.stream(LONG, EURO):
        waiting = asyncio.ensure_future(client.post(a_body(), headers=EURO | {"tokenfleet-debug": "1"}))
        await eventually(lambda: held(gateway) == 1)
        assert not waiting.done()
    answer = await waiting
    assert answer.status == 200
    wait_s = float(answer.why.rpartition("held ")[2].rstrip("s"))
    assert wait_s > 0.002, "held, not only decided"


async def test_a_client_that_leaves_while_held_leaves_the_line(client: Client) -> None:
    gateway = client.gateway
    async with client.stream(LONG, EURO), client.stream(LONG, EURO):
        waiting = asyncio.ensure_future(client.post(a_body(), headers=EURO))
        await eventually(lambda: held(gateway) == 1)
        waiting.cancel()
        await eventually(lambda: held(gateway) == 0)
        assert gateway.in_flight() == 2


async def test_a_wait_that_is_over_is_429_with_retry_after(client: Client) -> None:
    async with client.stream(LONG, EURO), client.stream(LONG, EURO):
        answer = await client.post(a_body(), headers=EURO | {"tokenfleet-deadline-ms": "300"})
        assert answer.status == 429
        assert int(answer.headers["retry-after"]) >= 1
        assert answer.headers["x-tokenfleet-reason"] == "deadline"
        assert answer.json["error"]["type"] == "rate_limit_error"


async def test_a_full_line_is_429_and_the_others_go_on(client: Client) -> None:
    gateway = client.gateway
    async with client.stream(LONG, EURO), client.stream(LONG, EURO):
        waiting = [asyncio.ensure_future(client.post(a_body(max_tokens=2), headers=EURO)) for _ in range(3)]
        await eventually(lambda: held(gateway) == 3)
        answer = await client.post(a_body(), headers=EURO)
        assert answer.status == 429
        assert answer.headers["x-tokenfleet-reason"] == "line_full"
    assert {one.status for one in await asyncio.gather(*waiting)} == {200}


async def test_a_higher_class_goes_first(client: Client) -> None:
    gateway = client.gateway
    done: list[str] = []

    async def ask(tenant: str) -> None:
        await client.post(a_body(max_tokens=2), headers={"x-tenant": tenant})
        done.append(tenant)

    async with client.stream(LONG, EURO):
        async with client.stream(LONG, EURO):
            first = [asyncio.ensure_future(ask("euro")) for _ in range(2)]
            await eventually(lambda: held(gateway) == 2)
            last = asyncio.ensure_future(ask("vip"))
            await eventually(lambda: held(gateway) == 3)
        await asyncio.gather(*first, last)
    assert done[0] == "vip"


async def test_held_requests_survive_the_loss_of_the_dispatcher(client: Client) -> None:
    gateway = client.gateway
    if gateway.workers == 1:
        pytest.skip("one process has no dispatcher to lose")
    async with client.stream(LONG, EURO), client.stream(LONG, EURO):
        waiting = [asyncio.ensure_future(client.post(a_body(f"{i}", max_tokens=2), headers=EURO)) for i in range(3)]
        await eventually(lambda: held(gateway) == 3)
        lost = gateway.pids("dispatcher")[0]
        os.kill(lost, signal.SIGKILL)
        await eventually(lambda: gateway.debug().get("workers") == 2 and lost not in gateway.pids("dispatcher"), 30)
        await eventually(lambda: held(gateway) + sum(one.done() for one in waiting) >= 3)
    answers = await asyncio.gather(*waiting)
    assert {one.status for one in answers} == {200}
