"""The dispatcher of this process with futures around it."""

import asyncio

from extproc.adapters.waiting_room import WaitingRoom
from extproc.model import Admit, Ending, Final, Outcome, Reason, Refuse
from tests.adapters.deciders import Clock, a_room, running, the_policy
from tests.builders import a_request
from tests.fleets import a_fleet

POLICY = the_policy()


class World:
    """Four instances with one request each, r0 to r3."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.room: WaitingRoom = a_room(POLICY, self.clock)
        self.admits = [self.room.offer(a_request(id=f"r{i}", arrived=100.0)) for i in range(4)]
        assert all(isinstance(one, Admit) for one in self.admits)

    def held(self, name: str) -> asyncio.Future[Final]:
        found = self.room.offer(a_request(id=name, arrived=self.clock()))
        assert isinstance(found, asyncio.Future)
        assert not found.done()
        return found


async def test_who_is_held_has_a_future_of_its_verdict() -> None:
    world = World()
    held = world.held("w")
    world.clock.now += 0.5
    world.room.settle("r0", Outcome())
    verdict = await held
    assert isinstance(verdict, Admit)
    assert verdict.why["held"] == 0.5


async def test_a_future_is_refused_at_its_deadline_and_not_before() -> None:
    world = World()
    held = world.held("w")
    world.clock.now += 19.99
    world.room.tick()
    assert not held.done()
    world.clock.now += 0.01
    world.room.tick()
    verdict = await held
    assert isinstance(verdict, Refuse)
    assert verdict.reason is Reason.DEADLINE


async def test_who_is_settled_while_held_is_cancelled_and_leaves_the_line() -> None:
    world = World()
    held, behind = world.held("w"), world.held("v")
    for _ in range(2):
        world.room.settle("w", Outcome(Ending.CANCELLED))
    assert held.cancelled()
    assert world.room.dispatcher.waiting() == {"standard": 1}
    world.room.settle("r0", Outcome())
    assert isinstance(await behind, Admit)
    assert world.room.dispatcher.total_in_flight() == 4


async def test_a_waiter_that_went_away_before_its_grant_gives_the_place_back_when_settled() -> None:
    world = World()
    held = world.held("w")
    held.cancel()
    world.room.settle("r0", Outcome())
    assert world.room.dispatcher.running() == ["r1", "r2", "r3", "w"]
    world.room.settle("w", Outcome(Ending.CANCELLED))
    assert world.room.dispatcher.total_in_flight() == 3


async def test_who_is_offered_twice_has_one_future() -> None:
    world = World()
    held = world.held("w")
    assert world.held("w") is held
    world.room.settle("r0", Outcome())
    assert isinstance(await held, Admit)
    assert world.room.dispatcher.total_in_flight() == 4
    assert world.room.offer(a_request(id="w")) is held.result()


async def test_who_runs_elsewhere_or_belongs_to_somebody_else_waits_no_more() -> None:
    world = World()
    adopted, withdrawn = world.held("w"), world.held("v")
    admit = Admit("a-0", "a", "site-a", ("127.0.0.1:9100",), "standard")
    world.room.adopt(a_request(id="w"), admit)
    world.room.withdraw("v")
    assert adopted.cancelled()
    assert withdrawn.cancelled()
    assert world.room.dispatcher.waiting() == {"standard": 0}
    assert world.room.dispatcher.total_in_flight() == 5
    assert not world.room._held


async def test_a_first_token_and_a_new_snapshot_go_to_the_dispatcher() -> None:
    world = World()
    world.room.first_token("r0", 0.1)
    assert world.room.dispatcher.prefill_in_flight() == 3000.0
    fleet = a_fleet(POLICY, missing=("b-0",))
    world.room.observe(fleet)
    assert world.room.fleet() is fleet


async def test_it_ticks_by_itself() -> None:
    world = World()
    held = world.held("w")
    world.clock.now += 20.0
    async with running(world.room.run()), asyncio.timeout(10):
        assert isinstance(await held, Refuse)
