"""Train a model over clients: the loop over rounds. `round.py` is one of them."""

from __future__ import annotations

import copy
import math
import time
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol, TypeVar

import torch
from torch import Tensor, nn

from equipoise.algorithm import Algorithm
from equipoise.core import rng
from equipoise.core.task import PerExample, Task
from equipoise.data.clients import FederatedData
from equipoise.engines import Loop, Simulator
from equipoise.engines.simulator.calibration import Choice
from equipoise.errors import Diverged, EquipoiseNotice, InvalidParameter, ObserverFailed, is_whole, require
from equipoise.metrics import mean
from equipoise.observers import Evaluation, History, Observers, Progress, Run, show_progress
from equipoise.personal.context import PersonalContext
from equipoise.personal.personal_run import PersonalRun
from equipoise.privacy.mechanism import DifferentialPrivacy, GaussianMechanism, SecureAggregation
from equipoise.privacy.private_run import PrivateRun
from equipoise.privacy.secure_run import SecureRun
from equipoise.result import ClientTable, PersonalModels, Result
from equipoise.runs.checkpoint import Checkpoint, CheckpointError, Checkpoints, identity_of, read_checkpoint, refuse_strangers
from equipoise.runs.look_ahead import Rounds
from equipoise.sampling import Full
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
        watching.on_start(Run(name, setting.rounds_allowed, setting.seed, state.round, setting, history))
        watching.on_state(state)
        rounds_of_run = Rounds(setting, algorithm)
        while state.round < setting.rounds_allowed:
            state, report = rounds_of_run.following(state)
            watching.on_round(report)
            if evaluate_every and state.round % evaluate_every == 0 and state.round < setting.rounds_allowed:
                watching.on_evaluation(setting.evaluation(algorithm, state))
            watching.on_state(state)
        watching.on_evaluating(state.round)
        final = setting.evaluation(algorithm, state, final=True)
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
    warn_if_rejected(history)
    warn_if_strangers(result)
    warn_if_out_of_budget(setting)
    return result


def resumed(saving: Checkpoints | None, setting: Setting, algorithm: Algorithm) -> tuple[ServerState, History, float]:
    """Where to start: the state, the history so far and the seconds it took; from a checkpoint if there is one."""
    if saving is None:
        return setting.begin(algorithm), History(), 0.0
    identity = identity_of(setting, algorithm)
    rows = saving.path.with_suffix(".clients.npy")  # what clients keep between rounds
    if not saving.path.exists():
        found = Checkpoint(setting.begin(algorithm, rows), History(), 0.0, identity)
    else:
        found = read_checkpoint(saving.path, getattr(setting.engine, "device", "cpu"))
        refuse_strangers(saving.path, found.identity, identity)
        if found.state.round > setting.rounds:
            raise CheckpointError(f"{saving.path} is already at round {found.state.round}, beyond rounds = {setting.rounds}.")
        if setting.personal is not None:
            setting.personal.resume(setting.first_params, found.state.personal, rows)
        if found.choice and hasattr(setting.engine, "use"):  # other chunks would change the last bits
            setting.engine.use(Choice(**found.choice))
    saving.begin(setting, identity, found.history, found.seconds)
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
    personal: PersonalRun | None = None
    protection: PrivateRun | SecureRun | None = None

    @property
    def rounds_allowed(self) -> int:
        """How many rounds the run has: all, or as many as a privacy budget allows."""
        return self.protection.rounds_allowed if isinstance(self.protection, PrivateRun) else self.rounds

    @property
    def first_params(self) -> Tensor:
        """w^0 (D,), on the engine's device."""
        return self.task.layout.read(self.task.module).to(getattr(self.engine, "device", "cpu"))

    def begin(self, algorithm: Algorithm, rows: Path | None = None) -> ServerState:
        """The state before the first round; what clients keep between rounds goes to the file `rows`."""
        params = self.first_params
        own = self.personal.begin(params, rows) if self.personal is not None else None
        server, averaging = algorithm.server.begin(params), algorithm.reported.begin(params)
        private = self.protection.begin() if isinstance(self.protection, PrivateRun) else None
        return ServerState(0, params, server=server, averaging=averaging, personal=own, privacy=private)

    def cohort(self, round_index: int, again: int = 0) -> Cohort:
        """Who takes part in a round; others are drawn if a network makes it be tried `again`, for the first or a later time."""
        seed = rng.stream_key(self.seed, f"cohort, try {again}") >> 1 if again else self.seed
        drawn = self.sampler(round_index, self.alpha, clients_per_round=self.clients_per_round, seed=seed)
        return replace(drawn, seed=self.seed) if again else drawn

    def evaluation(self, algorithm: Algorithm, state: ServerState, *, final: bool = False) -> Evaluation:
        """All clients of all splits at the iterate that the algorithm reports, and at their own models if they have any.

        Models that are made after training are only made for the `final` evaluation.
        """
        params = algorithm.reported.iterate(state.params, state.averaging)
        table = ClientTable.evaluate(self.engine, params, self.data)
        if self.personal is not None and (final or self.personal.keeps_rows):
            table = table.with_personal(self.personal.scores(state.personal, params, state.round))
        return Evaluation(state.round, table, params)

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
            rounds=state.round,
            clients_per_round=self.clients_per_round,
            error_is_loss=self.task.error_is_loss,
            personal=PersonalModels(self, state, params) if self.personal is not None else None,
            epsilon=self.protection.spent(state.privacy, state.round) if isinstance(self.protection, PrivateRun) else None,
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
    sampler = algorithm.drawn_by
    alpha = algorithm.base_weights(data.train)
    if isinstance(sampler, Full):
        clients_per_round = len(data.train)
    if clients_per_round is None:
        raise InvalidParameter("clients_per_round", "must be given unless the sampler is sampling.Full()", None)
    refuse_missing_groups(algorithm.risk, data.train.ids)
    sampler(0, alpha, clients_per_round=clients_per_round, seed=seed)  # refuses an impossible cohort before any work
    personal = None
    if algorithm.personal is not None:
        context = PersonalContext(running, task, data, lambda other: choose_engine(engine).start(other, data))
        personal = getattr(running, "personal_run", PersonalRun)(algorithm.personal, context, algorithm.solver, seed)
    protection = protect(algorithm, len(data.train), clients_per_round, rounds, task.layout.dimension, seed)
    if hasattr(running, "protected"):  # clients are elsewhere: sums go over the network
        protection = running.protected(protection, algorithm)
    return Setting(model, data, task, running, sampler, alpha, clients_per_round, rounds, seed, personal, protection)


