"""Random algorithms out of the catalogue."""

from __future__ import annotations

import random
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch

import equipoise as eq
from equipoise import aggregators, averaging, personal, privacy, risk, sampling, server_opt, solvers
from equipoise.errors import EquipoiseError

SGD = solvers.SGD(lr=0.1, batch_size=4)


def group(client: str) -> str:
    """The group of a client, by its name."""
    return client[-1]


RISKS = (
    risk.Mean(), risk.Superquantile(0.5), risk.Superquantile(0.3, rule="threshold"), risk.Superquantile(0.5, eta_every=2),
    risk.Superquantile(0.5, smoothing="kl", nu=0.5), risk.Superquantile(0.5, smoothing="huber", nu=0.3),
    risk.Superquantile(0.5, quantile=privacy.SecureSums()), risk.Superquantile(0.4, quantile=privacy.Exact(), at_least=2),
    risk.Superquantile(0.5, quantile=privacy.SecureHistogram(3.0)),
    risk.Superquantile(0.5, quantile=privacy.PrivateQuantile(3.0)),
    risk.Tilted(2.0), risk.Tilted(-2.0),
    risk.Tilted(1.0, tracked=True), risk.QFair(1.0), risk.QFair(0.3), risk.WorstCase(0.3),
    risk.HierarchicalTilt(group, 1.0, inner_tilt=-1.0), risk.GroupDRO(step=0.3, groups=group),
    risk.Mixture((0.3, risk.Mean()), (0.7, risk.Superquantile(0.2))),
    risk.Mixture((0.5, risk.Tilted(1.0)), (0.5, risk.Superquantile(0.5, eta_every=2))),
)  # fmt: skip
SOLVERS = (
    SGD, solvers.SGD(lr=0.05, batch_size=None, steps=2, momentum=0.5, weight_decay=0.01),
    solvers.SGD(lr=0.1, batch_size=3, epochs=2, prox=0.5), solvers.SGD(lr=0.1, epochs=3, straggler_share=0.5),
    solvers.SGD(lr=0.1, epochs=3, straggler_share=0.4, stragglers="drop"), solvers.SGD(lr=0.2, lr_decay=0.5, lr_decay_every=2),
    solvers.SGD(lr=0.1, batch_size=4, momentum=0.5, nesterov=True, clip_norm=0.2),
    solvers.SGD(lr=0.2, batch_size=4, schedule=solvers.Cosine(6, warmup=1), local_schedule=solvers.LinearDecay(4)),
    solvers.SGD(lr=0.2, batch_size=4, schedule=solvers.Step(2, 0.5), momentum=0.8, state="kept"),
    solvers.SGD(lr=0.2, batch_size=4, rates={"*bias*": 0.1}),
    solvers.AdaptiveProx(solvers.SGD(lr=0.3, batch_size=4), patience=1), solvers.FedDane(SGD), solvers.MAML(lr=0.1),
    solvers.PerFedAvg(lr=0.1), solvers.Adam(lr=0.02, batch_size=4), solvers.AdamW(lr=0.02, batch_size=4),
    solvers.Adam(lr=0.02, batch_size=4, state="kept"), solvers.AdamW(lr=0.02, batch_size=4, state="kept", clip_norm=0.5),
    solvers.Adam(lr=0.02, batch_size=4, schedule=solvers.Constant(warmup=2), prox=0.3, straggler_share=0.4, epochs=2),
    solvers.FedDyn(0.3, SGD), solvers.SGD(lr=0.1, batch_size=4, momentum=0.5, dampening=0.5),
    solvers.Scaffold(SGD), solvers.Scaffold(solvers.SGD(lr=0.1, epochs=3, momentum=0.4, straggler_share=0.5)),
    solvers.AdaDPS({"bias": torch.tensor(2.0)}, SGD), solvers.AdaDPS({"head.bias": torch.tensor([0.5, 1.0, 2.0])}, SGD),
)  # fmt: skip
AGGREGATORS = (
    aggregators.WeightedMean(), aggregators.Median(), aggregators.TrimmedMean(0.2), aggregators.GeometricMedian(),
    aggregators.Krum(1), aggregators.MultiKrum(1), aggregators.NormClip(0.01), aggregators.NormClip(None), aggregators.KNorm(1),
    aggregators.KLoss(1), aggregators.FedMGDA(0.1), aggregators.MeaMed(0.2), aggregators.CentredClipping(0.05),
    aggregators.CentredClipping(), aggregators.NNM(aggregators.Median(), 0.2), aggregators.NNM(aggregators.Krum(1), 0.15),
    aggregators.Bucketing(aggregators.Median(), 2), aggregators.Bucketing(aggregators.CentredClipping(0.05), 3),
    aggregators.Bulyan(1), aggregators.DnC(1), aggregators.DnC(1, repeats=3, coordinates=5), aggregators.FedNova(),
    aggregators.FedNova(aggregators.Median()), aggregators.FedNova(steps=3.0), aggregators.FedNova(aggregators.Krum(1)),
    aggregators.NNM(aggregators.TrimmedMean(0.2), 0.2), aggregators.Bucketing(aggregators.GeometricMedian(), 2),
)  # fmt: skip
SERVERS = (
    server_opt.SGD(), server_opt.SGD(lr=0.5), server_opt.Momentum(), server_opt.Adam(lr=0.1), server_opt.Yogi(lr=0.1),
    server_opt.Adagrad(lr=0.1),
)  # fmt: skip
SAMPLERS = (
    None, sampling.Full(), sampling.Poisson(), sampling.Uniform(0.5), sampling.Proportional(), sampling.Availability(day=4),
    sampling.FedBuff(buffer=3, per_step=0.1), sampling.FedBuff(buffer=5, damped=False), sampling.MinSeparation(2),
    sampling.NodePoisson(),
)  # fmt: skip
AVERAGINGS = (None, averaging.Last(), averaging.Uniform(), averaging.Geometric(0.2))
HEAD = ("*bias*", "head", "3.*")  # names of parameters of at least one scene each; the others refuse them
PERSONAL = (
    None, personal.Ditto(1.0), personal.Ditto(0.5, when="finetuning"), personal.Ditto(choices=(0.1, 1.0)), personal.Local(),
    personal.L2SGD(1.0), personal.Finetuning(2), personal.EWC(1.0, epochs=2), personal.SymmetrisedKL(0.5, epochs=2),
    personal.APFL(), personal.APFL(0.7, mix_lr=0.1), personal.Mapper(), personal.Split(kept="*bias*"), personal.FedBN(),
    personal.FedPer(HEAD[2]), personal.FedRep(HEAD[0], kept_epochs=2), personal.FedBABU(HEAD[1], finetuning=2),
    personal.LGFedAvg(HEAD[0]), personal.PFedMe(2.0, steps=2), personal.Mocha(0.1, solver=solvers.SGD(lr=0.05)),
)  # fmt: skip
REPEATED: dict[str, Any] = {"noise_seed": 0}  # so that a run that was killed can be held against one that was not
PRIVACY = (
    None, privacy.SecureAggregation(), privacy.GaussianMechanism(0.5, 0.3, **REPEATED),
    privacy.GaussianMechanism(0.5, 0.3, clip_rule=privacy.AdaptiveClip(), **REPEATED),
    privacy.DPFTRL(None, 1e-2, 0.5, noise_multiplier=0.8, bands=(1.0, 0.5), **REPEATED),
    privacy.DifferentialPrivacy(None, 1e-2, 0.5, noise_multiplier=0.8, method="rdp", **REPEATED),
    privacy.DifferentialPrivacy(None, 1e-2, 0.5, noise_multiplier=0.8, method="rdp", noise="distributed", **REPEATED),
)  # fmt: skip
POOLS: dict[str, tuple[Any, ...]] = {
    "risk": RISKS, "solver": SOLVERS, "aggregator": AGGREGATORS, "server": SERVERS, "sampler": SAMPLERS,
    "averaging": AVERAGINGS, "personal": PERSONAL, "privacy": PRIVACY, "weights": (None, "uniform"),
}  # fmt: skip
# Parts that need one another: two parts that are drawn alone would nearly always be refused.
BUNDLES: tuple[dict[str, Any], ...] = (
    {"sampler": sampling.NodePoisson(), "privacy": PRIVACY[-1]},
    {"sampler": sampling.Poisson(), "privacy": PRIVACY[-2]},
    {"sampler": sampling.Poisson(), "privacy": PRIVACY[-1]},
    {"sampler": sampling.MinSeparation(2), "privacy": PRIVACY[4], "risk": risk.Mean()},
    {"sampler": sampling.FedBuff(buffer=3, per_step=0.1), "solver": SGD},
    {"solver": solvers.Scaffold(SGD), "aggregator": aggregators.TrimmedMean(0.2)},
    {"solver": solvers.Scaffold(solvers.SGD(lr=0.1, batch_size=4, steps=3)), "privacy": PRIVACY[2]},
    {"solver": solvers.FedDyn(0.3, SGD), "aggregator": aggregators.CentredClipping(0.05)},
    {"aggregator": aggregators.FedNova(steps=3.0), "privacy": PRIVACY[2]},
    {"aggregator": aggregators.FedNova(aggregators.TrimmedMean(0.2)), "solver": solvers.SGD(lr=0.1, batch_size=3, epochs=2)},
)
MILD = (0.5, 0.8, 1.25, 2.0)  # by how much a number of a part is changed
WILD = (0, -0.0, -1, 1e-300, 1e-9, 1e9, 1e300, float("inf"), float("-inf"), float("nan"), 2**53, 10**20, -(10**20), True, None)


