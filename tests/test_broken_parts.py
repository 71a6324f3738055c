"""Broken risks, solvers, aggregators, server optimisers and samplers: each is refused by the law that it breaks, by its code.

The check of its kind refuses it, and so does the trial before a run, where the law is in the quick subset.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar

import pytest
import torch

import equipoise as eq
from equipoise.errors import InvalidParameter
from equipoise.risk import RiskValue
from equipoise.risk.worst_case import project_on_simplex
from equipoise.runs.own_parts import try_own_parts
from equipoise.testing import LawBroken
from equipoise.testing.laws import try_laws
from equipoise.testing.server_parts import TriedServer, directions, state_changes
from equipoise.types import Cohort

CHECKS = {
    "risk": eq.testing.check_risk, "solver": eq.testing.check_solver, "aggregator": eq.testing.check_aggregator,
    "server": eq.testing.check_server_optimizer, "sampler": eq.testing.check_sampler,
}  # fmt: skip


def train(ragged, engine="loop", **parts):
    model = eq.models.Softmax(4, 3)
    return eq.train(model, ragged, eq.Algorithm(**parts), rounds=1, clients_per_round=4, engine=engine, progress=False)


class RunningMean:
    """A running mean in self: of equal values it is that value, so that the same call twice in a row does not show it."""

    linear = False

    def __init__(self):
        self.memory = {}

    def mean(self, value):
        old = self.memory.get("m")
        self.memory["m"] = value if old is None or old.shape != value.shape else 0.5 * old + 0.5 * value
        return self.memory["m"]

    def __call__(self, updates, weights, *, losses=None, state=None):
        return self.mean(weights.to(updates.dtype) @ updates), state

    def begin(self, params):
        return None

    def step(self, params, total, state):
        return params + self.mean(total), state


# --------------------------------------------------------------------------------------------------------------------- risks


def own_risk(answer, after=lambda state: state):
    """A risk by (losses, base weights) -> (value, weights) and the state after it."""

    def risk(losses, base_weights, *, clients=None, state=None):
        return RiskValue(*answer(losses, base_weights), after(state))

    return risk


def linear_risk(weigh, after=lambda state: state):
    return own_risk(lambda losses, base: (weigh(losses, base) @ losses, weigh(losses, base)), after)


def mean_and_deviation(losses, base):
    mean = base @ losses
    deviation = (base @ (losses - mean).square()).sqrt().clamp(min=1e-12)
    return mean + 0.8 * deviation, base * (1 + 0.8 * (losses - mean) / deviation)


def overflows(losses, base):
    powers = base * losses.exp()
    return powers.sum().log(), powers / powers.sum()


def single_precision(losses, base):
    return (base @ losses).float(), base.float()


def underflows(losses, base, floor=0.0):
    return base @ (-torch.expm1(-losses) + floor * losses), base * (torch.exp(-losses) + floor)


def count_in_place(state):
    state = {"rounds": 0} if state is None else state
    state["rounds"] += 1
    return state


def hidden(calls):
    return linear_risk(lambda losses, base: (calls.append(1) or 1 + 0.1 * len(calls)) * base)


class RunningMeanRisk(RunningMean):
    def __call__(self, losses, base_weights, *, clients=None, state=None):
        weights = base_weights * (1 + self.mean(losses))
        return RiskValue(weights @ losses, weights, state)


@dataclass(frozen=True)
class TailOfPast:
    """The tail by a running mean of losses, which may be kept in the class and not in the state, or be the value itself."""

    tail: float = 0.3
    in_class: bool = False
    value_of_past: bool = False
    past: ClassVar[dict] = {}

    def __call__(self, losses, base_weights, *, clients=None, state=None):
        old = TailOfPast.past if self.in_class else dict(state or {})
        pairs = zip(clients, losses.tolist(), strict=True)
        ema = 0.7 * torch.tensor([old.get(*pair) for pair in pairs], dtype=losses.dtype) + 0.3 * losses
        new = {**old, **dict(zip(clients, ema.tolist(), strict=True))}
        if self.in_class:
            TailOfPast.past.update(new)
        weights = eq.risk.Superquantile(self.tail)(ema, base_weights, clients=clients).weights
        return RiskValue(weights @ (ema if self.value_of_past else losses), weights, None if self.in_class else new)


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


def needs_five(losses, base_weights, *, clients=None, state=None):
    if len(losses) < 5:
        raise ValueError("five at least")
    return RiskValue(base_weights @ losses, base_weights, state)


def plain(losses, base):
    return base


RISKS = [
    (own_risk(lambda losses, base: ((base * losses.square()).sum(), base * losses)), "gradient"),
    (linear_risk(lambda losses, base: torch.arange(1, len(losses) + 1).to(losses)), "weights_follow"),
    (own_risk(lambda losses, base: (-(base @ losses), -base)), "not_negative"),
    (linear_risk(lambda losses, base: base * (1 + losses.argsort().argsort().to(losses))), "equal_losses"),
    (linear_risk(lambda losses, base: torch.eye(len(losses)).to(losses)[losses.argmax()]), "equal_losses"),
    (own_risk(mean_and_deviation), "not_negative"),
    (lambda losses, base_weights: RiskValue(base_weights @ losses, base_weights, None), "callable_as"),
    (lambda losses, base_weights, *, clients=None, state=None: base_weights, "risk_value"),
    (lambda losses, base, clients=None, state=None: RiskValue(1.0, base, None), "tensors"),
    (own_risk(lambda losses, base: (losses.sum(), torch.ones(1).double())), "one_weight_each"),
    (own_risk(lambda losses, base: (losses, base)), "one_value"),
    (own_risk(lambda losses, base: (losses.mul_(2) @ base / 2, base)), "writes"),
    (linear_risk(plain, count_in_place), "writes_state"),
    (linear_risk(plain, lambda state: lambda: None), "kept_state"),
    (linear_risk(plain, lambda state: [object()]), "kept_state"),
    (hidden([]), "same_again"),
    (TailOfPast(0.5, in_class=True), "same_again"),
    (RunningMeanRisk(), "same_again"),
    (own_risk(single_precision), "float64"),
    (own_risk(lambda losses, base: (base @ losses, base * float("nan"))), "finite"),
]
RISKS_OF_THE_CHECK = [
    (own_risk(overflows), "normalised"),
    (own_risk(underflows), "normalised"),
    (needs_five, "any_size"),
    (linear_risk(lambda losses, base: base.float()), "risk_types"),
    *((TailOfPast(tail, value_of_past=True), "gradient_later") for tail in (0.3, 0.5, 0.8)),
    (OwnAscent(uniform=False), "starts_uniform"),
    (OwnAscent(by_id=False), "weights_follow"),
    (OwnAscent(project=off_by_one), "on_simplex"),
    (OwnAscent(project=lambda point: point / point.sum()), "projection"),
    (OwnAscent(project=lambda point: point.clamp(0.0, 1.0)), "on_simplex"),
]

# ------------------------------------------------------------------------------------------------------------------- solvers


def own_solver(step, memories=0, begin=None, **options):
    """An SGD with another step (self, weights, gradient, memory, anchor, lr), and zeros or what `begin` gives as its memory."""

    @dataclass(frozen=True, repr=False)
    class Own(eq.solvers.SGD):
        memory: dict = field(default_factory=dict)  # which no solver should have

        def begin(self, weights):
            return tuple(torch.zeros_like(weights) for _ in range(memories)) if begin is None else begin(weights)

        def step(self, weights, gradient, memory, *, anchor, lr):
            step(self, weights, gradient, memory, anchor, lr)

    return Own(**{"lr": 0.05} | options)


def numbered(step, memories):
    """An Adam with another step."""

    @dataclass(frozen=True, repr=False)
    class Own(eq.solvers.Adam):
        def begin(self, weights):
            return tuple(torch.zeros_like(weights) for _ in range(memories))

        def step(self, weights, gradient, memory, *, anchor, lr, number):
            step(weights, gradient, memory, lr, number)

    return Own(lr=0.05)


def by(direction, memories=0, **options):
    """A solver that steps against a direction of (solver, weights, gradient, memory, anchor)."""
    return own_solver(lambda s, w, g, m, a, lr: w.sub_(lr * direction(s, w, g, m, a)), memories, **options)


def kept(self, weights, gradient, memory, anchor, lr):
    """Momentum in self, of the shape that was seen first."""
    weights.sub_(lr * self.memory.setdefault("m", torch.zeros_like(weights)).mul_(0.9).add_(gradient))


def running_mean(self, weights, gradient, memory, anchor, lr):
    old = self.memory.get("m", gradient)
    self.memory["m"] = 0.5 * (old if old.shape == gradient.shape else gradient) + 0.5 * gradient
    weights.sub_(lr * self.memory["m"])


def not_in_place(self, weights, gradient, memory, anchor, lr):
    weights = weights - lr * gradient


def rebinding(self, weights, gradient, memory, anchor, lr):
    (m,) = memory
    m = 0.9 * m + gradient
    weights.sub_(lr * m)


def growing_apart(self, weights, gradient, memory, anchor, lr):
    weights.mul_(1 + lr * self.weight_decay).sub_(lr * gradient)


def growing_by_a_constant(self, weights, gradient, memory, anchor, lr):
    weights.sub_(lr * gradient)
    weights.copy_(weights.sign() * (weights.abs() + lr * 0.01))


def error_feedback(self, weights, gradient, memory, anchor, lr):
    memory[0].add_(lr * gradient)
    sent = memory[0].abs().mean(-1, keepdim=True) * memory[0].sign()
    memory[0].sub_(sent)
    weights.sub_(sent)


def away_by_memory(s, w, g, m, a):
    return g - 0.1 * m[0].mul_(0.9).add_(0.1 * g.square()).sqrt() * (w - a)


class Standing(eq.solvers.SGD):
    def learning_rate(self, round_index):
        return 0.0


class NotTold(eq.solvers.Adam):
    def step(self, weights, gradient, memory, *, anchor, lr):
        weights.sub_(lr * gradient)


class CountsForItself(eq.solvers.Adam):
    """Takes the first client's number for all."""

    def step(self, weights, gradient, memory, *, anchor, lr, number=1):
        number = number.flatten()[0].item() if torch.is_tensor(number) else number
        super().step(weights, gradient, memory, anchor=anchor, lr=lr, number=number)


