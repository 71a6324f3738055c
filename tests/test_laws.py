"""Every part passes the check of its contract, and each check catches parts that break its law."""

import inspect
import math
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.nn import functional

import equipoise as eq
from equipoise import (
    aggregators,
    attacks,
    averaging,
    engines,
    observers,
    personal,
    privacy,
    risk,
    sampling,
    server_opt,
    solvers,
    testing,
    types,
)
from equipoise.core.rng import torch_generator
from equipoise.experiment import catalog
from equipoise.privacy import DifferentialPrivacy, GaussianMechanism, PrivateQuantile, SecureAggregation
from equipoise.privacy.random_source import Seeded
from equipoise.testing import (
    LawBroken,
    check_aggregator,
    check_attack,
    check_averaging,
    check_clip_rule,
    check_engine,
    check_observer,
    check_personalisation,
    check_protection,
    check_quantile_source,
    check_risk,
    check_sampler,
    check_schedule,
    check_server_optimizer,
    check_solver,
)
from equipoise.testing.small_run import draw_everyone, make_small_task, perturb_params
from made_clients import make_clients


def three_groups(client):
    return f"group {int(client.split('-')[1]) % 3}"


RISKS = [
    risk.Mean(),
    *(risk.Superquantile(tail, rule=rule) for tail in (1.0, 0.8, 0.5, 0.3, 0.001, 1e-13) for rule in ("exact", "threshold")),
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
    *(risk.GroupDRO(step, three_groups) for step in (0.0, 0.01, 1.0, 50.0)),
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
    solvers.PerFedAvg(batch_size=4),
    solvers.AdaDPS({"weight": torch.full((4,), 2.0)}, solvers.SGD(batch_size=4)),
    solvers.FedDane(solvers.SGD(batch_size=4, clip_norm=0.5, rates={"weight": 0.5})),
    solvers.AdaptiveProx(solvers.Adam(prox=0.3, epochs=2)),
    solvers.Scaffold(solvers.SGD(batch_size=4, epochs=2, momentum=0.5, prox=0.2)),
    solvers.FedDyn(0.5, solvers.SGD(batch_size=4, epochs=2, momentum=0.5)),
    solvers.SGD(momentum=0.9, dampening=0.9, steps=1, state="kept"),
    solvers.SGD(momentum=0.9, nesterov=True, clip_norm=0.1),
    solvers.SGD(momentum=0.9, state="kept", local_schedule=solvers.LinearDecay(9), rates={"bias": 3.0}),
    solvers.Adam(lr=0.05, weight_decay=0.1, prox=0.2),
    solvers.Adam(lr=0.05, state="kept", clip_norm=0.1, schedule=solvers.Cosine(rounds=200, warmup=10)),
    solvers.AdamW(lr=0.05, steps=5, straggler_share=0.4),
    solvers.AdamW(lr=0.05, state="kept", local_schedule=solvers.Step(2)),
]
SCHEDULES = [
    solvers.Constant(), solvers.Constant(warmup=5), solvers.Step(), solvers.Step(20, 0.7, warmup=3), solvers.Cosine(200),
    solvers.Cosine(10, warmup=9, final=1.0), solvers.LinearDecay(200, warmup=10), solvers.LinearDecay(1),
]  # fmt: skip
AGGREGATORS = [
    aggregators.WeightedMean(),
    aggregators.Median(),
    aggregators.TrimmedMean(0.2),
    aggregators.GeometricMedian(),
    aggregators.Krum(2),
    aggregators.MultiKrum(2),
    aggregators.NormClip(0.5),
    aggregators.KNorm(2),
    aggregators.KLoss(2),
    aggregators.FedMGDA(),
    aggregators.FedNova(),
    aggregators.FedNova(aggregators.Median()),
    aggregators.CentredClipping(),
    aggregators.CentredClipping(1.0, 1),
    aggregators.NNM(aggregators.Median()),
    aggregators.Bucketing(aggregators.Median()),
    aggregators.Bulyan(2),
    aggregators.MeaMed(),
    aggregators.DnC(2),
    aggregators.NormClip(),
    aggregators.GeometricMedian(500, 1e-8),
    aggregators.FedNova(aggregators.MultiKrum(2)),
    aggregators.NNM(aggregators.MeaMed()),
    aggregators.NNM(aggregators.KLoss(2)),
    aggregators.Bucketing(aggregators.Krum(1)),
    aggregators.Bucketing(aggregators.NNM(aggregators.KNorm(1))),
]
AVERAGING = [averaging.Last(), averaging.Uniform(), averaging.Geometric(0.1)]
SERVERS = [server_opt.SGD(), server_opt.Momentum(), server_opt.Adam(), server_opt.Yogi(), server_opt.Adagrad()]
SAMPLERS = [
    sampling.Uniform(),
    sampling.Uniform(share=0.5),
    sampling.Proportional(),
    sampling.Poisson(),
    sampling.NodePoisson(),
    sampling.Full(),
    sampling.FedBuff(buffer=2),
    sampling.FedBuff(buffer=2, apart=2),
    sampling.MinSeparation(2),
    sampling.Availability(),
    sampling.Availability(day=10, share=0.3, aligned=0.0, schedule=3),
    sampling.Availability(share=0.2, aligned=1.0),  # at night nobody is there
]
ENGINES = [engines.Loop(), engines.Simulator(), engines.Simulator(chunk_size=3)]
PERSONALISATION = [
    personal.Ditto(),
    personal.Ditto(0.5, choices=(0.1, 1.0, 2.0), solver=solvers.SGD(lr=0.05, batch_size=4)),
    personal.Ditto(when="finetuning"),
    personal.Local(),
    personal.Finetuning(epochs=2),
    personal.L2SGD(0.5),
    personal.EWC(epochs=2),
    personal.SymmetrisedKL(epochs=2),
    personal.Mapper(),
    personal.APFL(),
    personal.Mocha(),
    personal.Split("bias"),
    personal.FedPer("bias"),
    personal.FedRep("bias", 2, 1),
    personal.FedBABU("bias", 1),
    personal.LGFedAvg("weight"),
    personal.FedBN(),
    personal.Split(("statistics",)),
    personal.PFedMe(2.0, 3),
]
ATTACKS = [
    attacks.LabelPoisoning(),
    attacks.RandomUpdates(share=0.4, scale=3.0),
    attacks.ModelReplacement(share=0.3),
    attacks.ModelReplacement(share=0.5, seed=7, update="negated", factor=3.0),
    attacks.SignFlip(),
    attacks.LabelFlip(),
    attacks.Backdoor(target=1, patch=2),
    attacks.Backdoor(share=0.4, examples=1.0, boost=None),
    attacks.ALIE(factor=1.0),
    attacks.IPM(),
    attacks.Mimic(),
    attacks.MinMax(),
]


