"""The command line: `equipoise demo`, `run`, `compare`, `tune`, `report`, `reproduce`, `plan`, `methods`, `data`, …

Whatever needs torch is imported inside the commands, so that help comes at once. What a user can get wrong ends in one message
on stderr and exit code 2, never in a stack trace; Ctrl-C exits with 130.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from click import UsageError
from typer import Argument, Option
from typer.core import TyperGroup

from equipoise.cli import serve_commands, store_commands
from equipoise.cli.flower_commands import app as flower_app
from equipoise.cli.output_files import Overwrite, refuse_taken_file
from equipoise.cli.privacy_commands import app as privacy_app
from equipoise.cli.termination import Terminated, end_by_sigterm, raising_terminated
from equipoise.core.screen import Screen, say
from equipoise.core.version import VERSION
from equipoise.core.words import message, printable, traceback_text
from equipoise.errors import ConfigError, EquipoiseError, EquipoiseNotice, unknown_name
from equipoise.experiment import catalog
from equipoise.experiment.named_settings import naming_settings


def _print_error(text: str, style: str = "red") -> None:
    """Print a message to stderr."""
    Screen(stderr=True).print(message(text), style=style, soft_wrap=True)


@contextmanager
def _notices() -> Iterator[None]:
    """Print notices of the library as one line each, without the line of code that Python adds."""

    def show(message: Warning | str, category: type[Warning], *rest: Any, **_: Any) -> None:
        if issubclass(category, EquipoiseNotice):
            _print_error(f"Note: {message}", "yellow")
        else:
            _print_error(warnings.formatwarning(message, category, *rest[:2]).rstrip(), "")

    with warnings.catch_warnings():
        warnings.simplefilter("always", EquipoiseNotice)
        warnings.showwarning = show
        yield


@contextmanager
def _resumable() -> Iterator[None]:
    """Add to Ctrl-C, and to a failure of the disk, the note that the same command goes on."""
    try:
        yield
    except (KeyboardInterrupt, OSError) as failure:
        failure.add_note("The same command goes on where it stopped.")
        raise


def _said(failure: BaseException) -> str:
    """What a failure says. One of the system that names no file is of standard output: all other writers name theirs."""
    if isinstance(failure, OSError) and failure.errno is not None and failure.filename is None:
        return f"standard output could not be written: {failure.strerror}."
    return str(failure)


class ClearErrors(TyperGroup):
    """A group of commands whose expected failures are one message and an exit code."""

    def invoke(self, ctx: Any) -> Any:
        """Run a command; print notices and expected failures as one line each."""
        try:
            with _notices():
                return super().invoke(ctx)
        except BrokenPipeError:  # `equipoise methods | head`: click ends quietly
            raise
        except (EquipoiseError, OSError) as failure:
            _print_error(" ".join([f"Error: {_said(failure)}", *vars(failure).get("__notes__", ())]))
            raise typer.Exit(2) from failure
        except UsageError as failure:
            failure.message = printable(failure.message)
            raise
        except KeyboardInterrupt as failure:
            how = "SIGTERM" if isinstance(failure, Terminated) else "Ctrl-C"
            _print_error(" ".join([f"Stopped by {how}.", *vars(failure).get("__notes__", ())]), "yellow")
            if isinstance(failure, Terminated):
                end_by_sigterm()
            raise typer.Exit(130) from failure


app = typer.Typer(
    cls=ClearErrors,
    help="Federated learning for clients that are not average.",
    no_args_is_help=True,
    add_completion=False,
)
data_app = typer.Typer(help="Data sets that a configuration can name, and stores on disk.", no_args_is_help=True)
data_app.command("convert")(store_commands.convert)
data_app.command("check")(store_commands.check)
app.add_typer(data_app, name="data")
app.add_typer(privacy_app, name="privacy")
app.add_typer(flower_app, name="flower")

Settings = Annotated[list[str] | None, Option("--set", metavar="KEY=VALUE", help="Change a value; may be given several times.")]
Trust = Annotated[bool, Option("--trust", help="Trust the code of its own that a run's folder or configuration records.")]
Workers = Annotated[int, Option(min=1, help="How many runs at once, one torch thread each.")]
AtLeast = Annotated[int, Option(min=0, metavar="N", help="Leave clients with fewer examples out of all figures.")]
RayAddress = Annotated[
    str | None,
    Option(metavar="ADDRESS", help='A Ray cluster that makes the runs, one per CPU: HOST:PORT, "auto", or "local".'),
]


def _print_version(requested: bool) -> None:
    """Print the version and exit, if the option --version was given."""
    if requested:
        say(f"equipoise {VERSION}")
        raise typer.Exit


Version = Annotated[bool, Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")]


@app.callback()
def _root(version: Version = False) -> None:
    pass


@app.command()
def demo(
    out: Annotated[Path, Option(help="Where the page, the picture and the table go.")] = Path("demo"),
    seeds: Annotated[int, Option(min=1, help="How many seeds; each draws its own data.")] = 5,
    rounds: Annotated[int | None, Option(min=1, help="Rounds of training; the default is the demo's own.")] = None,
) -> None:
    """Train FedAvg and Δ-FL on clients that differ, and show who is left behind."""
    from equipoise.cli.demo import run_demo

    try:
        run_demo(out, seeds=seeds, rounds=rounds, console=Screen())
    except KeyboardInterrupt:
        raise KeyboardInterrupt from None  # without notes, which are for those who call compare themselves


@app.command()
def run(
    config: Annotated[Path | None, Argument(metavar="CONFIG.toml", help="The run to do, e.g. examples/tail.toml.")] = None,
    settings: Settings = None,
    out: Annotated[
        Path | None,
        Option(help="The folder for the run, new or empty. Default: runs/CONFIG-SEED; of a private run runs/CONFIG."),
    ] = None,
    resume: Annotated[
        Path | None, Option(metavar="DIR", help="Go on with the run in this folder; --set train.rounds=N gives it more rounds.")
    ] = None,
    tensorboard: Annotated[Path | None, Option(metavar="DIR", help="Also write event files for TensorBoard here.")] = None,
    mlflow: Annotated[str | None, Option(metavar="URI", help="Also log to MLflow, e.g. sqlite:///mlflow.db.")] = None,
    wandb: Annotated[
        str | None, Option(metavar="PROJECT", help="Also log to Weights & Biases (WANDB_MODE=offline works).")
    ] = None,
    explain: Annotated[
        bool, Option("--explain", help="Only say how local work is done, and why, after one round; leave nothing.")
    ] = False,
    at_least: AtLeast = 0,
    trust: Trust = False,
) -> None:
    """Train what a TOML file describes; leave config, log, checkpoint, clients, model and report in a folder."""
    from equipoise import tracking
    from equipoise.experiment import folder, more_rounds
    from equipoise.experiment.build import build
    from equipoise.experiment.config import RunConfig
    from equipoise.result import Result

    observers: list[Any] = []  # made before data are read, so that an absent library is refused at once
    if resume is not None:
        if config is not None or out is not None:
            raise ConfigError("--resume takes all it needs from its folder: leave CONFIG and --out away.")
        more_rounds.refuse_other_settings(settings or ())
        run_folder = folder.to_resume(resume, more=bool(settings))
        checked = RunConfig.read(run_folder.config, settings or (), code="resume", trust=trust)
        if settings:
            more_rounds.refuse_no_more(run_folder, checked)
            observers.append(more_rounds.MoreRounds(run_folder, checked.train.rounds))
    elif config is None:
        raise ConfigError("Name a configuration, e.g. equipoise run examples/tail.toml, or a folder: --resume DIR.")
    else:
        with naming_settings(config, settings or ()):
            checked = RunConfig.read(config, settings or (), code="run", trust=trust)
        if explain:
            say(*build(checked).explain().split("\n"))
            return
        path = out or folder.free_folder(config, checked)
        folder.refuse_taken(path)  # before data are read, which may take long

    observers += [tracking.TensorBoard(tensorboard)] if tensorboard is not None else []
    observers += [tracking.MLflow(tracking_uri=mlflow)] if mlflow is not None else []
    observers += [tracking.WandB(wandb)] if wandb is not None else []
    if at_least and checked.family is not None:
        raise ConfigError("--at-least is for a run of one model, but the configuration has a [family]. Leave it out.")
    experiment = build(checked)
    if resume is None:
        run_folder = folder.claim(path)
    result = folder.run(experiment, run_folder, observers=observers)
    if isinstance(result, Result):
        from equipoise.cli.listing import worst_lines

        if at_least:
            result = result.judged_by(at_least=at_least)
            result.report(run_folder.report)
        say(*str(result.summary()).split("\n"), "", *worst_lines(result))
        if result.epsilon is not None:
            say(result.epsilon, *str(result.privacy).split("\n"))
    else:
        say(*result.summary().split("\n"))
    say("")
    members = sorted(run_folder.path.glob("members/*")), run_folder.path / "family.json"
    files = run_folder.report, run_folder.clients, run_folder.model, run_folder.onnx, run_folder.personal
    others = run_folder.personal_ids, run_folder.rounds, run_folder.config, *members[0], members[1]
    say(*filter(Path.exists, (*files, *others)))


@app.command()
def compare(
    config: Annotated[Path, Argument(metavar="STUDY.toml", help="Methods × seeds, e.g. examples/study.toml.")],
    settings: Settings = None,
    workers: Annotated[
        int | None, Option(min=1, help="How many runs at once, one torch thread each. Default: one per core; 1 on a GPU.")
    ] = None,
    out: Annotated[Path | None, Option(help="The folder for all runs. Default: runs/<study>.")] = None,
    at_least: AtLeast = 0,
    ray: RayAddress = None,
    trust: Trust = False,
) -> None:
    """Run every method with every seed, as far as runs are missing; print the table and write the report."""
    from equipoise.cli import listing
    from equipoise.experiment.folder import read_record, refuse_run_folder
    from equipoise.experiment.open_runs import group_data
    from equipoise.experiment.scheduler import run_all
    from equipoise.experiment.study import prepare, read_study
    from equipoise.privacy.ledger_report import words_below

    folder = out or Path("runs") / config.stem
    refuse_run_folder(folder)
    with naming_settings(config, settings or ()):
        runs = read_study(config, settings or (), out=folder, trust=trust)
    console = Screen()
    with _resumable():
        prepare(runs)
        with raising_terminated():
            jobs = run_all(runs, workers=workers, console=console, ray=ray)
        records = [read_record(job.folder.path).judged_by(at_least=at_least) for job in jobs if job.folder.finished]
        if records:
            from equipoise.report import write_report

            plain = not console.is_terminal  # bold is not seen in a pipe
            for table in (listing.comparison_table(records, plain=plain), *listing.metric_tables(records)):
                listing.print_whole(console, table)
            say(*listing.difference_lines(records), *listing.subgroups_below(records))
            for table in listing.validation_table(records, plain=plain):
                console.print()
                listing.print_whole(console, table)
            say(*filter(None, [words_below(folder, group_data(folder))]), write_report(records, folder / "report.html"))
    failed = [job for job in jobs if job.status == "failed"]
    for job in failed:
        _print_error(f"Failed: {job.run.method}, seed {job.run.seed}: {job.message} See {job.folder.log}.")
    if failed:
        raise typer.Exit(1)


@app.command()
def tune(
    config: Annotated[Path, Argument(metavar="SEARCH.toml", help="A run and values to try, e.g. examples/tune.toml.")],
    settings: Settings = None,
    workers: Workers = 1,
    out: Annotated[Path | None, Option(help="The folder for all trials. Default: runs/<search>.")] = None,
    ray: RayAddress = None,
    trust: Trust = False,
) -> None:
    """Try values by training loss or validation clients, never test clients; write the best configuration."""
    from equipoise.experiment.folder import refuse_run_folder
    from equipoise.experiment.search import read_search, trial_name
    from equipoise.experiment.tune import tune as run_search

    folder = out or Path("runs") / config.stem
    refuse_run_folder(folder)
    with naming_settings(config, settings or ()):
        search = read_search(config, settings or (), trust=trust)
    with _resumable(), raising_terminated():
        results = run_search(search, folder, workers=workers, console=Screen(), ray=ray)
    for result in results:
        if result.criterion is None:
            _print_error(f"Failed: {trial_name(result.values)}: {result.message}")
    if results[0].criterion is None:
        raise typer.Exit(1)


@app.command()
def report(
    folders: Annotated[list[Path], Argument(metavar="DIR…", help="Folders of finished runs, or of studies.")],
    out: Annotated[Path, Option(help="The page to write.")] = Path("report.html"),
    figures: Annotated[Path | None, Option(metavar="DIR", help="Also write each figure as a file here.")] = None,
    formats: Annotated[
        list[str] | None, Option("--format", help="Of the figures: pdf, svg or png; repeat for several. Default: svg, png.")
    ] = None,
    table: Annotated[Path | None, Option(metavar="FILE", help="Also write the table: .md or .tex (booktabs).")] = None,
    title: Annotated[str | None, Option(help="The title of the page.")] = None,
    at_least: AtLeast = 0,
    overwrite: Overwrite = False,
) -> None:
    """Write one page about runs beside each other; it opens offline. A page of an earlier report is renewed."""
    from equipoise.experiment.family_records import family_knob
    from equipoise.experiment.folder import finished_runs, read_records
    from equipoise.report import chosen_formats, export_figures, write_report, write_table

    kinds = chosen_formats(formats or ("svg", "png"))
    if formats and figures is None:
        raise ConfigError("--format is of the figures, which --figures DIR writes. Add --figures DIR.")
    refuse_taken_file(out, "--out", overwrite=overwrite, pages=True)
    refuse_taken_file(table, "--table", overwrite=overwrite)
    found = [record for path in finished_runs(folders) for record in read_records(path)]
    records = [record.judged_by(at_least=at_least) for record in found]
    knob = family_knob(folders[0], records) if len(folders) == 1 else None
    say(write_report(records, out, knob=knob, title=title))
    if figures is not None:
        say(*export_figures(records, figures, kinds))
    if table is not None:
        say(write_table(records, table))


@app.command()
def reproduce(
    name: Annotated[str | None, Argument(metavar="NAME", help="An entry of --list, e.g. emnist-linear.")] = None,
    list_entries: Annotated[bool, Option("--list", help="List the entries.")] = False,
    data: Annotated[Path | None, Option(metavar="DIR", help="The folder of the data files. Default: EQUIPOISE_DATA.")] = None,
    scale: Annotated[str, Option(help="small (minutes on two cores) or paper (the full setting, for a GPU).")] = "small",
    seeds: Annotated[int | None, Option(min=1, help="How many seeds; the default is the scale's own.")] = None,
    out: Annotated[Path, Option(help="Where runs and tables go; runs that are there are kept.")] = Path("reproduce"),
    device: Annotated[str | None, Option(help="A torch device, e.g. cuda.")] = None,
    methods: Annotated[str | None, Option(help="Only these rows, e.g. fedavg,delta-fl-0.5.")] = None,
    tune: Annotated[bool, Option("--tune", help="First choose learning rates: by training loss or validation data.")] = False,
    show: Annotated[bool, Option("--show", help="Run nothing: print what the folder holds.")] = False,
    minutes: Annotated[float | None, Option(help="Stop after this number of minutes; the same command resumes.")] = None,
    precision: Annotated[str, Option(help="Of a GPU's products: float32, tf32 or bf16.")] = "float32",
    ray: RayAddress = None,
) -> None:
    """Run a published experiment again, and print published and measured numbers side by side."""
    from equipoise import reproduce as published

    if list_entries or name is None:
        say(*published.listing().split("\n"))
        return
    with _resumable():
        published.reproduce(
            name, data=data, scale=scale, seeds=seeds, out=out, device=device, methods=methods, tune=tune, show=show,
            minutes=minutes, precision=precision, ray=ray, say=lambda text: say(*text.split("\n")),
        )  # fmt: skip


@app.command()
def plan(
    config: Annotated[Path, Argument(metavar="CONFIG.toml", help="The run to plan, e.g. examples/tail.toml.")],
    settings: Settings = None,
    nodes: Annotated[int, Option(min=1, help="Machines of the cluster.")] = 1,
    cpus_per_node: Annotated[int, Option(min=1, help="CPUs of a machine, one worker each.")] = 1,
    gpus_per_node: Annotated[int, Option(min=0, help="GPUs of a machine; if there are any, one worker each.")] = 0,
    gbit: Annotated[float, Option(min=0.001, help="The network at the driver, in Gbit/s.")] = 10.0,
    faster: Annotated[float, Option(min=0.001, help="How many times as fast a worker is as one here.")] = 1.0,
    trust: Trust = False,
) -> None:
    """Estimate time, memory and traffic of a round on a Ray cluster from a short measurement here; say what limits it."""
    from equipoise.experiment.build import build
    from equipoise.experiment.config import RunConfig
    from equipoise.experiment.plan import plan_run

    with naming_settings(config, settings or ()):
        checked = RunConfig.read(config, settings or (), code="run", trust=trust)
    experiment = build(checked)
    found = plan_run(
        experiment, nodes=nodes, cpus_per_node=cpus_per_node, gpus_per_node=gpus_per_node, gbit=gbit, faster=faster
    )
    say(*found.lines())


@app.command()
def methods(
    kind: Annotated[str | None, Argument(help=f"One of {', '.join(catalog.kinds())}; all if left out.")] = None,
) -> None:
    """List every part: what it does, its parameters with defaults, its source."""
    from equipoise.cli.listing import show_functions, show_methods

    if kind is not None and kind not in catalog.kinds():
        raise ConfigError(unknown_name("kind", kind, catalog.kinds()))
    show_methods(Screen(), catalog.kinds() if kind is None else (kind,))
    if kind is None:
        show_functions(Screen())


@data_app.command("list")
def data_list() -> None:
    """List the data sets, and which of them need files."""
    from equipoise.cli.listing import show_data_list

    show_data_list(Screen())


@data_app.command("show")
def data_show(
    name: Annotated[str, Argument(help="A name of `equipoise data list`, or the folder of a store or of a run.")],
    settings: Settings = None,
    folder: Annotated[Path | None, Option(help="The folder that holds the files of a data set that needs some.")] = None,
) -> None:
    """Show a data set: clients per split, examples, sizes, classes, shape; of a table, or a run on one, also its schema."""
    from equipoise.cli.listing import show_data
    from equipoise.experiment.config_tables import override
    from equipoise.experiment.part_config import check_part

    table = override({}, settings or ())
    if store_commands.is_store(name):
        show_data(Screen(), store_commands.opened(name, table))
        return
    if (schema := store_commands.schema_of_run(name)) is not None:
        say(*schema.describe().split("\n"))
        return
    if folder is not None:
        table["folder"] = str(folder)
    show_data(Screen(), check_part("data", {**table, "name": name}, "data").make("data"))


serve_commands.add_to(app)


def main() -> None:
    """The entry point of the `equipoise` command."""
    try:
        app()
    except Exception as failure:
        say(*traceback_text(failure).split("\n"), err=True)
        raise SystemExit(1) from None
