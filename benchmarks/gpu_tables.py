"""Makes the tables of `reproduce` on one GPU by many runs side by side, with torch and numpy alone.

    python benchmarks/gpu_tables.py --data DIR --out OUT --minutes 9

A run of small clients leaves most of a GPU idle: it waits for one short kernel after another. So several processes, each with
several threads, work on a list of jobs, the longest and the most wanted first. Processes of one GPU take turns, unless NVIDIA's
multi-process service (MPS) can be started; threads of one process never do. Jobs whose results are there are left out, and a
run that the time ends goes on from its checkpoint. OUT/tables.tar.gz has all results and the checkpoints of unfinished runs.
`--before benchmarks/stored/gpu_tables.tar.gz` takes the results of 17 and 18 November 2026 (docs/results/) as made.

    python benchmarks/gpu_tables.py --data DIR --out OUT --probe

measures rounds of a few methods by one thread, several threads and several processes, in about a minute and a half.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import shutil
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache, partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch

from equipoise.engines.simulator import engine as simulator_engine
from equipoise.reproduce.batched_runs import OutOfTime, TimeLimit
from equipoise.reproduce.chosen_rates import candidate_name, candidates, chosen_rates, with_chosen_rates
from equipoise.reproduce.experiment_runs import ExperimentRuns
from equipoise.reproduce.experiments import EXPERIMENTS
from equipoise.types import RoundReport

PFLLIB = ("pfllib-fashion-mnist-dirichlet", "pfllib-fashion-mnist-pathological")
CHEAP = ("FedPer", "Local", "Ditto", "Δ-FL 0.5 + Ditto", "FedRep", "FedBABU", "SCAFFOLD")
CHOSEN = ("FedAvg", "FedProx", "Δ-FL 0.5", *CHEAP)  # rows whose rate is chosen on validation examples, too
SLOW = ("APFL", "pFedMe", "Per-FedAvg")  # a round takes four to nine times as long as one of FedAvg
LONG = ("Ditto, 1,000 rounds", "FedPer, 1,000 rounds", "FedAvg, 1,000 rounds")
CONVNET_FIRST = ("FedAvg", "Δ-FL 0.8", "Δ-FL 0.5", "Δ-FL 0.1")
TEXTS = ("stackoverflow-lstm", "clothing-lstm")
MEMORY = Path("/dev/shm")  # noqa: S108  checkpoints of many runs would keep a disk busy
GRACE = 25.0  # seconds that workers have to end after the time is over


@dataclass(frozen=True)
class Job:
    """Some rows of a table with some seeds, made by one thread."""

    table: str
    methods: tuple[str, ...]
    seeds: tuple[int, ...]
    precision: str = "tf32"
    kind: str = "table"  # or "candidates": every rate, judged on validation examples; or "chosen": with the best of them
    rate: float | None = None  # of a candidate that is run alone

    def __str__(self) -> str:
        names = ", ".join(self.methods[:2]) + (f" and {len(self.methods) - 2} more" if len(self.methods) > 2 else "")
        rate = "" if self.rate is None else f", rate {self.rate:g}"
        return f"{self.table}, {self.kind}: {names}{rate}; seeds {', '.join(map(str, self.seeds))}"


def jobs() -> Iterator[Job]:
    """All jobs: the longest of the wanted ones first."""
    three, five = (0, 1, 2), (0, 1, 2, 3, 4)
    mimic = [m.name for m in EXPERIMENTS["bucketing-mnist-mimic"].methods]
    # The rows of mimics are the label-sorted ones of the first table.
    attacks = [m.name for m in EXPERIMENTS["bucketing-mnist-attacks"].methods if "mimic" not in m.name]
    tail = [m.name for m in EXPERIMENTS["emnist-tail"].methods]
    others = tuple(m.name for m in EXPERIMENTS["emnist-convnet"].methods if m.name not in CONVNET_FIRST)
    texts = {table: [m.name for m in EXPERIMENTS[table].methods] for table in TEXTS}
    yield from (Job(table, (name,), (0,)) for table in PFLLIB for name in LONG)
    yield from (Job("delta-fl-finetuning", CONVNET_FIRST, (seed,)) for seed in five)
    # FedProx has a solver of its own; all other rows of a table are one batch.
    yield from (Job(table, tuple(n for n in names if n != "FedProx"), five, "float32") for table, names in texts.items())
    yield from (Job(table, ("FedProx",), five, "float32") for table in texts)
    roles = [m.name for m in EXPERIMENTS["shakespeare-gru"].methods]
    yield from (Job("shakespeare-gru", tuple(n for n in roles if n != "FedProx"), (seed,)) for seed in five)
    yield from (Job("shakespeare-gru", ("FedProx",), (seed,)) for seed in five)
    yield from (Job(table, (name,), (seed,)) for name in SLOW for seed in three for table in PFLLIB)
    yield from (Job(table, (name,), (), kind="candidates") for table in PFLLIB for name in CHOSEN)
    yield from (Job(table, ("FedAvg", "Δ-FL 0.5"), three) for table in PFLLIB)
    yield from (Job(table, ("FedProx",), three) for table in PFLLIB)
    yield from (Job(table, (name,), (seed,)) for seed in three for table in PFLLIB for name in CHEAP)
    yield from (Job("bucketing-mnist-mimic", (name,), three) for name in mimic)
    yield from (Job("emnist-convnet", CONVNET_FIRST, (seed,)) for seed in five)
    yield from (Job("emnist-tail", tuple(pair), five, "float32") for pair in zip(tail[::2], tail[1::2], strict=True))
    chosen = [Job(table, (name,), (seed,), kind="chosen") for seed in three for table in PFLLIB for name in CHOSEN]
    sorted_labels = [Job("bucketing-mnist-attacks", (name,), (0,)) for name in attacks]
    yield from (job for pair in zip_longest(chosen, sorted_labels) for job in pair if job is not None)
    yield from (Job("emnist-convnet", others, (seed,)) for seed in five)
    yield from slow_choices(three)
    yield from (Job("bucketing-mnist-attacks", (name,), (1, 2)) for name in attacks)


def slow_choices(seeds: tuple[int, ...]) -> Iterator[Job]:
    """The rows whose rounds take long, with chosen rates; a rate is a job. APFL comes first: few of its jobs fit in memory."""
    for name in SLOW:
        rates = {table: EXPERIMENTS[table].rates for table in PFLLIB}
        yield from (Job(table, (name,), (), "tf32", "candidates", rate) for table in PFLLIB for rate in rates[table])
        yield from (Job(table, (name,), (seed,), kind="chosen") for seed in seeds for table in PFLLIB)


def may_begin(job: Job, under_way: list[Job]) -> bool:
    """Whether the device's memory holds a job beside those under way: some take ten times as much as others."""
    alike = [other for other in under_way if heavy(other) == heavy(job)]
    return len(alike) < {"": 99, "bucketing": 4, "APFL": 6}[heavy(job)]


