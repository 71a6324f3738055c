"""What is released and what it costs: noise, empty batches, ε, Poisson batches, public examples, resuming, refusals."""

import io
import itertools
import math

import numpy as np
import pytest
import torch
from torch import nn

from equipoise.errors import IncompatibleParts, InvalidParameter
from equipoise.models import Logistic
from equipoise.optim import (
    DP2,
    DPSGD,
    PDADPMD,
    AdaDPS,
    DPAdaGrad,
    DPAdam,
    DPRMSProp,
    DPRPub,
    cosine_share,
    inverse_tfidf,
    poisson_batches,
    set_aside,
    token_frequency,
)

D = 20_000
PRIVACY = {"clip": 0.5, "noise_multiplier": 1.5, "sample_rate": 0.01, "expected_batch_size": 10}
SEEDED = PRIVACY | {"noise_seed": 0}
STD = 1.5 * 0.5 / 10  # of the noise in the mean


def empty(features=D):
    return torch.zeros(0, features), torch.zeros(0, dtype=torch.int64)


def public(features=D, n=4):
    source = torch.Generator().manual_seed(9)
    return torch.rand(n, features, generator=source), torch.randint(0, 2, (n,), generator=source)


def moved(make, features=D, steps=1):
    """How the weights moved in the last of some steps on empty batches."""
    net = Logistic(features, bias=False)
    made = make(net)
    for _ in range(steps):
        before = net.weight.detach().clone()
        made.step(*empty(features))
    return net.weight.detach() - before


def assert_normal(sample, std):
    """Mean 0, standard deviation and kurtosis of N(0, std²), each within five standard errors."""
    z, n = sample.double() / std, len(sample)
    assert abs(float(z.mean())) < 5 / math.sqrt(n)
    assert abs(float(z.square().mean()) - 1) < 5 * math.sqrt(2 / n)
    assert abs(float(z.pow(4).mean()) - 3) < 5 * math.sqrt(96 / n)


# ------------------------------------------------------------------------------------------------------------------- noise


def test_an_empty_batch_releases_noise_of_the_stated_size():
    assert_normal(moved(lambda net: DPSGD(net, lr=2.0, **SEEDED)), 2.0 * STD)


def test_noise_is_on_the_sum_with_the_clip_of_the_phase():
    def make(net):
        return DP2(net, lr=1.0, lr_adaptive=3.0, delay=2, clip_adaptive=4.0, **SEEDED)

    assert_normal(moved(make, steps=2), STD)
    assert_normal(moved(make, steps=3), 3.0 * 1.5 * 4.0 / 10)


def test_adadps_adds_noise_after_preconditioning_and_the_baselines_before():
    side = {"weight": torch.rand(D) + 0.01}
    assert_normal(moved(lambda net: AdaDPS(net, lr=1.0, side_information=side, **SEEDED)), STD)
    change = moved(lambda net: DPRPub(net, lr=1.0, public=public(), beta=0.0, eps=1e-3, **SEEDED))
    x, y = public()
    gradient = ((0.5 - y.float())[:, None] * x).mean(0)
    assert_normal(change * (gradient.abs() + 1e-3), STD)


def test_noise_first_divides_the_noise_by_the_preconditioner():
    made = []

    def make(net):
        made.append(DP2(net, lr=1.0, delay=1, beta=0.0, eps=1e-3, variant="noise_first", **SEEDED))
        return made[0]

    change = moved(make, steps=2)
    assert_normal(change * (made[0].memory["second_moment"].sqrt() + 1e-3), STD)


def test_noise_is_fresh_at_every_step_and_a_function_of_the_seed():
    def path(seed, steps=3):
        net, found = Logistic(50, bias=False), []
        made = DPSGD(net, lr=1.0, **{**PRIVACY, "noise_seed": seed})
        for _ in range(steps):
            made.step(*empty(50))
            found.append(net.weight.detach().clone())
        return torch.stack(found).diff(dim=0, prepend=torch.zeros(1, 50))

    first = path(0)
    torch.testing.assert_close(first, path(0), rtol=0, atol=0)
    everything = torch.cat([first, path(1), path(None), path(None)])
    correlations = torch.corrcoef(everything) - torch.eye(len(everything))
    assert correlations.abs().max() < 0.8


