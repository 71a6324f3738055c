"""Plain PyTorch: the careful loop of `benchmarks/workloads.py`, in the project's own environment."""

from __future__ import annotations

import torch
from problem import PROBLEMS, as_arrays
from shared_workload import shared
from turns import Turns, options
from workloads import plain_round


def main() -> None:
    chosen = options()
    torch.set_num_threads(chosen.threads)
    workload, model = shared(chosen.workload)
    one = plain_round(workload)
    turns = Turns(PROBLEMS[chosen.workload], lambda: as_arrays([p.detach() for p in model.parameters()]))
    turns.ready(f"torch {torch.__version__}")
    while turns.proceed():
        one(turns.rounds - 1)


if __name__ == "__main__":
    main()
