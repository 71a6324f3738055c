"""A backdoor: malicious clients teach the model to call every example with a mark one class, and behave well otherwise."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from equipoise.attacks.malicious import Sent, check_attack_parameters
from equipoise.core import rng
from equipoise.data.clients import ClientSet
from equipoise.errors import InvalidData, InvalidParameter, require, require_integer, require_number


def stamp(x: Tensor, patch: int, value: float) -> Tensor:
    """Inputs (B, …) with a mark: the lower right corner of `patch` × `patch` pixels of images (B, …, H, W) has one value.

    Of inputs without two last dimensions, (B, F), the last `patch` features have it.

    >>> stamp(torch.zeros(1, 3, 3), 2, 1.0)[0].tolist()
    [[0.0, 0.0, 0.0], [0.0, 1.0, 1.0], [0.0, 1.0, 1.0]]
    >>> stamp(torch.zeros(1, 4), 2, 1.0)[0].tolist()
    [0.0, 0.0, 1.0, 1.0]
    """
    marked = x.clone()
    if x.dim() >= 3:
        marked[..., -patch:, -patch:] = value
    else:
        marked[..., -patch:] = value
    return marked


@dataclass(frozen=True)
class Backdoor:
    """Malicious clients train on examples with a mark, labelled `target`, among their own; `boost` multiplies their update.

    `examples` is the share of each malicious client's training examples that get the mark and the label. The mark is a square
    of `patch` × `patch` pixels in the lower right corner of images, the last `patch` features of the last `patch` steps of
    sequences (B, steps, features), or the last `patch` numbers of flat inputs, set to `value` as the data hold them (None: the
    largest value in the training data). `boost=None` multiplies by 1/π_k, of the client's weight π_k in the round: in a
    weighted mean whose other updates are small, the model is then replaced by the client's own. Where a `Sent` has no weights,
    it is the number of clients in the round. Of inputs with names, a dictionary of tensors, `leaf` names the tensor that gets
    the mark: Backdoor(…, leaf="image").

    Results have the column `backdoor_success`: of a client's examples of other classes, the share that the model calls
    `target` when they have the mark. Compare it with the error without the mark, and with the same rate of a model without
    an attack, which Backdoor(share=0, …) measures. A model that ignores the mark has its usual rate of false `target`s.

    Source: Bagdasaryan et al. 2020 (arXiv 1807.00459).

    >>> honest = ClientSet.pack([("a", torch.tensor([[0.0, 0.0], [5.0, 0.0]]), torch.tensor([0, 0]))])
    >>> poisoned = Backdoor(target=1, patch=1, examples=1.0).poison(honest, ("a",), classes=2)
    >>> poisoned.x.tolist(), poisoned.y.tolist()  # the last number is 5, the largest in the data
    ([[0.0, 5.0], [5.0, 5.0]], [1, 1])
    """

    share: float = 0.2  # the share of training clients that are malicious, in [0, 1]
    seed: int = 0  # which clients are malicious, and what is random in the attack
    target: int = 0  # the class that marked examples are to get
    patch: int = 3  # the side of the mark, in pixels or numbers
    value: float | None = None  # of the mark; None: the largest value in the training data
    examples: float = 0.5  # the share of a malicious client's examples that are marked
    boost: float | None = 1.0  # multiplies the update; None: one over the client's weight
    leaf: str | None = None  # the input that gets the mark, where inputs have names

    def __post_init__(self) -> None:
        check_attack_parameters(self)
        require_integer("target", self.target, 0)
        require_integer("patch", self.patch, 1)
        require_number("value", self.value, "(-∞, ∞)", none="the largest value in the data")
        require_number("examples", self.examples, "(0, 1]")
        require_number("boost", self.boost, "(0, ∞)", none="one over the client's weight")
        good = self.leaf is None or isinstance(self.leaf, str)
        require(good, "leaf", "must be the name of an input, or None for inputs without names", self.leaf)

    def poison(self, clients: ClientSet, chosen: tuple[str, ...], classes: int) -> ClientSet:
        """The training clients, with marked and relabelled examples of the chosen ones.

        `chosen` are the ids of the malicious clients among `clients`, and `classes` is the number of classes.
        """
        x, y = self.marked_leaves(clients, classes)
        x, y, value = x.clone(), y.clone(), self.mark_value(clients)
        for name, position in zip(chosen, clients.positions_of(chosen).tolist(), strict=True):
            rows = clients.rows(position)
            count = math.ceil(self.examples * (rows.stop - rows.start) - 1e-9)
            order = rng.generator(self.seed, "backdoor", client=name).permutation(rows.stop - rows.start)[:count]
            here = torch.as_tensor(order, dtype=torch.int64) + rows.start
            x[here], y[here] = stamp(x[here], self.patch, value), self.target
        inputs = x if self.leaf is None else {**clients.x, self.leaf: x}
        return ClientSet(inputs, y, clients.offsets, clients.ids, clients.scale, clients.shift, clients.source)

    def corrupt(self, sent: Sent) -> Tensor:
        """The updates (k, D) in `sent`, multiplied by `boost`."""
        if self.boost is None and sent.weights is not None:
            return sent.updates / sent.weights.to(sent.updates).unsqueeze(1)
        return sent.updates * float(sent.cohort if self.boost is None else self.boost)

    def mark_value(self, clients: ClientSet) -> float:
        """The value of the mark, as the data of the training `clients` hold it."""
        held: Any = clients.x if self.leaf is None else clients.x[self.leaf]
        return float(held.max()) if self.value is None else self.value

    def weakness(self, clients: ClientSet, classes: int, attackers: int, cohort: int) -> str:
        """A notice if the mark covers whole inputs of the training `clients`, whoever attacks; else ""."""
        shape = tuple(self.marked_leaves(clients, classes)[0].shape[1:])
        if math.prod(shape) < 2 or any(side > self.patch for side in shape[-2:]):
            return ""
        return (
            f"The mark of the backdoor, patch={self.patch}, covers whole inputs of shape {shape}: nothing of an example is "
            "left beside it. Take a smaller patch."
        )

    def probe(self, clients: ClientSet, train: ClientSet, classes: int) -> tuple[ClientSet, Tensor] | None:
        """The clients' examples of other classes than `target`, marked and labelled `target`; None if there are none.

        With them come the positions (k,) of the `clients` that have such examples. `train` are the training clients, whose
        largest value the mark has by default, and `classes` is the number of classes.
        """
        x, y = self.marked_leaves(clients, classes)
        others = y != self.target
        sizes = torch.stack([others[clients.rows(k)].sum() for k in range(len(clients))]).cpu()
        here = (sizes > 0).nonzero().flatten()
        if len(here) == 0:
            return None
        rows = torch.cat([others[r := clients.rows(k)].nonzero().flatten() + r.start for k in here.tolist()])
        marked: Any = stamp(x[rows], self.patch, self.mark_value(train))
        if self.leaf is not None:
            marked = {name: marked if name == self.leaf else values[rows] for name, values in clients.x.items()}
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), sizes[here].cumsum(0)])
        targets = torch.full_like(y[rows], self.target)
        return ClientSet(marked, targets, offsets, clients.ids_at(here), clients.scale, clients.shift, "backdoor"), here

    def marked_leaves(self, clients: ClientSet, classes: int) -> tuple[Any, Any]:
        """The inputs that get the mark, and the labels, of `clients` as they are held.

        Inputs that cannot have a mark, and a target that is none of the `classes`, are refused.
        """
        x, y = clients.x, clients.y
        if isinstance(x, dict) and all(isinstance(values, Tensor) for values in x.values()):
            fix = f'E.g. Backdoor(…, leaf="{next(iter(x))}"). The inputs are {", ".join(map(str, x))}.'
            require(self.leaf in x, "leaf", "must name the input that gets the mark", self.leaf, fix)
            x = x[self.leaf]
        elif self.leaf is not None:
            raise InvalidParameter("leaf", "must be None: the inputs have no names", self.leaf, "Leave it out.")
        if not isinstance(x, Tensor) or not isinstance(y, Tensor) or y.dim() != 1 or y.is_floating_point() or classes < 2:
            raise InvalidData(
                "A backdoor needs inputs that are one tensor, or a dictionary of tensors with the one to mark in `leaf`, and "
                "one class per example. An attack of your own with a method `probe`, as Backdoor has it, gets backdoor_success."
            )
        if clients.scale is None and not x.is_floating_point():
            raise InvalidData("A backdoor marks pixels or features; these inputs are tokens.")
        if self.target >= classes:
            raise InvalidParameter("target", f"must be one of the {classes} classes, from 0 on", self.target)
        return x, y
