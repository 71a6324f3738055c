"""One site of five lies, over Flower's messages: what each lie does without a defence, and that each defence bounds it.

Each test is of a sentence of docs/protect-federation.md, "A site that lies".
"""

from __future__ import annotations

import json
import logging
import math

import numpy as np
import pytest
import torch
from fake_grid import federation, run_app
from lying_site import lie, lie_in_sums, with_tensors

import equipoise as eq
from equipoise.data.clients import FederatedData
from equipoise.engines.flower import server_app
from equipoise.engines.flower.transport.messages import read_message
from equipoise.errors import IncompatibleParts
from made_clients import make_clients

logging.getLogger("flwr").setLevel("CRITICAL")
LIAR, SITES = "client-4", 5
SIZES = [6, 9, 12, 15, 10]
DATA = FederatedData(make_clients(SIZES), test=make_clients([10] * SITES, seed=1), name="five")
A = eq.aggregators
DIRECTION = np.random.default_rng(0).normal(size=15)


def softmax():
    return eq.models.Softmax(4, 3)


def run(algorithm, grid=None, *, rounds=1, **options):
    found, grid = [], grid or federation(DATA, softmax)
    options = {"timeout": 30.0, "pause": 1.0, "retries": 0, "seed": 3, "clients": SITES, **options}
    run_app(server_app(algorithm, model=softmax, rounds=rounds, on_result=found.append, **options), grid)
    return found[0], grid


def lying(**lies):
    return lie(federation(DATA, softmax), LIAR, **lies)


def updates_of(grid):
    """Each site's update in round 1, as it was sent."""
    return {
        client: read_message(reply.content).tensor("update", torch.float32, (15,)).double()
        for client, action, reply in grid.replies
        if action == "train.update"
    }


def start():
    """The parameters before the first round: a softmax begins at zero."""
    return torch.zeros(15)


# ------------------------------------------------------------------------------------------------------------ poisoned updates


LIES = {
    "-50 times": lambda own: -50 * own,
    "90 times the longest": lambda own: 90 * np.sign(DIRECTION),
    "a random direction": lambda own: 3 * DIRECTION,
    "its negative": lambda own: -own,
    "nothing": lambda own: 0 * own,
    "tiny": lambda own: -1e-6 * own,
}


@pytest.mark.parametrize("name", LIES)
def test_no_update_makes_a_step_of_norm_clip_longer_than_an_honest_one(name):
    """No norm in the mean is above the median norm, which one site of five cannot move beyond the others' norms."""
    found, grid = run(eq.Algorithm(aggregator=A.NormClip(), weights="uniform"), lying(update=LIES[name]))
    honest = torch.stack([update for client, update in updates_of(grid).items() if client != LIAR])
    assert float((found.params - start()).norm()) <= float(honest.norm(dim=1).max()) * (1 + 1e-5)


@pytest.mark.parametrize("name", LIES)
def test_no_update_moves_a_median_beyond_honest_values(name):
    found, grid = run(eq.Algorithm(aggregator=A.Median(), weights="uniform"), lying(update=LIES[name]))
    honest = torch.stack([update for client, update in updates_of(grid).items() if client != LIAR])
    step = (found.params - start()).double()
    assert bool(((honest.amin(0) - 1e-6 <= step) & (step <= honest.amax(0) + 1e-6)).all())


@pytest.mark.parametrize("name", LIES)
def test_a_median_holds_under_a_tail_risk_while_the_share_is_below_half_the_tail(name):
    """One of five with a false loss weighs 0.2 / 0.5 = 0.4 of the tail at most, which is less than half of it."""
    algorithm = eq.Algorithm(risk=eq.risk.Superquantile(tail=0.5), aggregator=A.Median(), weights="uniform")
    found, grid = run(algorithm, lying(update=LIES[name], loss=1e300))
    honest = torch.stack([update for client, update in updates_of(grid).items() if client != LIAR])
    step = (found.params - start()).double()
    assert bool(((honest.amin(0) - 1e-6 <= step) & (step <= honest.amax(0) + 1e-6)).all())


