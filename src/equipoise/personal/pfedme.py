"""pFedMe: the shared model follows clients' own models through Moreau envelopes of their losses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
from torch import Tensor

from equipoise.core.abilities import solver_traits
from equipoise.errors import IncompatibleParts, require, require_integer, require_number
from equipoise.personal.context import PersonalContext
from equipoise.personal.ditto import pull_to
from equipoise.types import Cohort, LocalSolver, SgdRule

if TYPE_CHECKING:
    from equipoise.algorithm import Algorithm


@dataclass(frozen=True)
class EnvelopeSteps:
    """Local work of pFedMe: the weights are θ, and the memory is y − w^t, which is what the client sends.

    Every batch is used for `inner` steps θ ← θ − r(∇F(θ) + λ(θ − y)), then y ← y − ηλ(y − θ). θ goes on from batch to batch, as
    in the authors' code. `solver` gives batches and η; r is `lr` (None: η).
    """

    solver: LocalSolver
    strength: float
    inner: int
    lr: float | None = None

    numbered: ClassVar[bool] = True
    by_turns: ClassVar[bool] = True

    @property
    def batch_size(self) -> int | None:
        """As the solver's."""
        return self.solver.batch_size

    @property
    def repeats(self) -> int:
        """Every batch is used for all inner steps."""
        return self.inner

    def local_steps(self, size: int, effort: int | None = None) -> int:
        """The inner steps on all batches of a client with `size` examples; `effort` counts epochs (or batches)."""
        return self.inner * self.solver.local_steps(size, effort)

    def learning_rate(self, round_index: int) -> float:
        """η, as the solver's."""
        return self.solver.learning_rate(round_index)

    def keeps(self, dimension: int) -> int:
        """The memory y − w^t, D numbers, and the number of steps: read after the work, and never kept."""
        return dimension + 1

    def begin(self, weights: Tensor) -> tuple[Tensor, ...]:
        """Y − w^t before the first step."""
        return (torch.zeros_like(weights),)

    def step(
        self, weights: Tensor, gradient: Tensor, memory: tuple[Tensor, ...], *, anchor: Tensor, lr: float, number: Any = 1
    ) -> None:
        """One inner step of θ, in place; the last one on a batch also moves y."""
        (moved,) = memory
        near = torch.add(anchor, moved)  # y
        rate = lr if self.lr is None else self.lr
        weights.sub_(torch.add(gradient, weights - near, alpha=self.strength), alpha=rate)
        due = number % self.inner == 0
        change = (near - weights).mul_(lr * self.strength)
        moved.sub_(torch.where(due, change, 0.0) if isinstance(due, Tensor) else change * float(due))


