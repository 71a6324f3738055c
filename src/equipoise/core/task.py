"""The learning task: a model, its per-example loss and its per-example error, as pure functions of a flat vector."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from equipoise.core import trees
from equipoise.core.carried import CarriedLayout, split_model
from equipoise.core.error_names import error_name
from equipoise.core.forward_rules import ForwardRules
from equipoise.core.functional import call_with_tensors
from equipoise.core.params import ParameterLayout
from equipoise.core.per_example_losses import MaskedCrossEntropy, PerExample, cross_entropy, misclassified, per_example
from equipoise.errors import require

if TYPE_CHECKING:
    from equipoise.data.clients import FederatedData


class _Scorer(nn.Module):
    """Model and loss as one module, so that parameters which a model uses in its own loss are trained too."""

    def __init__(
        self, module: nn.Module, loss: PerExample | None, error: PerExample | None, modes: Mapping[str, bool] | None = None
    ) -> None:
        super().__init__()
        self.module, self._given_loss, self._given_error = module, loss, error
        self.modes = _frozen_modes(module) if modes is None else dict(modes)  # in training, of frozen parts by name

    def with_parts(self, module: nn.Module, loss: PerExample | None, error: PerExample | None) -> _Scorer:
        """A scorer of other objects for the same model: its frozen parts keep the modes that the user left them in."""
        return _Scorer(module, loss, error, self.modes)

    def train(self, mode: bool = True) -> _Scorer:
        """Training or evaluation mode for the model. In training, its frozen parts are in the mode the user left them in."""
        super().train(mode)
        if mode and self.modes:
            parts = dict(self.module.named_modules())
            for name, training in self.modes.items():
                parts[name].training = training
        return self

    # A model's own methods are looked up when they are used: a copy of this module then uses the copied model's.
    @property
    def loss(self) -> PerExample:
        """The per-example loss: the given one, the model's own, or cross-entropy."""
        loss: PerExample = self._given_loss or getattr(self.module, "loss", None) or cross_entropy
        return loss

    @property
    def error(self) -> PerExample:
        """The per-example error: the given one, the model's own, or the usual one for the loss."""
        error: PerExample = self._given_error or getattr(self.module, "error", None) or self._usual_error
        return error

    @property
    def error_is_open(self) -> bool:
        """Whether neither the user nor the model says what an error is."""
        return self._given_error is None and getattr(self.module, "error", None) is None

    @property
    def is_cross_entropy(self) -> bool:
        known = MaskedCrossEntropy | nn.CrossEntropyLoss | nn.NLLLoss | nn.MultiMarginLoss
        return self.loss is cross_entropy or isinstance(self.loss, known)

    @property
    def _usual_error(self) -> PerExample:
        return misclassified if self.is_cross_entropy else self.loss

    def forward(self, x: Any, y: Any, with_error: bool) -> tuple[Tensor, Tensor | None]:
        outputs = trees.call(self.module, x)
        losses = per_example("loss", self.loss(outputs, y), x)
        return losses, per_example("error", self.error(outputs, y), x) if with_error else None


