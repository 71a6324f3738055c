"""Reports and cards of runs by secure sums: the mean over sites is known, and nothing is said that is not."""

from __future__ import annotations

import re
from dataclasses import replace
from html import unescape

import pytest
from fake_grid import federation, run_app

import equipoise as eq
from equipoise.data.clients import FederatedData
from equipoise.engines.flower import server_app
from equipoise.export import model_card
from equipoise.report import write_report
from made_clients import make_clients

SECURE = eq.Algorithm(privacy=eq.privacy.SecureAggregation())
DATA = FederatedData(make_clients([6, 9, 12]), test=make_clients([5, 9, 14], seed=1), name="three")


def softmax():
    return eq.models.Softmax(4, 3)


@pytest.fixture(scope="module")
def found():
    results = []
    options = {"timeout": 30.0, "seed": 3, "clients": 3, "minimum": 2, "evaluate_every": 1}
    app = server_app(SECURE, model=softmax, rounds=2, on_result=results.append, **options)
    run_app(app, federation(DATA, softmax))
    return results[0]


def test_the_card_of_a_run_by_secure_sums(found):
    card = model_card.card(found)
    assert card["data"]["clients"] == {"train": 3, "test": 3}
    figures = card["metrics"]["test"]
    assert figures["mean"] == pytest.approx(float(found.clients.where("test").error[0]))
    assert [figures[key] for key in ("percentile_90", "worst_10", "standard_deviation")] == [None] * 3
    text = model_card.card_markdown(card).decode()
    assert "means alone are known" in text
    assert "twice the mean" not in text
    assert "0 clients" not in text


@pytest.mark.parametrize("methods", [1, 2])
def test_the_report_of_a_run_by_secure_sums(found, methods, tmp_path):
    path = tmp_path / "report.html"
    write_report([found, replace(found, name="again")][:methods], path)
    text = unescape(re.sub(r"<script.*?</script>", "", path.read_text(), flags=re.DOTALL)).replace("\u00a0", " ")
    error = 100 * float(found.clients.where("test").error[0])
    assert f"Mean error over 3 test clients: {found.name} {error:.1f}" in text.replace("this model", found.name)
    assert "The one" not in text
    cells = re.findall(r'data-key="(?:percentile_90|worst_10|standard_deviation)">([^<]*)<', text)
    assert cells == ["–"] * 3 * methods
    assert 'id="figure-histogram"' not in text
    assert "Who fares worst" not in text
