"""The constants of a function by name, so that a message can say which of them differs."""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator
from typing import Any

_PLAIN = (bool, int, float, str)
_MOST = 40  # constants that are told apart, and characters of one


def constants_of(function: object) -> dict[str, str]:
    """Plain values that a function, a part or a module computes with: what is bound to it, defaults, names outside, numbers.

    >>> constants_of(functools.partial(print, sep="-"))
    {'sep': "'-'"}
    """
    found: dict[str, str] = {}
    for name, value in _walk(function, set()):
        if type(value) in _PLAIN and len(repr(value)) <= _MOST and len(found) < _MOST:
            found.setdefault(name, repr(value))
    return found


def _walk(value: Any, seen: set[int]) -> Iterator[tuple[str, Any]]:
    """Names and values, of what a function holds and of what that holds."""
    if id(value) in seen or type(value) in _PLAIN:
        return
    seen.add(id(value))
    if isinstance(value, functools.partial):
        held = {f"argument {place}": each for place, each in enumerate(value.args, 1)} | value.keywords
        inner: list[Any] = [value.func]
    elif isinstance(value, types.MethodType):
        held, inner = {}, [value.__self__, value.__func__]
    elif isinstance(value, types.FunctionType):
        held, inner = _of_function(value), []
    else:
        held, inner = {name: each for name, each in _attributes(value).items() if not name.startswith("_")}, []
    for name, each in held.items():
        if type(each) in _PLAIN and name != "training":
            yield name, each
    inner += [each for each in held.values() if isinstance(each, types.FunctionType | types.MethodType | functools.partial)]
    for each in inner:
        yield from _walk(each, seen)


def _attributes(value: object) -> dict[str, Any]:
    try:
        return vars(value)
    except TypeError:  # it has none
        return {}


def _of_function(function: types.FunctionType) -> dict[str, Any]:
    """What a function has by name: defaults, values around it and outside of it, and the numbers in its code."""
    code, defaults = function.__code__, function.__defaults__ or ()
    named = code.co_varnames[: code.co_argcount]
    held: dict[str, Any] = dict(zip(named[len(named) - len(defaults) :], defaults, strict=True)) | (
        function.__kwdefaults__ or {}
    )
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        try:
            held[name] = cell.cell_contents
        except ValueError:  # not filled yet
            continue
    held |= {name: function.__globals__[name] for name in code.co_names if name in function.__globals__}
    numbers = [constant for constant in code.co_consts if type(constant) in (int, float)]
    return held | {f"number {place} in its code": number for place, number in enumerate(numbers, 1)}
