"""Equipoise: the simulator's rounds of `benchmarks/workloads.py`, with nothing set, in the project's own environment."""

from __future__ import annotations

import torch
from problem import PROBLEMS, Array, as_arrays
from shared_workload import shared
from turns import Turns, options
from workloads import EquipoiseRounds

import equipoise as eq
from equipoise.core.params import ParameterLayout


def main() -> None:
    chosen = options()
    workload, model = shared(chosen.workload)
    layout, rounds = ParameterLayout.of(model), EquipoiseRounds(workload)

    def parameters() -> list[Array]:
        return as_arrays(list(layout.unflatten(rounds.params.cpu()).values()))

    turns = Turns(PROBLEMS[chosen.workload], parameters)
    turns.ready(f"{eq.__version__} (torch {torch.__version__})")
    while turns.proceed():
        rounds()


if __name__ == "__main__":
    main()
