"""The trial of a task on the first examples of the data: what cannot work is refused before any work."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from equipoise.core import trees
from equipoise.core.batch_trial import BatchUse, nearly_equal, try_batches
from equipoise.core.binary_error import binary_error
from equipoise.core.carried import CarriedLayout
from equipoise.core.per_example_losses import MaskedCrossEntropy, MaskedMisclassified, PerExample, cross_entropy, misclassified
from equipoise.core.target_forms import no_class_zero, refuse_wrong_targets
from equipoise.core.task import Task, in_training_mode
from equipoise.errors import EquipoiseError, IncompatibleParts, InvalidParameter, is_integer, require

if TYPE_CHECKING:
    from equipoise.data.clients import FederatedData

TRIED_ROWS = 256  # sequences among which those are chosen that padding is tried on


def try_task(task: Task, data: FederatedData) -> Task:
    """The task for these data, tried on their first examples so that what cannot work is refused before any work.

    Refused are wrong shapes and types, too few classes, a loss or error that is not one number per example or has no
    gradient, and models that in evaluation mode change buffers, or whose output for one example depends on its batch. If
    the data have classes and the outputs are scores of classes, an error that nobody defined is misclassification; if the
    loss is binary cross-entropy, it is the share of wrong signs. What training changes besides the parameters is found by
    trying.
    """
    wanted = _with_targets_ignored(task, data)
    trial = wanted.to(torch.device("cpu"))
    rows = torch.arange(3) % data.train.examples if data.train.examples < 3 else slice(0, 3)
    dtype = task.layout.dtype
    x, y = (trees.map_tree(Tensor.cpu, part(rows, dtype)) for part in (data.train.inputs, data.train.targets))
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        trial.scorer.eval()
        outputs = _run_user_code(trial, "model", data, lambda: _outputs(trial, x))
        refuse_wrong_targets(trial, outputs, y)
        _refuse_too_few_classes(trial, data, outputs)
        use = _run_user_code(trial, "model", data, lambda: try_batches(trial.module, trial.scorer.train, x))
        trial.scorer.train()
        params = task.layout.read(trial.module).requires_grad_()
        with torch.enable_grad():
            losses = _run_user_code(trial, "loss", data, lambda: trial.losses(params, trees.clone(x), y))
        require(losses.requires_grad, "loss", "must depend on the model's parameters", "detached from them")
        _refuse_buffers_with_gradients(trial)
        if (error := _error_of_outputs(trial, data, outputs, y)) is not None:
            wanted, trial = wanted.with_error(error), trial.with_error(error)
        trial.scorer.eval()
        several = _run_user_code(trial, "error", data, lambda: trial.scores(params, trees.clone(x), y))
        single = [(trees.select(x, slice(i, i + 1)), trees.select(y, slice(i, i + 1))) for i in range(len(several[0]))]
        alone = [trial.scores(params, trees.clone(one), target) for one, target in single]
        for place, what in enumerate(("loss", "error")):
            if not nearly_equal(several[place], torch.cat([scores[place] for scores in alone])):
                term = (
                    " A term of the whole batch, such as load balancing of experts: let forward return it, expanded to one "
                    "number per example in training mode and zeros in evaluation mode, and add it in the loss."
                )
                raise IncompatibleParts(
                    f"The {what} of an example depends on the other examples in its batch, which padding and averaging "
                    "over clients both break.",
                    f"Compute it from the example's own outputs and target.{term * (what == 'loss')}",
                )
        _refuse_padding(trial, data, params.detach())
        if use.mixes:
            _refuse_padding_in_training(trial, data, params.detach())
    return replace(_trained_as(wanted, use), several_labels=_has_several_labels(y))


def _has_several_labels(y: Any) -> bool:
    """Whether an example has several targets: y (B, …) are those of some examples."""
    return isinstance(y, Tensor) and y.dim() > 1 and y[0].numel() > 1


def _refuse_buffers_with_gradients(task: Task) -> None:
    """Refuse buffers that depend on the parameters: every step would go back through the steps before it."""
    kept = [name for name, value in task.module.named_buffers() if value.requires_grad]
    rule = f"must change its buffer {kept[0]!r} without gradients" if kept else ""
    fix = "Write `with torch.no_grad(): …` around the change, or detach what goes into it."
    require(not kept, "model", rule, type(task.module).__name__, fix)


def _trained_as(task: Task, use: BatchUse) -> Task:
    """The task with the carried buffers that a trial has found; buffers that the vector cannot hold are refused."""
    buffers, name = dict(task.module.named_buffers()), type(task.module).__name__
    if late := [changed for changed in use.changed if changed not in buffers]:
        rule, fix = f"must make its buffer {late[0]!r} before it runs", "Register it in __init__."
        raise InvalidParameter("model", rule, name, fix)
    with in_training_mode(task.scorer):
        carried = CarriedLayout.of(task.module, use.changed)
    for buffer in carried.names:
        fits = torch.promote_types(buffers[buffer].dtype, task.layout.dtype) == task.layout.dtype
        rule = f"must keep its parameters in a type at least as wide as its buffer {buffer!r} ({buffers[buffer].dtype})"
        require(fits, "model", rule, str(task.layout.dtype), "Convert it first, e.g. model.float().")
    if complex_ones := [changed for changed in use.changed if buffers[changed].is_complex()]:
        rule = f"must not change complex buffers when it runs, as it does {complex_ones[0]!r}"
        raise InvalidParameter("model", rule, name, "Keep real and imaginary part as two buffers.")
    return replace(task, carried=carried, mixes=use.mixes or carried.size > 0, smallest_batch=use.smallest)


def _with_targets_ignored(task: Task, data: FederatedData) -> Task:
    """The task with a default loss that leaves out the targets which these data ignore."""
    if task.scorer.loss is not cross_entropy or not data.has_ignored:
        return task
    return task.with_loss(MaskedCrossEntropy(data.ignore_index))


def _error_of_outputs(task: Task, data: FederatedData, outputs: Any, y: Any) -> PerExample | None:
    """The error that fits outputs and loss, if nobody has said what an error is; None leaves it as it is."""
    if not task.error_is_open:
        return None
    if _scores_classes(data, outputs, y) or task.scorer.is_cross_entropy:
        return MaskedMisclassified(data.ignore_index) if data.has_ignored else misclassified
    error: PerExample | None = binary_error(task.scorer.loss, outputs, y)
    return error


def _scores_classes(data: FederatedData, outputs: Any, y: Any) -> bool:
    """Whether the outputs are one score per class of the data."""
    tensors = isinstance(outputs, Tensor) and isinstance(y, Tensor) and outputs.dim() == 2
    return tensors and y.shape == outputs.shape[:1] and 1 < data.classes <= outputs.shape[1]


def _refuse_padding(task: Task, data: FederatedData, params: Tensor) -> None:
    """Refuse a model of padded sequences whose loss, error or gradient changes with more, less or no padding.

    These are compared at the first model and after a step along its gradient: a last layer of zeros hides what is below it.
    """
    if not data.train.has_sequences:
        return
    rows = data.train.first_rows(TRIED_ROWS)
    gradient = _run_user_code(task, "model", data, lambda: _refuse_padding_at(task, data, rows, params, ("loss", "error")))
    step = 0.1 * max(float(params.norm()), 1.0) / max(float(gradient.norm()), 1e-30)
    if bool(torch.isfinite(moved := params - step * gradient).all()):
        _run_user_code(task, "model", data, lambda: _refuse_padding_at(task, data, rows, moved, ("loss",)))


def _refuse_padding_at(task: Task, data: FederatedData, rows: Tensor, params: Tensor, names: tuple[str, ...]) -> Tensor:
    """The gradient of the sum of the losses of some examples, after their comparison with more and without padding.

    A model need not take more steps than any batch has, nor fewer than 8: what it does not take is not compared.
    """
    here = _padded_scores(task, data, [rows], params, 0)
    more = (8,) if data.may_pad_further(rows) else (8, 0)
    for parts, wider in (([rows], more), (list(torch.split(rows, 1)), (None, 0))):
        there = _padded_scores(task, data, parts, params, *wider)
        changed = [name for name in names if not nearly_equal(here[name], there[name])]
        gradients = (task.layout.unflatten(each["gradient"]) for each in (here, there))
        if changed or not _nearly_equal_gradients(*gradients):
            raise IncompatibleParts(
                f"The {changed[0] if changed else 'gradient'} of {type(task.module).__name__} changes when sequences are "
                "padded further, so that it depends on the other sequences in a batch.",
                "Use the mask: take the output at the last step where it is 1 (not outputs[:, -1]), average over steps "
                "where it is 1, hand it to attention as a padding mask; give an embedding padding_idx=…; pad targets with "
                "the ignored class −100.",
            )
    return here["gradient"]


def _refuse_padding_in_training(task: Task, data: FederatedData, params: Tensor) -> None:
    """Refuse a model that mixes the examples of a batch, if its statistics count padded places of sequences."""
    if not data.train.has_sequences:
        return
    rows = data.train.first_rows(TRIED_ROWS)

    def losses(wider: int) -> Tensor:
        trial = task.to(torch.device("cpu"))
        trial.scorer.train()
        return _padded_scores(trial, data, [rows], params, wider, 0)["loss"]

    here, again, there = (_run_user_code(task, "model", data, partial(losses, wider)) for wider in (0, 0, 8))
    if nearly_equal(here, again) and not nearly_equal(here, there):  # else random, and nothing can be compared
        raise IncompatibleParts(
            f"In training the loss of {type(task.module).__name__} changes when sequences are padded further: statistics "
            "of a batch count padded places.",
            "Normalise after the steps have been averaged where the mask is 1, or within each example (LayerNorm).",
        )


def _padded_scores(
    task: Task, data: FederatedData, parts: list[Tensor], params: Tensor, *wider: int | None
) -> dict[str, Tensor]:
    """Losses and errors of some examples in batches, and the gradient of the sum of all losses.

    Each batch is padded by the first of `wider` that the model takes; what it raises at the last is raised.
    """
    given = params.detach().requires_grad_()

    def score(part: Tensor, places: int | None) -> tuple[Tensor, Tensor]:
        x, y = (read(part, task.layout.dtype, wider=places) for read in (data.train.inputs, data.train.targets))
        return task.scores(given, trees.map_tree(Tensor.cpu, x), trees.map_tree(Tensor.cpu, y))

    def score_first(part: Tensor) -> tuple[Tensor, Tensor]:
        for places in wider[:-1]:
            with suppress(Exception):  # a user's model may raise anything
                return score(part, places)
        return score(part, wider[-1])

    with torch.enable_grad():
        losses, errors = (torch.cat(each) for each in zip(*map(score_first, parts), strict=True))
        (gradient,) = torch.autograd.grad(losses.sum(), given)
    return {"loss": losses.detach(), "error": errors.detach(), "gradient": gradient}


def _outputs(task: Task, x: Any) -> Any:
    """The model's outputs; several tensors are refused unless a loss is given for them."""
    outputs = trees.call(task.module, trees.clone(x))
    own = task.scorer.loss is not cross_entropy and not isinstance(task.scorer.loss, MaskedCrossEntropy)
    rule = "must return one tensor of outputs, unless a loss is given for what it returns"
    require(own or isinstance(outputs, Tensor), "model", rule, type(outputs).__name__)
    return outputs


