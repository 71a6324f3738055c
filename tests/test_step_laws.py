"""Laws of the direction of many steps: wrong signs break one of them, and honest optimisers of all kinds keep them."""

from dataclasses import dataclass

import pytest
import torch

import equipoise as eq
from equipoise.errors import InvalidParameter
from equipoise.runs import step_laws as laws
from equipoise.runs.steps_alone import lost_memories
from equipoise.testing import LawBroken, check_server_optimizer, check_solver
from made_clients import make_clients


def train(ragged, **parts):
    model = eq.models.Softmax(4, 3)
    return eq.train(model, ragged, eq.Algorithm(**parts), rounds=1, clients_per_round=4, engine="loop", progress=False)


def solver(step, memories=0, **options):
    """An SGD with another step."""

    @dataclass(frozen=True, repr=False)
    class Own(eq.solvers.SGD):
        def begin(self, weights):
            return tuple(torch.zeros_like(weights) for _ in range(memories))

        def step(self, weights, gradient, memory, *, anchor, lr):
            step(self, weights, gradient, memory, anchor, lr)

    return Own(lr=0.05, **options)


def numbered(step, memories):
    """An Adam with another step."""

    @dataclass(frozen=True, repr=False)
    class Own(eq.solvers.Adam):
        def begin(self, weights):
            return tuple(torch.zeros_like(weights) for _ in range(memories))

        def step(self, weights, gradient, memory, *, anchor, lr, number):
            step(weights, gradient, memory, lr, number)

    return Own(lr=0.05)


def away_from_anchor(self, weights, gradient, memory, anchor, lr):
    weights.sub_(lr * (gradient - self.prox * (weights - anchor)))


def away_in_any_case(self, weights, gradient, memory, anchor, lr):
    weights.sub_(lr * (gradient + 0.1 * (anchor - weights)))


def away_by_memory(self, weights, gradient, memory, anchor, lr):
    memory[0].mul_(0.9).add_(0.1 * gradient.square())
    weights.sub_(lr * (gradient - 0.1 * memory[0].sqrt() * (weights - anchor)))


def without_anchor(self, weights, gradient, memory, anchor, lr):
    weights.sub_(lr * (gradient + self.prox * weights))


def growing_weights(self, weights, gradient, memory, anchor, lr):
    weights.sub_(lr * (gradient - self.weight_decay * weights))


def growing_apart(self, weights, gradient, memory, anchor, lr):
    weights.mul_(1 + lr * self.weight_decay).sub_(lr * gradient)


def growing_by_a_constant(self, weights, gradient, memory, anchor, lr):
    weights.sub_(lr * gradient)
    weights.copy_(weights.sign() * (weights.abs() + lr * 0.01))


def momentum_against(self, weights, gradient, memory, anchor, lr):
    memory[0].mul_(0.9).sub_(gradient)
    weights.sub_(lr * (gradient + 0.2 * memory[0]))


def momentum_alternating(self, weights, gradient, memory, anchor, lr):
    memory[0].mul_(-0.9).add_(gradient)
    weights.sub_(lr * memory[0])


BROKEN_SOLVERS = [
    (solver(away_from_anchor, prox=0.1), laws.TO_ANCHOR, "prox * (weights - anchor)"),
    (solver(away_in_any_case), laws.TO_ANCHOR, "prox * (weights - anchor)"),
    (solver(away_by_memory, 1), laws.TO_ANCHOR, "prox * (weights - anchor)"),
    (solver(without_anchor, prox=0.1), laws.ANCHOR_USED, "prox * (weights - anchor)"),
    (solver(growing_weights, weight_decay=0.01), laws.TO_ZERO, "weight_decay * weights"),
    (solver(growing_apart, weight_decay=1e-4), laws.TO_ZERO, "weight_decay * weights"),
    (solver(growing_by_a_constant), laws.TO_ZERO, "weight_decay * weights"),
    (solver(momentum_against, 1), laws.ON_AND_ON, "Momentum adds to the gradient"),
    (solver(momentum_alternating, 1), laws.NOT_BACK, "Momentum adds to the gradient"),
]


