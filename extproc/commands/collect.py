"""``tokenfleet collect``: watch the instances, nothing else."""

import asyncio
import signal
from functools import partial
from pathlib import Path

import structlog
import typer
import uvloop

from extproc import settings
from extproc.adapters import eds_files, logs, policy_files
from extproc.adapters.discovery import Discovery
from extproc.adapters.redis_store import RedisAccess, RedisStore
from extproc.adapters.telemetry.collector import Collector
from extproc.policy import Policy

_log = structlog.get_logger()


def collect(
    policy: settings.PolicyFolder = settings.DEFAULT_POLICY,
    redis: settings.RedisUrl = settings.DEFAULT_REDIS,
    redis_password_file: settings.RedisPasswordFile = None,
    redis_ca: settings.RedisCa = None,
    redis_cert: settings.RedisCert = None,
    redis_key: settings.RedisKey = None,
    eds: settings.EdsFolder = None,
    log_level: settings.LogLevel = "info",
) -> None:
    """Scrape every instance of the fleet into Redis and list them for Envoy, until SIGTERM or Ctrl-C.

    An instance is starting, ready, draining or lost. Where instances come from a DNS name or a watched file, Envoy's
    endpoint files follow.
    """
    folder = settings.policy_folder(policy)
    try:
        logs.configure(log_level)
        read = policy_files.load(folder)
        access = RedisAccess(redis, redis_password_file, redis_ca, redis_cert, redis_key)
        RedisStore(access)  # a malformed URL is an error now, not at the first write
    except (policy_files.PolicyError, ValueError) as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from error
    try:
        if eds is not None:
            lay_out(read, eds)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_collect(read, folder, access, eds))
    except OSError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from error


def lay_out(policy: Policy, eds: Path) -> None:
    """Give every site's cluster a file, since Envoy does not start without; what is there stays until we know better.

    Raises :class:`OSError` if the folder cannot be written.
    """
    names = [site.envoy_cluster for site in policy.fleet.sites]
    eds_files.write(eds, {name: () for name in names if not eds_files.file_of(eds, name).exists()})


async def _collect(policy: Policy, folder: Path, access: RedisAccess, eds: Path | None) -> None:
    store = RedisStore(access)
    mirror = None if eds is None else partial(eds_files.write, eds)
    collecting = asyncio.ensure_future(Collector(policy, Discovery(policy, folder), store, mirror=mirror).run())
    for name in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(name, collecting.cancel)
    _log.info("collecting", sites=[site.name for site in policy.fleet.sites])
    try:
        await asyncio.wait([collecting])
        if not collecting.cancelled():
            collecting.result()
    finally:
        await store.close()
        _log.info("collector_stopped")
