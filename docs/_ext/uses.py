"""Where public names are used: in the examples of docstrings, in the pages of the documentation and in the gallery."""

import ast
import doctest
import functools
import importlib
import inspect
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from catalogue_examples import constructors
from given_types import givers
from public_names import is_contract, public_modules
from site_checks import fences

ROOT = Path(__file__).parents[2]
MOST = 3  # links per name
ORDER = ("tutorials/", "gallery/", "howto/", "")  # which pages come first
# Modules whose names nobody calls: the contracts, and the values and descriptions that pass between parts.
NOT_CALLED = ("equipoise.types",)


@functools.cache
def _owners() -> dict[int, tuple[str, ...]]:
    """The id of each public class or function → its public names."""
    found: dict[int, tuple[str, ...]] = defaultdict(tuple)
    for module, names in public_modules().items():
        for name in names:
            found[id(getattr(importlib.import_module(module), name))] += (f"{module}.{name}",)
    return found


def names_used(program: str, known: dict[str, str] | None = None) -> set[str]:
    """The public names that a program uses; `known` holds what its imports, and those of earlier blocks, call them."""
    known = {"eq": "equipoise", "equipoise": "equipoise"} if known is None else known
    try:
        tree = ast.parse(program)
    except SyntaxError:
        return set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            known |= {each.asname or each.name.partition(".")[0]: each.name if each.asname else each.name.partition(".")[0]
                      for each in node.names if each.name.startswith("equipoise")}  # fmt: skip
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("equipoise"):
            known |= {each.asname or each.name: f"{node.module}.{each.name}" for each in node.names}
    paths = {path for node in ast.walk(tree) if (path := _dotted(node, known))}
    return {name for path in paths for name in _owners().get(id(_value(path)), ())}


def _dotted(node: ast.AST, known: dict[str, str]) -> str:
    if isinstance(node, ast.Name):
        return known.get(node.id, "")
    if isinstance(node, ast.Attribute) and (owner := _dotted(node.value, known)):
        return f"{owner}.{node.attr}"
    return ""


@functools.cache
def _value(path: str) -> object:
    """What a dotted path of the library stands for; None if there is no such thing."""
    head, *rest = path.split(".")
    found: object = importlib.import_module(head)
    for number, name in enumerate(rest, 1):
        try:
            found = getattr(found, name)
        except AttributeError:
            try:
                found = importlib.import_module(".".join([head, *rest[:number]]))
            except ImportError:
                return None
    return found


def _programs() -> Iterator[tuple[str, str, list[str]]]:
    """(document, its title, its programs) of every page and of every script of the gallery."""
    folder = ROOT / "docs"
    for page in sorted(folder.rglob("*.md")):
        if {"generated", "gallery", "_build", "_cache"} & set(page.relative_to(folder).parts):
            continue
        text = page.read_text(encoding="utf-8")
        title = re.search(r"^# (.+)$", text, flags=re.M)
        blocks = [each.text for each in fences(text) if each.language == "python" or each.language.startswith("{code-cell}")]
        if title and blocks:
            yield str(page.relative_to(folder).with_suffix("")), title.group(1), blocks
    for script in sorted((ROOT / "examples" / "gallery").rglob("plot_*.py")):
        text = script.read_text(encoding="utf-8")
        title = ast.get_docstring(ast.parse(text)).splitlines()[0]
        yield f"gallery/{script.relative_to(ROOT / 'examples' / 'gallery').with_suffix('')}", title, [text]


@functools.cache
def pages_that_use() -> dict[str, list[tuple[str, str]]]:
    """Public name → (document, title) of the pages whose programs use it, tutorials and gallery first."""
    found: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for document, title, blocks in _programs():
        known = {"eq": "equipoise", "equipoise": "equipoise"}
        for name in set().union(*(names_used(block, known) for block in blocks)):
            found[name].append((document, title))

    def rank(place: tuple[str, str]) -> int:
        return next(number for number, head in enumerate(ORDER) if place[0].startswith(head))

    return {name: sorted(places, key=rank) for name, places in found.items()}


@functools.cache
def examples_that_use() -> dict[str, list[str]]:
    """Public name → other public names whose docstrings use it in an example."""
    found: dict[str, list[str]] = defaultdict(list)
    for module, names in public_modules().items():
        for name in names:
            full, text = f"{module}.{name}", inspect.getdoc(getattr(importlib.import_module(module), name)) or ""
            program = "".join(each.source for each in doctest.DocTestParser().get_examples(text)) if ">>> " in text else ""
            home = vars(importlib.import_module(getattr(importlib.import_module(module), name).__module__))
            known = {key: f"{value.__module__}.{value.__name__}" for key, value in home.items()
                     if getattr(value, "__module__", "").startswith("equipoise") and hasattr(value, "__name__")}  # fmt: skip
            for used in names_used(program, {"eq": "equipoise"} | known) - {full}:
                found[used].append(full)
    return found


def used_in(full: str) -> list[str]:
    """The lines of an entry that say where a name is used, as reStructuredText; none if its docstring has an example."""
    text = inspect.getdoc(_value(full)) or ""
    links = [f":doc:`{_plain(title)} </{document}>`" for document, title in pages_that_use().get(full, [])[:MOST]]
    head, example = "**Used in:** ", constructors().get(full, "")
    if ">>> " in text:
        return [head + ", ".join(links)] if links else []
    lines = ["**Example:**", "", ".. code-block:: python", "", f"   {example}", ""] if example else []
    if links:
        return [*lines, head + ", ".join(links)]
    if not example and (others := examples_that_use().get(full)):
        return [head + ", ".join(f"the example of :py:obj:`{each}`" for each in others[:MOST])]
    if not example and inspect.isclass(_value(full)) and (places := givers().get(_value(full))):
        return ["**Given by:** " + ", ".join(f":py:obj:`{place}`" for place in places[:MOST])]
    return lines


def _plain(title: str) -> str:
    return re.sub(r"[`<>*]", "", title)


def without_example() -> list[str]:
    """Public names that have no example and that no page, no script of the gallery and no other example uses.

    Contracts, exceptions, and the values of `NOT_CALLED` are not asked for one: nobody makes them in a program.
    """
    found = []
    for module, names in public_modules().items():
        for name in names:
            full, value = f"{module}.{name}", getattr(importlib.import_module(module), name)
            exempt = module in NOT_CALLED or (
                inspect.isclass(value) and (is_contract(value) or issubclass(value, BaseException))
            )
            if not exempt and ">>> " not in (inspect.getdoc(value) or "") and not used_in(full):
                found.append(full)
    return found
