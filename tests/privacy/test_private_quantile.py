"""The private quantile: without noise against sorting and counting, with noise against its formulas."""

import math
import warnings

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from equipoise.errors import EquipoiseNotice, IncompatibleParts, InvalidParameter
from equipoise.privacy.private_quantile import (
    PrivateQuantile,
    bin_edges,
    client_contributions,
    client_nodes,
    cumulative_counts,
    histogram_sensitivity,
    quantile_of_sum,
    safe_modulus,
)
from equipoise.privacy.random_source import Seeded
from equipoise.privacy.secure_sum import SimulatedSecureSum
from equipoise.risk import Superquantile

powers = st.sampled_from([2, 4, 8, 16, 32, 64])
tails = st.one_of(st.sampled_from([1.0, 0.9, 0.75, 0.5, 0.1, 0.01, 1e-9]), st.floats(0.01, 1.0))


@st.composite
def cohorts(draw):
    """Losses around [0, B], many of them exactly on an edge."""
    bound, bins = draw(st.sampled_from([1.0, 1.5, 10.0, 1e-6, 1e6])), draw(powers)
    on_edge = st.integers(0, bins).map(lambda j: float(bin_edges(bound, bins)[j]))
    anywhere = st.floats(-0.2, 1.3).map(lambda u: u * bound)
    return bound, bins, draw(st.lists(st.one_of(on_edge, anywhere), min_size=1, max_size=40))


def counts_by_comparing(losses, bound, bins):
    """How many clipped losses are below each edge, the last edge counting everybody: one comparison at a time."""
    clipped = [min(max(loss, 0.0), bound) for loss in losses]
    edges = [j / bins * bound for j in range(bins + 1)]
    return edges, [sum(loss < edge for loss in clipped) for edge in edges[:-1]] + [len(clipped)]


def private_quantile(losses, tail, *, source, clients=None, **setting):
    return PrivateQuantile(**setting).at(source, clients=clients)(losses, torch.ones(len(losses)), tail)


def quantile_without_noise(losses, tail, bound, bins, clients="count", scale=1, modulus=1 << 30):
    clients = len(losses) if clients == "count" else clients
    return float(
        private_quantile(
            torch.tensor(losses, dtype=torch.float64), tail, bound=bound, bins=bins, sigma=0.0, scale=scale, modulus=modulus,
            source=None, clients=clients,
        )
    )  # fmt: skip


@given(cohorts(), tails, st.sampled_from([1, 7]), st.booleans())
@settings(max_examples=300)
def test_without_noise_it_is_the_nearest_edge_by_sorting_and_counting(cohort, tail, scale, public):
    bound, bins, losses = cohort
    released = quantile_without_noise(losses, tail, bound, bins, len(losses) if public else None, scale)
    edges, below = counts_by_comparing(losses, bound, bins)
    assert released in edges
    distance = [abs(count - (1 - tail) * len(losses)) for count in below]
    place = edges.index(released)
    assert distance[place] <= min(distance) + 1e-6
    assert all(other > distance[place] - 1e-6 for other in distance)
    assert all(other > distance[place] + 1e-12 for other in distance[:place])  # of equal ones the lowest


@given(cohorts())
@settings(max_examples=100)
def test_dyadic_sums_are_cumulative_counts(cohort):
    bound, bins, losses = cohort
    rows = client_contributions(torch.tensor(losses), bound=bound, bins=bins, sigma=0.0, scale=3, source=None)
    _, below = counts_by_comparing(torch.tensor(losses).tolist(), bound, bins)
    assert cumulative_counts(rows.sum(0), bins=bins, scale=3).tolist() == below
    assert cumulative_counts(rows.sum(0), bins=bins, scale=3, clients=99).tolist() == [*below[:-1], 99]


def test_dyadic_partition_of_fifteen_as_in_the_paper():
    # Bins 1 to 15 of 16 are 1–8, 9–12, 13–14 and 15. Nodes: 16 leaves, 8 pairs, 4 fours, 2 eights.
    total = torch.zeros(30, dtype=torch.int64)
    total[28], total[24 + 2], total[16 + 6], total[14] = 1000, 100, 10, 1
    assert float(cumulative_counts(total, bins=16, scale=1)[15]) == 1111
    assert cumulative_counts(torch.ones(30, dtype=torch.int64), bins=16, scale=1).tolist() == [
        bin(j).count("1") for j in range(16)
    ] + [2]  # so many nodes as j has binary ones; the two halves for the last


