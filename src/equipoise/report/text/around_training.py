"""The sections of a page about metrics of single clients, and about runs that were stopped early."""

from __future__ import annotations

import math
from collections.abc import Iterator
from html import escape

from equipoise.report.data.over_seeds import FIGURES, metric_figures
from equipoise.report.data.results_by_method import Study
from equipoise.report.text.phrases import count_words
from equipoise.report.text.sentences import ValueFormat
from equipoise.report.text.tables import nonbreaking, swatch


def metrics_section(study: Study) -> Iterator[str]:
    """A table of each metric over the clients that methods are judged on; nothing for runs without metrics."""
    names = dict.fromkeys(name for run in study.runs for name in run.clients.metrics)
    if not names:
        return
    yield '<section aria-labelledby="metrics"><h2 id="metrics">Metrics</h2>'
    yield f'<p class="note">Each is a figure of one client, of all its examples, over {escape(str(study.judged))}. The tail is '
    yield "at the bad end: 90 % of the clients do at least as well as the 90th percentile.</p>"
    yield '<div class="scroll" tabindex="0" role="region" aria-labelledby="metrics"><table id="table-metrics"><thead><tr>'
    heads = ("metric", "method", *FIGURES.values(), "clients without a value")
    yield "".join(f'<th scope="col">{nonbreaking(head)}</th>' for head in heads) + "</tr></thead><tbody>"
    for name in names:
        for index, method in enumerate(study.methods):
            if (found := metric_figures(method.runs, name)) is None:
                continue
            values = [abs(found.figures[key].mean) for key in FIGURES]
            scale = ValueFormat.fitting(max((v for v in values if math.isfinite(v)), default=1.0), percent=False)
            texts = [scale.spread(found.figures[key], len(method.runs)) for key in FIGURES]
            better = "more is better" if found.higher_is_better else "less is better"
            missing = count_words(found.missing) if any(found.missing) else "none"
            cells = "".join(f"<td>{nonbreaking(text)}</td>" for text in (*texts, missing))
            yield f'<tr data-metric="{escape(name)}"><th scope="row">{escape(name)} <small>({better})</small></th>'
            yield f"<th>{swatch(index)}{escape(method.name)}</th>{cells}</tr>"
    yield "</tbody></table></div></section>"


def stopped_section(study: Study) -> Iterator[str]:
    """When and why runs were stopped early, and which round is reported; nothing if none was."""
    stopped = [(index, method, run) for index, method in enumerate(study.methods) for run in method.runs if run.history.stopped]
    if not stopped:
        return
    yield '<section aria-labelledby="stopped"><h2 id="stopped">Stopped early</h2><dl id="stops">'
    for index, method, run in stopped:
        seed = f", seed {run.seed}" if len(method.runs) > 1 else ""
        yield f"<dt>{swatch(index)}{escape(method.name)}{seed}</dt><dd>{escape(nonbreaking(str(run.history.stopped)))}</dd>"
    yield "</dl></section>"
