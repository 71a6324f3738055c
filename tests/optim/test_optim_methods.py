"""Each method against torch's own optimisers, arithmetic by hand, its algorithm written out slowly, and its limits."""

import math

import pytest
import torch
from torch import nn

from equipoise.core.per_example_losses import cross_entropy
from equipoise.models import LinearRegression, Logistic
from equipoise.optim import DP2, DPSGD, PDADPMD, AdaDPS, DPAdaGrad, DPAdam, DPRMSProp, DPRPub, cosine_share
from equipoise.optim.second_moments import adagrad, rmsprop, yogi

FREE = {"clip": math.inf, "noise_multiplier": 0.0, "sample_rate": 0.1}


def network(seed=0):
    source = torch.Generator().manual_seed(seed)
    net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=source, dtype=torch.float64))
    return net


def examples(n, seed=1):
    source = torch.Generator().manual_seed(seed)
    return torch.randn(n, 4, generator=source, dtype=torch.float64), torch.randint(0, 3, (n,), generator=source)


def flat(net):
    return torch.cat([p.detach().flatten() for p in net.parameters()])


# ------------------------------------------------------------------------------------------------ without noise: torch's own


@pytest.mark.parametrize(
    ("private", "plain"),
    [
        (lambda net, **free: DPSGD(net, lr=0.3, **free), lambda p: torch.optim.SGD(p, lr=0.3)),
        (lambda net, **free: DPAdam(net, lr=0.05, **free), lambda p: torch.optim.Adam(p, lr=0.05)),
        (
            lambda net, **free: DPAdam(net, lr=0.05, betas=(0.5, 0.8), eps=0.1, **free),
            lambda p: torch.optim.Adam(p, lr=0.05, betas=(0.5, 0.8), eps=0.1),
        ),
        (
            lambda net, **free: DPRMSProp(net, lr=0.05, beta=0.99, eps=1e-8, **free),
            lambda p: torch.optim.RMSprop(p, lr=0.05, alpha=0.99, eps=1e-8),
        ),
        (lambda net, **free: DPAdaGrad(net, lr=0.2, eps=1e-10, **free), lambda p: torch.optim.Adagrad(p, lr=0.2)),
        (lambda net, **free: DP2(net, lr=0.3, delay=10**9, **free), lambda p: torch.optim.SGD(p, lr=0.3)),
        (  # the public batch is the private one: preconditioning before or after makes no difference without clipping
            lambda net, **free: DPRPub(net, lr=0.05, beta=0.99, eps=1e-8, public=examples(7), **free),
            lambda p: torch.optim.RMSprop(p, lr=0.05, alpha=0.99, eps=1e-8),
        ),
        (
            lambda net, **free: AdaDPS(net, lr=0.05, beta=0.99, eps=1e-8, public=examples(7), **free),
            lambda p: torch.optim.RMSprop(p, lr=0.05, alpha=0.99, eps=1e-8),
        ),
        (
            lambda net, **free: AdaDPS(net, lr=0.2, rule="adagrad", eps=1e-10, public=examples(7), **free),
            lambda p: torch.optim.Adagrad(p, lr=0.2),
        ),
        (
            lambda net, **free: PDADPMD(net, lr=0.3, private_share=0.4, public=examples(7), **free),
            lambda p: torch.optim.SGD(p, lr=0.3),
        ),
    ],
)
def test_without_noise_and_clipping_it_is_the_usual_optimiser(private, plain):
    x, y = examples(7)
    mine, theirs = network(), network()
    one, other = private(mine, expected_batch_size=7, **FREE), plain(theirs.parameters())
    for _ in range(20):
        one.step(x, y)
        other.zero_grad()
        cross_entropy(theirs(x), y).mean().backward()
        other.step()
    assert (flat(mine) - flat(network())).norm() > 0.1
    torch.testing.assert_close(flat(mine), flat(theirs), rtol=1e-10, atol=1e-12)


def test_sums_are_divided_by_the_expected_batch_size_whatever_the_batch():
    x, y = examples(9)
    gradient = flat(network()) - flat(after(DPSGD, x, y, lr=1.0, expected_batch_size=9))
    half = flat(network()) - flat(after(DPSGD, x, y, lr=1.0, expected_batch_size=18))
    torch.testing.assert_close(half, gradient / 2)


