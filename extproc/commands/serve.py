"""``tokenfleet serve``: the ext_proc server, in one process or as workers around one dispatcher."""

import asyncio
import faulthandler
from collections.abc import Coroutine
from pathlib import Path
from typing import Annotated, Any

import typer
import uvloop

from extproc import settings
from extproc.adapters import logs, policy_files
from extproc.adapters.redis_store import RedisAccess, RedisStore
from extproc.commands import gateway
from extproc.commands import workers as workers_under
from extproc.commands.gateway import Shell

CLOSE_S = 5
"""Longest close of the event loop once everything has stopped: a task that does not end must not keep the process."""

SocketPath = Annotated[Path, typer.Option("--socket", help="The dispatcher's Unix socket.")]


def serve(
    policy: settings.PolicyFolder = settings.DEFAULT_POLICY,
    redis: settings.RedisUrl = settings.DEFAULT_REDIS,
    redis_password_file: settings.RedisPasswordFile = None,
    redis_ca: settings.RedisCa = None,
    redis_cert: settings.RedisCert = None,
    redis_key: settings.RedisKey = None,
    listen: settings.Listen = None,
    admin: settings.AdminAddress = settings.DEFAULT_ADMIN,
    workers: Annotated[
        int, typer.Option(min=1, max=64, envvar="TOKENFLEET_WORKERS", help="Worker processes around one dispatcher.")
    ] = 1,
    eds: settings.EdsFolder = None,
    drain_s: settings.DrainSeconds = 20.0,
    tls_certificate: settings.TlsCertificate = None,
    tls_key: settings.TlsKey = None,
    tls_ca: settings.TlsCa = None,
    log_level: settings.LogLevel = "info",
) -> None:
    """Serve ext_proc to Envoy until SIGTERM or Ctrl-C.

    Readings come from Redis, where `tokenfleet collect` leaves them. With `--redis none` this process collects them
    itself (one worker only); `--eds` is for that case.
    """
    shell = _shell(policy, redis, (redis_password_file, redis_ca, redis_cert, redis_key), admin, log_level)
    shell = Shell(
        shell.policy, policy, shell.redis, shell.admin, eds, settings.tls(tls_certificate, tls_key, tls_ca), drain_s
    )
    addresses = settings.counted_up(listen or [settings.DEFAULT_LISTEN], workers)
    if workers == 1:
        _run(gateway.alone(shell, addresses[0]))
    elif shell.redis is None:
        raise typer.BadParameter("several workers need a Redis to share readings", param_hint="--redis")
    else:
        _run(workers_under.supervise(shell, addresses))


def worker(
    socket: SocketPath,
    policy: settings.PolicyFolder = settings.DEFAULT_POLICY,
    redis: settings.RedisUrl = settings.DEFAULT_REDIS,
    redis_password_file: settings.RedisPasswordFile = None,
    redis_ca: settings.RedisCa = None,
    redis_cert: settings.RedisCert = None,
    redis_key: settings.RedisKey = None,
    listen: settings.Listen = None,
    admin: settings.AdminAddress = settings.DEFAULT_ADMIN,
    drain_s: settings.DrainSeconds = 20.0,
    tls_certificate: settings.TlsCertificate = None,
    tls_key: settings.TlsKey = None,
    tls_ca: settings.TlsCa = None,
    log_level: settings.LogLevel = "info",
) -> None:
    """One worker of `serve --workers N` (started by it)."""
    shell = _shell(policy, redis, (redis_password_file, redis_ca, redis_cert, redis_key), admin, log_level)
    shell = Shell(
        shell.policy, policy, shell.redis, shell.admin, None, settings.tls(tls_certificate, tls_key, tls_ca), drain_s
    )
    _run(gateway.work(shell, (listen or [settings.DEFAULT_LISTEN])[0], socket))


def dispatcher(
    socket: SocketPath,
    policy: settings.PolicyFolder = settings.DEFAULT_POLICY,
    redis: settings.RedisUrl = settings.DEFAULT_REDIS,
    redis_password_file: settings.RedisPasswordFile = None,
    redis_ca: settings.RedisCa = None,
    redis_cert: settings.RedisCert = None,
    redis_key: settings.RedisKey = None,
    admin: settings.AdminAddress = settings.DEFAULT_ADMIN,
    log_level: settings.LogLevel = "info",
) -> None:
    """Own the decisions of `serve --workers N` (started by it)."""
    _run(
        gateway.dispatch(
            _shell(policy, redis, (redis_password_file, redis_ca, redis_cert, redis_key), admin, log_level), socket
        )
    )


def _shell(
    folder: Path,
    redis: str,
    files: tuple[Path | None, Path | None, Path | None, Path | None],
    admin: str,
    log_level: str,
) -> Shell:
    try:
        logs.configure(log_level)
        policy = policy_files.load(folder)
        access = None if redis == settings.NO_REDIS else RedisAccess(redis, *files)
        if access is not None:
            RedisStore(access)  # a malformed URL is an error now, not at the first read
    except (policy_files.PolicyError, ValueError) as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from error
    return Shell(policy, folder, access, settings.host_port(admin, "--admin"))


def _run(main: Coroutine[Any, Any, None]) -> None:
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(main)
            faulthandler.dump_traceback_later(CLOSE_S, exit=True)
        faulthandler.cancel_dump_traceback_later()
    except OSError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from error
