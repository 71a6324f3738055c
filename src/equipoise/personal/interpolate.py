"""Personal models between a client's own model and the shared one: Mapper and APFL.

Both train λ v + (1 − λ) w, that is one model given by two sets of parameters. `Pair` is that model as a module whose parameters
are (λ, w, v), 1 + 2D numbers, so that any engine can train it; a `rule` says which of them the loss moves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from equipoise.core import trees
from equipoise.core.abilities import solver_traits
from equipoise.core.functional import call_with_tensors
from equipoise.core.task import Task
from equipoise.errors import IncompatibleParts, require, require_number
from equipoise.personal.context import PersonalContext
from equipoise.personal.ditto import check_own_solver, own_solver
from equipoise.personal.freezing import further_options
from equipoise.solvers.prepared import GRADIENT
from equipoise.types import Cohort, Engine, LocalSolver, Pull

if TYPE_CHECKING:
    from equipoise.algorithm import Algorithm

NamedParameters = dict[str, Tensor]


class Pair(nn.Module):
    """Two models of one kind and a number that mixes them; in a flat vector (1 + 2D,) they are the mix, `shared`, `own`.

    The loss of an example is rule(pair, x, y). Outputs are the inputs: the loss does all the work, with the model's own loss.
    """

    def __init__(self, task: Task, rule: PairRule) -> None:
        super().__init__()
        self.names, self.rule = task.layout.names, rule
        scorer = task.to(torch.device("cpu")).scorer  # a copy
        named = dict(scorer.module.named_parameters())
        self.mix = nn.Parameter(torch.zeros(1, dtype=task.layout.dtype))
        self.shared = nn.ParameterList([named[name].detach().clone() for name in self.names])
        self.scorer = scorer  # its parameters are those of the client's own model

    def forward(self, *x: Tensor, **named: Tensor) -> Any:
        """The inputs as they are: the loss does the work."""
        return named or (x if len(x) > 1 else x[0])

    def loss(self, x: Any, y: Any) -> Tensor:
        """Per-example losses (B,) as the rule says."""
        return self.rule(self, x, y)

    def shared_model(self) -> NamedParameters:
        """The parameters w by name."""
        return dict(zip(self.names, self.shared, strict=True))

    def own_model(self) -> NamedParameters:
        """The parameters v by name."""
        named = dict(self.scorer.module.named_parameters())
        return {name: named[name] for name in self.names}

    def mixed(self, shared: NamedParameters, own: NamedParameters) -> NamedParameters:
        """λ v + (1 − λ) w, with λ as a constant."""
        mix = self.mix.detach()[0]
        return {name: mix * own[name] + (1 - mix) * shared[name] for name in self.names}

    def losses(self, model: NamedParameters, x: Any, y: Any) -> Tensor:
        """Per-example losses (B,) of a model."""
        named = {f"module.{name}": value for name, value in model.items()}
        losses: Tensor = call_with_tensors(self.scorer, named, (x, y, False))[0]
        return losses


PairRule = Callable[[Pair, Any, Any], Tensor]


def detach_model(model: NamedParameters) -> NamedParameters:
    """The parameters as constants, through which no gradient flows."""
    return {name: value.detach() for name, value in model.items()}


def train_own(pair: Pair, x: Any, y: Any) -> Tensor:
    """F(λ v + (1 − λ) w) as a function of v."""
    return pair.losses(pair.mixed(detach_model(pair.shared_model()), pair.own_model()), x, y)


def train_shared(pair: Pair, x: Any, y: Any) -> Tensor:
    """F(λ v + (1 − λ) w) as a function of w."""
    return pair.losses(pair.mixed(pair.shared_model(), detach_model(pair.own_model())), x, y)


def train_both(pair: Pair, x: Any, y: Any) -> Tensor:
    """F(w) + F(λ v + (1 − λ) w): the first moves w, the second v alone."""
    return pair.losses(pair.shared_model(), trees.clone(x), y) + train_own(pair, x, y)


_engines: WeakKeyDictionary[PersonalContext, dict[Hashable, Engine]] = WeakKeyDictionary()


def pair_engine(context: PersonalContext, rule: PairRule) -> Engine:
    """The engine that trains pairs by a rule; started once per run, since starting one tries the model out."""
    started = _engines.setdefault(context, {})
    if rule not in started:
        started[rule] = context.start(Task.of(Pair(context.task, rule)))
    return started[rule]


def pair_steps(
    context: PersonalContext,
    rule: PairRule,
    rows: Tensor,
    params: Tensor,
    cohort: Cohort,
    solver: LocalSolver,
    moves: Literal["shared", "own", "both"],
) -> tuple[Tensor, Tensor]:
    """Local work on pairs: rows (λ, v) (K, 1 + D) and w (D,) in; the w and the v of every client after it, (K, D) each.

    The solver's weight decay and proximal term must not reach what the rule keeps fixed: they become pulls on what `moves`.
    """
    models = torch.cat([rows[:, :1], params.expand(len(rows), -1), rows[:, 1:]], 1)  # (K, 1 + 2D)
    shared, own = slice(1, 1 + len(params)), slice(1 + len(params), None)
    pull = None
    sgd = solver_traits(solver).sgd
    if sgd is not None:
        decay, prox = sgd.weight_decay, sgd.prox
        solver = replace(cast(Any, solver), weight_decay=0.0, prox=0.0, straggler_share=0.0)
        if decay or prox:
            strength, anchor = torch.zeros_like(models), torch.zeros_like(models)
            if moves != "shared":
                strength[:, own] = decay
            if moves != "own":
                strength[:, shared] = decay + prox
                anchor[:, shared] = prox / (decay + prox) * params
            pull = Pull(anchor, strength)
    after = pair_engine(context, rule).own_steps(models, cohort, solver, pull)
    return after[:, shared], after[:, own]


def mixed_models(rows: Tensor, params: Tensor) -> Tensor:
    """λ v + (1 − λ) w (K, D) of rows (λ, v) (K, 1 + D) and w (D,)."""
    mix = rows[:, :1]
    return mix * rows[:, 1:] + (1 - mix) * params


def refuse_all_but_sgd(method: object, solver: LocalSolver) -> None:
    """Refuse a solver that does more than take steps by gradients: it would not know one half of a pair from the other."""
    if solver_traits(solver).sgd is None:
        if options := further_options(solver):
            raise IncompatibleParts(
                f"{method!r} trains two models as one, and does not know {options} of {solver!r}.", f"Leave out {options}."
            )
        raise IncompatibleParts(
            f"{method!r} trains two models as one, by steps of solvers.SGD; {type(solver).__name__} is made for one model.",
            "Use solver=solvers.SGD(…).",
        )


class _MixesModels:
    """What methods share whose clients keep (λ, v) and are served λ v + (1 − λ) w."""

    def width(self, dimension: int) -> int:
        """A client keeps its mixing weight and its model v, 1 + D numbers.

        `dimension` is D, the number of parameters.
        """
        return 1 + dimension

    def models(
        self, context: PersonalContext, params: Tensor, cohort: Cohort, rows: Tensor, solver: LocalSolver, shared: Any
    ) -> Tensor:
        """The mixed models λ v + (1 − λ) w, (K, D).

        `context` holds the engine, the task and the data of the run. `params` (D,) is the shared model, `cohort` holds the
        clients, `rows` (K, width) is what they keep, `solver` is the algorithm's, and `shared` is the state of all clients
        together.
        """
        return mixed_models(rows, params)


_MIX_FIX = "0 is the shared model, 1 a model of the client's own."


@dataclass(frozen=True)
class Mapper(_MixesModels):
    """A client's model is λ v + (1 − λ) w, with a λ of `mixes` that it chooses by its training loss; w learns from the mixture.

    In a round each client trains its own v on F_k(λ v + (1 − λ) w^t) with w^t fixed, from the v that it has, once for every λ
    of `mixes`, and keeps the λ (the smaller of equals) and v with the lowest loss on its training examples. What it sends is
    its local work on w with these λ and v fixed, so that the shared model is not that of the same run without Mapper. A client
    with λ = 1 sends nothing. By the training loss most clients would choose 1, and w would never move, so 1 is not among the
    default `mixes`.
    `solver` trains v (None: as the algorithm trains w). Models are mixed by their parameters; for a linear model that is the
    published mixture of predictions.

    Source: Mansour, Mohri, Ro, Suresh 2020 (model interpolation); Li 2023 (thesis), sections 5.3.4 and 5.6.2.

    >>> import equipoise as eq
    >>> data = eq.data.gaussian_means([[0.0], [4.0]], examples=10, exact=True)  # F_k(w) = (w − μ_k)² + 1, from w^0 = 0
    >>> algorithm = eq.Algorithm(solver=eq.solvers.SGD(lr=0.25, batch_size=None), personal=Mapper(mixes=(0.5,)))
    >>> result = eq.train(eq.models.MeanEstimator(1), data, algorithm, rounds=1, clients_per_round=2)
    >>> round(float(result.personal.params(["client-1"])), 3)  # v = 1; w_1 = ¼ · ½ · 7, w = 0.4375; ½ · 1 + ½ · 0.4375
    0.719
    """

    mixes: tuple[float, ...] = (0.25, 0.5, 0.75)  # the values of λ to choose from, in [0, 1]
    solver: LocalSolver | None = None  # trains the clients' own models; None: the algorithm's solver

    def __post_init__(self) -> None:
        given: Any = self.mixes
        good = isinstance(given, tuple | list) and len(given) > 0
        require(good, "mixes", "must be one or more numbers in [0, 1]", given, "E.g. (0.25, 0.5, 0.75).")
        for mix in given:
            require_number("mixes", mix, "[0, 1]", _MIX_FIX)
        object.__setattr__(self, "mixes", tuple(sorted({float(mix) for mix in given})))
        check_own_solver(self.solver)

    def check(self, algorithm: Algorithm) -> None:
        """Refuse, in `algorithm`, solvers other than SGD."""
        for solver in (algorithm.solver, self.solver or algorithm.solver):
            refuse_all_but_sgd(self, solver)

    def begin(self, context: PersonalContext, params: Tensor) -> tuple[Tensor, Any]:
        """The first of `mixes` and v = w^0; there is no shared state.

        `context` holds the engine, the task and the data of the run. `params` (D,) is w^0.
        """
        return torch.cat([params.new_full((1,), self.mixes[0]), params]), None

    def work(
        self, context: PersonalContext, params: Tensor, cohort: Cohort, rows: Tensor, solver: LocalSolver, shared: Any
    ) -> tuple[Tensor, Any]:
        """For each client the (λ, v), (K, 1 + D), with the lowest training loss after local steps on v.

        `context` holds the engine, the task and the data of the run. `params` (D,) is the shared model, `cohort` holds the
        clients, `rows` (K, width) is what they keep, `solver` is the algorithm's, and `shared` is the state of all clients
        together.
        """
        solver = own_solver(self.solver, solver)
        stream = context.own_stream(cohort)
        best, lowest = rows, torch.full((len(rows),), math.inf, dtype=torch.float64)
        for mix in self.mixes:
            tried = torch.cat([torch.full_like(rows[:, :1], mix), rows[:, 1:]], 1)
            if mix > 0:  # at 0 the loss does not depend on v
                tried[:, 1:] = pair_steps(context, train_own, tried, params, stream, solver, "own")[1]
            loss, _ = context.engine.evaluate_own(mixed_models(tried, params), context.data.train, cohort.clients)
            better = loss < lowest
            best, lowest = torch.where(better.to(rows.device).unsqueeze(1), tried, best), torch.where(better, loss, lowest)
        return best, shared

    def updates(self, context: PersonalContext, params: Tensor, cohort: Cohort, rows: Tensor, solver: LocalSolver) -> Tensor:
        """What clients send, (K, D): their work on w given the λ and v that they have chosen in this round.

        `context` holds the engine, the task and the data of the run. `params` (D,) is the shared model, `cohort` holds the
        clients, `rows` (K, width) is what they keep, and `solver` is the algorithm's.
        """
        after, _ = pair_steps(context, train_shared, rows, params, cohort, solver, "shared")
        return after - params


@dataclass(frozen=True)
class APFL(_MixesModels):
    """A client's model is u = α v + (1 − α) w, where v and α are its own and learned beside the shared w.

    In a round a client takes the local steps w_k ← w_k − η∇F_k(w_k) of the shared model from w^t and, on the same batches,
    v ← v − ηα∇F_k(u) with u = α v + (1 − α) w_k. α starts at `mix` and is learned once per round, before these steps, by
    the gradient over all of the client's examples: α ← α − η_α⟨v − w^t, ∇F_k(u)⟩, cut to [0, 1]. `mix_lr` is η_α (None: the
    solver's rate; 0 keeps α as it is). At α = 0 v does not move, at 1 it is trained on the client's data alone. A client
    gets u with the current w. The steps of w_k are computed twice, here and for the update that the client sends, so a
    round needs three times as many gradients as a round without APFL.

    Source: Deng, Kamani, Mahdavi 2020 (Algorithm 1 and learning of α); Li 2023 (thesis), sections 5.3.4 and 5.6.2.

    >>> import equipoise as eq
    >>> data = eq.data.gaussian_means([[0.0], [4.0]], examples=10, exact=True)  # F_k(w) = (w − μ_k)² + 1, from w^0 = 0
    >>> algorithm = eq.Algorithm(solver=eq.solvers.SGD(lr=0.25, batch_size=None), personal=APFL(mix=0.5, mix_lr=0.0))
    >>> result = eq.train(eq.models.MeanEstimator(1), data, algorithm, rounds=1, clients_per_round=2)
    >>> round(float(result.personal.params(["client-1"])), 3)  # v = ¼ · ½ · 8 = 1 and w = 1
    1.0
    """

    mix: float = 0.5  # the first α, in [0, 1]
    mix_lr: float | None = None  # η_α, the rate of α; None: the solver's rate

    def __post_init__(self) -> None:
        require_number("mix", self.mix, "[0, 1]", _MIX_FIX)
        require_number("mix_lr", self.mix_lr, "[0, ∞)", none="the solver's learning rate")

    def check(self, algorithm: Algorithm) -> None:
        """Refuse, in `algorithm`, solvers other than SGD."""
        refuse_all_but_sgd(self, algorithm.solver)

    def begin(self, context: PersonalContext, params: Tensor) -> tuple[Tensor, Any]:
        """α = `mix` and v = w^0; there is no shared state.

        `context` holds the engine, the task and the data of the run. `params` (D,) is w^0.
        """
        return torch.cat([params.new_full((1,), self.mix), params]), None

    def work(
        self, context: PersonalContext, params: Tensor, cohort: Cohort, rows: Tensor, solver: LocalSolver, shared: Any
    ) -> tuple[Tensor, Any]:
        """The (α, v), (K, 1 + D), after a step on α and local steps on v: as many as the client gets done of w's.

        `context` holds the engine, the task and the data of the run. `params` (D,) is the shared model, `cohort` holds the
        clients, `rows` (K, width) is what they keep, `solver` is the algorithm's, and `shared` is the state of all clients
        together.
        """
        mix = self._learned_mix(context, params, cohort, rows, solver).unsqueeze(1)
        rows = torch.cat([mix, rows[:, 1:]], 1)
        _, own = pair_steps(context, train_both, rows, params, cohort, solver, "both")
        return torch.cat([mix, own], 1), shared

    def _learned_mix(
        self, context: PersonalContext, params: Tensor, cohort: Cohort, rows: Tensor, solver: LocalSolver
    ) -> Tensor:
        rate = solver.learning_rate(cohort.round) if self.mix_lr is None else self.mix_lr
        if rate == 0:
            return rows[:, 0]
        models = mixed_models(rows, params)
        gradient = models - context.engine.own_steps(models, cohort.having(effort=None), GRADIENT)
        slope = ((rows[:, 1:] - params) * gradient).sum(1)
        return (rows[:, 0] - rate * slope).clamp(0, 1)
