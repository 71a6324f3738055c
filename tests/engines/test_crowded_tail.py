"""A tail by bins of losses that holds more clients than asked: reports, notices and the log say so."""

from __future__ import annotations

import json
import re
import warnings
from pathlib import Path

import pytest
import torch
from fake_grid import federation, run_app

import equipoise as eq
from equipoise.data.clients import FederatedData
from equipoise.engines.flower import server_app
from equipoise.engines.flower.apps.template import TEMPLATE
from equipoise.errors import EquipoiseNotice
from equipoise.runs.crowded_tail import bins_of, crowded_tail, is_crowded
from equipoise.types import RoundReport
from made_clients import make_clients

P = eq.privacy
GUIDE = Path(__file__).parents[2] / "docs" / "operate-federation.md"


def secure(bound, bins, tail=0.5, **more):
    risk = eq.risk.Superquantile(tail=tail, quantile=P.SecureHistogram(bound=bound, bins=bins))
    return eq.Algorithm(risk=risk, privacy=P.SecureAggregation(), solver=eq.solvers.SGD(lr=0.1, batch_size=10), **more)


def softmax():
    return eq.models.Softmax(4, 3)


def four_clients():
    kind = {"features": 4, "classes": 3}
    return FederatedData(make_clients([6, 9, 12, 15], **kind), test=make_clients([5, 9, 14, 3], seed=1, **kind), name="four")


def simulate(algorithm, data, model, rounds=6):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = eq.train(model, data, algorithm, rounds=rounds, clients_per_round=4, seed=3, engine="loop")
    return result, [str(each.message) for each in caught if issubclass(each.category, EquipoiseNotice)]


def reported(share, cohort=4):
    return RoundReport(0, 1.0, 1.0, "start", None, cohort, cohort, 0.1, tail_share=share)


def test_whole_clients_are_no_crowd():
    """Of four clients and θ = 0.5 the threshold rule keeps ⌊2⌋ + 1 = 3: that is the rule's rounding, and 4 are a crowd."""
    assert [is_crowded(reported(kept / 4), 0.5) for kept in (1, 2, 3, 4)] == [False, False, False, True]
    # Of 100 clients and θ = 0.5: 51 by the rule, and one bin more or less is no crowd; a tenth of the clients is.
    assert [is_crowded(reported(kept / 100, 100), 0.5) for kept in (51, 55, 62)] == [False, False, True]
    assert not is_crowded(reported(1.0), 1.0)  # all were asked for
    assert not is_crowded(reported(1.0, 1), 0.5)  # a client cannot be halved
    assert not is_crowded(reported(None), 0.5)


def test_one_crowded_round_is_no_news():
    """All losses are equal at a model of zeros: one round with all clients says nothing of the bins."""
    algorithm = secure(2.0, 1024)
    assert not list(crowded_tail(algorithm, [reported(1.0)] * 2 + [reported(0.75)] * 3))
    assert not list(crowded_tail(algorithm, [reported(1.0)] * 4))
    (text,) = crowded_tail(algorithm, [reported(1.0)] * 3 + [reported(0.75)] * 2)
    assert "held 100 % of the clients in 3 of 5 rounds, and tail=0.5 asks for 50 %" in text


def test_a_simulation_gives_a_notice_that_names_the_bin():
    coarse, told = simulate(secure(100.0, 4), four_clients(), softmax())
    assert [report.tail_share for report in coarse.history.rounds] == [1.0] * 6
    (text,) = [each for each in told if "The tail held" in each]
    assert "A bin of losses is 25 wide (bound=100, bins=4)" in text
    assert "1.5 · log(classes)" in text
    assert "that is FedAvg" in text
    fine, told = simulate(secure(2.0, 4096), four_clients(), softmax())
    # At zeros all are equal; then 3 of 4.
    assert [report.tail_share for report in fine.history.rounds] == [1.0] + [0.75] * 5
    assert not [each for each in told if "The tail held" in each]
    exact, _ = simulate(eq.Algorithm(risk=eq.risk.Superquantile(tail=0.5)), four_clients(), softmax())
    assert {report.tail_share for report in exact.history.rounds} == {None}


