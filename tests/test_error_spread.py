"""Intervals of the mean error of a client whose errors are numbers: the moments of its examples, and how often they hold."""

import math

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import stats

import equipoise as eq
from equipoise.metrics import LEAST_FOR_SPREAD, skewed_mean_interval

SIZES = {"large": 60, "fair": 40, "small": 12, "single": 1}


def made(seed=0):
    draw = np.random.default_rng(seed)
    shop = np.repeat(list(SIZES), list(SIZES.values()))
    return pd.DataFrame({"shop": shop, "x": draw.normal(size=len(shop)), "y": draw.normal(size=len(shop)) ** 3})


def trained(frame, **options):
    data = eq.data.from_frame(frame, client="shop", target="y", test=0.0)
    model = eq.models.Tabular(data.schema, hidden=())
    return data, eq.train(model, data, rounds=1, clients_per_round=2, progress=False, **options)


def interval_of(errors):
    """Hall's interval, by a search for the means whose corrected statistic is at Student's quantiles."""
    from scipy.optimize import brentq

    n, mean, deviation = len(errors), errors.mean(), errors.std(ddof=1)
    skew = ((errors - mean) ** 3).mean() / errors.std() ** 3
    reach = stats.t.ppf(0.975, n - 1)

    def corrected(true):
        t = math.sqrt(n) * (mean - true) / deviation
        q = 1 / math.sqrt(n)
        return t + q * skew * t**2 / 3 + q**2 * skew**2 * t**3 / 27 + q * skew / 6

    return tuple(brentq(lambda true, end=end: corrected(true) - end, -1e3, 1e3) for end in (reach, -reach))


def test_intervals_are_those_of_the_clients_examples():
    frame = made()
    data, result = trained(frame)
    said = data.schema.predict(result.model, frame)["y"].to_numpy()
    errors = (said - frame["y"].to_numpy().astype(np.float32)) ** 2
    rows = {row["client"]: row for row in result.clients.where("train").worst(4)}
    for client, size in SIZES.items():
        own, row = errors[frame["shop"] == client], rows[client]
        assert row["error"] == pytest.approx(own.mean(), rel=1e-4)
        if size < LEAST_FOR_SPREAD:
            assert math.isnan(row["error_low"])
            assert math.isnan(row["error_high"])
            continue
        low, high = interval_of(own)
        assert row["error_low"] == pytest.approx(max(low, 0.0), rel=1e-3, abs=1e-3)
        assert row["error_high"] == pytest.approx(high, rel=1e-3)
    assert math.isnan(result.clients["error_deviation"][result.clients.client.index("single")])
    text = str(result.clients.where("train").worst(4))
    assert "–" in text


def test_without_skewness_it_is_students_interval():
    values = torch.tensor([-3.0, -1.0, 0.0, 1.0, 3.0] * 8, dtype=torch.float64)
    n, deviation = len(values), float(values.std())
    low, high = skewed_mean_interval(*(torch.tensor([v]) for v in (5.0, deviation, 0.0)), torch.tensor([n]))
    reach = stats.t.ppf(0.975, n - 1) * deviation / math.sqrt(n)
    assert (float(low), float(high)) == pytest.approx((5 - reach, 5 + reach))


def test_it_holds_the_mean_of_skewed_errors_where_students_does_not():
    draw, clients, size = np.random.default_rng(0), 4000, 20
    errors = torch.from_numpy(draw.laplace(size=(clients, size)) ** 2)  # of mean 2
    mean, deviation = errors.mean(1), errors.std(1)
    skew = ((errors - mean[:, None]) ** 3).mean(1) / errors.std(1, correction=0) ** 3
    low, high = skewed_mean_interval(mean, deviation, skew, torch.full((clients,), size))
    held = float(((low <= 2) & (high >= 2)).double().mean())
    reach = stats.t.ppf(0.975, size - 1) * deviation / math.sqrt(size)
    students = float(((mean - reach <= 2) & (mean + reach >= 2)).double().mean())
    assert held > 0.91
    assert students < 0.85


def test_equal_errors_and_few_examples_have_none():
    given = [torch.tensor(each) for each in ([1.0, 1.0], [0.0, 0.5], [float("nan"), 1.0], [50, LEAST_FOR_SPREAD - 1])]
    for end in skewed_mean_interval(*given):
        assert bool(end.isnan().all())


def test_a_sample_a_file_and_an_evaluation_have_them(tmp_path):
    data, result = trained(made())
    again = eq.evaluate(result.model, data).clients
    for name in ("error_deviation", "error_skewness"):
        torch.testing.assert_close(again[name], result.clients[name], equal_nan=True)
    path = result.clients.to_parquet(tmp_path / "clients.parquet")
    stored = eq.ClientTable.from_parquet(path)
    assert str(stored.where("train").worst(3)) == str(result.clients.where("train").worst(3))
    part = eq.evaluate(result.model, data, evaluate_clients=2).clients
    for row in part:
        same = next(each for each in result.clients if each["client"] == row["client"])
        assert row["error_deviation"] == pytest.approx(same["error_deviation"], nan_ok=True)


def test_classes_own_models_and_protected_runs_have_none():
    frame = made()
    data = eq.data.from_frame(frame.assign(y=frame["y"] > 0), client="shop", target="y", test=0.0)
    result = eq.train(eq.models.Tabular(data.schema), data, rounds=1, clients_per_round=2, progress=False)
    assert "error_deviation" not in result.clients.columns
    assert "Clopper" in str(result.clients.where("train").worst(2))
    _, own = trained(frame, algorithm=eq.Algorithm(personal=eq.personal.Finetuning()))
    assert own.clients.number_intervals is None
    worst = own.clients.where("train").worst(1)
    assert "error_low" not in worst[0]


def test_the_report_of_one_seed_shows_them(tmp_path):
    frame = pd.concat([made(seed).assign(shop=lambda rows, seed=seed: rows["shop"] + str(seed)) for seed in range(4)])
    _, result = trained(frame)
    result.report(tmp_path / "one.html")
    page = (tmp_path / "one.html").read_text()
    assert "interval (Student, corrected for skewness)" in page
    assert '<small class="below">' in page


def test_a_model_that_fails_when_it_is_asked_once_more_costs_no_run(monkeypatch):
    from equipoise.runs import error_spread

    def refuse(*given):
        raise RuntimeError("asked once too often")

    monkeypatch.setattr(error_spread, "_moments", refuse)
    _, result = trained(made())
    assert "error_deviation" not in result.clients.columns
