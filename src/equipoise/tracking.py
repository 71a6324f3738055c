"""Runs in TensorBoard, MLflow and Weights & Biases: observers that send what a run reports to these tools.

    train(model, data, …, observers=[tracking.TensorBoard("logs"), tracking.MLflow(experiment="tails")])

All log by the number of rounds done. `round/…` are of a round: loss, tail_loss (its worst 10 %), risk and clients_trained;
`train/…`, `validation/…` and `test/…` are of an evaluation of all clients: loss, error and error_90 (its 90th percentile).
A number that does not exist, such as the risk of a round without one, is left out.
"""

from __future__ import annotations

import math
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from equipoise.errors import ConfigError
from equipoise.observers import Evaluation, EvaluationPoint, Run, entry_of
from equipoise.types import Observer, RoundReport

FLUSH_SECONDS = 1.0  # between messages to MLflow: a database or server takes longer than a small round
BATCH = 1000  # metrics that MLflow takes at once


def round_numbers(report: RoundReport) -> dict[str, float]:
    """What is logged of a round.

    `report` is what an observer gets in `on_round`.

    >>> import equipoise as eq
    >>> result = eq.train(eq.models.Softmax(64, 10), eq.data.digits(clients=12), rounds=1, clients_per_round=3)
    >>> sorted(round_numbers(result.history.rounds[0]))
    ['round/clients_trained', 'round/loss', 'round/tail_loss']
    """
    numbers = {"loss": report.loss, "tail_loss": report.tail_loss, "risk": report.risk, "clients_trained": report.trained}
    return {f"round/{name}": value for name, value in numbers.items() if value is not None and math.isfinite(value)}


def evaluation_numbers(evaluation: Evaluation) -> dict[str, float]:
    """What is logged of an evaluation: mean loss, mean error and the error's 90th percentile, per split.

    `evaluation` is what an observer gets in `on_evaluation`.

    >>> import equipoise as eq
    >>> result = eq.train(eq.models.Softmax(64, 10), eq.data.digits(clients=12), rounds=1, clients_per_round=3)
    >>> [name for name in sorted(evaluation_numbers(result.history.evaluations[0])) if name.startswith("test/")]
    ['test/error', 'test/error_90', 'test/loss']
    """
    return {
        f"{split}/{name}": value
        for split, numbers in EvaluationPoint.of(evaluation).splits.items()
        for name, value in numbers.items()
        if math.isfinite(value)
    }


def method_of(run: Run) -> str:
    """The run's name without its seed, which is logged beside it.

    `run` is what an observer gets in `on_start`.

    >>> from equipoise.observers import Run
    >>> method_of(Run("tail, seed 3", rounds=10, seed=3))
    'tail'
    """
    return run.name.removesuffix(f", seed {run.seed}")


