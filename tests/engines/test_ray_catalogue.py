"""Every part of the catalogue on a real Ray cluster: the simulator's results, and the same bits for one and two workers."""

import dataclasses
from functools import partial

import pytest
import torch
from test_ray_engine import SGD, assert_close, assert_equal_bits, made_data, trained
from torch import nn

import equipoise as eq
import test_laws as laws
from equipoise import aggregators, attacks, models, personal, privacy, risk, sampling, solvers
from equipoise.engines import Ray, Simulator
from equipoise.experiment import catalog

pytestmark = [
    pytest.mark.xdist_group("ray"),
    pytest.mark.cluster,
    pytest.mark.usefixtures("small_pieces"),
    pytest.mark.filterwarnings("ignore::equipoise.errors.EquipoiseNotice"),
]
HERE = Simulator(workers=1)


class Normed(nn.Sequential):
    """A small net whose batch normalisation carries buffers from round to round."""

    def __init__(self, bias=True):
        super().__init__(nn.Linear(4, 6, bias=bias), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))


EVERYONE = {"clients_per_round": 12}
FULL = {"sampler": sampling.Full()}, {"clients_per_round": None}
NEEDS = {  # what a part needs beside it
    risk.WorstCase: FULL,
    personal.Mocha: FULL,
    aggregators.Bulyan: ({}, EVERYONE),
    sampling.MinSeparation: ({}, {"clients_per_round": 6}),
    sampling.NodePoisson: ({"privacy": laws.fixed_noise(0.7, clip=0.5, noise="distributed")}, {}),
}


def kinds_of(kind, *, first=False):
    """An algorithm for each part of a kind that the laws know; with `first` for the first of each class."""
    found = {}
    for part in laws.CHECKED[kind]:
        others, options = NEEDS.get(type(part), ({}, {}))
        if isinstance(part, personal.Split) and part.kept[0] in laws.NORMALISED:
            options = {"model": Normed}
        needs_examples = kind == "personal" and getattr(part, "choices", ())  # of validation, within clients
        if part is not None and not needs_examples:
            name = type(part).__name__ if first else repr(part)
            found.setdefault(f"{kind} {name}", ({kind: part} | others, options))
    return found


def repeated(part):
    """A private part whose noise and cohorts are the same on every engine."""
    return dataclasses.replace(part, noise_seed=0) if hasattr(part, "noise_seed") else part


NOISE = privacy.GaussianMechanism(clip=0.5, noise_multiplier=0.5, noise_seed=0)
SECURE = privacy.SecureAggregation()
ADAM = solvers.Adam(lr=0.05, batch_size=4, state="kept")
SCAFFOLD = solvers.Scaffold(solvers.SGD(lr=0.1, batch_size=4, steps=3))
KINDS = {
    **kinds_of("risk", first=True),
    "risk tracked tilt": ({"risk": risk.Tilted(1.0, tracked=True)}, {}),
    **kinds_of("solver"),
    **kinds_of("aggregator"),
    **kinds_of("server"),
    **kinds_of("sampler"),
    **kinds_of("averaging"),
    **kinds_of("personal"),
    **{
        f"privacy {part!r} {tail!r}": ({"privacy": repeated(part)} | ({} if tail is None else {"risk": tail}), {})
        for part, _, tail, _ in laws.PROTECTIONS
        if part is not None
    },
    "correlated noise": (
        {"privacy": repeated(laws.CORRELATED), "sampler": sampling.MinSeparation(2)},
        {"clients_per_round": 4},
    ),
    "FedNova, median": ({"aggregator": aggregators.FedNova(aggregators.Median())}, {}),
    "FedNova, noise": ({"aggregator": aggregators.FedNova(steps=2.0), "privacy": NOISE}, {}),
    "FedNova, secure": ({"aggregator": aggregators.FedNova(), "privacy": SECURE}, {}),
    "SCAFFOLD, median": ({"solver": SCAFFOLD, "aggregator": aggregators.Median()}, {}),
    "SCAFFOLD, noise": ({"solver": SCAFFOLD, "privacy": NOISE}, {}),
    "SCAFFOLD, secure": ({"solver": SCAFFOLD, "privacy": SECURE}, {}),
    "FedDyn, secure": ({"solver": solvers.FedDyn(0.5, SGD), "privacy": SECURE}, {}),
    "split, tail, batch norm": (
        {"personal": personal.Split(("3", "statistics")), "risk": risk.Superquantile(0.5)},
        {"model": Normed},
    ),
    "split, shared statistics": ({"personal": personal.FedRep("3", 1, 1)}, {"model": Normed}),
    "split, median": ({"personal": personal.FedPer("bias"), "aggregator": aggregators.Median()}, {}),
    "pFedMe, tail": ({"personal": personal.PFedMe(2.0, 2), "risk": risk.Superquantile(0.5)}, {}),
    "FedBuff, median": ({"sampler": sampling.FedBuff(buffer=3), "aggregator": aggregators.Median()}, {}),
    "Adam, kept, batch norm": ({"solver": ADAM}, {"model": partial(Normed, bias=False)}),
    "q-MAML": ({"risk": risk.QFair(1.0), "solver": solvers.MAML(lr=0.2)}, {}),
    "Ditto, median": ({"personal": personal.Ditto(0.5), "aggregator": aggregators.Median()}, {}),
    "Ditto, batch norm": ({"personal": personal.Ditto(0.5)}, {"model": Normed}),
}


