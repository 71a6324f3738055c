"""
Ditto's best strength is known here
===================================

Every client estimates its own number from a few noisy samples. Ditto pulls personal estimates towards the shared
estimate with strength λ. The best λ has a closed form (Li's thesis, 5.4.3). Adversaries make the best λ smaller, so
each client relies less on the shared estimate.
"""

import matplotlib.pyplot as plt
import numpy as np

K, n, sigma, tau, tau_a = 20, 5, 1.0, 0.5, 3.0
rng = np.random.default_rng(0)
strengths = np.geomspace(0.01, 30, 60)
for colour, adversaries in (("C0", 0), ("C1", 10)):
    spread = np.where(np.arange(K) < adversaries, tau_a, tau)
    truth = spread * rng.normal(size=(4000, K))
    means = truth + sigma / np.sqrt(n) * rng.normal(size=(4000, K))
    shared = means.mean(1, keepdims=True)
    errors = [(((lam * shared + means) / (1 + lam) - truth) ** 2)[:, adversaries:].mean() for lam in strengths]
    best = sigma**2 / n * K / (K * tau**2 + adversaries / (K - 1) * (tau_a**2 - tau**2))
    plt.semilogx(strengths, errors, color=colour, label=f"{adversaries} adversaries of {K}")
    plt.axvline(best, color=colour, ls="--", label=f"closed form: λ* = {best:.2f}")
plt.xlabel("strength λ: left own data alone, right the shared model")
plt.ylabel("mean squared error of benign clients")
plt.ylim(0, 0.6)
plt.legend()
plt.show()
