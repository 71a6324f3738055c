"""A search in Python: what it tries, by whom it judges, and how it goes on."""

import sys
from dataclasses import replace

import pandas as pd
import pytest
import torch
from torch import nn

import equipoise as eq
from equipoise.errors import CheckpointError, ConfigError, Diverged, InvalidData, InvalidParameter

DATA = eq.data.label_shift(train_clients=12, validation_clients=6, test_clients=5, examples=30)
USUAL = {"rounds": 4, "clients_per_round": 5}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(20, 8), nn.Linear(8, 10)

    def forward(self, x):
        return self.last(self.first(x).relu())


def net(seed):
    return Net()


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
    again = eq.tune(by_rate, space, net, other, seeds=2, **USUAL)
    assert again.trials == tuned.trials
    text = tuned.summary()
    assert "validation_90: 90th percentile of the validation error, mean ± standard deviation over 2 seeds" in text
    assert "may be so by chance: 2 seeds do not tell. Set seeds = 3 or more." in text
    assert "Test clients took no part." in repr(tuned)


def test_values_may_be_parts_and_the_training_loss_a_criterion():
    space = {"risk": [eq.risk.Mean(), eq.risk.Superquantile(tail=0.5)]}
    given = {"criterion": "train_loss", **USUAL}
    tuned = eq.tune(lambda risk: eq.Algorithm(risk=risk), space, net, replace(DATA, validation=None), **given)
    assert tuned.best.risk in space["risk"]
    assert "Superquantile(" in tuned.summary()


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
        assert tuned.summary().startswith(f"{criterion}: mean validation error")
    with pytest.raises(InvalidData, match='criterion = "validation_mean" needs validation clients'):
        eq.tune(by_rate, {"lr": [0.1]}, model, replace(whole, validation=None), criterion="validation_mean", **USUAL)


def test_optuna_goes_on_after_ctrl_c_and_ends_with_the_same_trials(tmp_path):
    pytest.importorskip("optuna")
    space = {"lr": {"low": 0.01, "high": 1.0, "log": True}, "risk": ["mean", "tail"]}
    search = {"trials": 4, "seeds": 2, **USUAL}
    whole = eq.tune(by_rate, space, net, DATA, folder=tmp_path / "whole", **search)
    assert len(whole.trials) == 4
    assert all(0.01 <= trial.values["lr"] <= 1.0 for trial in whole.trials)
    assert eq.tune(by_rate, space, net, DATA, **search).trials == whole.trials  # in memory, the seed decides alike
    stopped = Watch(stop_after=19)  # of 4 · 2 · 4 rounds: in the third trial
    with pytest.raises(KeyboardInterrupt) as caught:
        eq.tune(by_rate, space, net, DATA, folder=tmp_path / "cut", observers=[stopped], **search)
    (note,) = caught.value.__notes__
    assert note.startswith(str(tmp_path / "cut"))
    assert note.endswith("Repeat the call to go on from there.")
    rest = Watch()
    resumed = eq.tune(by_rate, space, net, DATA, folder=tmp_path / "cut", observers=[rest], **search)
    assert resumed.trials == whole.trials
    assert rest.rounds == 32 - 16  # two trials had ended
    again = Watch()
    assert eq.tune(by_rate, space, net, DATA, folder=tmp_path / "cut", observers=[again], **search).trials == whole.trials
    assert again.rounds == 0
    with pytest.raises(ConfigError, match=r"study\.db holds a search with another rounds\. Name another folder"):
        eq.tune(by_rate, space, net, DATA, folder=tmp_path / "cut", **search | {"rounds": 5})


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
    assert 'With folder="runs/tune"' in stopped.value.__notes__[0]


def test_a_trial_that_diverges_fails_alone_and_all_together_raise():
    tuned = eq.tune(by_rate, {"lr": [1e38, 0.1]}, net, DATA, **USUAL)
    assert [trial.criterion is None for trial in tuned.trials] == [False, True]
    assert tuned.values == {"lr": 0.1}
    assert "Failed: trial 2: seed 0: Round 1" in tuned.summary()
    with pytest.raises(Diverged) as caught:
        eq.tune(by_rate, {"lr": [1e38]}, net, DATA, **USUAL)
    assert "All 1 trials failed; this was the first." in caught.value.__notes__
    with pytest.raises(InvalidParameter, match="lr must be a positive number"):
        eq.tune(by_rate, {"lr": [-1.0, -2.0]}, net, DATA, **USUAL)


def test_without_optuna_nothing_is_trained_and_the_cure_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    watch = Watch()
    with pytest.raises(ConfigError, match=r'trials=… needs Optuna, .*pip install "equipoise\[tune\]"\. Or list values'):
        eq.tune(by_rate, {"lr": [0.1, 1.0]}, net, DATA, trials=3, observers=[watch], **USUAL)
    assert watch.rounds == 0
    assert eq.tune(by_rate, {"lr": [0.1]}, net, DATA, **USUAL).values == {"lr": 0.1}  # a grid needs none


