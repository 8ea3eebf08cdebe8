"""Child processes: started, watched, and never left behind.

On Linux the kernel ends a child when its parent dies, however the parent dies; a child has its own session, so that
Ctrl-C reaches the parent alone, which then ends its children in order.
"""

import asyncio
import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


def die_with_parent() -> None:
    """Ask the kernel, in a child that is about to start, for SIGTERM when the parent dies."""
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


@dataclass(frozen=True, slots=True)
class Child:
    """A running process and where its output goes."""

    name: str
    process: asyncio.subprocess.Process
    log: Path

    def last_words(self, lines: int = 12) -> str:
        """Return the end of its output."""
        try:
            text = self.log.read_text(encoding="utf-8", errors="replace")
        except OSError:
            return ""
        return "\n".join(text.splitlines()[-lines:])

    async def stop(self, grace_s: float) -> None:
        """Ask it to end, and after *grace_s* make it."""
        if self.process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            self.process.terminate()
        try:
            async with asyncio.timeout(grace_s):
                await self.process.wait()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                self.process.kill()
            await self.process.wait()


async def start(name: str, argv: Sequence[str], log: Path, env: Mapping[str, str] | None = None) -> Child:
    """Start *argv* with its output in *log*. Raises :class:`OSError` if there is no such program."""
    out = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o644)
    try:
        process = await asyncio.create_subprocess_exec(
            *argv,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            env={**os.environ, **(env or {})},
            start_new_session=True,
            preexec_fn=die_with_parent,
        )
    finally:
        os.close(out)
    return Child(name, process, log)


async def stop_all(children: Sequence[Child], grace_s: float) -> None:
    """End *children*, the last started first."""
    for child in reversed(children):
        await child.stop(grace_s)
