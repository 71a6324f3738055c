"""How fast two versions are, against each other: blocks of rounds of both take turns on this machine.

    python benchmarks/old_and_new.py --old /tmp/old --new . [--device cuda] [--alternations 20] [--only linear] [--budget 300]

`--old` and `--new` are checkouts with folders src and benchmarks. For each workload every version has one living process. It
trains by the public `train`, and an observer holds it between blocks of rounds until it is its turn: so set-up is not in the
figures, only one version works at a time, and what else the machine does hits both alike. The order is old, new, new, old, and
so on. The ratio is that of the medians, new over old; its interval holds 95 % of the ratios of resampled alternations. It does
not hold what two processes of one version differ by, about 3 %: repeat what matters.

A second line is about set-up and the first three rounds, in fresh processes of both versions by turns; the start of Python, its
imports, the data and the device itself are not in it. The first of each is dropped: it may compile what later ones find.

Both versions work in the same chunks by the same path. On a CPU that is what measuring before the first round finds there, and
both are told; on a GPU nothing is chosen. Workloads are those of benchmarks/workloads.py, each version's own. It is checked
that they are the same work, and that losses are the same after every block, bit for bit (of private cases they are not
compared: versions may key their noise differently). On a CPU that others use as well, the
time that processors spent on a round says more than the time that passed. Needs torch and NumPy alone.
"""

from __future__ import annotations

import argparse
import fnmatch
import importlib
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

FIRST_ROUNDS = 3
WARM_SECONDS = 1.0  # rounds before the first block, for caches and clocks
PAUSE = 0.02  # seconds between blocks, in which threads that wait for work go to sleep
RESAMPLES = 4000
MARGIN = 0.03  # by which two processes of one version have been seen to differ, beyond the interval of their blocks
ENOUGH = 10  # pairs, for an interval: those of fewer are too narrow


@dataclass(frozen=True)
class Pinned:
    """The simulator, told by which path, in which chunks and with how many workers it works, as a checkpoint tells it."""

    path: str
    chunk_size: int
    workers: int
    options: dict[str, Any]  # of the simulator

    def start(self, task: Any, data: Any) -> Any:
        running = importlib.import_module("equipoise").engines.Simulator(**self.options).start(task, data)
        running.measured.use({"chunk_size": self.chunk_size, "workers": self.workers, "path": self.path})
        return running


@dataclass(frozen=True)
class Case:
    """A workload of benchmarks/workloads.py, who works on it and how."""

    workload: str  # the name of one, or of a model in its table, or "tiny"
    clients_per_round: int
    tail: float | None = None  # of Δ-FL; None is FedAvg
    precision: str | None = None
    path: str | None = None  # of the simulator, by its name, to pin; None: nothing is chosen
    chunk_size: int = 0
    workers: int = 0
    threads: int | None = None  # of torch; None: as many as asked for
    private: bool = False  # distributed noise, and for Δ-FL a private quantile

    def made(self, workloads: Any, device: str) -> Any:
        """The workload itself."""
        on_gpu = device != "cpu"
        if self.workload == "label shift":
            return LabelShift(self.clients_per_round)
        if self.workload == "tiny":  # little more than what a round takes beside its arithmetic
            return workloads.scaling_workload(clients_per_round=self.clients_per_round, clients=100, examples=20, features=20)
        if self.workload in workloads.WORKLOADS and not on_gpu:
            return replace(workloads.WORKLOADS[self.workload], clients_per_round=self.clients_per_round)
        return workloads.grid_workload(self.workload, self.clients_per_round, "equal", clients=1000, on_gpu=on_gpu)

    def engine(self, device: str) -> Any:
        """The simulator, pinned where there is something to pin."""
        given = {"precision": self.precision} if self.precision else {}
        if self.path is not None:
            return Pinned(self.path, self.chunk_size, self.workers, {"device": device, **given})
        return importlib.import_module("equipoise").engines.Simulator(device=device, **given)

    def algorithm(self, eq: Any, rate: float, batch_size: int) -> Any:
        """What trains: FedAvg or Δ-FL, private or not."""
        solver = eq.solvers.SGD(lr=rate, batch_size=batch_size)
        if not self.private:
            risk = eq.risk.Mean() if self.tail is None else eq.risk.Superquantile(self.tail)
            return eq.Algorithm(risk=risk, solver=solver)
        options = {"noise": "distributed", "noise_multiplier": 1.0, "method": "rdp"}
        quantile = eq.privacy.PrivateQuantile(bound=16.0, bins=32)
        risk = eq.risk.Mean() if self.tail is None else eq.risk.Superquantile(self.tail, quantile=quantile)
        privacy = eq.privacy.DifferentialPrivacy(None, 1e-3, 1.0, **options)
        return eq.Algorithm(risk=risk, solver=solver, privacy=privacy)

    @property
    def words(self) -> str:
        if self.path is None:
            return "nothing is chosen"
        return f"pinned: {self.path}, chunks of {self.chunk_size}, {self.workers} threads or workers"


