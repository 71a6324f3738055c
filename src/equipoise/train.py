"""Train a model over clients: the loop over rounds. `round.py` is one of them."""

from __future__ import annotations

import copy
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import torch
from torch import nn

from equipoise.algorithm import Algorithm
from equipoise.data.clients import FederatedData
from equipoise.engines import Loop, Simulator
from equipoise.errors import Diverged, EquipoiseNotice, InvalidParameter, ObserverFailed, is_whole, require
from equipoise.metrics import mean
from equipoise.observers import Evaluation, History, Observers, Progress, Run, show_progress
from equipoise.result import ClientTable, Result
from equipoise.round import run_round
from equipoise.sampling import Full, Uniform
from equipoise.task import PerExample, Task
from equipoise.types import Engine, Observer, ServerState

T = TypeVar("T")
ModelOrMaker = nn.Module | Callable[[int], nn.Module]
DataOrMaker = FederatedData | Callable[[int], FederatedData]


class EngineChoice(Protocol):
    """Something that starts an engine: `engines.Simulator(...)`, `engines.Loop(...)`."""

    def start(self, task: Task, data: FederatedData) -> Engine: ...


def train(
    model: ModelOrMaker,
    data: DataOrMaker,
    algorithm: Algorithm | None = None,
    *,
    rounds: int,
    clients_per_round: int | None = None,
    seed: int = 0,
    loss: PerExample | None = None,
    error: PerExample | None = None,
    engine: EngineChoice | str = "simulator",
    evaluate_every: int | None = None,
    observers: Sequence[Observer] = (),
    progress: bool | None = None,
    name: str = "run",
) -> Result:
    """Train `model` over the clients of `data` for `rounds` rounds and evaluate every client of every split.

    `seed` fixes cohorts, batches and noise, whatever the engine. `model` and `data` may also be functions of the seed. `loss`
    and `error` take (outputs, targets) and give one number per example; without them the model's own `loss` and `error`, else
    cross-entropy, and misclassification where there are classes (elsewhere the error is the loss).
    `engine` is "simulator", "loop", or one with options such as engines.Simulator(device="cuda"). `evaluate_every` evaluates
    all clients every so many rounds for the history; the end is always evaluated. The given model is not changed.
    `clients_per_round` is not needed with sampling.Full(). `progress` shows a bar (None: in a terminal), `observers` watch the
    run (equipoise.observers), and `name` is what reports call it.
    """
    require(is_whole(rounds) and rounds >= 0, "rounds", "must be a whole number ≥ 0", rounds)
    require(is_whole(seed) and 0 <= seed < 2**63, "seed", "must be a whole number from 0 to 2^63 − 1", seed)
    good = evaluate_every is None or (is_whole(evaluate_every) and evaluate_every >= 1)
    require(good, "evaluate_every", "must be at least 1 round", evaluate_every)
    rounds, seed = int(rounds), int(seed)
    require(isinstance(observers, Sequence), "observers", "must be a list of observers", type(observers).__name__)
    algorithm = algorithm or Algorithm()
    if not isinstance(algorithm, Algorithm):
        raise InvalidParameter("algorithm", "must be an equipoise.Algorithm", algorithm, "Write Algorithm(risk=…).")
    if isinstance(model, FederatedData) or isinstance(data, nn.Module):
        raise InvalidParameter("model", "comes first and the data second", type(model).__name__, "Write train(model, data, …).")
    data, model = made(data, seed, FederatedData, "data"), made(model, seed, nn.Module, "model")

    task = Task.of(model, loss, error).fitted(data)
    running = choose_engine(engine).start(task, data)
    sampler = algorithm.sampler or Uniform()
    alpha = algorithm.base_weights(data.train)
    if clients_per_round is None:
        require(isinstance(sampler, Full), "clients_per_round", "must be given unless the sampler is sampling.Full()", None)
        clients_per_round = len(data.train)
    sampler(0, alpha, clients_per_round=clients_per_round, seed=seed)  # refuses an impossible cohort before any work
    params = task.layout.read(task.module).to(getattr(running, "device", "cpu"))
    state = ServerState(0, params, server=algorithm.server.begin(params))

    history = History()
    watching = Observers([history, *observers, *([Progress()] if show_progress(progress) else [])])
    began = time.perf_counter()
    try:
        watching.on_start(Run(name, rounds, seed))
        while state.round < rounds:
            cohort = sampler(state.round, alpha, clients_per_round=clients_per_round, seed=seed)
            state, report = run_round(state, algorithm, running, cohort, data.train)
            watching.on_round(report)
            if evaluate_every and state.round % evaluate_every == 0 and state.round < rounds:
                watching.on_evaluation(Evaluation(state.round, ClientTable.evaluate(running, state.params, data)))
        watching.on_evaluating(state.round)
        table = ClientTable.evaluate(running, state.params, data)
        watching.on_evaluation(Evaluation(state.round, table))
        trained_on = table.where("train")
        if not bool(torch.isfinite(trained_on.loss).all()):
            lost = [i for i, good in zip(trained_on.client, torch.isfinite(trained_on.loss).tolist(), strict=True) if not good]
            raise Diverged(rounds, lost, "loss after the last round")
    except BaseException as failure:
        if isinstance(failure, Diverged):
            failure.history = history
        watching.on_end(failing=True)
        raise
    trained = copy.deepcopy(model).eval()
    task.layout.write(trained, state.params)
    result = Result(
        name=name,
        algorithm=algorithm,
        seed=seed,
        model=trained,
        params=state.params,
        clients=table,
        history=history,
        seconds=time.perf_counter() - began,
        data=data.name,
        rounds=rounds,
        clients_per_round=clients_per_round,
        error_is_loss=task.error_is_loss,
    )
    try:
        watching.on_end()
    except ObserverFailed as failure:
        failure.finished = result
        raise
    warn_if_lost(history, table, classes=data.classes > 0)
    return result


