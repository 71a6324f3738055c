"""What passes between a round and those who answer it: questions, answers, and the features that plug in as stages.

A round is a generator. It is written for one run, asks clients by `yield Ask(…)`, and whoever drives it answers. A feature is a
`Stage`: its hooks give back values of declared types, and nothing is written into a shared object.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from equipoise.core.carried import mean_carried
from equipoise.types.round_values import Cohort, LocalWork

if TYPE_CHECKING:
    from equipoise.runs.setup import Setting

# What happens to an update on its way to the server, in this order, whatever the order of stages.
PHASES = ("attack", "normalise", "shift", "clip", "compress", "weigh", "quantise", "mask")
# What happens to the total on the server, in this order: noise is for the sum as it was released, before anything divides it.
UNKNOWN = torch.tensor(float("nan"))  # the value of a risk that nobody knows
PLACES = ("decode", "combine", "noise", "divide", "rescale")


LATER: Any = None  # what a round has not come to yet
KINDS = ("loss", "own", "update")  # of questions, in the order in which rounds mostly ask them


class Map(NamedTuple):
    """One map of a client's update: a phase, a name that engines know, and its numbers. Plain data: it can be sent."""

    phase: str
    name: str
    numbers: Mapping[str, Any] = {}


@dataclass(frozen=True, eq=False)
class Fold:
    """How the answers of clients become one: mapped on the client, then added up by a linear aggregator, or kept as rows."""

    by: Any  # an aggregator that is linear; None: rows
    maps: tuple[Map, ...] = ()
    step: float | None = None  # γ, if the next parameters are w + γ · total: an engine may take this step, too

    @property
    def scales(self) -> Any:
        """By what each client's update is multiplied, (K,); None: by nothing."""
        return next((each.numbers["by"] for each in self.maps if each.name == "scale"), None)

    @property
    def factors(self) -> Any:
        """By what each client's weight in the sum is multiplied, (K,); None: by nothing."""
        return next((each.numbers["by"] for each in self.maps if each.name == "factor"), None)

    def of(self, work: LocalWork, weights: Tensor) -> LocalWork:
        """Updates (K, D) of clients, one by one, mapped and added up under weights (K,), without what cannot be used."""
        weights = weights if self.factors is None else weights * self.factors
        if self.scales is not None:
            update = work.update * self.scales.to(work.update).unsqueeze(1)
            work = replace(work, update=update, sq_norms=work.sq_norms * self.scales.square())
        if self.by is None:
            return work
        arrived = torch.isfinite(work.sq_norms)
        here = arrived.to(work.update.device)
        total = self.by(work.update[here], weights.to(work.update.device)[here])[0]
        carried = None if work.carried is None else mean_carried(work.carried[arrived], weights[arrived].tolist())
        return replace(work, update=total, carried=carried)

    def plus(self, added: Map) -> Fold:
        """The fold with one more map; two in one phase are refused."""
        if any(each.phase == added.phase for each in self.maps):
            raise ValueError(f"two maps in the phase {added.phase!r}: {added.name!r} is one too many")
        return replace(self, maps=tuple(sorted((*self.maps, added), key=lambda each: PHASES.index(each.phase))))


@dataclass(frozen=True, eq=False)
class Ask:
    """A question to clients. Engines answer it; chunks, workers and wires are theirs.

    `what` is "loss" (answered by (K,) losses), "update" (by LocalWork), or "own" (by what the `rule`, a function that clients
    know, gives).
    """

    what: str
    model: Tensor  # (D,), followed by the carried values (C,) of a model that has any
    clients: Cohort
    rule: Any = None  # the local solver, or a client's own function
    fold: Fold = LATER  # of updates


class Weights(NamedTuple):
    """What a risk makes of a cohort: its value, the weight of each client, and the number that weights are divided by."""

    value: Tensor  # (); NaN if it is not known
    each: Tensor  # (K,); 0: this client does not work
    over: float = LATER  # fixed in advance; None: the sum over those who work


class Kept(NamedTuple):
    """What a hook gives back, with the next state of its stage."""

    value: Any
    state: Any


@dataclass(frozen=True, eq=False)
class View:
    """A round so far, as its stages see it. Nobody writes into it: the round goes on with what hooks give back."""

    run: Setting
    state: Any  # the ServerState before the round
    cohort: Cohort
    rule: Any  # the local solver of this round
    weights: Weights = LATER  # of the cohort
    workers: Cohort = LATER  # those who work; their column `shares` is π_k
    fold: Fold = LATER  # still None later: nobody is asked for an update
    send: LocalWork = LATER  # (K, D) updates that are no work of the rule
    answer: LocalWork = LATER  # still None later: nobody worked
    total: Tensor = LATER  # (D,) the aggregated update; still None later: nothing moves
    params: Tensor = LATER  # (D,) the next parameters
    after: Mapping[str, Any] = field(default_factory=dict)  # the next states of stages, by name

    @property
    def losses(self) -> Tensor | None:
        """The losses (K,) of the cohort, if somebody wants them."""
        return self.cohort.columns.get("losses")

    def before(self, stage: Stage) -> Any:
        """The state of a stage before the round."""
        return getattr(self.state, stage.name)


class Stage:
    """A feature of a run. Every hook is optional, and gives back what it is named for, or None to leave it as it is.

    A hook may be a generator that asks clients something, and may give back `Kept(value, state)` with the stage's next state.
    """

    name: ClassVar[str] = ""  # of its state
    pure: Any = False  # whether its hooks may be called early, or again: they note nothing, and wait for no number
    place: ClassVar[str] = "combine"  # of its `total` among those of other stages, one of PLACES

    def rule(self, view: View) -> Any:
        """The local rule of this round."""

    def cohort(self, view: View) -> Any:
        """Who is there, with columns for what is known of them, and what they are to know."""

    def weights(self, view: View) -> Any:
        """The weights of the cohort."""

    def workers(self, view: View) -> Any:
        """Those with a weight whose work counts, with columns for what they are to know."""

    def fold(self, view: View) -> Any:
        """How the updates are folded."""

    def send(self, view: View) -> Any:
        """What clients send (LocalWork, one by one), where that is no work of the rule."""

    def answer(self, view: View) -> Any:
        """What the server reads from what came."""

    def total(self, view: View) -> Any:
        """What becomes of the total, in the order of PLACES."""

    def params(self, view: View) -> Any:
        """The next parameters."""

    def keep(self, view: View) -> Any:
        """Kept(None, its next state)."""

    def commit(self, state: Any) -> Any:
        """The next state, written down: the driver has finished the round."""
        return state

    def tell(self, view: View) -> Mapping[str, Any]:
        """Fields of the report; asked for late, when numbers may be waited for."""
        return {}


Told = Callable[[float], Any]  # the report of a round that took so many seconds
Round = Generator[Ask, Any, tuple[Any, Told]]
Drawn = Callable[[int, int], Cohort]  # the cohort of a round, and of a further try of it
Stages = Sequence[Stage]
