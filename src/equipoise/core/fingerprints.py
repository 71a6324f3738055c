"""Fingerprints of what a user's code computes: of functions by their code and constants, of models by their structure.

Two functions have one fingerprint if they have the same instructions, constants, default values, and values from outside
(closures, global numbers, tensors and further functions of the user's own). Functions and classes of installed libraries stand
by their names. Where a function lies in memory, in which file and line, and what its comments say make no difference. An
object is all that it holds: attributes, slots, and what is in it. A `strict` fingerprint has what code notes for itself outside
of it, too, and what has no description differs from one process to the next.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import logging
import re
import secrets
import sys
import types
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

_LIBRARIES = {"equipoise", "torch", "numpy"} | sys.stdlib_module_names
NO_PART_OF_FINGERPRINT = {"fingerprint": False}  # metadata of a field that changes no computation
_STORES = frozenset(("STORE_GLOBAL", "STORE_DEREF", "DELETE_GLOBAL"))  # a name that code writes to is a note, no constant
_SLOT = types.MemberDescriptorType
_ONCE = secrets.token_hex(8)  # of this process
_ELSEWHERE = {"_parameters", "_buffers", "_modules", "training"}  # of a layer: described by itself, or no part of what it is


def fingerprint(value: object, *, trained: Iterable[Tensor] = (), strict: bool = False) -> str:
    """Twelve hexadecimal digits that stand for a function, a part, a tensor or a plain value.

    Tensors that are `trained` count as equal, wherever they are held.
    """
    return hashlib.sha256(repr(_Description({id(each) for each in trained}, strict).of(value)).encode()).hexdigest()[:12]


def tensors_fingerprint(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """Twelve hexadecimal digits that stand for the names, types, shapes and values of tensors, in any order."""
    return fingerprint(dict(tensors))


def without_addresses(text: str) -> str:
    """A text without the places in memory that plain objects show."""
    return re.sub(r" at 0x[0-9a-f]+", "", text)


class _Description:
    """Describes values by nested tuples of text."""

    def __init__(self, trained: set[int], strict: bool) -> None:
        self._trained, self._strict = trained, strict
        self._known: dict[int, tuple[object, Any]] = {}  # by id: the object, kept alive so that its id stays its own

    def of(self, value: Any) -> Any:
        """A description that is equal for values that compute the same."""
        if value is None or isinstance(value, bool | int | float | complex | str | bytes):
            return type(value).__name__, repr(value)
        if id(value) in self._trained:
            return "trained"
        if isinstance(value, Tensor | np.ndarray | np.generic):
            return _array(value)
        if id(value) not in self._known:
            self._known[id(value)] = value, ("being described",)  # what refers to itself
            self._known[id(value)] = value, self._of_object(value)
        return self._known[id(value)][1]

    def _of_object(self, value: Any) -> Any:
        if isinstance(value, types.ModuleType):
            return "module", value.__name__
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
        if isinstance(value, types.BuiltinFunctionType):
            return "function", value.__qualname__, self.of(value.__self__)
        if isinstance(value, weakref.ref):
            return "reference", self.of(value())
        if isinstance(value, logging.Logger):
            return "logger", value.name
        if isinstance(value, nn.Module):
            tensors = [(name, self.of(each)) for name, each in (*value.named_parameters(), *value.named_buffers())]
            layers = [(name, self._instance(layer)) for name, layer in value.named_modules()]
            return "nn.Module", without_addresses(repr(value)), tensors, layers
        inside: Any = None
        if isinstance(value, Mapping):
            inside = sorted((repr(self.of(key)), self.of(inner)) for key, inner in value.items())
        elif isinstance(value, set | frozenset):
            inside = sorted(repr(self.of(inner)) for inner in value)
        elif isinstance(value, Sequence):
            inside = [self.of(inner) for inner in value]
        if inside is not None and _is_of_library(type(value).__module__):
            return type(value).__name__, inside
        return inside, self._instance(value)

    def _instance(self, value: Any) -> Any:
        """An object by its class and all that it holds; one of the system, such as a lock or a file, by its class alone."""
        kind, known = type(value), dict[str, bool]()
        own = (parent for parent in kind.__mro__ if not _is_of_library(parent.__module__))
        held = {name for parent in own for name, each in vars(parent).items() if isinstance(each, _SLOT)}
        if not held and not hasattr(value, "__dict__"):
            text = without_addresses(repr(value))
            return "object", self._class(kind), text, _ONCE if self._strict and text != repr(value) else ""
        held |= set(getattr(value, "__dict__", ()))
        if dataclasses.is_dataclass(value):
            known = {each.name: each.metadata.get("fingerprint", True) for each in dataclasses.fields(value)}
            held = held & set(known) if _is_of_library(kind.__module__) else held
        if isinstance(value, nn.Module):
            held -= _ELSEWHERE | {name for name in held if name.endswith("_hooks") and not getattr(value, name)}
        cached = {name for name in held if isinstance(getattr(kind, name, None), functools.cached_property)}
        kept = {name: getattr(value, name, None) for name in held - cached if known.get(name, True)}
        # Hooks are counted over all models of a process.
        kept |= {name: list(each.values()) for name, each in kept.items() if name.endswith("_hooks") and isinstance(each, dict)}
        return "object", self._class(kind), sorted((name, self.of(inner)) for name, inner in kept.items())

    def _function(self, function: types.FunctionType) -> Any:
        if _is_of_library(function.__module__):
            return "function", _library_name(function)
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=False)
        stored = set() if self._strict else _stored_names(function.__code__)
        around = [(name, self.of(_content(cell))) for name, cell in cells if name not in stored]
        known = function.__globals__
        outside = [(n, self.of(known[n])) for n in sorted(_names(function.__code__)) if n in known and n not in stored]
        given = self.of(function.__defaults__), self.of(function.__kwdefaults__)
        noted = self.of(vars(function)) if self._strict else None
        return "function", self._code(function.__code__, function.__doc__), given, around, outside, noted

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
            if isinstance(_unwrapped(value), types.FunctionType)
            or not (name.startswith("__") or name == "_abc_impl" or isinstance(value, _SLOT))
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
    """The full name of a function or class of a library."""
    return f"{value.__module__}.{value.__qualname__}"


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
    if isinstance(value, functools.cached_property):
        return value.func
    inner: Callable[..., Any] | Any = value.fget if isinstance(value, property) else value
    return inner