def heavy(job: Job) -> str:
    """The kind of job that takes much memory, or nothing."""
    return "bucketing" if job.table.startswith("bucketing") else "APFL" if "APFL" in job.methods else ""


# ------------------------------------------------------------------------------------------------------------------ one worker


@lru_cache(maxsize=6)
def cached_data(table: str, scale: str, folder: str, seed: int, options: str) -> Any:
    """The data of a table, which several jobs share."""
    return EXPERIMENTS[table].data(Path(folder), seed, **json.loads(options))


def runs_of(job: Job, given: argparse.Namespace) -> ExperimentRuns:
    """The runs of a job, in the folder of its table."""
    entry = EXPERIMENTS[job.table]
    methods = tuple(method for method in entry.methods if method.name in job.methods)
    if given.scale == "small":
        methods = tuple(replace(method, rounds=None) for method in methods)
    scale = entry.scales[given.scale]
    if given.rounds is not None:
        scale = replace(scale, rounds=given.rounds)

    def data(folder: Path, seed: int, **options: Any) -> Any:
        same = 0 if entry.same_data else seed
        return cached_data(job.table, given.scale, str(folder), same, json.dumps(options, sort_keys=True))

    on_gpu = given.device.startswith("cuda")
    runs = ExperimentRuns(
        replace(entry, methods=methods, data=data), given.scale, scale, given.data, given.work / f"{job.table}-{given.scale}",
        given.device, lambda line: None, job.precision if on_gpu else "float32",
    )  # fmt: skip
    if job.kind == "table":
        return runs
    if job.kind == "chosen":
        return with_chosen_rates(runs)
    tried = candidates(runs)
    names = {candidate_name(name, rate) for name in job.methods for rate in entry.rates if job.rate in (None, rate)}
    return replace(tried, entry=replace(tried.entry, methods=tuple(m for m in tried.entry.methods if m.name in names)))