@dataclass(frozen=True)
class Chosen:
    """Parts that were drawn, by kind; those that are not named are the algorithm's defaults."""

    parts: dict[str, Any]
    varied: bool = False  # whether numbers were changed, so that a part may have come to be neutral

    def algorithm(self) -> eq.Algorithm:
        """The algorithm, if it is not refused."""
        return eq.Algorithm(**self.parts)

    def without(self, kind: str) -> Chosen:
        """The same with the default in the place of one part."""
        return Chosen({name: part for name, part in self.parts.items() if name != kind}, self.varied)

    def words(self) -> dict[str, str]:
        """The parts for a report."""
        return {kind: repr(part) for kind, part in self.parts.items()}


def draw(chance: random.Random, *, most: int = 4) -> Chosen:
    """One to `most` parts that are not the default; full participation is likelier, since more goes with it."""
    kinds = chance.sample(list(POOLS), chance.randint(1, most))
    parts = {kind: chance.choice([part for part in POOLS[kind] if part is not None]) for kind in kinds}
    if chance.random() < 0.4:
        parts["sampler"] = sampling.Full()
    if chance.random() < 0.15:
        parts |= chance.choice(BUNDLES)
    varied = chance.random() < 0.3
    if varied:
        parts = {kind: vary(chance, part) for kind, part in parts.items()}
    return Chosen({kind: part for kind, part in parts.items() if not _is_default(kind, part)}, varied)


