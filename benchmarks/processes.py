"""Measurements in processes of their own, so that threads, peak memory and failures are each contender's alone.

A process waits for commands on a pipe: the parent lets one at a time run a few rounds. What is compared takes turns, so that
whatever else the machine does hits all alike.
"""

from __future__ import annotations

import gc
import multiprocessing as mp
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from roofline import Demand, Rates, demand_of, measured_rates, wait
from workloads import CONTENDERS, Workload

ANSWER_SECONDS = 300.0  # a process that says nothing for so long has failed


class Failed(Exception):
    """A measurement that could not be made, and why."""


class LeftOut(Failed):
    """A measurement that was not tried."""


@dataclass(frozen=True)
class Spec:
    """What to measure: who runs which workload, where."""

    workload: Workload
    contender: str = "equipoise simulator"
    threads: int = 1
    device: str = "cpu"
    precision: str | None = None


@dataclass(frozen=True)
class Timing:
    """Some rounds in a row: their seconds, what the clients did in them, and the state after the last."""

    seconds: float
    rounds: int
    clients: int  # in all rounds together
    examples: int
    steps: int
    peak_mb: float
    waste: float | None


@dataclass(frozen=True)
class Made:
    """What is known of a contender before it runs."""

    demand: Demand
    works_by: str  # the class of the engine; "" for contenders that have none


