"""Reads what parts may offer into the frozen descriptions of `equipoise.types`. No other module asks a part what it is."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, TypeVar

from equipoise.errors import EquipoiseError, shown
from equipoise.types import (
    AggregatorTraits,
    AttackTraits,
    Engine,
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
    nothing.
    """
    part = None if isinstance(part, type) else part
    own = vars(type(part))
    description = object.__new__(kind)  # a frozen dataclass sets its fields one by one, which takes longer than to read them
    values = vars(description)
    for name, only_own, default in _fields(kind):
        values[name] = default if only_own and name not in own else getattr(part, name, default)
    return description


def solver_traits(solver: LocalSolver) -> SolverTraits:
    """What a solver offers."""
    return read(SolverTraits, solver)


def engine_traits(engine: object) -> EngineTraits:
    """What an engine offers."""
    return read(EngineTraits, engine)


def evaluates_samples(engine: Engine) -> bool:
    """Whether an engine's `evaluate` takes the positions of some clients, `which`; engines for version 0.1 do not."""
    try:
        inspect.signature(engine.evaluate).bind(*"pcw")
    except TypeError:
        return False
    return True


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
