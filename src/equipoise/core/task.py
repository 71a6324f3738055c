"""The learning task: a model, its per-example loss and its per-example error, as pure functions of a flat vector."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from equipoise.core import trees
from equipoise.core.batch_trial import BatchUse, nearly_equal, try_batches
from equipoise.core.binary_error import binary_error
from equipoise.core.carried import CarriedLayout, split_model
from equipoise.core.error_names import error_name
from equipoise.core.forward_rules import ForwardRules
from equipoise.core.functional import call_with_tensors
from equipoise.core.params import ParameterLayout
from equipoise.errors import EquipoiseError, IncompatibleParts, InvalidParameter, is_integer, require

if TYPE_CHECKING:
    from equipoise.data.federated_data import FederatedData

TRIED_ROWS = 256  # sequences among which those are chosen that padding is tried on
PerExample = Callable[[Any, Any], Tensor]  # of trees of outputs and targets


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy of logits (B, C, …) against classes (B, …): one number per example, (B,)."""
    losses = functional.cross_entropy(outputs, targets, reduction="none")
    return losses.flatten(1).mean(1) if losses.dim() > 1 else losses


def misclassified(outputs: Tensor, targets: Tensor) -> Tensor:
    """1 where the largest of the logits (B, C, …) is not the target class, else 0: (B,)."""
    wrong = (outputs.argmax(1) != targets).to(outputs.dtype)
    return wrong.flatten(1).mean(1) if wrong.dim() > 1 else wrong


@dataclass(frozen=True)
class MaskedCrossEntropy:
    """Cross-entropy of logits (B, C, …) against classes (B, …): the mean over the places of an example that are not ignored."""

    ignore_index: int

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """One number per example, (B,)."""
        losses = functional.cross_entropy(outputs, targets, reduction="none", ignore_index=self.ignore_index)
        return _mean_where(targets != self.ignore_index, losses)


@dataclass(frozen=True)
class MaskedMisclassified:
    """The share of an example's places, without the ignored ones, where the largest logit is not the target class."""

    ignore_index: int

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """One number per example, (B,)."""
        return _mean_where(targets != self.ignore_index, (outputs.argmax(1) != targets).to(outputs.dtype))


