"""``tokenfleet envoy-config``: write the Envoy configuration for a policy folder."""

import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from extproc.adapters import policy_files
from extproc.adapters.envoy_config import Mesh, MutualTls, write
from extproc.adapters.envoy_config.mesh import DEFAULT_SERVERS, BodyMode, Style
from extproc.policy import Policy


def envoy_config(  # noqa: PLR0913 - one option each
    policies: Annotated[
        Path, typer.Option(envvar="TOKENFLEET_POLICIES", help="Policy folder; fleet.yaml names the sites.")
    ] = Path("policies"),
    out: Annotated[Path | None, typer.Option(help="File to write; none prints.")] = None,
    listen: Annotated[str, typer.Option(help="host:port on which Envoy takes requests.")] = "0.0.0.0:8080",  # noqa: S104 - a gateway listens for others
    admin: Annotated[str, typer.Option(help="host:port of Envoy's admin page.")] = "127.0.0.1:9901",
    server: Annotated[
        list[str] | None,
        typer.Option(help="Our gRPC server, host:port or unix:/path; again for each. [default: 127.0.0.1:9002]"),
    ] = None,
    eds: Annotated[
        Path | None, typer.Option(help="Folder of endpoint files that `serve` keeps; none lists endpoints inline.")
    ] = None,
    style: Annotated[
        Style, typer.Option(help="cluster-header: any Envoy. priority-group: Envoy 1.40, retries may change the site.")
    ] = "cluster-header",
    body_mode: Annotated[
        BodyMode, typer.Option(help="buffered: one body message. full-duplex: as Gateway API implementations do.")
    ] = "buffered",
    failure_mode_allow: Annotated[
        bool, typer.Option(help="No server answers: send the request home unrouted, instead of a 503.")
    ] = False,
    usage: Annotated[bool, typer.Option(help="Read token counts from answers with a Lua filter.")] = True,
    unrouted_prefix: Annotated[
        str, typer.Option(help="Paths that skip the router, prefix taken off; '' for none.")
    ] = "/unrouted/",
    access_log: Annotated[str | None, typer.Option(help="JSON access log, e.g. /dev/stdout.")] = None,
    tls_certificate: Annotated[Path | None, typer.Option(help="mTLS to our servers: Envoy's certificate.")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="mTLS to our servers: Envoy's key.")] = None,
    tls_ca: Annotated[Path | None, typer.Option(help="mTLS to our servers: the authority that signed theirs.")] = None,
    tls_server_name: Annotated[str, typer.Option(help="mTLS to our servers: DNS name in their certificate.")] = "",
    validate: Annotated[bool, typer.Option("--validate", help="Let Envoy check the result, if it is found.")] = False,
) -> None:
    """Write an Envoy configuration for the sites of a policy folder.

    The result drops into a stock Envoy: `envoy -c FILE`. envoy/README.md says why each setting stands.
    """
    mesh = Mesh(
        *_host_port(listen, "--listen"),
        *_host_port(admin, "--admin"),
        servers=tuple(server or DEFAULT_SERVERS),
        eds=eds,
        style=style,
        body_mode=body_mode,
        failure_mode_allow=failure_mode_allow,
        usage=usage,
        unrouted_prefix=unrouted_prefix,
        access_log=access_log,
        tls=_tls(tls_certificate, tls_key, tls_ca, tls_server_name),
    )
    text = _written(_policy(policies), mesh)
    if validate:
        _validate(text)
    if out is None:
        sys.stdout.write(text)
    else:
        out.write_text(text, encoding="utf-8")


def _policy(folder: Path) -> Policy:
    try:
        return policy_files.load(folder)
    except policy_files.PolicyError as error:
        raise _stop(str(error)) from None


def _written(policy: Policy, mesh: Mesh) -> str:
    try:
        return write(policy, mesh)
    except ValueError as error:
        raise _stop(str(error)) from None


def _host_port(text: str, option: str) -> tuple[str, int]:
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isdecimal() or int(port) > 65_535:
        raise typer.BadParameter(f"{text!r} is not host:port", param_hint=option)
    return host.strip("[]"), int(port)


def _tls(certificate: Path | None, key: Path | None, ca: Path | None, server_name: str) -> MutualTls | None:
    match certificate, key, ca:
        case None, None, None:
            return None
        case Path(), Path(), Path():
            return MutualTls(certificate, key, ca, server_name)
        case _:
            raise typer.BadParameter("give all three of --tls-certificate, --tls-key, --tls-ca, or none")


def _validate(text: str) -> None:
    envoy = shutil.which("envoy") or shutil.which("envoy", path=sysconfig.get_path("scripts"))
    if envoy is None:
        typer.echo("envoy-config: no envoy on PATH, so nothing was validated", err=True)
        return
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        file.write(text)
        file.flush()
        command = [envoy, "--mode", "validate", "-l", "error", "-c", file.name]
        done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 - our own arguments
    if done.returncode:
        raise _stop(f"Envoy refuses it: {done.stderr.strip() or done.stdout.strip()}")
    typer.echo("envoy-config: Envoy accepts it", err=True)


def _stop(message: str) -> typer.Exit:
    typer.echo(f"envoy-config: {message}", err=True)
    return typer.Exit(1)
