"""Searches in Python and from files: what they refuse, try and judge, and that a killed one goes on as if it had not been."""

import io
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import tomllib
import warnings
from dataclasses import replace

import pytest
import torch
from torch import nn

import equipoise as eq
from equipoise.client_table import ClientTable
from equipoise.core.files import locked
from equipoise.core.screen import Screen
from equipoise.errors import CheckpointError, ConfigError, Diverged, InvalidData, InvalidParameter
from equipoise.experiment import folder, scheduler, search, worker
from equipoise.experiment.build import build
from equipoise.experiment.config import RunConfig
from equipoise.experiment.search import read_search, run_search
from equipoise.experiment.trials import TrialResult, folder_name, noise_words
from equipoise.report.over_seeds import Spread

with warnings.catch_warnings():  # typer 0.20 imports names that click 8.5 deprecates; only that import is excused
    warnings.filterwarnings("ignore", message="'click", category=DeprecationWarning)
    from typer.testing import CliRunner

    from equipoise.cli.commands import app

# ------------------------------------------------------------------------------------------------------------- in Python

DATA = eq.data.label_shift(train_clients=12, validation_clients=6, test_clients=5, examples=30)
USUAL = {"rounds": 4, "clients_per_round": 5}


def net(seed):
    return nn.Sequential(nn.Linear(20, 8), nn.ReLU(), nn.Linear(8, 10))


def by_rate(lr, risk="mean"):
    risks = {"mean": eq.risk.Mean(), "tail": eq.risk.Superquantile(tail=0.5)}
    return eq.Algorithm(solver=eq.solvers.SGD(lr=lr), risk=risks[risk])


class Watch(eq.types.Observer):
    """Counts rounds, notes the splits that were evaluated, and may stop like Ctrl-C."""

    def __init__(self, stop_after=None):
        self.rounds, self.splits, self.stop_after = 0, set(), stop_after

    def on_round(self, report):
        self.rounds += 1
        if self.rounds == self.stop_after:
            raise KeyboardInterrupt

    def on_evaluation(self, evaluation):
        self.splits |= set(evaluation.clients.split)


def test_a_grid_is_judged_as_by_hand_and_test_clients_are_not_seen():
    watch = Watch()
    space = {"lr": [0.001, 0.1, 0.5], "risk": ["mean", "tail"]}
    tuned = eq.tune(by_rate, space, net, DATA, seeds=2, observers=[watch], evaluate_every=1, **USUAL)
    assert watch.splits == {"train", "validation"}
    assert len(tuned.trials) == 6

    def by_hand(values):
        runs = [eq.train(net, DATA, by_rate(**values), seed=seed, **USUAL) for seed in (0, 1)]
        return sum(run.summary("validation").error.percentiles[90] for run in runs) / 2

    expected = {trial.values["lr"]: by_hand(trial.values) for trial in tuned.trials if trial.values["risk"] == "mean"}
    assert {t.values["lr"]: t.value for t in tuned.trials if t.values["risk"] == "mean"} == pytest.approx(expected)
    assert tuned.trials[0].value == min(trial.value for trial in tuned.trials)
    assert tuned.best == by_rate(**tuned.values)
    # Other test clients change nothing.
    other = replace(DATA, test=replace(DATA.test, y=torch.zeros_like(DATA.test.y)))
    assert eq.tune(by_rate, space, net, other, seeds=2, **USUAL).trials == tuned.trials
    assert "Not told from the best by 2 seeds: 5 of 5 trials" in tuned.summary()


def test_values_may_be_parts_and_the_training_loss_a_criterion():
    space = {"risk": [eq.risk.Mean(), eq.risk.Superquantile(tail=0.5)]}
    given = {"criterion": "train_loss", **USUAL}
    tuned = eq.tune(lambda risk: eq.Algorithm(risk=risk), space, net, replace(DATA, validation=None), **given)
    assert tuned.best.risk in space["risk"]
    assert "Superquantile()" in tuned.summary()


