"""The laws of the contracts, as public checks: a part of your own should pass the check of its kind.

Each check raises LawBroken with the law and the numbers that break it, and returns nothing when all hold. They try seeded
random cases and the awkward ones: one client, ties, zero losses, huge losses, zero updates.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from equipoise.aggregators import WeightedMean
from equipoise.algorithm import Algorithm
from equipoise.data.clients import ClientSet, FederatedData
from equipoise.engines import Loop
from equipoise.errors import EquipoiseError
from equipoise.models import Softmax
from equipoise.rng import torch_generator
from equipoise.sampling import Full
from equipoise.solvers.prepared import RoundContext
from equipoise.task import Task
from equipoise.train import EngineChoice, train
from equipoise.types import (
    Aggregator,
    Averaging,
    ClientRisk,
    Cohort,
    Engine,
    Job,
    LocalSolver,
    Observer,
    RiskValue,
    Sampler,
    ServerOptimizer,
)


class LawBroken(EquipoiseError, AssertionError):
    """A part breaks a law of its contract."""


def _hold(condition: bool, part: object, law: str, found: object = "") -> None:
    if not condition:
        raise LawBroken(f"{part!r} breaks the law: {law}." + (f" Found: {found}" if found != "" else ""))


def _close(a: Tensor, b: Tensor, tolerance: float) -> bool:
    scale = max(1.0, float(b.abs().max()) if b.numel() else 1.0)
    return a.shape == b.shape and bool(((a.double() - b.double()).abs() <= tolerance * scale).all())


# ---------------------------------------------------------------------------------------------------------------- risks


def check_risk(risk: ClientRisk, *, seed: int = 0) -> None:
    """Weights are the gradient of the value; order and ties do not matter; finite for any finite losses.

    Finite differences are taken where the value has a derivative; at a kink any subgradient is right. Ties are compared inside
    a group where the risk tells groups apart (`group_of`). A risk with `full_participation` follows a mixture of its own, not
    the base weights: instead of ties its memory is checked, and, if it has a `step`, the ascent on the simplex.
    """
    gen = torch_generator(seed, "check_risk")
    for count in (1, 2, 3, 7, 20):
        for dtype, tolerance in ((torch.float64, 1e-5), (torch.float32, 1e-4)):
            losses = 2 * torch.rand(count, generator=gen, dtype=torch.float64) + 0.1
            alpha = torch.rand(count, generator=gen, dtype=torch.float64) + 0.1
            losses, alpha = losses.to(dtype), (alpha / alpha.sum()).to(dtype)
            result = _call_risk(risk, losses, alpha)
            if dtype == torch.float64:
                _check_gradient(risk, losses, alpha, result)
            order = torch.randperm(count, generator=gen)
            moved = _call_risk(risk, losses[order], alpha[order], order)
            _hold(_close(moved.weights, result.weights[order], tolerance), risk, "permuting clients permutes the weights")
            _hold(_close(moved.value, result.value, tolerance), risk, "the value does not depend on the order of clients")
            if not getattr(risk, "full_participation", False):
                _check_ties(risk, losses, alpha, tolerance)
    _check_extremes(risk)
    if getattr(risk, "full_participation", False):
        _check_mixture_of_clients(risk, gen)


def _call_risk(risk: ClientRisk, losses: Tensor, alpha: Tensor, order: Tensor | None = None, state: Any = None) -> RiskValue:
    numbers = range(len(losses)) if order is None else order.tolist()
    result = risk(losses, alpha, clients=tuple(f"client-{i}" for i in numbers), state=state)
    _hold(isinstance(result, RiskValue), risk, "a risk returns a RiskValue", type(result).__name__)
    _hold(result.weights.shape == losses.shape, risk, "there is one weight per client", tuple(result.weights.shape))
    _hold(result.value.numel() == 1, risk, "the value is one number", tuple(result.value.shape))
    return result


def _check_gradient(risk: ClientRisk, losses: Tensor, alpha: Tensor, result: RiskValue) -> None:
    step, smooth = 1e-5, 0
    for i in range(len(losses)):
        nudge = torch.zeros_like(losses)
        nudge[i] = step
        rounding = 4e-16 * abs(float(result.value)) / step  # of the difference of two large values
        up, down = (float(_call_risk(risk, losses + s * nudge, alpha).value) for s in (1, -1))
        here = float(result.value)
        slope, weight = (up - down) / (2 * step), float(result.weights[i])
        if abs((up - here) - (here - down)) > 1e-2 * step * max(1.0, abs(slope)):  # a kink within the step
            continue
        smooth += 1
        _hold(
            abs(slope - weight) <= 1e-4 * max(1.0, abs(slope)) + rounding,
            risk,
            "the weights are the gradient of the value in the losses",
            f"client {i} of {len(losses)}: weight {weight:.6g}, finite difference {slope:.6g}",
        )
    _hold(2 * smooth >= len(losses), risk, "the value has a derivative at most losses", f"{smooth} of {len(losses)}")


def _check_ties(risk: ClientRisk, losses: Tensor, alpha: Tensor, tolerance: float) -> None:
    tied = losses.clone()
    tied[: (len(losses) + 1) // 2] = losses.max()
    group_of = getattr(risk, "group_of", lambda client: "")
    groups = [group_of(f"client-{i}") for i in range(len(losses))]
    for values in (tied, torch.full_like(losses, 0.7), torch.zeros_like(losses)):
        ratio = _call_risk(risk, values, alpha).weights.double() / alpha.double()
        levels = list(zip(values.tolist(), groups, strict=True))
        for level in set(levels):
            same = ratio[torch.tensor([other == level for other in levels])]
            _hold(
                float(same.max() - same.min()) <= 10 * tolerance * max(1.0, float(same.abs().max())),
                risk,
                "equal losses share weight in proportion to the base weights",
                same.tolist()[:5],
            )


def _check_extremes(risk: ClientRisk) -> None:
    for dtype, huge in ((torch.float32, 1e30), (torch.float64, 1e300)):
        for values in ([0.0, 0.0, 0.0], [0.0, 1.0, 1e4], [huge, 1.0, 0.0], [huge, huge, huge], [1e-30, 0.0, 1e-30], [1e4]):
            losses = torch.tensor(values, dtype=dtype)
            alpha = torch.full_like(losses, 1 / len(values))
            weights = _call_risk(risk, losses, alpha).weights
            normal = weights / weights.sum()
            _hold(
                bool(torch.isfinite(normal).all()), risk, "normalised weights are finite for finite losses", (values, weights)
            )
            _hold(bool((weights >= 0).all()), risk, "weights are not negative", (values, weights))
    state = _call_risk(risk, torch.tensor([1.0, 2.0]), torch.tensor([0.5, 0.5])).state
    _call_risk(risk, torch.tensor([1.0, 2.0]), torch.tensor([0.5, 0.5]), state=state)


def _check_mixture_of_clients(risk: ClientRisk, gen: torch.Generator) -> None:
    """The memory of a risk over all clients goes by their ids; an ascent with a `step` starts uniform and projects."""
    step = getattr(risk, "step", None)
    for count, scale in ((1, 1.0), (2, 1.0), (7, 0.1), (7, 3.0), (20, 30.0), (3, 1e300)):
        alpha = torch.rand(count, generator=gen, dtype=torch.float64) + 0.1
        losses, later = scale * torch.rand(2, count, generator=gen, dtype=torch.float64)
        alpha, order = alpha / alpha.sum(), torch.randperm(count, generator=gen)
        first = _call_risk(risk, losses, alpha)
        second = _call_risk(risk, later, alpha, state=first.state)
        moved = _call_risk(risk, later[order], alpha[order], order, state=first.state)
        _hold(_close(moved.weights, second.weights[order], 1e-9), risk, "weights follow their clients when the order changes")
        if step is None:
            continue
        uniform = torch.full_like(alpha, 1 / count)
        _hold(_close(first.weights, uniform, 1e-9), risk, "the mixture starts uniform", first.weights)
        third = _call_risk(risk, later, alpha, state=second.state)
        for here, seen, found in ((first.weights, losses, second.weights), (second.weights, later, third.weights)):
            on_simplex = bool((found >= 0).all()) and abs(float(found.sum()) - 1) < 1e-9
            _hold(on_simplex, risk, "the next mixture is a point of the simplex", found)
            expected = _projection_by_bisection(here + step * (seen - seen.max()))
            _hold(_close(found, expected, 1e-9), risk, "the next mixture is the projection of λ + step · F", (found, expected))


def _projection_by_bisection(point: Tensor) -> Tensor:
    """The projection on the simplex, max(v − τ, 0): slow, and unlike any fast way."""
    low, high = float(point.max()) - 1, float(point.max())
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if float((point - middle).clamp(min=0.0).sum()) > 1 else (low, middle)
    return (point - low).clamp(min=0.0)


# -------------------------------------------------------------------------------------------------------------- solvers


@dataclass(frozen=True)
class _NoSteps:
    """A solver's work with no step at all."""

    solver: LocalSolver

    @property
    def batch_size(self) -> int | None:
        return self.solver.batch_size

    def local_steps(self, size: int, effort: int | None = None) -> int:
        return 0

    def learning_rate(self, round_index: int) -> float:
        return self.solver.learning_rate(round_index)

    def begin(self, weights: Tensor) -> tuple[Tensor, ...]:
        return self.solver.begin(weights)

    def step(self, weights: Tensor, gradient: Tensor, memory: tuple[Tensor, ...], *, anchor: Tensor, lr: float) -> None:
        self.solver.step(weights, gradient, memory, anchor=anchor, lr=lr)


