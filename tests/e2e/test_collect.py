"""``tokenfleet collect`` as a process of its own, with a real Redis and engines on loopback."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from extproc.adapters.redis_store import RedisAccess, RedisStore
from extproc.model import Reading, State
from extproc.ports import StoreAway
from tests.adapters.telemetry.engines import Engine, engines
from tests.e2e.redis_process import PASSWORD, RedisProcess, running_redis
from tests.polling import eventually

pytestmark = pytest.mark.e2e

FLEET = """
home: here
models: {chat-model: {}}
telemetry: {scrape_ms: 20, expire_ms: 2000, timeout_ms: 500}
sites:
- name: here
  instances:
  - models: [chat-model]
    file: here.yaml
- name: there
  instances:
  - models: [chat-model]
    dns: localhost:9
"""


def command(*options: object) -> list[str]:
    return [sys.executable, "-m", "extproc", "collect", *map(str, options)]


class Fleet:
    """A policy folder whose one site is a watched file."""

    def __init__(self, folder: Path, *made: Engine) -> None:
        self.policy, self.eds = folder / "policy", folder / "eds"
        (self.policy / "profiles").mkdir(parents=True)
        (self.policy / "fleet.yaml").write_text(FLEET)
        (self.policy / "profiles" / "default.yaml").write_text("{source: test, a_ms: 10, c_ms: 0, d_ms: 0, e_ms: 40}")
        self.relist(*made)

    def relist(self, *made: Engine) -> None:
        rows = [{"name": f"e-{one.port}", "address": one.address} for one in made]
        beside = self.policy / ".here.yaml"
        beside.write_text(json.dumps(rows))
        beside.replace(self.policy / "here.yaml")

    def mirrored(self, cluster: str) -> list[int]:
        text = (self.eds / f"{cluster}.json").read_text()
        rows = json.loads(text)["resources"][0]["endpoints"][0]["lb_endpoints"]
        return sorted(row["endpoint"]["address"]["socket_address"]["port_value"] for row in rows)


@asynccontextmanager
async def collecting(fleet: Fleet, redis: str, *options: object) -> AsyncIterator[asyncio.subprocess.Process]:
    argv = command("--policy", fleet.policy, "--redis", redis, "--eds", fleet.eds, *options)
    process = await asyncio.create_subprocess_exec(
        *argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=os.environ | {"PYTHONWARNINGS": "error"}
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def ended(process: asyncio.subprocess.Process, by: signal.Signals) -> tuple[int, list[dict[str, object]]]:
    process.send_signal(by)
    out, _ = await asyncio.wait_for(process.communicate(), 10)
    assert process.returncode is not None
    return process.returncode, [json.loads(line) for line in out.splitlines()]


async def rows(store: RedisStore) -> dict[str, Reading]:
    try:
        return {one.instance.name: one for one in await store.read()}
    except StoreAway:
        return {}


async def shown(store: RedisStore, name: str, state: State) -> Reading:
    found: dict[str, Reading] = {}

    async def there() -> bool:
        found.clear()
        found.update(await rows(store))
        return name in found and found[name].state is state

    await eventually(there, 20)
    return found[name]


@asynccontextmanager
async def reading(redis: RedisProcess, password_file: Path | None = None) -> AsyncIterator[RedisStore]:
    store = RedisStore(RedisAccess(redis.url, password_file))
    try:
        yield store
    finally:
        await store.close()


@pytest.mark.parametrize("by", [signal.SIGTERM, signal.SIGINT])
async def test_it_collects_mirrors_follows_the_file_and_ends_clean(tmp_path: Path, by: signal.Signals) -> None:
    first, second, secret = Engine(), Engine(), tmp_path / "secret"
    secret.write_text(PASSWORD)
    with running_redis(tmp_path, PASSWORD) as redis:
        async with engines(first, second), reading(redis, secret) as store:
            fleet = Fleet(tmp_path, first)
            async with collecting(fleet, redis.url, "--redis-password-file", secret) as process:
                ready = await shown(store, f"e-{first.port}", State.READY)
                assert (ready.waiting, ready.instance.site) == (4.0, "here")
                assert fleet.mirrored("site-here") == [first.port]
                assert 9 in fleet.mirrored("site-there")
                await shown(store, "there-127.0.0.1-9", State.STARTING)
                fleet.relist(first, second)
                await shown(store, f"e-{second.port}", State.READY)
                assert fleet.mirrored("site-here") == sorted([first.port, second.port])
                await first.stop()
                await shown(store, f"e-{first.port}", State.LOST)
                status, logs = await ended(process, by)
    assert status == 0
    events = [log["event"] for log in logs]
    assert (events[0], events[-1]) == ("collecting", "collector_stopped")
    assert "Traceback" not in str(logs)


async def test_it_outlives_a_redis_that_stops_and_starts_empty(tmp_path: Path) -> None:
    engine = Engine()
    with running_redis(tmp_path) as redis:
        async with engines(engine), reading(redis) as store:
            fleet, name = Fleet(tmp_path, engine), f"e-{engine.port}"
            async with collecting(fleet, redis.url) as process:
                await shown(store, name, State.READY)
                redis.stop()
                scraped = engine.count("/metrics")
                await eventually(lambda: engine.count("/metrics") > scraped + 5)
                redis.start()
                await shown(store, name, State.READY)
                status, logs = await ended(process, signal.SIGTERM)
    assert status == 0
    assert [log["event"] for log in logs if str(log["event"]).startswith("store")] == ["store_away", "store_back"]


async def test_it_starts_before_redis_does(tmp_path: Path) -> None:
    engine = Engine()
    redis = RedisProcess(tmp_path)
    try:
        async with engines(engine), collecting(Fleet(tmp_path, engine), redis.url), reading(redis) as store:
            await eventually(lambda: engine.count("/metrics") > 3, 20)
            redis.start()
            await shown(store, f"e-{engine.port}", State.READY)
    finally:
        redis.close()


def test_a_broken_policy_or_url_ends_it_at_once_with_the_reason(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path)
    told = subprocess.run(command("--policy", tmp_path / "none"), capture_output=True, text=True, check=False)
    assert (told.returncode, "no such folder" in told.stderr) == (2, True)
    told = subprocess.run(
        command("--policy", fleet.policy, "--redis", "http://x"), capture_output=True, text=True, check=False
    )
    assert (told.returncode, "URL" in told.stderr) == (2, True)
    (tmp_path / "file").write_text("")
    told = subprocess.run(
        command("--policy", fleet.policy, "--eds", tmp_path / "file"), capture_output=True, text=True, check=False
    )
    assert (told.returncode, "file" in told.stderr) == (1, True)


def test_every_cluster_has_a_file_before_anything_is_known_and_an_earlier_one_stays(tmp_path: Path) -> None:
    from extproc.adapters import eds_files, policy_files
    from extproc.commands.collect import lay_out

    fleet = Fleet(tmp_path)
    eds_files.write(fleet.eds, {"site-here": ("10.0.0.1:8000",)})
    lay_out(policy_files.load(fleet.policy), fleet.eds)
    assert fleet.mirrored("site-here") == [8000]
    assert fleet.mirrored("site-there") == []
