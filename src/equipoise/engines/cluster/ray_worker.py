"""A worker of a cluster: a long-lived process with a simulator for each run that it works for."""

from __future__ import annotations

import gc
import logging
import os
import platform
import socket
import time
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from equipoise.core.equality import same_part
from equipoise.core.memory import own_memory
from equipoise.core.task import Task
from equipoise.core.version import VERSION
from equipoise.data.clients import ClientSet, FederatedData
from equipoise.engines.cluster.packing import Letter, answer_parts, opened, pack, pack_numbers
from equipoise.engines.cluster.piece_work import Phase, Stretch, work_on
from equipoise.engines.simulator.calibration import Choice
from equipoise.engines.simulator.engine import SimulatorEngine
from equipoise.engines.simulator.simulator_options import Simulator
from equipoise.errors import EquipoiseError

_KNOWN_HEADS = 16  # phases that a worker remembers: a round has a few, and they come again


def versions() -> dict[str, str]:
    """What must be the same on every node."""
    return {"equipoise": VERSION, "torch": torch.__version__, "Python": platform.python_version()}


@dataclass(frozen=True)
class Answer:
    """What a worker sends back: one value per stretch, or why there is none."""

    values: list[Any] = field(default_factory=list)
    seconds: float = 0.0
    notices: tuple[str, ...] = ()
    failure: BaseException | None = None
    trace: str = ""
    out_of_memory: bool = False
    chunk_size: int | None = None  # the smaller chunks that memory allowed
    logged: tuple[tuple[str, int, str], ...] = ()  # what was logged: by which logger, at which level, and the text

    def log_here(self, node: str) -> None:
        """Log in this process what the worker has logged, by the logger of the same name, with the node's name."""
        for logger, level, text in self.logged:
            logging.getLogger(logger).log(level, "%s: %s", node, text)


class LogKeeper(logging.Handler):
    """Keeps what is logged in this process, until it is told to the driver."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[tuple[str, int, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a record as its logger, its level and its text."""
        self.kept.append((record.name, record.levelno, self.format(record)))

    def taken(self) -> tuple[tuple[str, int, str], ...]:
        """What was kept since this was asked last."""
        kept, self.kept = self.kept, []
        return tuple(kept)


