"""Train a model over clients: the loop over rounds. `round.py` is one of them."""

from __future__ import annotations

import copy
import math
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

import torch
from torch import Tensor, nn

from equipoise.algorithm import Algorithm
from equipoise.checkpoint import Checkpoint, CheckpointError, Checkpoints, identity_of, read_checkpoint, refuse_strangers
from equipoise.data.clients import FederatedData
from equipoise.engines import Loop, Simulator
from equipoise.errors import Diverged, EquipoiseNotice, InvalidParameter, ObserverFailed, is_whole, require
from equipoise.metrics import mean
from equipoise.observers import Evaluation, History, Observers, Progress, Run, show_progress
from equipoise.result import ClientTable, Result
from equipoise.round import run_round
from equipoise.sampling import Full, Uniform
from equipoise.task import PerExample, Task
from equipoise.types import Cohort, Engine, Observer, Sampler, ServerState

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
    checkpoint: Checkpoints | str | Path | None = None,
) -> Result:
    """Train `model` over the clients of `data` for `rounds` rounds and evaluate every client of every split.

    `seed` fixes cohorts, batches and noise, whatever the engine. `model` and `data` may also be functions of the seed. `loss`
    and `error` take (outputs, targets) and give one number per example; without them the model's own `loss` and `error`, else
    cross-entropy, and misclassification where there are classes (elsewhere the error is the loss).
    `engine` is "simulator", "loop", or one with options such as engines.Simulator(device="cuda"). `evaluate_every` evaluates
    all clients every so many rounds for the history; the end is always evaluated. The given model is not changed.
    `clients_per_round` is not needed with sampling.Full(). `progress` shows a bar (None: in a terminal), `observers` watch the
    run (equipoise.observers), and `name` is what reports call it. `checkpoint` names a file: if it is there, the run goes on
    from it, else it is made; it is written about every ten seconds, and a run that was killed and started again ends with the
    same model, bit for bit.
    """
    good = evaluate_every is None or (is_whole(evaluate_every) and evaluate_every >= 1)
    require(good, "evaluate_every", "must be at least 1 round", evaluate_every)
    require(isinstance(observers, Sequence), "observers", "must be a list of observers", type(observers).__name__)
    algorithm = algorithm or Algorithm()
    setting = set_up(
        model, data, algorithm, rounds=rounds, clients_per_round=clients_per_round, seed=seed, loss=loss, error=error,
        engine=engine,
    )  # fmt: skip
    saving = Checkpoints(checkpoint) if isinstance(checkpoint, str | Path) else checkpoint
    state, history, before = resumed(saving, setting, algorithm)
    saves = [saving] if saving is not None else []
    watching = Observers([history, *observers, *saves, *([Progress()] if show_progress(progress) else [])])
    began = time.perf_counter() - before
    try:
        watching.on_start(Run(name, setting.rounds, setting.seed, state.round, setting, history))
        watching.on_state(state)
        while state.round < setting.rounds:
            state, report = run_round(
                state, algorithm, setting.engine, setting.cohort(state.round), setting.data.train,
                clients_per_round=setting.clients_per_round,
            )  # fmt: skip
            watching.on_round(report)
            if evaluate_every and state.round % evaluate_every == 0 and state.round < setting.rounds:
                watching.on_evaluation(setting.evaluation(algorithm, state))
            watching.on_state(state)
        watching.on_evaluating(state.round)
        final = setting.evaluation(algorithm, state)
        watching.on_evaluation(final)
        stop_if_lost(final)
    except BaseException as failure:
        if isinstance(failure, Diverged):
            failure.history = history
        watching.on_end(failing=True)
        raise
    result = setting.result(name, algorithm, state, final.clients, history, time.perf_counter() - began)
    try:
        watching.on_end()
    except ObserverFailed as failure:
        failure.finished = result
        raise
    warn_if_lost(history, final.clients, classes=setting.data.classes > 0)
    warn_if_idle(history)
    return result


def resumed(saving: Checkpoints | None, setting: Setting, algorithm: Algorithm) -> tuple[ServerState, History, float]:
    """Where to start: the state, the history so far and the seconds it took; from a checkpoint if there is one."""
    if saving is None:
        return setting.begin(algorithm), History(), 0.0
    identity = identity_of(setting, algorithm)
    if not saving.path.exists():
        found = Checkpoint(setting.begin(algorithm), History(), 0.0, identity)
    else:
        found = read_checkpoint(saving.path, getattr(setting.engine, "device", "cpu"))
        refuse_strangers(saving.path, found.identity, identity)
        if found.state.round > setting.rounds:
            raise CheckpointError(f"{saving.path} is already at round {found.state.round}, beyond rounds = {setting.rounds}.")
    saving.begin(identity, found.history, found.seconds)
    return found.state, found.history, found.seconds


