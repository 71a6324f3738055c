"""Every row of the table of what goes together (docs/methods.md): it runs, or is refused with its reason."""

import re
from dataclasses import dataclass, replace

import pytest
import torch

import equipoise as eq
from equipoise import aggregators, compatibility, personal, privacy, risk, solvers
from equipoise.data.clients import FederatedData
from equipoise.errors import EquipoiseNotice, IncompatibleParts
from made_clients import make_clients

SGD = solvers.SGD(lr=0.1, batch_size=4)
STEPS = solvers.SGD(lr=0.1, batch_size=4, steps=3)
DATA = FederatedData(make_clients([3, 5, 8, 9, 12, 7], dtype=torch.float64), make_clients([6] * 6, seed=1, dtype=torch.float64),
                     make_clients([6] * 6, seed=2, dtype=torch.float64), classes=3)  # fmt: skip
NOISE = privacy.GaussianMechanism(clip=0.5, noise_multiplier=0.5, noise_seed=0)
SECURE = privacy.SecureAggregation()
TAIL = risk.Superquantile(0.5)
SECURE_TAIL = risk.Superquantile(0.5, quantile=privacy.SecureHistogram(3.0, 16))
NOISY_TAIL = risk.Superquantile(0.5, quantile=privacy.PrivateQuantile(3.0, 4))

FEDNOVA = {"solver": SGD, "aggregator": aggregators.FedNova()}
SCAFFOLD = {"solver": solvers.Scaffold(STEPS)}
FEDDYN = {"solver": solvers.FedDyn(0.5, SGD)}
SPLIT = {"solver": SGD, "personal": personal.FedPer("bias")}
PFEDME = {"solver": SGD, "personal": personal.PFedMe(2.0, 2)}
GROUPS = {"risk": risk.GroupDRO(0.1, lambda client: client[-1])}
MEDIAN = {"aggregator": aggregators.Median()}

FTRL = privacy.DPFTRL(None, 1e-4, 0.5, 0.5, decays=(0.5,), scales=(0.3,), noise_seed=0)
CORRELATED = {"sampler": eq.sampling.Full(), "privacy": FTRL}
BUFFER = {"sampler": eq.sampling.FedBuff(2)}

RUNS = {
    "FedNova, tail": FEDNOVA | {"risk": TAIL},
    "FedNova, tilted": FEDNOVA | {"risk": risk.Tilted(1.0)},
    "FedNova, QFair": FEDNOVA | {"risk": risk.QFair(1.0)},
    "FedNova, robust": FEDNOVA | {"aggregator": aggregators.FedNova(aggregators.Median())},
    "FedNova, DP": FEDNOVA | {"aggregator": aggregators.FedNova(steps=2.0), "privacy": NOISE},
    "FedNova, secure": FEDNOVA | {"privacy": SECURE},
    "FedNova, secure tail": FEDNOVA | {"privacy": SECURE, "risk": SECURE_TAIL, "weights": "uniform"},
    "SCAFFOLD": SCAFFOLD,
    "SCAFFOLD, robust": SCAFFOLD | MEDIAN,
    "SCAFFOLD, DP": SCAFFOLD | {"privacy": NOISE},
    "SCAFFOLD, secure": SCAFFOLD | {"privacy": SECURE},
    "FedDyn": FEDDYN,
    "FedDyn, secure": FEDDYN | {"privacy": SECURE},
    "split, tail": SPLIT | {"risk": TAIL},
    "split, robust": SPLIT | MEDIAN,
    "split, DP": SPLIT | {"privacy": NOISE},
    "split, secure": SPLIT | {"privacy": SECURE},
    "pFedMe, tail": PFEDME | {"risk": TAIL},
    "pFedMe, robust": PFEDME | MEDIAN,
    "pFedMe, DP": PFEDME | {"privacy": NOISE},
    "pFedMe, DP tail": PFEDME | {"privacy": NOISE, "risk": NOISY_TAIL},
    "pFedMe, secure": PFEDME | {"privacy": SECURE},
    "centred clipping of one fixed radius, secure": {"aggregator": aggregators.CentredClipping(0.1, 1), "privacy": SECURE},
    "GroupDRO": GROUPS,
    "GroupDRO, secure": {"risk": risk.GroupDRO(0.5, lambda client: str(int(client[-1]) % 2)), "privacy": SECURE},
    "robust, tail": MEDIAN | {"risk": TAIL},
    "correlated noise": CORRELATED,
    "correlated noise, SCAFFOLD": CORRELATED | SCAFFOLD,
    "correlated noise, FedNova": CORRELATED | {"solver": SGD, "aggregator": aggregators.FedNova(steps=2.0)},
    "correlated noise, split": CORRELATED | SPLIT,
    "correlated noise, pFedMe": CORRELATED | PFEDME,
    "FedBuff, robust": BUFFER | MEDIAN,
    "FedBuff, correlated noise": {"sampler": eq.sampling.FedBuff(2, apart=2), "privacy": CORRELATED["privacy"]},
    "FedBuff without factors, secure": {"sampler": eq.sampling.FedBuff(2, damped=False), "privacy": SECURE},
}
PLAIN = privacy.GaussianMechanism(1.0, 1.0)
KEPT = solvers.Adam(state="kept")
NODES = {"sampler": eq.sampling.NodePoisson()}
SUMS = privacy.DifferentialPrivacy(epsilon=5.0, delta=1e-3, clip=1.0, noise="distributed")
ONE_GROUP = risk.GroupDRO(0.5, lambda client: "a")
APART = {"sampler": eq.sampling.FedBuff(2, apart=2), "privacy": FTRL}


