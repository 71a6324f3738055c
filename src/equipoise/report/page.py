"""The report page: a study in, one HTML document out. Everything is inline and nothing is fetched."""

from __future__ import annotations

import base64
import hashlib
import os
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from functools import lru_cache
from html import escape
from string import Template
from typing import Any

from equipoise.report import sections
from equipoise.report.figures import drawn
from equipoise.report.html import asset, embedded, notes, section, shown
from equipoise.report.knob import PAGE_SCRIPTS, knob_section
from equipoise.report.notices import notice
from equipoise.report.plot import COLOURS, CONFIG, DARK_COLOURS, NARROW, dark_colours, template
from equipoise.report.study import Study

TITLE = "How every client fares"
APART = ("histogram", "privacy", "gains")  # figures with a place of their own


def page(study: Study, knob: Mapping[str, Any] | None = None, title: str | None = None) -> str:
    """The whole document, with the knob of a family if there is one."""
    plots = drawn(study)
    figures = {name: list(sections.figure(study, name)) for name in APART if name in plots}
    body = [
        *(knob_section(knob) if knob is not None else ()),
        *figures.get("histogram", ()),
        *sections.numbers(study),
        *sections.differences(study),
        *sections.validation(study),
        *sections.subgroups(study),
        *sections.metrics(study),
        *sections.stopped(study),
        *sections.attack(study),
        *sections.rejected(study),
        *sections.network(study),
        *_pictures(study, [name for name in plots if name not in APART]),
        *sections.gains(study, figures.get("gains", ())),
        *sections.privacy(study, figures.get("privacy", ())),
        *sections.worst(study),
        *sections.all_clients(study),
        *sections.settings(study),
        *sections.glossary(study),
    ]
    data = {
        "figures": {name: plot.json() for name, plot in plots.items()}, "config": CONFIG, "narrow": NARROW,
        "light": template(dark=False), "dark": template(dark=True), "darkColours": dark_colours(),
    }  # fmt: skip
    script = "\n" + "".join(asset(name) for name in (*PAGE_SCRIPTS, "page.js"))
    first, *more = sections.headline(study)
    return Template(asset("page.html")).substitute(
        policy=_policy(script),
        names=escape(", ".join(method.name for method in study.methods)),
        style=f"{asset('page.css')}{_palette()}{asset('knob.css')}",
        title=escape(TITLE if title is None else title),
        about=escape(f"{study.data_name} · {_today()}"),
        headline=" ".join(map(shown, (first, *more))),
        note="\n".join(notes(sections.header_notices(study), "note")),
        sections="\n".join(body),
        data=embedded(data),
        plotly=plotly_js(),
        script=script,
    )


def _pictures(study: Study, names: list[str]) -> Iterator[str]:
    """Figures two by two on a wide screen; the curves, and a figure without a partner, take the whole width."""
    halves = [name for name in names if name != "curves"]
    kinds = dict.fromkeys(halves, "half") | ({halves[-1]: "wide"} if len(halves) % 2 else {})
    order = [*halves[:2], *(name for name in names if name == "curves"), *halves[2:]]
    shown_figures = [line for name in order for line in sections.figure(study, name, kinds.get(name, "wide"))]
    click = notes([notice("click")] if len(study.methods) > 1 else [])
    yield from section("figures", "In pictures", click, ['<div class="figures">', *shown_figures, "</div>"])


def _today() -> str:
    """The day on which a page is written, in UTC; SOURCE_DATE_EPOCH, as of other builders, sets another."""
    stamp = os.environ.get("SOURCE_DATE_EPOCH", "")
    now = datetime.fromtimestamp(int(stamp), UTC) if stamp.isdecimal() else datetime.now(UTC)
    return now.date().isoformat()


def _policy(script: str) -> str:
    """The content security policy: a browser fetches nothing and runs the two scripts of the page only."""
    scripts = f"{fingerprint(plotly_js())} {fingerprint(script)}"
    return f"default-src 'none'; script-src {scripts}; style-src 'unsafe-inline'; img-src data: blob:"


@lru_cache(maxsize=1)
def plotly_js() -> str:
    """The library, which is about 5 MB, as it may stand inside a script element."""
    from plotly.offline import get_plotlyjs

    source: str = get_plotlyjs()
    # A browser reads every end of line as \\n, and the hash in the policy is of what it reads.
    return source.replace("\r\n", "\n").replace("\r", "\n").replace("</script", "<\\/script")


@lru_cache(maxsize=2)
def fingerprint(script: str) -> str:
    """The script as a Content-Security-Policy names it: only scripts named there run, whatever else stands in the page."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


def _palette() -> str:
    """The colours of the methods as CSS variables, for a light and a dark ground."""
    light, dark = ("".join(f"--method-{k}:{shade};" for k, shade in enumerate(shades)) for shades in (COLOURS, DARK_COLOURS))
    return f":root{{{light}}}\n@media screen and (prefers-color-scheme: dark) {{:root{{{dark}}}}}\n"
