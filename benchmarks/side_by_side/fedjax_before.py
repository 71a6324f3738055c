"""Federated averaging by FedJAX: a gradient, client data in memory, a sampler and two optimisers."""

import fedjax
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
from digits import BATCH, CLIENTS, RATE, ROUNDS, clients
from fedjax.algorithms import fed_avg

users = clients()
network = hk.without_apply_rng(hk.transform(lambda x: hk.Linear(10)(x)))


def gradient(params, batch, rng):
    def loss(params):
        scores = jax.nn.log_softmax(network.apply(params, batch["x"]))
        return -(scores * jax.nn.one_hot(batch["y"], 10)).sum(1).mean()

    return jax.grad(loss)(params)


data = fedjax.InMemoryFederatedData({f"client {k}": {"x": x, "y": y.astype(np.int32)} for k, (x, y, _, _) in enumerate(users)})
sampler = fedjax.client_samplers.UniformGetClientSampler(data, CLIENTS, seed=0)
batches = fedjax.ShuffleRepeatBatchHParams(batch_size=BATCH, num_epochs=1)
algorithm = fed_avg.federated_averaging(gradient, fedjax.optimizers.sgd(RATE), fedjax.optimizers.sgd(1.0), batches)
state = algorithm.init(network.init(jax.random.PRNGKey(0), jnp.zeros((1, 64))))
for _ in range(ROUNDS):
    state, _ = algorithm.apply(state, sampler.sample())
errors = [float((network.apply(state.params, x).argmax(1) != y).mean()) for _, _, x, y in users]
print(f"error {np.mean(errors):.3f}")
