"""The page's tables: the numbers of the methods, and the clients that fare worst."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from itertools import chain

import torch

from equipoise.metrics import Interval
from equipoise.report.data.over_seeds import FIGURES, Spread, malicious_clients, metric_figures
from equipoise.report.data.results_by_method import MethodResults, Study
from equipoise.report.palette import COLOURS
from equipoise.report.text.captions import nonfinite_note, sample_caption, served_model
from equipoise.report.text.phrases import INTERVAL, listed

BACKDOOR = "backdoor_success"  # the column of the rate at which a backdoor works
WORST_CLIENTS = 10  # rows of the tables of clients that fare worst
REJECTED_NAMES = 5  # clients named whose updates were left out
SHARED = "shared model"
_LOWEST = " The lowest of a column is bold."


def numbers_table(study: Study) -> Iterator[str]:
    """One row per method: the figures of the error, clients trained per round, and wall time.

    Below a method whose clients are served their own models there is a row of the shared model.
    """
    seeds = f"; mean ± standard deviation over {study.seeds} seeds" if study.seeds > 1 else "; one seed, so no spread is known"
    unit = ", in %" if study.scale.percent else ""
    headers = {**FIGURES, "trained": "trained clients per round", "seconds": "wall time (s)"}
    caption = f"{study.scale.noun.capitalize()} over {study.judged}{study.judged.weighed}{unit}{seeds}.{served_model(study)}"
    caption += sample_caption(study)
    if len(study.methods) > 1:
        caption += " The lowest of a column, among what clients are served, is bold." if study.personalised else _LOWEST
    yield '<section aria-labelledby="numbers"><h2 id="numbers">In numbers</h2>'
    yield from _open_table("numbers", caption, ("method", *headers.values()))
    lowest = {key: _lowest([study.scale.number(method.figures[key].mean) for method in study.methods]) for key in FIGURES}
    for index, method in enumerate(study.methods):
        cells = []
        for key in headers:
            spread = method.figures[key]
            text = study.scale.spread(spread, len(method.runs)) if key in FIGURES else _rounded(spread.mean)
            mark = ' class="best"' if key in FIGURES and study.scale.number(spread.mean) == lowest[key] else ""
            cells.append(f'<td{mark} data-key="{key}">{nonbreaking(text)}</td>')
        yield f"<tr>{_header_cell(method.name, swatch(index))}{''.join(cells)}</tr>"
        yield from _interval_row(study, method.intervals)
        if method.personalised:
            shared = [study.scale.spread(method.figures[f"shared_{key}"], len(method.runs)) for key in FIGURES]
            cells = [f'<td data-key="shared_{key}">{nonbreaking(text)}</td>' for key, text in zip(FIGURES, shared, strict=True)]
            yield f'<tr class="below">{_header_cell(SHARED)}{"".join(cells)}<td></td><td></td></tr>'
            yield from _interval_row(study, method.shared_intervals)
    yield _CLOSE_TABLE
    if note := nonfinite_note(study):
        yield f'<p class="note">{escape(note)}</p>'
    yield "</section>"


def _interval_row(study: Study, intervals: Mapping[str, Interval]) -> Iterator[str]:
    """The row of 95 % intervals below the figures that they are of; nothing without a sample."""
    if intervals:
        texts = (intervals[key].text(study.scale.number).replace(" ", "\u00a0") if key in intervals else "" for key in FIGURES)
        yield f'<tr class="below">{_header_cell(nonbreaking(INTERVAL.strip()))}'
        yield f"{''.join(f'<td>{text}</td>' for text in texts)}<td></td><td></td></tr>"


def malicious_table(study: Study) -> Iterator[str]:
    """The malicious clients' mean error beside the benign ones', per method."""
    unit = ", in %" if study.scale.percent else ""
    over = "; mean ± standard deviation over seeds" if study.seeds > 1 else ""
    caption = f"Mean {study.scale.noun} of benign and of malicious clients{study.judged.weighed}{unit}{over}."
    caption += served_model(study, brief=True)
    yield from _open_table("malicious alone", caption, ("method", "benign clients", "malicious clients"))
    for index, method in enumerate(study.methods):
        spreads: list[Spread | None] = [method.figures.get(key) for key in ("mean", "malicious_mean")]
        texts = [study.scale.spread(spread, len(method.runs)) if spread is not None else "–" for spread in spreads]
        yield _row(_header_cell(method.name, swatch(index)), map(nonbreaking, texts))
    yield _CLOSE_TABLE


def backdoor_table(study: Study) -> Iterator[str]:
    """How often marked examples of other classes are called the attackers' class, beside the error without the mark."""
    over = "; mean ± standard deviation over seeds" if study.seeds > 1 else ""
    caption = (
        f"The backdoor, in %, over {study.judged}{over}: the share of a client's examples of other classes that are called "
    )
    caption += "the attackers' class when they have the mark. Read it beside the same rate of a model that nobody attacked "
    caption += "(attacks.Backdoor with share = 0)."
    heads = ("method", f"mean {study.scale.noun} without the mark", "backdoor success, mean", "90th percentile over clients")
    yield from _open_table("backdoor", caption, heads)
    for index, method in enumerate(study.methods):
        found = metric_figures(method.runs, BACKDOOR)
        rates = [found.figures[key] for key in ("mean", "percentile_90")] if found is not None else []
        texts = [study.scale.spread(method.figures["mean"], len(method.runs))]
        texts += [_percent_spread(rate, len(method.runs)) for rate in rates]
        yield _row(_header_cell(method.name, swatch(index)), map(nonbreaking, texts))
    yield _CLOSE_TABLE


