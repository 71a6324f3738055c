"""Problems whose answer is known: triangles of Gaussians, and superquantile least squares against a convex solver."""

import numpy as np
import pytest
import torch
from scipy.optimize import minimize

import equipoise as eq
from equipoise.data.clients import ClientSet, FederatedData
from equipoise.solvers import SGD

# One full gradient step per client and round; the step halves as it goes, since the objective has kinks.
GRADIENT_STEP = SGD(lr=0.1, batch_size=None, steps=1, lr_decay=0.5, lr_decay_every=40)


def three_gaussians(means):
    """Three clients in the plane with the given means and equal spread (four points around each mean)."""
    around = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0], [0.0, -1.0]], dtype=torch.float64)
    clouds = [(f"gaussian-{i}", torch.tensor(m, dtype=torch.float64) + around) for i, m in enumerate(means)]
    return FederatedData(ClientSet.pack((name, x, x) for name, x in clouds))


def minimiser(data, tail):
    algorithm = eq.Algorithm(risk=eq.risk.Superquantile(tail), solver=GRADIENT_STEP, sampler=eq.sampling.Full())
    model = eq.models.MeanEstimator(2).double()
    return eq.train(model, data, algorithm, rounds=800, clients_per_round=3).params.tolist()


OBTUSE = [(0.0, 0.0), (4.0, 0.0), (1.0, 0.5)]
RIGHT = [(0.0, 0.0), (3.0, 0.0), (0.0, 2.0)]
ACUTE = [(0.0, 0.0), (2.0, 0.0), (0.8, 1.6)]


@pytest.mark.parametrize(
    ("means", "answer"),
    [
        (OBTUSE, (2.0, 0.0)),  # the midpoint of the longest side
        (RIGHT, (1.5, 1.0)),  # the midpoint of the hypotenuse
        # The circumcentre: x = 1 by symmetry of the base, and (1 − 0.8)² + (y − 1.6)² = 1 + y² gives y = 1.6 / 3.2.
        (ACUTE, (1.0, 0.5)),
    ],
    ids=["obtuse", "right", "acute"],
)
def test_two_thirds_of_three_gaussians(means, answer):
    # Laguel et al. 2020, section 3, and its erratum: the midpoint is right only for right and obtuse triangles.
    assert minimiser(three_gaussians(means), 2 / 3) == pytest.approx(answer, abs=1e-3)


def test_tail_one_of_three_gaussians_is_the_centroid():
    assert minimiser(three_gaussians(ACUTE), 1.0) == pytest.approx((2.8 / 3, 1.6 / 3), abs=1e-6)


@pytest.mark.parametrize("tail", [0.8, 0.5, 0.2])
def test_least_squares_over_examples_reaches_the_convex_optimum(tail):
    # Each example is a client; the objective is the superquantile of the squared errors.
    rng = np.random.default_rng(3)
    x, noise = rng.normal(size=(25, 2)), rng.standard_t(df=3, size=25)
    y = x @ np.array([1.0, -2.0]) + 0.5 * noise
    clients = ClientSet.pack(
        (f"example-{i}", torch.from_numpy(x[i : i + 1]), torch.from_numpy(y[i : i + 1])) for i in range(len(y))
    )
    algorithm = eq.Algorithm(
        risk=eq.risk.Superquantile(tail),
        solver=SGD(lr=0.05, batch_size=None, steps=1, lr_decay=0.5, lr_decay_every=150),
        sampler=eq.sampling.Full(),
    )
    model = eq.models.LinearRegression(2, bias=False).double()
    found = eq.train(model, FederatedData(clients), algorithm, rounds=1800, clients_per_round=25).params.numpy()

    # min over (w, η, t) of η + mean(t)/θ subject to t ≥ r² − η and t ≥ 0.
    def split(v):
        return v[:2], v[2], v[3:]

    solution = minimize(
        lambda v: v[2] + v[3:].mean() / tail,
        np.concatenate([np.zeros(2), [1.0], np.ones(25)]),
        jac=lambda v: np.concatenate([np.zeros(2), [1.0], np.full(25, 1 / (25 * tail))]),
        constraints={
            "type": "ineq",
            "fun": lambda v: split(v)[2] + split(v)[1] - (y - x @ split(v)[0]) ** 2,
            "jac": lambda v: np.hstack([2 * (y - x @ split(v)[0])[:, None] * x, np.ones((25, 1)), np.eye(25)]),
        },
        bounds=[(None, None)] * 3 + [(0, None)] * 25,
        method="SLSQP",
        options={"ftol": 1e-12, "maxiter": 1000},
    )
    assert solution.success
    alpha = torch.full((25,), 1 / 25, dtype=torch.float64)
    reached = float(eq.risk.Superquantile(tail)(torch.from_numpy((y - x @ found) ** 2), alpha).value)
    assert reached == pytest.approx(solution.fun, rel=1e-4)
    assert reached >= solution.fun - 1e-7  # the solver's value is the optimum