class KeepsTooLittle(eq.solvers.Adam):
    @property
    def keeps(self):
        return lambda dimension: dimension


class OneMemory(eq.solvers.SGD):
    """Remembers outside of the memory it is given."""

    def step(self, weights, gradient, memory, *, anchor, lr):
        memory[0].mul_(0.9).add_(gradient)
        vars(self).setdefault("seen", []).append(0)
        weights.sub_(lr * len(self.seen) * memory[0])


NO_TUPLE = {
    "a tensor": own_solver(lambda s, w, g, m, a, lr: w.sub_(lr * m.mul_(0.9).add_(g)), begin=torch.zeros_like),
    "by name": own_solver(
        lambda s, w, g, m, a, lr: w.sub_(lr * m["m"].mul_(0.9).add_(g)), begin=lambda w: {"m": torch.zeros_like(w)}
    ),
    "None": own_solver(lambda s, w, g, m, a, lr: w.sub_(lr * g), begin=lambda w: None),
}
SOLVERS = [
    (by(lambda s, w, g, m, a: g - g.mean(0)), "each_client"),
    (by(lambda s, w, g, m, a: g - g.mean()), "each_client"),
    (own_solver(lambda s, w, g, m, a, lr: w.sub_(g.mul_(lr))), "writes"),
    (own_solver(not_in_place), "moves"),
    (by(lambda s, w, g, m, a: g.sign(), prox=1.0), "options"),
    (by(lambda s, w, g, m, a: g.sign(), momentum=0.9, weight_decay=1e-4), "options"),
    (own_solver(lambda s, w, g, m, a, lr: w.sub_(0.01 * g)), "options"),
    (Standing(), "positive_rate"),
    (own_solver(kept), "same_again"),
    (own_solver(running_mean), "same_again"),
    (own_solver(rebinding, 1), "memory_in_place"),
    (by(lambda s, w, g, m, a: -g), "lowers"),
    *((part, "memory_form") for part in NO_TUPLE.values()),
    (by(lambda s, w, g, m, a: m[0].mul_(0.9).add_(g)), "memory_missing"),
    (NotTold(), "callable_as"),
    (by(lambda s, w, g, m, a: g - s.prox * (w - a), prox=0.1), "to_anchor"),
    (by(lambda s, w, g, m, a: g + 0.1 * (a - w)), "to_anchor"),
    (by(away_by_memory, 1), "to_anchor"),
    (by(lambda s, w, g, m, a: g + s.prox * w, prox=0.1), "anchor_used"),
    (by(lambda s, w, g, m, a: g - s.weight_decay * w, weight_decay=0.01), "to_zero"),
    (own_solver(growing_apart, weight_decay=1e-4), "to_zero"),
    (own_solver(growing_by_a_constant), "to_zero"),
    (by(lambda s, w, g, m, a: g + 0.2 * m[0].mul_(0.9).sub_(g), 1), "on_and_on"),
    (by(lambda s, w, g, m, a: m[0].mul_(-0.9).add_(g), 1), "not_back"),
    (by(lambda s, w, g, m, a: g / g.norm(dim=-1, keepdim=True).clamp(min=1e-3)), "one_by_one"),
    (by(lambda s, w, g, m, a: g / (g.norm(dim=-1, keepdim=True) / 100).clamp(min=1)), "one_by_one"),
    (by(lambda s, w, g, m, a: g - 0.5 * g.mean(-1, keepdim=True)), "one_by_one"),
    (by(lambda s, w, g, m, a: g * (g.abs() >= g.abs().median(-1, keepdim=True).values)), "one_by_one"),
    (own_solver(error_feedback, 1), "one_by_one"),
]
SOLVERS_OF_THE_CHECK = [
    (CountsForItself(), "each_client"),
    (KeepsTooLittle(), "memory_width"),
    (OneMemory(momentum=0.9, state="kept"), "same_again"),
]


