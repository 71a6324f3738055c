"""Correlated noise: coefficients, sensitivities and losses by hand, streaming noise, and what the sampler promises."""

import warnings
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import equipoise as eq
from equipoise.errors import InvalidParameter
from equipoise.privacy import correlated_noise as cn
from equipoise.sampling import MinSeparation


def test_the_square_root_of_the_prefix_sum():
    root = cn.square_root_coefficients(6)
    assert root[:4].tolist() == [1.0, 0.5, 0.375, 0.3125]
    assert np.allclose(np.convolve(root, root)[:6], 1.0)


def test_known_sensitivities_and_losses():
    # C = I: k rounds of a client change k rows by 1 each: √k.
    assert cn.toeplitz_sensitivity([1, 0, 0, 0, 0, 0], separation=2, participations=3) == pytest.approx(3**0.5)
    # T = 2, coefficients (1, ½). Once: 1 + ¼ = 1.25. Prefix sums: C⁻¹ = (1, −½), rows (1) and (½, 1): 1.25. Loss 1.5625 against
    # 2 for I (1 · 2). Twice in a row: (1, 1½), 3.25; loss 3.25 · 1.25 = 4.0625 against 2 · 2 = 4: worse.
    c = [1.0, 0.5]
    assert cn.toeplitz_sensitivity(c, separation=2, participations=1) ** 2 == pytest.approx(1.25)
    assert cn.largest_prefix_variance(c) == pytest.approx(1.25)
    assert cn.loss_of(c, separation=2, participations=1) == pytest.approx(1.5625)
    assert cn.loss_of([1, 0], separation=2, participations=1) == pytest.approx(2.0)
    assert cn.toeplitz_sensitivity(c, separation=1, participations=2) ** 2 == pytest.approx(3.25)
    assert cn.loss_of(c, separation=1, participations=2) == pytest.approx(4.0625)
    assert cn.loss_of([1, 0], separation=1, participations=2) == pytest.approx(4.0)
    # Banded, two bands (1, ½), rounds 2 apart, twice: columns that share no row. T = 4: 1.25 + 1.25; T = 3: 1.25 + 1.
    for rounds, squared in ((4, 2.5), (3, 2.25)):
        matrix = cn.toeplitz_matrix(cn.Banded((1.0, 0.5)).coefficients(rounds))
        assert cn.banded_sensitivity(matrix, separation=2, participations=2) ** 2 == pytest.approx(squared)


def worst_by_trying(matrix, separation, participations):
    """The largest ‖Σ C e_t‖ over all sets of rounds, the slow way."""
    rounds = len(matrix)
    best = 0.0
    for chosen in range(2**rounds):
        times = [t for t in range(rounds) if chosen >> t & 1]
        apart = all(b - a >= separation for a, b in pairwise(times))
        if apart and len(times) <= participations:
            best = max(best, float(np.linalg.norm(matrix[:, times].sum(1))))
    return best


@settings(max_examples=40, deadline=None)
@given(st.lists(st.floats(0, 1), min_size=1, max_size=8), st.integers(1, 4), st.integers(1, 4))
def test_the_worst_client_is_the_one_of_the_formula(drops, separation, participations):
    coefficients = np.sort([1.0, *drops])[::-1]
    found = cn.toeplitz_sensitivity(coefficients, separation=separation, participations=participations)
    assert found == pytest.approx(worst_by_trying(cn.toeplitz_matrix(coefficients), separation, participations))


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 8), st.integers(1, 4), st.integers(1, 4), st.integers(0, 2**32))
def test_the_worst_client_of_any_banded_matrix_is_found(rounds, separation, participations, seed):
    rng = np.random.default_rng(seed)
    matrix = np.tril(rng.normal(size=(rounds, rounds))) * (np.subtract.outer(np.arange(rounds), np.arange(rounds)) < separation)
    found = cn.banded_sensitivity(matrix, separation=separation, participations=participations)
    assert found == pytest.approx(worst_by_trying(matrix, separation, participations))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(0, 2), max_size=4), st.floats(0.1, 2), st.integers(1, 9), st.integers(0, 3), st.integers(1, 4))
def test_the_worst_client_of_bands_is_the_one_of_the_formula(rest, first, rounds, further, participations):
    """Bands that rise, too; more bands than rounds, a separation beyond the run, and more participations than fit."""
    banded = cn.Banded((first, *rest))
    apart = len(banded.bands) + further
    found = banded.sensitivity(rounds, separation=apart, participations=participations)
    matrix = cn.toeplitz_matrix(banded.coefficients(rounds))
    assert found == pytest.approx(worst_by_trying(matrix, apart, participations))
    longer = [banded.sensitivity(rounds + more, separation=apart, participations=participations) for more in (0, 1, 5)]
    assert longer == sorted(longer)  # noise for a run is enough for a shorter one


def test_wrong_matrices_are_refused():
    for wrong in ([], [0.0], [1.0, 1.1], [1.0, -0.1], [1.0, float("nan")], [[1.0]]):
        with pytest.raises(InvalidParameter, match="coefficients"):
            cn.toeplitz_sensitivity(wrong, separation=1, participations=1)
    with pytest.raises(InvalidParameter, match="at least the number of bands, 2"):
        cn.banded_sensitivity(cn.toeplitz_matrix([1.0, 0.5]), separation=1, participations=1)
    with pytest.raises(InvalidParameter, match="lower-triangular"):
        cn.banded_sensitivity(np.ones((2, 2)), separation=2, participations=1)
    for wrong in ({"decays": (1.0,), "scales": (0.1,)}, {"decays": (0.5,)}, {"decays": (0.5, 0.5), "scales": (0.6, 0.6)}):
        with pytest.raises(InvalidParameter):
            cn.BLT(**wrong)
    with pytest.raises(InvalidParameter, match="separation"):
        cn.toeplitz_sensitivity([1.0], separation=0, participations=1)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 0.99), st.floats(0, 0.3)), max_size=3), st.integers(1, 12))
