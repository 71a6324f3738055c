"""The class-conditional law of the label-shift data: ten overlapping Gaussians, as `make_classification` draws them.

That function of scikit-learn follows I. Guyon, "Design of experiments for the NIPS 2003 variable selection benchmark" (2003).
It is written out here in NumPy, so that the data can be made where scikit-learn is not installed.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

CLASSES, INFORMATIVE, REDUNDANT, NOISE = 10, 15, 2, 3
FEATURES = INFORMATIVE + REDUNDANT + NOISE
CLASS_SEPARATION = 5.0
FLIPPED = 0.01

_PUBLISHED_SEED, _PUBLISHED_EXAMPLES = 2345, 500_000


@dataclass(frozen=True, eq=False)
class ClassLaw:
    """x given class c is N(μ_c, A_cᵀA_c) in the informative features, completed by z ↦ zB and by pure noise N(0, I).

    With g ~ N(0, I₁₅) and e ~ N(0, I₃): z = gA_c + μ_c, and x is (z, zB, e) with its columns permuted. Centroids are
    μ_cj = ±5 · s_c · t_j (corners of a hypercube, shrunk into a random polytope by s, t ~ U(0, 1)); A_c and B have entries
    from U(−1, 1).
    """

    centroids: NDArray[np.float64]  # (C, 15)
    mixing: NDArray[np.float64]  # (C, 15, 15)
    redundancy: NDArray[np.float64]  # (15, 2)
    columns: NDArray[np.int64]  # (20,) column j of x is column columns[j] of (z, zB, e)

    def transform(self, classes: NDArray[np.int64], normals: NDArray[np.float64]) -> NDArray[np.float32]:
        """Turn standard normals (N, 18) into examples (N, 20) of the given classes (N,)."""
        x = np.empty((len(classes), FEATURES), np.float32)
        for c in range(CLASSES):
            rows = np.flatnonzero(classes == c)
            z = normals[rows, :INFORMATIVE] @ self.mixing[c] + self.centroids[c]
            x[rows] = np.concatenate([z, z @ self.redundancy, normals[rows, INFORMATIVE:]], axis=1)[:, self.columns]
        return x

    def moments(self, c: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Mean (20,) and covariance (20, 20) of x given class c."""
        lift = np.concatenate([np.eye(INFORMATIVE), self.redundancy], axis=1)  # (15, 17)
        mean = np.concatenate([self.centroids[c] @ lift, np.zeros(NOISE)])
        covariance = np.eye(FEATURES)
        covariance[:-NOISE, :-NOISE] = lift.T @ self.mixing[c].T @ self.mixing[c] @ lift
        return mean[self.columns], covariance[np.ix_(self.columns, self.columns)]


def _bits(corners: NDArray[np.int64]) -> NDArray[np.float64]:
    """The corners' numbers written in binary, most significant bit first: (C,) gives (C, 15)."""
    return ((corners[:, None] >> np.arange(INFORMATIVE)[::-1]) & 1).astype(np.float64)


def random_law(rng: np.random.Generator) -> ClassLaw:
    """A fresh law: new corners, mixing matrices, redundant features and order of columns."""
    corners = rng.choice(2**INFORMATIVE, size=CLASSES, replace=False)
    centroids = (
        CLASS_SEPARATION * (2 * _bits(corners) - 1) * rng.uniform(size=(CLASSES, 1)) * rng.uniform(size=(1, INFORMATIVE))
    )
    mixing = rng.uniform(-1, 1, size=(CLASSES, INFORMATIVE, INFORMATIVE))
    redundancy = rng.uniform(-1, 1, size=(INFORMATIVE, REDUNDANT))
    return ClassLaw(centroids, mixing, redundancy, rng.permutation(FEATURES))


@lru_cache(maxsize=1)
def published_law() -> ClassLaw:
    """The very law of the published call, `make_classification(n_samples=500000, …, random_state=2345)`.

    NumPy promises that the stream of `RandomState` never changes, so following the order of that function's draws gives its
    centroids and matrices. What it draws in between (the examples) must be drawn too, and is thrown away: about half a second.
    """
    rng: Any = np.random.RandomState(_PUBLISHED_SEED)
    corners: list[int] = []
    while len(corners) < CLASSES:
        corner = int(rng.randint(2**INFORMATIVE))
        if corner not in corners:
            corners.append(corner)
    centroids = CLASS_SEPARATION * (2 * _bits(np.array(corners)) - 1)
    centroids = centroids * rng.uniform(size=(CLASSES, 1)) * rng.uniform(size=(1, INFORMATIVE))
    rng.standard_normal(size=(_PUBLISHED_EXAMPLES, INFORMATIVE))
    mixing = np.stack([2 * rng.uniform(size=(INFORMATIVE, INFORMATIVE)) - 1 for _ in range(CLASSES)])
    redundancy = 2 * rng.uniform(size=(INFORMATIVE, REDUNDANT)) - 1
    rng.standard_normal(size=(_PUBLISHED_EXAMPLES, NOISE))
    flipped = rng.uniform(size=_PUBLISHED_EXAMPLES) < FLIPPED
    rng.randint(CLASSES, size=int(flipped.sum()))
    rng.shuffle(np.arange(_PUBLISHED_EXAMPLES))
    columns = np.arange(FEATURES)
    rng.shuffle(columns)
    return ClassLaw(centroids, mixing, redundancy, columns)
