"""Families and several runs that stop and go on end as if they had never stopped."""

import signal
import subprocess
import sys
import tempfile
import warnings
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import nn

import equipoise as eq
from equipoise.compare import Comparison
from equipoise.data.clients import FederatedData
from equipoise.errors import Diverged, EquipoiseNotice, ObserverFailed
from equipoise.runs.checkpoint import CheckpointError, Checkpoints, read_checkpoint
from equipoise.types import Observer
from made_clients import make_clients

SGD = eq.solvers.SGD(lr=0.2, batch_size=4)
ENGINES = pytest.mark.parametrize("engine", ["loop", "simulator"])


def clients():
    return FederatedData(make_clients([1, 2, 3, 7, 10, 11, 20, 25]), test=make_clients([5, 9], seed=1, prefix="unseen"))


def softmax(seed=0):
    model = eq.models.Softmax(4, 3)
    with torch.no_grad():
        model.weight.copy_(torch.randn(3, 4, generator=torch.Generator().manual_seed(seed)))
    return model


class Squares(nn.Module):
    """Outputs squared: with a huge learning rate the parameters grow from round to round, from however small a start."""

    def __init__(self, start):
        super().__init__()
        self.weight = nn.Parameter(torch.full((4, 3), start, dtype=torch.float64))

    def forward(self, x):
        return x.double() @ self.weight

    def loss(self, outputs, targets):
        return outputs.square().sum(1)


GROWING = eq.Algorithm(solver=eq.solvers.SGD(lr=1e20, batch_size=None), risk=eq.risk.Superquantile(0.5))


def growing(seed):
    """A model that can be trained for seven rounds, but for that of seed 1, which diverges in the fourth."""
    return Squares(1e-60 if seed == 1 else 1e-200 * (seed + 1))


def family(algorithm=None, **options):
    """The members of a family as a list of results."""
    knob = {"tails": [1.0, 0.5, 0.2]} if not {"qs", "tilts", "tails"} & set(options) else {}
    given = {"rounds": 7, "clients_per_round": 4, "seed": 5, "evaluate_every": 2} | knob | options
    return list(eq.train_family(softmax(), clients(), algorithm or eq.Algorithm(solver=SGD), **given).results.values())


def many(algorithms=None, model=softmax, **options):
    """Several runs as a list of results."""
    given = {"seeds": [3, 0, 1], "rounds": 7, "clients_per_round": 4, "evaluate_every": 2} | options
    results = eq.train_many(model, clients(), algorithms or eq.Algorithm(solver=SGD), **given).results
    return [run for runs in results.values() for run in runs]


ADAM = eq.Algorithm(solver=SGD, server=eq.server_opt.Adam(lr=0.1), averaging=eq.averaging.Geometric(0.1))
GROUPS = {
    "tails, Adam, averaging, a slow quantile": (family, {"algorithm": replace(ADAM, risk=eq.risk.Superquantile(eta_every=3))}),
    "tracked tilts, momentum, stragglers": (family, {
        "algorithm": eq.Algorithm(
            risk=eq.risk.Tilted(tracked=True), server=eq.server_opt.Momentum(),
            solver=eq.solvers.SGD(epochs=3, straggler_share=0.5),
        ),
        "tilts": [-1.0, 2.0],
    }),
    "qs, a solver that prepares rounds": (family, {
        "algorithm": eq.Algorithm(solver=eq.solvers.AdaptiveProx(SGD)), "qs": [0.0, 1.0],
    }),
    "seeds, Adam, averaging, a slow quantile": (many, {
        "algorithms": replace(ADAM, risk=eq.risk.Superquantile(0.5, eta_every=3)),
    }),
    "seeds, worst case": (many, {"algorithms": eq.Algorithm(risk=eq.risk.WorstCase(), sampler=eq.sampling.Full(), solver=SGD)}),
    "seeds and algorithms": (many, {
        "algorithms": {"Poisson": replace(ADAM, sampler=eq.sampling.Poisson()), "q": eq.Algorithm(eq.risk.QFair(1.0), SGD)},
        "seeds": 2,
    }),
}  # fmt: skip


class StopAt(Observer):
    """Stops after some calls of `on_round`, as a power cut would."""

    def __init__(self, calls):
        self.calls = calls

    def on_round(self, report):
        self.calls -= 1
        if self.calls < 0:
            raise RuntimeError("power cut")


class Noting(Observer):
    """Notes the names of the runs whose rounds it is told of."""

    def __init__(self):
        self.rounds = []

    def on_round(self, report):
        self.rounds.append((report.run, report.round))


