"""Centred clipping, mixing, bucketing, Bulyan, MeaMed and DnC: answers by hand, bounds against attackers who send anything."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import assume, given, settings

import equipoise as eq
from equipoise import aggregators as agg
from equipoise.aggregators.wrappers import mixed_with_nearest
from equipoise.errors import InvalidParameter
from equipoise.testing import check_aggregator

PARTS = [
    agg.CentredClipping(),
    agg.CentredClipping(radius=0.5, iterations=1),
    agg.NNM(agg.Median()),
    agg.NNM(agg.KLoss(1), share=0.3),
    agg.Bucketing(agg.Median()),
    agg.Bucketing(agg.Krum(1)),
    agg.NNM(agg.Bucketing(agg.TrimmedMean(0.1))),
    agg.Bulyan(2),
    agg.MeaMed(),
    agg.DnC(2),
    agg.DnC(1, repeats=3, coordinates=2),
]


def column(*values):
    return torch.tensor(values, dtype=torch.float64).unsqueeze(1)


def even(count):
    return torch.full((count,), 1 / count, dtype=torch.float64)


def total(part, updates, weights=None, **given):
    return part(updates, even(len(updates)) if weights is None else weights, **given)[0]


@pytest.mark.parametrize("part", PARTS, ids=repr)
def test_the_law_of_aggregators(part):
    check_aggregator(part)


def test_centred_clipping_by_hand():
    # v = 0, τ = 2: 1, 1, 1 stay and 100 becomes 2, so that v = 5/4. A second step: −¼, −¼, −¼ and 2: v + 5/16.
    updates = column(1, 1, 1, 100)
    assert float(total(agg.CentredClipping(2.0, 1), updates)) == 1.25
    assert float(total(agg.CentredClipping(2.0, 2), updates)) == 1.25 + (3 * -0.25 + 2) / 4
    # From the last total 1: 0, 0, 0 and 2 give ½ more, which is also the next state.
    assert [float(each) for each in agg.CentredClipping(2.0, 1)(updates, even(4), state=column(1)[0])] == [1.5, 1.5]
    # τ = None: distances 1, 1, 1, 100 from 0 have the median 1: v = 1.
    assert float(total(agg.CentredClipping(None, 1), updates)) == 1.0


def test_the_radius_of_centred_clipping_is_a_weighted_median():
    # Distances 1, 1, 1, 100 from 0 with weights 0.1, 0.1, 0.1, 0.7: the weighted median is 100, so that nothing is clipped and
    # the mean 0.3 + 70 is left. The plain median 1 would give 1.
    weights = torch.tensor([0.1, 0.1, 0.1, 0.7], dtype=torch.float64)
    assert float(total(agg.CentredClipping(None, 1), column(1, 1, 1, 100), weights)) == pytest.approx(70.3)


def test_the_radius_of_centred_clipping_is_the_middle_distance():
    # Distances 1, 2, 3, 4, 100 from 0 have the median 3, to which 4 and 100 are clipped: (1 + 2 + 3 + 3 + 3)/5.
    assert float(total(agg.CentredClipping(None, 1), column(1, 2, 3, 4, 100))) == pytest.approx(2.4)


def test_mixing_by_hand():
    # β = ¼ of 0, 1, 2, 100: each with its two nearest: 1, 1, 1, 34⅓. The median is 1; β = 0 makes all of them the mean.
    updates = column(0, 1, 2, 100)
    assert float(total(agg.NNM(agg.Median(), share=0.25), updates)) == pytest.approx(1.0)
    assert float(total(agg.NNM(agg.WeightedMean(), share=0.25), updates)) == pytest.approx((3 + 103 / 3) / 4)
    assert float(total(agg.NNM(agg.Krum(0), share=0.0), updates)) == pytest.approx(103 / 4)
    # Weights ½, ¼, ¼ on 0, 1, 2 up to ¾: 0 takes itself and 1; 1 itself and, at equal distance, ½ of the mass from both
    # neighbours by weight: (¼·1 + ⅓·0 + ⅙·2)/¾; 2 takes itself, 1 and the half of 0's mass: (½ + ¼)/¾.
    weights = torch.tensor([0.5, 0.25, 0.25], dtype=torch.float64)
    mixed = [0.25 / 0.75, (0.25 + 2 / 6) / 0.75, 0.75 / 0.75]
    expected = sum(w * y for w, y in zip(weights.tolist(), mixed, strict=True))
    assert float(total(agg.NNM(agg.WeightedMean(), share=0.25), column(0, 1, 2), weights)) == pytest.approx(expected)


def test_buckets_of_one_change_nothing_and_one_bucket_is_the_mean():
    gen = torch.Generator().manual_seed(0)
    updates, weights = torch.randn(7, 3, generator=gen, dtype=torch.float64), torch.rand(7, generator=gen).double() + 0.1
    weights = weights / weights.sum()
    torch.testing.assert_close(total(agg.Bucketing(agg.Median(), 1), updates, weights), total(agg.Median(), updates, weights))
    torch.testing.assert_close(total(agg.Bucketing(agg.Median(), 7), updates, weights), weights @ updates)
    # Linear inside: buckets do not matter.
    torch.testing.assert_close(total(agg.Bucketing(agg.WeightedMean(), 3), updates, weights), weights @ updates)


def test_buckets_differ_from_round_to_round():
    updates = column(*range(8))
    part = agg.Bucketing(agg.Median(), 2)
    assert len({float(total(part, updates, keys=torch.arange(8) + 1000 * k)) for k in range(20)}) > 3


def test_wrappers_hand_the_state_to_the_rule_inside():
    # Clipped by 2 around the last total 1, as in the test of centred clipping: 1, 1, 1, 100 give 1½, which is the next state.
    # Around 0 it would be 1¼. Mixed up to ¾ of the weight 1, 1, 1 stay, and 100 becomes 34: 1½ as well.
    updates, inside = column(1, 1, 1, 100), agg.CentredClipping(2.0, 1)
    for part in (agg.Bucketing(inside, size=1), agg.NNM(inside, share=0.25), agg.FedNova(inside)):
        found = part(updates, even(4), state=column(1)[0])
        assert [float(each) for each in found] == pytest.approx([1.5, 1.5]), part


def test_bulyan_by_hand():
    # 0 … 5 and 100, f = 1. Krum selects 3 (a tie with 2, nearer the median), 2, 4 (a tie with 1), 1 (a tie with 0), 5 (a tie
    # with 0). Their median is 3; the three nearest are 2, 3, 4.
    updates = column(0, 1, 2, 3, 4, 5, 100)
    from equipoise.aggregators.selections import bulyan_selection

    assert bulyan_selection(updates, torch.arange(7), 1) == [3, 2, 4, 1, 5]
    assert float(total(agg.Bulyan(1), updates)) == pytest.approx(3.0)
    with pytest.raises(InvalidParameter, match="Bulyan needs K ≥ 4f \\+ 3 = 7"):
        total(agg.Bulyan(1), updates[:6])


def test_bulyan_selects_again_among_those_that_are_left():
    """1, 2, 3, 4, 5, 10, 11, f = 1. Among K′ that are left Krum sums the K′ − 3 smallest squares, and at least one.

    Of 7, four: 30, 15, 10, 15, 30, 111, 150: 3. Of 1, 2, 4, 5, 10, 11 three: 26, 14, 14, 26, …: 2 and 4, and 4 is nearer their
    median 4½. Of 1, 2, 5, 10, 11 two: 17, 10, 25, 26, 37: 2. Of 1, 5, 10, 11 one: 16, 16, 1, 1: 10, nearer 7½. Of 1, 5, 11 one:
    16, 16, 36: 5, the median. Of 3, 4, 2, 10, 5 the nearest their median are 3, 4, 5.

    Selected once, by the first sums, they would be 1, 2, 3, 4, 5, and the mean 3.
    """
    from equipoise.aggregators.selections import bulyan_selection

    updates = column(1, 2, 3, 4, 5, 10, 11)
    assert [float(updates[place]) for place in bulyan_selection(updates, torch.arange(7), 1)] == [3, 4, 2, 10, 5]
    assert float(total(agg.Bulyan(1), updates)) == pytest.approx(4.0)


def test_ties_of_bulyan_go_to_the_smallest_key():
    # −3, −1, 1, 3, f = 0: Krum sums 2 squares: 4 + 16, 4 + 4, 4 + 4, 4 + 16. −1 and 1 are as near the median 0, so that the key
    # decides. Of the three left Krum sums one square: after −1 those are 16, 4, 4: 1 is the median. After 1 they mirror it.
    from equipoise.aggregators.selections import bulyan_selection

    updates = column(-3, -1, 1, 3)
    assert bulyan_selection(updates, torch.tensor([9, 4, 7, 1]), 0)[:2] == [1, 2]
    assert bulyan_selection(updates, torch.tensor([1, 7, 4, 9]), 0)[:2] == [2, 1]
    # −1 (four times) and 1 (four times), f = 1: of 8 clients 6 are selected, of whom the 4 nearest their median are averaged.
    # All scores and all distances to the median 0 are equal at first; whoever comes first, the total follows the keys alone.
    updates, keys = column(-1, -1, -1, -1, 1, 1, 1, 1), torch.tensor([5, 3, 8, 6, 2, 7, 4, 1])
    found = total(agg.Bulyan(1), updates, keys=keys)
    for order in ([7, 6, 5, 4, 3, 2, 1, 0], [3, 6, 0, 5, 2, 7, 1, 4]):
        assert torch.equal(total(agg.Bulyan(1), updates[order], keys=keys[order]), found)


def test_the_mean_of_bulyan_is_weighted():
    # As above 1 … 5 are selected, by heads; of those 2, 3, 4 are nearest their median 3. Their weights are 0.2, 0.1, 0.1:
    # (0.4 + 0.3 + 0.4)/0.4.
    weights = torch.tensor([0.1, 0.1, 0.2, 0.1, 0.1, 0.2, 0.2], dtype=torch.float64)
    assert float(total(agg.Bulyan(1), column(0, 1, 2, 3, 4, 5, 100), weights)) == pytest.approx(2.75)
    # The median counts heads, too: with 0.45 on 5 it would be 5, but is 3, and 2, 3, 4 have equal weights.
    weights = torch.tensor([0.1, 0.1, 0.1, 0.1, 0.1, 0.45, 0.05], dtype=torch.float64)
    assert float(total(agg.Bulyan(1), column(0, 1, 2, 3, 4, 5, 100), weights)) == pytest.approx(3.0)


def test_the_centre_and_the_mean_of_dnc_are_weighted():
    # The centre of 0, 1, 2, 3, 100 is 0.1 + 0.2 + 0.6 + 20 = 20.9, from which 100 is the farthest. The mean of the others is
    # (0.1 + 0.2 + 0.6)/0.8.
    weights = torch.tensor([0.4, 0.1, 0.1, 0.2, 0.2], dtype=torch.float64)
    assert float(total(agg.DnC(1), column(0, 1, 2, 3, 100), weights)) == pytest.approx(1.125)
    # The centre of 0, 4, 10 is 0.4 + 8 = 8.4, from which 0 is the farthest: (0.4 + 8)/0.9 is left. Around the plain mean 14/3
    # it would be 10.
    weights = torch.tensor([0.1, 0.1, 0.8], dtype=torch.float64)
    assert float(total(agg.DnC(1), column(0, 4, 10), weights)) == pytest.approx(28 / 3)


def test_meamed_and_dnc_by_hand():
    # The median of 0, 1, 2, 100 is 1½; up to ¾ of the weight the nearest are 0, 1, 2.
    assert float(total(agg.MeaMed(0.25), column(0, 1, 2, 100))) == pytest.approx(1.0)
    # 100 stands out along the only direction; the mean of 0, 1, 2, 3 is left.
    assert float(total(agg.DnC(1), column(0, 1, 2, 3, 100))) == pytest.approx(1.5)


def test_ties_of_dnc_go_to_the_smallest_key():
    # −1 and 1 are as far from the mean 0. The one with the smaller key is dropped: −½ or ½ is left.
    assert float(total(agg.DnC(1), column(-1, 0, 1), keys=torch.tensor([5, 1, 3]))) == pytest.approx(-0.5)
    assert float(total(agg.DnC(1), column(-1, 0, 1), keys=torch.tensor([3, 1, 5]))) == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("draws", "expected"),
    [
        ([0, 1, 2, 0], [0.0, 5.0, 5.0]),  # dropped 2, 1 and 1 times: nobody never, so the mean of the last two
        ([0, 1, 2], [10 / 3] * 3),  # once each: the mean of all
        ([0, 1], [0.0, 0.0, 10.0]),  # the third is never dropped
    ],
)
def test_dnc_keeps_those_dropped_least_often_where_everyone_is_dropped(monkeypatch, draws, expected):
    # Client j alone stands out along coordinate j, so that it is dropped where coordinate j is drawn.
    def drawn(keys, offset, count):
        return (torch.arange(3) != draws[offset // count]).to(torch.int64).unsqueeze(0)  # the smallest comes first

    monkeypatch.setattr("equipoise.aggregators.selections.random_bits", drawn)
    part = agg.DnC(1, repeats=len(draws), coordinates=1)
    assert total(part, 10 * torch.eye(3, dtype=torch.float64)).tolist() == pytest.approx(expected)


def test_krum_counts_buckets_as_clients():
    # Eight clients in buckets of 2 are ⌈8/2⌉ = 4, and Krum with f = 1 needs 2f + 3 = 5. Nine are ⌈9/2⌉ = 5.
    part, updates = agg.Bucketing(agg.Krum(1), 2), column(*range(9))
    with pytest.raises(InvalidParameter, match=r"too large for 4 clients with a weight: Krum needs K ≥ 2f \+ 3 = 5"):
        total(part, updates[:8])
    assert 0 <= float(total(part, updates)) <= 8
    assert 0 <= float(total(agg.Krum(1), updates[:8])) <= 7


def test_wrong_parameters_are_refused():
    for make in (
        lambda: agg.NNM(agg.Median, share=0.2),
        lambda: agg.NNM(agg.Median(), share=0.5),
        lambda: agg.Bucketing(agg.Median(), 0),
        lambda: agg.CentredClipping(radius=0.0),
        lambda: agg.DnC(1, repeats=0),
        lambda: agg.MeaMed(0.5),
        lambda: agg.Bulyan(-1),
    ):
        with pytest.raises(InvalidParameter):
            make()


values = st.floats(-1e3, 1e3, width=32)
bad = st.one_of(st.sampled_from([float("nan"), float("inf"), 1e30, -1e30, 3e38]), values)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_attackers_cannot_leave_the_stated_bounds(data):
    honest = data.draw(st.integers(8, 14))
    attackers = data.draw(st.integers(1, 1 + (honest - 8) // 4))
    rows = [[data.draw(values) for _ in range(2)] for _ in range(honest)]
    rows += [[data.draw(bad) for _ in range(2)] for _ in range(attackers)]
    updates = torch.tensor(rows, dtype=torch.float32)
    count = honest + attackers
    order = torch.tensor(data.draw(st.permutations(range(count))))
    share = attackers / count + 1e-9
    own = updates[:honest].double()
    low, high = own.min(0).values, own.max(0).values
    width = (high - low).max()
    for part in (agg.MeaMed(share), agg.Bulyan(attackers)):
        found = total(part, updates[order], keys=order + 5).double()
        assert bool((found >= low - (high - low) - 1e-3).all() and (found <= high + (high - low) + 1e-3).all()), part
    mixed = total(agg.NNM(agg.Median(), share=share), updates[order]).double()
    diameter = torch.cdist(own, own).max()
    assert bool((mixed >= low - diameter - 1e-3).all() and (mixed <= high + diameter + 1e-3).all())
    # Attackers move centred clipping by at most iterations · β · τ from where it is if they send the centre.
    tau, steps = 1.0 + float(width), 1
    clipped = total(agg.CentredClipping(tau, steps), updates.nan_to_num(0.0, 0.0, 0.0)).double()
    quiet = total(agg.CentredClipping(tau, steps), torch.cat([updates[:honest], torch.zeros(attackers, 2)])).double()
    assert float((clipped - quiet).norm()) <= steps * attackers / count * tau * (1 + 1e-4) + 1e-3


huge = st.one_of(st.sampled_from([1e30, -1e30, 1e12, -1e6]), values)


@st.composite
def attacked(draw, below=0.5):
    """Honest updates (h, 2), attackers' (a, 2), weights (h + a,) that sum to 1 of which attackers hold less than `below`."""
    honest = [[draw(values) for _ in range(2)] for _ in range(draw(st.integers(2, 8)))]
    bad = [[draw(huge) for _ in range(2)] for _ in range(draw(st.integers(1, 6)))]
    masses = [draw(st.floats(0.01, 1.0)) for _ in range(len(honest) + len(bad))]
    weights = torch.tensor(masses, dtype=torch.float64)
    beta = draw(st.floats(0.01, 0.99)) * below  # what the attackers hold together
    here = torch.arange(len(weights)) < len(honest)
    weights = torch.where(here, (1 - beta) * weights / weights[here].sum(), beta * weights / weights[~here].sum())
    return torch.tensor(honest, dtype=torch.float64), torch.tensor(bad, dtype=torch.float64), weights, beta


