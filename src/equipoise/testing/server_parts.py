"""The laws of what the server does: aggregators, optimisers, averaging."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from equipoise.aggregators.stages import leaves_out
from equipoise.algorithm import LINEAR_OR_NOT
from equipoise.core.abilities import read
from equipoise.runs.tried_calls import close, copied, or_none, parts_of, same_state
from equipoise.testing.laws import Tried, agree, check_of, is_finite, try_laws, unchanged
from equipoise.types import Aggregator, AggregatorTraits, Averaging, ServerOptimizer

ROUNDING = 5e-7  # four units in the last place of float32, of the largest number
KEPT_SHARE, SLACK = 0.15, 1e-12  # what rounds without an update leave of the first step, at least


@dataclass(frozen=True, eq=False)
class TriedAggregator(Tried):
    """An aggregator, and updates (K, D) of a few clients with weights, losses and keys (K,)."""

    clients: int = 12
    lone: bool = True  # whether a cohort may have one client
    updates: Tensor = field(init=False)
    weights: Tensor = field(init=False)
    losses: Tensor = field(init=False)
    keys: Tensor = field(init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        gen, count = self.gen, self.clients
        updates, weights = self.random(count), torch.rand(count, generator=gen, dtype=torch.float64) + 0.1
        losses = torch.randint(1, 4, (count,), generator=gen).double()  # some are equal
        if count == 3:  # of which one is more central than the others
            updates = torch.tensor([[1.0, -2.0, 0.5], [3.0, 1.0, -1.0], [2.0, -1.5, 4.0]], dtype=torch.float64)
            losses = torch.tensor([0.5, 1.5, 1.0], dtype=torch.float64)
        keys = torch.randint(-(2**62), 2**62, (count,), generator=gen)
        vars(self).update(updates=updates, weights=weights / weights.sum(), losses=losses, keys=keys)

    def random(self, count: int) -> Tensor:
        """Random updates."""
        return torch.randn(count, 7, generator=self.gen, dtype=torch.float64)

    @property
    def everyone(self) -> Tensor:
        """The places of all clients."""
        return torch.arange(self.clients)

    def orders(self) -> list[Tensor]:
        """Other orders of the clients."""
        return [self.everyone.flip(0), *([] if self.quick else [torch.randperm(self.clients, generator=self.gen)])]

    def streams(self, places: Tensor) -> dict[str, Any]:
        """The keys of clients, if the aggregator takes them."""
        return {"keys": self.keys[places]} if read(AggregatorTraits, self.part).needs_keys else {}

    def answer(self, rows: Tensor, own: Tensor, places: Tensor, state: Any = None) -> tuple[Tensor, Any]:
        """The total and the state, of the right form, and the same again."""
        law, losses = "float32" if rows.dtype == torch.float32 else "combines", self.losses[places]
        law = "any_chunk" if len(rows) < self.clients else law
        given = {"updates": rows, "weights": own, "losses": losses, "state": state}
        with (
            self.without_error(law, f"{len(rows)} updates of type {rows.dtype} give ", count=len(rows)),
            unchanged(self.part, **given),
        ):
            found, again = (copied(self.part(rows, own, losses=losses, state=state, **self.streams(places))) for _ in range(2))
        two = isinstance(found, tuple) and len(found) == 2
        self.hold(two, "two_things", type(found).__name__, things="the total and its state")
        total, later = found
        self.hold(isinstance(total, Tensor), "total_tensor", type(total).__name__)
        self.hold(total.shape == rows.shape[1:], "total_shape", tuple(total.shape))
        self.hold(total.dtype == rows.dtype, "total_type", f"{total.dtype} of {rows.dtype}")
        self.hold(later is None or not self.part.linear, "linear_state", type(later).__name__)
        self.keepable(later)
        self.hold(same_state(found, again), "same_again", "a call was made again, and differs")
        return total, later

    def total(self, rows: Tensor | None = None, own: Tensor | None = None, places: Tensor | None = None) -> Tensor:
        """The total of a first round; of all updates, by all weights, in the order of the clients if not said."""
        places = self.everyone if places is None else places
        return self.answer(self.updates if rows is None else rows, self.weights[places] if own is None else own, places)[0]


@check_of("an aggregator", "__call__", "linear", fix=LINEAR_OR_NOT)
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
    try_laws(AGGREGATOR_LAWS, lambda: TriedAggregator(aggregator, seed=seed, clients=clients))


def aggregator_call(case: TriedAggregator) -> None:
    """Engines can call it."""
    shown = "aggregator(updates, weights, losses=…, state=…)"
    case.accepts(case.part, shown, 0, 0, losses=None, state=None, **case.streams(case.everyone))


def any_order(case: TriedAggregator) -> None:
    """The same total in any order, and again after a call in between."""
    tolerance, total = 1e-6 if case.quick else 1e-9, case.total()
    case.hold(is_finite(total), "finite", total.tolist())
    for order in case.orders():
        moved = case.total(case.updates[order], places=order)
        agree(case.part, "any_order", moved, total, tolerance)
    case.total(2 * case.updates.flip(0), places=case.everyone.flip(0))
    again = case.total()
    case.hold(torch.equal(again, total), "same_again", (total.tolist(), again.tolist()))


def any_order_later(case: TriedAggregator) -> None:
    """The order of clients matters in no round, neither for the state nor with it."""
    state = state_moved = None
    for index in range(3):
        rows, order = (1 + index) * case.updates.roll(index, 0), case.orders()[-1]
        total, after = case.answer(rows, case.weights, case.everyone, state)
        with_state = case.answer(rows[order], case.weights[order], order, state)[0]
        agree(case.part, "any_order", with_state, total, 1e-6 if case.quick else 1e-9)
        moved, state_moved = case.answer(rows[order], case.weights[order], order, state_moved)
        agree(case.part, "any_order_later" if index else "any_order", moved, total, 1e-6)
        state = after


def zero_total(case: TriedAggregator) -> None:
    """Nothing comes of nothing."""
    zero = case.total(torch.zeros_like(case.updates))
    case.hold((zero == 0).all(), "zero_total", zero.tolist())


def linear(case: TriedAggregator) -> None:
    """The total of a linear aggregator is additive over chunks, and doubles with the weights."""
    if not case.part.linear:
        return
    parts = [case.total(case.updates[part], places=part) for part in torch.split(case.everyone, 2 if case.quick else 5)]
    agree(case.part, "chunks", torch.stack(parts).sum(0), case.total(), 1e-6 if case.quick else 1e-9)
    double = case.total(own=2 * case.weights)
    case.hold(case.quick or close(double, 2 * case.total(), 1e-9), "doubles", double.tolist())


def float32(case: TriedAggregator) -> None:
    """Updates of float32, with weights of float64."""
    try:
        single = case.total(case.updates.float())
    except RuntimeError as failure:  # of torch, which took the same numbers as float64
        case.hold(False, "float32", f"updates of type torch.float32 give {failure!r}")
    if not case.quick:
        agree(case.part, "float32", single.double(), case.total(case.updates.float().double()), 1e-3)


def equal_updates(case: TriedAggregator) -> None:
    """One update, which all clients send in three rounds, gives a total along it, and three clients more change nothing."""
    state, sent = None, case.updates[0]
    for number in range(1, 4):
        answers = []
        for count in (case.clients, case.clients + 3):
            own = torch.full((count,), 1 / count, dtype=torch.float64)  # the last three share losses and keys with the first
            answers.append(case.answer(sent.expand(count, -1).clone(), own, torch.arange(count) % case.clients, state))
        (total, state), (of_more, _) = answers
        agree(case.part, "any_number", of_more, total, 1e-6)
        along = float(total @ sent)
        case.hold(along > 0, "along_updates", f"in round {number} the inner product of the total and the update is {along:.6g}")


def one_update(case: TriedAggregator) -> None:
    """The total of one client; an aggregator that needs more says so by an error."""
    update, one = torch.tensor([[1.0, -2.0, 0.5]], dtype=torch.float64), torch.ones(1, dtype=torch.float64)
    more = case.streams(torch.zeros(1, dtype=torch.int64))
    found = or_none(lambda: case.part(update, one, losses=0.5 * one, state=None, **more)[0]) if case.lone else None
    case.hold(not isinstance(found, Tensor) or is_finite(found), "one_update", found)


def ties(case: TriedAggregator) -> None:
    """Updates of one length, each as far from all others or equal to them: nothing but keys tells such clients apart."""
    even, corners = torch.full_like(case.weights, 1 / case.clients), torch.eye(6).double()
    turned = torch.linalg.qr(case.random(6)).Q  # tied up to rounding
    for values, own in ((corners, case.weights), (corners, even), (corners.float(), even), (turned, case.weights)):
        rows, order = values[case.everyone % 6], torch.randperm(case.clients, generator=case.gen)
        agree(case.part, "any_order", case.total(rows[order], own[order], order), case.total(rows, own), 1e-6)


def small_weights(case: TriedAggregator) -> None:
    """Some clients, or all but one, with weights of 1e-300; of 0 where the aggregator leaves such clients out by itself."""
    many, everyone = case.clients, case.everyone
    for few, rows in product((1, many // 2, many - 1, many), (case.updates, case.updates.float())):
        without = case.weights * (everyone >= few)
        tiny = without.clamp(min=1e-300)
        case.hold(is_finite(case.total(rows, tiny / tiny.sum())), "small_weights")
        if leaves_out(case.part):  # it may refuse the few that are left
            found = or_none(partial(case.total, rows, without))
            others = or_none(partial(case.total, rows[few:], without[few:], everyone[few:]))
            same = found is others or (found is not None and others is not None and close(found, others, 1e-5))
            case.hold(same and (few < many or not others.any()), "no_weight", (found, others))


QUICK = (aggregator_call, any_order, any_order_later, zero_total, linear, float32, equal_updates, one_update)
AGGREGATOR_LAWS = (*QUICK, ties, small_weights)


def try_aggregator(aggregator: Any, clients_per_round: int) -> None:
    """The quick trial of an aggregator on three updates, or on twelve if it takes no fewer."""
    few = TriedAggregator(aggregator, True, clients=3)
    call = partial(few.part, few.updates, few.weights, losses=few.losses, state=None, **few.streams(few.everyone))
    clients = 12 if or_none(call) is None else 3
    try_laws(QUICK, lambda: TriedAggregator(aggregator, True, clients=clients, lone=clients_per_round == 1))


# --------------------------------------------------------------------------------------------------------- server optimisers


@dataclass(frozen=True, eq=False)
class TriedServer(Tried):
    """A server optimiser. PARAMS and TOTAL have no coordinate in common, so that LARS takes opposite totals alike."""

    def step(self, params: Tensor, total: Tensor, state: Any) -> tuple[Tensor, Any]:
        """A step, of the right form."""
        with unchanged(self.part, parameters=params, total=total, state=state):
            found = self.part.step(params, total, state)
        two = isinstance(found, tuple) and len(found) == 2
        self.hold(two, "two_things", type(found).__name__, things="the next parameters and the next state")
        self.keepable(found[1])
        self.hold(is_finite(found[0]), "finite", f"the parameters are {found[0].tolist()}")
        return found  # type: ignore[no-any-return]

    def rounds(self, totals: Sequence[Tensor], params: Tensor | None = None, state: Any = None) -> list[Tensor]:
        """The parameters after each of some rounds."""
        now = PARAMS.clone() if params is None else params.clone()
        state, points = self.part.begin(now.clone()) if state is None else state, []
        for total in totals:
            now, state = self.part.step(now.clone(), total.clone(), state)
            points.append(now.clone())
        return points


PARAMS = torch.tensor([0.5, -1.0, 2.0, 0.0, 0.0, 0.0], dtype=torch.float64)
TOTAL = torch.tensor([0.0, 0.0, 0.0, 0.5, -0.25, 0.125], dtype=torch.float64)


@check_of("a server optimiser", "begin", "step")
def check_server_optimizer(server: ServerOptimizer, *, seed: int = 0) -> None:
    """A zero update from a fresh state changes nothing; inputs are not written to; the first step follows the update.

    Equal updates in 60 rounds move the parameters along them; opposite updates move them by as much in the opposite direction.
    Rounds without an update do not take back the step of one update. A state that begins at zero and is used is changed.
    """
    try_laws(SERVER_LAWS, lambda: TriedServer(server, seed=seed))


def server_call(case: TriedServer) -> None:
    """A round can call the step."""
    case.accepts(case.part.step, "step(params, total, state)", 0, 0, 0)


def memory_in_self(case: TriedServer) -> None:
    """A step gives the same after others, of long opposite totals, which turn around even the sign of a slow mean in self."""
    params, total = torch.randn(2, 7, generator=case.gen)
    state = case.part.begin(params)
    case.keepable(state)
    points = [case.part.step(params.clone(), factor * total, copied(state)) for factor in (1.0, *20 * [-10.0], 1.0)]
    first, again = (point[0] if isinstance(point, tuple) and point else None for point in (points[0], points[-1]))
    if isinstance(first, Tensor) and isinstance(again, Tensor):
        same = torch.equal(first.nan_to_num(), again.nan_to_num())
        case.hold(same, "same_again", f"differences of up to {float((first - again).abs().max()):.3g}")


def first_steps(case: TriedServer) -> None:
    """Steps from a fresh state, and from the next one."""
    params, total = torch.randn(2, 7, generator=case.gen)
    state = case.part.begin(params.clone())
    still, _ = case.step(params, torch.zeros_like(params), state)
    agree(case.part, "zero_update", still, params, ROUNDING)
    first, later = case.step(params, total, state)
    second, again = (case.step(params, total, later)[0] for _ in range(2))
    agree(case.part, "same_again", again, second)
    along = float((first - params) @ total)
    case.hold(along > 0, "along", f"their inner product is {along:.6g}")


def state_changes(case: TriedServer) -> None:
    """A state that begins at zero, stays so and has an effect on a step is lost.

    No number of the total is 0 and no two are alike, so that a server that keeps what it leaves out of a step has something.
    """
    total = TOTAL + torch.linspace(0.05, 0.1, 6, dtype=TOTAL.dtype)
    state, now = case.part.begin(PARAMS.clone()), PARAMS.clone()
    for factor in (1.0, -0.5, 2.0):
        now, state = case.part.step(now, factor * total, state)
    plain = case.rounds([total])[0]
    for place, (early, late) in enumerate(zip(_tensors(case.part.begin(PARAMS.clone())), _tensors(state), strict=False)):
        if early.shape == late.shape and early.is_floating_point() and not bool(early.any() or late.any()):
            other = case.part.begin(PARAMS.clone())
            _tensors(other)[place].fill_(0.7)
            case.hold(
                torch.equal(case.rounds([total], state=other)[0], plain), "state_changes", "it is zero after three rounds"
            )


def _tensors(state: Any) -> list[Tensor]:
    """The tensors of a state, in order."""
    return [state] if isinstance(state, Tensor) else [tensor for each in parts_of(state) or [] for tensor in _tensors(each)]


def directions(case: TriedServer) -> None:
    """Many rounds of one update, of its opposite and of none; one update and none after it."""
    size, zero = float(TOTAL @ TOTAL), torch.zeros_like(TOTAL)
    still, along, against = (case.rounds(60 * [sign * TOTAL]) for sign in (0, 1, -1))
    for number, (rest, there, back) in enumerate(zip(still, along, against, strict=True), 1):
        moved = float((there - rest) @ TOTAL)
        good = moved >= -SLACK * size and (moved > 0 or torch.equal(there, rest))
        case.hold(good, "server_on", f"after {number} rounds of one update their inner product is {moved:.3g}")
        drift, length = float((there + back - 2 * rest).norm()) / 2, float((there - back).norm()) / 2
        said = f"after {number} rounds the steps of both are {length:.3g} long, and their middle has moved by {drift:.3g}"
        case.hold(drift <= 0.1 * length + 1e-9, "opposite", said)
    after = case.rounds([TOTAL, *4 * [zero]])  # few: parameters may be drawn back to where they began
    left = [float((point - rest) @ TOTAL) for point, rest in zip(after, still[:5], strict=True)]
    kept = min(left) >= KEPT_SHARE * left[0] - SLACK * size
    case.hold(kept, "server_not_back", f"the least of {left[0]:.3g} that is left is {min(left):.3g}")


SERVER_LAWS = (server_call, memory_in_self, first_steps, state_changes, directions)


# ----------------------------------------------------------------------------------------------------------------- averaging


@check_of("averaging", "begin", "update", "iterate")
def check_averaging(averaging: Averaging, *, rounds: int = 50, seed: int = 0) -> None:
    """A constant sequence is reported as it is; the point lies in the iterates' hull; nothing given is written to.

    Sequences have `rounds` iterates.

    >>> import equipoise as eq
    >>> check_averaging(eq.averaging.Uniform())  # nothing is returned: all laws hold
    """
    case = Tried(averaging, seed=seed)
    for dtype in (torch.float32, torch.float64):
        still, *path = torch.randn(rounds + 2, 5, generator=case.gen, dtype=torch.float64).to(dtype)
        for iterates in (torch.stack([still] * (rounds + 1)), torch.stack(path)):
            state = case.part.begin(iterates[0])
            for count, point in enumerate(iterates):
                with unchanged(averaging, parameters=point, state=state):
                    after, again = (case.part.update(point, state) if count else state for _ in range(2))
                    found, repeated = (case.part.iterate(point, each) for each in (after, again))
                agree(averaging, "one_point", repeated, found)
                case.hold(found.shape == point.shape and found.dtype == dtype, "point_form", (tuple(found.shape), found.dtype))
                low, high = iterates[: count + 1].aminmax(dim=0)
                slack = 1e-12 * iterates[: count + 1].abs().max()  # far below float32, whose rounding therefore shows
                case.hold(((found >= low - slack) & (found <= high + slack)).all(), "hull", found)
                state = after