@pytest.fixture(scope="module")
def data():
    return made_data()


def run(data, engine, parts, options):
    model = options.get("model", lambda: models.Softmax(4, 3))
    algorithm = eq.Algorithm(**({"solver": SGD} | parts))
    torch.manual_seed(0)
    return trained(data, engine, algorithm, model(), rounds=2, **{k: v for k, v in options.items() if k != "model"})


@pytest.mark.parametrize("kind", KINDS)
def test_a_part_gives_the_simulators_results(cluster, data, kind):
    parts, options = KINDS[kind]
    on_two = run(data, Ray(), parts, options)
    assert_equal_bits(on_two, run(data, Ray(workers=1), parts, options))
    assert_close(on_two, run(data, HERE, parts, options))


@pytest.mark.parametrize("attack", laws.ATTACKS, ids=repr)
@pytest.mark.parametrize("aggregator", [aggregators.WeightedMean(), aggregators.Median()], ids=repr)
def test_an_attack_gives_the_simulators_results(cluster, data, attack, aggregator):
    attacked = attacks.apply(data, attack)
    on_two = run(attacked, Ray(), {"aggregator": aggregator}, {})
    assert_equal_bits(on_two, run(attacked, Ray(workers=1), {"aggregator": aggregator}, {}))
    assert_close(on_two, run(attacked, HERE, {"aggregator": aggregator}, {}))


def test_adam_blows_up_the_rounding_of_a_gradient_that_is_zero(cluster):
    """A bias before batch normalisation has no effect: its gradient is zero but for rounding, which Adam divides by itself.

    Adam's ε is 1e-8. In double precision the rounding of 1e-17 is far below it, and everything agrees. In single precision it
    is not: that bias may differ by whole steps, and no other parameter does.
    """
    for dtype, tolerance in ((torch.float64, 1e-7), (torch.float32, 2 * 10 * 0.05)):  # 2 rounds, up to 2 · 5 steps, of 0.05
        data, model = made_data(dtype), lambda dtype=dtype: Normed().to(dtype)
        on_ray, here = (run(data, engine, {"solver": ADAM}, {"model": model}) for engine in (Ray(), HERE))
        layout = {name: value.numel() for name, value in Normed().named_parameters()}
        for name, one, two in zip(layout, *(each.params.split(list(layout.values())) for each in (on_ray, here)), strict=True):
            torch.testing.assert_close(one, two, rtol=0, atol=tolerance if name == "0.bias" else 1e-5)


def test_no_part_of_the_catalogue_is_left_out():
    tried = {type(part) for parts, _ in KINDS.values() for part in parts.values()} | {type(each) for each in laws.ATTACKS}
    for kind in ("risk", "solver", "aggregator", "server", "sampler", "averaging", "personal", "privacy", "attack"):
        classes = {part.target for part in catalog.parts(kind) if isinstance(part.target, type)}
        assert not classes - tried, f"{kind}: {classes - tried}"
