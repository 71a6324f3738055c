"""Observers for TensorBoard, MLflow and Weights & Biases, read back with the tools' own readers."""

import json
import logging
import sys
import time

import pytest

from equipoise import Algorithm, solvers, testing, tracking, train
from equipoise.errors import ConfigError, Diverged, ObserverFailed
from equipoise.models import Softmax
from equipoise.types import Observer

SPLITS = ("train", "test")


def trained(data, *observers, rounds=4, **options):
    return train(
        Softmax(4, 3),
        data,
        rounds=rounds,
        clients_per_round=4,
        evaluate_every=2,
        observers=observers,
        progress=False,
        **options,
    )


# ---------------------------------------------------------------------------------------------------------- TensorBoard


def curves(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logging.getLogger("tensorboard").setLevel(logging.ERROR)
    found = EventAccumulator(str(folder)).Reload()
    return {tag: [(event.step, event.value) for event in found.Scalars(tag)] for tag in found.Tags()["scalars"]}


@pytest.fixture
def tensorboard():
    pytest.importorskip("torch.utils.tensorboard")


@pytest.mark.usefixtures("tensorboard")
def test_tensorboard_holds_the_history(ragged, tmp_path):
    result = trained(ragged, tracking.TensorBoard(tmp_path), name="a/b", seed=3)
    found = curves(tmp_path / "a-b" / "seed-3")
    assert set(found) == {
        "round/loss", "round/tail_loss", "round/clients_trained",
        *(f"{split}/{name}" for split in SPLITS for name in ("loss", "error", "error_90")),
    }  # fmt: skip
    assert found["round/loss"] == [(r.round + 1, pytest.approx(r.loss)) for r in result.history.rounds]
    assert found["test/error_90"] == [(p.round, pytest.approx(p.splits["test"]["error_90"])) for p in result.history.points]
    assert [step for step, _ in found["test/error_90"]] == [2, 4]


class StopAt(Observer):
    """Stops a run, as a power cut would, after so many rounds."""

    def __init__(self, rounds):
        self.rounds = rounds

    def on_state(self, state):
        if state.round == self.rounds:
            raise RuntimeError("power cut")


@pytest.mark.usefixtures("tensorboard")
def test_a_run_that_goes_on_has_one_curve(ragged, tmp_path):
    from equipoise.runs.checkpoint import Checkpoints

    whole = trained(ragged, rounds=6)
    with pytest.raises(ObserverFailed):
        trained(
            ragged, tracking.TensorBoard(tmp_path), StopAt(3), rounds=6, checkpoint=Checkpoints(tmp_path / "state", every=2)
        )
    trained(ragged, tracking.TensorBoard(tmp_path), rounds=6, checkpoint=Checkpoints(tmp_path / "state", every=2))
    found = curves(tmp_path / "run" / "seed-0")
    assert found["round/loss"] == [(r.round + 1, pytest.approx(r.loss)) for r in whole.history.rounds]
    assert [step for step, _ in found["test/error"]] == [2, 4, 6]


@pytest.mark.usefixtures("tensorboard")
def test_tensorboard_changes_nothing(tmp_path):
    testing.check_observer(tracking.TensorBoard(tmp_path))


def test_tensorboard_that_is_absent_is_refused_with_the_command(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ConfigError, match=r'TensorBoard is not installed: pip install "equipoise\[tensorboard\]"'):
        tracking.TensorBoard(tmp_path)


# --------------------------------------------------------------------------------------------------------------- MLflow


@pytest.fixture
def store(tmp_path, monkeypatch):
    """A store in a folder: MLflow's databases take ten seconds to set up."""
    for name in ("MLFLOW_DISABLE_TELEMETRY", "MLFLOW_ALLOW_FILE_STORE"):
        monkeypatch.setenv(name, "true")
    monkeypatch.chdir(tmp_path)
    pytest.importorskip("mlflow")
    return (tmp_path / "mlruns").as_uri()


def runs_in(store, experiment):
    from mlflow import MlflowClient

    client = MlflowClient(store)
    found = client.search_runs([client.get_experiment_by_name(experiment).experiment_id])

    def history(run, name):
        return sorted((m.step, m.value) for m in client.get_metric_history(run.info.run_id, name))

    return found, history


def test_mlflow_holds_the_history(ragged, store):
    algorithm = Algorithm(solver=solvers.SGD(lr=0.1))
    watching = tracking.MLflow(experiment="tails", tracking_uri=store)
    result = trained(ragged, watching, algorithm=algorithm, name="FedAvg", seed=3)
    trained(ragged, watching, algorithm=algorithm, name="again")  # the same observer, another run
    found, history = runs_in(store, "tails")
    assert {run.info.run_name for run in found} == {"FedAvg, seed 3", "again, seed 0"}
    run = next(run for run in found if run.info.run_name == "FedAvg, seed 3")
    assert run.info.status == "FINISHED"
    assert run.data.params == {"name": "FedAvg", "seed": "3", "rounds": "4", "first_round": "0"}
    assert history(run, "round/loss") == [(r.round + 1, r.loss) for r in result.history.rounds]
    assert history(run, "test/error_90") == [(p.round, p.splits["test"]["error_90"]) for p in result.history.points]
    assert "round/risk" not in run.data.metrics


def test_a_run_that_fails_is_closed_as_failed(ragged, store):
    with pytest.raises(Diverged):
        trained(ragged, tracking.MLflow("failing", tracking_uri=store), algorithm=Algorithm(solver=solvers.SGD(lr=1e38)))
    with pytest.raises(ObserverFailed):
        trained(ragged, tracking.MLflow("failing", tracking_uri=store), StopAt(2))
    found, _ = runs_in(store, "failing")
    assert [run.info.status for run in found] == ["FAILED", "FAILED"]


def test_mlflow_changes_nothing(store):
    testing.check_observer(tracking.MLflow(tracking_uri=store))


def test_mlflow_that_is_absent_is_refused_with_the_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(ConfigError, match=r'MLflow is not installed: pip install "equipoise\[mlflow\]"'):
        tracking.MLflow()


def test_a_store_that_mlflow_does_not_know_is_refused(store):
    with pytest.raises(ConfigError, match="tracking_uri = 'nonsense://x' cannot be used"):
        tracking.MLflow(tracking_uri="nonsense://x")


# ---------------------------------------------------------------------------------------------------------------------- W&B


@pytest.fixture
def offline(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    return tmp_path


def wandb_runs(folder):
    """The runs in the files of an offline folder: name, exit code and what was logged."""
    from wandb.proto import wandb_internal_pb2
    from wandb.sdk.internal.datastore import DataStore

    found = {}
    for file in sorted(folder.rglob("*.wandb")):
        store, rows, name, code = DataStore(), [], "", None
        store.open_for_scan(str(file))
        while (part := store.scan_data()) is not None:
            record = wandb_internal_pb2.Record()
            record.ParseFromString(part)
            if record.HasField("history"):
                items = {(each.key or ".".join(each.nested_key)): json.loads(each.value_json) for each in record.history.item}
                rows.append(items)
            elif record.HasField("run") and record.run.display_name:
                name = record.run.display_name
            elif record.HasField("exit"):
                code = record.exit.exit_code
        store._fp.close()
        found[name] = (code, rows)
    return found


def test_wandb_holds_the_history_offline(ragged, offline):
    result = trained(ragged, tracking.WandB("tails", folder=offline, offline=True), name="FedAvg", seed=3)
    deadline = time.monotonic() + 60  # another process writes the file, and on a busy machine it ends after `finish`
    while (code := next(iter(wandb_runs(offline).values()))[0]) is None and time.monotonic() < deadline:
        time.sleep(0.2)
    ((name, (code, rows)),) = wandb_runs(offline).items()
    assert (name, code) == ("FedAvg, seed 3", 0)
    losses = [row["round/loss"] for row in rows if "round/loss" in row]
    assert losses == pytest.approx([report.loss for report in result.history.rounds])
    errors = [row["test/error_90"] for row in rows if "test/error_90" in row]
    assert errors == pytest.approx([point.splits["test"]["error_90"] for point in result.history.points])


def test_wandb_that_is_absent_is_refused_with_the_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match=r'Weights & Biases is not installed: pip install "equipoise\[wandb\]"'):
        tracking.WandB()
