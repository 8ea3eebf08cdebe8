"""What a server sees of the fleet while the store and the collector come and go."""

import asyncio
import math
from collections.abc import Sequence

import pytest
from structlog.testing import capture_logs

from extproc.adapters.discovery import listed
from extproc.adapters.fleet_view import RENEW_S, FleetView
from extproc.adapters.memory_store import MemoryStore
from extproc.model import Fleet, Reading, State
from extproc.ports import StoreAway
from tests.builders import a_policy, a_reading
from tests.polling import eventually

POLICY = a_policy(fleet={"telemetry": {"refresh_ms": 1}})
BOUND = POLICY.fleet.telemetry.lost_after_ms / 1000
EXPIRE = POLICY.fleet.telemetry.expire_ms / 1000


class World:
    """A clock, a store that may go away, a view, and the snapshots it handed over."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.away = False
        self.rows = MemoryStore(lambda: self.now)
        self.fleets: list[Fleet] = []
        self.view = FleetView(POLICY, self, self.fleets.append, lambda: self.now)

    async def write(self, readings: Sequence[Reading], expire_s: float) -> None:
        await self.rows.write(readings, expire_s)

    async def drop(self, names: Sequence[str]) -> None:
        await self.rows.drop(names)

    async def read(self) -> Sequence[Reading]:
        if self.away:
            raise StoreAway("told to")
        return await self.rows.read()

    async def close(self) -> None:
        await self.rows.close()

    async def collected(self, *sites: int, **fields: object) -> None:
        """Write what a living collector would, of the policy's instances with these numbers."""
        instances = listed(POLICY)
        await self.write([a_reading(instances[i], at=self.now, **fields) for i in sites or range(4)], EXPIRE)

    async def look(self) -> Fleet:
        await self.view.refresh()
        return self.fleets[-1]


def states(fleet: Fleet) -> list[State]:
    return [state for site in fleet.sites for state in site.states]


async def test_before_any_reading_the_policys_instances_are_starting() -> None:
    world = World()
    fleet = await world.look()
    assert states(fleet) == [State.STARTING] * 4
    assert fleet.blind
    assert world.view.age_s == math.inf
    assert not world.view.away


async def test_readings_become_a_snapshot_and_newer_ones_replace_it() -> None:
    world = World()
    await world.collected(waiting=2.0)
    first = await world.look()
    assert states(first) == [State.READY] * 4
    world.now += 0.1
    await world.collected(0, waiting=7.0)
    second = await world.look()
    assert second.sites[0].waiting.tolist() == [7.0, 2.0]
    assert first.sites[0].waiting.tolist() == [2.0, 2.0]


async def test_without_news_no_snapshot_is_built_until_ages_need_it() -> None:
    world = World()
    await world.collected()
    for _ in range(4):
        await world.look()
        world.now += RENEW_S / 5
    assert len(world.fleets) == 1
    world.now += RENEW_S
    fleet = await world.look()
    assert len(world.fleets) == 2
    assert fleet.sites[0].age_s[0] == pytest.approx(RENEW_S * 9 / 5)


async def test_the_moment_of_blindness_is_told_at_once() -> None:
    world = World()
    await world.collected()
    world.now += BOUND - 0.01
    assert not (await world.look()).blind
    world.now += 0.02
    assert (await world.look()).blind
    count = len(world.fleets)
    world.now += 0.01
    await world.look()
    assert len(world.fleets) == count


async def test_a_silent_collector_leaves_the_living_routable_beyond_the_stores_expiry() -> None:
    world = World()
    await world.collected(0, 1, 2)
    await world.collected(3, state=State.LOST)
    await world.look()
    world.now += EXPIRE + 1
    assert list(await world.read()) == []
    fleet = await world.look()
    assert fleet.blind
    assert states(fleet) == [State.READY, State.READY, State.READY, State.LOST]
    assert world.view.age_s == EXPIRE + 1
    await world.collected(0, 1)
    fleet = await world.look()
    assert not fleet.blind
    assert states(fleet) == [State.READY, State.READY, State.STARTING, State.STARTING]


async def test_what_a_living_collector_drops_is_gone() -> None:
    world = World()
    await world.collected()
    await world.look()
    world.now += 0.1
    await world.collected(0, 1, 2)
    await world.drop(["b-1"])
    assert states(await world.look())[3] is State.STARTING


async def test_a_store_that_goes_away_leaves_the_last_snapshot_aging_and_is_reported_once() -> None:
    world = World()
    await world.collected(waiting=2.0)
    await world.look()
    with capture_logs() as logs:
        world.away = True
        for _ in range(3):
            world.now += RENEW_S
            fleet = await world.look()
            assert world.view.away
            assert states(fleet) == [State.READY] * 4
            assert fleet.sites[0].waiting[0] == 2.0
        world.now += BOUND
        assert (await world.look()).blind
        assert world.view.age_s == pytest.approx(3 * RENEW_S + BOUND)
        world.away = False
        await world.collected(waiting=1.0)
        fleet = await world.look()
        assert not fleet.blind
        assert fleet.sites[0].waiting[0] == 1.0
        assert not world.view.away
    assert [log["event"] for log in logs] == ["store_away", "store_back"]


async def test_a_store_that_comes_back_empty_does_not_empty_the_fleet() -> None:
    world = World()
    await world.collected()
    await world.look()
    world.away = True
    world.now += BOUND + 1
    await world.look()
    world.away = False
    await world.drop([one.name for one in listed(POLICY)])
    assert states(await world.look()) == [State.READY] * 4


async def test_a_store_away_from_the_start_still_gives_a_snapshot() -> None:
    world = World()
    world.away = True
    assert states(await world.look()) == [State.STARTING] * 4


async def test_a_wall_clock_set_back_does_not_stop_snapshots() -> None:
    world = World()
    await world.collected()
    await world.look()
    world.now -= 100
    assert (await world.look()).at == world.now


async def test_it_runs_by_itself_until_cancelled() -> None:
    world = World()
    task = asyncio.ensure_future(world.view.run())
    await eventually(lambda: len(world.fleets) == 1)
    await world.collected(waiting=5.0)
    await eventually(lambda: world.fleets[-1].sites[0].waiting[0] == 5.0)
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()