@dataclass(frozen=True)
class LabelShift:
    """The data of benchmarks/private_tail.py, as a workload."""

    clients_per_round: int
    title: str = "label shift, softmax regression"
    batch_size: int = 10

    def data(self) -> Any:
        return importlib.import_module("equipoise").data.label_shift(seed=0)

    def model(self) -> Any:
        return importlib.import_module("equipoise").models.Softmax(20, 10)


# What measuring before the first round finds on a CPU of two cores, for both versions.
COMPILED = {"path": "compiled softmax", "chunk_size": 108, "workers": 2}
CASES: dict[str, dict[str, Case]] = {
    "cpu": {
        "linear, 100 clients": Case("linear", 100, **COMPILED),
        "linear, 10 clients": Case("linear", 10, **COMPILED),
        "linear, 100 clients, tail 0.5": Case("linear", 100, tail=0.5, **COMPILED),
        "linear blocks, 100 clients": Case("linear", 100, path="linear blocks", chunk_size=50, workers=2),
        "tiny, 10 clients": Case("tiny", 10, path="example span", chunk_size=10, workers=1, threads=1),
        "tiny, 10 clients, tail 0.5": Case("tiny", 10, tail=0.5, path="compiled softmax", chunk_size=10, workers=1, threads=1),
        "ConvNet, 10 clients": Case("convnet", 10, path="hand-written ConvNet", chunk_size=5, workers=2),
        "label shift, distributed noise": Case(
            "label shift", 100, path="compiled softmax", chunk_size=108, workers=1, private=True
        ),
        "label shift, distributed noise, tail 0.5": Case(
            "label shift", 100, tail=0.5, path="compiled softmax", chunk_size=108, workers=1, private=True
        ),
        "linear, distributed noise": Case("linear", 100, private=True, **COMPILED),
    },
    "cuda": {
        "linear, 100 clients": Case("linear", 100),
        "linear, 1000 clients": Case("linear", 1000),
        "linear, 100 clients, tail 0.5": Case("linear", 100, tail=0.5),
        "ConvNet float32, 100 clients": Case("ConvNet", 100, precision="float32"),
        "ConvNet TF32, 100 clients": Case("ConvNet", 100, precision="tf32"),
    },
}


# --------------------------------------------------------------------------------------------------- inside a version's process


def say(**words: Any) -> None:
    """One line to the process that compares; other output goes to stderr."""
    sys.__stdout__.write("@" + json.dumps(words) + "\n")  # type: ignore[union-attr]
    sys.__stdout__.flush()  # type: ignore[union-attr]


def processor_seconds() -> float:
    """What processors have spent on this process, and on those that it has started and are alive."""
    found = time.process_time()
    for children in Path("/proc/self/task").glob("*/children"):
        for child in children.read_text().split():
            found += int(Path(f"/proc/{child}/schedstat").read_text().split()[0]) * 1e-9
    return found


