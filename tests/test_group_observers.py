"""What observers are told of runs that share their rounds, and what the package's own observers make of it."""

import io
import json
import logging
import sys
import time

import pytest
import torch

import equipoise as eq
from equipoise import tracking
from equipoise.data.clients import FederatedData
from equipoise.errors import Diverged, ObserverFailed
from equipoise.observers import JsonLines, Progress
from equipoise.runs.checkpoint import Checkpoints
from equipoise.types import Observer
from made_clients import make_clients

SGD = eq.solvers.SGD(lr=0.2, batch_size=4)
OPTIONS = {"rounds": 4, "clients_per_round": 4, "evaluate_every": 2, "progress": False, "engine": "loop"}
METHODS = {"FedAvg": eq.Algorithm(solver=SGD), "tail": eq.Algorithm(solver=SGD, risk=eq.risk.Superquantile(0.5))}
NAMES = ["FedAvg, seed 3", "tail, seed 3", "FedAvg, seed 5", "tail, seed 5"]


def clients():
    return FederatedData(make_clients([1, 2, 3, 7, 10, 11, 20, 25]), test=make_clients([5, 9], seed=1, prefix="unseen"))


def single(**options):
    return eq.train(eq.models.Softmax(4, 3), clients(), METHODS["tail"], **{"seed": 3, "name": "tail", **OPTIONS, **options})


def many(**options):
    return eq.train_many(eq.models.Softmax(4, 3), clients(), METHODS, **{"seeds": [3, 5], **OPTIONS, **options})


def family(**options):
    given = {"tails": [1.0, 0.5], "seed": 3, **OPTIONS, **options}
    return eq.train_family(eq.models.Softmax(4, 3), clients(), METHODS["FedAvg"], **given)


class Told(Observer):
    """Notes every call."""

    def __init__(self):
        self.calls, self.params = [], {}

    def on_start(self, run):
        self.calls.append(("start", run.name, run.seed, run.rounds, run.first_round, run.shares_rounds))
        assert run.setting.name == run.name

    def on_round(self, report):
        self.calls.append(("round", report.run, report.round))

    def on_state(self, state):
        self.calls.append(("state", state.round))

    def on_evaluating(self, round_index):
        self.calls.append(("evaluating", round_index))

    def on_evaluation(self, evaluation):
        self.calls.append(("evaluation", evaluation.run, evaluation.round))
        self.params[evaluation.run] = evaluation.params

    def on_end(self):
        self.calls.append(("end",))


def expected_calls(names, seeds, rounds=4, every=2, shares=True):
    calls = []
    for name, seed in zip(names, seeds, strict=True):
        calls += [("start", name, seed, rounds, 0, shares), ("state", 0)]
    for index in range(rounds):
        for name in names:
            calls.append(("round", name, index))
            if (index + 1) % every == 0 and index + 1 < rounds:
                calls.append(("evaluation", name, index + 1))
            calls.append(("state", index + 1))
    for name in names:
        calls += [("evaluating", rounds), ("evaluation", name, rounds)]
    return [*calls, ("end",)]


def test_observers_are_told_of_every_run_by_name():
    told = Told()
    results = many(observers=[told]).results
    assert told.calls == expected_calls(NAMES, [3, 3, 5, 5])
    for name in NAMES:
        method, seed = name.split(", seed ")
        run = results[method][[3, 5].index(int(seed))]
        assert torch.equal(told.params[name], run.params)
        assert (
            {report.run for report in run.history.rounds}
            == {evaluation.run for evaluation in run.history.evaluations}
            == {name}
        )
        assert run.name == method
    told = Told()
    members = family(observers=[told]).results
    assert told.calls == expected_calls(["tail 1", "tail 0.5"], [3, 3])
    assert torch.equal(told.params["tail 0.5"], members[0.5].params)