def can_be_made(job: Job, given: argparse.Namespace) -> bool:
    """Whether the files and the chosen rates that a job needs are there."""
    if not all(any((given.data / name).exists() for name in need.names) for need in EXPERIMENTS[job.table].needs):
        return False
    return job.kind != "chosen" or set(job.methods) <= chosen_rates(runs_of(replace(job, kind="table"), given)).keys()


def missing_of(job: Job, runs: ExperimentRuns) -> list[tuple[int, Any]]:
    """The seeds and methods of a job whose results are not there."""
    seeds = runs.seeds if job.kind == "candidates" else job.seeds
    wanted = [(seed, method) for method in runs.entry.methods for seed in seeds]
    return [(seed, method) for seed, method in wanted if runs.stored(method, seed, None) is None]


@dataclass(frozen=True)
class PrintedProgress(TimeLimit):
    """A limit on the time that prints now and then how many rounds a job has made."""

    job: str = ""
    printed: list[int] = field(default_factory=list)  # rounds: the runs of a batch report each of them

    def on_round(self, report: RoundReport) -> None:
        """Print every twentieth round, then stop if the time is over."""
        if (report.round % 20 == 0 or self.left <= 0) and report.round not in self.printed:
            self.printed.append(report.round)
            print(f"round {report.round}: {report.seconds:.2f} s, {self.left:.0f} s left; {self.job}", flush=True)
        super().on_round(report)


def do_job(job: Job, given: argparse.Namespace, ends: float) -> dict[str, Any]:
    """Make the runs of a job; what was done, and how long it took."""
    began, runs = time.monotonic(), runs_of(job, given)
    limit, done = PrintedProgress(ends, str(job)), 0
    report: dict[str, Any] = {"job": asdict(job), "state": "done"}
    try:
        for together in runs.in_batches(missing_of(job, runs), None):
            if limit.left < 5:
                raise OutOfTime
            done += len(runs.make(together, None, limit))
    except OutOfTime:
        report["state"] = "out of time"
    except Exception:
        report |= {"state": "failed", "error": traceback.format_exc()[-3000:]}
    return report | {"runs": done, "seconds": round(time.monotonic() - began, 1)}


def prepare(given: argparse.Namespace) -> None:
    """Settings of a process that shares the device with others."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if given.device.startswith("cuda"):
        torch.cuda.set_per_process_memory_fraction(0.3 if given.processes > 3 else 0.9 / given.processes)
        # Paths are not measured: beside other runs the faster one would be a matter of chance.
        simulator_engine.measured_on_device = lambda *asked: None  # type: ignore[assignment]


def on_own_stream(given: argparse.Namespace) -> None:
    """Work of this thread goes to a stream of its own; captures use streams of the other priority."""
    if given.device.startswith("cuda") and given.threads > 1:
        torch.cuda.set_stream(torch.cuda.Stream(priority=-1))  # type: ignore[no-untyped-call]


def worker(given: argparse.Namespace) -> None:
    """Do jobs that come as lines of JSON, some at a time, and say what was done of each."""
    prepare(given)
    waiting: queue.Queue[dict[str, Any] | None] = queue.Queue()
    telling = threading.Lock()

    def serve() -> None:
        on_own_stream(given)
        while (asked := waiting.get()) is not None:
            job = Job(**{**asked["job"], "methods": tuple(asked["job"]["methods"]), "seeds": tuple(asked["job"]["seeds"])})
            report = do_job(job, given, asked["ends"]) | {"number": asked["number"]}
            with telling:
                print("REPORT " + json.dumps(report), flush=True)

    threads = [threading.Thread(target=serve) for _ in range(given.threads)]
    for thread in threads:
        thread.start()
    for line in sys.stdin:
        waiting.put(json.loads(line))
    for _ in threads:
        waiting.put(None)
    for thread in threads:
        thread.join()


# ----------------------------------------------------------------------------------------------------------------- the driver


def start_mps() -> dict[str, str]:
    """The variables by which processes find NVIDIA's multi-process service; empty if it cannot be started."""
    program = shutil.which("nvidia-cuda-mps-control", path=f"{os.environ.get('PATH', '')}:/usr/local/nvidia/bin:/usr/bin")
    if program is None:
        print("MPS: there is no nvidia-cuda-mps-control", flush=True)
        return {}
    here = Path(tempfile.gettempdir()) / "equipoise_mps"
    found = {"CUDA_MPS_PIPE_DIRECTORY": str(here / "pipe"), "CUDA_MPS_LOG_DIRECTORY": str(here / "log")}
    for folder in found.values():
        Path(folder).mkdir(parents=True, exist_ok=True)
    env = {**os.environ, **found}
    try:
        subprocess.run([program, "-d"], env=env, timeout=20, check=True, capture_output=True)
        check = "import torch; print(float(torch.ones(4, device='cuda').sum()))"
        subprocess.run([sys.executable, "-c", check], env=env, timeout=60, check=True, capture_output=True)
        servers = subprocess.run([program], input="get_server_list\n", env=env, timeout=10, text=True, capture_output=True)
    except (subprocess.SubprocessError, OSError) as failure:
        print(f"MPS: cannot be used ({failure!r})", flush=True)
        stop_mps(found)
        return {}
    print(f"MPS: at work, servers {servers.stdout.split()}", flush=True)
    return found if servers.stdout.split() else {}