class TensorBoard(Observer):
    """Event files for `tensorboard --logdir FOLDER`, in a folder per run: FOLDER/<name>/seed-<seed>.

    A run that resumes from a checkpoint continues its curves. A run that starts anew hides an earlier run of the same name and
    seed.
    """

    def __init__(self, folder: str | Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter  # refused here, not after the data are read
        except ImportError as failure:
            raise _absent("TensorBoard", "tensorboard") from failure
        self.folder, self._make_writer = Path(folder), cast("Any", SummaryWriter)
        self._writers: dict[str, Any] = {}  # by the run's name

    def on_start(self, run: Run) -> None:
        """Begin to watch a run."""
        place = self.folder / method_of(run).replace("/", "-") / f"seed-{run.seed}"
        self._writers[run.name] = self._make_writer(str(place), purge_step=run.first_round + 1)

    def on_round(self, report: RoundReport) -> None:
        """Take in the report of a round."""
        self._write(report.run, round_numbers(report), report.round + 1)

    def on_evaluation(self, evaluation: Evaluation) -> None:
        """Take in an evaluation of all clients."""
        self._write(evaluation.run, evaluation_numbers(evaluation), evaluation.round)

    def on_end(self) -> None:
        """Close what was opened."""
        with ExitStack() as stack:
            for writer in self._writers.values():
                stack.callback(writer.close)
            self._writers = {}

    def _write(self, run: str, numbers: dict[str, float], step: int) -> None:
        if (writer := entry_of(run, self._writers)) is not None:
            for name, value in numbers.items():
                writer.add_scalar(name, value, step)


class MLflow(Observer):
    """A run of an MLflow experiment: its name, seed and rounds as parameters, and its numbers as metrics.

    `tracking_uri` is a server or a database (`http://…`, `sqlite:///mlflow.db`); without it MLflow's own setting. The run
    is closed at the end, as FAILED if training did not finish. A run that resumes from a checkpoint is a new run in MLflow,
    whose parameter first_round says where it begins. No global state of MLflow is changed.

    `experiment` is the name of the experiment; it is made if it is not there.
    """

    def __init__(self, experiment: str = "equipoise", *, tracking_uri: str | None = None) -> None:
        try:
            from mlflow import MlflowClient
            from mlflow.exceptions import MlflowException
        except ImportError as failure:
            raise _absent("MLflow", "mlflow") from failure
        self.experiment = experiment
        try:
            self._client = MlflowClient(tracking_uri)
        except (MlflowException, ImportError, ValueError) as failure:
            where = f"tracking_uri = {tracking_uri!r}" if tracking_uri else "MLflow's own tracking_uri"
            raise ConfigError(f"{where} cannot be used: {failure}") from failure
        self._runs: dict[str, _RunInMLflow] = {}  # by the run's name

    def on_start(self, run: Run) -> None:
        """Begin to watch a run."""
        found = self._client.get_experiment_by_name(self.experiment)
        number = found.experiment_id if found is not None else self._client.create_experiment(self.experiment)
        created = self._client.create_run(number, run_name=f"{method_of(run)}, seed {run.seed}")
        tracked = self._runs[run.name] = _RunInMLflow(self._client, created.info.run_id, run.rounds)
        shown = {"name": method_of(run), "seed": run.seed, "rounds": run.rounds, "first_round": run.first_round}
        for name, value in shown.items():
            self._client.log_param(tracked.run_id, name, value)

    def on_round(self, report: RoundReport) -> None:
        """Take in the report of a round."""
        if (tracked := entry_of(report.run, self._runs)) is not None:
            tracked.write(round_numbers(report), report.round + 1)

    def on_evaluation(self, evaluation: Evaluation) -> None:
        """Take in an evaluation of all clients."""
        if (tracked := entry_of(evaluation.run, self._runs)) is not None:
            numbers = evaluation_numbers(evaluation)
            tracked.write(numbers, evaluation.round)
            tracked.reached_end = evaluation.final and "train/loss" in numbers  # else it has diverged

    def on_end(self) -> None:
        """Close what was opened."""
        with ExitStack() as stack:
            for tracked in self._runs.values():
                stack.callback(tracked.close)
            self._runs = {}


@dataclass
class _RunInMLflow:
    """A run of an experiment, and what is to be sent there."""

    client: Any
    run_id: str
    rounds: int
    reached_end: bool = False
    waiting: list[Any] = field(default_factory=list)
    flushed: float = 0.0

    def write(self, numbers: dict[str, float], step: int) -> None:
        from mlflow.entities import Metric

        now = time.time()
        self.waiting += [Metric(name, value, int(1000 * now), step) for name, value in numbers.items()]
        if now - self.flushed >= FLUSH_SECONDS or len(self.waiting) > BATCH - 20:
            self.flush()

    def flush(self) -> None:
        for first in range(0, len(self.waiting), BATCH):
            self.client.log_batch(self.run_id, metrics=self.waiting[first : first + BATCH])
        self.waiting, self.flushed = [], time.time()

    def close(self) -> None:
        try:
            self.flush()
        finally:
            self.client.set_terminated(self.run_id, "FINISHED" if self.reached_end else "FAILED")


class WandB(Observer):
    """Runs in Weights & Biases, in a project; `offline=True` keeps them in files below `folder`, for `wandb sync` later.

    A run that resumes from a checkpoint is a new run there, with the remaining rounds. Only numbers, the name, the seed and
    the rounds are sent: no code, no system figures, no output of the terminal.

    `project` is the name of the project.
    """

    def __init__(self, project: str = "equipoise", *, folder: str | Path | None = None, offline: bool = False) -> None:
        try:
            import wandb
        except ImportError as failure:
            raise _absent("Weights & Biases", "wandb") from failure
        self.project, self.folder, self.offline, self._wandb = project, folder, offline, cast("Any", wandb)
        self._runs: dict[str, Any] = {}  # by the run's name
        self._ended: dict[str, bool] = {}
        self._rounds = 0

    def on_start(self, run: Run) -> None:
        """Begin to watch a run."""
        settings = self._wandb.Settings(
            console="off", x_disable_stats=True, x_disable_meta=True, disable_git=True, save_code=False, silent=True
        )
        about = {"name": method_of(run), "seed": run.seed, "rounds": run.rounds, "first_round": run.first_round}
        self._rounds, self._ended[run.name] = run.rounds, False
        self._runs[run.name] = self._wandb.init(
            project=self.project, name=f"{method_of(run)}, seed {run.seed}", config=about, settings=settings,
            dir=None if self.folder is None else str(self.folder), mode="offline" if self.offline else None,
            reinit="create_new",
        )  # fmt: skip

    def on_round(self, report: RoundReport) -> None:
        """Take in the report of a round."""
        self._write(report.run, round_numbers(report), report.round + 1)

    def on_evaluation(self, evaluation: Evaluation) -> None:
        """Take in an evaluation of all clients."""
        numbers = evaluation_numbers(evaluation)
        self._write(evaluation.run, numbers, evaluation.round)
        name = evaluation.run if evaluation.run in self._ended else next(iter(self._ended), "")
        self._ended[name] = evaluation.round == self._rounds and "train/loss" in numbers  # else it has diverged

    def on_end(self) -> None:
        """Close what was opened."""
        with ExitStack() as stack:
            for name, run in self._runs.items():
                stack.callback(run.finish, exit_code=0 if self._ended.get(name) else 1)
            self._runs, self._ended = {}, {}

    def _write(self, run: str, numbers: dict[str, float], step: int) -> None:
        if (tracked := entry_of(run, self._runs)) is not None:
            tracked.log({**numbers, "rounds_done": step}, step=step)


def _absent(what: str, extra: str) -> ConfigError:
    return ConfigError(f'{what} is not installed: pip install "equipoise[{extra}]".')
