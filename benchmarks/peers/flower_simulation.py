"""Flower's simulation: ServerApp and ClientApp with the message API, FedAvg, and Ray actors with one core each."""

from __future__ import annotations

import contextlib
import logging
import os

# Read at import. OpenBLAS's threads hang when Ray's driver has forked; nothing but the check of the loss uses them.
os.environ |= {"FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0", "OPENBLAS_NUM_THREADS": "1"}

import flwr
import ray
import torch
from flower_client import app
from flwr.app import ArrayRecord, ConfigRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from problem import PROBLEMS
from turns import Turns, options

ENDLESS = 10**9


class Finished(Exception):
    """No more rounds are wanted."""


def main() -> None:
    chosen = options()
    logging.getLogger("flwr").setLevel(logging.WARNING)
    problem = PROBLEMS[chosen.workload]
    latest = problem.initial()
    turns = Turns(problem, lambda: latest)
    turns.ready(f"{flwr.__version__} (ray {ray.__version__}, torch {torch.__version__})")
    server = ServerApp()

    def between_rounds(server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
        latest[:] = arrays.to_numpy_ndarrays()
        if not turns.proceed():
            raise Finished
        return None

    @server.main()
    def rounds(grid: Grid, context: Context) -> None:
        everyone = problem.clients_per_round  # named twice, or a first round before all have registered takes fewer
        strategy = FedAvg(fraction_evaluate=0.0, min_train_nodes=everyone, min_available_nodes=everyone)
        with contextlib.suppress(Finished):
            strategy.start(
                grid, ArrayRecord(problem.initial()), num_rounds=ENDLESS, evaluate_fn=between_rounds,
                train_config=ConfigRecord({"workload": chosen.workload}),
            )  # fmt: skip

    resources = {"init_args": {"num_cpus": chosen.processes}, "client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
    run_simulation(server, app, num_supernodes=problem.clients_per_round, backend_config=resources)


if __name__ == "__main__":
    main()
