"""The laws of engines, which all agree with the loop engine, and of attacks: the same malicious clients on every engine."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, is_dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from equipoise.aggregators import NormClip, WeightedMean
from equipoise.attacks import Sent, apply
from equipoise.attacks.single import normal_noise
from equipoise.core import rng
from equipoise.core.abilities import attack_traits, engine_traits, solver_traits
from equipoise.core.rng import torch_generator
from equipoise.core.task import Task
from equipoise.data.clients import FederatedData
from equipoise.engines import Loop, Simulator
from equipoise.errors import is_integer, is_number
from equipoise.runs.setup import EngineChoice
from equipoise.runs.tried_calls import same_state
from equipoise.solvers import MAML, SGD, Adam, FedDane
from equipoise.testing.laws import agree, check_of, hold, unchanged
from equipoise.testing.small_run import draw_everyone, make_small_task, perturb_params, prepare_solver
from equipoise.types import Attack, Engine, Job, LocalSolver, Pull

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
    tried = [(data, each) for each in (SOLVERS if solver is None else (solver,))]
    if solver is None and data.attack is None:
        tried.append((apply(data, NoisyReplacement(seed=seed)), SOLVERS[0]))
    for given, each in tried:
        found, right = (_answers(choice.start(task, given), task, given, each, seed) for choice in (engine, Loop()))
        for what in right | found:  # with -1 for NaN, which equals nothing
            here, there = (each.get(what, torch.zeros(0)).cpu().nan_to_num(nan=-1.0) for each in (found, right))
            agree(engine, "engine", here, there, tolerance, what=what + " under attack" * (given is not data))


def _answers(engine: Engine, task: Task, data: FederatedData, solver: LocalSolver, seed: int) -> dict[str, Tensor]:
    """What an engine computes, by what it is."""
    gen, device, dimension = torch_generator(seed, "check_engine"), engine_traits(engine).device, task.layout.dimension
    params = perturb_params(task, gen).to(device)
    models = perturb_params(task, gen, (len(data.train),)).to(device)
    everyone = cohort = draw_everyone(data, seed)
    solver = prepare_solver(solver, engine, params, cohort, task.layout)
    traits = solver_traits(solver)
    if traits.efforts is not None:
        cohort = cohort.having(effort=traits.efforts(cohort, data.train.keys))
    if traits.keeps is not None:
        rows = torch.rand(len(cohort), traits.keeps(dimension), generator=gen, dtype=torch.float64)
        rows[:, -1] = torch.arange(len(cohort)) % 4  # steps that each client has taken before
        cohort = cohort.having(rows=rows)
    work = engine.updates(params, cohort, solver)
    answers: dict[str, Tensor | None] = {"updates": work.update, "update norms": work.sq_norms, "local losses": work.losses}
    answers |= {"carried values": work.carried, "rows that clients keep": work.rows}
    for rule in (WeightedMean(), NormClip(0.05)):
        total = engine.summed_update(params, cohort, solver, cohort.weights, rule)
        for what, values in (("summed update", total.update), ("mean of carried values", total.carried), ("rows", total.rows)):
            answers[f"{what} by {type(rule).__name__}"] = values
    if data.attack is None:
        answers |= _of_several(engine, task, data, params, cohort, solver)
        answers |= _of_own_models(engine, data, params, models, everyone, solver)
    return {what: values for what, values in answers.items() if values is not None}


def _of_several(
    engine: Engine, task: Task, data: FederatedData, params: Tensor, cohort: Any, solver: LocalSolver
) -> dict[str, Tensor | None]:
    """Losses, sums of several jobs whose cohorts differ, and evaluation."""
    shared, carried = task.split(params)
    everyone = torch.arange(len(cohort))
    cohorts = (cohort, cohort.take(everyone[::2]), cohort.take(everyone[len(cohort) // 2 :]))
    jobs = [Job(torch.cat([f * shared, carried]), who, who.weights) for f, who in zip((1.0, 0.5, -1.0), cohorts, strict=True)]
    works = engine.summed_updates(jobs, solver, WeightedMean())
    some = everyone.flip(0)[::2]  # positions that do not follow on each other
    return {
        "losses": engine.losses(params, cohort),
        "losses for a solver": engine.losses(params, cohort, solver),
        "losses of several models": engine.losses_of([job.params for job in jobs], cohorts[1]),
        "losses of several jobs": torch.cat(engine.losses_each(jobs)),
        "summed updates of several jobs": torch.cat([work.update for work in works]),
        "update norms of several jobs": torch.cat([work.sq_norms for work in works]),
        "local losses of several jobs": torch.cat([work.losses for work in works]),
        "carried values of several jobs": torch.cat(
            [work.carried for work in works if work.carried is not None] or [shared[:0]]
        ),
        "evaluated losses and errors": torch.cat(engine.evaluate(params, data.train)),
        "evaluated losses and errors of a sample": torch.cat(engine.evaluate(params, data.train, some)),
    }


def _of_own_models(
    engine: Engine, data: FederatedData, params: Tensor, models: Tensor, everyone: Any, solver: LocalSolver
) -> dict[str, Tensor]:
    """Clients' own models after local work, alone and under a pull, and how they score."""
    traits, which = solver_traits(solver), torch.arange(len(models) - 1, -1, -1)
    answers = {"scores of own models": torch.cat(engine.evaluate_own(models[which.to(models.device)], data.train, which))}
    if traits.finish is not None or traits.repeats > 1 or traits.shared_gradient is not None or traits.shift is not None:
        return answers  # the solver has none
    solver = solver if traits.for_own_model is None else traits.for_own_model()
    strengths = torch.linspace(0, 1, len(models), dtype=models.dtype, device=models.device)
    pulls = {
        "own models": None,
        "own models pulled to one model": Pull(params, strengths),
        "own models pulled by parameter": Pull(0.5 * models, strengths.unsqueeze(1) * models.abs().clamp(max=1.0)),
    }
    return answers | {what: engine.own_steps(models.clone(), everyone, solver, pull) for what, pull in pulls.items()}