def after(kind, x, y, *, steps=1, seed=0, clip=math.inf, noise_multiplier=0.0, **options):
    net = network()
    made = kind(net, clip=clip, noise_multiplier=noise_multiplier, sample_rate=0.1, noise_seed=seed, **options)
    for _ in range(steps):
        made.step(x, y)
    return net


# ---------------------------------------------------------------------------------------------------------------- by hand


def one_weight():
    """Loss (w x − y)², gradient 2 (w x − y) x, w = 0 at first."""
    return LinearRegression(1, bias=False)


def point(x, y):
    return torch.tensor([[x]]), torch.tensor([y])


def test_two_steps_of_adadps_by_hand():
    net = one_weight()
    made = AdaDPS(
        net, lr=1.0, public=point(1.0, 2.0), beta=0.5, eps=1.0, clip=0.4, noise_multiplier=0.0, sample_rate=1.0,
        expected_batch_size=1,
    )  # fmt: skip
    made.step(*point(1.0, 1.0))
    # g = −2, ĝ = −4, v = 8, A = √8 + 1: g / A = −0.522 is clipped to −0.4
    assert net.weight.item() == pytest.approx(0.4, rel=1e-6)
    made.step(*point(1.0, 1.0))
    # g = −1.2, ĝ = −3.2, v = 4 + 5.12, A = √9.12 + 1: −0.2985 stays
    assert net.weight.item() == pytest.approx(0.4 + 1.2 / (math.sqrt(9.12) + 1), rel=1e-6)


def test_two_steps_of_adadps_with_adam_by_hand():
    net = one_weight()
    made = AdaDPS(
        net, lr=1.0, public=point(1.0, 2.0), rule="adam", beta=0.5, beta_mean=0.75, private_share=0.8, eps=1.0,
        expected_batch_size=1, **FREE,
    )  # fmt: skip
    made.step(*point(1.0, 1.0))
    first = (0.8 * 2 + 0.2 * 1) / (math.sqrt(8) + 1)  # M = −0.25 · 4
    assert net.weight.item() == pytest.approx(first, rel=1e-6)
    made.step(*point(1.0, 1.0))
    private, public = 2 * (1 - first), 2 * (2 - first)
    mean, v = 0.75 * 1 + 0.25 * public, 4 + 0.5 * public**2
    assert net.weight.item() == pytest.approx(first + (0.8 * private + 0.2 * mean) / (math.sqrt(v) + 1), rel=1e-6)


def test_side_information_divides_each_coordinate_before_the_joint_norm_is_clipped():
    net = LinearRegression(2, bias=False)
    made = AdaDPS(
        net, lr=1.0, side_information={"weight": torch.tensor([1.0, 0.25])}, clip=2.5, noise_multiplier=0.0, sample_rate=1.0,
        expected_batch_size=1,
    )  # fmt: skip
    made.step(torch.tensor([[1.5, 0.5]]), torch.tensor([1.0]))
    # g = −2 · (1.5, 0.5); g / A = (−3, −4) of norm 5, clipped to half
    assert net.weight.tolist() == pytest.approx([1.5, 2.0])
    net = LinearRegression(2)  # a bias has A = 1 unless it is given
    made = AdaDPS(net, lr=1.0, side_information={"weight": torch.tensor(0.5)}, expected_batch_size=1, **FREE)
    made.step(torch.tensor([[1.5, 0.5]]), torch.tensor([1.0]))
    assert [*net.weight.tolist(), *net.bias.tolist()] == pytest.approx([6.0, 2.0, 2.0])


