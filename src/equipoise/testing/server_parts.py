"""The laws of what the server does: aggregators, optimisers, averaging."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from equipoise.aggregators.stages import leaves_out
from equipoise.algorithm import LINEAR_OR_NOT
from equipoise.core.abilities import read
from equipoise.core.rng import torch_generator
from equipoise.runs.own_parts import (
    AGGREGATOR_CALL,
    ALONG,
    ALONG_CURE,
    ALONG_UPDATES,
    ALONG_UPDATES_CURE,
    ANY_NUMBER,
    ANY_ORDER,
    ANY_ORDER_LATER,
    ANY_TYPE,
    ONE_UPDATE,
    ONE_UPDATE_CURE,
    ORDER_CURE,
    ROUNDING,
    SERVER_CALL,
    TOTAL_TYPE,
    TWO_THINGS,
    TYPE_CURE,
    total_of_one,
)
from equipoise.runs.state_rules import FINITE, FINITE_CURE, LINEAR_CURE, NO_LINEAR_STATE, SAME_AGAIN, SAME_CURE
from equipoise.runs.step_laws import broken_server_law, memory_of_server
from equipoise.runs.tried_calls import close, copied, or_none
from equipoise.testing.laws import (
    accepts,
    agree,
    check_of,
    hold,
    is_finite,
    keepable,
    repeated,
    two_things,
    unchanged,
    without_error,
)
from equipoise.types import Aggregator, AggregatorTraits, Averaging, ServerOptimizer


@check_of("an aggregator", "__call__", "linear", cure=LINEAR_OR_NOT, on_copy=True)
def check_aggregator(aggregator: Aggregator, *, seed: int = 0, clients: int = 12) -> None:
    """Permutation-invariant; zero updates give zero; a linear one's total is additive over chunks and linear in the weights.

    Updates have the type of the model, mostly float32, weights and losses always float64: an aggregator takes both, and its
    total has the type of the updates. A call writes to nothing that it is given, the same call again gives the same answer, and
    this holds with the state of the calls before. A linear aggregator has no state. Zero updates give zero from a fresh state
    (None). Equal updates in every round give one total, however many clients send them, which a sum without weights does not;
    its inner product with them is positive in each of three rounds. Neither a total nor that of a later round depends on the
    order of clients, also where clients are tied: their updates have one length, are as far from each other or are equal, and
    their losses are equal. The total of one finite update is finite, unless the aggregator refuses a cohort of one by an error.

    The total is finite if weights are as small as 1e-300, all but one of them, too. In a run no client has the weight 0. The
    library's aggregators take it: such a client changes nothing, and without any weight the total is zero.

    Whether the total uses the weights is not checked: a median of clients need not. `train` gives a notice where it matters.
    """
    streams: dict[str, Any] = {"keys": None} if read(AggregatorTraits, aggregator).needs_keys else {}
    accepts(aggregator, aggregator, AGGREGATOR_CALL, (0, 0), losses=None, state=None, **streams)
    gen = torch_generator(seed, "check_aggregator")
    updates = torch.randn(clients, 7, generator=gen, dtype=torch.float64)
    weights = torch.rand(clients, generator=gen, dtype=torch.float64) + 0.1
    weights, losses = weights / weights.sum(), torch.randint(1, 4, (clients,), generator=gen).double()  # some are equal
    keys = torch.randint(-(2**62), 2**62, (clients,), generator=gen)

    def known(found: Any) -> Any:
        if isinstance(found, tuple) and len(found) == 2:
            keepable(aggregator, found[1])
        return found

    def answer(rows: Tensor, own: Tensor, places: Tensor, state: Any = None) -> tuple[Any, Any]:
        given = dict.fromkeys(streams, keys[places])
        law, cure = f"it combines the updates of {len(rows)} clients", "If it needs more, call check_aggregator(…, clients=…)."
        if len(rows) < clients:
            law, cure = "a linear aggregator combines any number of updates", "Set linear = False if it needs a whole cohort."
        if rows.dtype == torch.float32:
            law, cure = ANY_TYPE, TYPE_CURE
        here, call = losses[places], f"{len(rows)} updates of type {rows.dtype} give "
        with without_error(aggregator, law, call, cure):
            given_back = repeated(
                aggregator, "a call", lambda: aggregator(rows, own, losses=here, state=state, **given), known,
                updates=rows, weights=own, losses=here, state=state,
            )  # fmt: skip
        total, later = two_things(aggregator, given_back, TWO_THINGS)
        hold(isinstance(total, Tensor), aggregator, "the total is a tensor", type(total).__name__)
        hold(total.shape == rows.shape[1:], aggregator, "the total has the shape of one update", tuple(total.shape))
        hold(total.dtype == rows.dtype, aggregator, TOTAL_TYPE, f"{total.dtype} of {rows.dtype}", TYPE_CURE)
        hold(later is None or not aggregator.linear, aggregator, NO_LINEAR_STATE, type(later).__name__, LINEAR_CURE)
        return total, later

    def combine(rows: Tensor, own: Tensor, places: Tensor) -> Tensor:
        return answer(rows, own, places)[0]  # type: ignore[no-any-return]

    everyone = torch.arange(clients)
    total = combine(updates, weights, everyone)
    for order in (torch.randperm(clients, generator=gen), everyone.flip(0)):
        moved = combine(updates[order], weights[order], order)
        agree(aggregator, ANY_ORDER, moved, total, 1e-9)
    zero = combine(torch.zeros_like(updates), weights, everyone)
    hold((zero == 0).all(), aggregator, "zero updates give a zero total", zero)
    single = combine(updates.float(), weights, everyone)
    agree(aggregator, ANY_TYPE, single.double(), combine(updates.float().double(), weights, everyone), 1e-3)
    state = state_moved = None
    for index in range(3):
        rows = torch.randn(clients, 6, generator=gen, dtype=torch.float64)
        order = torch.randperm(clients, generator=gen)
        total_later, after = answer(rows, weights, everyone, state)
        agree(aggregator, ANY_ORDER, answer(rows[order], weights[order], order, state)[0], total_later, 1e-9)
        moved, state_moved = answer(rows[order], weights[order], order, state_moved)
        agree(aggregator, ANY_ORDER_LATER if index else ANY_ORDER, moved, total_later, 1e-6, cure=ORDER_CURE * bool(index))
        state = after
    if aggregator.linear:
        parts = [combine(updates[part], weights[part], part) for part in torch.split(everyone, 5)]
        agree(aggregator, "a linear total is the sum of its chunks' totals", torch.stack(parts).sum(0), total, 1e-9)
        double = combine(updates, 2 * weights, everyone)
        agree(aggregator, "a linear total doubles with the weights", double, 2 * total, 1e-9)
    _check_tied(aggregator, combine, weights, gen)
    _check_small_weights(aggregator, combine, updates, weights)
    _check_equal_updates(aggregator, answer, updates[0], clients)
    alone = total_of_one(aggregator, **dict.fromkeys(streams, keys[:1]))
    good = alone is None or bool(alone.isfinite().all())
    hold(good, aggregator, ONE_UPDATE, alone, ONE_UPDATE_CURE)


Combine = Callable[[Tensor, Tensor, Tensor], Tensor]
TIED_CURE = "Break ties by keys: set needs_keys = True and take keys=None, int64 (K,), a random number of each client."
NO_WEIGHT = "a client without a weight changes nothing, and without any weight the total is zero"


def _check_tied(aggregator: Aggregator, combine: Combine, weights: Tensor, gen: torch.Generator) -> None:
    """Updates of one length, each as far from all others or equal to them: nothing but keys tells such clients apart."""
    everyone, even, corners = torch.arange(len(weights)), torch.full_like(weights, 1 / len(weights)), torch.eye(6).double()
    turned = torch.linalg.qr(torch.randn(6, 6, generator=gen, dtype=torch.float64)).Q  # tied up to rounding
    for values, own in ((corners, weights), (corners, even), (corners.float(), even), (turned, weights)):
        rows, order = values[everyone % 6], torch.randperm(len(weights), generator=gen)
        moved, total = combine(rows[order], own[order], order), combine(rows, own, everyone)
        agree(aggregator, ANY_ORDER, moved, total, 1e-6, cure=TIED_CURE)


def _check_small_weights(aggregator: Aggregator, combine: Combine, updates: Tensor, weights: Tensor) -> None:
    """Some clients, or all but one, with weights of 1e-300; of 0 where the aggregator leaves such clients out by itself."""
    everyone = torch.arange(len(weights))
    for few, rows in product((1, len(weights) // 2, len(weights) - 1, len(weights)), (updates, updates.float())):
        without = weights * (everyone >= few)
        tiny = without.clamp(min=1e-300)
        hold(is_finite(combine(rows, tiny / tiny.sum(), everyone)), aggregator, "the total is finite for any positive weights")
        if leaves_out(aggregator):  # it may refuse the few that are left
            found = or_none(partial(combine, rows, without, everyone))
            others = or_none(partial(combine, rows[few:], without[few:], everyone[few:]))
            same = found is others or (found is not None and others is not None and close(found, others, 1e-5))
            hold(same and (few < len(weights) or not others.any()), aggregator, NO_WEIGHT, (found, others))


def _check_equal_updates(
    aggregator: Aggregator, answer: Callable[[Tensor, Tensor, Tensor, Any], tuple[Any, Any]], update: Tensor, clients: int
) -> None:
    """One update, which all clients send in three rounds, gives a total along it, and three clients more change nothing."""
    state = None
    for number in range(1, 4):
        answers = []
        for count in (clients, clients + 3):
            places = torch.arange(count) % clients  # the last three share losses and streams with the first
            rows, own = update.expand(count, -1).clone(), torch.full((count,), 1 / count, dtype=torch.float64)
            answers.append(answer(rows, own, places, state))
        (total, after), (total_of_more, _) = answers
        agree(aggregator, ANY_NUMBER, total_of_more, total, 1e-6)
        along = float(total @ update)
        shown = f"in round {number} the inner product of the total and the update is {along:.6g}"
        hold(along > 0, aggregator, ALONG_UPDATES, shown, ALONG_UPDATES_CURE)
        state = after


@check_of("a server optimiser", "begin", "step", on_copy=True)
def check_server_optimizer(server: ServerOptimizer, *, seed: int = 0) -> None:
    """A zero update from a fresh state changes nothing; inputs are not written to; the first step follows the update.

    Equal updates in 60 rounds move the parameters along them; opposite updates move them by as much in the opposite direction.
    Rounds without an update do not take back the step of one update. A state that begins at zero and is used is changed.
    """
    gen = torch_generator(seed, "check_server_optimizer")
    params, total = torch.randn(7, generator=gen), torch.randn(7, generator=gen)
    accepts(server, server.step, SERVER_CALL, (0, 0, 0))
    state, law = server.begin(params), "a step returns two things, the next parameters and the next state"
    keepable(server, state)
    kept = memory_of_server(copied(server), params, total)
    hold(not kept, server, SAME_AGAIN, kept, SAME_CURE)
    with unchanged(server, "a step", parameters=params, state=state):
        still, _ = two_things(server, server.step(params, torch.zeros_like(params), state), law)
        first, later = two_things(server, server.step(params, total, state), law)
    keepable(server, later)
    second, again = (server.step(params, total, later)[0] for _ in range(2))
    for numbers in (still, first, second):
        hold(bool(torch.isfinite(numbers).all()), server, FINITE, f"the parameters are {numbers.tolist()}", FINITE_CURE)
    agree(server, "a zero update from a fresh state changes nothing", still, params, ROUNDING)
    agree(server, "a step from one state gives one result", again, second, cure=SAME_CURE)
    along = float((first - params) @ total)
    hold(along > 0, server, ALONG, f"their inner product is {along:.6g}", ALONG_CURE)
    if (broken := broken_server_law(server)) is not None:
        hold(False, server, *broken)


@check_of("averaging", "begin", "update", "iterate")
def check_averaging(averaging: Averaging, *, rounds: int = 50, seed: int = 0) -> None:
    """A constant sequence is reported as it is; the point lies in the iterates' hull; nothing given is written to.

    Sequences have `rounds` iterates.

    >>> import equipoise as eq
    >>> check_averaging(eq.averaging.Uniform())  # nothing is returned: all laws hold
    """
    gen = torch_generator(seed, "check_averaging")
    for dtype in (torch.float32, torch.float64):
        still = torch.randn(5, generator=gen, dtype=torch.float64).to(dtype)
        path = [torch.randn(5, generator=gen, dtype=torch.float64).to(dtype) for _ in range(rounds + 1)]
        for iterates in ([still] * (rounds + 1), path):
            state = averaging.begin(iterates[0])
            for count, point in enumerate(iterates):
                with unchanged(averaging, "averaging", parameters=point, state=state):
                    after, again = (averaging.update(point, state) if count else state for _ in range(2))
                    reported, repeated = (averaging.iterate(point, each) for each in (after, again))
                agree(averaging, "an update of one state gives one point", repeated, reported)
                _check_hull(averaging, reported, torch.stack(iterates[: count + 1]))
                state = after


def _check_hull(averaging: Averaging, reported: Tensor, iterates: Tensor) -> None:
    same_form = reported.shape == iterates[0].shape and reported.dtype == iterates.dtype
    hold(same_form, averaging, "the reported point has the form of the parameters", (tuple(reported.shape), reported.dtype))
    low, high = iterates.min(0).values, iterates.max(0).values
    slack = 1e-12 * iterates.abs().max()  # far below float32, whose rounding therefore shows
    inside = (reported >= low - slack) & (reported <= high + slack)
    hold(inside.all(), averaging, "the reported point lies between the smallest and the largest iterate", reported)
