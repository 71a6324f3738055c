"""Every part passes the check of its contract, and each check catches parts that break its law."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch.nn import functional

import equipoise as eq
from equipoise import aggregators, engines, observers, privacy, risk, sampling, server_opt, solvers
from equipoise.risk import RiskValue
from equipoise.risk.worst_case import project_on_simplex
from equipoise.testing import (
    LawBroken,
    check_aggregator,
    check_engine,
    check_observer,
    check_risk,
    check_sampler,
    check_server_optimizer,
    check_solver,
)


def three_groups(client):
    return f"group {int(client.split('-')[1]) % 3}"


RISKS = [
    risk.Mean(),
    *(risk.Superquantile(tail, rule=rule) for tail in (1.0, 0.8, 0.5, 0.3, 0.001) for rule in ("exact", "threshold")),
    *(risk.Superquantile(t, smoothing=s, nu=v) for t in (1.0, 0.5, 0.01) for s in ("kl", "huber") for v in (1e-3, 0.1, 10.0)),
    *(risk.Tilted(tilt) for tilt in (-200.0, -1.0, -1e-9, 0.0, 1e-9, 0.5, 1.0, 200.0)),
    *(risk.Tilted(tilt, tracked=True) for tilt in (-1.0, 2.0)),
    *(risk.QFair(q) for q in (0.0, 0.1, 1.0, 2.0, 5.0, 50.0)),
    risk.Mixture((0.3, risk.Mean()), (0.7, risk.Superquantile(0.2))),
    risk.Mixture((0.5, risk.Tilted(1.0)), (0.5, risk.Tilted(-1.0))),
    risk.Mixture((2.0, risk.Superquantile(0.5, smoothing="kl", nu=0.1))),
    *(risk.Superquantile(tail, quantile=privacy.SecureSums()) for tail in (1.0, 0.5, 0.1)),
    *(risk.Superquantile(0.3, eta_every=3, quantile=source) for source in (privacy.Exact(), privacy.SecureSums())),
    *(risk.Superquantile(0.1, rule=rule, at_least=4) for rule in ("exact", "threshold")),
    *(risk.Superquantile(0.1, smoothing=smoothing, nu=0.1, at_least=4) for smoothing in ("kl", "huber")),
    *(
        risk.HierarchicalTilt(three_groups, t, u)
        for t, u in ((1.0, 0.0), (2.0, -1.0), (200.0, -200.0), (-3.0, 200.0), (0.0, 1.0))
    ),
    *(risk.WorstCase(step) for step in (1e-3, 0.1, 10.0)),
    risk.Mixture((0.5, risk.Mean()), (0.5, risk.WorstCase())),
]
SOLVERS = [
    solvers.SGD(),
    solvers.SGD(lr=0.5, batch_size=None, epochs=3),
    solvers.SGD(batch_size=3, steps=7, momentum=0.9),
    solvers.SGD(batch_size=4, epochs=2, weight_decay=0.1),
    solvers.SGD(momentum=0.5, weight_decay=0.01, lr_decay=0.5, lr_decay_every=2),
    solvers.SGD(steps=0),
    solvers.SGD(prox=1.0, epochs=3),
    solvers.SGD(prox=0.5, momentum=0.9, weight_decay=0.1),
    solvers.SGD(batch_size=4, epochs=5, straggler_share=0.6),
    solvers.SGD(batch_size=4, steps=5, straggler_share=0.6, stragglers="drop"),
    solvers.MAML(),
    solvers.MAML(lr=0.5, inner_lr=0.2, inner_steps=3, support=0.2),
    solvers.FedDane(solvers.SGD(batch_size=4, epochs=2, prox=0.5, momentum=0.5)),
    solvers.AdaptiveProx(solvers.SGD(prox=0.3, epochs=2)),
]
SERVERS = [server_opt.SGD(), server_opt.Momentum(), server_opt.Adam(), server_opt.Yogi(), server_opt.Adagrad()]
SAMPLERS = [
    sampling.Uniform(),
    sampling.Uniform(share=0.5),
    sampling.Proportional(),
    sampling.Poisson(),
    sampling.Full(),
    sampling.Availability(),
    sampling.Availability(day=10, share=0.3, aligned=0.0, schedule=3),
    sampling.Availability(share=0.2, aligned=1.0),  # at night nobody is there
]


@pytest.mark.parametrize("part", RISKS, ids=lambda part: repr(part).partition(" at 0x")[0])  # a function's address varies
def test_risk(part):
    check_risk(part)


@pytest.mark.parametrize("part", SOLVERS, ids=repr)
def test_solver(part):
    check_solver(part)


def test_aggregator():
    check_aggregator(aggregators.WeightedMean())


@pytest.mark.parametrize("part", SERVERS, ids=repr)
def test_server_optimizer(part):
    check_server_optimizer(part)


@pytest.mark.parametrize("part", SAMPLERS, ids=repr)
def test_sampler(part):
    check_sampler(part)


@pytest.mark.parametrize("part", [engines.Loop(), engines.Simulator(), engines.Simulator(chunk_size=3)], ids=repr)
@pytest.mark.parametrize("solver", SOLVERS, ids=repr)
def test_engine(part, solver):
    check_engine(part, solver=solver)


def test_observer(tmp_path):
    check_observer(observers.History())
    check_observer(observers.JsonLines(tmp_path / "rounds.jsonl"))
    check_observer(observers.Progress())


# ------------------------------------------------------------------------------------- a part of one's own, and broken ones


@dataclass(frozen=True)
class Softplus:
    """Smooth hinge on the loss above a level."""

    level: float

    def __call__(self, losses, base_weights, *, clients=None, state=None):
        z = losses - self.level
        return eq.risk.RiskValue((base_weights * functional.softplus(z)).sum(), base_weights * torch.sigmoid(z), state)


def test_a_risk_of_ones_own_passes_and_trains(ragged):
    eq.testing.check_risk(Softplus(level=0.7))
    result = eq.train(eq.models.Softmax(4, 3), ragged, eq.Algorithm(risk=Softplus(0.7)), rounds=3, clients_per_round=4)
    assert len(result.history.rounds) == 3


def wrong_gradient(losses, base_weights, *, clients=None, state=None):
    return RiskValue((base_weights * losses.square()).sum(), base_weights * losses, state)  # half the gradient


def order_matters(losses, base_weights, *, clients=None, state=None):
    ranks = torch.arange(1, len(losses) + 1, dtype=losses.dtype)
    return RiskValue((ranks * losses).sum(), ranks, state)


def unequal_ties(losses, base_weights, *, clients=None, state=None):
    weights = torch.zeros_like(losses)
    weights[losses.argmax()] = 1.0
    return RiskValue(losses.max(), weights, state)


def overflows(losses, base_weights, *, clients=None, state=None):
    powers = base_weights * losses.exp()
    return RiskValue(powers.sum().log(), powers / powers.sum(), state)


@dataclass(frozen=True)
class OwnAscent:
    """AFL in which each piece can be wrong."""

    step: float = 0.1
    project: Callable = project_on_simplex
    by_id: bool = True
    uniform: bool = True
    full_participation = True

    def __call__(self, losses, base_weights, *, clients=None, state=None):
        if state is None:
            mixture = torch.full_like(losses, 1 / len(losses)) if self.uniform else base_weights
        else:
            mixture = torch.stack([state[c] for c in clients]) if self.by_id else torch.stack(list(state.values()))
        following = self.project(mixture + self.step * losses)
        return RiskValue((mixture * losses).sum(), mixture.to(losses), dict(zip(clients, following, strict=True)))


def off_by_one(point):
    """The published mistake: the level of one entry too few."""
    down = point.sort(descending=True).values
    levels = (down.cumsum(0) - 1) / torch.arange(1, len(point) + 1)
    return (point - levels[max(int((down > levels).sum()) - 2, 0)]).clamp(min=0.0)


def only_rescaled(point):
    return point / point.sum()


def only_clipped(point):
    return point.clamp(0.0, 1.0)


def wrong_shape(losses, base_weights, *, clients=None, state=None):
    return RiskValue(losses.sum(), torch.ones(1), state)


def negative(losses, base_weights, *, clients=None, state=None):
    return RiskValue(-(base_weights * losses).sum(), -base_weights, state)


@pytest.mark.parametrize(
    ("broken", "law"),
    [
        (wrong_gradient, "gradient"),
        (order_matters, "permuting|order"),
        (unequal_ties, "equal losses share"),
        (overflows, "finite"),
        (wrong_shape, "one weight per client"),
        (negative, "not negative"),
        (OwnAscent(uniform=False), "starts uniform"),
        (OwnAscent(by_id=False), "follow their clients"),
        (OwnAscent(project=off_by_one), "simplex|projection"),
        (OwnAscent(project=only_rescaled), "projection"),
        (OwnAscent(project=only_clipped), "point of the simplex"),
    ],
)
def test_check_risk_catches(broken, law):
    with pytest.raises(LawBroken, match=law):
        check_risk(broken)


@dataclass(frozen=True)
class FirstOnly:
    linear = False

    def __call__(self, updates, weights, *, losses=None, state=None):
        return updates[0], state


@dataclass(frozen=True)
class CallsItselfLinear:
    linear = True

    def __call__(self, updates, weights, *, losses=None, state=None):
        return updates.mean(0), state


@dataclass(frozen=True)
class IgnoresWeights:
    linear = True

    def __call__(self, updates, weights, *, losses=None, state=None):
        return updates.sum(0) / 100, state


@dataclass(frozen=True)
class Doubling:
    linear = True

    def __call__(self, updates, weights, *, losses=None, state=None):
        return 2 * weights.to(updates) @ updates, state


def test_check_aggregator_catches():
    with pytest.raises(LawBroken, match="order of clients"):
        check_aggregator(FirstOnly())
    with pytest.raises(LawBroken, match="sum of its chunks"):
        check_aggregator(CallsItselfLinear())
    with pytest.raises(LawBroken, match="doubles with the weights"):
        check_aggregator(IgnoresWeights())


def test_a_linear_aggregator_of_ones_own_is_used(ragged):
    check_aggregator(Doubling())
    plain, double = (
        eq.train(
            eq.models.Softmax(4, 3), ragged, eq.Algorithm(aggregator=part), rounds=1, clients_per_round=4, engine=engine
        ).params
        for part, engine in ((aggregators.WeightedMean(), "loop"), (Doubling(), "simulator"))
    )
    torch.testing.assert_close(double, 2 * plain)


class Centring(solvers.SGD):
    """Mixes the clients of a batch."""

    def step(self, weights, gradient, memory, *, anchor, lr):
        weights.sub_(lr * (gradient - gradient.mean(0)))


def test_check_solver_catches():
    with pytest.raises(LawBroken, match="step on each"):
        check_solver(Centring())


class Drifting(server_opt.SGD):
    def step(self, params, total, state):
        return params + total + 1e-3, state


class Overwriting(server_opt.SGD):
    def step(self, params, total, state):
        return params.add_(total), state


class InPlaceMomentum(server_opt.Momentum):
    def step(self, params, total, state):
        state.mul_(self.momentum).add_(total)
        return params + self.lr * state, state


def test_check_server_optimizer_catches():
    with pytest.raises(LawBroken, match="write to the state"):
        check_server_optimizer(InPlaceMomentum())
    with pytest.raises(LawBroken, match="changes nothing"):
        check_server_optimizer(Drifting())
    with pytest.raises(LawBroken, match=r"write to the parameters|write to the state"):
        check_server_optimizer(Overwriting())


class AlwaysFirst(sampling.Uniform):
    def __call__(self, round_index, alpha, *, clients_per_round, seed):
        return super().__call__(0, alpha, clients_per_round=clients_per_round, seed=seed)


class Favouring(sampling.Uniform):
    """The same clients in every round."""

    def __call__(self, round_index, alpha, *, clients_per_round, seed):
        cohort = super().__call__(0, alpha, clients_per_round=clients_per_round, seed=seed)
        return type(cohort)(round_index, seed, cohort.clients, cohort.weights, cohort.inclusion)


class Forgetful(sampling.Uniform):
    def __call__(self, round_index, alpha, *, clients_per_round, seed):
        cohort = super().__call__(round_index, alpha, clients_per_round=clients_per_round, seed=seed)
        return type(cohort)(cohort.round, cohort.seed, cohort.clients, cohort.weights * 2, cohort.inclusion)


class Understating(sampling.Availability):
    """States the inclusion of a population that is always there."""

    def __call__(self, round_index, alpha, *, clients_per_round, seed):
        cohort = super().__call__(round_index, alpha, clients_per_round=clients_per_round, seed=seed)
        stated = torch.full_like(cohort.inclusion, clients_per_round / len(alpha))
        return type(cohort)(cohort.round, cohort.seed, cohort.clients, cohort.weights, stated)


def test_check_sampler_catches():
    with pytest.raises(LawBroken, match="as often as their inclusion says"):
        check_sampler(Understating())
    with pytest.raises(LawBroken, match="carries its round and seed"):
        check_sampler(AlwaysFirst())
    with pytest.raises(LawBroken, match="as often as"):
        check_sampler(Favouring())
    with pytest.raises(LawBroken, match="sum to 1"):
        check_sampler(Forgetful())


@dataclass(frozen=True)
class ShiftedSeed:
    """An engine that draws other batches than it should."""

    def start(self, task, data):
        inner = engines.Simulator().start(task, data)
        plain = inner.updates

        def updates(params, cohort, solver):
            return plain(
                params, type(cohort)(cohort.round, cohort.seed + 1, cohort.clients, cohort.weights, cohort.inclusion), solver
            )

        inner.updates = updates
        return inner


def test_check_engine_catches():
    with pytest.raises(LawBroken, match="updates agree"):
        check_engine(ShiftedSeed())


class Meddling(observers.History):
    """Changes the solver behind the run's back."""

    def on_start(self, run):
        solvers.SGD.learning_rate = lambda self, round_index: 0.2


def test_check_observer_catches():
    kept = solvers.SGD.learning_rate
    try:
        with pytest.raises(LawBroken, match="does not change training"):
            check_observer(Meddling())
    finally:
        solvers.SGD.learning_rate = kept