def test_the_mean_over_validation_clients_is_a_criterion_with_and_without_their_examples():
    clients = DATA.validation
    few = [(name, *(part[: 5 * (k + 1)] for part in clients.client(at=k))) for k, name in enumerate(clients.ids)]
    whole = replace(DATA, validation=eq.ClientSet.pack(few))  # of 5, 10, … examples
    model = eq.models.Softmax(20, 10)
    run = eq.train(model, replace(whole, test=None), by_rate(0.1), progress=False, **USUAL)
    rows = run.clients.where("validation")
    expected = {
        "validation_mean": float(rows.error.double().mean()),
        "validation_mean_by_example": float((rows.error.double() * rows.size).sum() / rows.size.sum()),
    }
    assert expected["validation_mean"] != pytest.approx(expected["validation_mean_by_example"], abs=1e-6)
    for criterion, value in expected.items():
        tuned = eq.tune(by_rate, {"lr": [0.1]}, model, whole, criterion=criterion, progress=False, **USUAL)
        assert tuned.trials[0].value == pytest.approx(value)
    for least in (0, 16):  # which leaves out three clients
        tuned = eq.tune(by_rate, {"lr": [0.1]}, model, whole, at_least=least, **USUAL)
        assert tuned.trials[0].value == pytest.approx(run.summary("validation", at_least=least).error.percentiles[90])
    with pytest.raises(InvalidParameter, match="at_least must leave a client"):
        eq.tune(by_rate, {"lr": [0.1]}, model, whole, at_least=10_000, **USUAL)


def test_optuna_goes_on_after_ctrl_c_and_ends_with_the_same_trials(tmp_path):
    pytest.importorskip("optuna")
    space = {"lr": {"low": 0.01, "high": 1.0, "log": True}, "risk": ["mean", "tail"]}
    given = {"trials": 4, "seeds": 2, **USUAL}
    whole = eq.tune(by_rate, space, net, DATA, folder=tmp_path / "whole", **given)
    assert len(whole.trials) == 4
    assert all(0.01 <= trial.values["lr"] <= 1.0 for trial in whole.trials)
    assert eq.tune(by_rate, space, net, DATA, **given).trials == whole.trials  # in memory, the seed decides alike
    stopped = Watch(stop_after=19)  # of 4 · 2 · 4 rounds: in the third trial
    with pytest.raises(KeyboardInterrupt) as caught:
        eq.tune(by_rate, space, net, DATA, folder=tmp_path / "cut", observers=[stopped], **given)
    assert caught.value.__notes__[0].startswith(str(tmp_path / "cut"))
    rest, again, more = Watch(), Watch(), Watch()
    resumed = eq.tune(by_rate, space, net, DATA, folder=tmp_path / "cut", observers=[rest], **given)
    assert resumed.trials == whole.trials
    assert rest.rounds == 32 - 16  # two trials had ended
    assert eq.tune(by_rate, space, net, DATA, folder=tmp_path / "cut", observers=[again], **given).trials == whole.trials
    assert again.rounds == 0
    longer = eq.tune(by_rate, space, net, DATA, folder=tmp_path / "cut", observers=[more], **given | {"trials": 5})
    assert more.rounds == 8
    assert set(map(repr, longer.trials)) > set(map(repr, whole.trials))


def test_a_folder_of_other_data_is_refused_and_a_search_without_one_says_how_to_keep_it(tmp_path):
    space = {"lr": [0.1, 0.2]}
    eq.tune(by_rate, space, net, DATA, folder=tmp_path, **USUAL)
    more = Watch()
    tuned = eq.tune(by_rate, {"lr": [0.1, 0.2, 0.3]}, net, DATA, folder=tmp_path, observers=[more], **USUAL)
    assert (len(tuned.trials), more.rounds) == (3, 4)  # the new value alone is trained
    other = eq.data.label_shift(train_clients=12, validation_clients=6, test_clients=5, examples=30, seed=9)
    with pytest.raises(CheckpointError, match="data") as caught:
        eq.tune(by_rate, space, net, other, folder=tmp_path, **USUAL)
    assert "This was the trial lr 0.1 with seed 0." in caught.value.__notes__
    with pytest.raises(KeyboardInterrupt) as stopped:
        eq.tune(by_rate, space, net, DATA, observers=[Watch(stop_after=2)], **USUAL)
    assert 'folder="runs/tune"' in stopped.value.__notes__[0]