def warn_if_lost(history: History, table: ClientTable, *, classes: bool) -> None:
    """A loss of a thousand times its start (or, with classes, of a thousand) is finite, but no result."""
    if not history.rounds:
        return
    start = 0.0 if classes else history.rounds[0].loss
    trained_on = table.where("train")
    last = mean(trained_on.loss, trained_on.size)
    if last > 1000 * (1 + start):
        text = f"The training loss ended at {last:.3g}: the run diverged. Lower the learning rate."
        warnings.warn(EquipoiseNotice(text), stacklevel=3)


def choose_engine(engine: EngineChoice | str) -> EngineChoice:
    """The engine by name, or the object itself."""
    if isinstance(engine, str):
        named: dict[str, EngineChoice] = {"simulator": Simulator(), "loop": Loop()}
        if engine not in named:
            raise InvalidParameter("engine", 'must be "simulator", "loop" or an engine object', engine)
        return named[engine]
    if not hasattr(engine, "start") or isinstance(engine, type):
        raise InvalidParameter("engine", 'must be "simulator", "loop" or an engine object', engine)
    return engine


def made(maker: object, seed: int, kind: type[T], parameter: str) -> T:
    """The object itself, or what a function of the seed makes; random initial weights then depend on the seed alone."""
    if isinstance(maker, kind):
        return maker
    rule = f"must be a {kind.__name__}, or a function of the seed that makes one"
    if not callable(maker) or isinstance(maker, type):
        raise InvalidParameter(parameter, rule, getattr(maker, "__name__", maker))
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        try:
            found = maker(seed)
        except TypeError as failure:
            raise InvalidParameter(
                parameter, rule, getattr(maker, "__name__", maker), f"Calling it said: {failure}."
            ) from failure
    if not isinstance(found, kind):
        raise InvalidParameter(parameter, rule, found)
    return found
