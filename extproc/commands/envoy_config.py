"""``tokenfleet envoy-config``: write the Envoy configuration for a policy folder."""

import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from extproc import settings
from extproc.adapters import policy_files
from extproc.adapters.envoy_config import Mesh, MutualTls, write
from extproc.adapters.envoy_config.mesh import BodyMode, Style

_PLACES = "Where things are"
_CHOICES = "Choices"
_TLS = "mTLS to our servers"


def envoy_config(
    policy: settings.PolicyFolder = settings.DEFAULT_POLICY,
    out: Annotated[Path | None, typer.Option(help="File to write; none prints.")] = None,
    validate: Annotated[bool, typer.Option("--validate", help="Let Envoy check the result.")] = False,
    listen: Annotated[
        str, typer.Option(help="host:port on which Envoy takes requests.", rich_help_panel=_PLACES)
    ] = "0.0.0.0:8080",
    admin: Annotated[
        str, typer.Option(help="host:port of Envoy's admin page.", rich_help_panel=_PLACES)
    ] = "127.0.0.1:9901",
    server: Annotated[
        list[str] | None,
        typer.Option(
            help=f"Our gRPC server, host:port or unix:/path; again for each. [default: {settings.DEFAULT_LISTEN}]",
            rich_help_panel=_PLACES,
        ),
    ] = None,
    eds: Annotated[
        Path | None,
        typer.Option(
            help="Folder of endpoint files that the collector keeps; none lists endpoints inline.",
            rich_help_panel=_PLACES,
        ),
    ] = None,
    access_log: Annotated[
        str | None, typer.Option(help="Path of a JSON access log, e.g. /dev/stdout.", rich_help_panel=_PLACES)
    ] = None,
    style: Annotated[
        Style,
        typer.Option(
            help="cluster-header: any recent Envoy. priority-group: Envoy 1.40; retries may move to the next site.",
            rich_help_panel=_CHOICES,
        ),
    ] = "cluster-header",
    body_mode: Annotated[
        BodyMode,
        typer.Option(
            help="buffered: the body in one message. full-duplex: in pieces, as Gateway API implementations do.",
            rich_help_panel=_CHOICES,
        ),
    ] = "buffered",
    failure_mode_allow: Annotated[
        bool,
        typer.Option(
            help="When no server answers: send requests home unrouted, or refuse them with 503. Buffered bodies only.",
            rich_help_panel=_CHOICES,
        ),
    ] = False,
    usage: Annotated[
        bool, typer.Option(help="Read token counts from answers with a Lua filter.", rich_help_panel=_CHOICES)
    ] = True,
    unrouted_prefix: Annotated[
        str,
        typer.Option(help="Paths that skip the router, prefix taken off; '' for none.", rich_help_panel=_CHOICES),
    ] = "/unrouted/",
    tls_certificate: Annotated[Path | None, typer.Option(help="Envoy's certificate.", rich_help_panel=_TLS)] = None,
    tls_key: Annotated[Path | None, typer.Option(help="Its key.", rich_help_panel=_TLS)] = None,
    tls_ca: Annotated[Path | None, typer.Option(help="Who must have signed ours.", rich_help_panel=_TLS)] = None,
    tls_server_name: Annotated[
        str, typer.Option(help="DNS name that our certificate must carry.", rich_help_panel=_TLS)
    ] = "",
) -> None:
    """Write an Envoy configuration for the sites of a policy folder.

    The result drops into a stock Envoy: `envoy -c FILE`. envoy/README.md says why each setting stands.
    """
    host, port = settings.host_port(listen, "--listen")
    admin_host, admin_port = settings.host_port(admin, "--admin")
    files = settings.tls(tls_certificate, tls_key, tls_ca)
    mesh = Mesh(
        host=host,
        port=port,
        admin_host=admin_host,
        admin_port=admin_port,
        servers=tuple(server or [settings.DEFAULT_LISTEN]),
        eds=eds,
        style=style,
        body_mode=body_mode,
        failure_mode_allow=failure_mode_allow,
        usage=usage,
        unrouted_prefix=unrouted_prefix,
        access_log=access_log,
        tls=MutualTls(files.certificate, files.key, files.ca, tls_server_name) if files else None,
    )
    text = _written(settings.policy_folder(policy), mesh)
    if validate:
        _validate(text)
    if out is None:
        sys.stdout.write(text)
    else:
        out.write_text(text, encoding="utf-8")


def _written(folder: Path, mesh: Mesh) -> str:
    try:
        return write(policy_files.load(folder), mesh)
    except (policy_files.PolicyError, ValueError) as error:
        raise _stop(str(error)) from None


def _validate(text: str) -> None:
    envoy = shutil.which("envoy") or shutil.which("envoy", path=sysconfig.get_path("scripts"))
    if envoy is None:
        raise _stop("no envoy on PATH to validate with")
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