@dataclass(frozen=True)
class SeededRelease:
    """A private quantile that draws the same noise in every call."""

    settings: PrivateQuantile
    reads_losses = False

    def __call__(self, losses, base_weights, tail):
        return self.settings.at(Seeded(0, "quantile", 0))(losses, base_weights, tail)


QUANTILES = [  # with what the check is told
    (privacy.Exact(), {}),
    (privacy.SecureSums(), {}),
    (privacy.SecureHistogram(4.0, 32), {"tolerance": 4.0 / 32, "largest": 4.0, "equal_weights": True}),
    (privacy.SecureHistogram(4.0, 7), {"tolerance": 4.0 / 7, "largest": 4.0, "equal_weights": True}),
    # Among edges with one count the lowest is released, which may be 0: the tolerance is the whole range.
    (PrivateQuantile(4.0, 32, sigma=0.0, scale=1), {"tolerance": 4.0, "largest": 4.0, "equal_weights": True}),
    (PrivateQuantile(4.0, 32, sigma=3.0, scale=1), {"tolerance": 4.0, "largest": 4.0, "equal_weights": True}),
]


def fixed_noise(multiplier, **options):
    return DifferentialPrivacy(None, 1e-3, noise_multiplier=multiplier, **options)


CORRELATED = privacy.DPFTRL(None, 1e-4, 0.5, noise_multiplier=1.0, bands=(1.0, 0.5))
PROTECTIONS = [  # the part, the part without noise, the risk, and by how much totals may differ from the plain run's
    (None, None, None, 0.0),
    (None, None, risk.Superquantile(0.5), 0.0),
    (SecureAggregation(), None, None, 1e-6),
    (SecureAggregation(), None, risk.Superquantile(0.5, quantile=privacy.SecureSums()), 1e-6),
    (SecureAggregation(), None, risk.Superquantile(0.5, quantile=privacy.SecureHistogram(3.0, 512)), 1e-6),
    (SecureAggregation(loss_bound=3.0), None, risk.Tilted(1.0), 1e-6),
    (GaussianMechanism(0.5, 1.0), GaussianMechanism(math.inf, 0.0), None, 0.0),
    (
        GaussianMechanism(0.5, 1.0, clip_rule=privacy.AdaptiveClip()), GaussianMechanism(math.inf, 0.0),
        risk.Superquantile(0.5, quantile=PrivateQuantile(3.0, 4)), 0.0,
    ),
    (
        GaussianMechanism(0.5, 1.0, loss_bound=3.0), GaussianMechanism(math.inf, 0.0, loss_bound=3.0), risk.QFair(1.0), 0.0,
    ),
    (DifferentialPrivacy(8.0, 1e-3, 0.5), fixed_noise(0.0, clip=math.inf), None, 0.0),
    (DifferentialPrivacy(8.0, 1e-3, 0.5, noise_seed=0), fixed_noise(0.0, clip=math.inf), None, 0.0),
    (
        DifferentialPrivacy(8.0, 1e-3, 0.5, noise="distributed", loss_bound=3.0),
        fixed_noise(0.0, clip=1e3, noise="distributed", step=1e-9, loss_bound=3.0), risk.Tilted(1.0), 1e-7,
    ),
]  # fmt: skip