def rprop(self, weights, gradient, memory, anchor, lr):
    memory[1].copy_(torch.where(memory[1] == 0, 1.0, memory[1]))
    same = gradient * memory[0]
    memory[1].mul_(torch.where(same > 0, 1.2, torch.where(same < 0, 0.5, 1.0))).clamp_(1e-6, 50)
    memory[0].copy_(torch.where(same < 0, 0.0, gradient))
    weights.sub_(lr * memory[1] * memory[0].sign())


def lion(self, weights, gradient, memory, anchor, lr):
    weights.mul_(1 - lr * self.weight_decay).sub_(lr * (0.9 * memory[0] + 0.1 * gradient).sign())
    memory[0].mul_(0.99).add_(0.01 * gradient)


def rmsprop_centred(s, w, g, m, a):
    m[0].lerp_(g.square(), 0.01)
    m[1].lerp_(g, 0.01)
    return m[2].mul_(0.9).add_(g / ((m[0] - m[1].square()).clamp(min=0).sqrt() + 1e-8))


def adadelta(s, w, g, m, a):
    change = g * ((m[1] + 1e-6) / (m[0].lerp_(g.square(), 0.1) + 1e-6)).sqrt()
    m[1].lerp_(change.square(), 0.1)
    return change


def adabelief_with_prox(s, w, g, m, a):
    g = g + s.prox * (w - a)
    m[1].lerp_((g - m[0].lerp_(g, 0.1)).square(), 0.1)
    return m[0] / (m[1].sqrt() + 1e-8)


def optimistic(self, weights, gradient, memory, anchor, lr):
    weights.sub_(lr * (2 * gradient - memory[0]))
    memory[0].copy_(gradient)


def soft_threshold(self, weights, gradient, memory, anchor, lr):
    weights.sub_(lr * gradient)
    weights.copy_(weights.sign() * (weights.abs() - lr * 0.1).clamp(min=0))


def lookahead(weights, gradient, memory, lr, number):
    weights.sub_(lr * gradient)
    memory[0].sub_(lr * gradient)  # how far the fast weights are from the slow ones
    here = torch.as_tensor(number) % 5 == 0
    weights.sub_(torch.where(here, 0.5 * memory[0], 0.0))
    memory[0].copy_(torch.where(here, 0.0, memory[0]))


def nadam(weights, gradient, memory, lr, number):
    mean = 0.9 * memory[0].lerp_(gradient, 0.1) / (1 - 0.9 ** (number + 1)) + 0.1 * gradient / (1 - 0.9**number)
    square = memory[1].lerp_(gradient.square(), 0.001) / (1 - 0.999**number)
    weights.sub_((lr * mean / (square.sqrt() + 1e-8)).to(weights.dtype))


