"""Personal models that are trained in every round beside the shared one: Ditto, local training and L2SGD."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor

from equipoise.core.abilities import is_part, solver_traits
from equipoise.errors import IncompatibleParts, InvalidParameter, is_number, require, require_kind, require_number
from equipoise.personal.context import PersonalContext
from equipoise.types import Cohort, LocalSolver, Pull

if TYPE_CHECKING:
    from equipoise.algorithm import Algorithm

USUAL_STRENGTHS = (0.1, 1.0, 2.0)  # λ that clients choose from
STRENGTHS_UNDER_ATTACK = (0.05, 0.1, 0.2)  # λ under model replacement, or if over half are malicious
ENOUGH_EXAMPLES = 4  # validation examples to choose a strength by


def own_solver(given: LocalSolver | None, of_algorithm: LocalSolver) -> LocalSolver:
    """How a client trains its own model: as `given`, else as it trains the shared one, without stragglers or FedProx's term."""
    solver = given if given is not None else of_algorithm
    for_own_model = solver_traits(solver).for_own_model
    return solver if for_own_model is None else for_own_model()


def check_own_solver(solver: LocalSolver | None) -> None:
    """Raise InvalidParameter unless `solver` is None or a local solver that can train a client's own model."""
    require_kind("solver", "solver", solver)
    good = solver is None or (is_part(solver, "local_steps") and solver_traits(solver).finish is None)
    require(good, "solver", "must be a local solver, or None for the algorithm's", solver, "E.g. solvers.SGD(lr=0.05).")


def refuse_unfit_solver(method: object, algorithm: Algorithm) -> None:
    """Refuse to train personal models by a solver that only makes sense for the shared one."""
    solver = algorithm.traits.personal.solver or algorithm.solver
    traits = solver_traits(solver)
    if traits.prepare is not None or traits.finish is not None or traits.repeats > 1:
        raise IncompatibleParts(
            f"{method!r} would train clients' own models by {type(solver).__name__}, which is made for the shared model.",
            "Give it a solver of its own, e.g. solver=solvers.SGD(lr=0.1).",
        )


def refuse_leaps(solver: LocalSolver, strength: float, pulling: str) -> None:
    """Refuse steps that are too long for the pull towards the shared model, or towards another one of that name."""
    if solver_traits(solver).for_own_model is not None:
        lr = solver.learning_rate(0)
        rule = f"times the learning rate must not exceed 1, or personal models leap over the {pulling} one"
        found, fix = f"{strength:g} · {lr:g} = {strength * lr:g}", "Lower strength, or give solver=SGD(…) a smaller lr."
        require(strength * lr <= 1, "strength", rule, found, fix)


class TrainsOwnModels:
    """What methods share whose clients keep a model of their own, trained by `solver` (None: by the algorithm's)."""

    solver: LocalSolver | None  # trains the clients' own models; None: the algorithm's solver

    def __post_init__(self) -> None:
        check_own_solver(self.solver)

    def check(self, algorithm: Algorithm) -> None:
        """Refuse, in `algorithm`, a solver that makes no personal model."""
        refuse_unfit_solver(self, algorithm)

    def width(self, dimension: int) -> int:
        """A client keeps its model, D numbers.

        `dimension` is D, the number of parameters.
        """
        return dimension

    def begin(self, context: PersonalContext, params: Tensor) -> tuple[Tensor, Any]:
        """Every client starts from w^0; there is no shared state.

        `context` holds the engine, the task and the data of the run. `params` (D,) is w^0.
        """
        return params, None

    def models(
        self, context: PersonalContext, params: Tensor, cohort: Cohort, rows: Tensor, solver: LocalSolver, shared: Any
    ) -> Tensor:
        """The models (K, D) that clients keep.

        `context` holds the engine, the task and the data of the run. `params` (D,) is the shared model, `cohort` holds the
        clients, `rows` (K, width) is what they keep, `solver` is the algorithm's, and `shared` is the state of all clients
        together.
        """
        return rows


