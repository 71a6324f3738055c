"""Values in configurations: which types TOML can hold, how values are checked against them, and how both are shown."""

from __future__ import annotations

import types
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, Literal, Union, get_args, get_origin

from equipoise.errors import ConfigError

NONE = "none"  # TOML has no null: this word says it where a parameter may be None
_PLAIN = (bool, int, float, str)
_SHORT = {bool: "bool", int: "int", float: "float", str: "str", type(None): NONE}
_LONG = {bool: "true or false", int: "a whole number", float: "a number", str: "text", type(None): f'"{NONE}"'}


def in_toml(annotation: Any) -> Any:
    """The part of a type that a configuration can hold; None if there is nothing (a tensor, a function, another object)."""
    if annotation in _PLAIN or get_origin(annotation) is Literal:
        return annotation
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin in (Union, types.UnionType):
        kept = [t for t in map(in_toml, (a for a in arguments if a is not type(None))) if t is not None]
        if kept and type(None) in arguments:
            kept.append(type(None))
        return Union[tuple(kept)] if kept else None  # noqa: UP007 — made at run time from a list
    if origin in (dict, Mapping) and arguments[0] is str and (inner := in_toml(arguments[1])) is not None:
        return types.GenericAlias(Mapping, (str, inner))
    if origin in (list, Sequence) and (inner := in_toml(arguments[0])) is not None:
        return types.GenericAlias(Sequence, (inner,))
    if origin is tuple and len(arguments) == 2 and arguments[1] is Ellipsis and (inner := in_toml(arguments[0])) is not None:
        return types.GenericAlias(Sequence, (inner,))
    return None


def type_text(annotation: Any, *, long: bool = False) -> str:
    """A type in words, short for a list of parameters or long for a sentence.

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
    return (_LONG if long else _SHORT).get(annotation, str(annotation))


def value_text(value: Any) -> str:
    """A value as a configuration would write it; objects as Python shows them."""
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
    """The value as the type asks for it: 1 for a float is 1.0, "none" is None; anything else than its type is refused."""
    from pydantic import ValidationError

    if isinstance(value, str) and value == NONE and type(None) in get_args(annotation):
        return None
    try:
        return _adapter(annotation).validate_python(value)
    except ValidationError as failure:
        raise ConfigError(f"{key} must be {type_text(annotation, long=True)}, but is {toml_text(value)}.") from failure


@cache
def _adapter(annotation: Any) -> Any:
    from pydantic import ConfigDict, TypeAdapter

    # Strict: text is no number, true is not 1, 2.0 is no whole number; a whole number is still a float.
    return TypeAdapter(annotation, config=ConfigDict(strict=True))


def toml_text(value: Any) -> str:
    """A value that came from TOML as one would write it there."""
    if isinstance(value, Mapping):
        return "a table with " + ", ".join(map(str, value)) if value else "an empty table"
    if isinstance(value, list):
        return "[" + ", ".join(map(toml_text, value)) + "]"
    return value_text(value)
