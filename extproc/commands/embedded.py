"""The embedded stack: real Envoy, real Redis, engines, collector and ext_proc server on this machine's loopback.

Order of start is order of need: Redis, engines, then (now that ports are known) the policy's copy, the collector, the
server, and Envoy last. Whatever dies is named with its last words, and everything else is brought down.
"""

import asyncio
import json
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from extproc import settings
from extproc.adapters import processes
from extproc.adapters.envoy_config.mesh import BodyMode, Style
from extproc.adapters.processes import Child
from extproc.commands.start import Failed, Stack, Start, Urls, death

__all__ = ["BodyMode", "Stack", "Style", "run"]

STOP_S = 8.0


async def run(stack: Stack, run_dir: Path | None) -> int:
    """Run the stack until Ctrl-C, SIGTERM or a death; return the exit status."""
    console = Console()
    made = None if run_dir is not None else tempfile.mkdtemp(prefix="tokenfleet-")
    folder = Path(made) if made else settings.made(run_dir or Path())
    children: list[Child] = []
    stop = asyncio.Event()
    for name in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(name, stop.set)
    try:
        starting = asyncio.ensure_future(_start(stack, folder, children, console))
        stopping = asyncio.ensure_future(stop.wait())
        await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            starting.cancel()
            await asyncio.wait({starting})
            return 130
        _greet(console, starting.result(), folder, stack)
        await _watch(children, stopping)
    except Failed as error:
        console.print(f"[bold red]stopped:[/] {error}", highlight=False)
        console.print(f"logs are kept in {folder}")
        made = None
        return 1
    else:
        return 0
    finally:
        with console.status("stopping …"):
            await processes.stop_all(children, STOP_S)
        console.print("everything is stopped")
        if made is not None:
            shutil.rmtree(made, ignore_errors=True)


async def _start(stack: Stack, folder: Path, children: list[Child], console: Console) -> Urls:
    columns = (SpinnerColumn(finished_text="[green]✓"), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:

        @asynccontextmanager
        async def step(text: str) -> AsyncIterator[None]:
            task = progress.add_task(text, total=1)
            yield
            progress.update(task, completed=1)

        tool = Start(stack, folder, children)
        async with step("Redis"):
            redis = await tool.redis()
        if redis is None:
            progress.console.print("[yellow]no Redis found: readings stay in the server's memory (one worker)")
        async with step(
            "engines: " + ("six simulated, two sites" if stack.engines == "simulated" else "llama.cpp, real")
        ):
            fleet = await tool.engines()
        async with step("collector and ext_proc server"):
            admin, servers = await tool.server(fleet, redis)
        async with step("Envoy"):
            return await tool.envoy(admin, servers)


async def _watch(children: Sequence[Child], stopping: asyncio.Future[Any]) -> None:
    """Return when *stopping* is done; raise :class:`Failed` when a child ends before."""
    ends = {asyncio.ensure_future(child.process.wait()): child for child in children}
    done, pending = await asyncio.wait({*ends, stopping}, return_when=asyncio.FIRST_COMPLETED)
    for one in pending:
        one.cancel()
    if stopping not in done:
        raise death(next(ends[one] for one in done if one in ends))


def _greet(console: Console, urls: Urls, folder: Path, stack: Stack) -> None:
    body = json.dumps(
        {"model": urls.model, "stream": True, "max_tokens": 40, "messages": [{"role": "user", "content": "Hello!"}]}
    )
    text = f"""
[bold]TokenFleet is up:[/] {urls.envoy}  ({stack.engines} engines)

  curl -iN {urls.envoy}/v1/chat/completions -H 'content-type: application/json' -H 'tokenfleet-debug: 1' \\
    -d '{body}'

The answer's x-tokenfleet-why says which site and instance, and why, in predicted seconds.
  metrics   {urls.admin}/metrics
  fleet     {urls.admin}/debug/fleet
  Envoy     {urls.envoy_admin}
  logs      {folder}
Ctrl-C stops everything."""
    console.print(text, highlight=False, soft_wrap=True)
