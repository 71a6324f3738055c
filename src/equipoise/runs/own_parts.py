"""A short trial of parts that are not the library's own, before a run: a part that breaks its law is refused.

Each law is that of the contract in `equipoise.types`, tried on a few cases; `equipoise.testing` has checks that try many.
Parts are copied first, so that what a copy notes about its calls stays with the copy. A part that raises an error here is
left to the run, which shows the error where it happens.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from equipoise.algorithm import Algorithm
from equipoise.core.abilities import is_of_user, nested_aggregators, read, refused_call, solver_traits
from equipoise.errors import InvalidParameter
from equipoise.runs.client_form import broken_client_form
from equipoise.runs.ignored_weights import tell_of_weights
from equipoise.runs.inclusion_rules import INCLUSION, INCLUSION_CURE, wrong_inclusion
from equipoise.runs.risk_direction import tell_of_low_losses
from equipoise.runs.state_rules import (
    FINITE,
    FINITE_CURE,
    IS_KEPT,
    KEPT_CURE,
    LINEAR_CURE,
    NO_LINEAR_STATE,
    SAME_AGAIN,
    SAME_CURE,
    STATE_CURE,
    copy_cure,
    unkeepable,
)
from equipoise.runs.step_laws import EACH_CLIENT, EACH_CLIENT_CURE, broken_server_law, broken_step_law, memory_of_server
from equipoise.runs.steps_alone import (
    BEGIN_CURE,
    convex_losses,
    failure_without_memory,
    ignored_options,
    is_memory,
    lost_memories,
    some_steps,
    step_call,
)
from equipoise.runs.tried_calls import close, copied, or_none, same_state
from equipoise.types import RiskTraits, RiskValue

STEP = 1e-5  # of finite differences
ROUNDING = 5e-7  # four units in the last place of float32, of the largest number
MOVES = "steps with gradients other than zero move the parameters, in place"
HAS_EFFECT = "every option that is set changes the step"
RISK_CALL = "risk(losses, base_weights, clients=…, state=…)"
AGGREGATOR_CALL = "aggregator(updates, weights, losses=…, state=…)"
SERVER_CALL = "step(params, total, state)"
SAMPLER_CALL = "sampler(round_index, alpha, clients_per_round=…, seed=…)"
IS_MEMORY = "the memory that begin returns is a tuple of tensors, each shaped like the parameters"
TUPLE_CURE = "Return e.g. (torch.zeros_like(weights),)."
NUMBER_CURE = "Add the parameter `number` to step, or set `numbered = False` in the class."
ARE_TENSORS = "the value and the weights of a risk are tensors"
ARE_EXACT = "the value and the weights of a risk are float64"
EXACT_CURE = "A round gives float64; do not cast it to float32."
NEGATIVE_CURE = (
    "A risk must not fall when a loss rises. A standard deviation does; use an upper semideviation instead, "
    "Σ α F + c Σ α max(F − mean, 0) with c ≤ 1 (howto/own-part)."
)
TOTAL_TYPE = "the total has the type of the updates"
ANY_TYPE = "updates may be float32, while weights and losses are float64"
TYPE_CURE = "Cast the weights before a product: weights.to(updates.dtype)."
ANY_NUMBER = "equal updates, with weights that sum to 1, give the same total however many clients send them"
LOWERS = "a few small steps against the gradient of a convex loss lower it"
MEMORY_IN_PLACE = "a memory that begins at zero and that the step uses is changed by the step, in place"
MEMORY_CURE = "Write e.g. memory[0].mul_(0.9).add_(gradient); `m = 0.9 * m + gradient` stores nothing."
ALONG = "the first step goes along the update"
ALONG_CURE = "The total is added to the parameters; it is no gradient. Write params + lr * total."
ONE_UPDATE = "the total of one finite update is finite, where a cohort of one client is taken at all"
ONE_UPDATE_CURE = "A standard deviation of one client is NaN: write updates.std(0, unbiased=False)."
TWO_THINGS = "it returns two things, the total and its state"
ANY_ORDER = "the order of clients does not matter"
ANY_ORDER_LATER = "the order of clients in one round does not matter for the totals of later rounds"
ORDER_CURE = "Make the state of sums or means over all clients, e.g. of the total; not of updates[0]."
ALONG_UPDATES = "the total of equal updates goes along them, in the first round and with a state of earlier rounds"
ALONG_UPDATES_CURE = "The total is added to the parameters; it is no gradient. Write weights.to(updates.dtype) @ updates."
CHECKS = {
    "risk": "check_risk", "solver": "check_solver", "aggregator": "check_aggregator", "server": "check_server_optimizer",
    "sampler": "check_sampler",
}  # fmt: skip


class _Broken(Exception):
    """A law that a part breaks, the numbers that show it, and the cure where there is one."""

    def __init__(self, law: str, numbers: object, cure: str) -> None:
        self.law, self.found = law, f"Found: {numbers}." + f" {cure}" * bool(cure)
        super().__init__(law)


def _hold(condition: bool, law: str, numbers: object, cure: str = "") -> None:
    if not condition:
        raise _Broken(law, numbers, cure)


def try_own_parts(algorithm: Algorithm, clients: Sequence[str], alpha: Tensor, clients_per_round: int, seed: int) -> None:
    """Raise InvalidParameter with the law that a part of the user's own breaks, and the numbers that show it."""
    bound = algorithm.traits.privacy.loss_bound
    trials: dict[str, Callable[[Any], None]] = {
        "risk": lambda part: _try_risk(part, clients, clients_per_round, bound),
        "solver": _try_solver,
        "aggregator": lambda part: _try_aggregator(part, clients_per_round),
        "server": _try_server,
        "sampler": lambda part: _try_sampler(part, alpha, clients_per_round, seed),
    }
    parts: list[tuple[str, Any]] = [(name, vars(algorithm)[name]) for name in trials]
    parts += [("solver", each) for each in (_wrapped(algorithm.solver), algorithm.traits.personal.solver)]
    parts += [
        ("aggregator", within) for within in nested_aggregators(algorithm.aggregator) if within is not algorithm.aggregator
    ]
    for name, part in parts:
        if part is None or not is_of_user(part):
            continue
        try:
            trials[name](copied(part))
        except _Broken as broken:
            rule, fix = f"must keep the law that {broken.law}", f"{broken.found} See equipoise.testing.{CHECKS[name]}."
            raise InvalidParameter(name, rule, part, fix) from None
        except Exception:  # noqa: S112 — the run raises it again, where it belongs
            continue
    tell_of_weights(algorithm, clients)
    if not algorithm.traits.risk.full_participation and len(clients) > 1:
        tell_of_low_losses(copied(algorithm.risk), tuple(clients[:5]))


