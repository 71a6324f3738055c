"""The API reference: a page per public module, an entry per public name, made by autodoc from signature and docstring."""

import importlib
import inspect
import re

from public_names import public_methods, public_modules


def _entry(module: str, name: str) -> str:
    value = getattr(importlib.import_module(module), name)
    if not inspect.isclass(value):
        return f".. autofunction:: {module}.{name}\n"
    methods = ", ".join(public_methods(value))
    members = f"   :members: {methods}\n" if methods else ""
    return f".. autoclass:: {module}.{name}\n{members}"


def _summary(value: object) -> str:
    first = (inspect.getdoc(value) or "").strip().split("\n\n")[0].replace("\n", " ")
    sentence = re.split(r"(?<!e\.g)(?<!i\.e)\. ", first)[0].rstrip(".")
    parts = re.split(r"(`[^`]*`)", sentence)  # code stays as it is, elsewhere nothing is markup
    return "".join(p.replace("|", "\\|") if p.startswith("`") else re.sub(r"([|*$_<\\])", r"\\\1", p) for p in parts)


def _page(module: str, names: list[str]) -> str:
    found = importlib.import_module(module)
    text = (inspect.getdoc(found) or "").strip()
    elsewhere = {"ClientSet", "FederatedData"} if module == "equipoise" else set()  # their entries are in equipoise.data
    anchors = {n: "equipoise.data.md" if n in elsewhere else f"#{module}.{n}" for n in names}
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
    rows = []
    for module, names in modules.items():
        if names:
            first = (inspect.getdoc(importlib.import_module(module)) or "").strip().split("\n")[0].rstrip(".")
            rows.append(f"| [`{module}`](api/{module}.md) | {first} | {len(names)} |")
    made["api.md"] = "\n".join([
        "# API", "",
        "For people who write Python. Every public name has an entry with its parameters, types and defaults, the formula it",
        f"implements and its source. There are {sum(map(len, modules.values()))} names in {len(rows)} modules. Names that do not",
        "stand here are internal and may change.", "", "| module | what it holds | names |", "|---|---|---|", *rows, "",
        "```{toctree}", ":hidden:", "", *[f"api/{module}" for module, names in modules.items() if names], "```", "",
    ])  # fmt: skip
    return made
