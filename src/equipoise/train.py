"""Train a model over clients: the loop over rounds. `round.py` is one of them."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from torch import nn

from equipoise.algorithm import Algorithm
from equipoise.data.clients import FederatedData
from equipoise.engines import Loop, Simulator
from equipoise.errors import Diverged, InvalidParameter, require
from equipoise.observers import Evaluation, History, Observers, Progress, Run, show_progress
from equipoise.result import ClientTable, Result
from equipoise.round import run_round
from equipoise.sampling import Uniform
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
    clients_per_round: int,
    seed: int = 0,
    loss: PerExample | None = None,
    engine: EngineChoice | str = "simulator",
    evaluate_every: int | None = None,
    observers: Sequence[Observer] = (),
    progress: bool | None = None,
    name: str = "run",
) -> Result:
    """Train `model` over the clients of `data` for `rounds` rounds and evaluate every client of every split.

    `seed` fixes cohorts, batches and noise, whatever the engine. `model` and `data` may also be functions of the seed. `loss`
    takes (outputs, targets) and gives one number per example; without it the model's own `loss`, else cross-entropy.
    `engine` is "simulator", "loop", or one with options such as engines.Simulator(device="cuda"). `evaluate_every` evaluates
    all clients every so many rounds for the history; the end is always evaluated. The given model is not changed.
    """
    require(isinstance(rounds, int) and rounds >= 0, "rounds", "must be a whole number ≥ 0", rounds)
    require(isinstance(seed, int) and 0 <= seed < 2**63, "seed", "must be a whole number from 0 to 2^63 − 1", seed)
    require(evaluate_every is None or evaluate_every >= 1, "evaluate_every", "must be at least 1 round", evaluate_every)
    algorithm = algorithm or Algorithm()
    if not isinstance(algorithm, Algorithm):
        raise InvalidParameter("algorithm", "must be an equipoise.Algorithm", algorithm, "Write Algorithm(risk=…).")
    data = data if isinstance(data, FederatedData) else _made(data, seed, FederatedData, "data")
    model = model if isinstance(model, nn.Module) else _made(model, seed, nn.Module, "model")

    task = Task.of(model, loss)
    task.refuse_misfit(data)
    running = choose_engine(engine).start(task, data)
    sampler = algorithm.sampler or Uniform()
    alpha = algorithm.base_weights(data.train)
    sampler(0, alpha, clients_per_round=clients_per_round, seed=seed)  # refuses an impossible cohort before any work
    params = task.layout.read(task.module).to(getattr(running, "device", "cpu"))
    state = ServerState(0, params, server=algorithm.server.begin(params))

    history = History()
    watching = Observers([history, *observers, *([Progress()] if show_progress(progress) else [])])
    began = time.perf_counter()
    watching.on_start(Run(name, rounds, seed))
    try:
        while state.round < rounds:
            cohort = sampler(state.round, alpha, clients_per_round=clients_per_round, seed=seed)
            state, report = run_round(state, algorithm, running, cohort, data.train)
            watching.on_round(report)
            if evaluate_every and state.round % evaluate_every == 0 and state.round < rounds:
                watching.on_evaluation(Evaluation(state.round, ClientTable.evaluate(running, state.params, data)))
        table = ClientTable.evaluate(running, state.params, data)
        watching.on_evaluation(Evaluation(state.round, table))
    except Diverged as failure:
        failure.history = history
        raise
    finally:
        watching.on_end()
    trained = copy.deepcopy(model)
    task.layout.write(trained, state.params)
    return Result(
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
        error_is_loss=task.error == task.loss,
    )


def choose_engine(engine: EngineChoice | str) -> EngineChoice:
    """The engine by name, or the object itself."""
    if isinstance(engine, str):
        named: dict[str, EngineChoice] = {"simulator": Simulator(), "loop": Loop()}
        if engine not in named:
            raise InvalidParameter("engine", 'must be "simulator", "loop" or an engine object', engine)
        return named[engine]
    if not hasattr(engine, "start"):
        raise InvalidParameter("engine", 'must be "simulator", "loop" or an engine object', engine)
    return engine


def _made(maker: object, seed: int, kind: type[T], parameter: str) -> T:
    made = maker(seed) if callable(maker) else maker
    if not isinstance(made, kind):
        raise InvalidParameter(parameter, f"must be a {kind.__name__}, or a function of the seed that makes one", made)
    return made
