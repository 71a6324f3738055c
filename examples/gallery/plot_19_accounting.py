"""
How much noise does a budget need?
==================================

The noise multiplier is the standard deviation of the noise on a sum, in units of the clip bound. If few clients are
sampled per round, an observer can hardly know who took part. The same ε then needs less noise.
"""

import matplotlib.pyplot as plt

from equipoise.privacy import noise_for

budgets = [1.0, 2.0, 4.0, 8.0]
for rate in (0.01, 0.1):
    noise = [noise_for(epsilon, 1e-4, rounds=50, sampling_rate=rate, tolerance=0.05) for epsilon in budgets]
    plt.loglog(budgets, noise, "o-", label=f"{100 * rate:g} % of the clients per round")
plt.xticks(budgets, [f"{b:g}" for b in budgets])
plt.yticks([0.5, 1, 2, 4], ["0.5", "1", "2", "4"])
plt.minorticks_off()
plt.xlabel("ε at δ = 0.0001 after 50 rounds")
plt.ylabel("noise multiplier")
plt.legend()
plt.show()
