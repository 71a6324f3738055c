"""Searches: what they refuse, what they try and judge, and that a killed one goes on as if it had not been."""

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

import pytest

from equipoise.client_table import ClientTable
from equipoise.core.files import locked
from equipoise.core.screen import Screen
from equipoise.errors import ConfigError
from equipoise.experiment import folder, scheduler, tune, worker
from equipoise.experiment.build import build
from equipoise.experiment.config import RunConfig
from equipoise.experiment.search import folder_name, read_search
from equipoise.report.over_seeds import Spread

with warnings.catch_warnings():  # typer 0.20 imports names that click 8.5 deprecates; only that import is excused
    warnings.filterwarnings("ignore", message="'click", category=DeprecationWarning)
    from typer.testing import CliRunner

    from equipoise.cli.commands import app

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
strategy = "optuna"
trials = 6
[search.space]
"algorithm.solver.lr" = {low = 0.01, high = 1.0, log = true}
"algorithm.solver.epochs" = {low = 1, high = 3}
"algorithm.risk" = ["mean", {name = "superquantile", tail = 0.5}]
"""


def written(tmp_path, search):
    file = tmp_path / "wanted.toml"
    file.write_text(search + RUN)
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


# ------------------------------------------------------------------------------------------------------------------ grid


@pytest.mark.parametrize("criterion", ["train_loss", "validation_90"])
def test_a_grid_is_judged_without_test_clients(criterion, tmp_path, console, here):
    search = read_search(written(tmp_path, GRID.format(criterion)), ["search.seeds=2"])
    outcomes = tune.tune(search, tmp_path / "out", workers=1, console=console)
    assert sorted(here) == sorted(f"lr-{lr}-tail-0.5-{seed}" for lr in ("0.001", "0.1", "1e+38") for seed in (5, 6))
    # The one that diverges is the last, and stops nothing.
    assert outcomes[-1].values["algorithm.solver.lr"] == 1e38
    assert outcomes[-1].criterion is None
    assert "seed 5: it did. See" in outcomes[-1].message
    assert outcomes[0].value <= outcomes[1].value
    # Nothing in a run's folder knows test clients, and its configuration says why.
    for path in (tmp_path / "out").glob("lr-*"):
        assert (path / "config.toml").read_text().startswith(tune.NOTE)
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
    tune.tune(read_search(file, [space]), out, workers=1, console=console)
    assert here == ["lr-0.1-tail-0.5-5"]
    more = read_search(file, [space, "search.space.algorithm.risk.tail=[0.2, 0.5]"])
    outcomes = tune.tune(more, out, workers=1, console=console)
    assert here[1:] == ["lr-0.1-tail-0.2-5"]
    assert len(outcomes) == 2
    # What was searched lies in the folder, and can be given again.
    assert read_search(out / "search.toml").space == more.space
    # A folder whose run has another configuration is not taken for this one's.
    with pytest.raises(ConfigError, match=r"train\.rounds is 4 there, 5 here"):
        tune.tune(read_search(file, [space, "train.rounds=5"]), out, workers=1, console=console)


def test_a_run_that_was_ended_with_test_clients_is_refused(tmp_path, console, here):
    file, out = written(tmp_path, GRID.format("train_loss")), tmp_path / "out"
    search = read_search(file, ["search.space={'algorithm.solver.lr' = [0.1]}", "algorithm.risk=mean"])
    tune.tune(search, out, workers=1, console=console)
    place = folder.RunFolder(out / "lr-0.1-5")
    for file in (place.rounds, place.clients, place.checkpoint):
        file.unlink()
    folder.run(build(RunConfig.read(place.config)), place, progress=False, report=False)  # as equipoise run --resume does
    with pytest.raises(ConfigError, match=r"lr-0\.1-5 was judged on test clients.*Delete the folder"):
        tune.tune(search, out, workers=1, console=console)
    shutil.rmtree(place.path)
    assert tune.tune(search, out, workers=1, console=console)[0].criterion is not None


def test_without_validation_clients_their_criterion_is_refused(tmp_path, console):
    search = read_search(written(tmp_path, GRID.format("validation_90")), ["data.validation_clients=0"])
    with pytest.raises(ConfigError, match=r"validation_90.*label_shift' have none\. Set data\.validation_clients above 0"):
        tune.tune(search, tmp_path / "out", workers=1, console=console)
    assert not (tmp_path / "out").exists()


# --------------------------------------------------------------------------------------------------------------- optuna


def test_optuna_tries_ranges_and_values_and_goes_on_for_more(tmp_path, console, here):
    pytest.importorskip("optuna")
    file, out = written(tmp_path, OPTUNA), tmp_path / "out"
    search = read_search(file)
    outcomes = tune.tune(search, out, workers=2, console=console)
    assert len(outcomes) == 6
    for outcome in outcomes:
        lr, epochs, risk = outcome.values.values()
        assert 0.01 <= lr <= 1.0
        assert epochs in (1, 2, 3)
        assert isinstance(epochs, int)
        assert risk in search.space["algorithm.risk"]
    assert outcomes[0].value == min(outcome.value for outcome in outcomes)
    # The same again tries nothing new, more trials add to it, and the seed decides what is tried.
    shutil.rmtree(out / f"{folder_name(outcomes[2].values)}-5")  # but what was deleted is run again
    assert tune.tune(search, out, workers=2, console=console) == outcomes
    assert here.count(here[-1]) == 2
    more = tune.tune(read_search(file, ["search.trials=8"]), out, workers=2, console=console)
    assert [o for o in more if o in outcomes] == outcomes
    assert len(more) == len(set(here)) == 8
    again = tune.tune(search, tmp_path / "again", workers=2, console=console)
    assert again == outcomes
    with pytest.raises(ConfigError, match=r"study\.db holds a search with another criterion"):
        tune.tune(read_search(file, ["search.criterion=validation_90"]), out, workers=2, console=console)


def test_a_failing_trial_of_optuna_is_the_worst(tmp_path, console, here):
    pytest.importorskip("optuna")
    file = written(tmp_path, OPTUNA)
    space = 'search.space={"algorithm.solver.lr" = [0.1, 1e38]}'
    search = read_search(file, [space, "algorithm.risk=mean", "search.trials=5"])
    outcomes = tune.tune(search, tmp_path / "out", workers=1, console=console)
    assert [outcome.values["algorithm.solver.lr"] for outcome in outcomes] == [0.1, 1e38]
    assert outcomes[1].criterion is None
    assert len(set(here)) == 2  # the same values are run once


def test_values_that_do_not_go_together_fail_their_trial(tmp_path, console, here):
    """For Optuna every value is tried with the first of the others; what only other pairs break is found on the way."""
    pytest.importorskip("optuna")
    space = 'search.space={"train.engine" = ["simulator", "loop"], "train.chunk_size" = ["none", 3]}'
    search = read_search(written(tmp_path, OPTUNA), [space, "algorithm.risk=mean", "search.trials=12"])
    outcomes = tune.tune(search, tmp_path / "out", workers=1, console=console)
    assert len(outcomes) == 4
    assert [outcome.criterion is None for outcome in outcomes] == [False, False, False, True]
    assert outcomes[-1].values == {"train.engine": "loop", "train.chunk_size": 3}
    assert "train.chunk_size is not used by the engine 'loop'" in outcomes[-1].message


def test_a_damaged_study_is_refused_with_its_path(tmp_path, console, here):
    pytest.importorskip("optuna")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "study.db").write_bytes(b"no database" * 1000)
    with pytest.raises(ConfigError, match=r"study\.db cannot be used: .* Delete it, or name another folder"):
        tune.tune(read_search(written(tmp_path, OPTUNA)), tmp_path / "out", workers=1, console=console)


def test_without_optuna_the_command_to_install_it_is_given(tmp_path, console, monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(ConfigError, match=r'pip install "equipoise\[tune\]"'):
        tune.tune(read_search(written(tmp_path, OPTUNA)), tmp_path / "out", workers=1, console=console)


# ------------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("search", "words"),
    [
        ("", "has no [search] section"),
        ("[search]\nstrategy = 'random'\n", 'search.strategy must be "grid" or "optuna", but is "random"'),
        ("[search]\ncriterion = 'test_90'\n[search.space]\n'algorithm.solver.lr' = [1.0]\n", 'must be "train_loss" or'),
        ("[search]\n", "search.space is empty"),
        ("[search]\nseeds = 0\n[search.space]\n'algorithm.solver.lr' = [1.0]\n", "search.seeds must be at least 1, but is 0"),
        ("[search]\ntrials = 3\n[search.space]\n'algorithm.solver.lr' = [1.0]\n", "search.trials is for Optuna"),
        ("[search]\nstrategy = 'optuna'\n[search.space]\n'algorithm.solver.lr' = [1.0]\n", "search.trials is missing"),
        ("[search.space]\n'algorithm.solver.lr' = 3\n", "algorithm.solver.lr must be a list of different values, but is 3"),
        ("[search.space]\n'algorithm.solver.lr' = [3, 3]\n", "must be a list of different values"),
        ("[search.space]\n'algorithm.solver.lr' = {low = 1, high = 2}\n", "is a range, which a grid cannot try"),
        ("[search.space]\n'algorithm.solver.lr' = [0.1, -1.0]\n", "algorithm.solver.lr"),
        ("[search.space]\n'algorithm.solver.rl' = [0.1]\n", "algorithm.solver.rl"),
        ("[search.space]\n'data.examples' = [10, 20]\n", "trials on other data cannot be compared"),
        ("[search.space]\n'train.seed' = [1, 2]\n", "seeds = N in [search]"),
        ("[search.space]\n'lr' = [1, 2]\n", "search.space.lr must be a key of [algorithm], [model] or [train]"),
        ("[search]\nsede = 1\n", "search.sede"),
    ],
)  # fmt: skip
def test_what_a_search_cannot_be_is_named(search, words, tmp_path):
    with pytest.raises(ConfigError) as caught:
        read_search(written(tmp_path, search))
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("axis", "words"),
    [
        ("{low = 1.0}", "lr.high is missing"),
        ("{low = 1.0, high = 0.5}", "lr.low must be below high = 0.5, but is 1.0"),
        ("{low = 0.0, high = 0.5, log = true}", "lr.low must be positive where log = true"),
        ("{low = 'a', high = 0.5}", "lr.low must be a number"),
        ("{low = 0.1, high = inf}", "lr.high must be finite"),
        ("{low = 0.1, high = 0.5, step = 1}", "lr.step"),
        ("{low = -0.1, high = 0.5}", "algorithm.solver.lr"),
    ],
)
def test_ranges_are_checked_to_their_ends(axis, words, tmp_path):
    search = f"[search]\nstrategy = 'optuna'\ntrials = 2\n[search.space]\n'algorithm.solver.lr' = {axis}\n"
    with pytest.raises(ConfigError) as caught:
        read_search(written(tmp_path, search))
    assert words in str(caught.value)


def trial(lr, *by_seed):
    """A trial with the given criterion in each seed."""
    return tune.TrialResult({"algorithm.solver.lr": lr}, Spread.of(by_seed), by_seed=by_seed)


def noise_of(trials):
    return tune.noise_words(trials, "validation_90")


def test_a_best_trial_within_the_noise_is_said_so(tmp_path):
    # Differences −0.01, +0.004 and −0.003: mean −0.003, s = 0.007, and ± 4.303 · 0.007 / √3 contains 0.
    text = tune.noise_words(
        [trial(0.1, 0.37, 0.374, 0.369), trial(0.3, 0.38, 0.37, 0.372), trial(1.0, 0.57, 0.575, 0.569)], "validation_90"
    )
    assert text.startswith("The best is within the noise of the next: −0.003 ± 0.007 against lr 0.3")
    assert "do not tell 1 of 2 other trials from the best: lr 0.3." in text
    same = noise_of([trial(0.1, 0.3, 0.3, 0.3), trial(0.3, 0.4, 0.4, 0.4)])
    assert "−0.100 ± 0.000 against lr 0.3, and there is no spread between seeds." in same
    # Differences of −0.1 ± 0.01 are clear.
    assert noise_of([trial(0.1, 0.30, 0.31, 0.29), trial(0.3, 0.40, 0.40, 0.40)]) == ""
    assert "one seed does not tell" in noise_of([trial(0.1, 0.3), trial(0.3, 0.4)])
    assert "2 seeds do not tell" in noise_of([trial(0.1, 0.3, 0.3), trial(0.3, 0.4, 0.4)])
    assert noise_of([trial(0.1, 0.3), tune.TrialResult({}, None, "failed")]) == ""
    equal = noise_of([trial(0.1, 1.0, 1.0), trial(0.3, 1.0, 1.0)])
    assert equal.startswith("All trials have the same validation_90, which therefore chooses none: the best, lr 0.1, is only")
    assert 'criterion = "validation_mean"' in equal
    assert "add seeds" not in equal
    file = tmp_path / "search.toml"
    file.write_text(RUN + GRID.format("validation_90"))
    best = tune.write_best(read_search(file), trial(0.1, 0.3), tmp_path, "It may be chance.")
    assert best.read_text(encoding="utf-8").splitlines()[1] == "# It may be chance."
    RunConfig.read(best)


def test_folders_tell_values_apart():
    points = [{"a.b": value} for value in ("x y", "x-y", {"name": "x"}, ["x"], "x", 1, 1.5, True, "é/é", "z" * 300, "z" * 301)]
    names = [folder_name(values) for values in points]
    assert len(set(names)) == len(names)
    assert all("/" not in name and len(name.encode()) < 250 for name in names)


def test_the_command_says_which_trials_failed_and_refuses_in_one_line(tmp_path, here, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = str(written(tmp_path, GRID.format("train_loss")))
    settings = ["--set", "search.space={'algorithm.solver.lr' = [1e38]}", "--set", "algorithm.risk=mean"]
    result = CliRunner().invoke(app, ["tune", file, *settings])
    assert result.exit_code == 1, result.output
    assert "Failed: lr 1e+38: seed 5: it did. See runs/wanted/lr-1e+38-5/run.log." in result.stderr
    assert not (tmp_path / "runs" / "wanted" / "best.toml").exists()
    result = CliRunner().invoke(app, ["tune", file, "--set", "search.seeds=0"])
    words = "Error: --set search.seeds=0: search.seeds must be at least 1, but is 0. [EQ403]\n"
    assert (result.exit_code, result.stderr) == (2, words)


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
@pytest.mark.parametrize("strategy", ["grid", "optuna"])
def test_a_killed_search_goes_on_and_ends_as_if_it_had_not_been(strategy, tmp_path, console, request):
    """The process of the search is killed in its second run; the run's own process lives on, and is waited for."""
    if strategy == "optuna":
        pytest.importorskip("optuna")
    search = (
        GRID.format("train_loss").replace(", 1e38", "") if strategy == "grid" else OPTUNA.replace("trials = 6", "trials = 2")
    )
    file = written(tmp_path, search)
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
    tune.tune(read_search(file), tmp_path / "whole", workers=1, console=console)
    whole, killed = (tomllib.loads((path / "best.toml").read_text()) for path in (tmp_path / "whole", out))
    assert whole == killed
    assert {p.name for p in out.glob("*/")} == {p.name for p in (tmp_path / "whole").glob("*/")}


