"""Engines: where clients' work is done. All give the same result for the same seed."""

from equipoise.engines.loop import Loop
from equipoise.engines.simulator import Simulator

__all__ = ["Loop", "Simulator"]
