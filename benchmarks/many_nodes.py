"""Many warm nodes on one machine: seconds per round, memory, and what a dead and a hanging node cost.

    python benchmarks/many_nodes.py --nodes 20 --rounds 6

Real processes with TLS and authenticated nodes on 127.0.0.1, from the generated kits: a SuperLink, `equipoise flower node` per
kit, and `equipoise flower run`. A round has two questions (Δ-FL: losses, then updates). Memory is the proportional set size of
a node's processes together, the largest of looks every three seconds. In the last four rounds one node is killed and the app of
another one hangs. All ends with the script.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

BIN = Path(sys.executable).parent
HANG = '    import pathlib, time\n    time.sleep(3600.0 * pathlib.Path("hang").exists())\n'


def free_port() -> int:
    """A port of this machine on which nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def family(pid: int) -> list[int]:
    """A process and all that it has started."""
    children: dict[int, list[int]] = {}
    for place in Path("/proc").iterdir():
        if place.name.isdigit():
            with suppress(OSError):
                parent = int((place / "stat").read_text().rsplit(")", 1)[1].split()[1])
                children.setdefault(parent, []).append(int(place.name))
    todo, found = [pid], []
    while todo:
        found.append(todo.pop())
        todo += children.get(found[-1], [])
    return found


def proportional_megabytes(pid: int) -> float:
    """Memory of a process and its children; what several of them share counts once."""
    total = 0.0
    for each in family(pid):
        with suppress(OSError):
            for line in Path(f"/proc/{each}/smaps_rollup").read_text().splitlines():
                total += int(line.split()[1]) / 1024 if line.startswith("Pss:") else 0.0
    return total


