"""Generators against the laws they state, and their seeds."""

from __future__ import annotations

import subprocess
import sys
from functools import partial

import numpy as np
import pytest
import torch
from scipy import stats

from equipoise.core.rng import generator
from equipoise.data import digits, gaussian_means, label_shift, synthetic
from equipoise.data.datasets.class_law import CLASSES, FEATURES, FLIPPED, published_law, random_law
from equipoise.data.partition import by_classes
from equipoise.errors import InvalidParameter

small = partial(label_shift, train_clients=40, validation_clients=10, test_clients=10, examples=30)


@pytest.mark.parametrize("make", [small, synthetic, digits, partial(gaussian_means, [[0.0, 1.0], [2.0, 3.0]])])
def test_seed_decides_every_bit(make):
    first, again, other = make(seed=1), make(seed=1), make(seed=2)
    for name, part in first.splits.items():
        assert torch.equal(part.x, again.splits[name].x)
        assert torch.equal(part.y, again.splits[name].y)
        assert part.ids == again.splits[name].ids
    assert first.train.x.shape != other.train.x.shape or not torch.equal(first.train.x, other.train.x)


# --- label shift ---------------------------------------------------------------------------------------------------------


def test_label_shift_default_sizes():
    data = label_shift()
    assert [len(part) for part in data.splits.values()] == [2500, 500, 500]
    assert all(set(part.sizes.tolist()) == {100} for part in data.splits.values())
    assert (data.features, data.classes) == (20, 10)
    assert data.train.x.dtype == torch.float32
    assert not set(data.train.ids) & set(data.test.ids)


@pytest.mark.parametrize(("split", "concentration"), [("train", 0.5), ("test", 0.01)])
def test_label_proportions_are_dirichlet(split, concentration):
    data = label_shift(train_clients=1500, validation_clients=0, test_clients=1500, examples=100, seed=3)
    y = data.splits[split].y.reshape(1500, 100).numpy()
    counts = np.stack([np.bincount(row, minlength=10) for row in y])
    # Counts are Dirichlet-multinomial: mean n/10 and variance n p (1 − p) (n + A) / (1 + A) with A = 10 · concentration.
    total = 10 * concentration
    variance = 100 * 0.1 * 0.9 * (100 + total) / (1 + total)
    assert np.abs(counts.mean(0) - 10).max() < 5 * np.sqrt(variance / 1500)
    assert counts.var(0).mean() == pytest.approx(variance, rel=0.06)


@pytest.mark.parametrize("geometry", ["seeded", "published"])
def test_inputs_follow_the_class_law(geometry):
    data = label_shift(
        train_clients=1000, validation_clients=0, test_clients=0, train_concentration=1e6, geometry=geometry, seed=4
    )
    law = published_law() if geometry == "published" else random_law(generator(4, "label shift classes"))
    moments = [law.moments(c) for c in range(CLASSES)]
    means = np.stack([m for m, _ in moments])
    # An input has its label's origin with probability 1 − flip + flip/10, each other class with flip/10.
    origin = np.full((CLASSES, CLASSES), FLIPPED / CLASSES) + (1 - FLIPPED) * np.eye(CLASSES)
    for c in range(CLASSES):
        x = data.train.x[data.train.y == c].double().numpy()
        mean = origin[c] @ means
        second = sum(origin[c, k] * (S + np.outer(m, m)) for k, (m, S) in enumerate(moments))
        covariance = second - np.outer(mean, mean)
        deviation = np.sqrt(np.diag(covariance))
        assert (np.abs(x.mean(0) - mean) / deviation).max() < 5 / np.sqrt(len(x))
        assert (np.abs(np.cov(x.T) - covariance) / np.outer(deviation, deviation)).max() < 6 / np.sqrt(len(x))


def test_published_geometry_is_that_of_the_published_call():
    make_classification = pytest.importorskip("sklearn.datasets").make_classification
    x, y = make_classification(
        n_samples=int(5e5),
        n_features=20,
        n_informative=15,
        n_redundant=2,
        n_repeated=0,
        n_classes=10,
        n_clusters_per_class=1,
        class_sep=5.0,
        hypercube=False,
        random_state=2345,
    )
    law = published_law()
    means = np.stack([law.moments(c)[0] for c in range(CLASSES)])
    origin = np.full((CLASSES, CLASSES), FLIPPED / CLASSES) + (1 - FLIPPED) * np.eye(CLASSES)
    for c in range(CLASSES):
        mine = x[y == c]
        assert (np.abs(mine.mean(0) - origin[c] @ means) / mine.std(0)).max() < 5 / np.sqrt(len(mine))
    # Redundant columns are exact combinations of informative ones: the law's last two directions explain them to rounding.
    back = np.argsort(law.columns)
    z = x[:, back]
    assert np.abs(z[:, :15] @ law.redundancy - z[:, 15:17]).max() < 1e-9


