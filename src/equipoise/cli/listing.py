"""What the command line prints about parts, data sets and comparisons; the text flows, so that any width works."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from rich import box
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from equipoise.core.screen import Screen
from equipoise.core.words import printable
from equipoise.experiment import catalog
from equipoise.experiment.part_config import FROM_DATA

if TYPE_CHECKING:
    from torch import Tensor

    from equipoise.data import ClientSet, FederatedData
    from equipoise.report.over_seeds import Spread
    from equipoise.run_record import RunRecord


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
            if part.source:
                _print_indented(console, 6, (f"Source: {part.source}", "dim"))
            _print_indented(console, 6, (f"In Python: {part.python_path}", "dim"))


def _print_indented(console: Screen, indent: int, *parts: str | tuple[str, str]) -> None:
    """Print parts of text, each plain or with a style, as a paragraph that is indented."""
    console.print(Padding(Text.assemble(*parts), (0, 0, 0, indent), expand=False))


def show_functions(console: Screen) -> None:
    """Print the functions and classes that only Python code can use."""
    console.print()
    console.print(Text.assemble(("functions", "bold underline"), "  in Python only"))
    for function in catalog.FUNCTIONS:
        part = catalog.CatalogPart("function", function, catalog.Entry(function))
        console.print()
        _print_indented(console, 2, (part.python_path, "bold cyan"), f"  {part.summary}")
        if part.source:
            _print_indented(console, 6, (f"Source: {part.source}", "dim"))


def by_method(records: Sequence[RunRecord]) -> dict[str, list[RunRecord]]:
    """The records by the name of the method, in order."""
    found: dict[str, list[RunRecord]] = {}
    for record in records:
        found.setdefault(record.name, []).append(record)
    return found


def validation_table(records: Sequence[RunRecord], *, plain: bool = False) -> list[Table]:
    """The table of methods on validation clients, by which one of them may be chosen; none without both splits."""
    from equipoise.report.paired import judged_on_validation

    methods = judged_on_validation(by_method(records))
    return [] if methods is None else [comparison_table([run for runs in methods.values() for run in runs], plain=plain)]


def comparison_table(records: Sequence[RunRecord], *, plain: bool = False) -> Table:
    """A table of methods: figures of the error ± over seeds, clients trained per round and seconds; the better in bold.

    In `plain` text, such as that of a pipe, a star stands for bold.
    """
    from equipoise.report.formats import Judged, ValueFormat, capital
    from equipoise.report.notices import about_runs, said, trivial_notices
    from equipoise.report.over_seeds import FIGURES, figures_of, in_percent, intervals_of, trivial_name
    from equipoise.report.paired import bold_notices, figures_by_seed, separated_methods

    by_name = by_method(records)
    rows = {name: figures_of(runs) for name, runs in by_name.items()}
    percent = in_percent(records)
    noun = capital(records[0].measured) + " in %" * percent
    factor, digits = (100.0, 1) if percent else (1.0, 3)
    scale, answer = ValueFormat(percent=percent, decimals=digits), trivial_name(records)
    remark = said([*trivial_notices(rows, answer, records[0].error_name, scale), *about_runs(by_name)])
    title = f"{noun} over {Judged.of(records)}, mean ± standard deviation over seeds"
    table = Table(title=title, title_justify="left", caption_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    values = figures_by_seed(by_name)
    bold = {key: separated_methods(values[key]) for key in FIGURES}
    marks = said(bold_notices(any(bold.values()), values["mean"]))
    if plain:
        marks = marks.replace("Bold:", "*:").replace("Nothing is bold:", "No cell has a *:")
    below = f"{marks} {remark}".strip()
    star = (" *", "  ") if plain and any(bold.values()) else ("", "")
    table.caption = Text(below) if below else None
    table.add_column("method", no_wrap=True)
    for heading in ("seeds", "mean", "90th pct.", "worst 10 %", "std. dev.", "trained", "seconds"):
        table.add_column(heading, justify="right", no_wrap=True)

    def add_intervals(name: str, column: str) -> None:
        if found := intervals_of(by_name[name], column):
            texts = (found[key].text(lambda v: f"{factor * v:.{digits}f}") if key in found else "" for key in FIGURES)
            table.add_row("  95 % interval", "", *texts, style="dim")

    for name, row in rows.items():
        seeds = len(by_name[name])
        best = {key: "bold green" if name in bold[key] else "" for key in FIGURES}
        cells = [
            Text(spread_text(row[key], seeds, factor, digits) + star[name not in bold[key]], style=best[key]) for key in FIGURES
        ]
        table.add_row(printable(name), str(seeds), *cells, f"{row['trained'].mean:.1f}", f"{row['seconds'].mean:.1f}")
        add_intervals(name, "error")
        if "shared_mean" in row:
            shared = [spread_text(row[f"shared_{key}"], seeds, factor, digits) for key in FIGURES]
            table.add_row("  shared model", "", *shared, style="dim")
            add_intervals(name, "shared_error")
    if trivial := next(((name, row) for name, row in rows.items() if "trivial_mean" in row), None):
        name, row = trivial
        figures = [spread_text(row[f"trivial_{key}"], len(by_name[name]), factor, digits) for key in FIGURES]
        table.add_row(trivial_name(by_name[name]), "", *figures, style="dim")
    return table


def difference_lines(records: Sequence[RunRecord]) -> list[str]:
    """The paired differences of the 90th percentile from the first method, and verdicts on the mean and the worst 10 %.

    None for one method, one seed, or means alone.
    """
    from equipoise.report.over_seeds import in_percent
    from equipoise.report.paper_tables import differences_of

    by_name = by_method(records)
    known = all(record.clients.where(record.judged_on).clients_in_mean is None for record in records)
    if len(by_name) < 2 or min(map(len, by_name.values())) < 2 or not known:
        return []
    first = next(iter(by_name))
    found = differences_of(by_name, first, "percentile_90")
    others = [differences_of(by_name, first, figure) for figure in ("mean", "worst_10")]
    return found.lines(1, 100.0, others) if in_percent(records) else found.lines(others=others)


def subgroups_below(records: Sequence[RunRecord]) -> list[str]:
    """The subgroups of clients under each method, in the unit of the table; none where clients have no attributes."""
    from equipoise.report.over_seeds import in_percent
    from equipoise.subgroups import subgroup_lines

    return subgroup_lines(by_method(records), percent=in_percent(records))


def worst_lines(record: RunRecord, count: int = 5) -> list[str]:
    """The clients that are served worst, as lines of text with intervals; none where hardly more clients were judged.

    Clients with few examples, whose error is mostly chance, are left out where enough others are there, unless `record` has a
    limit that was asked for. Clients that a run protects are not named: a terminal's output is passed on, too.
    """
    from equipoise.report.notices import FEW_EXAMPLES

    if record.protects_clients:
        return ["Single clients are not named: the run protects them. For whoever may see the data, clients.parquet has all."]
    rows = record.clients.where(record.judged_on)
    if len(rows.benign) <= count:
        return []
    large = int((rows.benign.size >= FEW_EXAMPLES).sum())
    least = FEW_EXAMPLES if count < large < len(rows.benign) and not record.at_least else 0
    some, limit = (large, least) if least else (len(rows.benign), record.at_least)
    among = f" of the {some:,} with {limit} examples or more" if limit else ""
    table = str(rows.worst(count, at_least=least)).splitlines()
    title = f"The {count} clients{among} that are served worst, by their {record.measured}:"
    return [title, *(f"  {line}" for line in table)]


def metric_tables(records: Sequence[RunRecord]) -> list[Table]:
    """For each metric a table of methods, with the figures of the table of errors ± over seeds."""
    from equipoise.report.over_seeds import FIGURES, metric_figures

    by_name = by_method(records)
    tables = []
    for metric in dict.fromkeys(name for record in records for name in record.clients.metrics):
        found = {name: figures for name, runs in by_name.items() if (figures := metric_figures(runs, metric)) is not None}
        better = "more" if all(figures.higher_is_better for figures in found.values()) else "less"
        title = f"{printable(metric)} over the same clients, {better} is better"
        table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
        table.add_column("method", no_wrap=True)
        for heading in ("mean", "90th pct.", "worst 10 %", "std. dev."):
            table.add_column(heading, justify="right", no_wrap=True)
        for name, figures in found.items():
            table.add_row(printable(name), *(spread_text(figures.figures[key], len(by_name[name]), 1.0, 3) for key in FIGURES))
        tables.append(table)
    return tables


def print_whole(console: Screen, table: Table) -> None:
    """Print a table at the width that it needs: in a narrow terminal its lines wrap, in a pipe or a log they are long."""
    needed = Screen(width=10_000).measure(table).maximum
    wide = Screen(file=console.file, width=max(needed, console.width), force_terminal=console.is_terminal)
    wide.print(table, crop=False)


def spread_text(spread: Spread, seeds: int, factor: float, digits: int) -> str:
    """A figure, and its deviation if there are several seeds."""
    text = f"{factor * spread.mean:.{digits}f}"
    return text + (f" ± {factor * spread.deviation:.{digits}f}" if seeds > 1 else "")


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
    note = "\nA folder is named by --folder or [data] folder, or by the environment variable EQUIPOISE_DATA."
    console.print(Text(note, style="dim"))


def show_data(console: Screen, data: FederatedData) -> None:
    """Print the clients, examples and sizes of each split, the shape of an example, a histogram of sizes, and a schema."""
    import torch

    from equipoise.core.trees import named_leaves
    from equipoise.data.leaves import shown_shape

    parts = named_leaves("", data.train.x)
    shapes = {name: " × ".join(map(str, shown_shape(leaf))) or "1" for name, leaf in parts.items()}
    kinds = {name: str(leaf.dtype).removeprefix("torch.") for name, leaf in parts.items()}
    shape = ", ".join(f"{name} {shapes[name]} ({kinds[name]})".strip() for name in parts)
    about = f"  {data.classes or 'no'} classes, examples of shape {shape}"
    console.print(Text.assemble((printable(data.name), "bold cyan"), printable(about), "\n"))
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for title in ("split", "clients", "unseen", "examples", "smallest", "10 %", "median", "90 %", "largest"):
        table.add_column(title, justify="left" if title == "split" else "right")
    for name, clients in data.splits.items():
        unseen = "" if name == "train" else str(int((data.train.find(clients) < 0).sum()))
        sizes = clients.sizes.double()
        quantiles = torch.quantile(sizes, torch.tensor([0.0, 0.1, 0.5, 0.9, 1.0], dtype=torch.float64), interpolation="lower")
        cells = [f"{int(q)}" for q in quantiles]
        table.add_row(name, str(len(clients)), unseen, str(clients.examples), *cells)
    console.print(table)
    console.print(Text("\nExamples per training client", style="bold"))
    console.say(*size_histogram(data.train))
    if data.schema is not None:
        console.print(Text("\nHow each column is read", style="bold"))
        console.say(*data.schema.describe().split("\n"))


def size_histogram(clients: ClientSet, bins: int = 8, width: int = 40) -> list[str]:
    """A histogram of the sizes of clients as lines of text: range, bar, number of clients."""
    edges = _size_ranges(clients.sizes, bins)
    counts = [int(((clients.sizes >= low) & (clients.sizes <= high)).sum()) for low, high in edges]
    labels = [f"{low}" if low == high else f"{low}–{high}" for low, high in edges]
    room = max(map(len, labels))
    bars = ["█" * max(round(width * count / max(counts)), int(count > 0)) for count in counts]
    return [f"{label:>{room}}  {bar} {count}" for label, bar, count in zip(labels, bars, counts, strict=True)]


def _size_ranges(sizes: Tensor, bins: int) -> list[tuple[int, int]]:
    """Ranges (first, last) of integers that cover the sizes without gaps; growing if sizes span orders of magnitude."""
    low, high = int(sizes.min()), int(sizes.max())
    if high - low < bins:
        return [(size, size) for size in range(low, high + 1)]
    if high >= 20 * low:
        cuts = [round(low * ((high + 1) / low) ** (i / bins)) for i in range(bins + 1)]
    else:
        cuts = [round(low + (high + 1 - low) * i / bins) for i in range(bins + 1)]
    return [(a, b - 1) for a, b in itertools.pairwise(cuts) if b > a]
