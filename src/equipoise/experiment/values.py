"""Values in configurations: the types that TOML can hold, checks of values against types, and both as text."""

from __future__ import annotations

import types
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, Literal, Union, get_args, get_origin

from equipoise.errors import ConfigError

NONE = "none"  # stands for None, because TOML has no null
_PLAIN = (bool, int, float, str)
_SHORT = {bool: "bool", int: "int", float: "float", str: "str", type(None): NONE}
_LONG = {bool: "true or false", int: "a whole number", float: "a number", str: "text", type(None): f'"{NONE}"'}


def in_toml(annotation: Any) -> Any:
    """The type without what TOML cannot hold (tensors, functions, other objects); None if nothing is left."""
    if annotation in _PLAIN or get_origin(annotation) is Literal:
        return annotation
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin in (Union, types.UnionType):
        choices = [t for t in map(in_toml, (a for a in arguments if a is not type(None))) if t is not None]
        if choices and type(None) in arguments:
            choices.append(type(None))
        return Union[tuple(choices)] if choices else None  # noqa: UP007 — made at run time from a list
    if origin in (dict, Mapping) and arguments[0] is str and (inner := in_toml(arguments[1])) is not None:
        return types.GenericAlias(Mapping, (str, inner))
    listed = origin in (list, Sequence) or (origin is tuple and arguments[1:] == (Ellipsis,))
    if listed and (inner := in_toml(arguments[0])) is not None:
        return types.GenericAlias(Sequence, (inner,))
    if origin is tuple and (inner := in_toml(Union[arguments])) is not None:  # a pair: a list of either type  # noqa: UP007
        return types.GenericAlias(Sequence, (inner,))
    return None


def is_plain(value: Any) -> bool:
    """Whether TOML can hold a value, with "none" for None and lists for tuples."""
    if isinstance(value, Mapping):
        return all(isinstance(key, str) and is_plain(inner) for key, inner in value.items())
    return all(map(is_plain, value)) if isinstance(value, list | tuple) else value is None or isinstance(value, _PLAIN)


def type_text(annotation: Any, *, long: bool = False) -> str:
    """A type as text, short for a list of parameters, or long for a sentence.

    >>> type_text(float), type_text(int | None), type_text(Literal["kl", "huber"] | None)
    ('float', 'int or none', '"kl" or "huber" or none')
    >>> type_text(int | None, long=True)
    'a whole number or "none"'
    """
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin in (Union, types.UnionType):
        return " or ".join(type_text(a, long=long) for a in arguments)
    if origin is Literal:
        return " or ".join(map(value_text, arguments))
    if origin is Sequence:
        return f"{'a list, each ' if long else 'list of '}{type_text(arguments[0], long=long)}"
    if origin is Mapping:
        return f"{'a table, each value ' if long else 'table of '}{type_text(arguments[1], long=long)}"
    if annotation is Any:
        return "any value"
    return (_LONG if long else _SHORT).get(annotation, str(annotation))


def value_text(value: Any) -> str:
    """A value as TOML writes it; other objects by their repr."""
    if value is None:
        return NONE
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, float):
        text = f"{value:.6g}"
        return f"{text}.0" if text.lstrip("-").isdigit() else text
    return repr(value)


def check_value(value: Any, annotation: Any, key: str) -> Any:
    """The value in the type of the annotation: 1 for a float is 1.0, "none" is None; a value of another type is refused."""
    from pydantic import ValidationError

    if isinstance(value, str) and value == NONE and type(None) in get_args(annotation):
        return None
    try:
        return _adapter(annotation).validate_python(_with_none(value, annotation))
    except ValidationError as failure:
        raise ConfigError(f"{key} must be {type_text(annotation, long=True)}, but is {toml_text(value)}.") from failure


def _with_none(value: Any, annotation: Any) -> Any:
    """A list, and the lists in it, with None for "none" where the type of the elements has None."""
    if not isinstance(value, list) or get_origin(annotation) is not Sequence:
        return value
    (inner,) = get_args(annotation)
    optional = type(None) in get_args(inner)
    return [None if optional and isinstance(each, str) and each == NONE else _with_none(each, inner) for each in value]


@cache
def _adapter(annotation: Any) -> Any:
    """The pydantic adapter that validates values of a type."""
    from pydantic import ConfigDict, TypeAdapter

    # Strict: text is no number, true is not 1, 2.0 is no integer; an integer is still a float.
    return TypeAdapter(annotation, config=ConfigDict(strict=True))


def toml_text(value: Any) -> str:
    """A value that was read from TOML as text for an error."""
    if isinstance(value, Mapping):
        return "a table with " + ", ".join(map(str, value)) if value else "an empty table"
    if isinstance(value, list):
        return "[" + ", ".join(map(toml_text, value)) + "]"
    return value_text(value)
