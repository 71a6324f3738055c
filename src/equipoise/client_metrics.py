"""Figures of one client from its outputs and targets: macro F1, mean absolute error, AUC, perplexity, top 5, and any other.

A metric is a function of (outputs, targets) of all examples of one client that gives one number, or NaN where the client has
none (AUC with one class). A metric that is a function of sums over examples (`SummedMetric`) needs no memory for the outputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from equipoise.core.abilities import metric_traits
from equipoise.core.numbers import plain_values
from equipoise.core.trees import leaves
from equipoise.errors import EquipoiseError, InvalidParameter, is_number, require

TAKEN = frozenset(
    ("client", "split", "seen", "size", "loss", "error", "malicious", "method", "seed", "round", "error_90", "served_loss",
     "served_error", "backdoor_success", "coverage", "set_size", "error_deviation", "error_skewness")
)  # fmt: skip
PREFIXES, ENDINGS = ("personal_", "shared_"), ("_90", "_worst_10")


@dataclass(frozen=True)
class Metric:
    """A function of (outputs, targets) of one client, and whether more is better: `Metric(my_error, higher_is_better=False)`.

    The direction says where the worst clients are: summaries have their tail at the low end if more is better.

    >>> wrong = Metric(lambda outputs, targets: (outputs.argmax(1) != targets).double().mean(), higher_is_better=False)
    >>> float(wrong(torch.eye(2), torch.tensor([0, 0])))
    0.5
    """

    function: Callable[[Any, Any], Any]  # (outputs, targets) of all examples of one client → its value
    higher_is_better: bool = True

    def __call__(self, outputs: Any, targets: Any) -> Any:
        """The value for one client."""
        return self.function(outputs, targets)


@dataclass(frozen=True)
class SummedMetric:
    """A metric of sums: `finish` of the added `totals` of parts of a client's examples.

    `totals(outputs, targets)` gives the sums (k,) of some examples, and `finish` makes the value of the sums of all of them.

    >>> squares = SummedMetric(lambda z, y: torch.stack([(z - y).square().sum(), torch.tensor(float(len(y)))]),
    ...                        lambda sums: (sums[0] / sums[1]).sqrt(), higher_is_better=False)
    >>> float(squares(torch.tensor([1.0, 3.0]), torch.tensor([0.0, 3.0])))  # the root of the mean squared error
    0.7071067690849304
    """

    totals: Callable[[Any, Any], Tensor]
    finish: Callable[[Tensor], Any]
    higher_is_better: bool = True

    def __call__(self, outputs: Any, targets: Any) -> Any:
        """The value for one client."""
        return self.finish(self.totals(outputs, targets))


@dataclass(frozen=True, eq=False)
class ClientMetrics:
    """The metrics of a run by name, checked."""

    functions: Mapping[str, Callable[[Any, Any], Any]] = field(default_factory=dict)

    @classmethod
    def of(cls, given: Any) -> ClientMetrics:
        """The metrics that a user gives, e.g. {"f1": metrics.macro_f1}; None for none."""
        if isinstance(given, ClientMetrics):
            return given
        fix = 'E.g. metrics={"f1": eq.metrics.macro_f1}.'
        good = given is None or isinstance(given, Mapping)
        require(good, "metrics", "must map names to functions of (outputs, targets)", given, fix)
        for name, function in (given or {}).items():
            good = isinstance(name, str) and name.isidentifier() and name not in TAKEN
            good = good and not name.startswith(PREFIXES) and not name.endswith(ENDINGS)
            require(good, "metrics", "must have names of one word that no column of the client table has", name, fix)
            good = callable(function) and not isinstance(function, type)
            require(good, "metrics", f"must be functions of (outputs, targets); {name!r} is none", function, fix)
            higher = metric_traits(function).higher_is_better
            rule = f"must say by higher_is_better, True or False, which way {name!r} is better"
            require(isinstance(higher, bool), "metrics", rule, higher)
        return cls(dict(given or {}))

    def __len__(self) -> int:
        return len(self.functions)

    @property
    def higher_is_better(self) -> dict[str, bool]:
        """By name, whether more is better."""
        return {name: metric_traits(function).higher_is_better for name, function in self.functions.items()}

    def named(self, names: Iterable[str]) -> ClientMetrics:
        """Those with the given names, in their order; a name that is not there is refused."""
        names = list(names)
        for name in names:
            require(name in self.functions, "metrics", f"must be one of {', '.join(self.functions) or 'none'}", name)
        return ClientMetrics({name: self.functions[name] for name in names})

    def begin(self, client: str) -> ClientMeasurement:
        """The measurement of one client, before any of its examples."""
        return ClientMeasurement(self, client)


class ClientMeasurement:
    """Takes in a client's outputs and targets part by part, and gives the value of each metric."""

    def __init__(self, metrics: ClientMetrics, client: str) -> None:
        self._metrics, self._client = metrics, client
        self._traits = {name: metric_traits(function) for name, function in metrics.functions.items()}
        self._totals: dict[str, Tensor] = {}
        self._parts: list[tuple[Any, Any]] = []
        self._gathers = any(traits.totals is None for traits in self._traits.values())

    def add(self, outputs: Any, targets: Any) -> None:
        """Take in some of the client's examples."""
        for name, traits in self._traits.items():
            if traits.totals is not None:
                totals = self._run(name, traits.totals, outputs, targets).detach().double().cpu()
                self._totals[name] = totals if name not in self._totals else self._totals[name] + totals
        if self._gathers:
            self._parts.append((_on_host(outputs), _on_host(targets)))

    def values(self) -> list[float]:
        """The value of each metric, in order; NaN for one that the client does not have."""
        outputs, targets = (_joined(side) for side in zip(*self._parts, strict=True)) if self._gathers else (None, None)
        found = []
        for name, traits in self._traits.items():
            if traits.totals is not None and traits.finish is not None:
                value = self._run(name, traits.finish, self._totals[name])
            else:
                value = self._run(name, self._metrics.functions[name], outputs, targets)
            plain = plain_values(value)
            if not is_number(plain):
                shown = type(value).__name__ if not isinstance(value, Tensor) else f"a tensor of shape {tuple(value.shape)}"
                where = f"metrics[{name!r}] of client {self._client!r}"
                fix = "Average over the examples, or return NaN where there is none."
                raise InvalidParameter(where, "must be one number", shown, fix)
            found.append(float(plain))
        return found

    def _run(self, name: str, function: Callable[..., Any], *given: Any) -> Any:
        try:
            with torch.no_grad():
                return function(*given)
        except EquipoiseError:
            raise
        except Exception as failure:  # a user's function may raise anything
            reason = (str(failure).strip().splitlines() or [type(failure).__name__])[0]
            rule = f"must be functions of (outputs, targets) of one client; {name!r} failed for client {self._client!r}"
            fix = f"It said: {reason}. Where a client has no value, return NaN."
            raise InvalidParameter("metrics", rule, function, fix) from failure