def test_two_releases_have_independent_noise():
    net = Logistic(D, bias=False)
    made = DP2(net, lr=1.0, delay=2, variant="extra_query", clip_adaptive=0.5, **SEEDED)
    made.step(*empty())
    made.step(*empty())
    before = net.weight.detach().clone()
    assert made.memory["count"] == 1
    raw = made.memory["sum"]
    made.step(*empty())
    assert_normal(raw, STD)
    net2 = Logistic(D, bias=False)
    again = DP2(net2, lr=1.0, delay=2, variant="extra_query", clip_adaptive=0.5, **SEEDED)
    again.step(*empty())
    start = net2.weight.detach().clone()
    again.step(*empty())
    step = net2.weight.detach() - start
    torch.testing.assert_close(net2.weight.detach(), before, rtol=0, atol=0)
    assert abs(float(torch.corrcoef(torch.stack([raw, step]))[0, 1])) < 5 / math.sqrt(D)


# -------------------------------------------------------------------------------------------------------------- what it costs


def by_hand(steps_of_multipliers, delta, rate=0.01, accountant="rdp"):
    import dp_accounting as dp

    made = dp.rdp.RdpAccountant() if accountant == "rdp" else dp.pld.PLDAccountant()
    for multiplier, steps in steps_of_multipliers:
        made.compose(dp.PoissonSampledDpEvent(rate, dp.GaussianDpEvent(multiplier)), steps)
    return made.get_epsilon(delta)


@pytest.mark.parametrize("method", ["rdp", "pld"])
def test_epsilon_is_that_of_as_many_sampled_gaussians_as_steps(method):
    net = Logistic(3)
    made = DPAdam(net, lr=0.1, **PRIVACY)
    assert made.epsilon(1e-5, method=method) == 0
    for x, y in made.batches(torch.randn(100, 3), torch.randint(0, 2, (100,)), steps=40):
        made.step(x, y)
    assert made.epsilon(1e-5, method=method) == pytest.approx(by_hand([(1.5, 40)], 1e-5, accountant=method), rel=1e-3)
    made.noise_multiplier = 3.0  # what was released stays released with the noise it had
    made.step(*empty(3))
    wanted = by_hand([(1.5, 40), (3.0, 1)], 1e-5, accountant=method)
    assert made.epsilon(1e-5, method=method) == pytest.approx(wanted, rel=1e-3)


def test_two_releases_about_one_batch_are_one_event():
    made = DP2(Logistic(3), lr=0.1, delay=4, variant="extra_query", **PRIVACY)
    for _ in range(20):
        made.step(*empty(3))
    joint = by_hand([(1.5, 5), (1.5 / math.sqrt(2), 15)], 1e-5)
    assert made.epsilon(1e-5, method="rdp") == pytest.approx(joint, rel=1e-6)
    assert joint > by_hand([(1.5, 35)], 1e-5) * 1.05  # as two events it would look cheaper than it is


@pytest.mark.parametrize("variant", ["delayed", "noise_first"])
def test_dp2_costs_as_much_as_dp_sgd(variant):
    made = DP2(Logistic(3), lr=0.1, delay=4, variant=variant, **PRIVACY)
    for _ in range(20):
        made.step(*empty(3))
    assert made.epsilon(1e-5, method="rdp") == pytest.approx(by_hand([(1.5, 20)], 1e-5), rel=1e-6)


def test_published_budgets():
    """Thesis: the toy of Figure 6.4 has ε = 4.13 at δ = 1e-3; Figure 6.6 has 2.8 at 4e-5 on IMDB."""
    toy = DPSGD(Logistic(1), lr=1.0, **{**PRIVACY, "noise_multiplier": 0.7, "sample_rate": 8 / 1000})
    toy.spent = {(8 / 1000, (0.7,)): 2250}
    assert toy.epsilon(1e-3, method="rdp") == pytest.approx(4.13, abs=0.005)
    toy.spent = {(64 / 25_000, (1.0,)): 39_000}
    assert toy.epsilon(4e-5, method="rdp") == pytest.approx(2.8, abs=0.05)


def test_without_noise_there_is_no_privacy():
    made = DPSGD(Logistic(3), lr=0.1, clip=math.inf, noise_multiplier=0.0, sample_rate=0.1, expected_batch_size=2)
    made.step(*empty(3))
    assert made.epsilon(1e-5) == math.inf
    for delta in (0.0, 1.0, -1, "small"):
        with pytest.raises(InvalidParameter, match="delta"):
            made.epsilon(delta)


# ------------------------------------------------------------------------------------------------------------------- batches


