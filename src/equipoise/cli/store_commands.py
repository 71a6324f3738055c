"""`equipoise data convert` and `equipoise data check`: files of data into a store on disk, and what a store holds."""

from __future__ import annotations

import ast
import inspect
import json
import re
import shlex
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from equipoise.core.screen import say
from equipoise.errors import ConfigError, EquipoiseError, EquipoiseNotice, InvalidData, InvalidParameter, unknown_name

KINDS = ".npz, .csv, .csv.gz, .parquet"
STORE_FILE = "manifest.json"

Source = Annotated[
    Path,
    typer.Argument(
        metavar="SOURCE", help="An .npz file with x, y and client, a CSV or Parquet file, a folder of them, or a LEAF folder."
    ),
]
Target = Annotated[Path, typer.Argument(metavar="STORE", help="The folder of the store; an interrupted one is gone on with.")]
Options = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="A parameter of the reader, e.g. client=user; may be given several times."),
]


def is_store(path: str) -> bool:
    """Whether a name is that of a store on disk."""
    return (Path(path).expanduser() / STORE_FILE).is_file()


def opened(path: str, options: dict[str, Any]) -> Any:
    """The data of a store, split as the options say; all clients are for training if they say nothing."""
    from equipoise.data import open_store

    if unknown := options.keys() - {"validation", "test", "seed"}:
        raise ConfigError(unknown_name("parameter of a store", min(unknown), ("validation", "test", "seed")))
    try:
        return open_store(path, **{"test": 0.0, **options})
    except InvalidParameter:  # it has splits of its own
        return open_store(path, **options)


def schema_of_run(path: str) -> Any:
    """The schema in the folder of a run; None if the name is not that of a run."""
    from equipoise.data import Schema
    from equipoise.experiment.run_files import RunFolder

    folder = RunFolder(Path(path).expanduser())
    if not folder.config.is_file():
        return None
    if not folder.schema.is_file():
        raise ConfigError(f"The data of the run in {path} are no table, so that it has no schema to show.")
    return Schema.load(folder.schema)


def convert(
    source: Source,
    store: Target,
    client: Annotated[str | None, typer.Option(help="The column or array that says whose each row is.")] = None,
    target: Annotated[str | None, typer.Option(help="Of a table: the column to predict.")] = None,
    settings: Options = None,
    append: Annotated[bool, typer.Option("--append", help="Add the clients to a store that is there.")] = False,
    name: Annotated[str | None, typer.Option(help="The name of the data in reports. Default: that of the source.")] = None,
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
        with cures_for_shell():
            path = data.write_table_store(source, store, **options, name=name or "", append=append)
        _print_check(path, data.check_store(path))
        return
    clients = _read(source, options)
    if isinstance(clients, data.FederatedData) and list(clients.splits) == ["train"]:  # split when it is opened
        path = data.write_store(clients.train, store, classes=clients.classes, name=name or clients.name, append=append)
    else:
        path = data.write_store(clients, store, name=name or (None if append else source.stem), append=append)
    _print_check(path, data.check_store(path))


@contextmanager
def cures_for_shell() -> Iterator[None]:
    """Add to errors and notices that advise kinds={'d': 'date'} what to write on the command line: --set kinds.d=date."""
    show = warnings.showwarning

    def show_cured(message: Warning | str, *rest: Any, **options: Any) -> None:
        show(EquipoiseNotice(_for_shell(message)) if isinstance(message, EquipoiseNotice) else message, *rest, **options)

    with warnings.catch_warnings():
        warnings.showwarning = show_cured
        try:
            yield
        except EquipoiseError as failure:
            if (text := _for_shell(failure)) == str(failure):
                raise
            raise InvalidData(text) from failure


def _for_shell(message: object) -> str:
    """The message, with its advice on kinds and on how to read a file in the form of options."""
    kinds = re.compile(r"kinds=(\{.*?: '(?:number|boolean|category|date|left out)'\})")
    reading = re.compile(r'(?:(?:, )?(?:decimal|thousands|date_format)="[^"]+")+')
    by_column = re.compile(r'decimal=\{"([^"]+)": "([.,])"\}')
    written = re.compile(r"""(delimiter|encoding)=('[^']+'|"[^"]+")""")
    patterns = (kinds, reading, by_column, written)
    found = sorted((match for each in patterns for match in each.finditer(str(message))), key=lambda match: match.start())
    cures = []
    for match in found:
        if match.re is kinds:
            pairs = ast.literal_eval(match[1]).items()
            cures.append(" ".join(_option(*pair) for pair in pairs))
        elif match.re is by_column:
            cures.append(f"--set {shlex.quote(f'decimal.{match[1]}={match[2]}')}")
        elif match.re is written:
            value = ast.literal_eval(match[2])
            cures.append(f"--set {shlex.quote(f'{match[1]}={json.dumps(value) if value.isspace() else value}')}")
        else:
            named = re.findall(r'(\w+)="([^"]+)"', match[0])
            cures.append(" ".join(f"--set {shlex.quote('='.join(pair))}" for pair in named))
    return f"{message} On the command line: {', or '.join(dict.fromkeys(cures))}." if cures else str(message)


def _option(column: str, kind: str) -> str:
    """The option that gives a column its kind; a name with a dot stands in an inline table."""
    inline = set(column) & set(".=")
    setting = f"kinds={{{json.dumps(column)}={json.dumps(kind)}}}" if inline else f"kinds.{column}={kind}"
    return f"--set {shlex.quote(setting)}"


def _read(source: Path, options: dict[str, Any]) -> Any:
    """What a file or folder holds, by the reader for its kind."""
    from equipoise import data

    if not source.is_dir() and source.suffix != ".npz":
        raise ConfigError(
            f"{source} must be a file that ends in {KINDS}, a folder of these, or a LEAF folder with train/*.json."
        )
    reader = data.leaf if source.is_dir() else data.npz
    _refuse_unknown_options(reader, (source,), options)
    return reader(source, **options)


def _refuse_unknown_options(reader: Callable[..., Any], places: tuple[Any, ...], options: dict[str, Any]) -> None:
    try:
        inspect.signature(reader).bind(*places, **options)
    except TypeError as failure:
        raise InvalidParameter(
            "--set", f"must name parameters of equipoise.data.{reader.__name__}", options, f"({failure})"
        ) from failure


def check(store: Annotated[Path, typer.Argument(metavar="STORE", help="The folder of a store.")]) -> None:
    """Read a whole store and compare every block with its checksum."""
    from equipoise.data import check_store

    _print_check(store, check_store(store))


def _print_check(path: Path, found: Any) -> None:
    shown = f"{found.clients} clients, {found.examples} examples, {found.bytes / 1e6:,.1f} MB: all checksums fit"
    say(f"{path}: {shown}.")