def _on_host(tree: Any) -> Any:
    return rebuilt(tree, [leaf.detach().cpu() if isinstance(leaf, Tensor) else leaf for leaf in leaves(tree)])


def rebuilt(tree: Any, values: list[Any]) -> Any:
    """A tree of the same type with other leaves: outputs of a library's own class keep their attributes."""
    if isinstance(tree, dict):
        named = dict(zip(tree, values, strict=True))
        return named if type(tree) is dict else type(tree)(**named)
    if isinstance(tree, tuple):
        return type(tree)(*values) if type(tree) is not tuple else tuple(values)
    return values[0]


def _joined(parts: tuple[Any, ...]) -> Any:
    """Trees of several parts of a client's examples as one; sequences that were padded to different lengths are padded alike.

    Padding is 0 in outputs, whose places are ignored, and the ignored class −100 in targets of classes.
    """
    if len(parts) == 1:
        return parts[0]
    columns = zip(*(leaves(part) for part in parts), strict=True)
    return rebuilt(parts[0], [_padded_together(column) if isinstance(column[0], Tensor) else column[0] for column in columns])


def _padded_together(tensors: tuple[Tensor, ...]) -> Tensor:
    shapes = {tensor.shape[1:] for tensor in tensors}
    if len(shapes) > 1:
        wide = [max(sizes) for sizes in zip(*shapes, strict=True)]
        pad = 0 if tensors[0].is_floating_point() else -100
        tensors = tuple(
            functional.pad(t, [n for size, most in zip(reversed(t.shape[1:]), reversed(wide), strict=True)
                               for n in (0, most - size)], value=pad) for t in tensors
        )  # fmt: skip
    return torch.cat(tensors)


# ------------------------------------------------------------------------------------------------------------- what is provided


def scores_of(outputs: Any) -> Tensor:
    """The tensor of scores among a model's outputs: the only tensor, or the entry "logits" of a dict-like object."""
    if isinstance(outputs, dict) and isinstance(outputs.get("logits"), Tensor):
        found: Tensor = outputs["logits"]
        return found
    if not isinstance(outputs, Tensor):
        rule = 'must be for models that return a tensor, or a dict with "logits"'
        raise InvalidParameter("metrics", rule, type(outputs).__name__, "Write a function of (outputs, targets) of your own.")
    return outputs


