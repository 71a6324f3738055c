"""
Private optimisers for one data set
===================================

DP-SGD, DP-Adam and DP² (delayed preconditioners) train one model without a federation, under example-level privacy. All
three spend the same ε. With sparse features a preconditioner helps.
"""

import matplotlib.pyplot as plt
import torch
from torch import nn

import equipoise as eq

torch.manual_seed(0)
rate = torch.logspace(0, -2, 60)
x = (torch.rand(2000, 60) < rate).float()
y = (x @ (torch.randn(60) / rate.sqrt()) > 0).long()
options = {"noise_multiplier": 1.0, "sample_rate": 0.05, "expected_batch_size": 100}
makers = {
    "DP-SGD": lambda net: eq.optim.DPSGD(net, lr=1.0, clip=0.5, **options),
    "DP-Adam": lambda net: eq.optim.DPAdam(net, lr=0.02, clip=0.5, **options),
    "DP²": lambda net: eq.optim.DP2(net, lr=1.0, lr_adaptive=0.03, clip=0.5, clip_adaptive=2.0, delay=40, **options),
}
for name, make in makers.items():
    torch.manual_seed(1)
    net = nn.Linear(60, 2)
    optimizer, losses = make(net), []
    for batch_x, batch_y in optimizer.batches(x, y, steps=200):
        optimizer.step(batch_x, batch_y)
        losses.append(nn.functional.cross_entropy(net(x), y).item())
    plt.plot(losses, label=name)
plt.xlabel("step")
plt.ylabel("training loss")
plt.legend()
plt.show()
