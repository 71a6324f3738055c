"""The commands of those who operate a federation: `equipoise flower authority`, `site`, `superlink`, `check`, `status`, …"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from typer import Argument, Option

from equipoise.cli.options import AllowHost, Token
from equipoise.core.plain_text import parse_json
from equipoise.core.screen import say

if TYPE_CHECKING:
    from equipoise.engines.flower.flower_internals import Registry
    from equipoise.engines.flower.operate.kits import Kit

app = typer.Typer()
COLOURS = re.compile(r"\x1b\[[0-9;]*m")  # codes that colour a terminal

Folder = Annotated[Path, Option("--folder", metavar="DIR", help="The folder of the app. Default: this one.")]
RunArgument = Annotated[Path, Argument(metavar="RUN", help="The folder of a federated run, e.g. runs/federation.")]
SiteNames = Annotated[list[str], Argument(metavar="NAME…", help="The sites' names, e.g. hospital-a.")]
KitOption = Annotated[Path, Option("--kit", metavar="DIR", help="The site's kit: the folder with node.toml.")]


def tell_nobody() -> None:
    """Have Flower report nothing to its makers, unless whoever runs this has said otherwise. It looks when it is loaded."""
    os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
    os.environ.setdefault("FLWR_DISABLE_UPDATE_CHECK", "1")


def _require_flower() -> None:
    tell_nobody()
    from equipoise.engines.flower.apps.flower_extra import require_flower

    require_flower()


@app.command()
def authority(
    host: Annotated[
        list[str] | None, Option(metavar="NAME", help="Where nodes reach the SuperLink; may be given several times.")
    ] = None,
    port: Annotated[int, Option(min=1, max=65535, help="The SuperLink's port.")] = 47090,
    renew: Annotated[bool, Option("--renew", help="Renew the SuperLink's certificate now.")] = False,
    folder: Folder = Path(),
) -> None:
    """Make the federation's certificates, or renew what ends soon. The authority itself is made once and never replaced."""
    _require_flower()
    from equipoise.engines.flower.operate.kits import OperatorFolder

    say(*OperatorFolder(folder).set_up(host or (), port, renew=renew))


@app.command()
def site(
    names: SiteNames,
    renew: Annotated[bool, Option("--renew", help="Make a new key; the old one is kept beside it.")] = False,
    retire: Annotated[bool, Option("--retire", help="Take the sites off the list: they take part no longer.")] = False,
    folder: Folder = Path(),
) -> None:
    """Make one kit per site, with all that its node needs, in sites/NAME; other sites are not touched."""
    _require_flower()
    from equipoise.engines.flower.operate.kits import OperatorFolder

    place = OperatorFolder(folder)
    for name in names:
        if retire:
            place.retire(name)
            say(f'{name} is off the list. Runs with nodes="nodes.toml" ask it nothing from their next round on.')
            say(f"To end its connection: equipoise flower unregister {name}")
            continue
        kit = place.make_kit(name, renew=renew)
        whose = "" if (kit / "node.key").exists() else "the site has its key itself; "
        say(f"{kit}  ({whose}let it in: equipoise flower register {name})")
        say(*(f"WARNING: {doubt}" for doubt in place.doubts(name)), err=True)
        if renew:
            say('The old key is off the list. Runs with nodes="nodes.toml" ask it nothing from their next round on.')
            say(f"To end its connection: equipoise flower unregister {name}")


def _flower_home(folder: Path) -> dict[str, str]:
    """Where Flower finds the SuperLink of a folder, whatever the environment says: `authority` has written it there."""
    return {"FLWR_HOME": str((folder / ".flwr").resolve())}


def _registry(folder: Path) -> Registry:
    """The SuperLink of a folder, which must answer soon: it may just have been begun."""
    _require_flower()
    os.environ.update(_flower_home(folder))
    from equipoise.engines.flower.flower_internals import Registry
    from equipoise.engines.flower.operate.kits import OperatorFolder
    from equipoise.engines.flower.operate.registered_nodes import await_superlink

    _ = OperatorFolder(folder).settings  # refuses a folder that has no SuperLink
    registry = Registry("federation")
    await_superlink(registry, tell=lambda text: say(text, err=True))
    return registry