def _wrapped(solver: Any) -> Any:
    """The solver inside all that wrap it (FedDane, SCAFFOLD): the one that takes the steps. None if nothing wraps it."""
    inside = solver_traits(solver).solver
    return None if inside is None else _wrapped(inside) or inside


def _accepts(call: Callable[..., Any], shown: str, *given: Any, cure: str = "", **named: Any) -> None:
    """Refuse a part that cannot be called as its contract says."""
    failure = refused_call(call, *given, **named)
    _hold(failure is None, f"it can be called as {shown}", failure, cure)


def _try_risk(risk: Any, clients: Sequence[str], clients_per_round: int, loss_bound: float | None) -> None:
    _accepts(risk, RISK_CALL, 0, 0, clients=(), state=None)
    traits = read(RiskTraits, risk)
    if len(clients) < 2 or traits.full_participation:  # it has a memory of all clients
        return
    losses, alpha = (torch.tensor(values, dtype=torch.float64) for values in ([0.5, 1.5], [0.3, 0.7]))

    def at(values: Tensor, weights: Tensor = alpha, ids: tuple[str, ...] = (clients[0], clients[1])) -> Any:
        given = values.clone(), weights.clone()
        result = risk(*given, clients=ids, state=None)
        if not isinstance(result, RiskValue):
            return result
        kept = torch.equal(given[0], values) and torch.equal(given[1], weights)
        _hold(kept, "a risk does not write to the losses or weights that it is given", given[0].tolist(), copy_cure("losses"))
        return result

    first = at(losses)
    _hold(isinstance(first, RiskValue), "a risk returns a RiskValue", type(first).__name__)
    value, weights = first.value, first.weights
    _hold(isinstance(value, Tensor) and isinstance(weights, Tensor), ARE_TENSORS, (value, weights))
    _hold(weights.shape == losses.shape, "there is one weight per client", tuple(weights.shape))
    types = (value.dtype, weights.dtype)
    _hold(types == (torch.float64, torch.float64), ARE_EXACT, types, EXACT_CURE)
    once = (float(value), weights.tolist())  # read now: the next call may write to these tensors
    at(100 * losses.flip(0))  # another call in between: a running mean of equal losses, or an order that stays, would not show
    again = at(losses)
    twice = (float(again.value), again.weights.tolist())
    _hold(repr(once) == repr(twice), SAME_AGAIN, (once[1], twice[1]), SAME_CURE)
    _try_risk_state(risk, first.state, losses, alpha, (clients[0], clients[1]))
    good = bool(torch.isfinite(weights).all()) and bool((weights >= 0).all())
    _hold(good, "weights are finite and not negative", weights.tolist(), NEGATIVE_CURE * bool((weights < 0).any()))
    moved = at(losses.flip(0), alpha.flip(0), (clients[1], clients[0])).weights
    _hold(close(moved.flip(0), weights), "permuting clients permutes the weights", (weights.tolist(), moved.tolist()))
    for i in range(2):
        nudge = torch.zeros_like(losses)
        nudge[i] = STEP
        up, here, down = float(at(losses + nudge).value), float(value), float(at(losses - nudge).value)
        slope, weight = (up - down) / (2 * STEP), float(weights[i])
        kink = abs((up - here) - (here - down)) > 1e-2 * STEP * max(1.0, abs(slope))
        shown = f"client {i} of losses {losses.tolist()} has the weight {weight:.6g}, and the finite difference is {slope:.6g}"
        good = kink or abs(slope - weight) <= 1e-3 * max(1.0, abs(slope))
        _hold(good, "the weights are the gradient of the value in the losses", shown)
    if traits.group_of is None:
        ratio = at(torch.full_like(losses, 0.7)).weights / alpha
        shown = f"base weights {alpha.tolist()} become {(ratio * alpha).tolist()}"
        _hold(close(ratio[:1], ratio[1:], 1e-4), "equal losses share weight in proportion to the base weights", shown)
    _try_outliers(risk, clients[: min(len(clients), max(2, clients_per_round), 400)])
    if (broken := broken_client_form(risk, loss_bound or 3.0)) is not None:
        raise _Broken(*broken)


