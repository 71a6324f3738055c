"""The last path: the loop engine, for models that cannot be vectorised over clients."""

from __future__ import annotations

from equipoise.engines.simulator.local_rule import LocalRule
from equipoise.engines.simulator.local_work import LocalPath


class LoopPath(LocalPath):
    """One client at a time, by the loop engine, which then also finds losses and evaluates."""

    name = "loop"
    whole_rounds = True

    def supports_rule(self, rule: LocalRule) -> str | None:
        """The engine takes it before any other is asked, or never."""
        return "the model can be vectorised over clients"
