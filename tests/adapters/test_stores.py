"""One contract over both stores."""

from collections.abc import AsyncIterator, Iterator

import pytest
import redis
import redis.asyncio

from extproc.adapters.memory_store import MemoryStore
from extproc.adapters.redis_store import KEY, RedisAccess, RedisStore
from extproc.model import Reading, State
from extproc.ports import Store, StoreAway
from tests.builders import a_reading, an_instance
from tests.e2e.redis_process import RedisProcess, running_redis
from tests.polling import eventually


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisProcess]:
    with running_redis(tmp_path_factory.mktemp("redis")) as running:
        yield running


@pytest.fixture
def emptied(server: RedisProcess) -> RedisProcess:
    with redis.Redis.from_url(server.url) as client:
        client.flushall()
    return server


@pytest.fixture(params=["memory", "redis"])
async def store(request: pytest.FixtureRequest) -> AsyncIterator[Store]:
    if request.param == "memory":
        made: Store = MemoryStore()
    else:
        made = RedisStore(RedisAccess(request.getfixturevalue("emptied").url))
    yield made
    await made.close()


def rows(*names: str, **fields: object) -> list[Reading]:
    return [a_reading(an_instance(name), **fields) for name in names]


async def until_gone(store: Store, names: list[str]) -> None:
    async def gone() -> bool:
        return [one.instance.name for one in await store.read()] == names

    await eventually(gone)


async def test_an_empty_store_reads_as_nothing(store: Store) -> None:
    assert list(await store.read()) == []


async def test_every_field_survives_and_rows_come_in_order_of_name(store: Store) -> None:
    full = Reading(
        instance=an_instance("b-0", "b", models=("m", "n"), dialect="vllm", draining=True),
        state=State.LOST,
        at=1_700_000_000.25,
        waiting=3.0,
        running=4.0,
        kv_usage=0.5,
        prefix_hits=10.0,
        prefix_queries=20.0,
        block_tokens=16,
        kv_blocks=1000,
        models=("m", "lora"),
        error="connection refused",
    )
    bare = Reading(instance=an_instance("a-0"), state=State.STARTING, at=1.0)
    await store.write([full, bare], 10)
    assert list(await store.read()) == [bare, full]


async def test_a_later_write_replaces_a_row_and_leaves_others(store: Store) -> None:
    await store.write(rows("a-0", "a-1", waiting=1.0), 10)
    await store.write(rows("a-1", waiting=2.0), 10)
    assert [one.waiting for one in await store.read()] == [1.0, 2.0]


async def test_a_row_that_is_not_renewed_vanishes_while_others_live(store: Store) -> None:
    await store.write(rows("a-0", "a-1"), 0.05)
    await store.write(rows("a-1"), 10)
    await until_gone(store, ["a-1"])


async def test_a_short_write_does_not_shorten_the_life_of_other_rows(store: Store) -> None:
    await store.write(rows("a-0"), 10)
    await store.write(rows("a-1"), 0.05)
    await until_gone(store, ["a-0"])


async def test_dropped_rows_are_gone_at_once_and_dropping_unknown_ones_is_fine(store: Store) -> None:
    await store.write(rows("a-0", "a-1"), 10)
    await store.drop(["a-0", "never-there"])
    await store.drop([])
    assert [one.instance.name for one in await store.read()] == ["a-1"]


async def test_writing_nothing_is_fine(store: Store) -> None:
    await store.write([], 10)
    assert list(await store.read()) == []


async def test_unchanged_rows_are_the_same_objects_at_the_next_read(store: Store) -> None:
    await store.write(rows("a-0", "a-1"), 10)
    first = await store.read()
    await store.write(rows("a-1", waiting=9.0), 10)
    second = await store.read()
    assert second[0] is first[0]
    assert second[1].waiting == 9.0


async def test_two_stores_on_one_redis_share_rows(emptied: RedisProcess) -> None:
    one, other = RedisStore(RedisAccess(emptied.url)), RedisStore(RedisAccess(emptied.url))
    await one.write(rows("a-0"), 10)
    assert [reading.instance.name for reading in await other.read()] == ["a-0"]
    await one.close()
    await other.close()
    await other.close()


async def test_nothing_is_left_in_redis_once_all_rows_have_expired(emptied: RedisProcess) -> None:
    one = RedisStore(RedisAccess(emptied.url))
    await one.write(rows("a-0", "a-1"), 0.05)
    await one.close()
    async with redis.asyncio.Redis.from_url(emptied.url) as client:

        async def gone() -> bool:
            return not await client.exists(KEY)

        await eventually(gone)


async def test_expired_rows_are_swept_from_redis_by_the_next_write(emptied: RedisProcess) -> None:
    one = RedisStore(RedisAccess(emptied.url))
    await one.write(rows("a-0"), 10)
    await one.write(rows("a-1"), 0.05)
    await until_gone(one, ["a-0"])
    await one.write(rows("a-0"), 10)
    async with redis.asyncio.Redis.from_url(emptied.url) as client:
        assert await client.hkeys(KEY) == [b"a-0"]
    await one.close()


async def test_a_row_of_another_version_is_left_out_and_spoils_no_other(emptied: RedisProcess) -> None:
    one = RedisStore(RedisAccess(emptied.url))
    await one.write(rows("a-0"), 10)
    async with redis.asyncio.Redis.from_url(emptied.url) as client:
        await client.hset(KEY, mapping={"a-1": b"99999999999999:\xc1", "a-2": b"no end", "a-3": b""})
    assert [reading.instance.name for reading in await one.read()] == ["a-0"]
    await one.close()


async def test_a_foreign_key_of_our_name_is_an_absent_store_and_no_crash(emptied: RedisProcess) -> None:
    async with redis.asyncio.Redis.from_url(emptied.url) as client:
        await client.set(KEY, "text")
    one = RedisStore(RedisAccess(emptied.url))
    with pytest.raises(StoreAway):
        await one.read()
    with pytest.raises(StoreAway):
        await one.write(rows("a-0"), 10)
    await one.close()


def test_a_url_that_is_none_is_an_error_at_once() -> None:
    with pytest.raises(ValueError, match="URL"):
        RedisStore(RedisAccess("http://127.0.0.1"))


async def test_a_thousand_rows_are_read_in_one_round_trip(emptied: RedisProcess) -> None:
    one = RedisStore(RedisAccess(emptied.url))
    await one.write(rows(*(f"a-{i:04}" for i in range(1000))), 10)
    async with redis.asyncio.Redis.from_url(emptied.url) as client:
        before = (await client.info("commandstats"))["cmdstat_hgetall"]["calls"]
        assert len(await one.read()) == 1000
        assert (await client.info("commandstats"))["cmdstat_hgetall"]["calls"] == before + 1
    await one.close()