@pytest.mark.parametrize(
    ("part", "law", "cure"),
    BROKEN_SOLVERS,
    ids=["prox", "anchor", "by memory", "no anchor", "decay", "decay apart", "constant", "momentum", "alternating"],
)
def test_a_solver_with_a_wrong_sign_is_refused_by_check_and_by_train(part, law, cure, ragged):
    with pytest.raises(LawBroken) as checked:
        check_solver(part)
    with pytest.raises(InvalidParameter) as tried:
        train(ragged, solver=part)
    for caught in (checked, tried):
        assert law in str(caught.value)
        assert cure in str(caught.value)


def norm_last(self, weights, gradient, memory, anchor, lr):
    weights.sub_(lr * gradient / gradient.norm(dim=-1, keepdim=True).clamp(min=1e-3))


def long_rows_clipped(self, weights, gradient, memory, anchor, lr):
    weights.sub_(lr * gradient / (gradient.norm(dim=-1, keepdim=True) / 100).clamp(min=1))


def centred(self, weights, gradient, memory, anchor, lr):
    weights.sub_(lr * (gradient - 0.5 * gradient.mean(-1, keepdim=True)))


def top_half(self, weights, gradient, memory, anchor, lr):
    weights.sub_(lr * gradient * (gradient.abs() >= gradient.abs().median(-1, keepdim=True).values))


def error_feedback(self, weights, gradient, memory, anchor, lr):
    memory[0].add_(lr * gradient)
    sent = memory[0].abs().mean(-1, keepdim=True) * memory[0].sign()
    memory[0].sub_(sent)
    weights.sub_(sent)


NOT_ALONE = {
    "norm of rows": solver(norm_last),
    "long rows": solver(long_rows_clipped),
    "centred": solver(centred),
    "top half": solver(top_half),
    "error feedback": solver(error_feedback, 1),
}


@pytest.mark.parametrize("part", NOT_ALONE.values(), ids=NOT_ALONE)
def test_a_step_that_mixes_numbers_is_refused_by_check_and_by_train(part, ragged):
    """The simulator gives a step one tensor of many clients, the loop the vector of one: they would train other models."""
    with pytest.raises(LawBroken) as checked:
        check_solver(part)
    with pytest.raises(InvalidParameter) as tried:
        train(ragged, solver=part)
    for caught in (checked, tried):
        assert laws.ONE_BY_ONE in str(caught.value)
        assert "clip_norm= bounds the norm of a client's gradient" in str(caught.value)


def nesterov(self, weights, gradient, memory, anchor, lr):
    memory[0].mul_(0.9).add_(gradient)
    weights.sub_(lr * (gradient + 0.9 * memory[0]))


def sign_with_prox(self, weights, gradient, memory, anchor, lr):
    weights.sub_(lr * (gradient + self.prox * (weights - anchor)).sign())


def signum(self, weights, gradient, memory, anchor, lr):
    memory[0].mul_(0.9).add_(gradient + self.prox * (weights - anchor) + self.weight_decay * weights)
    weights.sub_(lr * memory[0].sign())


def lion(self, weights, gradient, memory, anchor, lr):
    weights.mul_(1 - lr * self.weight_decay)
    weights.sub_(lr * (0.9 * memory[0] + 0.1 * gradient).sign())
    memory[0].mul_(0.99).add_(0.01 * gradient)


def adagrad(self, weights, gradient, memory, anchor, lr):
    memory[0].add_(gradient.square())
    weights.sub_(lr * gradient / (memory[0].sqrt() + 1e-10))


def rmsprop_centred(self, weights, gradient, memory, anchor, lr):
    memory[0].lerp_(gradient.square(), 0.01)
    memory[1].lerp_(gradient, 0.01)
    memory[2].mul_(0.9).add_(gradient / ((memory[0] - memory[1].square()).clamp(min=0).sqrt() + 1e-8))
    weights.sub_(lr * memory[2])


def adadelta(self, weights, gradient, memory, anchor, lr):
    memory[0].lerp_(gradient.square(), 0.1)
    change = gradient * ((memory[1] + 1e-6) / (memory[0] + 1e-6)).sqrt()
    memory[1].lerp_(change.square(), 0.1)
    weights.sub_(lr * change)


def rprop(self, weights, gradient, memory, anchor, lr):
    memory[1].copy_(torch.where(memory[1] == 0, 1.0, memory[1]))
    same = gradient * memory[0]
    memory[1].mul_(torch.where(same > 0, 1.2, torch.where(same < 0, 0.5, 1.0))).clamp_(1e-6, 50)
    memory[0].copy_(torch.where(same < 0, 0.0, gradient))
    weights.sub_(lr * memory[1] * memory[0].sign())


