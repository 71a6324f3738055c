"""Plain JAX: what a careful person writes by hand; with several processes, the cohort is shared among so many devices."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array as Tensor
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from problem import CLASSES, LEARNING_RATE, PROBLEMS, SCALE, Array, Problem
from turns import Turns, options

Parameters = dict[str, Tensor]
Round = Callable[[Parameters, np.ndarray, np.ndarray], Parameters]  # model, cohort (K,), orders (K, examples)
EVERYWHERE, SPLIT = PartitionSpec(), PartitionSpec("cores")


def linear(parameters: Parameters, x: Tensor) -> Tensor:
    return x @ parameters["weight"].T + parameters["bias"]


def convnet(parameters: Parameters, x: Tensor) -> Tensor:
    hidden = x.reshape(-1, 28, 28, 1)
    for layer in ("first", "second"):
        hidden = lax.conv_general_dilated(
            hidden, parameters[layer], (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )  # fmt: skip
        hidden = hidden + parameters[f"{layer} bias"]
        b, h, w, c = hidden.shape
        hidden = jax.nn.relu(hidden.reshape(b, h // 2, 2, w // 2, 2, c).max((2, 4)))  # faster than reduce_window
    return hidden.reshape(len(x), -1) @ parameters["readout"] + parameters["readout bias"]


def to_jax(arrays: list[Array]) -> Parameters:
    """From torch's layout (out, in, height, width), channel first, to (height, width, in, out), channel last."""
    if len(arrays) == 2:
        return {"weight": jnp.asarray(arrays[0]), "bias": jnp.asarray(arrays[1])}
    first, first_bias, second, second_bias, readout, readout_bias = arrays
    readout = readout.reshape(CLASSES, 64, 4, 4).transpose(2, 3, 1, 0).reshape(1024, CLASSES)
    named = {"first": first.transpose(2, 3, 1, 0), "first bias": first_bias, "second": second.transpose(2, 3, 1, 0),
             "second bias": second_bias, "readout": readout, "readout bias": readout_bias}  # fmt: skip
    return {name: jnp.asarray(value) for name, value in named.items()}


def from_jax(parameters: Parameters) -> list[Array]:
    named = {name: np.asarray(value) for name, value in parameters.items()}
    if "weight" in named:
        return [named["weight"], named["bias"]]
    readout = named["readout"].reshape(4, 4, 64, CLASSES).transpose(3, 2, 0, 1).reshape(CLASSES, 1024)
    first, second = named["first"].transpose(3, 2, 0, 1), named["second"].transpose(3, 2, 0, 1)
    return [first, named["first bias"], second, named["second bias"], readout, named["readout bias"]]


def step_of(logits: Callable[[Parameters, Tensor], Tensor]) -> Callable[[Parameters, tuple[Tensor, Tensor]], Parameters]:
    def loss(parameters: Parameters, x: Tensor, y: Tensor) -> Tensor:
        return -(jax.nn.log_softmax(logits(parameters, x)) * jax.nn.one_hot(y, CLASSES)).sum(1).mean()

    def step(parameters: Parameters, batch: tuple[Tensor, Tensor]) -> Parameters:
        return jax.tree.map(lambda p, g: p - LEARNING_RATE * g, parameters, jax.grad(loss)(parameters, *batch))

    return step


def scanned_round(problem: Problem, x: Tensor, y: Tensor) -> Round:
    """The round as one compiled function: a scan over clients and over their steps, a shard of the cohort on each device."""
    step, steps = step_of(linear), problem.examples // problem.batch_size

    def shard(model: Parameters, x: Tensor, y: Tensor, cohort: Tensor, orders: Tensor) -> Parameters:
        # A device's own copy of the model: the gradient of a shared one would be summed over devices in every step.
        start = jax.tree.map(lambda value: lax.pcast(value, "cores", to="varying"), model)

        def add(total: Parameters, client: tuple[Tensor, Tensor]) -> tuple[Parameters, None]:
            who, order = client
            images, classes = x[who][order].astype(jnp.float32) * SCALE, y[who][order]
            batches = (images.reshape(steps, problem.batch_size, -1), classes.reshape(steps, problem.batch_size))
            end, _ = lax.scan(lambda parameters, batch: (step(parameters, batch), None), start, batches)
            return jax.tree.map(lambda t, e, s: t + (e - s), total, end, start), None

        total, _ = lax.scan(add, jax.tree.map(jnp.zeros_like, start), (cohort, orders))
        return jax.tree.map(lambda m, t: m + t / problem.clients_per_round, model, lax.psum(total, "cores"))

    mesh = jax.make_mesh((jax.device_count(),), ("cores",), axis_types=(AxisType.Auto,))
    x, y = jax.device_put((x, y), NamedSharding(mesh, EVERYWHERE))
    specs = (EVERYWHERE, EVERYWHERE, EVERYWHERE, SPLIT, SPLIT)
    compiled = jax.jit(jax.shard_map(shard, mesh=mesh, in_specs=specs, out_specs=EVERYWHERE))
    return lambda model, cohort, orders: compiled(model, x, y, cohort, orders)


def looped_round(problem: Problem, x: Tensor, y: Tensor) -> Round:
    """One compiled function for a client's whole epoch, called for one client after the other, on the devices in turn.

    XLA runs a convolution inside a loop of its own many times slower than one outside, so there is no scan here.
    """
    step = step_of(convnet)
    homes = [(device, *jax.device_put((x, y), device)) for device in jax.devices()]

    @jax.jit
    def add(total: Parameters, start: Parameters, x: Tensor, y: Tensor, who: Tensor, order: Tensor) -> Parameters:
        images, classes, end = x[who][order].astype(jnp.float32) * SCALE, y[who][order], start
        for first in range(0, problem.examples, problem.batch_size):
            batch = slice(first, first + problem.batch_size)
            end = step(end, (images[batch], classes[batch]))
        return jax.tree.map(lambda t, e, s: t + (e - s), total, end, start)

    @jax.jit
    def mean(model: Parameters, totals: list[Parameters]) -> Parameters:
        return jax.tree.map(lambda m, *parts: m + sum(parts) / problem.clients_per_round, model, *totals)

    def one(model: Parameters, cohort: np.ndarray, orders: np.ndarray) -> Parameters:
        starts = [jax.device_put(model, device) for device, _, _ in homes]
        totals = [jax.tree.map(jnp.zeros_like, start) for start in starts]
        for i, (who, order) in enumerate(zip(cohort, orders, strict=True)):
            at = i % len(homes)
            totals[at] = add(totals[at], starts[at], *homes[at][1:], who, order)
        return mean(starts[0], jax.device_put(totals, homes[0][0]))

    return one


def main() -> None:
    chosen = options()
    jax.config.update("jax_num_cpu_devices", chosen.processes)  # each runs its part of the cohort in a thread of its own
    problem = PROBLEMS[chosen.workload]
    x, y = problem.data()
    make = scanned_round if len(problem.shapes) == 2 else looped_round
    one, parameters = make(problem, x, y.astype(np.int32)), to_jax(problem.initial())
    cohorts, generator = problem.cohorts(), np.random.default_rng(0)
    unshuffled = np.tile(np.arange(problem.examples, dtype=np.int32), (problem.clients_per_round, 1))  # (K, examples)
    turns = Turns(problem, lambda: from_jax(parameters), lambda: jax.block_until_ready(parameters))
    turns.ready(jax.__version__)
    while turns.proceed():
        parameters = one(parameters, next(cohorts).astype(np.int32), generator.permuted(unshuffled, axis=1))


if __name__ == "__main__":
    main()
