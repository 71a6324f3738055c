"""The error that every check raises, and the comparisons that checks share."""

from __future__ import annotations

import copy
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec

import torch
from torch import Tensor

from equipoise.core.abilities import is_part, refused_call
from equipoise.errors import EquipoiseError, InvalidParameter, shown
from equipoise.runs.state_rules import IS_KEPT, KEPT_CURE, SAME_AGAIN, SAME_CURE, STATE_CURE, copy_cure, unkeepable
from equipoise.runs.tried_calls import close, copied

P = ParamSpec("P")


class LawBroken(EquipoiseError, AssertionError):
    """A part breaks a law of its contract."""


def hold(condition: Tensor | bool, part: object, law: str, numbers: object = "", cure: str = "") -> None:
    """Raise LawBroken with the part, the law, the numbers that break it and the cure, unless `condition` is true."""
    if not condition:
        raise LawBroken(_broken(part, law, numbers, cure))


def _broken(part: object, law: str, numbers: object, cure: str) -> str:
    found = f" Found: {numbers}" if numbers != "" else ""
    return f"{shown(part)} breaks the law: {law}.{found}" + (f"{'.' * bool(found)} {cure}" if cure else "")


def agree(part: object, law: str, found: Tensor, expected: Tensor, tolerance: float = 0.0, *, cure: str = "") -> None:
    """Raise LawBroken with the largest difference unless two tensors are equal, bit for bit or as `close` has it."""
    hold(found.shape == expected.shape, part, law, f"another shape, {tuple(found.shape)} for {tuple(expected.shape)}", cure)
    same = close(found, expected, tolerance) if tolerance else torch.equal(found, expected)
    hold(same, part, law, f"differences up to {float((found - expected).abs().max()):g}" if found.numel() else "", cure)


@contextmanager
def without_error(part: object, law: str, case: str = "", cure: str = "") -> Iterator[None]:
    """Raise LawBroken in place of another error of the block, which is the cause; a refused parameter names its own fix."""
    try:
        yield
    except (LawBroken, InvalidParameter):
        raise
    except Exception as failure:
        raise LawBroken(_broken(part, law, f"{case}{failure!r}{_place_of(failure)}", cure)) from failure


def _place_of(failure: Exception) -> str:
    """The line that raised an error, for a message."""
    frames = traceback.extract_tb(failure.__traceback__)
    return f" in line {frames[-1].lineno} of {Path(frames[-1].filename).name}" if frames else ""


def check_of(
    kind: str, *needed: str, cure: str = "", on_copy: bool = False
) -> Callable[[Callable[P, None]], Callable[P, None]]:
    """Make a check raise LawBroken for a part, its first argument, that lacks what its `kind` has or that raises an error.

    Errors of this library are passed on, since they name their fix. With `on_copy` a copy of the part is checked, so that what
    a part wrongly keeps in self is not there when the part itself trains.
    """

    def decorate(check: Callable[P, None]) -> Callable[P, None]:
        @wraps(check)
        def checked(*given: P.args, **named: P.kwargs) -> None:
            part: Any = given[0] if given else next(iter(named.values()), None)
            has(part, kind, *needed, cure=cure)
            arguments: Any = (copied(part), *given[1:]) if on_copy and given else given
            try:
                check(*arguments, **named)
            except EquipoiseError:
                raise
            except Exception as failure:
                law, found = f"{kind} answers every call of its contract without an error", f"{failure!r}{_place_of(failure)}"
                raise LawBroken(_broken(part, law, found, cure)) from failure

        return checked

    return decorate


def has(part: object, kind: str, *needed: str, cure: str = "") -> None:
    """Raise LawBroken unless a part is an object with these attributes."""
    fix = f"Write {part.__name__}(…)." if isinstance(part, type) else ""
    hold(not isinstance(part, type), part, f"{kind} is an object, and no class", cure=fix)
    missing = [name for name in needed if not is_part(part, name)]
    hold(not missing, part, f"{kind} has {', '.join(needed)}", f"no {', '.join(missing)}", cure)


def accepts(part: object, call: Callable[..., Any], shown: str, given: tuple[Any, ...], cure: str = "", **named: Any) -> None:
    """Raise LawBroken unless a call can be made as `shown`."""
    failure = refused_call(call, *given, **named)
    hold(failure is None, part, f"it can be called as {shown}", failure, cure)


def two_things(part: object, answer: Any, law: str) -> tuple[Any, Any]:
    """The two things that a call returns; LawBroken if it returns something else."""
    hold(isinstance(answer, tuple) and len(answer) == 2, part, law, type(answer).__name__)
    return answer  # type: ignore[no-any-return]


def equal_values(a: Any, b: Any) -> bool:
    """Whether two states hold equal values, tensors bit for bit; NaN equals NaN."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        same_form = a.shape == b.shape and a.dtype == b.dtype
        return same_form and bool(((a == b) | ((a != a) & (b != b))).all())
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return list(a) == list(b) and all(equal_values(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(equal_values, a, b))
    if is_dataclass(a) and type(a) is type(b):
        return all(equal_values(getattr(a, each.name), getattr(b, each.name)) for each in fields(a))
    return bool(a == b) or bool(a != a and b != b)


def repeated(part: object, action: str, call: Callable[..., Any], values: Callable[[Any], Any], **given: Any) -> Any:
    """What a call gives; LawBroken if it writes to what it is `given`, if its `values` differ when it is made again."""
    with unchanged(part, action, **given):
        first = copied(call())  # the second call may write to what the first one gave
        second = call()
    hold(equal_values(values(first), values(second)), part, SAME_AGAIN, f"{action} was made again, and differs", SAME_CURE)
    return first


def keepable(part: object, state: Any) -> None:
    """Raise LawBroken unless a checkpoint can keep a state that a part returned."""
    found = unkeepable(state)
    hold(found is None, part, IS_KEPT, f"a value of type {found}", KEPT_CURE)


@contextmanager
def unchanged(part: object, action: str, **values: Any) -> Iterator[None]:
    """Raise LawBroken if one of the named values is another after the block than before it: an argument was written to."""
    before = copy.deepcopy(values)
    yield
    for name, value in values.items():
        law = f"{action} does not write to the {name.replace('_', ' ')} it is given"
        hold(equal_values(value, before[name]), part, law, cure=STATE_CURE if name == "state" else copy_cure(name))


def is_finite(values: Tensor) -> bool:
    """Whether all numbers of a tensor are finite."""
    return bool(torch.isfinite(values).all())