HONEST_SOLVERS = {
    "prox by memory": by(
        lambda s, w, g, m, a: g + s.prox * m[0].mul_(0.9).add_(0.1 * g.square()).sqrt() * (w - a), 1, prox=0.1
    ),
    "adabelief": by(adabelief_with_prox, 2, prox=3.0),
    "dual averaging": own_solver(lambda s, w, g, m, a, lr: w.copy_(a - lr * m[0].add_(g)), 1),
    "nesterov": by(lambda s, w, g, m, a: g + 0.9 * m[0].mul_(0.9).add_(g), 1),
    "from the start": by(lambda s, w, g, m, a: g + 0.1 * (w - m[0]), begin=lambda w: (w.clone(),)),
    "sign": by(lambda s, w, g, m, a: g.sign(), lr=0.01),
    "sign with prox": by(lambda s, w, g, m, a: (g + s.prox * (w - a)).sign(), prox=0.1),
    "weak prox": by(lambda s, w, g, m, a: (g + s.prox * (w - a)).sign(), prox=1e-6),  # it changes no sign here
    "signum": by(
        lambda s, w, g, m, a: m[0].mul_(0.9).add_(g + s.prox * (w - a) + s.weight_decay * w).sign(),
        1,
        prox=0.3,
        weight_decay=0.01,
    ),
    "lion": own_solver(lion, 1, weight_decay=0.1),
    "adagrad": by(lambda s, w, g, m, a: g / (m[0].add_(g.square()).sqrt() + 1e-10), 1),
    "rmsprop": by(rmsprop_centred, 3),
    "adadelta": by(adadelta, 2),
    "rprop": own_solver(rprop, 2),
    "optimistic": own_solver(optimistic, 1),
    "projected": own_solver(lambda s, w, g, m, a, lr: w.sub_(lr * g).clamp_(min=0)),
    "soft threshold": own_solver(soft_threshold),
    "clipped value": by(lambda s, w, g, m, a: g.clamp(-0.1, 0.1)),
    "cyclic": numbered(lambda w, g, m, lr, number: w.sub_(lr / (1 + number % 7) * g), 0),
    "lookahead": numbered(lookahead, 1),
    "nadam": numbered(nadam, 2),
    "strong prox": eq.solvers.SGD(prox=100.0, momentum=0.99),
    "strong decay": eq.solvers.Adam(weight_decay=100.0, prox=100.0),
    "long momentum": eq.solvers.SGD(momentum=0.999, nesterov=True, weight_decay=1.0),
}

# --------------------------------------------------------------------------------------------------------------- aggregators


def aggregator(total, state=lambda total, state: state, linear=False, needs_keys=False):
    """An aggregator by (updates, weights) -> total and (total, state) -> state."""

    class Own:
        def __call__(self, updates, weights, *, losses=None, state=None, **more):
            found = total(updates, weights, **more)
            return found, after(found, state)

    after, Own.linear, Own.needs_keys = state, linear, needs_keys
    return Own()


def mean(updates, weights):
    return weights.to(updates.dtype) @ updates


@dataclass(frozen=True)
class LinearMomentum:
    """FedAvgM as an aggregator that calls itself linear: engines add up its totals, and no call gets a state."""

    linear: bool = True

    def __call__(self, updates, weights, *, losses=None, state=None):
        total = mean(updates, weights) if state is None else mean(updates, weights) + 0.9 * state
        return total, total


class MomentumInPlace:
    linear = False

    def __call__(self, updates, weights, *, losses=None, state=None):
        total = mean(updates, weights)
        state = total.clone() if state is None else state.mul_(0.5).add_(total, alpha=0.5)
        return state, state


class OnlyTotal:
    linear = False

    def __call__(self, updates, weights, *, losses=None, state=None):
        return mean(updates, weights)


class KeptMomentum:
    """Momentum in self: of the same tensor, or of a new one in each call."""

    linear = False

    def __init__(self, in_place):
        self.in_place, self.kept = in_place, None

    def __call__(self, updates, weights, *, losses=None, state=None):
        total = mean(updates, weights)
        before = torch.zeros_like(total) if self.kept is None else self.kept
        self.kept = before.mul_(0.9).add_(total) if self.in_place else 0.9 * before + total
        return self.kept, state


def scale_in_place(updates, weights):
    return mean(updates.div_(updates.norm(dim=1, keepdim=True).clamp(min=1)), weights)


def needing(least, total):
    def call(updates, weights):
        if len(updates) < least:
            raise ValueError(f"{least} at least")
        return total(updates, weights)

    return call


def most_central(updates, weights, keys=None):
    """The update nearest the mean, of several the first, or the one with the smallest key."""
    away = (updates - updates.mean(0)).norm(dim=1)
    best = (away <= away.min() + 1e-6).nonzero().flatten()
    return updates[best[0] if keys is None else best[keys[best].argmin()]]


class CountsEverybody(eq.aggregators.Median):
    """An extension of the library's that does not leave out clients without a weight, as its parent does."""

    def __call__(self, updates, weights, *, losses=None, state=None, keys=None):
        return super().__call__(updates, torch.full_like(weights, 1 / len(weights)))


AGGREGATORS = [
    (OnlyTotal(), "two_things"),
    (aggregator(lambda updates, weights: updates[0]), "any_order"),
    (aggregator(lambda updates, weights: updates.mean(0), linear=True), "chunks"),
    (LinearMomentum(), "linear_state"),
    (aggregator(scale_in_place), "writes"),
    (MomentumInPlace(), "writes_state"),
    (aggregator(lambda updates, weights: updates.sum(0)), "any_number"),
    (aggregator(lambda updates, weights: weights @ updates.double()), "total_type"),
    (aggregator(torch.Tensor.__rmatmul__, linear=True), "float32"),
    (aggregator(lambda updates, weights: weights @ updates), "float32"),
    (aggregator(needing(5, lambda updates, weights: weights @ updates)), "float32"),
    (KeptMomentum(in_place=True), "same_again"),
    (KeptMomentum(in_place=False), "same_again"),
    (RunningMean(), "same_again"),
    (aggregator(lambda updates, weights: mean(updates, weights) * float("nan")), "finite"),
]
AGGREGATORS_OF_THE_CHECK = [
    (aggregator(needing(5, mean), linear=True), "any_chunk"),
    (aggregator(most_central), "any_order"),
    (
        aggregator(lambda updates, weights: mean(updates, 1 / weights.to(updates) / (1 / weights.to(updates)).sum())),
        "small_weights",
    ),
    (CountsEverybody(), "no_weight"),
    (aggregator(lambda updates, weights: updates.sum(0) / 100, linear=True), "doubles"),
]

