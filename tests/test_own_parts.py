"""`train` tries parts of the user's own on two clients, and refuses those that break their law, by its name."""

import time
from dataclasses import dataclass, field, fields

import pytest
import torch

import equipoise as eq
from equipoise import types
from equipoise.core.abilities import refuse_misspelt
from equipoise.errors import InvalidParameter
from equipoise.risk import RiskValue


def train(ragged, **parts):
    model = eq.models.Softmax(4, 3)
    return eq.train(model, ragged, eq.Algorithm(**parts), rounds=1, clients_per_round=4, engine="loop", progress=False)


def half_the_gradient(losses, base_weights, *, clients=None, state=None):
    return RiskValue((base_weights * losses.square()).sum(), base_weights * losses, state)


def by_place(losses, base_weights, *, clients=None, state=None):
    ranks = torch.arange(1, len(losses) + 1, dtype=losses.dtype)
    return RiskValue((ranks * losses).sum(), ranks, state)


def negative(losses, base_weights, *, clients=None, state=None):
    return RiskValue(-(base_weights * losses).sum(), -base_weights, state)


class Centring(eq.solvers.SGD):
    def step(self, weights, gradient, memory, *, anchor, lr):
        weights.sub_(lr * (gradient - gradient.mean(0)))


class Scribbling(eq.solvers.SGD):
    def step(self, weights, gradient, memory, *, anchor, lr):
        weights.sub_(gradient.mul_(lr))


class NotInPlace(eq.solvers.SGD):
    def step(self, weights, gradient, memory, *, anchor, lr):
        weights = weights - lr * gradient


@dataclass(frozen=True)
class SignSGD(eq.solvers.SGD):
    def step(self, weights, gradient, memory, *, anchor, lr):
        weights.sub_(lr * gradient.sign())


@dataclass(frozen=True)
class SignProx(eq.solvers.SGD):
    def step(self, weights, gradient, memory, *, anchor, lr):
        weights.sub_(lr * (gradient + self.prox * (weights - anchor)).sign())


def by_rank(losses, base_weights, *, clients=None, state=None):
    ranks = base_weights * (1 + losses.argsort().argsort().to(losses))
    return RiskValue((ranks * losses).sum(), ranks, state)


def mean_and_deviation(losses, base_weights, *, clients=None, state=None):
    mean = base_weights @ losses
    deviation = (base_weights @ (losses - mean).square()).sqrt().clamp(min=1e-12)
    weights = base_weights * (1 + 0.8 * (losses - mean) / deviation)
    return RiskValue(mean + 0.8 * deviation, weights, state)


def without_clients(losses, base_weights):
    return RiskValue(base_weights @ losses, base_weights, None)


def only_weights(losses, base_weights, *, clients=None, state=None):
    return base_weights


@dataclass(frozen=True)
class OnlyTotal:
    linear = False

    def __call__(self, updates, weights, *, losses=None, state=None):
        return weights.to(updates) @ updates


class OwnRate(eq.solvers.SGD):
    def step(self, weights, gradient, memory, *, anchor, lr):
        weights.sub_(0.01 * gradient)


def doubling(losses, base_weights, *, clients=None, state=None):
    losses.mul_(2)
    return RiskValue((base_weights * losses).sum() / 2, base_weights, state)


@dataclass(frozen=True)
class Medoid:
    """A good aggregator whose choice between two updates is a tie."""

    linear = False

    def __call__(self, updates, weights, *, losses=None, state=None):
        return updates[torch.cdist(updates, updates).sum(1).argmin()], state


class Standing(eq.solvers.SGD):
    def learning_rate(self, round_index):
        return 0.0


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
class Drifting(eq.server_opt.SGD):
    def step(self, params, total, state):
        return params + total + 1e-3, state


class Restless(eq.sampling.Uniform):
    def __call__(self, round_index, alpha, *, clients_per_round, seed):
        drawn = super().__call__(round_index, alpha, clients_per_round=clients_per_round, seed=time.perf_counter_ns())
        return type(drawn)(round_index, seed, drawn.clients, drawn.weights, drawn.inclusion)


class Doubling(eq.sampling.Uniform):
    def __call__(self, round_index, alpha, *, clients_per_round, seed):
        drawn = super().__call__(round_index, alpha, clients_per_round=clients_per_round, seed=seed)
        return type(drawn)(round_index, seed, drawn.clients, 2 * drawn.weights, drawn.inclusion)


def writes_to_state(losses, base_weights, *, clients=None, state=None):
    state = {"rounds": 0} if state is None else state
    state["rounds"] += 1
    return RiskValue(base_weights @ losses, base_weights, state)


def state_is_a_function(losses, base_weights, *, clients=None, state=None):
    return RiskValue(base_weights @ losses, base_weights, lambda: None)