def work(checkout: Path, device: str, name: str, threads: int) -> None:
    """Train a case until told to stop, a block of rounds at a time."""
    sys.stdout = sys.stderr
    import torch

    torch.set_num_threads(threads)
    sys.path.insert(0, str(checkout / "benchmarks"))
    import workloads

    import equipoise as eq
    from equipoise.types import Observer

    case = CASES[device][name]
    workload = case.made(workloads, device)
    data, model, rate = workload.data(), workload.model(), workloads.LEARNING_RATE
    algorithm = case.algorithm(eq, rate, workload.batch_size)
    clients = data.train
    same = f"{workload.title}, {workload.clients_per_round} of {len(clients)} clients, {tuple(clients.x.shape)}, "
    same += f"sums {int(clients.x.sum())} {int(clients.y.sum())}"
    same += f", {'private' if case.private else algorithm}"

    def wait() -> float:
        if device != "cpu":
            torch.cuda.synchronize()
        return time.perf_counter()

    class Blocks(Observer):
        """Times a block of rounds, says so, and waits for the next."""

        def __init__(self) -> None:
            self.left, self.set_up, self.spent = FIRST_ROUNDS, 0.0, 0.0
            self.began = wait()

        def on_start(self, run: Any) -> None:
            now = wait()
            self.set_up, self.began = now - self.began, now

        def on_round(self, report: Any) -> None:
            self.left -= 1
            if self.left:
                return
            seconds = wait() - self.began
            spent = processor_seconds() - self.spent
            say(seconds=seconds, spent=spent, set_up=self.set_up, round=report.round, loss=report.loss.hex())
            asked = sys.stdin.readline().split()
            if not asked or asked[0] == "stop":
                os._exit(0)  # children of this process see its end
            self.left, self.spent = int(asked[1]), processor_seconds()
            self.began = wait()

    if device != "cpu":
        torch.zeros(1, device=device)  # the device itself is not what is timed
    say(version=eq.__file__, same=same, torch=torch.__version__)
    sys.stdin.readline()
    rounds = 10**5 if case.private else 10**9
    options = {"rounds": rounds, "clients_per_round": workload.clients_per_round, "seed": 0, "progress": False}
    watching = Blocks()
    eq.train(model, data, algorithm, engine=case.engine(device), observers=[watching], **options)


# -------------------------------------------------------------------------------------------------------- outside: taking turns