# ---------------------------------------------------------------------------------------------------------- server optimisers


def server(step, begin=torch.zeros_like):
    """A server optimiser with this step."""

    class Own:
        def begin(self, params):
            return begin(params)

        def step(self, params, total, state):
            return step(params, total, state)

    return Own()


def nothing(params):
    return None


def zero(params):
    return 0


def pair(params):
    return torch.zeros_like(params), torch.zeros_like(params)


class InSelf:
    """Memory in self: the plain momentum, or a slow mean of which the sign is taken, for one size or by size."""

    def __init__(self, sign, by_size):
        self.sign, self.by_size, self.memory = sign, by_size, {}

    def begin(self, params):
        return None

    def step(self, params, total, state):
        key = params.shape if self.by_size else ""
        before = self.memory.get(key, 0)
        self.memory[key] = 0.99 * before + 0.01 * total if self.sign else 0.9 * before + total
        return params + ((0.9 * before + 0.1 * total).sign() if self.sign else self.memory[key]), state


def root_of_negative(params, total, state):
    """A Yogi whose second moment has the wrong sign."""
    second = state - 0.1 * total.square()
    return params + total / (second.sqrt() + 1e-3), second


def momentum_in_place(params, total, state):
    return params + state.mul_(0.9).add_(total), state


SERVERS = [
    (server(lambda p, t, s: (p + t + 1e-3, s)), "zero_update"),
    (server(lambda p, t, s: ((1 - 1e-5) * p + t, s)), "zero_update"),
    (server(lambda p, t, s: (p - t, s)), "along"),
    (server(momentum_in_place), "writes_state"),
    (server(lambda p, t, s: (p.add_(t), s)), "writes"),
    (server(lambda p, t, s: (p + t, s), lambda p: torch.Generator().manual_seed(0)), "kept_state"),
    (server(lambda p, t, s: (p + t, torch.Generator()), nothing), "kept_state"),
    (server(lambda p, t, s: p + t, nothing), "two_things"),
    (server(root_of_negative), "finite"),
    *((InSelf(sign, by_size), "same_again") for sign in (False, True) for by_size in (False, True)),
    (RunningMean(), "same_again"),
    (server(lambda p, t, s: (p + t - 1.5 * s, t.clone())), "server_on"),
    (server(lambda p, t, s: (p + t - 0.9 * s, t.clone())), "server_not_back"),
    (server(lambda p, t, s: (p + t - 0.9 * s, t - 0.9 * s)), "server_not_back"),
    (server(lambda p, t, s: (p + 0.9 * s + t, s)), "state_changes"),
    (
        server(lambda p, t, s: (p + 0.9 * s["v"] + t, {**s, "n": s["n"] + 1}), lambda p: {"v": torch.zeros_like(p), "n": 0}),
        "state_changes",
    ),
    (server(lambda p, t, s: (p + t + (s.norm() > 0) * 5, t.clone())), "opposite"),
]


def lamb(params, total, state):
    first, square = 0.9 * state[0] + 0.1 * total, 0.99 * state[1] + 0.01 * total.square()
    step = first / (square.sqrt() + 1e-6)
    return params + 0.1 * params.norm() * step / step.norm().clamp(min=1e-12), (first, square)


def trust_region(params, total, state):
    norm, (slow, count) = float(total.norm()), state
    now = norm if count == 0 else 0.8 * slow + 0.2 * norm
    return params + min(1.0, 2 * now / max(norm, 1e-12)) * total, (now, count + 1)


def slow_and_fast(params, total, state):
    moved, since, count = params + total, state[0] + total, state[1] + 1
    return (moved - 0.5 * since, (torch.zeros_like(since), count)) if count % 5 == 0 else (moved, (since, count))


def restarted(params, total, state):
    velocity = total if float(state @ total) < 0 else 0.9 * state + total
    return params + velocity, velocity


def schedule_free(params, total, state):
    fast, count = state[0] + total, state[2] + 1
    slow = state[1] + (fast - state[1]) / count
    return 0.1 * fast + 0.9 * slow, (fast, slow, count)  # rounds, also where both are the parameters


def larger_half(params, total, state):
    """The larger half of the numbers is sent now, and the rest is kept for later rounds."""
    whole = total + state
    sent = torch.where(whole.abs() >= whole.abs().median(), whole, 0.0)
    return params + sent, whole - sent


HONEST_SERVERS = {
    "error feedback": server(larger_half),
    "lamb": server(lamb, pair),
    "trust region": server(trust_region, lambda params: (0.0, 0)),
    "lars": server(lambda p, t, s: (p + 0.01 * p.norm() * t / t.norm().clamp(min=1e-12), s), nothing),
    "schedule-free": server(schedule_free, lambda params: (params.clone(), params.clone(), 0)),
    "decaying": server(lambda p, t, s: (p + t / (1 + s) ** 0.5, s + 1), zero),
    "warm-up": server(lambda p, t, s: (p + min(1.0, (s + 1) / 50) * t, s + 1), zero),
    "lookahead": server(slow_and_fast, lambda params: (torch.zeros_like(params), 0)),
    "nesterov": server(lambda p, t, s: (p + t + 0.9 * (0.9 * s + t), 0.9 * s + t)),
    "sign": server(lambda p, t, s: (p + 0.01 * t.sign(), s)),
    "clipped": server(lambda p, t, s: (p + t * (0.1 / t.norm().clamp(min=0.1)), s)),
    "exponentiated": server(lambda p, t, s: (p * torch.exp(t), s)),
    "optimistic": server(lambda p, t, s: (p + 2 * t - s, t.clone())),
    "later decay": server(lambda p, t, s: ((p * 0.99 if s else p) + t, s + 1), zero),
    "near the start": server(lambda p, t, s: (p + t - 0.1 * (p - s), s), lambda params: params.clone()),
    "restarted": server(restarted),
    "adam": eq.server_opt.Adam(lr=1.0, beta1=0.99),
    "yogi": eq.server_opt.Yogi(lr=10.0, beta2=0.0),
    "momentum": eq.server_opt.Momentum(momentum=0.999),
}