@dataclass(frozen=True, eq=False)
class Task:
    """What is learned, on a copy of the user's module. Parameters are a vector (D,) or named tensors."""

    scorer: _Scorer
    layout: ParameterLayout
    carried: CarriedLayout = field(default_factory=CarriedLayout)
    mixes: bool = False  # in training an example's output depends on the others of its batch, which is never padded
    smallest_batch: int = 1  # examples that a batch must have to be trained on
    several_labels: bool = False  # an example has several targets, as in a multi-label task or a sequence

    @classmethod
    def of(cls, model: nn.Module, loss: PerExample | None = None, error: PerExample | None = None) -> Task:
        """The task of a module. `loss` and `error` take (outputs, targets) and give one number per example.

        Without them the model's own `loss` and `error` methods are used where it has them. Else the loss is cross-entropy, and
        the error is misclassification for classes (see `try_task`) and the loss itself otherwise.
        """
        require(isinstance(model, nn.Module), "model", "must be a torch.nn.Module", type(model).__name__)
        for name, given in (("loss", loss), ("error", error)):
            require(given is None or callable(given), name, "must be a function of (outputs, targets)", given)
        layout = ParameterLayout.of(model)
        own = {id(parameter) for parameter in model.parameters()}
        of_loss = loss.parameters() if isinstance(loss, nn.Module) else ()
        strangers = any(p.requires_grad and id(p) not in own for p in of_loss)
        fix = "Make the loss part of the model (a method `loss`), or freeze it by requires_grad_(False)."
        require(not strangers, "loss", "must not have trainable parameters outside the model", type(loss).__name__, fix)
        scorer = _Scorer(*_copy_all(model, loss, error))
        with in_training_mode(scorer):
            carried = CarriedLayout.of(scorer.module)
        return cls(scorer, layout, carried, mixes=carried.size > 0)

    @classmethod
    def around(cls, model: nn.Module, loss: PerExample | None = None) -> Task:
        """The task of a module that is used as it is, without a copy and without questions."""
        return cls(_Scorer(model, loss, None), ParameterLayout.of(model))

    def with_loss(self, loss: PerExample) -> Task:
        """The task with another loss; model and error stay."""
        return replace(self, scorer=self.scorer.with_parts(self.module, loss, self.scorer._given_error))

    def with_error(self, error: PerExample) -> Task:
        """The task with another error; model and loss stay."""
        return replace(self, scorer=self.scorer.with_parts(self.module, self.scorer._given_loss, error))

    def with_module(self, module: nn.Module) -> Task:
        """The task with another module of the same kind, used as it is; loss and error stay."""
        return Task(_Scorer(module, self.scorer._given_loss, self.scorer._given_error), self.layout)

    @property
    def given_functions(self) -> tuple[PerExample | None, PerExample | None]:
        """The loss and the error that were given; None for those of the model, and for the usual ones."""
        return self.scorer._given_loss, self.scorer._given_error

    @property
    def module(self) -> nn.Module:
        """The module that is trained: a copy of the user's, or with `around` the user's own."""
        return self.scorer.module

    @property
    def frozen_modes(self) -> dict[str, bool]:
        """Whether the parts of the model that are frozen are in training mode during local work, by name."""
        return self.scorer.modes

    @property
    def loss(self) -> PerExample:
        """The per-example loss, a function of outputs and targets."""
        return self.scorer.loss

    @property
    def error(self) -> PerExample:
        """The per-example error, a function of outputs and targets."""
        return self.scorer.error

    @property
    def error_is_loss(self) -> bool:
        """Whether no error is defined apart from the loss."""
        return self.scorer.error == self.scorer.loss

    @property
    def error_is_open(self) -> bool:
        """Whether neither the user nor the model says what an error is."""
        return self.scorer.error_is_open

    @property
    def loss_is_given(self) -> bool:
        """Whether the user gave a loss, in place of the model's own or of cross-entropy."""
        return self.scorer._given_loss is not None

    @property
    def error_name(self) -> str:
        """What the error measures, in words, e.g. "0-1 error" or "share of wrong labels"; or the name of a user's function."""
        models_own = self.scorer._given_error is None and (not self.error_is_open or not self.loss_is_given)
        model = type(self.module).__name__ if models_own else ""
        return error_name(self.error, model, several_labels=self.several_labels, is_loss=self.error_is_loss)

    def to(self, device: torch.device) -> Task:
        """A copy of the task with the module's constants on a device, in training mode, whatever mode it was left in."""
        parts = _copy_all(self.module, self.scorer._given_loss, self.scorer._given_error)
        return replace(self, scorer=self.scorer.with_parts(*parts).to(device).train())

    @property
    def width(self) -> int:
        """D + C, the numbers of a model as engines take it."""
        return self.layout.dimension + self.carried.size

    def split(self, model: Tensor) -> tuple[Tensor, Tensor]:
        """The parameters (…, D) and the carried values (…, C) of a model as engines take it, (…, D + C)."""
        return split_model(model, self.layout.dimension, self.carried.size)

    def trained_in(self, *others: nn.Module) -> list[Tensor]:
        """The parameters and the carried buffers of the module, and of others of its kind."""
        names = {*self.layout.names, *self.carried.names, *self.carried.counters}
        tensors = (pair for each in (self.module, *others) for pair in (*each.named_parameters(), *each.named_buffers()))
        return [value for name, value in tensors if name in names]

    def sent_carried(self) -> Tensor:
        """The module's carried values as clients send them for the average, (C,) float64; empty if there are none."""
        if not self.carried.names:
            return torch.empty(0, dtype=torch.float64)
        return self.carried.sent(self.carried.read(self.module, self.layout.dtype))

    def after_work(self, models: Tensor, updates: Tensor, carried: Tensor | None) -> Tensor:
        """Clients' own models (K, D + C) after work that gave updates (K, D), and carried values as they were sent (K, C)."""
        params, before = self.split(models)
        if carried is None or not self.carried.names:
            return params + updates
        values = self.carried.from_moments(carried).to(models)
        return torch.cat([params + updates, torch.where(torch.isfinite(values), values, before)], -1)  # or no step was taken

    def read_model(self) -> Tensor:
        """A copy of the module's parameters and carried buffers as engines take them, (D + C,)."""
        params = self.layout.read(self.module)
        return torch.cat([params, self.carried.read(self.module, params.dtype)]) if self.carried.names else params

    def in_double(self) -> Task:
        """A copy of the task in float64."""
        parts = _copy_all(self.module, self.scorer._given_loss, self.scorer._given_error)
        layout = replace(self.layout, dtype=torch.float64)
        carried = replace(self.carried, dtypes=(torch.float64,) * len(self.carried.names))
        return replace(self, scorer=self.scorer.with_parts(*parts).double(), layout=layout, carried=carried)

    def outputs(self, params: Tensor | dict[str, Tensor], x: Any) -> Any:
        """The model's outputs on inputs (B, …)."""
        return trees.call_with(self.module, self.named(params), x)

    def losses(self, params: Tensor | dict[str, Tensor], x: Any, y: Any) -> Tensor:
        """Per-example losses (B,)."""
        losses: Tensor = call_with_tensors(self.scorer, self._named(params), (x, y, False))[0]
        return losses

    def batched_losses(self, params: Tensor | dict[str, Tensor], x: Any, y: Any, key: Tensor | None = None) -> Tensor:
        """`losses` by operations that `torch.func.vmap` can batch; `key` fixes the masks of dropout."""
        with ForwardRules(key, batched=True):
            return self.losses(params, x, y)

    def batched_scores(self, params: Tensor | dict[str, Tensor], x: Any, y: Any) -> tuple[Tensor, Tensor]:
        """`scores` by operations that `torch.func.vmap` can batch."""
        with ForwardRules(None, batched=True):
            return self.scores(params, x, y)

    def scores(self, params: Tensor | dict[str, Tensor], x: Any, y: Any) -> tuple[Tensor, Tensor]:
        """Per-example losses and errors, (B,) and (B,)."""
        losses, errors = call_with_tensors(self.scorer, self._named(params), (x, y, True))
        return losses, errors

    def named(self, params: Tensor | dict[str, Tensor]) -> dict[str, Tensor]:
        """Parameters by name, and carried buffers where the vector holds their values, too."""
        if not isinstance(params, Tensor):
            return params
        if params.shape[-1] == self.layout.dimension:
            return self.layout.unflatten(params)
        own, carried = self.split(params)
        return self.layout.unflatten(own) | self.carried.unflatten(carried)

    def _named(self, params: Tensor | dict[str, Tensor]) -> dict[str, Tensor]:
        return {f"module.{name}": value for name, value in self.named(params).items()}

    def drops(self, data: FederatedData) -> bool:
        """Whether a forward pass in training draws masks of dropout, tried on the first examples."""
        trial, rules = self.to(torch.device("cpu")), ForwardRules(torch.tensor(0), batched=False)
        rows = slice(0, min(2, data.train.examples))
        x, y = (trees.map_tree(Tensor.cpu, part(rows, self.layout.dtype)) for part in (data.train.inputs, data.train.targets))
        trial.scorer.train()
        with torch.random.fork_rng(devices=[]), torch.enable_grad(), rules:
            trial.scorer(trees.clone(x), y, False)
        return rules.calls > 0