def test_a_mean_moves_as_far_as_a_site_wants_up_to_the_bound_on_long_updates():
    """By hand: the step is Σ u_k / 5, and the liar's part of it is 40 times its honest one."""
    found, grid = run(eq.Algorithm(weights="uniform"), lying(update=lambda own: -40 * own))
    sent = updates_of(grid)
    torch.testing.assert_close((found.params - start()).double(), sum(sent.values()) / 5, rtol=1e-5, atol=1e-6)
    honest = torch.stack([sent[client] for client in sent if client != LIAR])
    assert float((found.params - start()).norm()) > 3 * float(honest.norm(dim=1).max())
    # `longest` leaves it out: 40 times its own length is more than 10 times the median.
    found, grid = run(eq.Algorithm(weights="uniform"), lying(update=lambda own: -40 * own), longest=10.0)
    assert "times as long as the median" in found.history.rounds[0].missing[LIAR]
    torch.testing.assert_close((found.params - start()).double(), honest.mean(0), rtol=1e-5, atol=1e-6)


# ---------------------------------------------------------------------------------------------------- false numbers of examples


def test_a_false_number_of_examples_takes_over_a_mean_by_examples_and_no_uniform_one():
    found, grid = run(eq.Algorithm(), lying(examples=1_000_000))
    own = updates_of(grid)[LIAR]
    torch.testing.assert_close((found.params - start()).double(), own, rtol=1e-2, atol=1e-3)  # the model is the liar's
    uniform = eq.Algorithm(weights="uniform")
    assert torch.equal(run(uniform, lying(examples=1_000_000))[0].params, run(uniform)[0].params)


def test_most_examples_bounds_the_weight_of_a_false_number():
    """With at most 20, the liar's weight is 20 of 62 examples. One who says 21 takes no part."""
    found, grid = run(eq.Algorithm(), lying(examples=20), most_examples=20)
    sent = updates_of(grid)
    sizes = dict(zip(DATA.train.ids, [*SIZES[:4], 20], strict=True))
    expected = sum(sizes[client] / 62 * sent[client] for client in sent)
    torch.testing.assert_close((found.params - start()).double(), expected, rtol=1e-5, atol=1e-6)
    found, grid = run(eq.Algorithm(), lying(examples=21), most_examples=20, clients=4, patience=60.0)
    assert LIAR not in updates_of(grid)


# -------------------------------------------------------------------------------------------------------------- false losses


def weights_of(risk, loss):
    """The weight of each site in the first round: each sends a unit vector of its own, so that the step is the weights."""
    units = {client: 1e-3 * np.eye(15)[k] for k, client in enumerate(DATA.train.ids)}
    grid = lying(loss=loss)
    told = grid.fault

    def fault(delivery):
        reply = told(delivery)
        own = units[delivery.client]
        return with_tensors(reply, {"update": lambda _: own}) if delivery.action == "train.update" else reply

    grid.fault = fault
    found, _ = run(eq.Algorithm(risk=risk, weights="uniform"), grid)
    step = 1e3 * (found.params - start()).double()
    return dict(zip(DATA.train.ids, step[:SITES].tolist(), strict=True))


@pytest.mark.parametrize("tail", [1.0, 0.8, 0.5, 0.4])
def test_a_false_loss_gives_a_site_no_more_than_its_share_over_the_tail(tail):
    weights = weights_of(eq.risk.Superquantile(tail=tail), 1e300)
    assert weights[LIAR] == pytest.approx(0.2 / tail, rel=1e-3)
    assert sum(weights.values()) == pytest.approx(1, rel=1e-3)


def test_a_tail_as_small_as_one_site_belongs_to_the_site_with_the_highest_claim():
    assert weights_of(eq.risk.Superquantile(tail=0.2), 1e6)[LIAR] == pytest.approx(1, rel=1e-3)
    assert weights_of(eq.risk.Tilted(1.0), 1e6)[LIAR] == pytest.approx(1, rel=1e-3)


