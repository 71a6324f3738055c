"""Observers watch a run: a progress bar, a log file, a history in memory. They never change training."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from equipoise.core.abilities import is_part
from equipoise.core.files import DurableFile, make_folder, not_written, write_atomically, writing
from equipoise.core.words import printable
from equipoise.errors import NotWritten, ObserverFailed
from equipoise.types import Observer, RoundReport, ServerState

if TYPE_CHECKING:
    from torch import Tensor

    from equipoise.client_table import ClientTable
    from equipoise.runs.setup import Setting
    from equipoise.runs.stopping import Stopped

T = TypeVar("T")
BINS = 20  # of the histogram of errors at each evaluation


@dataclass(frozen=True)
class Run:
    """What observers are told at the start.

    >>> Run("FedAvg", rounds=100, seed=0)
    Run(name='FedAvg', rounds=100, seed=0, first_round=0, shares_rounds=False)
    """

    name: str  # of the run
    rounds: int  # that it is to have
    seed: int  # of the run
    first_round: int = 0  # 0, or the round that it resumes from
    setting: Setting | None = field(default=None, repr=False, compare=False)  # engine and data, for observers that measure
    history: History | None = field(default=None, repr=False, compare=False)  # of the rounds before the first
    shares_rounds: bool = False  # whether other runs have their rounds between its own, as in train_many


@dataclass(frozen=True, eq=False)
class Evaluation:
    """All clients after `round` rounds, at the parameters `params` that the run reports.

    `on_evaluation` of an observer gets it, and `history.evaluations` of a result keeps it.
    """

    round: int  # rounds that were finished
    clients: ClientTable  # one row per client and split
    params: Tensor | None = None  # (D,); not kept in the history
    run: str = ""  # the run's name
    carried: Tensor | None = None  # (C,) of a model with carried values; not kept in the history
    final: bool = False  # whether it is that of the result


@dataclass(frozen=True)
class EvaluationPoint:
    """An evaluation in a few numbers per split: mean loss, mean error, 90th percentile of the error.

    Of a metric "f1" there are the mean "f1", and "f1_90", which 90 % of the clients reach.
    They are of the model that each client is served, over benign clients. Where that is a model of the client's own,
    "shared_loss", "shared_error" and "shared_error_90" are those of the shared model.
    """

    round: int  # rounds that were finished
    splits: dict[str, dict[str, float]]  # split → figure → value, e.g. splits["test"]["error_90"]
    histogram: dict[str, Any] | None = None  # of the errors of the split that is judged; None in logs of version 0.1
    not_evaluated: dict[str, dict[str, str]] = field(default_factory=dict)  # split → client that the numbers lack → why

    @classmethod
    def of(cls, evaluation: Evaluation) -> EvaluationPoint:
        """The evaluation as a few numbers per split, and how many clients have which error."""
        splits: dict[str, dict[str, float]] = {}
        for split, found in evaluation.clients.summaries().items():
            numbers = splits[split] = {}
            means = evaluation.clients.where(split).clients_in_mean is not None  # of secure sums: nothing else is known
            for prefix in ("", "shared_") if "shared_error" in found else ("",):
                error = found[f"{prefix}error"]
                numbers |= {f"{prefix}loss": found[f"{prefix}loss"].mean, f"{prefix}error": error.mean}
                numbers[f"{prefix}error_90"] = math.nan if means else error.percentiles[90]
            for name in evaluation.clients.metrics:
                numbers |= {name: found[name].mean, f"{name}_90": math.nan if means else found[name].tail_90}
        absent = {split: dict(why) for split, why in evaluation.clients.not_evaluated.items()}
        return cls(evaluation.round, splits, error_histogram(evaluation.clients), absent)


def error_histogram(clients: ClientTable) -> dict[str, Any] | None:
    """How many clients of the split that is judged have an error in each of 20 equal bins from "low" to "high".

    Errors within [0, 1] are counted from 0 to 1, others over their range; None if no error is finite, or only means are known.

    >>> import equipoise as eq
    >>> found = error_histogram(eq.evaluate(eq.models.Softmax(64, 10), eq.data.digits(clients=12)).clients)
    >>> found["split"], found["low"], found["high"], sum(found["counts"])
    ('test', 0.0, 1.0, 4)
    """
    split = next(name for name in ("test", "validation", "train") if name in clients.split)
    if clients.where(split).clients_in_mean is not None:
        return None
    errors = clients.where(split).benign.served_error
    errors = errors[errors.isfinite()].float()
    if not len(errors):
        return None
    low, high = min(float(errors.min()), 0.0), max(float(errors.max()), 1.0)
    if (low, high) != (0.0, 1.0):
        low, high = float(errors.min()), max(float(errors.max()), float(errors.min()) + 1e-6)
    counts = errors.histc(BINS, low, high).long().tolist()
    return {"split": split, "low": low, "high": high, "counts": counts}


@dataclass
class History(Observer):
    """Every report and evaluation of a run, in memory; `pandas.DataFrame(history.rounds)` works.

    `points` are the evaluations in a few numbers; a run that was resumed has all of them, but tables of clients
    (`evaluations`) only from there on. `stopped` says when and why early stopping ended the run, and which round is reported.
    """

    rounds: list[RoundReport] = field(default_factory=list)  # one per round
    evaluations: list[Evaluation] = field(default_factory=list)  # with their tables of clients
    points: list[EvaluationPoint] = field(default_factory=list)  # the same evaluations in a few numbers
    stopped: Stopped | None = None  # None unless early stopping ended the run

    def on_round(self, report: RoundReport) -> None:
        """Take in the report of a round."""
        self.rounds.append(report)

    def on_evaluation(self, evaluation: Evaluation) -> None:
        """Take in an evaluation of all clients."""
        self.evaluations.append(replace(evaluation, params=None, carried=None))
        self.points.append(EvaluationPoint.of(evaluation))


class JsonLines(Observer):
    """One JSON object per line and event, written through at once, so that a killed run keeps what it logged.

    The file is begun anew by the first run of this observer; further runs of it, as in `compare`, are added. Where runs share
    their rounds, as in `train_many`, a line says in "run" whose it is.

    >>> import tempfile
    >>> import equipoise as eq
    >>> path = Path(tempfile.mkdtemp()) / "run.jsonl"
    >>> data = eq.data.digits(clients=12)
    >>> _ = eq.train(eq.models.Softmax(64, 10), data, rounds=2, clients_per_round=3, observers=[JsonLines(path)])
    >>> [json.loads(line)["event"] for line in path.read_text().splitlines()]
    ['start', 'round', 'round', 'evaluation']
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._file: DurableFile | None = None
        self._logged: set[str] = set()  # the names of the runs in the file
        self._several = False

    def on_start(self, run: Run) -> None:
        """Begin to watch a run."""
        with writing(self.path):  # else the disk's failure would be called that of an observer
            self._begin(run)

    def _begin(self, run: Run) -> None:
        make_folder(self.path.parent)
        self._several = run.shares_rounds
        before = run.history if run.first_round and run.name not in self._logged else None
        lines = "".join(history_lines(before, run.name if self._several else None)).encode() if before is not None else b""
        if before is not None and not self._logged:
            # The log up to the checkpoint: what was logged may say less, or more, than that. The first run begins it anew.
            write_atomically(self.path, lines)
        if self._file is None:
            goes_on = run.first_round or self._logged
            self._file = DurableFile.at_end(self.path) if goes_on else DurableFile(self.path)
        if self._logged:
            self._write_bytes(lines)
        self._logged.add(run.name)
        about = {"name": run.name, "rounds": run.rounds, "seed": run.seed, "first_round": run.first_round}
        self._write({"event": "start", **about})

    def on_round(self, report: RoundReport) -> None:
        """Take in the report of a round."""
        self._write(_record(report, report.run if self._several else None))

    def on_evaluation(self, evaluation: Evaluation) -> None:
        """Take in an evaluation of all clients."""
        self._write(_record(EvaluationPoint.of(evaluation), evaluation.run if self._several else None))

    def on_end(self) -> None:
        """Close what was opened."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, record: dict[str, Any]) -> None:
        self._write_bytes(_line(record).encode())

    def _write_bytes(self, content: bytes) -> None:
        if self._file is None:
            return
        try:
            self._file.write(content)
        except OSError as failure:
            raise not_written(self.path, failure) from failure


def history_lines(history: History, run: str | None = None) -> list[str]:
    """A history as lines of a log, in the order of rounds; `run` is the name of the run, where lines say whose they are.

    `history` is that of a result: `result.history`.

    >>> import equipoise as eq
    >>> result = eq.train(eq.models.Softmax(64, 10), eq.data.digits(clients=12), rounds=2, clients_per_round=3)
    >>> [json.loads(line)["event"] for line in history_lines(result.history)]
    ['round', 'round', 'evaluation']
    """
    events = [(r.round + 1, 0, _record(r, run)) for r in history.rounds]
    events += [(p.round, 1, _record(p, run)) for p in history.points]
    return [_line(record) for _, _, record in sorted(events, key=lambda event: event[:2])]


def _record(told: RoundReport | EvaluationPoint, run: str | None) -> dict[str, Any]:
    """A round or an evaluation as a JSON object, with the name of the run if there is one."""
    record = {"event": "round" if isinstance(told, RoundReport) else "evaluation", **asdict(told), "run": run}
    unsaid = (["run"] if run is None else []) + ([] if record.get("not_evaluated") else ["not_evaluated"])
    return {name: value for name, value in record.items() if name not in unsaid}


def _line(record: dict[str, Any]) -> str:
    return json.dumps(_finite(record), allow_nan=False) + "\n"


def _finite(value: Any) -> Any:
    """JSON has no NaN and no infinity: a number that does not exist is null."""
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


class Progress(Observer):
    """A progress bar with round, loss, tail loss, clients trained and time left (rich); a line for each run at hand.

    `console` is the rich Console that shows it (None: a new one).

    >>> import equipoise as eq
    >>> from rich.console import Console
    >>> bar = Progress(Console(quiet=True))
    >>> _ = eq.train(eq.models.Softmax(64, 10), eq.data.digits(clients=12), rounds=1, clients_per_round=3, observers=[bar])
    """

    def __init__(self, console: Any = None) -> None:
        self._console = console
        self._bar: Any = None  # rich is imported only when a bar is drawn
        self._tasks: dict[str, Any] = {}  # by the run's name
        self._last_drawn: dict[Any, float] = {}
        self._rounds, self._evaluating, self._whom = 0, -1, "all"

    def on_start(self, run: Run) -> None:
        """Begin to watch a run."""
        from rich import progress

        from equipoise.core.screen import Screen

        self._bar = self._bar or progress.Progress(
            progress.TextColumn("{task.description}", markup=False),
            progress.BarColumn(bar_width=24),
            progress.MofNCompleteColumn(),
            progress.TextColumn("{task.fields[numbers]}"),
            progress.TimeRemainingColumn(),
            console=self._console or Screen(),
            refresh_per_second=8,
        )
        self._rounds, self._evaluating = run.rounds, -1
        self._whom = "all" if run.setting is None or run.setting.sample is None else "a sample of the"
        self._tasks[run.name] = self._bar.add_task(printable(run.name), total=run.rounds, completed=run.first_round, numbers="")
        self._bar.start()

    def on_round(self, report: RoundReport) -> None:
        """Take in the report of a round."""
        now = time.perf_counter()
        if (task := entry_of(report.run, self._tasks)) is None:
            return
        fields = {}
        # Formatting a thousand times a second would cost more than small rounds.
        if now - self._last_drawn.get(task, 0.0) > 0.1 or report.round + 1 == self._rounds:
            self._last_drawn[task] = now
            losses = f"loss {report.loss:.4f}  worst 10 % {report.tail_loss:.4f}"
            fields["numbers"] = f"{losses}  trained {report.trained}/{report.cohort}"
        self._bar.update(task, completed=report.round + 1, **fields)

    def on_evaluating(self, round_index: int) -> None:
        """The final evaluation of a run begins."""
        if self._bar is not None and self._evaluating != round_index:  # once for all runs
            self._evaluating = round_index
            self._bar.console.print(
                f"evaluating {self._whom} clients after round {round_index} …", style="dim", highlight=False
            )

    def on_end(self) -> None:
        """Close what was opened."""
        if self._bar is not None:
            self._bar.stop()
            self._bar, self._tasks = None, {}


def entry_of(run: str, entries: Mapping[str, T]) -> T | None:
    """What an observer keeps for a run: the entry of that name, or the only one there is.

    `run` is the name of the run, `entries` what is kept by name.

    >>> entry_of("tail", {"FedAvg": 1, "tail": 2}), entry_of("tail", {"run": 1}), entry_of("tail", {})
    (2, 1, None)
    """
    return entries.get(run, next(iter(entries.values())) if len(entries) == 1 else None)


def hears_something(member: object) -> bool:
    """Whether a value is an object, and no class, with at least one method of an observer.

    `member` is the value.

    >>> hears_something(History()), hears_something(History), hears_something(3)
    (True, False, False)
    """
    return any(is_part(member, name) for name in vars(Observer) if name.startswith("on_"))


class Observers:
    """Several observers as one; an error in any stops the run with its name. A method that an observer lacks is skipped.

    `members` are told in their order.

    >>> from equipoise.observers import Run
    >>> histories = History(), History()
    >>> Observers(histories).tell("on_start", Run("run", rounds=1, seed=0))
    """

    def __init__(self, members: Sequence[Observer]) -> None:
        self._members = tuple(members)

    def tell(self, event: str, told: object) -> None:
        """Tell every observer of an event: "on_start", "on_round", "on_state", "on_evaluating", "on_evaluation" and so on.

        One that writes to the parameters that it is shown stops the run.
        """
        params = told.params if isinstance(told, ServerState | Evaluation) else None
        version = None if params is None else params._version
        for member in self._members:
            self._call(member, event, told)
            if params is not None and params._version != version:
                raise ObserverFailed(f"Observer {type(member).__name__} wrote to the parameters in {event}. Work on a clone().")

    def end(self, *, failing: bool = False) -> None:
        """Let every observer close what it opened, also after one that fails; a run that fails keeps its own error."""
        first = None
        for member in self._members:
            try:
                self._call(member, "on_end")
            except (ObserverFailed, NotWritten) as failure:
                first = first or failure
        if first is not None and not failing:
            raise first

    def _call(self, member: Observer, event: str, *told: object) -> None:
        try:
            getattr(member, event, lambda *_: None)(*told)
        except NotWritten:  # the disk's fault, and no observer's
            raise
        except Exception as failure:
            raise ObserverFailed(f"Observer {type(member).__name__} failed in {event}: {failure}") from failure


def show_progress(progress: bool | None) -> bool:
    """Whether to draw a bar: as asked, else only where a person watches a terminal and rich is installed.

    >>> show_progress(True), show_progress(False)
    (True, False)
    """
    return progress if progress is not None else sys.stdout.isatty() and find_spec("rich") is not None
