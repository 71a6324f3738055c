"""pFedMe by hand: where it ends, its limits, what is served, what goes with it, both engines, resumed runs."""

from dataclasses import replace

import pytest
import torch

import equipoise as eq
from equipoise.data.clients import FederatedData
from equipoise.errors import IncompatibleParts, InvalidParameter
from equipoise.personal import Ditto, PFedMe
from equipoise.solvers import SGD, Adam
from made_clients import make_clients
from test_drift import ENGINES, FULL, parabolas, train

POINTS = [1.0, 2.0, 6.0]  # x_k of F_k = ½(v − x_k)², with mean 3


def method(strength, steps=12, lr=0.3, rate=0.5, server=1.0):
    work = SGD(lr=rate, batch_size=None, steps=1)
    return eq.Algorithm(
        solver=work, personal=PFedMe(strength, steps, lr), server=eq.server_opt.SGD(server), sampler=FULL, weights="uniform"
    )


@ENGINES
def test_the_shared_model_is_the_mean_and_own_models_lie_between(engine):
    # With exact inner solves θ_k = (x_k + λy)/(1 + λ): w → x̄ = 3, and θ_k = (x_k + 3λ)/(1 + λ): for λ = 2 (7/3, 8/3, 4).
    # ηλ = ½, so that y_k = (w + θ_k)/2 is another number, (8/3, 17/6, 7/2), and w − 3 becomes ½ + ½ · ⅔ = ⅚ of itself.
    algorithm = method(2.0, rate=0.25)
    result = train(parabolas(POINTS), algorithm, 100, engine)
    assert float(result.params) == pytest.approx(3.0, abs=1e-6)
    own = result.personal.params(["c0", "c1", "c2"]).flatten()
    assert own.tolist() == pytest.approx([7 / 3, 8 / 3, 4.0], abs=1e-6)
    ditto = replace(algorithm, personal=Ditto(2.0, solver=SGD(lr=0.3, batch_size=None, steps=12)))
    assert train(parabolas(POINTS), ditto, 100, engine).personal.params(["c0", "c1", "c2"]).flatten().tolist() == pytest.approx(
        own.tolist(), abs=1e-5
    )


def test_a_small_strength_trains_alone_and_a_large_one_serves_the_shared_model():
    alone = train(parabolas(POINTS), method(1e-6, steps=40), 2).personal.params(["c0", "c2"]).flatten()
    assert alone.tolist() == pytest.approx([1.0, 6.0], abs=1e-4)
    near = train(parabolas(POINTS), method(1000.0, steps=20, lr=5e-4, rate=5e-4), 5)
    assert near.personal.params(["c0", "c2"]).flatten().tolist() == pytest.approx([float(near.params)] * 2, abs=1e-2)


@ENGINES
def test_the_first_round_by_hand(engine):
    # λ = 2, K = 2, r = 0.1, η = 0.25, one batch, x = 8, from w = 0: θ = 0.8, then 0.8 − 0.1(−7.2 + 1.6) = 1.36. The client
    # sends −ηλ(0 − 1.36) = 0.68, and not θ; with a server rate of ½ the model moves by 0.34.
    algorithm = method(2.0, steps=2, lr=0.1, rate=0.25, server=0.5)
    assert float(train(parabolas([8.0]), algorithm, 1, engine).params) == pytest.approx(0.34)
    # Two batches: θ goes on from 1.36 with y = 0.68: 1.36 + 0.1(6.64 − 1.36) = 1.888, + 0.1(6.112 − 2.416) = 2.2576;
    # y = 0.68 + 0.5(2.2576 − 0.68) = 1.4688.
    two = replace(algorithm, solver=replace(algorithm.solver, steps=2))
    assert float(train(parabolas([8.0]), two, 1, engine).params) == pytest.approx(1.4688 / 2)


def test_a_client_that_was_never_drawn_is_served_its_own_model():
    # Nobody trains in 0 rounds; θ = 12 passes from w = 0 towards (x + λw)/(1 + λ) = x/3.
    result = train(parabolas(POINTS), method(2.0), 0)
    assert result.personal.params(["c2"]).flatten().tolist() == pytest.approx([2.0], abs=1e-5)
    assert not result.clients.personal_error.isnan().any()


class StopsAt(eq.types.Observer):
    """Ends a run after some rounds, as a kill would."""

    def __init__(self, rounds):
        self.rounds = rounds

    def on_state(self, state):
        if state.round == self.rounds:
            raise RuntimeError


RAGGED = FederatedData(make_clients([1, 2, 3, 7, 10, 11, 20, 25], dtype=torch.float64), classes=3)
OTHERS = {
    "plain": {},
    "tail": {"risk": eq.risk.Superquantile(0.5)},
    "median": {"aggregator": eq.aggregators.Median()},
    "secure sums": {"privacy": eq.privacy.SecureAggregation()},
    "noise": {"privacy": eq.privacy.GaussianMechanism(clip=0.5, noise_multiplier=0.5, noise_seed=0)},
    "stragglers": {"solver": SGD(lr=0.2, batch_size=4, epochs=2, straggler_share=0.5)},
}


@pytest.mark.parametrize("parts", OTHERS.values(), ids=OTHERS)
def test_pfedme_in_both_engines_with_other_parts_and_resumed(parts, tmp_path):
    algorithm = eq.Algorithm(**({"solver": SGD(lr=0.2, batch_size=4), "personal": PFedMe(2.0, 3)} | parts))
    model, options = eq.models.Softmax(4, 3).double(), {"clients_per_round": 5, "progress": False}
    one, other = (eq.train(model, RAGGED, algorithm, rounds=3, engine=e, **options) for e in ("loop", "simulator"))
    torch.testing.assert_close(one.params, other.params, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(one.clients.personal_loss, other.clients.personal_loss, rtol=1e-5, atol=1e-6)
    saving = {"rounds": 3, "checkpoint": eq.runs.checkpoint.Checkpoints(tmp_path / "run.ckpt", every=1)}
    with pytest.raises(eq.errors.ObserverFailed):
        eq.train(model, RAGGED, algorithm, observers=[StopsAt(2)], **saving, **options)
    again = eq.train(model, RAGGED, algorithm, **saving, **options)
    assert again.history.rounds[0].round == 0
    assert torch.equal(again.params, other.params)
    names = other.personal.ids  # all clients: those that were never drawn are served a model, too
    assert torch.equal(again.personal.params(names), other.personal.params(names))
    assert torch.equal(again.clients.personal_loss, other.clients.personal_loss)


@pytest.mark.parametrize("solver", [SGD(momentum=0.9), SGD(prox=0.1), SGD(weight_decay=0.1), Adam(), eq.solvers.Scaffold()])
def test_solvers_with_steps_of_their_own_are_refused(solver):
    with pytest.raises(IncompatibleParts, match=r"has steps of its own|clients send other updates"):
        eq.Algorithm(solver=solver, personal=PFedMe(1.0))


def test_steps_that_leap_are_refused():
    with pytest.raises(InvalidParameter, match="strength"):
        eq.Algorithm(solver=SGD(lr=0.1), personal=PFedMe(15.0))
    with pytest.raises(InvalidParameter, match="strength"):
        eq.Algorithm(solver=SGD(lr=0.01), personal=PFedMe(15.0, lr=0.2))
    eq.Algorithm(solver=SGD(lr=0.005), personal=PFedMe(15.0, lr=0.1))  # the authors' own setting
    for wrong in ({"strength": 0.0}, {"steps": 0}, {"lr": -1.0}):
        with pytest.raises(InvalidParameter, match=next(iter(wrong))):
            PFedMe(**wrong)