@settings(max_examples=60, deadline=None)
@given(attacked(below=1.0), st.integers(1, 5), st.floats(0.1, 1e3), st.tuples(values, values))
def test_centred_clipping_moves_by_at_most_its_bound_for_any_share_of_attackers(sent, iterations, radius, start):
    # One iteration without attackers is v − Σ π_k clip(v − u_k, τ), which brings no two points v farther apart. So each
    # iteration adds at most βτ to the distance from the run in which attackers always send the present v.
    honest, bad, weights, beta = sent
    centre = torch.tensor(start, dtype=torch.float64)
    found, _ = agg.CentredClipping(radius, iterations)(torch.cat([honest, bad]), weights, state=centre)
    for _ in range(iterations):
        centre, _ = agg.CentredClipping(radius, 1)(torch.cat([honest, centre.expand_as(bad)]), weights, state=centre)
    assert float((found - centre).norm()) <= iterations * beta * radius * (1 + 1e-9) + 1e-9


def test_centred_clipping_reaches_its_bound():
    # Everyone honest is at 0 and τ = 1; one attacker far away holds ¾: v = ¾. Then the honest quarter pulls back by ¼ · ¾.
    updates, weights = column(0, 1e6), torch.tensor([0.25, 0.75], dtype=torch.float64)
    assert float(total(agg.CentredClipping(1.0, 1), updates, weights)) == pytest.approx(0.75)
    assert float(total(agg.CentredClipping(1.0, 2), updates, weights)) == pytest.approx(0.75 + 0.75 - 0.25 * 0.75)


