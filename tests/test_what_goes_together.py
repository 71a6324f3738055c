"""Every row of the table of what goes together (docs/methods.md): it runs, or is refused with its reason."""

import re

import pytest
import torch

import equipoise as eq
from equipoise import aggregators, personal, privacy, risk, solvers
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
REFUSED = {
    "SCAFFOLD, tail": (SCAFFOLD | {"risk": TAIL}, "cancels the weights"),
    "SCAFFOLD, tilted": (SCAFFOLD | {"risk": risk.Tilted(1.0)}, "cancels the weights"),
    "SCAFFOLD by epochs, DP": ({"solver": solvers.Scaffold(SGD), "privacy": NOISE}, "Count local work in steps"),
    "SCAFFOLD by epochs, secure": ({"solver": solvers.Scaffold(SGD), "privacy": SECURE}, "Count local work in steps"),
    "SCAFFOLD, FedNova": (SCAFFOLD | {"aggregator": aggregators.FedNova()}, "keeps its state|does not say"),
    "FedDyn, tail": (FEDDYN | {"risk": TAIL}, "integrates fixed weights"),
    "FedDyn, robust": (FEDDYN | MEDIAN, "h keeps the difference"),
    "FedDyn, DP": (FEDDYN | {"privacy": NOISE}, "add up in h"),
    "FedDyn, other server": (FEDDYN | {"server": eq.server_opt.Momentum()}, "server step of its own"),
    "FedNova, DP without a public length": (FEDNOVA | {"privacy": NOISE}, "tells how much data"),
    "FedNova, split": (FEDNOVA | {"personal": personal.FedPer("bias")}, "clients send other updates"),
    "FedNova, pFedMe": (FEDNOVA | {"personal": personal.PFedMe(2.0, 2)}, "clients send other updates"),
    "SCAFFOLD, split": (
        SCAFFOLD | {"personal": personal.FedPer("bias")},
        "clients send other updates|made for the shared model",
    ),
    "FedDyn, pFedMe": (FEDDYN | {"personal": personal.PFedMe(2.0, 2)}, "clients send other updates|steps of its own"),
    "GroupDRO, DP": (GROUPS | {"privacy": NOISE}, "depend on losses of other clients"),
    "median, secure": (MEDIAN | {"privacy": SECURE}, "reveals only the sum"),
    "median, DP": (MEDIAN | {"privacy": NOISE}, "no plain sum"),
    "centred clipping, secure": ({"aggregator": aggregators.CentredClipping(), "privacy": SECURE}, "reveals only the sum"),
    "iterated clipping, secure": (
        {"aggregator": aggregators.CentredClipping(0.1, 3), "privacy": SECURE},
        "reveals only the sum",
    ),
    "correlated noise, tail": (CORRELATED | {"risk": NOISY_TAIL}, "second release"),
    "correlated noise, robust": (CORRELATED | MEDIAN, "no plain sum"),
    "correlated noise, FedDyn": (CORRELATED | FEDDYN, "add up in h"),
    "correlated noise, random cohorts": (CORRELATED | {"sampler": eq.sampling.Uniform()}, "how far apart"),
    "FedBuff, tail": (BUFFER | {"risk": TAIL}, "cannot be ranked"),
    "FedBuff, DP": (BUFFER | {"privacy": NOISE}, "counts on random cohorts"),
    "FedBuff, correlated noise": (BUFFER | {"privacy": CORRELATED["privacy"]}, "Set apart"),
    "FedBuff, secure": (BUFFER | {"privacy": SECURE}, "how stale"),
    "NNM, secure": ({"aggregator": aggregators.NNM(aggregators.Median()), "privacy": SECURE}, "reveals only the sum"),
}


@pytest.mark.parametrize("parts", RUNS.values(), ids=RUNS)
def test_these_parts_run_together_in_both_engines(parts):
    algorithm, model = eq.Algorithm(**parts), eq.models.Softmax(4, 3).double()
    options = {"rounds": 2, "clients_per_round": 5, "progress": False}
    one, other = (eq.train(model, DATA, algorithm, engine=engine, **options) for engine in ("loop", "simulator"))
    torch.testing.assert_close(one.params, other.params, rtol=1e-6, atol=1e-6)
    assert not torch.equal(one.params, torch.zeros_like(one.params))
    if algorithm.personal is not None:
        torch.testing.assert_close(one.clients.personal_loss, other.clients.personal_loss, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("parts", "words"), REFUSED.values(), ids=REFUSED)
def test_these_parts_are_refused_together_with_the_reason(parts, words):
    with pytest.raises(IncompatibleParts, match=words):
        eq.Algorithm(**parts)


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
@pytest.mark.parametrize(("hidden", "words"), [(SECURE, "reveals only the sum"), (NOISE, "no plain sum")], ids=["sums", "DP"])
def test_rules_that_need_single_updates_are_refused_where_only_sums_are_seen(rule, hidden, words):
    with pytest.raises(IncompatibleParts, match=words):
        eq.Algorithm(aggregator=rule, privacy=hidden)


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