def test_dp2_by_hand():
    net = one_weight()
    made = DP2(
        net, lr=0.1, lr_adaptive=0.5, delay=1, clip=1.5, clip_adaptive=0.6, beta=0.75, eps=0.5, noise_multiplier=0.0,
        sample_rate=1.0, expected_batch_size=1,
    )  # fmt: skip
    made.step(*point(1.0, 1.0))
    assert net.weight.item() == pytest.approx(0.15)  # −2 clipped to −1.5
    made.step(*point(1.0, 1.0))
    # v = 0.25 · 1.5², √v + ε = 1.25; −1.7 / 1.25 = −1.36 is clipped to −0.6
    assert net.weight.item() == pytest.approx(0.45)
    made.step(*point(1.0, 1.0))
    assert net.weight.item() == pytest.approx(0.45 + 0.1 * 1.1)
    made.step(*point(1.0, 1.0))
    # v = 0.75 · 0.5625 + 0.25 · 1.1² = 0.724, √v + ε = 1.351; −0.88 / 1.351 = −0.651 is clipped again
    assert net.weight.item() == pytest.approx(0.86)
    made.clip_adaptive = 9.0
    made.step(*point(1.0, 1.0))  # −0.28 in the first phase
    made.step(*point(1.0, 1.0))
    v = 0.75 * 0.724375 + 0.25 * 0.28**2
    assert net.weight.item() == pytest.approx(0.888 + 0.5 * 0.224 / (math.sqrt(v) + 0.5), rel=1e-5)


def test_dp2_with_yogi_by_hand():
    net = one_weight()
    made = DP2(net, lr=0.25, delay=1, rule="yogi", beta=0.75, eps=0.5, expected_batch_size=1, **FREE)
    made.step(*point(1.0, 1.0))
    w = 0.5
    assert net.weight.item() == pytest.approx(w)
    v = 0.25 * 4.0  # h = −2, h² = 4 > v = 0: v grows by a quarter of 4
    made.step(*point(1.0, 1.0))
    w += 0.25 * 1.0 / (math.sqrt(v) + 0.5)
    assert net.weight.item() == pytest.approx(w)
    h = 2 * (w - 1)
    assert h**2 < v
    made.step(*point(1.0, 1.0))
    w -= 0.25 * h
    assert net.weight.item() == pytest.approx(w)
    v -= 0.25 * h**2  # now h² is below v, and v falls: with the sign as printed, sign(h − v²) < 0, it would have fallen at once
    made.step(*point(1.0, 1.0))
    w -= 0.25 * 2 * (w - 1) / (math.sqrt(v) + 0.5)
    assert net.weight.item() == pytest.approx(w, rel=1e-5)


def test_rules_follow_the_squares():
    v, g = torch.tensor([1.0, 9.0, 4.0]), torch.tensor([2.0, 2.0, -2.0])
    assert rmsprop(v, g, 0.9).tolist() == pytest.approx([1.3, 8.5, 4.0])
    assert adagrad(v, g).tolist() == [5.0, 13.0, 8.0]
    assert yogi(v, g, 0.9).tolist() == pytest.approx([1.4, 8.6, 4.0])
    for rule in (rmsprop, yogi):
        here = torch.tensor([0.0])
        for _ in range(400):
            here = rule(here, torch.tensor([3.0]), 0.9)
        assert float(here) == pytest.approx(9.0, abs=1.0)


# ------------------------------------------------------------------------------- DP² against its algorithms, written out slowly


def gradients_at(w, x, y):
    return 2 * (x @ w - y)[:, None] * x


def clip(v, bound):
    return v * min(1.0, bound / max(float(v.norm()), 1e-300))


def algorithm_11(x, y, steps, s1, s2, rule, *, c1, c2, lr1, lr2, beta, eps, noise_first=False):
    w, v, total = (torch.zeros(x.shape[1], dtype=torch.float64) for _ in range(3))
    for t in range(steps):
        phase = t % (s1 + s2)
        if phase == 0:
            total = torch.zeros_like(w)
        if phase == s1:
            h = total / s1
            v = {
                "rmsprop": beta * v + (1 - beta) * h**2,
                "adagrad": v + h**2,
                "yogi": v + (1 - beta) * torch.sign(h**2 - v) * h**2,
            }[rule]
            total = torch.zeros_like(w)
        adaptive = phase >= s1
        divisor = v.sqrt() + eps if adaptive else torch.ones_like(w)
        if noise_first:
            g = sum(clip(row, c1) for row in gradients_at(w, x, y)) / len(x) / divisor
        else:
            g = sum(clip(row / divisor, c2 if adaptive else c1) for row in gradients_at(w, x, y)) / len(x)
        total = total + g
        w = w - (lr2 if adaptive else lr1) * g
    return w