def check_solver(solver: LocalSolver, *, seed: int = 0) -> None:
    """Zero steps give a zero update; a step acts on each client alone; more data never mean fewer steps.

    A solver that is prepared anew for each round is checked as it is prepared for the first round of a small run.
    """
    if hasattr(solver, "prepare"):
        task, data = _small_task(seed)
        solver = _prepared(solver, Loop().start(task, data), task.layout.read(task.module), _everyone(data, seed))
    for size in (1, 2, 9, 10, 11, 1000):
        steps = solver.local_steps(size)
        _hold(isinstance(steps, int) and steps >= 0, solver, "local_steps is a whole number ≥ 0", (size, steps))
        _hold(steps <= solver.local_steps(size + 1), solver, "more data never mean fewer steps", size)
    for round_index in (0, 1, 1000):
        lr = solver.learning_rate(round_index)
        _hold(
            math.isfinite(lr) and lr > 0, solver, "the learning rate is positive and finite in every round", (round_index, lr)
        )
    task, data = _small_task(seed)
    params = torch.randn(task.layout.dimension, generator=torch_generator(seed, "check_solver"), dtype=torch.float64)
    work = Loop().start(task, data).updates(params, _everyone(data, seed), _NoSteps(solver))
    _hold(bool((work.update == 0).all()), solver, "zero steps give a zero update", float(work.update.abs().max()))
    gen = torch_generator(seed, "check_solver steps")
    together, anchor = torch.randn(3, 5, generator=gen), torch.randn(5, generator=gen)
    alone = [row.clone() for row in together]
    memory, memories = solver.begin(together), [solver.begin(row) for row in alone]
    for _ in range(3):
        gradients = torch.randn(3, 5, generator=gen)
        kept = gradients.clone()
        solver.step(together, gradients, memory, anchor=anchor, lr=0.1)
        _hold(torch.equal(gradients, kept), solver, "a step does not write to the gradient, which parameters may share")
        for row, gradient, own in zip(alone, gradients, memories, strict=True):
            solver.step(row, gradient.clone(), own, anchor=anchor, lr=0.1)
    _hold(_close(together, torch.stack(alone), 1e-6), solver, "a step on many clients is the step on each")


