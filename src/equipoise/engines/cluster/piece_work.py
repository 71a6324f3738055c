"""What a worker of a cluster does with the pieces that it is given, by its own simulator: one function for each kind of phase.

Every piece is worked on by itself, so that its numbers do not depend on the other pieces that a worker happens to have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from equipoise.aggregators import WeightedMean
from equipoise.core.abilities import solver_traits
from equipoise.core.carried import join_model
from equipoise.engines.cluster.pieces import Node, add_pieces, whole_nodes
from equipoise.engines.simulator.calibration import Choice
from equipoise.engines.simulator.engine import SimulatorEngine
from equipoise.types import Cohort, Job, LocalWork, Pull


@dataclass(frozen=True, eq=False)
class Phase:
    """What all workers are told of a phase."""

    kind: str
    session: int
    models: tuple[Tensor, ...] = ()  # (D,) or (D + C,) each: one per job, or several for one job
    solver: Any = None
    aggregator: Any = None
    choice: dict[str, Any] = field(default_factory=dict)  # the one calibrated choice of the run
    cohort_sizes: tuple[int, ...] = ()  # of each job, as a whole
    together: bool = False  # whether every model is that of the one job
    clients: Any = "train"  # the name of the set that is evaluated; where work is done, the set
    metrics: Any = None

    def says_the_same(self, other: Phase) -> bool:
        """Whether all but the models is the same."""
        parts = zip((self.solver, self.aggregator, self.metrics), (other.solver, other.aggregator, other.metrics), strict=True)
        return all(one is two for one, two in parts) and self._values == other._values

    @property
    def _values(self) -> tuple[Any, ...]:
        return self.kind, self.session, self.choice, self.cohort_sizes, self.together, self.clients


@dataclass(frozen=True, eq=False)
class Stretch:
    """Some pieces in turn of one job, and what their clients bring along, in the order of the pieces."""

    job: int
    pieces: Node
    count: int  # pieces of the job in all
    lengths: list[int]  # clients of each piece
    cohort: Cohort | None = None
    weights: Tensor | None = None
    which: Tensor | range | None = None  # positions in the set that is evaluated
    own_models: Tensor | None = None  # (k, D)
    pull: Pull | None = None

    def parts(self) -> Iterator[slice]:
        """The clients of each piece."""
        start = 0
        for length in self.lengths:
            yield slice(start, start + length)
            start += length

    def positions(self, part: slice) -> Tensor:
        """The positions of a piece in the set that is evaluated."""
        return torch.arange(self.which.start, self.which.stop)[part] if isinstance(self.which, range) else self.which[part]  # type: ignore[index]


@dataclass(frozen=True, eq=False)
class PieceSums:
    """Sums over pieces, by node of the tree, and numbers of each client, in the order of the pieces."""

    nodes: dict[Node, tuple[Tensor, Tensor | None]]  # total (D,); carried values times their mass, and the mass, (C + 1,)
    sq_norms: Tensor
    losses: Tensor
    rows: Tensor | None


def work_on(engine: SimulatorEngine, phase: Phase, stretch: Stretch) -> Any:
    """The answer of a worker to a stretch."""
    engine.measures, engine.cohort_sizes = False, None
    if phase.choice:
        engine.choice = Choice(**phase.choice)
    return KINDS[phase.kind](engine, phase, stretch)


def losses(engine: SimulatorEngine, phase: Phase, stretch: Stretch) -> Tensor:
    """F_k(w) of the clients at every model of the phase, or at that of their job: (M, k)."""
    models = phase.models if phase.together else (phase.models[stretch.job],)
    cohorts = [_cohort(stretch, part) for part in stretch.parts()]
    if len(models) == 1:
        return torch.cat([engine.losses(models[0], cohort).cpu() for cohort in cohorts]).unsqueeze(0)
    return torch.cat([engine.losses_of(models, cohort).cpu() for cohort in cohorts], 1)


def adapted_losses(engine: SimulatorEngine, phase: Phase, stretch: Stretch) -> Tensor:
    """The losses (k,) after the inner steps of a solver that adapts."""
    model = phase.models[0]
    return torch.cat([engine.losses(model, _cohort(stretch, part), phase.solver).cpu() for part in stretch.parts()])


def updates(engine: SimulatorEngine, phase: Phase, stretch: Stretch) -> LocalWork:
    """Every client's update, (k, D); an attack that sees them all is not here, but where they all are."""
    engine.cohort_sizes = (phase.cohort_sizes[stretch.job],)
    done = [engine.updates(phase.models[stretch.job], _cohort(stretch, part), phase.solver) for part in stretch.parts()]
    return LocalWork(
        torch.cat([work.update for work in done]).cpu(), _joined(done, "sq_norms"), _joined(done, "losses"),
        None if done[0].carried is None else _joined(done, "carried"), None if done[0].rows is None else _joined(done, "rows"),
    )  # fmt: skip