@settings(max_examples=80, deadline=None)
@given(attacked())
def test_mixed_honest_updates_stay_within_a_diameter_of_their_own(sent):
    # Honest updates weigh at least 1 − β and lie within Δ of u_k, so the nearest up to 1 − β do, too, and so does their mean.
    honest, bad, weights, beta = sent
    mixed = mixed_with_nearest(torch.cat([honest, bad]), weights, beta)[: len(honest)]
    diameter = torch.cdist(honest, honest).max()
    assert bool(((mixed - honest).norm(dim=1) <= diameter * (1 + 1e-6) + 1e-3).all())


@settings(max_examples=80, deadline=None)
@given(attacked())
def test_the_mean_around_the_median_stays_within_a_width_of_the_honest_range(sent):
    # The median is in the honest range, as β < ½. All honest values, 1 − β of the weight, lie within one width of it, so the
    # nearest up to 1 − β do, too.
    honest, bad, weights, beta = sent
    found = total(agg.MeaMed(beta), torch.cat([honest, bad]), weights)
    low, high = honest.min(0).values, honest.max(0).values
    assert bool((found >= low - (high - low) - 1e-6).all() and (found <= high + (high - low) + 1e-6).all())


@settings(max_examples=60, deadline=None)
@given(st.data(), st.integers(1, 2), st.integers(0, 2**40))
def test_bulyan_with_unequal_weights_stays_within_a_width_of_the_honest_range(data, attackers, key):
    # Heads count: of the K − 2f selected at most f are attackers', and of the K − 4f nearest their median each is as near as an
    # honest value on its side. So all that are averaged are within one width of the range, and any weights keep the mean there.
    honest = column(*(data.draw(values) for _ in range(data.draw(st.integers(3 * attackers + 3, 3 * attackers + 7)))))
    updates = torch.cat([honest, column(*(data.draw(huge) for _ in range(attackers)))])
    masses = torch.tensor([data.draw(st.floats(0.01, 1.0)) for _ in range(len(honest))], dtype=torch.float64)
    weights = torch.cat([masses, torch.full((attackers,), data.draw(st.sampled_from([0.1, 5.0, 50.0])), dtype=torch.float64)])
    order = torch.tensor(data.draw(st.permutations(range(len(updates)))))
    found = float(total(agg.Bulyan(attackers), updates[order], (weights / weights.sum())[order], keys=order + key))
    low, high = float(honest.min()), float(honest.max())
    assert low - (high - low) - 1e-6 <= found <= high + (high - low) + 1e-6