def test_a_site_that_claims_a_low_loss_is_left_out_of_the_tail():
    assert weights_of(eq.risk.Superquantile(tail=0.5), 0.0)[LIAR] == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize(
    ("tail", "aggregator", "longest", "warned"),
    [(0.4, A.Median(), 100.0, True), (0.4, A.WeightedMean(), 10.0, True), (0.5, A.Median(), 10.0, False),
     (0.4, A.WeightedMean(), 100.0, False)],
)  # fmt: skip
def test_a_defence_that_has_two_updates_in_a_round_is_named_before_the_run(tail, aggregator, longest, warned, tmp_path):
    """Of five sites with equal weights, two are in a tail of 0.4 and three in one of 0.5."""
    algorithm = eq.Algorithm(risk=eq.risk.Superquantile(tail), aggregator=aggregator, weights="uniform")
    run(algorithm, longest=longest, folder=str(tmp_path / "run"))
    events = (tmp_path / "run" / "events.jsonl").read_text()
    assert ("rounds of 5 clients train 2" in events) == warned
    assert ("Give the risk a tail of 0.5 or more" in events) == warned


@pytest.mark.parametrize("loss", [26.0, 1.5])
def test_a_loss_far_above_all_others_is_an_alert(loss, tmp_path):
    """The losses of the others are log 3 = 1.1 in the first round."""
    algorithm = eq.Algorithm(risk=eq.risk.Superquantile(0.5), weights="uniform")
    run(algorithm, lying(loss=loss), rounds=2, folder=str(tmp_path / "run"))
    alerts = json.loads((tmp_path / "run" / "status.json").read_text())["alerts"]
    found = [each for each in alerts if each["text"].startswith("reported a loss of 26 in round 2, and the others at most")]
    assert [each["client"] for each in found] == [LIAR] * (loss == 26.0)


# --------------------------------------------------------------------------------------------------------------- false scores


@pytest.mark.parametrize("score", [0.0, 1.0])
def test_a_false_error_moves_the_mean_by_at_most_one_over_the_sites(score):
    truth, told = (run(eq.Algorithm(), grid)[0] for grid in (None, lying(score=score)))
    assert abs(truth.summary().error.mean - told.summary().error.mean) <= 1 / SITES + 1e-9
    assert torch.equal(truth.params, told.params)  # scores train nothing


@pytest.mark.parametrize(("score", "why"), [(math.nan, "not finite"), (math.inf, "not finite"), (-3.0, "between 0 and 1")])
def test_a_score_that_is_none_stops_no_run_and_is_in_no_mean(score, why):
    """Before, one site could end a run after its last round, by a loss that is not finite."""
    found, _ = run(eq.Algorithm(), lying(score=score))
    assert why in found.clients.not_evaluated["test"][LIAR]
    assert LIAR not in found.clients.client
    assert math.isfinite(found.summary().error.mean)


def test_a_model_that_has_diverged_everywhere_stops_the_run_as_before():
    grid = federation(DATA, softmax)
    nothing = lambda own: np.full_like(own, math.nan)  # noqa: E731
    told = dict.fromkeys(("train", "test"), nothing)
    grid.fault = lambda d: with_tensors(d.answer(), told) if d.action == "evaluate.scores" else d.answer()
    with pytest.raises(eq.errors.Diverged):
        run(eq.Algorithm(), grid)


# ---------------------------------------------------------------------------------------------------------------- secure sums


def test_secure_sums_bound_no_lie(monkeypatch):
    """Nobody sees one update: a thousand times as long, it is neither found nor clipped, also where nodes clip their own."""
    for aggregator in (A.WeightedMean(), A.NormClip(bound=0.1)):
        algorithm = eq.Algorithm(aggregator=aggregator, weights="uniform", privacy=eq.privacy.SecureAggregation())
        truth, _ = run(algorithm)
        with monkeypatch.context() as patched:
            change = lambda row: torch.cat([-1000 * row[:-1], row[-1:]])  # noqa: E731 - the last number is its weight
            lie_in_sums(patched, LIAR, "update", change)
            told, _ = run(algorithm)
        assert not told.history.rounds[0].missing
        assert float((told.params - start()).norm()) > 50 * float((truth.params - start()).norm())
    with pytest.raises(IncompatibleParts):
        eq.Algorithm(aggregator=A.Median(), privacy=eq.privacy.SecureAggregation())


