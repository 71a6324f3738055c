"""The tables by which methods are told apart: paired differences from the first one, and the figures on validation data."""

from __future__ import annotations

from collections.abc import Iterator

from equipoise.report.data.over_seeds import FIGURES, covered_by_seeds
from equipoise.report.data.paired import LEAST_SEEDS, RULE, PairedDifference, cohort_words, lower_words, uncorrected_words
from equipoise.report.data.results_by_method import Study
from equipoise.report.text.tables import close_table, header_cell, nonbreaking, open_table, row, swatch

_SHOWN = ("mean", "percentile_90", "worst_10")


def differences_section(study: Study) -> Iterator[str]:
    """For each method its paired differences from the first one, with intervals; nothing for one method, or for one seed."""
    if len(study.methods) < 2 or study.judged.means:
        return
    found = {figure: study.paired_differences(figure) for figure in _SHOWN}
    if max(each.seeds for each in found["mean"]) < 2:
        return
    first = study.methods[0].name
    points = " in percentage points" if study.scale.percent else ""
    yield '<section aria-labelledby="differences"><h2 id="differences">Differences, seed by seed</h2>'
    caption = f"A figure under a method minus the same figure under {first}{points}, paired by seed: mean ± standard deviation "
    caption += f"over seeds; below: 95 % interval and verdict. Less than 0: the method is lower. {RULE} The interval covers "
    caption += f"{covered_by_seeds(study.runs)}."
    caption += f" {uncorrected_words(len(study.methods) - 1, len(_SHOWN))}".rstrip()
    caption += f" {cohort_words({method.name: method.runs for method in study.methods}, first)}".rstrip()
    few = min(each.seeds for each in found["mean"]) < LEAST_SEEDS
    caption += f" An interval needs {LEAST_SEEDS} seeds." if few else ""
    heads = ("method", *(FIGURES[figure] for figure in _SHOWN), "90th percentile in seeds")
    yield from open_table("differences", caption, heads)
    for index, method in enumerate(study.methods[1:], start=1):
        cells = [_cell(study, found[figure][index - 1]) for figure in _SHOWN]
        tail = found["percentile_90"][index - 1]
        yield row(header_cell(method.name, swatch(index)), (*cells, lower_words(tail)))
    yield close_table()
    yield "</section>"


def _cell(study: Study, each: PairedDifference) -> str:
    """A mean difference with its deviation, and its interval below."""
    scale, spread = study.scale, each.spread

    def signed(value: float) -> str:
        return scale.signed(value).removeprefix("±")  # of 0, which has no sign here

    text = nonbreaking(f"{signed(spread.mean)} ± {scale.number(spread.deviation)}") if each.seeds > 1 else "–"
    between = each.interval.text(lambda value: scale.end(value).removeprefix("±"))
    below = "" if between == "–" else f' <small class="below">{between}</small>'
    return f'{text}{below} <small class="below verdict">{each.verdict_words}</small>'


def validation_section(study: Study) -> Iterator[str]:
    """The figures of every method on validation data, by which the headline's method is chosen; nothing without such data."""
    found, figures = study.validation, study.validation_figures
    if found is None or figures is None:
        return
    chosen = figures.choose()
    unit = ", in %" if study.scale.percent else ""
    over = f"; mean ± standard deviation over {study.seeds} seeds" if study.seeds > 1 else ""
    yield '<section aria-labelledby="validation"><h2 id="validation">On validation data</h2>'
    caption = f"{study.scale.noun.capitalize()} over {found.judged}{unit}{over}. The sentence at the top is about the method "
    caption += f"with the lowest 90th percentile here: {chosen}. Choose by this table, and report the one above once."
    yield from open_table("validation", caption, ("method", *FIGURES.values()))
    for index, method in enumerate(found.methods):
        cells = []
        for key in FIGURES:
            text = nonbreaking(study.scale.spread(method.figures[key], len(method.runs)))
            cells.append(f'<td data-key="validation_{key}">{text}</td>')
        yield f"<tr>{header_cell(method.name, swatch(index))}{''.join(cells)}</tr>"
    yield close_table()
    yield "</section>"