def _percent_spread(spread: Spread, seeds: int) -> str:
    """A rate in percent, with its standard deviation where there are several seeds."""
    return f"{100 * spread.mean:.1f}" + (f" ± {100 * spread.deviation:.1f}" if seeds > 1 else "")


def rejected_table(study: Study) -> Iterator[str]:
    """Per method: the number of updates that were left out, the clients who sent them, and the rounds."""
    over = " Over all seeds." if study.seeds > 1 else ""
    caption = f"Updates that were not finite or absurdly large, and so were left out of their round.{over}"
    attacked = ("of malicious clients",) if study.attacked else ()
    yield from _open_table("rejected", caption, ("method", "updates left out", *attacked, "clients", "who", "rounds"))
    for index, method in enumerate(study.methods):
        rejected = [(run, client, report.round + 1) for run in method.runs
                for report in run.history.rounds for client in report.rejected]  # fmt: skip
        by_client = Counter(client for _, client, _ in rejected).most_common()
        malicious = {id(run): frozenset(malicious_clients(run)) for run in method.runs}
        cells = [f"{len(rejected):,}"]
        cells += [f"{sum(client in malicious[id(run)] for run, client, _ in rejected):,}"] if attacked else []
        cells += [f"{len(by_client):,}", listed([client for client, _ in by_client], REJECTED_NAMES) or "–"]
        cells.append(round_ranges({number for _, _, number in rejected}))
        yield _row(_header_cell(method.name, swatch(index)), map(escape, cells))
    yield _CLOSE_TABLE


def round_ranges(numbers: set[int], most: int = 8) -> str:
    """Rounds as a short list of ranges; of more than `most`, the first ones.

    >>> round_ranges({1, 2, 3, 7, 9, 10}), round_ranges(set(range(1, 40, 2)), most=3)
    ('1 to 3, 7, 9, 10', '1, 3, 5, … (20 rounds up to 39)')
    """
    stretches: list[list[int]] = []
    for number in sorted(numbers):
        if stretches and number == stretches[-1][-1] + 1:
            stretches[-1].append(number)
        else:
            stretches.append([number])
    texts = ([f"{s[0]:,} to {s[-1]:,}"] if len(s) > 2 else [f"{number:,}" for number in s] for s in stretches)
    words = list(chain.from_iterable(texts))
    if len(words) <= most:
        return ", ".join(words) or "–"
    return f"{', '.join(words[:most])}, … ({len(numbers):,} rounds up to {max(numbers):,})"


def worst_clients(study: Study) -> Iterator[str]:
    """The clients that fare worst under the method; with several methods, under the first and under the best one."""
    first, best = study.methods[0], study.best
    yield '<section aria-labelledby="worst"><h2 id="worst">Who fares worst</h2>'
    if len(study.methods) == 1:
        yield from _worst_alone(study, first)
    else:
        noun = study.scale.noun
        yield f'<p class="note">The same clients under each method; small numbers are the change against {escape(first.name)}. '
        yield f"Clients picked for a large {noun} under one method tend to fare less badly under any other, by chance alone: "
        yield "read both tables, and judge by the figures over all clients above.</p>"
        yield f'<div class="{"pair" if len(study.methods) <= 3 else "stack"}">'
        yield from _before_and_after(study, first, "left-behind")
        yield from _before_and_after(study, best, "still-behind")
        yield "</div>"
    yield "</section>"


def _worst_alone(study: Study, method: MethodResults) -> Iterator[str]:
    """The clients that fare worst under the only method, with their error and loss."""
    rows, only_loss = method.rows[0], study.scale.noun == "loss"
    worst = method.worst(WORST_CLIENTS)
    seed = f", seed {method.runs[0].seed}" if len(method.runs) > 1 else ""
    finite = rows.loss[torch.isfinite(rows.loss)]
    losses = study.scale.fitting(float(finite.abs().max()) if len(finite) else 1.0, percent=False)
    tables = {"": rows}
    if method.personalised:
        tables = {"served " if method.partly_personalised else "own ": rows, "shared ": method.all_rows[0].benign}
    columns = [] if only_loss else [
        (f"{whose}error{' (%)' * study.scale.percent}", table.error, study.scale) for whose, table in tables.items()
    ]  # fmt: skip
    columns += [(f"{whose}loss", table.loss, losses) for whose, table in tables.items() if only_loss or table is rows]
    caption = f"The {_client_count(len(worst), study.judged.benign_word)} with the largest {study.scale.noun}{seed}"
    caption += f"{_evaluated(study)}.{served_model(study)}"
    yield from _open_table("worst alone", caption, ("client", "examples", *(title for title, _, _ in columns)))
    for k in worst:
        numbers = (scale.number(float(values[k])) for _, values, scale in columns)
        yield _row(_header_cell(rows.client[k]), (f"{int(rows.size[k]):,}", *numbers))
    yield _CLOSE_TABLE


