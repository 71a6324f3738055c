"""Parts of an algorithm as they travel to the nodes: a name of the catalogue and JSON parameters, never code.

A part that is not in the catalogue travels by the import path of its class, "package.module:Class", and the values of its
fields. A node makes it only if the package is installed there and the node's owner allows it (`client_app(allow=[…])`); nothing
but a dataclass is made, by its constructor, which refuses bad values.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping
from functools import lru_cache
from importlib import import_module
from operator import attrgetter
from typing import Any

from torch import Tensor

from equipoise.errors import ConfigError, EquipoiseError, InvalidParameter, is_integer
from equipoise.experiment.part_config import PartConfig, check_part, describe_part

OURS = ("equipoise.risk", "equipoise.solvers", "equipoise.aggregators", "equipoise.personal", "equipoise.privacy")
KINDS = ("risk", "solver", "aggregator", "personal")  # what nodes need; data, models and files are their own affair
_PLAIN = (bool, int, float, str, type(None))
_DEEPEST = 8  # parts inside parts


class PartNotSent(EquipoiseError):
    """A part that cannot travel to the nodes, or that a node does not make."""


def pack_part(kind: str, part: Any, tensors: dict[str, Tensor]) -> Any:
    """A part as JSON; tensors that it holds go to `tensors`, under names that the JSON repeats."""
    if part is None:
        return None
    try:
        return {"kind": kind, "table": describe_part(kind, part)}
    except (ConfigError, AttributeError):  # not in the catalogue, or it holds what a configuration cannot
        return _pack_value(part, tensors, _DEEPEST)


def unpack_part(packed_part: Any, tensors: Mapping[str, Tensor], allow: Iterable[str] = ()) -> Any:
    """The part that `pack_part` made JSON of. `allow` names packages, besides our own, whose classes may be made."""
    if packed_part is None:
        return None
    if not isinstance(packed_part, Mapping):
        raise PartNotSent("A part is no table.")
    if "table" in packed_part:
        kind = packed_part.get("kind")
        if not isinstance(kind, str) or kind not in KINDS:
            raise PartNotSent(f"A {kind!r} is not a part that can be sent.")
        return _make_by_name(kind, json.dumps(packed_part["table"], sort_keys=True))
    return _unpack_value(packed_part, tensors, tuple(allow), _DEEPEST)


@lru_cache(maxsize=64)
def _make_by_name(kind: str, table: str) -> Any:
    """A part of the catalogue; parts are frozen, so that one serves all requests that ask for it."""
    config: PartConfig = check_part(kind, json.loads(table), kind)
    return config.make(kind)


def _pack_value(value: Any, tensors: dict[str, Tensor], depth: int) -> Any:
    """A value as JSON: plain ones as they are, tensors and floats that JSON lacks by a mark, dataclasses by their path."""
    if depth == 0:
        raise PartNotSent(f"{type(value).__name__} holds parts inside parts too deeply.")
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(value)}
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, Tensor):
        name = f"part.{len(tensors)}"
        tensors[name] = value
        return {"tensor": name, "shape": list(value.shape), "dtype": str(value.dtype).removeprefix("torch.")}
    if isinstance(value, list | tuple):
        return {"list": [_pack_value(inner, tensors, depth - 1) for inner in value], "tuple": isinstance(value, tuple)}
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {"dict": {key: _pack_value(inner, tensors, depth - 1) for key, inner in value.items()}}
    if dataclasses.is_dataclass(value) and not isinstance(value, type) and "<" not in type(value).__qualname__:
        fields = {
            f.name: _pack_value(getattr(value, f.name), tensors, depth - 1) for f in dataclasses.fields(value) if f.init
        }  # fmt: skip
        return {"class": f"{type(value).__module__}:{type(value).__qualname__}", "fields": fields}
    raise PartNotSent(
        f"{type(value).__name__} cannot travel to the nodes: a part of your own must be a dataclass of a module that is "
        "installed there, with fields of numbers, text, lists, tensors or such dataclasses."
    )


def _unpack_value(value: Any, tensors: Mapping[str, Tensor], allow: tuple[str, ...], depth: int) -> Any:
    if depth == 0:
        raise PartNotSent("Parts inside parts too deeply.")
    if isinstance(value, _PLAIN):
        return value
    if not isinstance(value, Mapping):
        raise PartNotSent("A value of a part is neither plain nor marked.")
    if "float" in value:
        return float(value["float"])
    if "tensor" in value:
        if value["tensor"] not in tensors:
            raise PartNotSent("A part lacks its tensor.")
        return tensors[value["tensor"]]
    if "list" in value:
        inner = [_unpack_value(each, tensors, allow, depth - 1) for each in value["list"]]
        return tuple(inner) if value.get("tuple") else inner
    if "dict" in value:
        return {key: _unpack_value(each, tensors, allow, depth - 1) for key, each in value["dict"].items()}
    kind = find_allowed_class(str(value.get("class")), allow)
    fields = value.get("fields")
    names = {f.name for f in dataclasses.fields(kind) if f.init}
    if not isinstance(fields, Mapping) or not set(fields) <= names:
        raise PartNotSent(f"{value.get('class')} has other fields here than where the algorithm was made.")
    return kind(**{name: _unpack_value(each, tensors, allow, depth - 1) for name, each in fields.items()})


def find_allowed_class(path: str, allow: Iterable[str]) -> Any:
    """The dataclass at "package.module:Class", if this node may make it.

    Both the module that is named and the module that the class comes from must be allowed: an allowed module has attributes
    that lead elsewhere, such as the packages that it imports.
    """
    module, _, name = path.partition(":")
    allow = (*OURS, *allow)

    def refuse_unless_allowed(home: str) -> None:
        if not any(home == package or home.startswith(f"{package}.") for package in allow):
            raise PartNotSent(f"{path} is not allowed on this node. Its owner can allow it: client_app(allow=[{home!r}], …).")

    refuse_unless_allowed(module)
    try:
        named: Any = attrgetter(name)(import_module(module))
    except ImportError as failure:
        raise PartNotSent(f"{path} is not installed on this node.") from failure
    except AttributeError:
        named = None
    if not (isinstance(named, type) and dataclasses.is_dataclass(named)):
        raise PartNotSent(f"{path} is no dataclass on this node.")
    refuse_unless_allowed(named.__module__)
    return named


def list_part_tensors(packed_part: Any) -> dict[str, tuple[str, tuple[int, ...]]]:
    """The tensors that a packed part says it holds: name → type and shape, for whoever reads them from a message."""
    if isinstance(packed_part, list):
        return {name: what for inner in packed_part for name, what in list_part_tensors(inner).items()}
    if not isinstance(packed_part, Mapping):
        return {}
    if "tensor" in packed_part:
        shape = packed_part.get("shape")
        if not isinstance(shape, list) or not all(is_integer(n) and n >= 0 for n in shape):
            raise InvalidParameter("part", "must give its tensors a shape", shape)
        return {str(packed_part["tensor"]): (str(packed_part.get("dtype")), tuple(shape))}
    return {name: what for inner in packed_part.values() for name, what in list_part_tensors(inner).items()}