def assert_same_runs(found, wanted):
    """All that two lists of runs left is the same, bit for bit, but for the time it took."""
    assert [(run.name, run.seed) for run in found] == [(run.name, run.seed) for run in wanted]
    for mine, theirs in zip(found, wanted, strict=True):
        assert torch.equal(mine.params, theirs.params)
        assert torch.equal(mine.clients.loss, theirs.clients.loss)
        assert mine.history.points == theirs.history.points
        mine, theirs = ([replace(report, seconds=0.0) for report in run.history.rounds] for run in (mine, theirs))
        assert repr(mine) == repr(theirs)  # NaN where nobody was drawn


@ENGINES
@pytest.mark.parametrize("name", GROUPS)
def test_stopping_and_going_on_changes_nothing(name, engine, tmp_path):
    train, options = GROUPS[name]
    whole = train(engine=engine, **options)
    file = tmp_path / "group.safetensors"
    for calls in (2 * len(whole) + 1, 3 * len(whole) - 1):  # in the third round; and, going on from there, in the last but one
        with pytest.raises(ObserverFailed, match="power cut"):
            train(engine=engine, observers=[StopAt(calls)], checkpoint=Checkpoints(file, every=1), **options)
    saved = read_checkpoint(file)
    assert [run.state.round for run in saved.runs] == [4] * len(whole)
    assert_same_runs(train(engine=engine, checkpoint=file, **options), whole)


@settings(max_examples=8)
@given(
    name=st.sampled_from(sorted(GROUPS)),
    stops=st.lists(st.integers(0, 12), min_size=1, max_size=3),
    every=st.integers(1, 4),
)
def test_stopping_anywhere_and_going_on_changes_nothing(name, stops, every):
    train, options = GROUPS[name]
    whole = train(engine="loop", **options)
    with tempfile.TemporaryDirectory() as folder:
        saving = {"engine": "loop", "checkpoint": Checkpoints(Path(folder) / "group", every=every), **options}
        for calls in stops:
            with suppress(ObserverFailed):
                train(observers=[StopAt(calls)], **saving)
        assert_same_runs(train(**saving), whole)


# ------------------------------------------------------------------------------------------------------- runs that diverge


@ENGINES
@pytest.mark.parametrize("calls", [4, 10, 14])  # before the run of seed 1 diverges, in that very round, and later
def test_a_run_that_diverged_before_the_stop_has_diverged_after_it(engine, calls, tmp_path):
    options = {"algorithms": GROWING, "model": growing, "engine": engine}
    with pytest.raises(Diverged) as whole:
        many(**options)
    assert (whole.value.round, whole.value.run, len(whole.value.history.rounds)) == (3, "run, seed 1", 3)
    file = tmp_path / "group.safetensors"
    with pytest.raises(ObserverFailed, match="power cut"):
        many(observers=[StopAt(calls)], checkpoint=Checkpoints(file, every=1), **options)
    saved = read_checkpoint(file)
    assert [run.failure is None for run in saved.runs] == [True, True, calls < 14]
    noted = Noting()
    with pytest.raises(Diverged) as resumed:
        many(observers=[noted], checkpoint=file, **options)
    assert str(resumed.value) == str(whole.value)
    assert resumed.value.__notes__ == whole.value.__notes__ == ["This was method 'run' with seed 1."]
    assert (resumed.value.round, resumed.value.clients, resumed.value.run) == (3, whole.value.clients, "run, seed 1")
    losses = [[report.loss for report in failure.value.history.rounds] for failure in (resumed, whole)]
    assert losses[0] == losses[1]
    assert_same_runs(resumed.value.finished.results["run"], whole.value.finished.results["run"])
    if calls == 14:
        assert {name for name, _ in noted.rounds} == {"run, seed 3", "run, seed 0"}


def test_the_checkpoint_of_a_family_or_a_run_that_diverges_stays_before_it(tmp_path):
    # What diverges on one engine or in one precision may not on another: it can be tried again.
    wild = eq.Algorithm(solver=eq.solvers.SGD(lr=1e38))
    for train, options in (
        (family, {"algorithm": wild}),
        (many, {"algorithms": wild, "seeds": 1}),
        (many, {"algorithms": wild}),
    ):
        file = tmp_path / f"{train.__name__}-{len(options)}.safetensors"
        for _ in range(2):
            with pytest.raises(Diverged) as caught:
                train(checkpoint=Checkpoints(file, every=1), **options)
            saved = read_checkpoint(file)
            assert all(run.failure is None for run in saved.runs)
            assert max(run.state.round for run in saved.runs) <= caught.value.round


# --------------------------------------------------------------------------------------------- a process that is killed

