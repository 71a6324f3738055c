"""Reads what parts may offer into the frozen descriptions of `equipoise.types`. No other module asks a part what it is."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from difflib import get_close_matches
from functools import lru_cache
from typing import Any, TypeVar

from equipoise.errors import EquipoiseError, InvalidParameter, shown
from equipoise.types import (
    AggregatorTraits,
    AttackTraits,
    EngineTraits,
    LocalSolver,
    MetricTraits,
    PersonalTraits,
    PrivacyTraits,
    QuantileTraits,
    RiskTraits,
    SamplerTraits,
    ServerTraits,
    SolverTraits,
)

T = TypeVar("T")


_FIELDS: dict[type, list[tuple[str, bool, Any]]] = {}  # name, whether subclasses do not inherit it, default


def _fields(kind: Any) -> list[tuple[str, bool, Any]]:
    if kind not in _FIELDS:
        _FIELDS[kind] = [(each.name, "own" in each.metadata, each.default) for each in fields(kind)]
    return _FIELDS[kind]


def read(kind: type[T], part: object) -> T:
    """The description `kind` of a part: of each field the part's attribute of that name, or the field's default.

    A field marked OWN is read from the part's own class only, not from a class that it extends. A class is no part, and offers
    nothing. A part of the user's own with an attribute that is nearly one of the fields is refused.
    """
    part = None if isinstance(part, type) else part
    own = vars(type(part))
    description = object.__new__(kind)  # a frozen dataclass sets its fields one by one, which takes longer than to read them
    values = vars(description)
    for name, only_own, default in _fields(kind):
        values[name] = default if only_own and name not in own else getattr(part, name, default)
    if part is not None:
        refuse_misspelt(kind.__name__.removesuffix("Traits").lower(), part, tuple(values))
    return description


def refuse_misspelt(parameter: str, part: object, known: tuple[str, ...]) -> None:
    """Refuse a part of the user's own with an attribute that is none of the `known` names, which are read, but nearly one."""
    own: Any = type(part)
    if is_of_user(part) and (found := _misspelt(known, own, tuple(getattr(part, "__dict__", ())))):
        rule = f"must not have the attribute {found[0]!r}, which nothing reads"
        raise InvalidParameter(parameter, rule, part, f"Did you mean {found[1]!r}?")


@lru_cache(maxsize=512)
def _misspelt(known: tuple[str, ...], own: type, given: tuple[str, ...]) -> tuple[str, str] | None:
    """The first public attribute that is nearly a known name, and that name; None if there is none.

    Near are the same letters in another order, and long names with few other letters: a short word with another letter, such
    as `rate` beside `rates`, is a word of its own.
    """
    long = [name for name in known if len(name) >= 8]
    for name in sorted(name for name in {*dir(own), *given}.difference(known) if name[0] != "_"):
        near = [each for each in known if sorted(each) == sorted(name)] or get_close_matches(name, long, n=1, cutoff=0.9)
        if near:
            return name, near[0]
    return None


def solver_traits(solver: LocalSolver) -> SolverTraits:
    """What a solver offers."""
    return read(SolverTraits, solver)


def engine_traits(engine: object) -> EngineTraits:
    """What an engine offers."""
    return read(EngineTraits, engine)


def attack_traits(attack: object) -> AttackTraits:
    """What an attack offers."""
    return read(AttackTraits, attack)


def metric_traits(metric: object) -> MetricTraits:
    """What a metric of one client offers."""
    return read(MetricTraits, metric)


def is_part(value: object, *needed: str) -> bool:
    """Whether a value is an object with these attributes, and no class."""
    return not isinstance(value, type) and all(hasattr(value, name) for name in needed)


def refused_call(call: Callable[..., Any], *given: Any, **named: Any) -> TypeError | None:
    """Why a call with these arguments cannot be made; None if it can."""
    try:
        inspect.signature(call).bind(*given, **named)
    except TypeError as failure:
        return failure
    except ValueError:  # code without a signature
        return None
    return None


def is_of_user(part: object) -> bool:
    """Whether the code of a part, its class or the function that it is, is not the library's own."""
    home = getattr(part, "__module__", None) or type(part).__module__
    return home.split(".")[0] != __name__.split(".")[0]


@contextmanager
def named_part(kind: str, part: Any) -> Iterator[None]:
    """Inside, an error of a part of the user's own gets a note that names the part; errors of this library name it already."""
    try:
        yield
    except EquipoiseError:
        raise
    except Exception as failure:
        if is_of_user(part):
            failure.add_note(f"The {kind} {shown(part)} raised this error.")
        raise


def nested_aggregators(aggregator: Any) -> Iterator[Any]:
    """An aggregator, and those that it wraps, from the outside in: FedNova, NNM and Bucketing call theirs `aggregator`."""
    while aggregator is not None:
        yield aggregator
        aggregator = vars(aggregator).get("aggregator") if is_dataclass(aggregator) else None


@dataclass(frozen=True, eq=False)
class AlgorithmTraits:
    """What the parts of an algorithm offer; of an optional part that is absent, the defaults."""

    risk: RiskTraits
    quantile: QuantileTraits  # of the risk's source of quantiles
    solver: SolverTraits
    aggregator: AggregatorTraits
    server: ServerTraits
    sampler: SamplerTraits
    averaging: SamplerTraits
    personal: PersonalTraits
    privacy: PrivacyTraits

    @property
    def needs_losses(self) -> bool:
        """Whether the risk's weights depend on the losses, or the aggregator goes by them."""
        return self.risk.needs_losses or self.aggregator.needs_losses

    @property
    def counts_steps(self) -> bool:
        """Whether the lengths of clients' local steps count: clients without a step then take no part."""
        return self.aggregator.normalises is not None or self.solver.after_total is not None


def algorithm_traits(algorithm: Any) -> AlgorithmTraits:
    """What the parts of an algorithm offer."""
    risk = read(RiskTraits, algorithm.risk)
    return AlgorithmTraits(
        risk=risk,
        quantile=read(QuantileTraits, risk.quantile),
        solver=read(SolverTraits, algorithm.solver),
        aggregator=read(AggregatorTraits, algorithm.aggregator),
        server=read(ServerTraits, algorithm.server),
        sampler=read(SamplerTraits, algorithm.drawn_by),
        averaging=read(SamplerTraits, algorithm.reported),
        personal=read(PersonalTraits, algorithm.personal),
        privacy=read(PrivacyTraits, algorithm.privacy),
    )