def test_one_run_is_told_of_as_ever():
    told = Told()
    single(observers=[told])
    assert told.calls == expected_calls(["tail"], [3], shares=False)
    told = Told()
    eq.train_many(eq.models.Softmax(4, 3), clients(), METHODS["tail"], seeds=[3], observers=[told], **OPTIONS)
    assert told.calls == expected_calls(["run"], [3], shares=False)
    told = Told()
    family(tails=[0.5], observers=[told])
    assert told.calls == expected_calls(["tail 0.5"], [3], shares=False)


def test_observers_do_not_change_runs_that_share_their_rounds():
    plain, watched = many(), many(observers=[Told()])
    for name, runs in plain.results.items():
        assert all(torch.equal(a.params, b.params) for a, b in zip(runs, watched.results[name], strict=True))


@pytest.mark.parametrize("train", [many, family])
def test_an_observer_that_fails_is_named(train):
    class Fragile(Observer):
        def on_evaluation(self, evaluation):
            raise OSError("disk full")

    told = Told()
    with pytest.raises(ObserverFailed, match="Observer Fragile failed in on_evaluation: disk full"):
        train(observers=[told, Fragile()])
    assert told.calls[-1] == ("end",)


@pytest.mark.parametrize("train", [many, family])
@pytest.mark.parametrize("option", [{"evaluate_every": 0}, {"observers": Told()}])
def test_how_runs_are_watched_is_checked(train, option):
    (name,) = option
    with pytest.raises(eq.errors.InvalidParameter, match=f"{name} must be"):
        train(**option)


# --------------------------------------------------------------------------------------------------------------- JSON lines


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def without_time(lines):
    return [{name: value for name, value in line.items() if name != "seconds"} for line in lines]


def test_lines_of_several_runs_say_whose_they_are(tmp_path):
    log = tmp_path / "rounds.jsonl"
    results = many(observers=[JsonLines(log)]).results
    lines = lines_of(log)
    assert [line["name"] for line in lines if line["event"] == "start"] == NAMES
    assert [line["run"] for line in lines if line["event"] == "round"] == 4 * NAMES
    assert [(line["run"], line["round"]) for line in lines if line["event"] == "evaluation"] == [
        (name, index) for index in (2, 4) for name in NAMES
    ]
    for name in NAMES:
        method, seed = name.split(", seed ")
        alone = tmp_path / "alone.jsonl"
        eq.train(eq.models.Softmax(4, 3), clients(), METHODS[method], seed=int(seed), observers=[JsonLines(alone)], **OPTIONS)
        mine = [{k: v for k, v in line.items() if k != "run"} for line in lines if line.get("run") == name]
        assert without_time(mine) == without_time(lines_of(alone)[1:])
    assert len(results["tail"]) == 2


def test_lines_of_one_run_do_not_name_it(tmp_path):
    log = tmp_path / "rounds.jsonl"
    watching = JsonLines(log)
    single(observers=[watching])
    eq.compare(METHODS, eq.models.Softmax(4, 3), clients(), seeds=1, rounds=1, clients_per_round=4, observers=[watching])
    lines = lines_of(log)
    assert [list(line) for line in lines[:2]] == [
        ["event", "name", "rounds", "seed", "first_round"],
        ["event", "round", "loss", "tail_loss", "loss_from", "risk", "cohort", "trained", "seconds", "dropped", "rejected",
         "epsilon", "missing", "bytes_sent", "bytes_received", "bytes_by_client", "failed_tries", "clock", "arrivals",
         "skipped", "tail_share", "stood_out", "clients"],
    ]  # fmt: skip
    assert list(lines[3]) == ["event", "round", "splits", "histogram"]
    assert [line["name"] for line in lines if line["event"] == "start"] == ["tail", "FedAvg", "tail"]
    assert not any("run" in line for line in lines)


class StopAfter(Observer):
    def __init__(self, rounds):
        self.rounds = rounds

    def on_state(self, state):
        if state.round == self.rounds:
            raise RuntimeError("power cut")


