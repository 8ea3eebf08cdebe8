"""What an Envoy configuration needs to know beside the policy."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from extproc.policy import Policy

LONGEST_ENVOY_WAIT_S = 3600.0
"""Envoy takes no longer ``message_timeout``."""

DEFAULT_SERVERS = ("127.0.0.1:9002",)

Style = Literal["cluster-header", "priority-group"]
BodyMode = Literal["buffered", "full-duplex"]


@dataclass(frozen=True, slots=True)
class MutualTls:
    """Files, as Envoy sees them, for the connection to our servers."""

    certificate: Path
    key: Path
    ca: Path
    server_name: str = ""
    """Expected DNS name of our servers' certificate, also sent as SNI; empty checks the chain only."""


@dataclass(frozen=True, slots=True)
class Mesh:
    """Where things are, and the choices that an operator makes. Port 0 lets Envoy choose a free one."""

    host: str = "0.0.0.0"  # noqa: S104 - a gateway listens for others
    port: int = 8080
    admin_host: str = "127.0.0.1"
    admin_port: int = 9901
    servers: tuple[str, ...] = DEFAULT_SERVERS
    """Our gRPC servers: ``unix:/path`` or ``host:port``."""
    eds: Path | None = None
    """Folder of endpoint files (see :mod:`extproc.adapters.eds_files`); none writes the fleet's endpoints inline."""
    style: Style = "cluster-header"
    body_mode: BodyMode = "buffered"
    failure_mode_allow: bool = False
    """What happens to a request when no server answers: true sends it home unrouted, false answers 503.

    Not with ``full-duplex``: its body is in our hands, and Envoy refuses it whatever this says.
    """
    usage: bool = True
    """Read token counts from answers (a Lua filter)."""
    unrouted_prefix: str = "/unrouted/"
    """Paths that skip us altogether, with the prefix taken off; empty for none."""
    tls: MutualTls | None = None
    access_log: str | None = None
    """Path of a JSON access log, e.g. ``/dev/stdout``."""
    connect_s: float = 0.5
    stall_s: float = 120.0
    """An attempt whose engine sends nothing for so long is given up: tried elsewhere before the answer, cut after."""
    upload_s: float = 60.0
    """Longest time for a client to send its request."""
    retry_statuses: tuple[int, ...] = (500, 503)
    concurrent: int = 100_000
    """Requests, held and running, that a cluster may have at once."""


def hold_s(policy: Policy) -> float:
    """Return how long Envoy must wait for us, seconds: the longest hold, and ten more for the answer.

    Raises
    ------
    ValueError
        If a class may wait longer than Envoy can.
    """
    longest = max(one.longest_wait_ms for one in policy.slomax.classes) / 1000
    if longest + 10 > LONGEST_ENVOY_WAIT_S:
        raise ValueError(
            f"slomax.yaml: longest_wait_ms of {longest * 1000:.0f} is more than Envoy can hold a request; "
            f"the most is {(LONGEST_ENVOY_WAIT_S - 10) * 1000:.0f}"
        )
    return longest + 10