def test_at_least_leaves_out_small_validation_clients(tmp_path, console, here):
    file = written(tmp_path, GRID.format("validation_90").replace("0.001, 0.1, 1e38", "0.1, 0.2"))
    sizes = build(read_search(file).config({"algorithm.solver.lr": 0.1})).data.validation.sizes.tolist()
    least = sorted(sizes)[-1]
    search = read_search(file, [f"search.at_least={least}"])
    (first, *_) = tune.tune(search, tmp_path / "out", workers=1, console=console)
    (run, *_) = search.plan(first.values, tmp_path / "out")
    rows = ClientTable.from_parquet(run.folder.clients).where("validation")
    kept = sorted(error for error, size in zip(rows.error.tolist(), rows.size.tolist(), strict=True) if size >= least)
    assert first.value == pytest.approx(kept[-(-9 * len(kept) // 10) - 1])
    assert f"over clients with {least} validation examples or more" in console.file.getvalue()
    with pytest.raises(ConfigError, match=r"search\.at_least must be 0 or more, and 0 with the training loss"):
        read_search(file, ["search.at_least=5", "search.criterion=train_loss"])
    tune.tune(read_search(file), tmp_path / "every", workers=1, console=console)
    assert "Validation clients with fewer than 30 examples: " in console.file.getvalue()
    assert f"Fewer than 10 clients are judged ({len(sizes)})" in console.file.getvalue()