class RayWorker:
    """Works for runs: `open` a session with task and data, then `work` on pieces."""

    def __init__(self, threads: int, log_level: int = logging.WARNING) -> None:
        torch.set_num_threads(threads)
        self.log = LogKeeper()
        logging.getLogger().addHandler(self.log)
        logging.getLogger().setLevel(log_level)
        gc.freeze()  # what is there stays: a collection in the middle of a round need not look at it
        self.sessions: dict[int, SimulatorEngine] = {}
        self.others: dict[tuple[int, str], ClientSet] = {}  # sets that are no splits of the data
        self.models: dict[int, tuple[Tensor, ...]] = {}  # of the last phase, by session
        self.heads: dict[bytes, Phase] = {}  # phases without models, as they were packed
        self.solver: Any = None  # of the last phase
        self.smaller: int | None = None
        self.notices: list[str] = []

    def hello(self) -> dict[str, str]:
        """Where this worker is, and the versions of what it runs."""
        return versions() | {"node": socket.gethostname(), "process": str(os.getpid())}

    def memory(self) -> int:
        """Bytes of memory that are this worker's own."""
        return own_memory()

    def open(self, session: int, simulator: Simulator, data_parts: Any, *task_parts: Any) -> Answer:
        """Begin to work for a run."""
        answer = Answer()
        with self._noted():
            try:
                data: FederatedData = opened([data_parts])
                task: Task = opened(task_parts)
                engine = simulator.start(task, data)
                engine.omniscient_attack = False  # the driver has all updates
                engine.measures = False
                self.sessions[session] = engine
            except Exception as failure:
                answer = _failed(failure)
        return replace(answer, notices=self._told(), logged=self.log.taken())

    def add_clients(self, session: int, name: str, parts: Any) -> None:
        """A further set of clients to evaluate, by a name."""
        self.others[session, name] = opened([parts])

    def close(self, session: int) -> None:
        """The run is over."""
        self.sessions.pop(session, None)
        self.models.pop(session, None)
        self.heads = {head: phase for head, phase in self.heads.items() if phase.session != session}
        self.others = {key: clients for key, clients in self.others.items() if key[0] != session}

    def work(self, *arguments: Any) -> Any:
        """The answer to the phase of a letter, in as many parts as it says. Without models: at those of the phase before."""
        began, answer, letter = time.perf_counter(), Answer(), Letter.read(arguments)
        with self._noted():
            try:
                phase: Phase = self._phase(letter)
                stretches: list[Stretch] = opened(letter.own)
                engine = self.sessions[phase.session]
                answer = Answer([self._worked(engine, phase, stretch) for stretch in stretches])
            except Exception as failure:
                answer = _failed(failure)
        seconds, logged = time.perf_counter() - began, self.log.taken()
        done = replace(answer, seconds=seconds, notices=self._told(), chunk_size=self.smaller, logged=logged)
        count = letter.answer_parts
        packed = answer_parts(pack_numbers(done) if done.failure is None else pack(done), count)
        return packed if count > 1 else packed[0]

    def _phase(self, letter: Letter) -> Phase:
        """What all workers are told, with the models and the set of clients that is evaluated."""
        head = b"".join(letter.head)
        if head not in self.heads:
            phase: Phase = opened([head])
            if self.solver is not None and phase.solver is not None and same_part(self.solver, phase.solver):
                phase = replace(phase, solver=self.solver)  # the same object: what the simulator has read of it stays known
            splits, key = self.sessions[phase.session].data.splits, (phase.session, phase.clients)
            clients = splits[phase.clients] if phase.clients in splits else self.others[key]
            if len(self.heads) >= _KNOWN_HEADS:
                self.heads.clear()
            self.heads[head] = replace(phase, clients=clients)
        known = self.heads[head]
        self.solver = known.solver
        if letter.models:
            self.models[known.session] = opened(letter.models)
        return replace(known, models=self.models.get(known.session, ()))

    def _worked(self, engine: SimulatorEngine, phase: Phase, stretch: Stretch) -> Any:
        """The work of a stretch; where memory is short, in ever smaller chunks."""
        while True:
            try:
                if self.smaller is not None:
                    path = phase.choice.get("path")
                    phase = replace(phase, choice=vars(Choice(self.smaller, 1, path=path)))
                return work_on(engine, phase, stretch)
            except Exception as failure:
                if not is_out_of_memory(failure):
                    raise
                if phase.kind == "calibrate":  # nothing is measured; the work itself finds out which chunks there is room for
                    return phase.choice
                now = self.smaller or phase.choice.get("chunk_size") or max(stretch.lengths)
                if now <= 1:
                    raise
                self.smaller = max(1, min(now, max(stretch.lengths)) // 2)
                if torch.cuda.is_available():
                    torch.cuda.empty_cache()

    @contextmanager
    def _noted(self) -> Iterator[None]:
        """Keep what is warned of, for the driver."""
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("default")
            yield
        self.notices += [str(each.message) for each in seen]

    def _told(self) -> tuple[str, ...]:
        told, self.notices = tuple(dict.fromkeys(self.notices)), []
        return told


def is_out_of_memory(failure: BaseException) -> bool:
    """Whether an error says that memory was not enough."""
    by_text = isinstance(failure, RuntimeError) and "can't allocate memory" in str(failure)
    return isinstance(failure, MemoryError | torch.OutOfMemoryError) or by_text


def _failed(failure: Exception) -> Answer:
    """An error as an answer; one that cannot be sent as it is, as text."""
    trace = traceback.format_exc()
    try:
        opened(answer_parts(pack(failure), 1))
    except Exception:  # its class cannot be made of its text alone
        known = isinstance(failure, EquipoiseError)
        failure = EquipoiseError(str(failure)) if known else RuntimeError(f"{type(failure).__name__}: {failure}")
    return Answer(failure=failure, trace=trace, out_of_memory=is_out_of_memory(failure))