def test_columns_are_informative_redundant_and_noise():
    law = random_law(generator(0, "label shift classes"))
    data = label_shift(train_clients=50, validation_clients=0, test_clients=0, geometry="seeded")
    z = data.train.x.double().numpy()[:, np.argsort(law.columns)]
    assert np.abs(z[:, :15] @ law.redundancy - z[:, 15:17]).max() < 1e-4
    assert sorted(law.columns) == list(range(FEATURES))
    for column in z[:, 17:].T:
        assert stats.kstest(column, "norm").pvalue > 1e-4


def test_centroids_lie_on_shrunk_corners():
    law = random_law(generator(9, "any"))
    size = np.abs(law.centroids)
    # |μ_cj| = 5 s_c t_j: rank one, below 5; the corners themselves are different.
    assert np.linalg.matrix_rank(size, tol=1e-9) == 1
    assert size.max() < 5
    assert len({tuple(row) for row in np.sign(law.centroids).tolist()}) == CLASSES


def test_one_per_cent_of_inputs_come_from_another_class():
    # With centroids far apart the nearest one tells the origin; here the origin is read from the generator's own law instead.
    data = label_shift(train_clients=400, validation_clients=0, test_clients=0, geometry="seeded", seed=8)
    law = random_law(generator(8, "label shift classes"))
    x = data.train.x.double().numpy()
    score = np.empty((len(x), CLASSES))
    inner = np.argsort(law.columns)[:15]
    for c in range(CLASSES):
        white = np.linalg.solve(law.mixing[c].T, (x[:, inner] - law.centroids[c]).T)  # N(0, I) if class c made x
        score[:, c] = (white**2).sum(0)
    own = score[np.arange(len(x)), data.train.y.numpy()]
    # χ² with 15 degrees of freedom exceeds its 1 − 1e-6 quantile only for inputs of other classes, most of which do.
    share = (own > stats.chi2.ppf(1 - 1e-6, 15)).mean()
    assert 0.004 < share < 0.0105


def test_more_clients_do_not_change_the_first():
    few, many = small(seed=2), small(seed=2, train_clients=60)
    assert torch.equal(few.train.x, many.train.x[: len(few.train.x)])


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"train_clients": 0}, "train_clients"),
        ({"test_clients": -1}, "test_clients"),
        ({"examples": 0}, "examples"),
        ({"train_concentration": 0.0}, "train_concentration"),
        ({"test_concentration": float("inf")}, "test_concentration"),
        ({"geometry": "paper"}, "geometry"),
    ],
)
def test_label_shift_errors(changes, word):
    with pytest.raises(InvalidParameter, match=word):
        label_shift(**changes)


