"""Local steps divided by side information: AdaDPS among clients."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from equipoise.core.params import ParameterLayout
from equipoise.errors import InvalidParameter, require
from equipoise.solvers.prepared import AdjustedSolver, RoundContext, require_sgd
from equipoise.solvers.sgd import SGD
from equipoise.types import LocalSolver


@dataclass(frozen=True, eq=False)
class AdaDPS:
    """Local SGD with every gradient divided by public side information A: w ← w − γ ∇F(w) / A.

    `side_information` has A by parameter name, positive and broadcast to the parameter's shape; others have A = 1. It must come
    from public sources, such as how common each token is (optim.token_frequency, optim.inverse_tfidf). Under differential
    privacy the update is clipped and noised afterwards, as every update is: coordinates with a small A then stand out of
    the noise. `solver` gives rate, batches and epochs. The published algorithm takes s + 1 local steps where it says s; here
    they are as many as the solver says, and the noise is on the sum of updates.

    Source: Li 2023 (thesis), section 6.4.2 and Algorithm 10; Li et al. 2022 (AdaDPS).

    >>> import torch
    >>> import equipoise as eq
    >>> solver = AdaDPS({"weight": torch.full((10, 64), 2.0)}, solver=eq.solvers.SGD(lr=0.1))
    >>> result = eq.train(eq.models.Softmax(64, 10), eq.data.digits(clients=12), eq.Algorithm(solver=solver), rounds=2,
    ...                   clients_per_round=3)
    >>> len(result.history.rounds)
    2
    """

    side_information: Mapping[str, Tensor]
    solver: SGD = field(default_factory=SGD)

    public_only: ClassVar[bool] = True  # what it prepares a round by is public

    def __post_init__(self) -> None:
        require_sgd(self.solver)
        good = isinstance(self.side_information, Mapping) and len(self.side_information) > 0
        require(good, "side_information", "must name a parameter of the model or more", self.side_information)
        for name, values in self.side_information.items():
            good = isinstance(values, Tensor) and bool((torch.isfinite(values) & (values > 0)).all())
            require(good, "side_information", f"of {name} must be a tensor of positive finite numbers", values)

    def __repr__(self) -> str:
        shapes = {name: tuple(values.shape) for name, values in self.side_information.items()}
        return f"AdaDPS(side_information of {shapes}, solver={self.solver!r})"

    def prepare(self, context: RoundContext, state: Any) -> tuple[LocalSolver, Any]:
        """The solver with A as one vector (D,); nothing is asked of clients."""
        side_information = flat_side_information(context.layout, self.side_information)
        return AdjustedSolver(self.solver, preconditioner=side_information.to(context.params)), state


def flat_side_information(layout: ParameterLayout, given: Mapping[str, Tensor]) -> Tensor:
    """A as one vector (D,): 1 where nothing is given."""
    for name in given:
        if name not in layout.names:
            known = ", ".join(layout.names)
            raise InvalidParameter("side_information", "must be of the model's trained parameters", name, f"They are {known}.")
    shapes = dict(zip(layout.names, layout.shapes, strict=True))
    try:
        full = {name: torch.broadcast_to(given.get(name, torch.ones(())).double(), shape) for name, shape in shapes.items()}
    except RuntimeError as failure:
        rule = f"must broadcast to the parameters' shapes {[tuple(s) for s in shapes.values()]}"
        raise InvalidParameter("side_information", rule, [tuple(v.shape) for v in given.values()]) from failure
    return layout.flatten(full)
