"""Private optimisers for centralised training: torch modules, per-example clipping, noise, and an account of what it cost.

    optimizer = eq.optim.DPSGD(net, lr=0.5, clip=1.0, noise_multiplier=1.0, sample_rate=1 / 400, expected_batch_size=64)
    for x, y in optimizer.batches(X, Y, steps=1000):       # Poisson batches; one may be empty, and is a step as well
        optimizer.step(x, y)
    optimizer.epsilon(delta=1e-5)

One convention for all: noise of standard deviation noise_multiplier · clip per coordinate on the *sum* of clipped gradients,
divided by the expected batch size.

| method | knows | noise and preconditioner | releases per step |
|---|---|---|---|
| DPSGD | nothing | no preconditioner | 1 |
| DPAdam, DPRMSProp, DPAdaGrad | nothing | from the noisy gradients, after the noise | 1 |
| DP2 | nothing | from averages of earlier noisy gradients, before the noise | 1 |
| DP2(variant="noise_first") | nothing | the same, after the noise | 1 |
| DP2(variant="extra_query") | nothing | the same, before the noise, updated by a second release | 1 or 2, one event |
| AdaDPS | public examples or side information | from those, before the noise | 1 |
| DPRPub | public examples | from those, after the noise | 1 |
| PDADPMD | public examples | none; mixes in the public gradient | 1 |
"""

from equipoise.optim.adaptive import DPSGD, DPAdaGrad, DPAdam, DPRMSProp
from equipoise.optim.delayed import DP2
from equipoise.optim.poisson_batches import poisson_batches, set_aside
from equipoise.optim.private import PrivateOptimizer
from equipoise.optim.public import PDADPMD, AdaDPS, DPRPub, cosine_share
from equipoise.optim.side_information import inverse_tfidf, token_frequency

__all__ = [
    "DP2",
    "DPSGD",
    "PDADPMD",
    "AdaDPS",
    "DPAdaGrad",
    "DPAdam",
    "DPRMSProp",
    "DPRPub",
    "PrivateOptimizer",
    "cosine_share",
    "inverse_tfidf",
    "poisson_batches",
    "set_aside",
    "token_frequency",
]
