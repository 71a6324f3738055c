"""What the command line prints about parts, data sets and runs; the text flows, so that any width works."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, cast

from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from equipoise.core.screen import Screen, say
from equipoise.core.words import printable
from equipoise.experiment import catalog
from equipoise.experiment.part_config import FROM_DATA

if TYPE_CHECKING:
    from equipoise.compare import Comparison
    from equipoise.data import ClientSet, FederatedData
    from equipoise.run_record import RunRecord

FEW_EXAMPLES = 30  # of a client: its error is mostly chance
BINS, WIDTH = 8, 40  # of a histogram in text


def show_methods(console: Screen, kinds: Iterable[str]) -> None:
    """Print every part of some kinds: name, summary, parameters with defaults, source, and name in Python."""
    for number, kind in enumerate(kinds):
        if number:
            console.print()
        console.print(Text.assemble((kind, "bold underline"), f"  {catalog.KIND_HELP[kind]}"))
        for part in catalog.parts(kind):
            console.print()
            _print_indented(console, 2, (part.name, "bold cyan"), f"  {part.summary}")
            for parameter in part.all_parameters:
                name, _, rest = parameter.text.partition(":")
                from_data = kind == "model" and (parameter.name in FROM_DATA or not parameter.in_config)
                origin = ", from the data" if from_data else "" if parameter.in_config else ", given in Python only"
                _print_indented(console, 6, (name, "green"), f":{rest}{origin}")
            _print_source(console, part)
            _print_indented(console, 6, (f"In Python: {part.python_path}", "dim"))


def show_functions(console: Screen) -> None:
    """Print the functions and classes that only Python code can use."""
    console.print()
    console.print(Text.assemble(("functions", "bold underline"), "  in Python only"))
    for function in catalog.FUNCTIONS:
        part = catalog.CatalogPart("function", function, catalog.Entry(function))
        console.print()
        _print_indented(console, 2, (part.python_path, "bold cyan"), f"  {part.summary}")
        _print_source(console, part)


def _print_source(console: Screen, part: catalog.CatalogPart) -> None:
    if part.source:
        _print_indented(console, 6, (f"Source: {part.source}", "dim"))


def _print_indented(console: Screen, indent: int, *parts: str | tuple[str, str]) -> None:
    """Print parts of text, each plain or with a style, as a paragraph that is indented."""
    console.print(Padding(Text.assemble(*parts), (0, 0, 0, indent), expand=False))


# -------------------------------------------------------------------------------------------------------------------- runs


def comparison_of(records: Sequence[RunRecord]) -> Comparison:
    """Runs beside each other, by the name of the method, in order."""
    from equipoise.compare import Comparison

    found: dict[str, list[RunRecord]] = {}
    for record in records:
        found.setdefault(record.name, []).append(record)
    return Comparison(cast(dict[str, list[Any]], found))


def worst_lines(record: RunRecord, count: int = 5) -> list[str]:
    """The clients that are served worst, as lines of text with intervals; none where hardly more clients were judged.

    Clients with few examples, whose error is mostly chance, are left out where enough others are there, unless `record` has a
    limit that was asked for. Clients that a run protects are not named: a terminal's output is passed on, too.
    """
    if record.protects_clients:
        return ["Single clients are not named: the run protects them. For whoever may see the data, clients.parquet has all."]
    rows = record.clients.where(record.judged_on)
    if len(rows.benign) <= count:
        return []
    large = int((rows.benign.size >= FEW_EXAMPLES).sum())
    least = FEW_EXAMPLES if count < large < len(rows.benign) and not record.at_least else 0
    limit = f", with {least or record.at_least} examples or more" if least or record.at_least else ""
    title = f"The clients that are served worst, by their {record.measured}{limit}:"
    return [title, *(f"  {line}" for line in str(rows.worst(count, at_least=least)).splitlines())]


# -------------------------------------------------------------------------------------------------------------------- data


def show_data_list(console: Screen) -> None:
    """Print a table of the data sets: name, the files it needs, and a summary."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("name", style="bold cyan", no_wrap=True)
    table.add_column("needs", no_wrap=True)
    table.add_column("what it is")
    for part in catalog.parts("data"):
        files = next((key for key in ("folder", "path") if key in part.parameters), None)
        table.add_row(part.name, {None: "nothing", "folder": "a folder", "path": "a file"}[files], part.summary)
    console.print(table)
    say("", "A folder is named by --folder or [data] folder, or by the environment variable EQUIPOISE_DATA.")


def show_data(console: Screen, data: FederatedData) -> None:
    """Print the clients, examples and sizes of each split, the shape of an example, a histogram of sizes, and a schema."""
    import torch

    from equipoise.core.trees import named_leaves
    from equipoise.data.clients import shown_shape

    shapes = []
    for name, leaf in named_leaves("", data.train.x).items():
        shape = " × ".join(map(str, shown_shape(leaf))) or "1"
        shapes.append(f"{name} {shape} ({str(leaf.dtype).removeprefix('torch.')})".strip())
    say(f"{data.name}  {data.classes or 'no'} classes, examples of shape {', '.join(shapes)}", "")
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for title in ("split", "clients", "unseen", "examples", "smallest", "10 %", "median", "90 %", "largest"):
        table.add_column(title, justify="left" if title == "split" else "right")
    for name, clients in data.splits.items():
        unseen = "" if name == "train" else str(int((data.train.find(clients) < 0).sum()))
        marks = torch.tensor([0.0, 0.1, 0.5, 0.9, 1.0], dtype=torch.float64)
        sizes = torch.quantile(clients.sizes.double(), marks, interpolation="lower")
        table.add_row(printable(name), str(len(clients)), unseen, str(clients.examples), *(f"{int(each)}" for each in sizes))
    console.print(table)
    say("", "Examples per training client", *size_histogram(data.train))
    if data.schema is not None:
        say("", "How each column is read", *data.schema.describe().split("\n"))


def size_histogram(clients: ClientSet) -> list[str]:
    """A histogram of the sizes of clients as lines of text: range, bar, number of clients.

    Ranges grow where sizes span orders of magnitude.
    """
    import numpy as np

    low, high = int(clients.sizes.min()), int(clients.sizes.max()) + 1
    spread = np.geomspace if high > 20 * low > 0 else np.linspace
    edges = np.unique(np.rint(spread(low, high, min(BINS, high - low) + 1)).astype(int))
    counts, _ = np.histogram(clients.sizes.numpy(), [*edges[:-1], edges[-1] - 0.5])
    labels = [f"{a}" if a == b - 1 else f"{a}–{b - 1}" for a, b in itertools.pairwise(edges)]
    room, most = max(map(len, labels)), max(counts)
    return [
        f"{label:>{room}}  {'█' * max(round(WIDTH * n / most), int(n > 0))} {n}"
        for label, n in zip(labels, counts, strict=True)
    ]