# ------------------------------------------------------------------------------------------------------------------ samplers


def changed(change, of=eq.sampling.Uniform, index=None):
    """A sampler of the library whose cohort, of another seed or of one round, is changed: (cohort, alpha) -> fields."""

    class Own(of):
        def __call__(self, round_index, alpha, *, clients_per_round, seed):
            draw = super().__call__
            here = round_index if index is None else index
            drawn = draw(here, alpha, clients_per_round=clients_per_round, seed=seed)
            given = {"round": round_index, "seed": seed, "clients": drawn.clients, "weights": drawn.weights}
            return Cohort(**{**given, "inclusion": drawn.inclusion, **change(drawn, alpha)})

    return Own()


def drawing(choose, inclusion, weigh=lambda alpha, clients: alpha[clients]):
    """A sampler by (alpha, m, generator) -> positions, (alpha, positions) -> inclusion and (alpha, positions) -> weights."""

    class Drawing:
        def __call__(self, round_index, alpha, *, clients_per_round, seed):
            random = torch.Generator().manual_seed(seed * 9973 + round_index)
            clients = choose(alpha, clients_per_round, random).sort().values
            weights = weigh(alpha, clients)
            return Cohort(round_index, seed, clients, weights / weights.sum(), inclusion(alpha, clients))

    return Drawing()


def uniformly(alpha, m, random):
    return torch.randperm(len(alpha), generator=random)[:m]


def never_the_last(alpha, m, random):
    return torch.randperm(len(alpha) - 1, generator=random)[:m]


def at_any_time(alpha, m, random):
    return torch.randperm(len(alpha), generator=random.manual_seed(time.perf_counter_ns()))[:m]


def in_proportion(alpha, m, random):
    """Without replacement: the m largest of log α plus Gumbel noise; inclusion has no closed form."""
    uniform = torch.rand(len(alpha), generator=random, dtype=torch.float64)
    return (alpha.log() - (-uniform.log()).log()).topk(m).indices


def share(clients_less=0, factor=1.0):
    return lambda alpha, clients: torch.full((len(clients),), factor * len(clients) / (len(alpha) - clients_less)).double()


def alike(alpha, clients):
    return torch.ones(len(clients), dtype=torch.float64)


def unknown(alpha, clients):
    return None


def stating(number):
    return drawing(uniformly, lambda alpha, clients: torch.full((len(clients),), number).double())


SAMPLERS = [
    (drawing(at_any_time, share()), "function_of_seed"),
    (changed(lambda cohort, alpha: {"weights": 2 * cohort.weights}), "shares"),
    (changed(lambda cohort, alpha: {"round": 0}), "round_and_seed"),
    (changed(lambda cohort, alpha: {"clients": cohort.clients.clamp(max=0)}), "distinct"),
    (changed(lambda cohort, alpha: {"clients": cohort.clients + len(alpha)}), "in_range"),
    *((stating(number), "inclusion") for number in (torch.nan, 0.0, 1.5)),
    (drawing(uniformly, lambda alpha, clients: [0.5] * len(clients)), "inclusion"),
    (drawing(uniformly, lambda alpha, clients: torch.tensor(0.5).double()), "inclusion"),
]
SAMPLERS_OF_THE_CHECK = [
    (lambda index, alpha, **_: None, "cohort"),
    (changed(lambda c, alpha: {"inclusion": torch.full_like(c.inclusion, 0.3)}, eq.sampling.Availability), "inclusion_true"),
    (changed(lambda cohort, alpha: {}, index=0), "seeds_alike"),
    (drawing(uniformly, share(factor=0.5)), "inclusion_true"),
    (drawing(never_the_last, share()), "inclusion_sum"),
    (
        drawing(uniformly, lambda alpha, clients: None if int(clients[0]) else share()(alpha, clients)),
        "inclusion_of_all",
    ),
]

# ---------------------------------------------------------------------------------------------------- the check and the trial

QUICK = [("risk", *row) for row in RISKS] + [("solver", *row) for row in SOLVERS]
QUICK += [("aggregator", *row) for row in AGGREGATORS] + [("server", *row) for row in SERVERS]
QUICK += [("sampler", *row) for row in SAMPLERS]
OF_THE_CHECK = [("risk", *row) for row in RISKS_OF_THE_CHECK] + [("solver", *row) for row in SOLVERS_OF_THE_CHECK]
OF_THE_CHECK += [("aggregator", *row) for row in AGGREGATORS_OF_THE_CHECK] + [
    ("sampler", *row) for row in SAMPLERS_OF_THE_CHECK
]


def names(rows):
    return [f"{kind} {law} {place}" for place, (kind, _, law) in enumerate(rows)]


@pytest.mark.filterwarnings("ignore:.*fall as losses rise")
@pytest.mark.parametrize(("kind", "part", "law"), QUICK + OF_THE_CHECK, ids=names(QUICK + OF_THE_CHECK))
def test_the_check_names_the_law_that_a_part_breaks(kind, part, law):
    TailOfPast.past.clear()
    with pytest.raises(LawBroken) as caught:
        CHECKS[kind](part)
    assert caught.value.law == law
    assert caught.value.code == "EQ900"


@pytest.mark.parametrize(("kind", "part", "law"), QUICK, ids=names(QUICK))
def test_so_does_the_trial_before_a_run(kind, part, law, ragged):
    TailOfPast.past.clear()
    with pytest.raises(InvalidParameter) as caught:
        train(ragged, **{kind: part})
    assert (caught.value.parameter, caught.value.law, caught.value.code) == (kind, law, "EQ121")