@app.command()
def nodes(
    as_json: Annotated[bool, Option("--json", help="Print the nodes as JSON.")] = False,
    folder: Folder = Path(),
) -> None:
    """List the nodes that the SuperLink lets in, by the names of their sites, with Flower's ids."""
    registry = _registry(folder)
    from equipoise.engines.flower.operate.registered_nodes import list_nodes, plain, table_of

    found = list_nodes(folder, registry)
    say(*(json.dumps(plain(found), indent=1).split("\n") if as_json else table_of(found)))


@app.command()
def register(names: SiteNames, folder: Folder = Path()) -> None:
    """Let sites in, by the keys in nodes.toml. Waits for a SuperLink that was just begun."""
    registry = _registry(folder)
    from equipoise.engines.flower.operate.registered_nodes import register as let_in

    for name, (node, new) in let_in(folder, names, registry).items():
        say(f"{name} is {'let in now' if new else 'let in already'}. Flower's id: {node}")


@app.command()
def unregister(names: SiteNames, folder: Folder = Path()) -> None:
    """Remove keys that nodes.toml no longer lists: a site's old key after `site --renew`, its key after `site --retire`."""
    registry = _registry(folder)
    from equipoise.engines.flower.operate.registered_nodes import unregister as let_out

    for name, ids in let_out(folder, names, registry).items():
        say(f"{name}: let in no longer: {', '.join(map(str, ids))}")


@app.command()
def superlink(
    host: Annotated[
        str, Option(help="Where to listen. 127.0.0.1: only this machine and its proxy; 0.0.0.0: everywhere, without a proxy.")
    ] = "127.0.0.1",
    folder: Folder = Path(),
) -> None:
    """Run the SuperLink of this folder: TLS, known nodes alone, and a database that only its owner can read."""
    _require_flower()
    from equipoise.engines.flower import superlink_process
    from equipoise.engines.flower.operate.kits import OperatorFolder

    place = OperatorFolder(folder)
    certificates = place.authority
    say(*certificates.prepare([*place.settings["hosts"], "localhost", "127.0.0.1"]))
    os.umask(0o077)
    database = folder / "superlink.db"
    database.touch(mode=0o600)
    database.chmod(0o600)
    os.environ.update(_flower_home(folder))
    os.environ["PYTHONUNBUFFERED"] = "1"  # or a log file would lag behind
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(folder.resolve()), os.environ.get("PYTHONPATH")]))
    here = str(Path(sys.executable).parent)  # Flower finds its other programs in the path, in which a unit has none of ours
    os.environ["PATH"] = os.pathsep.join([here, os.environ.get("PATH", os.defpath)])
    command = [
        sys.executable, "-P", superlink_process.__file__, "--host", host, "--port", str(place.listen(host)),
        "--enable-supernode-auth", "--disable-runtime-dependency-installation", "--database", str(database),
        "--ssl-ca-certfile", str(certificates.certificate), "--ssl-certfile", str(certificates.server),
        "--ssl-keyfile", str(certificates.server_key),
    ]  # fmt: skip
    sys.stdout.flush()
    os.execv(command[0], command)  # noqa: S606 - its own program, by its path


