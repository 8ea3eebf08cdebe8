"""``tokenfleet up``: the whole stack on this machine, to try it and to build on it."""

import asyncio
from pathlib import Path
from typing import Annotated, Literal

import typer

from extproc import settings
from extproc.commands import embedded

Engines = Literal["simulated", "llama.cpp"]


def up(
    policy: settings.PolicyFolder = settings.DEFAULT_POLICY,
    engines: Annotated[
        Engines, typer.Option(help="simulated: timings of real GPUs. llama.cpp: three real servers with a tiny model.")
    ] = "simulated",
    port: Annotated[int, typer.Option(help="Envoy's port; 0 takes a free one.", min=0, max=65_535)] = 0,
    admin_port: Annotated[int, typer.Option(help="Our admin port; 0 takes a free one.", min=0, max=65_535)] = 0,
    envoy_admin_port: Annotated[int, typer.Option(help="Envoy's admin port; 0 takes a free one.", min=0)] = 0,
    workers: Annotated[int, typer.Option(min=1, max=64, help="Worker processes of the ext_proc server.")] = 1,
    time_scale: Annotated[
        float, typer.Option(min=0.001, max=1000, help="Seconds on the clock for each simulated second.")
    ] = 1.0,
    style: Annotated[embedded.Style, typer.Option(help="Envoy configuration, as in `envoy-config --style`.")] = (
        "cluster-header"
    ),
    body_mode: Annotated[embedded.BodyMode, typer.Option(help="As in `envoy-config --body-mode`.")] = "buffered",
    run_dir: Annotated[
        Path | None, typer.Option(help="Folder for logs, sockets and generated files; none takes a temporary one.")
    ] = None,
) -> None:
    """Start Envoy, Redis, six engines in two sites, the collector and the ext_proc server; Ctrl-C stops all of it.

    Envoy and Redis are the real ones. The engines are simulated, with the timings of the GPUs that the policy's
    profiles name, unless `--engines llama.cpp`.
    """
    stack = embedded.Stack(
        policy=settings.policy_folder(policy),
        engines=engines,
        port=port,
        admin_port=admin_port,
        envoy_admin_port=envoy_admin_port,
        workers=workers,
        time_scale=time_scale,
        style=style,
        body_mode=body_mode,
    )
    raise typer.Exit(asyncio.run(embedded.run(stack, run_dir)))
