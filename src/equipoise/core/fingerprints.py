"""Fingerprints of what a user's code computes: of functions by their code and constants, of models by their structure.

Two functions have one fingerprint if they have the same instructions, constants, default values, and values from outside
(closures, global numbers, tensors and further functions of the user's own). Functions and classes of installed libraries stand
by their names. Where a function lies in memory, in which file and line, and what its comments say make no difference.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import re
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

_LIBRARIES = {"equipoise", "torch", "numpy"} | sys.stdlib_module_names
_FORMER_MODULES = {  # of modules that were part of another one: checkpoints of before name their classes and functions by it
    "equipoise.client_table": "equipoise.result",
    "equipoise.core.per_example_losses": "equipoise.core.task",
    "equipoise.core.task_trial": "equipoise.core.task",
    "equipoise.engines.simulator.simulator_options": "equipoise.engines.simulator.engine",
    "equipoise.experiment.config_tables": "equipoise.experiment.config",
    "equipoise.experiment.part_config": "equipoise.experiment.config",
    "equipoise.experiment.train_options": "equipoise.experiment.config",
    "equipoise.personal_models": "equipoise.result",
    "equipoise.round_report": "equipoise.round",
    "equipoise.run_record": "equipoise.result",
    "equipoise.run_summary": "equipoise.result",
    "equipoise.types.attack_contracts": "equipoise.types",
    "equipoise.types.engine_contracts": "equipoise.types",
    "equipoise.types.metric_contracts": "equipoise.types",
    "equipoise.types.observer_contracts": "equipoise.types",
    "equipoise.types.personal_contracts": "equipoise.types",
    "equipoise.types.privacy_contracts": "equipoise.types",
    "equipoise.types.risk_contracts": "equipoise.types",
    "equipoise.types.round_values": "equipoise.types",
    "equipoise.types.sampler_contracts": "equipoise.types",
    "equipoise.types.server_contracts": "equipoise.types",
    "equipoise.types.solver_contracts": "equipoise.types",
}
NO_PART_OF_FINGERPRINT = {"fingerprint": False}  # metadata of a field that changes no computation
_STORES = frozenset(("STORE_GLOBAL", "STORE_DEREF", "DELETE_GLOBAL"))  # a name that code writes to is a note, no constant


def fingerprint(value: object) -> str:
    """Twelve hexadecimal digits that stand for a function, a part, a tensor or a plain value."""
    return hashlib.sha256(repr(_Description().of(value)).encode()).hexdigest()[:12]


def tensors_fingerprint(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """Twelve hexadecimal digits that stand for the names, types, shapes and values of tensors, in any order."""
    return fingerprint(dict(tensors))


def module_structure(module: nn.Module) -> str:
    """A module as it shows itself, with the plain attributes of every layer: all but its tensors."""
    shown = without_addresses(repr(module))
    plain = {
        f"{name}.{key}".lstrip("."): value
        for name, layer in module.named_modules()
        for key, value in vars(layer).items()
        if not key.startswith("_") and key != "training" and type(value) in (bool, int, float, str, tuple)
    }
    return f"{shown} {without_addresses(repr(plain))}"


def module_code(module: nn.Module) -> str:
    """The fingerprint of the classes of a module's layers, as far as they are the user's own, with hooks and functions."""
    described, kinds = _Description(), {type(layer): None for layer in module.modules()}
    functions = [
        (name, key, described.of(value))
        for name, layer in module.named_modules()
        for key, value in vars(layer).items()
        if not key.startswith("_") and isinstance(value, types.FunctionType | functools.partial)
    ]
    return fingerprint([sorted(repr(described.of(kind)) for kind in kinds), functions])


def own_code(value: object) -> str:
    """The fingerprint of the user's own functions and objects inside a part; empty where all is of a library."""
    found = [fingerprint(each) for each in _own_parts(value)]
    return " ".join(found)


def _own_parts(value: Any) -> Iterator[object]:
    """The functions and the objects of classes that are the user's own, in a part or in what it holds."""
    if isinstance(value, types.FunctionType | types.MethodType | functools.partial):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for inner in value.values() if isinstance(value, Mapping) else value:
            yield from _own_parts(inner)
    elif isinstance(value, type) or not dataclasses.is_dataclass(value) or not _is_of_library(type(value).__module__):
        if not _is_of_library(type(value).__module__):
            yield value
    else:
        for field in dataclasses.fields(value):
            yield from _own_parts(getattr(value, field.name))


def without_addresses(text: str) -> str:
    """A text without the places in memory that plain objects show."""
    return re.sub(r" at 0x[0-9a-f]+", "", text)


