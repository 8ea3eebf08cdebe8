"""The dispatcher's side: whose request is whose, and what a lost worker leaves behind."""

import asyncio
from pathlib import Path

from extproc.adapters import wire
from extproc.model import Admit, Ending, Outcome, Refuse
from tests.adapters.deciders import Gateway, verdict_of
from tests.polling import eventually


async def a_link(path: Path) -> tuple[wire.Link, list[wire.Message]]:
    """A worker that says exactly what it is told."""
    heard: list[wire.Message] = []
    loop = asyncio.get_running_loop()
    _, link = await loop.create_unix_connection(
        lambda: wire.Link(lambda _, messages: heard.extend(messages), lambda _: None), str(path)
    )
    return link, heard


def answers(heard: list[wire.Message]) -> list[str]:
    return [one.id for one in heard if isinstance(one, wire.Admitted | wire.Refused)]


async def test_a_worker_is_greeted_at_once_and_hears_beats(tmp_path: Path) -> None:
    async with Gateway(tmp_path / "s") as gateway:
        socket = await gateway.start()
        link, heard = await a_link(gateway.path)
        await eventually(lambda: len(heard) >= 3)
        assert all(isinstance(one, wire.Beat) for one in heard)
        assert socket.workers() == 1
        link.close()
        await eventually(lambda: socket.workers() == 0)


async def test_a_dead_worker_s_places_are_freed_and_its_held_leave_the_line(tmp_path: Path) -> None:
    async with Gateway(tmp_path / "s") as gateway:
        socket = await gateway.start()
        dying, living = await gateway.worker(), await gateway.worker()
        for i in range(4):
            dying.decider.offer(gateway.request(f"r{i}"))
        dying.decider.offer(gateway.request("doomed"))
        await eventually(lambda: sum(gateway.room.dispatcher.waiting().values()) == 1)
        waits = living.decider.offer(gateway.request("waits"))
        assert isinstance(waits, asyncio.Future)
        await eventually(lambda: sum(gateway.room.dispatcher.waiting().values()) == 2)
        await dying.die()
        async with asyncio.timeout(10):
            verdict = await waits
        assert isinstance(verdict, Admit)
        assert not verdict.alone
        await eventually(lambda: gateway.room.dispatcher.running() == ["waits"])
        assert sum(gateway.room.dispatcher.waiting().values()) == 0
        assert (socket.workers(), socket.owned()) == (1, 1)


async def test_a_request_belongs_to_the_connection_that_brought_it_last(tmp_path: Path) -> None:
    async with Gateway(tmp_path / "s") as gateway:
        socket = await gateway.start()
        old, old_heard = await a_link(gateway.path)
        new, new_heard = await a_link(gateway.path)
        held = gateway.request("w")
        for i in range(4):
            old.send(wire.Offer(gateway.request(f"r{i}")))
        old.send(wire.Offer(held))
        await eventually(lambda: len(answers(old_heard)) == 4)
        admitted = {one.id: one.admit for one in old_heard if isinstance(one, wire.Admitted)}
        new.send(wire.Offer(held))
        new.send(wire.Adopt(gateway.request("r0"), admitted["r0"]))
        await eventually(lambda: socket.owned() == 5 and socket._owner["r0"] is not socket._owner["r1"])
        old.close()
        await eventually(lambda: "w" in answers(new_heard))
        assert sorted(gateway.room.dispatcher.running()) == ["r0", "w"]
        assert answers(old_heard) == ["r0", "r1", "r2", "r3"]
        assert set(answers(new_heard)) == {"w"}
        new.close()
        await eventually(lambda: gateway.room.dispatcher.total_in_flight() == 0)
        assert socket.owned() == 0


async def test_who_is_refused_belongs_to_nobody(tmp_path: Path) -> None:
    async with Gateway(tmp_path / "s") as gateway:
        socket = await gateway.start()
        worker = await gateway.worker()
        verdict = await verdict_of(worker.decider.offer(gateway.request("r", model="no-such-model")))
        assert isinstance(verdict, Refuse)
        assert socket.owned() == 0


async def test_another_worker_s_access_log_may_end_a_request(tmp_path: Path) -> None:
    async with Gateway(tmp_path / "s") as gateway:
        socket = await gateway.start()
        one, other = await gateway.worker(), await gateway.worker()
        found = one.decider.offer(gateway.request("r"))
        assert isinstance(found, asyncio.Future)
        await found
        other.decider.settle("r", Outcome(Ending.COMPLETED, 200))
        await eventually(lambda: gateway.room.dispatcher.total_in_flight() == 0)
        one.decider.settle("r", Outcome())
        assert isinstance(await verdict_of(one.decider.offer(gateway.request("s"))), Admit)
        assert socket.owned() == 1


async def test_what_only_a_dispatcher_says_is_ignored_and_garbage_costs_the_connection(tmp_path: Path) -> None:
    async with Gateway(tmp_path / "s") as gateway:
        socket = await gateway.start()
        link, heard = await a_link(gateway.path)
        link.send(wire.Beat())
        link.send(wire.Offer(gateway.request("r")))
        await eventually(lambda: answers(heard) == ["r"])
        assert link._transport is not None
        link._transport.write(b"\x00\x00\x00\x02\xff\xff")
        await eventually(lambda: socket.workers() == 0)
        assert gateway.room.dispatcher.total_in_flight() == 0
        assert isinstance(await verdict_of((await gateway.worker()).decider.offer(gateway.request("s"))), Admit)


async def test_a_socket_left_behind_by_a_dead_dispatcher_is_no_obstacle(tmp_path: Path) -> None:
    async with Gateway(tmp_path / "s") as gateway:
        gateway.path.touch()
        await gateway.start()
        await gateway.worker()
        await gateway.stop()
        assert not gateway.path.exists()
