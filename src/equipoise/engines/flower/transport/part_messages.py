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
from typing import Any

from torch import Tensor

from equipoise.errors import ConfigError, EquipoiseError, InvalidParameter
from equipoise.experiment.config import PartConfig, check_part, described
from equipoise.risk import Mixture

OURS = ("equipoise.risk", "equipoise.solvers", "equipoise.aggregators", "equipoise.personal", "equipoise.privacy")
KINDS = ("risk", "solver", "aggregator", "personal")  # what nodes need; data, models and files are their own affair
_PLAIN = (bool, int, float, str, type(None))
_DEEPEST = 8  # parts inside parts


class NotSent(EquipoiseError):
    """A part that cannot travel to the nodes, or that a node does not make."""


def packed(kind: str, made: Any, tensors: dict[str, Tensor]) -> Any:
    """A part as JSON; tensors that it holds go to `tensors`, under names that the JSON repeats."""
    if made is None:
        return None
    try:
        return {"kind": kind, "table": table_of(kind, made)}
    except (ConfigError, AttributeError):  # not in the catalogue, or it holds what a configuration cannot
        return _by_path(made, tensors, _DEEPEST)


def table_of(kind: str, made: Any) -> dict[str, Any]:
    """A part of the catalogue as a configuration writes it; ConfigError for others."""
    if isinstance(made, Mixture):
        return {"name": "mixture", "terms": [{"coefficient": c, **table_of(kind, inner)} for c, inner in made.terms]}
    return described(kind, made).table()


def unpacked(packed_part: Any, tensors: Mapping[str, Tensor], allow: Iterable[str] = ()) -> Any:
    """The part that `packed` made JSON of. `allow` names packages, besides our own, whose classes may be made."""
    if packed_part is None:
        return None
    if not isinstance(packed_part, Mapping):
        raise NotSent("A part is no table.")
    if "table" in packed_part:
        return _by_name(packed_part)
    return _made(packed_part, tensors, tuple(allow), _DEEPEST)


def _by_name(packed_part: Mapping[str, Any]) -> Any:
    kind = packed_part.get("kind")
    if not isinstance(kind, str) or kind not in KINDS:
        raise NotSent(f"Parts of the kind {kind!r} do not travel.")
    return _from_table(kind, json.dumps(packed_part["table"], sort_keys=True))


@lru_cache(maxsize=64)
def _from_table(kind: str, table: str) -> Any:
    """A part of the catalogue; parts are frozen, so that one serves all requests that ask for it."""
    config: PartConfig = check_part(kind, json.loads(table), kind)
    return config.make(kind)


def _by_path(value: Any, tensors: dict[str, Tensor], depth: int) -> Any:
    """A value as JSON: plain ones as they are, tensors and floats that JSON lacks by a mark, dataclasses by their path."""
    if depth == 0:
        raise NotSent(f"{type(value).__name__} holds parts inside parts too deeply.")
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(value)}
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, Tensor):
        name = f"part.{len(tensors)}"
        tensors[name] = value
        return {"tensor": name, "shape": list(value.shape), "dtype": str(value.dtype).removeprefix("torch.")}
    if isinstance(value, list | tuple):
        return {"list": [_by_path(inner, tensors, depth - 1) for inner in value], "tuple": isinstance(value, tuple)}
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {"dict": {key: _by_path(inner, tensors, depth - 1) for key, inner in value.items()}}
    if dataclasses.is_dataclass(value) and not isinstance(value, type) and "<" not in type(value).__qualname__:
        fields = {
            f.name: _by_path(getattr(value, f.name), tensors, depth - 1) for f in dataclasses.fields(value) if f.init
        }  # fmt: skip
        return {"class": f"{type(value).__module__}:{type(value).__qualname__}", "fields": fields}
    raise NotSent(
        f"{type(value).__name__} cannot travel to the nodes: a part of your own must be a dataclass of a module that is "
        "installed there, with fields of numbers, text, lists, tensors or such dataclasses."
    )


def _made(value: Any, tensors: Mapping[str, Tensor], allow: tuple[str, ...], depth: int) -> Any:
    if depth == 0:
        raise NotSent("Parts inside parts too deeply.")
    if isinstance(value, _PLAIN):
        return value
    if not isinstance(value, Mapping):
        raise NotSent("A value of a part is neither plain nor marked.")
    if "float" in value:
        return float(value["float"])
    if "tensor" in value:
        found = tensors.get(value["tensor"])
        if found is None:
            raise NotSent("A part lacks its tensor.")
        return found
    if "list" in value:
        inner = [_made(each, tensors, allow, depth - 1) for each in value["list"]]
        return tuple(inner) if value.get("tuple") else inner
    if "dict" in value:
        return {key: _made(each, tensors, allow, depth - 1) for key, each in value["dict"].items()}
    kind = allowed_class(str(value.get("class")), allow)
    fields = value.get("fields")
    names = {f.name for f in dataclasses.fields(kind) if f.init}
    if not isinstance(fields, Mapping) or not set(fields) <= names:
        raise NotSent(f"{value.get('class')} has other fields here than where the algorithm was made.")
    return kind(**{name: _made(each, tensors, allow, depth - 1) for name, each in fields.items()})


def allowed_class(path: str, allow: Iterable[str]) -> Any:
    """The dataclass at "package.module:Class", if this node may make it."""
    module, _, name = path.partition(":")
    allow = (*OURS, *allow)
    if not any(module == package or module.startswith(f"{package}.") for package in allow):
        raise NotSent(f"{path} is not allowed on this node. Its owner can allow it: client_app(allow=[{module!r}], …).")
    try:
        found: Any = import_module(module)
    except ImportError as failure:
        raise NotSent(f"{path} is not installed on this node.") from failure
    for step in name.split("."):
        found = getattr(found, step, None)
    if not (isinstance(found, type) and dataclasses.is_dataclass(found)):
        raise NotSent(f"{path} is no dataclass on this node.")
    return found


def tensors_of(packed_part: Any) -> dict[str, tuple[str, tuple[int, ...]]]:
    """The tensors that a packed part says it holds: name → type and shape, for whoever reads them from a message."""
    if isinstance(packed_part, list):
        return {name: what for inner in packed_part for name, what in tensors_of(inner).items()}
    if not isinstance(packed_part, Mapping):
        return {}
    if "tensor" in packed_part:
        shape = packed_part.get("shape")
        if not isinstance(shape, list) or not all(type(n) is int and n >= 0 for n in shape):
            raise InvalidParameter("part", "must give its tensors a shape", shape)
        return {str(packed_part["tensor"]): (str(packed_part.get("dtype")), tuple(shape))}
    return {name: what for inner in packed_part.values() for name, what in tensors_of(inner).items()}