def test_each_client_has_a_one_at_every_level():
    rows = client_contributions(torch.tensor([0.0, 2.5, 9.99]), bound=8.0, bins=8, sigma=0.0, scale=5, source=None)
    assert rows.shape == (3, 14)
    for row, leaf in zip(rows, (0, 2, 7), strict=True):
        levels = row[:8], row[8:12], row[12:]
        assert [level.tolist() for level in levels] == [[5 * (place == leaf >> r) for place in range(8 >> r)] for r in range(3)]


def test_bins_are_closed_below_and_the_last_one_above():
    # Erratum 4: as printed, level 0 would be empty.
    losses = torch.tensor([0.0, 0.25, 0.5, math.nextafter(0.5, 0), 1.0, -3.0, 1e9, math.inf], dtype=torch.float64)
    assert client_nodes(losses, 1.0, 4)[:, 0].tolist() == [0, 1, 2, 1, 3, 0, 3, 3]


@pytest.mark.parametrize("level", [0.0, 0.3, 0.5, 0.99, 1.0, 7.0])
@pytest.mark.parametrize("tail", [1.0, 0.75, 0.5])
def test_equal_losses_are_all_kept_by_tails_of_one_half_and_more(level, tail):
    released = quantile_without_noise([level] * 9, tail, 1.0, 4)
    assert min(level, 1.0) >= released


@pytest.mark.parametrize("level", [0.3, 1.0])
def test_equal_losses_and_a_small_tail(level):
    # The nearer of nobody and everybody below: the upper edge of the bin. At the bound everybody is kept all the same.
    released = quantile_without_noise([level] * 9, 0.25, 1.0, 4)
    assert released == (0.5 if level == 0.3 else 1.0)


def test_the_whole_tail_keeps_everybody():
    assert quantile_without_noise([0.1, 0.9, 0.5], 1.0, 1.0, 64) == 0.0


def test_the_masses_kept_are_the_tail():
    losses = [(i + 0.5) / 100 for i in range(100)]
    for tail in (0.1, 0.3, 0.5, 0.7, 0.9):
        released = quantile_without_noise(losses, tail, 1.0, 128)
        assert sum(loss >= released for loss in losses) == pytest.approx(100 * tail, abs=1)


def test_a_small_modulus_wraps_around():
    losses = [(i + 0.5) / 100 for i in range(100)]  # halves hold 50 clients, times 10: 500
    assert quantile_without_noise(losses, 0.5, 1.0, 8, scale=10, modulus=1024) == 0.5
    assert quantile_without_noise(losses, 0.5, 1.0, 8, scale=10, modulus=1000) != 0.5  # 500 comes back as −500
    assert quantile_without_noise(losses, 0.5, 1.0, 8, scale=10, modulus=1001) == 0.5


def test_float32_and_float64_and_one_client():
    for dtype in (torch.float32, torch.float64):
        losses = torch.tensor([0.7], dtype=dtype)
        found = private_quantile(losses, 1.0, bound=1.0, bins=2, sigma=0.0, scale=1, modulus=8, source=None)
        assert found.shape == ()
        assert float(found) == 0.0


def test_nobody_at_all_gives_an_edge():
    nobody = torch.zeros(0, dtype=torch.float64)
    assert float(private_quantile(nobody, 0.5, bound=1.0, bins=4, sigma=1.0, scale=1, modulus=64, source=Seeded(0, "x"))) == 0


# ----------------------------------------------------------------------------------------------------------------------- noise