def protect(
    algorithm: Algorithm, clients: int, clients_per_round: int, rounds: int, dimension: int, seed: int
) -> PrivateRun | SecureRun | None:
    """The algorithm's privacy, made ready for a run: its noise set for so many rounds and clients."""
    privacy = algorithm.privacy
    if isinstance(privacy, SecureAggregation):
        return SecureRun(privacy, algorithm, clients_per_round=clients_per_round, seed=seed)
    if isinstance(privacy, DifferentialPrivacy | GaussianMechanism):
        return PrivateRun(
            privacy, algorithm, clients=clients, clients_per_round=clients_per_round, rounds=rounds, dimension=dimension,
            seed=seed,
        )  # fmt: skip
    require(privacy is None, "privacy", "must be a part of equipoise.privacy", privacy)
    return None


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


def warn_if_rejected(history: History) -> None:
    """Say whose updates were left out: honest clients may have diverged."""
    times = Counter(client for report in history.rounds for client in report.rejected)
    if times:
        shown = ", ".join(client for client, _ in times.most_common(5)) + (", …" if len(times) > 5 else "")
        text = f"{times.total()} updates of {len(times)} clients were not finite or absurdly large, and were left out: {shown}."
        warnings.warn(EquipoiseNotice(text), stacklevel=3)


def warn_if_strangers(result: Result) -> None:
    """Say that personal models are not what a run is judged by, if the clients it is judged on have none."""
    if result.personal is not None and not result.clients.where(result.judged_on).has_own:
        text = (
            f"The {result.judged_on} clients of {result.data!r} took no part in training and have no models of their own: the "
            f"summary is of the shared model. Split examples inside clients (data.split_examples) to judge personal models."
        )
        warnings.warn(EquipoiseNotice(text), stacklevel=3)


def warn_if_out_of_budget(setting: Setting) -> None:
    """Say that a run ended before its last round, because the next would have exceeded its privacy budget."""
    if setting.rounds_allowed < setting.rounds:
        text = (
            f"The privacy budget allows {setting.rounds_allowed} of the {setting.rounds} rounds with this noise; the run "
            "stopped there. Raise noise_multiplier, or leave it out to have it set for all rounds."
        )
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
