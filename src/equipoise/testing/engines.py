"""The law of engines: all agree with the loop engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from equipoise.aggregators import NormClip, WeightedMean
from equipoise.attacks import Sent, apply
from equipoise.attacks.single import normal_noise
from equipoise.core.abilities import engine_traits, solver_traits
from equipoise.core.rng import torch_generator
from equipoise.core.task import Task
from equipoise.data.federated_data import FederatedData
from equipoise.engines import Loop
from equipoise.runs.setup import EngineChoice
from equipoise.solvers import MAML, SGD, Adam, FedDane
from equipoise.testing.laws import agree, check_of
from equipoise.testing.small_run import draw_everyone, make_small_task, perturb_params, prepare_solver
from equipoise.types import Cohort, Engine, Job, LocalSolver, LocalWork, Pull

# Plain steps, a prepared round, a last step of its own, clipped and numbered steps with a state that is kept.
SOLVERS: tuple[Any, ...] = (
    SGD(), FedDane(SGD(batch_size=4, prox=0.5)), MAML(), Adam(lr=0.05, batch_size=4, clip_norm=0.1, state="kept")
)  # fmt: skip


@dataclass(frozen=True)
class NoisyReplacement:
    """Malicious clients send update · cohort size + noise: what an engine gets wrong about attacks shows in it."""

    share: float = 0.4
    seed: int = 0

    def corrupt(self, sent: Sent) -> Tensor:
        """The corrupted updates (k, D)."""
        return sent.cohort * sent.updates + normal_noise(sent.keys, sent.updates.shape[1]).to(sent.updates)


@check_of("an engine", "start", fix="Give a description such as equipoise.engines.Simulator().")
def check_engine(
    engine: EngineChoice,
    *,
    task: Task | None = None,
    data: FederatedData | None = None,
    solver: LocalSolver | None = None,
    tolerance: float = 1e-9,
    seed: int = 0,
) -> None:
    """Agrees with the loop engine on all that an engine computes, for the given task and data or for small ones.

    Compared are losses; updates, their norms and their sums; carried values of a task that has any; several jobs with cohorts
    that differ; clients' own models, with and without a pull; and evaluation. With a `solver` this is done for it alone.
    Without one it is done for plain SGD, for a solver that prepares each round (FedDane) and for one that adapts (MAML), and
    the updates of data under attack are compared, too. Clients' own models are trained only if the solver can do that.

    >>> import equipoise as eq
    >>> check_engine(eq.engines.Simulator(chunk_size=3), solver=eq.solvers.SGD())  # nothing is returned: all laws hold
    """
    if task is None or data is None:
        task, data = make_small_task(seed)
    gen = torch_generator(seed, "check_engine")
    params = perturb_params(task, gen)
    own_models = perturb_params(task, gen, (len(data.train),))
    oracle, tried = Loop().start(task, data), engine.start(task, data)
    cohort = draw_everyone(data, seed)
    for each in SOLVERS if solver is None else (solver,):
        inputs = EngineInputs(task, data, params, own_models, cohort, each)
        _compare(engine, inputs.answers(tried), inputs.answers(oracle), tolerance)
    if solver is None and data.attack is None:
        attacked = apply(data, NoisyReplacement(seed=seed))
        inputs = EngineInputs(task, attacked, params, own_models, cohort, SOLVERS[0])
        oracle, tried = Loop().start(task, attacked), engine.start(task, attacked)
        _compare(engine, inputs.answers_under_attack(tried), inputs.answers_under_attack(oracle), tolerance)


def _compare(engine: EngineChoice, answers: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    """Raise LawBroken at the first answer that is not the expected one, with -1 for NaN, which equals nothing."""
    for what, answer in answers.items():
        found, right = (values.cpu().nan_to_num(nan=-1.0) for values in (answer, expected[what]))
        agree(engine, "engine", found, right, tolerance, what=what)


@dataclass(frozen=True, eq=False)
class EngineInputs:
    """What engines that are compared are given."""

    task: Task
    data: FederatedData
    params: Tensor  # (D,), followed by carried values (C,) if there are any
    own_models: Tensor  # (n, D) or (n, D + C), one per training client
    everyone: Cohort
    solver: LocalSolver

    def scaled(self, factor: float) -> Tensor:
        """The model with its parameters scaled; carried values stay."""
        params, carried = self.task.split(self.params)
        return torch.cat([factor * params, carried])

    def solver_for(self, engine: Engine) -> tuple[LocalSolver, Cohort]:
        """The solver as an engine prepares it, and the cohort with its clients' effort and what they have kept."""
        params, cohort = self.params.to(engine_traits(engine).device), self.everyone
        solver = prepare_solver(self.solver, engine, params, cohort, self.task.layout)
        traits = solver_traits(solver)
        if traits.efforts is not None:
            cohort = cohort.having(effort=traits.efforts(cohort, self.data.train.keys))
        if traits.keeps is not None:
            gen = torch_generator(cohort.seed, "check_engine rows")
            rows = torch.rand(len(cohort), traits.keeps(self.task.layout.dimension), generator=gen, dtype=torch.float64)
            rows[:, -1] = torch.arange(len(cohort)) % 4  # steps that each client has taken before
            cohort = cohort.having(rows=rows)
        return solver, cohort

    def answers(self, engine: Engine) -> dict[str, Tensor]:
        """What an engine computes, by what it is."""
        device = engine_traits(engine).device
        solver, cohort = self.solver_for(engine)
        params, half = self.params.to(device), cohort.take(torch.arange(0, len(cohort), 2))
        jobs = [
            Job(params, cohort, cohort.weights),
            Job(self.scaled(0.5).to(device), half, half.weights),
            Job(
                self.scaled(-1.0).to(device),
                cohort.take(torch.arange(len(cohort) // 2, len(cohort))),
                cohort.weights[len(cohort) // 2 :],
            ),
        ]
        answers = {
            "losses": engine.losses(params, cohort),
            "losses for a solver": engine.losses(params, cohort, solver),
            "losses of several models": engine.losses_of([job.params for job in jobs], half),
            "losses of several jobs": torch.cat(engine.losses_each(jobs)),
            **_work_answers(engine, params, cohort, solver),
        }
        several = engine.summed_updates(jobs, solver, WeightedMean())
        for what, field in (("summed updates", "update"), ("update norms", "sq_norms"), ("local losses", "losses")):
            answers[f"{what} of several jobs"] = torch.cat([getattr(work, field) for work in several])
        if self.task.carried.names:
            answers["carried values of several jobs"] = torch.cat([_known(work.carried) for work in several])
        answers["evaluated losses"], answers["evaluated errors"] = engine.evaluate(params, self.data.train)
        some = torch.arange(len(cohort) - 1, -1, -2)  # positions that do not follow on each other
        sample = engine.evaluate(params, self.data.train, some)
        answers["evaluated losses of a sample"], answers["evaluated errors of a sample"] = sample
        return answers | self._own_model_answers(engine, solver)

    def answers_under_attack(self, engine: Engine) -> dict[str, Tensor]:
        """The client updates that an engine gets where clients are malicious."""
        solver, cohort = self.solver_for(engine)
        work = _work_answers(engine, self.params.to(engine_traits(engine).device), cohort, solver)
        return {f"{what} under attack": answer for what, answer in work.items()}

    def _own_model_answers(self, engine: Engine, solver: LocalSolver) -> dict[str, Tensor]:
        """Clients' own models after local work, alone and under a pull, and how they score; nothing if the solver has none."""
        traits = solver_traits(solver)
        device = engine_traits(engine).device
        models, which = self.own_models.to(device), torch.arange(len(self.own_models) - 1, -1, -1)
        scores = engine.evaluate_own(models[which.to(device)], self.data.train, which)
        answers = {"losses of own models": scores[0], "errors of own models": scores[1]}
        if traits.finish is not None or traits.repeats > 1 or traits.shared_gradient is not None or traits.shift is not None:
            return answers
        if traits.for_own_model is not None:
            solver = traits.for_own_model()
        strengths = torch.linspace(0, 1, len(models), dtype=models.dtype, device=device)
        pulls = {
            "own models": None,
            "own models pulled to one model": Pull(self.params.to(device), strengths),
            "own models pulled by parameter": Pull(0.5 * models, strengths.unsqueeze(1) * models.abs().clamp(max=1.0)),
        }
        own = {what: engine.own_steps(models.clone(), self.everyone, solver, pull) for what, pull in pulls.items()}
        return answers | own


def _work_answers(engine: Engine, params: Tensor, cohort: Cohort, solver: LocalSolver) -> dict[str, Tensor]:
    """Each client's update, and their sum through linear aggregators."""
    work: LocalWork = engine.updates(params, cohort, solver)
    sums = {
        type(rule).__name__: engine.summed_update(params, cohort, solver, cohort.weights, rule)
        for rule in (WeightedMean(), NormClip(0.05))
    }
    answers = {"updates": work.update, "update norms": work.sq_norms, "local losses": work.losses}
    answers |= {f"summed update by {name}": total.update for name, total in sums.items()}
    if work.carried is not None:
        answers["carried values"] = work.carried
        answers |= {f"mean of carried values by {name}": _known(total.carried) for name, total in sums.items()}
    if work.rows is not None:
        answers["rows that clients keep"] = work.rows
        answers |= {f"rows kept beside the sum by {name}": _known(total.rows) for name, total in sums.items()}
    return answers


def _known(values: Tensor | None) -> Tensor:
    """Carried values or kept rows, or nothing where there are none."""
    return torch.zeros(0) if values is None else values
