"""The API reference: a page per public module, an entry per public name, made by autodoc from signature and docstring."""

import importlib
import inspect
import re

from docstrings import markdown
from given_types import INNER, given_types
from public_names import public_methods, public_modules

GIVEN = "equipoise.given"  # the name of the page of types that are no public names
ELSEWHERE = {  # names that a module offers, too, and whose entry is on the page of another module
    "equipoise": {"ClientSet": "equipoise.data", "FederatedData": "equipoise.data"},
    "equipoise.risk": {"RiskValue": "equipoise.types"},
}


def _entry(module: str, name: str) -> str:
    value = getattr(importlib.import_module(module), name)
    return _class_entry(f"{module}.{name}", value) if inspect.isclass(value) else f".. autofunction:: {module}.{name}\n"


def _class_entry(full: str, value: type, *, inner: bool = False) -> str:
    methods = ", ".join(public_methods(value)) if not inner else ""
    members = f"   :members: {methods}\n" if methods else ""
    return f".. autoclass:: {full}\n{members}"


def full_name(given: type) -> str:
    """A type that is no public name, as the reference calls it."""
    return f"{given.__module__}.{given.__qualname__}"


def _given_page() -> str:
    """The page of the types that public names give back and that have no entry of their own."""
    found = given_types()
    held = [each for each in found if each.__name__ not in INNER]
    inner = [each for each in found if each.__name__ in INNER]

    def rows(types: list[type]) -> list[str]:
        return [f"| [`{t.__name__}`](#{full_name(t)}) | {_summary(t)} | {_places(found[t])} |" for t in types]

    def entries(types: list[type], **options: bool) -> str:
        return "\n".join(_class_entry(full_name(each), each, **options) for each in types)

    head = ["| type | what it is | where you meet it |", "|---|---|---|"]
    return "\n".join([
        "# What calls give back", "",
        "For people who hold a result and ask what is in it. You need not import these types: results, tables and schemas give",
        "them to you. What stands under *Parameters* are also the attributes of an object.", "", *head, *rows(held), "",
        "```{eval-rst}", entries(held), "```", "", "## Inner types", "",
        "You meet these names in signatures. Their members may change; what you may rely on is the contract in",
        "[`equipoise.types`](equipoise.types.md).", "", *head, *rows(inner), "",
        "```{eval-rst}", entries(inner, inner=True), "```", "",
    ])  # fmt: skip


def _places(places: list[str], most: int = 3) -> str:
    shown = ", ".join(f"`{place.removeprefix('equipoise.')}`" for place in places[:most])
    return shown + (f" and {len(places) - most} more" if len(places) > most else "")


def _summary(value: object) -> str:
    first = (inspect.getdoc(value) or "").strip().split("\n\n")[0].replace("\n", " ")
    sentence = re.split(r"(?<!e\.g)(?<!i\.e)\. ", first)[0].rstrip(".")
    return markdown(sentence)


def _page(module: str, names: list[str]) -> str:
    found = importlib.import_module(module)
    text = (inspect.getdoc(found) or "").strip()
    elsewhere = ELSEWHERE.get(module, {})
    anchors = {n: f"{elsewhere[n]}.md" if n in elsewhere else f"#{module}.{n}" for n in names}
    rows = [f"| [`{n}`]({anchors[n]}) | {_summary(getattr(found, n))} |" for n in names]
    entries = "\n".join(_entry(module, name) for name in names if name not in elsewhere)
    return "\n".join([
        f"# `{module}`", "", *text.splitlines(), "", "| name | what it is |", "|---|---|", *rows, "",
        "```{eval-rst}", f".. currentmodule:: {module}", "", entries, "```", "",
    ])  # fmt: skip


def pages() -> dict[str, str]:
    """The page of every module, and their list."""
    modules = public_modules()
    made = {f"api/{module}.md": _page(module, names) for module, names in modules.items() if names}
    made[f"api/{GIVEN}.md"] = _given_page()
    rows = []
    for module, names in modules.items():
        if names:
            first = (inspect.getdoc(importlib.import_module(module)) or "").strip().split("\n")[0].rstrip(".")
            rows.append(f"| [`{module}`](api/{module}.md) | {first} | {len(names)} |")
    rows.append(
        f"| [what calls give back](api/{GIVEN}.md) | The types of results, summaries, rules and costs | {len(given_types())} |"
    )
    made["api.md"] = "\n".join([
        "# API", "",
        "For people who write Python. Every public name has an entry with its parameters, types and defaults, the formula it",
        f"implements and its source. There are {sum(map(len, modules.values()))} names in {len(rows) - 1} modules. Names that do not",
        "stand here are internal and may change. Under *Parameters* of a class stand its attributes, too.", "", "| module | what it holds | names |", "|---|---|---|", *rows, "",
        "```{toctree}", ":hidden:", "", *[f"api/{module}" for module, names in modules.items() if names], f"api/{GIVEN}", "```", "",
    ])  # fmt: skip
    return made