def algorithm_12(x, y, steps, s, *, c1, c2, lr1, lr2, beta, eps):
    w, v, total, count = (torch.zeros(x.shape[1], dtype=torch.float64) for _ in range(4))
    for t in range(1, steps + 1):
        rows = gradients_at(w, x, y)
        raw = sum(clip(row, c1) for row in rows) / len(x)
        total, count = total + raw, count + 1
        if (t - 1) % s == 0:
            v = beta * v + (1 - beta) * (total / count) ** 2
            total, count = torch.zeros_like(w), torch.zeros_like(w)
            w = w - lr1 * raw
        else:
            w = w - lr2 * sum(clip(row / (v.sqrt() + eps), c2) for row in rows) / len(x)
    return w


VALUES = {"c1": 0.8, "c2": 1.7, "lr1": 0.05, "lr2": 0.02, "beta": 0.6, "eps": 0.05}


def dp2_weights(x, y, steps, **options):
    net = LinearRegression(x.shape[1], bias=False).double()
    made = DP2(
        net, lr=VALUES["lr1"], lr_adaptive=VALUES["lr2"], clip=VALUES["c1"], beta=VALUES["beta"], eps=VALUES["eps"],
        noise_multiplier=0.0, sample_rate=0.5, expected_batch_size=len(x), **options,
    )  # fmt: skip
    for _ in range(steps):
        made.step(x, y)
    return net.weight.detach(), made


@pytest.fixture
def table():
    source = torch.Generator().manual_seed(5)
    x = torch.randn(6, 3, generator=source, dtype=torch.float64) * torch.tensor([3.0, 1.0, 0.1])
    return x, x @ torch.tensor([0.2, -1.0, 4.0], dtype=torch.float64)


@pytest.mark.parametrize("rule", ["rmsprop", "adagrad", "yogi"])
@pytest.mark.parametrize(("s1", "s2"), [(1, 1), (2, 3), (3, 1)])
def test_dp2_is_algorithm_11(table, rule, s1, s2):
    weights, _ = dp2_weights(*table, 23, delay=s1, delay_adaptive=s2, rule=rule, clip_adaptive=VALUES["c2"])
    torch.testing.assert_close(weights, algorithm_11(*table, 23, s1, s2, rule, **VALUES), rtol=1e-9, atol=1e-12)


def test_dp2_ablations_are_their_algorithms(table):
    weights, _ = dp2_weights(*table, 23, delay=3, variant="noise_first")
    wanted = algorithm_11(*table, 23, 3, 3, "rmsprop", noise_first=True, **VALUES)
    torch.testing.assert_close(weights, wanted, rtol=1e-9, atol=1e-12)
    weights, made = dp2_weights(*table, 23, delay=4, variant="extra_query", clip_adaptive=VALUES["c2"])
    torch.testing.assert_close(weights, algorithm_12(*table, 23, 4, **VALUES), rtol=1e-9, atol=1e-12)
    assert made.spent == {(0.5, (0.0,)): 6, (0.5, (0.0, 0.0)): 17}  # t = 0, 4, …, 20 release once


def test_the_promised_call():
    net = Logistic(3)
    optimizer = DP2(
        net, lr=0.1, lr_adaptive=3.0, clip=0.5, clip_adaptive=5.0, delay=195, noise_multiplier=1.0, sample_rate=64 / 25_000,
        expected_batch_size=64,
    )  # fmt: skip
    x, y = torch.randn(2500, 3), torch.randint(0, 2, (2500,))
    for batch in optimizer.batches(x, y, steps=2):
        optimizer.step(*batch)
    assert (optimizer.steps, optimizer.expected_batch_size, optimizer.eps) == (2, 64, 1e-7)


def test_equal_delays_by_default_and_equal_clips_and_rates(table):
    _, made = dp2_weights(*table, 1, delay=7)
    assert (made.delay_adaptive, made.clip_adaptive) == (7, made.clip)
    assert DP2(one_weight(), lr=0.2, delay=1, expected_batch_size=1, **FREE).lr_adaptive == 0.2


# ----------------------------------------------------------------------------------------------------------------- limits


