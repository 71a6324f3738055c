"""Mocha: clients' own models, each regularised by how it relates to every other, and these relations are learned."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from equipoise.core.abilities import solver_traits
from equipoise.errors import Diverged, IncompatibleParts, InvalidParameter, require, require_number
from equipoise.models.linear import LinearModel
from equipoise.personal.context import PersonalContext
from equipoise.personal.ditto import TrainsOwnModels, own_solver
from equipoise.types import Cohort, LocalSolver, Pull

if TYPE_CHECKING:
    from equipoise.algorithm import Algorithm


def relationship(models: Tensor, floor: float) -> Tensor:
    """The Ω (n, n) that minimises tr(Ω⁻¹ V Vᵀ) for models V (n, D), among Ω with trace n and eigenvalues ≥ floor.

    Without a floor that is n (V Vᵀ)^{1/2} / tr (V Vᵀ)^{1/2}; models that are all zero give the identity.

    >>> relationship(torch.tensor([[3.0, 0.0], [0.0, 1.0]]), 0.1)
    tensor([[1.5000, 0.0000],
            [0.0000, 0.5000]], dtype=torch.float64)
    """
    rows = models.detach().cpu().double()
    squares, directions = torch.linalg.eigh(rows @ rows.t())
    values = raised(squares.clamp(min=0).sqrt(), floor)
    relation: Tensor = directions @ torch.diag(values) @ directions.t()
    return relation


def raised(spread: Tensor, floor: float) -> Tensor:
    """The ω (n,) that minimise Σ s_i²/ω_i with Σ ω_i = n and ω_i ≥ floor: max(floor, t s_i), with the t that gives the sum."""
    count = len(spread)
    if not bool(spread.max() > 1e-300):  # of smaller ones the ratios are lost
        return torch.ones_like(spread)
    falling = spread.sort(descending=True).values
    free = torch.arange(1, count + 1, dtype=spread.dtype)  # if this number of values are above the floor …
    scale = (count - (count - free) * floor) / falling.cumsum(0)  # … this is t
    above = int((scale * falling >= floor).sum())  # in exact arithmetic one at least
    return (scale[max(above, 1) - 1] * spread).clamp(min=floor)


@dataclass(frozen=True, eq=False)
class ServerModels:
    """What Mocha's server knows where clients may lie: Ω (n, n), and the models (n, D) that they have told it of."""

    relation: Tensor
    told: Tensor


def regulariser_pull(
    models: Tensor, relation: Tensor, strength: float, l2: float, *, told: Tensor | None = None
) -> Pull | None:
    """The regulariser's pull on each of the models V (n, D) while the others stand still; None if there is none.

    `told` (n, D) are the models as the server knows them, from which it finds the slopes.

    The gradient of (λ/2) tr(Ω⁻¹ V Vᵀ) at V is λ Ω⁻¹V. Clients that all go down this quadratic at once may together overshoot;
    with m the largest eigenvalue of Ω⁻¹ each goes down the bound λ⟨(Ω⁻¹V)_k, v − V_k⟩ + (λ m/2)‖v − V_k‖² instead, whose sum
    over clients lies above it: what lowers every client's part lowers the whole.
    """
    total = strength / float(torch.linalg.eigvalsh(relation)[0]) + l2
    if total == 0:
        return None
    known = models if told is None else told
    slopes = torch.linalg.solve(relation, known.detach().cpu().double()).to(models)
    anchor = ((total - l2) * models - strength * slopes) / total
    return Pull(anchor, torch.full((len(models),), total, dtype=models.dtype))


