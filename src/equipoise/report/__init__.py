"""Reports: one HTML page that opens offline, and the picture at its top. matplotlib is imported when a figure is drawn."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from equipoise.errors import InvalidParameter
from equipoise.files import write_atomically
from equipoise.result import RunRecord

__all__ = ["histogram_picture", "write_report"]


def write_report(results: Sequence[RunRecord], path: str | Path) -> Path:
    """Write one self-contained HTML page about a run, or about several methods (`Result.name`) and seeds (`Result.seed`).

    The first method is the baseline of the headline. The page asks for nothing from the network and runs no script.
    """
    from equipoise.report.page import page
    from equipoise.report.study import Study

    return write_atomically(Path(path), page(Study.of(results)).encode())


def histogram_picture(results: Sequence[RunRecord], path: str | Path) -> Path:
    """Write the histogram of per-client errors as a picture of about 1200 × 500 pixels: .png or .svg, by the suffix."""
    from equipoise.report import figures
    from equipoise.report.study import Study

    target = Path(path)
    kind = target.suffix.lower()
    if kind not in (".png", ".svg"):
        raise InvalidParameter("path", "must end in .png or .svg", str(path))
    figure = figures.histogram(Study.of(results), width=8.0, least_height=10 / 3)
    return write_atomically(target, figures.render(figure, kind[1:], dpi=150))
