"""`equipoise serve`, `choose`, `watch`, `export` and `predict`: runs and families in people's hands."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from equipoise.cli.options import AllowHost, Overwrite, Settings, Token, Trust, refuse_taken_file
from equipoise.core.screen import Screen, say


def serve(
    folder: Annotated[Path, Argument(metavar="DIR", help="A folder with runs, families or studies, or one of them.")],
    host: Annotated[str, Option(help="Where to listen; beyond this machine a token is asked for.")] = "127.0.0.1",
    port: Annotated[int, Option(min=0, max=65535, help="0 takes any that is free.")] = 8642,
    token: Token = None,
    allow_host: AllowHost = None,
    certificate: Annotated[Path | None, Option(metavar="FILE", help="TLS: the certificate, as PEM.")] = None,
    key: Annotated[Path | None, Option(metavar="FILE", help="TLS: its private key, as PEM.")] = None,
    open_browser: Annotated[bool, Option("--open", help="Also open the page in a browser.")] = False,
) -> None:
    """Show runs as they grow and families with their knob, and serve their models; read-only, on this machine alone."""
    from equipoise.serve.run_server import ServerOptions
    from equipoise.serve.run_server import serve as run_server

    options = ServerOptions(host, port, token, tuple(allow_host or ()), certificate, key)
    run_server(folder, options, say=say, open_browser=open_browser)


def choose(
    url: Annotated[str, Argument(metavar="URL", help="A server's address, or that of a family's page.")],
    data: Annotated[Path, Argument(metavar="DATA", help="Labelled examples of your own: CSV or npz. They stay here.")],
    family: Annotated[str | None, Option(metavar="ID", help="Which family, if the server has several.")] = None,
    out: Annotated[
        Path | None, Option(metavar="DIR", help="Keep the best model in this new folder. Default: chosen-model.")
    ] = None,
    token: Token = None,
    ca: Annotated[Path | None, Option(metavar="FILE", help="TLS: the authority of the server's certificate, as PEM.")] = None,
) -> None:
    """Try a family's models on your own examples, on this machine, and keep the one that serves them best."""
    from equipoise.serve.choose import choose as choose_model

    choice = choose_model(url, data, run=family, token=token, out=out or Path("chosen-model"), authority=ca, say=say)
    say(*str(choice).split("\n"))
    if choice.kept is not None:
        say(f"Kept in {choice.kept}.")


def watch(
    folder: Annotated[Path, Argument(metavar="DIR", help="A folder with runs, or one of them.")],
    once: Annotated[bool, Option("--once", help="Show how runs stand now, and end.")] = False,
) -> None:
    """Show runs as they grow, in this terminal, until all have ended."""
    from equipoise.serve.terminal import watch as watch_runs

    watch_runs(folder, console=Screen(), once=once)


def export(
    folder: Annotated[Path, Argument(metavar="DIR", help="The folder of a finished run.")],
    trust: Trust = False,
) -> None:
    """Write the model of a finished run as ONNX, with its card, into its folder, if it left none: runs of studies do not."""
    from equipoise.experiment.run_model import export_run

    say(*export_run(folder, trust=trust))


def predict(
    folder: Annotated[Path, Argument(metavar="RUN", help="The folder of a finished run on a table.")],
    rows: Annotated[Path, Argument(metavar="ROWS", help="New rows: a CSV or Parquet file. It needs no target.")],
    out: Annotated[Path | None, Option(metavar="FILE", help="Write a CSV file. Default: standard output.")] = None,
    settings: Settings = None,
    member: Annotated[str | None, Option(metavar="NAME", help="Which model of a family, e.g. tail-0.5.")] = None,
    model: Annotated[
        str | None,
        Option(metavar="MODULE:NAME", help="A class or function of your own that makes the model, e.g. my_model:make."),
    ] = None,
    keep: Annotated[
        list[str] | None,
        Option(metavar="COLUMN", help="Copy a column of ROWS, such as an id, into the output; may be given several times."),
    ] = None,
    shared: Annotated[
        bool, Option("--shared", help="Use the shared model, also for clients with a model of their own.")
    ] = False,
    client: Annotated[
        str | None, Option(metavar="COLUMN", help="The column of ROWS that names the client. Default: that of training.")
    ] = None,
    schema: Annotated[
        Path | None, Option(metavar="FILE", help="The schema, if RUN has none: that of the app for a federation's run.")
    ] = None,
    overwrite: Overwrite = False,
    trust: Trust = False,
) -> None:
    """Write what a run says about each new row, by the client's own model or the shared one: probabilities, or the number."""
    import io
    import sys
    from csv import reader

    from pyarrow import csv

    from equipoise.core.files import write_atomically
    from equipoise.experiment.config_tables import override
    from equipoise.experiment.predicted_run import predict_rows

    refuse_taken_file(out, "--out", overwrite=overwrite)
    reading = override({}, settings or ())
    found = predict_rows(
        folder, rows, reading=reading, member=member, keep=keep or (), trust=trust, model=model, shared=shared,
        client=client, schema_file=schema,
    )  # fmt: skip
    written = io.BytesIO()
    csv.write_csv(found.table, written)
    if found.said:
        say(found.said, err=True)
    if out is not None:
        say(f"{write_atomically(out, written.getvalue())}: {found.table.num_rows} rows")
    elif sys.stdout.isatty():
        say(*map(",".join, reader(io.StringIO(written.getvalue().decode()))))  # a row is one line, whatever is in its cells
    else:
        sys.stdout.write(written.getvalue().decode())


def add_to(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    for command in (serve, choose, watch, export, predict):
        app.command()(command)