def optimistic(self, weights, gradient, memory, anchor, lr):
    weights.sub_(lr * (2 * gradient - memory[0]))
    memory[0].copy_(gradient)


def projected(self, weights, gradient, memory, anchor, lr):
    weights.sub_(lr * gradient).clamp_(min=0)


def soft_threshold(self, weights, gradient, memory, anchor, lr):
    weights.sub_(lr * gradient)
    weights.copy_(weights.sign() * (weights.abs() - lr * 0.1).clamp(min=0))


def clipped_value(self, weights, gradient, memory, anchor, lr):
    weights.sub_(lr * gradient.clamp(-0.1, 0.1))


def cyclic(weights, gradient, memory, lr, number):
    weights.sub_(lr / (1 + number % 7) * gradient)


def lookahead(weights, gradient, memory, lr, number):
    weights.sub_(lr * gradient)
    memory[0].sub_(lr * gradient)  # how far the fast weights are from the slow ones
    here = torch.as_tensor(number) % 5 == 0
    weights.sub_(torch.where(here, 0.5 * memory[0], 0.0))
    memory[0].copy_(torch.where(here, 0.0, memory[0]))


def nadam(weights, gradient, memory, lr, number):
    memory[0].lerp_(gradient, 0.1)
    memory[1].lerp_(gradient.square(), 0.001)
    mean = 0.9 * memory[0] / (1 - 0.9 ** (number + 1)) + 0.1 * gradient / (1 - 0.9**number)
    weights.sub_((lr * mean / ((memory[1] / (1 - 0.999**number)).sqrt() + 1e-8)).to(weights.dtype))


def prox_by_memory(self, weights, gradient, memory, anchor, lr):
    memory[0].mul_(0.9).add_(0.1 * gradient.square())
    weights.sub_(lr * (gradient + self.prox * memory[0].sqrt() * (weights - anchor)))


def adabelief_with_prox(self, weights, gradient, memory, anchor, lr):
    gradient = gradient + self.prox * (weights - anchor)
    memory[0].lerp_(gradient, 0.1)
    memory[1].lerp_((gradient - memory[0]).square(), 0.1)
    weights.sub_(lr * memory[0] / (memory[1].sqrt() + 1e-8))


def dual_averaging(self, weights, gradient, memory, anchor, lr):
    weights.copy_(anchor - lr * memory[0].add_(gradient))


HONEST_SOLVERS = {
    "prox by memory": solver(prox_by_memory, 1, prox=0.1),
    "adabelief": solver(adabelief_with_prox, 2, prox=3.0),
    "dual averaging": solver(dual_averaging, 1),
    "nesterov": solver(nesterov, 1),
    "sign with prox": solver(sign_with_prox, prox=0.1),
    "signum": solver(signum, 1, prox=0.3, weight_decay=0.01),
    "lion": solver(lion, 1, weight_decay=0.1),
    "adagrad": solver(adagrad, 1),
    "rmsprop": solver(rmsprop_centred, 3),
    "adadelta": solver(adadelta, 2),
    "rprop": solver(rprop, 2),
    "optimistic": solver(optimistic, 1),
    "projected": solver(projected),
    "soft threshold": solver(soft_threshold),
    "clipped value": solver(clipped_value),
    "cyclic": numbered(cyclic, 0),
    "lookahead": numbered(lookahead, 1),
    "nadam": numbered(nadam, 2),
    "strong prox": eq.solvers.SGD(prox=100.0, momentum=0.99),
    "strong decay": eq.solvers.Adam(weight_decay=100.0, prox=100.0),
    "long momentum": eq.solvers.SGD(momentum=0.999, nesterov=True, weight_decay=1.0),
}


@pytest.mark.parametrize("part", HONEST_SOLVERS.values(), ids=HONEST_SOLVERS)
def test_honest_solvers_keep_the_laws_of_direction(part):
    assert laws.broken_step_law(part) is None
    assert lost_memories(part) == []  # Lookahead empties its memory every five steps


def server(step, begin=torch.zeros_like):
    """A server optimiser with this step."""

    class Own:
        def begin(self, params):
            return begin(params)

        def step(self, params, total, state):
            return step(params, total, state)

    return Own()


