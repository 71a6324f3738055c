"""How far clients are from each other, and how well they solve their local problems: the quantities of FedProx's analysis."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from equipoise.algorithm import Algorithm
from equipoise.core.abilities import is_part, solver_traits
from equipoise.core.carried import join_model, move_model
from equipoise.core.per_example_losses import PerExample
from equipoise.data.clients import FederatedData
from equipoise.errors import require
from equipoise.observers import Evaluation, Run
from equipoise.privacy.lookers import refuse_looking
from equipoise.runs.setup import EngineChoice, set_up
from equipoise.solvers.prepared import GRADIENT
from equipoise.types import Cohort, Engine, LocalSolver, Observer

_AT_ONCE = 2**24  # numbers of gradients that are held together


@dataclass(frozen=True)
class Dissimilarity:
    """How the clients' gradients at one model differ: 0 and 1 when they are all alike.

    `variance` is E_k‖∇F_k(w) − ∇f(w)‖² and `ratio` is B(w) = √(E_k‖∇F_k(w)‖² / ‖∇f(w)‖²), with E_k over clients by their base
    weights and f their mean. Source: Li 2023 (thesis), Definition 7 and Figure 3.2.
    """

    variance: float
    ratio: float


def dissimilarity_of(engine: Engine, params: Tensor, alpha: Tensor, data: FederatedData | None = None) -> Dissimilarity:
    """The dissimilarity of all training clients at `params` (D,), with base weights `alpha` (n,).

    Where `data` are under attack, it is that of the benign clients.

    `engine` is a started engine.

    >>> import equipoise as eq
    >>> from equipoise.core.task import Task
    >>> data = eq.data.gaussian_means([(0.0, 0.0), (2.0, 0.0)], examples=4, exact=True)
    >>> engine = eq.engines.Loop().start(Task.of(eq.models.MeanEstimator(2)), data)
    >>> found = dissimilarity_of(engine, torch.zeros(2), torch.tensor([0.5, 0.5]))  # gradients 0 and (−4, 0)
    >>> round(found.variance, 4), round(found.ratio, 4)
    (4.0, 1.4142)
    """
    cohort = _everyone(alpha)
    if data is not None and data.malicious:
        benign = torch.tensor([name not in data.malicious for name in data.train.ids])
        require(bool(benign.any()), "data", "must have benign clients", f"{len(benign)} malicious ones")
        cohort = cohort.take(benign)
    cohort = cohort.take(cohort.weights > 0)
    # Around the mean so far (Welford): E‖g‖² − ‖E g‖² would have no correct digit where gradients are nearly equal.
    mass, mean, variance = 0.0, torch.zeros(()), 0.0
    for places in torch.split(torch.arange(len(cohort)), max(1, _AT_ONCE // len(params))):
        part = cohort.take(places)
        updates = engine.updates(params, part, GRADIENT).update.double()
        weights = (part.weights / cohort.weights.sum()).to(updates)
        more, centre = float(weights.sum()), weights @ updates / weights.sum()
        mass += more
        variance += float(weights @ (updates - centre).square().sum(1))
        variance += float((centre - mean).square().sum()) * more * (mass - more) / mass
        mean = mean + (centre - mean) * more / mass
    square = float(mean.square().sum())
    ratio = math.sqrt(1 + variance / square) if square > 0 else (1.0 if variance == 0 else math.inf)
    return Dissimilarity(variance, ratio)


def dissimilarity(
    model: nn.Module,
    data: FederatedData,
    *,
    algorithm: Algorithm | None = None,
    loss: PerExample | None = None,
    engine: EngineChoice | str = "simulator",
) -> Dissimilarity:
    """The dissimilarity of the training clients of `data` at the parameters of `model`; base weights as in `algorithm`.

    Under attack it is that of the benign clients.

    Source: Li 2023 (thesis), Definition 7.
    """
    parts = algorithm or Algorithm()
    refuse_looking("heterogeneity", parts)
    setting = set_up(model, data, parts, rounds=0, clients_per_round=1, seed=0, loss=loss, error=None, engine=engine)
    return dissimilarity_of(setting.engine, setting.first_model, setting.alpha, data)


def inexactness(engine: Engine, params: Tensor, cohort: Cohort, solver: LocalSolver) -> Tensor:
    """γ_k = ‖∇h_k(w_k)‖ / ‖∇h_k(w^t)‖ of each client of a cohort, (K,): 0 is an exact local solution, 1 no progress.

    h_k(w) = F_k(w) + (μ/2)‖w − w^t‖² with the solver's proximal μ, w_k the client's model after its local work from `params`.
    It is about what clients compute, malicious ones included, and not about what these send.

    `engine` is a started engine, and `cohort` says which clients work.

    Source: Li 2023 (thesis), Definition 6.

    >>> import equipoise as eq
    >>> from equipoise.core.task import Task
    >>> data = eq.data.gaussian_means([(0.0, 0.0), (2.0, 0.0)], examples=4, exact=True)
    >>> engine = eq.engines.Loop().start(Task.of(eq.models.MeanEstimator(2)), data)
    >>> half = torch.tensor([0.5, 0.5])
    >>> cohort = eq.types.Cohort(0, 0, torch.arange(2), half, torch.ones(2))
    >>> inexactness(engine, torch.ones(2), cohort, eq.solvers.SGD(lr=0.25, steps=1, batch_size=None))  # half of the way
    tensor([0.5000, 0.5000], dtype=torch.float64)
    """
    rule, fix = "must be one whose work does not change from round to round", "Give the solver that it wraps."
    require(is_part(solver, "local_steps"), "solver", rule, solver, fix)
    dimension = engine.updates(params, cohort.take(torch.tensor([0])), GRADIENT).update.shape[-1]  # carried values come behind
    start = params.expand(len(cohort), -1)

    def steps(models: Tensor, taken: LocalSolver) -> Tensor:
        """What clients move by, (K, D). No attack changes it, since nothing is sent."""
        return (engine.own_steps(models, cohort, taken) - models)[:, :dimension]

    moved, before = steps(start, solver), steps(start, GRADIENT).double().norm(dim=1).cpu()
    reached = torch.stack([move_model(params, each) for each in moved])
    after = (solver_traits(solver).prox * moved - steps(reached, GRADIENT)).double().norm(dim=1).cpu()
    return torch.where(before > 0, after / before, torch.where(after > 0, math.inf, 0.0))


class Heterogeneity(Observer):
    """Measures the dissimilarity at every evaluation of a run (train(…, evaluate_every=…)) and keeps it by round.

    It costs a pass with gradients over all training clients each time. With an averaged iterate it is measured there.

    >>> import equipoise as eq
    >>> data, watch = eq.data.gaussian_means([(0.0, 0.0), (2.0, 0.0)], examples=4, exact=True), Heterogeneity()
    >>> _ = eq.train(eq.models.MeanEstimator(2), data, rounds=2, clients_per_round=2, evaluate_every=1, observers=[watch])
    >>> sorted(watch.rounds)
    [1, 2]
    """

    def __init__(self) -> None:
        self.rounds: dict[int, Dissimilarity] = {}  # of the run that began last
        self.runs: dict[str, dict[int, Dissimilarity]] = {}  # of every run, by its name
        self._watched: dict[str, Run] = {}

    def on_start(self, run: Run) -> None:
        """Begin to watch a run; one under differential privacy is refused."""
        if run.setting is not None:
            refuse_looking("heterogeneity", run.setting.algorithm)
        self.rounds = self.runs[run.name] = {}
        self._watched[run.name] = run

    def on_evaluation(self, evaluation: Evaluation) -> None:
        """Measure the dissimilarity at the parameters of an evaluation."""
        run = self._watched.get(evaluation.run)
        if run is not None and run.setting is not None and evaluation.params is not None:
            model = join_model(evaluation.params, evaluation.carried)
            measured = dissimilarity_of(run.setting.engine, model, run.setting.alpha, run.setting.data)
            self.runs[evaluation.run][evaluation.round] = measured


def _everyone(alpha: Tensor) -> Cohort:
    return Cohort(0, 0, torch.arange(len(alpha)), alpha, torch.ones_like(alpha))
