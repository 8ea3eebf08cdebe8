"""The collector over tiny engines: states, isolation, the store's outages, the mirror."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from extproc.adapters.discovery import Discovery
from extproc.adapters.memory_store import MemoryStore
from extproc.adapters.telemetry.collector import Collector, Mirror
from extproc.model import Reading, State
from extproc.policy import Policy
from extproc.ports import Store, StoreAway
from tests.adapters.telemetry.engines import LLAMA_BUSY, Engine, engines
from tests.builders import CHAT, a_policy, a_reading, an_instance
from tests.polling import eventually

IDLE = "vllm:num_requests_waiting 0\nvllm:num_requests_running 0\nvllm:kv_cache_usage_perc 0\n"


def a_fleet(*groups: dict[str, Any], **telemetry: float) -> Policy:
    times = {"scrape_ms": 10, "timeout_ms": 300, "lost_after_ms": 400} | telemetry
    site = {"name": "a", "instances": [{"models": [CHAT], **group} for group in groups]}
    return a_policy(fleet={"sites": [site], "telemetry": times})


def static(*made: Engine, **fields: Any) -> dict[str, Any]:
    return {"static": [{"name": f"a-{i}", "address": one.address, **fields} for i, one in enumerate(made)]}


class Outage(MemoryStore):
    """A store that goes away when told."""

    away = False
    writes = 0

    async def write(self, readings: Sequence[Reading], expire_s: float) -> None:
        if self.away:
            raise StoreAway("told to")
        self.writes += 1
        await super().write(readings, expire_s)

    async def read(self) -> Sequence[Reading]:
        if self.away:
            raise StoreAway("told to")
        return await super().read()


class Watched:
    """A running collector and what it leaves in its store."""

    def __init__(self, store: Store) -> None:
        self.store = store

    async def rows(self) -> dict[str, Reading]:
        return {reading.instance.name: reading for reading in await self.store.read()}

    async def shows(self, name: str, holds: Callable[[Reading], bool]) -> Reading:
        last: list[Reading | None] = [None]

        async def found() -> bool:
            last[0] = (await self.rows()).get(name)
            return last[0] is not None and holds(last[0])

        with suppress(TimeoutError):
            await eventually(found)
        assert last[0] is not None
        assert holds(last[0]), last[0]
        return last[0]

    async def becomes(self, name: str, state: State) -> Reading:
        return await self.shows(name, lambda reading: reading.state is state)


@asynccontextmanager
async def collecting(
    policy: Policy,
    store: Store | None = None,
    *,
    mirror: Mirror | None = None,
    folder: Path = Path(),
    vet_s: float = 10.0,
) -> AsyncIterator[Watched]:
    store = MemoryStore() if store is None else store
    discovery = Discovery(policy, folder, file_s=0.01, dns_s=0.01)
    task = asyncio.ensure_future(Collector(policy, discovery, store, mirror=mirror, vet_s=vet_s).run())
    try:
        yield Watched(store)
        assert not task.done(), task
    finally:
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled(), task


async def test_a_ready_engine_is_read_with_its_numbers_and_models() -> None:
    engine = Engine(models=["chat-model", "lora-x"])
    async with engines(engine), collecting(a_fleet(static(engine))) as seen:
        reading = await seen.becomes("a-0", State.READY)
    assert (reading.waiting, reading.running, reading.kv_usage) == (4.0, 4.0, 0.21330724070450102)
    assert (reading.prefix_hits, reading.prefix_queries) == (25536.0, 37708.0)
    assert (reading.block_tokens, reading.kv_blocks) == (32, 512)
    assert reading.models == ("chat-model", "lora-x")
    assert reading.error is None
    assert reading.instance.address == engine.address


async def test_engines_of_several_kinds_are_recognised_in_one_fleet() -> None:
    made = [
        Engine(),
        Engine(page=LLAMA_BUSY),
        Engine(page="trtllm_num_requests_waiting 7\n", path="/prometheus/metrics"),
    ]
    async with engines(*made), collecting(a_fleet(static(*made))) as seen:
        assert (await seen.becomes("a-0", State.READY)).waiting == 4.0
        assert (await seen.becomes("a-1", State.READY)).prefix_hits == 16672.0
        assert (await seen.becomes("a-2", State.READY)).waiting == 7.0


async def test_an_engine_without_metrics_is_ready_without_numbers() -> None:
    engine = Engine(page_status=404)
    async with engines(engine), collecting(a_fleet(static(engine))) as seen:
        reading = await seen.becomes("a-0", State.READY)
    assert reading.waiting is None
    assert "404" in str(reading.error)
    assert reading.models == ("chat-model",)


async def test_an_engine_that_speaks_no_known_dialect_is_ready_without_numbers() -> None:
    engine = Engine(page="something_else 1\n")
    async with engines(engine), collecting(a_fleet(static(engine) | {"dialect": "vllm"})) as seen:
        reading = await seen.becomes("a-0", State.READY)
    assert reading.waiting is None
    assert "dialect" in str(reading.error)


@pytest.mark.parametrize(("page", "health"), [(503, 200), (200, 503), (200, 500), (503, 503)])
async def test_a_loading_engine_is_starting_until_it_is_well(page: int, health: int) -> None:
    engine = Engine(page_status=page, health_status=health)
    async with engines(engine), collecting(a_fleet(static(engine))) as seen:
        await seen.becomes("a-0", State.STARTING)
        await eventually(lambda: engine.count("/metrics") > 5)
        assert (await seen.rows())["a-0"].state is State.STARTING
        engine.page_status = engine.health_status = 200
        await seen.becomes("a-0", State.READY)


async def test_an_engine_that_becomes_unwell_is_found_out_by_its_health() -> None:
    engine = Engine()
    async with engines(engine), collecting(a_fleet(static(engine)), vet_s=0.05) as seen:
        await seen.becomes("a-0", State.READY)
        engine.health_status = 503
        await seen.becomes("a-0", State.STARTING)
        engine.health_status = 200
        await seen.becomes("a-0", State.READY)


async def test_models_and_health_are_asked_seldom() -> None:
    engine = Engine()
    async with engines(engine), collecting(a_fleet(static(engine))) as seen:
        await seen.becomes("a-0", State.READY)
        await eventually(lambda: engine.count("/metrics") > 20)
    assert engine.count("/v1/models") == 1
    assert engine.count("/health") == 1


async def test_a_model_list_that_hangs_makes_nobody_lost_and_is_asked_for_again() -> None:
    engine = Engine(models_hang=True)
    async with engines(engine), collecting(a_fleet(static(engine), timeout_ms=50), vet_s=0.1) as seen:
        assert (await seen.becomes("a-0", State.READY)).models is None
        engine.models_hang = False
        assert (await seen.shows("a-0", lambda reading: reading.models is not None)).state is State.READY


async def test_models_loaded_later_are_seen() -> None:
    engine = Engine()
    async with engines(engine), collecting(a_fleet(static(engine)), vet_s=0.05) as seen:
        await seen.becomes("a-0", State.READY)
        engine.models = ["chat-model", "new"]
        await seen.shows("a-0", lambda reading: reading.models == ("chat-model", "new"))


@pytest.mark.parametrize("body", ["not json", "[]", '{"data": 3}', '{"data": [{"id": 1}]}', ""])
async def test_a_broken_model_list_is_no_list(body: str) -> None:
    engine = Engine(models_body=body)
    async with engines(engine), collecting(a_fleet(static(engine))) as seen:
        assert (await seen.becomes("a-0", State.READY)).models is None


async def test_an_engine_that_is_gone_is_lost_by_refusal_long_before_its_reading_is_old() -> None:
    engine = Engine()
    async with engines(engine), collecting(a_fleet(static(engine), lost_after_ms=60_000)) as seen:
        await seen.becomes("a-0", State.READY)
        await engine.stop()
        lost = await seen.becomes("a-0", State.LOST)
        assert lost.error
        await engine.start()
        await seen.becomes("a-0", State.READY)
        assert engine.count("/v1/models") == 2  # another process may serve other models


async def test_an_engine_that_was_never_there_is_starting() -> None:
    engine = Engine()
    await engine.start()
    await engine.stop()
    async with collecting(a_fleet(static(engine))) as seen:
        reading = await seen.becomes("a-0", State.STARTING)
        assert "refused" in str(reading.error).lower() or "connect" in str(reading.error).lower()


async def test_a_hung_engine_is_lost_and_delays_no_other() -> None:
    hung, quick = Engine(), Engine(page=IDLE)
    times = {"timeout_ms": 10_000, "lost_after_ms": 300}
    async with engines(hung, quick), collecting(a_fleet(static(hung, quick), **times)) as seen:
        await seen.becomes("a-0", State.READY)
        hung.going.clear()
        before = quick.count("/metrics")
        await seen.becomes("a-0", State.LOST)
        assert quick.count("/metrics") - before > 5
        assert (await seen.rows())["a-1"].state is State.READY
        hung.going.set()
        await seen.becomes("a-0", State.READY)


async def test_a_page_without_end_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("extproc.adapters.telemetry.scrape._MOST_BYTES", 10_000)
    engine = Engine()
    async with engines(engine), collecting(a_fleet(static(engine))) as seen:
        assert "longer" in str((await seen.becomes("a-0", State.STARTING)).error)


async def test_bytes_that_are_no_text_are_no_crash() -> None:
    engine = Engine(page=IDLE.encode() + b"\xff\x00\xfe\nm{\x80\n")
    async with engines(engine), collecting(a_fleet(static(engine))) as seen:
        assert (await seen.becomes("a-0", State.READY)).waiting == 0.0


async def test_one_listed_as_draining_is_draining() -> None:
    engine = Engine()
    async with engines(engine), collecting(a_fleet(static(engine, draining=True))) as seen:
        await seen.becomes("a-0", State.DRAINING)


async def test_the_collector_outlives_the_store_and_says_so_once_per_change() -> None:
    engine, store = Engine(), Outage()
    with capture_logs() as logs:
        async with engines(engine), collecting(a_fleet(static(engine)), store) as seen:
            await seen.becomes("a-0", State.READY)
            store.away = True
            engine.page = IDLE
            count = engine.count("/metrics")
            await eventually(lambda: engine.count("/metrics") > count + 10)
            store.away = False
            await seen.shows("a-0", lambda reading: reading.waiting == 0.0)
            written = store.writes
            await eventually(lambda: store.writes > written + 3)
    assert [log["event"] for log in logs if log["event"].startswith("store")] == ["store_away", "store_back"]


async def test_a_restart_does_not_make_a_ready_instance_look_new() -> None:
    engine, store = Engine(), MemoryStore()
    engine.going.clear()
    async with engines(engine):
        instance = an_instance("a-0", address=engine.address)
        await store.write([a_reading(instance, at=time.time(), waiting=3.0)], 60)
        async with collecting(a_fleet(static(engine), lost_after_ms=60_000), store) as seen:
            await eventually(lambda: engine.count("/metrics") > 0)
            states = [(await seen.rows())["a-0"].state for _ in range(20)]
            engine.going.set()
            await seen.shows("a-0", lambda reading: reading.waiting == 4.0)
    assert State.STARTING not in states


async def test_a_reading_left_by_another_address_is_not_gone_on_from() -> None:
    engine, store = Engine(page_status=500), MemoryStore()
    async with engines(engine):
        await store.write([a_reading(an_instance("a-0", address="127.0.0.1:1"))], 60)
        async with collecting(a_fleet(static(engine)), store) as seen:
            await seen.shows("a-0", lambda reading: reading.instance.address == engine.address)
            assert (await seen.rows())["a-0"].state is State.STARTING


def write_list(path: Path, *made: Engine) -> None:
    beside = path.with_suffix(".new")
    beside.write_text("\n".join(f"- {{name: f-{one.port}, address: '{one.address}'}}" for one in made) or "[]")
    beside.replace(path)


async def test_instances_come_and_go_with_a_watched_file_and_are_mirrored(tmp_path: Path) -> None:
    first, second = Engine(), Engine()
    mirrored: list[Mapping[str, Sequence[str]]] = []
    async with engines(first, second):
        write_list(tmp_path / "list.yaml", first)
        async with collecting(a_fleet({"file": "list.yaml"}), mirror=mirrored.append, folder=tmp_path) as seen:
            await seen.becomes(f"f-{first.port}", State.READY)
            assert mirrored == [{"site-a": (first.address,)}]
            write_list(tmp_path / "list.yaml", first, second)
            await seen.becomes(f"f-{second.port}", State.READY)
            write_list(tmp_path / "list.yaml", second)

            async def only_second() -> bool:
                return set(await seen.rows()) == {f"f-{second.port}"}

            await eventually(only_second)
            count = first.count("/metrics")
            busy = second.count("/metrics")
            await eventually(lambda: second.count("/metrics") > busy + 5)
            assert first.count("/metrics") <= count + 1
    both = tuple(sorted((first.address, second.address)))
    assert mirrored == [{"site-a": (first.address,)}, {"site-a": both}, {"site-a": (second.address,)}]


async def test_a_name_that_moves_to_another_address_starts_anew(tmp_path: Path) -> None:
    good, loading = Engine(), Engine(page_status=503)
    listing = tmp_path / "list.yaml"
    async with engines(good, loading):
        listing.write_text(f"[{{name: f, address: '{good.address}'}}]")
        async with collecting(a_fleet({"file": "list.yaml"}), folder=tmp_path) as seen:
            await seen.becomes("f", State.READY)
            listing.write_text(f"[{{name: f, address: '{loading.address}'}}]")
            moved = await seen.becomes("f", State.STARTING)
            assert moved.instance.address == loading.address


async def test_draining_set_in_the_file_takes_effect_without_a_gap(tmp_path: Path) -> None:
    engine = Engine()
    listing = tmp_path / "list.yaml"
    async with engines(engine):
        listing.write_text(f"[{{name: f, address: '{engine.address}'}}]")
        async with collecting(a_fleet({"file": "list.yaml"}), folder=tmp_path) as seen:
            await seen.becomes("f", State.READY)
            listing.write_text(f"[{{name: f, address: '{engine.address}', draining: true}}]")
            await seen.becomes("f", State.DRAINING)
    assert engine.count("/v1/models") == 1


async def test_a_mirror_that_fails_is_tried_until_it_works_and_reported_once() -> None:
    engine, tries = Engine(), [0]

    def mirror(_clusters: Mapping[str, Sequence[str]]) -> None:
        tries[0] += 1
        if tries[0] < 4:
            raise OSError("disk full")

    with capture_logs() as logs:
        async with engines(engine), collecting(a_fleet(static(engine)), mirror=mirror) as seen:
            await eventually(lambda: tries[0] == 4)
            await seen.becomes("a-0", State.READY)
            count = engine.count("/metrics")
            await eventually(lambda: engine.count("/metrics") > count + 5)
    assert tries[0] == 4
    assert [log["event"] for log in logs if log["event"].startswith("mirror")] == ["mirror_failed", "mirror_written"]


async def test_a_site_whose_list_is_not_known_yet_is_not_mirrored_as_empty(tmp_path: Path) -> None:
    engine = Engine()
    mirrored: list[Mapping[str, Sequence[str]]] = []
    async with engines(engine):
        policy = a_fleet(static(engine), {"file": "later.yaml"})
        async with collecting(policy, mirror=mirrored.append, folder=tmp_path) as seen:
            await seen.becomes("a-0", State.READY)
            assert mirrored in ([], [{}])
            write_list(tmp_path / "later.yaml")
            await eventually(lambda: {"site-a": (engine.address,)} in mirrored)


async def test_states_are_logged_when_they_change_only() -> None:
    engine = Engine()
    with capture_logs() as logs:
        async with engines(engine), collecting(a_fleet(static(engine))) as seen:
            await seen.becomes("a-0", State.READY)
            count = engine.count("/metrics")
            await eventually(lambda: engine.count("/metrics") > count + 10)
    assert [log["state"] for log in logs if log["event"] == "instance_state"] == [State.READY]


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"\x00\xff\xfe\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: abc\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 50\r\n\r\ncut",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 3\r\n\r\nabc",
        b"HTTP/1.1 200 OK\r\nContent-Encoding: unheard\r\nContent-Length: 3\r\n\r\nabc",
        b"HTTP/1.1 200 OK\r\nX: " + b"y" * 100_000 + b"\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nBad Header\xff: \xfe\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 301 Moved\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/9.9 999 \xff\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n\x01\x02",
        b"SSH-2.0-OpenSSH\r\n",
    ],
)
async def test_what_is_no_http_at_all_harms_nobody(said: bytes) -> None:
    asked = [0]

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked[0] += 1
        with suppress(OSError, asyncio.IncompleteReadError):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(said)
            await writer.drain()
        writer.close()

    good = Engine()
    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    odd = Engine(port=server.sockets[0].getsockname()[1])
    async with server, engines(good), collecting(a_fleet(static(good, odd))) as seen:
        await eventually(lambda: asked[0] > 3)
        await seen.becomes("a-0", State.READY)
        await seen.shows("a-1", lambda reading: reading.waiting is None)
