"""
Four measures of a tail
=======================

VaR is a quantile. CVaR (the superquantile) is the mean beyond this quantile. EVaR is an upper bound of both, and TiVaR
lies between VaR and EVaR (Li's thesis, 7.4). VaR ≤ CVaR ≤ EVaR, and VaR ≤ TiVaR ≤ EVaR.
"""

import matplotlib.pyplot as plt
import torch

from equipoise.risk import measures

losses = torch.distributions.Exponential(1.0).icdf(torch.linspace(0.005, 0.995, 200))
tails = torch.linspace(0.05, 0.95, 19).tolist()
named = {"EVaR": measures.entropic_value_at_risk, "CVaR (superquantile)": measures.superquantile,
         "TiVaR": measures.tilted_value_at_risk, "VaR (quantile)": measures.value_at_risk}  # fmt: skip
for name, measure in named.items():
    plt.plot(tails, [float(measure(losses, tail)) for tail in tails], label=name)
plt.axhline(float(losses.mean()), color="0.5", ls=":", label="mean")
plt.xlabel("tail θ: share of the worst clients")
plt.ylabel("value of the measure")
plt.title("Losses from an exponential law")
plt.legend()
plt.show()
