"""The page's tables: the numbers of the methods, and the clients that fare worst."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from itertools import chain

from equipoise.metrics import Interval
from equipoise.report.data.over_seeds import FIGURES, Spread, malicious_clients, metric_figures, split_words, trivial_name
from equipoise.report.data.paired import bold_words, separated_methods
from equipoise.report.data.results_by_method import Study
from equipoise.report.palette import COLOURS
from equipoise.report.text.captions import nonfinite_note, sample_caption, served_model, trivial_note
from equipoise.report.text.phrases import BACKDOOR, INTERVAL, capital, listed, minus
from equipoise.report.text.sentences import MEANS_ONLY

WORST_CLIENTS = 10  # rows of the tables of clients that fare worst
REJECTED_NAMES = 5  # clients named whose updates were left out
SHARED = "shared model"


def numbers_table(study: Study) -> Iterator[str]:
    """One row per method: the figures of the error, clients trained per round, and wall time.

    Below a method whose clients are served their own models there is a row of the shared model.
    """
    split = f" ({split_words(study.runs)})" if study.seeds > 1 else ""
    seeds = f"; mean ± standard deviation over {study.seeds} seeds{split}" if split else "; one seed, so no spread is known"
    unit = ", in %" if study.scale.percent else ""
    headers = {**FIGURES, "trained": "trained clients per round", "seconds": "wall time (s)"}
    caption = f"{capital(study.measured)} over {study.judged}{study.judged.weighed}{unit}{seeds}.{served_model(study)}"
    caption += f" {MEANS_ONLY}" if study.judged.means else ""
    caption += sample_caption(study)
    values = study.figures_by_seed
    bold = {key: separated_methods(values[key]) for key in FIGURES}
    caption += f" {bold_words(any(bold.values()), values['mean'])}".rstrip()
    yield '<section aria-labelledby="numbers"><h2 id="numbers">In numbers</h2>'
    yield from open_table("numbers", caption, ("method", *headers.values()))
    for index, method in enumerate(study.methods):
        cells = []
        for key in headers:
            spread = method.figures[key]
            text = study.scale.spread(spread, len(method.runs)) if key in FIGURES else _rounded(spread.mean)
            mark = ' class="best"' if key in FIGURES and method.name in bold[key] else ""
            cells.append(f'<td{mark} data-key="{key}">{nonbreaking(text)}</td>')
        yield f"<tr>{header_cell(method.name, swatch(index))}{''.join(cells)}</tr>"
        yield from _interval_row(study, method.intervals)
        if method.personalised:
            shared = [study.scale.spread(method.figures[f"shared_{key}"], len(method.runs)) for key in FIGURES]
            cells = [f'<td data-key="shared_{key}">{nonbreaking(text)}</td>' for key, text in zip(FIGURES, shared, strict=True)]
            yield f'<tr class="below">{header_cell(SHARED)}{"".join(cells)}<td></td><td></td></tr>'
            yield from _interval_row(study, method.shared_intervals)
    yield from _trivial_row(study)
    yield close_table()
    if note := trivial_note(study):
        yield f'<p class="note" id="trivial">{escape(nonbreaking(note))}</p>'
    if note := nonfinite_note(study):
        yield f'<p class="note">{escape(note)}</p>'
    yield "</section>"


def _trivial_row(study: Study) -> Iterator[str]:
    """The row of the trivial answer, below all methods; nothing if it is not known."""
    if (method := study.with_trivial) is not None:
        figures = [study.scale.spread(method.figures[f"trivial_{key}"], len(method.runs)) for key in FIGURES]
        cells = [f'<td data-key="trivial_{key}">{nonbreaking(text)}</td>' for key, text in zip(FIGURES, figures, strict=True)]
        yield f'<tr class="trivial">{header_cell(trivial_name(method.runs))}{"".join(cells)}<td>–</td><td>–</td></tr>'


def _interval_row(study: Study, intervals: Mapping[str, Interval]) -> Iterator[str]:
    """The row of 95 % intervals below the figures that they are of; nothing without a sample."""
    if intervals:
        texts = (
            intervals[key].text(lambda value: minus(study.scale.number(value))).replace(" ", "\u00a0")
            if key in intervals
            else ""
            for key in FIGURES
        )
        yield f'<tr class="below">{header_cell(nonbreaking(INTERVAL.strip()))}'
        yield f"{''.join(f'<td>{text}</td>' for text in texts)}<td></td><td></td></tr>"


def malicious_table(study: Study) -> Iterator[str]:
    """The malicious clients' mean error beside the benign ones', per method."""
    unit = ", in %" if study.scale.percent else ""
    over = "; mean ± standard deviation over seeds" if study.seeds > 1 else ""
    caption = f"Mean {study.scale.noun} of benign and of malicious clients{study.judged.weighed}{unit}{over}."
    caption += served_model(study, brief=True)
    yield from open_table("malicious alone", caption, ("method", "benign clients", "malicious clients"))
    for index, method in enumerate(study.methods):
        spreads: list[Spread | None] = [method.figures.get(key) for key in ("mean", "malicious_mean")]
        texts = [study.scale.spread(spread, len(method.runs)) if spread is not None else "–" for spread in spreads]
        yield row(header_cell(method.name, swatch(index)), map(nonbreaking, texts))
    yield close_table()


def backdoor_table(study: Study) -> Iterator[str]:
    """How often marked examples of other classes are called the attackers' class, beside the error without the mark."""
    over = "; mean ± standard deviation over seeds" if study.seeds > 1 else ""
    caption = (
        f"The backdoor, in %, over {study.judged}{over}: the share of a client's examples of other classes that are called "
    )
    caption += "the attackers' class when they have the mark. Read it beside the same rate of a model that nobody attacked "
    caption += "(attacks.Backdoor with share = 0)."
    heads = ("method", f"mean {study.scale.noun} without the mark", "backdoor success, mean", "90th percentile over clients")
    yield from open_table("backdoor", caption, heads)
    for index, method in enumerate(study.methods):
        found = metric_figures(method.runs, BACKDOOR)
        rates = [found.figures[key] for key in ("mean", "percentile_90")] if found is not None else []
        texts = [study.scale.spread(method.figures["mean"], len(method.runs))]
        texts += [_percent_spread(rate, len(method.runs)) for rate in rates]
        yield row(header_cell(method.name, swatch(index)), map(nonbreaking, texts))
    yield close_table()


