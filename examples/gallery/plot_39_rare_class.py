"""
A tilt between classes serves the rare class
============================================

One example in twenty belongs to the rare class. Logistic regression almost always answers with the common class. With
`groups=y`, a positive tilt evens out the mean losses of the two classes, without weights that somebody must choose. The
common class pays for this (compare section 7.7.2.5 of Li's thesis).
"""

import matplotlib.pyplot as plt
import numpy as np

from equipoise.tilted import TiltedLogisticRegression

rng = np.random.default_rng(0)


def draw(count):
    """Examples of two classes that overlap; one in twenty is of class 1."""
    y = (np.arange(count) % 20 == 0).astype(int)
    return rng.normal(size=(count, 5)) + 0.7 * y[:, None], y


X, y = draw(2000)
X_test, y_test = draw(20_000)
tilts = [0.0, 0.5, 1.0, 2.0, 5.0, 20.0]
errors = []
for tilt in tilts:
    wrong = TiltedLogisticRegression(tilt=tilt).fit(X, y, groups=y).predict(X_test) != y_test
    errors.append([100 * wrong[y_test == 1].mean(), 100 * wrong[y_test == 0].mean()])
rare, common = np.transpose(errors)
places = np.arange(len(tilts))
plt.plot(places, rare, "o-", label="rare class, 1 in 20")
plt.plot(places, common, "s-", label="common class")
plt.xticks(places, [f"{t:g}" for t in tilts])
plt.xlabel("tilt between the classes; 0: their means count by the number of examples")
plt.ylabel("test error in %")
plt.ylim(0, 100)
plt.legend()
plt.show()