BROKEN_SERVERS = [
    (server(lambda p, t, s: (p + t - 1.5 * s, t.clone())), laws.SERVER_ON, "Momentum adds to the total"),
    (server(lambda p, t, s: (p + t - 0.9 * s, t.clone())), laws.SERVER_NOT_BACK, "Momentum adds to the total"),
    (server(lambda p, t, s: (p + t - 0.9 * s, t - 0.9 * s)), laws.SERVER_NOT_BACK, "Momentum adds to the total"),
    (server(lambda p, t, s: (p + 0.9 * s + t, s)), laws.STATE_CHANGES, "Return the next state"),
    (
        server(lambda p, t, s: (p + 0.9 * s["v"] + t, {**s, "n": s["n"] + 1}), lambda p: {"v": torch.zeros_like(p), "n": 0}),
        laws.STATE_CHANGES,
        "Return the next state",
    ),
    (server(lambda p, t, s: (p + t + (s.norm() > 0) * 5, t.clone())), laws.OPPOSITE, "Leave out constants"),
]


@pytest.mark.parametrize(
    ("part", "law", "cure"), BROKEN_SERVERS, ids=["later", "difference", "alternating", "not stored", "in a dict", "constant"]
)
def test_a_server_optimiser_with_a_wrong_sign_is_refused_by_check_and_by_train(part, law, cure, ragged):
    with pytest.raises(LawBroken) as checked:
        check_server_optimizer(part)
    with pytest.raises(InvalidParameter) as tried:
        train(ragged, server=part)
    for caught in (checked, tried):
        assert law in str(caught.value)
        assert cure in str(caught.value)


def pair(params):
    return torch.zeros_like(params), torch.zeros_like(params)


def lamb(params, total, state):
    mean, square = 0.9 * state[0] + 0.1 * total, 0.99 * state[1] + 0.01 * total.square()
    step = mean / (square.sqrt() + 1e-6)
    return params + 0.1 * params.norm() * step / step.norm().clamp(min=1e-12), (mean, square)


def trust_region(params, total, state):
    norm, (mean, count) = float(total.norm()), state
    now = norm if count == 0 else 0.8 * mean + 0.2 * norm
    return params + min(1.0, 2 * now / max(norm, 1e-12)) * total, (now, count + 1)


def lars(params, total, state):
    return params + 0.01 * params.norm() * total / total.norm().clamp(min=1e-12), state


def decaying(params, total, state):
    return params + total / (1 + state) ** 0.5, state + 1


def warm_up(params, total, state):
    return params + min(1.0, (state + 1) / 50) * total, state + 1


def slow_and_fast(params, total, state):
    moved, since, count = params + total, state[0] + total, state[1] + 1
    return (moved - 0.5 * since, (torch.zeros_like(since), count)) if count % 5 == 0 else (moved, (since, count))


def nesterov_server(params, total, state):
    velocity = 0.9 * state + total
    return params + total + 0.9 * velocity, velocity


def later_decay(params, total, state):
    return (params * 0.99 if state else params) + total, state + 1


def near_the_start(params, total, state):
    return params + total - 0.1 * (params - state), state


def restarted(params, total, state):
    velocity = total if float(state @ total) < 0 else 0.9 * state + total
    return params + velocity, velocity


def schedule_free(params, total, state):
    fast, count = state[0] + total, state[2] + 1
    mean = state[1] + (fast - state[1]) / count
    return 0.1 * fast + 0.9 * mean, (fast, mean, count)  # rounds, also where both are the parameters


def test_a_server_that_rounds_is_not_refused_for_a_zero_update(ragged):
    part = server(schedule_free, lambda params: (params.clone(), params.clone(), 0))
    for seed in range(5):
        check_server_optimizer(part, seed=seed)
    train(ragged, server=part)


def test_a_server_that_moves_by_more_than_rounding_at_a_zero_update_is_refused(ragged):
    part = server(lambda params, total, state: ((1 - 1e-5) * params + total, state))
    for refused in (lambda: check_server_optimizer(part), lambda: train(ragged, server=part)):
        with pytest.raises((LawBroken, InvalidParameter), match="a zero update from a fresh state changes nothing"):
            refused()


