"""The catalogue of methods: one sortable table of every part, made from the catalogue and the docstrings."""

import html
import re

from docstrings import marked_up
from public_names import values

from equipoise.experiment import catalog


def table(kind: str, heads: tuple[str, ...], rows: list[list[str]], label: str, **attributes: str) -> str:
    """A table of HTML that `tables.js` sorts and filters."""
    given = "".join(f' {name.replace("_", "-")}="{value}"' for name, value in attributes.items())
    head = "".join(f'<th scope="col">{each}</th>' for each in heads)
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return (f'```{{raw}} html\n<div class="wide-table" tabindex="0" role="region" aria-label="{label}"><table class="sortable {kind}"'
            f"{given}><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>\n```")  # fmt: skip


def _link(path: str) -> str:
    short = re.sub(r"([._])", r"\1<wbr>", path.removeprefix("equipoise."))  # a long name may wrap here
    module = path.rpartition(".")[0]
    return f'<a href="api/{module}.html#{path}"><code>{short}</code></a>' if path in values() else f"<code>{short}</code>"


def page() -> str:
    """The page."""
    parts = [part for kind in catalog.kinds() for part in catalog.parts(kind)]
    parts += [catalog.CatalogPart("function", target, catalog.Entry(target)) for target in catalog.FUNCTIONS]
    rows = []
    for part in parts:
        listed = part.kind != "function"
        parameters = html.escape(", ".join(p.name for p in part.all_parameters) if listed else "")
        rows.append([part.kind, _link(part.python_path), marked_up(part.summary), f"<code>{part.name if listed else ''}</code>",
                     f"<code>{parameters}</code>", marked_up(part.source)])  # fmt: skip
    heads = ("kind", "in Python", "what it does", "in a file", "parameters", "source")
    return "\n".join([
        "# Catalogue of methods", "",
        "For everybody who looks for a method. After this page you know which methods there are, and their parameters and sources.",
        f"The table has all {len(rows)} parts and functions. Click a heading to sort; type into the field to filter, e.g. `krum`,",
        "`2021` or `privacy`. [What goes with what](combinations.md) says which of them combine.", "",
        table("catalogue", heads, rows, "Catalogue of methods", data_filter="Filter methods"), "",
    ])  # fmt: skip