def processor_seconds(pid: int) -> float:
    """What a process and all that it has started have computed so far, those included that have ended."""
    ticks = 0
    for each in family(pid):
        with suppress(OSError):
            ticks += sum(map(int, Path(f"/proc/{each}/stat").read_text().rsplit(")", 1)[1].split()[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


class Federation:
    """The operator's folder, and the processes."""

    def __init__(self, place: Path, nodes: int) -> None:
        self.app, self.names = place / "many-nodes", [f"client-{i}" for i in range(nodes)]
        self.environment = {
            **os.environ, "PATH": f"{BIN}:{os.environ['PATH']}", "FLWR_HOME": str(self.app / ".flwr"), "NO_COLOR": "1",
            "FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1",
            "EQUIPOISE_ONNX": "0",
        }  # fmt: skip
        self.environment.pop("EQUIPOISE_CONFIG", None)
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        self.memory: dict[str, float] = {}  # the most megabytes of each command so far

    def call(self, *command: str, cwd: Path | None = None) -> str:
        """A command to its end."""
        done = subprocess.run(
            command, env=self.environment, cwd=cwd or self.app, capture_output=True, text=True, timeout=120, check=False
        )
        if done.returncode:
            raise SystemExit(f"{' '.join(command)}: {done.returncode}\n{done.stdout}{done.stderr}")
        return done.stdout

    def start(self, name: str, *command: str, cwd: Path | None = None) -> None:
        """A command that goes on, with a log."""
        with (self.app / f"{name}.log").open("ab") as log:
            self.running[name] = subprocess.Popen(
                command, env=self.environment, cwd=cwd or self.app, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True,
            )  # fmt: skip

    def log(self, name: str) -> str:
        """What a command has said."""
        return (self.app / f"{name}.log").read_text(errors="replace")

    def set_up(self) -> None:
        """Folder, certificates, kits, SuperLink, registered keys."""
        self.app.parent.mkdir(exist_ok=True)
        self.call("equipoise", "flower", "init", str(self.app), cwd=self.app.parent)
        task, data = (self.app / "many_nodes" / name for name in ("task.py", "data.py"))
        model = "    return eq.models.Softmax(8, 3)"
        task.write_text(task.read_text().replace(model, HANG + model))
        four = 'CLIENTS = ("client-0", "client-1", "client-2", "client-3")'
        if four not in data.read_text():
            raise SystemExit("the template's clients are others than this script expects")
        data.write_text(data.read_text().replace(four, f"CLIENTS = tuple({self.names!r})"))
        self.call("equipoise", "flower", "authority", "--host", "127.0.0.1", "--port", str(free_port()))
        self.call("equipoise", "flower", "site", *self.names)
        self.start("superlink", "equipoise", "flower", "superlink")
        self.call("equipoise", "flower", "register", *self.names)

    def rounds(self) -> list[dict[str, Any]]:
        """The rounds that have ended."""
        file = self.app / "runs" / "federation" / "rounds.jsonl"
        lines = file.read_text().splitlines() if file.exists() else []
        events = [json.loads(line) for line in lines if line.endswith("}")]
        return [event for event in events if event["event"] == "round"]

    def await_rounds(self, count: int, seconds: float) -> None:
        """Wait for so many rounds."""
        end = time.monotonic() + seconds
        while len(self.rounds()) < count and self.running["run"].poll() is None:
            if time.monotonic() > end:
                raise SystemExit(f"{len(self.rounds())} rounds of {count}\n{self.log('run')[-3000:]}")
            time.sleep(0.5)

    def computed(self) -> tuple[float, float]:
        """Processor seconds so far: of the SuperLink with the run, and of all nodes."""
        return processor_seconds(self.running["superlink"].pid), sum(
            processor_seconds(self.running[name].pid) for name in self.names
        )

    def look_at_memory(self, count: int, seconds: float) -> None:
        """Note the most memory of nodes and SuperLink until there are so many rounds."""
        end = time.monotonic() + seconds
        while len(self.rounds()) < count and time.monotonic() < end and self.running["run"].poll() is None:
            for name in ("superlink", *self.names):
                self.memory[name] = max(self.memory.get(name, 0.0), proportional_megabytes(self.running[name].pid))
            time.sleep(3.0)

    def end(self) -> None:
        """End everything, by its id."""
        for process in self.running.values():
            with suppress(ProcessLookupError):
                process.terminate()
        end = time.monotonic() + 15
        for process in self.running.values():
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=max(0.1, end - time.monotonic()))
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=6, help="without faults; six more follow")
    parser.add_argument("--timeout", type=float, default=30.0)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that all is ended
    place = Path(tempfile.mkdtemp(prefix="equipoise-many-nodes-"))
    it = Federation(place, options.nodes)
    try:
        measure(it, options.rounds, options.timeout)
    finally:
        it.end()
        shutil.rmtree(place, ignore_errors=True)


def measure(it: Federation, rounds: int, timeout: float) -> None:
    """Connect all nodes, run, disturb two."""
    it.set_up()
    began = time.monotonic()
    for name in it.names:
        it.start(name, "equipoise", "flower", "node", "--kit", ".", cwd=it.app / "sites" / name)
    config = f'nodes="nodes.toml" clients-per-round={len(it.names)} minimum={len(it.names) * 3 // 4} timeout={timeout}'
    it.start("run", "equipoise", "flower", "run", "--run-config", f"{config} rounds={rounds + 6}")
    it.await_rounds(1, 600)
    print(f"first round {time.monotonic() - began:.0f} s after the start of the nodes", flush=True)
    before = it.computed()
    it.await_rounds(rounds, 60.0 * rounds)
    link, nodes = ((now - then) / (rounds - 1) for now, then in zip(it.computed(), before, strict=True))
    taken = [entry["seconds"] for entry in it.rounds()[:rounds]]
    print(
        f"rounds of two questions: median {statistics.median(taken):.1f} s ({', '.join(f'{each:.1f}' for each in taken)}); "
        f"processor seconds of a round: {link:.1f} of SuperLink and run, {nodes:.1f} of all nodes",
        flush=True,
    )
    it.look_at_memory(rounds + 2, 120.0)  # rounds of its own, as looking takes time
    memory = [it.memory[name] for name in it.names]
    print(f"memory of a node: median {statistics.median(memory):.0f} MB, at most {max(memory):.0f} MB; ", end="")
    print(f"SuperLink with the run: {it.memory['superlink']:.0f} MB", flush=True)
    dead, hanging = it.names[1], it.names[2]
    os.killpg(it.running[dead].pid, signal.SIGKILL)
    (it.app / "sites" / hanging / "hang").touch()
    it.await_rounds(rounds + 6, 60 + 6 * timeout)
    for entry in it.rounds()[rounds + 2 :]:
        print(
            f"one dead, one hanging (timeout {timeout:g} s): {entry['seconds']:.1f} s, without {entry['missing']}", flush=True
        )
    with suppress(subprocess.TimeoutExpired):
        it.running["run"].wait(timeout=90)
    print(f"exit code of the run: {it.running['run'].poll()}")


if __name__ == "__main__":
    main()