@dataclass(frozen=True)
class Unknown:
    """A risk that says nothing of how a client finds its weight."""

    def __call__(self, losses, base_weights, *, clients=None, state=None):
        return risk.RiskValue(losses.sum(), base_weights, state)


class OwnModels(personal.Ditto):
    """A method that does not say whether the server sees models."""

    sums_models = None


# Row of compatibility.toml → parts that it refuses.
REFUSED = {
    "equal-weights-by-weight": [{"sampler": eq.sampling.Proportional(), "weights": "uniform"}],
    "coins-of-nodes-in-the-open": [NODES, NODES | {"privacy": PLAIN}],
    "mixture-of-some-clients": [
        {"risk": measure, "sampler": sampler}
        for measure in (risk.WorstCase(), risk.Mixture((0.5, risk.Mean()), (0.5, risk.WorstCase())))
        for sampler in (None, eq.sampling.Uniform(), eq.sampling.Poisson(), eq.sampling.Availability())
    ],
    "fixed-weights": [
        each | {"risk": measure}
        for each in (SCAFFOLD, FEDDYN, {"solver": solvers.FedDane()}) for measure in (TAIL, risk.Tilted(1.0), risk.QFair(1.0))
    ],
    "one-update-of-weighed-clients": [{"aggregator": aggregators.Krum(1), "risk": risk.Tilted(1.0)}],
    "one-update-of-a-large-loss": [{"aggregator": aggregators.KLoss(1), "risk": TAIL}],
    "length-unknown": [{"solver": solvers.MAML(), "aggregator": aggregators.FedNova()}],
    "length-by-name": [{"solver": solvers.SGD(rates={"w": 0.5}), "aggregator": aggregators.FedNova()}],
    "length-of-kept-state": [
        {"solver": solver, "aggregator": aggregators.FedNova()} for solver in (KEPT, solvers.Scaffold(STEPS), solvers.FedDyn())
    ],
    "length-of-other-updates": [
        FEDNOVA | {"personal": method} for method in (personal.FedPer("bias"), personal.PFedMe(2.0, 2), personal.Mapper())
    ],
    "length-tells-sizes": [FEDNOVA | {"privacy": PLAIN}],
    "correction-of-other-updates": [SCAFFOLD | {"personal": personal.FedPer("bias")}, FEDDYN | {"personal": personal.Mapper()}],
    "sum-of-all-updates-by-another-mean": [FEDDYN | MEDIAN],
    "sum-of-all-updates-with-noise": [FEDDYN | {"privacy": NOISE}, CORRELATED | FEDDYN],
    "sum-of-all-updates-with-another-step": [FEDDYN | {"server": s} for s in (eq.server_opt.Adam(), eq.server_opt.SGD(0.5))],
    "correction-by-epochs": [{"solver": solvers.Scaffold(SGD), "privacy": hidden} for hidden in (NOISE, SECURE)],
    "buffer-weights-alone": [BUFFER | {"risk": risk.Tilted(1.0)}],
    "buffer-weights-by-losses": [BUFFER | {"risk": TAIL}],
    "buffer-aggregator-by-losses": [BUFFER | {"aggregator": aggregators.KLoss(1)}],
    "buffer-damped-sums": [BUFFER | {"privacy": SECURE}],
    "buffer-of-few": [{"sampler": eq.sampling.FedBuff(2, damped=False), "privacy": privacy.SecureAggregation(fewest=3)}],
    "buffer-of-random-cohorts": [BUFFER | {"privacy": NOISE}],
    "buffer-at-any-time": [BUFFER | {"privacy": FTRL}],
    "buffer-noise-of-weights": [{"sampler": eq.sampling.FedBuff(2, apart=2, loss_bound=3.0), "privacy": FTRL}],
    "buffer-clock-tells-sizes": [{"sampler": eq.sampling.FedBuff(2, apart=2, per_step=1.0), "privacy": FTRL}],
    "buffer-personal": [BUFFER | {"personal": personal.Ditto()}],
    "buffer-prepared": [BUFFER | {"solver": solver} for solver in (KEPT, solvers.AdaptiveProx(), solvers.Scaffold())],
    "buffer-stragglers": [BUFFER | {"solver": solvers.SGD(epochs=2, straggler_share=0.5)}],
    "buffer-around-the-total": [BUFFER | {"aggregator": aggregators.CentredClipping()}],
    "buffer-lengths": [BUFFER | {"aggregator": aggregators.FedNova()}],
    "distance-unknown": [
        {"sampler": s, "privacy": FTRL} for s in (None, eq.sampling.Uniform(), eq.sampling.Poisson())
    ],
    "second-release": [CORRELATED | {"risk": measure} for measure in (TAIL, NOISY_TAIL, risk.Tilted(1.0))],
    "noise-and-examples": [{"weights": "examples", "privacy": hidden} for hidden in (PLAIN, SUMS)],
    "noise-and-no-sum": [{"aggregator": rule, "privacy": PLAIN} for rule in (aggregators.Median(), aggregators.NormClip(1.0))],
    "sums-and-single-updates": [
        {"aggregator": rule, "privacy": SECURE}
        for rule in (aggregators.Median(), aggregators.Krum(1), aggregators.NormClip(), aggregators.CentredClipping(0.1, 3),
                     aggregators.NNM(aggregators.Median()))
    ],
    "own-risk-without-a-form": [{"risk": Unknown(), "privacy": hidden} for hidden in (PLAIN, SECURE)],
    "quantile-of-single-losses": [
        {"risk": measure, "privacy": hidden}
        for hidden in (PLAIN, SECURE)
        for measure in (TAIL, risk.Superquantile(0.5, rule="threshold"), risk.Superquantile(0.5, smoothing="kl", nu=0.1),
                        risk.Superquantile(0.5, at_least=3))
    ],
    "quantile-without-noise": [{"risk": risk.Superquantile(0.5, quantile=privacy.SecureSums()), "privacy": PLAIN}],
    "quantile-kept-for-rounds": [
        {"risk": risk.Superquantile(0.5, quantile=privacy.PrivateQuantile(2.0, 16), eta_every=3), "privacy": PLAIN},
        {"risk": risk.Superquantile(0.5, quantile=privacy.SecureHistogram(2.0, 16), eta_every=3), "privacy": SECURE},
    ],
    "quantile-with-a-budget": [{"risk": NOISY_TAIL, "privacy": SECURE}],
    "tracked-risk": [{"risk": risk.Tilted(1.0, tracked=True), "privacy": hidden} for hidden in (PLAIN, SECURE)],
    "loss-without-bound": [{"risk": risk.QFair(1.0), "privacy": hidden} for hidden in (PLAIN, SECURE)],
    "losses-of-others": [
        {"risk": risk.WorstCase(), "sampler": eq.sampling.Full(), "privacy": SECURE},
        {"risk": risk.Mixture((0.5, risk.Mean()), (0.5, NOISY_TAIL)), "privacy": PLAIN},
        {"risk": risk.HierarchicalTilt({"client-0": "a"}), "privacy": PLAIN},
        {"risk": ONE_GROUP, "privacy": PLAIN},
    ],
    "looking-before-rounds": [
        {"solver": solver, "privacy": hidden}
        for hidden in (PLAIN, SECURE) for solver in (solvers.AdaptiveProx(), solvers.FedDane())
    ],
    "own-models-seen": [
        parts | {"privacy": hidden}
        for hidden in (PLAIN, SECURE)
        for parts in ({"personal": personal.L2SGD()}, {"personal": personal.Mocha(), "sampler": eq.sampling.Full()},
                      {"personal": OwnModels()})
    ],
    "noise-and-stragglers": [
        {"solver": solver, "privacy": PLAIN}
        for solver in (
            solvers.SGD(epochs=3, straggler_share=0.5), solvers.SGD(straggler_share=0.5, stragglers="drop"),
            solvers.AdaDPS({"weight": torch.ones(1)}, solvers.SGD(epochs=2, straggler_share=0.5)),
        )
    ],
    "cohorts-unknown-to-the-accountant": [
        {"sampler": sampler, "privacy": PLAIN} for sampler in (eq.sampling.Proportional(), eq.sampling.Availability())
    ],
    "smaller-cohorts": [{"sampler": eq.sampling.Uniform(share=0.5), "privacy": PLAIN}],
    "histogram-and-examples": [{"risk": SECURE_TAIL, "privacy": SECURE, "weights": "examples"}],
    "budget-that-is-missing": [{"risk": NOISY_TAIL}, {"risk": risk.Mixture((0.5, risk.Mean()), (0.5, NOISY_TAIL))}],
}  # fmt: skip
ELSEWHERE = ("statistics", "-on-nodes", "signed-")  # rows that need a model or a network: test_carried, and below