def _mean_where(known: Tensor, values: Tensor) -> Tensor:
    """The mean of each example's values (B, …) where they are known, (B,)."""
    if values.dim() == 1:
        return values
    shares = known.to(values.dtype).flatten(1)
    return (values.flatten(1) * shares).sum(1) / shares.sum(1).clamp(min=1)


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

    @classmethod
    def of(cls, model: nn.Module, loss: PerExample | None = None, error: PerExample | None = None) -> Task:
        """The task of a module. `loss` and `error` take (outputs, targets) and give one number per example.

        Without them the model's own `loss` and `error` methods are used where it has them. Else the loss is cross-entropy, and
        the error is misclassification for classes (see `fitted`) and the loss itself otherwise.
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
        with _in_training(scorer):
            carried = CarriedLayout.of(scorer.module)
        return cls(scorer, layout, carried, mixes=carried.size > 0)

    @classmethod
    def around(cls, model: nn.Module, loss: PerExample | None = None) -> Task:
        """The task of a module that is used as it is, without a copy and without questions."""
        return cls(_Scorer(model, loss, None), ParameterLayout.of(model))

    def with_module(self, module: nn.Module) -> Task:
        """The task with another module of the same kind, used as it is; loss and error stay."""
        return Task(_Scorer(module, self.scorer._given_loss, self.scorer._given_error), self.layout)

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
    def loss_is_given(self) -> bool:
        """Whether the user gave a loss, in place of the model's own or of cross-entropy."""
        return self.scorer._given_loss is not None

    @property
    def error_name(self) -> str:
        """What the error measures, in words: "0-1 error", "squared error", or the name of the user's own function."""
        return error_name(self.error, type(self.module).__name__)

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

    def fitted(self, data: FederatedData) -> Task:
        """The task for these data, tried on their first examples so that what cannot work is refused before any work.

        Refused are wrong shapes and types, too few classes, a loss or error that is not one number per example or has no
        gradient, and models that in evaluation mode change buffers, or whose output for one example depends on its batch. If
        the data have classes and the outputs are scores of classes, an error that nobody defined is misclassification; if the
        loss is binary cross-entropy, it is the share of wrong signs. What training changes besides the parameters is found by
        trying.
        """
        wanted = self._respecting(data)
        trial = wanted.to(torch.device("cpu"))
        rows = torch.arange(3) % data.train.examples if data.train.examples < 3 else slice(0, 3)
        dtype = self.layout.dtype
        x, y = (trees.map_tree(Tensor.cpu, part(rows, dtype)) for part in (data.train.inputs, data.train.targets))
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            trial.scorer.eval()
            outputs = trial._run_user_code("model", data, lambda: trial._outputs(x))
            trial._refuse_too_few_classes(data, outputs)
            use = trial._run_user_code("model", data, lambda: try_batches(trial.module, trial.scorer.train, x))
            trial.scorer.train()
            params = self.layout.read(trial.module).requires_grad_()
            with torch.enable_grad():
                losses = trial._run_user_code("loss", data, lambda: trial.losses(params, trees.clone(x), y))
            require(losses.requires_grad, "loss", "must depend on the model's parameters", "detached from them")
            trial._refuse_buffers_with_gradients()
            if (error := trial._error_of_outputs(data, outputs, y)) is not None:
                wanted, trial = (task._with_error(error) for task in (wanted, trial))
            trial.scorer.eval()
            several = trial._run_user_code("error", data, lambda: trial.scores(params, trees.clone(x), y))
            single = [(trees.select(x, slice(i, i + 1)), trees.select(y, slice(i, i + 1))) for i in range(len(several[0]))]
            alone = [trial.scores(params, trees.clone(one), target) for one, target in single]
            for place, what in enumerate(("loss", "error")):
                if not nearly_equal(several[place], torch.cat([scores[place] for scores in alone])):
                    raise IncompatibleParts(
                        f"The {what} of an example depends on the other examples in its batch, which padding and averaging "
                        "over clients both break.",
                        "Compute it from the example's own outputs and target.",
                    )
            trial._refuse_padding(data, params.detach())
            if use.mixes:
                trial._refuse_padding_in_training(data, params.detach())
        return wanted._trained_as(use)

    def _refuse_buffers_with_gradients(self) -> None:
        """A buffer that depends on the parameters would have every step go back through the steps before it."""
        kept = [name for name, value in self.module.named_buffers() if value.requires_grad]
        rule = f"must change its buffer {kept[0]!r} without gradients" if kept else ""
        fix = "Write `with torch.no_grad(): …` around the change, or detach what goes into it."
        require(not kept, "model", rule, type(self.module).__name__, fix)

    def _with_error(self, error: PerExample) -> Task:
        return replace(self, scorer=self.scorer.with_parts(self.module, self.scorer._given_loss, error))

    def _trained_as(self, use: BatchUse) -> Task:
        """The task with the carried buffers that a trial has found; refuses those that the vector cannot hold."""
        buffers, name = dict(self.module.named_buffers()), type(self.module).__name__
        if late := [changed for changed in use.changed if changed not in buffers]:
            rule, fix = f"must make its buffer {late[0]!r} before it runs", "Register it in __init__."
            raise InvalidParameter("model", rule, name, fix)
        with _in_training(self.scorer):
            carried = CarriedLayout.of(self.module, use.changed)
        for buffer in carried.names:
            fits = torch.promote_types(buffers[buffer].dtype, self.layout.dtype) == self.layout.dtype
            rule = f"must keep its parameters in a type at least as wide as its buffer {buffer!r} ({buffers[buffer].dtype})"
            require(fits, "model", rule, str(self.layout.dtype), "Convert it first, e.g. model.float().")
        if complex_ones := [changed for changed in use.changed if buffers[changed].is_complex()]:
            rule = f"must not change complex buffers when it runs, as it does {complex_ones[0]!r}"
            raise InvalidParameter("model", rule, name, "Keep real and imaginary part as two buffers.")
        return replace(self, carried=carried, mixes=use.mixes or carried.size > 0, smallest_batch=use.smallest)

    def _respecting(self, data: FederatedData) -> Task:
        """The task with a default loss that leaves out the targets which these data ignore."""
        if self.scorer.loss is not cross_entropy or not data.has_ignored:
            return self
        loss = MaskedCrossEntropy(data.ignore_index)
        return replace(self, scorer=self.scorer.with_parts(self.module, loss, self.scorer._given_error))

    def _error_of_outputs(self, data: FederatedData, outputs: Any, y: Any) -> PerExample | None:
        """The error that fits outputs and loss, if nobody has said what an error is; None leaves it as it is."""
        if not self.scorer.error_is_open:
            return None
        if self._scores_classes(data, outputs, y) or self.scorer.is_cross_entropy:
            return MaskedMisclassified(data.ignore_index) if data.has_ignored else misclassified
        error: PerExample | None = binary_error(self.scorer.loss, outputs, y)
        return error

    def _scores_classes(self, data: FederatedData, outputs: Any, y: Any) -> bool:
        """Whether the outputs are one score per class of the data."""
        tensors = isinstance(outputs, Tensor) and isinstance(y, Tensor) and outputs.dim() == 2
        return tensors and y.shape == outputs.shape[:1] and 1 < data.classes <= outputs.shape[1]

    def _refuse_padding(self, data: FederatedData, params: Tensor) -> None:
        """Where sequences are padded, more, less or no padding must change neither loss, error nor gradient.

        They are compared at the first model and after a step along its gradient: a last layer of zeros hides what is below it.
        """
        if not data.train.has_sequences:
            return
        rows = data.train.first_rows(TRIED_ROWS)
        gradient = self._run_user_code("model", data, lambda: self._refuse_padding_at(data, rows, params, ("loss", "error")))
        step = 0.1 * max(float(params.norm()), 1.0) / max(float(gradient.norm()), 1e-30)
        if bool(torch.isfinite(moved := params - step * gradient).all()):
            self._run_user_code("model", data, lambda: self._refuse_padding_at(data, rows, moved, ("loss",)))

    def _refuse_padding_at(self, data: FederatedData, rows: Tensor, params: Tensor, names: tuple[str, ...]) -> Tensor:
        """Compare some examples with more padding, and one by one without; the gradient of the sum of their losses.

        A model need not take more steps than any batch has, nor fewer than 8: what it does not take is not compared.
        """
        here = self._padded_scores(data, [rows], params, 0)
        more = (8,) if data.may_pad_further(rows) else (8, 0)
        for parts, wider in (([rows], more), (list(torch.split(rows, 1)), (None, 0))):
            there = self._padded_scores(data, parts, params, *wider)
            changed = [name for name in names if not nearly_equal(here[name], there[name])]
            gradients = (self.layout.unflatten(each["gradient"]) for each in (here, there))
            if changed or not _nearly_equal_gradients(*gradients):
                raise IncompatibleParts(
                    f"The {changed[0] if changed else 'gradient'} of {type(self.module).__name__} changes when sequences are "
                    "padded further, so that it depends on the other sequences in a batch.",
                    "Use the mask: take the output at the last step where it is 1 (not outputs[:, -1]), average over steps "
                    "where it is 1, hand it to attention as a padding mask; give an embedding padding_idx=…; pad targets with "
                    "the ignored class −100.",
                )
        return here["gradient"]

    def _refuse_padding_in_training(self, data: FederatedData, params: Tensor) -> None:
        """Where sequences are padded and a model mixes the examples of a batch, its statistics must not count padded places."""
        if not data.train.has_sequences:
            return
        rows = data.train.first_rows(TRIED_ROWS)

        def losses(wider: int) -> Tensor:
            trial = self.to(torch.device("cpu"))
            trial.scorer.train()
            return trial._padded_scores(data, [rows], params, wider, 0)["loss"]

        here, again, there = (self._run_user_code("model", data, partial(losses, wider)) for wider in (0, 0, 8))
        if nearly_equal(here, again) and not nearly_equal(here, there):  # else random, and nothing can be compared
            raise IncompatibleParts(
                f"In training the loss of {type(self.module).__name__} changes when sequences are padded further: statistics "
                "of a batch count padded places.",
                "Normalise after the steps have been averaged where the mask is 1, or within each example (LayerNorm).",
            )

    def _padded_scores(self, data: FederatedData, parts: list[Tensor], params: Tensor, *wider: int | None) -> dict[str, Tensor]:
        """Losses and errors of some examples in batches, and the gradient of the sum of all losses.

        Each batch is padded by the first of `wider` that the model takes; what it raises at the last is raised.
        """
        given = params.detach().requires_grad_()

        def score(part: Tensor, places: int | None) -> tuple[Tensor, Tensor]:
            x, y = (read(part, self.layout.dtype, wider=places) for read in (data.train.inputs, data.train.targets))
            return self.scores(given, trees.map_tree(Tensor.cpu, x), trees.map_tree(Tensor.cpu, y))

        def score_first(part: Tensor) -> tuple[Tensor, Tensor]:
            for places in wider[:-1]:
                with suppress(Exception):  # a user's model may raise anything
                    return score(part, places)
            return score(part, wider[-1])

        with torch.enable_grad():
            losses, errors = (torch.cat(each) for each in zip(*map(score_first, parts), strict=True))
            (gradient,) = torch.autograd.grad(losses.sum(), given)
        return {"loss": losses.detach(), "error": errors.detach(), "gradient": gradient}

    def _outputs(self, x: Any) -> Any:
        outputs = trees.call(self.module, trees.clone(x))
        own = self.scorer.loss is not cross_entropy and not isinstance(self.scorer.loss, MaskedCrossEntropy)
        rule = "must return one tensor of outputs, unless a loss is given for what it returns"
        require(own or isinstance(outputs, Tensor), "model", rule, type(outputs).__name__)
        return outputs

    def _run_user_code(self, what: str, data: FederatedData, run: Callable[[], Any]) -> Any:
        """The result of `run`; whatever it raises is said to be about the model, the loss or the error."""
        try:
            return run()
        except EquipoiseError:
            raise
        except Exception as failure:  # a user's function may raise anything when it is given what it does not expect
            x, y = data.train.inputs(slice(0, 1), self.layout.dtype), data.train.targets(slice(0, 1), self.layout.dtype)
            rule = f"must fit the data {data.name!r}: inputs of {_described(x)}"
            rule += f", targets of {_described(y)}" if what != "model" else ""
            reason = (str(failure).strip().splitlines() or [type(failure).__name__])[0]
            pixels = what == "model" and isinstance(x, Tensor) and not x.is_floating_point()
            hint = " If the inputs are pixels, give the data scale=1/255." if pixels else ""
            name = type(self.module).__name__ if what == "model" else getattr(self.scorer, what)
            raise InvalidParameter(what, rule, name, f"It said: {reason}.{hint}") from failure

    def _refuse_too_few_classes(self, data: FederatedData, outputs: Any) -> None:
        known, name = getattr(self.module, "classes", None), type(self.module).__name__
        if not is_integer(known):
            logits = self.scorer.is_cross_entropy and isinstance(outputs, Tensor) and outputs.dim() > 1
            known = outputs.shape[1] if logits else data.classes
        if known is not None and data.classes > known:
            classes = f"{data.classes} classes of {data.name!r} (0 to {data.classes - 1})"
            rule = f"must tell the {classes} apart"
            raise InvalidParameter(
                "model", rule, f"{name} with {known} classes", "Give it more classes, or use models.Softmax."
            )


