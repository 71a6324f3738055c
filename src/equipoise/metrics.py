"""Numbers that say how a model serves its clients: one value per client in, one summary out.

Metrics of one client (`macro_f1`, `auc`, …), for `metrics={"f1": macro_f1}` of `train`, are from `equipoise.client_metrics`.
Percentiles take no average of neighbours: the p-th is the smallest value with at least p % of the weight at or below it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

import numpy as np
import torch
from torch import Tensor

from equipoise.client_metrics import Metric, SummedMetric, auc, macro_f1, mean_absolute_error, perplexity, top_5
from equipoise.errors import InvalidParameter, require, require_number
from equipoise.risk.superquantile import exact_weights, tail_quantile

__all__ = [
    "Interval",
    "Metric",
    "Summary",
    "SummedMetric",
    "angle",
    "auc",
    "best",
    "entropy",
    "gini",
    "kl_to_uniform",
    "macro_f1",
    "mean",
    "mean_absolute_error",
    "mean_interval",
    "percentile",
    "percentile_interval",
    "perplexity",
    "rank_correlation",
    "share_interval",
    "standard_deviation",
    "summarise",
    "summarise_metric",
    "top_5",
    "worst",
]

LEAST_FOR_SPREAD = 20  # numbers whose spread gives their mean an interval
PERCENTILES = (10, 20, 25, 50, 60, 75, 80, 90, 95)


def _weights(values: Tensor, weights: Tensor | None) -> Tensor:
    if values.dim() != 1 or len(values) == 0:
        raise InvalidParameter("values", "must be one number per client, at least one", tuple(values.shape))
    if weights is None:
        return torch.full((len(values),), 1 / len(values), dtype=torch.float64)
    require(len(weights) == len(values), "weights", f"must be one per client, {len(values)}", len(weights))
    require(bool((weights >= 0).all()) and float(weights.sum()) > 0, "weights", "must be ≥ 0 with a positive sum", weights)
    return weights.double() / weights.double().sum()


def mean(values: Tensor, weights: Tensor | None = None) -> float:
    """The weighted mean Σ w_i v_i, with weights w that are scaled to sum to 1.

    >>> mean(torch.tensor([1.0, 4.0])), mean(torch.tensor([1.0, 4.0]), torch.tensor([2.0, 1.0]))
    (2.5, 2.0)
    """
    return float(_weights(values, weights) @ values.double())


def standard_deviation(values: Tensor, weights: Tensor | None = None) -> float:
    """The population standard deviation √(Σ w_i (v_i − mean)²) over clients: divided by n, as the fairness papers do.

    The weights w are scaled to sum to 1; they are 1/n if none are given.

    >>> standard_deviation(torch.tensor([1.0, 3.0]))
    1.0
    """
    w = _weights(values, weights)
    return math.sqrt(float(w @ (values.double() - w @ values.double()).square()))


def percentile(values: Tensor, percent: float, weights: Tensor | None = None) -> float:
    """The p-th percentile over clients, 0 ≤ p ≤ 100.

    It is the smallest value with at least p % of the weight at or below it. No mean of neighbours is taken.

    >>> percentile(torch.arange(1.0, 11.0), 90)
    9.0
    """
    require_number("percent", percent, "[0, 100]")
    return float(tail_quantile(values.double(), _weights(values, weights), 1 - percent / 100))


def worst(values: Tensor, share: float, weights: Tensor | None = None) -> float:
    """The mean of the largest `share` of the values (their superquantile); with errors or losses these are the worst clients.

    A client at the border counts in part, so that exactly the share `share` of the weight counts. It is the measure that
    `risk.Superquantile` minimises: the maximum of Σ λ_i v_i over λ ≥ 0 with Σ λ_i = 1 and λ_i ≤ w_i / share.

    Source: Pillutla et al. 2023, (5)–(7).

    >>> worst(torch.arange(1.0, 11.0), 0.2)
    9.5
    """
    require_number("share", share, "(0, 1]")
    v = values.double()
    w = _weights(values, weights)
    if bool(torch.isfinite(v).all()):
        return float(exact_weights(v, w, share) @ v)
    order = v.argsort(descending=True)  # a client's loss may be infinite: 0 · ∞ must not count
    above = w[order].cumsum(0)
    tail = above.clamp(max=share) - (above - w[order]).clamp(max=share)
    return float(torch.where(tail > 1e-12, tail * v[order], 0.0).sum()) / share


def best(values: Tensor, share: float, weights: Tensor | None = None) -> float:
    """The mean of the smallest `share` of the values.

    It is −worst(−values, share): a client at the border counts in part.

    >>> best(torch.arange(1.0, 11.0), 0.2)
    1.5
    """
    return -worst(-values.double(), share, weights)


def angle(values: Tensor) -> float:
    """The angle in degrees between the vector of values and the all-ones vector; 0 when all clients fare alike.

    It is arccos(Σ_i v_i / (√n ‖v‖)).

    Source: Li 2023 (thesis), section 4.4, Definition 9.

    >>> round(angle(torch.tensor([1.0, 1.0])), 4), round(angle(torch.tensor([1.0, 0.0])), 4)
    (0.0, 45.0)
    """
    v = values.double()
    norm = float(v.norm())
    if norm == 0:
        return 0.0
    return math.degrees(math.acos(min(1.0, abs(float(v.sum())) / (norm * math.sqrt(len(v))))))


def entropy(values: Tensor) -> float:
    """The entropy of the values ≥ 0 normalised to sum to 1 (natural logarithm); log n when all are equal.

    With a_i = v_i / Σ_j v_j it is −Σ_i a_i log a_i.

    Source: Li 2023 (thesis), section 4.4, Definition 10.

    >>> round(entropy(torch.ones(4)), 4), abs(entropy(torch.tensor([1.0, 0.0])))  # log 4 is 1.3863
    (1.3863, 0.0)
    """
    require(bool((values >= 0).all()), "values", "must be ≥ 0 for an entropy", float(values.min()))
    total = float(values.double().sum())
    if total == 0:
        return math.log(len(values))
    p = values.double() / total
    return float(-torch.special.xlogy(p, p).sum())


def kl_to_uniform(values: Tensor) -> float:
    """KL(a ‖ uniform) of the values normalised to sum to 1: log n − entropy; 0 when all clients fare alike.

    With a_i = v_i / Σ_j v_j it is Σ_i a_i log(n a_i).

    >>> round(kl_to_uniform(torch.ones(4)), 6), round(kl_to_uniform(torch.tensor([1.0, 0.0])), 4)  # log 2
    (0.0, 0.6931)
    """
    return max(0.0, math.log(len(values)) - entropy(values))


def gini(values: Tensor) -> float:
    """The Gini coefficient Σ_ij |v_i − v_j| / (2 n² mean) of values ≥ 0: 0 when equal, towards 1 when one has all.

    n is the number of clients. The sum is found from ranks, in n log n steps.

    >>> gini(torch.tensor([0.0, 0.0, 0.0, 1.0]))
    0.75
    """
    require(bool((values >= 0).all()), "values", "must be ≥ 0 for a Gini coefficient", float(values.min()))
    v = values.double().sort().values
    n, total = len(v), float(v.sum())
    if total == 0:
        return 0.0
    ranks = torch.arange(1, n + 1, dtype=torch.float64)
    return float(((2 * ranks - n - 1) * v).sum()) / (n * total)


def rank_correlation(values: Tensor, sizes: Tensor) -> float:
    """Spearman's rank correlation of values with data sizes: negative when small clients fare worse.

    It is the correlation of the ranks; equal values share the mean of their ranks. It is 0 where all values or all sizes
    are equal.

    >>> round(rank_correlation(torch.tensor([0.5, 0.3, 0.1]), torch.tensor([10, 20, 30])), 6)  # small clients fare worse
    -1.0
    """
    a, b = _ranks(values.double()), _ranks(sizes.double())
    a, b = a - a.mean(), b - b.mean()
    scale = float(a.norm() * b.norm())
    return float(a @ b) / scale if scale > 0 else 0.0


def _ranks(values: Tensor) -> Tensor:
    """Ranks with ties at their mean."""
    ordered = values.sort().values
    return (torch.searchsorted(ordered, values) + torch.searchsorted(ordered, values, right=True) - 1).double() / 2


@dataclass(frozen=True)
class Interval:
    """Where a figure over all clients lies, with 95 % confidence, by a random sample of them. An end may be infinite."""

    low: float  # −∞ if the sample is too small for a lower end
    high: float  # ∞ if the sample is too small for an upper end

    def text(self, write: Callable[[float], str]) -> str:
        """The interval in words, its numbers written by `write`.

        >>> Interval(0.25, 0.5).text("{:.2f}".format), Interval(0.25, math.inf).text("{:.2f}".format)
        ('0.25 to 0.50', '0.25 or more')
        """
        below, above = math.isfinite(self.low), math.isfinite(self.high)
        if below and above:
            return f"{write(self.low)} to {write(self.high)}"
        return f"{write(self.low)} or more" if below else f"{write(self.high)} or less" if above else "–"


_CONFIDENCE = 0.95
_NORMAL = 1.959963984540054  # the normal distribution's 97.5 % quantile


def mean_interval(values: Tensor, weights: Tensor | None = None) -> Interval:
    """The normal interval of the mean over all clients, from a random sample of more than one.

    With weights w_i that sum to 1 the variance of the mean is n / (n − 1) · Σ w_i² (v_i − mean)².

    >>> found = mean_interval(torch.tensor([0.1, 0.2, 0.3]))
    >>> round(found.low, 4), round(found.high, 4)
    (0.0868, 0.3132)
    """
    w, n = _weights(values, weights), len(values)
    centre = float(w @ values.double())
    if n == 1:
        return Interval(-math.inf, math.inf)
    spread = math.sqrt(n / (n - 1) * float((w * (values.double() - centre)).square().sum()))
    return Interval(centre - _NORMAL * spread, centre + _NORMAL * spread)


def percentile_interval(values: Tensor, percent: float, weights: Tensor | None = None) -> Interval:
    """The interval between two values of a random sample that holds a percentile over all clients.

    Without weights the l-th and u-th smallest of n values: the number of values below the percentile is binomial (n, p), and l
    and u leave at most 2.5 % of it at each side, so the confidence is at least 95 % whatever the distribution. An end is
    infinite where n is too small. With weights, the weighted percentiles p ± 1.96 · the deviation of the weight below the
    percentile. Source: David and Nagaraja 2003, section 7.1; Woodruff 1952.

    >>> percentile_interval(torch.arange(1.0, 11.0), 50)
    Interval(low=2.0, high=9.0)
    """
    from scipy.special import bdtr

    require_number("percent", percent, "[0, 100]")
    w, p, n = _weights(values, weights), percent / 100, len(values)
    if weights is None:
        ordered = torch.cat([values.double().sort().values, torch.tensor([math.inf])])
        at_most = bdtr(np.arange(n + 1), n, p)  # P(B ≤ k)
        low, high = np.searchsorted(at_most, [(1 - _CONFIDENCE) / 2, (1 + _CONFIDENCE) / 2]).tolist()
        return Interval(float(ordered[low - 1]) if low else -math.inf, float(ordered[high]))
    below = values.double() <= percentile(values, percent, w)
    reach = 100 * _NORMAL * float((w * (below.double() - p)).norm())
    low_end = percentile(values, percent - reach, w) if percent >= reach else -math.inf
    return Interval(low_end, percentile(values, percent + reach, w) if percent + reach <= 100 else math.inf)


def share_interval(hits: float, count: int, confidence: float = _CONFIDENCE) -> Interval:
    """The interval of Clopper and Pearson of a share, e.g. of a client's error on `count` examples, `hits` of them wrong.

    It says where the error on further examples of the same client lies. `hits` may be a mean over seeds on the same examples.

    `confidence` is the probability with which the interval holds the true share, at least.

    >>> found = share_interval(0, 10)
    >>> found.low, round(found.high, 6)
    (0.0, 0.308497)
    """
    from scipy.special import betaincinv

    rest = (1 - confidence) / 2
    low = 0.0 if hits <= 0 else float(betaincinv(hits, count - hits + 1, rest))
    high = 1.0 if hits >= count else float(betaincinv(hits + 1, count - hits, 1 - rest))
    return Interval(low, high)


def skewed_mean_interval(means: Tensor, deviations: Tensor, skewness: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """The ends of 95 % intervals of means of skewed numbers, (R,) each: e.g. of the squared errors of a client's examples.

    Student's t statistic T of n independent numbers of skewness γ is corrected by Hall's transformation, with a = γ / (3 √n):
    ((1 + a T)³ − 1) / (3 a) + γ / (6 √n) has hardly any skewness. The ends are the mean − T(±t) deviation / √n, where T is its
    inverse and t the quantile of Student's distribution. With γ = 0 it is Student's interval. NaN for fewer than 20 numbers,
    and where all are equal.

    In a simulation of 20,000 clients each, with 20 and with 100 examples, it held the true mean in 94.2 % and 94.8 % of the
    clients for squared normal residuals, in 92.4 % and 93.9 % for squared Laplace ones and in 90.6 % and 92.5 % for squared
    residuals of Student's distribution with 5 degrees of freedom; in 94 % to 95 % for absolute residuals of these. Student's
    interval held 89.3 % and 93.2 %, 82.5 % and 90.0 %, 80.3 % and 87.5 % for the squares. Source: Hall 1992, On the removal of
    skewness by transformation.
    """
    from scipy.special import stdtrit

    n, m, s, g = (each.double() for each in (counts, means, deviations, skewness))
    known = (n >= LEAST_FOR_SPREAD) & (s > 0) & g.isfinite()
    t = torch.from_numpy(np.asarray(stdtrit((n - 1).clamp(min=1).numpy(), (1 + _CONFIDENCE) / 2)))
    bent = torch.where(g.abs() < 1e-9, torch.ones_like(g), g / (3 * n.sqrt()))

    def inverse(x: Tensor) -> Tensor:
        inside = 1 + 3 * bent * (x - g / (6 * n.sqrt()))
        found = (inside.sign() * inside.abs() ** (1 / 3) - 1) / bent
        return torch.where(g.abs() < 1e-9, x, found)

    none, step = torch.full_like(m, torch.nan), s / n.sqrt()
    return torch.where(known, m - inverse(t) * step, none), torch.where(known, m - inverse(-t) * step, none)


def counts_wrong(errors: Tensor, sizes: Tensor) -> bool:
    """Whether each error is a share of wrong examples, so that it has an interval: a whole number of `sizes` examples."""
    wrong = errors.double() * sizes
    whole = (wrong - wrong.round()).abs() <= 1e-5 * sizes.clamp(min=1)
    return bool(((errors >= 0) & (errors <= 1) & whole).all())


@dataclass(frozen=True)
class Summary:
    """How the values (errors, losses or a metric) are spread over clients.

    `angle` and `kl_to_uniform` are of the values themselves; for errors, the thesis prints those of the accuracies, which are
    given beside them. The variance of accuracies is that of errors.

    `tail_90` is the value that 90 % of the clients reach or do better than: the 90th percentile, or, if more is better, its
    mirror image at the low end, where `worst_10` and `worst_5` are then, too. `missing` clients have no value of a metric.
    """

    clients: int  # how many have a value
    mean: float  # over clients, under the weights
    mean_by_example: float  # weighted by the number of examples
    standard_deviation: float  # over clients, divided by n
    variance: float  # its square
    percentiles: dict[int, float]  # p → the p-th percentile over clients
    worst_10: float  # mean of the worst 10 % of the clients
    worst_5: float  # of the worst 5 %
    best_10: float  # mean of the best 10 % of the clients
    best_5: float  # of the best 5 %
    angle: float
    kl_to_uniform: float
    gini: float  # Gini coefficient: 0 when equal, towards 1 when one client has all
    size_correlation: float  # Spearman's rank correlation with the number of examples
    accuracy_angle: float = math.nan  # of 1 − error, as the fairness papers print it; NaN for losses
    accuracy_kl_to_uniform: float = math.nan  # KL divergence of 1 − error to uniform; NaN for losses
    tail_90: float = math.nan
    higher_is_better: bool = False
    missing: int = 0

    def as_dict(self) -> dict[str, object]:
        """The figures by name."""
        return asdict(self)


def summarise(values: Tensor, sizes: Tensor, weights: Tensor | None = None) -> Summary:
    """All metrics of one value per client. `sizes` are the clients' examples; `weights` default to equal.

    The papers weigh training losses by data size and leave test errors unweighted. Angle, KL and Gini are of the values as
    they are and take no weights; `mean_by_example` weighs by size.

    >>> found = summarise(torch.tensor([0.1, 0.2, 0.3, 0.8]), torch.tensor([40, 30, 20, 10]))
    >>> round(found.mean, 4), round(found.mean_by_example, 4), round(found.percentiles[90], 4), round(found.worst_10, 4)
    (0.35, 0.24, 0.8, 0.8)
    """
    w = _weights(values, weights)
    deviation = standard_deviation(values, w)
    nonnegative = bool((values >= 0).all())
    accuracies = 1 - values.double() if nonnegative and bool((values <= 1).all()) else None
    return Summary(
        clients=len(values),
        mean=mean(values, w),
        mean_by_example=mean(values, sizes),
        standard_deviation=deviation,
        variance=deviation**2,
        percentiles={p: percentile(values, p, w) for p in PERCENTILES},
        tail_90=percentile(values, 90, w),
        worst_10=worst(values, 0.10, w),
        worst_5=worst(values, 0.05, w),
        best_10=best(values, 0.10, w),
        best_5=best(values, 0.05, w),
        angle=angle(values),
        kl_to_uniform=kl_to_uniform(values) if nonnegative else math.nan,
        gini=gini(values) if nonnegative else math.nan,
        size_correlation=rank_correlation(values, sizes),
        accuracy_angle=math.nan if accuracies is None else angle(accuracies),
        accuracy_kl_to_uniform=math.nan if accuracies is None else kl_to_uniform(accuracies),
    )


def summarise_metric(values: Tensor, sizes: Tensor, weights: Tensor | None = None, *, higher_is_better: bool = True) -> Summary:
    """The summary of a metric over the clients that have a value; those with NaN are counted as missing, never averaged.

    If more is better, the tail figures (`tail_90`, `worst_10`, `worst_5`) are those of the low end.

    >>> found = summarise_metric(torch.tensor([0.25, 0.9, math.nan, 0.8]), torch.ones(4))
    >>> found.clients, found.missing, found.worst_10
    (3, 1, 0.25)
    """
    known = ~values.isnan()
    missing = int((~known).sum())
    if missing == len(values):
        nothing = dict.fromkeys(Summary.__dataclass_fields__, math.nan) | {"percentiles": dict.fromkeys(PERCENTILES, math.nan)}
        return Summary(**nothing | {"clients": 0, "higher_is_better": higher_is_better, "missing": missing})  # type: ignore[arg-type]
    kept, weighed = values[known], None if weights is None else weights[known]
    found = replace(summarise(kept, sizes[known], weighed), missing=missing)
    if not higher_is_better:
        return found
    return replace(
        found, higher_is_better=True, tail_90=-percentile(-kept, 90, weighed), worst_10=found.best_10, worst_5=found.best_5,
        best_10=found.worst_10, best_5=found.worst_5,
    )  # fmt: skip
