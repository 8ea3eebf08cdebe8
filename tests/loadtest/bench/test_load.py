"""The load generator against the engines that answer at once: both real, without an Envoy between them."""

import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from loadtest.bench.bodies import MODEL
from loadtest.bench.load import Generator, Order


@contextmanager
def engines(*options: str) -> Iterator[int]:
    command = [sys.executable, "-m", "loadtest.bench.upstream", "--model", MODEL, *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield int(json.loads(process.stdout.readline())["ports"][0])
    finally:
        process.terminate()
        process.communicate(timeout=10)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/chat/completions?chunks=5"])
async def test_every_client_is_answered_again_and_again(path: str) -> None:
    with engines() as port:
        order = Order(port, "40KB", 4, 0.5, path, watch={"own": [os.getpid()]})
        found = await Generator().run(order)
    assert not found.failed
    assert found.requests == len(found.latencies_us) > 20
    assert all(0 < one < 5_000_000 for one in found.latencies_us)
    assert 0 < found.cpu_s["own"] <= found.seconds * 1.5


async def test_what_is_no_200_is_counted_as_failed_and_not_as_answered() -> None:
    with engines() as port:
        found = await Generator().run(Order(port, "2KB", 2, 0.2, path="/v1/chat/completions?nothing"))
        assert not found.failed
        bad = await Generator().run(Order(port, "2KB", 2, 0.2, path="/nowhere"))
    assert bad.requests == 0
    assert set(bad.failed) == {"HTTP/1.1 404 Not Found"}


async def test_who_never_answers_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loadtest.bench.load.STUCK_S", 0.2)
    with engines("--hang") as port:
        found = await Generator().run(Order(port, "2KB", 3, 0.1))
    assert found.requests == 0
    assert found.failed == {"no answer": 3}


def test_the_collector_finds_what_it_looks_for() -> None:
    with engines() as port:
        pages = {}
        for path in ("/metrics", "/health", "/v1/models"):
            with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as answer:
                assert answer.status == 200
                pages[path] = answer.read().decode()
    assert json.loads(pages["/v1/models"])["data"][0]["id"] == MODEL
    assert "vllm:num_requests_running" in pages["/metrics"]