def sums(engine: SimulatorEngine, phase: Phase, stretch: Stretch) -> PieceSums:
    """Weighted sums of the clients' updates, as large nodes of the tree as the stretch has."""
    size, model = phase.cohort_sizes[stretch.job], phase.models[stretch.job]
    jobs = [Job(model, _cohort(stretch, part), stretch.weights[part]) for part in stretch.parts()]  # type: ignore[index]
    engine.cohort_sizes = (size,) * len(jobs)
    works, done = engine.summed_apart(jobs, phase.solver, phase.aggregator), list[LocalWork]()

    def piece(_: int) -> tuple[Tensor, Tensor | None]:
        work = next(works)
        done.append(replace(work, update=work.update.new_empty(0)))  # a view would keep the memory of all pieces
        return work.update.cpu(), _carried_sum(work, engine.task.carried.size)

    nodes = {node: add_pieces(node, piece, add_sums) for node in whole_nodes((0, stretch.count), *stretch.pieces)}
    return PieceSums(
        nodes, _joined(done, "sq_norms"), _joined(done, "losses"), None if done[0].rows is None else _joined(done, "rows")
    )


def add_sums(first: tuple[Tensor, Tensor | None], second: tuple[Tensor, Tensor | None]) -> tuple[Tensor, Tensor | None]:
    """The sum of two pieces."""
    carried = None if first[1] is None or second[1] is None else first[1] + second[1]
    return first[0] + second[0], carried


def own_steps(engine: SimulatorEngine, phase: Phase, stretch: Stretch) -> Tensor:
    """Each client's own model after its local work, (k, D)."""
    return torch.cat([
        engine.own_steps(_own(stretch, part), _cohort(stretch, part), phase.solver, _pull(stretch.pull, part)).cpu()
        for part in stretch.parts()
    ])  # fmt: skip


def evaluate(engine: SimulatorEngine, phase: Phase, stretch: Stretch) -> Tensor:
    """Mean loss and mean error of the clients, (2, k): at the one model, or each at its own."""
    clients = phase.clients
    done = []
    for part in stretch.parts():
        if stretch.own_models is None:
            done.append(torch.stack(engine.evaluate(phase.models[0], clients, stretch.positions(part))))
        else:
            done.append(torch.stack(engine.evaluate_own(_own(stretch, part), clients, stretch.positions(part))))
    return torch.cat(done, 1).cpu()


def measure(engine: SimulatorEngine, phase: Phase, stretch: Stretch) -> Tensor:
    """Each metric of the clients, (M, k): at the one model, or each at its own."""
    clients = phase.clients
    return torch.cat([
        engine.measure(
            phase.models[0] if stretch.own_models is None else _own(stretch, part), clients, phase.metrics,
            stretch.positions(part),
        )
        for part in stretch.parts()
    ], 1)  # fmt: skip


def calibrate(engine: SimulatorEngine, phase: Phase, stretch: Stretch) -> dict[str, Any]:
    """The fastest choice for work of this kind, measured here on the first piece; its results are dropped."""
    engine.measures, engine.choice = True, engine.given
    part = next(stretch.parts())
    cohort = _cohort(stretch, part)
    if stretch.own_models is not None:
        engine.own_steps(_own(stretch, part), cohort, phase.solver, _pull(stretch.pull, part))
    elif solver_traits(phase.solver).adapts:
        engine.losses(phase.models[0], cohort, phase.solver)
    else:
        engine.summed_update(phase.models[stretch.job], cohort, phase.solver, cohort.weights, WeightedMean())
    return asdict(engine.choice)


def exchange(engine: SimulatorEngine, phase: Phase, stretch: Stretch) -> Tensor:
    """No work: what came goes back. It measures what an exchange takes."""
    return phase.models[0]


def explain(engine: SimulatorEngine, phase: Phase, stretch: Stretch) -> str:
    """How local work is done here, and why."""
    return engine.explain(phase.solver)


KINDS: dict[str, Callable[[SimulatorEngine, Phase, Stretch], Any]] = {
    kind.__name__: kind
    for kind in (losses, adapted_losses, updates, sums, own_steps, evaluate, measure, calibrate, exchange, explain)
}


def _cohort(stretch: Stretch, part: slice) -> Cohort:
    if stretch.cohort is None:
        raise TypeError("this phase has no cohort")
    return stretch.cohort.take(torch.arange(len(stretch.cohort))[part])


def _own(stretch: Stretch, part: slice) -> Tensor:
    if stretch.own_models is None:
        raise TypeError("this phase has no models of clients' own")
    return stretch.own_models[part]


def _pull(pull: Pull | None, part: slice) -> Pull | None:
    if pull is None:
        return None
    return Pull(pull.anchor if pull.anchor.dim() == 1 else pull.anchor[part], pull.strength[part])


def _joined(done: list[LocalWork], name: str) -> Tensor:
    return torch.cat([getattr(work, name) for work in done]).cpu()


def _carried_sum(work: LocalWork, size: int) -> Tensor | None:
    """The carried values times their mass, and the mass, (C + 1,) float64; None for a model without carried values."""
    if not size:
        return None
    mean = torch.zeros(size, dtype=torch.float64) if work.carried is None else work.carried.double().cpu()
    mass = torch.tensor([work.carried_mass], dtype=torch.float64)
    return join_model(mean * mass, mass)
