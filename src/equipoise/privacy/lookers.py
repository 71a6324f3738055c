"""Who looks at the clients that train, beside the sums of a round, and what protection makes of it: the one list.

Noise covers sums. Whoever else looks at training clients, at their losses or at what they change, and chooses what is released
or writes a text beside ε, has an entry here, and asks `may_look` or `refuse_looking` first. Without an entry there is no
answer but an error. What only tries parts, before a run, is handed `data_to_try`: no training client is in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch

from equipoise.core.trees import map_tree
from equipoise.data.clients import ClientSet, Ragged
from equipoise.errors import ConfigError, IncompatibleParts

if TYPE_CHECKING:
    from equipoise.algorithm import Algorithm
    from equipoise.data.clients import FederatedData

# accounted: noise covers it, and the ledger has it before it is made. public: declared as known. outside: exact, for those who
# may see the data, and no choice is made by it. others: of other people's examples, or made-up ones. silent: nothing is said or
# decided. means: by a mean over all clients alone. refused: there is no run.
Verdict = Literal["accounted", "public", "outside", "others", "silent", "means", "refused"]


class Looker(NamedTuple):
    """What somebody looks at, and what becomes of that under differential privacy, and under secure sums alone."""

    looks_at: str
    noise: Verdict
    sums: Verdict


CHOSEN = "ε covers the clients that train; the validation clients, by whom values are chosen, are others, and not covered."
LOOKERS = {
    "rounds": Looker("losses, updates and their lengths, in a cohort", "accounted", "accounted"),
    "shape of the data": Looker("shapes, types, classes, and the ids and the number of clients", "public", "public"),
    "trials": Looker("examples that model, loss, error and metrics are tried on, and labels under attack", "others", "others"),
    "input scales": Looker("means and deviations of inputs and targets", "others", "others"),
    "small batches": Looker("who has a batch of one example", "silent", "outside"),
    "notices": Looker("losses and numbers of clients in the rounds", "silent", "means"),
    "end of the run": Looker("whether the loss of a training client is finite", "silent", "means"),
    "trivial answer": Looker("targets, and the spread of errors", "silent", "silent"),
    "search": Looker("figures of training clients that choose the values of a search", "refused", "means"),
    "early stopping": Looker("figures of training clients that choose the round", "refused", "means"),
    "family": Looker("the same cohorts, for several models at once", "refused", "refused"),
    "heterogeneity": Looker("the gradients of all training clients", "refused", "means"),
    "evaluations": Looker("exact losses, errors and metrics of clients", "outside", "outside"),
    "history": Looker("mean losses and numbers of clients of a round", "outside", "outside"),
    "identity": Looker("a hash of all examples, in checkpoint and ledger", "outside", "outside"),
    "speed": Looker("times and sizes of the first cohort, which decide in which order numbers are added", "outside", "outside"),
}  # fmt: skip


def may_look(who: str, algorithm: Algorithm) -> bool:
    """Whether an entry of `LOOKERS` may look at training clients in a run of this algorithm."""
    looker, privacy = LOOKERS[who], algorithm.privacy
    verdict = looker.sums if algorithm.traits.privacy.only_sums else looker.noise
    return privacy is None or verdict in ("accounted", "public", "outside", "means")


def refuse_looking(who: str, algorithm: Algorithm) -> None:
    """Refuse what an entry of `LOOKERS` must not look at in a run of this algorithm."""
    if not may_look(who, algorithm):
        reason = f"{who.capitalize()} would look at {LOOKERS[who].looks_at}, which no noise hides: ε would not cover it."
        raise IncompatibleParts(reason, "Look at other people: data.split_clients sets validation clients apart.")


def trains(data: FederatedData, split: str) -> bool:
    """Whether a client of a split is one that trains, perhaps with other examples."""
    return split == "train" or bool((data.train.find(data.splits[split]) >= 0).any())


def refuse_search(algorithms: Sequence[Algorithm], data: FederatedData, split: str) -> None:
    """Refuse trials that are judged by training clients whom noise hides, and a choice between models with and without noise.

    Clients' own models are not judged by the examples that they were trained on, either: the closest fit would win.
    """
    for algorithm in algorithms if trains(data, split) else ():
        refuse_looking("search", algorithm)
        if split == "train" and algorithm.personal is not None:
            raise ConfigError("By the training loss the closest fit would win. Judge clients' own models by validation_90.")
    if len({algorithm.private for algorithm in algorithms}) > 1:
        raise IncompatibleParts("A search with and without noise would choose by exact models.", "Search for each by itself.")


def data_to_try(data: FederatedData, algorithm: Algorithm) -> FederatedData:
    """The data that parts are tried on before a run: under protection other people's examples, or made-up ones."""
    if may_look("trials", algorithm):
        return data
    train, others = data.train, [clients for split, clients in data.splits.items() if not trains(data, split)]
    made_up = ClientSet.trusted(
        x=map_tree(lambda leaf: _made_up(leaf, 0.99), train.x), y=map_tree(lambda leaf: _made_up(leaf, 0.0), train.y),
        offsets=torch.tensor([0, 8]), ids=("client",), scale=train.scale, shift=train.shift,
    )  # fmt: skip
    shown = replace(data, train=[*others, made_up][0], validation=None, test=None, malicious=frozenset())
    vars(shown)["has_ignored"] = data.has_ignored  # public, as the classes are
    return shown


def _made_up(like: Any, largest: float) -> Any:
    """Eight examples in the shape and type of a leaf: numbers from 0 to `largest`, zeros for integers.

    Sequences have one to eight steps.
    """
    sequence = isinstance(like, Ragged)
    count, shape = (36, like.step_shape) if sequence else (8, like.shape[1:])
    values = torch.linspace(0, largest, count * shape.numel()).view(count, *shape).to(like.dtype)
    return Ragged(values, torch.arange(9).cumsum(0), like.pad, like.mask) if sequence else values