def test_streaming_is_the_dense_inverse(pairs, rounds):
    blt = cn.BLT(tuple(d for d, _ in pairs), tuple(w for _, w in pairs))
    z = torch.randn(rounds, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    coefficients = blt.coefficients(rounds)
    dense = torch.linalg.solve(torch.from_numpy(cn.toeplitz_matrix(coefficients)), z)
    buffers, streamed = blt.begin(z[0]), []
    for independent in z:
        noise, buffers = blt.step(independent, buffers)
        streamed.append(noise)
    assert torch.allclose(torch.stack(streamed), dense, atol=1e-9)
    assert torch.allclose(cn.correlated_noise(cn.inverse_coefficients(coefficients), z), dense, atol=1e-9)


def test_blt_coefficients():
    # d = ½, ω = ¼: 1, ¼, ⅛, 1/16.
    assert cn.BLT((0.5,), (0.25,)).coefficients(4).tolist() == [1.0, 0.25, 0.125, 0.0625]
    assert cn.BLT().coefficients(3).tolist() == [1.0, 0.0, 0.0]


def test_a_fit_beats_independent_noise_and_is_near_the_square_root():
    rounds = 64
    fitted = cn.fit_blt(rounds, pairs=2)
    mine, none, root = (
        cn.loss_of(c, separation=rounds, participations=1)
        for c in (fitted.coefficients(rounds), cn.BLT().coefficients(rounds), cn.square_root_coefficients(rounds))
    )
    assert none == rounds  # sens 1, the variance of 64 independent numbers
    assert mine < 1.05 * root < none


@pytest.mark.parametrize("apart", [1, 3, 7])
def test_rounds_of_a_client_are_apart(apart):
    sampler, alpha = MinSeparation(apart), torch.full((23,), 1 / 23, dtype=torch.float64)
    last, count = {}, dict.fromkeys(range(23), 0)
    for t in range(50):
        cohort = sampler(t, alpha, clients_per_round=3, seed=5)
        assert len(set(cohort.clients.tolist())) == 3
        for client in cohort.clients.tolist():
            assert t - last.get(client, -apart) >= apart
            last[client] = t
            count[client] += 1
    assert max(count.values()) <= sampler.participations(50) == -(-50 // apart)


def test_too_many_clients_for_a_group_are_refused():
    with pytest.raises(InvalidParameter, match="whose turn it is"):
        MinSeparation(5)(0, torch.full((12,), 1 / 12, dtype=torch.float64), clients_per_round=3, seed=0)
    with pytest.raises(InvalidParameter, match="rounds"):
        MinSeparation(0)
    private = eq.privacy.DifferentialPrivacy(epsilon=5.0, delta=1e-4, clip=1.0)
    with pytest.raises(eq.errors.IncompatibleParts):  # not sampled at random: nothing is amplified
        eq.Algorithm(sampler=MinSeparation(5), privacy=private)


def test_numbers_of_jax_privacy():
    """jax-privacy 2.0.0, computed once: minsep_sensitivity_squared, inverse_coef and get_sensitivity_banded."""
    root = cn.square_root_coefficients(6)
    for separation, participations, squared in (
        (1, 2, 5.1015167236328125), (2, 3, 7.6387481689453125), (3, 2, 4.0972442626953125), (6, 1, 1.6236114501953125),
    ):  # fmt: skip
        found = cn.toeplitz_sensitivity(root, separation=separation, participations=participations)
        assert found**2 == pytest.approx(squared, rel=1e-12)
    assert cn.inverse_coefficients(root).tolist() == [1.0, -0.5, -0.125, -0.0625, -0.0390625, -0.02734375]
    matrix = cn.toeplitz_matrix([1.0, 0.5, 0.0, 0.0])
    assert cn.banded_sensitivity(matrix, separation=2, participations=2) == pytest.approx(1.5811388300841898, rel=1e-12)


def test_a_factor_of_the_wrong_side_is_charged_for_what_its_columns_are():
    """X tridiagonal (1, ½): CᵀC = X has columns of norm 1. LLᵀ = X has rows of norm 1, and a first column (1, ½): √1.25."""
    x = np.eye(4) + 0.5 * (np.eye(4, k=1) + np.eye(4, k=-1))
    wrong = np.linalg.cholesky(x)
    right = np.linalg.cholesky(x[::-1, ::-1]).T[::-1, ::-1]  # flip, factor, transpose, flip
    assert np.allclose(right.T @ right, x)
    assert np.allclose(np.triu(right, 1), 0)
    assert cn.banded_sensitivity(right, separation=2, participations=1) == pytest.approx(1.0)
    assert cn.banded_sensitivity(wrong, separation=2, participations=1) == pytest.approx(1.25**0.5)


def test_a_fit_warns_of_nothing():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cn.fit_blt(20, pairs=2, separation=2, participations=10)