@settings(max_examples=80, deadline=None)
@given(st.data(), st.integers(2, 4), st.integers(1, 3), st.integers(0, 2**40))
def test_a_median_of_buckets_bears_attackers_below_one_in_two_sizes(data, size, attackers, key):
    # f attackers spoil at most f buckets, of weight s/K each: less than ½ in all if f/K < 1/(2s). So the median of the buckets
    # is between means of honest buckets, which are in the honest range.
    count = data.draw(st.integers(2 * size * attackers + 1, 2 * size * attackers + 6))
    honest = column(*(data.draw(values) for _ in range(count - attackers)))
    updates = torch.cat([honest, column(*(data.draw(huge) for _ in range(attackers)))])
    found = float(total(agg.Bucketing(agg.Median(), size), updates, keys=torch.arange(count) + key))
    assert float(honest.min()) - 1e-6 <= found <= float(honest.max()) + 1e-6


def test_a_median_of_buckets_breaks_where_its_bound_ends():
    # Four clients in buckets of 2 and one attacker, β = ¼ = 1/(2s): one of two buckets is spoilt, and the median is their mean.
    assert float(total(agg.Bucketing(agg.Median(), 2), column(0, 0, 0, 1e6), keys=torch.arange(4))) == pytest.approx(1e6 / 4)


