"""Learning rates that `reproduce --tune` chooses for each method on validation examples."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import equipoise as eq
from equipoise.errors import ConfigError, InvalidParameter
from equipoise.reproduce import EXPERIMENTS, Scale, reproduce
from equipoise.reproduce.chosen_rates import (
    CHOOSING_SEED,
    best_rate,
    candidates,
    chosen_rates,
    methods_with_a_choice,
    validation_accuracy,
    with_chosen_rates,
    with_rate,
)  # fmt: skip
from equipoise.reproduce.entry import Method
from equipoise.reproduce.experiment_runs import ExperimentRuns

NAME = "synthetic-with-a-choice"


def split_data(folder, seed, validation=0.0):
    """Synthetic clients whose test examples do not depend on the validation share."""
    made = eq.data.synthetic(1.0, 1.0, clients=6, seed=0)
    packed = made.train
    return eq.data.split_examples(packed, validation=validation, test=0.2, seed=0, classes=10)


@pytest.fixture
def entry(monkeypatch, tmp_path):
    """An entry with a choice of two rates for three methods; the second rate learns nothing."""
    monkeypatch.chdir(tmp_path)
    scaffold = eq.solvers.Scaffold(solver=eq.solvers.SGD(lr=0.1, batch_size=10, epochs=1))
    full = eq.sampling.Full()
    made = replace(
        EXPERIMENTS["pfllib-fashion-mnist-dirichlet"],
        name=NAME, tables=(), needs=(), same_data=True, data=split_data, rates=(1e-9, 0.1),
        model=lambda data, folder, seed: eq.models.Softmax(60, 10),
        solver=eq.solvers.SGD(lr=0.1, batch_size=10, epochs=1),
        methods=(
            Method("FedAvg", sampler=full), Method("SCAFFOLD", sampler=full, local=scaffold),
            Method("FedAvg, long", sampler=full, rounds=5),
        ),
        scales={"small": Scale(3, 6, 2), "paper": Scale(3, 6, 2)},
    )  # fmt: skip
    monkeypatch.setitem(EXPERIMENTS, NAME, made)
    return made


def runs_of(entry, out="out"):
    return ExperimentRuns(entry, "small", entry.scales["small"], None, Path(out) / f"{NAME}-small", None, lambda _: None)


def made(**options):
    lines = []
    return reproduce(NAME, out=Path("out"), say=lines.append, **options), lines


def test_each_method_is_run_with_the_rate_that_validation_examples_chose(entry):
    folder, lines = made(tune=True)
    assert folder == Path("out") / f"{NAME}-small" / "chosen"
    assert chosen_rates(runs_of(entry)) == {"FedAvg": 0.1, "SCAFFOLD": 0.1}
    files = sorted(path.name for path in (folder / "runs").iterdir())
    assert files == ["fedavg-seed0.json", "fedavg-seed1.json", "scaffold-seed0.json", "scaffold-seed1.json"]
    assert "FedAvg 0.1, SCAFFOLD 0.1" in lines[-1]
    assert f"{NAME} --scale small --tune" in lines[-1]
    assert json.loads((folder / "result.json").read_text(encoding="utf-8"))["chosen_rates"] == {"FedAvg": 0.1, "SCAFFOLD": 0.1}


def test_the_same_command_makes_nothing_twice_and_show_prints_the_same(entry):
    made(tune=True)
    _, again = made(tune=True)
    assert sum("0 runs to make" in line for line in again) == 2
    _, shown = made(tune=True, show=True)
    assert shown[-1].split("What differs")[1] == again[-1].split("What differs")[1]


def test_a_run_at_the_rate_of_the_table_is_taken_from_it(entry):
    made()
    _, lines = made(tune=True, seeds=2)
    assert any("0 runs to make, 4 kept from before" in line for line in lines)


def test_the_choice_is_made_without_test_examples_and_without_reported_seeds(entry):
    tried = candidates(runs_of(entry))
    assert list(tried.seeds) == [CHOOSING_SEED]
    assert CHOOSING_SEED not in runs_of(entry).seeds
    plain, held_out = split_data(None, 0), split_data(None, 0, validation=0.1)
    assert torch.equal(plain.test.x, held_out.test.x)
    method = tried.entry.methods[1]
    data = tried.data(method, CHOOSING_SEED)
    assert data.validation is not None

    class Trained:
        result = eq.train(eq.models.Softmax(60, 10), data, eq.Algorithm(), rounds=1, clients_per_round=6, progress=False)

    before = validation_accuracy(Trained)
    rows = Trained.result.clients.where("validation")
    assert before["validation"] == pytest.approx(100 * (1 - float((rows.error * rows.size).sum() / rows.size.sum())))


def test_a_method_without_all_its_candidates_is_left_out(entry):
    made(tune=True)
    (Path("out") / f"{NAME}-small" / "candidates" / "runs" / f"scaffold-rate-0.1-seed{CHOOSING_SEED}.json").unlink()
    assert chosen_rates(runs_of(entry)) == {"FedAvg": 0.1}
    assert [method.name for method in with_chosen_rates(runs_of(entry)).entry.methods] == ["FedAvg"]
    with pytest.raises(ConfigError, match="no method that was run with every rate"):
        with_chosen_rates(runs_of(entry, "elsewhere"))


def test_the_best_rate_and_ties():
    assert best_rate({0.005: 70.0, 0.02: 80.0, 0.05: 79.0}) == 0.02
    assert best_rate({0.05: 80.0, 0.02: 80.0}) == 0.02  # equal: the smaller


def test_the_rate_of_local_work_is_replaced_also_inside_another_solver(entry):
    plain, wrapped, _ = entry.methods
    assert with_rate(plain, 0.3).solver == {"lr": 0.3}
    assert with_rate(wrapped, 0.3).local.solver.lr == 0.3
    assert with_rate(replace(plain, local=eq.solvers.PerFedAvg(lr=0.1)), 0.3).local.lr == 0.3
    with pytest.raises(InvalidParameter, match="learning rate"):
        with_rate(replace(plain, local=object()), 0.3)


def test_rows_that_differ_by_their_rounds_have_no_choice_of_their_own(entry):
    assert [method.name for method in methods_with_a_choice(runs_of(entry))] == ["FedAvg", "SCAFFOLD"]


def test_entries_without_a_rule_refuse(entry):
    with pytest.raises(ConfigError, match="no rule"):
        candidates(replace(runs_of(entry), entry=replace(entry, choose=None)))