def stop_mps(found: dict[str, str]) -> None:
    """End the service that was started here."""
    program = shutil.which("nvidia-cuda-mps-control", path=f"{os.environ.get('PATH', '')}:/usr/local/nvidia/bin:/usr/bin")
    if found and program is not None:
        env = {**os.environ, **found}
        subprocess.run([program], input="quit\n", env=env, timeout=20, text=True, capture_output=True, check=False)


class Crew:
    """Worker processes, each with some threads; a process that dies is started again, its jobs one at a time."""

    def __init__(self, given: argparse.Namespace, env: dict[str, str]) -> None:
        self.given, self.env = given, env
        self.reports: queue.Queue[tuple[int, dict[str, Any] | None]] = queue.Queue()
        self.processes: dict[int, subprocess.Popen[str]] = {}
        self.count = 0

    def start(self, threads: int) -> int:
        """Start a process, and give its number."""
        names = ("data", "work", "device", "scale", "rounds", "processes")
        options = [f"--{name}={value}" for name in names if (value := getattr(self.given, name)) is not None]
        command = [sys.executable, __file__, "--worker", f"--threads={threads}", *options]
        number, self.count = self.count, self.count + 1
        log = open(self.given.work / f"worker-{number}.log", "w", encoding="utf-8")  # noqa: SIM115  the process has it
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, env=self._environment()
        )
        self.processes[number] = process
        threading.Thread(target=self._listen, args=(number, process), daemon=True).start()
        return number

    def _environment(self) -> dict[str, str]:
        return {**os.environ, **self.env, "TMPDIR": str(self.given.work), "PYTHONUNBUFFERED": "1"}

    def _listen(self, number: int, process: subprocess.Popen[str]) -> None:
        for line in process.stdout or ():
            if line.startswith("REPORT "):
                self.reports.put((number, json.loads(line.removeprefix("REPORT "))))
            else:
                print(line, end="", flush=True)
        self.reports.put((number, None))

    def send(self, number: int, message: dict[str, Any]) -> None:
        """Hand a job to a process."""
        pipe = self.processes[number].stdin
        if pipe is not None:
            pipe.write(json.dumps(message) + "\n")
            pipe.flush()

    def end(self) -> None:
        """Let all processes end."""
        for process in self.processes.values():
            if process.stdin is not None and not process.stdin.closed:
                process.stdin.close()
        for process in self.processes.values():
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()