CHECKED = {
    "risk": RISKS,
    "quantile": [source for source, _ in QUANTILES],
    "solver": SOLVERS,
    "schedule": SCHEDULES,
    "aggregator": AGGREGATORS,
    "server": SERVERS,
    "sampler": SAMPLERS,
    "averaging": AVERAGING,
    "personal": PERSONALISATION,
    "privacy": [*(part for part, *_ in PROTECTIONS), CORRELATED],
    "clip_rule": [privacy.AdaptiveClip()],
    "attack": ATTACKS,
    "engine": [*ENGINES, engines.Ray()],  # checked on a real cluster in engines/test_ray_engine.py
}
NO_PARTS = {"model", "data"}  # kinds of the catalogue that have no contract
CHECKS = {  # of each contract in equipoise.types
    types.ClientRisk: testing.check_risk,
    types.QuantileSource: testing.check_quantile_source,
    types.LocalSolver: testing.check_solver,
    types.Schedule: testing.check_schedule,
    types.Aggregator: testing.check_aggregator,
    types.ServerOptimizer: testing.check_server_optimizer,
    types.Averaging: testing.check_averaging,
    types.Sampler: testing.check_sampler,
    types.Personalisation: testing.check_personalisation,
    types.Privacy: testing.check_protection,
    types.Protection: testing.check_protection,
    types.ClipRule: testing.check_clip_rule,
    types.Attack: testing.check_attack,
    types.Engine: testing.check_engine,
}
# Protocols that no user writes: each is one side of an engine or a run, and is tested with it.
INSIDE = {
    types.PersonalWork, types.SolverMemory, types.LookAheadEngine, types.RoundUnderWay, types.MeasuredChoice, types.Network,
}  # fmt: skip


@pytest.mark.parametrize("kind", [kind for kind in catalog.kinds() if kind not in NO_PARTS])
def test_every_part_of_the_catalogue_is_checked(kind):
    classes = {part.target for part in catalog.parts(kind) if isinstance(part.target, type)}  # functions make parts of these
    assert classes <= {type(part) for part in CHECKED[kind]}


def test_every_contract_has_a_check():
    contracts = {value for value in vars(types).values() if inspect.isclass(value) and getattr(value, "_is_protocol", False)}
    assert contracts == set(CHECKS) | INSIDE
    assert {check.__name__ for check in CHECKS.values()} | {"check_observer", "LawBroken"} == set(testing.__all__)


