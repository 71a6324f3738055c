"""Flower as it is deployed: SuperLink and SuperNodes as processes, the apps that we write for users, and a node that dies."""

import fcntl
import json
import os
import re
import select
import shutil
import tempfile
import time
import tomllib
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import equipoise as eq

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'equipoise[flower]'")

from fake_grid import FakeGrid, run_app
from real_federation import Federation, Processes, free_ports

from equipoise.cli.flower_commands import app as flower_commands
from equipoise.engines.flower.apps import warm_node
from equipoise.engines.flower.apps.node_policy import read_policy
from equipoise.engines.flower.apps.template import project_name, render_app, write_app
from equipoise.errors import ConfigError, InvalidParameter

EXAMPLE = Path(__file__).parents[2] / "examples" / "flower"
CLIENTS = [f"client-{i}" for i in range(4)]
delta_fl = eq.Algorithm(
    risk=eq.risk.Superquantile(tail=0.5), solver=eq.solvers.SGD(lr=0.1, batch_size=10, epochs=1), weights="uniform"
)


@pytest.fixture
def alone():
    """One federation at a time on this machine: each has a dozen processes, and the example's README names a port."""
    with (Path(tempfile.gettempdir()) / "equipoise-federation.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def shell_blocks(text: str) -> list[str]:
    return re.findall(r"^```bash\n(.*?)^```", text, flags=re.M | re.S)


def copy_of_example(folder: Path) -> Path:
    made_by_runs = shutil.ignore_patterns("runs", "certificates", "keys", ".flwr", "*.log", "__pycache__", "*.html")
    return Path(shutil.copytree(EXAMPLE, folder / "app", ignore=made_by_runs))


def rewrite(file: Path, old: str, new: str) -> None:
    text = file.read_text(encoding="utf-8")
    assert text.count(old) == 1
    file.write_text(text.replace(old, new), encoding="utf-8")


def digits() -> eq.data.FederatedData:
    return eq.data.digits(clients=4, split_by="examples", seed=0)


def parameters(folder: Path, model: torch.nn.Module | None = None) -> torch.Tensor:
    """What a run folder's model holds, as one vector in the order of the module."""
    from safetensors.torch import load_file

    saved = load_file(folder / "model.safetensors")
    return torch.cat([saved[name].flatten() for name, _ in (model or eq.models.Softmax(64, 10)).named_parameters()])


def in_simulation(algorithm: eq.Algorithm, rounds: int, clients: int = 4) -> eq.Result:
    data = digits()
    first = eq.data.FederatedData(data.train.take(range(clients)), test=data.test.take(range(clients)), classes=10)
    model = eq.models.Softmax(64, 10)
    return eq.train(model, first, algorithm, rounds=rounds, clients_per_round=clients, seed=0, engine="loop", progress=False)


def reports(folder: Path) -> list[dict[str, object]]:
    events = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
    return [event for event in events if event["event"] == "round"]


# ------------------------------------------------------------------------------------------------------------ the app we write


def test_init_writes_the_example_but_for_its_data(tmp_path):
    """One text for template and example: what the example's test proves holds for what users get."""
    texts = render_app("digits-federation")
    own = {"README.md", "digits_federation/data.py", "digits_federation/task.py"}
    for path in texts.keys() - own:
        assert (EXAMPLE / path).read_text(encoding="utf-8") == texts[path], path
    task = texts["digits_federation/task.py"].replace("Softmax(8, 3)", "Softmax(64, 10)")
    assert (EXAMPLE / "digits_federation/task.py").read_text(encoding="utf-8") == task
    commands = shell_blocks((EXAMPLE / "README.md").read_text(encoding="utf-8").replace(" --preload sklearn.datasets", ""))
    assert commands == shell_blocks(texts["README.md"])

    done = CliRunner().invoke(flower_commands, ["init", str(tmp_path / "my-federation")])
    assert done.exit_code == 0, done.output
    assert {str(p.relative_to(tmp_path / "my-federation")) for p in (tmp_path / "my-federation").rglob("*") if p.is_file()} == {
        path.replace("digits_federation", "my_federation") for path in texts
    }


@pytest.mark.filterwarnings("ignore:GitWildMatchPattern:DeprecationWarning")  # Flower's
def test_what_init_writes_is_an_app_to_flower_and_runs(tmp_path, monkeypatch):
    """Flower's own check and bundle; then server and nodes in one process, over Flower's messages."""
    from flwr.cli.build import build_fab_from_disk
    from flwr.cli.config_utils import load_and_validate
    from flwr.common.config import get_fab_config

    folder = tmp_path / "made-federation"
    write_app(folder)
    config, notes = load_and_validate(folder / "pyproject.toml")
    assert not notes
    (folder / "keys").mkdir()
    (folder / "keys" / "secret.py").write_text("# as a user's certificates are: not for others")
    bundle = build_fab_from_disk(folder)
    assert get_fab_config(bundle)["tool"]["flwr"]["app"]["components"]["serverapp"] == "made_federation.server_app:app"
    assert b"keys/secret.py" not in bundle
    assert b"made_federation/data.py" in bundle

    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.chdir(tmp_path)
    from made_federation import client_app, data, server_app, task

    settings = config["tool"]["flwr"]["app"]["config"]
    assert settings["clients-per-round"] == len(data.CLIENTS)
    client_app.app.own(read_policy(folder / "policy.toml"))  # as `equipoise flower node` does with --policy
    run_app(server_app.app, FakeGrid(dict.fromkeys(data.CLIENTS, client_app.app)), **settings)
    result = eq.train(
        task.net(), data.simulated(), task.algorithm, rounds=settings["rounds"], clients_per_round=4, seed=0, engine="loop",
        progress=False,
    )  # fmt: skip
    torch.testing.assert_close(parameters(tmp_path / settings["folder"], task.net()), result.params, rtol=1e-6, atol=1e-7)
    assert (tmp_path / settings["folder"] / "report.html").exists()


def test_init_refuses_what_would_not_work(tmp_path):
    assert project_name(Path("a/My federation_2")) == "my-federation-2"
    for name in ("9lives", "class", "torch", "é"):
        with pytest.raises(InvalidParameter):
            project_name(tmp_path / name)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("keep")
    with pytest.raises(ConfigError, match="not empty"):
        write_app(tmp_path / "full")
    assert [p.name for p in (tmp_path / "full").iterdir()] == ["mine.txt"]


def test_node_passes_on_all_but_what_it_decides_itself():
    read = warm_node.NodeAddress.read
    found = read(["--superlink", "a:1", "--port", "9999", "--node-config", "client-id='a' beds=12", "--insecure"])
    assert (found.host, found.port) == ("127.0.0.1", 9999)
    assert found.others == ["--superlink", "a:1", "--insecure", "--node-config", "client-id='a' beds=12"]
    assert found.node_config == {"client-id": "a", "beds": 12}
    assert read(["--insecure"]).port > 1023
    with pytest.raises(InvalidParameter, match="flower-supernode"):
        read(["--isolation", "subprocess"])
    with pytest.raises(ConfigError, match="no_such_module"):
        warm_node._load("no_such_module")


def test_pauses_are_short_after_work_and_long_when_nothing_comes(monkeypatch):
    slept = []
    monkeypatch.setattr(warm_node.time, "sleep", slept.append)
    pauses = warm_node.Pauses(0.2, 3.0)
    for _ in range(12):
        pauses.sleep(3.0)
    assert slept[:3] == pytest.approx([0.2, 0.3, 0.45])
    assert slept[-1] == 3.0
    pauses.sleep(0.5)  # Flower waits for an app's answer: there was a message
    pauses.sleep(3.0)
    assert slept[-2:] == [0.05, 0.2]


def test_a_loop_that_has_work_ends_the_pause_of_the_other():
    """The SuperNode tells the SuperExec when a message is there as a whole, which is in its next pause."""
    reading, writing = os.pipe()
    for end in (reading, writing):
        os.set_blocking(end, False)
    node, other = warm_node.Pauses(0.2, 3.0, tells=writing), warm_node.Pauses(30.0, 30.0, told=reading)
    node.sleep(0.01)
    assert not select.select([reading], [], [], 0)[0]  # nothing was there
    node.has_work()
    assert not select.select([reading], [], [], 0)[0]  # not yet as a whole
    node.sleep(0.01)
    node.sleep(0.01)
    began = time.monotonic()
    other.sleep(30.0)
    assert time.monotonic() - began < 10
    assert not select.select([reading], [], [], 0)[0]  # it is told once
    for _ in range(70_000):  # nobody listens
        node.has_work()
        with suppress(BlockingIOError):
            os.write(writing, b".")
    node.sleep(0.01)
    for end in (reading, writing):
        os.close(end)


# ------------------------------------------------------------------------------------------------------------- real processes


def stranger_key(folder: Path) -> Path:
    """A key of the right kind that nobody has registered."""
    from cryptography.hazmat.primitives import serialization as form
    from cryptography.hazmat.primitives.asymmetric import ec

    file = folder / "stranger"
    key = ec.generate_private_key(ec.SECP384R1())
    file.write_bytes(key.private_bytes(form.Encoding.PEM, form.PrivateFormat.OpenSSH, form.NoEncryption()))
    return file


@pytest.mark.long
@pytest.mark.usefixtures("alone")
def test_readme_of_the_example(tmp_path):
    """TLS, authenticated nodes, Δ-FL through `flwr run`: the README's commands, one after another, as a user would."""
    app = copy_of_example(tmp_path)
    commands = "\n".join(shell_blocks((app / "README.md").read_text(encoding="utf-8")))
    with Processes(tmp_path / "logs") as processes:
        readme = processes.start("readme", ["bash", "-e", "-c", commands], cwd=app, may_end=True)
        processes.wait_until(lambda: (app / "client-3.log").exists(), "the nodes are started", 200)
        stranger = processes.start(
            "stranger",
            ["flower-supernode", "--superlink", "127.0.0.1:47090", "--root-certificates", str(app / "certificates/ca.crt"),
             "--auth-supernode-private-key", str(stranger_key(tmp_path)), "--port", str(free_ports(1)[0])],
            may_end=True,
        )  # fmt: skip
        processes.wait_until(lambda: readme.poll() is not None, "the README's commands end", 500)
        assert stranger.poll() not in (None, 0), "a node with a key that nobody registered was let in"
        assert "Failed to activate SuperNode" in processes.log("stranger")
    assert readme.returncode == 0, processes.log("readme")
    assert "Uvicorn running on https://127.0.0.1:47090" in (app / "superlink.log").read_text()

    rounds = tomllib.loads((app / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]["rounds"]
    oracle = in_simulation(delta_fl, rounds)
    run = app / "runs" / "federation"
    torch.testing.assert_close(parameters(run), oracle.params, rtol=1e-6, atol=1e-7)
    for found, expected in zip(reports(run), oracle.history.rounds, strict=True):
        assert found["loss"] == pytest.approx(expected.loss, rel=1e-6)
        assert found["trained"] == expected.trained
        assert not found["missing"]
        assert set(found["bytes_by_client"]) == set(CLIENTS)
    page = (app / "simulation.html").read_text(encoding="utf-8")
    assert "simulation" in page
    assert "federation" in page


@pytest.mark.long
@pytest.mark.usefixtures("alone")
def test_secure_sums_and_then_a_node_that_dies(tmp_path):
    """Two runs on the same four nodes, of which one is killed in the second."""
    with Federation(tmp_path / "logs", [f'client-id="{client}"' for client in CLIENTS]) as federation:
        secure_sums_end_within_rounding_of_the_loop_engine(federation, tmp_path / "secure")
        a_node_dies_in_the_middle_of_a_round(federation, tmp_path / "dying")


def secure_sums_end_within_rounding_of_the_loop_engine(federation: Federation, folder: Path) -> None:
    """Δ-FL of which the server sees sums alone: quantile and updates through real masks, against plain arithmetic.

    Rounding moves each of K rows (w u, w) by less than a step: the mean update by less than K (1 + |u|) step / Σ w in a round,
    where |u| < 1 here and the weights, in units of their mean, add up to more than 1.
    """
    app = copy_of_example(folder)
    few = "eq.risk.Superquantile(tail=0.5, quantile=eq.privacy.SecureHistogram(bound=4.0, bins=1024))"
    task = app / "digits_federation" / "task.py"
    rewrite(task, "eq.risk.Superquantile(tail=0.5)", f"{few}, privacy=eq.privacy.SecureAggregation()")
    rewrite(task, "batch_size=10", "batch_size=None")  # a node's batches have a seed of its own, which no simulation knows
    rewrite(app / "digits_federation" / "client_app.py", "app = client_app(", "app = client_app(only_sums=True, ")
    run, rounds = folder / "run", 2
    federation.submit(app, rounds=rounds, minimum=4, folder=str(run))
    federation.finish(timeout=500)
    found = reports(run)
    assert not any(report["missing"] for report in found)
    histogram = eq.privacy.SecureHistogram(bound=4.0, bins=1024)
    risk, solver = eq.risk.Superquantile(tail=0.5, quantile=histogram), replace(delta_fl.solver, batch_size=None)
    plain = replace(delta_fl, risk=risk, solver=solver)
    oracle = in_simulation(plain, rounds)
    assert [report.trained for report in oracle.history.rounds] == [4, 3]  # there is a tail to hide
    bound = rounds * 2 * 4 * eq.privacy.SecureAggregation().step
    torch.testing.assert_close(parameters(run), oracle.params, rtol=1e-6, atol=bound)
    width = histogram.bound / histogram.bins  # to which the histogram tells the mean loss
    assert [report["loss"] for report in found] == pytest.approx([report.loss for report in oracle.history.rounds], abs=width)


def a_node_dies_in_the_middle_of_a_round(federation: Federation, folder: Path) -> None:
    """SIGKILL while a node works: the round goes on with the others' weights, and its report names the node.

    The others' updates do not depend on it, so that the model is that of a simulation with three clients.
    """
    app = copy_of_example(folder)
    rewrite(app / "digits_federation" / "task.py", "eq.risk.Superquantile(tail=0.5)", "eq.risk.Mean()")
    rewrite(app / "digits_federation" / "server_app.py", "clients_per_round=4)", "clients_per_round=4, retries=0)")
    slow = 'import time\n    time.sleep(2.0 * (context.node_config["client-id"] == "client-3"))\n    everyone = simulated()'
    rewrite(app / "digits_federation" / "data.py", "everyone = simulated()", slow)  # there is time to kill it while it works
    run = folder / "run"
    federation.submit(app, rounds=2, minimum=3, timeout=12.0, folder=str(run))
    federation.wait_for_log("node-3", "round 1: asked for its update", timeout=200)
    federation.kill("node-3")
    assert "round 1: answered" not in federation.log("node-3").split("round 1: asked for its update")[1]
    federation.finish(timeout=300)
    found = reports(run)
    assert [list(report["missing"]) for report in found] == [["client-3"], ["client-3"]]
    assert "Round 1 goes on without client-3" in federation.log("run")
    fedavg = replace(delta_fl, risk=eq.risk.Mean())
    torch.testing.assert_close(parameters(run), in_simulation(fedavg, rounds=2, clients=3).params, rtol=1e-6, atol=1e-7)