def test_needs_neither_sklearn_nor_scipy():
    code = (
        "import sys; sys.modules['sklearn'] = None; sys.modules['scipy'] = None\n"
        "import equipoise.data as d\n"
        "d.label_shift(train_clients=3, validation_clients=0, test_clients=1, geometry='published'); d.synthetic(clients=2)\n"
        "assert not any(m.split('.')[0] in ('sklearn', 'scipy', 'pandas') and sys.modules[m] for m in sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# --- Synthetic(α, β) -----------------------------------------------------------------------------------------------------


def test_synthetic_sizes_are_lognormal_plus_fifty():
    data = synthetic(clients=400, features=2, classes=2, seed=5)
    sizes = data.train.sizes + torch.tensor([data.test.sizes[data.test.ids.index(i)] for i in data.train.ids])
    assert int(sizes.min()) >= 50
    # exp(N(4, 4)) rounded down: compare on the continuous part, away from the grid.
    logs = np.log(sizes.numpy() - 50 + 0.5)
    assert np.mean(logs) == pytest.approx(4.0, abs=5 * 2 / 20)
    assert np.std(logs) == pytest.approx(2.0, rel=0.15)


def test_synthetic_splits_inside_clients():
    data = synthetic(validation=0.1, test=0.1, seed=3)
    assert data.train.ids == data.test.ids == data.validation.ids
    assert len(data.train) == 30
    assert (data.features, data.classes) == (60, 10)
    assert data.test.sizes.sum() / data.train.sizes.sum() == pytest.approx(1 / 8, rel=0.05)


def test_synthetic_inputs_have_the_stated_covariance():
    data = synthetic(clients=60, features=5, seed=1)
    centred = torch.cat([x - x.mean(0) for x, _ in (data.train.client(at=k) for k in range(60))])
    n = len(centred)
    covariance = (centred.T @ centred / (n - 60)).double().numpy()
    expected = np.diag(np.arange(1, 6) ** -1.2)
    scale = np.sqrt(np.outer(np.diag(expected), np.diag(expected)))
    assert (np.abs(covariance - expected) / scale).max() < 6 / np.sqrt(n)


@pytest.mark.parametrize("beta", [0.0, 3.0])
def test_beta_is_the_standard_deviation_of_the_clients_level(beta):
    # The mean over 200 features of v_k is N(0, β² + 1/200), and sampling adds little.
    data = synthetic(1.0, beta, clients=300, features=200, classes=2, seed=2)
    level = np.array([data.train.client(at=k)[0].mean().item() for k in range(300)])
    assert np.std(level) == pytest.approx(np.sqrt(beta**2 + 1 / 200), rel=0.2)


def test_labels_do_not_depend_on_alpha():
    # u_k in W_k = u_k + noise and b_k = u_k + noise gives every class u_k · (Σ_j x_j + 1), which leaves the argmax as it was.
    first, other = synthetic(0.0, 1.0, clients=5, seed=6), synthetic(5.0, 1.0, clients=5, seed=6)
    assert torch.equal(first.train.x, other.train.x)
    assert torch.equal(first.train.y, other.train.y)


def test_iid_clients_share_one_linear_model():
    data = synthetic(iid=True, clients=10, features=8, classes=4, seed=7)
    assert np.abs(data.train.x.mean(0).numpy()).max() < 6 / np.sqrt(len(data.train.x))
    rng = generator(7, "synthetic model")
    W, b = rng.normal(size=(4, 8)), rng.normal(size=4)
    predicted = (data.test.x.double().numpy() @ W.T + b).argmax(1)
    assert (predicted == data.test.y.numpy()).mean() > 0.999  # x was rounded to float32 after y was computed


def test_clients_of_synthetic_disagree():
    # One least-squares classifier per client fits its own client much better than another's.
    data = synthetic(1.0, 0.0, clients=6, features=10, classes=3, seed=4)

    def fit(k):
        x, y = data.train.client(at=k)
        x = torch.cat([x, torch.ones(len(x), 1)], 1)
        return torch.linalg.lstsq(x, torch.nn.functional.one_hot(y, 3).float()).solution

    def accuracy(w, k):
        x, y = data.train.client(at=k)
        return ((torch.cat([x, torch.ones(len(x), 1)], 1) @ w).argmax(1) == y).float().mean().item()

    own = np.mean([accuracy(fit(k), k) for k in range(6)])
    foreign = np.mean([accuracy(fit(k), (k + 1) % 6) for k in range(6)])
    assert own > foreign + 0.2


@pytest.mark.parametrize("changes", [{"alpha": -1.0}, {"beta": float("nan")}, {"clients": 0}, {"features": 0}, {"classes": 1}])
def test_synthetic_errors(changes):
    with pytest.raises(InvalidParameter, match=next(iter(changes))):
        synthetic(**changes)


# --- mean estimation -----------------------------------------------------------------------------------------------------


def test_exact_means_have_exact_moments():
    means = [[0.0, 0.0], [4.0, 0.0], [1.0, 3.0]]
    data = gaussian_means(means, examples=20, exact=True, seed=1)
    assert data.train.x is data.train.y
    for k, mean in enumerate(means):
        x = data.train.x[data.train.rows(k)]
        assert torch.allclose(x.mean(0), torch.tensor(mean, dtype=torch.float64), atol=1e-12)
        assert torch.allclose(torch.cov(x.T, correction=0), torch.eye(2, dtype=torch.float64), atol=1e-12)


def test_exact_losses_differ_by_distance_alone():
    data = gaussian_means([[0.0, 0.0], [4.0, 0.0], [1.0, 3.0]], exact=True)
    w = torch.tensor([0.3, -1.2], dtype=torch.float64)
    losses = [(data.train.x[data.train.rows(k)] - w).square().sum(1).mean().item() for k in range(3)]
    distances = [(torch.tensor(m, dtype=torch.float64) - w).square().sum().item() for m in ([0, 0], [4, 0], [1, 3])]
    assert np.subtract(losses, distances) == pytest.approx([2.0] * 3, abs=1e-12)


def test_random_means_follow_the_law():
    data = gaussian_means([[5.0], [-5.0]], examples=4000)
    for k, mean in enumerate((5.0, -5.0)):
        assert stats.kstest(data.train.x[data.train.rows(k), 0].numpy() - mean, "norm").pvalue > 1e-4
    first, second = data.train.x[:4000, 0] - 5, data.train.x[4000:, 0] + 5
    assert abs(np.corrcoef(first, second)[0, 1]) < 5 / np.sqrt(4000)


def test_gaussian_means_errors():
    with pytest.raises(InvalidParameter, match="means"):
        gaussian_means([1.0, 2.0])
    with pytest.raises(InvalidParameter, match="finite"):
        gaussian_means([[float("nan")]])
    with pytest.raises(InvalidParameter, match="examples"):
        gaussian_means([[0.0, 0.0]], examples=2, exact=True)
    assert len(gaussian_means([[0.0]], examples=1).train.x) == 1


# --- digits --------------------------------------------------------------------------------------------------------------


def test_digits_are_all_there_once():
    data = digits()
    assert len(data.train.x) + len(data.test.x) == 1797
    assert (len(data.train), len(data.test)) == (40, 20)
    assert (data.features, data.classes) == (64, 10)
    assert data.train.x.dtype == torch.uint8
    seen = data.train.inputs(slice(None))
    assert seen.min() == 0
    assert seen.max() == 1
    assert not set(data.train.ids) & set(data.test.ids)


def test_digits_with_another_partition():
    data = digits(clients=20, partition=partial(by_classes, classes_per_client=1), test=0.25)
    assert all(len(data.train.client(at=k)[1].unique()) == 1 for k in range(len(data.train)))
    with pytest.raises(InvalidParameter, match="clients"):
        digits(clients=2000)
