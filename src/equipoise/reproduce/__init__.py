"""Published experiments run again: `equipoise reproduce NAME`, or `python -m equipoise.reproduce` with torch and numpy alone.

An entry is an `Experiment` of `experiments.toml`; its published numbers stand in `published/*.toml`, with their source.
"""

from equipoise.reproduce.entry import Claim, Experiment, Figure, Method, Need, Scale
from equipoise.reproduce.experiments import EXPERIMENTS
from equipoise.reproduce.runner import listing, reproduce

__all__ = ["EXPERIMENTS", "Claim", "Experiment", "Figure", "Method", "Need", "Scale", "listing", "reproduce"]