def _copy_all(
    model: nn.Module, loss: PerExample | None, error: PerExample | None
) -> tuple[nn.Module, PerExample | None, PerExample | None]:
    """A copy of the model, with loss and error copied along: what they share with the model they share with the copy."""
    try:
        copied: tuple[nn.Module, PerExample | None, PerExample | None] = copy.deepcopy((model, loss, error))
    except Exception:  # a loss may hold what cannot be copied (a lock, a tensor of a graph): then it is used as it is
        return copy.deepcopy(model), loss, error
    return copied


def _nearly_equal_gradients(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    """Equal up to rounding, parameter by parameter; what is small beside the whole gradient may be rounding alone."""
    whole = float(torch.cat([value.flatten() for value in one.values()]).norm())
    return all(
        float((value - other[name]).norm()) <= max(1e-3, 8 * torch.finfo(value.dtype).eps) * float(value.norm()) + 1e-5 * whole
        for name, value in one.items()
    )


def _described(tree: Any) -> str:
    """Shapes and types of one example."""
    texts = {name: f"shape {tuple(leaf.shape[1:])} and type {str(leaf.dtype).removeprefix('torch.')}"
             for name, leaf in trees.named_leaves("", tree).items()}  # fmt: skip
    return "; ".join(f"{name} {text}".strip() for name, text in texts.items())


def per_example(name: str, values: Tensor, x: Any) -> Tensor:
    """Refuse a loss that was already averaged: clients need one number per example."""
    batch = trees.batch_shape(x)
    if not isinstance(values, Tensor) or values.shape != batch:
        fix = 'With a torch loss use reduction="none", and average over all but the first dimension.'
        shape = tuple(values.shape) if isinstance(values, Tensor) else values
        raise InvalidParameter(name, f"must give one number per example, shape ({batch[0]},)", shape, fix)
    return values


def refuse_batch_normalisation(model: nn.Module, harm: str) -> None:
    """Refuse layers whose output for one example depends on others, where there is no batch of one client; `harm` says why."""
    for name, layer in model.named_modules():
        keeps_statistics = isinstance(layer, nn.modules.batchnorm._NormBase) and layer.track_running_stats
        if isinstance(layer, nn.modules.batchnorm._BatchNorm) or keeps_statistics:
            raise IncompatibleParts(
                f"{f'model.{name}' if name else 'model'} is a {type(layer).__name__}: its statistics {harm}.",
                f"Replace it, e.g. by torch.nn.GroupNorm(groups, {getattr(layer, 'num_features', 'channels')}); "
                "equipoise.models.with_group_norm(model) replaces all of them.",
            )


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
def _in_training(scorer: _Scorer) -> Iterator[None]:
    """Within it, the model is in training mode; afterwards its parts are in the modes they were in."""
    before = [(part, part.training) for part in scorer.modules()]
    scorer.train()
    try:
        yield
    finally:
        for part, training in before:
            part.training = training
