"""What does not go with a model that carries statistics of its batches (BatchNorm), and what becomes of small batches."""

from __future__ import annotations

import torch
from torch import Tensor

from equipoise.algorithm import Algorithm
from equipoise.compatibility import refuse
from equipoise.core.abilities import solver_traits
from equipoise.core.task import Task
from equipoise.data.clients import ClientSet
from equipoise.errors import IncompatibleParts, notify
from equipoise.privacy.lookers import may_look
from equipoise.solvers.batches import batch_sizes

_CURE = "Use equipoise.models.with_group_norm(model), which normalises within each example"


def withheld_carried(task: Task, algorithm: Algorithm) -> Tensor:
    """Which carried values (C,) never leave the client: those that its personal model keeps."""
    withholds = algorithm.traits.personal.withholds_carried
    return torch.zeros(task.carried.size, dtype=torch.bool) if withholds is None else withholds(task).cpu()


def next_carried(task: Task, algorithm: Algorithm, before: Tensor, moments: Tensor) -> Tensor:
    """The server's carried values (C,) after a round with this mean of clients' moments (C,); what clients keep stays."""
    after = task.carried.from_moments(moments).to(before)
    return torch.where(withheld_carried(task, algorithm).to(before.device), before, after)


def refuse_unfit_for_carried(task: Task, algorithm: Algorithm) -> None:
    """Refuse, for a model with carried values, parts that would have to protect, compare or mix them."""
    if task.carried.names:
        about = {"model": type(task.module).__name__, "statistic": task.carried.names[0]}
        sent = not bool(withheld_carried(task, algorithm).all())
        refuse(algorithm, statistics=True, **{"statistics are sent": sent}, **about)


def check_smallest_batches(task: Task, clients: ClientSet, algorithm: Algorithm) -> None:
    """Say which clients have batches that are too small for the model, and are left out; refuse if nothing is left.

    BatchNorm refuses a batch of one example, if it has one value per channel: there is no variance.
    """
    public_length = algorithm.privacy is not None and algorithm.traits.solver.after_rows is not None  # of everyone's steps
    if task.smallest_batch < 2 or not (public_length or may_look("small batches", algorithm)):
        return
    solver = algorithm.traits.solver.solver or algorithm.solver
    traits, name = solver_traits(solver), type(task.module).__name__
    sizes = clients.host_sizes
    smallest, largest = batch_sizes(solver, sizes)
    few, none = int((smallest < 2).sum()), int((largest < 2).sum())
    if none == len(sizes) or (few and (traits.finish is not None or public_length)):
        ids = [clients.ids[k] for k in (smallest < 2).nonzero().flatten()[:3].tolist()]
        raise IncompatibleParts(
            f"{name} cannot be trained on a batch of one example (a BatchNorm layer has no variance then), and {few} of "
            f"{len(sizes)} clients have such batches with {solver!r}, e.g. {', '.join(ids)}.",
            f"Give the solver a larger batch_size, or leave these clients out. {_CURE}, and is trained on any batch.",
        )
    if few:
        alone = f" {none} of them have no other batch, and never move the model." if none else ""
        text = (
            f"{name} cannot be trained on a batch of one example (a BatchNorm layer has no variance then). {few} of "
            f"{len(sizes)} clients have a last batch of one example, which is left out.{alone} Another batch_size may avoid it."
        )
        notify(text)
