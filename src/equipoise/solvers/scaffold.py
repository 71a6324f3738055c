"""SCAFFOLD: local steps corrected by control variates, so that clients drift less from the common minimum."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from equipoise.core.abilities import is_of_user, solver_traits
from equipoise.errors import require
from equipoise.solvers.prepared import AdjustedSolver, RoundContext, require_sgd
from equipoise.solvers.sgd import SGD
from equipoise.types import LocalSolver


def adds_up_gradients(solver: LocalSolver) -> bool:
    """Whether steps from 0, around an anchor of 0, are linear in the gradients: Σ_i f_i g_i. An error in a step means no.

    Tried on two sequences of three gradients and on 2 · the first + 3 · the second.
    """

    def moved(gradients: Tensor) -> Tensor:
        weights = torch.zeros(4, dtype=torch.float64)
        memory, anchor = solver.begin(weights), weights.clone()
        for gradient in gradients:
            solver.step(weights, gradient.clone(), memory, anchor=anchor, lr=0.1)
        return weights

    first, second = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    try:
        return torch.allclose(moved(2 * first + 3 * second), 2 * moved(first) + 3 * moved(second), rtol=1e-6, atol=1e-9)
    except Exception:
        return False


@dataclass(frozen=True)
class Scaffold:
    """SCAFFOLD, option II: every local gradient is ∇F_k(y) − c_k + c; c_k is what client k has seen, c its mean over clients.

    Both start at 0. After its steps a client keeps c_k ← c_k − c − u_k/(ηa_k), with the round's rate η and a_k the length of
    its steps (τ_k for plain SGD; see aggregators.FedNova). The server moves c by Σ α_k Δc_k over the clients that took part, α
    over all n clients, so that c = Σ_k α_k c_k after every round, also under partial participation. (Some published code adds
    the mean of Δc over participants, which lacks the factor m/n.) Each client keeps D numbers. Clients with zero steps keep
    theirs, and take no part in the round. `solver` gives rate, batches, momentum and proximal term. A solver of
    your own is refused unless its update is a sum of gradients, each with a fixed factor: c_k is made of that sum.

    It works only with risk.Mean(): with other weights the correction cancels the risk. Where the server does not take the
    mean of updates that it sees one by one, c follows the total T: c ← c − s(c + T/(ηa)), s being the base weight of the
    clients in it. With a robust aggregator c = Σ_k α_k c_k then no longer holds, and a is the cohort's mean length. Under
    secure sums and differential privacy the solver must count its work in `steps`, so that a is public; c_k follows the
    update as it was sent, clipped, and c is made of what was released anyway.

    Source: Karimireddy et al. 2020 (SCAFFOLD, arXiv 1910.06378); weights α instead of 1/n are ours.
    """

    solver: LocalSolver = field(default_factory=SGD)

    public_only: ClassVar[bool] = True  # c comes from totals that were released

    def __post_init__(self) -> None:
        require_sgd(self.solver)
        traits = solver_traits(self.solver)
        good, fix = traits.normalisers is not None and not traits.rates, "E.g. solvers.SGD(lr=0.05)."
        require(good, "solver", "must have one rate for all parameters", self.solver, fix)
        if is_of_user(type(self.solver).step):
            rule = "must add up gradients, each with a fixed factor: c_k is made of that sum"
            fix = "Use solvers.SGD(…), also with momentum or a proximal term, or your solver without SCAFFOLD."
            require(adds_up_gradients(self.solver), "solver", rule, self.solver, fix)

    @property
    def keeps(self) -> Callable[[int], int]:
        """A client keeps c_k, D numbers."""
        return lambda dimension: dimension

    def prepare(self, context: RoundContext, state: Tensor | None) -> tuple[LocalSolver, Tensor]:
        """The solver with this round's c."""
        common = context.new_vector() if state is None else state.to(context.params)
        return AdjustedSolver(self.solver, shift=common), common

    def after_rows(self, state: Tensor, alpha: Tensor, change: Tensor) -> Tensor:
        """The c after a round: c + Σ α_k (c_k′ − c_k), of the clients whose rows changed by `change` (K, D)."""
        return state + (alpha.double() @ change.double()).to(state)

    def after_total(self, state: Tensor, total: Tensor, share: float, scale: float) -> Tensor:
        """The c after a round by its total T alone: c − s(c + T/(ηa)), with s = `share` and ηa = `scale`."""
        return state - share * (state + total.to(state) / scale)
