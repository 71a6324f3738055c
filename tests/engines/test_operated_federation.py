"""A federation as it is operated: a server and four sites, each a machine of its own, from the generated files.

Every command of the generated units and of the Compose file is run here, as its own user in its own network namespace.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import shutil
import signal
import time
from itertools import pairwise
from pathlib import Path

import pytest
import yaml

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'equipoise[flower]'")

from site_machines import BIN, Machine, Machines, wait_until, why_not

pytestmark = pytest.mark.federation
SITES = ("client-0", "client-1", "client-2", "client-3")
PORT = 47090
TIMEOUT = 20.0  # seconds that a node has for an answer
BARE = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin"  # the path of a unit's processes
METRICS = "curl -s http://127.0.0.1:9464/metrics"
HANG = '    import pathlib, time\n    time.sleep(3600.0 * pathlib.Path("hang").exists())\n'


class Operation:
    """What the operator and the sites do, in the words of the guide."""

    def __init__(self, machines: Machines) -> None:
        self.machines, self.server, self.sites = machines, machines.server, machines.sites
        self.home = self.server.folder / "my-federation"
        self.server.more["FLWR_HOME"] = str(self.home / ".flwr")
        self.ran: list[str] = []  # commands, as units and Compose file have them
        self.began = time.monotonic()

    def note(self, what: str) -> None:
        """Where the test is, for whoever watches it or looks for what took long."""
        print(f"{time.monotonic() - self.began:6.1f} s  {what}", flush=True)

    # ------------------------------------------------------------------------------------------------------------ the operator

    def operate(self, command: str, **options: object) -> str:
        """A command of the operator, in the folder of the app."""
        self.ran.append(command)
        return self.server.call(command, cwd=self.home, **options)  # type: ignore[arg-type]

    def start(self, name: str, command: str) -> None:
        """A command of the operator that goes on."""
        self.ran.append(command)
        self.server.start(name, f"env -C {self.home} {command}")

    def start_unit(self, name: str, unit: str) -> None:
        """Start what a unit of the server starts, as systemd does: by its path, without a shell's environment."""
        command = unit_command(self.home / "deploy" / unit)
        self.ran.append(command)
        self.server.start(name, f"env -C {self.home} {by_path(command)}", PATH=BARE)

    def set_up(self) -> None:
        """The operator's folder, and a kit at each site."""
        self.server.call("equipoise flower init my-federation")
        task = self.home / "my_federation" / "task.py"
        text = task.read_text(encoding="utf-8")
        assert text.count("    return eq.models.Softmax(8, 3)") == 1
        task.write_text(text.replace("    return eq.models.Softmax(8, 3)", f"{HANG}    return eq.models.Softmax(8, 3)"))
        self.operate(f"equipoise flower authority --host {self.server.address} --port {PORT}")
        self.operate(f"equipoise flower site {' '.join(SITES)}")
        for name, site in self.sites.items():
            self.hand_over(name, site)

    def hand_over(self, name: str, site: Machine) -> None:
        """The kit goes to its site, where only its user reads it."""
        shutil.copytree(self.home / "sites" / name, site.folder, dirs_exist_ok=True)
        site.own()

    def superlink(self) -> None:
        """Start the SuperLink as its unit does, and wait until it answers."""
        self.start_unit("superlink", "equipoise-superlink.service")
        watched = {"superlink": self.server.running["superlink"]}
        wait_until(lambda: self.asks("127.0.0.1", PORT + 1, "/health") == 200, "the SuperLink answers", 90, watched)

    def proxy(self) -> None:
        """Start the proxy as its unit does, and see that it lets nodes in and nobody's commands."""
        self.start_unit("proxy", "equipoise-proxy.service")
        watched = {"proxy": self.server.running["proxy"]}
        wait_until(lambda: self.asks(self.server.address, PORT, "/health") == 404, "the proxy answers", 20, watched)
        assert self.asks(self.server.address, PORT, "/v1/control/list-runs") == 404
        assert self.asks("127.0.0.1", PORT + 1, "/v1/control/list-runs") != 404
        assert self.asks(self.server.address, PORT, "/v1/fleet/pull-messages") == self.asks(
            "127.0.0.1", PORT + 1, "/v1/fleet/pull-messages"
        )

    def asks(self, host: str, port: int, path: str) -> int:
        """The status of an HTTPS answer on the server's machine; 0 without one."""
        ask = f"curl -s -o /dev/null -w '%{{http_code}}' --cacert certificates/ca.crt https://{host}:{port}{path}"
        said = self.server.call(ask, cwd=self.home, expected=None)
        return int(said[-3:])

    def nodes(self) -> list[dict[str, object]]:
        """The nodes that the SuperLink lets in: name, state, Flower's id, whether the key is listed."""
        return json.loads(self.operate("equipoise flower nodes --json"))

    # --------------------------------------------------------------------------------------------------------------- the sites

    def node(self, name: str, **more: str) -> None:
        """Start a site's node, as its unit does."""
        site = self.sites[name]
        command = unit_command(site.folder / "equipoise-node.service")
        self.ran.append(command)
        site.start(name, by_path(command), PATH=BARE, **more)

    # ----------------------------------------------------------------------------------------------------------------- the run

    @property
    def folder(self) -> Path:
        return self.home / "runs" / "federation"

    def train(self, rounds: int = 1000) -> None:
        """Begin the run, or go on with it."""
        config = f'nodes="nodes.toml" rounds={rounds} clients=3 clients-per-round=0 minimum=2 timeout={TIMEOUT} pause=1.0'
        self.start("run", f"equipoise flower run --run-config '{config}'")

    def rounds(self) -> list[dict[str, object]]:
        file = self.folder / "rounds.jsonl"
        lines = file.read_text().splitlines() if file.exists() else []
        events = [json.loads(line) for line in lines if line.endswith("}")]
        return [event for event in events if event["event"] == "round"]

    def status(self) -> dict[str, object]:
        return json.loads((self.folder / "status.json").read_text())

    def takes_part(self, *names: str) -> bool:
        """Whether the last round had all of these clients in it."""
        last = self.rounds()[-1:]
        return bool(last) and all(name in last[0]["bytes_by_client"] and name not in last[0]["missing"] for name in names)

    def await_rounds(self, more: int, within: float = 90) -> list[dict[str, object]]:
        """The next rounds."""
        before = len(self.rounds())
        wait_until(lambda: len(self.rounds()) >= before + more, f"{more} rounds more", within, self.watched)
        return self.rounds()[before:]

    def await_clients(self, *names: str, within: float = 120) -> float:
        """Wait until these take part."""
        return wait_until(lambda: self.takes_part(*names), f"{', '.join(names)} take part", within, self.watched)

    @property
    def watched(self):
        return {name: self.server.running[name] for name in ("superlink", "run")}


