"""A law of all estimators: a fit with whole-number weights is the fit with every example repeated so often."""

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings

from equipoise.tilted import FairPCA, TiltedLinearRegression, TiltedLogisticRegression, TiltedSVC

TAIL = {"risk": "superquantile", "tail": 0.4, "alpha": 1e-2}
MODELS = [
    TiltedLinearRegression(),
    TiltedLinearRegression(5.0, alpha=1e-2),
    TiltedLinearRegression(-1.0, alpha=1e-2),
    TiltedLogisticRegression(),
    TiltedLogisticRegression(2.0),
    TiltedLogisticRegression(-1.0),
    TiltedSVC(),
    TiltedSVC(2.0),
    TiltedSVC(-1.0),
    TiltedSVC(loss="hinge"),
]
seeds = st.integers(0, 2**32 - 1)


def problem(seed, classes):
    """Up to 20 examples, often fewer than features or separable; columns of different sizes; weights from 0 to 4."""
    rng = np.random.default_rng(seed)
    n = int(rng.integers(8, 21))
    features = int(rng.integers(1, 2 * n if rng.random() < 0.5 else 6))
    size = 10 ** rng.uniform(-1, 1, features)
    x = rng.normal(size=(n, features))
    z = x @ rng.normal(size=features) / features**0.5 + rng.choice([0.0, 0.5, 2.0]) * rng.normal(size=n)
    weights = rng.integers(0, 5, n)
    weights[:3] += 1
    if classes:
        z = np.digitize(z, np.quantile(z, np.arange(1, classes) / classes))
        z[:classes] = np.arange(classes)
    x = (x + rng.choice([0.0, 3.0]) * rng.normal(size=features)) * size
    return x, z, weights, rng.integers(0, 3, n), rng.permutation(n)


def predictions(model, x):
    return model.predict(x) if isinstance(model, TiltedLinearRegression) else model.decision_function(x)


def distance(model, seed, classes, grouped=False):
    """How far the weighted and the repeated fit lie apart, relative to the largest prediction or 1."""
    x, y, weights, groups, order = problem(seed, classes)
    rows = np.repeat(np.arange(len(y)), weights)
    labels = {"groups": groups} if grouped else {}
    repeated = predictions(model.fit(x[rows], y[rows], **{name: each[rows] for name, each in labels.items()}), x)
    labels = {name: each[order] for name, each in labels.items()}
    weighted = predictions(model.fit(x[order], y[order], sample_weight=weights[order], **labels), x)
    return np.abs(weighted - repeated).max() / max(1.0, np.abs(repeated).max())


# A gradient carries rounding of about 1e-16, and the smallest curvature in these problems is about 1e-8 of the largest: the
# tolerance is their quotient. Over 200 problems of each kind the largest distance was 2.5e-10.
@pytest.mark.parametrize("model", MODELS, ids=str)
@given(seed=seeds)
@settings(max_examples=8)
def test_weights_are_repetitions(model, seed):
    assert distance(model, seed, 0 if isinstance(model, TiltedLinearRegression) else 2) < 1e-8


@pytest.mark.parametrize("estimator", [TiltedLinearRegression, TiltedLogisticRegression, TiltedSVC])
@given(seed=seeds)
@settings(max_examples=4)
def test_weights_are_repetitions_for_superquantiles(estimator, seed):
    assert distance(estimator(**TAIL), seed, 0 if estimator is TiltedLinearRegression else 2) < 1e-8


# Negative tilts are left out here: they may give a class up, whose free intercept then has no minimum.
@pytest.mark.parametrize("model", [TiltedLogisticRegression(), TiltedLogisticRegression(1.0), TiltedSVC()], ids=str)
@given(seed=seeds)
@settings(max_examples=6)
def test_weights_are_repetitions_with_three_classes(model, seed):
    assert distance(model, seed, 3) < 1e-8


@pytest.mark.parametrize(
    "model",
    [TiltedLogisticRegression(2.0, inner_tilt=-0.5), TiltedSVC(2.0, inner_tilt=0.5), TiltedSVC(**TAIL)],
    ids=str,
)
@given(seed=seeds)
@settings(max_examples=4)
def test_weights_are_repetitions_in_groups(model, seed):
    assert distance(model, seed, 2, grouped=True) < 1e-8


@pytest.mark.parametrize("model", [FairPCA(1, tilt=0.1), FairPCA(1, tilt=-0.1), FairPCA(1, risk="superquantile")], ids=str)
@given(seed=seeds)
@settings(max_examples=8)
def test_weights_are_repetitions_for_principal_components(model, seed):
    # Components have a slope of up to `tol` = 1e-7 left, which leaves its square, divided by a curvature, in the objective.
    x, _, weights, groups, order = problem(seed, 0)
    rows = np.repeat(np.arange(len(x)), weights)
    for repeated, weighted in (({}, {}), ({"groups": groups[rows]}, {"groups": groups[order]})):
        once = model.fit(x[rows], **repeated).objective_
        again = model.fit(x[order], sample_weight=weights[order], **weighted).objective_
        assert abs(again - once) < 1e-9 * np.square(x[rows] - x[rows].mean(0)).sum(1).mean()


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("tilt", [0.0, 3.0])
def test_support_vectors_that_can_be_separated(seed, tilt):
    # Margins end within 1e-4 of the squared hinge's kink, for which no difference of gradients is small enough.
    x, y, *_ = problem(seed, 2)
    rng = np.random.default_rng(seed)
    x, y = np.hstack([x, rng.normal(size=(len(x), 2 * len(x)))]), torch.from_numpy(2.0 * y - 1)
    model = TiltedSVC(tilt).fit(x, y.numpy())
    w = torch.from_numpy(np.append(model.coef_[0], model.intercept_)).requires_grad_(True)
    losses = (1 - y * (torch.from_numpy(x) @ w[:-1] + w[-1])).clamp(min=0).square()
    risk = losses.mean() if tilt == 0 else torch.logsumexp(tilt * losses, 0) / tilt
    (slope,) = torch.autograd.grad(risk + 0.5 * model.alpha * w[:-1].square().sum(), w)
    assert float(slope.abs().max()) < 1e-13 * np.abs(x).max()
    assert float(losses.detach().max()) < 1e-4
