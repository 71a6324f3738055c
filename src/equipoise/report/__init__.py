"""Reports: one interactive HTML page that opens offline, its figures as files for papers, and tables of methods.

Here belong the numbers of several runs beside each other (`study`, `over_seeds`, `paired`, `by_client`, `series`), figures,
each described once (`figures`, `plot`), the page (`sections`, `html`, `page`), and every text, as entries of `notices.toml`.
Figures of one run do not: they are `metrics` and `client_table`. plotly is imported to write the page, matplotlib to draw.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from equipoise.core.files import write_atomically
from equipoise.errors import ConfigError, InvalidParameter, require

if TYPE_CHECKING:
    from equipoise.run_record import RunRecord

__all__ = ["export_figures", "histogram_picture", "write_report", "write_table"]

FORMATS = ("pdf", "svg", "png")


def write_report(
    results: Sequence[RunRecord], path: str | Path, *, knob: Mapping[str, Any] | None = None, title: str | None = None
) -> Path:
    """Write one self-contained HTML page about a run, or about several methods (`RunRecord.name`) and seeds.

    The first method is the baseline of the headline. The page asks for nothing from the network. `knob` are the numbers of a
    family's knob, which the page then has. `title` stands at the top, above the name of the data and the day.
    """
    from equipoise.report.page import page
    from equipoise.report.study import Study

    good = title is None or (isinstance(title, str) and bool(title.strip()))
    require(good, "title", "must be a text that is not empty", title, "Leave it out for the usual title.")
    return write_atomically(Path(path), page(Study.of(results), knob, title).encode())


def export_figures(
    results: Sequence[RunRecord], folder: str | Path, formats: str | Iterable[str] = ("svg", "png")
) -> list[Path]:
    """Write every figure of the report for a paper: histogram.svg, histogram.png, percentiles.svg and so on.

    `formats` are some of pdf (fonts embedded, as TrueType), svg and png (300 dpi). Figures that the results have nothing for
    (the trade-off of a single method) are left out.
    """
    from equipoise.report.figures import drawn
    from equipoise.report.static_figures import render
    from equipoise.report.study import Study

    kinds = chosen_formats(formats)
    require_matplotlib()
    plots = drawn(Study.of(results))
    return [
        write_atomically(Path(folder) / f"{name}.{kind}", render(plot, kind, dpi=300))
        for name, plot in plots.items()
        for kind in kinds
    ]


def chosen_formats(formats: str | Iterable[str]) -> list[str]:
    """The formats of figures as a list; others than `FORMATS` are refused."""
    kinds = [formats] if isinstance(formats, str) else list(dict.fromkeys(formats)) if isinstance(formats, Iterable) else []
    good = len(kinds) > 0 and all(kind in FORMATS for kind in kinds)
    require(good, "format", f"must be one or more of {', '.join(FORMATS)}", formats)
    return kinds


def require_matplotlib() -> None:
    """Refuse to draw where matplotlib is not installed, with how to get it."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as failure:
        raise ConfigError("Figures need matplotlib, which is not installed: pip install matplotlib.") from failure


def histogram_picture(results: Sequence[RunRecord], path: str | Path) -> Path:
    """Write the histogram of per-client errors as a picture of about 1200 × 500 pixels: .png or .svg, by the suffix."""
    from equipoise.report.figures import histogram
    from equipoise.report.static_figures import render
    from equipoise.report.study import Study

    target = Path(path)
    kind = target.suffix.lower()
    if kind not in (".png", ".svg"):
        raise InvalidParameter("path", "must end in .png or .svg", str(path))
    require_matplotlib()
    plot = histogram(Study.of(results).with_short_names())
    return write_atomically(target, render(plot, kind[1:], dpi=150, width=8.0, least_height=10 / 3))


def write_table(results: Sequence[RunRecord], path: str | Path) -> Path:
    """Write the table of methods for a paper, by the suffix of `path`: .md (Markdown) or .tex (LaTeX with booktabs).

    Figures are mean ± standard deviation over seeds. Errors that are shares are in percent, as on the page; losses and
    errors of numbers are as they are.
    """
    from equipoise.report.over_seeds import in_percent
    from equipoise.report.paper_tables import latex_table, markdown_table, paper_table

    target, kinds = Path(path), {".md": markdown_table, ".tex": latex_table}
    require(target.suffix.lower() in kinds, "path", "must end in .md or .tex", str(path))
    methods: dict[str, list[RunRecord]] = {}
    for run in results:
        methods.setdefault(run.name, []).append(run)
    text = paper_table(methods, kinds[target.suffix.lower()], percent=in_percent(results))
    return write_atomically(target, f"{text}\n".encode())
