"""Notices on a model before its run: probabilities as outputs, an error that is the loss, parameters that only decay."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from equipoise.core import trees
from equipoise.core.abilities import solver_traits
from equipoise.core.target_forms import has_default_loss
from equipoise.core.task import Task
from equipoise.data.clients import FederatedData
from equipoise.errors import is_number, notify
from equipoise.types import LocalSolver

_TRIED = 8  # examples


def tell_of_model(task: Task, data: FederatedData, solver: LocalSolver) -> None:
    """Try a model on a few examples, and tell of what trains without an error but not as its user expects."""
    decays, no_error = _decays(solver), task.error_is_loss and task.error_is_open
    if not (decays or has_default_loss(task) or no_error):
        return
    trial, rows = task.to(torch.device("cpu")), torch.arange(max(3, min(_TRIED, data.train.examples))) % data.train.examples
    x, y = (trees.map_tree(Tensor.cpu, part(rows, task.layout.dtype)) for part in (data.train.inputs, data.train.targets))
    with torch.random.fork_rng(devices=[]):
        if has_default_loss(task):
            _tell_of_probabilities(trial, x)
        if no_error:
            _tell_of_missing_error(trial, x)
        if decays:
            _tell_of_unused_parameters(trial, x, y)


def _decays(solver: LocalSolver) -> bool:
    """Whether a solver, or one that it wraps, has weight decay."""
    traits = solver_traits(solver)
    if is_number(traits.weight_decay) and traits.weight_decay > 0:
        return True
    return traits.solver is not None and _decays(traits.solver)


def _tell_of_probabilities(trial: Task, x: Any) -> None:
    trial.scorer.eval()
    with torch.no_grad():
        outputs = trees.call(trial.module, trees.clone(x))
    if not isinstance(outputs, Tensor) or outputs.dim() < 2 or outputs.shape[1] < 2:
        return
    sums = outputs.double().sum(1)
    if bool((outputs >= 0).all()) and bool(((sums - 1).abs() <= 8 * torch.finfo(outputs.dtype).eps * outputs.shape[1]).all()):
        notify("The outputs look like probabilities; cross-entropy takes logits. Remove the softmax.")


def _tell_of_missing_error(trial: Task, x: Any) -> None:
    """Tell that the error is the loss, with all its terms, for a model with several outputs."""
    trial.scorer.eval()
    with torch.no_grad():
        outputs = trees.call(trial.module, trees.clone(x))
    if not isinstance(outputs, Tensor):
        notify(
            f"The model returns a {type(outputs).__name__} and no error is given, so the error is the loss, with all terms. "
            f"Give error=…, e.g. error=lambda outputs, y: ({trees.first_output(outputs)}.argmax(-1) != y).float() for classes."
        )


def _tell_of_unused_parameters(trial: Task, x: Any, y: Any) -> None:
    trial.scorer.train()
    named = dict(trial.module.named_parameters())
    leaves = {name: named[name] for name in trial.layout.names}
    with torch.enable_grad():
        loss = trial.scorer(trees.clone(x), y, False)[0].mean()
        gradients = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    if unused := [name for name, gradient in zip(leaves, gradients, strict=True) if gradient is None]:
        which = f"The parameter {unused[0]!r}" + f" and {len(unused) - 1} more" * (len(unused) > 1)
        one = len(unused) == 1
        notify(
            f"{which} {'gets' if one else 'get'} no gradient; weight decay still shrinks {'it' if one else 'them'}; "
            f"requires_grad_(False) keeps {'it' if one else 'them'}."
        )
