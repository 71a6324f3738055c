"""Notices point at the user's line, and several runs of one call give each notice once."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
from torch import nn

import equipoise as eq
from equipoise.errors import EquipoiseNotice, each_notice_once, notify, without_notices

SOURCE = Path(eq.__file__).parent


def test_no_part_of_the_library_counts_stack_levels_for_a_notice():
    direct = [path.name for path in SOURCE.rglob("*.py") if "warnings.warn(EquipoiseNotice" in path.read_text()]
    assert direct == ["errors.py"]


def test_a_notice_of_compare_points_at_the_line_of_the_user():
    data = eq.data.label_shift(train_clients=8, validation_clients=0, test_clients=2, examples=20)
    attacked = eq.attacks.apply(data, eq.attacks.ModelReplacement(share=0.25, factor=1e38, seed=1))
    with pytest.warns(EquipoiseNotice, match="were not finite or absurdly large") as caught:
        eq.compare(
            {"FedAvg": eq.Algorithm()}, eq.models.Softmax(20, 10), attacked, rounds=2, clients_per_round=8, seeds=1,
            progress=False,
        )  # fmt: skip
    assert {Path(each.filename).name for each in caught} == {"test_notices.py"}


def test_a_notice_of_an_algorithm_points_at_the_line_that_makes_it():
    with pytest.warns(EquipoiseNotice, match="nearly all of the weight") as caught:
        eq.Algorithm(risk=eq.risk.Tilted(tilt=1.0), aggregator=eq.aggregators.Median())
    assert Path(caught[0].filename).name == "test_notices.py"
    assert "If Median() resists attackers, it does so only while they have a minority of it." in str(caught[0].message)


def test_group_norm_is_told_once_per_comparison():
    data = eq.data.label_shift(train_clients=8, validation_clients=0, test_clients=2, examples=20)

    def make_net(seed):
        return eq.models.with_group_norm(nn.Sequential(nn.Linear(20, 8), nn.BatchNorm1d(8), nn.Linear(8, 10)))

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        eq.compare({"FedAvg": eq.Algorithm()}, make_net, data, rounds=1, clients_per_round=4, seeds=3, progress=False)
    told = [each for each in caught if "with_group_norm replaced 1 layer" in str(each.message)]
    assert len(told) == 1
    assert Path(told[0].filename).name == "test_notices.py"


def test_what_was_not_shown_does_not_count_as_told():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with each_notice_once():
            with without_notices():
                notify("a")
            with each_notice_once():
                notify("a")
            notify("a")
        notify("a")
    assert [str(each.message) for each in caught] == ["a", "a"]


def test_a_summary_says_how_many_training_clients_are_malicious():
    data = eq.data.label_shift(train_clients=20, validation_clients=0, test_clients=4, seed=0)
    model, options = eq.models.Softmax(data.features, data.classes), {"rounds": 1, "clients_per_round": 5, "progress": False}
    poisoned = eq.attacks.apply(data, eq.attacks.LabelPoisoning(share=0.1, seed=1))
    result = eq.train(model, poisoned, **options)
    assert "4 unseen test clients" in str(result.summary())
    assert {"bad": "2", "all": "20"} in [each.fields for each in result.summary().notices if each.code == "attack"]
    assert "attack" not in [each.code for each in eq.train(model, data, **options).summary().notices]