def test_a_private_quantile_is_one_of_bins():
    private = P.DifferentialPrivacy(epsilon=5.0, delta=1e-3, clip=1.0)
    algorithm = eq.Algorithm(risk=eq.risk.Superquantile(0.5, quantile=P.PrivateQuantile(bound=3.0, bins=16)), privacy=private)
    assert bins_of(algorithm) == (3.0, 16)
    (text,) = crowded_tail(algorithm, [reported(0.9, 40)] * 5)
    assert "More bins need more noise" in text


@pytest.mark.filterwarnings("default::equipoise.errors.EquipoiseNotice")
@pytest.mark.usefixtures("batches_of_the_simulation")
def test_a_federation_says_the_share_in_its_log_and_events(tmp_path, caplog):
    """By the counts that the server has: the same share as the simulation's, which sees all losses."""
    found = []
    with caplog.at_level("INFO", logger="flwr"):
        app = server_app(
            secure(100.0, 4), model=softmax, rounds=6, clients_per_round=4, on_result=found.append, timeout=30.0, pause=1.0,
            retries=0, seed=3, folder=str(tmp_path / "run"), clients=4,
        )  # fmt: skip
        run_app(app, federation(four_clients(), softmax))
    assert [report.tail_share for report in found[0].history.rounds] == [1.0] * 6
    lines = [record.getMessage() for record in caplog.records]
    assert sum("100 % in the tail" in line for line in lines) == 6
    (place,) = [i for i, line in enumerate(lines) if "Round 5:" in line]
    assert "A bin of losses is 25 wide" in lines[place + 1]  # while the run goes on, and not again in each round
    assert sum("A bin of losses is 25 wide" in line for line in lines if "Round" not in line) <= 2
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    assert [event["tail_share"] for event in events if event["event"] == "round"] == [1.0] * 6


def test_the_guides_tail_differs_from_fedavg():
    """On the made-up data of a new app: the guide's numbers train as the exact tail of half of the sites, and not as FedAvg."""
    made = {}
    exec((TEMPLATE / "package" / "data.py.txt").read_text(), made)  # noqa: S102 — the file of a new app
    data = made["simulated"]()
    section = GUIDE.read_text().split("## Secure sums")[1]
    given = re.search(r"tail=([\d.]+), quantile=eq.privacy.SecureHistogram\(bound=([\d.]+), bins=(\d+)\)", section)
    assert given is not None
    tail, bound, bins = float(given[1]), float(given[2]), int(given[3])

    def model():
        return eq.models.Softmax(8, 3)

    def run(algorithm):
        return simulate(algorithm, data, model(), rounds=20)[0]

    solver = eq.solvers.SGD(lr=0.1, batch_size=10)
    fedavg = run(eq.Algorithm(privacy=P.SecureAggregation(), weights="uniform", solver=solver)).params
    exact = run(eq.Algorithm(risk=eq.risk.Superquantile(tail=0.5), weights="uniform", solver=solver))
    guide = run(secure(bound, bins, tail))
    assert [report.tail_share for report in guide.history.rounds[1:]] == [0.5] * 19
    assert float((guide.params - fedavg).abs().max()) > 0.02
    assert float((guide.params - exact.params).abs().max()) < float((guide.params - fedavg).abs().max())
    coarse = run(secure(100.0, 2, tail)).params  # all sites in one bin
    assert torch.allclose(coarse, fedavg, atol=1e-5)


@pytest.mark.filterwarnings("ignore::equipoise.errors.EquipoiseNotice")
def test_under_distributed_noise_the_share_is_that_of_the_noisy_counts():
    """Without noise the counts are exact: all four losses are above 0.25 and below 100, in one bin or in the upper half."""
    found = []
    privacy = P.DifferentialPrivacy(None, 1e-2, 1.0, noise_multiplier=0.0, noise="distributed")
    for bound in (100.0, 0.5):
        risk = eq.risk.Superquantile(0.5, quantile=P.PrivateQuantile(bound=bound, bins=2))
        algorithm = eq.Algorithm(risk=risk, sampler=eq.sampling.Uniform(), privacy=privacy)
        app = server_app(
            algorithm, model=softmax, rounds=1, clients_per_round=4, on_result=found.append, timeout=30.0, pause=1.0, retries=0,
        )  # fmt: skip
        run_app(app, federation(four_clients(), softmax))
    assert [result.history.rounds[0].tail_share for result in found] == [1.0, 1.0]