# ---------------------------------------------------------------------------------------------------------- aggregators


def check_aggregator(aggregator: Aggregator, *, seed: int = 0, clients: int = 12) -> None:
    """Permutation-invariant; zero updates give zero; a linear one's total is additive over chunks and linear in the weights."""
    gen = torch_generator(seed, "check_aggregator")
    updates = torch.randn(clients, 6, generator=gen, dtype=torch.float64)
    weights = torch.rand(clients, generator=gen, dtype=torch.float64) + 0.1
    weights, losses = weights / weights.sum(), torch.rand(clients, generator=gen, dtype=torch.float64)
    total, _ = aggregator(updates, weights, losses=losses)
    _hold(total.shape == updates.shape[1:], aggregator, "the total has the shape of one update", tuple(total.shape))
    order = torch.randperm(clients, generator=gen)
    moved, _ = aggregator(updates[order], weights[order], losses=losses[order])
    _hold(_close(moved, total, 1e-9), aggregator, "the order of clients does not matter")
    zero, _ = aggregator(torch.zeros_like(updates), weights, losses=losses)
    _hold(bool((zero == 0).all()), aggregator, "zero updates give a zero total", zero)
    if aggregator.linear:
        parts = [aggregator(updates[i : i + 5], weights[i : i + 5], losses=losses[i : i + 5])[0] for i in range(0, clients, 5)]
        _hold(_close(torch.stack(parts).sum(0), total, 1e-9), aggregator, "a linear total is the sum of its chunks' totals")
        double, _ = aggregator(updates, 2 * weights, losses=losses)
        _hold(_close(double, 2 * total, 1e-9), aggregator, "a linear total doubles with the weights")


