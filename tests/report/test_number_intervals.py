"""The interval of one client's error in the tables of a report, where targets are numbers."""

import numpy as np
import pandas as pd
import pytest
from report_cases import Page

import equipoise as eq
from equipoise.compare import Comparison


def test_the_report_of_several_seeds_shows_the_interval_by_examples_and_not_that_of_the_seeds(tmp_path):
    draw = np.random.default_rng(0)
    shop = np.repeat([f"shop {k}" for k in range(14)], 40)
    frame = pd.DataFrame({"shop": shop, "x": draw.normal(size=len(shop)), "y": draw.normal(size=len(shop)) ** 3})
    data = eq.data.from_frame(frame, client="shop", target="y", test=0.0)
    model = eq.models.Tabular(data.schema, hidden=())
    methods = {"FedAvg": eq.Algorithm(), "own": eq.Algorithm(personal=eq.personal.Finetuning())}
    both = eq.compare(methods, model, data, rounds=2, clients_per_round=4, seeds=3, progress=False)
    alone = Comparison({"FedAvg": both.results["FedAvg"]})
    tables = [run.clients for run in alone.results["FedAvg"]]
    worst = max(range(len(frame["shop"].unique())), key=lambda k: sum(float(rows.error[k]) for rows in tables))
    low, high = (sum(float(rows.number_intervals[end][worst]) for rows in tables) / 3 for end in (0, 1))
    page = Page(alone.report(tmp_path / "three.html"))
    shown = next(row for row in page.rows["table-worst"] if row[0] == tables[0].client[worst])[2].split()
    errors = [float(rows.error[worst]) for rows in tables]
    assert [float(shown[k]) for k in (0, 1, 3)] == pytest.approx([sum(errors) / 3, low, high], rel=1e-2)
    assert high - low > 3 * (max(errors) - min(errors))  # the seeds alone would promise much more
    text = (tmp_path / "three.html").read_text()
    assert "corrected for skewness), its ends averaged over seeds. It covers the choice" in text
    assert "Under own there is none" not in text
    both.report(tmp_path / "both.html")
    assert "Under own there is none: the errors of single examples are not kept." in (tmp_path / "both.html").read_text()


def test_the_tables_of_three_methods_are_below_each_other(tmp_path):
    data = eq.data.label_shift(train_clients=6, validation_clients=0, test_clients=4, examples=20)
    for count, expected in ((2, "pair"), (3, "stack")):
        methods = {f"rate {k}": eq.Algorithm(solver=eq.solvers.SGD(lr=0.1 * (k + 1))) for k in range(count)}
        made = eq.compare(methods, eq.models.Softmax(20, 10), data, rounds=1, clients_per_round=3, seeds=1, progress=False)
        page = made.report(tmp_path / "r.html").read_text()
        section = page[page.index('<section aria-labelledby="worst">') :]
        assert f'<div class="{expected}">' in section  # else the last column would not fit beside the other table
