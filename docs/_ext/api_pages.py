"""The API reference: a page per public module, its entries by autodoc from signatures and docstrings."""

import ast
import importlib
import inspect
import textwrap

from docstrings import reflowed
from public_names import given_types, public_methods, public_modules, values
from sphinx.pycode import ModuleAnalyzer


def _entry(full: str, value: object) -> str:
    if not inspect.isclass(value):
        return f".. autofunction:: {full}\n"
    methods = ", ".join(public_methods(value))
    return f".. autoclass:: {full}\n" + (f"   :members: {methods}\n" if methods else "")


def _page(title: str, text: str, names: dict[str, object]) -> str:
    listed = "\n".join(f"   {full}" for full in names)
    entries = "\n".join(_entry(full, value) for full, value in names.items())
    table = f".. autosummary::\n   :nosignatures:\n\n{listed}\n\n"
    return f"# {title}\n\n{text}\n\n```{{eval-rst}}\n{table}{entries}```\n"


def pages() -> dict[str, str]:
    """The page of every module, of the types that calls give back, and their list."""
    known, made = values(), {}
    for module, names in public_modules().items():
        own = {f"{module}.{name}": known[f"{module}.{name}"] for name in names if f"{module}.{name}" in known}
        found = importlib.import_module(module)
        away = sorted(full for full, value in known.items() for name in names
                      if getattr(found, name) is value and full not in own)  # fmt: skip
        text = inspect.getdoc(found) or ""
        text += (
            f"\n\nAlso here, with entries of their own: {', '.join(f'{{py:obj}}`{each}`' for each in away)}." if away else ""
        )
        data = [n for n in getattr(found, "__all__", ()) if n not in names and not inspect.ismodule(getattr(found, n))]
        made[f"api/{module}.md"] = _page(f"`{module}`", text, own) + _values(found, data)
    given = {f"{each.__module__}.{each.__qualname__}": each for each in given_types()}
    made["api/equipoise.given.md"] = _page(
        "What calls give back", "You need not import these types: results, tables and schemas give them to you.", given
    )
    made["api.md"] = "\n".join([
        "# API", "", "For people who write Python. Every public name has an entry with its parameters, types and defaults, the",
        "formula it implements and its source. Names not listed here are internal and may change. The attributes of a class",
        "are listed under *Parameters*.", "",
        "```{toctree}", ":maxdepth: 1", "", *[path.removesuffix(".md") for path in made], "```", "",
    ])  # fmt: skip
    return made


def _values(module: object, names: list[str]) -> str:
    """Public values that are no class or function, such as ready metrics: the text behind their assignment."""
    nodes = ast.walk(ast.parse(inspect.getsource(module)))
    homes = [n.module for n in nodes if isinstance(n, ast.ImportFrom) and (n.module or "").startswith("equipoise.")]
    entries = []
    for name in names:
        said = (ModuleAnalyzer.for_module(home).find_attr_docs().get(("", name)) for home in [*homes, module.__name__])
        text = textwrap.indent("\n".join(reflowed(next(filter(None, said), []))), "   ")
        entries.append(f".. py:data:: {module.__name__}.{name}\n\n{text}\n")
    return "\n## Values\n\n```{eval-rst}\n" + "\n".join(entries) + "```\n" if entries else ""