def test_methods_that_know_nothing_more_than_dp_sgd_are_dp_sgd():
    x, y = examples(6)
    noisy = {"lr": 0.3, "clip": 0.5, "noise_multiplier": 1.2, "expected_batch_size": 6, "seed": 4, "steps": 8}
    wanted = flat(after(DPSGD, x, y, **noisy))
    ones = {"0.weight": torch.ones(()), "2.bias": torch.ones(3)}
    torch.testing.assert_close(flat(after(AdaDPS, x, y, side_information=ones, **noisy)), wanted)
    torch.testing.assert_close(flat(after(PDADPMD, x, y, public=examples(3, 9), private_share=1.0, **noisy)), wanted)
    torch.testing.assert_close(flat(after(DP2, x, y, delay=8, clip_adaptive=99.0, **noisy)), wanted)
    assert (wanted - flat(after(DPSGD, x, y, **{**noisy, "seed": 5}))).norm() > 0.1


def test_mirror_descent_leans_on_the_public_gradient_towards_the_end():
    x, y = examples(6)
    public = examples(5, 8)
    net, theirs = network(), network()
    made = PDADPMD(net, lr=0.3, public=public, private_share=0.0, expected_batch_size=6, **FREE)
    plain = torch.optim.SGD(theirs.parameters(), lr=0.3)
    for _ in range(3):
        made.step(x, y)
        plain.zero_grad()
        cross_entropy(theirs(public[0]), public[1]).mean().backward()
        plain.step()
    torch.testing.assert_close(flat(net), flat(theirs))
    share = cosine_share(100)
    assert share(0) == 1
    assert share(50) == pytest.approx(math.sqrt(0.5))
    assert share(100) == share(1000) == pytest.approx(0.0, abs=1e-15)


def test_learning_rates_may_follow_the_step():
    x, y = point(1.0, 0.0)
    net = one_weight()
    with torch.no_grad():
        net.weight.fill_(1.0)
    made = DPSGD(net, lr=lambda step: (0.25, 0.125)[step], expected_batch_size=1, **FREE)
    made.step(x, y)
    assert net.weight.item() == 0.5
    made.step(x, y)
    assert net.weight.item() == 0.5 - 0.125


def test_public_batches_are_drawn_anew_and_are_right_on_average():
    """Linear regression at a fixed point: the mean of many public batch gradients is the gradient of the whole."""
    source = torch.Generator().manual_seed(0)
    x, y = torch.randn(20, 2, generator=source), torch.randn(20, generator=source)
    net = LinearRegression(2, bias=False)
    made = PDADPMD(
        net, lr=1.0, public=(x, y), public_batch_size=4, private_share=0.0, clip=1.0, noise_multiplier=0.0, sample_rate=1.0,
        expected_batch_size=1, noise_seed=1,
    )  # fmt: skip
    found = torch.stack([made._public(torch.zeros(2)) for _ in range(3000)])
    assert len(found.unique(dim=0)) > 1000
    whole = (-2 * y[:, None] * x).mean(0)
    torch.testing.assert_close(found.mean(0), whole, atol=5 * float(found.std(0).max()) / math.sqrt(3000), rtol=0)


def test_adadps_reaches_what_dp_sgd_does_not():
    """The regime of thesis 6.2.1, smaller: rare features carry the weight, and A knows which are rare."""
    source = torch.Generator().manual_seed(0)
    frequent = torch.arange(60) < 6
    x = (torch.rand(500, 60, generator=source) < torch.where(frequent, 0.9, 0.03)).float()
    y = x @ torch.where(frequent, 0.01, 1.0)
    privacy = {"clip": 0.5, "noise_multiplier": 0.7, "sample_rate": 0.02, "expected_batch_size": 10, "noise_seed": 0}

    def loss(make):
        found = []
        for lr in (0.05, 0.2, 0.5):
            net = LinearRegression(60, bias=False)
            made = make(net, lr)
            for batch in made.batches(x, y, steps=500):
                made.step(*batch)
            found.append((net(x) - y).square().mean().item())
        return min(found)

    side = {"weight": torch.where(frequent, 1.0, 0.03)}
    informed = loss(lambda net, lr: AdaDPS(net, lr=lr, side_information=side, **privacy))
    plain = loss(lambda net, lr: DPSGD(net, lr=lr, **privacy))
    assert informed < 0.8 * plain


def test_the_models_own_loss_is_the_default():
    net = Logistic(2)
    DPSGD(net, lr=1.0, expected_batch_size=2, **FREE).step(torch.eye(2), torch.tensor([0, 1]))
    assert net.weight.tolist() == [-0.25, 0.25]  # slopes ±½, over two examples
