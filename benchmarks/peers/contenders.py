"""The systems that are compared, their settings, and the processes in which they run."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from environments import HOME, last_words, python_of
from turns import descendants

HERE = Path(__file__).resolve().parent
LONGEST_ANSWER = 300.0  # seconds
# Threads are set for each worker; what the caller's shell says about them would count for some and not for others.
NOT_PASSED_ON = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "XLA_FLAGS", "PYTHONPATH", "PFL_WORKER_RANK")


class Failed(Exception):
    """Why a worker gives no answer."""


@dataclass(frozen=True)
class Setting:
    """How many cores a worker is pinned to, and what it makes of them; None: what the system does by itself."""

    cores: int
    threads: int | None = None
    processes: int | None = None
    words: str = ""

    def arguments(self) -> list[str]:
        given = {"--threads": self.threads, "--processes": self.processes}
        return [word for name, value in given.items() if value is not None for word in (name, str(value))]


@dataclass(frozen=True)
class System:
    name: str
    script: str
    environment: str | None
    settings: tuple[Setting, ...]


def systems(cores: int) -> list[System]:
    """Every system with one core and, in each way that it has, with all."""
    alone, n = Setting(1, 1, 1, "1 thread"), cores
    found = [
        System("equipoise", "equipoise_worker.py", None, (Setting(1, words="its choice"), Setting(n, words="its choice"))),
        System("plain PyTorch", "plain_torch.py", None, (alone, Setting(n, n, 1, f"{n} threads"))),
        System("Flower", "flower_simulation.py", "flower",
               (Setting(1, 1, 1, "1 actor"), Setting(n, 1, max(1, n // 2), "its default"), Setting(n, 1, n, f"{n} actors"),
                Setting(n, 1, 2 * n, f"{2 * n} actors"))),
        System("pfl", "pfl_worker.py", "pfl",
               (alone, Setting(n, n, 1, f"{n} threads"), Setting(n, 1, n, f"{n} processes"))),
        System("FedJAX", "fedjax_worker.py", "fedjax",
               (Setting(1, 1, 1, "jit"), Setting(n, 1, 1, "jit"), Setting(n, 1, n, f"pmap, {n} devices"))),
        System("JAX", "jax_worker.py", "jax",
               (Setting(1, 1, 1, "1 device"), Setting(n, 1, 1, "1 device"), Setting(n, 1, n, f"{n} devices"))),
    ]  # fmt: skip
    return [System(s.name, s.script, s.environment, tuple(dict.fromkeys(s.settings))) for s in found]


@dataclass
class Worker:
    """A system at one setting in a process of its own. It is stopped whenever it is not its turn, with all its children."""

    system: System
    setting: Setting
    workload: str
    version: str = ""
    count: int = 1
    losses: dict[int, float] = field(default_factory=dict)
    seconds: list[float] = field(default_factory=list)  # per round, one entry a pass
    peak_mb: float = 0.0
    reason: str | None = None  # why it has failed
    process: subprocess.Popen[bytes] | None = None
    unread: bytes = b""

    @property
    def log(self) -> Path:
        """Where its standard error goes."""
        words = f"{self.system.name}-{self.workload}-{self.setting.cores}-{self.setting.words}"
        return HOME / "logs" / f"{words.replace(' ', '_').replace(',', '')}.log"

    def start(self) -> None:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        kept = {name: value for name, value in os.environ.items() if name not in NOT_PASSED_ON}
        if self.setting.threads is not None:
            kept |= {"OMP_NUM_THREADS": str(self.setting.threads), "MKL_NUM_THREADS": str(self.setting.threads)}
        mine = sorted(os.sched_getaffinity(0))[-self.setting.cores :]
        command = [str(python_of(self.system.environment)), str(HERE / self.system.script), self.workload]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                ["taskset", "-c", ",".join(map(str, mine)), *command, *self.setting.arguments()],
                env=kept | {"PYTHONPATH": str(HERE.parent)}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
                start_new_session=True,
            )  # fmt: skip
        self.version = str(self.answer()["version"])

    def ask(self, command: str) -> dict[str, Any]:
        assert self.process is not None
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(f"{command}\n".encode())
            self.process.stdin.flush()
        except BrokenPipeError:
            raise Failed(last_words(self.log.read_text())) from None
        return self.answer()

    def answer(self) -> dict[str, Any]:
        """The worker's next line of JSON; other lines are what a framework prints while it is imported."""
        deadline = time.monotonic() + LONGEST_ANSWER
        while True:
            line, found, rest = self.unread.partition(b"\n")
            if not found:
                self.unread += self.more(deadline)
                continue
            self.unread = rest
            if line.startswith(b"{"):
                answer: dict[str, Any] = json.loads(line)
                return answer

    def more(self, deadline: float) -> bytes:
        """What the worker has written since, if it writes before the deadline."""
        assert self.process is not None
        assert self.process.stdout is not None
        if not select.select([self.process.stdout], [], [], max(0.0, deadline - time.monotonic()))[0]:
            raise Failed(f"no answer in {LONGEST_ANSWER:.0f} s")
        written = os.read(self.process.stdout.fileno(), 2**16)
        if not written:
            raise Failed(last_words(self.log.read_text()))
        return written

    def run(self) -> float:
        """Seconds per round over `count` rounds."""
        answer = self.ask(f"run {self.count}")
        self.peak_mb = float(answer["peak_mb"])
        return float(answer["seconds"]) / self.count

    def freeze(self) -> None:
        self.signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self.signal(signal.SIGCONT)

    def signal(self, number: signal.Signals) -> None:
        if self.process is None or self.process.poll() is not None:
            return
        for process in descendants(self.process.pid):
            try:
                os.kill(process, number)
            except ProcessLookupError:
                continue

    def end(self) -> None:
        """Lets the worker end by itself, and ends it if it does not."""
        if self.process is None:
            return
        self.thaw()
        assert self.process.stdin is not None
        try:
            self.process.stdin.close()
            if self.reason is None:
                self.process.wait(30)
        except (BrokenPipeError, subprocess.TimeoutExpired):
            pass
        self.signal(signal.SIGKILL)
        self.process.wait()