def state_is_an_object(losses, base_weights, *, clients=None, state=None):
    return RiskValue(base_weights @ losses, base_weights, [object()])


CALLS = []


def hidden_state(losses, base_weights, *, clients=None, state=None):
    CALLS.append(1)
    factor = 1 + 0.1 * len(CALLS)
    return RiskValue(factor * base_weights @ losses, factor * base_weights, state)


def single_precision(losses, base_weights, *, clients=None, state=None):
    return RiskValue((base_weights @ losses).float(), base_weights.float(), state)


@dataclass(frozen=True)
class LinearMomentum:
    """FedAvgM as an aggregator that calls itself linear: engines add up its totals, and no call gets a state."""

    linear = True

    def __call__(self, updates, weights, *, losses=None, state=None):
        total = weights.to(updates.dtype) @ updates
        total = total if state is None else total + 0.9 * state
        return total, total


@dataclass(frozen=True)
class Momentum(LinearMomentum):
    linear = False


@dataclass(frozen=True)
class ScalesInPlace:
    linear = False

    def __call__(self, updates, weights, *, losses=None, state=None):
        updates.div_(updates.norm(dim=1, keepdim=True).clamp(min=1))
        return weights.to(updates.dtype) @ updates, state


@dataclass(frozen=True)
class MomentumInPlace:
    linear = False

    def __call__(self, updates, weights, *, losses=None, state=None):
        total = weights.to(updates.dtype) @ updates
        state = total.clone() if state is None else state.mul_(0.5).add_(total, alpha=0.5)
        return state, state


@dataclass(frozen=True)
class PlainSum:
    linear = False

    def __call__(self, updates, weights, *, losses=None, state=None):
        return updates.sum(0), state


@dataclass(frozen=True)
class DoublePrecision:
    linear = False

    def __call__(self, updates, weights, *, losses=None, state=None):
        return weights @ updates.double(), state


@dataclass(frozen=True)
class Rebinding(eq.solvers.SGD):
    """Momentum that is never stored."""

    def begin(self, weights):
        return (torch.zeros_like(weights),)

    def step(self, weights, gradient, memory, *, anchor, lr):
        (m,) = memory
        m = 0.9 * m + gradient
        weights.sub_(lr * m)


@dataclass(frozen=True)
class FromTheStart(eq.solvers.SGD):
    """A good solver that remembers where it began, and changes nothing of that."""

    def begin(self, weights):
        return (weights.clone(),)

    def step(self, weights, gradient, memory, *, anchor, lr):
        weights.sub_(lr * (gradient + 0.1 * (weights - memory[0])))


@dataclass(frozen=True)
class Ascent(eq.solvers.SGD):
    def step(self, weights, gradient, memory, *, anchor, lr):
        weights.add_(lr * gradient)


OF_STATE = [
    (eq.testing.check_risk, writes_to_state, "does not write to the state it is given"),
    (eq.testing.check_risk, state_is_a_function, "a state is made of what a checkpoint keeps"),
    (eq.testing.check_risk, state_is_an_object, "a state is made of what a checkpoint keeps"),
    (eq.testing.check_risk, hidden_state, "twice"),
    (eq.testing.check_aggregator, LinearMomentum(), "a linear aggregator has no state"),
    (eq.testing.check_aggregator, ScalesInPlace(), "does not write to the updates"),
    (eq.testing.check_aggregator, MomentumInPlace(), "does not write to the state it is given"),
    (eq.testing.check_aggregator, PlainSum(), "however many clients send them"),
    (eq.testing.check_aggregator, DoublePrecision(), "the total has the type of the updates"),
    (eq.testing.check_solver, Rebinding(), "is changed by the step, in place"),
    (eq.testing.check_solver, Ascent(), "a convex loss lower it"),
]
PLACE = {eq.testing.check_risk: "risk", eq.testing.check_aggregator: "aggregator", eq.testing.check_solver: "solver"}


@pytest.mark.parametrize(("check", "part", "law"), OF_STATE, ids=lambda case: getattr(case, "__name__", str(case))[:30])
def test_parts_that_misuse_their_state_are_refused_by_check_and_by_train(check, part, law, ragged):
    with pytest.raises(eq.testing.LawBroken, match=law):
        check(part)
    for engine in ("loop", "simulator"):
        with pytest.raises(InvalidParameter, match=law) as caught:
            eq.train(
                eq.models.Softmax(4, 3), ragged, eq.Algorithm(**{PLACE[check]: part}), rounds=1, clients_per_round=4,
                engine=engine, progress=False,
            )  # fmt: skip
        assert caught.value.code == "EQ121"


def test_checks_name_what_is_wrong_and_not_what_follows_from_it():
    with pytest.raises(eq.testing.LawBroken, match="does not write to the losses"):
        eq.testing.check_risk(doubling)
    with pytest.raises(eq.testing.LawBroken, match="the value and the weights of a risk are float64"):
        eq.testing.check_risk(single_precision)
    with pytest.raises(eq.testing.LawBroken, match=r"^Ascent\(lr=0.05\) breaks the law"):
        eq.testing.check_solver(Ascent(lr=0.05))


