"""Machines for tests of an operated federation: a network namespace, a user and a folder each, and a bridge between them.

Nothing of this is seen outside: the server and its proxy listen inside a namespace of their own. Root is needed.
"""

from __future__ import annotations

import compileall
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from signal import SIGALRM, SIGKILL, SIGTERM, Signals, alarm, signal
from typing import Any

BIN = Path(sys.executable).parent
SOURCE = Path(__file__).parents[2] / "src"
FIRST_USER = 61000  # ids that no account has
SUBNET = "10.213.7"
LONGEST = 2700  # seconds that a test may take, on a machine with other work
BUSY = 3.0  # how much longer than its limit each step may take on such a machine


def why_not() -> str | None:
    """Why there can be no such machines here; None if there can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "network namespaces need Linux and root"
    if missing := [name for name in ("ip", "nsenter", "setpriv") if shutil.which(name) is None]:
        return f"{missing[0]} is not installed"
    probe = f"eqfed-probe-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True, check=False)
    subprocess.run(["ip", "netns", "del", probe], capture_output=True, check=False)
    if made.returncode:
        return f"a network namespace cannot be made: {made.stderr.strip()}"
    tried = as_user(FIRST_USER, [sys.executable, "-c", "import torch, flwr, equipoise"])
    read = subprocess.run(tried, env=environment(Path("/")), capture_output=True, text=True, check=False)
    return f"another user cannot use this Python: {read.stderr.strip()[-200:]}" if read.returncode else None


def as_user(user: int, command: Sequence[str], net: str | None = None) -> list[str]:
    """A command as a user without an account runs it, in a network namespace.

    Where Python itself lies in a folder of root's alone, as /root/.pyenv does, the user sees that folder empty but for Python.
    """
    drop = ["setpriv", "--reuid", str(user), "--regid", str(user), "--clear-groups", "--", *command]
    enter = ["nsenter", f"--net=/run/netns/{net}"] if net is not None else []
    base = Path(sys.base_prefix)
    closed = [folder for folder in base.parents if not folder.stat().st_mode & 0o001]
    if not closed:
        return [*enter, *drop]
    hide = (
        'd=$(mktemp -d) && mount --bind "$1" "$d" && mount -t tmpfs -o mode=755 tmpfs "$2" && mkdir -p "$1" && '
        'mount --bind "$d" "$1" && umount "$d" && rmdir "$d" && shift 2 && exec "$@"'
    )
    return [*enter, "unshare", "-m", "--propagation", "private", "bash", "-c", hide, "-", str(base), str(closed[-1]), *drop]


def environment(home: Path, **more: str) -> dict[str, str]:
    """What a shell of such a machine has, and nothing of this process's."""
    return {
        "PATH": f"{BIN}:/usr/sbin:/usr/bin:/sbin:/bin",
        "PYTHONPATH": str(SOURCE),
        "PYTHONDONTWRITEBYTECODE": "1",
        "HOME": str(home),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "EQUIPOISE_ONNX": "0",
        "NO_COLOR": "1",
        "COLUMNS": "200",
        "LANG": "C.UTF-8",
        **more,
    }


@dataclass(eq=False)
class Machine:
    """One machine. What it starts is ended by its id, with all its children: each has a session of its own."""

    name: str
    number: int
    net: str
    folder: Path  # its user's alone
    logs: Path
    running: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    more: dict[str, str] = field(default_factory=dict)  # of the environment

    @property
    def user(self) -> int:
        """Its user's id."""
        return FIRST_USER + self.number

    @property
    def address(self) -> str:
        """Where the others reach it."""
        return f"{SUBNET}.{self.number}"

    def inside(self, command: Sequence[str]) -> list[str]:
        """A command as its user runs it there."""
        return as_user(self.user, command, self.net)

    def own(self) -> None:
        """All in its folder is its user's alone."""
        for path in (self.folder, *self.folder.rglob("*")):
            os.chown(path, self.user, self.user, follow_symlinks=False)
        self.folder.chmod(0o700)

    def call(self, command: str, *, timeout: float = 90, expected: int | None = 0, cwd: Path | None = None) -> str:
        """Run a command of a guide to its end; its output. `expected` None: any exit code."""
        done = subprocess.run(
            self.inside(["bash", "-c", command]), env=environment(self.folder, **self.more), cwd=cwd or self.folder, text=True,
            timeout=BUSY * timeout, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False,
        )  # fmt: skip
        assert expected is None or done.returncode == expected, f"{self.name}: {command}: {done.returncode}\n{done.stdout}"
        return done.stdout

    def start(self, name: str, command: str, **more: str) -> subprocess.Popen[bytes]:
        """Run a command beside the others; its output is appended to the log of this name."""
        with (self.logs / f"{name}.log").open("ab") as log:
            self.running[name] = subprocess.Popen(
                self.inside(["bash", "-c", f"exec {command}"]), env=environment(self.folder, **self.more, **more),
                cwd=self.folder, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        return self.running[name]

    def log(self, name: str) -> str:
        """What a command has said so far."""
        return (self.logs / f"{name}.log").read_text(encoding="utf-8", errors="replace")

    def send(self, name: str, number: Signals, *, group: bool) -> None:
        """Send a signal to a command, or to all its session."""
        with suppress(ProcessLookupError):
            (os.killpg if group else os.kill)(self.running[name].pid, number)

    def end(self, name: str, number: Signals = SIGTERM, *, group: bool = False, within: float = 40) -> int:
        """End a command by a signal; its exit code."""
        self.send(name, number, group=group)
        code = self.await_end(name, within)
        self.kill_rest(name)
        return code

    def await_end(self, name: str, within: float) -> int:
        """Wait until a command ends by itself; its exit code."""
        try:
            return self.running[name].wait(timeout=BUSY * within)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.name}: {name} has not ended within {BUSY * within:g} s") from None

    def kill_rest(self, name: str) -> None:
        """Whatever a command has started is gone."""
        self.send(name, SIGKILL, group=True)

    def pids(self) -> list[int]:
        """All processes in its namespace."""
        found = subprocess.run(["ip", "netns", "pids", self.net], capture_output=True, text=True, check=True).stdout
        return [int(word) for word in found.split()]


