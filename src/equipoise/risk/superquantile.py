"""The superquantile: the mean loss of the worst tail of clients, and its smooth forms.

Losses F (K,), base weights α (K,) that sum to 1, tail θ in (0, 1]. All arithmetic is in float64,
relative to one of the losses where exponentials or small differences appear.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from equipoise.core.abilities import is_part, read
from equipoise.core.numbers import mass_slack, numbers
from equipoise.errors import IncompatibleParts, require, require_integer, require_kind, require_number
from equipoise.risk.quantile_sources import ROUNDING, Exact, tail_quantile_index
from equipoise.risk.quantile_sources import tail_quantile as tail_quantile  # public here too
from equipoise.risk.tilted import tilted, weighed
from equipoise.types import QuantileSource, QuantileTraits, RiskValue


def exact_weights(losses: Tensor, base_weights: Tensor, tail: float) -> Tensor:
    """The maximiser of Σ π_k F_k over 0 ≤ π_k ≤ α_k/θ, Σ π_k = 1.

    Clients above the quantile are filled to α_k/θ; those at it, up to rounding, share what is left in proportion to α. Source:
    Pillutla et al. 2023, (5)–(7); Laguel et al. 2020, Proposition 2.

    >>> exact_weights(torch.tensor([3., 1., 2.]), torch.full((3,), 1 / 3), 0.5)
    tensor([0.6667, 0.0000, 0.3333])
    """
    values, alpha = numbers(losses), numbers(base_weights)
    alpha = alpha / alpha.sum()
    quantile = float(values[tail_quantile_index(values, alpha, tail, base_weights.dtype)])
    if not math.isfinite(quantile):  # of more losses than the tail holds, none is finite
        return torch.full_like(base_weights, math.nan)
    # Equal losses may differ in their last digits, by the order in which an engine adds examples up: that must not tell them
    # apart, or a run that starts from a model of zeros would depend on the engine.
    slack = ROUNDING * abs(quantile)
    weights = np.where(values > quantile + slack, alpha / tail, 0.0)
    left = 1.0 - weights.sum()
    if left > min(0.5, mass_slack(base_weights.dtype, len(values)) / tail):  # or rounding gives a client more a tiny weight
        level = abs(values - quantile) <= slack
        weights[level] = alpha[level] * (left / max(alpha[level].sum(), 1e-300))
    return torch.from_numpy(weights / weights.sum()).to(base_weights)


def base_weights_at_or_above(losses: Tensor, base_weights: Tensor, quantile: Tensor | float) -> Tensor:
    """Base weights of the clients whose loss is at least `quantile`, 0 for the others; each client can do this alone.

    The comparison is in float64, up to rounding: a released quantile rounded to float32 could pass by the client that it is
    meant to keep.
    """
    level = torch.as_tensor(quantile, dtype=torch.float64, device=losses.device)
    return torch.where(losses.double() >= level - ROUNDING * level.abs(), base_weights, torch.zeros_like(base_weights))


def threshold_weights(losses: Tensor, base_weights: Tensor, tail: float) -> Tensor:
    """Base weights of the clients at or above the quantile, renormalised.

    Source: Pillutla et al. 2023, Algorithm 1 and (10). When θK is an integer it keeps one client more than the exact
    weights do: the papers' claim that the two then agree is an erratum.
    """
    kept = base_weights_at_or_above(losses, base_weights, tail_quantile(losses, base_weights, tail)).double()
    return (kept / kept.sum()).to(base_weights.dtype)


def tail_holding(losses: Tensor, base_weights: Tensor, tail: float, at_least: int) -> float:
    """The smallest tail ≥ θ that holds the `at_least` largest losses: max(θ, their mass), and 1 for smaller cohorts.

    Where some of several equal losses are needed they count with their mean weight, so that the order of clients does not
    matter; any weight at all for one of them is a weight for each, because equal losses share.

    Source: our answer to the question of Pillutla et al. 2023, section 6 (client availability), how to vary θ with the
    number of clients at hand.

    >>> tail_holding(torch.tensor([1., 4., 2., 3.]), torch.full((4,), 0.25), 0.1, at_least=2)
    0.5
    """
    if at_least >= len(losses):
        return 1.0
    alpha = base_weights.double() / base_weights.double().sum()
    last = losses.sort(descending=True).values[at_least - 1]
    above, level = losses > last, losses == last
    mass = alpha[above].sum() + alpha[level].mean() * (at_least - above.sum())
    return min(1.0, max(tail, float(mass)))


def kl_smoothed(losses: Tensor, base_weights: Tensor, tail: float, nu: float) -> tuple[Tensor, Tensor]:
    """Value and weights of max Σ π_k F_k − ν Σ π_k log(π_k/α_k) over 0 ≤ π_k ≤ α_k/θ, Σ π_k = 1.

    Water-filling: π_k = α_k · min(1/θ, e^{(F_k − c)/ν}) with c such that they sum to 1: the j largest losses reach their cap,
    and the rest share what these leave in proportion to α e^{F/ν}. The right j is the smallest at which no other client
    exceeds its cap; more capped clients leave less for the rest, so it is found by bisection.
    Source: Pillutla et al. 2023, (14)–(15). As θ → 0 this is the tilted risk with tilt 1/ν.
    """
    descending, order = torch.sort(losses.double(), descending=True)
    alpha = base_weights[order].double()
    alpha = alpha / alpha.sum()
    left = 1.0 - (alpha.cumsum(0) - alpha) / tail  # what the first j clients at their cap leave, j = 0 … K − 1
    cap = -math.log(tail)

    def log_ratio(j: int) -> Tensor:  # log(π/α) of the clients from j on; relative to F_j, so that nothing is lost
        relative = (descending[j:] - descending[j]) / nu
        return relative - torch.logsumexp(alpha[j:].log() + relative, 0) + left[j].log()

    low, high = 0, int((left > 1e-12).sum())  # `high` itself means that every client before it is capped
    while low < high:
        middle = (low + high) // 2
        if log_ratio(middle)[0] <= cap:
            high = middle
        else:
            low = middle + 1
    ratio = torch.full_like(descending, cap)
    if low < len(ratio):
        ratio[low:] = log_ratio(low) if left[low] > 1e-12 else -math.inf
    ordered = alpha * ratio.clamp(max=cap).exp()
    ordered = ordered / ordered.sum()
    if low == 0:  # nobody at the cap: the tilted risk, whose form keeps its digits for large ν
        value = tilted(descending, alpha, 1 / nu)[0]
    else:
        value = (ordered * (descending - torch.where(ordered > 0, nu * ratio, 0.0))).sum()
    return value, torch.empty_like(ordered).scatter_(0, order, ordered)


def huber_smoothed(losses: Tensor, base_weights: Tensor, tail: float, nu: float) -> tuple[Tensor, Tensor]:
    """Value and weights of min_η η + (1/θ) Σ α_k g_ν(F_k − η).

    g_ν(ρ) is ν/2 for ρ ≤ 0, ρ²/(2ν) + ν/2 up to ν, and ρ beyond; the weights are (α_k/θ) clip((F_k − η*)/ν, 0, 1). They sum
    to 1 at η*: a decreasing, piecewise linear function of η with kinks at F_k and F_k − ν, so η* is found exactly.
    Source: Laguel et al. 2020, (5)–(7).
    """
    alpha = base_weights.double() / base_weights.double().sum()
    top = losses.double().max()
    shifted = losses.double() - top
    if nu <= 1e-9 * float(-shifted.min()):  # smoothing below what float64 resolves: the limit itself
        weights = exact_weights(losses, alpha, tail)
        return (weights * losses.double()).sum(), weights  # not from `shifted`, which overflows with the range of losses

    def mass(eta: Tensor) -> Tensor:
        return (alpha * ((shifted - eta) / nu).clamp(0.0, 1.0)).sum()

    kinks = torch.cat([shifted, shifted - nu]).sort().values  # the mass falls from 1 to 0 along them
    low, high = 0, len(kinks) - 1  # the last kink whose mass reaches θ, by bisection; the first one's is 1
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if mass(kinks[middle]) >= tail * (1 - 1e-12) else (low, middle - 1)
    left, right = kinks[low], kinks[min(low + 1, len(kinks) - 1)]
    mass_left, mass_right = mass(left), mass(right)
    step = torch.where(mass_left > mass_right, (mass_left - tail) / (mass_left - mass_right), 0.0)
    eta = left + (right - left) * step.clamp(0.0, 1.0)
    rho = shifted - eta
    inside = rho.square() / (2 * nu) + nu / 2
    smooth = torch.where(rho <= 0, nu / 2, torch.where(rho >= nu, rho, inside))
    weights = alpha / tail * (rho / nu).clamp(0.0, 1.0)
    return top + eta + (alpha * smooth).sum() / tail, weights / weights.sum()


@dataclass(frozen=True, eq=False)
class Released:
    """The quantile that clients filter by, and the number of rounds it was used in."""

    eta: Tensor  # ()
    rounds: int


@dataclass(frozen=True)
class Superquantile:
    """The mean loss of the worst tail of clients (CVaR), which Δ-FL minimises.

    `tail` θ in (0, 1]: 1 is the mean over clients, towards 0 it is the worst client. `rule="exact"` weighs the client at the
    quantile fractionally and is the gradient of the superquantile; `rule="threshold"` keeps every client at or above the
    quantile. `smoothing="kl"` or `"huber"` with strength `nu` > 0 makes the objective smooth.

    `quantile` is where the quantile comes from: privacy.Exact() reads the losses, others release a number by which clients
    filter themselves. `eta_every` rounds use one quantile; a new one is taken earlier if nobody reaches it. `rule=None` is
    "exact" where the rule can be, with Exact() in every round, else "threshold". An approximate source may release a number
    above every loss. Then all weights are 0, the round does nothing, and the value is the released number. `at_least`
    widens the tail until that number of clients have a weight (all clients of a smaller cohort).

    Value: max Σ π_k F_k over 0 ≤ π_k ≤ α_k/θ, Σ π = 1; weights: the maximising π.

    Smoothed by "kl" with ν = `nu`, the weights are π_k = min(α_k/θ, α_k e^{(F_k − c)/ν}), with c such that they sum to 1. By
    "huber" they are (α_k/θ) · clip((F_k − η*)/ν, 0, 1).

    Source: Pillutla et al. 2023, (5)–(7), (14)–(15), Algorithms 1 and 3; Laguel et al. 2020, (5)–(7), Algorithms 2 and 3,
    appendices B.1 and C.3 (`eta_every`). `at_least` is ours.

    >>> losses, alpha = torch.tensor([1.0, 2.0, 5.0]), torch.full((3,), 1 / 3)
    >>> risk = Superquantile(tail=0.5)(losses, alpha)  # half of three clients: the worst one, and half of the next
    >>> round(float(risk.value), 4), [round(w, 4) for w in risk.weights.tolist()]  # 2/3 · 5 + 1/3 · 2
    (4.0, [0.0, 0.3333, 0.6667])
    >>> Superquantile(tail=0.5, rule="threshold")(losses, alpha).weights.tolist()  # all at or above the quantile 2
    [0.0, 0.5, 0.5]
    """

    tail: float = 0.5  # θ in (0, 1]: the share of the base weight that counts; 1 is the mean
    rule: Literal["exact", "threshold"] | None = None  # weights at the quantile: in part, or whole; None: as `quantile` allows
    smoothing: Literal["kl", "huber"] | None = None  # how the objective is smoothed; None: no smoothing
    nu: float | None = None  # ν > 0, the strength of the smoothing, in units of the loss
    quantile: QuantileSource = field(default_factory=Exact)  # where the quantile comes from
    eta_every: int = 1  # how many rounds use one quantile
    at_least: int | None = None  # widen the tail until this number of clients have a weight

    pure: ClassVar[bool] = True
    needs_ids: ClassVar[bool] = False
    client_form: ClassVar[str] = "filter"

    def __post_init__(self) -> None:
        fix = 'It is a share of the training examples, or of the clients with weights="uniform": 0.5 is the worse half.'
        require_number("tail", self.tail, "(0, 1]", fix)
        require(self.rule in (None, "exact", "threshold"), "rule", 'must be "exact", "threshold" or None', self.rule)
        require(self.smoothing in (None, "kl", "huber"), "smoothing", 'must be None, "kl" or "huber"', self.smoothing)
        if self.smoothing is None:
            require(self.nu is None, "nu", "is the strength of smoothing and needs one", self.nu, 'Add smoothing="kl".')
        else:
            require_number("nu", self.nu, "(0, ∞)", "Smoothing needs it: start with a tenth of a typical client loss.")
        require_kind("quantile", "quantile", self.quantile)
        good = callable(self.quantile) and is_part(self.quantile, "reads_losses")
        require(good, "quantile", "must be a source of quantiles", self.quantile, "E.g. Exact() or SecureSums() of privacy.")
        require_integer("eta_every", self.eta_every, 1)
        require_integer("at_least", self.at_least, 1, none="the tail as it is")
        self._refuse_incompatible_options()

    def _refuse_incompatible_options(self) -> None:
        if self.smoothing is not None and self.rule == "threshold":
            raise IncompatibleParts(
                f'smoothing="{self.smoothing}" gives every client a weight between 0 and its cap, but rule="threshold" '
                "keeps a client whole or not at all.",
                'Use rule="exact", or drop smoothing.',
            )
        hidden = not read(QuantileTraits, self.quantile).exact
        if (self.smoothing is not None or self.rule == "exact") and (hidden or self.eta_every > 1):
            option = f'smoothing="{self.smoothing}"' if self.smoothing is not None else 'rule="exact"'
            given = f"quantile={self.quantile!r}" if hidden else f"eta_every={self.eta_every}"
            raise IncompatibleParts(
                f"{option} sets weights by all losses of the round, but with {given} clients compare their own to a number.",
                'Use rule="threshold" without smoothing, or quantile=Exact() with eta_every=1.',
            )
        if self.at_least is not None and hidden:
            raise IncompatibleParts(
                f"at_least={self.at_least} counts the largest losses, which quantile={self.quantile!r} does not show.",
                "Use quantile=Exact(), or drop at_least.",
            )

    @property
    def keeps_everyone(self) -> bool:
        """Whether all weights are positive: those of the KL-smoothed tail are."""
        return self.smoothing == "kl"

    @cached_property
    def filters(self) -> bool:
        """Whether clients are kept whole or not at all: the threshold rule, given or by `rule=None`."""
        if self.rule is None:
            return self.eta_every > 1 or not read(QuantileTraits, self.quantile).exact
        return self.rule == "threshold"

    def __call__(self, losses: Tensor, base_weights: Tensor, *, clients: Any = None, state: Any = None) -> RiskValue:
        """The superquantile of losses (K,) and its weights; the state is the quantile in use, where clients filter by one."""
        losses = weighed(losses, base_weights)
        tail = self.tail if self.at_least is None else tail_holding(losses, base_weights, self.tail, self.at_least)
        if self.filters:
            return self._filter_clients(losses, base_weights, tail, state)
        if self.smoothing is not None and self.nu is not None:
            smooth = kl_smoothed if self.smoothing == "kl" else huber_smoothed
            value, weights = smooth(losses, base_weights, tail, self.nu)
            return RiskValue(value.to(losses.dtype), weights.to(base_weights.dtype), state)
        weights = exact_weights(losses, base_weights, tail)
        return RiskValue((weights.double() * losses.double()).sum().to(losses.dtype), weights, state)

    def _filter_clients(self, losses: Tensor, base_weights: Tensor, tail: float, state: Released | None) -> RiskValue:
        enough = min(self.at_least or 1, len(losses))
        released = state if state is not None and state.rounds < self.eta_every else None
        if released is None or int((self.client_weight(losses, base_weights, released.eta) > 0).sum()) < enough:
            released = Released(self.quantile(losses, base_weights, tail), 0)
        kept = self.client_weight(losses, base_weights, released.eta).double()
        value = released.eta
        if bool(kept.sum() > 0):
            kept = kept / kept.sum()
            value = (kept * losses.double()).sum()
        following = replace(released, rounds=released.rounds + 1)
        return RiskValue(value.to(losses.dtype), kept.to(base_weights.dtype), following)

    def client_weight(self, loss: Tensor, base_weight: Tensor, public: Tensor | float) -> Tensor:
        """The weight that a client computes by itself when the quantile η was released.

        It is the client's `base_weight` () if its `loss` () is at least `public` = η, else 0.
        """
        if not self.filters:
            raise IncompatibleParts(
                f"{self!r} sets weights by all losses of the round, so that no client can find its own.",
                'Use rule="threshold" without smoothing.',
            )
        return base_weights_at_or_above(loss, base_weight, public)