def test_every_client_adds_noise_of_the_stated_variance_at_every_node():
    losses = torch.linspace(0, 1, 400)
    options = {"bound": 1.0, "bins": 16, "scale": 50, "source": Seeded(0, "noise")}
    noise = (client_contributions(losses, sigma=3.5, **options) - client_contributions(losses, sigma=0.0, **options)).double()
    count = noise.numel()  # 400 × 30
    assert float(noise.mean()) == pytest.approx(0, abs=4.5 * 3.5 / math.sqrt(count))
    assert float(noise.var()) == pytest.approx(3.5**2, rel=4.5 * math.sqrt(2 / count))
    assert float((noise.var(0) / 3.5**2 - 1).abs().max()) < 5 * math.sqrt(2 / 400)  # each node
    assert float((noise.var(1) / 3.5**2 - 1).abs().max()) < 5.5 * math.sqrt(2 / 30)  # each client
    across = torch.corrcoef(noise.t()) - torch.eye(30)
    assert float(across.abs().max()) < 5 / math.sqrt(400)


def test_the_noise_of_the_sum_is_that_of_all_clients():
    count, sigma, scale, bins = 50, 2.0, 3, 4
    losses = torch.full((count,), 0.1)
    modulus = safe_modulus(scale, sigma, bins, count)
    totals = torch.stack([
        SimulatedSecureSum(modulus).sum(
            client_contributions(losses, bound=1.0, bins=bins, sigma=sigma, scale=scale, source=Seeded(0, "sum", r))
        )
        for r in range(600)
    ]).double()  # fmt: skip
    expected = torch.tensor([count, 0, 0, 0, count, 0]).double() * scale
    assert float((totals.mean(0) - expected).abs().max()) < 5 * math.sqrt(count * sigma**2 / 600)
    assert float(totals.var(0).mean()) == pytest.approx(count * sigma**2, rel=5 * math.sqrt(2 / 3600))


def test_more_noise_more_error_and_little_noise_little_error():
    losses = torch.linspace(0, 1, 500)
    errors = {}
    for multiplier in (0.5, 5.0, 50.0):
        settings_ = PrivateQuantile(1.0, 64).calibrated(multiplier, 500)
        released = [
            float(settings_.at(Seeded(0, "error", r), clients=500)(losses, torch.full((500,), 0.002), 0.3)) for r in range(20)
        ]
        errors[multiplier] = sum(abs(x - 0.7) for x in released) / 20
    assert errors[0.5] < 0.015
    assert errors[0.5] < errors[5.0] < errors[50.0]


def test_missing_shares_of_noise_are_added():
    # Nobody contributes: without shares nothing is random; with 400 the noise is that of 400 clients.
    nobody, weights = torch.zeros(0), torch.zeros(0)
    part = PrivateQuantile(1.0, 4, sigma=5.0, scale=1)
    alone = {float(part.at(Seeded(0, "shares", r), clients=40)(nobody, weights, 0.5)) for r in range(20)}
    joined = {float(part.at(Seeded(0, "shares", r), clients=40, shares=400)(nobody, weights, 0.5)) for r in range(20)}
    assert len(alone) == 1
    assert len(joined) > 1
    losses, equal = torch.linspace(0, 1, 10), torch.full((10,), 0.1)
    full = part.at(Seeded(0, "shares"), shares=10)  # none is missing
    assert float(full(losses, equal, 0.5)) == float(part.at(Seeded(0, "shares"))(losses, equal, 0.5))


def test_a_release_is_a_pure_function_of_its_source():
    part, losses, weights = PrivateQuantile(1.0, 32).calibrated(10.0, 60), torch.linspace(0, 1, 60), torch.full((60,), 1 / 60)
    released = [float(part.at(Seeded(0, "q", r))(losses, weights, 0.5)) for r in (1, 1, 2, 3, 4)]
    assert released[0] == released[1]
    assert len(set(released)) > 1


# ------------------------------------------------------------------------------------------------------------ what it costs


@pytest.mark.parametrize("bins", [2, 4, 16])
def test_the_sensitivity_is_the_largest_change_by_one_client(bins):
    every = client_contributions(
        (torch.arange(bins) + 0.5) / bins, bound=1.0, bins=bins, sigma=0.0, scale=3, source=None
    ).double()
    assert float(every.norm(dim=1).max()) == pytest.approx(histogram_sensitivity(3, bins))
    assert float(torch.cdist(every, every).max()) == pytest.approx(histogram_sensitivity(3, bins, "replace_one"))


