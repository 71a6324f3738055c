"""DP-SGD by Opacus: wrap module, optimiser and loader."""

import warnings

import torch
from opacus import PrivacyEngine
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

warnings.simplefilter("ignore")
torch.manual_seed(0)
x, y = load_digits(return_X_y=True)
x, y = torch.tensor(x / 16, dtype=torch.float32), torch.tensor(y)
net = nn.Linear(64, 10)
loader = DataLoader(TensorDataset(x[:1500], y[:1500]), batch_size=100)
engine = PrivacyEngine(accountant="prv")
net, optimizer, loader = engine.make_private(
    module=net, optimizer=torch.optim.SGD(net.parameters(), lr=1.0), data_loader=loader, noise_multiplier=1.0, max_grad_norm=1.0
)
for _ in range(20):
    for batch_x, batch_y in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(batch_x), batch_y).backward()
        optimizer.step()
error = (net(x[1500:]).argmax(1) != y[1500:]).float().mean()
print(f"error {error:.3f}, ε = {engine.get_epsilon(1e-3):.2f} at δ = 0.001")