def error_feedback(params, total, state):
    """The larger half of the numbers is sent now, and the rest is kept for later rounds."""
    whole = total + state
    sent = torch.where(whole.abs() >= whole.abs().median(), whole, 0.0)
    return params + sent, whole - sent


HONEST_SERVERS = {
    "error feedback": server(error_feedback),
    "lamb": server(lamb, pair),
    "trust region": server(trust_region, lambda params: (0.0, 0)),
    "lars": server(lars, lambda params: None),
    "schedule-free": server(schedule_free, lambda params: (params.clone(), params.clone(), 0)),
    "decaying": server(decaying, lambda params: 0),
    "warm-up": server(warm_up, lambda params: 0),
    "lookahead": server(slow_and_fast, lambda params: (torch.zeros_like(params), 0)),
    "nesterov": server(nesterov_server),
    "sign": server(lambda p, t, s: (p + 0.01 * t.sign(), s)),
    "clipped": server(lambda p, t, s: (p + t * (0.1 / t.norm().clamp(min=0.1)), s)),
    "exponentiated": server(lambda p, t, s: (p * torch.exp(t), s)),
    "optimistic": server(lambda p, t, s: (p + 2 * t - s, t.clone())),
    "later decay": server(later_decay, lambda params: 0),
    "near the start": server(near_the_start, lambda params: params.clone()),
    "restarted": server(restarted),
    "adam": eq.server_opt.Adam(lr=1.0, beta1=0.99),
    "yogi": eq.server_opt.Yogi(lr=10.0, beta2=0.0),
    "momentum": eq.server_opt.Momentum(momentum=0.999),
}


@pytest.mark.parametrize("part", HONEST_SERVERS.values(), ids=HONEST_SERVERS)
def test_honest_server_optimisers_keep_the_laws_of_direction(part):
    assert laws.broken_server_law(part) is None


def falls_below_zero(index):
    return 1 - index / 3


def no_number_later(index):
    return float("nan") if index == 5 else 1.0


@pytest.mark.parametrize(
    ("schedule", "index", "rate"), [(falls_below_zero, 4, "-0.0333"), (no_number_later, 5, "nan")], ids=["negative", "nan"]
)
@pytest.mark.parametrize("wrap", [lambda inner: inner, eq.solvers.Scaffold], ids=["plain", "wrapped"])
def test_a_schedule_whose_rate_turns_negative_is_refused_before_the_first_round(schedule, index, rate, wrap, ragged):
    """0.1 · (1 − 4/3) = −0.0333: a step along the gradient."""
    part, model = eq.solvers.SGD(lr=0.1, schedule=schedule), eq.models.Softmax(4, 3)
    rounds, seen = {"clients_per_round": 4, "engine": "loop", "progress": False}, []

    class Watch(eq.types.Observer):
        def on_round(self, report):
            seen.append(report)

    with pytest.raises(InvalidParameter, match=rf"{schedule.__name__}.*the rate {rate}.* in round {index + 1} "):
        eq.train(model, ragged, eq.Algorithm(solver=wrap(part)), rounds=9, observers=[Watch()], **rounds)
    assert not seen
    with pytest.raises(InvalidParameter, match="schedule must give a rate that is finite and not negative in every round"):
        part.learning_rate(index)
    eq.train(model, ragged, eq.Algorithm(solver=part), rounds=4, **rounds)  # zero in the last round, which is allowed


def test_a_local_schedule_that_turns_negative_is_refused_before_the_first_round(ragged):
    with pytest.raises(InvalidParameter, match=r"local_schedule must .*falls_below_zero.* gives -0.333333 at local step 5 "):
        train(ragged, solver=eq.solvers.SGD(steps=9, local_schedule=falls_below_zero))
    train(ragged, solver=eq.solvers.SGD(steps=4, local_schedule=falls_below_zero))


