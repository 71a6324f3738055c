"""The same training without a network. Name the folder of a federated run to see both on one page."""

import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import equipoise as eq
from equipoise.experiment.folder import read_record
from equipoise.report import write_report

from .data import simulated
from .task import algorithm, net

if __name__ == "__main__":
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8"))
    config = project["tool"]["flwr"]["app"]["config"]
    data = replace(simulated(), name=config["data"])
    result = eq.train(
        net(),
        data,
        algorithm,
        rounds=config["rounds"],
        clients_per_round=min(config["clients-per-round"] or len(data.train), len(data.train)),
        seed=config["seed"],
        engine="loop",
        name="simulation",
    )
    print(result.summary())
    print(write_report([result, *map(read_record, sys.argv[1:])], "simulation.html"))
