"""Engines: where clients' work is done. With one seed all agree up to rounding."""

from importlib import import_module
from typing import Any

from equipoise.engines.cluster.ray_engine import Ray
from equipoise.engines.loop import Loop
from equipoise.engines.simulator.simulator_options import Simulator

__all__ = ["Loop", "Ray", "Simulator", "flower"]


def __getattr__(name: str) -> Any:
    """`engines.flower` is imported when it is first used: it needs Flower, and `equipoise.train` below it."""
    if name == "flower":
        return import_module("equipoise.engines.flower")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