def test_good_parts_with_a_memory_pass():
    eq.testing.check_aggregator(Momentum())
    eq.testing.check_solver(FromTheStart())


def test_an_aggregator_of_ones_own_inside_another_is_tried(ragged):
    with pytest.raises(InvalidParameter, match="a linear aggregator has no state"):
        train(ragged, aggregator=eq.aggregators.FedNova(LinearMomentum()))


@dataclass(frozen=True)
class LateSet:
    """A risk whose state becomes a set once the trial before the run is over."""

    def __call__(self, losses, base_weights, *, clients=None, state=None):
        several = len(losses) == 4
        return RiskValue(base_weights @ losses, base_weights, {1, 2} if several else None)


def test_a_state_that_no_checkpoint_keeps_is_refused_after_the_first_round(ragged, tmp_path):
    for options in ({}, {"checkpoint": tmp_path / "late.ckpt"}):
        with pytest.raises(InvalidParameter, match=r"risk of 'ours' must keep the law that a state is made of") as caught:
            eq.train(
                eq.models.Softmax(4, 3), ragged, eq.Algorithm(risk=LateSet()), rounds=3, clients_per_round=4, name="ours",
                progress=False, **options,
            )  # fmt: skip
        assert caught.value.code == "EQ121"
        assert "type set" in str(caught.value)


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ({"risk": half_the_gradient}, "risk must keep the law that the weights are the gradient of the value"),
        ({"risk": by_place}, "risk must keep the law that permuting clients permutes the weights"),
        ({"risk": negative}, "risk must keep the law that weights are finite and not negative"),
        ({"solver": Centring()}, "solver must keep the law that a step on many clients is the step on each"),
        ({"solver": Scribbling()}, "solver must keep the law that a step does not write to the gradient"),
        ({"risk": by_rank}, "risk must keep the law that equal losses share weight in proportion"),
        ({"risk": mean_and_deviation}, "risk must keep the law that weights are finite and not negative"),
        ({"risk": without_clients}, "risk must keep the law that it can be called as risk(losses, base_weights, clients="),
        ({"risk": only_weights}, "risk must keep the law that a risk returns a RiskValue"),
        ({"aggregator": OnlyTotal()}, "aggregator must keep the law that it returns two things, the total and its state"),
        ({"risk": doubling}, "risk must keep the law that a risk does not write to the losses or weights"),
        ({"solver": OwnRate()}, "Found: lr has none"),
        ({"solver": NotInPlace()}, "solver must keep the law that steps with gradients other than zero move the parameters"),
        ({"solver": SignSGD(prox=1.0)}, "solver must keep the law that every option that is set changes the step"),
        ({"solver": SignSGD(momentum=0.9, weight_decay=1e-4)}, "momentum=0.9, weight_decay=0.0001 have none"),
        ({"solver": Standing()}, "solver must keep the law that the learning rate is positive"),
        ({"aggregator": FirstOnly()}, "aggregator must keep the law that the order of clients does not matter"),
        ({"aggregator": CallsItselfLinear()}, "aggregator must keep the law that a linear total is the sum"),
        ({"server": Drifting()}, "server must keep the law that a zero update from a fresh state changes nothing"),
        ({"sampler": Restless()}, "sampler must keep the law that a cohort is a function of seed and round alone"),
        ({"sampler": Doubling()}, "sampler must keep the law that weights are positive and sum to 1"),
    ],
    ids=lambda case: "" if isinstance(case, str) else type(next(iter(case.values()))).__name__,
)
def test_a_part_that_breaks_its_law_is_refused_by_the_name_of_the_law(parts, words, ragged):
    with pytest.raises(InvalidParameter) as caught:
        train(ragged, **parts)
    assert words in str(caught.value)
    assert "Found: " in str(caught.value)
    assert "equipoise.testing.check_" in str(caught.value)


@dataclass(frozen=True)
class Counting:
    """A good risk that notes its calls, and knows clients of the data only."""

    known: tuple
    calls: list = field(default_factory=list)

    def __call__(self, losses, base_weights, *, clients=None, state=None):
        assert set(clients) <= set(self.known)
        self.calls.append(len(losses))
        return RiskValue(base_weights @ losses, base_weights, state)


@dataclass(frozen=True)
class NeedsThree:
    """A good aggregator that takes no two updates."""

    linear = False

    def __call__(self, updates, weights, *, losses=None, state=None):
        if len(updates) < 3:
            raise ValueError("three at least")
        return weights.to(updates) @ updates, state


