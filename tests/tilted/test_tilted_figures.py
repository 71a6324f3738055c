"""Figures 7.1 and 7.4 as laws, what importing costs, and that the benchmark's data and links are right."""

import subprocess
import sys
from itertools import pairwise

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings

import equipoise.tilted
from equipoise.risk.measures import entropic_value_at_risk, superquantile, tilted_value_at_risk, value_at_risk
from equipoise.tilted import TiltedLinearRegression, TiltedLogisticRegression, links, tilted_loss

MEASURES = (value_at_risk, tilted_value_at_risk, superquantile, entropic_value_at_risk)
POINTS = torch.from_numpy(np.random.default_rng(0).normal(size=10))
ESTIMATES = torch.cat(
    [torch.linspace(-2, 2, 9, dtype=torch.float64), POINTS, POINTS.mean()[None], (POINTS.max() + POINTS.min())[None] / 2]
)


def curve(measure, tails):
    """Figure 7.4, mean estimation: the measure of the squared losses, minimised over the estimate."""
    return [min(measure((POINTS - estimate).square(), tail) for estimate in ESTIMATES) for tail in tails]


def test_the_curves_of_figure_7_4():
    tails = [0.05, 0.2, 0.5, 0.8, 0.95, 1.0]
    var, tivar, cvar, evar = (curve(measure, tails) for measure in MEASURES)
    for lower, upper in ((var, tivar), (tivar, evar), (var, cvar), (cvar, evar)):
        assert all(a <= b + 1e-6 for a, b in zip(lower, upper, strict=True))
    for values in (var, tivar, cvar, evar):
        assert all(a >= b - 1e-6 for a, b in pairwise(values))  # less tail, less risk
    # At the left end all are the smallest largest loss: half the range, squared.
    for values in (var, tivar, cvar, evar):
        assert values[0] == pytest.approx(float((POINTS.max() - POINTS.min()) / 2) ** 2, abs=1e-6)
    # At the right end CVaR and EVaR are the variance, VaR and TiVaR the smallest loss, which is 0 at a point.
    variance = float(POINTS.var(correction=0))
    assert (cvar[-1], evar[-1]) == (pytest.approx(variance, abs=1e-9), pytest.approx(variance, abs=1e-6))
    assert (var[-1], tivar[-1]) == (pytest.approx(0.0, abs=1e-6), pytest.approx(0.0, abs=1e-3))
    # "TiVaR provides a tighter approximation to VaR than CVaR when α is closer to 1."
    assert all(tivar[place] < cvar[place] for place in (3, 4, 5))


def test_the_toys_of_figure_7_1():
    # (a) The solutions of point estimation go from the bulk over the mean to the middle of the range.
    y = np.array([0.9, 1.0, 1.1, 1.05, 3.0])
    found = [float(TiltedLinearRegression(t).fit(np.zeros((5, 1)), y).intercept_) for t in (-50.0, -2.0, 0.0, 2.0, 500.0)]
    assert found[1:] == sorted(found[1:])
    assert found[0] == pytest.approx(1.03, abs=0.06)
    assert found[2] == pytest.approx(y.mean())
    assert found[-1] == pytest.approx((0.9 + 3.0) / 2, abs=0.01)
    # (c) Classes of different size: the rare one is served better the larger the tilt.
    rng = np.random.default_rng(1)
    x = np.vstack([rng.normal(size=(100, 2)) - np.array([1.5, 0]), rng.normal(size=(10, 2)) + np.array([1.5, 0])])
    labels = np.repeat([0, 1], [100, 10])
    rare = [
        TiltedLogisticRegression(t, alpha=1e-2).fit(x, labels).predict_proba(x[100:])[:, 1].min() for t in (-2.0, 0.0, 10.0)
    ]
    assert rare == sorted(rare)


@given(st.lists(st.floats(0, 5), min_size=2, max_size=10), st.floats(-3, 3))
@settings(max_examples=50)
def test_larger_tilts_have_larger_risks(values, tilt):
    losses = torch.tensor(values, dtype=torch.float64)
    assert float(tilted_loss(losses, tilt)) <= float(tilted_loss(losses, tilt + 0.5)) + 1e-12
    # Variance reduction: R_t = mean + (t/2) variance + O(t²).
    small = float(tilted_loss(losses, 1e-4))
    assert small == pytest.approx(float(losses.mean() + 0.5e-4 * losses.var(correction=0)), abs=1e-6)


@pytest.mark.parametrize("link", [links.squared, links.logistic, links.squared_hinge, links.hinge, links.multinomial])
def test_slopes_are_derivatives(link):
    generator = torch.Generator().manual_seed(0)
    many = link is links.multinomial
    z = torch.randn((20, 3) if many else 20, dtype=torch.float64, generator=generator).requires_grad_(True)
    y = torch.arange(20) % (3 if many else 2)
    losses, slopes = link(z, y if many else y.double())
    torch.testing.assert_close(torch.autograd.grad(losses.sum(), z)[0], slopes.detach())


def test_losses_need_torch_alone():
    code = (
        "import sys; from equipoise.tilted import tilted_loss, batch_descent; "
        "print(sorted({name.split('.')[0] for name in sys.modules} & {'sklearn', 'scipy', 'pandas'}))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"


def test_names():
    for name in equipoise.tilted.__all__:
        assert getattr(equipoise.tilted, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'TiltedForest'"):
        _ = equipoise.tilted.TiltedForest