@settings(max_examples=80, deadline=None)
@given(st.data(), st.integers(2, 3), st.integers(1, 2), st.floats(0.01, 0.99), st.integers(0, 2**40))
def test_a_median_of_buckets_bears_what_the_heaviest_hit_buckets_weigh(data, size, attackers, part, key):
    # f attackers hit at most f buckets, with f(s − 1) honest clients in them. If they weigh less than ½ with the heaviest of
    # these, the median of the buckets is between means of honest buckets.
    honest = column(*(data.draw(values) for _ in range(data.draw(st.integers(4 * size, 4 * size + 4)))))
    masses = torch.tensor([data.draw(st.floats(0.1, 1.0)) for _ in range(len(honest))], dtype=torch.float64)
    masses = masses / masses.sum()
    beside = float(masses.sort(descending=True).values[: attackers * (size - 1)].sum())
    assume(beside < 0.49)
    beta = part * (0.5 - beside) / (1 - beside)  # β + (1 − β) · beside < ½
    updates = torch.cat([honest, column(*(data.draw(huge) for _ in range(attackers)))])
    weights = torch.cat([(1 - beta) * masses, torch.full((attackers,), beta / attackers, dtype=torch.float64)])
    found = float(total(agg.Bucketing(agg.Median(), size), updates, weights, keys=torch.arange(len(updates)) + key))
    assert float(honest.min()) - 1e-6 <= found <= float(honest.max()) + 1e-6


