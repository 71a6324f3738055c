"""A part of the library in the place of another kind is refused when it is given, with its kind and its place."""

import inspect
import warnings

import pytest
import torch

import equipoise as eq
from equipoise.core.part_kinds import KINDS, kind_of
from equipoise.errors import InvalidParameter
from equipoise.experiment import catalog
from equipoise.risk import RiskValue

_VALUES = {
    "groups": len, "kept": "head", "noise_multiplier": 1.0, "steps": 10, "rounds": 10, "every": 10, "malicious": 2,
    "share": 0.2, "aggregator": eq.aggregators.Median(), "solver": eq.solvers.SGD(), "features": 4, "classes": 3,
    "vocabulary": 5, "fraction": 0.2, "buffer": 3, "clip": 1.0, "delta": 1e-3, "epsilon": 8.0, "hidden": 4, "size": 2,
    "personal": "head", "columns": ("a",), "widths": (3,), "shared": "head",
}  # fmt: skip


def made(part):
    """A part of the catalogue with values for what it needs; None if these do not do."""
    if part.target is eq.risk.Mixture:
        return eq.risk.Mixture((1.0, eq.risk.Mean()))
    needed = [p for p in inspect.signature(part.target).parameters.values() if p.default is p.empty and p.kind < 4]
    needed = [p.name for p in needed if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    if "delta" in inspect.signature(part.target).parameters:
        needed += ["epsilon", "delta", "clip"]
    given = {name: _VALUES.get(name, 0.5) for name in needed if name in inspect.signature(part.target).parameters}
    for own in (given, {name: 3 if value == 0.5 else value for name, value in given.items()}):
        try:
            return part.target(**own)
        except (eq.errors.EquipoiseError, TypeError):
            continue
    return None


def all_parts():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        kinds = [kind for kind in catalog.kinds() if kind not in ("data", "model")]
        found = {kind: [made(part) for part in catalog.parts(kind)] for kind in kinds}
    found["model"], found["data"] = [eq.models.Softmax(64, 10)], [eq.data.digits(clients=4)]
    found["optimizer"], found["observer"] = [], [eq.observers.History()]
    return found


PARTS = all_parts()


def protection(**options):
    return eq.privacy.DifferentialPrivacy(epsilon=8.0, delta=1e-3, clip=1.0, **options)


PLACES = {
    **{slot: (slot, lambda part, slot=slot: eq.Algorithm(**{slot: part})) for slot in
       ("risk", "solver", "aggregator", "server", "sampler", "averaging", "personal", "privacy")},
    "terms[0]": ("risk", lambda part: eq.risk.Mixture((1.0, part))),
    "quantile": ("quantile", lambda part: eq.risk.Superquantile(0.5, quantile=part)),
    "schedule": ("schedule", lambda part: eq.solvers.SGD(schedule=part)),
    "local_schedule": ("schedule", lambda part: eq.solvers.Adam(local_schedule=part)),
    "solver of Scaffold": ("solver", lambda part: eq.solvers.Scaffold(part)),
    "solver of Ditto": ("solver", lambda part: eq.personal.Ditto(solver=part)),
    "aggregator of NNM": ("aggregator", lambda part: eq.aggregators.NNM(part, share=0.2)),
    "aggregator of FedNova": ("aggregator", lambda part: eq.aggregators.FedNova(part)),
    "clip_rule": ("clip_rule", lambda part: protection(clip_rule=part)),
    "attack": ("attack", lambda part: eq.attacks.apply(PARTS["data"][0], part)),
    "engine": ("engine", lambda part: eq.train(PARTS["model"][0], PARTS["data"][0], rounds=0, engine=part)),
}  # fmt: skip


def test_parts_of_the_catalogue_are_made_and_their_kinds_known():
    missing = {kind: parts.count(None) for kind, parts in PARTS.items() if None in parts}
    assert not missing
    assert {kind: {kind_of(part) for part in parts} for kind, parts in PARTS.items() if parts} == {
        kind: {kind} for kind in KINDS if PARTS[kind]
    }


@pytest.mark.parametrize("place", PLACES)
def test_parts_of_other_kinds_are_refused(place):
    kind, give = PLACES[place]
    for other, parts in PARTS.items():
        for part in parts if other != kind else ():
            with pytest.raises(InvalidParameter) as caught:
                give(part)
            text = str(caught.value)
            assert text.startswith(f"{place.split(' ')[0]} must "), text
            if callable(part) or place not in ("schedule", "local_schedule", "terms[0]"):  # else refused for not being callable
                assert f"must be {KINDS[kind][0]}, e.g. " in text
                assert f"That is {KINDS[other][0]}, " in text


def test_own_parts_of_any_class_are_taken():
    class Risk(eq.aggregators.Median):  # extends a part of another kind, and answers as a risk
        def __call__(self, losses, base_weights, *, clients=None, state=None):
            return RiskValue(base_weights @ losses, base_weights, state)

    class Server:
        def begin(self, params):
            return None

        def step(self, params, total, state):
            return params + total, state

    algorithm = eq.Algorithm(risk=Risk(), server=Server(), solver=eq.solvers.SGD(schedule=lambda index: 0.5))
    result = eq.train(eq.models.Softmax(64, 10), eq.data.digits(clients=4), algorithm, rounds=1, clients_per_round=2)
    assert bool(torch.isfinite(result.params).all())
