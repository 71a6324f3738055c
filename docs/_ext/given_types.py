"""The types of what public names give back: followed through return types and attributes, as far as users hold them."""

import ast
import dataclasses
import functools
import importlib
import inspect
import re
import sys
from collections.abc import Iterator

from public_names import public_methods, public_modules

# Types of the machinery: users meet their names in signatures, and use them through a contract of `equipoise.types` or not at
# all. They have an entry without members, and what they give back is not followed.
INNER = frozenset((
    "AlgorithmTraits", "Checkpoint", "KnownCohorts", "LoopEngine", "PrivateRelease", "Protected", "ProxState", "RayEngine",
    "RecordedAlgorithm", "ReleaseBook", "Setting", "SimulatorEngine", "StopState", "StoreState", "Task",
))  # fmt: skip


def public_classes() -> set[type]:
    """The classes among the public names."""
    found = (getattr(importlib.import_module(module), name) for module, names in public_modules().items() for name in names)
    return {value for value in found if inspect.isclass(value)}


def given_types() -> dict[type, list[str]]:
    """Each type that is not a public name and that public names give back, with the places where one meets it."""
    public, found = public_classes(), {}
    waiting = [
        (f"{module}.{name}", getattr(importlib.import_module(module), name))
        for module, names in public_modules().items()
        for name in names
    ]
    done: set[int] = set()
    while waiting:
        where, value = waiting.pop(0)
        if id(value) in done:
            continue
        done.add(id(value))
        for place, owner, annotation in _given(where, value):
            for met in _classes(annotation, owner):
                if met in public:
                    continue
                found.setdefault(met, []).append(place)
                if met.__name__ not in INNER:
                    waiting.append((met.__name__, met))
    return dict(sorted(found.items(), key=lambda item: item[0].__name__))


@functools.cache
def givers() -> dict[type, list[str]]:
    """Public class → the public functions, methods and attributes that give it."""
    public, found = public_classes(), {}
    for module, names in public_modules().items():
        for name in names:
            for place, owner, annotation in _given(f"{module}.{name}", getattr(importlib.import_module(module), name)):
                for met in _classes(annotation, owner):
                    if met in public and not place.startswith((f"{module}.{met.__name__}.", "equipoise.types.")):
                        found.setdefault(met, []).append(place.removesuffix("()"))
    return found


def _given(where: str, value: object) -> Iterator[tuple[str, object, object]]:
    """(place, owner, annotation) of what a function returns, or of a class's attributes, properties and methods."""
    if not inspect.isclass(value):
        yield f"{where}()", value, getattr(value, "__annotations__", {}).get("return")
        return
    if dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            if not field.name.startswith("_"):
                owner = next(base for base in value.__mro__ if field.name in getattr(base, "__annotations__", {}))
                yield f"{where}.{field.name}", owner, field.type
    for name in public_methods(value):
        member = inspect.getattr_static(value, name)
        function = getattr(member, "fget", None) or getattr(member, "func", None) or getattr(member, "__func__", member)
        yield f"{where}.{name}", function, function.__annotations__.get("return")


def _classes(annotation: object, owner: object) -> Iterator[type]:
    """The classes of this library that an annotation names, in the module of its owner."""
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation) if annotation else ""
    for name in re.findall(r"[A-Za-z_][\w.]*", text):
        met = _resolved(name.rpartition(".")[2], owner.__module__)
        if inspect.isclass(met) and met.__module__.startswith("equipoise") and not met.__name__.startswith("_"):
            yield met


@functools.cache
def _resolved(name: str, module: str) -> object:
    """What a name stands for in a module, also if it is imported there for type checking only."""
    known = getattr(sys.modules[module], name, None)
    return known if known is not None else _for_type_checking(module).get(name, lambda: None)()


@functools.cache
def _for_type_checking(module: str) -> dict:
    """Name → a function that imports it, for the imports inside `if TYPE_CHECKING`."""
    found = {}
    for node in ast.walk(ast.parse(inspect.getsource(sys.modules[module]))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("equipoise"):
            for each in node.names:
                found[each.asname or each.name] = functools.partial(_imported, node.module, each.name)
    return found


def _imported(module: str, name: str) -> object:
    return getattr(importlib.import_module(module), name, None)
