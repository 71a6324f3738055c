"""The point that a run reports, for models with carried values (`core.carried`), too."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from equipoise.core.carried import CarriedLayout, join_model
from equipoise.types import Averaging, ServerState


@dataclass(frozen=True, eq=False)
class Reported:
    """The point that a run reports: parameters (D,), and carried values (C,) if the model has any."""

    params: Tensor
    carried: Tensor | None

    @property
    def model(self) -> Tensor:
        """The model as engines take it."""
        return join_model(self.params, self.carried)


@dataclass(frozen=True, eq=False)
class AveragedModel:
    """A rule of `averaging` applied to a whole model: to its parameters and, as they are averaged, to its carried values."""

    rule: Averaging
    layout: CarriedLayout

    def begin(self, first: ServerState) -> Any:
        """The state of the rule before the first round; of a model with carried values, one state for each of the two."""
        params = self.rule.begin(first.params)
        if first.carried is None:
            return params
        return {"params": params, "carried": self.rule.begin(self.layout.to_moments(first.carried))}

    def update(self, after: ServerState) -> Any:
        """The state of the rule after a round that ended in `after`, which still has the one before."""
        before = after.averaging
        if after.carried is None:
            return self.rule.update(after.params, before)
        carried = self.rule.update(self.layout.to_moments(after.carried), before["carried"])
        return {"params": self.rule.update(after.params, before["params"]), "carried": carried}

    def iterate(self, state: ServerState) -> Reported:
        """The point to report in a state."""
        if state.carried is None:
            return Reported(self.rule.iterate(state.params, state.averaging), None)
        params, moments = self.rule.iterate(state.params, state.averaging["params"]), self.layout.to_moments(state.carried)
        mean = self.rule.iterate(moments, state.averaging["carried"])
        same = mean is moments  # the last iterate: no bit of it is lost
        return Reported(params, state.carried if same else self.layout.from_moments(mean).to(state.carried))
