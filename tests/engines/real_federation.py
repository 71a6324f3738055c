"""A real federation for tests: SuperLink and SuperNodes as processes of this machine, started and ended by their ids."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType

BIN = Path(sys.executable).parent


def free_ports(count: int) -> list[int]:
    """Ports nobody listens on, all different: the sockets are open together before any is given back."""
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def quiet_environment(home: Path) -> dict[str, str]:
    """Flower with a home of its own, nothing sent outside, one thread per process, and our commands first in the path."""
    return {
        **os.environ,
        "PATH": f"{BIN}{os.pathsep}{os.environ.get('PATH', '')}",
        "FLWR_HOME": str(home),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "NO_COLOR": "1",
        "COLUMNS": "200",
    }


class Processes:
    """Commands that run beside each other, each with a log file; leaving the block ends all of them by their ids."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.home = folder / "flwr-home"
        self.home.mkdir(parents=True, exist_ok=True)
        self.environment = quiet_environment(self.home)
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        self.may_end: set[str] = set()  # those whose end is no failure

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for process in reversed(self.running.values()):
            process.terminate()
        end = time.monotonic() + 5
        for process in reversed(self.running.values()):
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=max(0.0, end - time.monotonic()))
            self._kill_group(process)
            process.wait(timeout=10)
        if error is not None:
            error.add_note("\n".join(f"── {name}\n{self.log(name)[-3000:]}" for name in self.running))

    @staticmethod
    def _kill_group(process: subprocess.Popen[bytes]) -> None:
        """The process and whatever it started; each has a session of its own, so that no one else is hit."""
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)

    def start(
        self, name: str, command: Sequence[str], cwd: Path | None = None, *, may_end: bool = False
    ) -> subprocess.Popen[bytes]:
        self.may_end |= {name} if may_end else set()
        with (self.folder / f"{name}.log").open("wb") as log:
            self.running[name] = subprocess.Popen(
                list(command), stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=self.environment, cwd=cwd,
                start_new_session=True,
            )  # fmt: skip
        return self.running[name]

    def call(self, *command: str, timeout: float = 180, cwd: Path | None = None) -> str:
        """Run a command to its end; its output, or the failure with the output."""
        done = subprocess.run(
            command, env=self.environment, cwd=cwd, timeout=timeout, text=True, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        assert done.returncode == 0, f"{command} ended with {done.returncode}\n{done.stdout}"
        return done.stdout

    def kill(self, name: str, number: signal.Signals = signal.SIGKILL, *, within: float = 10) -> None:
        """End a process and all it started by a signal; SIGKILL pulls the plug."""
        self.may_end.add(name)
        with suppress(ProcessLookupError):
            os.killpg(self.running[name].pid, number)
        self.running[name].wait(timeout=within)
        self._kill_group(self.running[name])

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(encoding="utf-8", errors="replace")

    def wait_until(self, condition: Callable[[], bool], what: str, timeout: float = 60) -> None:
        end = time.monotonic() + timeout
        while not condition():
            for name, process in self.running.items():
                if process.poll() is not None and name not in self.may_end:
                    raise AssertionError(f"{name} ended with {process.returncode} before {what}")
            if time.monotonic() > end:
                raise AssertionError(f"{what}: not within {timeout} s")
            time.sleep(0.1)

    def wait_for_log(self, name: str, words: str, timeout: float = 60) -> None:
        self.wait_until(lambda: words in self.log(name), f"{name} says {words!r}", timeout)


class Federation(Processes):
    """A SuperLink and SuperNodes on loopback without TLS: for what does not concern the connection itself."""

    def __init__(self, folder: Path, node_configs: Sequence[str]) -> None:
        super().__init__(folder)
        self.node_configs = node_configs

    def __enter__(self) -> Federation:
        port, *node_ports = free_ports(1 + len(self.node_configs))
        address = f"127.0.0.1:{port}"
        (self.home / "config.toml").write_text(
            f'[superlink]\ndefault = "here"\n[superlink.here]\naddress = "{address}"\ninsecure = true\n'
        )
        try:
            self.start(
                "superlink",
                [str(BIN / "flower-superlink"), "--insecure", "--host", "127.0.0.1", "--port", str(port),
                 "--disable-runtime-dependency-installation"],
            )  # fmt: skip
            self.wait_until(lambda: answers(f"http://{address}/health"), "the SuperLink answers")
            for i, (node_port, config) in enumerate(zip(node_ports, self.node_configs, strict=True)):
                self.start(
                    f"node-{i}",
                    [sys.executable, "-c", "from equipoise.cli.flower_commands import app; app()", "node",
                     "--preload", "sklearn.datasets", "--insecure", "--superlink", address, "--port", str(node_port),
                     "--node-config", config],
                )  # fmt: skip
            for i in range(len(self.node_configs)):
                self.wait_for_log(f"node-{i}", "SuperNode ID:")
        except BaseException as failure:
            self.__exit__(type(failure), failure, failure.__traceback__)
            raise
        return self

    def submit(self, app: Path, **config: object) -> subprocess.Popen[bytes]:
        """`flwr run` with the log of the run streamed; the process ends with the run."""
        pairs = " ".join(f"{key.replace('_', '-')}={json.dumps(value)}" for key, value in config.items())
        return self.start("run", [str(BIN / "flwr"), "run", str(app), "--stream", "--run-config", pairs], may_end=True)

    def finish(self, timeout: float) -> None:
        """Wait for the run that was submitted, and check that it completed."""
        self.wait_until(lambda: self.running["run"].poll() is not None, "the run ends", timeout)
        listed = self.call(str(BIN / "flwr"), "list", "--format", "json")
        states = [run["status"] for run in json.loads(listed[listed.index("{") :])["runs"]]
        assert set(states) == {"finished:completed"}, f"{states}\n{self.log('run')}"


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=1) as reply:  # noqa: S310
            return bool(reply.status == 200)
    except OSError:
        return False
