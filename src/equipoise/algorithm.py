"""An algorithm: a frozen bundle of parts, refused at construction if the parts are wrong together."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field, fields
from functools import cached_property
from importlib import import_module
from typing import Literal

import torch
from torch import Tensor

from equipoise import aggregators, averaging, risk, sampling, server_opt, solvers
from equipoise.compatibility import refuse
from equipoise.core.abilities import AlgorithmTraits, algorithm_traits, is_of_user, is_part, read
from equipoise.data.clients import ClientSet
from equipoise.errors import InvalidParameter, notify, require, require_kind
from equipoise.types import (
    Aggregator,
    Averaging,
    ClientRisk,
    LocalSolver,
    Personalisation,
    Privacy,
    PrivacyTraits,
    RiskTraits,
    Sampler,
    ServerOptimizer,
)

LINEAR_OR_NOT = (
    "Write a class with `linear = False`, or `linear = True` if the totals over parts of a cohort add up to its total."
)
# What each part must offer; enough to tell a part from a class, a name or a part in the wrong place.
_CONTRACTS: dict[str, tuple[str, ...]] = {
    "risk": ("__call__",),
    "solver": ("local_steps", "learning_rate", "begin", "step"),
    "aggregator": ("__call__", "linear"),
    "server": ("begin", "step"),
    "sampler": ("__call__",),
    "averaging": ("begin", "update", "iterate"),
    "personal": ("width", "begin", "work", "models"),
    "privacy": ("protect",),
}
_HOMES = {"server": "server_opt", "sampler": "sampling", "solver": "solvers", "aggregator": "aggregators"}
_OPTIONAL = ("sampler", "averaging", "personal", "privacy")


def _class_name(kind: type) -> str:
    """A class as a user knows it: those of other libraries with their module."""
    return kind.__name__ if kind.__module__.startswith("equipoise.") else f"{kind.__module__}.{kind.__qualname__}"


def _how_to_make(part: str, kind: type) -> str:
    """What to write in place of a class: an object of it, or of the part of this library that has its name."""
    home = _HOMES.get(part, part)
    own: object = vars(import_module(f"equipoise.{home}")).get(kind.__name__)
    if not isinstance(own, type):
        return f"Write {kind.__name__}(…), with its parameters."
    named = [each.name for each in inspect.signature(own).parameters.values() if each.kind is not each.VAR_POSITIONAL]
    return f"Write equipoise.{home}.{kind.__name__}({f'{named[0]}=…' if named else ''})."


@dataclass(frozen=True)
class Algorithm:
    """A federated algorithm as a frozen bundle of parts; every part has a default, and together the defaults are FedAvg.

    `risk` is the objective: a function of the clients' losses. `solver` says what a client does in a round, `aggregator`
    how client updates are combined, `server` how the result moves the model, and `sampler` which clients take part.
    `personal` gives every client a model of its own besides the shared one (equipoise.personal). `privacy` protects clients
    (equipoise.privacy). `sampler=None` draws a fixed number of clients uniformly without replacement. `averaging` says
    which iterate is reported and served. None means the last iterate, or the mean of all iterates if the risk asks for it
    (WorstCase). `weights` are the base weights α of the clients: "examples" (∝ their training examples, the default) or
    "uniform". Under differential privacy the defaults are Poisson sampling and uniform weights; with
    privacy.SecureHistogram they are uniform.

    >>> import equipoise as eq
    >>> algorithm = eq.Algorithm(risk=eq.risk.Superquantile(tail=0.5), aggregator=eq.aggregators.Median())
    >>> algorithm.risk.tail, algorithm.solver.lr, algorithm.sampler
    (0.5, 0.1, None)
    """

    risk: ClientRisk = field(default_factory=risk.Mean)
    solver: LocalSolver = field(default_factory=solvers.SGD)
    aggregator: Aggregator = field(default_factory=aggregators.WeightedMean)
    server: ServerOptimizer = field(default_factory=server_opt.SGD)
    sampler: Sampler | None = None
    averaging: Averaging | None = None
    personal: Personalisation | None = None
    privacy: Privacy | None = None
    weights: Literal["examples", "uniform"] | None = None

    def __post_init__(self) -> None:
        for part in fields(self):
            value = getattr(self, part.name)
            if part.name == "weights" or (part.name in _OPTIONAL and value is None):
                continue
            if isinstance(value, type):
                raise InvalidParameter(part.name, "must be an object", _class_name(value), _how_to_make(part.name, value))
            require_kind(part.name, part.name, value)
            missing = [name for name in _CONTRACTS[part.name] if not is_part(value, name)]
            if missing and not (part.name == "solver" and is_part(value, "prepare")):
                rule, fix = f"must offer {', '.join(missing)}", f"See equipoise.{_HOMES.get(part.name, part.name)}."
                fix = f"{LINEAR_OR_NOT} {fix}" if missing == ["linear"] and is_of_user(value) else fix
                raise InvalidParameter(part.name, rule, value, fix)
        require(self.weights in (None, "examples", "uniform"), "weights", 'must be "examples", "uniform" or None', self.weights)
        traits = self.traits
        if traits.risk.unbounded and not self.aggregator.linear:
            notify(liars_text(self))
        refuse(self)
        if traits.personal.check is not None:
            traits.personal.check(self)

    @cached_property
    def traits(self) -> AlgorithmTraits:
        """What the parts offer, read once."""
        return algorithm_traits(self)

    @cached_property
    def private(self) -> bool:
        """Whether the run is differentially private: cohorts and base weights then follow from that."""
        return read(PrivacyTraits, self.privacy).clip is not None

    @cached_property
    def drawn_by(self) -> Sampler:
        """The sampler that draws the cohorts: `sampler`, or the default if that is None."""
        return self.sampler or (sampling.Poisson() if self.private else sampling.Uniform())

    @cached_property
    def reported(self) -> Averaging:
        """Which iterate a run reports."""
        return self.averaging or (averaging.Uniform() if read(RiskTraits, self.risk).averaged else averaging.Last())

    def base_weights(self, clients: ClientSet) -> Tensor:
        """α (n,): the clients' base weights, float64, summing to 1."""
        sizes = clients.sizes.cpu().double()
        counted = self.private or self.traits.quantile.histogram is not None  # each client once
        uniform = self.weights == "uniform" or (self.weights is None and counted)
        alpha = torch.ones_like(sizes) if uniform else sizes
        return alpha / alpha.sum()


def liars_text(algorithm: Algorithm) -> str:
    """What becomes of a robust aggregator when the weights follow losses that clients report themselves."""
    return (
        f"{algorithm.risk!r} gives a client that lies about its loss nearly all of the weight. If {algorithm.aggregator!r} "
        "resists attackers, it does so only while they have a minority of it. Use risk.Superquantile(tail), which multiplies "
        "the share of a client by at most 1/tail: a median then holds while attackers are fewer than tail/2 of the clients."
    )
