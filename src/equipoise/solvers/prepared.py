"""Solvers that look around before a round: a proximal term that adapts, and FedDane's gradient correction.

Each wraps a local solver. `prepare` is called once a round with what the server may ask (a RoundContext) and the solver's state
from the round before; it returns the solver for this round and the next state.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from equipoise.aggregators import WeightedMean
from equipoise.core.abilities import solver_traits
from equipoise.core.params import ParameterLayout
from equipoise.errors import InvalidParameter, require, require_integer, require_kind, require_number
from equipoise.solvers.sgd import SGD
from equipoise.types import Cohort, LocalSolver, LocalWork, SgdRule
from equipoise.types.round_contracts import Ask, Fold

GRADIENT = SGD(lr=1.0, batch_size=None, steps=1)  # one full-batch step of length 1: the update is −∇F_k


@dataclass(frozen=True, eq=False)
class RoundContext:
    """What a solver may ask for before a round. Where clients are protected, nobody may be asked and nobody is named."""

    params: Tensor  # (D,) w^t, as engines take it: followed by the carried values (C,) of a model that has any
    cohort: Cohort  # of the round; empty where clients are protected
    alpha: Tensor  # (n,) base weights of all clients
    draw: Callable[[str], Cohort]  # a further cohort of this round, for a purpose
    layout: ParameterLayout  # of the model's parameters

    def new_vector(self) -> Tensor:
        """Zeros (D,), as the model's parameters are: without the carried values that follow them."""
        return torch.zeros_like(self.params[: self.layout.dimension])


def mean_gradient(params: Tensor, cohort: Cohort) -> Generator[Ask, Any, Tensor]:
    """Asks for Σ weights_k ∇F_k(w) over a cohort, (D,), each gradient over all of the client's training data."""
    work: LocalWork = yield Ask("update", params, cohort.having(shares=cohort.weights), GRADIENT, Fold(WeightedMean()))
    return -work.update


def _everyone(cohort: Cohort, alpha: Tensor) -> Cohort:
    return Cohort(cohort.round, cohort.seed, torch.arange(len(alpha)), alpha, torch.ones_like(alpha))


@dataclass(frozen=True)
class AdaptiveProx:
    """FedProx whose μ follows the training loss: up when the loss rises, down after several falls in a row, never below 0.

    μ starts at the `prox` of `solver`, gains `step` whenever the loss over all training clients is above that of the round
    before, and loses `step` after `patience` falls in a row. The loss is the global one, as published: every round costs a pass
    over all training data, since the losses of small cohorts rise and fall by chance.

    Source: Li 2023 (thesis), section 3.7.3.3.
    """

    solver: LocalSolver = field(default_factory=SGD)
    step: float = 0.1
    patience: int = 5

    def __post_init__(self) -> None:
        with_prox(self.solver, 0.0)
        require_number("step", self.step, "(0, ∞)")
        require_integer("patience", self.patience, 1)

    def prepare(self, context: RoundContext, state: ProxState | None) -> Generator[Ask, Tensor, tuple[LocalSolver, ProxState]]:
        """The solver with this round's μ."""
        losses = yield Ask("loss", context.params, _everyone(context.cohort, context.alpha))
        loss = float(context.alpha @ losses.to(context.alpha))
        traits = solver_traits(self.solver)
        state = adapted(state or ProxState(traits.prox), loss, self.step, self.patience)
        return with_prox(self.solver, state.prox), state


@dataclass(frozen=True)
class ProxState:
    """μ, the loss it was last judged by, and how often that fell in a row."""

    prox: float
    loss: float | None = None
    falls: int = 0


def adapted(state: ProxState, loss: float, step: float, patience: int) -> ProxState:
    """The state after seeing the loss of another round.

    >>> adapted(ProxState(0.0, loss=1.0), 1.5, 0.1, 5)
    ProxState(prox=0.1, loss=1.5, falls=0)
    """
    if state.loss is None or loss == state.loss:
        return ProxState(state.prox, loss)
    if loss > state.loss:
        return ProxState(state.prox + step, loss)
    if state.falls + 1 < patience:
        return ProxState(state.prox, loss, state.falls + 1)
    return ProxState(max(0.0, state.prox - step), loss)


@dataclass(frozen=True)
class FedDane:
    """FedProx with a gradient correction: clients minimise F_k(w) + ⟨g − ∇F_k(w^t), w⟩ + (μ/2)‖w − w^t‖².

    g is the mean gradient at w^t over a second cohort, drawn as the first; μ is the `prox` of `solver`. According to its
    publication it works with IID clients and is unstable with others. The library has it for comparison. It works only with
    risk.Mean().

    Source: Li 2023 (thesis), section 3.6 and Figure 3.4; Li et al. 2019 (FedDANE).
    """

    solver: LocalSolver = field(default_factory=SGD)

    fixed_weights: ClassVar[bool] = True  # at w^t each corrected gradient is g, and weights of clients cancel out

    def __post_init__(self) -> None:
        require_sgd(self.solver)

    def prepare(self, context: RoundContext, state: None) -> Generator[Ask, Any, tuple[LocalSolver, None]]:
        """The solver with this round's g."""
        second = context.draw("gradient")
        if len(second) == 0:  # Poisson sampling may draw nobody: then there is nothing to correct by
            return self.solver, None
        gradient = yield from mean_gradient(context.params, second)
        return AdjustedSolver(self.solver, gradient), None