def test_poisson_batches_hold_each_example_with_its_own_coin():
    x = torch.arange(30)
    batches = [rows for rows, _ in poisson_batches(x, x, sample_rate=0.1, steps=4000, seed=3)]
    sizes = np.array([len(rows) for rows in batches])
    assert (sizes == 0).mean() == pytest.approx(0.9**30, abs=5 * math.sqrt(0.042 / 4000))
    assert sizes.mean() == pytest.approx(3.0, abs=5 * math.sqrt(2.7 / 4000))
    assert sizes.var() == pytest.approx(2.7, rel=0.15)
    inside = torch.stack([torch.isin(x, rows) for rows in batches]).double()
    assert inside.sum(1).tolist() == sizes.tolist()  # no example twice
    assert (inside.mean(0) - 0.1).abs().max() < 5 * math.sqrt(0.09 / 4000)
    assert (torch.corrcoef(inside.t()) - torch.eye(30)).abs().max() < 6 / math.sqrt(4000)
    assert np.corrcoef(sizes[1:], sizes[:-1])[0, 1] == pytest.approx(0, abs=5 / math.sqrt(4000))


def test_batches_are_a_function_of_seed_and_step():
    x, y = torch.randn(50, 2), torch.arange(50)

    def rows(**options):
        return [batch[1].tolist() for batch in poisson_batches(x, y, sample_rate=0.2, **options)]

    whole = rows(steps=6, seed=1)
    assert rows(steps=2, seed=1, start=4) == whole[4:]
    assert rows(steps=6, seed=2) != whole
    assert rows(steps=6) != rows(steps=6)
    for (inputs, targets), positions in zip(poisson_batches(x, y, sample_rate=0.2, steps=6, seed=1), whole, strict=True):
        assert torch.equal(inputs, x[positions])
        assert targets.tolist() == positions


def test_the_optimisers_batches_follow_its_rate():
    made = DPSGD(Logistic(2), lr=1.0, **{**PRIVACY, "sample_rate": 0.05})
    sizes = [len(x) for x, _ in made.batches(torch.randn(400, 2), torch.zeros(400, dtype=torch.int64), steps=300)]
    assert np.mean(sizes) == pytest.approx(20, abs=5 * math.sqrt(19 / 300))


def test_batches_go_on_where_the_steps_stand():
    x, y = torch.randn(50, 2), torch.zeros(50, dtype=torch.int64)
    made = DPSGD(Logistic(2), lr=1.0, **{**SEEDED, "sample_rate": 0.2})
    whole = [inputs for inputs, _ in made.batches(x, y, steps=5)]  # drawn, not stepped on
    for inputs, targets in made.batches(x, y, steps=3):
        made.step(inputs, targets)
    rest = [inputs for inputs, _ in made.batches(x, y, steps=2)]
    assert all(torch.equal(one, other) for one, other in zip(rest, whole[3:], strict=True))
    assert not torch.equal(whole[0], rest[0])


def test_public_examples_leave_the_private_set():
    x, y = torch.arange(100).unsqueeze(1), torch.arange(100)
    (shown, shown_y), (hidden, hidden_y) = set_aside(x, y, examples=13, seed=0)
    assert len(shown) == 13
    assert sorted(shown_y.tolist() + hidden_y.tolist()) == list(range(100))
    assert torch.equal(shown[:, 0], shown_y)
    assert torch.equal(hidden[:, 0], hidden_y)
    assert set_aside(x, y, examples=13, seed=1)[0][1].tolist() != shown_y.tolist()


def test_side_information_by_hand():
    counts = torch.tensor([[2, 1, 0, 1], [4, 0, 0, 0], [3, 0, 0, 1]])  # means 3, 1/3, 0, 2/3
    assert token_frequency(counts, floor=0.12).tolist() == pytest.approx([1.0, 0.12, 0.12, 2 / 9])
    score = [0.0, 0.25 / 3 * math.log(3), 0.0, (0.25 + 0.25) / 3 * math.log(1.5)]
    most = max(score)
    wanted = [1 / max(s / most, 0.05) for s in score]
    found = inverse_tfidf(counts, floor=0.05)
    assert found.tolist() == pytest.approx(wanted)
    assert found.argmin() == np.argmax(score)  # inverse: what matters most is divided by least
    for make in (token_frequency, inverse_tfidf):
        for bad in (torch.zeros(3, 2), torch.ones(3), -torch.ones(2, 2), torch.full((2, 2), math.nan)):
            with pytest.raises(InvalidParameter, match="x must hold"):
                make(bad)
        with pytest.raises(InvalidParameter, match="floor"):
            make(torch.eye(2), floor=0.0)


