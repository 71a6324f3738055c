"""The catalogue of methods: one sortable table of every part, made from the catalogue and the docstrings."""

import html
import re

from docstrings import marked_up
from public_names import public_modules

from equipoise.experiment import catalog


def _link(path: str) -> str:
    module, _, name = path.rpartition(".")
    known = module in public_modules() and name in public_modules()[module]
    short = _breakable(path.removeprefix("equipoise."))
    return f'<a href="api/{module}.html#{path}"><code>{short}</code></a>' if known else f"<code>{short}</code>"


def _breakable(name: str) -> str:
    """The name, which may wrap after a dot or an underscore, so that the column of a long name does not push others away."""
    return re.sub(r"([._])", r"\1<wbr>", name)


def page() -> str:
    """The page."""
    rows = []
    for kind in catalog.kinds():
        for part in catalog.parts(kind):
            parameters = ", ".join(p.name for p in part.all_parameters) or "–"
            cells = [kind, _link(part.python_path), marked_up(part.summary), f"<code>{_breakable(part.name)}</code>",
                     f"<code>{html.escape(parameters)}</code>" if parameters != "–" else "–", marked_up(part.source) or "–"]  # fmt: skip
            rows.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    for target in catalog.FUNCTIONS:
        part = catalog.CatalogPart("function", target, catalog.Entry(target))
        cells = ["function", _link(part.python_path), marked_up(part.summary), "–", "–", marked_up(part.source) or "–"]
        rows.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    heads = "".join(
        f'<th scope="col">{h}</th>' for h in ("kind", "in Python", "what it does", "in a file", "parameters", "source")
    )
    table = f'<div class="wide-table" tabindex="0" role="region" aria-label="Catalogue of methods"><table class="sortable catalogue" ' \
            f'data-filter="Filter methods"><thead><tr>{heads}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'  # fmt: skip
    return "\n".join([
        "# Catalogue of methods", "",
        "For everybody who looks for a method. After this page you know which methods there are, and their parameters and sources.",
        f"The table has all {len(rows)} parts and functions. Click a heading to sort; type into the field to filter, e.g. `krum`,",
        "`2021` or `privacy`. [What goes with what](combinations.md) says which of them combine.", "", "```{raw} html", table, "```", "",
    ])  # fmt: skip