class Machines:
    """A server and sites; leaving the block ends their processes and takes the namespaces away, whatever happened."""

    def __init__(self, sites: Sequence[str]) -> None:
        self.handlers: dict[Signals, Any] = {}
        self.place = Path(tempfile.mkdtemp(prefix="equipoise-machines-"))
        self.place.chmod(0o755)
        self.logs = self.place / "logs"
        self.logs.mkdir()
        self.server = self._machine("server", 1)
        self.sites = {name: self._machine(name, 2 + i) for i, name in enumerate(sites)}

    def _machine(self, name: str, number: int) -> Machine:
        machine = Machine(name, number, f"eqfed-{os.getpid()}-{number}", self.place / name, self.logs)
        machine.folder.mkdir()
        machine.own()
        return machine

    @property
    def all(self) -> list[Machine]:
        """The server, and the sites."""
        return [self.server, *self.sites.values()]

    def __enter__(self) -> Machines:
        for number in (SIGTERM, SIGALRM):  # whoever ends the test, or the time that it has, leaves nothing behind
            self.handlers[number] = signal(number, self._leave)
        alarm(LONGEST)
        compileall.compile_dir(SOURCE, quiet=2)  # its users cannot, and each of their processes would do it again
        try:
            for machine in self.all:
                run("ip", "netns", "add", machine.net)
                run("ip", "-n", machine.net, "link", "set", "lo", "up")
            net = self.server.net
            run("ip", "-n", net, "link", "add", "br0", "type", "bridge")
            run("ip", "-n", net, "addr", "add", f"{self.server.address}/24", "dev", "br0")
            run("ip", "-n", net, "link", "set", "br0", "up")
            for site in self.sites.values():
                run(
                    "ip",
                    "-n",
                    net,
                    "link",
                    "add",
                    f"to{site.number}",
                    "type",
                    "veth",
                    "peer",
                    "name",
                    "eth0",
                    "netns",
                    site.net,
                )
                run("ip", "-n", net, "link", "set", f"to{site.number}", "master", "br0", "up")
                run("ip", "-n", site.net, "addr", "add", f"{site.address}/24", "dev", "eth0")
                run("ip", "-n", site.net, "link", "set", "eth0", "up")
        except BaseException:
            self._remove()
            raise
        return self

    def _leave(self, number: int, _: object) -> None:
        raise SystemExit(f"The test was ended by {Signals(number).name}.")

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            if error is not None:
                logs = sorted(self.logs.glob("*.log"))
                error.add_note("\n".join(f"── {log.name}\n{log.read_text(errors='replace')[-2500:]}" for log in logs))
        finally:
            self._remove()

    def _remove(self) -> None:
        alarm(0)
        for number, handler in self.handlers.items():
            signal(number, handler)
        for machine in self.all:
            for name in machine.running:
                machine.kill_rest(name)
        for machine in self.all:
            for process in machine.running.values():
                with suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=10)
            with suppress(subprocess.CalledProcessError):
                for pid in machine.pids():  # in a namespace that nobody but this test has
                    with suppress(ProcessLookupError):
                        os.kill(pid, SIGKILL)
            subprocess.run(["ip", "netns", "del", machine.net], capture_output=True, check=False)
        shutil.rmtree(self.place, ignore_errors=True)


def run(*command: str) -> None:
    """A command of this machine."""
    subprocess.run(command, check=True, capture_output=True)


def wait_until(
    condition: Callable[[], object], what: str, within: float, watched: Mapping[str, subprocess.Popen[bytes]]
) -> float:
    """Wait; the seconds that it took. A watched process that ends meanwhile is a failure."""
    began = time.monotonic()
    while not condition():
        for name, process in watched.items():
            assert process.poll() is None, f"{name} ended with {process.returncode} before {what}"
        assert time.monotonic() - began < BUSY * within, f"{what}: not within {BUSY * within:g} s"
        time.sleep(0.2)
    return time.monotonic() - began