@dataclass(frozen=True)
class Fails:
    """A part of each kind that fails late, after its trial."""

    linear = False

    def __call__(self, *given, clients=None, **more):
        return {}[0 if clients is None else clients[0]]

    def begin(self, params):
        return None

    def step(self, params, total, state):
        raise ZeroDivisionError


@pytest.mark.parametrize("kind", ["risk", "aggregator", "server", "sampler"])
def test_an_error_of_a_part_is_its_own_and_has_a_note_that_names_the_part(kind, ragged):
    with pytest.raises((KeyError, ZeroDivisionError)) as caught:
        train(ragged, **{kind: Fails()})
    name = {"server": "server optimiser"}.get(kind, kind)
    assert f"The {name} Fails() raised this error." in caught.value.__notes__


def test_checks_find_what_the_trial_finds():
    for check, part, law in (
        (eq.testing.check_solver, NotInPlace(), "move the parameters, in place"),
        (eq.testing.check_solver, SignSGD(prox=1.0), "every option that is set"),
        (eq.testing.check_risk, mean_and_deviation, "weights are not negative"),
        (eq.testing.check_risk, by_rank, "equal losses share weight"),
    ):
        with pytest.raises(eq.testing.LawBroken, match=law):
            check(part)
    eq.testing.check_solver(SignSGD(lr=0.01))
    eq.testing.check_solver(SignProx(prox=1e-6))  # a weak one that changes no sign here


def test_a_step_that_uses_its_options_is_taken(ragged):
    train(ragged, solver=SignProx(prox=1e-6), aggregator=Medoid())


def test_good_parts_are_not_touched_by_their_trial(ragged):
    risk = Counting(tuple(ragged.train.ids))
    train(ragged, risk=risk, aggregator=NeedsThree())
    assert risk.calls == [4]  # the trial was made on a copy


def test_a_trial_is_quick(ragged):
    parts = {"risk": Counting(tuple(ragged.train.ids)), "aggregator": NeedsThree()}
    began = time.perf_counter()
    eq.runs.own_parts.try_own_parts(eq.Algorithm(**parts), ragged.train.ids, torch.full((8,), 1 / 8), 4, 0)
    assert time.perf_counter() - began < 0.5


# --------------------------------------------------------------------------------------------- what is no part, or raises


@dataclass(frozen=True)
class NeedsFive:
    """Takes no fewer than five updates, as Krum does."""

    linear: bool = False

    def __call__(self, updates, weights, *, losses=None, state=None):
        if len(updates) < 5:
            raise ValueError("five at least")
        return updates.median(0).values if not self.linear else weights.to(updates) @ updates, state


def needs_five(losses, base_weights, *, clients=None, state=None):
    if len(losses) < 5:
        raise ValueError("five at least")
    return RiskValue(base_weights @ losses, base_weights, state)


class NotTold(eq.solvers.Adam):
    def step(self, weights, gradient, memory, *, anchor, lr):
        weights.sub_(lr * gradient)


class OneTensor(eq.solvers.SGD):
    """Momentum whose memory is a tensor, and no tuple."""

    def begin(self, weights):
        return torch.zeros_like(weights)

    def step(self, weights, gradient, memory, *, anchor, lr):
        memory.mul_(0.9).add_(gradient)
        weights.sub_(lr * memory)


class ByName(OneTensor):
    def begin(self, weights):
        return {"momentum": torch.zeros_like(weights)}

    def step(self, weights, gradient, memory, *, anchor, lr):
        super().step(weights, gradient, memory["momentum"], anchor=anchor, lr=lr)


class NoMemory(eq.solvers.SGD):
    def begin(self, weights):
        return None


class NoAnswer:
    def begin(self, params):
        return None

    def step(self, params, total, state):
        return params + total


LOST = "lost"


