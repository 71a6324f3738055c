"""The local rule of one call of the engine, with what its solver offers: read once, and asked by every path."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from torch import Tensor

from equipoise.core.abilities import solver_traits
from equipoise.core.numbers import Numbers
from equipoise.types import LocalSolver, Pull, SgdRule, SolverTraits

PullKind = Literal["none", "one number per client", "one number per parameter"]


@dataclass(frozen=True, eq=False)
class LocalRule:
    """How clients take their steps in a round: by which solver, at which rate, and on which models."""

    solver: LocalSolver
    traits: SolverTraits
    lr: float
    own_models: bool = False  # whether each client has a model of its own
    pull: PullKind = "none"  # towards anchors

    @classmethod
    def of(cls, solver: LocalSolver, lr: float, own_models: bool = False, pull: PullKind = "none") -> LocalRule:
        """The rule of a solver."""
        return cls(solver, solver_traits(solver), lr, own_models, pull)

    def __reduce__(self) -> tuple[Any, ...]:  # another process reads the traits itself
        return LocalRule.of, (self.solver, self.lr, self.own_models, self.pull)

    @property
    def sgd(self) -> SgdRule:
        """The formula of a rule that `why_not_plain_sgd` has nothing against, or that has momentum."""
        if self.traits.sgd is None:
            raise TypeError(f"{self.solver!r} does not take the steps of SGD")
        return self.traits.sgd

    @property
    def whole_clients(self) -> bool:
        """Whether a step sees all examples of a client: its batch, or the gradient at the start that FedDane asks for."""
        return self.solver.batch_size is None or self.traits.shared_gradient is not None

    def lr_at(self, step: int) -> float:
        """The rate at a local step of the round, counted from 0."""
        return self.lr if self.traits.step_factor is None else self.lr * float(self.traits.step_factor(step))

    def why_not_sgd(self) -> str | None:
        """Why a path that writes out SGD's step cannot take these steps; None if it can."""
        traits = self.traits
        if traits.sgd is not None:
            return None
        if traits.numbered:
            return f"the steps of {type(self.solver).__name__} are not those of SGD"
        if traits.clip_norm is not None:
            return "gradients are clipped at every step"
        if traits.step_factor is not None:
            return "the learning rate changes from step to step"
        if traits.rates:
            return "parameters have learning rates of their own"
        if traits.keeps is not None:
            return "clients keep the state of their optimiser between rounds"
        return f"the steps of {type(self.solver).__name__} are not those of SGD with or without plain momentum"

    def why_not_plain_sgd(self) -> str | None:
        """Why a step is not that of SGD without momentum, perhaps with one pull by a number per client; None if it is."""
        sgd = self.traits.sgd
        if sgd is None:
            return self.why_not_sgd()
        if sgd.momentum:
            return "SGD has momentum"
        if self.lr * sgd.weight_decay >= 1:
            return "the learning rate times the weight decay is 1 or more"
        if self.pull == "one number per parameter":
            return "models are pulled by one number per parameter"
        two_points = self.pull != "none" and sgd.prox
        return "models are pulled to two points: by SGD's proximal term and beside it" if two_points else None

    def steps_each(self, sizes: Numbers, effort: Tensor | None) -> Numbers:
        """How many steps each of K clients takes, (K,), by their numbers of examples and what they get done of the work."""
        efforts = None if effort is None else effort.numpy()
        if self.traits.local_steps_each is not None:
            steps: Numbers = self.traits.local_steps_each(sizes, efforts)
            return steps
        return steps_one_by_one(self.solver, sizes, efforts)


def steps_one_by_one(solver: LocalSolver, sizes: Numbers, efforts: Numbers | None) -> Numbers:
    """`solver.local_steps` of every client, (K,)."""
    given = [sizes.tolist()] if efforts is None else [sizes.tolist(), efforts.tolist()]
    return np.array([solver.local_steps(*one) for one in zip(*given, strict=True)], dtype=np.int64)


def kind_of(pull: Pull | None) -> PullKind:
    """What kind of pull moves clients' models."""
    if pull is None:
        return "none"
    return "one number per client" if pull.strength.dim() == 1 else "one number per parameter"
