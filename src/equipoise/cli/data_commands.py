"""`equipoise data list`, `show`, `convert` and `check`: data sets, and stores on disk."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument, Option

from equipoise.cli.options import Settings
from equipoise.core.screen import Screen, say
from equipoise.errors import ConfigError, InvalidParameter, unknown_name

app = typer.Typer(help="Data sets that a configuration can name, and stores on disk.", no_args_is_help=True)
STORE_FILE = "manifest.json"


@app.command("list")
def list_sets() -> None:
    """List the data sets, and which of them need files."""
    from equipoise.cli.listing import show_data_list

    show_data_list(Screen())


@app.command()
def show(
    name: Annotated[str, Argument(help="A name of `equipoise data list`, or the folder of a store or of a run.")],
    settings: Settings = None,
    folder: Annotated[Path | None, Option(help="The folder that holds the files of a data set that needs some.")] = None,
) -> None:
    """Show a data set: clients per split, examples, sizes, classes, shape; of a table, or a run on one, also its schema."""
    from equipoise.cli.listing import show_data
    from equipoise.data import Schema
    from equipoise.experiment.config_tables import override
    from equipoise.experiment.part_config import check_part
    from equipoise.experiment.run_files import RunFolder

    table, place = override({}, settings or ()), Path(name).expanduser()
    if (place / STORE_FILE).is_file():
        show_data(Screen(), _opened(place, table))
    elif (run := RunFolder(place)).config.is_file():
        if not run.schema.is_file():
            raise ConfigError(f"The data of the run in {name} are no table, so that it has no schema to show.")
        say(*Schema.load(run.schema).describe().split("\n"))
    else:
        table |= {} if folder is None else {"folder": str(folder)}
        show_data(Screen(), check_part("data", {**table, "name": name}, "data").make("data"))


def _opened(place: Path, options: dict[str, Any]) -> Any:
    """The data of a store, split as the options say; all clients are for training if they say nothing."""
    from equipoise.data import open_store

    if unknown := options.keys() - {"validation", "test", "seed"}:
        raise ConfigError(unknown_name("parameter of a store", min(unknown), ("validation", "test", "seed")))
    try:
        return open_store(place, **{"test": 0.0, **options})
    except InvalidParameter:  # it has splits of its own
        return open_store(place, **options)


@app.command()
def convert(
    source: Annotated[
        Path,
        Argument(
            metavar="SOURCE",
            help="An .npz file with x, y and client, a CSV or Parquet file, a folder of them, or a LEAF folder.",
        ),
    ],
    store: Annotated[Path, Argument(metavar="STORE", help="The folder of the store; an interrupted one is gone on with.")],
    client: Annotated[str | None, Option(help="The column or array that says whose each row is.")] = None,
    target: Annotated[str | None, Option(help="Of a table: the column to predict.")] = None,
    settings: Settings = None,
    append: Annotated[bool, Option("--append", help="Add the clients to a store that is there.")] = False,
    name: Annotated[str | None, Option(help="The name of the data in reports. Default: that of the source.")] = None,
) -> None:
    """Write a data set into a store on disk, which opens at once and need not fit into memory."""
    from equipoise import data
    from equipoise.data.store import holds_table
    from equipoise.experiment.config_tables import override

    named = {key: value for key, value in (("client", client), ("target", target)) if value is not None}
    options = override({}, settings or ()) | named
    if holds_table(source):
        for key in {"client", "target"} - options.keys():
            raise ConfigError(f"--{key} is missing: name a column of {source}.")
        _refuse_unknown_options(data.write_table_store, (source, store), options)
        check(data.write_table_store(source, store, **options, name=name or "", append=append))
        return
    if not source.is_dir() and source.suffix != ".npz":
        kinds = ".npz, .csv, .csv.gz, .parquet"
        raise ConfigError(
            f"{source} must be a file that ends in {kinds}, a folder of these, or a LEAF folder with train/*.json."
        )
    reader: Callable[..., Any] = data.leaf if source.is_dir() else data.npz
    _refuse_unknown_options(reader, (source,), options)
    clients = reader(source, **options)
    if isinstance(clients, data.FederatedData) and list(clients.splits) == ["train"]:  # split when it is opened
        path = data.write_store(clients.train, store, classes=clients.classes, name=name or clients.name, append=append)
    else:
        path = data.write_store(clients, store, name=name or (None if append else source.stem), append=append)
    check(path)


def _refuse_unknown_options(reader: Callable[..., Any], places: tuple[Any, ...], options: dict[str, Any]) -> None:
    try:
        inspect.signature(reader).bind(*places, **options)
    except TypeError as failure:
        rule = f"must name parameters of equipoise.data.{reader.__name__}"
        raise InvalidParameter("--set", rule, options, f"({failure})") from failure


@app.command()
def check(store: Annotated[Path, Argument(metavar="STORE", help="The folder of a store.")]) -> None:
    """Read a whole store and compare every block with its checksum."""
    from equipoise.data import check_store

    found = check_store(store)
    size = f"{found.clients} clients, {found.examples} examples, {found.bytes / 1e6:,.1f} MB"
    say(f"{store}: {size}: all checksums fit.")