def _try_risk_state(risk: Any, state: Any, losses: Tensor, alpha: Tensor, ids: tuple[str, ...]) -> None:
    """A state is what a checkpoint keeps, and the next call does not write to it."""
    _hold_kept(state)
    before = copy.deepcopy(state)
    after = risk(2 * losses, alpha.clone(), clients=ids, state=state).state
    _hold(same_state(state, before), "a call does not write to the state it is given", (before, state), STATE_CURE)
    _hold_kept(after)


def _hold_kept(state: Any) -> None:
    found = unkeepable(state)
    _hold(found is None, IS_KEPT, f"a value of type {found}", KEPT_CURE)


def _try_outliers(risk: Any, clients: Sequence[str]) -> None:
    """A cohort in which one client is unlike all others: weights that fall with a loss become negative there."""
    count = len(clients)
    for one, others in ((0.1, 1.0), (1.0, 0.1)):
        losses = torch.full((count,), others, dtype=torch.float64)
        losses[0] = one
        weights = risk(losses, torch.full_like(losses, 1 / count), clients=tuple(clients), state=None).weights
        shown = f"one loss of {one} and {count - 1} of {others} give a weight of {float(weights.min()):.4g}"
        _hold(bool((weights >= 0).all()), "weights are finite and not negative", shown, NEGATIVE_CURE)


