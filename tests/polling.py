"""Wait for what another task or process will do."""

import asyncio
from collections.abc import Awaitable, Callable
from inspect import isawaitable


async def eventually(holds: Callable[[], Awaitable[bool] | bool], seconds: float = 20.0) -> None:
    """Return once *holds* is true; raises :class:`TimeoutError` if that takes too long."""
    async with asyncio.timeout(seconds):
        while True:
            answer = holds()
            if await answer if isawaitable(answer) else answer:
                return
            await asyncio.sleep(0.005)