def test_multiplier_by_hand():
    part = PrivateQuantile(10.0, 64, sigma=2.0, scale=5)
    # S = 5√6, √m'·σ = 16 · 2 = 32; ψ = 10 e^(−4π²) + … is of the order 1e-16.
    assert part.multiplier(256) == pytest.approx(32 / (5 * math.sqrt(6)), rel=1e-12)
    assert part.multiplier(256, adjacency="replace_one") == pytest.approx(32 / (5 * math.sqrt(12)), rel=1e-12)
    assert part.multiplier(64) == pytest.approx(part.multiplier(256) / 2)
    # Erratum 2: the printed sensitivity, 5 · 6, makes the same release √6 times as costly.
    assert part.multiplier(256) / (32 / (5 * 6)) == pytest.approx(math.sqrt(6))


def test_multiplier_counts_what_discrete_shares_cost():
    # σ = ½, m' = 2: ψ = 10 e^(−π²/4), d = 2 · 4 − 2 = 6, S = √2.
    excess = 10 * math.exp(-(math.pi**2) / 4)
    first, second = math.sqrt(2 / 0.5 + excess * 3), math.sqrt(2 / 0.5) + excess * math.sqrt(6)
    assert PrivateQuantile(1.0, 4, sigma=0.5, scale=1).multiplier(2) == pytest.approx(1 / min(first, second))


def test_no_noise_has_no_multiplier():
    assert PrivateQuantile(1.0, 4, sigma=0.0, scale=1).multiplier(100) == 0


@given(
    st.floats(0.01, 1000), st.integers(1, 5000), st.integers(0, 5000), powers, st.sampled_from(["add_remove", "replace_one"])
)
@settings(max_examples=150)
def test_calibration_is_the_inverse_on_the_safe_side(multiplier, fewest, more, bins, adjacency):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", EquipoiseNotice)
        part = PrivateQuantile(1.0, bins).calibrated(multiplier, fewest, most=fewest + more, adjacency=adjacency, failure=1e-6)
    assert multiplier <= part.multiplier(fewest, adjacency=adjacency) <= multiplier * (1 + 1e-9)
    assert math.sqrt(fewest) * part.sigma >= 20
    most = fewest + more
    bound = 2 + 2 * part.scale * most + 2 * most * math.sqrt(2 * part.sigma**2 * math.log(16 * most * bins / 1e-6))
    assert bound <= part.modulus < 2 * bound + 2
    # Either bound on the noise asked for the scale: a smaller one would break it.
    smaller = part.sigma * (part.scale - 1) / part.scale
    assert part.scale == 1 or math.sqrt(fewest) * smaller < 20 or smaller < 2


def test_calibration_at_the_border_of_twenty():
    # Here √m'·σ is 20 but for rounding, which must not fall below it.
    for multiplier in (5.0, 20 / 11, 20 / 22):
        for fewest in range(2, 100):
            part = PrivateQuantile(1.0, 2).calibrated(multiplier, fewest)
            assert math.sqrt(fewest) * part.sigma >= 20


def test_sums_do_not_leave_the_safe_modulus():
    part = PrivateQuantile(1.0, 16).calibrated(1.0, 30)
    for r in range(50):
        rows = client_contributions(
            torch.ones(30), bound=1.0, bins=16, sigma=part.sigma, scale=part.scale, source=Seeded(0, "m", r)
        )
        assert torch.equal(SimulatedSecureSum(part.modulus).sum(rows), rows.sum(0))


def test_a_notice_if_bins_exceed_clients():
    with pytest.warns(EquipoiseNotice, match=r"64 bins count the 50 clients.*bins=32"):
        PrivateQuantile(1.0, 64).calibrated(1.0, 50)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        PrivateQuantile(1.0, 32).calibrated(1.0, 50)
        PrivateQuantile(1.0, 64).calibrated(1.0, 50, most=100)


# --------------------------------------------------------------------------------------------------------------- as a part


