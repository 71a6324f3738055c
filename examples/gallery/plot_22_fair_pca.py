"""
Fair PCA fits the small group, too
==================================

Plain PCA keeps the directions of the larger group. A tilt between groups reduces the gap between their reconstruction
losses.
"""

import matplotlib.pyplot as plt
import numpy as np

from equipoise.tilted import FairPCA

rng = np.random.default_rng(0)
many = rng.normal(size=(900, 6)) * [3, 2, 1, 0.3, 0.3, 0.3]
few = rng.normal(size=(100, 6)) * [0.3, 0.3, 0.3, 2, 1.5, 1]
X, group = np.vstack([many, few]), np.repeat(["many", "few"], [900, 100])
tilts = [0.0, 0.1, 0.3, 1.0, 3.0, 10.0, 100.0]
losses = np.array([FairPCA(2, tilt=tilt).fit(X, groups=group).group_losses_ for tilt in tilts])
places = np.arange(len(tilts))
plt.plot(places, losses[:, 0], "o-", label="few: 100 examples")
plt.plot(places, losses[:, 1], "s-", label="many: 900 examples")
plt.xticks(places, [f"{t:g}" + ("\nplain PCA" if t == 0 else "") for t in tilts])
plt.xlabel("tilt between the groups")
plt.ylabel("loss beyond the group's own best")
plt.legend()
plt.show()