def _try_solver(solver: Any) -> None:
    traits = solver_traits(solver)
    if traits.prepare is not None:
        return
    for size in (1, 7):
        steps = solver.local_steps(size)
        _hold(isinstance(steps, int) and steps >= 0, "local_steps is an integer ≥ 0", (size, steps))
    lr = solver.learning_rate(0)
    _hold(math.isfinite(lr) and lr > 0, "the learning rate is positive and finite", lr)
    told = {"number": 1} if traits.numbered else {}
    _accepts(solver.step, step_call(told), 0, 0, 0, anchor=0, lr=0, cure=NUMBER_CURE if told else "", **told)
    together, gradient, anchor = torch.randn(3, 2, 4, generator=torch.Generator().manual_seed(0)).unbind()
    alone, given = together.clone(), gradient.clone()
    memory = solver.begin(together)
    _hold(is_memory(memory, together), IS_MEMORY, type(memory).__name__, TUPLE_CURE)
    failure = failure_without_memory(copied(solver))
    _hold(not failure, IS_MEMORY, failure, BEGIN_CURE)
    again = together.clone()
    solver.step(together, given, solver.begin(together), anchor=anchor, lr=lr, **told)
    _hold(
        torch.equal(given, gradient), "a step does not write to the gradient it is given", given.tolist(), copy_cure("gradient")
    )
    between = together.clone()  # another step in between: a running mean of equal gradients would not show
    solver.step(between, -3 * gradient, solver.begin(between), anchor=anchor, lr=lr, **told)
    solver.step(again, gradient.clone(), solver.begin(again), anchor=anchor, lr=lr, **told)
    _hold_finite(together)
    _hold(torch.equal(again, together), SAME_AGAIN, (together.tolist(), again.tolist()), SAME_CURE)
    for k in range(2):
        solver.step(alone[k], gradient[k].clone(), solver.begin(alone[k]), anchor=anchor[k], lr=lr, **told)
    apart = f"differences of up to {float((together - alone).abs().max()):.3g}"
    _hold(close(together, alone, 1e-5), EACH_CLIENT, apart, EACH_CLIENT_CURE)
    before, after = some_steps(solver)
    _hold(not torch.equal(before, after), MOVES, f"{before.tolist()} before and after {max(3, traits.repeats)} steps")
    lost = lost_memories(solver)
    _hold(not lost, MEMORY_IN_PLACE, f"memory{lost} is not", MEMORY_CURE)
    first, last = convex_losses(solver)
    _hold(last < first, LOWERS, f"{first:.6g} before and {last:.6g} after")
    ignored = ignored_options(solver)
    _hold(not ignored, HAS_EFFECT, f"{', '.join(ignored)} {'has' if len(ignored) == 1 else 'have'} none")
    if (broken := broken_step_law(solver)) is not None:
        raise _Broken(*broken)


def total_of_one(aggregator: Any, **streams: Any) -> Tensor | None:
    """An aggregator's total of one client's update; None where it needs more clients, and says so by an error."""
    update, one = torch.tensor([[1.0, -2.0, 0.5]], dtype=torch.float64), torch.ones(1, dtype=torch.float64)
    answer = or_none(lambda: copied(aggregator)(update, one, losses=0.5 * one, state=None, **streams)[0])
    return answer if isinstance(answer, Tensor) else None