@pytest.mark.parametrize("train", [many, family, single])
def test_the_log_of_runs_that_go_on_is_whole(train, tmp_path):
    whole, log = tmp_path / "whole.jsonl", tmp_path / "log.jsonl"
    train(observers=[JsonLines(whole)])
    saving = Checkpoints(tmp_path / "state", every=1)
    with pytest.raises(ObserverFailed):
        train(observers=[JsonLines(log), StopAfter(3)], checkpoint=saving)
    train(observers=[JsonLines(log)], checkpoint=saving)
    found, wanted = (without_time(line for line in lines_of(path) if line["event"] != "start") for path in (log, whole))
    runs = {line.get("run") for line in wanted}
    assert runs == ({None} if train is single else {line["name"] for line in lines_of(whole) if line["event"] == "start"})
    for run in runs:
        assert [line for line in found if line.get("run") == run] == [line for line in wanted if line.get("run") == run]
    assert [line["first_round"] for line in lines_of(log) if line["event"] == "start"] == [2] * len(runs)


@pytest.mark.filterwarnings("ignore::equipoise.errors.EquipoiseNotice")
def test_the_log_of_several_groups_that_go_on_is_whole(tmp_path):
    methods = METHODS | {"median": eq.Algorithm(solver=SGD, aggregator=eq.aggregators.Median())}

    def run(log, *others, **options):
        observers = [JsonLines(log), *others]
        eq.train_many(eq.models.Softmax(4, 3), clients(), methods, seeds=[3, 5], observers=observers, **OPTIONS, **options)

    class StopInMedian(Observer):
        def on_round(self, report):
            if (report.run, report.round) == ("median, seed 3", 2):
                raise RuntimeError("power cut")

    whole, log = tmp_path / "whole.jsonl", tmp_path / "log.jsonl"
    run(whole)
    with pytest.raises(ObserverFailed):
        run(log, StopInMedian(), checkpoint=Checkpoints(tmp_path / "state", every=1))
    run(log, checkpoint=Checkpoints(tmp_path / "state", every=1))
    found, wanted = (without_time(line for line in lines_of(path) if line["event"] != "start") for path in (log, whole))
    assert sorted(map(json.dumps, found)) == sorted(map(json.dumps, wanted))
    medians = [line for line in lines_of(log) if line["event"] == "round" and "run" not in line]
    assert [line["round"] for line in medians] == 2 * [0, 1, 2, 3]  # one after the other, as in `compare`


# ----------------------------------------------------------------------------------------------------------------- progress


@pytest.mark.parametrize(("train", "names"), [(many, NAMES), (family, ["tail 1", "tail 0.5"]), (single, ["tail"])])
def test_a_bar_has_a_line_for_each_run(train, names):
    console = pytest.importorskip("rich.console")
    out = io.StringIO()
    train(observers=[Progress(console.Console(file=out, force_terminal=True, width=140))])
    text = out.getvalue()
    for name in names:
        assert name in text
    assert text.count("4/4") >= len(names)
    assert text.count("evaluating all clients after round 4") == 1


def test_the_bar_of_train_many_and_train_family_evaluates_once(monkeypatch):
    said = []
    monkeypatch.setattr(sys.modules["equipoise.train"], "Progress", lambda: Bar(said))  # eq.train is the function

    class Bar(Progress):
        def __init__(self, said):
            from rich.console import Console

            super().__init__(Console(file=io.StringIO()))
            self.said = said

        def on_start(self, run):
            super().on_start(run)
            self.said.append(run.name)
            inner = self._bar.console.print
            self._bar.console.print = lambda *text, **how: (self.said.extend(text), inner(*text, **how))

    pytest.importorskip("rich")
    for train, title in ((many, "4 runs"), (family, "family of 2"), (single, "tail")):
        said.clear()
        train(progress=True)
        assert [text for text in said if isinstance(text, str)] == [title, "evaluating all clients after round 4 …"]


