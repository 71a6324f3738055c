"""Every error a user can meet. Each message names the parameter, the rule, the value and the fix."""

from __future__ import annotations

import math
import reprlib
import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import MISSING, fields, is_dataclass
from difflib import get_close_matches
from functools import lru_cache
from numbers import Integral, Real
from pathlib import Path
from types import FrameType
from typing import Any, Self

from equipoise.core.error_codes import WRITTEN, code_of, raised_in
from equipoise.core.part_kinds import text_of_wrong_kind
from equipoise.core.words import message

AFTER_THE_LAST = "loss after the last round"  # what has diverged, where every round went well
_PACKAGE = Path(__file__).parent
_NOT_THE_USERS = (str(_PACKAGE), *(str(Path(place) / "torch") for place in sys.path if place))  # code in which notices arise
_FEW, _LONG = 10, 600  # numbers of an array that is shown, characters of a message's value
_MANY = 8  # fields of a dataclass, beyond which a message shows those alone that differ from their defaults
_SHORT = reprlib.Repr()
_SHORT.maxlist = _SHORT.maxtuple = _SHORT.maxset = _SHORT.maxfrozenset = _SHORT.maxdict = 20
_SHORT.maxstring = _SHORT.maxother = _LONG


class EquipoiseError(Exception):
    """Base of all errors raised on purpose by this package. Its message ends in a code of the catalogue of errors."""

    finished: Any = None  # what `compare`, or a run whose observer failed at its end, had finished before the error
    _module: str = ""  # of the library, that made the error

    def __new__(cls, *arguments: Any, **named: Any) -> Self:
        """Remember where the error is made: the code follows from that and from the class."""
        self = super().__new__(cls, *arguments, **named)
        self._module = raised_in()
        return self

    @property
    def code(self) -> str:
        """The code of the family of rules that was broken, e.g. "EQ101"; that of the error that this one passes on, if any."""
        passed_on = WRITTEN.findall(super().__str__())
        names = tuple(base.__name__ for base in type(self).__mro__)
        return passed_on[-1] if passed_on else code_of(names, self._module)

    def __str__(self) -> str:
        text, code = message(WRITTEN.sub("", super().__str__())), self.code
        return f"{text} [{code}]" if code and text else text


class InvalidParameter(EquipoiseError, ValueError):
    """A parameter breaks its rule."""

    law: str = ""  # of a part of the user's own, that breaks it: the code of the law

    def __init__(self, parameter: str, rule: str, value: object, fix: str = "") -> None:
        self.parameter, self.rule, self.value, self.fix = parameter, rule, value, fix
        super().__init__(f"{parameter} {rule}, but is {shown(value)}." + (f" {fix}" if fix else ""))


def shown(value: object) -> str:
    """A value for a message: as Python shows it, long arrays by shape and type, long texts and lists by their beginning.

    >>> shown([1, 2]), shown("a" * 500)[:6], shown(range(3))
    ('[1, 2]', "'aaaaa", 'range(0, 3)')
    """
    shape = getattr(value, "shape", None)
    if isinstance(shape, tuple) and math.prod(shape) > _FEW:
        return f"an array of shape {tuple(shape)} and type {getattr(value, 'dtype', type(value).__name__)}"
    if not isinstance(value, type) and is_dataclass(value) and _is_long(value):
        return brief(value)
    text = _SHORT.repr(value) if isinstance(value, list | tuple | set | frozenset | dict | str) else repr(value)
    return text if len(text) <= _LONG else f"{text[: _LONG - 1]}…"


def _is_long(value: Any) -> bool:
    """Whether a dataclass of the user's own has more fields than a reader takes in."""
    return len(fields(value)) > _MANY and not type(value).__module__.startswith("equipoise.")


def brief(value: Any) -> str:
    """A dataclass by its name and the fields that differ from their defaults; any other value as Python shows it.

    >>> import equipoise as eq
    >>> brief(eq.solvers.SGD(lr=0.05)), brief(3)
    ('SGD(lr=0.05)', '3')
    """
    if isinstance(value, type) or not is_dataclass(value):
        return repr(value)
    given = []
    for each in fields(value):
        default = each.default if each.default_factory is MISSING else each.default_factory()
        found = vars(value).get(each.name, default)
        if each.repr and (default is MISSING or repr(found) != repr(default)):
            given.append(f"{each.name}={brief(found)}")
    return f"{type(value).__name__}({', '.join(given)})"