def vary(chance: random.Random, part: Any) -> Any:
    """A part with other numbers near its own; itself where these are refused."""
    numbers = _numbers_of(part)
    changed = {name: _near(chance, value) for name, value in numbers.items() if chance.random() < 0.5}
    try:
        return replace(part, **changed) if changed else part
    except EquipoiseError:
        return part


def wildly(chance: random.Random, part: Any) -> Any:
    """A part with one absurd number: an EquipoiseError, or a part; whatever else is raised is a finding."""
    numbers = _numbers_of(part)
    return replace(part, **{chance.choice(sorted(numbers)): chance.choice(WILD)}) if numbers else part


def _numbers_of(part: Any) -> dict[str, Any]:
    if not is_dataclass(part):
        return {}
    values = {field.name: getattr(part, field.name) for field in fields(part) if field.init}
    return {name: value for name, value in values.items() if isinstance(value, int | float)}


def _near(chance: random.Random, value: Any) -> Any:
    if isinstance(value, bool):
        return not value
    return max(0, value + chance.choice([-1, 1, 2])) if isinstance(value, int) else value * chance.choice(MILD)


def _is_default(kind: str, part: Any) -> bool:
    default = {f.name: f for f in fields(eq.Algorithm)}[kind]
    made = default.default_factory() if callable(default.default_factory) else default.default
    return bool(part == made)
