"""Train models over clients: the loop over rounds. `round.py` is one of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from equipoise.algorithm import Algorithm
from equipoise.core.abilities import refuse_misspelt
from equipoise.core.per_example_losses import PerExample
from equipoise.errors import CheckpointError, Diverged, FileGuard, ObserverFailed, is_integer, notify, require
from equipoise.observers import History, Observers, Progress, Run, hears_something, show_progress
from equipoise.privacy.common_clients import client_marks
from equipoise.privacy.ledger import Ledger
from equipoise.privacy.lookers import may_look
from equipoise.result import Result
from equipoise.rounds.driver_choice import choose_driver
from equipoise.rounds.drivers import Outcome
from equipoise.runs.checkpoint import Checkpoints
from equipoise.runs.health import notices, stop_if_lost
from equipoise.runs.identity import run_key
from equipoise.runs.input_scales import cause_of_divergence
from equipoise.runs.interrupted import interrupts_wait, noting_interrupts, stop_if_asked
from equipoise.runs.setup import DataOrMaker, EngineChoice, ModelOrMaker, Setting, set_up
from equipoise.runs.stopping import EarlyStopping, Stopped, StopState
from equipoise.runs.tried_calls import refuse_unkeepable
from equipoise.types import Observer, ServerState


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
    evaluate_clients: int | None = None,
    metrics: Mapping[str, Callable[[Any, Any], Any]] | None = None,
    stop: EarlyStopping | None = None,
    observers: Sequence[Observer] = (),
    progress: bool | None = None,
    name: str = "run",
    checkpoint: Checkpoints | str | Path | None = None,
    ledger: str | Path | None = None,
) -> Result:
    """Train `model` over the clients of `data` for `rounds` rounds and evaluate every client of every split.

    `model` is a torch module, which is not changed, and `data` a FederatedData; both may also be functions of the seed.
    `algorithm` says what is minimised and how (None: FedAvg). Each round draws `clients_per_round` clients; sampling.Full()
    needs no number. `seed` fixes cohorts and batches, whatever the engine. Under differential privacy each run draws its noise
    and its cohorts anew, unless the part of `privacy` has a `noise_seed`.

    `loss` and `error` take (outputs, targets) and give one number per example. Without them the model's own `loss` and
    `error` are used; else the loss is cross-entropy, and the error is misclassification where there are classes, or the loss.
    `metrics` adds figures of each client by name, functions of (outputs, targets) of all its examples, e.g.
    {"f1": eq.metrics.macro_f1}.

    `engine` is "simulator", "loop", or one with options such as engines.Simulator(device="cuda"). The run always ends with an
    evaluation of all clients; `evaluate_every=10` adds one after every ten rounds, for the history. `evaluate_clients=1000`
    evaluates 1000 clients of each split, a random sample that is the same for all methods and seeds. `stop`, an
    `EarlyStopping`, ends the run when a figure no longer improves, and reports the best iterate.

    `progress` shows a bar (None: in a terminal), `observers` are informed about the run (equipoise.observers), and `name`
    is its name in reports. `checkpoint` names a file, which is written about every ten seconds, and after the round in
    which Ctrl-C is pressed. If the file exists, the run continues from it, and ends with the model of an uninterrupted run,
    bit for bit. `ledger` names the file that every private release is written to before it is made (None: beside the
    checkpoint, or in memory); runs on the same data may share one, and `equipoise privacy ledger` adds them up.

    >>> import equipoise as eq
    >>> data = eq.data.label_shift(train_clients=5, validation_clients=0, test_clients=3, examples=20)
    >>> algorithm = eq.Algorithm(risk=eq.risk.Superquantile(tail=0.5))
    >>> result = eq.train(eq.models.Softmax(20, 10), data, algorithm, rounds=2, clients_per_round=3)
    >>> result.rounds, len(result.clients), result.judged_on
    (2, 8, 'test')
    """
    watch = Watching(evaluate_every, observers, progress, checkpoint, ledger)
    try:
        with noting_interrupts(watch.saving):
            setting = set_up(
                model, data, algorithm or Algorithm(), rounds=rounds, clients_per_round=clients_per_round, seed=seed, loss=loss,
                error=error, engine=engine, evaluate_clients=evaluate_clients, metrics=metrics, stop=stop, name=name,
            )  # fmt: skip
            (result,) = train_runs([setting], watch, name)
    except ObserverFailed as failure:
        failure.finished = failure.finished and failure.finished[0]
        raise
    if isinstance(result, Diverged):
        raise result
    who = "the run" if name == "run" else f"{name!r} with seed {seed}"
    for text in notices(setting, result, who):
        notify(text)
    return result


_HEARS = "must be objects with a method of an observer, such as on_round(report)"


@dataclass(frozen=True, eq=False)
class Watching:
    """How runs are watched: evaluations on the way, observers, a progress bar, and the file of their checkpoint."""

    evaluate_every: int | None = None
    observers: Sequence[Observer] = ()
    progress: bool | None = None
    checkpoint: Checkpoints | str | Path | None = None
    ledger: Ledger | str | Path | None = None

    def __post_init__(self) -> None:
        good = self.evaluate_every is None or (is_integer(self.evaluate_every) and self.evaluate_every >= 1)
        require(good, "evaluate_every", "must be at least 1 round", self.evaluate_every)
        good = isinstance(self.observers, Sequence)
        require(good, "observers", "must be a list of observers", self.observers.__class__.__name__)
        for member in self.observers:
            require(hears_something(member), "observers", _HEARS, member, "Extend equipoise.types.Observer.")
            refuse_misspelt("observers", member, tuple(vars(Observer)))

    @property
    def saving(self) -> Checkpoints | None:
        """What writes the checkpoint."""
        return Checkpoints(self.checkpoint) if isinstance(self.checkpoint, str | Path) else self.checkpoint

    def open_ledgers(self, settings: Sequence[Setting]) -> None:
        """Have every private run write its releases into the ledger: the file that is named, or one beside the checkpoint."""
        private = [setting for setting in settings if not setting.protection.in_the_open]
        saving = self.saving
        path = self.ledger if self.ledger is not None else saving.path.with_suffix(".ledger.jsonl") if saving else None
        networked = settings[0].engine_traits.network is not None
        if not private or (path is None and not networked):
            return
        ledger = Ledger.at(path, durable=networked)
        for setting in private:
            name = "" if setting.noise is None or networked else setting.noise.run  # a run of its own, as its noise is
            setting.protection.open_ledger(ledger, data=setting.data.fingerprint, run=name or run_key(setting), once=networked)
            if setting.protection.book is not None and not networked:  # federation.json says who is in a federation
                setting.protection.book.set_clients(setting.data.name, client_marks(setting.data.train.host_keys))


@dataclass(eq=False)
class RunUnderWay:
    """A run between two rounds: its state, its history, and the error that stopped it."""

    setting: Setting
    state: ServerState
    history: History = field(default_factory=History)
    failure: Diverged | None = None
    start: Tensor | None = None  # w^0, where clients begin with it in later rounds
    stop: StopState = field(default_factory=StopState)

    def __post_init__(self) -> None:
        self.note_stop()

    @classmethod
    def begin(cls, setting: Setting, rows: Path | None = None, solver_rows: Path | None = None) -> RunUnderWay:
        """A run before its first round; what clients keep between rounds goes to the files `rows` and `solver_rows`."""
        return cls(setting, setting.begin(rows, solver_rows), start=setting.first_model if setting.keeps_rows else None)

    @property
    def over(self) -> bool:
        """Whether early stopping has ended the run."""
        return self.stop.over

    @property
    def reported(self) -> ServerState:
        """The state whose model is reported: the best one if the run was stopped early, else the last."""
        if not self.over or self.stop.best is None:
            return self.state
        return replace(self.stop.best, personal=self.state.personal, privacy=self.state.privacy)

    def note_stop(self) -> None:
        """Write into the history that the run was stopped, if it was."""
        rule, best = self.setting.stop, self.stop.best
        if rule is not None and best is not None and self.over:
            self.history.stopped = Stopped(rule.figure, self.stop.value, best.round, self.state.round, self.stop.waited)

    def take(self, outcome: Outcome, watching: Observers, evaluate_every: int | None) -> None:
        """Go on from a round, or stop if it failed."""
        if isinstance(outcome, Diverged):
            self.fail(outcome)
            return
        self.state, report = outcome
        if self.state.round == 1:  # later states are looked at when a checkpoint is written
            for part in ("risk", "aggregator"):
                refuse_unkeepable(part, vars(self.setting.algorithm)[part], vars(self.state)[part], self.setting.name)
        self.history.on_round(report)
        watching.tell("on_round", report)
        if self.to_evaluate(evaluate_every):
            self.evaluate(watching)
        watching.tell("on_state", self.state)

    def to_evaluate(self, every: int | None) -> bool:
        """Whether all clients are evaluated after this round, which is not the last."""
        done, last_round = self.state.round, self.setting.protection.rounds_allowed
        return every is not None and done % every == 0 and done < last_round

    def fail(self, failure: Diverged) -> None:
        """Stop here; what was logged before is kept with the error."""
        failure.history, failure.run = self.history, self.setting.name
        if (reason := cause_of_divergence(self.setting)) is not None:
            failure.because(reason)
        self.failure = failure

    def evaluate(self, watching: Observers, *, final: bool = False) -> None:
        """Evaluate all clients, or the sample; after the last round a loss that is not finite stops the run."""
        self.setting.protection.begin_evaluation(self.state.round)
        evaluation = self.setting.evaluation(self.reported, final=final)
        self.history.on_evaluation(evaluation)
        watching.tell("on_evaluation", evaluation)
        if self.setting.stop is not None and not final:
            self.stop = self.setting.stop.seen(self.stop, evaluation.clients, self.state)
            self.note_stop()
        if final and may_look("end of the run", self.setting.algorithm):
            try:
                stop_if_lost(evaluation, named=self.setting.protection.in_the_open)
            except Diverged as failure:
                self.fail(failure)

    def forget_if_ended(self) -> None:
        """Forget the secret of the noise after the last round: nothing is drawn from it any more."""
        ended = self.failure is not None or self.over or self.state.round >= self.setting.protection.rounds_allowed
        if ended and self.setting.noise is not None:
            self.setting.noise.secret = b""

    def ended(self, seconds: float) -> Result | Diverged:
        """The result, or the error that stopped the run."""
        if self.failure is not None:
            return self.failure
        return self.setting.result(self.state, self.reported, self.history.evaluations[-1].clients, self.history, seconds)


def train_runs(
    settings: Sequence[Setting], watch: Watching, title: str, *, stop_at_failure: bool = False
) -> list[Result | Diverged]:
    """All rounds of runs that share an engine, and their evaluation: the result of each, or the error that stopped it.

    A run that diverges or is stopped early ends there, and the others go on; with `stop_at_failure` an error is raised. The
    progress bar is called `title`.
    """
    saving = watch.saving
    with noting_interrupts(saving), saving.held() if saving is not None else nullcontext():
        return _train_alone(settings, watch, title, saving, stop_at_failure)


def _train_alone(
    settings: Sequence[Setting], watch: Watching, title: str, saving: Checkpoints | None, stop_at_failure: bool
) -> list[Result | Diverged]:
    """All rounds of runs and their evaluation, while no other process works with their checkpoint."""
    every = watch.evaluate_every
    if every is None and settings[0].stop is not None:
        every = 1
    runs, seconds_before = start_or_resume(settings, saving, watch)
    watching, saves = Observers(watch.observers), Observers([saving] if saving is not None else [])
    bar = Observers([Progress()] if show_progress(watch.progress) else [])
    last_round = settings[0].protection.rounds_allowed
    began = time.perf_counter() - seconds_before

    def still_running() -> list[RunUnderWay]:
        failures = [run.failure for run in runs if run.failure is not None]
        if failures and stop_at_failure:
            raise failures[0]
        return [run for run in runs if run.failure is None and not run.over]

    try:
        for run in runs:
            name, seed, shared = run.setting.name, run.setting.seed, len(runs) > 1
            watching.tell("on_start", Run(name, last_round, seed, run.state.round, run.setting, run.history, shared))
            watching.tell("on_state", run.state)
        bar.tell("on_start", Run(title, last_round, settings[0].seed, max(run.state.round for run in runs), settings[0]))
        for run in runs:
            run.forget_if_ended()
        saves.tell("on_states", runs)
        for run in still_running():  # a run that had ended here and now has more rounds: its rule sees the last one, too
            known = {0, *(point.round for point in run.history.points)}
            if run.setting.stop is not None and run.to_evaluate(every) and run.state.round not in known:
                run.evaluate(watching)
        with interrupts_wait(saving):
            alive, driver = still_running(), None
            while alive and alive[0].state.round < last_round:
                driver = driver or choose_driver([run.setting for run in alive])
                for run, outcome in zip(alive, driver([run.state for run in alive]), strict=True):
                    run.take(outcome, watching, every)
                    run.forget_if_ended()
                if running := [run for run in alive if run.failure is None]:
                    bar.tell("on_round", running[0].history.rounds[-1])
                if any(run.failure is not None or run.over for run in alive):
                    alive, driver = still_running(), None
                asked = None if saving is None else saving.stop_asked
                if any(run.failure is None for run in runs):  # else the checkpoint stays where the run can be tried again
                    saves.tell("on_states", runs)
                stop_if_asked(asked, saving)
        for run in runs:
            if run.failure is None:
                bar.tell("on_evaluating", run.reported.round)
                watching.tell("on_evaluating", run.reported.round)
                run.evaluate(watching, final=True)
        still_running()
        ended_well = any(run.failure is None for run in runs)
    except BaseException as failure:
        for each in (watching, bar):
            each.end(failing=True)
        if saving is not None:
            saving.on_failure(failure)
        raise
    seconds = (time.perf_counter() - began) / len(runs)
    results = [run.ended(seconds) for run in runs]
    try:
        for each in (bar, watching):
            each.end(failing=not ended_well)
    except ObserverFailed as failure:
        failure.finished = results
        raise
    return results


def start_or_resume(
    settings: Sequence[Setting], saving: Checkpoints | None, watch: Watching
) -> tuple[list[RunUnderWay], float]:
    """The runs where they start, and the seconds that they took before: from their checkpoint if there is one."""
    saved = None if saving is None else saving.open(settings)
    for setting, each in zip(settings, () if saved is None else saved.runs, strict=saved is not None):
        begun = each.state.round < setting.protection.rounds_allowed and not each.ended
        if setting.noise is not None and (each.secret or not begun):  # else more rounds have a secret and a name of their own
            setting.noise.run, setting.noise.secret = each.state.privacy.run, bytes.fromhex(each.secret)
    watch.open_ledgers(settings)
    if saving is None:
        return [RunUnderWay.begin(setting) for setting in settings], 0.0
    if saved is None:
        return [RunUnderWay.begin(setting, saving.rows, saving.solver_rows) for setting in settings], 0.0
    runs = []
    with FileGuard(saving.path, CheckpointError, "does not fit this run", "Delete it to start anew."):
        for setting, each in zip(settings, saved.runs, strict=True):
            start = setting.first_model if each.start is None else each.start
            if setting.personal is not None:
                setting.personal.resume(start, each.state.personal, saving.rows)
            if setting.kept is not None:
                setting.kept.resume(each.state.kept, saving.solver_rows)
            setting.protection.resume(each.state.privacy, each.state.round)
            kept = start if setting.keeps_rows else None
            runs.append(RunUnderWay(setting, each.state, each.history, start=kept, stop=each.stop or StopState()))
            if each.failure is not None:
                runs[-1].fail(each.failure)
        measured = settings[0].engine_traits.measured
        if saved.choice and measured is not None:  # another choice would change the last bits
            measured.use(saved.choice)
    return runs, saved.seconds
