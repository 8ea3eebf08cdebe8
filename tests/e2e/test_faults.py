"""Parts of the gateway go away under traffic, and come back."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import pytest_asyncio

from tests.e2e.calls import Answer, Client, a_body, a_client
from tests.e2e.gateway import OTHER, Gateway, a_gateway
from tests.polling import eventually

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="module")]


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    with a_gateway(tmp_path_factory.mktemp("faults")) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="module")
async def client(gateway: Gateway) -> AsyncIterator[Client]:
    async with a_client(gateway) as one:
        yield one
    await eventually(lambda: gateway.in_flight() == 0)


async def ready(gateway: Gateway) -> None:
    await eventually(lambda: set(gateway.states().values()) == {"ready"} and not gateway.resting(), 20)


async def test_redis_gone_keeps_routing_says_so_and_recovers(client: Client) -> None:
    gateway = client.gateway
    gateway.redis.stop()
    await eventually(lambda: gateway.metric("tokenfleet_store_away") == 1)
    assert (await client.post(a_body())).status == 200
    # Past the staleness bound nothing is known of anybody: own counts decide.
    await eventually(lambda: gateway.metric("tokenfleet_fleet_blind") == 1, 20)
    euro = {"x-tenant": "euro"}
    answers = await asyncio.gather(*(client.post(a_body(f"{i} sheep"), headers=euro) for i in range(12)))
    assert {one.status for one in answers} == {200}
    assert {one.instance for one in answers} == {"a-0", "a-1"}
    gateway.redis.start()
    await eventually(lambda: gateway.metric("tokenfleet_store_away") == 0, 20)
    await eventually(lambda: gateway.metric("tokenfleet_fleet_blind") == 0, 20)
    await ready(gateway)


async def test_collector_gone_keeps_routing_then_least_request_among_the_living(client: Client) -> None:
    gateway = client.gateway
    gateway.stop("collector", signal.SIGKILL)
    assert (await client.post(a_body())).status == 200
    await eventually(lambda: gateway.metric("tokenfleet_fleet_blind") == 1, 20)
    gateway.fault("a-1", kind="503")
    try:
        answers = [await client.post(a_body(f"{i} goats")) for i in range(12)]
        assert {one.status for one in answers} == {200}
        assert {one.instance for one in answers} == {"a-0"}
    finally:
        gateway.fault("a-1", kind="none")
    gateway.start_collector()
    await eventually(lambda: gateway.metric("tokenfleet_fleet_blind") == 0, 20)
    await ready(gateway)


async def test_a_site_whose_engines_die_is_left_and_taken_back(client: Client) -> None:
    gateway = client.gateway
    gateway.stop("engines-a", signal.SIGKILL)
    # At once, before any scrape: no host of the site answers, so the caller is told, not left hanging.
    first = await client.post(a_body())
    assert first.status in (200, 503)
    await eventually(lambda: [gateway.states()[f"a-{i}"] for i in range(3)] == ["lost"] * 3, 20)
    away = await client.post(a_body())
    assert away.status == 200
    assert away.instance.startswith("b-")
    bound = await client.post(a_body(), headers={"x-tenant": "euro"})
    assert bound.status == 503
    assert int(bound.headers["retry-after"]) >= 1
    assert bound.headers["x-tokenfleet-reason"] == "no_instance"
    gateway.start_engines("a")
    await ready(gateway)
    assert (await client.post(a_body())).instance.startswith("a-")


async def test_a_model_whose_only_instances_are_gone_is_503_with_retry_after(client: Client) -> None:
    gateway = client.gateway
    gateway.fault("a-2", kind="503")
    gateway.fault("b-2", kind="503")
    try:
        answer = await client.post(a_body(model=OTHER))
        assert answer.status == 503
    finally:
        gateway.fault("a-2", kind="none")
        gateway.fault("b-2", kind="none")
    await ready(gateway)


async def test_a_drained_server_lets_responses_finish_and_refuses_nobody_it_holds(client: Client) -> None:
    gateway = client.gateway
    async with client.stream(a_body(max_tokens=300)) as answer:
        await eventually(lambda: gateway.in_flight() == 1)
        gateway.stop("server", signal.SIGTERM)
        rest = (await answer.content.read()).decode()
    assert rest.rstrip().endswith("data: [DONE]"), "a clean close lets the response finish"
    gone = await client.post(a_body())
    assert gone.status == 503, "nobody decides, so nobody is let through unrouted"
    gateway.start_server()
    await eventually(lambda: gateway.envoy is not None and bool(gateway.envoy.get("/clusters")))
    assert await eventually_served(client)


async def test_a_killed_server_fails_what_it_holds_and_takes_new_ones_when_back(client: Client) -> None:
    gateway = client.gateway
    gateway.stop("server", signal.SIGKILL)
    answer = await client.post(a_body())
    assert answer.status == 503
    gateway.start_server()
    assert await eventually_served(client)


async def eventually_served(client: Client) -> bool:
    async def served() -> bool:
        return (await client.post(a_body())).status == 200

    await eventually(served, 20)
    return True


async def test_unrouted_paths_need_no_server(client: Client) -> None:
    gateway = client.gateway
    gateway.stop("server", signal.SIGTERM)
    try:
        assert (await client.post(a_body(), "/unrouted/v1/chat/completions")).status == 200
    finally:
        gateway.start_server()
    assert await eventually_served(client)


async def test_an_operator_may_choose_the_fallback_when_all_servers_are_gone(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    with a_gateway(tmp_path_factory.mktemp("open"), failure_mode_allow=True) as gateway:
        async with a_client(gateway) as client:
            gateway.stop("server", signal.SIGKILL)
            answers = [await client.post(a_body(f"{i} cats")) for i in range(12)]
            assert {one.instance[0] for one in answers} == {"a"}, "the fallback stays in the home site"
            # Envoy knows no models: the home instance that has another one says so itself.
            assert {one.status for one in answers if one.instance != "a-2"} == {200}
            assert {one.status for one in answers if one.instance == "a-2"} <= {404}


async def test_a_killed_worker_cuts_no_answer_and_what_it_held_goes_home_where_envoy_may_do_without_us(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    one_each = {"max_in_flight": 1, "classes": [{"name": "standard", "longest_wait_ms": 20000, "max_waiting": 20}]}
    euro = {"x-tenant": "euro"}
    folder = tmp_path_factory.mktemp("killed")
    with a_gateway(folder, workers=2, failure_mode_allow=True, files={"slomax": one_each}) as gateway:
        await eventually(lambda: gateway.debug().get("workers") == 2, 20)
        async with a_client(gateway) as client:

            def ask(number: int, **fields: Any) -> asyncio.Future[Answer]:
                return asyncio.ensure_future(client.post(a_body(f"{number} x", **fields), headers=euro))

            running = [ask(i, max_tokens=400, stream=True) for i in range(2)]
            await eventually(lambda: gateway.in_flight() == 2)
            waiting = [ask(i, max_tokens=2) for i in range(8)]
            await eventually(lambda: sum(gateway.debug()["held"].values()) == 8)
            victim = 0 if gateway.debug(1)["in_flight"] else 1
            os.kill(gateway.pids("worker")[victim], signal.SIGKILL)
            await eventually(lambda: any(one.done() for one in waiting))
            assert not any(one.done() for one in running), "it did not wait for a place"
            answers = await asyncio.gather(*waiting)
            assert all(one.text.rstrip().endswith("data: [DONE]") for one in await asyncio.gather(*running))
    home = [one for one in answers if "x-tokenfleet-request-id" not in one.headers]
    assert 0 < len(home) < len(answers), "the other worker's were steered"
    assert {one.instance[0] for one in home} == {"a"}
    assert {one.status for one in answers if one.instance != "a-2"} == {200}
