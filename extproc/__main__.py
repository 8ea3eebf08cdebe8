"""The command line: ``tokenfleet`` or ``python -m extproc``."""

import typer

from extproc import __version__
from extproc.commands import check, collect, envoy_config, serve, up

app = typer.Typer(
    name="tokenfleet",
    help="An LLM request router for a stock Envoy: when a request runs, where, and on which GPU instance.",
    epilog="Start with `tokenfleet up`: real Envoy, real Redis, simulated engines in two sites.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    add_completion=False,
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"tokenfleet {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print the version."),
) -> None:
    """Take what stands before the command."""


app.command()(up.up)
app.command()(serve.serve)
app.command()(collect.collect)
app.command()(check.check)
app.command("envoy-config")(envoy_config.envoy_config)
app.command(hidden=True)(serve.worker)
app.command(hidden=True)(serve.dispatcher)


def main() -> None:
    """Run the command line."""
    app()


if __name__ == "__main__":
    main()