@dataclass(frozen=True)
class Mocha(TrainsOwnModels):
    """Multi-task learning: min over V, Ω of Σ_k F_k(v_k) + (λ/2) tr(Ω⁻¹ V Vᵀ) + (λ₂/2)‖V‖², v_k the rows of V, Ω learned.

    Ω (n, n) says how the clients' models relate. It starts at the identity (clients know nothing of each other), has trace n,
    and after each round is set to its best value for the models, n(V Vᵀ)^{1/2}/tr((V Vᵀ)^{1/2}), with eigenvalues of at least
    `floor`; `floor=1` keeps the identity, which is training alone with an L2 term. `strength` is λ, `l2` λ₂. At its best Ω the
    term is (λ/2n)(sum of the singular values of V)², which favours models in few common directions.

    In a round all clients take local steps on their own model, by `solver` (None: as the algorithm's); Ω is fixed meanwhile and
    the others' models are those of the start of the round. The published solver takes steps of dual coordinate ascent on the
    hinge loss; these are steps of SGD on the same objective, which any convex loss has, with each F_k the mean over a client's
    examples. Made for linear models, with the hinge loss (models.LinearSVM), and sampling.Full(). The server sees every model.
    The shared model is trained beside it and takes no part. A client sends how far its model has moved; an attack on updates
    changes what is sent, and with it what the server tells the others, while the malicious client's own model stays honest.

    Source: Smith, Chiang, Sanjabi, Talwalkar 2017; Zhang, Yeung 2010 (Ω); Li 2023 (thesis), sections 5.3.4 and 5.6.2.

    >>> import equipoise as eq
    >>> clients = [(name, torch.ones(1, 1), torch.tensor([y])) for name, y in (("a", 0.0), ("b", 4.0))]  # (v − y)²
    >>> solver, personal = eq.solvers.SGD(lr=0.25, batch_size=None), Mocha(strength=0.4, floor=1.0)
    >>> algorithm = eq.Algorithm(solver=solver, personal=personal, sampler=eq.sampling.Full())
    >>> data, model = eq.FederatedData(eq.ClientSet.pack(clients)), eq.models.LinearRegression(1, bias=False)
    >>> result = eq.train(model, data, algorithm, rounds=2, clients_per_round=2)
    >>> round(float(result.personal.params(["b"])), 3)  # Ω is the identity: v = 2, then 2 − ¼(2(2 − 4) + 0.4 · 2)
    2.8
    """

    strength: float = 0.1  # λ ≥ 0: how strongly related models pull each other
    l2: float = 0.0  # λ₂ ≥ 0, the L2 term
    floor: float = 0.1  # the least eigenvalue of Ω, in (0, 1]
    solver: LocalSolver | None = None  # trains the clients' own models; None: the algorithm's solver

    sums_models: ClassVar[bool] = True  # the server learns the clients' own models

    def __post_init__(self) -> None:
        for name in ("strength", "l2"):
            require_number(name, getattr(self, name), "[0, ∞)")
        require_number("floor", self.floor, "(0, 1]")
        super().__post_init__()

    def check(self, algorithm: Algorithm) -> None:
        """Refuse, in `algorithm`, samplers that leave clients out, and steps that may overshoot the point that pulls them."""
        if not algorithm.traits.sampler.everyone:
            raise IncompatibleParts(
                f"{self!r} relates every client to every other in each round, but {algorithm.drawn_by!r} leaves clients out.",
                "Add sampler=sampling.Full(); with many clients use personal.Ditto() or personal.L2SGD().",
            )
        super().check(algorithm)
        solver = own_solver(self.solver, algorithm.solver)
        if solver_traits(solver).for_own_model is not None:
            lr = solver.learning_rate(0)
            fast = lr * (self.strength / self.floor + self.l2)
            rule = "(strength / floor + l2) · the learning rate must not exceed 1, or models may diverge"
            found = f"({self.strength:g} / {self.floor:g} + {self.l2:g}) · {lr:g} = {fast:g}"
            require(fast <= 1, "strength", rule, found, "Lower strength, raise floor, or give solver=SGD(…) a smaller lr.")

    def begin(self, context: PersonalContext, params: Tensor) -> tuple[Tensor, Any]:
        """Every client starts from w^0, and Ω (n, n) from the identity; refuses models that are not linear.

        `context` holds the engine, the task and the data of the run. `params` (D,) is w^0.
        """
        module = context.task.module
        if not isinstance(module, LinearModel):
            fix = "Use models.LinearSVM(…), or personal.Ditto() with this model."
            raise InvalidParameter("personal", "Mocha is convex and needs a linear model", type(module).__name__, fix)
        count = len(context.data.train)
        relation = torch.eye(count, dtype=torch.float64)
        return params, ServerModels(relation, params.expand(count, -1).clone()) if context.update_attack else relation

    def work(
        self, context: PersonalContext, params: Tensor, cohort: Cohort, rows: Tensor, solver: LocalSolver, shared: Any
    ) -> tuple[Tensor, Any]:
        """All models (n, D) after local steps under the regulariser, and the best Ω (n, n) for them.

        `context` holds the engine, the task and the data of the run. `params` (D,) is the shared model, `cohort` holds the
        clients, `rows` (K, width) is what they keep, `solver` is the algorithm's, and `shared` is the state of all clients
        together.
        """
        lies = context.update_attack
        relation = shared.relation if lies else shared
        told = shared.told.to(rows) if lies else rows
        pull = regulariser_pull(rows, relation, self.strength, self.l2, told=told)
        after = context.engine.own_steps(rows, context.own_stream(cohort), own_solver(self.solver, solver), pull)
        lost = ~torch.isfinite(after).all(1).cpu()
        if bool(lost.any()):  # it would take all others along
            raise Diverged(cohort.round, (context.data.train.ids[k] for k in cohort.clients[lost].tolist()), "own model")
        if not lies:
            return after, relationship(after, self.floor)
        told = told + context.sent(cohort, after - rows, told.mean(0))
        return after, ServerModels(relationship(told, self.floor), told)