@pytest.mark.parametrize(
    ("check", "part", "law", "cure"),
    [
        ("aggregator", NeedsFive(linear=True), "combines any number of updates", "Set linear = False"),
        ("aggregator", lambda updates, weights, **_: (weights @ updates, None), "aggregator has __call__, linear", "a class"),
        ("aggregator", NeedsFive, "is an object, and no class", "Write NeedsFive"),
        ("aggregator", OnlyTotal(), "two things, the total and its state", "Tensor"),
        ("risk", needs_five, "a cohort of any size, also one client", "a round may have few clients"),
        ("risk", without_clients, "it can be called as risk(losses, base_weights, clients=", "clients"),
        ("risk", lambda losses, alpha, clients=None, state=None: RiskValue(1.0, alpha, None), "are tensors", "as_tensor"),
        ("solver", NotTold(), "it can be called as step(", "Add the parameter `number`"),
        ("solver", torch.optim.SGD, "is an object, and no class", "Write SGD"),
        ("solver", OneTensor(), "memory that begin returns is a tuple of tensors", "Return e.g. (torch.zeros_like(weights),)"),
        ("solver", LOST, "a solver has batch_size, local_steps", "Extend solvers.SGD"),
        ("server_optimizer", NoAnswer(), "two things, the next parameters and the next state", "Tensor"),
        ("server_optimizer", LOST, "has begin, step", "no begin, step"),
        ("sampler", lambda index, alpha, **_: None, "a sampler returns a Cohort", "NoneType"),
        ("averaging", LOST, "has begin, update, iterate", "no begin"),
        ("schedule", lambda: 1.0, "answers every call of its contract", "Write schedule(index)"),
        ("observer", LOST, "has a method such as on_round", "Extend equipoise.types.Observer"),
        ("attack", LOST, "an attack has share, seed", "no share, seed"),
        ("personalisation", LOST, "has width, begin, work, models", "no width"),
        ("quantile_source", lambda losses, weights, tail: losses.max(), "has __call__, reads_losses", "no reads_losses"),
        ("clip_rule", LOST, "has ratio, next_bound", "no ratio"),
        ("engine", "loop", "an engine has start", "Simulator()"),
    ],
)  # fmt: skip
def test_a_check_names_the_law_and_the_cure_for_what_is_no_part(check, part, law, cure):
    with pytest.raises(eq.testing.LawBroken) as caught:
        getattr(eq.testing, f"check_{check}")(part)
    assert "breaks the law: " in str(caught.value)
    assert law in str(caught.value)
    assert cure in str(caught.value)
    assert str(caught.value).endswith("[EQ900]")


def test_an_aggregator_that_needs_several_clients_is_checked_with_as_many():
    eq.testing.check_aggregator(NeedsFive())
    with pytest.raises(eq.testing.LawBroken, match=r"updates of 4 clients.*five at least.*check_aggregator\(…, clients=…\)"):
        eq.testing.check_aggregator(NeedsFive(), clients=4)
    with pytest.raises(InvalidParameter, match="EQ1"):  # a part of the library's own refuses with its own fix
        eq.testing.check_aggregator(eq.aggregators.Krum(4), clients=4)


@pytest.mark.parametrize("observer", [print, object(), eq.observers.History], ids=["function", "object", "class"])
def test_an_observer_that_hears_nothing_is_refused(observer, ragged):
    with pytest.raises(InvalidParameter, match=r"observers must be objects with a method.*equipoise\.types\.Observer"):
        eq.train(eq.models.Softmax(4, 3), ragged, rounds=1, clients_per_round=4, observers=[observer])


@pytest.mark.parametrize("solver", [OneTensor(), ByName(), NoMemory()], ids=lambda solver: type(solver).__name__)
@pytest.mark.parametrize("engine", ["loop", "simulator"])
@pytest.mark.parametrize("inside", [False, True], ids=["alone", "in FedDane"])
def test_a_memory_that_is_no_tuple_is_refused_in_every_engine(solver, engine, inside, ragged):
    algorithm = eq.Algorithm(solver=eq.solvers.FedDane(solver) if inside else solver)
    with pytest.raises(InvalidParameter, match=r"memory that begin returns is a tuple of tensors.*zeros_like.*\[EQ121\]"):
        eq.train(eq.models.Softmax(4, 3), ragged, algorithm, rounds=1, clients_per_round=4, engine=engine, progress=False)


def test_a_personal_solver_of_ones_own_is_tried(ragged):
    with pytest.raises(InvalidParameter, match="memory that begin returns is a tuple of tensors"):
        train(ragged, personal=eq.personal.Ditto(solver=OneTensor()))


# ------------------------------------------------------------------------------------- what is kept in self, and wrong types


@dataclass(frozen=True)
class NoCast:
    """A weighted mean of float32 updates by float64 weights, which torch refuses."""

    linear: bool = True
    least: int = 1

    def __call__(self, updates, weights, *, losses=None, state=None):
        if len(updates) < self.least:
            raise ValueError("more clients")
        return weights @ updates, state


@pytest.mark.parametrize("part", [NoCast(), NoCast(linear=False), NoCast(linear=False, least=5)], ids=str)
@pytest.mark.parametrize("engine", ["loop", "simulator"])
def test_weights_that_are_never_cast_are_refused_by_check_and_by_train_alike(part, engine, ragged):
    words = r"updates may be float32, while weights and losses are float64.*weights\.to\(updates\.dtype\)"
    with pytest.raises(eq.testing.LawBroken, match=words):
        eq.testing.check_aggregator(part)
    with pytest.raises(InvalidParameter, match=words):
        eq.train(
            eq.models.Softmax(4, 3), ragged, eq.Algorithm(aggregator=part), rounds=1, clients_per_round=5, engine=engine,
            progress=False,
        )  # fmt: skip


