"""FedDyn: local objectives that are corrected from round to round, so that clients agree with the minimum of the mean."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from equipoise.core.abilities import solver_traits
from equipoise.errors import require, require_number
from equipoise.solvers.prepared import AdjustedSolver, RoundContext, require_sgd
from equipoise.solvers.sgd import SGD
from equipoise.types import LocalSolver


@dataclass(frozen=True)
class FedDyn:
    """Dynamic regularisation: clients minimise F_k(y) − ⟨g_k, y⟩ + (κ_k/2)‖y − w^t‖², with κ_k = κ/(n α_k) for n clients.

    `strength` is κ. Afterwards client k keeps g_k ← g_k − κ_k u_k, D numbers that begin at 0. The server keeps h, from 0: with
    ū the *plain* mean of the updates of m clients, h ← h − κ (m/n) ū, and w ← w + ū − h/κ. After every round h = Σ_k α_k g_k,
    also under partial participation. Base weights α enter by κ_k alone, as in the authors' code: with equal weights κ_k = κ.
    Clients with zero steps take no part. `solver` gives rate, batches and momentum; it has no proximal term of its own.

    It works only with risk.Mean(), because g_k integrates fixed weights. It refuses robust aggregators, because h keeps
    every error, and differential privacy, because noise in h adds up from round to round. The server has its own step:
    server_opt.SGD(1).

    Source: Acar et al. 2021 (FedDyn). Some published code has (κ/2)‖y − w‖ in place of the square.
    """

    strength: float = 0.1
    solver: LocalSolver = field(default_factory=SGD)

    public_only: ClassVar[bool] = True  # h comes from totals that were released
    plain_mean: ClassVar[bool] = True  # every client of a cohort counts alike

    def __post_init__(self) -> None:
        require_number("strength", self.strength, "(0, ∞)")
        require_sgd(self.solver)
        traits, fix = solver_traits(self.solver), "E.g. solvers.SGD(lr=0.05)."
        require(traits.prox == 0, "solver", "must have no proximal term of its own: `strength` is one", self.solver, fix)

    @property
    def keeps(self) -> Callable[[int], int]:
        """A client keeps g_k, D numbers."""
        return lambda dimension: dimension

    def own_prox(self, alpha: Tensor, clients: int) -> Tensor:
        """κ_k = κ/(n α_k) of clients with base weights α (K,) among n, (K,)."""
        return self.strength / (clients * alpha)

    def prepare(self, context: RoundContext, state: Tensor | None) -> tuple[LocalSolver, Tensor]:
        """The solver whose gradients lack g_k, and h."""
        common = context.new_vector() if state is None else state.to(context.params)
        return AdjustedSolver(self.solver, shift=torch.zeros_like(common), dynamic=True), common

    def after_total(self, state: Tensor, total: Tensor, share: float, scale: float) -> Tensor:
        """The h after a round: h − κ (m/n) ū, with m/n = `share` and ū = `total`."""
        return state - self.strength * share * total.to(state)

    def server_total(self, state: Tensor, total: Tensor) -> Tensor:
        """What the server moves by: ū − h/κ, with the h of after this round."""
        return total - state.to(total) / self.strength
