"""The contract of metrics of one client."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True, eq=False)
class MetricTraits:
    """What a metric of one client, a function of (outputs, targets), may offer."""

    higher_is_better: bool = True  # whether more is better
    totals: Callable[[Any, Any], Tensor] | None = None  # sums (k,) over some examples
    finish: Callable[[Tensor], Any] | None = None  # the value, of the sums over all examples
