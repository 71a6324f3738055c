"""What all laws share: the error, comparisons, and how a part is tried. The laws' words are in `laws.toml`, by their codes."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache, wraps
from pathlib import Path
from typing import Any, ParamSpec

import torch
from torch import Tensor

from equipoise.core.abilities import is_part, refused_call
from equipoise.core.plain_text import parse_toml
from equipoise.errors import EquipoiseError, InvalidParameter, shown
from equipoise.runs.tried_calls import close, copied, same_state, unkeepable

P = ParamSpec("P")


@lru_cache(maxsize=1)
def law_texts() -> dict[str, list[str]]:
    """The law and the cure of each code."""
    return parse_toml(Path(__file__).with_name("laws.toml"))


class LawBroken(EquipoiseError, AssertionError):
    """A part breaks a law of its contract: `law` is the law's code."""

    def __init__(self, part: object, law: str, found: object = "", **named: object) -> None:
        self.part, self.law = part, law
        self.rule, cure = (text.format(**named) for text in law_texts()[law])
        self.cure = " ".join(each for each in (f"Found: {found}." if str(found) else "", cure) if each)
        super().__init__(f"{shown(part)} breaks the law: {self.rule} ({law}). {self.cure}".rstrip())


def hold(condition: Tensor | bool, part: object, law: str, found: object = "", **named: object) -> None:
    """Raise LawBroken with the part, the law and the numbers that break it, unless `condition` is true."""
    if not condition:
        raise LawBroken(part, law, found, **named)


def agree(part: object, law: str, found: Tensor, expected: Tensor, tolerance: float = 0.0, **named: object) -> None:
    """Raise LawBroken with the largest difference unless two tensors are equal, bit for bit or as `close` has it."""
    shapes = f"another shape, {tuple(found.shape)} for {tuple(expected.shape)}"
    hold(found.shape == expected.shape, part, law, shapes, **named)
    same = close(found, expected, tolerance) if tolerance else torch.equal(found, expected)
    hold(same, part, law, f"differences of up to {float((found - expected).abs().max()):g}" if found.numel() else "", **named)


def is_finite(values: Tensor) -> bool:
    """Whether all numbers of a tensor are finite."""
    return bool(torch.isfinite(values).all())


@contextmanager
def without_error(
    part: object, law: str, case: str = "", own: type[EquipoiseError] = InvalidParameter, **named: Any
) -> Iterator[None]:
    """Raise LawBroken in place of another error of the block, but for the library's `own` errors, which name their fix."""
    try:
        yield
    except (LawBroken, own):
        raise
    except Exception as failure:
        last = traceback.extract_tb(failure.__traceback__)[-1]
        raise LawBroken(
            part, law, f"{case}{failure!r} in line {last.lineno} of {Path(last.filename).name}", **named
        ) from failure


@contextmanager
def unchanged(part: object, **values: Any) -> Iterator[None]:
    """Raise LawBroken if one of the named values is another after the block than before it: an argument was written to."""
    before = copied(values)
    yield
    for name, value in values.items():
        law = "writes_state" if name == "state" else "writes"
        hold(same_state(value, before[name]), part, law, argument=name)


def check_of(kind: str, *needed: str, fix: str = "") -> Callable[[Callable[P, None]], Callable[P, None]]:
    """Make a check raise LawBroken for a part, its first argument, that lacks what its `kind` has or that raises an error."""

    def decorate(check: Callable[P, None]) -> Callable[P, None]:
        @wraps(check)
        def checked(*given: P.args, **named: P.kwargs) -> None:
            part: Any = given[0] if given else next(iter(named.values()), None)
            has(part, kind, *needed, fix=fix)
            with without_error(part, "answers", own=EquipoiseError, kind=kind, fix=fix):
                check(*given, **named)

        return checked

    return decorate


def has(part: object, kind: str, *needed: str, fix: str = "") -> None:
    """Raise LawBroken unless a part is an object with these attributes."""
    hold(not isinstance(part, type), part, "is_object", kind=kind, fix=f"Write {getattr(part, '__name__', '')}(…).")
    missing = [name for name in needed if not is_part(part, name)]
    hold(not missing, part, "has", f"no {', '.join(missing)}", kind=kind, needed=", ".join(needed), fix=fix)


@dataclass(frozen=True, eq=False)
class Tried:
    """A part that is tried, `quick`, as before a run, or thoroughly. Each law tries a copy: memory in self is left behind."""

    part: Any
    quick: bool = False
    seed: int = 0
    gen: torch.Generator = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "part", copied(self.part))
        object.__setattr__(self, "gen", torch.Generator().manual_seed(self.seed))

    def hold(self, condition: Tensor | bool, law: str, found: object = "", **named: object) -> None:
        """Raise LawBroken unless `condition` is true."""
        hold(condition, self.part, law, found, **named)

    def accepts(self, call: Callable[..., Any], shown_call: str, *given: Any, fix: str = "", **named: Any) -> None:
        """Raise LawBroken unless a call can be made as it is shown."""
        failure = refused_call(call, *given, **named)
        self.hold(failure is None, "callable_as", failure, call=shown_call, fix=fix)

    def keepable(self, state: Any) -> None:
        """Raise LawBroken unless a checkpoint can keep a state that the part returned."""
        found = unkeepable(state)
        self.hold(found is None, "kept_state", f"a value of type {found}")

    @contextmanager
    def without_error(self, law: str, case: str, **named: Any) -> Iterator[None]:
        """As `without_error`; an error in a quick trial is left to the run."""
        if self.quick:
            yield
            return
        with without_error(self.part, law, case, **named):
            yield


def try_laws(laws: tuple[Callable[[Any], None], ...], make: Callable[[], Any]) -> None:
    """Try each law on a fresh case of the part."""
    for law in laws:
        law(make())
