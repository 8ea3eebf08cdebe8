"""Workers under a parent: one dispatcher and N workers, kept alive until a signal, stopped in order."""

import asyncio
import sys
import tempfile
from pathlib import Path

import structlog

from extproc.adapters import processes
from extproc.commands.gateway import Shell, signalled

log: structlog.stdlib.BoundLogger = structlog.get_logger()

RESTART_S = 0.5
"""Pause before a child that died is started again."""


async def supervise(shell: Shell, addresses: list[str]) -> None:
    """Keep one dispatcher and a worker for each address alive until a signal.

    Workers drain first and the dispatcher ends last: a drain that had to decide alone would not know what others run.
    """
    with tempfile.TemporaryDirectory(prefix="tokenfleet-") as folder:
        socket = Path(folder) / "dispatcher.sock"
        host, first = shell.admin
        shared = [arg for arg in sys.argv[2:] if arg]
        stop, last = signalled(), asyncio.Event()
        dispatcher = _argv("dispatcher", shared, socket, f"{host}:{first}", None)
        deciding = asyncio.ensure_future(_keep("dispatcher", dispatcher, last, 5.0))
        working = []
        for i, address in enumerate(addresses):
            worker = _argv("worker", shared, socket, f"{host}:{first + 1 + i if first else 0}", address)
            working.append(asyncio.ensure_future(_keep(f"worker-{i}", worker, stop, shell.drain_s)))
        log.info("supervising", workers=len(addresses), addresses=addresses)
        await asyncio.wait(working)
        last.set()
        await asyncio.wait([deciding])


def _argv(command: str, shared: list[str], socket: Path, admin: str, listen: str | None) -> list[str]:
    """Return a child's command line: the parent's own options, but for what differs."""
    own = {"--workers", "--listen", "--admin", "--eds", *(("--drain-s",) if command == "dispatcher" else ())}
    if command == "dispatcher":
        own |= {"--tls-certificate", "--tls-key", "--tls-ca"}
    kept: list[str] = []
    rest = iter(shared)
    for arg in rest:
        name, equals, _ = arg.partition("=")
        if name not in own:
            kept.append(arg)
        elif not equals:
            next(rest, None)
    base = [sys.executable, "-m", "extproc", command, *kept, "--socket", str(socket), "--admin", admin]
    return base if listen is None else [*base, "--listen", listen]


async def _keep(name: str, argv: list[str], stop: asyncio.Event, drain_s: float) -> None:
    stopping = asyncio.ensure_future(stop.wait())
    while not stop.is_set():
        process = await asyncio.create_subprocess_exec(
            *argv, preexec_fn=processes.die_with_parent, start_new_session=True
        )
        ended = asyncio.ensure_future(process.wait())
        await asyncio.wait({ended, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if not stop.is_set():
            log.error("child died; starting it again", child=name, status=process.returncode)
            await asyncio.wait({stopping}, timeout=RESTART_S)
            continue
        await processes.Child(name, process, Path("/dev/null")).stop(drain_s + 5)
