"""Observers for TensorBoard and MLflow, read back with the tools' own readers."""

import logging
import sys

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
