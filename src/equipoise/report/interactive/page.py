"""The report page: a study in, one HTML document out. Everything is inline and nothing is fetched."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from html import escape
from string import Template
from typing import TYPE_CHECKING, Any

import torch

from equipoise.conformal import COVERAGE
from equipoise.core.abilities import read
from equipoise.core.version import VERSION
from equipoise.report.data.by_client import client_errors, mean_over_seeds, trivial_column
from equipoise.report.data.results_by_method import Numbers, Study
from equipoise.report.interactive import figures as interactive
from equipoise.report.interactive import theme
from equipoise.report.interactive.assets import asset, embedded, fingerprint, plotly_js
from equipoise.report.interactive.knob_section import PAGE_SCRIPTS, clients_section, knob_section
from equipoise.report.palette import COLOURS, DARK_COLOURS
from equipoise.report.text import notes
from equipoise.report.text.around_training import metrics_section, stopped_section
from equipoise.report.text.captions import captions
from equipoise.report.text.choosing import differences_section, validation_section
from equipoise.report.text.client_numbers import seeds_words
from equipoise.report.text.gains import gains_section
from equipoise.report.text.groups_and_sets import conformal_section, subgroups_section
from equipoise.report.text.phrases import listed, plural
from equipoise.report.text.tables import SHARED, nonbreaking, numbers_table, swatch
from equipoise.report.text.worst import worst_clients
from equipoise.types import SamplerTraits

if TYPE_CHECKING:
    from equipoise.client_table import ClientTable
    from equipoise.run_record import RunRecord

OF_SINGLE_CLIENTS = ("histogram", "percentiles", "tradeoff", "sizes", "own", "gains")  # figures
MOST_CLIENTS = 50_000  # rows of the table of all clients: a page of some megabytes
MOST_CHANGES = 4  # methods in the table of all clients; of more, it has no columns of changes
MOST_INPUTS = 20  # columns of a table that are named
TITLE = "How every client fares"
KNOB_NOTE = "Here each client is judged on all of its examples; below, some are kept for choosing."


def page(study: Study, knob: Mapping[str, Any] | None = None, title: str | None = None) -> str:
    """The whole document, with the knob of a family if there is one."""
    drawn = {name: figure for name, draw in interactive.FIGURE_MAKERS.items() if (figure := draw(study)) is not None}
    if study.judged.means:
        drawn = {name: figure for name, figure in drawn.items() if name not in OF_SINGLE_CLIENTS}
    data = {
        "figures": drawn, "config": theme.CONFIG, "narrow": theme.NARROW,
        "light": theme.template(dark=False), "dark": theme.template(dark=True),
        "darkColours": theme.dark_colours(),
    }  # fmt: skip
    sections = [
        *(knob_section(knob, note=KNOB_NOTE) if knob is not None else ()),
        *(_figure(study, "histogram") if "histogram" in drawn else ()),
        *numbers_table(study),
        *differences_section(study),
        *validation_section(study),
        *subgroups_section(study),
        *metrics_section(study),
        *conformal_section(study),
        *stopped_section(study),
        *notes.attack_section(study),
        *notes.rejected_section(study),
        *notes.network_section(study),
        *_figures(study, [name for name in drawn if name not in ("histogram", "privacy", "gains")]),
        *gains_section(study, _figure(study, "gains") if "gains" in drawn else iter(())),
        *notes.privacy_section(study, _figure(study, "privacy") if "privacy" in drawn else iter(())),
        *(worst_clients(study) if not study.judged.means else ()),
        *_all_clients(study),
        *_settings(study),
        *_glossary(study),
    ]
    note, script = notes.header_note(study), "\n" + "".join(asset(name) for name in (*PAGE_SCRIPTS, "page.js"))
    return Template(asset("page.html")).substitute(
        policy=_policy(script),
        names=escape(", ".join(method.name for method in study.methods)),
        style=f"{asset('page.css')}{_palette()}{asset('knob.css')}",
        title=escape(TITLE if title is None else title),
        about=escape(f"{study.data_name} · {_today()}"),
        headline=escape(nonbreaking(study.headline())),
        note=_trained_on(study) + (f'<p id="note" class="note">{escape(nonbreaking(note))}</p>\n' if note else ""),
        sections="\n".join(sections),
        data=embedded(data),
        plotly=plotly_js(),
        script=script,
    )


def _trained_on(study: Study) -> str:
    """A line on the table that models were trained on: its name, the target and the inputs; empty for other data."""
    first = study.runs[0]
    if not first.target or not first.inputs:
        return ""
    text = f"What was trained on: {study.data_name}; {first.target} is predicted from {listed(first.inputs, MOST_INPUTS)}."
    return f'<p id="trained-on" class="note">{escape(text)}</p>\n'


def _today() -> str:
    """The day on which a page is written, in UTC; SOURCE_DATE_EPOCH, as of other builders, sets another."""
    stamp = os.environ.get("SOURCE_DATE_EPOCH", "")
    now = datetime.fromtimestamp(int(stamp), UTC) if stamp.isdecimal() else datetime.now(UTC)
    return now.date().isoformat()


def _policy(script: str) -> str:
    """The content security policy: a browser fetches nothing and runs the two scripts of the page only."""
    scripts = f"{fingerprint(plotly_js())} {fingerprint(script)}"
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


def _all_clients(study: Study) -> Iterator[str]:
    """All benign clients with their error under each method, mean over seeds; none where a run protects single clients."""
    if not study.names_clients:
        return
    found = client_errors(study, rows_of=lambda method: [run.clients.benign for run in method.runs], by_split=True)
    shared = client_errors(
        study, rows_of=lambda method: [run.clients.benign for run in method.runs], values_of=lambda rows: rows.error,
        by_split=True,
    )  # fmt: skip
    judged = study.methods[0].runs[0].judged_on
    order = sorted(range(len(found)), key=lambda row: found.keys[row][0] != judged)[:MOST_CLIENTS]  # those judged first
    keys = [(found.keys[row][0], found.keys[row][1]) for row in order]
    columns: dict[str, Sequence[Any]] = {"client": [client for _, client in keys]}
    if len({split for split, _ in keys}) > 1:
        columns["split"] = [split for split, _ in keys]
    if found.seed_of_row is not None:
        columns["seed"] = [found.seed_of_row[row] for row in order]
    columns["examples"] = [found.sizes[row] for row in order]
    noun, several = study.scale.noun, len(study.methods) > 1
    for index in found.methods:
        name = f"{noun}, {study.methods[index].name}" if several else noun
        columns[name] = _finite(mean_over_seeds(found.of(index))[order])
        if study.methods[index].personalised:
            columns[f"{name}, {SHARED}"] = _finite(mean_over_seeds(shared.of(index))[order])
    for index in found.methods[1:] if len(found.methods) <= MOST_CHANGES else ():
        columns[f"change, {study.methods[index].name}"] = _finite(mean_over_seeds(found.change(index))[order])
    knowing = [index for index in found.methods if "trivial_mean" in study.methods[index].figures]
    if knowing:
        answered = client_errors(
            study, rows_of=lambda method: [run.clients.benign for run in method.runs], values_of=trivial_column, by_split=True
        )
        columns[f"trivial {noun}"] = _finite(mean_over_seeds(answered.of(knowing[0]))[order])
    if found.seed_of_row is None:
        columns |= {f"{COVERAGE}, {method.name}": _shown(method.runs[0].clients, keys) for method in study.methods
                    if method.runs[0].clients.miss is not None}  # fmt: skip
    title = f"All clients{seeds_words(found)}"
    if len(found) > MOST_CLIENTS:
        title = f"The first {MOST_CLIENTS:,} of {len(found):,} clients; all are in clients.parquet"
    yield from clients_section(columns, percent=study.scale.percent, title=title, note=_rows_words(columns))


def _rows_words(columns: Mapping[str, Sequence[Any]]) -> str:
    """How many clients the rows are of, where a client has several; else empty."""
    clients, rows = len(set(columns["client"])), len(columns["client"])
    each = [word for word in ("split", "seed") if word in columns]
    if clients == rows or not each:
        return ""
    return f"{clients:,} {plural('client', clients)} in {rows:,} rows: a row for each client and {' and '.join(each)}."


def _finite(values: Numbers) -> list[float | None]:
    """Numbers of six digits for a table of the page; None where a number is not finite."""
    return [float(f"{value:.6g}") if math.isfinite(value) else None for value in values.tolist()]


def _shown(table: ClientTable, keys: Sequence[tuple[str, str]]) -> list[float | None]:
    """The coverage of clients by split and name, for a table of the page; only test clients have one."""
    known = {("test", row["client"]): row[COVERAGE] for row in table.where("test")}
    values = [known.get(key) for key in keys]
    return [float(f"{value:.6g}") if isinstance(value, float) and math.isfinite(value) else None for value in values]


def _settings(study: Study) -> Iterator[str]:
    """Algorithms, seeds, data, rounds, cohorts and versions."""
    yield '<section aria-labelledby="settings"><h2 id="settings">Settings</h2><dl class="settings">'
    for index, method in enumerate(study.methods):
        yield f"<dt>{swatch(index)}{escape(method.name)}</dt><dd><details><summary>The algorithm, as code</summary>"
        yield f"<code>{escape(repr(method.runs[0].algorithm))}</code></details></dd>"
    values = {
        "seeds": [", ".join(str(run.seed) for run in method.runs) for method in study.methods],
        "data": [method.runs[0].data for method in study.methods],
        "rounds": [_range([len(run.history.rounds) for run in method.runs]) for method in study.methods],
        "clients per round": [_cohorts(method.runs) for method in study.methods],
    }
    yield from (f"<dt>{what}</dt><dd>{_by_method(study, each)}</dd>" for what, each in values.items())
    yield f"<dt>versions</dt><dd>equipoise {VERSION}, torch {escape(str(torch.__version__))}</dd>"
    yield "</dl></section>"


def _cohorts(runs: Sequence[RunRecord]) -> str:
    """How many clients were drawn per round; where clients come and go, how many updates fill the buffer of a step."""
    sizes = _range([report.cohort for run in runs for report in run.history.rounds])
    buffered = read(SamplerTraits, runs[0].algorithm.sampler).buffered is not None
    return f"{sizes} updates in each step of the server (its buffer)" if buffered else sizes


def _by_method(study: Study, values: list[str]) -> str:
    """One value if all methods agree, else each with its method."""
    if len(set(values)) == 1:
        return escape(values[0])
    return escape("; ".join(f"{method.name}: {value}" for method, value in zip(study.methods, values, strict=True)))


def _range(numbers: list[int]) -> str:
    if not numbers:
        return "none"
    return str(min(numbers)) if min(numbers) == max(numbers) else f"{min(numbers)} to {max(numbers)}"


def _glossary(study: Study) -> Iterator[str]:
    """What the words of the page mean."""
    noun, definition = study.scale.noun, escape(study.definition)
    definition += ", the model being the one that it is served" if study.personalised else ""
    seen = " Unseen clients took no part in training." if study.judged.unseen else ""
    count = " Every client counts the same, however many examples it has."
    if study.judged.weighted:
        count = " These are training clients, so each counts by its examples, as in the objective."
    count += " Malicious ones do not count." if study.judged.benign else ""
    words = {
        "client": "the owner of a part of the data, such as a branch, a hospital or a phone.",
        "example": "one row of a client's data, with its answer.",
        noun: f"{escape(study.measured)}: {definition}.{seen}" if study.measured != noun else f"{definition}.{seen}",
        "mean": f"the {noun} averaged over clients.{count}",
        "90th percentile": "nine of ten clients fare at least this well.",
        "worst 10 %": f"the mean {noun} of the tenth of the clients that fare worst.",
        "standard deviation": "how far clients lie apart (over clients; after ± it is over seeds).",
        "trained clients per round": "how many of the clients drawn did local work; those with weight 0 did none.",
        "wall time": "seconds that a run took, with evaluation, on the machine that ran it. Runs that were trained together "
        "share their time equally.",
    }
    if study.sample:
        words["95 % interval"] = (
            "figures are of a random sample; in 95 of 100 samples this interval holds the figure over all clients."
        )
    if study.personalised:
        words["own model"] = "one that a client keeps besides the shared model, and is served in place of it."
    if study.attacked:
        words["malicious clients"] = "those that send updates or train on labels meant to do harm; the others are benign."
    if notes.is_private(study):
        words["ε, δ"] = "how much the released models can give away about one client: less is better."
    yield '<section aria-labelledby="words"><h2 id="words">Words</h2><dl class="words">'
    yield from (f"<dt>{nonbreaking(word)}</dt><dd>{meaning}</dd>" for word, meaning in words.items())
    yield "</dl></section>"