@dataclass(frozen=True)
class PFedMe:
    """A client's own model θ_k minimises F_k(θ) + (λ/2)‖θ − w‖². The shared model w minimises the mean of these minima.

    A client of a round begins with y = θ = w^t. On each batch it takes `steps` K steps θ ← θ − r(∇F(θ) + λ(θ − y)), and
    then y ← y − ηλ(y − θ). It sends y − w^t. `strength` is λ, `lr` is r (None: the algorithm's rate), and the algorithm's
    solver, a plain SGD, gives η, batches and epochs; server_opt.SGD(β) is the published mixing. θ is kept from batch to
    batch.

    Every client, also one that was never drawn, gets θ_k of the final w: K passes over all of its data from w, at the rate
    r, pulled to w by λ. Clients keep nothing between rounds. With a small λ a client trains alone; with a large λ it gets
    the shared model. The risk sees the losses of the shared model. There is no hidden weight decay.

    Source: T Dinh, Tran, Nguyen 2020 (pFedMe). The published code evaluates y in place of θ.

    >>> import equipoise as eq
    >>> data = eq.data.gaussian_means([[0.0], [4.0]], examples=10, exact=True)  # F_k(w) = (w − μ_k)² + 1, from w^0 = 0
    >>> algorithm = eq.Algorithm(solver=eq.solvers.SGD(lr=0.25, batch_size=None), personal=PFedMe(strength=2.0, steps=1))
    >>> result = eq.train(eq.models.MeanEstimator(1), data, algorithm, rounds=1, clients_per_round=2)
    >>> round(float(result.personal.params(["client-1"])), 3)  # θ = 2, y = 0 + ¼ · 2 · 2 = 1, w = ½; then ½ + ¼ · 7
    2.25
    """

    strength: float = 5.0  # λ > 0: the pull to w
    steps: int = 5  # K, steps on each batch, and passes for the model that is served
    lr: float | None = None  # r, the rate of θ; None: the algorithm's rate

    finetunes: ClassVar[bool] = True  # all clients find their own model after the rounds

    def __post_init__(self) -> None:
        require_number(
            "strength", self.strength, "(0, ∞)", "A small one trains alone; the authors use 15 with a rate of 0.005."
        )
        require_integer("steps", self.steps, 1)
        require_number("lr", self.lr, "(0, ∞)", none="the algorithm's rate")

    def check(self, algorithm: Algorithm) -> None:
        """Refuse, in `algorithm`, solvers other than plain SGD, and steps that overshoot the point that pulls them."""
        solver = algorithm.solver
        if solver_traits(solver).sgd != SgdRule(0.0, 0.0, 0.0):
            raise IncompatibleParts(
                f"{self!r} has steps of its own, for which {solver!r} gives rate, batches and epochs alone.",
                "Use solvers.SGD(…) without momentum, weight decay, proximal term and further options.",
            )
        for name, rate, most in (("the learning rate", solver.learning_rate(0), 1.0), ("lr", self.lr, 1.99)):
            if rate is not None:  # θ may leap over y and come nearer; y must not leap over θ
                found, fix = f"{self.strength:g} · {rate:g} = {self.strength * rate:g}", "Lower strength, or the rate."
                rule = f"times {name} must not exceed {most:g}, or steps leap over the point that they are pulled to"
                require(self.strength * rate <= most, "strength", rule, found, fix)

    def width(self, dimension: int) -> int:
        """Clients keep nothing between rounds.

        `dimension` is D, the number of parameters.
        """
        return 0

    def begin(self, context: PersonalContext, params: Tensor) -> tuple[Tensor, Any]:
        """An empty row, and no shared state.

        `context` holds the engine, the task and the data of the run. `params` (D,) is w^0.
        """
        return params[:0], None

    def work(
        self, context: PersonalContext, params: Tensor, cohort: Cohort, rows: Tensor, solver: LocalSolver, shared: Any
    ) -> tuple[Tensor, Any]:
        """Rows and shared state as they are.

        `context` holds the engine, the task and the data of the run. `params` (D,) is the shared model, `cohort` holds the
        clients, `rows` (K, width) is what they keep, `solver` is the algorithm's, and `shared` is the state of all clients
        together.
        """
        return rows, shared

    def updates(self, context: PersonalContext, params: Tensor, cohort: Cohort, rows: Tensor, solver: LocalSolver) -> Tensor:
        """What clients send: y − w^t after their local work, (K, D).

        `context` holds the engine, the task and the data of the run. `params` (D,) is the shared model, `cohort` holds the
        clients, `rows` (K, width) is what they keep, and `solver` is the algorithm's.
        """
        steps = EnvelopeSteps(solver, self.strength, self.steps, self.lr)
        fresh = torch.zeros(len(cohort), steps.keeps(len(params)), dtype=torch.promote_types(params.dtype, torch.float32))
        work = context.engine.updates(params, cohort.having(rows=fresh), steps)
        kept = fresh if work.rows is None else work.rows
        return kept[:, : len(params)].to(params)

    def models(
        self, context: PersonalContext, params: Tensor, cohort: Cohort, rows: Tensor, solver: LocalSolver, shared: Any
    ) -> Tensor:
        """θ_k (K, D) of some clients: K passes over each client's data from w, pulled to w.

        `context` holds the engine, the task and the data of the run. `params` (D,) is the shared model, `cohort` holds the
        clients, `rows` (K, width) is what they keep, `solver` is the algorithm's, and `shared` is the state of all clients
        together.
        """
        start = params.expand(len(cohort), -1).contiguous()
        alone: Callable[[int], LocalSolver] | None = solver_traits(solver).with_epochs
        own = solver if alone is None else alone(self.steps)
        if self.lr is not None:
            own = replace(cast(Any, own), lr=self.lr, schedule=None, lr_decay=1.0)
        return context.engine.own_steps(start, context.own_stream(cohort), own, pull_to(params, self.strength, len(cohort)))
