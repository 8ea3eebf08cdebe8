"""A worker whose dispatcher goes away and comes back: nothing is lost, nothing is counted twice, no law is broken."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from extproc.adapters import wire
from extproc.adapters.remote_decider import SILENCE_S
from extproc.flights import LOG_GRACE_S
from extproc.model import Admit, Ending, Final, Outcome, Reason, Refuse, State
from tests.adapters.deciders import Gateway, Worker, the_policy, verdict_of
from tests.fleets import a_fleet
from tests.polling import eventually


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[Gateway]:
    async with Gateway(tmp_path / "s") as one:
        yield one


async def admitted(worker: Worker, gateway: Gateway, *names: str) -> list[Admit]:
    verdicts = [await verdict_of(worker.decider.offer(gateway.request(name))) for name in names]
    found = [one for one in verdicts if isinstance(one, Admit)]
    assert len(found) == len(names)
    return found


def held(worker: Worker, gateway: Gateway, name: str, **fields: object) -> asyncio.Future[Final]:
    found = worker.decider.offer(gateway.request(name, **fields))
    assert isinstance(found, asyncio.Future)
    return found


def waiting(gateway: Gateway) -> int:
    return sum(gateway.room.dispatcher.waiting().values())


async def test_a_worker_without_a_dispatcher_decides_alone_marked_and_counted(gateway: Gateway) -> None:
    worker = await gateway.worker(connected=False)
    (verdict,) = await admitted(worker, gateway, "r")
    assert verdict.alone
    refuse = await verdict_of(worker.decider.offer(gateway.request("x", model="no-such-model")))
    assert isinstance(refuse, Refuse)
    assert (refuse.reason, refuse.alone) == (Reason.UNKNOWN_MODEL, True)
    assert worker.decider.stats.alone == 2
    assert worker.decider.stats.losses == 0
    assert worker.alone() == 1
    worker.decider.settle("r", Outcome(Ending.COMPLETED, 200))
    assert worker.alone() == 0


async def test_residency_and_bounds_hold_alone_too(gateway: Gateway) -> None:
    worker = await gateway.worker(connected=False)
    sites = [(await verdict_of(worker.decider.offer(gateway.request(f"r{i}", tenant="eu")))) for i in range(2)]
    assert [isinstance(one, Admit) and one.site for one in sites] == ["a", "a"]
    waits = held(worker, gateway, "w", tenant="eu")
    await asyncio.sleep(0)
    assert not waits.done(), "the other site has room, and may not be used"
    worker.decider.settle("r0", Outcome())
    verdict = await verdict_of(waits)
    assert isinstance(verdict, Admit)
    assert (verdict.site, verdict.alone) == ("a", True)
    worker.local.observe(a_fleet(gateway.policy, missing=("a-0", "a-1")))
    refuse = await verdict_of(worker.decider.offer(gateway.request("x", tenant="eu")))
    assert isinstance(refuse, Refuse)
    assert refuse.reason is Reason.RESIDENCY


async def test_who_is_held_when_the_dispatcher_goes_away_is_decided_alone(gateway: Gateway) -> None:
    await gateway.start()
    worker = await gateway.worker()
    first = await admitted(worker, gateway, "r0", "r1", "r2", "r3")
    assert not any(one.alone for one in first)
    waits = held(worker, gateway, "w")
    await eventually(lambda: waiting(gateway) == 1)
    await gateway.stop()
    await eventually(lambda: not worker.decider.connected)
    assert worker.decider.stats.losses == 1
    assert worker.alone() == 4, "what runs is known, so nobody is sent on top of it"
    assert not waits.done()
    gateway.clock.now += 1.5
    worker.decider.settle("r0", Outcome())
    verdict = await verdict_of(waits)
    assert isinstance(verdict, Admit)
    assert (verdict.alone, verdict.why["held"]) == (True, 1.5)
    assert worker.decider.stats.alone == 1


async def test_an_offer_that_was_on_its_way_when_the_dispatcher_went_is_decided_alone(gateway: Gateway) -> None:
    await gateway.start()
    worker = await gateway.worker()
    futures = [held(worker, gateway, f"r{i}") for i in range(3)]
    assert worker.decider._link is not None
    worker.decider._link.close()
    verdicts = [await verdict_of(one) for one in futures]
    assert all(isinstance(one, Admit) for one in verdicts)
    assert len({one.instance for one in verdicts if isinstance(one, Admit)}) == 3
    for i in range(3):
        worker.decider.settle(f"r{i}", Outcome())
    await eventually(lambda: worker.decider.connected and gateway.room.dispatcher.total_in_flight() == 0)
    assert worker.alone() == 0


async def test_a_caller_s_deadline_counts_from_its_first_arrival(gateway: Gateway) -> None:
    await gateway.start()
    worker = await gateway.worker()
    await admitted(worker, gateway, "r0", "r1", "r2", "r3")
    waits = held(worker, gateway, "w", deadline_s=4.0)
    await eventually(lambda: waiting(gateway) == 1)
    gateway.clock.now += 2.5
    await gateway.stop()
    await eventually(lambda: not worker.decider.connected)
    await gateway.start()
    await eventually(lambda: worker.decider.connected and waiting(gateway) == 1)
    gateway.clock.now += 1.4
    gateway.room.tick()
    await asyncio.sleep(0)
    assert not waits.done()
    gateway.clock.now += 0.1
    gateway.room.tick()
    verdict = await verdict_of(waits)
    assert isinstance(verdict, Refuse)
    assert (verdict.reason, verdict.alone) == (Reason.DEADLINE, False)


@pytest.mark.parametrize("seen", [True, False])
async def test_a_dispatcher_that_comes_back_empty_knows_who_runs_and_who_waits(gateway: Gateway, seen: bool) -> None:
    await gateway.start()
    worker = await gateway.worker()
    before = await admitted(worker, gateway, "r0", "r1", "r2")
    await gateway.stop()
    await eventually(lambda: not worker.decider.connected)
    (alone,) = await admitted(worker, gateway, "r3")
    assert alone.alone
    waits = [held(worker, gateway, name) for name in ("w0", "w1")]
    await gateway.start(seen=seen)
    await eventually(lambda: worker.decider.connected and gateway.room.dispatcher.total_in_flight() == 4)
    assert worker.alone() == 0, "its own dispatcher has forgotten them"
    assert sum(worker.local.dispatcher.waiting().values()) == 0
    if not seen:
        for one in waits:
            verdict = await verdict_of(one)
            assert isinstance(verdict, Refuse), "a dispatcher must have seen the fleet before it opens its socket"
        gateway.room.observe(a_fleet(gateway.policy))
    counts = gateway.room.dispatcher.in_flight()
    assert counts == {one.instance: 1 for one in (*before, alone)}
    if seen:
        await eventually(lambda: waiting(gateway) == 2)
        for name, one in zip(("r0", "r3"), waits, strict=True):
            worker.decider.settle(name, Outcome())
            verdict = await verdict_of(one)
            assert isinstance(verdict, Admit)
            assert not verdict.alone
        for name in ("w0", "w1"):
            worker.decider.settle(name, Outcome())
    for name in ("r0", "r1", "r2", "r3"):
        worker.decider.settle(name, Outcome())
    await eventually(lambda: gateway.room.dispatcher.total_in_flight() == 0)
    assert worker.alone() == 0


async def test_a_connection_that_was_cut_to_the_same_dispatcher_leaves_its_counts_right(gateway: Gateway) -> None:
    socket = await gateway.start()
    worker = await gateway.worker()
    await admitted(worker, gateway, "r0", "r1", "r2", "r3")
    waits = held(worker, gateway, "w")
    await eventually(lambda: waiting(gateway) == 1)
    for _ in range(2):
        link = worker.decider._link
        assert link is not None
        link.close()
        await eventually(lambda gone=link: worker.decider.connected and worker.decider._link is not gone)  # type: ignore[misc]
        await eventually(lambda: gateway.room.dispatcher.total_in_flight() == 4 and waiting(gateway) == 1)
    assert not waits.done()
    gateway.clock.now += LOG_GRACE_S + 1
    gateway.room.tick()
    assert gateway.room.dispatcher.total_in_flight() == 4, "books of a cut connection close nobody who runs"
    worker.decider.settle("r0", Outcome(Ending.COMPLETED, 200))
    assert isinstance(await verdict_of(waits), Admit)
    for name in ("r1", "r2", "r3", "w"):
        worker.decider.settle(name, Outcome(Ending.COMPLETED, 200))
    await eventually(lambda: gateway.room.dispatcher.total_in_flight() == 0)
    assert (worker.alone(), socket.owned()) == (0, 0)
    counts = gateway.room.dispatcher.accounts.counts.values()
    assert sum(one.endings.get("completed", 0) for one in counts) == 5


async def test_who_is_cancelled_while_the_dispatcher_is_away_is_not_offered_when_it_is_back(gateway: Gateway) -> None:
    await gateway.start()
    worker = await gateway.worker()
    await admitted(worker, gateway, "r0", "r1", "r2", "r3")
    waits = held(worker, gateway, "w")
    await gateway.stop()
    await eventually(lambda: not worker.decider.connected)
    worker.decider.settle("w", Outcome(Ending.CANCELLED))
    worker.decider.settle("r0", Outcome())
    await asyncio.wait([waits])
    assert waits.cancelled()
    await gateway.start()
    await eventually(lambda: worker.decider.connected and gateway.room.dispatcher.total_in_flight() == 3)
    assert sorted(gateway.room.dispatcher.running()) == ["r1", "r2", "r3"]
    assert waiting(gateway) == 0


async def test_a_grant_made_alone_in_the_turn_in_which_the_dispatcher_returns_is_decided_once(gateway: Gateway) -> None:
    worker = await gateway.worker(connected=False)
    await admitted(worker, gateway, "r0", "r1", "r2", "r3")
    waits = held(worker, gateway, "w")
    link = worker.decider._dial()
    worker.decider.settle("r0", Outcome())  # grants w alone; its answer comes in the next turn of the loop
    worker.decider._take(link, [wire.Beat()])
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not waits.done(), "the dispatcher has been asked"
    assert worker.alone() == 0
    there = Admit("b-1", "b", "site-b", ("127.0.0.1:9201",), "standard")
    worker.decider._take(link, [wire.Admitted("w", there)])
    assert waits.result() == there


class Mute(asyncio.Protocol):
    """A dispatcher that takes connections and says nothing, like one that is stopped."""

    def __init__(self, taken: list[asyncio.BaseTransport]) -> None:
        self._taken = taken

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._taken.append(transport)


async def test_a_dispatcher_that_takes_connections_and_never_speaks_is_away(gateway: Gateway) -> None:
    taken: list[asyncio.BaseTransport] = []
    server = await asyncio.get_running_loop().create_unix_server(lambda: Mute(taken), str(gateway.path))
    try:
        worker = await gateway.worker(connected=False)
        await eventually(lambda: len(taken) == 1)
        (verdict,) = await admitted(worker, gateway, "r")
        assert verdict.alone
        assert not worker.decider.connected
        gateway.clock.now += SILENCE_S + 0.1
        await eventually(lambda: len(taken) == 2)
        assert worker.decider.stats.losses == 0, "it never was there"
    finally:
        server.close()
        for one in taken:
            one.close()


async def test_a_dispatcher_that_falls_silent_is_away(gateway: Gateway) -> None:
    heard = asyncio.Event()

    def lost(_: wire.Link) -> None:
        heard.set()

    loop = asyncio.get_running_loop()
    server = await loop.create_unix_server(
        lambda: wire.Link(lambda *_: None, lost, lambda link: link.send(wire.Beat())), str(gateway.path)
    )
    try:
        worker = await gateway.worker()
        waits = held(worker, gateway, "r")
        gateway.clock.now += SILENCE_S - 0.1
        await asyncio.sleep(0.3)
        assert worker.decider.connected
        gateway.clock.now += 0.2
        verdict = await verdict_of(waits)
        assert isinstance(verdict, Admit)
        assert verdict.alone
        assert worker.decider.stats.losses == 1
        async with asyncio.timeout(10):
            await heard.wait()
        worker.decider.settle("r", Outcome())
    finally:
        server.close()


async def test_alone_a_held_request_is_refused_at_its_deadline(gateway: Gateway) -> None:
    worker = await gateway.worker(connected=False)
    await admitted(worker, gateway, "r0", "r1", "r2", "r3")
    waits = held(worker, gateway, "w")
    gateway.clock.now += 20.0
    worker.local.tick()
    verdict = await verdict_of(waits)
    assert isinstance(verdict, Refuse)
    assert (verdict.reason, verdict.alone) == (Reason.DEADLINE, True)
    assert worker.decider.stats.alone == 5


async def test_alone_a_worker_follows_its_own_snapshot(gateway: Gateway) -> None:
    worker = await gateway.worker(connected=False)
    worker.local.observe(a_fleet(gateway.policy, states={"a-0": State.LOST, "a-1": State.DRAINING}))
    (verdict,) = await admitted(worker, gateway, "r")
    assert verdict.site == "b"
    assert worker.decider.fleet() is worker.local.fleet()


async def test_a_worker_that_ends_closes_its_connection(gateway: Gateway) -> None:
    socket = await gateway.start()
    worker = await gateway.worker()
    await worker.die()
    await eventually(lambda: socket.workers() == 0)
    assert not worker.decider.connected
    assert worker.decider.stats.losses == 0


async def test_first_tokens_reach_whoever_decides(gateway: Gateway) -> None:
    worker = await gateway.worker(connected=False)
    await admitted(worker, gateway, "r")
    assert worker.local.dispatcher.prefill_in_flight() == 1000.0
    worker.decider.first_token("r", 0.1)
    assert worker.local.dispatcher.prefill_in_flight() == 0.0


async def test_a_storm_of_cuts_loses_nobody_and_leaves_no_count(gateway: Gateway) -> None:
    gateway.policy = the_policy(max_in_flight=3)
    await gateway.start()
    workers = [await gateway.worker() for _ in range(3)]
    answered: list[Final] = []

    async def one_client(worker: Worker, name: str) -> None:
        verdict = await verdict_of(worker.decider.offer(gateway.request(name)))
        answered.append(verdict)
        await asyncio.sleep(0.02)
        worker.decider.settle(name, Outcome(Ending.COMPLETED, 200))

    async def cut() -> None:
        for i in range(8):
            await asyncio.sleep(0.05)
            if i == 4:
                await gateway.stop()
                await gateway.start()
            elif (link := workers[i % 3].decider._link) is not None:
                link.close()

    clients = [one_client(worker, f"w{n}-{i}") for n, worker in enumerate(workers) for i in range(60)]
    await asyncio.gather(cut(), *clients)
    assert len(answered) == 180
    assert all(isinstance(one, Admit) for one in answered)
    await eventually(lambda: gateway.room.dispatcher.total_in_flight() == 0 and waiting(gateway) == 0)
    assert [worker.alone() for worker in workers] == [0, 0, 0]
