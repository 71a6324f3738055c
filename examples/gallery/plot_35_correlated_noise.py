"""
Noise that later rounds cancel (DP-FTRL)
========================================

A model is the sum of all rounds' updates. Independent noise adds up over the rounds. DP-FTRL adds noise that later
rounds partly cancel. The matrix of the noise is banded (Choquette-Choo et al. 2023) or a BLT (McMahan et al. 2024). All
three curves have the same privacy: clients take part in every 50th round at most. The deviations are calculated.
"""

import matplotlib.pyplot as plt
import numpy as np

from equipoise.privacy import BLT, Banded, fit_blt
from equipoise.privacy.correlated_noise import inverse_coefficients, square_root_coefficients

rounds, promise = 200, {"separation": 50, "participations": 4}
matrices = {
    "independent noise": BLT(),
    "banded, 8 bands": Banded(tuple(square_root_coefficients(8))),
    "banded, 50 bands": Banded(tuple(square_root_coefficients(50))),
    "BLT, 2 buffers": fit_blt(rounds, pairs=2, **promise),
}
for name, matrix in matrices.items():
    inverse = inverse_coefficients(matrix.coefficients(rounds))
    deviation = np.sqrt(np.cumsum(np.cumsum(inverse) ** 2))  # of the noise in the sum of the first rounds
    plt.plot(range(1, rounds + 1), matrix.sensitivity(rounds, **promise) * deviation, label=name)
plt.xlabel("round")
plt.ylabel("noise in the model, in units of z · clip")
plt.ylim(0, None)
plt.legend()
plt.show()
