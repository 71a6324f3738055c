"""The API reference: a page per public module, an entry per public name, made by autodoc from signature and docstring."""

import importlib
import inspect
import re

import docstrings
from api_leads import GOAL, grouped, lead
from docstrings import markdown
from given_types import INNER, given_types
from public_names import public_methods, public_modules, values_of
from uses import used_in

GIVEN = "equipoise.given"  # the name of the page of types that are no public names
ELSEWHERE = {  # names that a module offers, too, and whose entry is on the page of another module
    "equipoise": {"ClientSet": "equipoise.data", "FederatedData": "equipoise.data"},
    "equipoise.risk": {"RiskValue": "equipoise.types"},
}


def _entry(module: str, name: str) -> str:
    value = getattr(importlib.import_module(module), name)
    uses = "".join(f"   {line}\n" if line else "\n" for line in used_in(f"{module}.{name}"))
    head = _class_entry(f"{module}.{name}", value) if inspect.isclass(value) else f".. autofunction:: {module}.{name}\n"
    return f"{head}\n{uses}" if uses else head


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
        f"For people who hold a result and ask what is in it. {GOAL} know its attributes and methods.", "",
        "You need not import these types: results, tables and schemas give them to you. The attributes of a class are listed",
        "under *Parameters*.", "", *head, *rows(held), "",
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
    groups = grouped(module, names)
    lines = [f"# `{module}`", "", lead(module), "", *text.splitlines(), "", "| name | what it is |", "|---|---|"]
    lines += [f"| [`{n}`]({anchors[n]}) | {_summary(getattr(found, n))} |" for group in groups.values() for n in group]
    lines += [f"| [`{n}`](#{module}.{n}) | {markdown(text.rstrip('.'))} |" for n, text in values_of(found).items()]
    for heading, group in groups.items():
        entries = "\n".join(_entry(module, name) for name in group if name not in elsewhere)
        lines += ["", *([f"## {heading}", ""] if heading else [])]
        away = [f"[`{name}`]({anchors[name]})" for name in group if name in elsewhere]
        lines += [f"The entries of {' and '.join(away)} are on the page of their module.", ""] if away else []
        lines += ["```{eval-rst}", f".. currentmodule:: {module}", "", entries, "```"] if entries else []
    return "\n".join([*lines, *_values(module), ""])


def _values(module: str) -> list[str]:
    """The entries of the public values of a module."""
    said = values_of(importlib.import_module(module))
    entries = [f".. py:data:: {name}\n\n   {docstrings.converted(text)}\n" for name, text in said.items()]
    return ["", "## Values", "", "```{eval-rst}", f".. currentmodule:: {module}", "", *entries, "```"] if entries else []


def pages() -> dict[str, str]:
    """The page of every module, and their list."""
    modules = public_modules()
    made = {f"api/{module}.md": _page(module, names) for module, names in modules.items() if names}
    made[f"api/{GIVEN}.md"] = _given_page()
    rows: list[str] = []
    counts: list[int] = []
    for module, names in modules.items():
        if names:
            first = (inspect.getdoc(importlib.import_module(module)) or "").strip().split("\n")[0].rstrip(".")
            counts.append(len(names) + len(values_of(importlib.import_module(module))))
            rows.append(f"| [`{module}`](api/{module}.md) | {first} | {counts[-1]} |")
    rows.append(
        f"| [what calls give back](api/{GIVEN}.md) | The types of results, summaries, rules and costs | {len(given_types())} |"
    )
    made["api.md"] = "\n".join([
        "# API", "",
        f"For people who write Python. {GOAL} know which module holds what you need.", "",
        "Every public name has an entry with its parameters, types and defaults, the formula it implements and its source, and",
        f"an example or links to pages that use it. There are {sum(counts)} names in {len(rows) - 1} modules.",
        "Names not listed here are internal and may change. The attributes of a class are listed under *Parameters*.", "", "| module | what it holds | names |", "|---|---|---|", *rows, "",
        "```{toctree}", ":hidden:", "", *[f"api/{module}" for module, names in modules.items() if names], f"api/{GIVEN}", "```", "",
    ])  # fmt: skip
    return made
