"""A whole gateway in parts that a test can kill and start again: Redis, engines, collector, server, Envoy."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
from ruamel.yaml import YAML

from extproc.adapters import eds_files, policy_files
from extproc.adapters.envoy_config import Mesh, MutualTls, write
from tests.e2e.envoy_process import EnvoyProcess, start_envoy
from tests.e2e.redis_process import RedisProcess

MODEL = "chat-model"
OTHER = "other-model"
PROFILE = {"source": "made up for tests", "a_ms": 5, "c_ms": 0.1, "d_ms": 0.01, "e_ms": 10}
SITES = {"a": ["eu"], "b": ["us"]}
START_S = 30.0


def wait_for(holds: Callable[[], Any], what: str, seconds: float = START_S) -> Any:
    """Poll until *holds* returns something; fail naming *what*."""
    until = time.monotonic() + seconds
    while True:
        found = holds()
        if found:
            return found
        assert time.monotonic() < until, f"{what}: not within {seconds} s"
        time.sleep(0.03)


def fetch(url: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()
    except OSError:
        return 0, ""


class Gateway:
    """Two sites of three instances (two with ``chat-model``, one with ``other-model``), and everything before them."""

    def __init__(
        self,
        folder: Path,
        *,
        files: Mapping[str, Any] | None = None,
        workers: int = 1,
        listed: Mapping[str, Any] | None = None,
        tls: Mapping[str, Mapping[str, Path]] | None = None,
        **mesh: Any,
    ) -> None:
        self.folder = folder
        self.policy = folder / "policies"
        self.eds = folder / "eds"
        self.files = dict(files or {})
        self.workers = workers
        self.mesh = mesh
        self._tls = {} if tls is None else tls["server"]
        if tls is not None:
            self.mesh["tls"] = MutualTls(**tls["envoy"], server_name="server.test")
        self.addresses: dict[str, str] = {}
        self.children: dict[str, subprocess.Popen[bytes]] = {}
        self.admin = ""
        self._telemetry = {"scrape_ms": 100, "lost_after_ms": 1500, "refresh_ms": 50} | dict(listed or {})
        self._short = Path(tempfile.mkdtemp(prefix="tf-"))  # socket paths hold 107 bytes
        self._port = free_ports(1)
        folder.mkdir(parents=True, exist_ok=True)
        self.redis = RedisProcess(folder)
        self.envoy: EnvoyProcess | None = None

    # --- start and stop

    def start(self) -> None:
        self.redis.start()
        for site in SITES:
            self.start_engines(site)
        for site in SITES:
            self._hear(site)
        self._write_policy()
        self.start_collector()
        self.start_server()
        self.start_envoy()

    def start_engines(self, site: str) -> None:
        names = {f"{site}-0": MODEL, f"{site}-1": MODEL, f"{site}-2": OTHER}
        argv = [sys.executable, "-m", "loadtest.engine", "--profiles", str(self._profiles())]
        for name, model in names.items():
            port = self.addresses.get(name, ":0").rpartition(":")[2]
            argv += ["--instance", f"{name}:{port}:{model}:default"]
        self.log(f"engines-{site}").unlink(missing_ok=True)
        self._spawn(f"engines-{site}", argv)

    def _hear(self, site: str) -> None:
        def ready() -> dict[str, Any] | None:
            lines = self.log(f"engines-{site}").read_text().splitlines()
            return next((json.loads(line) for line in lines if line.startswith('{"ready"')), None)

        found = wait_for(ready, f"engines of {site}")
        self.addresses |= {name: f"127.0.0.1:{port}" for name, port in found["ports"].items()}

    def start_collector(self) -> None:
        eds_files.write(self.eds, {f"site-{site}": () for site in SITES})
        argv = ["collect", "--policy", str(self.policy), "--redis", self.redis.url, "--eds", str(self.eds)]
        self._spawn("collector", [sys.executable, "-m", "extproc", *argv])

    @property
    def sockets(self) -> list[str]:
        if self._tls:
            return [f"127.0.0.1:{self._port}"]
        return [f"unix:{self._short}/p{i}" for i in range(self.workers)]

    def start_server(self) -> None:
        port = int(self.admin.rpartition(":")[2]) if self.admin else free_ports(1 + self.workers)
        self.admin = f"http://127.0.0.1:{port}"
        argv = ["serve", "--policy", str(self.policy), "--redis", self.redis.url, "--admin", f"127.0.0.1:{port}"]
        argv += ["--workers", str(self.workers), "--drain-s", "3"]
        argv += [part for name, file in self._tls.items() for part in (f"--tls-{name}", str(file))]
        argv += [part for socket in self.sockets for part in ("--listen", socket)]
        self._spawn("server", [sys.executable, "-m", "extproc", *argv])
        for url in self.admins:
            wait_for(lambda url=url: fetch(f"{url}/readyz")[0] == 200, f"{url} ready")  # type: ignore[misc]
        wait_for(lambda: set(self.states().values()) == {"ready"}, "all instances ready")

    @property
    def admins(self) -> list[str]:
        """Admin pages of the process that decides, then of the workers where there are several."""
        host, _, port = self.admin.rpartition(":")
        return [f"{host}:{int(port) + i}" for i in range(1 if self.workers == 1 else 1 + self.workers)]

    def start_envoy(self) -> None:
        mesh = Mesh(host="127.0.0.1", port=0, admin_port=0, servers=tuple(self.sockets), eds=self.eds, **self.mesh)
        self.envoy = start_envoy(write(policy_files.load(self.policy), mesh), self.folder / "envoy")
        wait_for(lambda: fetch(f"{self.url}/v1/models")[0] in (200, 404), "Envoy reaches the server")

    def close(self) -> None:
        if self.envoy is not None:
            self.envoy.stop()
        for name in reversed(list(self.children)):
            self.stop(name)
        self.redis.close()
        shutil.rmtree(self._short, ignore_errors=True)

    def stop(self, name: str, sig: int = signal.SIGTERM) -> None:
        child = self.children.pop(name)
        below = psutil.Process(child.pid).children(recursive=True) if child.poll() is None else []
        child.send_signal(signal.SIGCONT)
        child.send_signal(sig)
        try:
            child.wait(15)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
        for orphan in psutil.wait_procs(below, timeout=10)[1]:
            orphan.kill()

    def pids(self, command: str) -> list[int]:
        """Processes of the server that run *command* (``worker``, ``dispatcher``), in order of start."""
        below = psutil.Process(self.children["server"].pid).children()
        found = [one for one in below if one.cmdline()[1:4] == ["-m", "extproc", command]]
        return [one.pid for one in sorted(found, key=lambda one: one.create_time())]

    # --- look

    @property
    def url(self) -> str:
        assert self.envoy is not None
        return self.envoy.url

    def log(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def verdicts(self) -> list[dict[str, Any]]:
        lines = self.log("server").read_text().splitlines()
        return [line for text in lines if text.startswith("{") and (line := json.loads(text))["event"] == "verdict"]

    def debug(self, page: int = 0) -> dict[str, Any]:
        status, text = fetch(f"{self.admins[page]}/debug/fleet")
        found: dict[str, Any] = json.loads(text) if status == 200 else {"sites": [], "in_flight": -1, "held": {}}
        return found

    def states(self) -> dict[str, str]:
        return {one["name"]: one["state"] for site in self.debug()["sites"] for one in site["instances"]}

    def resting(self) -> set[str]:
        return {one["name"] for site in self.debug()["sites"] for one in site["instances"] if one["resting"]}

    def in_flight(self) -> int:
        return int(self.debug()["in_flight"])

    def metric(self, name: str, page: int = 0, **labels: str) -> float:
        """Sum of a metric's samples that carry *labels*."""
        wanted = [f'{key.rstrip("_")}="{value}"' for key, value in labels.items()]
        total = 0.0
        for line in fetch(f"{self.admins[page]}/metrics")[1].splitlines():
            series, _, value = line.rpartition(" ")
            if series.partition("{")[0] == name and all(label in series for label in wanted):
                total += float(value)
        return total

    def fault(self, instance: str, **fault: Any) -> None:
        request = urllib.request.Request(
            f"http://{self.addresses[instance]}/fault",
            data=json.dumps(fault).encode(),
            headers={"content-type": "application/json"},
            method="POST",
        )
        with urllib.request.urlopen(request, timeout=5) as answer:
            assert answer.status == 200

    # --- pieces

    def _profiles(self) -> Path:
        folder = self.policy / "profiles"
        folder.mkdir(parents=True, exist_ok=True)
        YAML().dump(PROFILE, folder / "default.yaml")
        return folder

    def _write_policy(self) -> None:
        def group(site: str, names: list[str], model: str) -> dict[str, Any]:
            static = [{"name": f"{site}-{i}", "address": self.addresses[f"{site}-{i}"]} for i in names]
            return {"models": [model], "dialect": "vllm", "static": static}

        fleet = {
            "home": "a",
            "models": {MODEL: {"aliases": ["chat-alias"]}, OTHER: {}},
            "telemetry": self._telemetry,
            "sites": [
                {
                    "name": site,
                    "jurisdictions": regions,
                    "rtt_ms": 0 if site == "a" else 40,
                    "instances": [group(site, ["0", "1"], MODEL), group(site, ["2"], OTHER)],
                }
                for site, regions in SITES.items()
            ],
        }
        base: dict[str, Any] = {
            "fleet": fleet,
            "gateway": {"debug": True, "trust": {"tenant_header": "x-tenant"}},
            "tenants": {
                "tenants": {"euro": {"jurisdictions": ["eu"]}, "states": {"jurisdictions": ["us"]}, "bookkeeper": {}}
            },
            "slomax": {"classes": [{"name": "standard", "ttft_ms": 2000, "tpot_ms": 200, "longest_wait_ms": 20000}]},
        }
        for name, content in (base | self.files).items():
            merged = content if name not in base or name == "slomax" else {**base[name], **content}
            YAML().dump(merged, self.policy / f"{name}.yaml")

    def _spawn(self, name: str, argv: list[str]) -> None:
        with self.log(name).open("ab") as out:
            self.children[name] = subprocess.Popen(
                argv, stdout=out, stderr=out, env={**os.environ, "PYTHONUNBUFFERED": "1"}
            )


def free_ports(count: int) -> int:
    """First of *count* free ports in a row."""
    import socket

    while True:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            first = int(probe.getsockname()[1])
        try:
            for port in range(first, min(first + count, 65_536)):
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", port))
        except OSError:
            continue
        return first


@contextmanager
def a_gateway(folder: Path, **options: Any) -> Iterator[Gateway]:
    gateway = Gateway(folder, **options)
    try:
        gateway.start()
        yield gateway
    finally:
        gateway.close()
