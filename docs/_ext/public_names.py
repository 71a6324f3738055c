"""Every public name of the library, and the types that public names give back."""

import dataclasses
import functools
import importlib
import inspect
import re
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Protocol

import equipoise

# Public modules of modules, and the contracts of parts; the others are in `equipoise.__all__`.
MORE = (
    "equipoise.risk.measures", "equipoise.data.partition", "equipoise.data.tabular", "equipoise.models.language",
    "equipoise.engines.flower", "equipoise.types", "equipoise.tracking", "equipoise.privacy.correlated_noise",
)  # fmt: skip
# Types of the machinery, which users meet in signatures alone: no entry, and what they give back is not followed.
INNER = (
    "AlgorithmTraits", "Checkpoint", "KnownCohorts", "LoopEngine", "PrivateRelease", "Protected", "ProxState", "RayEngine",
    "RecordedAlgorithm", "ReleaseBook", "Setting", "SimulatorEngine", "StopState", "StoreState", "Task",
)  # fmt: skip


def names_of(module: ModuleType) -> list[str]:
    """The public classes and functions of a module: its `__all__`, or all that it defines."""
    own = [n for n, v in vars(module).items() if getattr(v, "__module__", "") == module.__name__ and not n.startswith("_")]
    return [
        n for n in getattr(module, "__all__", own) if inspect.isclass(getattr(module, n)) or is_function(getattr(module, n))
    ]


def is_function(value: object) -> bool:
    """Whether a value is a function, also one that keeps its answers (`functools.cache`)."""
    return inspect.isfunction(inspect.unwrap(value)) if callable(value) else False


def public_modules() -> dict[str, list[str]]:
    """Module → public names, `equipoise` itself first."""
    modules = [getattr(equipoise, n) for n in equipoise.__all__ if inspect.ismodule(getattr(equipoise, n))]
    found = {"equipoise": [n for n in equipoise.__all__ if not inspect.ismodule(getattr(equipoise, n))]}
    return found | {module.__name__: names_of(module) for module in [*modules, *map(importlib.import_module, MORE)]}


def values() -> dict[str, object]:
    """Public name in full → the class or function. Each is listed under the last module that offers it."""
    named = [(f"{m}.{n}", getattr(importlib.import_module(m), n)) for m, names in public_modules().items() for n in names]
    homes = {id(value): full for full, value in named}
    return {full: value for full, value in named if homes[id(value)] == full}


def is_contract(owner: type) -> bool:
    """Whether a class is a protocol: it says what a part must offer."""
    return Protocol in owner.__bases__


def public_methods(owner: type) -> list[str]:
    """Methods and properties that a class has itself or from a class that is not public; of a contract also its call."""
    public = {id(value) for value in values().values()}
    bases = [b for b in owner.__mro__[1:] if b.__module__.startswith("equipoise") and id(b) not in public]
    kinds = property | functools.cached_property | classmethod | staticmethod
    found = (item for base in (owner, *bases) for item in vars(base).items())
    names = [n for n, value in found if not n.startswith("_") and (isinstance(value, kinds) or is_function(value))]
    return list(dict.fromkeys([*(["__call__"] if is_contract(owner) and "__call__" in vars(owner) else []), *names]))


def given_types() -> list[type]:
    """Types that are not public names, and that public names give back or have as attributes."""
    modules = [module for name, module in list(sys.modules.items()) if name.startswith("equipoise")]
    known = {v.__name__: v for m in modules for v in vars(m).values() if inspect.isclass(v) and v.__module__ == m.__name__}
    waiting = list(values().values())
    seen = {each.__name__ for each in waiting} | set(INNER)
    found = []
    while waiting:
        for annotation in _given(waiting.pop(0)):
            text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
            for name in re.findall(r"\b[A-Z]\w+", text):
                if name in known and name not in seen:
                    seen.add(name)
                    found.append(known[name])
                    waiting.append(known[name])
    return sorted(found, key=lambda each: each.__name__)


def _given(value: object) -> Iterator[object]:
    """What a function returns, or the types of a class's attributes, properties and methods."""
    if not inspect.isclass(value):
        yield getattr(value, "__annotations__", {}).get("return", "")
        return
    yield from (f.type for f in dataclasses.fields(value) if f.name[0] != "_") if dataclasses.is_dataclass(value) else ()
    for name in public_methods(value):
        member = inspect.getattr_static(value, name)
        function = getattr(member, "fget", None) or getattr(member, "func", None) or getattr(member, "__func__", member)
        yield function.__annotations__.get("return", "")