class IncompatibleParts(EquipoiseError, ValueError):
    """Parts of an algorithm that do not go together, although each part alone is right."""

    def __init__(self, reason: str, fix: str, rule: str = "") -> None:
        self.reason, self.fix, self.rule = reason, fix, rule  # the row of compatibility.toml, if it is one of these
        super().__init__(f"{reason}\n  {fix}")


class InvalidData(EquipoiseError, ValueError):
    """Data cannot be used; the message says where (file, client, row) and why."""


class ConfigError(EquipoiseError, ValueError):
    """A configuration file has a wrong or missing section, key or value."""


class Diverged(EquipoiseError, RuntimeError):
    """Training produced a number that is not finite. What was logged before is kept in `history`.

    `round` is the number of rounds that were done before; the message counts rounds from 1, as all messages do.
    """

    def __init__(self, round_index: int, clients: Iterable[str], what: str) -> None:
        self.round, self.clients, self.what = round_index, tuple(clients), what
        self.history: Any = None  # filled by `train`, as is the run's name
        self.run = ""
        shown = ", ".join(self.clients[:5]) + (f" and {len(self.clients) - 5} more" if len(self.clients) > 5 else "")
        where = f" of client {shown}" if self.clients else ""
        number = round_index if what == AFTER_THE_LAST else round_index + 1
        wrong = "is not finite or absurdly large" if what == "update" else "is not finite"
        self._found = f"Round {number}: the {what}{where} {wrong}, so training stopped; earlier rounds are kept."
        advice = "Lower the learning rate, or look at these clients' data, and at the loss function if it is your own."
        super().__init__(f"{self._found} {advice}")

    def because(self, reason: str) -> None:
        """Say what is likely wrong in place of the usual advice."""
        self.args = (f"{self._found} {reason}",)


class NotWritten(EquipoiseError, OSError):
    """A file could not be written; the message names it and says why."""


class CheckpointError(EquipoiseError):
    """A checkpoint cannot be used: it is damaged, or belongs to another run."""


class ObserverFailed(EquipoiseError, RuntimeError):
    """An observer raised an error; the message names the observer, and the cause is the original error."""


class FileGuard:
    """Inside, whatever is wrong with the file at `path` becomes one `error`: its path, `what` it is not, the reason, `cure`.

    An error of that class which names the path already stays as it is.

    >>> with FileGuard("model.json", ConfigError, "is damaged", "Copy it again."):
    ...     {}["files"]
    Traceback (most recent call last):
    equipoise.errors.ConfigError: model.json is damaged: 'files' is missing. Copy it again. [EQ400]
    """

    def __init__(self, path: object, error: type[EquipoiseError], what: str = "cannot be read", cure: str = "") -> None:
        self.path, self.error, self.what, self.cure = path, error, what, cure

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, failure: BaseException | None, trace: object) -> None:
        known = isinstance(failure, NotWritten) or (isinstance(failure, self.error) and str(self.path) in str(failure))
        if isinstance(failure, Exception) and not known:
            said = f"{self.what}: {_reason(failure).removeprefix(f'{self.path} ')}"
            said = "does not exist" if isinstance(failure, FileNotFoundError) else said
            raise self.error(f"{self.path} {said}. {self.cure}".rstrip()) from failure


def _reason(failure: Exception) -> str:
    """Why a file could not be read, without a full stop."""
    if isinstance(failure, KeyError):
        return f"{failure} is missing"
    text = WRITTEN.sub("", str((isinstance(failure, OSError) and failure.strerror) or failure)).strip()
    return (text.splitlines() or [type(failure).__name__])[0].rstrip(".")


class EquipoiseNotice(UserWarning):
    """Something the user should know once, such as a slower engine being used."""


_TOLD: ContextVar[set[str] | None] = ContextVar("told", default=None)  # notices given so far, where each is given once