PLAIN = {  # kinds whose check takes the part alone
    "risk": check_risk, "solver": check_solver, "schedule": check_schedule, "aggregator": check_aggregator,
    "server": check_server_optimizer, "averaging": check_averaging, "sampler": check_sampler, "attack": check_attack,
    "clip_rule": check_clip_rule,
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "part"),
    [(kind, part) for kind in PLAIN for part in CHECKED[kind]],
    ids=lambda part: repr(part).partition(" at 0x")[0],  # a function's address varies
)
def test_a_part_of_the_catalogue_keeps_its_laws(kind, part):
    PLAIN[kind](part)


@pytest.mark.parametrize("part", RISKS, ids=lambda part: repr(part).partition(" at 0x")[0])
def test_risks_of_the_library_also_take_float32(part):
    """A round gives float64, and so does check_risk; whoever calls a risk of the library may have float32."""
    ids = tuple(f"client-{i}" for i in range(7))
    losses, alpha = torch.rand(2, 7, generator=torch_generator(0, "float32")) + 0.1
    for values in (losses, torch.zeros(7), torch.tensor([1e30, *6 * [0.0]]), torch.full((7,), 1e30)):
        weights = part(values, alpha / alpha.sum(), clients=ids, state=None).weights
        assert torch.isfinite(weights / weights.sum()).all()
        assert (weights >= 0).all()
    order = torch.tensor([3, 1, 0, 6, 5, 2, 4])
    found = part(losses, alpha, clients=ids).weights
    moved = part(losses[order], alpha[order], clients=tuple(ids[k] for k in order)).weights
    torch.testing.assert_close(moved, found[order], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("part", AGGREGATORS, ids=repr)
def test_weights_of_float32_cut_where_those_of_float64_do(part):
    """Sizes of clients are small integers, so that many of their sums are exactly half of all, or the share that is cut."""
    gen = torch_generator(0, "float32")
    for _ in range(20):
        updates, sizes = torch.randn(12, 4, generator=gen, dtype=torch.float64), torch.randint(1, 4, (12,), generator=gen)
        losses = torch.rand(12, generator=gen)
        found, expected = (part(updates, own / own.sum(), losses=losses)[0] for own in (sizes.float(), sizes.double()))
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("part", AGGREGATORS, ids=repr)
def test_a_call_without_keys_is_the_same_in_whatever_order_tied_clients_are_listed(part):
    rows, gen = torch.eye(6).repeat(2, 1), torch_generator(0, "keyless")  # pairs of equal updates, whose weights differ
    weights = torch.rand(12, generator=gen, dtype=torch.float64) + 0.1
    expected = part(rows, weights / weights.sum(), losses=torch.ones(12))[0]
    for order in (torch.arange(12).flip(0), torch.randperm(12, generator=gen)):
        found = part(rows[order], (weights / weights.sum())[order], losses=torch.ones(12))[0]
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


SELECTING = [
    *AGGREGATORS,
    aggregators.DnC(1, repeats=3),
    aggregators.NNM(aggregators.Krum(1)),
    aggregators.NNM(aggregators.Bulyan(1)),
    aggregators.NNM(aggregators.DnC(2)),
    aggregators.NNM(aggregators.NNM(aggregators.Bulyan(1)), share=0.1),
]


def symmetric(case):
    """Updates (12, D) in float64, between which nothing but weights, losses and keys tells: as far apart, or equal."""
    gen = torch_generator(0, "symmetric")
    block, square = (torch.randn(shape, generator=gen, dtype=torch.float64) for shape in ((6,), (12, 12)))
    turn = torch.linalg.qr(square).Q
    if case == "apart":  # each client has a part of the coordinates of its own, with one block in it
        return torch.block_diag(*(block[torch.randperm(6, generator=gen)].unsqueeze(0) for _ in range(12)))
    if case == "zero":  # one of zeros, as far from all others
        return torch.eye(12, dtype=torch.float64) @ turn - turn[:1]
    if case == "opposite":
        return torch.cat([turn[:6], -turn[:6]])
    if case == "grid":  # sums of whole numbers, of which many are equal
        return (torch.arange(12, dtype=torch.float64).unsqueeze(1) - 5) / 3
    return (turn[:4] / 3).repeat(3, 1)  # equal


@pytest.mark.parametrize("case", ["apart", "zero", "opposite", "grid", "equal"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("part", SELECTING, ids=repr)
def test_neither_order_nor_rounding_decides_ties(part, dtype, case):
    """Engines add up in another order, so that updates and losses differ in their last digits."""
    gen, rows, small = torch_generator(0, "rounding"), symmetric(case), 2 * torch.finfo(dtype).eps
    weights, losses = torch.arange(1.0, 13.0, dtype=torch.float64) / 78, torch.arange(12, dtype=torch.float64) // 4 + 1
    keys = torch.randint(-(2**62), 2**62, (12,), generator=gen)
    found = []
    for _ in range(6):
        order = torch.randperm(12, generator=gen)
        noise = 1 + small * (2 * torch.rand(rows.shape, generator=gen, dtype=torch.float64) - 1)
        given = {"keys": keys[order]} if getattr(part, "needs_keys", False) else {}
        reported = (losses * noise[:, 0]).to(dtype)[order]
        found.append(part((rows * noise).to(dtype)[order], weights[order], losses=reported, **given)[0])
    # Weights of FedMGDA are those of least squares of nearly parallel updates: right to half of the digits.
    loose = math.sqrt(small) if "FedMGDA" in repr(part) else 1e3 * small
    for each in found[1:]:
        torch.testing.assert_close(each, found[0], rtol=0, atol=loose * float(rows.abs().max()))


SCALES = [(torch.float16, 2.0**-8), (torch.float16, 2.0**13), (torch.float32, 2.0**-100), (torch.float32, 2.0**120)]
SCALES += [(torch.float64, 2.0**-600), (torch.float64, 2.0**660)]


@pytest.mark.parametrize(("dtype", "scale"), SCALES)
@pytest.mark.parametrize("part", AGGREGATORS, ids=repr)
def test_totals_grow_with_the_updates_as_far_as_the_type_holds(part, dtype, scale):
    if getattr(part, "bound", None) is not None or getattr(part, "radius", None) is not None:
        pytest.skip("its bound is an absolute one")
    updates = torch.randn(12, 4, generator=torch_generator(1, "scales"), dtype=torch.float64).clamp(-3.5, 3.5).to(dtype)
    weights, losses, keys = torch.full((12,), 1 / 12, dtype=torch.float64), torch.arange(12.0), torch.arange(12)
    given = {"keys": keys} if getattr(part, "needs_keys", False) else {}
    small, large = (part(rows, weights, losses=losses, **given)[0] for rows in (updates, updates * scale))
    tolerance = 1e-6 if dtype == torch.float64 else 8 * torch.finfo(dtype).eps
    torch.testing.assert_close(large / scale, small, rtol=0, atol=4 * tolerance)


def corners(count):
    """A client for each of `count` directions ±e_i, whose data pull a model of zeros in this direction, all as strongly."""
    rows = torch.cat([torch.eye(count // 2), -torch.eye(count // 2)])
    return [(f"client-{i}", rows[i : i + 1].abs(), rows[i : i + 1].sum(1)) for i in range(count)]


def trained(clients, part, of_risk, rounds, engine):
    algorithm = eq.Algorithm(
        of_risk, aggregator=part, sampler=sampling.Full(), weights="uniform", solver=solvers.SGD(lr=0.1, batch_size=None)
    )
    model = eq.models.LinearRegression(clients[0][1].shape[1], bias=False)
    data = eq.FederatedData(eq.data.ClientSet.pack(clients))
    return eq.train(model, data, algorithm, rounds=rounds, progress=False, engine=engine).params


@pytest.mark.filterwarnings("ignore::equipoise.errors.EquipoiseNotice")
@pytest.mark.parametrize("engine", ["loop", "simulator"])
@pytest.mark.parametrize("part", AGGREGATORS, ids=repr)
def test_a_run_is_the_same_in_whatever_order_tied_clients_are_listed(part, engine):
    clients, order = corners(12), torch.randperm(12, generator=torch_generator(0, "order")).tolist()
    expected = trained(clients, part, risk.Mean(), 2, engine)
    for listed in (clients[::-1], [clients[i] for i in order]):
        torch.testing.assert_close(trained(listed, part, risk.Mean(), 2, engine), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings("ignore::equipoise.errors.EquipoiseNotice")
@pytest.mark.parametrize("engine", ["loop", "simulator"])
@pytest.mark.parametrize("part", AGGREGATORS, ids=repr)
def test_a_client_whose_weight_underflows_changes_nothing_in_a_run(part, engine):
    """q = 40: the loss 1e-8 has the weight 1e-320 beside losses above 1, which is 0 once the round divides by their sum."""
    gen = torch_generator(0, "q")
    many = [(f"client-{i}", torch.ones(2, 1), 1 + i + torch.rand(2, generator=gen)) for i in range(11)]
    easy = ("easy", torch.ones(2, 1), torch.full((2,), 1e-4))
    found, expected = (trained(clients, part, risk.QFair(40.0), 1, engine) for clients in ([easy, *many], many))
    assert bool(expected.abs().sum() > 0)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("poison", [math.nan, math.inf, 1e30])
@pytest.mark.parametrize("part", AGGREGATORS, ids=repr)
def test_what_a_client_without_a_weight_sends_changes_no_call(part, poison):
    gen, keys = torch_generator(0, "weightless"), torch.arange(13)
    updates, losses, weights = torch.randn(13, 3, generator=gen), torch.rand(13, generator=gen), torch.full((13,), 1 / 12)
    updates[4], weights[4], rest = poison, 0.0, keys != 4
    given = [{"keys": own} if getattr(part, "needs_keys", False) else {} for own in (keys, keys[rest])]
    found = part(updates, weights, losses=losses, **given[0])[0]
    torch.testing.assert_close(found, part(updates[rest], weights[rest], losses=losses[rest], **given[1])[0])


@pytest.mark.parametrize("loss", [-1e20, 0.0, 1e20, math.inf])
@pytest.mark.parametrize(
    "part", [each for each in RISKS if "WorstCase" not in repr(each)], ids=lambda part: repr(part).partition(" at 0x")[0]
)
def test_the_loss_of_a_client_without_a_weight_changes_no_risk(part, loss):
    """Nor does its group, in which it is alone. WorstCase weighs everyone, whatever the base weights are."""
    gen, ids = torch_generator(0, "weightless"), tuple(f"client-{k}" for k in (0, 3, 6, 1, 4, 2))
    losses, alpha = torch.rand(6, generator=gen, dtype=torch.float64) + 1, torch.rand(6, generator=gen, dtype=torch.float64)
    losses[5], alpha[5] = abs(loss) if "QFair" in repr(part) else loss, 0.0
    alpha = alpha / alpha.sum()
    found, expected = part(losses, alpha, clients=ids), part(losses[:5], alpha[:5], clients=ids[:5])
    torch.testing.assert_close(found.value, expected.value)
    torch.testing.assert_close(found.weights, torch.cat([expected.weights, torch.zeros(1, dtype=torch.float64)]))


@pytest.mark.parametrize("part", ENGINES[1:], ids=repr)  # the loop engine is what others are compared with
@pytest.mark.parametrize("solver", SOLVERS, ids=repr)
def test_engine(part, solver):
    check_engine(part, solver=solver)


@pytest.mark.parametrize("part", ENGINES, ids=repr)
def test_engine_with_the_solvers_of_the_check(part):
    check_engine(part)


@dataclass(frozen=True)
class OneSendsNothingUsable:
    """Malicious clients double their update; one of them sends NaN."""

    share: float = 0.5
    seed: int = 0

    def corrupt(self, sent):
        return torch.where(sent.updates.norm(dim=1, keepdim=True) < 0.09, math.nan, 2 * sent.updates)


def test_updates_are_corrupted_once_beside_one_that_is_left_out():
    task, data = make_small_task(0)
    data = attacks.apply(data, OneSendsNothingUsable())
    params, cohort = perturb_params(task, torch_generator(0, "test")), draw_everyone(data, 0)
    expected, work = (
        engine.start(task, data).summed_update(
            params, cohort, solvers.SGD(momentum=0.5), cohort.weights, aggregators.WeightedMean()
        )
        for engine in ENGINES[:2]
    )
    assert 0 < int(expected.arrived.sum()) < len(cohort)
    assert (work.arrived == expected.arrived).all()
    torch.testing.assert_close(work.update, expected.update)


@pytest.mark.parametrize("engine", ["loop", "simulator"])
@pytest.mark.parametrize("part", PERSONALISATION, ids=repr)
def test_personalisation(part, engine):
    sampler = sampling.Full() if isinstance(part, personal.Mocha) else None
    algorithm = eq.Algorithm(solver=solvers.SGD(batch_size=5), sampler=sampler)
    own = needs_batch_norm() if isinstance(part, personal.Split) and part.kept[0] in NORMALISED else {}
    check_personalisation(part, algorithm=algorithm, engine=engine, **own)


NORMALISED = ("normalisation", "statistics")


@pytest.mark.parametrize("engine", ["loop", "simulator"])
@pytest.mark.parametrize("part", [personal.FedPer("2"), personal.FedRep("2", 1, 1), personal.Split("1.bias")], ids=repr)
def test_personalisation_with_statistics_that_are_shared(part, engine):
    check_personalisation(part, algorithm=eq.Algorithm(solver=solvers.SGD(batch_size=5)), engine=engine, **needs_batch_norm())


class Leaking(personal.Split):
    """Sends all statistics, also those that a client keeps."""

    keeps_carried = True
    withholds_carried = personal.Split.withholds_carried

    def sends_carried(self, context, params, cohort, rows, solver):
        return context.task.carried.sent(context.task.split(rows)[1])


@pytest.mark.parametrize("kept", ["1", ("1.weight", "3")])
def test_a_personal_method_that_sends_statistics_that_it_keeps_is_caught(kept):
    given = needs_batch_norm()
    given["model"] = nn.Sequential(*given["model"], nn.BatchNorm1d(3).double())
    with pytest.raises(eq.errors.EquipoiseError, match="carried"):
        check_personalisation(Leaking(kept), algorithm=eq.Algorithm(solver=solvers.SGD(batch_size=5)), **given)


def needs_batch_norm():
    """A model with a BatchNorm, and clients whose batches of 5 are never a single example."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)).double()
    clients, validation = (make_clients(sizes, dtype=torch.float64) for sizes in ([5, 10, 5, 15, 20, 10, 3, 8], [6] * 8))
    return {"model": model, "data": eq.FederatedData(clients, validation=validation, classes=3)}


@pytest.mark.parametrize(("part", "told"), QUANTILES, ids=repr)
def test_quantile_source(part, told):
    check_quantile_source(SeededRelease(part) if isinstance(part, PrivateQuantile) else part, **told)


@pytest.mark.parametrize(("part", "noiseless", "of_risk", "tolerance"), PROTECTIONS, ids=lambda part: repr(part)[:60])
def test_protection(part, noiseless, of_risk, tolerance):
    check_protection(part, noiseless=noiseless, risk=of_risk, tolerance=tolerance)


def test_correlated_noise():
    noiseless = privacy.DPFTRL(None, 1e-4, math.inf, noise_multiplier=0.0)
    check_protection(CORRELATED, noiseless=noiseless, sampler=sampling.MinSeparation(2))


def test_observer(tmp_path):
    check_observer(observers.History())
    check_observer(observers.JsonLines(tmp_path / "rounds.jsonl"))
    check_observer(observers.Progress())


# ------------------------------------------------------------------------------------------------------- parts of one's own


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


@dataclass(frozen=True)
class Doubling:
    linear = True

    def __call__(self, updates, weights, *, losses=None, state=None):
        return 2 * weights.to(updates) @ updates, state


def test_a_linear_aggregator_of_ones_own_is_used(ragged):
    check_aggregator(Doubling())
    plain, double = (
        eq.train(
            eq.models.Softmax(4, 3), ragged, eq.Algorithm(aggregator=part), rounds=1, clients_per_round=4, engine=engine
        ).params
        for part, engine in ((aggregators.WeightedMean(), "loop"), (Doubling(), "simulator"))
    )
    torch.testing.assert_close(double, 2 * plain)


class Meddling(observers.History):
    """Changes the solver behind the run's back."""

    def on_start(self, run):
        solvers.SGD.learning_rate = lambda self, round_index: 0.2


def test_check_observer_catches():
    kept = solvers.SGD.learning_rate
    try:
        with pytest.raises(LawBroken, match="watches"):
            check_observer(Meddling())
    finally:
        solvers.SGD.learning_rate = kept