# ------------------------------------------------------------------------------------------------------------------- attacks


@check_of("an attack", "share", "seed")
def check_attack(
    attack: Attack,
    *,
    task: Task | None = None,
    data: FederatedData | None = None,
    engines: Sequence[EngineChoice] = (Simulator(chunk_size=3),),
    tolerance: float = 1e-9,
    seed: int = 0,
) -> None:
    """The attack has the same malicious clients and sends the same updates on every engine, and spares all other clients.

    `share` of the training clients, to the nearest, are malicious; another `seed` draws others. Data that the attack poisons
    keep their clients, sizes and the examples of clean clients; the data it is given are not written to, and applying it
    again repeats. What a malicious client sends depends on its own update, its key, its weight and the cohort's size alone (if
    it is omniscient also on the honest updates, in any order), so that engines may ask for one client or for many; clean
    clients send what they send without the attack.

    >>> import equipoise as eq
    >>> check_attack(eq.attacks.SignFlip())  # nothing is returned: all laws hold
    """
    if task is None or data is None:
        task, data = make_small_task(seed)
    hold(is_number(attack.share) and 0 <= attack.share <= 1, attack, "share", attack.share)
    hold(is_integer(attack.seed) and attack.seed >= 0, attack, "seed", attack.seed)
    attacked = _check_data(attack, data)
    if is_dataclass(attack):  # a part whose fields can be replaced
        _check_seed(attack, data)
    _check_corruption(attack, torch_generator(seed, "check_attack"), seed)
    params, solver = perturb_params(task, torch_generator(seed, "check_attack engines")), SGD(batch_size=5)
    cohort = draw_everyone(data, seed)
    honest, expected = (Loop().start(task, each).updates(params, cohort, solver).update for each in (data, attacked))
    clean = torch.tensor([name not in attacked.malicious for name in data.train.ids])
    agree(attack, "spares_clean", honest[clean], expected[clean])
    for engine in engines:
        updates = engine.start(task, attacked).updates(params, cohort, solver).update.cpu()
        agree(attack, "under_attack", updates, expected, tolerance, engine=repr(engine))


def _check_data(attack: Attack, data: FederatedData) -> FederatedData:
    """The data under attack, after a look at who and what has changed."""
    before = copy.deepcopy(data)
    attacked, again = apply(data, attack), apply(data, attack)
    hold(before.fingerprint == data.fingerprint, attack, "data_unwritten")
    same = attacked.fingerprint == again.fingerprint and attacked.malicious == again.malicious
    hold(same, attack, "data_again")
    count, expected = len(attacked.malicious), attack.share * len(data.train)
    hold(abs(count - expected) <= 0.5, attack, "share_malicious", (count, expected))
    agree(attack, "sizes", attacked.train.sizes, data.train.sizes)
    for position, name in enumerate(data.train.ids):
        same = all(map(torch.equal, attacked.train.client(at=position), data.train.client(at=position)))
        hold(same or name in attacked.malicious, attack, "clean_examples", name)
    return attacked


def _check_seed(attack: Attack, data: FederatedData) -> None:
    """Another seed draws other clients, where there is a choice; a share of 0 changes nothing."""
    other = cast(Any, attack)
    none = apply(data, replace(other, share=0.0))
    hold(not none.malicious and none.train is data.train, attack, "nobody_malicious")
    drawn = {apply(data, replace(other, share=0.5, seed=seed)).malicious for seed in range(6)}
    hold(len(drawn) > 1 or len(data.train) < 2, attack, "other_seed", drawn)


def _check_corruption(attack: Attack, gen: torch.Generator, seed: int) -> None:
    """What malicious clients send: one by one as together, again as before, and from updates that are not written to."""
    corrupt, omniscient = attack_traits(attack).corrupt, attack_traits(attack).omniscient
    if corrupt is None:
        return
    for dtype in (torch.float64, torch.float32):
        updates = torch.randn(5, 7, generator=gen, dtype=torch.float64).to(dtype)
        keys = rng.client_keys(rng.stream_key(seed, "batches", 3), torch.arange(5))
        honest = torch.randn(7, 7, generator=gen, dtype=torch.float64).to(dtype) if omniscient else None
        sent = Sent(updates, keys, 12, honest)
        with unchanged(attack, updates=updates, keys=keys):
            together = corrupt(sent)
        hold(isinstance(together, Tensor), attack, "update_tensor", type(together).__name__)
        hold(together.shape == updates.shape, attack, "update_shape", tuple(together.shape))
        hold(same_state(corrupt(sent), together), attack, "sent_again")
        if honest is not None:
            moved = corrupt(Sent(updates, keys, 12, honest.flip(0)))
            agree(attack, "honest_order", moved, together, 1e-6)
            continue
        alone = torch.cat([corrupt(Sent(updates[k : k + 1], keys[k : k + 1], 12)) for k in range(5)])
        agree(attack, "sent_alone", alone, together, 1e-6)