def _before_and_after(study: Study, chosen: MethodResults, name: str) -> Iterator[str]:
    """The clients that fare worst under `chosen`, with their error under every method that has the same seed."""
    scale, rows, seed = study.scale, chosen.rows[0], chosen.runs[0].seed
    worst = chosen.worst(WORST_CLIENTS)
    under = [(index, method, method.errors_by_client(seed)) for index, method in enumerate(study.methods)]
    shown = [(index, method, errors) for index, method, errors in under if errors is not None]
    seeds = f", seed {seed}" if study.seeds > 1 else ""
    who = f"{_client_count(len(worst), study.judged.benign_word)} with the largest {scale.noun} under {chosen.name}{seeds}"
    who += _evaluated(study)
    unit = " in %" if scale.percent else ""
    caption = f"The {who}; {scale.noun}{unit} under each method.{served_model(study, brief=True)}"
    columns = ("client", "examples", *(method.name for _, method, _ in shown))
    yield from _open_table("worst", caption, columns, name, [index for index, _, _ in shown])
    for k in worst:
        key = (rows.client[k], int(rows.size[k]))
        errors = [by_client.get(key, math.nan) for _, _, by_client in shown]
        base = errors[0] if shown[0][0] == 0 else math.nan
        cells = (_change(study, base, error) if column else scale.number(error) for column, error in enumerate(errors))
        yield _row(_header_cell(key[0]), (f"{key[1]:,}", *cells))
    yield _CLOSE_TABLE


def _change(study: Study, before: float, after: float) -> str:
    """An error and its change against `before`: the difference of the two numbers as they are written."""
    change = study.scale.change(before, after)
    text = study.scale.number(after)
    if math.isnan(change):
        return text
    if change == 0:
        return f'{text} <small class="same">±0</small>'
    sign, mark = ("−", "down") if change < 0 else ("+", "up")
    return f'{text} <small class="{mark}">{sign}{study.scale.points(change).removesuffix(" points")}</small>'


def _open_table(
    kind: str, caption: str, columns: tuple[str, ...], name: str = "", methods: Sequence[int] = ()
) -> Iterator[str]:
    """The opening tags of a table under its caption, in a box that scrolls; the last columns may belong to `methods`."""
    name = name or f"table-{kind.split()[0]}"
    marks = [""] * (len(columns) - len(methods)) + [swatch(index) for index in methods]
    yield f'<div class="card"><p class="caption" id="{name}-caption">{escape(nonbreaking(caption))}</p>'
    yield f'<div class="scroll" tabindex="0" role="region" aria-labelledby="{name}-caption">'
    yield f'<table class="{kind}" id="{name}" aria-labelledby="{name}-caption">'
    heads = (_header_cell(nonbreaking(column), mark, "col") for mark, column in zip(marks, columns, strict=True))
    yield f"<thead><tr>{''.join(heads)}</tr></thead><tbody>"


def _row(header: str, cells: Iterable[str]) -> str:
    """A row of a table: its header cell, then cells that are HTML already."""
    return f"<tr>{header}{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"


def _header_cell(name: str, mark: str = "", scope: str = "row") -> str:
    """The header cell of a row or column; only a long name may break."""
    kind = ' class="short"' if len(name) <= 14 else ""
    return f'<th scope="{scope}"{kind}>{mark}{escape(name)}</th>'


_CLOSE_TABLE = "</tbody></table></div></div>"


def swatch(index: int) -> str:
    """A small square in the colour of a method."""
    return f'<span class="swatch" style="background:var(--method-{index % len(COLOURS)})"></span>'


def nonbreaking(text: str) -> str:
    """The text with non-breaking spaces between numbers and their units."""
    return text.replace(" %", "\u00a0%").replace(" ± ", "\u00a0±\u00a0")


def _client_count(count: int, kind: str = "") -> str:
    return f"{kind}client" if count == 1 else f"{count} {kind}clients"


def _evaluated(study: Study) -> str:
    """A clause that only a sample of clients was evaluated; empty if all were."""
    return ", of those evaluated" if study.sample else ""


def _rounded(value: float) -> str:
    return f"{value:.1f}" if value < 100 else f"{value:,.0f}"


def _lowest(written: list[str]) -> str | None:
    """The lowest of the written numbers; None if all are equal, or none is a number."""
    numbers = [text for text in written if text != "–"]
    return min(numbers, key=float) if len(set(written)) > 1 and numbers else None