def _run_user_code(task: Task, what: str, data: FederatedData, run: Callable[[], Any]) -> Any:
    """The result of `run`; what it raises becomes an error about `what`: the model, the loss or the error."""
    try:
        return run()
    except EquipoiseError:
        raise
    except Exception as failure:  # a user's function may raise anything when it is given what it does not expect
        x, y = data.train.inputs(slice(0, 1), task.layout.dtype), data.train.targets(slice(0, 1), task.layout.dtype)
        rule = f"must fit the data {data.name!r}: inputs of {_described(x)}"
        rule += f", targets of {_described(y)}" if what != "model" else ""
        reason = (str(failure).strip().splitlines() or [type(failure).__name__])[0]
        pixels = what == "model" and isinstance(x, Tensor) and not x.is_floating_point()
        hint = " If the inputs are pixels, give the data scale=1/255." if pixels else ""
        if what == "model" and isinstance(x, dict):
            hint = f" Inputs of a dict are keyword arguments: def forward(self, {', '.join(map(str, x))})."
        elif what == "model" and isinstance(x, tuple):
            hint = f" Inputs of a tuple are {len(x)} arguments of forward, in their order."
        name = type(task.module).__name__ if what == "model" else getattr(task.scorer, what)
        raise InvalidParameter(what, rule, name, f"It said: {reason}.{hint}") from failure


