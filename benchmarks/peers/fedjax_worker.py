"""FedJAX: its federated averaging over in-memory clients; with several processes, its pmap backend on so many devices."""

from __future__ import annotations

import os
from importlib.metadata import version
from typing import Any

import fedjax
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
from fedjax.algorithms import fed_avg
from problem import CLASSES, LEARNING_RATE, PROBLEMS, SCALE, Array
from turns import Turns, options


def linear(x: jax.Array) -> jax.Array:
    return hk.Linear(CLASSES, name="readout")(x)


def convnet(x: jax.Array) -> jax.Array:
    hidden = x.reshape(-1, 28, 28, 1)
    for name, channels in (("first", 32), ("second", 64)):
        hidden = hk.Conv2D(channels, 5, padding="VALID", name=name)(hidden)
        b, h, w, c = hidden.shape
        hidden = jax.nn.relu(hidden.reshape(b, h // 2, 2, w // 2, 2, c).max((2, 4)))
    return hk.Linear(CLASSES, name="readout")(hidden.reshape(b, -1))


def to_haiku(arrays: list[Array]) -> dict[str, dict[str, jax.Array]]:
    """From torch's layout, channel first, to haiku's, channel last."""
    *convolutions, readout, readout_bias = arrays
    if convolutions:
        readout = readout.reshape(CLASSES, 64, 4, 4).transpose(0, 2, 3, 1).reshape(CLASSES, 1024)
    named = {"readout": {"w": jnp.asarray(readout.T), "b": jnp.asarray(readout_bias)}}
    for i, name in enumerate(("first", "second") if convolutions else ()):
        weight, bias = convolutions[2 * i : 2 * i + 2]
        named[name] = {"w": jnp.asarray(weight.transpose(2, 3, 1, 0)), "b": jnp.asarray(bias)}
    return named


def from_haiku(named: Any) -> list[Array]:
    readout = np.asarray(named["readout"]["w"]).T
    if len(named) > 1:
        readout = readout.reshape(CLASSES, 4, 4, 64).transpose(0, 3, 1, 2).reshape(CLASSES, 1024)
    arrays: list[Array] = []
    for name in ("first", "second") if len(named) > 1 else ():
        arrays += [np.asarray(named[name]["w"]).transpose(3, 2, 0, 1), np.asarray(named[name]["b"])]
    return [*arrays, readout, np.asarray(named["readout"]["b"])]


def main() -> None:
    chosen = options()
    problem = PROBLEMS[chosen.workload]
    # Read when jax computes for the first time: so many devices, each with a thread of its own.
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={chosen.processes}"
    network = hk.without_apply_rng(hk.transform(linear if len(problem.shapes) == 2 else convnet))
    if chosen.processes > 1:
        fedjax.set_for_each_client_backend("pmap")

    def gradient(parameters: Any, batch: dict[str, jax.Array], rng: jax.Array) -> Any:
        def loss(parameters: Any) -> jax.Array:
            scores = jax.nn.log_softmax(network.apply(parameters, batch["x"].astype(jnp.float32) * SCALE))
            return -(scores * jax.nn.one_hot(batch["y"], CLASSES)).sum(1).mean()

        return jax.grad(loss)(parameters)

    x, y = problem.data()
    clients = {f"client-{i}": {"x": x[i], "y": y[i].astype(np.int32)} for i in range(problem.clients)}
    data = fedjax.InMemoryFederatedData(clients)
    sampler = fedjax.client_samplers.UniformGetClientSampler(data, problem.clients_per_round, seed=0)
    algorithm = fed_avg.federated_averaging(
        gradient, fedjax.optimizers.sgd(LEARNING_RATE), fedjax.optimizers.sgd(1.0),
        fedjax.ShuffleRepeatBatchHParams(batch_size=problem.batch_size, num_epochs=1),
    )  # fmt: skip
    state = algorithm.init(to_haiku(problem.initial()))
    turns = Turns(problem, lambda: from_haiku(state.params), lambda: jax.block_until_ready(state.params))
    turns.ready(f"{version('fedjax')} (jax {jax.__version__})")
    while turns.proceed():
        state, _ = algorithm.apply(state, sampler.sample())


if __name__ == "__main__":
    main()