class Version:
    """A living process of one version."""

    def __init__(self, checkout: Path, device: str, name: str, threads: int, cache: Path) -> None:
        threads = CASES[device][name].threads or threads
        environment = os.environ | {
            "PYTHONPATH": str(checkout / "src"), "EQUIPOISE_CACHE": str(cache), "OMP_NUM_THREADS": str(threads),
            "MKL_NUM_THREADS": str(threads), "PYTHONDONTWRITEBYTECODE": "1",
        }  # fmt: skip
        command = [
            sys.executable,
            __file__,
            "--work",
            name,
            "--new",
            str(checkout),
            "--device",
            device,
            "--threads",
            str(threads),
        ]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, text=True, bufsize=1)
        self.about: dict[str, Any] = {}
        self.seconds: list[float] = []  # per round, of each block
        self.spent: list[float] = []  # the same, of processors

    def hear(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("@"):
                found: dict[str, Any] = json.loads(line[1:])
                return found
        raise SystemExit(f"A process ended with {self.process.wait()}; what it said stands above.")

    def ask(self, words: str) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(words + "\n")
        self.process.stdin.flush()
        return self.hear()

    def ready(self) -> None:
        """Wait until it has imported all and made the data."""
        self.about = self.hear()

    def first(self) -> dict[str, Any]:
        """Set up, and the first rounds."""
        return self.ask("begin")

    def block(self, rounds: int) -> dict[str, Any]:
        return self.ask(f"run {rounds}")

    def stop(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def ratio_of(old: Sequence[float], new: Sequence[float]) -> tuple[float, float, float]:
    """The ratio of medians, new over old, and the interval that holds 95 % of those of resampled pairs."""
    a, b = np.array(old), np.array(new)
    chosen = np.random.default_rng(0).integers(0, len(a), (RESAMPLES, len(a)))
    ratios = np.median(b[chosen], 1) / np.median(a[chosen], 1)
    low, high = np.quantile(ratios, [0.025, 0.975])
    return float(np.median(b) / np.median(a)), float(low), float(high)


def in_words(old: Sequence[float], new: Sequence[float]) -> str:
    """Medians in milliseconds, and their ratio with its interval; of few pairs their lowest and highest ratio instead."""
    ratio, low, high = ratio_of(old, new)
    medians = f"old {1e3 * float(np.median(old)):.3f} ms, new {1e3 * float(np.median(new)):.3f} ms; new / old {ratio:.3f}"
    if len(old) < ENOUGH:
        pairs = np.array(new) / np.array(old)
        return f"{medians} (pairs from {pairs.min():.3f} to {pairs.max():.3f})"
    verdict = "  SLOWER" if low > 1 + MARGIN else "  faster" if high < 1 - MARGIN else ""
    fast = float(np.quantile(new, 0.25) / np.quantile(old, 0.25))
    return f"{medians} (95 %: {low:.3f} … {high:.3f}; of the lower quartiles {fast:.3f}){verdict}"


@dataclass(frozen=True)
class Plan:
    """What is asked for."""

    checkouts: dict[str, Path]
    device: str
    threads: int
    alternations: int
    fresh: int
    seconds: float
    caches: Path

    def start(self, name: str) -> dict[str, Version]:
        """A process of each version, ready to begin."""
        versions = {
            label: Version(checkout, self.device, name, self.threads, self.caches / label)
            for label, checkout in self.checkouts.items()
        }
        for version in versions.values():
            version.ready()
        return versions


def order(turn: int) -> tuple[str, str]:
    """Who goes first: old, new, new, old, and so on."""
    return ("old", "new") if turn % 2 == 0 else ("new", "old")


def take_turns(plan: Plan, name: str, deadline: float) -> dict[str, Any]:
    """Blocks of both versions by turns."""
    versions = plan.start(name)
    old, new = versions["old"], versions["new"]
    if old.about["same"] != new.about["same"]:
        raise SystemExit(f"The versions have different work:\n  {old.about['same']}\n  {new.about['same']}")
    print(f"  {old.about['version']} and {new.about['version']}", flush=True)
    same = True
    try:
        for version in versions.values():
            version.first()
        rounds = 1
        while True:  # the same rounds for both, so that losses can be compared
            slowest = max(version.block(rounds)["seconds"] for version in versions.values())
            if slowest >= WARM_SECONDS / 3 or slowest >= plan.seconds:
                break
            rounds = max(rounds + 1, int(rounds * min(4.0, 1.1 * plan.seconds / slowest)))
        rounds = max(1, round(rounds * plan.seconds / slowest))
        for turn in range(plan.alternations):
            found = {}
            for label in order(turn):
                time.sleep(PAUSE)
                found[label] = versions[label].block(rounds)
            same = same and found["old"]["loss"] == found["new"]["loss"] and found["old"]["round"] == found["new"]["round"]
            for label, version in versions.items():
                version.seconds.append(found[label]["seconds"] / rounds)
                version.spent.append(found[label]["spent"] / rounds)
            if time.monotonic() > deadline:
                break
    finally:
        for version in versions.values():
            version.stop()
    print(f"  rounds: {in_words(old.seconds, new.seconds)}, {len(old.seconds)} alternations of {rounds} rounds", flush=True)
    if plan.device == "cpu":  # on a GPU the host spends its time on waiting
        print(f"  time of processors: {in_words(old.spent, new.spent)}", flush=True)
    if not CASES[plan.device][name].private:  # versions may key their noise differently
        print(f"  losses after each block are {'the same' if same else 'NOT the same'}, bit for bit", flush=True)
    spent = {"old_processors": old.spent, "new_processors": new.spent}
    return {"rounds_per_block": rounds, "old": old.seconds, "new": new.seconds, "same_losses": same} | spent


def fresh_processes(plan: Plan, name: str, deadline: float) -> dict[str, Any]:
    """Set-up and first rounds in processes of their own, by turns; the first of each version is dropped."""
    set_up: dict[str, list[float]] = {"old": [], "new": []}
    first: dict[str, list[float]] = {"old": [], "new": []}
    for turn in range(plan.fresh + 1):
        began = time.monotonic()
        versions = plan.start(name)
        for label in order(turn):
            time.sleep(PAUSE)
            found = versions[label].first()
            if turn:
                set_up[label].append(found["set_up"])
                first[label].append(found["seconds"])
        for version in versions.values():
            version.stop()
        if 2 * time.monotonic() - began > deadline:  # another pair would end too late
            break
    if not set_up["old"]:
        return {}
    print(f"  set-up: {in_words(set_up['old'], set_up['new'])}, {len(set_up['old'])} processes each", flush=True)
    both = {label: [a + b for a, b in zip(set_up[label], first[label], strict=True)] for label in set_up}
    print(f"  set-up and first {FIRST_ROUNDS} rounds: {in_words(both['old'], both['new'])}", flush=True)
    return {"set_up": set_up, "first_rounds": first}


def wanted(name: str, pattern: str | None) -> bool:
    """Whether a case is asked for: by a pattern with wildcards, or words that its name holds."""
    return pattern is None or fnmatch.fnmatch(name, pattern) or pattern.lower() in name.lower()


def asked() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    parser.add_argument("--old", type=Path, help="the checkout before")
    parser.add_argument("--new", type=Path, default=Path("."), help="the checkout after")
    parser.add_argument("--device", choices=tuple(CASES), default="cpu")
    parser.add_argument("--alternations", type=int, default=None, help="20 on a CPU, 60 on a GPU, where blocks are shorter")
    parser.add_argument("--fresh", type=int, default=5, help="fresh processes of each version, for set-up; 0: none")
    parser.add_argument("--only", default=None, help="workloads whose name holds this, or fits it as a pattern with *")
    parser.add_argument("--seconds", type=float, default=None, help="how long a block is (0.4 on a CPU, 0.1 on a GPU)")
    parser.add_argument(
        "--budget", type=float, default=None, help="seconds in all; then fewer alternations are made, and said so"
    )
    parser.add_argument("--threads", type=int, default=cores, help="torch threads of each process")
    parser.add_argument("--out", type=Path, default=None, help="a file for all figures, as JSON")
    parser.add_argument("--work", default=None, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    options = asked()
    if options.work is not None:
        work(options.new.resolve(), options.device, options.work, options.threads)
        return
    if options.old is None:
        raise SystemExit("give --old, the checkout to compare with")
    began = time.monotonic()
    checkouts = {"old": options.old.resolve(), "new": options.new.resolve()}
    for checkout in checkouts.values():
        if not (checkout / "benchmarks" / "workloads.py").exists():
            raise SystemExit(f"{checkout} is no checkout: benchmarks/workloads.py is not there.")
    cases = {name: case for name, case in CASES[options.device].items() if wanted(name, options.only)}
    seconds, alternations = (0.4, 20) if options.device == "cpu" else (0.1, 60)
    seconds, alternations = options.seconds or seconds, options.alternations or alternations
    print(f"{platform.node()}, {options.device}, {options.threads} threads, load {os.getloadavg()[0]:.1f}, "
          f"{time.strftime('%Y-%m-%d %H:%M UTC', time.gmtime())}. Milliseconds are of this machine and hour.")  # fmt: skip
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="old-and-new-") as folder:
        plan = Plan(checkouts, options.device, options.threads, alternations, options.fresh, seconds, Path(folder))
        for number, (name, case) in enumerate(cases.items()):
            left = None if options.budget is None else (options.budget - (time.monotonic() - began)) / (len(cases) - number)
            start = time.monotonic()
            if left is not None and left < 5:
                print(f"{name}: left out, no time is left", flush=True)
                continue
            print(f"\n{name} ({case.words})", flush=True)
            share = 0.65 if options.fresh else 1.0
            figures[name] = take_turns(plan, name, start + share * left if left is not None else float("inf"))
            if options.fresh:
                figures[name] |= fresh_processes(plan, name, start + left if left is not None else float("inf"))
    print(f"\n{time.monotonic() - began:.0f} s in all.")
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
