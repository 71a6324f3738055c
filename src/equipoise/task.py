"""The learning task: a model, its per-example loss and its per-example error, as pure functions of a flat vector."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

from equipoise.errors import IncompatibleParts, InvalidParameter
from equipoise.params import ParameterLayout

if TYPE_CHECKING:
    from equipoise.data.clients import FederatedData

PerExample = Callable[[Tensor, Tensor], Tensor]


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy of logits (B, C, …) against classes (B, …): one number per example, (B,)."""
    losses = functional.cross_entropy(outputs, targets, reduction="none")
    return losses.flatten(1).mean(1) if losses.dim() > 1 else losses


def misclassified(outputs: Tensor, targets: Tensor) -> Tensor:
    """1 where the largest of the logits (B, C, …) is not the target class, else 0: (B,)."""
    wrong = (outputs.argmax(1) != targets).to(outputs.dtype)
    return wrong.flatten(1).mean(1) if wrong.dim() > 1 else wrong


@dataclass(frozen=True, eq=False)
class Task:
    """What is learned: `loss` and `error` take (outputs, targets) and give one number per example."""

    module: nn.Module
    loss: PerExample
    error: PerExample
    layout: ParameterLayout

    @classmethod
    def of(cls, model: nn.Module, loss: PerExample | None = None) -> Task:
        """The task of a module; its own `loss` and `error` methods are used where it has them.

        Without a loss it is cross-entropy. Without an error it is misclassification when the loss is cross-entropy, and the
        loss itself otherwise.
        """
        if not isinstance(model, nn.Module):
            raise InvalidParameter("model", "must be a torch.nn.Module", type(model).__name__)
        refuse_mixing_layers(model)
        module = copy.deepcopy(model)
        own_loss = getattr(model, "loss", None)
        loss = loss or own_loss or cross_entropy
        own_error = getattr(model, "error", None) if loss is own_loss else None
        return cls(module, loss, own_error or (misclassified if loss is cross_entropy else loss), ParameterLayout.of(module))

    def to(self, device: torch.device) -> Task:
        """The same task with the module's constants on a device."""
        return Task(copy.deepcopy(self.module).to(device), self.loss, self.error, self.layout)

    def refuse_misfit(self, data: FederatedData) -> None:
        """Try the model on two examples: a wrong shape, type or number of classes is refused in words, before any work."""
        params = self.layout.read(self.module)
        clients, rows = data.train, slice(0, 2)
        x, y = clients.inputs(rows, params.dtype), clients.targets(rows, params.dtype)
        said = f"must fit the data {data.name!r}, whose inputs have shape {tuple(x.shape[1:])} and type {x.dtype}"
        self.module.eval()
        try:
            with torch.no_grad():
                outputs = self.outputs(params, x)
                known = getattr(self.module, "classes", outputs.shape[-1] if self.loss is cross_entropy else data.classes)
                if data.classes > known:
                    name = type(self.module).__name__
                    rule = f"must tell the {data.classes} classes of {data.name!r} apart; {name} knows {known}"
                    raise InvalidParameter("model", rule, name, "Give it more classes, or use models.Softmax.")
                per_example("loss", self.loss(outputs, y), x)
                per_example("error", self.error(outputs, y), x)
        except InvalidParameter:
            raise
        except (RuntimeError, ValueError, TypeError, IndexError) as failure:
            reason = str(failure).strip().splitlines()[0]
            raise InvalidParameter("model", said, type(self.module).__name__, f"It said: {reason}") from failure

    def outputs(self, params: Tensor | dict[str, Tensor], x: Tensor) -> Tensor:
        """The model's outputs on inputs (B, …) at parameters given as a vector (D,) or by name."""
        named = self.layout.unflatten(params) if isinstance(params, Tensor) else params
        outputs: Tensor = functional_call(self.module, named, (x,))
        return outputs

    def losses(self, params: Tensor | dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        """Per-example losses (B,)."""
        return per_example("loss", self.loss(self.outputs(params, x), y), x)


def per_example(name: str, values: Tensor, x: Tensor) -> Tensor:
    """Refuse a loss that was already averaged: clients need one number per example."""
    if values.shape != x.shape[:1]:
        raise InvalidParameter(
            name,
            f"must give one number per example, shape ({x.shape[0]},)",
            tuple(values.shape),
            'With a torch loss use reduction="none", and average over all but the first dimension.',
        )
    return values


def refuse_mixing_layers(model: nn.Module) -> None:
    """Batch normalisation is not a function of one example, so padding and averaging over clients both break it."""
    for name, layer in model.named_modules():
        keeps_statistics = isinstance(layer, nn.modules.batchnorm._NormBase) and layer.track_running_stats
        if isinstance(layer, nn.modules.batchnorm._BatchNorm) or keeps_statistics:
            raise IncompatibleParts(
                f"model.{name} is a {type(layer).__name__}: its statistics mix the examples of a batch and, once averaged, the "
                "data of different clients.",
                f"Replace it, e.g. by torch.nn.GroupNorm(groups, {getattr(layer, 'num_features', 'channels')}).",
            )
