"""Which path does the local work of all clients of a data set: for tests that mean one path."""

import torch

import equipoise as eq


def everyone(count, round=0):
    """All clients of a data set, with equal weights."""
    return eq.sampling.Full()(round, torch.full((count,), 1 / count, dtype=torch.float64), clients_per_round=count, seed=0)


def paths_of(engine, task, data, solver):
    """The paths that an engine choice takes for updates by a solver; those of the sum must be the same."""
    engine, cohort = engine.start(task, data), everyone(len(data.train))
    params = task.layout.read(task.module).to(engine.device)
    engine.summed_update(params, cohort, solver, cohort.weights, eq.aggregators.WeightedMean())
    for_sums = engine.paths_taken
    engine.updates(params, cohort, solver)
    assert engine.paths_taken == for_sums
    return for_sums