@contextmanager
def each_notice_once() -> Iterator[None]:
    """Inside, `notify` gives a notice once: several runs would say the same of the same data or model.

    >>> with warnings.catch_warnings(record=True) as given, each_notice_once():
    ...     warnings.simplefilter("always")
    ...     notify("Slower."), notify("Slower.")
    (None, None)
    >>> len(given)
    1
    """
    token = _TOLD.set(set() if (told := _TOLD.get()) is None else told)
    try:
        yield
    finally:
        _TOLD.reset(token)


@contextmanager
def without_notices() -> Iterator[None]:
    """Inside, no notice is given, and none counts as given.

    >>> with without_notices():
    ...     notify("Nobody reads this.")
    """
    token = _TOLD.set(set())
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", EquipoiseNotice)
            yield
    finally:
        _TOLD.reset(token)


def notify(text: str) -> None:
    """Give a notice that points at the line of the user: the nearest caller outside of this package.

    `text` is the notice, in whole sentences.

    >>> with warnings.catch_warnings(record=True) as given:
    ...     warnings.simplefilter("always")
    ...     notify("The loop engine is used.")
    >>> str(given[0].message)
    'The loop engine is used.'
    """
    text = message(text)
    if (told := _TOLD.get()) is not None:
        if text in told:
            return
        told.add(text)
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and _is_ours(frame):
        level, frame = level + 1, frame.f_back
    warnings.warn(EquipoiseNotice(text), stacklevel=level)


def _is_ours(frame: FrameType) -> bool:
    """Whether a frame runs code of this package: a file of it, or the `__init__` that a dataclass of it was given."""
    if frame.f_code.co_filename.startswith(_NOT_THE_USERS):
        return True
    return frame.f_code.co_filename == "<string>" and str(frame.f_globals.get("__name__")).startswith(f"{_PACKAGE.name}.")


def is_number(value: object) -> bool:
    """Whether the value is a real number (NumPy's types too), and not a bool.

    >>> is_number(0.5), is_number(True), is_number("1")
    (True, False, False)
    """
    return isinstance(value, Real) and not isinstance(value, bool)


def is_integer(value: object) -> bool:
    """Whether the value is an integer (NumPy's types too), and not a bool.

    >>> is_integer(3), is_integer(3.0), is_integer(True)
    (True, False, False)
    """
    return type(value) is int or (isinstance(value, Integral) and not isinstance(value, bool))


def require(condition: bool, parameter: str, rule: str, value: object, fix: str = "") -> None:
    """Raise InvalidParameter unless `condition` holds.

    >>> require(True, "lr", "must be positive", 0.1)
    >>> require(False, "lr", "must be positive", -1.0, "E.g. 0.1.")
    Traceback (most recent call last):
    equipoise.errors.InvalidParameter: lr must be positive, but is -1.0. E.g. 0.1. [EQ100]
    """
    if not condition:
        raise InvalidParameter(parameter, rule, value, fix)


def require_kind(parameter: str, kind: str, value: object) -> None:
    """Raise InvalidParameter if the value is a part of the library of another kind. Parts of the user's own may be of any kind.

    `kind` is the kind that is needed, such as "risk" or "solver".

    >>> import equipoise as eq
    >>> require_kind("risk", "risk", eq.risk.Mean())
    >>> require_kind("risk", "risk", eq.aggregators.Median())  # doctest: +IGNORE_EXCEPTION_DETAIL
    Traceback (most recent call last):
    equipoise.errors.InvalidParameter: risk must be a risk, e.g. risk.Superquantile(tail=0.5), but is Median().
    """
    if (wrong := text_of_wrong_kind(kind, value)) is not None:
        rule, fix = wrong
        raise InvalidParameter(parameter, rule, value, fix)


_NAMED_INTERVALS = {
    "(0, ∞)": "must be a positive number",
    "(0, ∞]": "must be a positive number",
    "[0, ∞)": "must be a number ≥ 0",
    "[0, ∞]": "must be a number ≥ 0",
    "(-∞, ∞)": "must be a finite number",
}