class Bench:
    """Inside the process: one contender at a time."""

    def __init__(self) -> None:
        self.spec: Spec | None = None
        self.one: Any = None
        self.index = 0

    def make(self, spec: Spec) -> Made:
        """Build a contender in the place of the one before."""
        self.drop()
        if spec.device != "cpu":
            wait(spec.device)  # nothing can be reset before the device was first used
            torch.cuda.reset_peak_memory_stats()
        options = ({"device": spec.device} if spec.device != "cpu" else {}) | (
            {"precision": spec.precision} if spec.precision is not None else {}
        )
        self.spec, self.one, self.index = spec, CONTENDERS[spec.contender](spec.workload, **options), 0
        return Made(demand_of(spec.workload.model(), spec.workload.data().train), getattr(self.one, "works_by", ""))

    def drop(self) -> None:
        """Let go of the contender and its memory on the device."""
        getattr(self.one, "close", lambda: None)()
        self.one = None
        gc.collect()
        if self.spec is not None and self.spec.device != "cpu":
            torch.cuda.empty_cache()

    def run(self, count: int, clients_per_round: int | None = None) -> Timing:
        """Run `count` rounds, with fewer clients than usual if so told."""
        assert self.spec is not None
        workload, indices = self.spec.workload, range(self.index, self.index + count)
        self.index += count
        usual = workload.clients_per_round
        per_round = usual if clients_per_round is None else clients_per_round
        if per_round != usual:
            self.one.clients_per_round = per_round
        wait(self.spec.device)
        began = time.perf_counter()
        for index in indices:
            self.one(index)
        wait(self.spec.device)
        seconds = time.perf_counter() - began
        if hasattr(self.one, "tally"):
            examples, steps = self.one.tally(indices)
        else:
            assert workload.sizes == "equal"
            examples = count * per_round * workload.examples
            steps = count * per_round * -(-workload.examples // workload.batch_size)
        if per_round != usual:
            self.one.clients_per_round = usual
        waste = getattr(self.one, "waste", None)
        return Timing(seconds, count, count * per_round, examples, steps, peak_megabytes(self.spec.device), waste)

    def local_work(self, count: int) -> float:
        """Seconds of `count` rounds of the engine's part alone; cohorts are drawn before."""
        assert self.spec is not None
        cohorts = [self.one.cohort(index) for index in range(self.index, self.index + count)]
        wait(self.spec.device)
        began = time.perf_counter()
        for cohort in cohorts:
            self.one.local_work(cohort)
        wait(self.spec.device)
        return time.perf_counter() - began

    def rates(self, device: str, precision: str | None, quick: bool) -> Rates:
        return measured_rates(device, precision, quick=quick)

    def machine(self, device: str) -> dict[str, object]:
        found: dict[str, object] = {"torch": torch.__version__, "threads": torch.get_num_threads()}
        if device != "cpu":
            properties = torch.cuda.get_device_properties(device)
            found |= {
                "gpu": properties.name,
                "multiprocessors": properties.multi_processor_count,
                "gpu_memory_gb": round(properties.total_memory / 1e9, 1),
                "cuda": torch.version.cuda,
            }
        return found


def peak_megabytes(device: str) -> float:
    """The most memory so far: of this process, with what its living children have for themselves now; or of torch on a GPU.

    Children that were forked share data and libraries with their parent, and those are counted once.
    """
    if device != "cpu":
        return torch.cuda.max_memory_allocated() / 2**20
    own = _kilobytes("self", "status", "VmHWM")  # unlike ru_maxrss it begins anew with the process
    if not own:
        own = float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    return (own + sum(_kilobytes(str(child.pid), "smaps_rollup", "Private_") for child in mp.active_children())) / 1024


def _kilobytes(pid: str, file: str, key: str) -> float:
    """The sum of the entries of a file of /proc that begin so; 0 where there is none."""
    try:
        lines = Path(f"/proc/{pid}/{file}").read_text().splitlines()
    except OSError:
        return 0.0
    return sum(float(line.split()[1]) for line in lines if line.startswith(key))


def serve(pipe: Connection, threads: int) -> None:
    """The process: does what it is told until the pipe closes."""
    torch.set_num_threads(threads)
    bench = Bench()
    pipe.send("ready")
    while True:
        try:
            command, *arguments = pipe.recv()
        except EOFError:
            return
        if command == "stop":
            bench.drop()
            return
        answer: object
        try:
            answer = getattr(bench, command)(*arguments)
        except Exception as failure:  # whatever a contender raises becomes a row of the table
            reason = (str(failure).strip().splitlines() or [""])[0][:200]
            answer = Failed(f"{type(failure).__name__}: {reason}")
        pipe.send(answer)


class Process:
    """The parent's end."""

    def __init__(self, threads: int = 1) -> None:
        context = mp.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        # Not a daemon: a contender may have worker processes of its own.
        self.process = context.Process(target=serve, args=(theirs, threads))
        self.process.start()
        theirs.close()
        self.ready = False

    def wait_until_ready(self) -> None:
        if not self.ready:
            self._receive()
            self.ready = True

    def ask(self, command: str, *arguments: object) -> Any:
        """The answer to a command; Failed if there is none."""
        try:
            self.wait_until_ready()
            self.pipe.send((command, *arguments))
            answer = self._receive()
        except (EOFError, OSError) as failure:
            self.process.join(5)
            raise Failed(f"its process ended (exit code {self.process.exitcode})") from failure
        if isinstance(answer, Failed):
            raise answer
        return answer

    def _receive(self) -> Any:
        if not self.pipe.poll(ANSWER_SECONDS):
            self.process.kill()
            raise Failed(f"no answer in {ANSWER_SECONDS:.0f} s")
        return self.pipe.recv()

    def stop(self) -> None:
        with suppress(OSError):
            self.pipe.send(("stop",))
        self.pipe.close()
        self.process.join(20)
        if self.process.is_alive():
            self.process.kill()


@dataclass(frozen=True)
class Effort:
    """How long to measure."""

    passes: int
    seconds: float  # of each pass
    longest: float  # a round that takes more is timed once, without a warm-up of its size
    deadline: float  # on time.monotonic's clock: nothing is begun that would end later
    with_engine: bool = False  # time the engine's part alone, too


class Measurement:
    """One contender being measured: warmed up, then timed pass by pass."""

    def __init__(self, spec: Spec, process: Process) -> None:
        self.spec, self.process = spec, process
        self.made: Made | None = None
        self.timings: list[Timing] = []
        self.engine_seconds: list[float] = []
        self.failure: Failed | None = None
        self.each = 0.0  # about the seconds of a round
        self.count = 0  # rounds per pass; 0: one round in all

    def attempt(self, work: Callable[[Effort], None], effort: Effort) -> None:
        """Do a part of the measurement; once something has failed nothing more is tried."""
        if self.failure is not None:
            return
        try:
            work(effort)
        except Failed as failed:
            self.failure = failed

    def warm_up(self, effort: Effort) -> None:
        """Build the contender, and find out how many rounds fill a pass."""
        if time.monotonic() > effort.deadline:
            raise LeftOut("left out: no time was left")
        self.made = self.process.ask("make", self.spec)
        self.each = self._first_round()
        self._refuse_if_late(effort)
        if self.each > effort.longest:
            return
        on_gpu = self.spec.device != "cpu"
        for rounds in (1, 2, 4) if on_gpu else (1,):  # graphs are captured as their shapes first come
            timing = self.process.ask("run", rounds)
        self.count = max(1, round(effort.seconds / (timing.seconds / timing.rounds)))

    def _refuse_if_late(self, effort: Effort) -> None:
        if time.monotonic() + self.each > effort.deadline:
            raise LeftOut(f"left out: about {self.each:.1f} s a round, and no time was left")

    def _first_round(self) -> float:
        """About the seconds of a round, by running one that is smaller where that can be done."""
        usual = self.spec.workload.clients_per_round
        few = min(10, usual) if self.spec.device == "cpu" and self.spec.contender.startswith("equipoise") else usual
        _, *others = (float(self.process.ask("run", 1, few).seconds) for _ in range(3))  # the first sets things up
        return min(others) * usual / few

    def one_pass(self, effort: Effort) -> None:
        if self.count == 0 and self.timings:
            return
        if self.timings and time.monotonic() > effort.deadline:
            return
        if not self.timings:
            self._refuse_if_late(effort)
        self.timings.append(self.process.ask("run", max(1, self.count)))
        if effort.with_engine and self.made is not None and self.made.works_by:
            rounds = max(1, self.count)
            self.engine_seconds.append(self.process.ask("local_work", rounds) / rounds)


@contextmanager
def processes(threads: Sequence[int]) -> Iterator[list[Process]]:
    """Processes with so many threads each, all started before any of them works."""
    started = [Process(count) for count in threads]
    try:
        for process in started:
            process.wait_until_ready()
        yield started
    finally:
        for process in started:
            process.stop()


def take_turns(specs: Sequence[Spec], effort: Effort, where: Sequence[Process]) -> list[Measurement]:
    """Measure contenders in a process each, pass by pass in turn."""
    measurements = [Measurement(spec, process) for spec, process in zip(specs, where, strict=True)]
    for one in measurements:
        one.attempt(one.warm_up, effort)
    for _ in range(effort.passes):
        for one in measurements:
            one.attempt(one.one_pass, effort)
    return measurements


def one_by_one(specs: Sequence[Spec], effort: Effort) -> Iterator[Measurement]:
    """Measure contenders one after another in one process, where starting one for each would take longer than measuring."""
    process = Process(specs[0].threads)
    try:
        for spec in specs:
            (one,) = take_turns([spec], effort, [process])
            yield one
            if one.failure is not None and not isinstance(one.failure, LeftOut):  # a device may be unusable afterwards
                process.stop()
                process = Process(spec.threads)
    finally:
        process.stop()