@dataclass(frozen=True)
class Ditto:
    """Each client also trains a model of its own near the shared one: v ← v − η(∇F_k(v) + λ(v − w^t)), v kept between rounds.

    `strength` is λ: 0 trains v on the client's data alone, a large λ makes it the shared model. With `choices` each client
    keeps a model for each of these λ and is served the one with the lowest validation error (then loss); clients with
    fewer than 4 validation examples use `strength`. `solver` trains v (None: as the algorithm trains w). Every client of a
    cohort does this work, also one that has no weight in the shared model.

    `when="joint"` is the published algorithm. `when="finetuning"` trains v after w, from w and near it, by `solver`; nothing is
    kept between rounds. The published choices are USUAL_STRENGTHS in personal.ditto, and STRENGTHS_UNDER_ATTACK there where
    attacks are strong.

    Source: Li 2023 (thesis), section 5.2, Algorithms 6 and 7, section 5.7.2 (choosing λ); Li et al. 2021 (Ditto).

    >>> import equipoise as eq
    >>> data = eq.data.gaussian_means([[0.0], [4.0]], examples=10, exact=True)  # F_k(w) = (w − μ_k)² + 1, from w^0 = 0
    >>> algorithm = eq.Algorithm(solver=eq.solvers.SGD(lr=0.25, batch_size=None), personal=Ditto(strength=1.0))
    >>> result = eq.train(eq.models.MeanEstimator(1), data, algorithm, rounds=2, clients_per_round=2)
    >>> round(float(result.personal.params(["client-1"])), 3)  # v = 2, w^1 = 1; then 2 − ¼(2(2 − 4) + (2 − 1))
    2.75
    """

    strength: float = 1.0  # λ ≥ 0: the pull to the shared model
    choices: tuple[float, ...] = ()  # values of λ that each client chooses from by its validation error
    solver: LocalSolver | None = None  # trains the clients' own models; None: the algorithm's solver
    when: Literal["joint", "finetuning"] = "joint"  # train v in every round, or after the rounds

    keeps_carried: ClassVar[bool] = True  # a client's row holds its own carried values, behind its parameters

    def __post_init__(self) -> None:
        require_number("strength", self.strength, "[0, ∞)", "0 is local training; 1 is a good start.")
        given: Any = self.choices
        good = isinstance(given, tuple | list) and all(is_number(c) and 0 <= c < math.inf for c in given)
        require(good, "choices", "must be numbers ≥ 0", self.choices, f"E.g. {USUAL_STRENGTHS}.")
        object.__setattr__(self, "choices", tuple(float(c) for c in self.choices))
        require(self.when in ("joint", "finetuning"), "when", 'must be "joint" or "finetuning"', self.when)
        check_own_solver(self.solver)

    @property
    def strengths(self) -> tuple[float, ...]:
        """All λ that models are trained with; the first is `strength`."""
        return tuple(dict.fromkeys((self.strength, *self.choices)))

    def check(self, algorithm: Algorithm) -> None:
        """Refuse, in `algorithm`, a solver that makes no personal model, or steps that overshoot the shared model."""
        refuse_unfit_solver(self, algorithm)
        refuse_leaps(own_solver(self.solver, algorithm.solver), max(self.strengths), "shared")

    def width(self, dimension: int) -> int:
        """One model per strength, D numbers each; 0 where models are trained after the shared one.

        `dimension` is D, the number of parameters.
        """
        return len(self.strengths) * dimension if self.when == "joint" else 0

    def begin(self, context: PersonalContext, params: Tensor) -> tuple[Tensor, Any]:
        """w^0 for every strength, and no shared state; refuses `choices` without validation examples.

        `context` holds the engine, the task and the data of the run. `params` (D,) is w^0.
        """
        validation = context.data.validation
        if self.choices and (validation is None or not bool((context.data.train.find(validation) >= 0).any())):
            rule = "need data with validation examples of the training clients"
            fix = "Make them by data.split_examples(…), or give one strength."
            raise InvalidParameter("choices", rule, self.choices, fix)
        return params.repeat(len(self.strengths)) if self.when == "joint" else params[:0], None

    def work(
        self, context: PersonalContext, params: Tensor, cohort: Cohort, rows: Tensor, solver: LocalSolver, shared: Any
    ) -> tuple[Tensor, Any]:
        """The cohort's models (K, strengths · D) after local steps near w^t.

        `context` holds the engine, the task and the data of the run. `params` (D,) is the shared model, `cohort` holds the
        clients, `rows` (K, width) is what they keep, `solver` is the algorithm's, and `shared` is the state of all clients
        together.
        """
        return self._train(context, params, cohort, rows.view(len(rows), -1, len(params)), solver).flatten(1), shared

    def _train(self, context: PersonalContext, params: Tensor, cohort: Cohort, models: Tensor, solver: LocalSolver) -> Tensor:
        """Models (K, C, D), one per strength, after local work near w."""
        work, solver = context.own_stream(cohort), own_solver(self.solver, solver)
        after = [
            context.engine.own_steps(models[:, c].contiguous(), work, solver, pull_to(params, strength, len(models)))
            for c, strength in enumerate(self.strengths)
        ]
        return torch.stack(after, 1)

    def models(
        self, context: PersonalContext, params: Tensor, cohort: Cohort, rows: Tensor, solver: LocalSolver, shared: Any
    ) -> Tensor:
        """The models (K, D) at `strength`, or at the choice with the best validation error of each client.

        `context` holds the engine, the task and the data of the run. `params` (D,) is the shared model, `cohort` holds the
        clients, `rows` (K, width) is what they keep, `solver` is the algorithm's, and `shared` is the state of all clients
        together.
        """
        if self.when == "joint":
            models = rows.view(len(rows), -1, len(params))
        else:
            start = params.expand(len(cohort), len(self.strengths), -1)
            models = self._train(context, params, cohort, start, solver)
        if not self.choices:
            return models[:, 0]
        chosen = choose_by_validation(context, models, cohort.clients, [self.strengths.index(c) for c in self.choices])
        return models[torch.arange(len(models)), chosen]