@pytest.mark.parametrize(
    "personal",
    [
        eq.personal.Ditto(solver=eq.solvers.SGD(steps=9, local_schedule=falls_below_zero)),
        eq.personal.Ditto(solver=eq.solvers.SGD(steps=1, schedule=falls_below_zero)),
        eq.personal.Split("bias", (("all", 9),)),
        eq.personal.Split("bias", finetuning=9),
        eq.personal.Finetuning(epochs=9),
    ],
    ids=["own local schedule", "own schedule", "phase", "finetuning after a split", "finetuning"],
)
def test_so_is_one_of_clients_own_models(personal):
    """One epoch of the solver has at most 4 steps here, and nine have more."""
    own = getattr(personal, "solver", None)
    solver = eq.solvers.SGD(batch_size=10, local_schedule=falls_below_zero) if own is None else eq.solvers.SGD()
    algorithm, model = eq.Algorithm(solver=solver, personal=personal), eq.models.Softmax(4, 3)
    data = eq.data.FederatedData(make_clients([6, 9, 12, 25]), test=make_clients([4, 4, 4, 4], seed=1), name="ragged")
    with pytest.raises(InvalidParameter, match=r"schedule must give a (rate|factor) that is finite and not negative"):
        eq.train(model, data, algorithm, rounds=9, clients_per_round=4, engine="loop", progress=False)


@pytest.mark.parametrize("engine", ["loop", "simulator"])
def test_stragglers_of_the_shared_work_may_finetune_for_one_epoch(engine):
    """Finetuning has no stragglers, and one epoch is too few only for them."""
    data = eq.data.FederatedData(make_clients([6, 9, 12, 25]), test=make_clients([4, 4, 4, 4], seed=1), name="ragged")
    slow = eq.solvers.SGD(epochs=3, straggler_share=0.3)
    algorithm, model = eq.Algorithm(solver=slow, personal=eq.personal.Finetuning(epochs=1)), eq.models.Softmax(4, 3)
    eq.train(model, data, algorithm, rounds=1, clients_per_round=4, engine=engine, progress=False)


class RootOfNegative:
    """A Yogi whose second moment has the wrong sign."""

    def begin(self, params):
        return torch.zeros_like(params)

    def step(self, params, total, state):
        second = state - 0.1 * total.square()
        return params + total / (second.sqrt() + 1e-3), second


def test_a_part_that_gives_nan_is_told_so():
    """NaN is not equal to itself: the message was that the part keeps something between calls."""
    with pytest.raises(LawBroken, match=r"finite inputs give finite numbers.*negative"):
        check_server_optimizer(RootOfNegative())
    algorithm = eq.Algorithm(server=RootOfNegative())
    with pytest.raises(InvalidParameter, match="finite inputs give finite numbers"):
        eq.train(eq.models.Softmax(64, 10), eq.data.digits(clients=4), algorithm, rounds=1, clients_per_round=2)


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


@pytest.mark.parametrize("sign", [False, True])
@pytest.mark.parametrize("by_size", [False, True])
def test_memory_in_self_of_a_server_optimiser_is_named(sign, by_size, ragged):
    words = r"the same call twice gives the same answer.*Keep nothing in self"
    with pytest.raises(LawBroken, match=words):
        check_server_optimizer(InSelf(sign, by_size))
    with pytest.raises(InvalidParameter, match=words):
        train(ragged, server=InSelf(sign, by_size))


@dataclass(frozen=True)
class Centralised(eq.solvers.SGD):
    """Gradient centralisation: a mean over the gradient."""

    def step(self, weights, gradient, memory, *, anchor, lr):
        weights.sub_(lr * (gradient - gradient.mean()))


def test_a_mean_over_the_gradient_is_refused_with_what_a_step_may_do(ragged):
    cure = r"differences( of)? up to 0\.\d+\. A step must work element by element.*clip_norm bounds the norm"
    with pytest.raises(LawBroken, match=cure):
        check_solver(Centralised(lr=0.1))
    with pytest.raises(InvalidParameter, match=cure):
        train(ragged, solver=Centralised(lr=0.1))


@dataclass(frozen=True)
class WithoutBegin(eq.solvers.SGD):
    """Momentum without the memory for it."""

    def step(self, weights, gradient, memory, *, anchor, lr):
        memory[0].mul_(0.9).add_(gradient)
        weights.sub_(lr * memory[0])


def test_a_solver_that_wants_a_memory_is_told_to_write_begin(ragged):
    with pytest.raises(LawBroken, match=r"the memory is empty, and a step gives IndexError.*Write `begin`"):
        check_solver(WithoutBegin(lr=0.1))
    with pytest.raises(InvalidParameter, match=r"the memory is empty, and a step gives IndexError.*Write `begin`"):
        train(ragged, solver=WithoutBegin(lr=0.1))