def _try_aggregator(aggregator: Any, clients_per_round: int) -> None:
    _accepts(aggregator, AGGREGATOR_CALL, 0, 0, losses=None, state=None)
    # Three, since of two updates none is more central than the other; twelve for a part that needs more.
    updates = torch.tensor([[1.0, -2.0, 0.5], [3.0, 1.0, -1.0], [2.0, -1.5, 4.0]], dtype=torch.float64)
    weights, losses = (torch.tensor(values, dtype=torch.float64) for values in ([0.25, 0.5, 0.25], [0.5, 1.5, 1.0]))
    if or_none(lambda: copied(aggregator)(updates.clone(), weights.clone(), losses=losses.clone(), state=None)) is None:
        several = torch.linspace(0.5, 2.0, 4, dtype=torch.float64)
        updates, losses = torch.kron(several[:, None], updates), torch.kron(several, losses)
        weights = torch.kron(several, weights) / several.sum()
    _try_totals(aggregator, updates, weights, losses)
    if clients_per_round == 1 and (single := total_of_one(aggregator)) is not None:
        _hold(bool(single.isfinite().all()), ONE_UPDATE, single.tolist(), ONE_UPDATE_CURE)


def _try_totals(aggregator: Any, updates: Tensor, weights: Tensor, losses: Tensor) -> None:
    """An aggregator's totals of a few updates (K, 3) with weights (K,) that sum to 1, and of pieces of them."""
    everyone = list(range(len(updates)))
    backwards = everyone[::-1]

    def total(rows: Tensor, places: list[int], own: Tensor = weights, state: Any = None) -> tuple[Tensor, Any]:
        updates, shares = rows.clone(), own[places].clone()
        given = aggregator(updates, shares, losses=losses[places].clone(), state=state)
        good = isinstance(given, tuple) and len(given) == 2
        _hold(good, TWO_THINGS, type(given).__name__)
        kept = torch.equal(updates, rows) and torch.equal(shares, own[places])
        _hold(kept, "a call does not write to the updates or weights it is given", updates.tolist(), copy_cure("updates"))
        return given[0].clone() if isinstance(given[0], Tensor) else given[0], given[1]  # the next call may write to it

    every, state = total(updates, everyone)
    _hold(every.shape == (3,), "the total has the shape of one update", tuple(every.shape))
    _hold(state is None or not aggregator.linear, NO_LINEAR_STATE, type(state).__name__, LINEAR_CURE)
    _hold_kept(state)
    before = copy.deepcopy(state)
    next_total, later = total(2 * updates.flip(0), backwards, state=state)
    again = total(updates, everyone)[0]  # after another call: a running mean of equal totals would not show
    _hold_finite(every)
    _hold(torch.equal(again, every), SAME_AGAIN, (every.tolist(), again.tolist()), SAME_CURE)
    _hold(same_state(state, before), "a call does not write to the state it is given", (before, state), STATE_CURE)
    _hold_kept(later)
    moved, other = total(updates.flip(0), backwards)
    _hold(close(moved, every), ANY_ORDER, (every.tolist(), moved.tolist()))
    next_moved = total(2 * updates.flip(0), backwards, state=other)[0]
    _hold(close(next_moved, next_total), ANY_ORDER_LATER, (next_total.tolist(), next_moved.tolist()), ORDER_CURE)
    nothing = total(torch.zeros_like(updates), everyone)[0]
    _hold(bool((nothing == 0).all()), "zero updates give a zero total", nothing.tolist())
    if aggregator.linear:
        parts = total(updates[:1], [0])[0] + total(updates[1:], everyone[1:])[0]
        _hold(close(parts, every), "a linear total is the sum of its chunks' totals", (every.tolist(), parts.tolist()))
    try:
        single = total(updates.float(), everyone)[0]
    except RuntimeError as failure:  # of torch, which took the same numbers as float64
        raise _Broken(ANY_TYPE, f"updates of type torch.float32 give {failure!r}", TYPE_CURE) from failure
    _hold(single.dtype == torch.float32, TOTAL_TYPE, f"{single.dtype} of torch.float32", TYPE_CURE)
    count, state, sent = len(updates), None, updates[0]
    for number in range(1, 4):
        even = (torch.full_like(weights, 1 / count), torch.full_like(weights, 1 / (2 * count)))
        many = total(sent.expand(2 * count, -1), everyone * 2, even[1], state)[0]
        few, state = total(sent.expand(count, -1), everyone, even[0], state)
        shown = f"in round {number} {count} clients {few.tolist()}, {2 * count} {many.tolist()}"
        _hold(close(many, few), ANY_NUMBER, shown)
        shown = f"updates {sent.tolist()} of all clients give the total {few.tolist()} in round {number}"
        _hold(float(few @ sent) > 0, ALONG_UPDATES, shown, ALONG_UPDATES_CURE)