def _copy_all(
    model: nn.Module, loss: PerExample | None, error: PerExample | None
) -> tuple[nn.Module, PerExample | None, PerExample | None]:
    """A copy of the model, with loss and error copied along: what they share with the model they share with the copy."""
    try:
        copied: tuple[nn.Module, PerExample | None, PerExample | None] = copy.deepcopy((model, loss, error))
    except Exception:  # a loss may hold what cannot be copied (a lock, a tensor of a graph): then it is used as it is
        return copy.deepcopy(model), loss, error
    return copied


def _frozen_modes(model: nn.Module) -> dict[str, bool]:
    """The mode (training or not) of every part of a model that lies in a frozen subtree, by name.

    A subtree is frozen if it has parameters or buffers and no trainable parameter.
    """
    modes: dict[str, bool] = {}
    frozen = ""  # the subtree at hand: the parts of one follow each other
    for name, part in model.named_modules():
        if not (frozen and name.startswith(f"{frozen}.")):
            holds = any(True for _ in (*part.parameters(), *part.buffers()))
            frozen = name if holds and not any(p.requires_grad for p in part.parameters()) else ""
        if frozen:
            modes[name] = part.training
    return modes


@contextmanager
def in_training_mode(module: nn.Module) -> Iterator[None]:
    """Within this context a module is in training mode; afterwards its parts are in the modes they were in."""
    before = [(part, part.training) for part in module.modules()]
    module.train()
    try:
        yield
    finally:
        for part, training in before:
            part.training = training
