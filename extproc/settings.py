"""Process settings: what flags and environment say, one type an option, shared by all commands."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

_SERVER = "Server"
_REDIS = "Redis"
_TLS = "mTLS with Envoy"

PolicyFolder = Annotated[
    Path,
    typer.Option("--policy", "--policies", envvar="TOKENFLEET_POLICY", help="Policy folder.", show_default=True),
]
RedisUrl = Annotated[
    str,
    typer.Option(
        "--redis",
        envvar="TOKENFLEET_REDIS",
        help="Where readings are: redis://, rediss:// (TLS) or unix:// URL.",
        rich_help_panel=_REDIS,
    ),
]
RedisPasswordFile = Annotated[
    Path | None,
    typer.Option(envvar="TOKENFLEET_REDIS_PASSWORD_FILE", help="File that holds the password.", rich_help_panel=_REDIS),
]
RedisCa = Annotated[
    Path | None, typer.Option(envvar="TOKENFLEET_REDIS_CA", help="CA to trust.", rich_help_panel=_REDIS)
]
RedisCert = Annotated[
    Path | None,
    typer.Option(envvar="TOKENFLEET_REDIS_CERT", help="Our certificate, where Redis asks.", rich_help_panel=_REDIS),
]
RedisKey = Annotated[Path | None, typer.Option(envvar="TOKENFLEET_REDIS_KEY", help="Its key.", rich_help_panel=_REDIS)]
EdsFolder = Annotated[
    Path | None,
    typer.Option("--eds", envvar="TOKENFLEET_EDS", help="Folder of endpoint files that Envoy watches."),
]
Listen = Annotated[
    list[str] | None,
    typer.Option(
        "--listen",
        envvar="TOKENFLEET_LISTEN",
        help="host:port or unix:/path for Envoy, one a worker; fewer are counted up. [default: 127.0.0.1:9002]",
        rich_help_panel=_SERVER,
    ),
]
AdminAddress = Annotated[
    str,
    typer.Option(
        "--admin",
        envvar="TOKENFLEET_ADMIN",
        help="host:port of /metrics, /healthz, /readyz, /debug/fleet; workers take the ports after it.",
        rich_help_panel=_SERVER,
    ),
]
DrainSeconds = Annotated[
    float,
    typer.Option(
        "--drain-s",
        envvar="TOKENFLEET_DRAIN_S",
        min=0,
        help="After SIGTERM, held requests get so long to be decided.",
        rich_help_panel=_SERVER,
    ),
]
TlsCertificate = Annotated[
    Path | None, typer.Option(envvar="TOKENFLEET_TLS_CERTIFICATE", help="Our certificate.", rich_help_panel=_TLS)
]
TlsKey = Annotated[Path | None, typer.Option(envvar="TOKENFLEET_TLS_KEY", help="Its key.", rich_help_panel=_TLS)]
TlsCa = Annotated[
    Path | None,
    typer.Option(envvar="TOKENFLEET_TLS_CA", help="Who must have signed Envoy's.", rich_help_panel=_TLS),
]
LogLevel = Annotated[
    str, typer.Option("--log-level", envvar="TOKENFLEET_LOG_LEVEL", help="debug, info, warning or error.")
]

DEFAULT_POLICY = Path("policies")
DEFAULT_REDIS = "redis://127.0.0.1:6379/0"
DEFAULT_LISTEN = "127.0.0.1:9002"
DEFAULT_ADMIN = "127.0.0.1:9090"
NO_REDIS = "none"
"""In place of a URL: readings stay in this process, which then collects them itself."""


@dataclass(frozen=True, slots=True)
class Tls:
    """Files of one side of mutual TLS."""

    certificate: Path
    key: Path
    ca: Path


def tls(certificate: Path | None, key: Path | None, ca: Path | None) -> Tls | None:
    """Return the three files, or ``None`` for none of them; anything between is an error."""
    if certificate is None and key is None and ca is None:
        return None
    if certificate is None or key is None or ca is None:
        raise typer.BadParameter("give all of --tls-certificate, --tls-key and --tls-ca, or none of them")
    return Tls(certificate, key, ca)


def host_port(text: str, option: str) -> tuple[str, int]:
    """Return the parts of ``host:port``; IPv6 in brackets."""
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isdecimal() or int(port) > 65_535:
        raise typer.BadParameter(f"{text!r} is not host:port", param_hint=option)
    return host.strip("[]"), int(port)


def counted_up(given: list[str], count: int) -> list[str]:
    """Return *count* addresses: those given, then the last one's port (or socket name) counted up."""
    if len(given) > count:
        raise typer.BadParameter(f"{len(given)} addresses for {count} workers", param_hint="--listen")
    listed = list(given)
    last = given[-1]
    for step in range(1, count - len(given) + 1):
        if last.startswith("unix:"):
            listed.append(f"{last}.{step}")
        else:
            host, port = host_port(last, "--listen")
            host = f"[{host}]" if ":" in host else host
            listed.append(f"{host}:{port + step if port else 0}")
    return listed


def policy_folder(given: Path) -> Path:
    """Return *given*, or, where the default is meant and not there, the policies that came with the package."""
    shipped = Path(__file__).parent / "share" / "policies"
    return shipped if given == DEFAULT_POLICY and not given.is_dir() and shipped.is_dir() else given


def made(folder: Path) -> Path:
    """Return *folder*, absolute and there."""
    folder.mkdir(parents=True, exist_ok=True)
    return folder.resolve()