def drive(given: argparse.Namespace) -> int:
    """Hand out all jobs until they are done or the time is over; the results go to OUT."""
    began = time.monotonic()
    ends = began + 60 * given.minutes - GRACE
    given.work.mkdir(parents=True, exist_ok=True)
    mps = start_mps() if given.mps == "auto" and given.device.startswith("cuda") else {}
    if given.processes is None:
        given.processes = 12 if mps else 4
    if given.threads is None:
        given.threads = 1 if mps else 3
    print(f"{given.processes} processes of {given.threads} threads, MPS {'on' if mps else 'off'}", flush=True)
    asked = [job for job in jobs() if not given.only or any(part in str(job) for part in given.only.split("|"))]
    left = [job for job in asked if not can_be_made(job, given) or missing_of(job, runs_of(job, given))]
    print(f"{len(left)} of {len(asked)} jobs are left, {time.monotonic() - began:.0f} s", flush=True)
    crew, under_way, attempts = Crew(given, mps), dict[int, tuple[int, Job]](), dict[Job, int]()
    idle = [number for number in [crew.start(given.threads) for _ in range(given.processes)] for _ in range(given.threads)]
    idle = [number for turn in range(given.threads) for number in idle[turn :: given.threads]]  # spread over processes
    waiting, sent = list(left), 0
    with open(given.work / "log.jsonl", "a", encoding="utf-8") as log:
        while (waiting or under_way) and time.monotonic() < ends + GRACE - 8:
            while idle and time.monotonic() < ends - 15:
                busy = [other for _, other in under_way.values()]
                job = next((each for each in waiting if may_begin(each, busy) and can_be_made(each, given)), None)
                if job is None:
                    break
                waiting.remove(job)
                number = idle.pop(0)
                under_way[sent] = number, job
                crew.send(number, {"number": sent, "job": asdict(job), "ends": ends})
                sent += 1
            if not under_way:
                break
            try:
                number, report = crew.reports.get(timeout=1)
            except queue.Empty:
                continue
            if report is None:  # the process has died
                lost = [key for key, (owner, _) in under_way.items() if owner == number]
                for key in lost:
                    _, job = under_way.pop(key)
                    attempts[job] = attempts.get(job, 0) + 1
                    print(f"worker {number} died in {job}", flush=True)
                    if attempts[job] < 2:
                        waiting.insert(0, job)
                idle = [other for other in idle if other != number]
                if time.monotonic() < ends - 60:
                    idle.append(crew.start(1))
                continue
            _, job = under_way.pop(report.pop("number"))
            idle.append(number)
            after = time.monotonic() - began
            log.write(json.dumps(report | {"after": round(after, 1)}) + "\n")
            log.flush()
            what = report.get("error", "").strip().splitlines()[-1:]
            print(f"{after:6.0f} s  {report['state']:11s} {report['seconds']:6.1f} s  {job}", *what, flush=True)
            if report["state"] == "failed" and attempts.get(job, 0) < 1 and given.threads > 1:
                attempts[job] = 1
                waiting.append(job)
    crew.end()
    stop_mps(mps)
    pack(given)
    print(f"{len(waiting) + len(under_way)} jobs are not done; {time.monotonic() - began:.0f} s", flush=True)
    return 0


def pack(given: argparse.Namespace) -> None:
    """Results, curves and checkpoints of unfinished runs and logs as one file in OUT."""
    given.out.mkdir(parents=True, exist_ok=True)
    with tarfile.open(given.out / "tables.tar.gz", "w:gz") as packed:
        for path in sorted(given.work.rglob("*")):
            kept = path.is_file() and path.suffix in (".json", ".jsonl", ".log", ".md", ".ckpt")
            if kept and path.stat().st_size < 4 * 2**20:
                packed.add(path, path.relative_to(given.work))
    print(f"{given.out / 'tables.tar.gz'}: {(given.out / 'tables.tar.gz').stat().st_size / 2**20:.2f} MiB", flush=True)


# ------------------------------------------------------------------------------------------------------------------- the probe


PROBED = ("FedAvg", "FedPer", "Ditto", "FedRep", "SCAFFOLD", "APFL", "pFedMe", "Per-FedAvg")