def _hold_finite(numbers: Tensor) -> None:
    _hold(bool(torch.isfinite(numbers).all()), FINITE, numbers.tolist(), FINITE_CURE)


def _try_server(server: Any) -> None:
    _accepts(server.step, SERVER_CALL, 0, 0, 0)
    params = torch.tensor([0.5, -1.0, 2.0])
    total = torch.tensor([1.0, -0.5, 0.25])
    kept = memory_of_server(copied(server), params, total)
    _hold(not kept, SAME_AGAIN, kept, SAME_CURE)
    given, still = params.clone(), torch.zeros_like(params)
    fresh = server.begin(params.clone())
    _hold_kept(fresh)
    after, _ = server.step(given, still, fresh)
    _hold(
        torch.equal(given, params), "a step does not write to the parameters it is given", given.tolist(), copy_cure("params")
    )
    _hold_finite(after)
    shown = (params.tolist(), after.tolist())
    _hold(close(after, params, ROUNDING), "a zero update from a fresh state changes nothing", shown)
    start = server.begin(params.clone())
    before = copy.deepcopy(start)
    moved, later = server.step(params.clone(), total.clone(), start)
    _hold(same_state(start, before), "a step does not write to the state it is given", (before, start), STATE_CURE)
    _hold_kept(later)
    _hold_finite(moved)
    along = float((moved - params) @ total)
    _hold(along > 0, ALONG, f"their inner product is {along:.6g}", ALONG_CURE)
    if (broken := broken_server_law(server)) is not None:
        raise _Broken(*broken)


def _try_sampler(sampler: Any, alpha: Tensor, clients_per_round: int, seed: int) -> None:
    _accepts(sampler, SAMPLER_CALL, 0, alpha, clients_per_round=1, seed=0)
    first, again = (sampler(1, alpha.clone(), clients_per_round=clients_per_round, seed=seed) for _ in range(2))
    _hold((first.round, first.seed) == (1, seed), "a cohort carries its round and seed", (first.round, first.seed))
    _hold(
        torch.equal(first.clients, again.clients), "a cohort is a function of seed and round alone", first.clients.tolist()[:9]
    )
    if len(first) == 0:
        return
    _hold(len(torch.unique(first.clients)) == len(first), "clients of a cohort are distinct", first.clients.tolist()[:9])
    inside = int(first.clients.min()) >= 0 and int(first.clients.max()) < len(alpha)
    _hold(inside, f"positions are between 0 and {len(alpha) - 1}", first.clients.tolist()[:9])
    good = bool((first.weights > 0).all()) and abs(float(first.weights.sum()) - 1) < 1e-6
    _hold(good, "weights are positive and sum to 1", first.weights.tolist()[:9])
    stated = wrong_inclusion(first)
    _hold(not stated, INCLUSION, stated, INCLUSION_CURE)
