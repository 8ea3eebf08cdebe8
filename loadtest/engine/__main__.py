"""Host simulated instances: ``python -m loadtest.engine --instance a-0:9001:my-model --instance a-1:0:my-model``.

When all ports listen, one line of JSON goes to standard output: ``{"ready": true, "ports": {"a-0": 9001, …}}``.
"""

import asyncio
import json
import signal
import sys
from collections.abc import Awaitable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
import uvloop
from aiohttp import web

from extproc.model import Profile
from loadtest.engine.core import Order
from loadtest.engine.faults import Fault
from loadtest.engine.http import application
from loadtest.engine.instance import Instance
from loadtest.engine.profiles import read_profiles, shipped_profiles


@dataclass(frozen=True, slots=True)
class Options:
    """What all instances of the process share; seconds are wall seconds."""

    host: str = "127.0.0.1"
    scale: float = 1.0
    order: Order = "priority"
    load_s: float = 0.0
    max_queued: int | None = None
    drain_s: float = 5.0


@dataclass(frozen=True, slots=True)
class Place:
    """One instance to host; port 0 takes a free one."""

    name: str
    port: int
    model: str
    profile: str = "default"


def read_place(text: str, profiles: dict[str, Profile]) -> Place:
    """Read ``name:port:model[:profile]``; a model's name may hold colons. Raises ``ValueError``."""
    name, port, model = text.split(":", 2)
    head, _, tail = model.rpartition(":")
    return Place(name, int(port), head, tail) if head and tail in profiles else Place(name, int(port), model)


async def start(place: Place, profile: Profile, options: Options) -> tuple[Instance, web.AppRunner, int]:
    """Start one instance; return it, what to clean up, and its port."""
    instance = Instance(
        place.name,
        place.model,
        profile,
        scale=options.scale,
        order=options.order,
        load_s=options.load_s,
        max_queued=options.max_queued,
    )
    runner = web.AppRunner(application(instance), handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, options.host, place.port, backlog=1024).start()
    return instance, runner, runner.addresses[0][1]


async def serve(places: list[Place], profiles: dict[str, Profile], options: Options) -> None:
    """Host *places* until SIGTERM, then drain: running answers get ``drain_s`` to end. SIGINT ends at once."""
    stop, now = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    loop.add_signal_handler(signal.SIGINT, now.set)
    hosted = [await start(place, profiles[place.profile], options) for place in places]
    ports = {instance.name: port for instance, _, port in hosted}
    sys.stdout.write(json.dumps({"ready": True, "ports": ports}) + "\n")
    sys.stdout.flush()
    await _first(stop.wait(), now.wait())
    for instance, _, _ in hosted:
        instance.set_fault(Fault(kind="drain"))
    drained = asyncio.gather(*(instance.live.drained() for instance, _, _ in hosted))
    await _first(drained, now.wait(), asyncio.sleep(options.drain_s))
    for instance, runner, _ in hosted:
        instance.close()
        await runner.cleanup()


async def _first(*some: Awaitable[object]) -> None:
    """Wait until one of *some* is over; the others are cancelled."""
    tasks = [asyncio.ensure_future(one) for one in some]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()


def main(
    instance: Annotated[list[str], typer.Option(help="name:port:model[:profile]; port 0 takes a free one.")],
    profiles: Annotated[Path | None, typer.Option(help="Folder of engine profiles; the shipped ones if none.")] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    time_scale: Annotated[float, typer.Option(help="Wall seconds per simulated second.")] = 1.0,
    order: Annotated[str, typer.Option(help="priority, or fcfs to ignore priorities.")] = "priority",
    load_s: Annotated[float, typer.Option(help="Answer 503 for so long after the start.")] = 0.0,
    max_queued: Annotated[int | None, typer.Option(help="Waiting requests beyond which calls get 503.")] = None,
    drain_s: Annotated[float, typer.Option(help="Longest wait for running answers after SIGTERM.")] = 5.0,
) -> None:
    """Host simulated vLLM instances."""
    known = read_profiles(profiles or shipped_profiles())
    if order not in ("fcfs", "priority"):
        raise typer.BadParameter("order is fcfs or priority")
    try:
        places = [read_place(text, known) for text in instance]
    except ValueError:
        raise typer.BadParameter("an instance is name:port:model[:profile]") from None
    chosen: Order = "fcfs" if order == "fcfs" else "priority"
    uvloop.run(serve(places, known, Options(host, time_scale, chosen, load_s, max_queued, drain_s)))


if __name__ == "__main__":
    typer.run(main)