WORKER = """
import sys, time
sys.path.insert(0, {tests!r})
from test_group_checkpoints import *

class Slowly(Observer):
    def on_round(self, report):
        print(report.run, report.round, flush=True)
        time.sleep(0.05)

train, options = GROUPS[{name!r}]
results = train(observers=[Slowly()], checkpoint=Checkpoints({file!r}, every=1), engine={engine!r}, **options)
torch.save([(run.params, run.clients.loss) for run in results], {out!r})
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="kills a process")
@pytest.mark.parametrize(
    ("name", "engine"), [("tails, Adam, averaging, a slow quantile", "simulator"), ("seeds and algorithms", "loop")]
)
def test_a_process_that_is_killed_and_started_again_ends_the_same(name, engine, tmp_path):
    file, out = tmp_path / "group.safetensors", tmp_path / "results"
    code = WORKER.format(tests=str(Path(__file__).parent), name=name, engine=engine, file=str(file), out=str(out))
    train, options = GROUPS[name]
    whole = train(engine=engine, **options)
    first_rounds = []
    for lines in (len(whole) + 2, 2 * len(whole) + 1):  # in the second round, and two rounds further
        with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
            told = [process.stdout.readline() for _ in range(lines)]
            process.send_signal(signal.SIGKILL)
            process.wait()
        assert process.returncode == -signal.SIGKILL
        first_rounds.append(int(told[0].split()[-1]))
        assert not out.exists()
    assert first_rounds[0] == 0 < first_rounds[1]  # it went on from a checkpoint
    last = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert last.returncode == 0, last.stderr
    assert int(last.stdout.splitlines()[0].split()[-1]) > first_rounds[1]
    for (params, losses), run in zip(torch.load(out), whole, strict=True):
        assert torch.equal(params, run.params)
        assert torch.equal(losses, run.clients.loss)


# ------------------------------------------------------------------------------------------------------ what is refused


@pytest.mark.parametrize(
    ("train", "change", "words"),
    [
        (family, {"tails": [1.0, 0.5, 0.3]}, "differs in algorithm: "),
        (family, {"tails": [0.5, 1.0, 0.2]}, "differs in algorithm: "),
        (family, {"tails": [1.0, 0.5]}, "differs in number of runs: 3 there, 2 here"),
        (family, {"tails": [1.0]}, "differs in number of runs: 3 there, 1 here"),
        (family, {"qs": [0.0, 0.5, 1.0]}, "differs in algorithm: "),
        (family, {"seed": 6}, "differs in seed: 5 there, 6 here"),
        (family, {"clients_per_round": 3}, "differs in clients_per_round: 4 there, 3 here"),
        (family, {"algorithm": ADAM}, "differs in algorithm: "),
        (family, {"rounds": 2}, "is already at round 3, beyond rounds = 2"),
        (many, {"seeds": [3, 0, 2]}, "differs in seed: 1 there, 2 here"),
        (many, {"seeds": [0, 3, 1]}, "differs in seed: 3 there, 0 here"),
        (many, {"seeds": [3, 0]}, "differs in number of runs: 3 there, 2 here"),
        (many, {"seeds": [3]}, "differs in number of runs: 3 there, 1 here"),
        (many, {"algorithms": ADAM}, "differs in algorithm: "),
        (many, {"rounds": 2}, "is already at round 3, beyond rounds = 2"),
    ],
)  # fmt: skip
def test_the_checkpoint_of_other_runs_is_refused(train, change, words, tmp_path):
    file = tmp_path / "group.safetensors"
    train(rounds=3, engine="loop", checkpoint=file)
    before = file.read_bytes()
    with pytest.raises(CheckpointError) as caught:
        train(**({"rounds": 3, "engine": "loop", "checkpoint": file} | change))
    assert str(file) in str(caught.value)
    assert words in str(caught.value)
    assert file.read_bytes() == before


def test_the_checkpoint_of_a_single_run_is_none_of_a_family(tmp_path):
    file = tmp_path / "state.safetensors"
    eq.train(softmax(), clients(), rounds=2, clients_per_round=4, checkpoint=file)
    with pytest.raises(CheckpointError, match="differs in number of runs: 1 there, 3 here"):
        family(checkpoint=file)


# -------------------------------------------------------------------------------------------------- what is finished


@pytest.mark.parametrize("train", [family, many])
def test_a_finished_group_is_not_run_again_and_can_be_extended(train, tmp_path):
    file, noted = tmp_path / "group.safetensors", Noting()
    first = train(checkpoint=file, rounds=3)
    again = train(checkpoint=file, rounds=3, observers=[noted])
    assert not noted.rounds
    assert_same_runs(again, first)
    assert_same_runs(train(checkpoint=file), train())


MIXED = {
    "FedAvg": eq.Algorithm(solver=SGD),
    "slow": eq.Algorithm(solver=eq.solvers.SGD(lr=0.01)),
    "median": eq.Algorithm(solver=SGD, aggregator=eq.aggregators.Median()),
    "own": eq.Algorithm(solver=SGD, personal=eq.personal.Ditto()),
    "secure": eq.Algorithm(solver=SGD, privacy=eq.privacy.SecureAggregation()),
}


@pytest.mark.filterwarnings("ignore::equipoise.errors.EquipoiseNotice")
@pytest.mark.parametrize("every", [None, 1])
def test_groups_have_files_of_their_own(every, tmp_path):
    whole = many(MIXED, seeds=2)
    file = tmp_path / "many.ckpt"
    saving = {"checkpoint": Checkpoints(file, every=1) if every else file, "seeds": 2}
    with pytest.raises(ObserverFailed):
        many(MIXED, observers=[StopAt(2 * 7 + 2 * 7 + 7 + 3)], **saving)  # in the first run with models of clients' own
    files = ["many.ckpt", "many-2.ckpt", "many-median-seed0.ckpt", "many-own-seed0.ckpt"]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*files, "many-own-seed0.clients.npy"])
    saved = [[run.state.round for run in read_checkpoint(tmp_path / name).runs] for name in files]
    assert saved == [[7, 7], [7, 7], [7], [3 if every else 0]]
    noted = Noting()
    assert_same_runs(many(MIXED, observers=[noted], **saving), whole)
    assert {name for name, _ in noted.rounds} == {
        "own, seed 0", "secure, seed 0", "median, seed 1", "own, seed 1", "secure, seed 1",
    }  # fmt: skip
    assert noted.rounds[0] == ("own, seed 0", 3 if every else 0)
    groups = [path for path in tmp_path.iterdir() if path.suffix == ".ckpt"]
    assert len(groups) == 8
    noted.rounds.clear()
    assert_same_runs(many(MIXED, observers=[noted], **saving), whole)
    assert not noted.rounds


@pytest.mark.filterwarnings("ignore::equipoise.errors.EquipoiseNotice")
def test_single_runs_are_found_by_name_if_others_are_added(tmp_path):
    file, noted = tmp_path / "many.ckpt", Noting()
    first = {name: MIXED[name] for name in ("median", "own")}
    whole = many(first, seeds=1, checkpoint=file)
    assert {path.name for path in tmp_path.glob("*.ckpt")} == {"many-median-seed0.ckpt", "many-own-seed0.ckpt"}
    again = many({"secure": MIXED["secure"], **first}, seeds=1, checkpoint=file, observers=[noted])
    assert {name for name, _ in noted.rounds} == {"secure"}
    assert_same_runs(again[1:], whole)


class BadEnd(Observer):
    def on_end(self):
        raise OSError("no")


class Closing(Observer):
    ended = 0

    def on_end(self):
        self.ended += 1


def test_an_error_that_stops_runs_is_not_hidden_by_an_observer_that_fails_at_the_end():
    wild, closing = eq.Algorithm(solver=eq.solvers.SGD(lr=1e38)), Closing()
    with pytest.raises(Diverged) as caught:
        family(wild, observers=[BadEnd(), closing])
    assert caught.value.__notes__ == [f"This was the member with {caught.value.run}."]
    with pytest.raises(Diverged):
        many(wild, observers=[BadEnd(), closing])
    with pytest.raises(ObserverFailed, match="StopAt failed in on_round: power cut"):
        family(observers=[StopAt(4), BadEnd(), closing])
    with pytest.raises(ObserverFailed, match="StopAt failed in on_round: power cut"):
        many(observers=[StopAt(4), BadEnd(), closing])
    assert closing.ended == 4


def test_what_is_finished_is_kept_with_the_error_of_an_observer_at_the_end():
    closing = Closing()
    with pytest.raises(ObserverFailed, match="BadEnd failed in on_end: no") as caught:
        family(observers=[BadEnd(), closing])
    assert isinstance(caught.value.finished, eq.Family)
    assert_same_runs(list(caught.value.finished.results.values()), family())
    with pytest.raises(ObserverFailed, match="BadEnd failed in on_end: no") as caught:
        many(observers=[BadEnd(), closing])
    assert isinstance(caught.value.finished, Comparison)
    assert_same_runs(caught.value.finished.results["run"], many())
    assert closing.ended == 2
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", EquipoiseNotice)
        with pytest.raises(ObserverFailed) as caught:
            many(MIXED, seeds=1, observers=[BadEnd()])
    assert [run.name for runs in caught.value.finished.results.values() for run in runs] == ["FedAvg"]
    with pytest.raises(ObserverFailed) as caught:
        many(observers=[StopAt(3)])
    assert caught.value.finished.results == {}