@pytest.mark.parametrize(("change", "message"), [
    ({"space": {}}, "space must map names"),
    ({"space": {"lr": 0.1}}, r"space\['lr'\] must be a list of different values, but is 0\.1"),
    ({"space": {"lr": [0.1, 0.1]}}, "must be a list of different values"),
    ({"space": {"rate": [0.1]}}, r"algorithm must take the names of space, rate, as its parameters.*missing a"),
    ({"space": {"lr": {"low": 0.1, "high": 1.0}}}, "must be a list of values without trials=….*or give trials=20"),
    ({"space": {"lr": {"low": 1.0, "high": 0.1}}, "trials": 2}, "low must be below high"),
    ({"algorithm": eq.Algorithm()}, "algorithm must be a function that makes an Algorithm"),
    ({"algorithm": lambda lr: lr}, r"algorithm must be a function that gives an equipoise\.Algorithm"),
    ({"criterion": "test_90"}, "criterion must be one of train_loss, validation_90"),
    ({"trials": 0}, "trials must be a whole number of at least 1"),
    ({"checkpoint": "a.ckpt"}, "checkpoint is set by tune.*folder="),
    ({"seed": 3}, "seed is set by tune.*seeds="),
    ({"space": {"lr": [lambda: 0.1]}, "folder": "runs"}, "repr is the same in every process"),
])  # fmt: skip
def test_what_cannot_be_searched_is_refused(change, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    given = {"algorithm": by_rate, "space": {"lr": [0.1]}, "model": net, "data": DATA, **USUAL} | change
    with pytest.raises((InvalidParameter, ConfigError), match=message):
        eq.tune(**given)


def test_data_that_the_criterion_cannot_judge_are_refused():
    with pytest.raises(InvalidData, match=r"validation_90.*have none.*criterion=\"train_loss\""):
        eq.tune(by_rate, {"lr": [0.1]}, net, replace(DATA, validation=None), **USUAL)
    own = eq.Algorithm(personal=eq.personal.Finetuning())
    with pytest.raises(ConfigError, match="the closest fit would win"):
        eq.tune(lambda lr: own, {"lr": [0.1]}, net, DATA, criterion="train_loss", **USUAL)
    with pytest.raises(InvalidParameter, match=r"Write tune\(algorithm, space, model, data, …\)"):
        eq.tune(by_rate, {"lr": [0.1]}, DATA, net, **USUAL)


def test_at_least_leaves_out_small_validation_clients_and_few_examples_are_said():
    shop, x, y = ["a"] * 200 + ["b"] * 120 + ["c"] * 20, [0.5, 1.5, 2.5, 3.5, 4.5] * 68, [0.1, 1.2, 5.3, 2.4] * 85
    frame = pd.DataFrame({"shop": shop, "x": x, "y": y})
    data = eq.data.from_frame(frame, client="shop", target="y", validation=0.2, test=0.2, split_by="examples")
    model = eq.models.Tabular(data.schema, hidden=())
    given = {"rounds": 2, "clients_per_round": 3}
    small = int(sorted(data.validation.sizes.tolist())[0])
    every, large = (eq.tune(by_rate, {"lr": [0.01, 0.1]}, model, data, **given, at_least=least) for least in (0, small + 1))
    few = sum(size < 30 for size in data.validation.sizes.tolist())  # "b" and "c"
    assert f"Validation clients with fewer than 30 examples: {few} of 3." in every.summary()
    assert "Fewer than 10 clients are judged (3)" in every.summary()
    assert f"over clients with {small + 1} validation examples or more" in large.summary()
    assert f"Validation clients with fewer than {small + 1} examples, left out: 1 of 3." in large.summary()
    for trial in large.trials:
        run = eq.train(model, data, by_rate(**trial.values), **given)
        assert trial.value == pytest.approx(run.summary("validation", at_least=small + 1).error.percentiles[90])
    with pytest.raises(InvalidParameter, match="at_least must leave a client, and no validation client has more than"):
        eq.tune(by_rate, {"lr": [0.01, 0.1]}, model, data, **given, at_least=10_000)
    with pytest.raises(InvalidParameter, match="at_least must be 0 with the training loss"):
        eq.tune(by_rate, {"lr": [0.01]}, model, data, **given, at_least=5, criterion="train_loss")


def test_the_table_shows_what_differs_from_defaults_once():
    space = {"risk": [eq.risk.Superquantile(tail=0.3), eq.risk.Superquantile(tail=0.2), eq.risk.Mean()]}
    tuned = eq.tune(lambda risk: eq.Algorithm(risk=risk), space, net, DATA, **USUAL)
    text = tuned.summary()
    assert "smoothing" not in text
    assert text.count("Superquantile(tail=0.3)") == text.count("Superquantile(tail=0.2)") == 1
    assert "best, trial 1," in text  # may be so by chance, or is only the first of equal ones
    assert "smoothing" not in repr(tuned)
