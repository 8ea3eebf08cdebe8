"""Redis that stops, hangs, asks for a password or speaks TLS."""

import asyncio
import ssl
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
import trustme

from extproc.adapters.redis_store import RedisAccess, RedisStore
from extproc.ports import StoreAway
from tests.builders import a_reading
from tests.e2e.redis_process import PASSWORD, RedisProcess, running_redis
from tests.polling import eventually

pytestmark = pytest.mark.e2e


@asynccontextmanager
async def opened(access: RedisAccess, timeout_s: float = 1.0) -> AsyncIterator[RedisStore]:
    store = RedisStore(access, timeout_s=timeout_s)
    try:
        yield store
    finally:
        await store.close()


async def works(store: RedisStore) -> bool:
    await store.write([a_reading(waiting=3.0)], 10)
    return [one.waiting for one in await store.read()] == [3.0]


async def works_again(store: RedisStore) -> bool:
    try:
        return await works(store)
    except StoreAway:
        return False


@asynccontextmanager
async def tls_in_front(redis: RedisProcess, context: ssl.SSLContext) -> AsyncIterator[int]:
    """Serve TLS before *redis*, as a proxy or a managed Redis does; the bundled server is built without TLS."""
    tasks: set[asyncio.Task[None]] = set()

    async def pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with suppress(OSError, ssl.SSLError):
            while data := await source.read(65536):
                sink.write(data)
                await sink.drain()
        sink.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inner_reader, inner_writer = await asyncio.open_unix_connection(redis.socket)
        for task in (pump(reader, inner_writer), pump(inner_reader, writer)):
            tasks.add(asyncio.ensure_future(task))

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class Papers:
    """A made-up authority, a server's certificate, a client's, and a stranger's authority."""

    def __init__(self, folder: Path) -> None:
        ours, strange = trustme.CA(), trustme.CA()
        self.ca, self.strange_ca = folder / "ca.pem", folder / "strange.pem"
        ours.cert_pem.write_to_path(self.ca)
        strange.cert_pem.write_to_path(self.strange_ca)
        client = ours.issue_cert("collector@tokenfleet.test")
        self.cert, self.key = folder / "client.pem", folder / "client.key"
        client.cert_chain_pems[0].write_to_path(self.cert)
        client.private_key_pem.write_to_path(self.key)
        self.server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        ours.issue_cert("127.0.0.1").configure_cert(self.server)
        self.asking = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        ours.issue_cert("127.0.0.1").configure_cert(self.asking)
        self.asking.verify_mode = ssl.CERT_REQUIRED
        ours.configure_trust(self.asking)


@pytest.fixture
def papers(tmp_path: Path) -> Papers:
    return Papers(tmp_path)


async def test_a_redis_that_stops_is_away_and_one_that_comes_back_is_used_again(tmp_path: Path) -> None:
    with running_redis(tmp_path) as redis:
        async with opened(RedisAccess(redis.url)) as store:
            assert await works(store)
            redis.stop()
            for _ in range(3):
                with pytest.raises(StoreAway):
                    await store.read()
                with pytest.raises(StoreAway):
                    await store.write([a_reading()], 10)
                with pytest.raises(StoreAway):
                    await store.drop(["a-0"])
            redis.start()
            assert await works(store)  # at the first try, although the pooled connection is dead


async def test_a_redis_that_hangs_blocks_no_longer_than_the_time_out(tmp_path: Path) -> None:
    with running_redis(tmp_path) as redis:
        async with opened(RedisAccess(redis.url), timeout_s=0.2) as store:
            assert await works(store)
            redis.freeze()
            began = time.monotonic()
            with pytest.raises(StoreAway):
                await store.read()
            with pytest.raises(StoreAway):
                await store.write([a_reading()], 10)
            assert time.monotonic() - began < 2.0
            redis.thaw()
            await eventually(lambda: works_again(store))


async def test_an_answer_that_came_too_late_is_not_taken_for_the_next_one(tmp_path: Path) -> None:
    with running_redis(tmp_path) as redis:
        async with opened(RedisAccess(redis.url), timeout_s=0.2) as store:
            await store.write([a_reading(waiting=1.0)], 60)
            redis.freeze()
            with pytest.raises(StoreAway):
                await store.write([a_reading(waiting=2.0)], 60)
            redis.thaw()
            await eventually(lambda: works_again(store))


async def test_nobody_there_is_away(tmp_path: Path) -> None:
    async with opened(RedisAccess(f"unix://{tmp_path}/none")) as store:
        with pytest.raises(StoreAway):
            await store.read()


async def test_a_password_may_stand_in_the_url_or_in_a_file(tmp_path: Path) -> None:
    secret = tmp_path / "password"
    secret.write_text(f"{PASSWORD}\n")
    with running_redis(tmp_path, PASSWORD) as redis:
        written = f"unix://:{PASSWORD.replace(' ', '%20')}@{redis.socket}"
        async with opened(RedisAccess(written)) as store:
            assert await works(store)
        async with opened(RedisAccess(redis.url, password_file=secret)) as store:
            assert await works(store)


async def test_a_missing_or_wrong_password_is_away_until_the_file_has_the_right_one(tmp_path: Path) -> None:
    secret = tmp_path / "password"
    with running_redis(tmp_path, PASSWORD) as redis:
        async with opened(RedisAccess(redis.url)) as store:
            with pytest.raises(StoreAway, match="uthentication"):
                await store.read()
        async with opened(RedisAccess(redis.url, password_file=secret)) as store:
            with pytest.raises(StoreAway, match="password"):
                await store.read()
            secret.write_text("wrong")
            with pytest.raises(StoreAway):
                await store.read()
            secret.write_text(PASSWORD)
            assert await works(store)


async def test_tls_with_our_authority_and_a_password_works(tmp_path: Path, papers: Papers) -> None:
    secret = tmp_path / "password"
    secret.write_text(PASSWORD)
    with running_redis(tmp_path, PASSWORD) as redis:
        async with tls_in_front(redis, papers.server) as port:
            access = RedisAccess(f"rediss://127.0.0.1:{port}/0", password_file=secret, ca=papers.ca)
            async with opened(access) as store:
                assert await works(store)


async def test_tls_of_a_strange_authority_is_not_trusted(tmp_path: Path, papers: Papers) -> None:
    with running_redis(tmp_path) as redis:
        async with tls_in_front(redis, papers.server) as port:
            for ca in (papers.strange_ca, None):
                async with opened(RedisAccess(f"rediss://127.0.0.1:{port}/0", ca=ca)) as store:
                    with pytest.raises(StoreAway, match="certificate"):
                        await store.read()


async def test_tls_that_asks_for_our_certificate_gets_it(tmp_path: Path, papers: Papers) -> None:
    with running_redis(tmp_path) as redis:
        async with tls_in_front(redis, papers.asking) as port:
            url = f"rediss://127.0.0.1:{port}/0"
            async with opened(RedisAccess(url, ca=papers.ca, cert=papers.cert, key=papers.key)) as store:
                assert await works(store)
            async with opened(RedisAccess(url, ca=papers.ca)) as store:
                with pytest.raises(StoreAway):
                    await store.read()