def time_rounds(name: str, table: str, given: argparse.Namespace, rounds: int, precision: str = "tf32") -> str:
    """A line of text: the seconds of rounds of one method, and the memory that they took."""
    job = Job(table, (name,), (0,), precision)
    runs = runs_of(job, given)
    (method,) = runs.entry.methods
    began = time.monotonic()
    try:
        result = runs.train(method, 0, runs.data(method, 0), None, rounds)
    except Exception as failure:
        return f"{name}: {failure!r}\n{traceback.format_exc()[-1500:]}"
    seconds = ", ".join(f"{report.seconds * 1000:.0f}" for report in result.history.rounds)
    memory = torch.cuda.max_memory_allocated() / 2**30 if given.device.startswith("cuda") else 0.0
    whole = f"{time.monotonic() - began:.1f} s in all; {memory:.2f} GiB"
    return f"{table.split('-')[-1]} {name} {precision}: rounds of {seconds} ms; {whole}"


def probe_worker(given: argparse.Namespace) -> None:
    """Some methods by this process, in turn or by threads."""
    prepare(given)
    dirichlet, rounds = PFLLIB[0], given.rounds or 4
    if given.threads == 1 and given.probe == "turns":
        for precision in ("float32", "tf32"):
            print(time_rounds("FedAvg", dirichlet, given, rounds, precision), flush=True)
        for name in PROBED[1:]:
            print(time_rounds(name, dirichlet, given, 3, "tf32"), flush=True)
        print(time_rounds("median, label-sorted, s = 2", "bucketing-mnist-mimic", given, 12), flush=True)
        print(time_rounds("FedAvg", "emnist-convnet", given, 12), flush=True)
        return
    barrier = threading.Barrier(given.threads)

    def serve(number: int) -> None:
        on_own_stream(given)
        barrier.wait()
        print(f"[{os.getpid()}/{number}]", time_rounds("FedPer", dirichlet, given, 3 * rounds), flush=True)

    threads = [threading.Thread(target=partial(serve, number)) for number in range(given.threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def probe(given: argparse.Namespace) -> int:
    """One process in turn, then six threads, then four processes with MPS if it is there."""
    names = ("data", "work", "device", "scale", "rounds")
    options = [f"--{name}={value}" for name in names if (value := getattr(given, name)) is not None]
    given.work.mkdir(parents=True, exist_ok=True)

    def started(kind: str, threads: int, processes: int, env: dict[str, str]) -> None:
        began = time.monotonic()
        command = [sys.executable, __file__, "--worker", f"--probe={kind}", f"--threads={threads}", f"--processes={processes}"]
        running = [subprocess.Popen([*command, *options], env={**os.environ, **env}) for _ in range(processes)]
        for process in running:
            try:
                process.wait(120)
            except subprocess.TimeoutExpired:
                process.kill()
                print("killed after 120 s", flush=True)
        print(f"-- {kind}: {processes} processes of {threads} threads: {time.monotonic() - began:.1f} s", flush=True)

    started("turns", 1, 1, {})
    started("alone", 1, 1, {})
    started("threads", 6, 1, {})
    mps = start_mps()
    started("processes", 1, 6, mps)
    stop_mps(mps)
    return 0


def main() -> int:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Make the tables of `reproduce` on one GPU, many runs side by side.")
    parser.add_argument("--data", type=Path, required=True, help="the folder of the data files")
    parser.add_argument("--out", type=Path, default=Path("tables"), help="where results go as one file")
    parser.add_argument("--work", type=Path, default=MEMORY / "equipoise_tables", help="where runs are kept meanwhile")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--scale", default="paper", choices=["small", "paper"])
    parser.add_argument("--rounds", type=int, help="in place of the scale's, to try things out")
    parser.add_argument("--processes", type=int)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--mps", default="auto", choices=["auto", "off"])
    parser.add_argument("--only", help="jobs whose line has one of these texts, separated by |")
    parser.add_argument("--before", type=Path, help="a tables.tar.gz of before: what it holds is not made again")
    parser.add_argument("--probe", nargs="?", const="all")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        given.threads, given.processes = given.threads or 1, given.processes or 1
        (probe_worker if given.probe else worker)(given)
        return 0
    if given.probe:
        return probe(given)
    if given.before is not None:
        given.work.mkdir(parents=True, exist_ok=True)
        with tarfile.open(given.before) as packed:
            packed.extractall(given.work, filter="data")
    return drive(given)


if __name__ == "__main__":
    sys.exit(main())
