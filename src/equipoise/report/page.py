"""The report page: a study in, one HTML document out. Everything is inline; nothing is fetched and nothing runs."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

import torch

from equipoise.compare import FIGURES
from equipoise.report import figures
from equipoise.report.drawing import colour, inline_svg, smoothing
from equipoise.report.look import CSS
from equipoise.report.study import Method, Study
from equipoise.report.words import with_article

# A browser that obeys this fetches nothing, whatever stands in the page.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def page(study: Study) -> str:
    """The whole document."""
    names = ", ".join(method.name for method in study.methods)
    return "\n".join(
        [
            "<!DOCTYPE html>",
            '<html lang="en">',
            "<head>",
            '<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
            f"<title>{escape(names)} – Equipoise report</title>",
            f"<style>{CSS}</style>",
            "</head>",
            "<body>",
            "<main>",
            "<header>",
            '<p class="eyebrow">Equipoise report</p>',
            "<h1>How every client fares</h1>",
            f'<p id="headline">{escape(_bound(study.headline()))}</p>',
            "</header>",
            *_table(study),
            *_figures(study),
            *_worst_clients(study),
            *_settings(study),
            *_glossary(study),
            "</main>",
            "</body>",
            "</html>",
            "",
        ]
    )


def _table(study: Study) -> Iterator[str]:
    seeds = f"; mean ± standard deviation over {study.seeds} seeds" if study.seeds > 1 else "; one seed, so no spread is known"
    unit = ", in %" if study.scale.percent else ""
    weighed = ", weighted by their examples" if study.crowd.weighted else ""
    headers = {**FIGURES, "trained": "trained clients per round", "seconds": "seconds"}
    yield '<section aria-labelledby="numbers"><h2 id="numbers">In numbers</h2>'
    caption = f"{study.scale.noun.capitalize()} over {study.crowd}{weighed}{unit}{seeds}."
    yield f'<table class="numbers"><caption>{escape(_bound(caption))}'
    if len(study.methods) > 1:
        yield " The lowest of a column is bold."
    yield "</caption>"
    yield '<thead><tr><th scope="col">method</th>' + "".join(f'<th scope="col">{_bound(t)}</th>' for t in headers.values())
    yield "</tr></thead><tbody>"
    lowest = {key: _lowest([study.scale.number(method.figures[key].mean) for method in study.methods]) for key in FIGURES}
    for index, method in enumerate(study.methods):
        cells = []
        for key, title in headers.items():
            spread = method.figures[key]
            seeds_here = len(method.runs)
            if key in FIGURES:
                text = study.scale.spread(spread, seeds_here)
                best = study.scale.number(spread.mean) == lowest[key]
            else:
                text, best = _plain(spread.mean), False
            mark = ' class="best"' if best else ""
            cells.append(f'<td{mark} data-key="{key}" data-label="{_bound(title)}">{text}</td>')
        yield f'<tr><th scope="row">{_swatch(index)}{escape(method.name)}</th>{"".join(cells)}</tr>'
    yield "</tbody></table>"
    if left_out := study.left_out():
        yield f'<p class="note">{left_out} clients (over all runs) have {with_article(study.scale.noun)} that is not finite; '
        yield "figures leave them out, and a number that depends on them is shown as –.</p>"
    yield "</section>"


def _figures(study: Study) -> Iterator[str]:
    several, noun = len(study.methods) > 1, study.scale.noun
    pooled = " All seeds together." if study.seeds > 1 else ""
    band = " Lines: mean over seeds; bands: lowest to highest seed." if study.seeds > 1 else ""
    rounds = max(method.over_rounds("loss").shape[1] for method in study.methods)
    window = smoothing(rounds)
    smoothed = f" Averaged over {window} rounds." if window > 1 else ""
    drawn = [
        (
            "histogram",
            f"The {noun} of each client",
            f"How many clients see which {noun}: the fewer at the right, the fewer are left behind.{pooled}",
            figures.histogram(study),
        ),
        (
            "percentiles",
            f"The {noun} at each percentile",
            f"Read at 90: nine of ten clients fare at least this well.{band}",
            figures.percentile_curve(study),
        ),
        (
            "tradeoff",
            "The tail against the mean",
            "Lower left is better." + (" Small points: single seeds." if study.seeds > 1 else ""),
            figures.tradeoff(study),
        ),
        (
            "sizes",
            f"The {noun} against the client's data",
            ("Points: some of the clients" if study.crowd.count[1] > figures.MOST_POINTS else "Points: clients")
            + (f" under {escape(study.methods[0].name)}" if len(study.methods) > 2 else "")
            + (", first seed" if study.seeds > 1 else "")
            + "; lines: mean over clients of similar size. A line that falls says that small clients fare worse.",
            figures.sizes(study),
        ),
        (
            "losses",
            "Training loss over rounds",
            f"Of the clients drawn in a round.{band}{smoothed}{_loss_caveat(study)}",
            figures.loss_curves(study),
        ),
        (
            "trained",
            "Clients trained in each round",
            "A method that trains only the tail asks fewer clients to work." * several + band + smoothed,
            figures.trained(study),
        ),
    ]
    yield '<section aria-labelledby="figures"><h2 id="figures">In pictures</h2><div class="figures">'
    for name, title, caption, figure in drawn:
        if figure is not None:
            yield f'<figure id="figure-{name}"><h3>{title}</h3>'
            yield inline_svg(figure, name, title)
            yield f"<figcaption>{caption.strip()}</figcaption></figure>"
    yield "</div></section>"


def _loss_caveat(study: Study) -> str:
    """Losses at the start of a round and losses during local work are not on one level; say so where both occur."""
    taken = {report.loss_from for m in study.methods for run in m.runs for report in run.history.rounds if report.trained}
    if len(taken) < 2:
        return ""
    return (
        " Methods that ask for losses first show them at the start of the round, the others while clients work, "
        "which is usually lower: compare shapes, not levels."
    )


def _worst_clients(study: Study) -> Iterator[str]:
    method = study.methods[-1]
    run, rows = method.runs[0], method.rows[0]
    worst = rows.worst(10)
    several = f" under {escape(method.name)}" * (len(study.methods) > 1) + f", seed {run.seed}" * (len(method.runs) > 1)
    same = study.scale.noun == "loss"
    yield '<section aria-labelledby="worst"><h2 id="worst">Who fares worst</h2>'
    who = "client" if len(worst) == 1 else f"{len(worst)} clients"
    yield f'<table class="worst"><caption>The {who} with the largest {study.scale.noun}{several}.</caption>'
    columns = ("client", "examples", *(() if same else ("error" + " (%)" * study.scale.percent,)), "loss")
    yield "<thead><tr>" + "".join(f'<th scope="col">{column}</th>' for column in columns) + "</tr></thead><tbody>"
    finite = rows.loss[torch.isfinite(rows.loss)]
    losses = study.scale.fitting(float(finite.abs().max()) if len(finite) else 1.0, percent=False)
    for row in worst:
        error = "" if same else f"<td>{study.scale.number(_float(row['error']))}</td>"
        yield f'<tr><th scope="row">{escape(str(row["client"]))}</th><td>{row["size"]}</td>{error}'
        yield f"<td>{losses.number(_float(row['loss']))}</td></tr>"
    yield "</tbody></table></section>"


def _settings(study: Study) -> Iterator[str]:
    import equipoise

    yield '<section aria-labelledby="settings"><h2 id="settings">Settings</h2><dl class="settings">'
    for index, method in enumerate(study.methods):
        yield f"<dt>{_swatch(index)}{escape(method.name)}</dt><dd><code>{escape(repr(method.runs[0].algorithm))}</code></dd>"
    yield f"<dt>seeds</dt><dd>{_by_method(study, {m.name: ', '.join(str(r.seed) for r in m.runs) for m in study.methods})}</dd>"
    yield f"<dt>data</dt><dd>{_by_method(study, {m.name: m.runs[0].data for m in study.methods})}</dd>"
    yield f"<dt>rounds</dt><dd>{_by_method(study, {m.name: _rounds(m) for m in study.methods})}</dd>"
    yield f"<dt>clients per round</dt><dd>{_by_method(study, {m.name: _cohort(m) for m in study.methods})}</dd>"
    yield f"<dt>versions</dt><dd>equipoise {escape(equipoise.__version__)}, torch {escape(str(torch.__version__))}</dd>"
    yield "</dl></section>"


def _by_method(study: Study, values: dict[str, str]) -> str:
    """One value if all methods agree, else each with its method."""
    if len(set(values.values())) == 1:
        return escape(values[study.methods[0].name])
    return escape("; ".join(f"{name}: {value}" for name, value in values.items()))


def _rounds(method: Method) -> str:
    return _range([len(run.history.rounds) for run in method.runs])


def _cohort(method: Method) -> str:
    return _range([report.cohort for run in method.runs for report in run.history.rounds])


def _range(numbers: list[int]) -> str:
    if not numbers:
        return "none"
    return str(min(numbers)) if min(numbers) == max(numbers) else f"{min(numbers)} to {max(numbers)}"


def _glossary(study: Study) -> Iterator[str]:
    noun, percent = study.scale.noun, study.scale.percent
    what = (
        "the share of a client's examples that the model gets wrong" if percent else f"the mean {noun} over a client's examples"
    )
    seen = " Unseen clients took no part in training." if study.crowd.unseen else ""
    count = " Every client counts the same, however many examples it has."
    if study.crowd.weighted:
        count = " These are training clients, so each counts by its examples, as in the objective."
    words = {
        noun: f"{what}.{seen}",
        "mean": f"the {noun} averaged over clients.{count}",
        "90th percentile": "nine of ten clients fare at least this well.",
        "worst 10 %": f"the mean {noun} of the tenth of the clients that fare worst.",
        "standard deviation": "how far clients lie apart (over clients; after ± it is over seeds).",
        "trained clients per round": "how many of the clients drawn did local work; those with weight 0 did none.",
        "seconds": "wall-clock time of a run, with evaluation, on the machine that ran it.",
    }
    yield '<section aria-labelledby="words"><h2 id="words">Words</h2><dl class="words">'
    yield from (f"<dt>{_bound(word)}</dt><dd>{meaning}</dd>" for word, meaning in words.items())
    yield "</dl></section>"


def _swatch(index: int) -> str:
    return f'<span class="swatch" style="background:{colour(index)}"></span>'


def _bound(text: str) -> str:
    """Numbers stay with their unit at the end of a line."""
    return text.replace(" %", "\u00a0%").replace(" ± ", "\u00a0±\u00a0")


def _plain(value: float) -> str:
    return f"{value:.1f}" if value < 100 else f"{value:.0f}"


def _float(value: object) -> float:
    return float(str(value))


def _lowest(written: list[str]) -> str | None:
    """The lowest of the numbers as written; None if they are all the same, or none is a number."""
    numbers = [text for text in written if text != "–"]
    return min(numbers, key=float) if len(set(written)) > 1 and numbers else None
