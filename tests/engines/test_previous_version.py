"""A node of the version before: it goes on in plain runs, and is refused by name, with the cure, in others.

The wheel of that commit is built from the repository's history; without the history, as in a source package, nothing is tested.
"""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'equipoise[flower]'")

from real_federation import BIN, Processes, free_ports

pytestmark = pytest.mark.federation
COMMIT = "ad1fb4b"
ROOT = Path(__file__).parents[2]
OLD, NEW = "client-2", ("client-0", "client-1", "client-3")
RISK = "risk=eq.risk.Superquantile(tail=0.5),"
SECURE = (
    "privacy=eq.privacy.SecureAggregation(), "
    "risk=eq.risk.Superquantile(tail=0.5, quantile=eq.privacy.SecureHistogram(bound=3.0, bins=16)),"
)


@pytest.fixture(scope="module")
def previous(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the wheel of the commit holds, unpacked: a folder for PYTHONPATH."""
    place = tmp_path_factory.mktemp("previous")
    source, wheels = place / "source", place / "wheels"
    source.mkdir()
    saved = subprocess.run(["git", "-C", str(ROOT), "archive", COMMIT], capture_output=True, check=False)
    if saved.returncode:
        pytest.skip(f"the history of the repository does not have {COMMIT}: {saved.stderr.decode().strip()[-200:]}")
    subprocess.run(["tar", "-x", "-C", str(source)], input=saved.stdout, check=True)
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(wheels), str(source)]
    built = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    if built.returncode:
        pytest.skip(f"no wheel of {COMMIT} can be built here: {built.stderr.strip()[-300:]}")
    (wheel,) = wheels.glob("*.whl")
    with zipfile.ZipFile(wheel) as packed:
        packed.extractall(place / "installed")
    return place / "installed"


class Mixed(Processes):
    """A SuperLink with TLS and authenticated nodes: three from their kits, and one of the previous version."""

    def __init__(self, folder: Path, previous: Path) -> None:
        super().__init__(folder)
        self.previous, self.app = previous, folder / "mixed-federation"
        self.environment["EQUIPOISE_ONNX"] = "0"

    def set_up(self) -> None:
        self.call("equipoise", "flower", "init", str(self.app))
        self.environment["FLWR_HOME"] = str(self.app / ".flwr")
        (port,) = free_ports(1)
        self.call("equipoise", "flower", "authority", "--host", "127.0.0.1", "--port", str(port), cwd=self.app)
        self.call("equipoise", "flower", "site", *NEW, OLD, cwd=self.app)
        self.start("superlink", ["equipoise", "flower", "superlink"], self.app)
        self.call("equipoise", "flower", "register", *NEW, OLD, cwd=self.app)
        address = self.address()
        for name in NEW:
            self.start(name, ["equipoise", "flower", "node", "--kit", "."], self.app / "sites" / name)
        now = dict(self.environment)
        self.environment["PYTHONPATH"] = str(self.previous)
        kit = self.app / "sites" / OLD
        where = self.call(sys.executable, "-c", "import equipoise; print(equipoise.__file__)").strip()
        assert Path(where).is_relative_to(self.previous), where
        old = [str(BIN / "equipoise"), "flower", "node", "--superlink", address, "--root-certificates", "ca.crt"]
        self.start(OLD, [*old, "--auth-supernode-private-key", "node.key", "--node-config", f"client-id='{OLD}'"], kit)
        self.environment = now
        for name in (*NEW, OLD):
            self.wait_for_log(name, "SuperNode ID", 300)

    def address(self) -> str:
        import tomllib

        return str(tomllib.loads((self.app / "sites" / OLD / "node.toml").read_text())["superlink"])

    def run(self, name: str, clients: int, within: float = 900, **more: object) -> str:
        """A run to its end; its log."""
        options = {"rounds": 2, "clients": clients, "clients-per-round": 0, "minimum": 2, "timeout": 60.0, "patience": 300.0}
        options |= {"folder": str(self.app / "runs" / name), **more}
        config = " ".join(f"{key}={json.dumps(value)}" for key, value in options.items())
        process = self.start(name, ["equipoise", "flower", "run", "--run-config", config], self.app, may_end=True)
        self.wait_until(lambda: process.poll() is not None, f"{name} ends", within)
        assert process.returncode == 0, self.log(name)[-3000:]
        return self.log(name)

    def trained(self, name: str) -> list[set[str]]:
        """Who took part in each round."""
        lines = (self.app / "runs" / name / "rounds.jsonl").read_text().splitlines()
        rounds = [event for event in map(json.loads, lines) if event["event"] == "round"]
        return [set(entry["bytes_by_client"]) - set(entry["missing"]) for entry in rounds]


def test_a_node_of_the_previous_version_works_or_is_refused_by_name_with_the_cure(previous, tmp_path):
    with Mixed(tmp_path, previous) as it:
        it.set_up()
        it.run("plain", 4)
        assert it.trained("plain") == [{*NEW, OLD}] * 2

        said = it.run("listed", 3, nodes="nodes.toml")
        assert it.trained("listed") == [set(NEW)] * 2
        assert f"{OLD} does not prove the key that it is listed with: install the server's version of Equipoise on it" in said

        task = it.app / "mixed_federation" / "task.py"
        text = task.read_text()
        assert text.count(RISK) == 1
        task.write_text(text.replace(RISK, SECURE))
        said = it.run("sums", 3)
        assert it.trained("sums") == [set(NEW)] * 2
        assert f"{OLD} has an earlier version of Equipoise" in said
        assert "Install the server's version on it" in said