def _percent_spread(spread: Spread, seeds: int) -> str:
    """A rate in percent, with its standard deviation where there are several seeds."""
    return f"{100 * spread.mean:.1f}" + (f" ± {100 * spread.deviation:.1f}" if seeds > 1 else "")


def rejected_table(study: Study) -> Iterator[str]:
    """Per method: the number of updates that were left out, the clients who sent them, and the rounds."""
    over = " Over all seeds." if study.seeds > 1 else ""
    caption = f"Updates that were not finite or absurdly large, and so were left out of their round.{over}"
    attacked = ("of malicious clients",) if study.attacked else ()
    yield from open_table("rejected", caption, ("method", "updates left out", *attacked, "clients", "who", "rounds"))
    for index, method in enumerate(study.methods):
        rejected = [(run, client, report.round + 1) for run in method.runs
                for report in run.history.rounds for client in report.rejected]  # fmt: skip
        by_client = Counter(client for _, client, _ in rejected).most_common()
        malicious = {id(run): frozenset(malicious_clients(run)) for run in method.runs}
        cells = [f"{len(rejected):,}"]
        cells += [f"{sum(client in malicious[id(run)] for run, client, _ in rejected):,}"] if attacked else []
        cells += [f"{len(by_client):,}", listed([client for client, _ in by_client], REJECTED_NAMES) or "–"]
        cells.append(round_ranges({number for _, _, number in rejected}))
        yield row(header_cell(method.name, swatch(index)), map(escape, cells))
    yield close_table()


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


def open_table(kind: str, caption: str, columns: tuple[str, ...], name: str = "", methods: Sequence[int] = ()) -> Iterator[str]:
    """The opening tags of a table under its caption, in a box that scrolls; the last columns may belong to `methods`."""
    name = name or f"table-{kind.split()[0]}"
    marks = [""] * (len(columns) - len(methods)) + [swatch(index) for index in methods]
    yield f'<div class="card"><p class="caption" id="{name}-caption">{escape(nonbreaking(caption))}</p>'
    yield f'<div class="scroll" tabindex="0" role="region" aria-labelledby="{name}-caption">'
    yield f'<table class="{kind}" id="{name}" aria-labelledby="{name}-caption">'
    heads = (header_cell(nonbreaking(column), mark, "col") for mark, column in zip(marks, columns, strict=True))
    yield f"<thead><tr>{''.join(heads)}</tr></thead><tbody>"


def row(header: str, cells: Iterable[str]) -> str:
    """A row of a table: its header cell, then cells that are HTML already."""
    return f"<tr>{header}{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"


def header_cell(name: str, mark: str = "", scope: str = "row") -> str:
    """The header cell of a row or column; only a long name may break."""
    kind = ' class="short"' if len(name) <= 14 else ""
    return f'<th scope="{scope}"{kind}>{mark}{escape(name)}</th>'


def close_table() -> str:
    """The closing tags of a table."""
    return "</tbody></table></div></div>"


def swatch(index: int) -> str:
    """A small square in the colour of a method."""
    return f'<span class="swatch" style="background:var(--method-{index % len(COLOURS)})"></span>'


def nonbreaking(text: str) -> str:
    """The text with non-breaking spaces between numbers and their units."""
    return text.replace(" %", "\u00a0%").replace(" ± ", "\u00a0±\u00a0")


def _rounded(value: float) -> str:
    return f"{value:.1f}" if value < 100 else f"{value:,.0f}"