class KeptMomentum:
    """Momentum in self: of the same tensor, or of a new one in each call."""

    linear = False

    def __init__(self, in_place):
        self.in_place, self.kept = in_place, None

    def __call__(self, updates, weights, *, losses=None, state=None):
        total = weights.to(updates.dtype) @ updates
        before = torch.zeros_like(total) if self.kept is None else self.kept
        self.kept = before.mul_(0.9).add_(total) if self.in_place else 0.9 * before + total
        return self.kept, state


class KeptSolver(eq.solvers.SGD):
    """Momentum in self, of the shape that was seen first."""

    def begin(self, weights):
        vars(self).setdefault("kept", torch.zeros_like(weights))
        return ()

    def step(self, weights, gradient, memory, *, anchor, lr):
        weights.sub_(lr * vars(self)["kept"].mul_(0.9).add_(gradient))


class KeptServer:
    kept = 0.0

    def begin(self, params):
        return None

    def step(self, params, total, state):
        self.kept = 0.9 * self.kept + total
        return params + self.kept, None


@pytest.mark.parametrize(
    ("place", "make"),
    [
        ("aggregator", lambda: KeptMomentum(in_place=True)),
        ("aggregator", lambda: KeptMomentum(in_place=False)),
        ("solver", KeptSolver),
        ("server", KeptServer),
    ],
    ids=["aggregator in place", "aggregator", "solver", "server"],
)
def test_momentum_that_is_kept_in_self_is_refused_by_that_name(place, make, ragged):
    check = eq.testing.check_server_optimizer if place == "server" else getattr(eq.testing, f"check_{place}")
    part = make()
    with pytest.raises(eq.testing.LawBroken, match=r"one result|same call twice") as checked:
        check(part)
    with pytest.raises(InvalidParameter, match="the same call twice gives the same answer") as tried:
        train(ragged, **{place: part})  # the check has left nothing in it
    for caught in (checked, tried):
        assert "Keep nothing in self" in str(caught.value)


@pytest.mark.parametrize(
    ("check", "part", "cure"),
    [
        (eq.testing.check_risk, writes_to_state, "Make a new state and return that one, e.g. of dict(state)"),
        (eq.testing.check_aggregator, MomentumInPlace(), "Make a new state and return that one, e.g. of dict(state)"),
        (eq.testing.check_aggregator, ScalesInPlace(), "Work on a copy, e.g. updates.clone()"),
        (eq.testing.check_risk, doubling, "Work on a copy, e.g. losses.clone()"),
        (eq.testing.check_risk, mean_and_deviation, "use an upper semideviation instead"),
        (eq.testing.check_risk, state_is_an_object, "Write the state as one of these types"),
        (eq.testing.check_solver, NotTold(), "Add the parameter `number`"),
    ],
    ids=["risk state", "aggregator state", "updates", "losses", "negative weights", "types", "number"],
)
def test_messages_about_state_name_the_cure(check, part, cure, ragged):
    with pytest.raises(eq.testing.LawBroken) as checked:
        check(part)
    with pytest.raises(InvalidParameter) as tried:
        train(ragged, **{PLACE[check]: part})
    for caught in (checked, tried):
        assert cure in str(caught.value)


def test_a_function_as_an_aggregator_is_told_to_be_a_class():
    with pytest.raises(InvalidParameter, match=r"must offer linear.*Write a class with `linear = False`"):
        eq.Algorithm(aggregator=lambda updates, weights, **_: (weights.to(updates.dtype) @ updates, None))


class AgainstTheUpdate(eq.server_opt.SGD):
    def step(self, params, total, state):
        return params - total, state


class StateInPlace:
    def begin(self, params):
        return torch.zeros_like(params)

    def step(self, params, total, state):
        return params + state.mul_(0.9).add_(total), state


class StateIsAGenerator:
    def begin(self, params):
        return torch.Generator().manual_seed(0)

    def step(self, params, total, state):
        return params + total, state


class LaterAGenerator(StateIsAGenerator):
    def begin(self, params):
        return None

    def step(self, params, total, state):
        return params + total, torch.Generator()


@pytest.mark.parametrize(
    ("part", "law", "cure"),
    [
        (AgainstTheUpdate(), "the first step goes along the update", "it is no gradient"),
        (StateInPlace(), "a step does not write to the state it is given", "Make a new state"),
        (StateIsAGenerator(), "a state is made of what a checkpoint keeps", "a value of type Generator"),
        (LaterAGenerator(), "a state is made of what a checkpoint keeps", "a value of type Generator"),
    ],
    ids=["sign", "in place", "generator", "later"],
)
def test_server_optimisers_that_break_a_law_are_refused_by_check_and_by_train(part, law, cure, ragged):
    with pytest.raises(eq.testing.LawBroken, match=law) as checked:
        eq.testing.check_server_optimizer(part)
    with pytest.raises(InvalidParameter, match=law) as tried:
        train(ragged, server=part)
    for caught in (checked, tried):
        assert cure in str(caught.value)