# ------------------------------------------------------------------------------------------------------------------ resuming

METHODS = {
    "DPSGD": lambda net, **o: DPSGD(net, lr=0.5, **o),
    "DPAdam": lambda net, **o: DPAdam(net, lr=0.1, **o),
    "DPRMSProp": lambda net, **o: DPRMSProp(net, lr=0.1, **o),
    "DPAdaGrad": lambda net, **o: DPAdaGrad(net, lr=0.1, **o),
    "AdaDPS": lambda net, **o: AdaDPS(net, lr=0.5, public=public(4), rule="adam", public_batch_size=2, **o),
    "AdaDPS, side": lambda net, **o: AdaDPS(net, lr=0.5, side_information={"weight": torch.full((4,), 0.3)}, **o),
    "DPRPub": lambda net, **o: DPRPub(net, lr=0.1, public=public(4), public_batch_size=1, **o),
    "PDADPMD": lambda net, **o: PDADPMD(net, lr=0.1, public=public(4), private_share=cosine_share(11), **o),
    "DP2": lambda net, **o: DP2(net, lr=0.1, delay=2, delay_adaptive=3, rule="yogi", **o),
    "DP2, extra": lambda net, **o: DP2(net, lr=0.1, delay=3, variant="extra_query", **o),
}


@pytest.mark.parametrize("name", METHODS)
def test_nothing_but_the_batches_knows_how_many_examples_there_are(name):
    """ε speaks of one example more or less: a default made of N would tell whether it is there."""
    options = {key: value for key, value in PRIVACY.items() if key != "expected_batch_size"}
    with pytest.raises(TypeError, match="expected_batch_size"):
        METHODS[name](Logistic(4), **options)
    with pytest.raises(InvalidParameter, match="expected_batch_size"):
        METHODS[name](Logistic(4), expected_batch_size=None, **options)

    def after(examples):
        net = Logistic(4)
        made = METHODS[name](net, **SEEDED)
        for _ in made.batches(torch.randn(examples, 4), torch.zeros(examples, dtype=torch.int64), steps=3):
            made.step(*empty(4))  # no example is in a batch: all that is released is noise
        return torch.cat([parameter.detach().flatten() for parameter in net.parameters()]), made.state_dict()

    (few, state), (more, later) = after(300), after(301)
    assert torch.equal(few, more)
    assert float(few.abs().max()) > 0
    assert repr(state) == repr(later)


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("seed", [5])
def test_a_resumed_run_ends_where_the_whole_one_does(name, seed):
    source = torch.Generator().manual_seed(2)
    x, y = torch.randn(60, 4, generator=source), torch.randint(0, 2, (60,), generator=source)
    options = {"clip": 0.5, "noise_multiplier": 1.0, "sample_rate": 0.1, "expected_batch_size": 6.0}

    def run(net, made, steps):
        for batch in made.batches(x, y, steps=steps):
            made.step(*batch)

    first = Logistic(4)
    made = METHODS[name](first, noise_seed=seed, **options)
    run(first, made, 4)
    file = io.BytesIO()
    torch.save({"net": first.state_dict(), "optimizer": made.state_dict()}, file)
    run(first, made, 7)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    second = Logistic(4)
    second.load_state_dict(saved["net"])
    resumed = METHODS[name](second, noise_seed=99, **{**options, "expected_batch_size": 7.0})
    resumed.load_state_dict(saved["optimizer"])
    run(second, resumed, 7)
    for one, other in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(one, other)
    assert (resumed.steps, resumed.spent) == (11, made.spent)
    assert resumed.expected_batch_size == 6.0


def test_a_state_is_a_copy_and_a_strange_one_is_refused():
    made = DPAdam(Logistic(3), lr=0.1, **PRIVACY)
    made.step(*empty(3))
    state = made.state_dict()
    kept = state["memory"]["mean"].clone()
    made.step(*empty(3))
    assert torch.equal(state["memory"]["mean"], kept)
    assert state["steps"] == 1
    with pytest.raises(InvalidParameter, match="must be of DPSGD, but is 'DPAdam'"):
        DPSGD(Logistic(3), lr=0.1, **PRIVACY).load_state_dict(state)
    with pytest.raises(InvalidParameter, match="memory of shapes"):
        DPAdam(Logistic(4), lr=0.1, **PRIVACY).load_state_dict(state)
    with pytest.raises(InvalidParameter, match="without generators"):
        made.load_state_dict({name: value for name, value in state.items() if name != "generators"})
    informed = AdaDPS(Logistic(3), lr=0.1, public=public(3), **PRIVACY).state_dict()
    with pytest.raises(InvalidParameter, match="generators"):
        AdaDPS(Logistic(3), lr=0.1, side_information={}, **PRIVACY).load_state_dict(informed)