@dataclass(frozen=True, eq=False)
class Setting:
    """What all rounds of a run share: model, data, a running engine, and who may take part."""

    model: nn.Module
    data: FederatedData
    task: Task
    engine: Engine
    sampler: Sampler
    alpha: Tensor  # (n,) base weights of the training clients
    clients_per_round: int
    rounds: int
    seed: int

    def begin(self, algorithm: Algorithm) -> ServerState:
        """The state before the first round."""
        params = self.task.layout.read(self.task.module).to(getattr(self.engine, "device", "cpu"))
        return ServerState(0, params, server=algorithm.server.begin(params), averaging=algorithm.reported.begin(params))

    def cohort(self, round_index: int) -> Cohort:
        """Who takes part in a round."""
        return self.sampler(round_index, self.alpha, clients_per_round=self.clients_per_round, seed=self.seed)

    def evaluation(self, algorithm: Algorithm, state: ServerState) -> Evaluation:
        """All clients of all splits at the iterate that the algorithm reports."""
        params = algorithm.reported.iterate(state.params, state.averaging)
        return Evaluation(state.round, ClientTable.evaluate(self.engine, params, self.data), params)

    def model_at(self, params: Tensor) -> nn.Module:
        """A copy of the user's model with these parameters."""
        trained = copy.deepcopy(self.model).eval()
        self.task.layout.write(trained, params)
        return trained

    def result(
        self, name: str, algorithm: Algorithm, state: ServerState, clients: ClientTable, history: History, seconds: float
    ) -> Result:
        """The result of a run that ended in `state`."""
        params = algorithm.reported.iterate(state.params, state.averaging)
        return Result(
            name=name,
            algorithm=algorithm,
            seed=self.seed,
            model=self.model_at(params),
            params=params,
            clients=clients,
            history=history,
            seconds=seconds,
            data=self.data.name,
            rounds=self.rounds,
            clients_per_round=self.clients_per_round,
            error_is_loss=self.task.error_is_loss,
        )


def set_up(
    model: ModelOrMaker,
    data: DataOrMaker,
    algorithm: Algorithm,
    *,
    rounds: int,
    clients_per_round: int | None,
    seed: int,
    loss: PerExample | None,
    error: PerExample | None,
    engine: EngineChoice | str,
) -> Setting:
    """Check what a run is given, and start its engine; what cannot run is refused here."""
    require(is_whole(rounds) and rounds >= 0, "rounds", "must be a whole number ≥ 0", rounds)
    require(is_whole(seed) and 0 <= seed < 2**63, "seed", "must be a whole number from 0 to 2^63 − 1", seed)
    rounds, seed = int(rounds), int(seed)
    if not isinstance(algorithm, Algorithm):
        raise InvalidParameter("algorithm", "must be an equipoise.Algorithm", algorithm, "Write Algorithm(risk=…).")
    if isinstance(model, FederatedData) or isinstance(data, nn.Module):
        raise InvalidParameter("model", "comes first and the data second", type(model).__name__, "Write train(model, data, …).")
    data, model = made(data, seed, FederatedData, "data"), made(model, seed, nn.Module, "model")
    task = Task.of(model, loss, error).fitted(data)
    running = choose_engine(engine).start(task, data)
    sampler = algorithm.sampler or Uniform()
    alpha = algorithm.base_weights(data.train)
    if isinstance(sampler, Full):
        clients_per_round = len(data.train)
    if clients_per_round is None:
        raise InvalidParameter("clients_per_round", "must be given unless the sampler is sampling.Full()", None)
    refuse_missing_groups(algorithm.risk, data.train.ids)
    sampler(0, alpha, clients_per_round=clients_per_round, seed=seed)  # refuses an impossible cohort before any work
    return Setting(model, data, task, running, sampler, alpha, clients_per_round, rounds, seed)


def refuse_missing_groups(risk: object, clients: Sequence[str]) -> None:
    """Refuse a risk by groups that leaves training clients without one, before any work."""
    for inner in (term[1] for term in getattr(risk, "terms", ())):
        refuse_missing_groups(inner, clients)
    groups = getattr(risk, "groups", None)
    if isinstance(groups, Mapping) and (missing := [client for client in clients if client not in groups]):
        shown = ", ".join(missing[:5]) + (", …" if len(missing) > 5 else "")
        raise InvalidParameter(
            "groups", f"must name a group for each of the {len(clients)} training clients", f"without {len(missing)}: {shown}"
        )


def stop_if_lost(final: Evaluation) -> None:
    """Raise Diverged if a training client's loss after the last round is not finite."""
    trained_on = final.clients.where("train")
    if not bool(torch.isfinite(trained_on.loss).all()):
        lost = [i for i, good in zip(trained_on.client, torch.isfinite(trained_on.loss).tolist(), strict=True) if not good]
        raise Diverged(final.round, lost, "loss after the last round")


def warn_if_lost(history: History, table: ClientTable, *, classes: bool, who: str = "the run") -> None:
    """A loss of a thousand times its start (or, with classes, of a thousand) is finite, but no result."""
    first = next((report.loss for report in history.rounds if math.isfinite(report.loss)), None)
    if first is None:
        return
    start = 0.0 if classes else first
    trained_on = table.where("train")
    last = mean(trained_on.loss, trained_on.size)
    if last > 1000 * (1 + start):
        text = f"The training loss ended at {last:.3g}: {who} diverged. Lower the learning rate."
        warnings.warn(EquipoiseNotice(text), stacklevel=3)


def warn_if_idle(history: History) -> None:
    """Rounds may train nobody (an empty cohort, a tail whose clients were all dropped); most of them should not."""
    idle = sum(report.trained == 0 for report in history.rounds)
    if 2 * idle > len(history.rounds):
        rounds = f"{idle} of {len(history.rounds)} rounds"
        text = f"Nobody was trained in {rounds}: cohorts were empty, or all clients with a weight dropped out."
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
