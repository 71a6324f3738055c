"""The commands `equipoise flower init` and `node`."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

PRELOAD_HELP = "Also load this once, e.g. pandas, if your data need it; may be given several times."
app = typer.Typer(help="The same algorithm on a real federation, with Flower.", no_args_is_help=True)


@app.command()
def init(
    folder: Annotated[Path, Argument(metavar="DIR", help="Where the app goes, new or empty, e.g. my-federation.")],
) -> None:
    """Write a complete Flower app: server, nodes, a loader for your data, certificates, and a README with the commands."""
    from equipoise.engines.flower.apps.template import write_app

    for file in write_app(folder):
        typer.echo(str(file))
    typer.echo(f"Next: the commands in {folder / 'README.md'}.")


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def node(
    context: typer.Context,
    preload: Annotated[list[str] | None, Option(metavar="MODULE", help=PRELOAD_HELP)] = None,
) -> None:
    """Run a node as flower-supernode does, with all its options, but load PyTorch once and not for each message."""
    from equipoise.errors import ConfigError

    if importlib.util.find_spec("flwr") is None:
        raise ConfigError('A node needs Flower: pip install "equipoise[flower]".')
    from equipoise.engines.flower.apps.warm_node import run

    raise typer.Exit(run(context.args, preload=preload or ()))