# ---------------------------------------------------------------------- the types of a risk, its direction, memory in self


def uses_double(losses, base_weights, *, clients=None, state=None):
    weights = base_weights * (1 + (losses > 0.7).double())
    return RiskValue(weights @ losses, weights, state)


def uses_float(losses, base_weights, *, clients=None, state=None):
    weights = base_weights.float()
    return RiskValue(weights @ losses, weights, state)


def test_check_risk_gives_float64_as_a_round_does(ragged):
    eq.testing.check_risk(uses_double)
    train(ragged, risk=uses_double)
    with pytest.raises(eq.testing.LawBroken) as caught:
        eq.testing.check_risk(uses_float)
    assert "for the losses and base weights of a cohort, both float64" in str(caught.value)
    assert "Make tensors of your own float64, too" in str(caught.value)
    assert "few clients" not in str(caught.value)


def tilted_the_wrong_way(losses, base_weights, *, clients=None, state=None):
    z = base_weights.log() - losses
    return RiskValue(-torch.logsumexp(z, 0), torch.softmax(z, 0), state)


def test_a_risk_that_favours_low_losses_is_told_of(ragged, recwarn):
    for call in (eq.testing.check_risk, lambda risk: train(ragged, risk=risk)):
        recwarn.clear()
        call(tilted_the_wrong_way)
        notices = [str(each.message) for each in recwarn]
        assert sum("fall as losses rise: clients with a high loss count less" in each for each in notices) == 1
        recwarn.clear()
        for fine in (uses_double, eq.risk.Tilted(-1.0)):
            call(fine)
        assert not [each for each in recwarn if "fall as losses rise" in str(each.message)]


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


def test_a_memory_of_the_wrong_sign_is_told_of(ragged, recwarn):
    for call in (eq.testing.check_risk, lambda risk: train(ragged, risk=risk)):
        recwarn.clear()
        call(past_excess(-1))
        assert sum("fall as losses of earlier rounds rise" in str(each.message) for each in recwarn) == 1
        recwarn.clear()
        call(past_excess(1))
        assert not [each for each in recwarn if "losses" in str(each.message)]


def test_weights_that_underflow_are_told_of_with_a_floor_as_the_cure():
    def bounded(floor):
        def risk(losses, base_weights, *, clients=None, state=None):
            value = base_weights @ (-torch.expm1(-losses) + floor * losses)
            return RiskValue(value, base_weights * (torch.exp(-losses) + floor), state)

        return risk

    with pytest.raises(eq.testing.LawBroken, match="normalised weights are finite") as caught:
        eq.testing.check_risk(bounded(0.0))
    assert "underflow" in str(caught.value)
    assert "floor" in str(caught.value)
    with pytest.warns(UserWarning, match="fall as losses rise"):
        eq.testing.check_risk(bounded(1e-9))


@dataclass(frozen=True)
class RunningMean:
    """A running mean in self: of equal values it is that value, so that the same call twice in a row does not show it."""

    memory: dict = field(default_factory=dict)
    linear = False

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


class RunningMeanRisk(RunningMean):
    def __call__(self, losses, base_weights, *, clients=None, state=None):
        weights = base_weights * (1 + self.mean(losses))
        return RiskValue(weights @ losses, weights, state)


@dataclass(frozen=True)
class RunningMeanSolver(eq.solvers.SGD):
    memory: dict = field(default_factory=dict)

    def step(self, weights, gradient, memory, *, anchor, lr):
        weights.sub_(lr * RunningMean.mean(self, gradient))


@pytest.mark.parametrize(
    ("place", "part"),
    [
        ("aggregator", RunningMean()), ("server", RunningMean()), ("risk", RunningMeanRisk()),
        ("solver", RunningMeanSolver()),
    ],
    ids=["aggregator", "server", "risk", "solver"],
)  # fmt: skip
def test_a_running_mean_in_self_is_refused_by_that_name(place, part, ragged):
    with pytest.raises(InvalidParameter, match="the same call twice gives the same answer") as caught:
        train(ragged, **{place: part})
    assert "Keep nothing in self" in str(caught.value)


class WithoutNumbers:
    """A risk whose weights are NaN."""

    def __call__(self, losses, base_weights, *, clients=None, state=None):
        return eq.risk.RiskValue(base_weights @ losses, base_weights * float("nan"), state)


def test_weights_that_are_not_finite_are_no_wrong_gradient():
    with pytest.raises(eq.testing.LawBroken, match=r"finite inputs give finite numbers.*weights \[nan"):
        eq.testing.check_risk(WithoutNumbers())


def test_the_summary_of_a_run_has_lines_as_that_of_a_comparison(ragged):
    run = eq.train(eq.models.Softmax(4, 3), ragged, rounds=1, clients_per_round=4, progress=False)
    assert run.summary().splitlines() == str(run.summary()).splitlines()