class _Description:
    """Describes values by nested tuples of text."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[object, Any]] = {}  # by id: the object, kept alive so that its id stays its own

    def of(self, value: Any) -> Any:
        """A description that is equal for values that compute the same."""
        if value is None or isinstance(value, bool | int | float | complex | str | bytes):
            return type(value).__name__, repr(value)
        if isinstance(value, Tensor | np.ndarray | np.generic):
            return _array(value)
        if id(value) not in self._known:
            self._known[id(value)] = value, ("being described",)  # what refers to itself
            self._known[id(value)] = value, self._of_object(value)
        return self._known[id(value)][1]

    def _of_object(self, value: Any) -> Any:
        if isinstance(value, types.ModuleType):
            return "module", value.__name__
        if isinstance(value, Mapping):
            return "mapping", sorted((repr(self.of(key)), self.of(inner)) for key, inner in value.items())
        if isinstance(value, set | frozenset):
            return "set", sorted(repr(self.of(inner)) for inner in value)
        if isinstance(value, list | tuple):
            return type(value).__name__, [self.of(inner) for inner in value]
        if isinstance(value, functools.partial):
            return "partial", self.of(value.func), self.of(value.args), self.of(value.keywords)
        if isinstance(value, types.MethodType):
            return "method", self.of(value.__func__), self.of(value.__self__)
        if isinstance(value, types.FunctionType):
            return self._function(value)
        if isinstance(value, types.CodeType):
            return self._code(value, None)
        if isinstance(value, type):
            return "class", self._class(value)
        if isinstance(value, nn.Module):
            fixed = [(name, _array(part)) for name, part in value.named_parameters() if not part.requires_grad]
            fixed += [(name, _array(part)) for name, part in value.named_buffers()]
            return "nn.Module", module_structure(value), fixed, module_code(value)
        return self._instance(value)

    def _instance(self, value: Any) -> Any:
        """An object by its class and its attributes; one of the system, such as a lock or a file, by its class alone."""
        if dataclasses.is_dataclass(value):
            known = (field for field in dataclasses.fields(value) if field.metadata.get("fingerprint", True))
            held = {field.name: getattr(value, field.name) for field in known}
        else:
            try:
                held = vars(value)
            except TypeError:  # nothing but what its class says
                return "object", self._class(type(value)), without_addresses(repr(value))
        return "object", self._class(type(value)), sorted((name, self.of(inner)) for name, inner in held.items())

    def _function(self, function: types.FunctionType) -> Any:
        if _is_of_library(function.__module__):
            return "function", _library_name(function)
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=False)
        stored = _stored_names(function.__code__)
        around = [(name, self.of(_content(cell))) for name, cell in cells if name not in stored]
        known = function.__globals__
        outside = [(n, self.of(known[n])) for n in sorted(_names(function.__code__)) if n in known and n not in stored]
        given = self.of(function.__defaults__), self.of(function.__kwdefaults__)
        return "function", self._code(function.__code__, function.__doc__), given, around, outside

    def _code(self, code: types.CodeType, doc: str | None) -> Any:
        constants = [self.of(constant) for constant in code.co_consts if doc is None or constant != doc]
        return "code", code.co_code.hex(), code.co_names, code.co_argcount, code.co_kwonlyargcount, constants

    def _class(self, kind: type) -> Any:
        """A class by its name, and by its own methods and constants as far as it is the user's."""
        own = [
            (name, self.of(_unwrapped(value)))
            for parent in kind.__mro__
            if not _is_of_library(parent.__module__)
            for name, value in sorted(vars(parent).items())
            if isinstance(_unwrapped(value), types.FunctionType | bool | int | float | str | tuple | Tensor)
            and name not in ("__module__", "__doc__", "__qualname__", "__firstlineno__", "__static_attributes__")
        ]
        return _library_name(kind) if _is_of_library(kind.__module__) else kind.__qualname__, own


def _array(value: Any) -> tuple[str, str, tuple[int, ...], str]:
    tensor = value.detach().cpu().contiguous() if isinstance(value, Tensor) else None
    if tensor is not None and tensor.layout == torch.strided:
        content: Any = tensor.reshape(-1).view(torch.uint8).numpy() if tensor.numel() else b""
        return "array", str(tensor.dtype), tuple(tensor.shape), hashlib.sha256(content).hexdigest()
    array = np.ascontiguousarray(value if tensor is None else tensor.to_dense().numpy())
    return "array", str(array.dtype), array.shape, hashlib.sha256(array.tobytes()).hexdigest()


def _is_of_library(module: str | None) -> bool:
    """Whether a module belongs to Python or to an installed library, so that its functions stand by their names."""
    top = (module or "").partition(".")[0]
    file = vars(sys.modules[top]).get("__file__") if top in sys.modules else None
    return top in _LIBRARIES or "site-packages" in (file or "")


def _library_name(value: type | types.FunctionType) -> str:
    """The full name of a function or class of a library; one of ours that has moved keeps the module that it was in before."""
    return f"{_FORMER_MODULES.get(value.__module__, value.__module__)}.{value.__qualname__}"


def _names(code: types.CodeType) -> set[str]:
    """All names that code, or a function inside it, looks up."""
    return set(code.co_names).union(*(_names(inner) for inner in code.co_consts if isinstance(inner, types.CodeType)))


def _stored_names(code: types.CodeType) -> set[str]:
    """The names outside that code, or a function inside it, writes to."""
    import dis

    stored = {str(step.argval) for step in dis.get_instructions(code) if step.opname in _STORES}
    return stored.union(*(_stored_names(inner) for inner in code.co_consts if isinstance(inner, types.CodeType)))


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return None


def _unwrapped(value: Any) -> Any:
    """The function of a method, a class method, a static method or a property."""
    if isinstance(value, classmethod | staticmethod):
        return value.__func__
    inner: Callable[..., Any] | Any = value.fget if isinstance(value, property) else value
    return inner