@pytest.mark.parametrize("part", HONEST_SOLVERS.values(), ids=HONEST_SOLVERS)
def test_honest_solvers_keep_the_laws(part):
    eq.testing.check_solver(part)


@pytest.mark.parametrize("part", HONEST_SERVERS.values(), ids=HONEST_SERVERS)
def test_honest_server_optimisers_keep_the_laws(part):
    try_laws((state_changes, directions), lambda: TriedServer(part))
    for seed in range(0 if part is HONEST_SERVERS["exponentiated"] else 3):  # whose first step may go astray
        eq.testing.check_server_optimizer(part, seed=seed)


def test_honest_risks_and_aggregators_keep_the_laws(ragged):
    for tail in (0.3, 0.5, 0.8):
        eq.testing.check_risk(TailOfPast(tail))
    with pytest.warns(UserWarning, match="fall as losses rise"):
        eq.testing.check_risk(own_risk(lambda losses, base: underflows(losses, base, 1e-9)))
    eq.testing.check_aggregator(LinearMomentum(linear=False))
    eq.testing.check_aggregator(aggregator(most_central, needs_keys=True))
    eq.testing.check_aggregator(aggregator(needing(5, lambda updates, weights: updates.median(0).values)))
    medoid = aggregator(lambda updates, weights: updates[torch.cdist(updates, updates).sum(1).argmin()])
    train(ragged, aggregator=medoid)  # whose choice between two updates is a tie


@pytest.mark.parametrize("engine", ["loop", "simulator"])
@pytest.mark.parametrize("solver", NO_TUPLE.values(), ids=NO_TUPLE)
def test_parts_inside_of_others_are_tried(solver, engine, ragged):
    inside = {"solver": eq.solvers.FedDane(solver)}, {"personal": eq.personal.Ditto(solver=solver)}
    for parts in (*inside, {"aggregator": eq.aggregators.FedNova(LinearMomentum())}):
        with pytest.raises(InvalidParameter) as caught:
            train(ragged, engine, **parts)
        assert caught.value.law == ("linear_state" if "aggregator" in parts else "memory_form")


@pytest.mark.parametrize(
    ("check", "part", "law"),
    [
        ("aggregator", lambda updates, weights, **_: (weights @ updates, None), "has"),
        ("aggregator", OnlyTotal, "is_object"),
        ("solver", torch.optim.SGD, "is_object"),
        ("schedule", lambda: 1.0, "answers"),
        ("schedule", lambda index: 1.0 - index / 100, "factor"),
        ("schedule", iter(range(1, 99)).__next__, "answers"),
        ("observer", "no part", "hears"),
        *((kind, "no part", "has") for kind in (
            "solver", "server_optimizer", "averaging", "attack", "personalisation", "quantile_source", "clip_rule", "engine",
        )),
    ],
)  # fmt: skip
def test_a_check_says_what_is_no_part(check, part, law):
    with pytest.raises(LawBroken) as caught:
        getattr(eq.testing, f"check_{check}")(part)
    assert caught.value.law == law


def test_one_index_has_one_factor():
    calls = []
    with pytest.raises(LawBroken) as caught:
        eq.testing.check_schedule(lambda index: calls.append(index) or 1.0 / len(calls))
    assert caught.value.law == "one_factor"


def test_an_aggregator_is_checked_with_as_many_clients_as_it_needs():
    with pytest.raises(LawBroken) as caught:
        eq.testing.check_aggregator(aggregator(needing(5, mean)), clients=4)
    assert caught.value.law == "combines"
    with pytest.raises(InvalidParameter, match="EQ1"):  # a part of the library's own refuses with its own fix
        eq.testing.check_aggregator(eq.aggregators.Krum(4), clients=4)


# --------------------------------------------------------------------------------------------------- the trial leaves no trace


@dataclass(frozen=True)
class Counting:
    """A good risk that notes its calls, and knows clients of the data only."""

    known: tuple
    calls: list = field(default_factory=list)

    def __call__(self, losses, base_weights, *, clients=None, state=None):
        assert set(clients) <= set(self.known)
        self.calls.append(len(losses))
        return RiskValue(base_weights @ losses, base_weights, state)


def test_good_parts_are_not_touched_by_their_quick_trial(ragged):
    parts = {"risk": Counting(tuple(ragged.train.ids)), "aggregator": aggregator(needing(3, mean))}
    began = time.perf_counter()
    try_own_parts(eq.Algorithm(**parts), ragged.train.ids, torch.full((8,), 1 / 8), 4, 0)
    assert time.perf_counter() - began < 0.5
    train(ragged, **parts)
    assert parts["risk"].calls == [4]


@dataclass(frozen=True)
class Fails:
    """A part of each kind that raises an error in its trial."""

    linear = False

    def __call__(self, *given, clients=None, **more):
        return {}[0 if clients is None else clients[0]]

    def begin(self, params):
        return None

    def step(self, params, total, state):
        raise ZeroDivisionError


@pytest.mark.parametrize("kind", ["risk", "aggregator", "server", "sampler"])
def test_an_error_of_a_part_is_left_to_the_run_and_has_a_note_that_names_the_part(kind, ragged):
    with pytest.raises((KeyError, ZeroDivisionError)) as caught:
        train(ragged, **{kind: Fails()})
    name = {"server": "server optimiser"}.get(kind, kind)
    assert f"The {name} Fails() raised this error." in caught.value.__notes__


