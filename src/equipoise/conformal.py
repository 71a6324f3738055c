"""Conformal sets: classes that hold the true one with a chosen probability, and how well that holds for each client."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from equipoise.core import trees
from equipoise.core.abilities import read
from equipoise.core.task import Task
from equipoise.data.clients import ClientSet, FederatedData
from equipoise.errors import InvalidData, InvalidParameter, require, require_number
from equipoise.privacy.private_quantile import bin_edges, client_contributions, cumulative_counts, safe_modulus
from equipoise.privacy.random_source import SystemSource
from equipoise.privacy.secure_sum import SimulatedSecureSum
from equipoise.types import QuantileSource, QuantileTraits

if TYPE_CHECKING:
    from equipoise.client_table import ClientTable

_ROWS = 1024  # examples in a forward pass
COVERAGE, SET_SIZE = "coverage", "set_size"  # columns of a table of clients


def conformal_threshold(scores: Tensor, miss: float, clients: int = 1) -> float:
    """The ⌈(1 − ζ)(N + K)⌉-th smallest of N scores of K clients; infinite if there is none.

    A test point of client k, drawn with probability (n_k + 1)/(N + K) and exchangeable with that client's scores, is then
    covered with a probability of at least 1 − ζ, and below 1 − ζ + K/(N + K) for scores without ties.

    `scores` (N,) are the scores of the true classes, larger where the model is less sure.

    Source: Lu et al. 2023 (arXiv 2305.17564). Some published code uses N + 1 in place of N + K.

    >>> conformal_threshold(torch.arange(1.0, 21.0), 0.1, clients=2), conformal_threshold(torch.arange(1.0, 21.0), 0.1)
    (20.0, 19.0)
    """
    rank = math.ceil((1 - miss) * (len(scores) + clients) - 1e-9)
    return float(scores.sort().values[rank - 1]) if rank <= len(scores) else math.inf


@dataclass(frozen=True, eq=False)
class ConformalSets:
    """How conformal sets of a model fare, client by client: the share of covered test examples and the mean set size.

    A single client has no guarantee of a coverage of 1 − `miss`, unless each client has its own threshold (`per_client`).
    `slack` is one standard deviation of a client's coverage if its true coverage is 1 − `miss`. Iterating gives
    dictionaries.
    """

    miss: float
    per_client: bool
    client: tuple[str, ...]  # (n,) the ids
    size: Tensor  # (n,) int64, test examples
    threshold: Tensor  # (n,) float64; infinite: every class is in the set
    coverage: Tensor  # (n,) float64
    set_size: Tensor  # (n,) float64

    @property
    def slack(self) -> Tensor:
        """√(ζ(1 − ζ)/test examples) of each client, (n,)."""
        return (self.miss * (1 - self.miss) / self.size.double()).sqrt()

    @property
    def overall(self) -> float:
        """The share of all test examples that are covered."""
        return float((self.coverage * self.size).sum() / self.size.sum())

    @property
    def worst(self) -> float:
        """The smallest coverage of a client."""
        return float(self.coverage.min())

    @property
    def percentile_10(self) -> float:
        """The coverage that nine of ten clients reach: the largest value with at least 90 % of the clients at or above it."""
        ordered = self.coverage.sort(descending=True).values
        return float(ordered[math.ceil(0.9 * len(ordered) - 1e-9) - 1])

    def __iter__(self) -> Iterator[dict[str, Any]]:
        columns = (self.size, self.threshold, self.coverage, self.set_size, self.slack)
        names = ("size", "threshold", "coverage", "set_size", "slack")
        for client, *numbers in zip(self.client, *(column.tolist() for column in columns), strict=True):
            yield {"client": client, **dict(zip(names, numbers, strict=True))}

    def __str__(self) -> str:
        own = "with a threshold for each client" if self.per_client else "with one threshold for all clients"
        lines = [
            f"Conformal sets of {len(self.client)} clients, wanted coverage {1 - self.miss:.1%}, {own}:",
            f"  of all test examples      {self.overall:.1%}",
            f"  nine of ten clients reach {self.percentile_10:.1%}",
            f"  worst client              {self.worst:.1%}",
            f"  mean set size             {float((self.set_size * self.size).sum() / self.size.sum()):.2f}",
        ]
        return "\n".join(lines)


def threshold_by_sums(scores: Tensor, miss: float, clients: int, quantile: QuantileSource) -> float:
    """`conformal_threshold` from sums over scores, rounded up to the edge of a bin, so that the coverage is not lower.

    `quantile` is a privacy.SecureHistogram, or a privacy.PrivateQuantile with its noise, whose bound is at least 1, as
    large as a score may be. Every score counts by itself: the noise protects one example, and not all examples of a client.

    `scores` (N,) are those of `conformal_threshold`.

    >>> from equipoise.privacy import SecureHistogram
    >>> scores = torch.arange(0.05, 1.0, 0.1)  # 0.05, 0.15, …, 0.95: the 9th of 10 is 0.85
    >>> conformal_threshold(scores, 0.2).__round__(2), threshold_by_sums(scores, 0.2, 1, SecureHistogram(1.0, 10)).__round__(2)
    (0.85, 0.9)
    """
    traits = read(QuantileTraits, quantile)
    source: Any = quantile
    known = traits.histogram is not None or traits.calibrated is not None
    fix = "E.g. privacy.SecureHistogram(bound=1.0, bins=64)."
    require(known and source.bound >= 1, "quantile", "must count scores in bins from 0 to 1", quantile, fix)
    rank = math.ceil((1 - miss) * (len(scores) + clients) - 1e-9)
    if rank > len(scores):
        return math.inf
    if traits.histogram is not None:
        below = traits.histogram.rows(scores).sum(0).cumsum(0).double()  # (bins,) below the upper edge of each bin
    else:
        (sigma, scale), bound, bins = source.noise(), source.bound, source.bins
        rows = client_contributions(scores, bound=bound, bins=bins, sigma=sigma, scale=scale, source=SystemSource())
        total = SimulatedSecureSum(source.modulus or safe_modulus(scale, sigma, bins, len(scores))).sum(rows)
        below = cumulative_counts(total, bins=bins, scale=scale, clients=len(scores))[1:]
    enough = (below >= rank - 1e-9).nonzero().flatten()
    place = int(enough[0]) if len(enough) else source.bins - 1
    return float(bin_edges(source.bound, source.bins)[place + 1])


def conformal_sets(
    model: nn.Module,
    data: FederatedData,
    *,
    miss: float = 0.1,
    per_client: bool = False,
    quantile: QuantileSource | None = None,
) -> ConformalSets:
    """Sets of classes with the scores 1 − p_y below a threshold, calibrated on validation examples and judged on test examples.

    `miss` is ζ. The validation examples of clients that also have test examples calibrate the threshold. Do not choose
    anything else by these examples, or the measured coverage is too high. With `per_client` each client has a threshold of
    its own, the ⌈(1 − ζ)(n_k + 1)⌉-th smallest; one with fewer than (1 − ζ)/ζ validation examples gets every class.
    `quantile` finds the common threshold by secure sums (privacy.SecureHistogram), or with noise (privacy.PrivateQuantile):
    see `threshold_by_sums`.

    Source: Lu et al. 2023 (arXiv 2305.17564).
    """
    alone = quantile is None or not per_client
    require(alone, "quantile", "finds one threshold for all clients", quantile, "Use per_client=False.")
    require(isinstance(model, nn.Module), "model", "must be a torch.nn.Module", type(model).__name__)
    require(isinstance(data, FederatedData), "data", "must be FederatedData", type(data).__name__)
    require_number("miss", miss, "(0, 1)", "0.1 asks for a coverage of 90 %.")
    cure = 'Split examples inside clients: split_by="examples", with validation=… and test=….'
    if data.validation is None or data.test is None:
        raise InvalidData(f"Conformal sets need validation and test examples; {data.name!r} has not both. {cure}")
    where = data.validation.find(data.test)
    here = (where >= 0).nonzero().flatten()
    if len(here) == 0:
        raise InvalidData(f"No client of {data.name!r} has both validation and test examples. {cure}")
    task = Task.around(model)
    was_training = model.training
    try:
        model.eval()
        calibration = [_probabilities(task, data.validation, k) for k in where[here].tolist()]
        tests = [_probabilities(task, data.test, k) for k in here.tolist()]
    finally:
        model.train(was_training)
    scores = [1 - p.gather(1, y.unsqueeze(1))[:, 0] for p, y in calibration]
    shared = (
        conformal_threshold(torch.cat(scores), miss, len(scores))
        if quantile is None
        else threshold_by_sums(torch.cat(scores), miss, len(scores), quantile)
    )
    thresholds = [conformal_threshold(own, miss) if per_client else shared for own in scores]
    rows = []
    for (p, y), threshold in zip(tests, thresholds, strict=True):
        inside = 1 - p <= threshold  # (n, C)
        rows.append((inside.gather(1, y.unsqueeze(1)).double().mean(), inside.double().sum(1).mean()))
    coverage, size = map(torch.stack, zip(*rows, strict=True))
    known = torch.tensor(thresholds, dtype=torch.float64)
    return ConformalSets(miss, per_client, data.test.ids_at(here), data.test.sizes.cpu()[here], known, coverage, size)


def conformal_columns(table: ClientTable, sets: ConformalSets) -> ClientTable:
    """A table of clients with the columns `coverage` and `set_size` in its test rows; NaN elsewhere.

    `table` is the table of clients of a run, `sets` are those of `conformal_sets`.

    >>> import equipoise as eq
    >>> data = eq.data.digits(clients=12, split_by="examples", validation=0.2)
    >>> result = eq.train(eq.models.Softmax(64, 10), data, rounds=2, clients_per_round=3)
    >>> table = conformal_columns(result.clients, conformal_sets(result.model, data))
    >>> bool((table.where("test").metrics["set_size"] >= 0).all())
    True
    """
    columns = {}
    for name in (COVERAGE, SET_SIZE):
        known = {row["client"]: row[name] for row in sets}
        rows = zip(table.client, table.split, strict=True)
        values = [known.get(client, math.nan) if split == "test" else math.nan for client, split in rows]
        columns[name] = torch.tensor(values, dtype=torch.float64)
    higher = {**table.higher_is_better, COVERAGE: True, SET_SIZE: False}
    return replace(table, metrics={**table.metrics, **columns}, higher_is_better=higher, miss=sets.miss)


def _probabilities(task: Task, clients: ClientSet, k: int) -> tuple[Tensor, Tensor]:
    """The probabilities (n, C) of the classes, float64, and the labels (n,) of one client's examples."""
    rows, parts, dtype = clients.rows(k), [], task.layout.dtype
    device = next(task.module.parameters()).device
    labels = clients.targets(rows, dtype)
    if not isinstance(labels, Tensor) or labels.dim() != 1 or labels.is_floating_point():
        raise InvalidData("Conformal sets need one class per example as the target.")
    for start in range(rows.start, rows.stop, _ROWS):
        x = trees.map_tree(lambda leaf: leaf.to(device), clients.inputs(slice(start, min(start + _ROWS, rows.stop)), dtype))
        with torch.no_grad():
            outputs = trees.call(task.module, x)
        if not isinstance(outputs, Tensor) or outputs.dim() != 2:
            raise InvalidParameter("model", "must give one score per class, (B, C)", type(outputs).__name__)
        parts.append(outputs.double().softmax(1).cpu())
    return torch.cat(parts), labels.cpu().long()