def pull_to(anchor: Tensor, strength: float, clients: int) -> Pull | None:
    """A pull of equal strength on all clients; none at strength 0."""
    return Pull(anchor, torch.full((clients,), float(strength), dtype=anchor.dtype)) if strength else None


def choose_by_validation(context: PersonalContext, models: Tensor, clients: Tensor, choices: Sequence[int]) -> Tensor:
    """Which of the models (K, C, D) each client does best with on its validation examples, (K,); 0 where it has too few.

    It is one of the `choices`, numbers of models. Fewer errors are better; among equals the lower loss, then the first.
    """
    validation = context.data.validation
    chosen = torch.zeros(len(clients), dtype=torch.int64)
    if validation is None:
        return chosen
    where = validation.find(context.data.train.select(clients))
    able = (where >= 0) & (validation.sizes.cpu()[where.clamp(min=0)] >= ENOUGH_EXAMPLES)
    here = able.nonzero().flatten()
    if len(here) == 0:
        return chosen
    own = models[here.to(models.device)]
    scores = [context.engine.evaluate_own(own[:, c].contiguous(), validation, where[here]) for c in choices]
    loss, error = (torch.stack([score[i] for score in scores], 1) for i in (0, 1))  # (k, choices)
    lost = ~(torch.isfinite(loss) & torch.isfinite(error))  # a model that diverged
    loss, error = loss.masked_fill(lost, math.inf), error.masked_fill(lost, math.inf)
    level = error == error.min(1, keepdim=True).values
    chosen[here] = torch.tensor(choices)[torch.where(level, loss, math.inf).argmin(1)]
    return chosen


