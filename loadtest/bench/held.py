"""Memory of requests held at the gateway: thousands in line at once, through the real Envoy.

Every instance takes one request and never answers, so all others wait. Counted is the growth of the server's resident
memory, divided by what it holds; Envoy's own growth is beside it.
"""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

import psutil
from ruamel.yaml import YAML

from loadtest.bench import meshes, parts
from loadtest.bench.bodies import MODEL, SIZES, bodies
from loadtest.bench.load import Numbers

REQUESTS = 5_000
_WARM = 200
_LONGEST_MS = 600_000
_AT_ONCE = 64
_SETTLE_S = 1.0


@dataclass(frozen=True, slots=True)
class Held:
    """Bytes of one held request."""

    requests: int
    bytes_each: int
    envoy_bytes_each: int
    left_after: int
    """Requests that the server still counted, held or in flight, once every client had gone: 0 if nothing leaks."""


async def measure(folder: Path, requests: int, step: Callable[[str], None]) -> Held:
    """Return what *requests* held at once cost."""
    running = parts.Parts(folder)
    try:
        step("held: starting")
        names = parts.shipped_instances()
        engines = await running.engines(*names.values(), hang=True)
        policies = folder / "policies"
        policy = parts.lay_out(policies, dict(zip(names, engines, strict=True)), _hold_all)
        redis = await running.redis()
        await running.collector(policies, redis)
        server = await running.server(policies, redis)
        envoy = await running.envoy("held", meshes.config(policy, server.addresses))
        async with _clients(envoy.port, _WARM):
            await _holds(server, _WARM)  # what is loaded once, at the first requests, is not a request's
        await _holds(server, 0)
        before = _rss(server.pids()), _rss((envoy.envoy,))
        step(f"held: {requests} requests")
        async with _clients(envoy.port, requests):
            held = await _holds(server, requests)
            await asyncio.sleep(_SETTLE_S)
            after = _rss(server.pids()), _rss((envoy.envoy,))
        left = await _holds(server, 0)
        return Held(held, (after[0] - before[0]) // held, (after[1] - before[1]) // held, left)
    finally:
        await running.stop()


def _hold_all(policies: Path) -> None:
    yaml = YAML()
    document = yaml.load(policies / "slomax.yaml")
    document["max_in_flight"] = 1
    for one in document["classes"]:
        one["longest_wait_ms"] = _LONGEST_MS
    yaml.dump(document, policies / "slomax.yaml")


@contextlib.asynccontextmanager
async def _clients(port: int, count: int) -> AsyncIterator[None]:
    """Have *count* clients wait for answers, and more until every instance has its one; they leave at the end."""
    running = sum(model == MODEL for model in parts.shipped_instances().values())
    templates, numbers, gate = cycle(list(bodies(SIZES["2KB"]))), Numbers(), asyncio.Semaphore(_AT_ONCE)

    async def send() -> asyncio.StreamWriter:
        async with gate:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            body = next(templates)
            head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: bench\r\ncontent-length: {len(body)}\r\n\r\n"
            writer.write(head.encode() + body.numbered(numbers.next()))
            await writer.drain()
            return writer

    writers = await asyncio.gather(*(send() for _ in range(count + running)))
    try:
        yield
    finally:
        for writer in writers:
            writer.transport.abort()


async def _holds(server: parts.Server, wanted: int) -> int:
    """Return how many requests the server holds once it is *wanted*, or a minute on; with 0 wanted, holds or runs."""
    count = -1
    for _ in range(600):
        _, body = await parts.get(f"{server.admin}/debug/fleet")
        if body:
            fleet = json.loads(body)
            count = sum(fleet["held"].values()) + (0 if wanted else fleet["in_flight"])
            if count == wanted:
                break
        await asyncio.sleep(0.1)
    if wanted and count < wanted:
        raise parts.Failed(f"the server holds {count} of {wanted} requests")
    return count


def _rss(pids: tuple[int, ...]) -> int:
    return sum(int(psutil.Process(pid).memory_info().rss) for pid in pids)
