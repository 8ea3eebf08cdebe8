"""The locust file as a person runs it: a process, against an engine or against something that misbehaves."""

import contextlib
import csv
import json
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
MODEL = "qwen3-32b"

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]


def locust(url: str, folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Run locust headless from another folder, as an installed user would."""
    command = [sys.executable, "-m", "locust", "-f", str(ROOT / "loadtest" / "locustfile.py"), "--headless", "-H", url]
    command += [
        "-u",
        "4",
        "-r",
        "4",
        "-t",
        "3s",
        "--csv",
        "run",
        "--think-s",
        "0.05",
        "--answer-tokens",
        "12",
        *options,
    ]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=90, check=False)


def rows(folder: Path, file: str) -> list[dict[str, str]]:
    with (folder / f"run_{file}.csv").open(newline="") as lines:
        return list(csv.DictReader(lines))


@contextlib.contextmanager
def an_engine() -> Iterator[str]:
    command = [sys.executable, "-m", "loadtest.engine", "--instance", f"e-0:0:{MODEL}:qwen3-32b-h100x4-vllm"]
    engine = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert engine.stdout is not None
        port = json.loads(engine.stdout.readline())["ports"]["e-0"]
        yield f"http://127.0.0.1:{port}"
    finally:
        engine.terminate()
        engine.communicate(timeout=20)


@contextlib.contextmanager
def a_server(status: int, answer: bytes) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Give a server that says *answer* to everything, and the requests that it got: headers and body."""
    seen: list[dict[str, Any]] = []

    class Says(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            seen.append({"key": self.headers["authorization"], "body": body})
            self.send_response(status)
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            with contextlib.suppress(BrokenPipeError):  # the run ended meanwhile
                self.wfile.write(answer)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Says)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", seen
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_first_tokens_and_tokens_are_in_the_table_and_in_the_summary(tmp_path: Path) -> None:
    with an_engine() as url:
        done = locust(url, tmp_path)
        with urllib.request.urlopen(f"{url}/metrics", timeout=5) as answer:
            metrics = answer.read().decode()
    assert done.returncode == 0, done.stderr[-2000:]
    found = {row["Type"]: row for row in rows(tmp_path, "stats")}
    answers = int(found["tokens"]["Request Count"])
    assert answers > 5
    assert int(found["TTFT"]["Request Count"]) == int(found["TPOT"]["Request Count"]) == answers
    assert float(found["tokens"]["Average Response Time"]) == 12
    assert 0 < float(found["TTFT"]["Average Response Time"]) < float(found["POST"]["Average Response Time"])
    assert "TTFT ms: p50 " in done.stdout
    assert "a second" in done.stdout
    hits = [line for line in metrics.splitlines() if line.startswith("vllm:prefix_cache_hits_total")]
    assert float(hits[0].rpartition(" ")[2]) > 0, "turns share their prefix"


def test_conversations_grow_and_tenants_take_turns(tmp_path: Path) -> None:
    events = [{"choices": [{"delta": {"content": "well"}}]}, {"choices": [], "usage": {"completion_tokens": 7}}]
    stream = b"".join(b"data: %b\n\n" % json.dumps(event).encode() for event in events) + b"data: [DONE]\n\n"
    with a_server(200, stream) as (url, seen):
        done = locust(url, tmp_path, "--turns", "3", "--api-keys", "k-1,k-2", "--model", "m-1")
    assert done.returncode == 0, done.stderr[-2000:]
    assert {one["key"] for one in seen} == {"Bearer k-1", "Bearer k-2"}
    assert {one["body"]["model"] for one in seen} == {"m-1"}
    assert {len(one["body"]["messages"]) for one in seen} == {2, 4, 6}
    later = next(one["body"]["messages"] for one in seen if len(one["body"]["messages"]) == 4)
    assert [one["role"] for one in later] == ["system", "user", "assistant", "user"]
    assert later[2]["content"] == "well"
    systems = {(one["key"], one["body"]["messages"][0]["content"]) for one in seen}
    assert len(systems) == 2, "a tenant's users share one system prompt"
    tokens = next(row for row in rows(tmp_path, "stats") if row["Type"] == "tokens")
    assert float(tokens["Average Response Time"]) == 7


@pytest.mark.parametrize(
    ("status", "answer", "reason"),
    [
        (429, b'{"error": {"code": "line_full", "message": "17 wait"}}', "429: line_full"),
        (200, b'data: {"error": {"message": "engine died"}}\n\ndata: [DONE]\n\n', "engine died"),
        (200, b'data: {"choices": [{"delta": {"content": "a"}}]}\n\n', "the stream ended without [DONE]"),
    ],
)
def test_what_went_wrong_is_a_failure_with_its_reason(tmp_path: Path, status: int, answer: bytes, reason: str) -> None:
    with a_server(status, answer) as (url, _):
        done = locust(url, tmp_path)
    assert done.returncode == 1
    failures = rows(tmp_path, "failures")
    assert len(failures) == 1
    assert reason in failures[0]["Error"]
    assert "had a token" in done.stdout