def test_a_state_that_no_checkpoint_keeps_is_refused_after_the_first_round(ragged, tmp_path):
    def late_set(losses, base_weights, *, clients=None, state=None):
        several = len(losses) == 5  # as in no trial
        return RiskValue(base_weights @ losses, base_weights, {1, 2} if several else None)

    for options in ({}, {"checkpoint": tmp_path / "late.ckpt"}):
        given = {"rounds": 3, "clients_per_round": 5, "name": "ours", "progress": False, **options}
        with pytest.raises(InvalidParameter, match="type set") as caught:
            eq.train(eq.models.Softmax(4, 3), ragged, eq.Algorithm(risk=late_set), **given)
        assert (caught.value.parameter, caught.value.code) == ("risk", "EQ121")


# ------------------------------------------------------------------------------------------------------------------- notices


def past_excess(sign):
    """α (1 ± 0.9 tanh(past)), where past is the running mean of how far the loss of a client is above that of its cohort."""

    def risk(losses, base_weights, *, clients=None, state=None):
        past = dict(state or {})
        known = torch.tensor([past.get(each, 0.0) for each in clients], dtype=losses.dtype)
        weights = base_weights * (1 + sign * 0.9 * torch.tanh(known.clamp(min=0)))
        above = (losses - base_weights @ losses).tolist()
        past.update({each: 0.8 * past.get(each, 0.0) + 0.2 * now for each, now in zip(clients, above, strict=True)})
        return RiskValue(weights @ losses, weights, past)

    return risk


def tilted_the_wrong_way(losses, base):
    z = base.log() - losses
    return -torch.logsumexp(z, 0), torch.softmax(z, 0)


@pytest.mark.parametrize(
    ("risk", "told"),
    [
        (own_risk(tilted_the_wrong_way), 1),
        (past_excess(-1), 6),
        (past_excess(1), 0),
        (linear_risk(lambda losses, base: base * (1 + (losses > 0.7).double())), 0),
        (eq.risk.Tilted(-1.0), 0),
    ],
)
def test_a_risk_that_favours_low_losses_is_told_of(risk, told, ragged, recwarn):
    for call in (eq.testing.check_risk, lambda risk: train(ragged, risk=risk)):
        recwarn.clear()
        call(risk)
        notices = [str(each.message) for each in recwarn if "fall as losses rise" in str(each.message)]
        assert [f"(round {told})" in each for each in notices] == [True] * bool(told)


def test_samplers_that_leave_clients_out_or_weigh_them_alike_are_told_of(recwarn):
    for sampler, words in (
        (drawing(uniformly, share()), []),
        (drawing(in_proportion, unknown, alike), []),
        (drawing(never_the_last, share(clients_less=1)), ["none of 6000 cohorts: [19], 1 of 20"]),
        (drawing(uniformly, share(), alike), ["do not follow their base weights"]),
    ):
        recwarn.clear()
        eq.testing.check_sampler(sampler)
        assert [word in str(each.message) for word, each in zip(words, recwarn, strict=True)] == [True] * len(words)


@pytest.mark.parametrize("draws", [20, 100])
def test_true_inclusion_is_hardly_ever_refused(draws):
    for seed in range(5):
        for sampler in (eq.sampling.Uniform(), eq.sampling.Poisson(), eq.sampling.Proportional(), eq.sampling.Availability()):
            eq.testing.check_sampler(sampler, draws=draws, seed=seed, clients=10, clients_per_round=2)


@pytest.mark.parametrize("engine", ["loop", "simulator"])
def test_a_run_needs_no_inclusion(engine, ragged):
    runs = (
        train(ragged, engine, sampler=drawing(uniformly, stated), risk=eq.risk.Superquantile(0.5))
        for stated in (share(), unknown)
    )
    assert torch.equal(*(run.params for run in runs))


def only_above_one(losses, base):
    over = (losses - 1).clamp(min=0) + (0.01 if bool((losses <= 1).all()) else 0.0)  # a round needs some weight
    return base @ over.square() / 2, base * over


def above_one(losses, base):
    over = (losses - 1).clamp(min=0)
    return base @ (losses + 4 * over.square()), base * (1 + 8 * over)


def only_the_past(losses, base_weights, *, clients=None, state=None):
    """Leaves nobody out in the first round; later it leaves out clients whose loss was the smallest."""
    past = dict(state or {})
    factors = torch.tensor([past.get(each, 1.0) for each in clients], dtype=losses.dtype)
    past.update(zip(clients, (losses > losses.min()).double().tolist(), strict=True))
    return RiskValue(factors * base_weights @ losses, factors * base_weights, past)


@pytest.mark.parametrize(
    ("risk", "aggregator", "told"),
    [
        (own_risk(above_one), eq.aggregators.Krum(malicious=1), True),
        (own_risk(above_one), eq.aggregators.KLoss(malicious=1), True),
        (own_risk(only_above_one), eq.aggregators.KLoss(malicious=1), True),  # which takes a large loss, that keeps its weight
        (own_risk(only_above_one), eq.aggregators.Krum(malicious=1), False),
        (own_risk(above_one), eq.aggregators.Median(), False),
        (linear_risk(plain), eq.aggregators.Krum(malicious=1), False),  # it weighs as FedAvg does
        (eq.risk.Superquantile(tail=0.5), eq.aggregators.Krum(malicious=1), False),
    ],
)
def test_train_tells_of_a_risk_without_effect_beside_krum_and_k_loss(risk, aggregator, told, ragged, recwarn):
    algorithm = eq.Algorithm(risk=risk, aggregator=aggregator)
    eq.train(eq.models.Softmax(4, 3), ragged, algorithm, rounds=1, clients_per_round=8, engine="loop", progress=False)
    assert sum("ignores the weights of clients" in str(each.message) for each in recwarn) == told


def test_a_risk_that_leaves_clients_out_later_has_an_effect():
    ids = tuple(f"client-{i}" for i in range(12))
    assert not eq.runs.own_parts.weighs_without_leaving_out(only_the_past, ids)
    assert eq.runs.own_parts.weighs_without_leaving_out(only_the_past, ids, large=True)
    assert not eq.runs.own_parts.weighs_without_leaving_out(lambda *given, **more: 1 / 0, ids)