# --------------------------------------------------------------------------------------------- server optimisers, samplers


def check_server_optimizer(server: ServerOptimizer, *, seed: int = 0) -> None:
    """A zero update from a fresh state changes nothing; inputs are not written to; the first step follows the update."""
    gen = torch_generator(seed, "check_server_optimizer")
    params, total = torch.randn(7, generator=gen), torch.randn(7, generator=gen)
    kept, state = params.clone(), server.begin(params)
    still, _ = server.step(params, torch.zeros_like(params), state)
    _hold(torch.equal(still, params), server, "a zero update from a fresh state changes nothing", still - params)
    first, _ = server.step(params, total, state)
    _, later = server.step(params, total, state)
    second, _ = server.step(params, total, later)
    again, _ = server.step(params, total, later)
    _hold(torch.equal(second, again), server, "a step does not write to the state it is given")
    _hold(torch.equal(params, kept), server, "a step does not write to the parameters it is given")
    _hold(float((first - params) @ total) > 0, server, "the first step goes along the update")


def check_sampler(sampler: Sampler, *, clients: int = 20, clients_per_round: int = 6, draws: int = 1000, seed: int = 0) -> None:
    """Distinct clients with positive weights that sum to 1; a pure function of seed and round; stated inclusion is true.

    Inclusion may change from round to round, so it is held against `draws` seeds at each of a few rounds; a client that no
    cohort of a round holds has inclusion 0 in it. Over `draws` rounds, one seed must choose a client as often as another.
    """
    alpha = torch.rand(clients, generator=torch_generator(seed, "check_sampler"), dtype=torch.float64) + 0.1
    alpha = alpha / alpha.sum()

    def draw(round_index: int, own_seed: int) -> Cohort:
        cohort = sampler(round_index, alpha, clients_per_round=clients_per_round, seed=own_seed)
        _check_cohort(sampler, cohort, round_index, own_seed, clients)
        return cohort

    for index in (0, 1, 9, 1000):
        seen, stated = torch.zeros(clients), torch.zeros(clients, dtype=torch.float64)
        for own_seed in range(seed, seed + draws):
            cohort = draw(index, own_seed)
            seen[cohort.clients] += 1
            stated[cohort.clients] = cohort.inclusion
        error = 5 * (stated * (1 - stated) / draws).sqrt() + 1e-9  # five standard deviations
        _hold(
            bool(((seen / draws - stated).abs() <= error).all()),
            sampler,
            "clients take part as often as their inclusion says",
            f"round {index}: {(seen / draws).tolist()}, stated {stated.tolist()}",
        )
    same = torch.equal(draw(1, seed).clients, draw(1, seed).clients)
    _hold(same, sampler, "a cohort is a function of seed and round alone")
    first, second = torch.zeros(clients), torch.zeros(clients)
    for index in range(draws):
        first[draw(index, seed).clients] += 1
        second[draw(index, seed + 1).clients] += 1
    # A count has a variance of at most draws/4, so five standard deviations of the difference of two are at most this.
    _hold(
        bool(((first - second).abs() <= 5 * math.sqrt(draws / 2)).all()),
        sampler,
        "over many rounds clients take part as often as at another seed",
        (first.tolist(), second.tolist()),
    )


