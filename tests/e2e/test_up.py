"""`tokenfleet up`, as a person runs it."""

import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests.e2e.gateway import fetch, wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]


class Up:
    def __init__(self, folder: Path, *options: str) -> None:
        self.folder = folder
        self.out = folder / "out.txt"
        argv = [sys.executable, "-m", "extproc", "up", "--run-dir", str(folder / "run"), *options]
        env = {**os.environ, "COLUMNS": "200", "PYTHONUNBUFFERED": "1"}
        with self.out.open("wb") as out:
            self.process = subprocess.Popen(argv, stdout=out, stderr=out, start_new_session=True, env=env)

    @property
    def text(self) -> str:
        return self.out.read_text()

    def greeted(self) -> str:
        def done() -> bool:
            assert self.process.poll() is None, self.text
            return "Ctrl-C stops everything." in self.text

        wait_for(done, "greeting", 90)
        return self.text

    def children(self) -> list[psutil.Process]:
        found: list[psutil.Process] = psutil.Process(self.process.pid).children(recursive=True)
        return found

    def child(self, *words: str) -> psutil.Process:
        return next(one for one in self.children() if all(word in " ".join(one.cmdline()) for word in words))


@contextmanager
def an_up(folder: Path, *options: str) -> Iterator[Up]:
    up = Up(folder, *options)
    try:
        yield up
    finally:
        below = up.children() if up.process.poll() is None else []
        up.process.send_signal(signal.SIGINT)
        try:
            up.process.wait(30)
        except subprocess.TimeoutExpired:
            up.process.kill()
            up.process.wait()
        for one in psutil.wait_procs(below, timeout=10)[1]:
            one.kill()


def gone(processes: list[psutil.Process]) -> bool:
    return not any(one.is_running() and one.status() != psutil.STATUS_ZOMBIE for one in processes)


def curl_of(text: str) -> list[str]:
    """The command that the greeting tells a person to paste."""
    found = re.search(r"^ *(curl .*\\)\n *(-d .*)$", text, re.MULTILINE)
    assert found is not None, text
    return shlex.split(found[1].rstrip("\\") + found[2])


def test_what_it_prints_works_and_ctrl_c_leaves_nothing(tmp_path: Path) -> None:
    with an_up(tmp_path, "--workers", "2") as up:
        text = up.greeted()
        answer = subprocess.run(curl_of(text), capture_output=True, text=True, check=True, timeout=30).stdout
        assert "200 OK" in answer
        assert re.search(r"x-tokenfleet-why: class=\S+ site=paris instance=paris-\d queue", answer)
        assert answer.rstrip().endswith("data: [DONE]")
        for page in ("metrics", "fleet", "Envoy"):
            url = re.search(rf"^ *{page} +(http\S+)$", text, re.MULTILINE)
            assert url is not None
            assert fetch(url[1])[0] == 200
        below = up.children()
        assert len(below) >= 7, "redis, two engine hosts, collector, server with dispatcher and two workers, Envoy"
        up.process.send_signal(signal.SIGINT)
        assert up.process.wait(30) == 0
        assert gone(below)
        assert "everything is stopped" in up.text


def test_the_readme_shows_what_it_prints(tmp_path: Path) -> None:
    """Ports, times and folders apart."""
    readme = Path(__file__).parents[2].joinpath("README.md").read_text()
    shown = readme.partition("<!-- up -->\n```\n")[2].partition("\n```")[0]

    def normal(text: str) -> list[str]:
        text = re.sub(r"127\.0\.0\.1:\d+", "HOST", re.sub(r"\d:\d\d:\d\d", "TIME", text))
        return [line.rstrip() for line in re.sub(r"logs +\S+", "logs", text).splitlines()]

    with an_up(tmp_path) as up:
        assert normal(up.greeted()) == normal(shown)


@pytest.mark.parametrize("victim", [("envoy", "-c"), ("redis-server",), ("extproc", "collect"), ("loadtest.engine",)])
def test_a_child_that_dies_is_named_and_the_rest_is_brought_down(tmp_path: Path, victim: tuple[str, ...]) -> None:
    with an_up(tmp_path) as up:
        up.greeted()
        below = up.children()
        up.child(*victim).kill()
        assert up.process.wait(30) == 1
        assert re.search(r"stopped: (envoy|redis|collector|engines-\w+) ended with status -9", up.text)
        assert gone(below)


def test_a_killed_parent_leaves_no_orphans(tmp_path: Path) -> None:
    with an_up(tmp_path, "--workers", "2") as up:
        up.greeted()
        below = up.children()
        up.process.kill()
        wait_for(lambda: gone(below), "children end with their parent", 20)


def test_ctrl_c_while_it_starts_stops_what_has_started(tmp_path: Path) -> None:
    with an_up(tmp_path) as up:
        wait_for(lambda: len(up.children()) >= 2, "first children")
        below = up.children()
        up.process.send_signal(signal.SIGINT)
        assert up.process.wait(30) == 130
        assert gone(below)


def test_a_port_in_use_is_said_and_everything_is_brought_down(tmp_path: Path) -> None:
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with an_up(tmp_path, "--port", str(taken.getsockname()[1])) as up:
            assert up.process.wait(100) == 1
            assert "envoy" in up.text
            assert "everything is stopped" in up.text


def test_without_redis_it_says_so_and_works(tmp_path: Path) -> None:
    """A Redis that does not start stands in for none at all."""
    fake = tmp_path / "bin"
    fake.mkdir()
    (fake / "redis-server").write_text("#!/bin/sh\nexit 1\n")
    (fake / "redis-server").chmod(0o755)
    before = os.environ["PATH"]
    os.environ["PATH"] = f"{fake}:{before}"
    try:
        with an_up(tmp_path) as up:
            text = up.greeted()
            assert "no Redis" in text
            answer = subprocess.run(curl_of(text), capture_output=True, text=True, check=True, timeout=30).stdout
            assert "200 OK" in answer
    finally:
        os.environ["PATH"] = before