# ------------------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        (DPSGD, {"lr": 0.0}, "lr must be a positive number"),
        (DPSGD, {"clip": 0.0}, "clip must be a positive number"),
        (DPSGD, {"clip": math.nan}, "clip must be a positive number"),
        (DPSGD, {"clip": math.inf}, "clip must be finite where noise is added"),
        (DPSGD, {"noise_multiplier": -1.0}, "noise_multiplier must be a number"),
        (DPSGD, {"noise_multiplier": math.inf}, "noise_multiplier must be a number"),
        (DPSGD, {"sample_rate": 0.0}, r"sample_rate must lie in \(0, 1\]"),
        (DPSGD, {"sample_rate": 64}, "sample_rate"),
        (DPSGD, {"expected_batch_size": 0}, "expected_batch_size"),
        (DPSGD, {"noise_seed": 1.5}, "noise_seed must be a whole number"),
        (DPSGD, {"loss": 3}, "loss must be a function"),
        (DPAdam, {"betas": (0.9, 1.0)}, "betas must be two numbers"),
        (DPAdam, {"eps": 0.0}, "eps must be a positive number"),
        (DPRMSProp, {"beta": 1.0}, "beta must lie in"),
        (DPAdaGrad, {"eps": -1.0}, "eps must be a positive number"),
        (DP2, {"delay": 0}, "delay must be a whole number"),
        (DP2, {"delay": 2, "delay_adaptive": 1.5}, "delay_adaptive must be a whole number"),
        (DP2, {"delay": 2, "rule": "yogy"}, "rule must be one of rmsprop, adagrad, yogi.*Did you mean 'yogi'"),
        (DP2, {"delay": 2, "variant": "late"}, "variant must be one of delayed, extra_query, noise_first"),
        (DP2, {"delay": 2, "clip_adaptive": -1.0}, "clip_adaptive must be a positive number"),
        (DP2, {"delay": 2, "lr_adaptive": 0.0}, "lr_adaptive must be a positive number"),
        (AdaDPS, {"public": public(3), "rule": "yogi"}, "rule must be one of rmsprop, adagrad, adam"),
        (AdaDPS, {"public": public(3), "private_share": 0.0}, "private_share"),
        (AdaDPS, {"public": public(3), "beta_mean": 1.0}, "beta_mean"),
        (AdaDPS, {"public": public(3)[0]}, "public must be a pair"),
        (AdaDPS, {"public": (public(3)[0], public(3)[1][:2])}, "y of public must have one row per example, 4"),
        (AdaDPS, {"public": empty(3)}, "public must hold at least one example"),
        (AdaDPS, {"public": public(3), "public_batch_size": 5}, "public_batch_size must be a whole number between 1 and 4"),
        (AdaDPS, {"side_information": {"weights": torch.ones(3)}}, "side_information must be of parameters among weight, bias"),
        (AdaDPS, {"side_information": {"weight": torch.ones(4)}}, r"must fit parameter 'weight' of shape \(3,\)"),
        (AdaDPS, {"side_information": {"weight": torch.zeros(3)}}, "positive, finite"),
        (PDADPMD, {"public": public(3), "private_share": 1.5}, "private_share must lie in"),
    ],
)
def test_wrong_parameters_are_named(kind, change, message):
    with pytest.raises(InvalidParameter, match=message):
        kind(Logistic(3), **{"lr": 0.1, **PRIVACY, **change})


def test_wrong_combinations_are_refused():
    for sources in ({}, {"public": public(3), "side_information": {"weight": torch.ones(3)}}):
        with pytest.raises(IncompatibleParts, match="either public examples or side information"):
            AdaDPS(Logistic(3), lr=0.1, **sources, **PRIVACY)
    with pytest.raises(IncompatibleParts, match="noise_first clips raw gradients in both phases"):
        DP2(Logistic(3), lr=0.1, delay=2, variant="noise_first", clip_adaptive=1.0, **PRIVACY)
    with pytest.raises(IncompatibleParts, match="extra_query has no second phase"):
        DP2(Logistic(3), lr=0.1, delay=2, variant="extra_query", delay_adaptive=3, **PRIVACY)
    with pytest.raises(IncompatibleParts, match="BatchNorm1d"):
        DPSGD(nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)), lr=0.1, **PRIVACY)


