"""The sections of a page about subgroups of clients, and about the coverage of conformal sets."""

from __future__ import annotations

import math
from collections.abc import Iterator
from html import escape

from torch import Tensor

from equipoise.conformal import COVERAGE, SET_SIZE
from equipoise.metrics import mean, percentile
from equipoise.report.data.results_by_method import MethodResults, Study
from equipoise.report.text.phrases import minus
from equipoise.report.text.tables import WORST_CLIENTS, close_table, nonbreaking, swatch
from equipoise.subgroups import attributes_of, subgroups_over_seeds


def subgroups_section(study: Study) -> Iterator[str]:
    """A table of each attribute of clients: mean, 90th percentile and gap of its subgroups; nothing without attributes."""
    attributes = attributes_of(study.runs)
    if not attributes:
        return
    noun, seeds = study.scale.noun, ", averaged over seeds" if study.seeds > 1 else ""
    unit = ", in %" if study.scale.percent else ""
    yield '<section aria-labelledby="subgroups"><h2 id="subgroups">Subgroups</h2>'
    yield f'<p class="note">The {noun} of the model that clients are served{unit}, over {escape(str(study.judged))}{seeds}. '
    yield "The gap is the mean of a subgroup minus that of all other clients: above 0 it fares worse. Intervals are of 95 %, "
    yield "for the clients that these stand for; one that holds 0 says that the gap may be chance.</p>"

    def number_of(value: float) -> str:
        return minus(study.scale.number(value))

    for number, attribute in enumerate(attributes):
        heads = ("method", attribute, "clients", "mean", "95 % interval", "90th percentile", "95 % interval", "gap",
                 "95 % interval")  # fmt: skip
        yield from _open(f"table-subgroups-{number}", f"By {attribute}", heads)
        for index, method in enumerate(study.methods):
            for each in subgroups_over_seeds(method.runs, attribute):
                cells = [escape(each.value), f"{each.clients:,}"]
                for figure, between in (
                    (each.mean, each.mean_interval), (each.percentile_90, each.percentile_90_interval),
                    (each.gap, each.gap_interval),
                ):  # fmt: skip
                    known = math.isfinite(figure)
                    cells += [number_of(figure), between.text(number_of)] if known else ["–", "–"]
                yield f'<tr><th scope="row">{swatch(index)}{escape(method.name)}</th>{_cells(cells)}</tr>'
        yield close_table()
    yield "</section>"


def conformal_section(study: Study) -> Iterator[str]:
    """The coverage of conformal sets over clients, and the clients that are covered least; nothing for runs without sets."""
    having = [(index, method) for index, method in enumerate(study.methods) if method.runs[0].clients.miss is not None]
    if not having:
        return
    wanted = sorted({1 - float(method.runs[0].clients.miss or 0) for _, method in having})
    yield '<section aria-labelledby="conformal"><h2 id="conformal">Conformal sets</h2>'
    yield f'<p class="note">Sets of classes of the shared model that are to hold the true one in {_percents(wanted)} of all '
    yield "cases. This is promised over all clients together, and to no single one: each is listed with one standard deviation "
    yield "of its coverage, by chance alone, after ±.</p>"
    heads = (
        "method",
        "wanted",
        "all test examples",
        "mean over clients",
        "nine of ten clients reach",
        "worst client",
        "set size",
    )
    yield from _open("table-conformal", "Coverage, in %, and mean size of the sets; of the first seed.", heads)
    for index, method in having:
        coverage, sizes, examples, _ = _columns(method)
        miss = float(method.runs[0].clients.miss or 0)
        figures = (1 - miss, mean(coverage, examples), mean(coverage), -percentile(-coverage, 90), float(coverage.min()))
        cells = [f"{100 * value:.1f}" for value in figures] + [f"{mean(sizes, examples):.2f}"]
        yield f'<tr><th scope="row">{swatch(index)}{escape(method.name)}</th>{_cells(cells)}</tr>'
    yield close_table()
    for index, method in having:
        if method.runs[0].algorithm.privacy is not None:  # single clients are not shown
            continue
        coverage, sizes, examples, clients = _columns(method)
        miss = float(method.runs[0].clients.miss or 0)
        yield from _open(f"table-coverage-{index}", f"{method.name}: the clients that are covered least", _LEAST)
        for k in coverage.argsort(stable=True)[:WORST_CLIENTS].tolist():
            slack = math.sqrt(miss * (1 - miss) / float(examples[k]))
            shown = f"{100 * float(coverage[k]):.1f} ± {100 * slack:.1f}"
            cells = [f"{int(examples[k]):,}", nonbreaking(shown), f"{float(sizes[k]):.2f}"]
            yield f'<tr><th scope="row">{escape(clients[k])}</th>{_cells(cells)}</tr>'
        yield close_table()
    yield "</section>"


_LEAST = ("client", "test examples", "coverage (%)", "set size")


def _columns(method: MethodResults) -> tuple[Tensor, Tensor, Tensor, tuple[str, ...]]:
    """Coverage, set sizes and test examples of the clients of a method's first seed that have sets, and their names."""
    rows = method.runs[0].clients.where("test").benign
    here = (~rows.metrics[COVERAGE].isnan()).nonzero().flatten()
    rows = rows.take(here)
    return rows.metrics[COVERAGE], rows.metrics[SET_SIZE], rows.size.double(), rows.client


def _percents(values: list[float]) -> str:
    return ", ".join(f"{100 * value:g} %" for value in values)


def _open(name: str, caption: str, heads: tuple[str, ...]) -> Iterator[str]:
    """The opening tags of a table under its caption, in a box that scrolls."""
    yield f'<div class="card"><p class="caption" id="{name}-caption">{escape(nonbreaking(caption))}</p>'
    yield f'<div class="scroll" tabindex="0" role="region" aria-labelledby="{name}-caption">'
    yield f'<table id="{name}" aria-labelledby="{name}-caption"><thead><tr>'
    yield "".join(f'<th scope="col">{escape(nonbreaking(head))}</th>' for head in heads) + "</tr></thead><tbody>"


def _cells(values: list[str]) -> str:
    return "".join(f"<td>{value}</td>" for value in values)