def test_a_heavy_client_beside_an_attacker_spoils_a_median_of_buckets():
    # The attacker holds 0.2, less than 1/(2s) = ¼. A bucket with it and the honest 0.4 weighs 0.6: its mean, a third of 1e6, is
    # the median. With another honest client ½ · 1e6 weighs 0.4, against 0.6 of zeros: 0.
    weights = torch.tensor([0.2, 0.4, 0.2, 0.2], dtype=torch.float64)
    part, updates = agg.Bucketing(agg.Median(), 2), column(1e6, 0, 0, 0)
    found = {round(float(total(part, updates, weights, keys=torch.arange(4) + 100 * k))) for k in range(40)}
    assert found == {0, 333333}


@pytest.mark.parametrize("part", PARTS, ids=repr)
def test_what_is_not_finite_is_left_out(part):
    gen = torch.Generator().manual_seed(1)
    updates = torch.randn(13, 4, generator=gen, dtype=torch.float64)
    losses, keys = torch.rand(13, generator=gen).double(), torch.arange(13)
    spoiled = updates.clone()
    spoiled[3] = float("nan")
    found = total(part, spoiled, losses=losses, **({"keys": keys} if "keys" in part.__call__.__code__.co_varnames else {}))
    assert bool(torch.isfinite(found).all())
    nothing = total(part, torch.full((13, 4), float("nan"), dtype=torch.float64), losses=losses)
    assert nothing.tolist() == [0.0] * 4


