"""The report page: a study in, one HTML document out. Everything is inline and nothing is fetched."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

import torch

from equipoise.core.version import VERSION
from equipoise.report.data.results_by_method import MethodResults, Study
from equipoise.report.interactive import figures as interactive
from equipoise.report.interactive import theme
from equipoise.report.interactive.assets import asset, embedded, fingerprint, plotly_js
from equipoise.report.palette import COLOURS, DARK_COLOURS
from equipoise.report.text import notes
from equipoise.report.text.captions import captions
from equipoise.report.text.tables import nonbreaking, numbers_table, swatch, worst_clients


def page(study: Study) -> str:
    """The whole document."""
    names = ", ".join(method.name for method in study.methods)
    drawn = {name: figure for name, draw in interactive.FIGURE_MAKERS.items() if (figure := draw(study)) is not None}
    data = {
        "figures": drawn, "config": theme.CONFIG, "narrow": theme.NARROW,
        "light": theme.template(dark=False), "dark": theme.template(dark=True),
        "darkColours": theme.dark_colours(),
    }  # fmt: skip
    return "\n".join(
        [
            "<!DOCTYPE html>",
            '<html lang="en">',
            "<head>",
            '<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f'<meta http-equiv="Content-Security-Policy" content="{_policy()}">',
            f"<title>{escape(names)} – Equipoise report</title>",
            f"<style>{asset('page.css')}{_palette()}</style>",
            "</head>",
            "<body>",
            "<main>",
            "<header>",
            '<p class="eyebrow">Equipoise report</p>',
            "<h1>How every client fares</h1>",
            f'<p id="headline">{escape(nonbreaking(study.headline()))}</p>',
            *([f'<p id="note" class="note">{escape(nonbreaking(note))}</p>'] if (note := notes.header_note(study)) else []),
            "</header>",
            "<noscript><p>The figures need JavaScript; the tables do not.</p></noscript>",
            *_figure(study, "histogram"),
            *numbers_table(study),
            *notes.attack_section(study),
            *notes.rejected_section(study),
            *notes.network_section(study),
            *_figures(study, [name for name in drawn if name not in ("histogram", "privacy")]),
            *notes.privacy_section(study, _figure(study, "privacy") if "privacy" in drawn else iter(())),
            *worst_clients(study),
            *_settings(study),
            *_glossary(study),
            "</main>",
            f'<script type="application/json" id="figure-data">{embedded(data)}</script>',
            f"<script>{plotly_js()}</script>",
            f"<script>{asset('page.js')}</script>",
            "</body>",
            "</html>",
            "",
        ]
    )


def _policy() -> str:
    """The content security policy: a browser fetches nothing and runs the two scripts of the page only."""
    scripts = f"{fingerprint(plotly_js())} {fingerprint(asset('page.js'))}"
    return f"default-src 'none'; script-src {scripts}; style-src 'unsafe-inline'; img-src data: blob:"


def _palette() -> str:
    """The colours of the methods as CSS variables, for a light and a dark ground."""
    light, dark = ("".join(f"--method-{k}:{shade};" for k, shade in enumerate(shades)) for shades in (COLOURS, DARK_COLOURS))
    return f":root{{{light}}}\n@media screen and (prefers-color-scheme: dark) {{:root{{{dark}}}}}\n"


def _figure(study: Study, name: str, kind: str = "wide") -> Iterator[str]:
    """A figure with its title and caption; the script draws it."""
    title, caption = (escape(nonbreaking(text)) for text in captions(study)[name])
    yield f'<figure id="figure-{name}" class="{kind}"><h3 id="title-{name}">{title}</h3>'
    yield f'<div class="plot" data-figure="{name}" role="group" aria-labelledby="title-{name}"></div>'
    yield f"<figcaption>{caption}</figcaption></figure>"


def _figures(study: Study, names: list[str]) -> Iterator[str]:
    """Figures two by two on a wide screen; the curves, and a figure without a partner, take the whole width."""
    halves = [name for name in names if name != "curves"]
    kinds = dict.fromkeys(halves, "half") | ({halves[-1]: "wide"} if len(halves) % 2 else {})
    order = [*halves[:2], *(name for name in names if name == "curves"), *halves[2:]]
    yield '<section aria-labelledby="figures"><h2 id="figures">In pictures</h2>'
    if len(study.methods) > 1:
        yield '<p class="note">Click a method in a legend to hide it in all of these figures, double-click to see it alone.</p>'
    yield '<div class="figures">'
    for name in order:
        yield from _figure(study, name, kinds.get(name, "wide"))
    yield "</div></section>"


def _settings(study: Study) -> Iterator[str]:
    """Algorithms, seeds, data, rounds, cohorts and versions."""
    yield '<section aria-labelledby="settings"><h2 id="settings">Settings</h2><dl class="settings">'
    for index, method in enumerate(study.methods):
        yield f"<dt>{swatch(index)}{escape(method.name)}</dt><dd><code>{escape(repr(method.runs[0].algorithm))}</code></dd>"
    yield f"<dt>seeds</dt><dd>{_by_method(study, {m.name: ', '.join(str(r.seed) for r in m.runs) for m in study.methods})}</dd>"
    yield f"<dt>data</dt><dd>{_by_method(study, {m.name: m.runs[0].data for m in study.methods})}</dd>"
    yield f"<dt>rounds</dt><dd>{_by_method(study, {m.name: _rounds(m) for m in study.methods})}</dd>"
    yield f"<dt>clients per round</dt><dd>{_by_method(study, {m.name: _cohort(m) for m in study.methods})}</dd>"
    yield f"<dt>versions</dt><dd>equipoise {VERSION}, torch {escape(str(torch.__version__))}</dd>"
    yield "</dl></section>"


def _by_method(study: Study, values: dict[str, str]) -> str:
    """One value if all methods agree, else each with its method."""
    if len(set(values.values())) == 1:
        return escape(values[study.methods[0].name])
    return escape("; ".join(f"{name}: {value}" for name, value in values.items()))


def _rounds(method: MethodResults) -> str:
    """The number of rounds of the runs of a method."""
    return _range([len(run.history.rounds) for run in method.runs])


def _cohort(method: MethodResults) -> str:
    """The number of clients drawn in a round."""
    return _range([report.cohort for run in method.runs for report in run.history.rounds])


def _range(numbers: list[int]) -> str:
    if not numbers:
        return "none"
    return str(min(numbers)) if min(numbers) == max(numbers) else f"{min(numbers)} to {max(numbers)}"


def _glossary(study: Study) -> Iterator[str]:
    """What the words of the page mean."""
    noun, percent = study.scale.noun, study.scale.percent
    definition = (
        "the share of a client's examples that the model gets wrong" if percent else f"the mean {noun} over a client's examples"
    )
    definition += ", the model being the one that it is served" if study.personalised else ""
    seen = " Unseen clients took no part in training." if study.judged.unseen else ""
    count = " Every client counts the same, however many examples it has."
    if study.judged.weighted:
        count = " These are training clients, so each counts by its examples, as in the objective."
    count += " Malicious ones do not count." if study.judged.benign else ""
    words = {
        noun: f"{definition}.{seen}",
        "mean": f"the {noun} averaged over clients.{count}",
        "90th percentile": "nine of ten clients fare at least this well.",
        "worst 10 %": f"the mean {noun} of the tenth of the clients that fare worst.",
        "standard deviation": "how far clients lie apart (over clients; after ± it is over seeds).",
        "trained clients per round": "how many of the clients drawn did local work; those with weight 0 did none.",
        "wall time": "seconds that a run took, with evaluation, on the machine that ran it.",
    }
    if study.personalised:
        words["own model"] = "one that a client keeps besides the shared model, and is served in place of it."
    if study.attacked:
        words["malicious clients"] = "those that send updates or train on labels meant to do harm; the others are benign."
    if notes.is_private(study):
        words["ε, δ"] = "how much the released models can give away about one client: less is better."
    yield '<section aria-labelledby="words"><h2 id="words">Words</h2><dl class="words">'
    yield from (f"<dt>{nonbreaking(word)}</dt><dd>{meaning}</dd>" for word, meaning in words.items())
    yield "</dl></section>"
