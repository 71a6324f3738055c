"""The commands `equipoise flower init`, `node` and `key`, and those of federation_commands.py."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from equipoise.cli.federation_commands import app as operators
from equipoise.cli.federation_commands import tell_nobody, use_kit
from equipoise.core.screen import say

PRELOAD_HELP = "Also load this once, e.g. pandas, if your data need it; may be given several times."
APP_HELP = "The installed app that this node runs, whatever the server hands it, e.g. my_federation.client_app:app."
PIN_HELP = "The SHA-256 of the one app bundle that this node takes from the server."
POLICY_HELP = "What this node refuses, whatever the server asks: a TOML file. Needs --app or --pin."
KIT_HELP = "The site's kit: the folder with node.toml, which says all of this."
RELOAD_HELP = "Load the data anew for each message, and not once."
app = typer.Typer(help="The same algorithm on a real federation, with Flower.", no_args_is_help=True)
app.registered_commands += operators.registered_commands


@app.command()
def init(
    folder: Annotated[Path, Argument(metavar="DIR", help="Where the app goes, new or empty, e.g. my-federation.")],
) -> None:
    """Write a complete Flower app: server, nodes, a loader for your data, certificates, and a README with the commands."""
    from equipoise.engines.flower.apps.template import write_app

    say(*write_app(folder), f"Next: the commands in {folder / 'README.md'}.")


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def node(
    context: typer.Context,
    preload: Annotated[list[str] | None, Option(metavar="MODULE", help=PRELOAD_HELP)] = None,
    app: Annotated[str | None, Option("--app", metavar="MODULE:NAME", help=APP_HELP)] = None,
    pin: Annotated[str | None, Option("--pin", metavar="SHA256", help=PIN_HELP)] = None,
    policy: Annotated[Path | None, Option("--policy", metavar="FILE", help=POLICY_HELP)] = None,
    kit: Annotated[Path | None, Option("--kit", metavar="DIR", help=KIT_HELP)] = None,
    reload_data: Annotated[bool, Option("--reload-data", help=RELOAD_HELP)] = False,
) -> None:
    """Run a node as flower-supernode does, with all its options, but load PyTorch once and not for each message.

    With --app or --pin the node runs the app that its owner has chosen, and never what the server hands it. With --kit all
    options come from the kit's node.toml. The node starts again by itself when it has lost the SuperLink.
    """
    from equipoise.errors import ConfigError

    tell_nobody()
    if importlib.util.find_spec("flwr") is None:
        raise ConfigError('A node needs Flower: pip install "equipoise[flower]".')
    from equipoise.engines.flower.apps.warm_node import run

    arguments = context.args
    if kit is not None:
        if app is not None or pin is not None or policy is not None:
            raise ConfigError("--kit says --app and --policy itself: give one or the other.")
        found = use_kit(kit)
        arguments, app, policy = [*found.arguments, *context.args], found.app, found.policy
        preload = [*found.preload, *(preload or ())]
    raise typer.Exit(run(arguments, preload=preload or (), app=app, pinned=pin, policy=policy, keep_data=not reload_data))


@app.command()
def key(
    file: Annotated[Path, Argument(metavar="FILE", help="Where the private key goes, a new file, e.g. keys/hospital-a.")],
    name: Annotated[str | None, Option(metavar="CLIENT", help="The client's name; without it that of the file.")] = None,
) -> None:
    """Make the key by which other nodes know this one in signed sums, and print the line for their files of peers."""
    import json

    from equipoise.engines.flower.apps.flower_extra import require_flower

    require_flower()
    from equipoise.engines.flower.secure.identities import write_identity

    public = write_identity(file)
    say(f"{json.dumps(name or file.stem)} = {json.dumps(public)}")
