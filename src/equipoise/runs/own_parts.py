"""A short trial of parts that are not the library's own, before a run: a part that breaks its law is refused.

The laws are those of `equipoise.testing`, whose checks try many more cases. Parts are copied first. A part that raises an error
here is left to the run, which shows the error where it happens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from equipoise.algorithm import Algorithm
from equipoise.core.abilities import is_of_user, nested_aggregators, solver_traits
from equipoise.errors import InvalidParameter, notify, shown
from equipoise.runs.tried_calls import close, copied, or_none
from equipoise.testing.laws import LawBroken, try_laws
from equipoise.testing.risks import tell_of_low_losses, try_risk
from equipoise.testing.samplers import try_sampler
from equipoise.testing.server_parts import SERVER_LAWS, TriedServer, try_aggregator
from equipoise.testing.steps import try_solver

CLIENTS = 12  # of a cohort whose weights may be ignored


def try_own_parts(algorithm: Algorithm, clients: Sequence[str], alpha: Tensor, clients_per_round: int, seed: int) -> None:
    """Raise InvalidParameter with the law that a part of the user's own breaks, and the numbers that show it."""
    bound, a = algorithm.traits.privacy.loss_bound, algorithm
    solvers = (a.solver, _wrapped(a.solver), a.traits.personal.solver)
    trials: list[tuple[str, str, Sequence[Any], Callable[[Any], None]]] = [
        ("risk", "risk", (a.risk,), lambda part: try_risk(part, clients, clients_per_round, bound)),
        ("solver", "solver", solvers, try_solver),
        (
            "aggregator",
            "aggregator",
            (*nested_aggregators(a.aggregator),),
            lambda part: try_aggregator(part, clients_per_round),
        ),
        ("server", "server_optimizer", (a.server,), lambda part: try_laws(SERVER_LAWS, lambda: TriedServer(part, True))),
        ("sampler", "sampler", (a.sampler,), lambda part: try_sampler(part, alpha, clients_per_round, seed)),
    ]
    for name, check, parts, trial in trials:
        for part in [each for each in parts if each is not None and is_of_user(each)]:
            try:
                trial(part)
            except LawBroken as broken:
                cure = f"{broken.cure} See equipoise.testing.check_{check}."
                refused = InvalidParameter(name, f"must keep the law that {broken.rule} ({broken.law})", part, cure)
                refused.law = broken.law
                raise refused from None
            except Exception:  # noqa: S112 — the run raises it again, where it belongs
                continue
    tell_of_weights(algorithm, clients)
    if not algorithm.traits.risk.full_participation and len(clients) > 1:
        tell_of_low_losses(algorithm.risk, clients[:5])


def _wrapped(solver: Any) -> Any:
    """The solver inside all that wrap it (FedDane, SCAFFOLD): the one that takes the steps. None if nothing wraps it."""
    inside = solver_traits(solver).solver
    return None if inside is None else _wrapped(inside) or inside


# ------------------------------------------------------------------------------------------------ weights that have no effect


def tell_of_weights(algorithm: Algorithm, clients: Sequence[str]) -> None:
    """Give a notice where an aggregator makes nothing of the risk's weights, and one of the two is the user's own.

    The library's own risks say whether they leave clients out, and are refused beside Krum and k-loss if they do not.
    """
    risk, part, large = algorithm.traits.risk, algorithm.aggregator, algorithm.traits.aggregator.picks_large_loss
    if not risk.needs_losses or risk.server_step is not None:
        return
    ignored = is_of_user(part) and ignores_weights(part)
    picked = not ignored and algorithm.traits.aggregator.picks_one and is_of_user(algorithm.risk)
    if ignored or (picked and weighs_without_leaving_out(algorithm.risk, tuple(clients[:CLIENTS]), large)):
        notify(
            f"{shown(part)} ignores the weights of clients, and {shown(algorithm.risk)} has an effect only through clients to "
            "which it gives the weight 0. Use an aggregator that uses weights, or a risk that leaves clients out."
        )


def ignores_weights(aggregator: Any) -> bool:
    """Whether the total of different updates is the same whoever has nearly all of the weight."""
    updates = torch.randn(CLIENTS, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    losses = torch.linspace(0.5, 1.5, CLIENTS, dtype=torch.float64)
    weights = torch.full((3, CLIENTS), 0.1 / (CLIENTS - 1), dtype=torch.float64)
    weights[range(3), range(3)] = 0.9
    calls = [partial(copied(aggregator), updates.clone(), own, losses=losses, state=None) for own in weights]
    answers = [or_none(call) for call in calls]
    return all(answer is not None and close(answer[0], answers[0][0]) for answer in answers)


def weighs_without_leaving_out(risk: Any, ids: tuple[str, ...], large: bool = False) -> bool:
    """Whether a risk weighs some tried losses otherwise than by base weights, and gives no client the weight 0.

    With `large` only clients with a loss above the median count. False if a call raises an error: the run shows it.
    """
    base, weighs = torch.full((len(ids),), 1 / max(1, len(ids)), dtype=torch.float64), False
    even = torch.linspace(0.1, 3.0, len(ids), dtype=torch.float64)
    high, low = torch.full_like(even, 0.1), torch.ones_like(even)
    high[:1], low[:1] = 1.0, 0.1
    for losses in [scale * each for scale in (0.01, 1.0, 10.0) for each in (even, high, low)]:
        mine, state = copied(risk), None
        for _ in range(4):  # rounds, for a risk with a state
            found = or_none(lambda: mine(losses.clone(), base.clone(), clients=ids, state=state))  # noqa: B023
            weights = getattr(found, "weights", None)
            if len(ids) < 2 or not isinstance(weights, Tensor) or weights.shape != base.shape:
                return False
            if bool((weights[losses > losses.median()] if large else weights).eq(0).any()):
                return False
            weighs, state = weighs or not close(weights / weights.sum(), base), found.state
    return weighs
