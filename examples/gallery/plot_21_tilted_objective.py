"""
What a tilt does to an objective
================================

The picture shows three losses as functions of one parameter, and their tilted mean. As the tilt goes to +∞, the tilted
mean becomes the largest loss. As the tilt goes to −∞, it becomes the smallest loss. The minimum moves with the tilt
(compare Figure 7.2 of Li's thesis).
"""

import matplotlib.pyplot as plt
import torch

from equipoise.tilted import tilted_loss

theta = torch.linspace(-3.5, 4.5, 300)
losses = torch.stack([(theta + 2) ** 2, (theta - 0.5) ** 2, (theta - 3) ** 2]) / 4
for curve in losses:
    plt.plot(theta, curve, color="0.8", lw=1.2)
for tilt, colour in ((-5.0, "C0"), (-1.0, "C7"), (0.0, "black"), (1.0, "C4"), (10.0, "C1")):
    values = torch.stack([tilted_loss(column, tilt=tilt) for column in losses.T])
    plt.plot(theta, values, color=colour, label=f"t = {tilt:g}")
    plt.plot(theta[values.argmin()], values.min(), "o", color=colour)
plt.ylim(-0.6, 5)
plt.xlabel("parameter θ")
plt.ylabel("tilted loss")
plt.title("Grey: the three losses. Dots: minima")
plt.legend()
plt.show()
