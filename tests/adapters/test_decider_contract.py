"""What every decider owes the server, in this process and behind a socket."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from extproc.adapters.waiting_room import WaitingRoom
from extproc.model import Admit, Ending, Final, Outcome, Reason, Refuse
from extproc.ports import Decider
from tests.adapters.deciders import Clock, Gateway, a_room, the_policy
from tests.builders import a_request
from tests.polling import eventually

POLICY = the_policy()


@dataclass
class World:
    decider: Decider
    room: WaitingRoom
    clock: Clock

    def begin(self, name: str, **fields: Any) -> asyncio.Future[Final]:
        """Offer; the verdict is a future however it was given."""
        found = self.decider.offer(a_request(id=name, **{"arrived": self.clock()} | fields))
        if isinstance(found, Admit | Refuse):
            done: asyncio.Future[Final] = asyncio.get_running_loop().create_future()
            done.set_result(found)
            return done
        return asyncio.ensure_future(found)

    async def offer(self, name: str, **fields: Any) -> Final:
        async with asyncio.timeout(10):
            return await self.begin(name, **fields)

    async def fill(self) -> None:
        """Give each of the four instances its one request, r0 to r3."""
        for i in range(4):
            assert isinstance(await self.offer(f"r{i}"), Admit)

    async def held(self, name: str, **fields: Any) -> asyncio.Future[Final]:
        before = self.waiting()
        future = self.begin(name, **fields)
        await eventually(lambda: self.waiting() == before + 1)
        assert not future.done()
        return future

    def waiting(self) -> int:
        return sum(self.room.dispatcher.waiting().values())

    def running(self) -> int:
        return self.room.dispatcher.total_in_flight()


@pytest.fixture(params=["in process", "over a socket"])
async def world(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[World]:
    clock = Clock()
    if request.param == "in process":
        room = a_room(POLICY, clock)
        yield World(room, room, clock)
        return
    async with Gateway(tmp_path / "s", POLICY, clock) as gateway:
        await gateway.start()
        worker = await gateway.worker()
        yield World(worker.decider, gateway.room, clock)
        assert worker.decider.stats.alone == 0


async def test_an_offer_is_answered_by_a_verdict(world: World) -> None:
    verdict = await world.offer("r", residency=frozenset({"eu"}))
    assert isinstance(verdict, Admit)
    assert (verdict.site, len(verdict.hosts), verdict.alone) == ("a", 2, False)
    assert set(verdict.why) == {"queue", "prefill", "decode", "network", "held"}
    assert world.running() == 1


async def test_a_refusal_is_a_verdict_too(world: World) -> None:
    verdict = await world.offer("r", model="no-such-model")
    assert isinstance(verdict, Refuse)
    assert verdict.reason is Reason.UNKNOWN_MODEL
    assert world.running() == 0


async def test_who_is_held_is_answered_when_a_place_is_free(world: World) -> None:
    await world.fill()
    held = await world.held("w")
    world.decider.settle("r0", Outcome())
    async with asyncio.timeout(10):
        assert isinstance(await held, Admit)
    assert world.running() == 4


async def test_the_first_to_arrive_is_the_first_to_go(world: World) -> None:
    await world.fill()
    second, first = await world.held("second", arrived=99.5), await world.held("first", arrived=99.0)
    world.decider.settle("r0", Outcome())
    async with asyncio.timeout(10):
        assert isinstance(await first, Admit)
    assert not second.done()


async def test_who_is_held_past_its_deadline_is_refused(world: World) -> None:
    await world.fill()
    held = await world.held("w")
    world.clock.now += 20.0
    world.room.tick()
    async with asyncio.timeout(10):
        verdict = await held
    assert isinstance(verdict, Refuse)
    assert verdict.reason is Reason.DEADLINE


async def test_who_is_cancelled_while_held_leaves_the_line(world: World) -> None:
    await world.fill()
    held = await world.held("w")
    world.decider.settle("w", Outcome(Ending.CANCELLED))
    await eventually(lambda: world.waiting() == 0)
    await asyncio.wait([held])
    assert held.cancelled()
    world.decider.settle("r0", Outcome())
    await eventually(lambda: world.running() == 3)


async def test_who_is_cancelled_in_the_turn_in_which_it_was_offered_leaves_nothing(world: World) -> None:
    future = world.begin("r")
    world.decider.settle("r", Outcome(Ending.CANCELLED))
    verdict = await world.offer("s")
    assert isinstance(verdict, Admit)
    assert world.room.dispatcher.running() == ["s"]
    await asyncio.wait([future], timeout=5)
    assert future.done()


async def test_a_settlement_is_idempotent_and_a_later_one_completes_it(world: World) -> None:
    await world.offer("r")
    for _ in range(2):
        world.decider.settle("r", Outcome())
    await eventually(lambda: world.running() == 0)
    assert world.room.dispatcher.accounts.counts == {}
    full = Outcome(Ending.COMPLETED, 200, ttft_s=0.1, duration_s=0.2, output_tokens=7)
    for _ in range(2):
        world.decider.settle("r", full)
    await eventually(lambda: bool(world.room.dispatcher.accounts.counts))
    await world.offer("s")
    (counts,) = world.room.dispatcher.accounts.counts.values()
    assert (counts.offered, counts.endings, counts.on_target_tokens) == (1, {"completed": 1}, 7)


async def test_a_stranger_s_settlement_is_nothing(world: World) -> None:
    world.decider.settle("nobody", Outcome(Ending.COMPLETED))
    world.decider.first_token("nobody", 0.1)
    assert isinstance(await world.offer("r"), Admit)
    assert world.running() == 1


async def test_a_first_token_ends_the_prefill(world: World) -> None:
    await world.offer("r", prompt_tokens=700)
    assert world.room.dispatcher.prefill_in_flight() == 700.0
    world.decider.first_token("r", 0.1)
    await eventually(lambda: world.room.dispatcher.prefill_in_flight() == 0.0)
    assert world.running() == 1


async def test_hundreds_at_once_are_all_answered_and_all_given_back(world: World) -> None:
    futures = {f"r{i}": world.begin(f"r{i}") for i in range(90)}
    left = set(futures)
    async with asyncio.timeout(20):
        while left:
            done, _ = await asyncio.wait([futures[one] for one in left], return_when=asyncio.FIRST_COMPLETED)
            assert world.running() <= 4
            for name in [one for one in left if futures[one] in done]:
                assert isinstance(futures[name].result(), Admit)
                world.decider.settle(name, Outcome())
                left.remove(name)
    await eventually(lambda: world.running() == 0)
    assert world.waiting() == 0


async def test_a_snapshot_is_at_hand(world: World) -> None:
    assert [site.name for site in world.decider.fleet().sites] == ["a", "b"]
