"""Tables of methods for papers: Markdown, and LaTeX for the package booktabs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from equipoise.core.words import markdown_text, printable
from equipoise.errors import InvalidParameter, nearest_name, require, require_integer, require_name
from equipoise.metrics import PERCENTILES, Summary, percentile
from equipoise.report import paired
from equipoise.report.formats import Judged, capital
from equipoise.report.notices import about_runs, covered, metric_notices, notice, said
from equipoise.report.over_seeds import FIGURES, Spread, in_percent, trivial_name, trivial_summary
from equipoise.report.paired import Differences

if TYPE_CHECKING:
    from equipoise.run_record import RunRecord

_UNITLESS = {
    "angle": "angle",
    "kl_to_uniform": "KL to uniform",
    "gini": "Gini coefficient",
    "size_correlation": "correlation with size",
    "accuracy_angle": "angle of accuracies",
    "accuracy_kl_to_uniform": "KL of accuracies to uniform",
}
HEADINGS = {
    "mean": "mean",
    "mean_by_example": "mean by example",
    **{f"percentile_{p}": f"{p}th percentile" for p in PERCENTILES},
    **{f"{end}_{share}": f"{end} {share} %" for end in ("worst", "best") for share in (10, 5)},
    "standard_deviation": "standard deviation",
    "variance": "variance",
    **_UNITLESS,
}
_GREEK = {
    "α": "alpha", "β": "beta", "γ": "gamma", "δ": "delta", "ε": "varepsilon", "ζ": "zeta", "η": "eta", "θ": "theta",
    "κ": "kappa", "λ": "lambda", "μ": "mu", "ν": "nu", "π": "pi", "ρ": "rho", "σ": "sigma", "τ": "tau", "φ": "phi", "χ": "chi",
    "ψ": "psi", "ω": "omega", "Γ": "Gamma", "Δ": "Delta", "Θ": "Theta", "Λ": "Lambda", "Π": "Pi", "Σ": "Sigma", "Φ": "Phi",
    "Ψ": "Psi", "Ω": "Omega", "±": "pm", "×": "times", "≤": "leq", "≥": "geq", "∞": "infty",
}  # fmt: skip
_SYMBOLS = {
    **{character: f"\\{character}" for character in "&%$#_{}"},
    **{character: f"$\\{name}$" for character, name in _GREEK.items()},
    **{
        "\\": r"\textbackslash{}",
        "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}",
        "−": "$-$",
        "–": "--",
        "…": r"\ldots{}",
    },
}


def latex_text(text: str) -> str:
    r"""A text with what LaTeX reads as commands written out; Greek letters and signs as mathematics.

    >>> print(latex_text("Δ-FL 50 %, q_0"))
    $\Delta$-FL 50 \%, q\_0
    """
    return "".join(_SYMBOLS.get(character, character) for character in " ".join(printable(text).split()))


Cells = frozenset[tuple[int, int]]  # by row, 0 being the headings, and column


def markdown_table(
    caption: str, rows: Sequence[Sequence[str]], legend: str = "", remark: str = "", best: Cells = frozenset()
) -> str:
    """Rows of cells, the first one of headings, with a line above them and one below. The `best` cells are bold.

    The line above is the caption and the `legend`, which says what marks mean.
    """
    head, *body = (
        [f"**{markdown_text(cell)}**" if (i, j) in best else markdown_text(cell) for j, cell in enumerate(row)]
        for i, row in enumerate(rows)
    )
    lines = [f"| {' | '.join(row)} |" for row in (head, ["---", *["---:"] * (len(head) - 1)], *body)]
    return "\n".join(
        [markdown_text(f"{caption} {legend}".rstrip()), "", *lines, *(["", markdown_text(remark)] if remark else [])]
    )


def latex_table(
    caption: str, rows: Sequence[Sequence[str]], legend: str = "", remark: str = "", best: Cells = frozenset()
) -> str:
    """Rows of cells, the first one of headings, as a tabular with the lines of booktabs.

    The `best` cells are bold. The caption, the `legend`, which says what marks mean, and the remark are a note below the
    tabular, so that readers of the paper see what ± means and of how many seeds.
    """
    written = [
        [rf"\textbf{{{latex_text(cell)}}}" if (i, j) in best else latex_text(cell) for j, cell in enumerate(row)]
        for i, row in enumerate(rows)
    ]
    head, *body = (rf"{' & '.join(row)} \\" for row in written)
    inner = [rf"\begin{{tabular}}{{l{'r' * (len(rows[0]) - 1)}}}", r"\toprule", head, r"\midrule", *body, r"\bottomrule"]
    said = latex_text(" ".join(filter(None, (caption, legend, remark))))
    note = [r"\par\smallskip", rf"{{\footnotesize\raggedright {said}\par}}"] if said else []
    return "\n".join([*inner, r"\end{tabular}", *note])


def paper_table(
    methods: Mapping[str, Sequence[RunRecord]],
    write: Callable[[str, Sequence[Sequence[str]], str, str, Cells], str],
    *,
    column: str = "error",
    figures: Iterable[str] = tuple(FIGURES),
    percent: bool = False,
    digits: int | None = None,
    trivial: bool = True,
    baseline: str | None = None,
    note: str = "",
) -> str:
    """One row per method with figures over clients, mean ± standard deviation over seeds, as `write` writes tables.

    `column` is "error", "loss" or a metric, and `figures` are names of `HEADINGS`. `percent` multiplies by 100, and is refused
    for a loss and for errors and metrics that are no shares. `digits` after the point are 3, or 1 for percent. `trivial` adds a
    row for the trivial answer, where it is known. With a `baseline` there is a second table below: the paired differences of
    all other methods from it, one row per method and figure. `note` says more about the clients.
    """
    chosen = [figures] if isinstance(figures, str) else list(figures)
    unknown = next((name for name in chosen if name not in HEADINGS), None)
    good = unknown is None and len(chosen) > 0
    require(good, "figures", f"must be some of {', '.join(HEADINGS)}", unknown, nearest_name(unknown, HEADINGS))
    records = [run for runs in methods.values() for run in runs]
    require_name("column", column, _columns(records))
    require(isinstance(percent, bool), "percent", "must be True or False", percent)
    if percent and not _are_shares(records, column):
        rule = f"must be False for the column {column!r}, whose values are no shares between 0 and 1"
        raise InvalidParameter("percent", rule, percent, "A loss and the error of a number are shown as they are.")
    if digits is not None:
        require_integer("digits", digits, 0)
    if baseline is not None:
        require_baseline(baseline, methods)

    def cells(found: Sequence[Mapping[str, float]]) -> list[str]:
        return [_spread_text([each[name] for each in found], *_scale(name, percent, digits)) for name in chosen]

    rows = [["method", *(HEADINGS[name] for name in chosen)]]
    each_run = {name: [_figures(run, column, chosen) for run in runs] for name, runs in methods.items()}
    rows += [[name, *cells(figures_of_runs)] for name, figures_of_runs in each_run.items()]
    found = {name: {run.seed: row for run, row in zip(runs, each_run[name], strict=True)} for name, runs in methods.items()}
    best = _best_cells(found, chosen, higher=bool(records[0].clients.higher_is_better.get(column)))
    first = next(iter(methods.values()))
    answers = [_named(known, chosen) for run in first if (known := trivial_summary(run)) is not None]
    if trivial and column == "error" and len(answers) == len(first):
        rows.append([trivial_name(first), *cells(answers)])
    caption = f"{_caption(methods, column, percent)}{note}."
    first_figure = {name: {seed: row[chosen[0]] for seed, row in by_seed.items()} for name, by_seed in found.items()}
    marks = paired.bold_notices(bool(best), first_figure) + ([covered(records)] if best and baseline is None else [])
    missing = {column: max(_missing(run, column) for run in records)} if column in records[0].clients.metrics else {}
    text = write(
        caption, rows, said(marks), " ".join(each.text for each in (*about_runs(methods), *metric_notices(missing))), best
    )
    if baseline is None:
        return text
    below = {name: list[list[str]]() for name in methods if name != baseline}
    for figure in chosen:
        factor, after = _scale(figure, percent, digits)
        for each in differences_of(methods, baseline, figure, column):
            texts = paired.difference_text(each, after, factor), paired.interval_text(each, after, factor)
            below[each.method].append([each.method, HEADINGS[figure], *texts, paired.lower_text(each), each.verdict_words])
    title = f"Paired differences from {baseline}, seed by seed: mean ± standard deviation."
    head = ["method", "figure", "difference", "95 % interval", "lower in", "verdict"]
    rows = [head, *(row for each_method in below.values() for row in each_method)]
    limits = [covered(records), *paired.uncorrected(len(below), len(chosen)), *paired.cohort_notices(methods, baseline)]
    return f"{text}\n\n{write(title, rows, said([notice('interval-rule')]), said(limits), frozenset())}"


def require_baseline(baseline: str, methods: Mapping[str, Sequence[RunRecord]]) -> None:
    """Refuse a baseline that is no method, or the only one."""
    require_name("baseline", baseline, methods)
    fix = "Compare it with another method."
    require(len(methods) > 1, "baseline", "must have another method beside it", baseline, fix)


def differences_of(
    methods: Mapping[str, Sequence[RunRecord]], baseline: str, figure: str, column: str = "error"
) -> Differences:
    """The paired differences of a figure, of all methods from a baseline, over the seeds that they share with it."""
    require_name("figure", figure, HEADINGS)
    require_baseline(baseline, methods)
    records = [run for runs in methods.values() for run in runs]
    require_name("column", column, _columns(records))
    by_seed = {name: {run.seed: _figures(run, column, [figure])[figure] for run in runs} for name, runs in methods.items()}
    first = records[0]
    what = {"error": first.measured, "loss": "loss"}.get(column, column)
    return Differences(
        baseline, HEADINGS[figure], f"{what} over {Judged.of(records)}",
        tuple(paired.paired(name, by_seed[name], by_seed[baseline]) for name in methods if name != baseline),
        (covered(records), *paired.cohort_notices(methods, baseline)),
    )  # fmt: skip


def _best_cells(found: Mapping[str, Mapping[int, Mapping[str, float]]], figures: Sequence[str], *, higher: bool) -> Cells:
    """The cells that paired differences separate from all others of their column as the better ones.

    `found` are the figures by method and seed. Of a correlation no direction is better.
    """
    places = {name: number for number, name in enumerate(found, start=1)}
    cells = set()
    for j, figure in enumerate(figures, start=1):
        more = higher and figure.startswith(("mean", "percentile", "worst", "best"))
        values = {name: {seed: row[figure] for seed, row in by_seed.items()} for name, by_seed in found.items()}
        if figure != "size_correlation":
            cells |= {(places[name], j) for name in paired.separated_methods(values, higher=more)}
    return frozenset(cells)


def _are_shares(records: Sequence[RunRecord], column: str) -> bool:
    """Whether a column holds shares: errors of classes, or a metric that is nowhere outside of [0, 1]."""
    if column in ("error", "loss"):
        return column == "error" and in_percent(records)
    values = torch.cat([run.clients.served_metrics[column].double() for run in records])
    finite = values[values.isfinite()]
    return bool(((finite >= 0) & (finite <= 1)).all())


def _columns(records: Sequence[RunRecord]) -> list[str]:
    """The columns that all runs have: error, loss and metrics."""
    shared = (name for name in records[0].clients.metrics if all(name in run.clients.metrics for run in records))
    return ["error", "loss", *shared]


def _caption(methods: Mapping[str, Sequence[RunRecord]], column: str, percent: bool) -> str:
    """What the table is of: the column, the clients and the seeds."""
    records = [run for runs in methods.values() for run in runs]
    what = {"error": capital(records[0].measured), "loss": "Loss"}.get(column, column)
    better = " (more is better)" * bool(records[0].clients.higher_is_better.get(column))
    over = f"{Judged.of(records)}, mean ± standard deviation over seeds ({max(map(len, methods.values()))})"
    return f"{what}{' in %' * percent}{better} over {over}"


def _missing(run: RunRecord, column: str) -> int:
    """How many judged clients have no value of a metric."""
    return int(run.clients.where(run.judged_on).benign.served_metrics[column].isnan().sum())


def _scale(figure: str, percent: bool, digits: int | None) -> tuple[float, int]:
    """What a figure is multiplied by, and its digits after the point."""
    if not percent or figure in _UNITLESS:
        return 1.0, 3 if digits is None else digits
    return 1e4 if figure == "variance" else 100.0, 1 if digits is None else digits


def _spread_text(values: Sequence[float], factor: float, digits: int) -> str:
    spread = Spread.of(values)
    if not math.isfinite(spread.mean):
        return "–"
    text = f"{factor * spread.mean:z.{digits}f}".replace("-", "−")
    return text + (f" ± {factor * spread.deviation:.{digits}f}" if len(values) > 1 else "")


def _figures(run: RunRecord, column: str, names: Sequence[str]) -> dict[str, float]:
    """Figures of one run by name. Where more is better, the p-th percentile is what p % of the clients reach."""
    rows, split = run.clients.where(run.judged_on), run.judged_on
    found = _named(rows.summaries()[split][column], names)
    if column in rows.metrics and rows.higher_is_better[column]:
        rows = rows.benign
        values = rows.served_metrics[column]
        known = ~values.isnan()
        weights = rows.size[known].double() if split == "train" else None
        for name in names:
            if name.startswith("percentile_") and bool(known.any()):
                found[name] = -percentile(-values[known], int(name.removeprefix("percentile_")), weights)
    return found


def _named(summary: Summary, names: Sequence[str]) -> dict[str, float]:
    every = vars(summary) | {f"percentile_{p}": value for p, value in summary.percentiles.items()}
    return {name: float(every[name]) for name in names}