@dataclass(frozen=True)
class Local(TrainsOwnModels):
    """Each client trains alone whenever it is in a cohort, v ← v − η∇F_k(v); its model v is kept between rounds.

    The shared model is trained as without this method. `solver` trains the clients' own models (None: as the algorithm's).

    Source: Li 2023 (thesis), section 5.3 ("local").

    >>> import equipoise as eq
    >>> data = eq.data.gaussian_means([[0.0], [4.0]], examples=10, exact=True)  # F_k(w) = (w − μ_k)² + 1, from w^0 = 0
    >>> algorithm = eq.Algorithm(solver=eq.solvers.SGD(lr=0.25, batch_size=None), personal=Local())
    >>> result = eq.train(eq.models.MeanEstimator(1), data, algorithm, rounds=1, clients_per_round=2)
    >>> round(float(result.personal.params(["client-1"])), 3)  # 0 − ¼ · 2(0 − 4)
    2.0
    """

    solver: LocalSolver | None = None  # trains the clients' own models; None: the algorithm's solver

    keeps_carried: ClassVar[bool] = True  # a client's row holds its own carried values, behind its parameters

    def work(
        self, context: PersonalContext, params: Tensor, cohort: Cohort, rows: Tensor, solver: LocalSolver, shared: Any
    ) -> tuple[Tensor, Any]:
        """The cohort's models (K, D) after local steps on each client's own data.

        `context` holds the engine, the task and the data of the run. `params` (D,) is the shared model, `cohort` holds the
        clients, `rows` (K, width) is what they keep, `solver` is the algorithm's, and `shared` is the state of all clients
        together.
        """
        return context.engine.own_steps(rows, context.own_stream(cohort), own_solver(self.solver, solver)), shared


@dataclass(frozen=True)
class L2SGD(TrainsOwnModels):
    """Clients' own models, each pulled towards the mean of all: min Σ_k F_k(v_k) + (λ/2)‖v_k − m‖², m the mean over clients.

    `strength` is λ. The published method needs all clients now and then; as in the comparison with Ditto, the clients of a
    cohort take steps v ← v − η(∇F_k(v) + λ(v − m)) at the current m, and the server keeps m up to date. The shared model is
    trained, too, and has no effect on these models. A client that was never drawn counts in m with its initial model. A
    client sends the change of its model. An attack on updates changes what the client sends, and its own model stays
    honest.

    Source: Li 2023 (thesis), section 5.6.2; Hanzely, Richtárik 2020.

    >>> import equipoise as eq
    >>> data = eq.data.gaussian_means([[0.0], [4.0]], examples=10, exact=True)  # F_k(w) = (w − μ_k)² + 1, from w^0 = 0
    >>> algorithm = eq.Algorithm(solver=eq.solvers.SGD(lr=0.25, batch_size=None), personal=L2SGD(strength=1.0))
    >>> result = eq.train(eq.models.MeanEstimator(1), data, algorithm, rounds=2, clients_per_round=2)
    >>> round(float(result.personal.params(["client-1"])), 3)  # v = 2, m = 1; then 2 − ¼(2(2 − 4) + (2 − 1))
    2.75
    """

    strength: float = 1.0  # λ ≥ 0: the pull to the mean of all models
    solver: LocalSolver | None = None  # trains the clients' own models; None: the algorithm's solver

    sums_models: ClassVar[bool] = True  # the server learns the mean of the clients' own models

    keeps_carried: ClassVar[bool] = True  # a client's row holds its own carried values, behind its parameters

    def __post_init__(self) -> None:
        super().__post_init__()
        require_number("strength", self.strength, "[0, ∞)")

    def check(self, algorithm: Algorithm) -> None:
        """Refuse, in `algorithm`, a solver that makes no personal model, or steps that overshoot the mean model."""
        super().check(algorithm)
        refuse_leaps(own_solver(self.solver, algorithm.solver), self.strength, "mean")

    def begin(self, context: PersonalContext, params: Tensor) -> tuple[Tensor, Any]:
        """Every client starts from w^0, and so does the mean m, the shared state.

        `context` holds the engine, the task and the data of the run. `params` (D,) is w^0.
        """
        return params, params.clone()

    def work(
        self, context: PersonalContext, params: Tensor, cohort: Cohort, rows: Tensor, solver: LocalSolver, shared: Any
    ) -> tuple[Tensor, Any]:
        """The cohort's models (K, D) after local steps pulled towards m, and the new mean m.

        `context` holds the engine, the task and the data of the run. `params` (D,) is the shared model, `cohort` holds the
        clients, `rows` (K, width) is what they keep, `solver` is the algorithm's, and `shared` is the state of all clients
        together.
        """
        pull = pull_to(shared, self.strength, len(rows))
        after = context.engine.own_steps(rows, context.own_stream(cohort), own_solver(self.solver, solver), pull)
        sent = context.sent(cohort, after - rows, shared)
        return after, shared + sent.sum(0) / len(context.data.train)