def unit_command(unit: Path) -> str:
    """What a unit starts; the program is found in the path, as a test's is installed elsewhere."""
    return re.search(r"^ExecStart=\S*/(?=equipoise |nginx )(.*)$", unit.read_text(), re.M)[1]  # type: ignore[index]


def by_path(command: str) -> str:
    """A command whose program is named by its path, where it is one of ours."""
    return f"{BIN}/{command}" if command.startswith("equipoise ") else command


def compose_commands(file: Path) -> list[str]:
    services = yaml.safe_load(file.read_text())["services"]
    return [shlex.join(service["command"]) for service in services.values() if "command" in service]


def test_a_federation_is_operated():
    """From an empty folder to models at the sites, with everything that happens to a federation of months on the way."""
    if reason := why_not() or next((f"{name} is not installed" for name in ("nginx", "curl") if not shutil.which(name)), None):
        pytest.skip(reason)
    with Machines(SITES) as machines:
        it = Operation(machines)
        sites_are_set_up_and_check(it)
        three_begin_and_are_paused(it)
        a_fourth_joins(it)
        one_is_killed_and_one_hangs(it)
        one_is_upgraded_and_one_gets_a_new_key(it)
        the_server_is_killed(it)
        the_superlink_is_restarted(it, 1.0)
        the_superlink_is_restarted(it, 10.0)
        the_run_ends(it)
        sites_fetch_the_model(it)
        all_is_saved_and_ends(it)
        every_generated_command_was_run(it)


def sites_are_set_up_and_check(it: Operation) -> None:
    it.set_up()
    it.superlink()
    it.proxy()
    it.note("SuperLink and proxy are up")
    for site in it.sites.values():
        site.start("check", "equipoise flower check --kit .")
    for site in it.sites.values():
        assert site.await_end("check", 120) == 0, site.log("check")
        assert site.log("check").count("READY.") >= 1
    said = it.operate(f"equipoise flower register {' '.join(SITES)}")
    assert [line.split()[0] for line in said.splitlines() if "is let in now" in line] == list(SITES)
    it.note("four sites are READY")
    for name in SITES[:3]:
        it.node(name)