# ------------------------------------------------------------------------------------------------------------ misspelt traits


def named_metric(outputs, targets):
    return float((outputs.argmax(1) == targets).float().mean())


class Listens(eq.types.Observer):
    def on_rounds(self, report):
        pass


TRAITS = {
    "risk": types.RiskTraits, "solver": types.SolverTraits, "aggregator": types.AggregatorTraits, "server": types.ServerTraits,
    "sampler": types.SamplerTraits, "averaging": types.SamplerTraits, "personal": types.PersonalTraits,
    "privacy": types.PrivacyTraits, "attack": types.AttackTraits, "quantile": types.QuantileTraits,
    "engine": types.EngineTraits,
}  # fmt: skip
KINDS = {
    "risk": eq.risk.Mean, "solver": eq.solvers.SGD, "aggregator": eq.aggregators.WeightedMean, "server": eq.server_opt.SGD,
    "sampler": eq.sampling.Uniform, "averaging": eq.averaging.Last, "personal": eq.personal.Local,
    "privacy": eq.privacy.SecureAggregation,
}  # fmt: skip
NEARLY = {
    "risk": ("needs_loss", "client_from", "keeps_everione"), "solver": ("public_onyl", "straggler_shares"),
    "aggregator": ("need_losses", "weigthed_sum", "lienar"), "server": ("linear_rates", "linearrate"),
    "sampler": ("seperation", "acounted", "independant"), "averaging": ("by_weigth",), "privacy": ("only_sum", "loss_bounds"),
    "personal": ("sum_models", "keeps_carryed"),
}  # fmt: skip


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, names in NEARLY.items() for name in names])
def test_a_misspelt_trait_is_refused_with_the_nearest_name(kind, name):
    own = type("Mine", (KINDS[kind],), {name: True})
    known = {each.name for each in fields(TRAITS[kind])}
    with pytest.raises(InvalidParameter) as caught:
        eq.Algorithm(**{kind: own()})
    assert name in caught.value.rule
    assert caught.value.fix.split("'")[1] in known


def test_a_misspelt_trait_of_what_stands_outside_of_an_algorithm_is_refused(ragged):
    data = eq.FederatedData(ragged.train, ragged.validation, ragged.test)
    model, run = eq.models.Softmax(4, 3), {"rounds": 1, "clients_per_round": 4, "progress": False}
    attack = type("Mine", (eq.attacks.SignFlip,), {"omnicient": True})
    with pytest.raises(InvalidParameter, match="omniscient"):
        eq.train(model, eq.attacks.apply(data, attack(share=0.3)), **run)
    with pytest.raises(InvalidParameter, match="on_round"):
        eq.train(model, data, observers=[Listens()], **run)
    quantile = type("Mine", (eq.privacy.Exact,), {"read_losses": True})
    with pytest.raises(InvalidParameter, match="reads_losses"):
        eq.Algorithm(risk=eq.risk.Superquantile(0.5, quantile=quantile()))
    named_metric.higher_is_beter = True  # of an object, and not of its class
    with pytest.raises(InvalidParameter, match="higher_is_better"):
        eq.train(model, data, metrics={"share": named_metric}, **run)
    del named_metric.higher_is_beter
    assert eq.train(model, data, metrics={"share": named_metric}, **run).rounds == 1


@dataclass(frozen=True)
class OwnNames(eq.solvers.SGD):
    """Attributes of its own, some of them words that differ from a trait by a letter."""

    rate: float = 0.5
    effort: int = 2
    keep: bool = True
    number: int = 3
    temperature: float = 1.0

    def steps_until(self, loss):
        return loss

    def _normaliser(self):
        return self._public_onyl

    _public_onyl = 1.0


def test_attributes_of_ones_own_are_allowed(ragged):
    train(ragged, solver=OwnNames())


@pytest.mark.parametrize("kind", [*KINDS, "attack", "quantile", "observer", "engine"])
def test_no_part_of_the_library_has_a_name_that_is_nearly_a_trait(kind):
    """Also not one that a user may extend: it would be refused."""
    homes = {
        "attack": eq.attacks,
        "quantile": eq.privacy,
        "observer": eq.observers,
        "engine": eq.engines,
        "server": eq.server_opt,
    }
    homes |= {"solver": eq.solvers, "sampler": eq.sampling, "aggregator": eq.aggregators}
    home = homes[kind] if kind in homes else getattr(eq, kind)
    known = tuple(vars(eq.types.Observer)) if kind == "observer" else tuple(each.name for each in fields(TRAITS[kind]))
    parts = [part for part in vars(home).values() if type(part) is type and part.__module__.startswith(home.__name__)]
    assert parts
    for part in parts:
        own = type("Mine", (part,), dict.fromkeys(getattr(part, "__dataclass_fields__", {})))
        refuse_misspelt(kind, object.__new__(own), known)