def test_clients_filter_by_it_in_the_superquantile():
    losses, weights = torch.linspace(0, 1, 100).double(), torch.full((100,), 0.01, dtype=torch.float64)
    source = PrivateQuantile(1.0, 64, sigma=0.0, scale=1).at(Seeded(0, "q"), clients=100)
    risk = Superquantile(tail=0.25, quantile=source)(losses, weights)
    assert int((risk.weights > 0).sum()) == 25
    assert not source.reads_losses


def test_it_must_be_given_noise_before_it_is_used():
    part = PrivateQuantile(bound=1.5, bins=32)
    risk = Superquantile(tail=0.5, quantile=part)
    assert risk.filters
    with pytest.raises(IncompatibleParts, match="DifferentialPrivacy"):
        risk(torch.rand(4), torch.full((4,), 0.25))
    for call in (lambda: part.at(Seeded(0, "x")), lambda: part.multiplier(10)):
        with pytest.raises(InvalidParameter, match="calibrated"):
            call()


def test_unequal_weights_are_refused():
    source = PrivateQuantile(1.0, 4, sigma=0.0, scale=1).at(Seeded(0, "q"))
    with pytest.raises(InvalidParameter, match="base_weights"):
        source(torch.rand(3), torch.tensor([0.5, 0.25, 0.25]), 0.5)
    source(torch.rand(3), torch.full((3,), 1 / 3), 0.5)


@pytest.mark.parametrize(
    ("wrong", "name"),
    [
        ({"bound": 0.0}, "bound"),
        ({"bound": math.inf}, "bound"),
        ({"bins": 1}, "bins"),
        ({"bins": 48}, "bins"),
        ({"bins": 32.0}, "bins"),
        ({"sigma": -1.0, "scale": 1}, "sigma"),
        ({"sigma": math.nan, "scale": 1}, "sigma"),
        ({"sigma": 1.0, "scale": 0}, "scale"),
        ({"sigma": 1.0, "scale": 1.5}, "scale"),
        ({"sigma": 1.0, "scale": 1, "modulus": 1}, "modulus"),
    ],
)
def test_refuses_what_breaks_a_rule(wrong, name):
    with pytest.raises(InvalidParameter, match=name):
        PrivateQuantile(**{"bound": 1.0, "bins": 32, **wrong})


@pytest.mark.parametrize("given_", [{"sigma": 1.0}, {"scale": 3}, {"modulus": 64}])
def test_noise_is_set_together_or_not_at_all(given_):
    with pytest.raises(IncompatibleParts, match="together"):
        PrivateQuantile(1.0, 32, **given_)


def test_refuses_wrong_arguments():
    part = PrivateQuantile(1.0, 2, sigma=1.0, scale=1)
    with pytest.raises(InvalidParameter, match="multiplier"):
        part.calibrated(0.0, 10)
    with pytest.raises(InvalidParameter, match="contributors"):
        part.calibrated(1.0, 0)
    with pytest.raises(InvalidParameter, match="most"):
        part.calibrated(1.0, 10, most=9)
    with pytest.raises(InvalidParameter, match="adjacency"):
        part.multiplier(10, adjacency="both")
    with pytest.raises(InvalidParameter, match="clients"):
        part.at(Seeded(0, "x"), clients=0)
    with pytest.raises(InvalidParameter, match="tail"):
        part.at(Seeded(0, "x"))(torch.rand(2), torch.full((2,), 0.5), 0.0)
    with pytest.raises(InvalidParameter, match="losses"):
        part.at(Seeded(0, "x"))(torch.tensor([0.1, math.nan]), torch.full((2,), 0.5), 0.5)


def test_the_servers_part_needs_the_sum_only():
    losses = torch.linspace(0, 1, 64)
    rows = client_contributions(losses, bound=1.0, bins=8, sigma=1.0, scale=20, source=Seeded(0, "net"))
    total = SimulatedSecureSum(1 << 20).sum(rows)
    by_parts = quantile_of_sum(total, 0.5, bound=1.0, bins=8, scale=20, clients=64)
    whole = private_quantile(
        losses, 0.5, bound=1.0, bins=8, sigma=1.0, scale=20, modulus=1 << 20, source=Seeded(0, "net"), clients=64
    )
    assert float(by_parts) == float(whole)