def three_begin_and_are_paused(it: Operation) -> None:
    it.train()
    wait_until(lambda: len(it.rounds()) >= 2, "two rounds", 150, it.watched)
    it.note("three train")
    it.operate("equipoise flower pause runs/federation")
    wait_until(lambda: it.status()["state"] == "paused", "the run is paused", 60, it.watched)
    before = len(it.rounds())
    time.sleep(4)
    assert len(it.rounds()) == before
    said = it.operate("equipoise flower status runs/federation", expected=None)
    assert "paused" in said
    it.operate("equipoise flower resume runs/federation")
    it.await_rounds(1)
    it.note("paused and resumed")


def a_fourth_joins(it: Operation) -> None:
    it.node(SITES[3])
    it.await_clients(*SITES)
    assert f"{SITES[3]} joins the run before round" in it.server.log("run")
    it.note("the fourth has joined")


def one_is_killed_and_one_hangs(it: Operation) -> None:
    """A node is killed as by a power cut; while it is away, another one's app hangs. Both come back by themselves."""
    first, second = it.sites[SITES[0]], it.sites[SITES[1]]
    first.end(SITES[0], signal.SIGKILL, group=True)
    (second.folder / "hang").touch()
    found = it.await_rounds(4, within=8 * TIMEOUT)
    why = [str(entry["missing"].get(SITES[1])) for entry in found]  # type: ignore[attr-defined]
    assert any(reason.startswith("did not answer within") for reason in why), why
    assert not any(all(r.startswith("did not answer") for r in two) for two in pairwise(why)), why  # one timeout, then it rests
    assert all(SITES[0] in entry["missing"] for entry in found[1:]), found
    it.note(f"one killed, one hangs: rounds of {', '.join(format(entry['seconds'], '.1f') for entry in found)} s")
    it.node(SITES[0])
    (second.folder / "hang").unlink()
    took = it.await_clients(*SITES, within=150)
    it.note(f"both are back after {took:.0f} s")


def one_is_upgraded_and_one_gets_a_new_key(it: Operation) -> None:
    """A node ends, is begun again with another version, and goes on; another one's key is replaced."""
    third, fourth = it.sites[SITES[2]], it.sites[SITES[3]]
    third.send(SITES[2], signal.SIGINT, group=True)  # Ctrl-C in a shell
    assert third.await_end(SITES[2], 40) == 0
    newer = third.folder / "newer"
    newer.mkdir()
    (newer / "sitecustomize.py").write_text("import equipoise.core.version\nequipoise.core.version.VERSION = '9.9.9'\n")
    third.own()
    third.start(SITES[2], f"env PYTHONPATH={newer}:$PYTHONPATH equipoise flower node --kit .")

    (before,) = (node["id"] for node in it.nodes() if node["name"] == SITES[3])
    it.operate(f"equipoise flower site {SITES[3]} --renew")
    assert before not in it.operate(f"equipoise flower register {SITES[3]}")
    assert fourth.end(SITES[3]) == 0
    it.hand_over(SITES[3], fourth)
    it.node(SITES[3])
    it.await_rounds(1)
    took = it.await_clients(*SITES, within=120)
    assert it.status()["clients"][SITES[2]]["versions"]["equipoise"] == "9.9.9"
    assert f"{SITES[3]}: let in no longer: {before}" in it.operate(f"equipoise flower unregister {SITES[3]}")
    assert {node["name"]: (node["state"], node["listed"]) for node in it.nodes()} == dict.fromkeys(SITES, ("online", True))
    it.note(f"one upgraded, one with a new key, after {took:.0f} s")


def the_server_is_killed(it: Operation) -> None:
    """The process of the run alone: its command says so, and the same command goes on."""
    pid = int(it.status()["pid"])  # type: ignore[call-overload]
    assert pid in it.server.pids()
    os.kill(pid, signal.SIGKILL)
    assert it.server.await_end("run", 150) != 0
    assert it.operate("equipoise flower status runs/federation", expected=2)
    before = len(it.rounds())
    it.train()
    it.await_rounds(2, within=150)
    assert [entry["round"] for entry in it.rounds()] == list(range(len(it.rounds())))
    it.await_clients(*SITES)
    it.note(f"the server was killed after round {before}, and goes on")