@lru_cache(maxsize=64)
def _bounds(interval: str) -> tuple[float, float]:
    low, high = interval[1:-1].replace("∞", "inf").split(",")
    return float(low), float(high)


def require_number(parameter: str, value: Any, interval: str, fix: str = "", *, none: str = "") -> None:
    """Raise InvalidParameter unless the value is a number in an interval such as "(0, 1]" or "[0, ∞)".

    `none` says what None stands for, where None is allowed.

    `interval` is written as in mathematics: a bracket includes its end, a parenthesis does not.

    >>> require_number("tail", 0.5, "(0, 1]")
    >>> require_number("tail", 0.0, "(0, 1]")
    Traceback (most recent call last):
    equipoise.errors.InvalidParameter: tail must lie in (0, 1], but is 0.0. [EQ100]
    """
    if none and value is None:
        return
    if is_integer(value) and abs(value) >= 2**63:  # tensors hold 64 bits
        require(False, parameter, "must be a number that fits into 64 bits", value, "Write it as a float, e.g. 1e20.")
    low, high = _bounds(interval)
    good = is_number(value) and low <= value <= high
    good = good and (value != low or interval[0] == "[") and (value != high or interval[-1] == "]")
    rule = _NAMED_INTERVALS.get(interval, f"must lie in {interval}")
    require(good, parameter, f"{rule}, or None for {none}" if none else rule, value, fix)


def require_integer(parameter: str, value: Any, least: int, most: int | None = None, fix: str = "", *, none: str = "") -> None:
    """Raise InvalidParameter unless the value is an integer of at least `least`, and of at most `most` if that is given.

    `none` says what None stands for, where None is allowed. Without `most`, integers of more than 64 bits are refused.

    >>> require_integer("rounds", 3, 1)
    >>> require_integer("rounds", 0, 1)
    Traceback (most recent call last):
    equipoise.errors.InvalidParameter: rounds must be a whole number of at least 1, but is 0. [EQ100]
    """
    if none and value is None:
        return
    if most is None and is_integer(value) and value >= 2**63:
        most = 2**63 - 1
    good = is_integer(value) and value >= least and (most is None or value <= most)
    rule = "must be a whole number " + (f"of at least {least}" if most is None else f"between {least} and {most}")
    require(good, parameter, f"{rule}, or None for {none}" if none else rule, value, fix)


def unknown_name(kind: str, name: str, allowed: Iterable[str]) -> str:
    """The text for an unknown name: the name, the nearest known name, and all allowed names.

    `kind` says what the name is of, such as "model".

    >>> unknown_name("model", "sofmax", ["softmax", "mlp"])
    "Unknown model 'sofmax'. Did you mean 'softmax'? Allowed: mlp, softmax."
    """
    allowed = sorted(allowed)
    hint = nearest_name(name, allowed)
    return f"Unknown {kind} {name!r}.{' ' * bool(hint)}{hint} Allowed: {', '.join(allowed)}."


def nearest_name(name: Any, allowed: Iterable[str]) -> str:
    """A question that names the nearest of the allowed names; empty if none is near.

    >>> nearest_name("fedavg", ["FedAvg", "tail"]), nearest_name("CRP", ["crp"]), nearest_name("x", ["tail"])
    ("Did you mean 'FedAvg'?", "Did you mean 'crp'?", '')
    """
    if not isinstance(name, str):
        return ""
    names = list(allowed)
    near = [each for each in names if each.casefold() == name.casefold()] or get_close_matches(name, names, n=1)
    return f"Did you mean {near[0]!r}?" if near else ""


def require_name(parameter: str, name: Any, allowed: Iterable[str]) -> None:
    """Raise InvalidParameter unless the name is one of those allowed; the message names the nearest one.

    >>> require_name("split", "test", ["test", "train"])
    >>> require_name("split", "tset", ["test", "train"])
    Traceback (most recent call last):
    equipoise.errors.InvalidParameter: split must be one of test, train, but is 'tset'. Did you mean 'test'? [EQ100]
    """
    names = list(allowed)
    known = isinstance(name, str) and name in names
    require(known, parameter, f"must be one of {', '.join(names)}", name, nearest_name(name, names))