def _refuse_too_few_classes(task: Task, data: FederatedData, outputs: Any) -> None:
    """Refuse a model that knows fewer classes than the data have."""
    known, name = getattr(task.module, "classes", None), type(task.module).__name__
    if not is_integer(known):
        logits = task.scorer.is_cross_entropy and isinstance(outputs, Tensor) and outputs.dim() > 1
        known = outputs.shape[1] if logits else data.classes
    if known is not None and data.classes > known:
        classes = f"{data.classes} classes of {data.name!r} (0 to {data.classes - 1})"
        rule = f"must tell the {classes} apart"
        fix = f"{no_class_zero(data)}Give it more classes, or use models.Softmax."
        raise InvalidParameter("model", rule, f"{name} with {known} classes", fix)


def _nearly_equal_gradients(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    """Whether two gradients are equal up to rounding, parameter by parameter.

    What is small beside the whole gradient may be rounding alone.
    """
    whole = float(torch.cat([value.flatten() for value in one.values()]).norm())
    return all(
        float((value - other[name]).norm()) <= max(1e-3, 8 * torch.finfo(value.dtype).eps) * float(value.norm()) + 1e-5 * whole
        for name, value in one.items()
    )


def _described(tree: Any) -> str:
    """Shapes and types of one example, in words."""
    texts = {name: f"shape {tuple(leaf.shape[1:])} and type {str(leaf.dtype).removeprefix('torch.')}"
             for name, leaf in trees.named_leaves("", tree).items()}  # fmt: skip
    return "; ".join(f"{name} {text}".strip() for name, text in texts.items())