@pytest.mark.parametrize("parts", RUNS.values(), ids=RUNS)
def test_these_parts_run_together_in_both_engines(parts):
    algorithm, model = eq.Algorithm(**parts), eq.models.Softmax(4, 3).double()
    options = {"rounds": 2, "clients_per_round": 5, "progress": False}
    one, other = (eq.train(model, DATA, algorithm, engine=engine, **options) for engine in ("loop", "simulator"))
    torch.testing.assert_close(one.params, other.params, rtol=1e-6, atol=1e-6)
    assert not torch.equal(one.params, torch.zeros_like(one.params))
    if algorithm.personal is not None:
        torch.testing.assert_close(one.clients.personal_loss, other.clients.personal_loss, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rule", REFUSED)
def test_a_row_of_the_table_refuses_its_parts_and_nothing_before_it_does(rule):
    for parts in REFUSED[rule]:
        with pytest.raises(IncompatibleParts) as refusal:
            eq.Algorithm(**parts)
        assert refusal.value.rule == rule, parts
        assert refusal.value.code == "EQ201"


ON_NODES = {
    "seeded-noise-on-nodes": (replace(SUMS, noise_seed=0), {}, {}),
    "signed-single-updates": (None, {}, {"signed": True}),
    "sums-of-other-updates-on-nodes": (SECURE, {"personal": personal.FedPer("bias")}, {}),
    "sums-by-unknown-length-on-nodes": (
        SECURE, {"aggregator": aggregators.FedNova(aggregators.NormClip(1.0))}, {},
    ),
    "sums-around-a-centre-on-nodes": (SECURE, {"aggregator": aggregators.CentredClipping(0.1, 1)}, {}),
    "sums-over-groups-on-nodes": (SECURE, {"risk": ONE_GROUP}, {}),
    "sums-of-the-tail-on-nodes": (SECURE, {"risk": risk.Superquantile(0.5, quantile=privacy.SecureSums())}, {}),
    "small-poisson-cohorts-on-nodes": (SUMS, {"sampler": eq.sampling.Poisson()}, {}),
    "both-adapters-with-noise-on-nodes": (PLAIN, {}, {"trains both adapters": True, "model": "Net"}),
}  # fmt: skip


@pytest.mark.parametrize("rule", ON_NODES)
def test_a_row_about_nodes_holds_over_a_network_alone(rule):
    hidden, parts, around = ON_NODES[rule]
    algorithm = eq.Algorithm(privacy=hidden, **parts)
    with pytest.raises(IncompatibleParts) as refusal:
        compatibility.refuse(algorithm, network=True, **around)
    assert refusal.value.rule == rule


def test_every_row_has_an_example_and_names_facts_that_there_are():
    named = {fact.removeprefix("no ") for row in compatibility.rows() for fact in row.facts}
    around = {"network", "signed", "trains both adapters", "statistics", "statistics are sent"}
    assert named == set(compatibility.facts_of(eq.Algorithm())) & named | around
    rules = {row.rule for row in compatibility.rows()}
    assert {rule for rule in rules if not any(part in rule for part in ELSEWHERE)} == set(REFUSED)
    assert {rule for rule in rules if rule.endswith("-on-nodes") or rule.startswith("signed-")} == set(ON_NODES)


SINGLE = [
    aggregators.NNM(aggregators.WeightedMean()),
    aggregators.Bucketing(aggregators.Median()),
    aggregators.Bulyan(1),
    aggregators.MeaMed(),
    aggregators.DnC(1),
    aggregators.FedNova(aggregators.MeaMed(), steps=2.0),
    aggregators.CentredClipping(None, 1),
]


@pytest.mark.parametrize("rule", SINGLE, ids=repr)
@pytest.mark.parametrize(
    ("hidden", "row"), [(SECURE, "sums-and-single-updates"), (NOISE, "noise-and-no-sum")], ids=["sums", "DP"]
)
def test_rules_that_need_single_updates_are_refused_where_only_sums_are_seen(rule, hidden, row):
    with pytest.raises(IncompatibleParts) as refusal:
        eq.Algorithm(aggregator=rule, privacy=hidden)
    assert refusal.value.rule == row


@pytest.mark.parametrize("tail", [risk.Mean(), SECURE_TAIL], ids=["mean", "tail"])
def test_fednova_by_secure_sums_is_that_of_the_open_run(tail):
    # π u/a, π a and π are summed; clients have 1 to 3 batches of 4.
    model, runs = eq.models.Softmax(4, 3).double(), []
    for protection in (None, privacy.SecureAggregation(step=2.0**-30)):
        algorithm = eq.Algorithm(**FEDNOVA | {"risk": tail, "privacy": protection, "weights": "uniform"})
        runs.append(eq.train(model, DATA, algorithm, rounds=3, clients_per_round=5, progress=False).params)
    torch.testing.assert_close(*runs, rtol=1e-6, atol=1e-7)


def test_group_dro_by_secure_sums_is_that_of_the_open_run():
    # Two groups of three of the six clients, everyone: the sums tell R_g, which is all that the risk needs.
    groups = risk.GroupDRO(0.5, lambda client: str(int(client[-1]) % 2))
    model, runs = eq.models.Softmax(4, 3).double(), []
    for protection in (None, privacy.SecureAggregation(step=2.0**-30)):
        algorithm = eq.Algorithm(risk=groups, solver=SGD, privacy=protection, sampler=eq.sampling.Full())
        runs.append(eq.train(model, DATA, algorithm, rounds=3, progress=False).params)
    torch.testing.assert_close(*runs, rtol=1e-6, atol=1e-7)


def test_clipping_around_a_public_point_is_found_by_secure_sums():
    model, runs = eq.models.Softmax(4, 3).double(), []
    for protection in (None, privacy.SecureAggregation(step=2.0**-30)):
        algorithm = eq.Algorithm(solver=SGD, aggregator=aggregators.CentredClipping(0.1, 1), privacy=protection)
        runs.append(eq.train(model, DATA, algorithm, rounds=4, clients_per_round=4, progress=False).params)
    torch.testing.assert_close(*runs, rtol=1e-6, atol=1e-7)


def test_a_group_that_is_too_small_for_a_sum_takes_no_part():
    alone = risk.GroupDRO(0.5, lambda client: "alone" if client == "client-0" else "others")
    algorithm = eq.Algorithm(risk=alone, solver=SGD, privacy=SECURE, sampler=eq.sampling.Full())
    result = eq.train(eq.models.Softmax(4, 3).double(), DATA, algorithm, rounds=1, progress=False)
    assert result.history.rounds[0].trained == 5


UNBOUNDED = [
    risk.Tilted(1.0), risk.QFair(1.0), risk.GroupDRO(0.1, lambda client: client),
    risk.HierarchicalTilt(lambda client: client, 1.0),
    risk.Mixture((0.5, risk.Mean()), (0.5, risk.Tilted(1.0))),
]  # fmt: skip
ROBUST = [
    aggregators.Median(),
    aggregators.NNM(aggregators.TrimmedMean(0.2)),
    aggregators.FedNova(aggregators.GeometricMedian()),
]


@pytest.mark.parametrize("rule", ROBUST, ids=lambda rule: type(rule).__name__)
@pytest.mark.parametrize("unbounded", UNBOUNDED, ids=lambda each: type(each).__name__)
def test_a_risk_that_gives_liars_all_weight_warns_beside_a_robust_rule(unbounded, rule):
    with pytest.warns(EquipoiseNotice, match=r"nearly all of the weight.*Superquantile"):
        eq.Algorithm(risk=unbounded, aggregator=rule)


def test_the_warning_does_not_say_which_lie_pays():
    # With a negative tilt the weight goes to small losses.
    with pytest.warns(EquipoiseNotice, match="a client that lies about its loss nearly all") as said:
        eq.Algorithm(risk=risk.Tilted(-2.0), aggregator=aggregators.Median())
    assert "large loss" not in str(said[0].message)


@pytest.mark.filterwarnings("error")
def test_bounded_risks_and_plain_means_do_not_warn():
    eq.Algorithm(risk=TAIL, aggregator=aggregators.Median())
    eq.Algorithm(risk=risk.Mean(), aggregator=aggregators.Median())
    eq.Algorithm(risk=risk.Tilted(1.0))
    eq.Algorithm(risk=risk.Tilted(1.0), aggregator=aggregators.NormClip(1.0))


def test_what_the_warning_says_is_true():
    # One of ten clients lies: a loss of 100 among losses of 1. Superquantile(½) doubles its share of 1/10 at most, so that a
    # median (half of the weight) holds; tilted by 1 it has nearly all of it.
    losses, base = torch.tensor([100.0] + [1.0] * 9), torch.full((10,), 0.1)
    tail, tilted = (each(losses, base).weights for each in (TAIL, risk.Tilted(1.0)))
    assert float(tail[0] / tail.sum()) == pytest.approx(0.2)
    assert float(tilted[0] / tilted.sum()) > 0.999


class OwnRisk:
    """Weights by rank: one's own risk, of which the library knows nothing."""

    def __call__(self, losses, base):
        return torch.where(losses >= losses.median(), base, 0.0)


HIDING = [privacy.SecureAggregation, lambda **given: privacy.DifferentialPrivacy(5.0, 1e-3, 1.0, **given)]


@pytest.mark.parametrize("refused", [OwnRisk(), risk.Mixture((0.5, risk.Mean()), (0.5, TAIL))])
@pytest.mark.parametrize("hide", HIDING)
def test_the_cure_for_a_risk_that_privacy_refuses_works_as_it_is_written(refused, hide):
    with pytest.raises(IncompatibleParts) as failure:
        eq.Algorithm(risk=refused, privacy=hide())
    written = re.findall(r"risk\.\w+\((?:[^()]|\([^()]*\))*\)", failure.value.fix)
    assert [text.partition("(")[0] for text in written] == ["risk.Mean", "risk.Superquantile", "risk.Tilted", "risk.QFair"]
    bound = {"loss_bound": 2.0} if "give the privacy part a loss_bound" in failure.value.fix else {}
    for text, given in zip(written, ({}, {}, bound, bound), strict=True):
        made = eval(text.replace("…", "2.0"), {"risk": risk, "privacy": privacy})  # noqa: S307 — the library's own words
        eq.Algorithm(risk=made, privacy=hide(**given))
