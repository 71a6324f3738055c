"""Every public name of the library: what `equipoise` offers, and what each of its public modules offers."""

import ast
import dataclasses
import functools
import importlib
import inspect
import itertools
from types import ModuleType
from typing import Protocol

import equipoise

# Public modules of modules, and the contracts of parts; the others are in `equipoise.__all__`.
MORE = (
    "equipoise.risk.measures", "equipoise.data.partition", "equipoise.data.tabular", "equipoise.models.language",
    "equipoise.engines.flower", "equipoise.types", "equipoise.tracking", "equipoise.privacy.correlated_noise",
)  # fmt: skip


def names_of(module: ModuleType) -> list[str]:
    """The public classes and functions of a module: its `__all__`, or all that it defines."""
    listed = getattr(module, "__all__", None)
    if listed is None:
        listed = [
            n for n, v in vars(module).items() if getattr(v, "__module__", "") == module.__name__ and not n.startswith("_")
        ]
    return [n for n in listed if inspect.isclass(getattr(module, n)) or is_function(getattr(module, n))]


def is_function(value: object) -> bool:
    """Whether a value is a function, also one that keeps its answers (`functools.cache`)."""
    return inspect.isfunction(inspect.unwrap(value)) if callable(value) else False


def values_of(module: ModuleType) -> dict[str, str]:
    """The public values of a module that are no class, function or module, such as a ready metric → what is said about each.

    That is the text behind the assignment, in the module that makes the value.
    """
    names = [n for n in getattr(module, "__all__", ()) if not inspect.ismodule(getattr(module, n))]
    names = [n for n in names if n not in names_of(module)]
    found = {}
    for name in names:
        homes = (node.module for node in ast.walk(_parsed(module.__name__)) if isinstance(node, ast.ImportFrom)
                 and any((each.asname or each.name) == name for each in node.names))  # fmt: skip
        found[name] = _said_behind(next(homes, None) or module.__name__, name)
    return found


@functools.cache
def _parsed(module: str) -> ast.Module:
    return ast.parse(inspect.getsource(importlib.import_module(module)))


def _said_behind(module: str, name: str) -> str:
    body = _parsed(module).body
    for node, after in itertools.pairwise(body):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        if name in [each.id for each in targets if isinstance(each, ast.Name)]:
            said = after.value if isinstance(after, ast.Expr) else None
            return inspect.cleandoc(said.value) if isinstance(said, ast.Constant) and isinstance(said.value, str) else ""
    return ""


def public_modules() -> dict[str, list[str]]:
    """Module → public names, `equipoise` itself first."""
    found = {"equipoise": [n for n in equipoise.__all__ if not inspect.ismodule(getattr(equipoise, n))]}
    modules = [getattr(equipoise, n) for n in equipoise.__all__ if inspect.ismodule(getattr(equipoise, n))]
    for module in [*modules, *map(importlib.import_module, MORE)]:
        found[module.__name__] = names_of(module)
    return found


def all_names() -> list[str]:
    """Every public name in full, e.g. equipoise.risk.Superquantile."""
    return [f"{module}.{name}" for module, names in public_modules().items() for name in names]


@functools.cache
def _documented_elsewhere() -> frozenset[type]:
    """Public classes: what others inherit from them is in their own entries."""
    found = (getattr(importlib.import_module(module), name) for module, names in public_modules().items() for name in names)
    return frozenset(value for value in found if inspect.isclass(value))


def is_contract(owner: type) -> bool:
    """Whether a class is a protocol: it says what a part must offer."""
    return Protocol in owner.__bases__


def public_methods(owner: type) -> list[str]:
    """Methods and properties that a class defines itself, or inherits from a class of the library that is not public.

    Of a contract also the call that it asks for.
    """
    bases = [b for b in owner.__mro__[1:] if b.__module__.startswith("equipoise") and b not in _documented_elsewhere()]
    called = {"__call__"} if is_contract(owner) else set()
    kinds = property | functools.cached_property | classmethod | staticmethod
    return list(dict.fromkeys(
        name
        for base in (owner, *bases)
        for name, value in vars(base).items()
        if (not name.startswith("_") or name in called) and (isinstance(value, kinds) or is_function(value))
    ))  # fmt: skip


def _own_docstring(owner: type, name: str) -> str:
    """The docstring of a method or property itself, and not one that it inherits, e.g. from torch."""
    member = inspect.getattr_static(owner, name)
    function = getattr(member, "fget", None) or getattr(member, "func", None) or getattr(member, "__func__", member)
    return inspect.cleandoc(function.__doc__ or "")


def _of_class(owner: type) -> str:
    """The docstring that a class has itself: not that of a base, and not the signature that a dataclass gets without one."""
    own = inspect.cleandoc(vars(owner).get("__doc__") or "")
    return "" if dataclasses.is_dataclass(owner) and own.startswith(f"{owner.__name__}(") else own


def docstrings() -> dict[str, str]:
    """The docstring of every public name, and of every method of a public class; empty where there is none."""
    found = {}
    for module in map(importlib.import_module, public_modules()):
        found |= {f"{module.__name__}.{name}": text for name, text in values_of(module).items()}
    for full in all_names():
        module, _, name = full.rpartition(".")
        value = getattr(importlib.import_module(module), name)
        found[full] = _of_class(value) if inspect.isclass(value) else inspect.getdoc(value) or ""
        if inspect.isclass(value):
            found |= {f"{full}.{m}": _own_docstring(value, m) for m in public_methods(value)}
    return found


def without_docstring() -> list[str]:
    """Public names, and methods of public classes, that say nothing about themselves."""
    return [name for name, text in docstrings().items() if not text]
