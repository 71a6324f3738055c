"""Runs on the same clients add up, also where each seed splits the rows of a table anew."""

from pathlib import Path

import pytest
import torch

import equipoise as eq
from equipoise.core.rng import name_keys
from equipoise.core.screen import Screen
from equipoise.experiment.open_runs import group_data
from equipoise.privacy.accounting import epsilon_of
from equipoise.privacy.common_clients import client_marks, join_data
from equipoise.privacy.ledger_report import words_below
from equipoise.privacy.releases import CohortEvent, PoissonSampling, Release

DP = eq.privacy.DifferentialPrivacy(None, 1e-2, clip=1.0, noise_multiplier=1.0)
OPTIONS = {"rounds": 2, "clients_per_round": 3, "seed": 0, "progress": False}


def table(seed, clients=12):
    generator = torch.Generator().manual_seed(7)
    x = torch.rand(10 * clients, generator=generator)
    frame = {"who": [f"c{k % clients}" for k in range(10 * clients)], "x": x.tolist(), "y": (x > 0.5).tolist()}
    return eq.data.from_frame(frame, client="who", target="y", split_by="examples", seed=seed)


def expected(runs):
    return epsilon_of([(CohortEvent((Release("update", 1.0),), PoissonSampling(0.25)), 2 * runs)], 1e-2)


def test_two_splits_of_a_table_in_one_ledger(tmp_path):
    ledger = tmp_path / "ledger.jsonl"
    for seed in (0, 1):
        data = table(seed)
        model = eq.models.Softmax(data.features, data.classes)
        result = eq.train(model, data, eq.Algorithm(privacy=DP), ledger=ledger, **OPTIONS)
    assert table(0).fingerprint != table(1).fingerprint
    assert f"All 2 runs on these clients in the ledger together: ε = {expected(2):.4g}" in str(result.privacy)
    said = words_below(tmp_path, group_data(tmp_path))
    assert said.startswith("The 2 private runs on these data together")
    assert table(0).fingerprint not in said  # a hash of all examples: whoever knows all but one may try that one
    assert f"ε = {expected(2):.4g} at" in said


def test_seeds_of_a_study_split_the_table_anew_and_add_up(tmp_path):
    """Before, each seed was a data set of its own, and `equipoise compare` printed no ε for all of them."""
    from equipoise.experiment.scheduler import run_all
    from equipoise.experiment.study import prepare, read_study

    rows = "".join(f"c{k % 12},{k / 120},{int(k % 7 < 3)}\n" for k in range(120))
    (tmp_path / "table.csv").write_text("who,x,y\n" + rows)
    (tmp_path / "study.toml").write_text(
        "[study]\nseeds = 3\n[methods.private]\n"
        'privacy = {name = "differential_privacy", epsilon = "none", delta = 0.01, clip = 1.0, noise_multiplier = 1.0}\n'
        f"[data]\nname = 'csv'\npath = '{tmp_path / 'table.csv'}'\nclient = 'who'\ntarget = 'y'\nsplit_by = 'examples'\n"
        "[model]\nname = 'softmax'\n[train]\nrounds = 2\nclients_per_round = 3\n"
    )
    runs = read_study(tmp_path / "study.toml", (), out=tmp_path / "out")
    prepare(runs)
    run_all(runs, workers=1, console=Screen(quiet=True))
    said = words_below(tmp_path / "out", group_data(tmp_path / "out"))
    assert "The 3 private runs" in said
    assert f"ε = {expected(3):.4g}" in said


def test_an_exact_model_of_another_split_is_not_overlooked(tmp_path):
    for name, data in (("a", "one"), ("b", "two")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.toml").write_text("[data]\nname = 'csv'\npath = '/t.csv'\n[algorithm]\n")
        line = f'{{"kind":"exact","data":"{data}","run":"{name}","round":0,"purpose":"update"}}\n'
        (tmp_path / name / "ledger.jsonl").write_text(line)
    assert group_data(tmp_path) == {"one": "one, two", "two": "one, two"}
    (tmp_path / "b" / "config.toml").write_text("[data]\nname = 'csv'\npath = '/other.csv'\n[algorithm]\n")
    assert group_data(tmp_path) == {"one": "one", "two": "two"}
    assert group_data(Path(tmp_path / "nothing")) == {}


@pytest.mark.parametrize(("first", "shared"), [(0, True), (900, True), (2000, False)])
def test_marks_of_many_clients(first, shared):
    """Of 1000 clients only some marks are kept: sets that share a tenth of their clients have some in common."""
    one, other = (client_marks(name_keys([f"client {k}" for k in range(low, low + 1000)])) for low in (0, first))
    assert len(one) == 256
    assert bool(set(one) & set(other)) == shared
    names = join_data([(["a"], {(mark,) for mark in one}), (["b"], {(mark,) for mark in other})])
    assert (names["a"] == names["b"]) == shared