def the_superlink_is_restarted(it: Operation, seconds: float) -> None:
    """SIGKILL in the middle of a round. The nodes come back by themselves; the run's command is given again."""
    it.await_rounds(1)
    it.server.end("superlink", signal.SIGKILL, group=True)
    time.sleep(seconds)
    it.superlink()
    assert it.server.await_end("run", 150) != 0
    again = time.monotonic()
    it.train()
    it.await_rounds(1, within=180)
    it.await_clients(*SITES, within=180)
    for site, name in ((it.sites[name], name) for name in SITES):
        assert site.running[name].poll() is None
    it.note(f"SuperLink away for {seconds:g} s: all take part again {time.monotonic() - again:.0f} s after it is back")


def the_run_ends(it: Operation) -> None:
    it.operate("equipoise flower stop runs/federation")
    assert it.server.await_end("run", 90) == 1
    it.operate("equipoise flower status runs/federation", expected=3)
    rounds = len(it.rounds()) + 2
    it.operate(f"equipoise flower extend runs/federation --rounds {rounds}")
    it.train(rounds=rounds - 1)
    assert it.server.await_end("run", 150) == 0, it.server.log("run")[-2000:]
    said = it.operate("equipoise flower status runs/federation", expected=None)  # 4 with an alert: the data are made up
    assert f"finished, round {rounds} of {rounds}" in said
    assert len(it.rounds()) == rounds
    it.note("stopped, extended, begun again and finished")


def sites_fetch_the_model(it: Operation) -> None:
    it.operate("equipoise flower publish runs/federation --out published")
    it.server.start("web", f"python -m http.server --bind {it.server.address} --directory {it.home}/published 8000")
    site = it.sites[SITES[0]]
    wait_until(
        lambda: site.call(f"curl -s http://{it.server.address}:8000/manifest.json", expected=None), "the web server", 30, {}
    )
    said = site.call(f"equipoise flower fetch http://{it.server.address}:8000 --kit .")
    assert "federation is in model. Nothing was sent." in said  # one model, so that there is nothing to choose from
    kept, choice = (site.folder / "model" / name for name in ("model.safetensors", "choice.json"))
    assert kept.read_bytes() == (it.folder / "model.safetensors").read_bytes()
    assert json.loads(choice.read_text())["sha256"] == hashlib.sha256(kept.read_bytes()).hexdigest()
    asked = [line for line in it.server.log("web").splitlines() if site.address in line]
    assert len(asked) == 3
    assert all('"GET /' in line for line in asked)
    it.server.end("web")
    it.note("a site has fetched the model")


def all_is_saved_and_ends(it: Operation) -> None:
    it.operate("equipoise flower backup . ../backup.tar.gz")
    it.operate("equipoise flower restore ../backup.tar.gz ../restored")
    restored = it.server.folder / "restored"
    for name in ("certificates/ca.key", "nodes.toml", "runs/federation/model.safetensors"):
        assert (restored / name).read_bytes() == (it.home / name).read_bytes()
    assert (it.home / "superlink.db").stat().st_mode & 0o077 == 0
    shown = [
        unit_command(it.home / "deploy" / "equipoise-status.service"),
        *compose_commands(it.home / "deploy" / "compose.yaml"),
    ]
    for command in (each for each in shown if " status " in each):
        it.start("status", command)
        wait_until(lambda: "equipoise_" in it.server.call(METRICS, expected=None), "metrics", 60, {})
        it.server.end("status")
    for name, site in it.sites.items():
        site.send(name, signal.SIGTERM, group=False)
    for name, site in it.sites.items():
        assert site.await_end(name, 40) == 0
    it.server.end("proxy")
    it.server.end("superlink")
    wait_until(lambda: not any(machine.pids() for machine in it.machines.all), "all processes end", 20, {})
    it.note("all has ended")


def every_generated_command_was_run(it: Operation) -> None:
    deploy = it.home / "deploy"
    units = [*deploy.glob("*.service"), *(site.folder / "equipoise-node.service" for site in it.sites.values())]
    assert len(units) == 7
    generated = {unit_command(unit) for unit in units} | set(compose_commands(deploy / "compose.yaml"))
    missing = {tuple(shlex.split(each)) for each in generated} - {tuple(shlex.split(each)) for each in it.ran}
    assert not missing
