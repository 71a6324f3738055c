"""The laws of client risks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from equipoise.core.abilities import is_of_user, read
from equipoise.errors import notify, shown
from equipoise.runs.tried_calls import copied, same_state
from equipoise.testing.laws import Tried, agree, check_of, is_finite, try_laws, unchanged
from equipoise.types import ClientRisk, RiskTraits, RiskValue

RISK_CALL = "risk(losses, base_weights, clients=…, state=…)"
STEP = 1e-5  # of finite differences
NAMES = tuple(f"client-{i}" for i in range(400))


def _shortly(values: list[float]) -> str:
    """The values, of many the first three and their number."""
    text = ", ".join(f"{value:.4g}" for value in values[:3])
    return f"[{text}]" if len(values) <= 3 else f"[{text}, …] of {len(values)} clients"


@dataclass(frozen=True, eq=False)
class TriedRisk(Tried):
    """A risk, called with losses of clients of these names; in a cohort of the size `cohort` one is unlike the others."""

    names: Sequence[str] = NAMES
    cohort: int = 400
    bounds: tuple[float, ...] = (0.5, 3.0, 20.0)  # of losses, under differential privacy

    @property
    def traits(self) -> RiskTraits:
        """What the risk says of itself."""
        return read(RiskTraits, self.part)

    def __call__(
        self, losses: Tensor, alpha: Tensor, order: Tensor | None = None, state: Any = None, law: str = "any_size"
    ) -> RiskValue:
        """What the risk makes of losses, of the right form, and the same again."""
        ids = tuple(self.names[i] for i in (range(len(losses)) if order is None else order.tolist()))
        case = f"losses {_shortly(losses.tolist())} give "
        with self.without_error(law, case), unchanged(self.part, losses=losses, base_weights=alpha, state=state):
            found, again = (copied(self.part(losses, alpha, clients=ids, state=state)) for _ in range(2))
        self.hold(isinstance(found, RiskValue), "risk_value", type(found).__name__)
        tensors = isinstance(found.value, Tensor) and isinstance(found.weights, Tensor)
        self.hold(tensors, "tensors", (found.value, found.weights))
        self.keepable(found.state)
        self.hold(same_state(found, again), "same_again", "a call was made again, and differs")
        self.hold(found.weights.shape == losses.shape, "one_weight_each", tuple(found.weights.shape))
        self.hold(found.value.numel() == 1, "one_value", tuple(found.value.shape))
        types = (found.value.dtype, found.weights.dtype)
        self.hold(types == (torch.float64, torch.float64), "float64", types)
        return found  # type: ignore[no-any-return]

    def samples(self) -> list[tuple[Tensor, Tensor]]:
        """Losses and base weights of some cohorts."""
        if self.quick:
            return [(torch.tensor([0.5, 1.5], dtype=torch.float64), torch.tensor([0.3, 0.7], dtype=torch.float64))]
        drawn = (torch.rand(2, count, generator=self.gen, dtype=torch.float64) + 0.1 for count in (1, 2, 3, 7, 20))
        return [(2 * losses - 0.1, alpha / alpha.sum()) for losses, alpha in drawn]

    def slopes(self, losses: Tensor, alpha: Tensor, found: RiskValue, *more: Any) -> list[tuple[int, float, float]]:
        """Clients, their weights and the derivatives of the value in their losses, by finite differences; not at kinks."""
        slopes, here = [], float(found.value)
        for i, weight in enumerate(found.weights.tolist()):
            nudge = torch.zeros_like(losses)
            nudge[i] = STEP
            up, down = (float(self(losses + sign * nudge, alpha, *more).value) for sign in (1, -1))
            slope = (up - down) / (2 * STEP)
            if not abs((up - here) - (here - down)) > 1e-2 * STEP * max(1.0, abs(slope)):
                slopes.append((i, weight, slope))
        return slopes


@check_of("a risk", "__call__", fix=f"Write {RISK_CALL}, which returns a RiskValue.")
def check_risk(risk: ClientRisk, *, seed: int = 0) -> None:
    """Weights are the gradient of the value and never negative; order and ties do not matter; finite for any finite losses.

    Losses and base weights are float64, as in a round. A notice says if weights fall as losses rise, which is allowed.

    A call writes to nothing that it is given, and the same call again gives the same answer. Three calls in a row pass the
    state on: with a state the weights are the gradient up to a common factor, and order does not matter. Equal losses share
    weight by base weights with a fresh state (None) only: a state may know the past of each client. A state is made of what
    checkpoints keep.

    Finite differences are taken where the value has a derivative; at a kink any subgradient is right. Ties are compared inside
    a group where the risk tells groups apart (`group_of`). A risk with `full_participation` follows a mixture of its own, not
    the base weights: instead of ties its memory is checked, and, if it has a `step`, the ascent on the simplex.

    A risk with `client_form = "loss"`, for secure sums and differential privacy, has a `client_weight` that each client finds
    alone: between 0 and the base weight for any loss, and in proportion to the weights for losses up to the bound.

    `risk` is the risk that is checked.
    """
    try_laws(RISK_LAWS, lambda: TriedRisk(risk, seed=seed))
    if not read(RiskTraits, risk).full_participation:
        tell_of_low_losses(risk)


def callable_as(case: TriedRisk) -> None:
    """It can be called as a round calls it."""
    case.accepts(case.part, RISK_CALL, 0, 0, clients=(), state=None)


def same_again(case: TriedRisk) -> None:
    """The same answer again after a call with losses of another order: a memory outside of the state shows here."""
    losses = torch.linspace(0.5, 1.5, 2 if case.quick else 12, dtype=torch.float64)
    alpha = losses / losses.sum()
    first, _, again = (case(values, alpha, law="risk_types") for values in (losses, 100 * losses.flip(0), losses))
    case.hold(same_state(first, again), "same_again", "a call was made again after another one, and differs")


def finite_and_not_negative(case: TriedRisk) -> None:
    """Weights and value are finite, and no weight is negative."""
    for losses, alpha in case.samples():
        found = case(losses, alpha)
        said = f"the value {float(found.value):.6g} and the weights {_shortly(found.weights.tolist())}"
        case.hold(is_finite(found.value) and is_finite(found.weights), "finite", said)
        case.hold((found.weights >= 0).all(), "not_negative", said)


def any_order(case: TriedRisk) -> None:
    """Weights follow their clients, and the value stays."""
    for losses, alpha in case.samples():
        order, found = torch.randperm(len(losses), generator=case.gen) if len(losses) > 2 else None, case(losses, alpha)
        order = torch.arange(len(losses)).flip(0) if order is None else order
        moved = case(losses[order], alpha[order], order)
        agree(case.part, "weights_follow", moved.weights, found.weights[order], 1e-5)
        agree(case.part, "value_any_order", moved.value, found.value, 1e-5)


def gradient(case: TriedRisk) -> None:
    """The weights are the gradient of the value."""
    for losses, alpha in case.samples():
        found = case(losses, alpha)
        slopes = case.slopes(losses, alpha, found)
        rounding = 4e-16 * abs(float(found.value)) / STEP  # of the difference of two large values
        for i, weight, slope in slopes:
            good = abs(slope - weight) <= (1e-3 if case.quick else 1e-4) * max(1.0, abs(slope)) + rounding
            case.hold(good, "gradient", f"client {i} of {len(losses)}: weight {weight:.6g}, finite difference {slope:.6g}")
        many = case.quick or 2 * len(slopes) >= len(losses)
        case.hold(many, "derivative", f"{len(slopes)} of {len(losses)}")


def equal_losses(case: TriedRisk) -> None:
    """Equal losses share weight by base weights, inside a group where there are groups."""
    if case.traits.full_participation:
        return
    group_of = case.traits.group_of
    for losses, alpha in case.samples():
        tied = losses.clone()
        tied[: (len(losses) + 1) // 2] = losses.max()
        groups = ["" if group_of is None else group_of(name) for name in case.names[: len(losses)]]
        even = torch.full_like(losses, 0.7)
        for values in (even,) if case.quick else (tied, even, torch.zeros_like(losses)):
            ratio, levels = case(values, alpha).weights / alpha, list(zip(values.tolist(), groups, strict=True))
            for level in set(levels):
                same = ratio[torch.tensor([other == level for other in levels])]
                good = float(same.max() - same.min()) <= 1e-4 * max(1.0, float(same.abs().max()))
                case.hold(good, "equal_losses", _shortly(same.tolist()))


def outliers(case: TriedRisk) -> None:
    """Weights of extreme cohorts, such as those of one client unlike all others, are finite and not negative."""
    huge, many = 1e300, case.cohort - 1
    few = [[0.0, 0.0, 0.0], [0.0, 1.0, 1e4], [huge, 1.0, 0.0], 3 * [huge], [1e-30, 0.0, 1e-30], [1e30, 0.0, 1.0], [1e4]]
    for values in [*([] if case.quick else few), [0.1] + many * [1.0], [1.0] + many * [0.1]]:
        losses = torch.tensor(values, dtype=torch.float64)
        weights = case(losses, torch.full_like(losses, 1 / len(values))).weights
        said = f"losses {_shortly(values)} give weights {_shortly(weights.tolist())}, the least {float(weights.min()):.4g}"
        case.hold(case.quick or is_finite(weights / weights.sum()), "normalised", said)
        case.hold((weights >= 0).all(), "not_negative", said)


def gradient_later(case: TriedRisk) -> None:
    """Rounds with the state of the one before, in which cohorts change, and so does the order of clients."""
    if case.quick:
        (losses, alpha), *_ = case.samples()
        case(2 * losses, alpha, state=case(losses, alpha).state)
        return
    for _ in range(8):  # in some cohorts clients with and without a past share the weight
        state, size = None, 7 if case.traits.full_participation else 5
        for _ in range(3):
            clients, order = torch.randperm(7, generator=case.gen)[:size], torch.randperm(size, generator=case.gen)
            losses, alpha = 2 * torch.rand(2, size, generator=case.gen, dtype=torch.float64) + 0.1
            alpha = alpha / alpha.sum()
            found = case(losses, alpha, clients, state)
            case.hold(is_finite(found.weights) and (found.weights >= 0).all(), "not_negative", found.weights.tolist())
            slopes = torch.tensor(case.slopes(losses, alpha, found, clients, state), dtype=torch.float64).reshape(-1, 3)
            weights, expected = slopes[:, 1], slopes[:, 2]  # a round divides weights by their sum
            if float(weights.sum()) > 0 and abs(float(expected.sum())) > 1e-9:
                agree(case.part, "gradient_later", weights / weights.sum(), expected / expected.sum(), 1e-3)
            moved = case(losses[order], alpha[order], clients[order], state)
            agree(case.part, "weights_follow", moved.weights, found.weights[order], 1e-9)
            state = found.state


def mixture(case: TriedRisk) -> None:
    """The memory of a risk over all clients goes by their ids; an ascent with a `step` starts uniform and projects."""
    if not case.traits.full_participation:
        return
    for count, scale in ((1, 1.0), (2, 1.0), (7, 0.1), (7, 3.0), (20, 30.0), (3, 1e300)):
        alpha = torch.rand(count, generator=case.gen, dtype=torch.float64) + 0.1
        losses, later = scale * torch.rand(2, count, generator=case.gen, dtype=torch.float64)
        alpha, order = alpha / alpha.sum(), torch.randperm(count, generator=case.gen)
        first = case(losses, alpha)
        second = case(later, alpha, state=first.state)
        moved = case(later[order], alpha[order], order, first.state)
        agree(case.part, "weights_follow", moved.weights, second.weights[order], 1e-9)
        if (step := case.traits.step) is None:
            continue
        agree(case.part, "starts_uniform", first.weights, torch.full_like(alpha, 1 / count), 1e-9)
        third = case(later, alpha, state=second.state)
        for here, seen, following in ((first.weights, losses, second.weights), (second.weights, later, third.weights)):
            on_simplex = bool((following >= 0).all()) and abs(float(following.sum()) - 1) < 1e-9
            case.hold(on_simplex, "on_simplex", following)
            agree(case.part, "projection", following, _projection_by_bisection(here + step * (seen - seen.max())), 1e-9)


def _projection_by_bisection(point: Tensor) -> Tensor:
    """The projection on the simplex, max(v − τ, 0): slow, and unlike any fast way."""
    low, high = float(point.max()) - 1, float(point.max())
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if float((point - middle).clamp(min=0.0).sum()) > 1 else (low, middle)
    return (point - low).clamp(min=0.0)


def client_form(case: TriedRisk) -> None:
    """The weight that a client finds alone, from its own loss and a public bound; forms by quantile and group are not tried."""
    weigh = case.traits.client_weight
    if case.traits.client_form != "loss" or weigh is None:
        return
    for bound in case.bounds:
        for loss in (-5.0, 0.0, bound, 2 * bound + 1, 1e30, math.inf):
            weight = weigh(torch.tensor([loss], dtype=torch.float64), torch.ones(1, dtype=torch.float64), bound)
            good = bool(((weight >= 0) & (weight <= 1 + 1e-9)).all())
            case.hold(good, "form_within", f"a loss of {loss:g} with the bound {bound:g} gives {weight.tolist()}")
        losses = bound * torch.tensor([0.05, 0.3, 0.7, 1.0], dtype=torch.float64)
        base = torch.tensor([0.1, 0.4, 0.2, 0.3], dtype=torch.float64)
        together = weigh(losses, base, bound)
        alone = torch.cat([weigh(losses[k : k + 1], base[k : k + 1], bound) for k in range(len(losses))])
        same = together.shape == base.shape and torch.allclose(together, alone, rtol=1e-6, atol=1e-12)
        case.hold(same, "form_alone", f"{together.tolist()} together, {alone.tolist()} alone")
        weights = case.part(losses, base, clients=tuple("abcd"), state=None).weights
        found, expected = together / together.sum(), weights / weights.sum()
        shares = f"shares {found.tolist()} by client_weight, {expected.tolist()} by the risk, for losses {losses.tolist()}"
        case.hold(torch.allclose(found, expected, rtol=1e-4, atol=1e-6), "form_in_proportion", shares)


FORM: tuple[Callable[[TriedRisk], None], ...] = (callable_as,)  # of any risk
OF_WEIGHTS = (same_again, finite_and_not_negative, any_order, gradient, equal_losses, outliers, gradient_later, client_form)
RISK_LAWS = (*FORM, *OF_WEIGHTS, mixture)


def try_risk(risk: Any, clients: Sequence[str], clients_per_round: int, loss_bound: float | None) -> None:
    """The quick trial of a risk, on clients of a run; a risk with a memory of all clients is not called."""
    size = min(len(clients), max(2, clients_per_round), 400)
    quick = len(clients) > 1 and not read(RiskTraits, risk).full_participation
    laws = (*FORM, *OF_WEIGHTS) if quick else FORM
    try_laws(laws, lambda: TriedRisk(risk, True, names=clients, cohort=size, bounds=(loss_bound or 3.0,)))


def first_round_that_favours_low_losses(risk: Any, names: Sequence[str]) -> int:
    """The first round in which no weight is above that of a lower loss, and the last is below the first; 0 if there is none.

    Base weights are equal, and clients have the same losses in every round, so that the state of a risk knows who fares badly.
    After the first round only the sixth counts: a memory may take a few rounds to follow.
    """
    losses = torch.tensor([0.3, 0.6, 0.9, 1.4, 2.2][: len(names)], dtype=torch.float64)
    state = None
    try:
        for number in range(1, 7):
            found = risk(losses.clone(), torch.full_like(losses, 1 / len(losses)), clients=tuple(names), state=state)
            weights, state = found.weights, found.state
            falls = bool((weights.diff() <= 1e-12).all()) and float(weights[-1]) < (1 - 1e-6) * float(weights[0])
            if falls and number in (1, 6):
                return number
    except Exception:  # the run raises it again, where it belongs
        return 0
    return 0


def tell_of_low_losses(risk: Any, names: Sequence[str] = NAMES[:5]) -> None:
    """Give a notice if a risk of the user's own gives less weight to a higher loss; that of the library is documented."""
    if is_of_user(risk) and (number := first_round_that_favours_low_losses(copied(risk), names)):
        notify(
            f"The weights of {shown(risk)} fall as losses rise (round {number}): clients with a high loss count less. If you "
            "want to help them, look for a wrong sign, e.g. softmax(-losses), or 1 - past in place of 1 + past."
        )