def test_a_site_can_set_the_mean_of_an_evaluation_by_secure_sums(monkeypatch):
    algorithm = eq.Algorithm(privacy=eq.privacy.SecureAggregation())
    lie_in_sums(monkeypatch, LIAR, "scores", lambda row: row - row + torch.tensor([0, -(1 << 33), row[2]]))
    assert run(algorithm)[0].summary().error.mean < -1  # of errors between 0 and 1


def test_a_site_can_set_the_quantile_that_secure_sums_find(monkeypatch):
    """A hundred counts in the highest bin: the tail begins there, and no honest site is in it."""
    tail = eq.risk.Superquantile(0.5, quantile=eq.privacy.SecureHistogram(bound=3.0, bins=64))
    algorithm = eq.Algorithm(risk=tail, weights="uniform", privacy=eq.privacy.SecureAggregation())
    truth, _ = run(algorithm)
    lie_in_sums(monkeypatch, LIAR, "counts", lambda row: torch.cat([0 * row[:-1], torch.tensor([100])]))
    told, _ = run(algorithm)
    assert float((truth.params - start()).norm()) > 0.01
    assert torch.equal(told.params, start())  # nobody's loss is above the quantile: nothing is learnt


# --------------------------------------------------------------------------------------------- a lie that makes a run diverge


def claim_and_climb(grid):
    """A site that says three times its loss, and climbs where others descend."""

    def fault(delivery):
        reply = delivery.answer()
        if delivery.client == LIAR and delivery.action == "train.losses":
            reply = with_tensors(reply, {"loss": lambda own: 3 * own})
        if delivery.client == LIAR and delivery.action == "train.update":
            reply = with_tensors(reply, {"update": lambda own: -60 * own})
        return reply

    grid.fault = fault
    return grid


@pytest.mark.filterwarnings("default::equipoise.errors.EquipoiseNotice")
def test_a_site_that_makes_a_run_diverge_is_named_by_advice_status_report_and_card(tmp_path):
    """No single number of it is far enough from the others to be left out, or for an alert of its own."""
    algorithm = eq.Algorithm(risk=eq.risk.Superquantile(0.5), solver=eq.solvers.SGD(lr=30.0), weights="uniform")
    folder = tmp_path / "run"
    with pytest.warns(eq.errors.EquipoiseNotice, match=f"diverged.*Look first at {LIAR}.*the largest loss in") as caught:
        run(algorithm, claim_and_climb(federation(DATA, softmax)), rounds=8, folder=str(folder))
    assert "Lower the learning rate. Or one site is the cause" in str([str(each.message) for each in caught])
    alerts = json.loads((folder / "status.json").read_text())["alerts"]
    assert LIAR in {each["client"] for each in alerts if each["text"].startswith("may be why the run diverges")}
    for file in ("report.html", "model.card.md", "model.card.json"):
        text = (folder / file).read_text()
        assert "the run diverged" in text
        assert f"Look first at {LIAR}" in text


@pytest.mark.filterwarnings("ignore:1 update of 1 client was not finite")
def test_a_far_loss_is_in_report_and_card_too(tmp_path):
    algorithm = eq.Algorithm(risk=eq.risk.Superquantile(0.5), weights="uniform")
    run(algorithm, lying(loss=195.0), rounds=2, folder=str(tmp_path / "run"))
    for file in ("report.html", "model.card.md"):
        assert f"{LIAR} reported a loss more than 10 times any other in 2 rounds" in (tmp_path / "run" / file).read_text()
    run(eq.Algorithm(), lying(update=lambda own: own * np.nan), rounds=1, folder=str(tmp_path / "nothing"))
    assert f"1 update of {LIAR} was left out" in (tmp_path / "nothing" / "model.card.md").read_text()
    run(algorithm, rounds=2, folder=str(tmp_path / "honest"))
    assert "reported a loss" not in (tmp_path / "honest" / "model.card.md").read_text()


def test_an_update_that_was_left_out_as_too_long_is_on_the_card(tmp_path):
    run(eq.Algorithm(weights="uniform"), lying(update=lambda own: -400 * own), rounds=2, folder=str(tmp_path / "run"))
    said = f"2 updates of {LIAR} were left out: not finite, or far longer than the others'."
    assert said in (tmp_path / "run" / "model.card.md").read_text()
    assert said in (tmp_path / "run" / "report.html").read_text().replace("&#x27;", "'")