def test_a_trial_that_diverges_fails_alone_and_all_together_raise():
    tuned = eq.tune(by_rate, {"lr": [1e38, 0.1]}, net, DATA, **USUAL)
    assert [trial.criterion is None for trial in tuned.trials] == [False, True]
    assert tuned.values == {"lr": 0.1}
    assert "Failed: trial 2: seed 0: Round 1" in tuned.summary()
    with pytest.raises(Diverged):
        eq.tune(by_rate, {"lr": [1e38]}, net, DATA, **USUAL)
    with pytest.raises(InvalidParameter) as caught:
        eq.tune(by_rate, {"lr": [-1.0, -2.0]}, net, DATA, **USUAL)
    assert caught.value.parameter == "lr"


def test_without_optuna_nothing_is_trained_and_the_cure_is_named(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "optuna", None)
    watch = Watch()
    with pytest.raises(ConfigError, match=r'pip install "equipoise\[tune\]"'):
        eq.tune(by_rate, {"lr": [0.1, 1.0]}, net, DATA, trials=3, observers=[watch], folder=tmp_path / "new", **USUAL)
    assert watch.rounds == 0
    assert not (tmp_path / "new").exists()
    assert eq.tune(by_rate, {"lr": [0.1]}, net, DATA, **USUAL).values == {"lr": 0.1}  # a grid needs none
    with pytest.raises(ConfigError, match=r'pip install "equipoise\[tune\]"'):
        run_search(read_search(written(tmp_path, OPTUNA)), tmp_path / "out", workers=1, console=Screen(quiet=True))