def _by_class(outputs: Any, targets: Any) -> tuple[Tensor, Tensor]:
    """Scores (P, C) and classes (P,) of all places whose target is one of the C classes; others are ignored.

    One score per place stands for two classes: it is positive for class 1.
    """
    scores = scores_of(outputs)
    if scores.dim() == 1 or scores.shape == targets.shape or (scores.dim() == 2 and scores.shape[1] == 1):
        scores = scores.reshape(len(targets), 1, *targets.shape[1:])
        scores = torch.cat([torch.zeros_like(scores), scores], 1)
    if scores.dim() < 2 or scores.shape[:1] + scores.shape[2:] != targets.shape:
        rule = "must be for scores (B, C, …) and targets (B, …)"
        raise InvalidParameter("metrics", rule, (tuple(scores.shape), tuple(targets.shape)))
    places, classes = scores.movedim(1, -1).reshape(-1, scores.shape[1]), targets.reshape(-1).long()
    known = (classes >= 0) & (classes < scores.shape[1])
    return places[known], classes[known]


def _f1_totals(outputs: Any, targets: Any) -> Tensor:
    """By class, places that are rightly said to be of it, said to be of it, and of it: (3 C,)."""
    scores, classes = _by_class(outputs, targets)
    said, count = scores.argmax(1), scores.shape[1]
    right = torch.bincount(classes[said == classes], minlength=count)
    return torch.cat([right, torch.bincount(said, minlength=count), torch.bincount(classes, minlength=count)])


def _macro_f1(totals: Tensor) -> float:
    right, said, true = totals.view(3, -1)
    present = said + true > 0
    return float((2 * right[present] / (said + true)[present]).mean())  # NaN without any place


def _top_totals(outputs: Any, targets: Any, count: int) -> Tensor:
    scores, classes = _by_class(outputs, targets)
    best = scores.topk(min(count, scores.shape[1]), dim=1).indices
    return torch.stack([(best == classes.unsqueeze(1)).any(1).double().sum(), _count(classes)])


def _error_totals(outputs: Any, targets: Any) -> Tensor:
    scores = scores_of(outputs)
    if scores.numel() != targets.numel():
        rule = "must be for as many outputs as targets, for a mean absolute error"
        raise InvalidParameter("metrics", rule, (tuple(scores.shape), tuple(targets.shape)))
    return torch.stack([(scores.reshape(targets.shape).double() - targets.double()).abs().sum(), _count(targets)])


def _likelihood_totals(outputs: Any, targets: Any) -> Tensor:
    scores, classes = _by_class(outputs, targets)
    return torch.stack([functional.cross_entropy(scores, classes, reduction="none").double().sum(), _count(classes)])


def _count(values: Tensor) -> Tensor:
    return torch.tensor(float(values.numel()), dtype=torch.float64, device=values.device)


def mean_of_totals(totals: Tensor) -> float:
    """The first of two sums divided by the second; NaN if that is 0."""
    return float(totals[0] / totals[1]) if float(totals[1]) else math.nan


def exponential_of_mean(totals: Tensor) -> float:
    """Exp of the first of two sums divided by the second, infinite where that overflows; NaN if the second is 0."""
    return float(torch.exp(totals[0] / totals[1])) if float(totals[1]) else math.nan


def area_under_curve(outputs: Any, targets: Any) -> float:
    """The area under the ROC curve of two classes: the chance that an example of class 1 has the larger score, ties by half.

    Scores are (B,), (B, 1), or (B, 2), whose difference counts. NaN for a client with examples of one class only.
    """
    scores, classes = _by_class(outputs, targets)
    rule = "must be for two classes, for an AUC"
    require(scores.shape[1] == 2, "metrics", rule, scores.shape[1], "With more classes use metrics.macro_f1.")
    margin = (scores[:, 1].double() - scores[:, 0].double()).contiguous()
    above, below = margin[classes == 1], margin[classes == 0].sort().values
    if len(above) == 0 or len(below) == 0:
        return math.nan
    wins = torch.searchsorted(below, above) + torch.searchsorted(below, above, right=True)
    return float(wins.double().sum()) / (2 * len(above) * len(below))


macro_f1 = SummedMetric(_f1_totals, _macro_f1)
"""The F1 of each class that a client has or is said to have, averaged; for scores (B, C, …) and classes (B, …)."""
top_5 = SummedMetric(partial(_top_totals, count=5), mean_of_totals)
"""The share of a client's places whose class is among those with the five largest scores."""
mean_absolute_error = SummedMetric(_error_totals, mean_of_totals, higher_is_better=False)
"""The mean of |output − target|."""
perplexity = SummedMetric(_likelihood_totals, exponential_of_mean, higher_is_better=False)
"""exp of the mean cross-entropy over all places of a client, e.g. tokens; for scores (B, C, …) and classes (B, …)."""
auc = Metric(area_under_curve)
"""The area under the ROC curve of a client with two classes: how often a positive example scores higher than a negative one."""

PROVIDED: dict[str, Callable[[Any, Any], Any]] = {
    "macro_f1": macro_f1, "top_5": top_5, "mean_absolute_error": mean_absolute_error, "perplexity": perplexity, "auc": auc,
}  # fmt: skip