# ---------------------------------------------------------------------------------------------------- TensorBoard and MLflow


def curves(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logging.getLogger("tensorboard").setLevel(logging.ERROR)
    events = EventAccumulator(str(folder)).Reload()
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_tensorboard_has_a_folder_for_each_run(tmp_path):
    pytest.importorskip("torch.utils.tensorboard")
    results = many(observers=[tracking.TensorBoard(tmp_path)]).results
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.glob("*/*")) == [
        "FedAvg/seed-3", "FedAvg/seed-5", "tail/seed-3", "tail/seed-5",
    ]  # fmt: skip
    for method, runs in results.items():
        for run in runs:
            here = curves(tmp_path / method / f"seed-{run.seed}")
            assert here["round/loss"] == [(r.round + 1, pytest.approx(r.loss)) for r in run.history.rounds]
            assert here["test/error"] == [(p.round, pytest.approx(p.splits["test"]["error"])) for p in run.history.points]
    family(observers=[tracking.TensorBoard(tmp_path / "family")])
    assert sorted(path.parent.name for path in (tmp_path / "family").glob("*/seed-3")) == ["tail 0.5", "tail 1"]


def test_tensorboard_goes_on_in_the_curves_of_each_run(tmp_path):
    pytest.importorskip("torch.utils.tensorboard")
    saving = Checkpoints(tmp_path / "state", every=2)
    with pytest.raises(ObserverFailed):
        family(observers=[tracking.TensorBoard(tmp_path / "logs"), StopAfter(3)], checkpoint=saving)
    time.sleep(1.1)  # TensorBoard reads files by name, which holds the second, then a number that does not sort
    members = family(observers=[tracking.TensorBoard(tmp_path / "logs")], checkpoint=saving).results
    for tail, run in members.items():
        here = curves(tmp_path / "logs" / f"tail {tail:g}" / "seed-3")
        assert here["round/loss"] == [(r.round + 1, pytest.approx(r.loss)) for r in run.history.rounds]


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
    runs = client.search_runs([client.get_experiment_by_name(experiment).experiment_id])

    def history(run, name):
        return sorted((m.step, m.value) for m in client.get_metric_history(run.info.run_id, name))

    return {run.info.run_name: run for run in runs}, history


def test_mlflow_has_a_run_for_each_run(store):
    results = many(observers=[tracking.MLflow("many", tracking_uri=store)]).results
    runs, history = runs_in(store, "many")
    assert sorted(runs) == sorted(NAMES)
    for name, run in runs.items():
        method, seed = name.split(", seed ")
        wanted = results[method][[3, 5].index(int(seed))]
        assert run.info.status == "FINISHED"
        assert run.data.params == {"name": method, "seed": seed, "rounds": "4", "first_round": "0"}
        assert history(run, "round/loss") == [(r.round + 1, r.loss) for r in wanted.history.rounds]
        assert history(run, "test/error_90") == [(p.round, p.splits["test"]["error_90"]) for p in wanted.history.points]


class Wide(torch.nn.Module):
    """Outputs squared, from a start that is so large for seed 5 that its loss overflows."""

    def __init__(self, seed):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((4, 3), 1e30 if seed == 5 else 0.1))

    def forward(self, x):
        return x @ self.weight

    def loss(self, outputs, targets):
        return outputs.square().sum(1)


def test_in_mlflow_only_the_run_that_diverged_has_failed(store):
    with pytest.raises(Diverged):
        eq.train_many(
            lambda seed: Wide(seed), clients(), eq.Algorithm(solver=eq.solvers.SGD(lr=0.01)), seeds=[3, 5],
            error=lambda outputs, y: outputs[:, 0], observers=[tracking.MLflow("failing", tracking_uri=store)], **OPTIONS,
        )  # fmt: skip
    runs, _ = runs_in(store, "failing")
    assert {name: run.info.status for name, run in runs.items()} == {"run, seed 3": "FINISHED", "run, seed 5": "FAILED"}
