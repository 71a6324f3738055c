"""Every public name of the library: what `equipoise` offers, and what each of its public modules offers."""

import importlib
import inspect
from types import ModuleType

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
    return [n for n in listed if inspect.isclass(getattr(module, n)) or inspect.isfunction(getattr(module, n))]


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


def public_methods(owner: type) -> list[str]:
    """Methods and properties that a class defines itself."""
    return [
        name
        for name, value in vars(owner).items()
        if not name.startswith("_") and (inspect.isfunction(value) or isinstance(value, property | classmethod | staticmethod))
    ]


def docstrings() -> dict[str, str]:
    """The docstring of every public name, and of every method of a public class; empty where there is none."""
    found = {}
    for full in all_names():
        module, _, name = full.rpartition(".")
        value = getattr(importlib.import_module(module), name)
        found[full] = inspect.getdoc(value) or ""
        if inspect.isclass(value):
            found |= {f"{full}.{m}": inspect.getdoc(getattr(value, m)) or "" for m in public_methods(value)}
    return found


def without_docstring() -> list[str]:
    """Public names, and methods of public classes, that say nothing about themselves."""
    return [name for name, text in docstrings().items() if not text]