@dataclass(frozen=True, eq=False)
class AdjustedSolver:
    """A solver whose clients see another gradient than ∇f(w): the engine adds g − ∇F_k(w^t) or c − c_k, or divides it by A."""

    solver: LocalSolver
    shared_gradient: Tensor | None = None  # (D,) g
    preconditioner: Tensor | None = None  # (D,) A
    shift: Tensor | None = None  # (D,) c: the engine adds c − row_k to every gradient of client k (SCAFFOLD, FedDyn)
    dynamic: bool = False  # rows are FedDyn's g_k, and not SCAFFOLD's c_k
    sent_clip: float | None = None  # updates are clipped to this norm when they are sent, and rows follow what was sent

    @property
    def batch_size(self) -> int | None:
        """As the wrapped solver's."""
        return self.solver.batch_size

    def local_steps(self, size: int, effort: int | None = None) -> int:
        """As the wrapped solver's."""
        return self.solver.local_steps(size, effort)

    @property
    def efforts(self) -> Callable[[Cohort, Tensor], Tensor | None] | None:
        """As the wrapped solver's."""
        return solver_traits(self.solver).efforts

    def learning_rate(self, round_index: int) -> float:
        """As the wrapped solver's."""
        return self.solver.learning_rate(round_index)

    @property
    def keeps(self) -> Callable[[int], int] | None:
        """With a shift c a client keeps its own c_k, D numbers."""
        return None if self.shift is None else lambda dimension: dimension

    def with_sent_clip(self, bound: float) -> AdjustedSolver:
        """The solver for clients whose updates are clipped to a norm of `bound` when they are sent."""
        return replace(self, sent_clip=bound if bound < math.inf else None)

    def next_rows(self, rows: Tensor, updates: Tensor, steps: Tensor, lr: float, prox: Tensor | None = None) -> Tensor:
        """The rows (K, D) of clients after local work with updates u_k (K, D) in τ_k (K,) steps; as they were without a step.

        SCAFFOLD: c_k − c − u_k/(ηa_k). FedDyn: g_k − κ_k u_k, with κ_k = `prox` (K,).
        """
        lengths, taken = solver_traits(self.solver).normalisers, (steps.to(updates.device) > 0).unsqueeze(1)
        if self.sent_clip is not None:
            norms = torch.linalg.vector_norm(updates, dim=1, keepdim=True)
            updates = updates * (self.sent_clip / norms.clamp(min=1e-30)).clamp(max=1.0)
        if self.dynamic and prox is not None:
            return torch.where(taken, rows - prox.to(updates).unsqueeze(1) * updates, rows)
        if self.shift is None or lengths is None:
            return rows
        scale = (lr * lengths(steps.cpu(), lr)).to(updates).unsqueeze(1)
        return torch.where(taken, rows - self.shift - updates / scale, rows)

    @property
    def adjusted_sgd(self) -> SgdRule | None:
        """The wrapped solver's formula; None with a shared gradient, which takes a pass of its own before the steps."""
        return None if self.shared_gradient is not None else solver_traits(self.solver).sgd

    @property
    def steps(self) -> int | None:
        """As the wrapped solver's."""
        return solver_traits(self.solver).steps

    @property
    def normalisers(self) -> Callable[[Tensor, float], Tensor] | None:
        """As the wrapped solver's."""
        return solver_traits(self.solver).normalisers

    @property
    def clip_norm(self) -> float | None:
        """As the wrapped solver's: the gradient of the loss is clipped before it is adjusted."""
        return solver_traits(self.solver).clip_norm

    @property
    def step_factor(self) -> Callable[[int], float] | None:
        """As the wrapped solver's."""
        return solver_traits(self.solver).step_factor

    @property
    def rates(self) -> Mapping[str, float] | None:
        """As the wrapped solver's."""
        return solver_traits(self.solver).rates

    def begin(self, weights: Tensor) -> tuple[Tensor, ...]:
        """As the wrapped solver's."""
        return self.solver.begin(weights)

    def step(self, weights: Tensor, gradient: Tensor, memory: tuple[Tensor, ...], *, anchor: Tensor, lr: float) -> None:
        """The wrapped solver's step by the adjusted gradient."""
        self.solver.step(weights, gradient, memory, anchor=anchor, lr=lr)


def with_prox(solver: LocalSolver, prox: float) -> LocalSolver:
    """The wrapped solver with another proximal term; a solver without one, or with a kept state, is refused."""
    traits, fix = solver_traits(solver), "E.g. solvers.SGD(lr=0.01, epochs=20, prox=1.0)."
    if traits.with_prox is None:
        raise InvalidParameter("solver", "must be a solvers.SGD", solver, fix)
    require(traits.keeps is None, "solver", "must begin every round with a fresh state here", solver, 'Use state="fresh".')
    return traits.with_prox(prox)


def require_sgd(solver: LocalSolver) -> None:
    """Raise InvalidParameter unless the wrapped solver takes steps of SGD, whose gradient may be adjusted."""
    require_kind("solver", "solver", solver)
    traits, fix = solver_traits(solver), "E.g. solvers.SGD(lr=0.01, epochs=20, prox=1.0)."
    require(traits.with_prox is not None and not traits.numbered, "solver", "must be a solvers.SGD", solver, fix)
    with_prox(solver, 0.0)  # refuses a kept state
