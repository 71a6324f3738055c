"""The same steps by Equipoise: the optimiser knows the module, draws the batches and accounts."""

import torch
from sklearn.datasets import load_digits
from torch import nn

import equipoise as eq

torch.manual_seed(0)
x, y = load_digits(return_X_y=True)
x, y = torch.tensor(x / 16, dtype=torch.float32), torch.tensor(y)
net = nn.Linear(64, 10)
options = {"clip": 1.0, "noise_multiplier": 1.0, "sample_rate": 1 / 15, "expected_batch_size": 100}
optimizer = eq.optim.DPSGD(net, lr=1.0, **options)
for batch_x, batch_y in optimizer.batches(x[:1500], y[:1500], steps=300):
    optimizer.step(batch_x, batch_y)
error = (net(x[1500:]).argmax(1) != y[1500:]).float().mean()
print(f"error {error:.3f}, ε = {optimizer.epsilon(delta=1e-3):.2f} at δ = 0.001")