def _check_cohort(sampler: Sampler, cohort: Cohort, round_index: int, seed: int, clients: int) -> None:
    carried = (cohort.round, cohort.seed)
    _hold(carried == (round_index, seed), sampler, "a cohort carries its round and seed", carried)
    if len(cohort) == 0:
        return
    _hold(len(set(cohort.clients.tolist())) == len(cohort), sampler, "clients of a cohort are distinct", cohort.clients)
    in_range = int(cohort.clients.min()) >= 0 and int(cohort.clients.max()) < clients
    _hold(in_range, sampler, "positions are in range", cohort.clients)
    good = bool((cohort.weights > 0).all()) and abs(float(cohort.weights.sum()) - 1) < 1e-9
    _hold(good, sampler, "weights are positive and sum to 1", cohort.weights)


# ------------------------------------------------------------------------------------------------------------ averaging


def check_averaging(averaging: Averaging, *, rounds: int = 50, seed: int = 0) -> None:
    """A constant sequence is reported as it is; the point lies in the iterates' hull; nothing given is written to."""
    gen = torch_generator(seed, "check_averaging")
    for dtype in (torch.float32, torch.float64):
        still = torch.randn(5, generator=gen, dtype=torch.float64).to(dtype)
        path = [torch.randn(5, generator=gen, dtype=torch.float64).to(dtype) for _ in range(rounds + 1)]
        for iterates in ([still] * (rounds + 1), path):
            kept = [point.clone() for point in iterates]
            state = averaging.begin(iterates[0])
            for count, point in enumerate(iterates):
                before, state = state, averaging.update(point, state) if count else state
                found = averaging.iterate(point, state)
                again = averaging.iterate(point, averaging.update(point, before) if count else before)
                _hold(torch.equal(point, kept[count]), averaging, "averaging does not write to the parameters it is given")
                _hold(torch.equal(found, again), averaging, "an update does not write to the state it is given")
                _check_hull(averaging, found, torch.stack(kept[: count + 1]))


def _check_hull(averaging: Averaging, found: Tensor, iterates: Tensor) -> None:
    same_form = found.shape == iterates[0].shape and found.dtype == iterates.dtype
    _hold(same_form, averaging, "the reported point has the form of the parameters", (tuple(found.shape), found.dtype))
    low, high = iterates.min(0).values, iterates.max(0).values
    slack = 1e-12 * iterates.abs().max()  # far below float32, whose rounding therefore shows
    inside = bool(((found >= low - slack) & (found <= high + slack)).all())
    _hold(inside, averaging, "the reported point lies between the smallest and the largest iterate", found)


# --------------------------------------------------------------------------------------------------- engines, observers


def _small_task(seed: int) -> tuple[Task, FederatedData]:
    """A softmax model and eight ragged clients, in float64."""
    gen = torch_generator(seed, "check task")
    sizes = [1, 2, 3, 7, 10, 11, 20, 25]
    clients = ClientSet.pack(
        (f"client-{i}", torch.randn(n, 4, generator=gen, dtype=torch.float64), torch.randint(0, 3, (n,), generator=gen))
        for i, n in enumerate(sizes)
    )
    return Task.of(Softmax(4, 3).double()), FederatedData(clients, classes=3, name="ragged")


def _everyone(data: FederatedData, seed: int) -> Cohort:
    return Full()(0, Algorithm().base_weights(data.train), clients_per_round=len(data.train), seed=seed)


