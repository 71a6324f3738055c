"""A private federation of real processes of which one is killed: what its nodes recorded of all messages, and its ledger."""

from __future__ import annotations

import base64
import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

from killed_federation import DELTA, Campaign
from real_federation import Federation

from equipoise.experiment.run_files import RunFolder

EXAMPLE = Path(__file__).parents[2] / "examples" / "flower"
CLIENTS = 4
OF_EVALUATION = b'"sum.scores '  # in the line of a message
TASK = f"""
import torch
import equipoise as eq

torch.set_num_threads(1)
algorithm = eq.Algorithm(
    risk=eq.risk.Superquantile(0.5, quantile=eq.privacy.PrivateQuantile(bound=2.0, bins=2)), sampler=eq.sampling.Uniform(),
    solver=eq.solvers.SGD(lr=0.1, batch_size=10, epochs=1),
    privacy=eq.privacy.DifferentialPrivacy(
        None, {DELTA}, 1.0, noise="distributed", noise_multiplier=1.0, method="rdp", fewest=3),
)


def net():
    return eq.models.Softmax(64, 10)
"""
NODE = """
import base64, json, os
from flwr.clientapp import ClientApp
from equipoise.engines.flower import client_app
from equipoise.engines.flower.transport.messages import expanded
from .data import load_data
from .task import net

inner = client_app(model=net, load_data=load_data, keep={keep!r})


def note(kind, context, action, message):
    client, values, tensors = context.node_config["client-id"], None, {{}}
    if message.has_content() and "call" in message.content:
        content = expanded(message.content)
        values = content["call"]["values"]
        tensors = {{n: base64.b64encode(a.data).decode() for n, a in content["tensors"].items()}}
    line = json.dumps({{"kind": kind, "client": client, "action": action, "values": values, "tensors": tensors}}) + "\\n"
    file = os.open({messages!r}, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(file, line.encode())
    os.close(file)


class Recorded(ClientApp):
    def __call__(self, message, context):
        action = message.metadata.message_type
        note("request", context, action, message)
        reply = inner(message, context)
        note("reply", context, action, reply)  # before it leaves: whoever has the messages has at most this
        return reply


app = Recorded()
"""


class RecordedRun(Campaign):
    """A run of real processes, with all messages that its nodes got and were about to send."""

    def __init__(self, folder: Path, rounds: int = 3) -> None:
        self.folder, self.rounds, self.app = folder, rounds, folder / "app"
        shutil.copytree(EXAMPLE, self.app, ignore=shutil.ignore_patterns("runs", ".flwr", "__pycache__"))
        package = self.app / "digits_federation"
        (package / "task.py").write_text(TASK)
        where = {"keep": str(folder / "nodes"), "messages": str(self.messages)}
        (package / "client_app.py").write_text(NODE.format(**where))

    @property
    def messages(self) -> Path:
        return self.folder / "messages.jsonl"

    def count(self, part: bytes = b"") -> int:
        """How many messages nodes have noted; those alone that hold some bytes, where they are named."""
        lines = self.messages.read_bytes().split(b"\n")[:-1] if self.messages.exists() else []
        return sum(part in line for line in lines)

    @property
    def grid(self):  # type: ignore[override]
        """The messages in the form that the checks of a federation in memory read."""
        sent, replies = [], []
        for line in self.messages.read_text().splitlines():
            said = json.loads(line)
            arrays = {name: SimpleNamespace(data=base64.b64decode(data)) for name, data in said["tensors"].items()}
            content = {"call": {"values": said["values"]}, "tensors": arrays}
            message = SimpleNamespace(
                content=content, metadata=SimpleNamespace(message_type=said["action"]),
                has_content=lambda values=said["values"]: values is not None,
            )  # fmt: skip
            if said["kind"] == "request":
                sent.append((said["client"], message))
            else:
                replies.append((said["client"], said["action"], message))
        return SimpleNamespace(sent=sent, replies=replies)

    @property
    def finished(self) -> bool:
        place = RunFolder(self.folder / "run")
        return place.config.exists() and place.finished


def kill_real(folder: Path, moment: int, victim: str, *, evaluating: bool = False, timeout: float = 400) -> RecordedRun:
    """A run whose server ("server") or a node ("node-2") is killed by SIGKILL once its nodes have noted `moment` messages.

    With `evaluating` these are messages of the evaluation after the last round. A node is started anew at once. The command of
    the run is given again until the run has ended. A federation in which nobody gets or sends a message for `timeout` seconds
    hangs; one that is merely slow, on a busy machine, does not.
    """
    run = RecordedRun(folder)
    options = {
        "rounds": run.rounds, "clients_per_round": CLIENTS, "clients": CLIENTS, "minimum": 3, "timeout": 20.0, "pause": 1.0,
        "patience": 120.0, "folder": str(folder / "run"),
    }  # fmt: skip
    configs = [f'client-id="client-{i}"' for i in range(CLIENTS)]
    with Federation(folder / "logs", configs) as federation:
        federation.submit(run.app, **options)
        part = OF_EVALUATION if evaluating else b""
        wait_while_messages_come(
            federation, run, lambda: run.count(part) >= moment or run.finished, f"{moment} messages", timeout
        )
        if run.finished:
            run.check()
            return run
        if victim == "server":
            found = server_processes(federation.running["superlink"].pid)
            assert found, "the server is not there"
            for process in found:
                os.kill(process, signal.SIGKILL)
        else:
            command = federation.running[victim].args
            federation.kill(victim)
            federation.start(victim, command, may_end=True)  # type: ignore[arg-type]
        for _ in range(4):
            if victim == "server":  # nobody tells the command that its run is gone
                federation.kill("run")
                federation.submit(run.app, **options)
                victim = ""
            over = lambda: run.finished or federation.running["run"].poll() is not None  # noqa: E731
            wait_while_messages_come(federation, run, over, "the run ends", timeout)
            run.check()
            if run.finished:
                break
            federation.submit(run.app, **options)
    assert run.finished, "the run did not end"
    return run


def wait_while_messages_come(
    federation: Federation, run: RecordedRun, condition: Callable[[], bool], what: str, timeout: float
) -> None:
    """Wait until a condition holds; it is a failure if no message comes or goes for `timeout` seconds."""
    while not condition():
        seen = run.count()
        federation.wait_until(lambda now=seen: condition() or run.count() > now, f"{what}: message {seen + 1}", timeout)


def server_processes(superlink: int) -> list[int]:
    """The processes of ServerApps that a SuperLink, or what it has started, has started."""
    parents, commands = {}, {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                state, parent = (entry / "stat").read_text().rsplit(")", 1)[1].split()[:2]
                commands[int(entry.name)] = (entry / "cmdline").read_bytes() if state != "Z" else b""
            except OSError:
                continue
            parents[int(entry.name)] = int(parent)

    def below(process: int) -> bool:
        while process in parents and process != superlink:
            process = parents[process]
        return process == superlink

    return [process for process, command in commands.items() if b"flwr-serverapp" in command and below(process)]