@pytest.mark.parametrize(("change", "named"), [
    ({"space": {}}, "space"),
    ({"space": {"lr": 0.1}}, r"space\['lr'\]"),
    ({"space": {"lr": [0.1, 0.1]}}, r"space\['lr'\]"),
    ({"space": {"rate": [0.1]}}, "algorithm"),
    ({"space": {"lr": {"low": 0.1, "high": 1.0}}}, r"space\['lr'\]"),
    ({"space": {"lr": {"low": 1.0, "high": 0.1}}, "trials": 2}, r"space\['lr'\].low"),
    ({"algorithm": eq.Algorithm()}, "algorithm"),
    ({"algorithm": lambda lr: lr}, "algorithm"),
    ({"criterion": "test_90"}, "criterion"),
    ({"trials": 0}, "trials"),
    ({"checkpoint": "a.ckpt"}, "checkpoint is set by tune"),
    ({"seed": 3}, "seed is set by tune"),
    ({"at_least": 5, "criterion": "train_loss"}, "at_least"),
    ({"space": {"lr": [lambda: 0.1]}, "folder": "runs"}, r"space\['lr'\]"),
    ({"model": DATA, "data": net}, r"Write tune\(algorithm, space, model, data"),
])  # fmt: skip
def test_what_cannot_be_searched_is_refused(change, named, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    given = {"algorithm": by_rate, "space": {"lr": [0.1]}, "model": net, "data": DATA, **USUAL} | change
    with pytest.raises((InvalidParameter, ConfigError), match=named):
        eq.tune(**given)


def test_data_that_the_criterion_cannot_judge_are_refused():
    for criterion in ("validation_90", "validation_mean"):
        with pytest.raises(InvalidData, match=criterion):
            eq.tune(by_rate, {"lr": [0.1]}, net, replace(DATA, validation=None), criterion=criterion, **USUAL)
    own = eq.Algorithm(personal=eq.personal.Finetuning())
    with pytest.raises(ConfigError, match="the closest fit would win"):
        eq.tune(lambda lr: own, {"lr": [0.1]}, net, DATA, criterion="train_loss", **USUAL)


def trial(lr, *by_seed):
    """A trial with the given criterion in each seed."""
    return TrialResult({"algorithm.solver.lr": lr}, Spread.of(by_seed), by_seed=by_seed)


@pytest.mark.parametrize(("trials", "told"), [
    # Differences −0.01, +0.004 and −0.003: mean −0.003, s = 0.007, and ± 4.303 · 0.007 / √3 contains 0.
    ([trial(0.1, 0.37, 0.374, 0.369), trial(0.3, 0.38, 0.37, 0.372), trial(1.0, 0.57, 0.575, 0.569)], "1 of 2 trials"),
    ([trial(0.1, 0.30, 0.31, 0.29), trial(0.3, 0.40, 0.40, 0.40)], ""),  # −0.1 ± 0.01 is clear
    ([trial(0.1, 0.3), trial(0.3, 0.4)], "by 1 seeds: 1 of 1"),
    ([trial(0.1, 1.0, 1.0), trial(0.3, 1.0, 1.0)], "equal to it: 1"),
    ([trial(0.1, 0.3), TrialResult({}, None, "failed")], ""),
])  # fmt: skip
def test_trials_within_the_noise_of_the_best_are_counted(trials, told):
    assert told in noise_words(trials)
    assert told or noise_words(trials) == ""


def test_folders_tell_values_apart():
    points = [{"a.b": value} for value in ("x y", "x-y", {"name": "x"}, ["x"], "x", 1, 1.5, True, "é/é", "z" * 300, "z" * 301)]
    names = [folder_name(values) for values in points]
    assert len(set(names)) == len(names)
    assert all("/" not in name and len(name.encode()) < 250 for name in names)


# ----------------------------------------------------------------------------------------------------------- from a file

RUN = """
[data]
name = "label_shift"
train_clients = 12
validation_clients = 8
test_clients = 3
examples = 20
[model]
name = "softmax"
[algorithm.risk]
name = "superquantile"
[train]
name = "mine"
rounds = 4
clients_per_round = 6
seed = 5
"""
GRID = '[search]\ncriterion = "{}"\n[search.space]\n"algorithm.solver.lr" = [0.001, 0.1, 1e38]\n"algorithm.risk.tail" = [0.5]\n'
OPTUNA = """
[search]
trials = 6
[search.space]
"algorithm.solver.lr" = {low = 0.01, high = 1.0, log = true}
"algorithm.solver.epochs" = {low = 1, high = 3}
"algorithm.risk" = ["mean", {name = "superquantile", tail = 0.5}]
"""


def written(tmp_path, text):
    file = tmp_path / "wanted.toml"
    file.write_text(text + RUN)
    return file


@pytest.fixture
def console():
    return Screen(record=True, width=120, file=io.StringIO())


@pytest.fixture
def here(monkeypatch):
    """Trials are run in this process, which saves seconds of imports; returns the folders that were run."""
    started = []

    def run_all(runs, *, workers, console, options=(), ray=None):
        jobs = [scheduler.ScheduledRun(run, "there already" if run.folder.finished else "waiting") for run in runs]
        for job in jobs:
            if job.status == "waiting":
                started.append(job.folder.path.name)
                code = worker.main(str(job.folder.path), without_test="--without-test" in options)
                job.status, job.message = ("done", "") if code == 0 else ("failed", "it did.")
        return jobs

    monkeypatch.setattr(scheduler, "run_all", run_all)
    return started


@pytest.mark.parametrize("criterion", ["train_loss", "validation_90"])
def test_a_grid_from_a_file_is_judged_without_test_clients(criterion, tmp_path, console, here):
    wanted = read_search(written(tmp_path, GRID.format(criterion)), ["search.seeds=2"])
    outcomes = run_search(wanted, tmp_path / "out", workers=1, console=console)
    assert sorted(here) == sorted(f"lr-{lr}-tail-0.5-{seed}" for lr in ("0.001", "0.1", "1e+38") for seed in (5, 6))
    # The one that diverges is the last, and stops nothing.
    assert outcomes[-1].values["algorithm.solver.lr"] == 1e38
    assert outcomes[-1].criterion is None
    assert "seed 5: it did. See" in outcomes[-1].message
    assert outcomes[0].value <= outcomes[1].value
    # Nothing in a run's folder knows test clients, and its configuration says why.
    for path in (tmp_path / "out").glob("lr-*"):
        assert (path / "config.toml").read_text().startswith(search.NOTE)
        assert '"test"' not in (path / "rounds.jsonl").read_text()
        if folder.RunFolder(path).finished:
            assert set(ClientTable.from_parquet(path / "clients.parquet").split) == {"train", "validation"}
    # The criterion is what the summaries say, averaged over seeds.
    records = [folder.read_record(tmp_path / "out" / f"lr-0.1-tail-0.5-{seed}") for seed in (5, 6)]
    if criterion == "train_loss":
        expected = [record.clients.summaries()["train"]["loss"].mean_by_example for record in records]
    else:
        expected = [record.summary("validation").error.percentiles[90] for record in records]
    found = next(outcome for outcome in outcomes if outcome.values["algorithm.solver.lr"] == 0.1)
    assert found.criterion.mean == pytest.approx(sum(expected) / 2)
    text = console.export_text()
    assert "±" in text
    assert "failed" in text
    assert f"equipoise run {tmp_path / 'out' / 'best.toml'}" in text
    # The best is a run like the file's, with its name, seed and test clients.
    best = RunConfig.read(tmp_path / "out" / "best.toml")
    assert (best.train.name, best.train.seed, best.train.threads) == ("mine", 5, None)
    assert best.algorithm().solver.lr == outcomes[0].values["algorithm.solver.lr"]
    result = folder.run(build(best), folder.claim(tmp_path / "run"), progress=False, report=False)
    assert result.judged_on == "test"


def test_more_values_run_only_what_is_missing(tmp_path, console, here):
    file, out = written(tmp_path, GRID.format("train_loss")), tmp_path / "out"
    space = 'search.space={"algorithm.solver.lr" = [0.1], "algorithm.risk.tail" = [0.5]}'
    run_search(read_search(file, [space]), out, workers=1, console=console)
    assert here == ["lr-0.1-tail-0.5-5"]
    more = read_search(file, [space, "search.space.algorithm.risk.tail=[0.2, 0.5]"])
    outcomes = run_search(more, out, workers=1, console=console)
    assert here[1:] == ["lr-0.1-tail-0.2-5"]
    assert len(outcomes) == 2
    # A folder whose run has another configuration is not taken for this one's.
    with pytest.raises(ConfigError, match=r"train\.rounds is 4 there, 5 here"):
        run_search(read_search(file, [space, "train.rounds=5"]), out, workers=1, console=console)


def test_a_run_that_was_ended_with_test_clients_is_refused(tmp_path, console, here):
    file, out = written(tmp_path, GRID.format("train_loss")), tmp_path / "out"
    wanted = read_search(file, ["search.space={'algorithm.solver.lr' = [0.1]}", "algorithm.risk=mean"])
    run_search(wanted, out, workers=1, console=console)
    place = folder.RunFolder(out / "lr-0.1-5")
    for file in (place.rounds, place.clients, place.checkpoint):
        file.unlink()
    folder.run(build(RunConfig.read(place.config)), place, progress=False, report=False)  # as equipoise run --resume does
    with pytest.raises(ConfigError, match=r"lr-0\.1-5 was judged on test clients.*Delete the folder"):
        run_search(wanted, out, workers=1, console=console)
    shutil.rmtree(place.path)
    assert run_search(wanted, out, workers=1, console=console)[0].criterion is not None


def test_without_validation_clients_their_criterion_is_refused(tmp_path, console):
    wanted = read_search(written(tmp_path, GRID.format("validation_90")), ["data.validation_clients=0"])
    with pytest.raises(ConfigError, match=r"validation_90.*label_shift' have none\. Set data\.validation_clients above 0"):
        run_search(wanted, tmp_path / "out", workers=1, console=console)
    assert not (tmp_path / "out").exists()


def test_optuna_tries_ranges_and_values_and_goes_on_for_more(tmp_path, console, here):
    pytest.importorskip("optuna")
    file, out = written(tmp_path, OPTUNA), tmp_path / "out"
    wanted = read_search(file)
    outcomes = run_search(wanted, out, workers=2, console=console)
    assert len(outcomes) == 6
    for outcome in outcomes:
        lr, epochs, risk = outcome.values.values()
        assert 0.01 <= lr <= 1.0
        assert epochs in (1, 2, 3)
        assert isinstance(epochs, int)
        assert risk in wanted.space["algorithm.risk"]
    assert outcomes[0].value == min(outcome.value for outcome in outcomes)
    # The same again, also with other workers, tries nothing new; more trials add to it, and the seed decides what is tried.
    shutil.rmtree(out / f"{folder_name(outcomes[2].values)}-5")  # but what was deleted is run again
    assert run_search(wanted, out, workers=1, console=console) == outcomes
    assert here.count(here[-1]) == 2
    more = run_search(read_search(file, ["search.trials=8"]), out, workers=2, console=console)
    assert [o for o in more if o in outcomes] == outcomes
    assert len(more) == len(set(here)) == 8
    assert run_search(wanted, tmp_path / "again", workers=2, console=console) == outcomes


def test_a_failing_trial_of_optuna_is_the_worst(tmp_path, console, here):
    pytest.importorskip("optuna")
    file = written(tmp_path, OPTUNA)
    space = 'search.space={"algorithm.solver.lr" = [0.1, 1e38]}'
    wanted = read_search(file, [space, "algorithm.risk=mean", "search.trials=5"])
    outcomes = run_search(wanted, tmp_path / "out", workers=1, console=console)
    assert [outcome.values["algorithm.solver.lr"] for outcome in outcomes] == [0.1, 1e38]
    assert outcomes[1].criterion is None


def test_values_that_do_not_go_together_fail_their_trial(tmp_path, console, here):
    """For Optuna every value is tried with the first of the others; what only other pairs break is found on the way."""
    pytest.importorskip("optuna")
    space = 'search.space={"train.engine" = ["simulator", "loop"], "train.chunk_size" = ["none", 3]}'
    wanted = read_search(written(tmp_path, OPTUNA), [space, "algorithm.risk=mean", "search.trials=12"])
    outcomes = run_search(wanted, tmp_path / "out", workers=1, console=console)
    assert [outcome.criterion is None for outcome in outcomes] == [False, False, False, True]
    assert outcomes[-1].values == {"train.engine": "loop", "train.chunk_size": 3}
    assert "train.chunk_size is not used by the engine 'loop'" in outcomes[-1].message


def test_at_least_leaves_out_small_validation_clients(tmp_path, console, here):
    file = written(tmp_path, GRID.format("validation_90").replace("0.001, 0.1, 1e38", "0.1, 0.2"))
    sizes = build(read_search(file).config({"algorithm.solver.lr": 0.1})).data.validation.sizes.tolist()
    least = sorted(sizes)[-1]
    wanted = read_search(file, [f"search.at_least={least}"])
    (first, *_) = run_search(wanted, tmp_path / "out", workers=1, console=console)
    (run, *_) = wanted.plan(first.values, tmp_path / "out")
    rows = ClientTable.from_parquet(run.folder.clients).where("validation")
    kept = sorted(error for error, size in zip(rows.error.tolist(), rows.size.tolist(), strict=True) if size >= least)
    assert first.value == pytest.approx(kept[-(-9 * len(kept) // 10) - 1])


LR = "[search.space]\n'algorithm.solver.lr' = {}\n"


@pytest.mark.parametrize(("text", "named"), [
    ("", "has no [search] section"),
    ("[search]\ncriterion = 'test_90'\n" + LR.format("[1.0]"), "search.criterion"),
    ("[search]\n", "search.space is empty"),
    ("[search]\nseeds = 0\n" + LR.format("[1.0]"), "search.seeds must be at least 1, but is 0"),
    ("[search]\ntrials = 0\n" + LR.format("[1.0]"), "search.trials must be at least 1"),
    ("[search]\nat_least = 5\n" + LR.format("[1.0]"), "search.at_least"),
    ("[search]\nsede = 1\n", "search.sede"),
    (LR.format("3"), "algorithm.solver.lr must be a list of different values, but is 3"),
    (LR.format("[3, 3]"), "must be a list of different values"),
    (LR.format("{low = 1, high = 2}"), "algorithm.solver.lr"),
    (LR.format("[0.1, -1.0]"), "algorithm.solver.lr"),
    (LR.replace("lr", "rl").format("[0.1]"), "algorithm.solver.rl"),
    ("[search.space]\n'data.examples' = [10, 20]\n", "search.space.data.examples"),
    ("[search.space]\n'train.seed' = [1, 2]\n", "seeds = N in [search]"),
    ("[search.space]\n'lr' = [1, 2]\n", "search.space.lr"),
    *(("[search]\ntrials = 2\n" + LR.format(axis), named) for axis, named in [
        ("{low = 1.0}", "lr.high is missing"),
        ("{low = 1.0, high = 0.5}", "lr.low must be below high = 0.5, but is 1.0"),
        ("{low = 0.0, high = 0.5, log = true}", "lr.low must be positive where log = true"),
        ("{low = 'a', high = 0.5}", "lr.low must be a number"),
        ("{low = 0.1, high = inf}", "lr.high must be finite"),
        ("{low = 0.1, high = 0.5, step = 1}", "lr.step"),
        ("{low = -0.1, high = 0.5}", "algorithm.solver.lr"),
    ]),
])  # fmt: skip
def test_what_a_search_cannot_be_is_named(text, named, tmp_path):
    with pytest.raises(ConfigError) as caught:
        read_search(written(tmp_path, text))
    assert named in str(caught.value)


def test_the_command_says_which_trials_failed_and_refuses_in_one_line(tmp_path, here, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = str(written(tmp_path, GRID.format("train_loss")))
    settings = ["--set", "search.space={'algorithm.solver.lr' = [1e38]}", "--set", "algorithm.risk=mean"]
    result = CliRunner().invoke(app, ["tune", file, *settings])
    assert result.exit_code == 1, result.output
    assert "Failed: trial 1: seed 5: it did. See runs/wanted/lr-1e+38-5/run.log." in result.stdout
    assert not (tmp_path / "runs" / "wanted" / "best.toml").exists()
    result = CliRunner().invoke(app, ["tune", file, "--set", "search.seeds=0"])
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.endswith("search.seeds must be at least 1, but is 0. [EQ403]\n")


# ---------------------------------------------------------------------------------------------------------------- killed


def test_a_worker_waits_for_another_in_its_folder(tmp_path):
    pytest.importorskip("fcntl")
    entered = threading.Event()

    def enter():
        with locked(tmp_path / "run.log", wait=True):
            entered.set()

    second = threading.Thread(target=enter)
    with locked(tmp_path / "run.log", wait=True):
        second.start()
        assert not entered.wait(0.1)
    second.join(10)
    assert entered.is_set()


def command(file, out):
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "COLUMNS": "200"}
    words = [sys.executable, "-c", "from equipoise.cli.commands import main; main()", "tune", str(file), "--out", str(out)]
    return subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["grid", "optuna"])
def test_a_killed_search_goes_on_and_ends_as_if_it_had_not_been(kind, tmp_path, console, request):
    """The process of the search is killed in its second run; the run's own process lives on, and is waited for."""
    if kind == "optuna":
        pytest.importorskip("optuna")
    text = GRID.format("train_loss").replace(", 1e38", "") if kind == "grid" else OPTUNA.replace("trials = 6", "trials = 2")
    file = written(tmp_path, text)
    file.write_text(file.read_text().replace("rounds = 4", "rounds = 150\ncheckpoint_every = 10"))
    out = tmp_path / "killed"
    first = command(file, out)
    while first.poll() is None and len(logs := sorted(out.glob("*/rounds.jsonl"))) < 2:
        time.sleep(0.01)
    first.send_signal(signal.SIGKILL)
    first.communicate()
    assert first.returncode == -signal.SIGKILL
    ended = [log for log in logs if folder.RunFolder(log.parent).finished]
    before = {log: log.stat().st_mtime_ns for log in ended}
    second = command(file, out)
    output = second.communicate()[0]
    assert second.returncode == 0, output
    assert "Traceback" not in output
    assert f"equipoise run {out / 'best.toml'}" in output
    assert all(log.stat().st_mtime_ns == before[log] for log in ended)
    for log in out.glob("*/rounds.jsonl"):  # two processes never wrote to one run
        rounds = [event["round"] for event in map(json.loads, log.read_text().splitlines()) if event["event"] == "round"]
        assert rounds == list(range(len(rounds)))
    request.getfixturevalue("here")
    run_search(read_search(file), tmp_path / "whole", workers=1, console=console)
    whole, killed = (tomllib.loads((path / "best.toml").read_text()) for path in (tmp_path / "whole", out))
    assert whole == killed
    assert {p.name for p in out.glob("*/")} == {p.name for p in (tmp_path / "whole").glob("*/")}