def _show(command: list[str], environment: dict[str, str], folder: Path) -> int:
    """Run a command and show what it says, without the codes that colour a terminal."""
    with subprocess.Popen(
        command, env=environment, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as process:
        for line in process.stdout or ():
            say(COLOURS.sub("", line.rstrip("\n")))
    return process.returncode


@app.command()
def run(
    run_config: Annotated[str, Option("--run-config", metavar="TEXT", help="As for flwr run, e.g. 'rounds=100'.")] = "",
    folder: Folder = Path(),
) -> None:
    """Begin the run, or go on with it, and show its log. The exit code is 0 only if the run has completed."""
    _registry(folder)  # waits for a SuperLink that was just begun
    from equipoise.engines.flower.flower_internals import read_runs
    from equipoise.engines.flower.operate.run_options import refuse_unknown_options
    from equipoise.errors import ConfigError

    refuse_unknown_options(folder, run_config)
    environment = {**os.environ, **_flower_home(folder)}
    environment["PYTHONUNBUFFERED"] = "1"  # or a log file would show the run's log at its end
    flower = str(Path(sys.executable).with_name("flwr"))
    if not Path(flower).exists():
        raise ConfigError(f'{flower} is missing. Install Flower beside Equipoise: pip install "equipoise[flower]"')

    def listed() -> dict[str, str]:
        asked = [flower, "list", "federation", "--format", "json"]
        done = subprocess.run(asked, env=environment, cwd=folder, capture_output=True, text=True, check=False)
        try:
            return {str(each["run-id"]): str(each["status"]) for each in read_runs(done.stdout)}
        except (ValueError, KeyError, TypeError):
            say(silent_superlink(done.stdout, done.stderr), err=True)
            raise typer.Exit(2) from None

    before = listed()
    command = [flower, "run", ".", "federation", "--stream", *(["--run-config", run_config] if run_config else [])]
    code = _show(command, environment, folder)
    new = {name: state for name, state in listed().items() if name not in before}
    good = code == 0 and bool(new) and all(state == "finished:completed" for state in new.values())
    if not good:
        say(f"The run has not completed: {', '.join(new.values()) or 'it was not begun'}.", err=True)
    raise typer.Exit(0 if good else code or 1)


def silent_superlink(out: str, error: str) -> str:
    """What to say if the SuperLink does not list its runs. Flower answers in JSON, of which the message is shown."""
    try:
        said = str(parse_json(out)["error-message"])
    except (ValueError, KeyError, TypeError):
        said = f"{out[-500:]}{error[-500:]}"
    said = " ".join(said.split()).rstrip(".")
    cure = "Is it running? Start it (`equipoise flower superlink`), and give `run` again, which resumes the run."
    return f"The SuperLink does not say which runs there are{f': {said}' if said else ''}. {cure}"


@app.command()
def check(
    kit: KitOption = Path(),
    as_json: Annotated[bool, Option("--json", help="Print findings as JSON.")] = False,
) -> None:
    """Look at everything that a node needs before it joins, and try one step of training. Sends nothing."""
    _require_flower()
    from equipoise.engines.flower.operate.node_check import all_findings, plain, verdict_of

    findings = all_findings(use_kit(kit))
    code, verdict = verdict_of(findings)
    if as_json:
        say(*json.dumps({"ready": code == 0, "findings": plain(findings)}, indent=1).split("\n"))
    else:
        for finding in findings:
            mark = {"good": "ok     ", "warning": "WARNING", "fault": "FAULT  ", "skipped": "-      "}[finding.verdict]
            say(f"{mark}  {finding.what}: {finding.text}")
        say(verdict)
    raise typer.Exit(code)


@app.command()
def status(
    folder: RunArgument,
    as_json: Annotated[bool, Option("--json", help="Print the status as JSON.")] = False,
    serve: Annotated[int | None, Option("--serve", metavar="PORT", help="Serve it as a page, and /metrics.")] = None,
    host: Annotated[str, Option(help="Where to serve it; beyond this machine a token is asked for.")] = "127.0.0.1",
    token: Token = None,
    allow_host: AllowHost = None,
) -> None:
    """Show nodes, rounds, faults and alerts of a run.

    Exit codes: 0 good, 1 failed, 2 the server is gone, 3 stopped, 4 alerts.
    """
    _require_flower()
    from equipoise.engines.flower.operate.run_view import RunView

    view = RunView(folder)
    if serve is not None:
        from equipoise.serve.run_server import ServerOptions, run_app
        from equipoise.serve.status_server import status_app

        options = ServerOptions(host, serve, token, tuple(allow_host or ()))
        run_app(lambda access: status_app(view, access), options, f"The status of {folder}", say)
        return
    about = view.read()
    say(*(json.dumps(about, indent=1).split("\n") if as_json else view.lines()))
    raise typer.Exit(int(about["exit_code"]))


def _order(folder: Path, said: str, *, state: Literal["run", "pause", "stop"] | None = None, rounds: int | None = None) -> None:
    _require_flower()
    from equipoise.engines.flower.apps.run_control import give_order
    from equipoise.engines.flower.operate.run_view import RunView

    RunView(folder).read()  # refuses a folder that is no run
    give_order(folder, state=state, rounds=rounds)
    say(said)


@app.command()
def pause(folder: RunArgument) -> None:
    """Have a run wait after the round at hand."""
    _order(folder, "The run waits after the round at hand.", state="pause")


@app.command()
def resume(folder: RunArgument) -> None:
    """Have a paused run go on. A run whose server has ended goes on with `equipoise flower run`."""
    _order(folder, "The run goes on.", state="run")


@app.command()
def stop(folder: RunArgument) -> None:
    """End a run after the current round. The command `run` resumes it later."""
    _order(folder, "The run ends after the round at hand.", state="stop")


@app.command()
def extend(
    folder: RunArgument, rounds: Annotated[int, Option("--rounds", min=1, help="How many rounds it has in all.")]
) -> None:
    """Give a run more rounds, while it goes on or after its end (then `equipoise flower run` goes on with it).

    A run under differential privacy gets no more: its noise is calibrated for its rounds.
    """
    _require_flower()
    from equipoise.engines.flower.apps.fixed_rounds import refuse_more_rounds
    from equipoise.engines.flower.operate.run_view import RunView
    from equipoise.errors import ConfigError

    refuse_more_rounds(folder, rounds)
    made = RunView(folder).read()["round"]
    if rounds <= made:
        raise ConfigError(f"--rounds must be more than the {made} rounds that the run in {folder} has made, but is {rounds}.")
    _order(folder, f"The run has {rounds} rounds in all, or more if it was begun with more.", rounds=rounds)


@app.command()
def backup(
    folder: Annotated[Path, Argument(metavar="DIR", help="The folder of the app, or of a site's kit.")],
    archive: Annotated[Path, Argument(metavar="FILE", help="A new archive, e.g. backup.tar.gz.")],
) -> None:
    """Write a folder into one archive with checksums. It holds private keys: only its owner can read it."""
    from equipoise.engines.flower.operate.backups import back_up

    say(f"{back_up(folder, archive)} files in {archive}.")


@app.command()
def restore(
    archive: Annotated[Path, Argument(metavar="FILE", help="An archive of `equipoise flower backup`.")],
    folder: Annotated[Path, Argument(metavar="DIR", help="A new or empty folder.")],
) -> None:
    """Unpack a backup into a new folder, after its checksums were compared."""
    from equipoise.engines.flower.operate.backups import restore as unpack

    say(f"{unpack(archive, folder)} files in {folder}.")


@app.command()
def fetch(
    source: Annotated[
        str, Argument(metavar="SOURCE", help="What `equipoise flower publish` wrote: its folder, or its address.")
    ],
    kit: KitOption = Path(),
    out: Annotated[Path, Option("--out", metavar="DIR", help="The model's folder, as seen from the current one.")] = Path(
        "model"
    ),
    overwrite: Annotated[bool, Option("--overwrite", help="Replace a model there that is none of an earlier fetch.")] = False,
    token: Annotated[str | None, Option(envvar="EQUIPOISE_TOKEN", metavar="TOKEN", help="Of the server.")] = None,
    ca: Annotated[Path | None, Option("--ca", metavar="FILE", help="TLS: the server's authority. Default: the kit's.")] = None,
) -> None:
    """Get the finished model or family, compare its checksums, try it on this node's data, and keep what serves them best."""
    _require_flower()
    from equipoise.engines.flower.operate.fetching import fetch as fetch_model

    say(*fetch_model(source, use_kit(kit), out, token=token, authority=ca, overwrite=overwrite))


@app.command()
def publish(
    runs: Annotated[list[Path], Argument(metavar="RUN…", help="Finished runs, e.g. of several tails.")],
    out: Annotated[Path, Option("--out", metavar="DIR", help="Where the models go.")] = Path("published"),
) -> None:
    """Write the models of finished runs with their checksums into a folder that nodes fetch them from."""
    _require_flower()
    from equipoise.engines.flower.operate.fetching import publish as write_models

    say(f"{', '.join(write_models(runs, out))}: in {out}. Copy the folder to the sites, or serve it with any web server.")


def use_kit(path: Path) -> Kit:
    """A site's kit; this process finds its app and its state."""
    from equipoise.engines.flower.operate.kits import Kit

    kit = Kit.read(path)
    sys.path.insert(0, str((kit.path / "app").resolve()))
    os.environ.setdefault("EQUIPOISE_CONFIG", str((kit.path / "state").resolve()))
    return kit
