"""
Tilted regression ignores outliers
==================================

A negative tilt gives large losses less weight. Two fifths of the targets are noise. Least squares follows this noise,
and the tilted fit does not (compare Figure 7.1 of Li's thesis).
"""

import matplotlib.pyplot as plt
import numpy as np
from sklearn.linear_model import LinearRegression

from equipoise.tilted import TiltedLinearRegression

rng = np.random.default_rng(0)
X = rng.uniform(-2, 2, (300, 1))
y = 1.5 * X[:, 0] + 0.3 * rng.normal(size=300)
y[:120] = rng.normal(5, 3, 120)
grid = np.array([[-2.0], [2.0]])
plt.scatter(X[120:, 0], y[120:], s=12, color="0.6", label="good examples")
plt.scatter(X[:120, 0], y[:120], s=12, color="0.85", label="outliers")
plt.plot(grid, LinearRegression().fit(X, y).predict(grid), "C0--", label="least squares")
plt.plot(grid, TiltedLinearRegression(tilt=-2.0).fit(X, y).predict(grid), "C1", label="tilted, t = −2")
plt.plot(grid, 1.5 * grid, "k:", label="truth")
plt.xlabel("x")
plt.ylabel("y")
plt.ylim(-5, 12)
plt.legend(ncols=2)
plt.show()
