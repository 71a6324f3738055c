"""What is refused of parts before a run, beside broken laws: misspelt attributes, what is no part, and rates below zero."""

from dataclasses import dataclass, fields

import pytest

import equipoise as eq
from equipoise import types
from equipoise.core.abilities import refuse_misspelt
from equipoise.errors import InvalidParameter
from made_clients import make_clients


def train(ragged, **parts):
    model = eq.models.Softmax(4, 3)
    return eq.train(model, ragged, eq.Algorithm(**parts), rounds=1, clients_per_round=4, engine="loop", progress=False)


@pytest.mark.parametrize("observer", [print, object(), eq.observers.History], ids=["function", "object", "class"])
def test_an_observer_that_hears_nothing_is_refused(observer, ragged):
    with pytest.raises(InvalidParameter, match=r"observers must be objects with a method.*equipoise\.types\.Observer"):
        eq.train(eq.models.Softmax(4, 3), ragged, rounds=1, clients_per_round=4, observers=[observer])


def test_a_function_as_an_aggregator_is_told_to_be_a_class():
    with pytest.raises(InvalidParameter, match=r"must offer linear.*Write a class with `linear = False`"):
        eq.Algorithm(aggregator=lambda updates, weights, **_: (weights.to(updates.dtype) @ updates, None))


# ----------------------------------------------------------------------------------------------------------- rates below zero


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