def test_wrong_batches_are_refused():
    made = DPSGD(Logistic(3), lr=0.1, **PRIVACY)
    with pytest.raises(InvalidParameter, match="y must have one row per example, 2"):
        made.step(torch.zeros(2, 3), torch.zeros(3, dtype=torch.int64))
    with pytest.raises(InvalidParameter, match="x must be a tensor"):
        made.step([[0.0, 0.0, 0.0]], torch.zeros(1, dtype=torch.int64))
    x, y = torch.zeros(5, 3), torch.zeros(5, dtype=torch.int64)
    for options, message in (({"sample_rate": 2}, "sample_rate"), ({"steps": -1}, "steps"), ({"start": -1}, "start")):
        with pytest.raises(InvalidParameter, match=message):
            poisson_batches(x, y, **{"sample_rate": 0.5, "steps": 1, **options})
    with pytest.raises(InvalidParameter, match="at least one example"):
        poisson_batches(x[:0], y[:0], sample_rate=0.5, steps=1)
    for examples in (0, 5, 2.5):
        with pytest.raises(InvalidParameter, match="between 1 and 4"):
            set_aside(x, y, examples=examples, seed=0)
    with pytest.raises(InvalidParameter, match="steps"):
        cosine_share(0)


def test_frozen_parameters_stay():
    net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    net[0].requires_grad_(False)
    before = [p.clone() for p in net.parameters()]
    made = DPSGD(net, lr=1.0, **PRIVACY)
    made.step(torch.randn(5, 3), torch.tensor([0, 1, 0, 1, 1]))
    same = [torch.equal(p, q) for p, q in zip(net.parameters(), before, strict=True)]
    assert same == [True, True, False, False]


def test_noise_of_the_system_follows_from_no_seed(monkeypatch):
    """Whoever guesses a seed of 62 bits, or reads torch's generator, has the noise; the system's cannot be drawn again."""
    drawn = []
    plain = torch.randn
    monkeypatch.setattr(torch, "randn", lambda *a, **k: drawn.append(1) or plain(*a, **k))
    steps = []
    for _ in range(2):
        net = nn.Linear(500, 2)
        optimizer = DPSGD(
            net, lr=1.0, clip=0.7, noise_multiplier=1.3, sample_rate=0.5, expected_batch_size=10.0
        )  # fmt: skip
        before = optimizer.layout.read(net).clone()
        optimizer.step(torch.zeros(0, 500), torch.zeros(0, dtype=torch.long))
        steps.append(optimizer.layout.read(net) - before)
    assert not drawn
    assert not torch.equal(*steps)
    assert float(steps[0].std()) * 10 / 0.7 == pytest.approx(1.3, rel=0.1)
    x, y = torch.arange(400.0).unsqueeze(1), torch.zeros(400)
    batches = [[rows.flatten().tolist() for rows, _ in optimizer.batches(x, y, steps=3)] for _ in range(2)]
    assert batches[0] != batches[1]
    assert 100 < sum(map(len, batches[0])) / 3 < 300


@pytest.mark.parametrize("name", METHODS)
def test_noise_from_a_seed_repeats_and_has_no_epsilon(name):
    moved, options = [], {"clip": 0.5, "noise_multiplier": 1.0, "sample_rate": 0.5, "expected_batch_size": 4.0}
    for seed in (3, 3, 4, None, None):
        net = Logistic(4)
        made = METHODS[name](net, noise_seed=seed, **options)
        for _ in range(2):
            made.step(*empty(4))
        moved.append(made.layout.read(net).clone())
        assert (made.epsilon(1e-5) == math.inf) == (seed is not None)
        assert 0 < made.nominal_epsilon(1e-5) < math.inf
        unseeded = METHODS[name](Logistic(4), **options)
        unseeded.load_state_dict(made.state_dict())
        assert unseeded.epsilon(1e-5) == made.epsilon(1e-5)  # a state says where the noise of its steps came from
    assert torch.equal(moved[0], moved[1])
    assert not any(torch.equal(a, b) for a, b in itertools.combinations(moved[1:], 2))