@pytest.mark.parametrize("engine", ["loop", "simulator"])
def test_runs_with_every_new_aggregator_agree(engine, tmp_path):
    data = eq.data.label_shift(train_clients=20, validation_clients=2, test_clients=4)
    model = eq.models.Softmax(data.features, data.classes)
    for part in (
        agg.NNM(agg.Median()),
        agg.Bucketing(agg.Krum(1)),
        agg.CentredClipping(),
        agg.Bulyan(2),
        agg.MeaMed(),
        agg.DnC(2),
        agg.NNM(agg.CentredClipping()),  # the centre is the state of the rule inside
        agg.Bucketing(agg.CentredClipping()),
        agg.FedNova(agg.CentredClipping()),
    ):
        algorithm = eq.Algorithm(aggregator=part)

        def run(rounds, part=algorithm, **given):
            return eq.train(model, data, part, rounds=rounds, clients_per_round=12, progress=False, **given)

        whole = run(4, engine=engine)
        file = tmp_path / f"{part!r}-{engine}.safetensors"
        run(2, engine=engine, checkpoint=file)
        again = run(4, engine=engine, checkpoint=file)
        for left, right in zip(whole.model.parameters(), again.model.parameters(), strict=True):
            assert torch.equal(left, right)
        if engine == "loop":
            other = run(4, engine="simulator")
            for left, right in zip(whole.model.parameters(), other.model.parameters(), strict=True):
                torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-5)


COMMON = [  # the type, what all updates share, the honest spread around it, and where attackers are
    (torch.float64, 1.7e9, 1.0, 500.0), (torch.float64, 1.7e9, 1e-6, 0.8), (torch.float64, 1e4, 1e-6, 5e-3),
    (torch.float64, 1e4, 1e-10, 4e-6), (torch.float32, 1e4, 1.0, 500.0), (torch.float32, -1e-4, 1e-8, 5e-6),
]  # fmt: skip


@pytest.mark.parametrize("part", [agg.Krum(2), agg.MultiKrum(2), agg.NNM(agg.Median()), agg.MeaMed(), agg.Bulyan(2)], ids=repr)
@pytest.mark.parametrize(("dtype", "common", "spread", "away"), COMMON)
def test_bounds_hold_beside_a_large_common_part(part, dtype, common, spread, away):
    gen = torch.Generator().manual_seed(0)
    honest = common + spread * torch.rand(9, 20, generator=gen, dtype=torch.float64)
    updates = torch.cat([honest, (honest.mean(0) + away).expand(2, -1)]).to(dtype)
    honest = updates[:9].double()
    low, high, diameter = honest.amin(0), honest.amax(0), float(torch.pdist(honest).max())
    for _ in range(40):
        given = {"keys": torch.randint(-(2**62), 2**62, (11,), generator=gen)} if getattr(part, "needs_keys", False) else {}
        found = total(part, updates, **given).double()
        if isinstance(part, agg.Krum):
            assert float((found - honest.mean(0)).norm()) <= (7**0.5 + 1) * diameter
        elif isinstance(part, agg.NNM):
            assert float(torch.maximum(low - found, found - high).max()) <= diameter
        else:
            assert float((torch.maximum(low - found, found - high) - (high - low)).max()) <= 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("part", [agg.DnC(2), agg.NNM(agg.Median(), 0.3), agg.NNM(agg.Krum(1), 0.3), agg.NNM(agg.DnC(2))])
def test_engines_agree_where_only_rounding_tells_clients_apart(part, apart, dtype):
    """Clients have the same examples and features in other orders: of their own features, or beside one with targets of 0."""
    gen = torch.Generator().manual_seed(0)
    x, y = torch.randn(24, 8, generator=gen, dtype=torch.float64), torch.randn(24, generator=gen, dtype=torch.float64)
    clients = [] if apart else [("zero", x.to(dtype), torch.zeros(24, dtype=dtype))]
    for k in range(8):
        rows, own = torch.randperm(24, generator=gen), x[:, torch.randperm(8, generator=gen)]
        if apart:
            own = torch.nn.functional.pad(own, (8 * k, 56 - 8 * k))
        clients.append((f"c{k}", own[rows].to(dtype), y[rows].to(dtype)))
    data, solver = eq.FederatedData(eq.ClientSet.pack(clients)), eq.solvers.SGD(lr=0.02, batch_size=None, epochs=5)
    found = []
    for engine in ("loop", "simulator"):
        model = eq.models.LinearRegression(clients[0][1].shape[1], bias=False).to(dtype)
        with torch.no_grad():
            model.weight.zero_()
        algorithm = eq.Algorithm(aggregator=part, sampler=eq.sampling.Full(), solver=solver)
        found.append(eq.train(model, data, algorithm, rounds=1, engine=engine, progress=False).params)
    torch.testing.assert_close(*found, rtol=0, atol=100 * torch.finfo(dtype).eps * float(found[0].abs().max()))