def _prepared(solver: LocalSolver, engine: Engine, params: Tensor, cohort: Cohort) -> LocalSolver:
    """The solver of a round, where every client takes part in every cohort."""
    if not hasattr(solver, "prepare"):
        return solver
    context = RoundContext(engine, params, cohort, cohort.weights, lambda purpose: cohort)
    prepared: LocalSolver = solver.prepare(context, None)[0]
    return prepared


def check_engine(
    engine: EngineChoice,
    *,
    task: Task | None = None,
    data: FederatedData | None = None,
    solver: LocalSolver | None = None,
    tolerance: float = 1e-9,
    seed: int = 0,
) -> None:
    """Agrees with the loop engine on losses, updates, summed updates and evaluation, for the given task or a small one."""
    if task is None or data is None:
        task, data = _small_task(seed)
    solver = solver or Algorithm().solver
    oracle, tried = Loop().start(task, data), engine.start(task, data)
    gen = torch_generator(seed, "check_engine")
    params = task.layout.read(task.module)
    params = params + 0.1 * torch.randn(len(params), generator=gen, dtype=params.dtype)
    device = getattr(tried, "device", "cpu")
    here = params.to(device)
    cohort = _everyone(data, seed)
    plain, solver = _prepared(solver, oracle, params, cohort), _prepared(solver, tried, here, cohort)
    if hasattr(solver, "efforts"):
        cohort = replace(cohort, effort=solver.efforts(cohort, data.train.keys))
    models = torch.stack([params, 0.5 * params])
    half = cohort.take(torch.arange(0, len(cohort), 2))
    jobs = [Job(models[0], cohort, cohort.weights), Job(models[1], half, half.weights)]
    moved = [Job(job.params.to(device), job.cohort, job.weights) for job in jobs]
    pairs: dict[str, Callable[[], tuple[Tensor, Tensor]]] = {
        "losses": lambda: (tried.losses(here, cohort), oracle.losses(params, cohort)),
        "updates": lambda: (tried.updates(here, cohort, solver).update, oracle.updates(params, cohort, plain).update),
        "local losses": lambda: (tried.updates(here, cohort, solver).losses, oracle.updates(params, cohort, plain).losses),
        "update norms": lambda: (tried.updates(here, cohort, solver).sq_norms, oracle.updates(params, cohort, plain).sq_norms),
        "summed update": lambda: (
            tried.summed_update(here, cohort, solver, cohort.weights, WeightedMean()).update,
            oracle.summed_update(params, cohort, plain, cohort.weights, WeightedMean()).update,
        ),
        "losses for a solver": lambda: (tried.losses(here, cohort, solver), oracle.losses(params, cohort, plain)),
        "losses of several models": lambda: (tried.losses_of(models.to(device), cohort), oracle.losses_of(models, cohort)),
        "summed updates of several models": lambda: (
            torch.stack([work.update for work in tried.summed_updates(moved, solver, WeightedMean())]),
            torch.stack([work.update for work in oracle.summed_updates(jobs, plain, WeightedMean())]),
        ),
        "evaluated losses": lambda: (tried.evaluate(here, data.train)[0], oracle.evaluate(params, data.train)[0]),
        "evaluated errors": lambda: (tried.evaluate(here, data.train)[1], oracle.evaluate(params, data.train)[1]),
    }
    for what, pair in pairs.items():
        found, expected = (t.cpu().nan_to_num(nan=-1.0) for t in pair())
        difference = float((found - expected).abs().max()) if found.shape == expected.shape else "another shape"
        _hold(_close(found, expected, tolerance), engine, f"{what} agree with the loop engine", difference)


def check_observer(observer: Observer, *, seed: int = 0) -> None:
    """Watching a run does not change it: the parameters are the same, bit for bit, with and without the observer."""
    task, data = _small_task(seed)

    def params(*observers: Observer) -> Tensor:
        result = train(
            task.module, data, rounds=4, clients_per_round=3, seed=seed, evaluate_every=2, observers=observers, progress=False
        )
        return result.params

    alone = params()
    _hold(torch.equal(params(observer), alone), observer, "an observer does not change training")
