"""Split models: each client keeps some parameters of its own, and all clients share the others.

A client's model is (w, row_k): the shared parameters w and the ones that it keeps. It sends the update of the shared ones
alone. FedPer, FedRep, FedBABU, LG-FedAvg and FedBN differ in what is kept and in how a client works.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
from torch import Tensor, nn

from equipoise.core.abilities import is_of_user, solver_traits
from equipoise.core.task import Task
from equipoise.errors import IncompatibleParts, InvalidParameter, is_integer, require, require_integer
from equipoise.personal.context import PersonalContext
from equipoise.personal.ditto import refuse_unfit_solver
from equipoise.personal.freezing import further_options, unfit_for_freezing
from equipoise.solvers.batches import steps_of
from equipoise.solvers.prepared import AdjustedSolver
from equipoise.types import Cohort, LocalSolver, Pull

if TYPE_CHECKING:
    from equipoise.algorithm import Algorithm

NORMALISATION = "normalisation"  # in place of a pattern: the layers that normalise
STATISTICS = "statistics"  # in place of a pattern: what these carry, e.g. a BatchNorm's running mean and variance
_LAYERS = (nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)
_TRAINED = ("kept", "shared", "all")


def kept_names(module: nn.Module, kept: Iterable[str]) -> set[str]:
    """The names of parameters and buffers that match a pattern, or belong to a normalisation layer if that is asked for.

    Layers are found by their type, never by the letters of their names. Of a tensor that has several names, as tied weights
    have, the first is given, whichever matches.
    """
    names = _first_names(module)
    layers = {name: layer for name, layer in module.named_modules() if isinstance(layer, _LAYERS)}
    found = set()
    for pattern in kept:
        if pattern in (NORMALISATION, STATISTICS):
            parts = {f"{name}.{own}".lstrip(".") for name, layer in layers.items() for own, _ in layer.named_buffers()}
            if pattern == NORMALISATION:
                parts |= {f"{name}.{own}".lstrip(".") for name, layer in layers.items() for own, _ in layer.named_parameters()}
        else:
            parts = {name for name in names if fnmatchcase(name, pattern) or name.startswith(f"{pattern}.")}
        parts = {names[name] for name in parts}
        if not parts:
            if pattern in (NORMALISATION, STATISTICS):
                _refuse_missing_layers(module, pattern)
            known = ", ".join(sorted(name for name, _ in module.named_parameters())[:12])
            raise InvalidParameter("kept", "must match names of the model's parameters", pattern, f"They are: {known}.")
        found |= parts
    return found


def _first_names(module: nn.Module) -> dict[str, str]:
    """Of each name of a parameter or buffer the first name of the same tensor, by which a task knows it."""
    first: dict[int, str] = {}
    every = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
    return {name: first.setdefault(id(values), name) for name, values in every}


def _refuse_missing_layers(module: nn.Module, pattern: str) -> None:
    """Refuse to keep normalisation layers, or their statistics, of a model that has none."""
    holds = "parameters or statistics" if pattern == NORMALISATION else "running statistics"
    raise InvalidParameter(
        "model", f"must have a normalisation layer with {holds}, which clients keep by kept={pattern!r}", type(module).__name__,
        "It has none. Put e.g. BatchNorm or GroupNorm into the model, or keep a part by its name: "
        'personal.FedPer("head").',
    )  # fmt: skip


def kept_mask(task: Task, kept: Iterable[str]) -> Tensor:
    """Which numbers of a model (D + C,) a client keeps, bool."""
    names = kept_names(task.module, kept)
    values = zip((*task.layout.names, *task.carried.names), (*task.layout.shapes, *task.carried.shapes), strict=True)
    return torch.cat([torch.full((shape.numel(),), name in names) for name, shape in values])


@dataclass(frozen=True)
class Split:
    """Clients keep the parameters whose names match `kept`, and share the others.

    `kept` is a pattern such as "head.*" (or the name of a module, "head"), or several; "normalisation" stands for all
    normalisation layers with their statistics, "statistics" for their statistics alone. `phases` says what a client trains one
    after another: pairs of "all", "kept" or "shared" and a number of epochs (None: as the solver's), with the rest frozen.
    `finetuning` epochs on the whole model follow at the end, for the model that is served. A tied weight, which has several
    names, is kept if one of them matches.

    Running statistics (BatchNorm) that match nothing are shared: the server averages them under the weights of the updates, as
    FedAvg does. Every phase runs the model in training mode, so that the batches of all phases move them. Finetuning starts
    from the average. Statistics that are shared are refused with privacy and with aggregators that are no average; those that
    clients keep go with both.

    The risk sees the losses of clients' own models F_k(w, row_k). A client that was never drawn has the initial values of
    the parameters that it keeps. So has the shared model `result.model`, in which these parameters are never trained: only
    the noise of a private run moves them there. If nothing is kept, the method is FedAvg. If everything is kept, nothing is
    shared, and drawn clients train as in Local, on other mini-batches. Robust aggregators and privacy see the shared update
    alone, and ε covers the shared parameters.

    Source: Arivazhagan et al. 2019 (FedPer); Collins et al. 2021 (FedRep); Oh, Kim, Yun 2022 (FedBABU); Liang et al. 2020
    (LG-FedAvg); Li et al. 2021 (FedBN).

    >>> import equipoise as eq
    >>> data = eq.data.gaussian_means([[0.0], [4.0]], examples=10, exact=True)  # F_k(w) = (w − μ_k)² + 1, from w^0 = 0
    >>> algorithm = eq.Algorithm(solver=eq.solvers.SGD(lr=0.25, batch_size=None), personal=Split("point"))
    >>> result = eq.train(eq.models.MeanEstimator(1), data, algorithm, rounds=1, clients_per_round=2)
    >>> round(float(result.personal.params(["client-1"])), 3)  # all is kept, so it trains alone: 0 − ¼ · 2(0 − 4)
    2.0
    """

    kept: str | tuple[str, ...]  # patterns of the parameters that clients keep
    phases: tuple[tuple[str, int | None], ...] = (("all", None),)  # what is trained one after another, and for how many epochs
    finetuning: int = 0  # epochs on the whole model at the end

    keeps_carried: ClassVar[bool] = True
    serves_all: ClassVar[bool] = True  # what a client keeps begins as all others' does, and noise does not touch it

    def __post_init__(self) -> None:
        given: Any = (self.kept,) if isinstance(self.kept, str) else self.kept
        good = isinstance(given, tuple | list) and all(isinstance(each, str) and each for each in given)
        require(good, "kept", "must be a pattern of parameter names, or several", self.kept, 'E.g. "head.*".')
        object.__setattr__(self, "kept", tuple(given))
        phases: Any = self.phases
        good = isinstance(phases, tuple | list) and len(phases) > 0
        require(good, "phases", "must be pairs of names and epochs", phases, 'E.g. (("kept", 10), ("shared", 1)).')
        for phase in phases:
            good = isinstance(phase, tuple | list) and len(phase) == 2 and phase[0] in _TRAINED
            good = good and (phase[1] is None or (is_integer(phase[1]) and phase[1] >= 1))
            require(good, "phases", 'must be pairs of "all", "kept" or "shared" and epochs of at least 1, or None', phase)
        object.__setattr__(self, "phases", tuple((names, epochs) for names, epochs in phases))
        require_integer("finetuning", self.finetuning, 0)

    @property
    def keeps_layers(self) -> bool:
        """Whether the shared model has layers that no round trains: those that clients keep."""
        return len(self.kept) > 0

    @property
    def further_epochs(self) -> tuple[int, ...]:
        """The numbers of epochs of phases and finetuning, beside the solver's own."""
        return tuple(epochs for _, epochs in self.phases if epochs) + (self.finetuning,) * self.finetunes

    @property
    def finetunes(self) -> bool:
        """Whether all clients train once more after the rounds, also those that were never drawn."""
        return self.finetuning > 0

    def check(self, algorithm: Algorithm) -> None:
        """Refuse, in `algorithm`, solvers that train only shared models, and stragglers."""
        refuse_unfit_solver(self, algorithm)
        traits = algorithm.traits.solver
        if traits.efforts is not None and traits.straggler_share > 0:
            raise IncompatibleParts(
                f"{self!r} trains kept and shared parameters together, so a straggler has no shared part to leave out.",
                "Use straggler_share=0.",
            )
        if traits.sgd is None and any(trained != "all" for trained, _ in self.phases):
            if options := further_options(algorithm.solver):
                raise IncompatibleParts(
                    f"{self!r} freezes parameters, and such phases do not know {options} of {algorithm.solver!r}.",
                    f"Leave out {options}, or train all parameters together.",
                )
            if not is_of_user(algorithm.solver):
                raise IncompatibleParts(
                    f"{self!r} freezes parameters, and {algorithm.solver!r} may move them without a gradient.",
                    "Use solvers.SGD(…), or train all parameters together.",
                )
            if (found := unfit_for_freezing(algorithm.solver)) is not None:
                raise IncompatibleParts(f"{self!r} freezes parameters, and {algorithm.solver!r} {found[0]}.", found[1])
        if traits.with_epochs is None and any(epochs is not None for _, epochs in self.phases):
            raise IncompatibleParts(
                f"{algorithm.solver!r} has no number of epochs that a phase could set.", "Use phases with None epochs."
            )

    def width(self, dimension: int) -> int:
        """A client keeps its model as it was after its last work, of which only its own parameters are used.

        `dimension` is D, the number of parameters.
        """
        return dimension

    def begin(self, context: PersonalContext, params: Tensor) -> tuple[Tensor, Any]:
        """Every client starts from w^0; refuses patterns that match nothing, or one of two statistics that belong together.

        `context` holds the engine, the task and the data of the run. `params` (D,) is w^0.
        """
        self._mask(context, params)
        kept, layout = self.withholds_carried(context.task), context.task.carried
        if any(bool(kept[mean].all()) != bool(kept[variance].all()) for mean, variance in layout.moments):
            raise IncompatibleParts(
                f"{self!r} keeps one of a layer's running mean and variance; they are averaged together or kept together.",
                f'Keep both: kept={(*self.kept, STATISTICS)!r}, or name the layer, e.g. "body.1".',
            )
        return params, None

    def withholds_carried(self, task: Task) -> Tensor:
        """Which carried values of a model, e.g. running statistics, a client keeps, (C,) bool. The others are averaged.

        `task` holds the model.
        """
        return kept_mask(task, self.kept)[task.layout.dimension :]

    def work(
        self, context: PersonalContext, params: Tensor, cohort: Cohort, rows: Tensor, solver: LocalSolver, shared: Any
    ) -> tuple[Tensor, Any]:
        """The cohort's models (K, D) after the phases, from the shared parameters and each client's own.

        `context` holds the engine, the task and the data of the run. `params` (D,) is the shared model, `cohort` holds the
        clients, `rows` (K, width) is what they keep, `solver` is the algorithm's, and `shared` is the state of all clients
        together.
        """
        mask = self._mask(context, params)
        if not bool(mask.any()):  # all is shared: clients do the work of FedAvg, and nothing else
            return rows, shared
        models = torch.where(mask, rows, params)
        for number, (trained, epochs) in enumerate(self.phases):
            models = self._train(context, models, params, mask, cohort, solver, trained, epochs, number)
        return models, shared

    def updates(
        self, context: PersonalContext, params: Tensor, cohort: Cohort, rows: Tensor, solver: LocalSolver
    ) -> Tensor | None:
        """The update (K, D) of the shared parameters, 0 in place of those that a client keeps; None if it keeps none.

        `context` holds the engine, the task and the data of the run. `params` (D,) is the shared model, `cohort` holds the
        clients, `rows` (K, width) is what they keep, and `solver` is the algorithm's.
        """
        dimension = context.task.layout.dimension
        if not bool(self._mask(context, params).any()):
            return None
        sent = torch.where(self._mask(context, params), 0.0, rows - params)
        return sent[:, :dimension]

    def sends_carried(
        self, context: PersonalContext, params: Tensor, cohort: Cohort, rows: Tensor, solver: LocalSolver
    ) -> Tensor | None:
        """The carried values (K, C) that clients share, as they are averaged; None if they keep them all.

        NaN for a client that took no step. In place of what a client keeps it sends the server's values. `context` holds the
        engine, the task and the data of the run. `params` (D,) is the shared model, `cohort` holds the clients, `rows`
        (K, width) is what they keep, and `solver` is the algorithm's.
        """
        task, kept = context.task, self.withholds_carried(context.task)
        if bool(kept.all()):
            return None
        (_, before), (_, after) = task.split(params), task.split(rows)
        moments = task.carried.sent(torch.where(kept.to(params.device), before, after))
        return torch.where(self._takes_steps(context, params, cohort, solver).unsqueeze(1), moments, torch.nan)

    def _takes_steps(self, context: PersonalContext, params: Tensor, cohort: Cohort, solver: LocalSolver) -> Tensor:
        """Which clients of a cohort take a step in one of the phases, (K,) bool: not those whose batches are all too small."""
        mask = self._mask(context, params)[: context.task.layout.dimension]
        taken = torch.zeros(len(cohort), dtype=torch.bool)
        for trained, epochs in self.phases:
            if trained == "all" or bool((mask if trained == "kept" else ~mask).any()):
                steps = steps_of(cohort, _of_phase(solver, epochs), context.data.train, context.task.smallest_batch)
                taken |= torch.from_numpy(steps > 0)
        return taken

    def losses(self, context: PersonalContext, params: Tensor, cohort: Cohort, rows: Tensor) -> Tensor:
        """F_k(w, row_k) of each client on its training examples, (K,).

        `context` holds the engine, the task and the data of the run. `params` (D,) is the shared model, `cohort` holds the
        clients, and `rows` (K, width) is what they keep.
        """
        models = torch.where(self._mask(context, params), rows, params)
        return context.engine.evaluate_own(models, context.data.train, cohort.clients)[0]

    def models(
        self, context: PersonalContext, params: Tensor, cohort: Cohort, rows: Tensor, solver: LocalSolver, shared: Any
    ) -> Tensor:
        """The models (K, D) of some clients: the shared parameters and each client's own, finetuned if that is asked for.

        `context` holds the engine, the task and the data of the run. `params` (D,) is the shared model, `cohort` holds the
        clients, `rows` (K, width) is what they keep, `solver` is the algorithm's, and `shared` is the state of all clients
        together.
        """
        models = torch.where(self._mask(context, params), rows, params)
        if not self.finetuning:
            return models
        own, everything = context.own_stream(cohort), torch.zeros_like(params, dtype=torch.bool)
        return self._train(context, models, params, everything, own, solver, "all", self.finetuning, 0)

    def _mask(self, context: PersonalContext, params: Tensor) -> Tensor:
        return kept_mask(context.task, self.kept).to(params.device)

    def _train(
        self, context: PersonalContext, models: Tensor, params: Tensor, mask: Tensor, cohort: Cohort, solver: LocalSolver,
        trained: str, epochs: int | None, number: int,
    ) -> Tensor:  # fmt: skip
        """Models (K, D + C) after one phase, in which the parameters that are not trained stay as they are."""
        dimension = context.task.layout.dimension
        solver = _of_phase(solver, epochs)
        if number:  # each phase has batches of its own
            cohort = replace(cohort, seed=context.own_stream(cohort).seed + number)
        if trained == "all" and not bool(mask[:dimension].any()):
            return context.engine.own_steps(models, cohort, solver)
        active = torch.ones_like(mask) if trained == "all" else (mask if trained == "kept" else ~mask)
        active, shared = active[:dimension], ~mask[:dimension]
        if not bool(active.any()):
            return models
        solver, pull = self._only(solver, active, shared, params[:dimension], len(models))
        after = context.engine.own_steps(models, cohort, solver, pull)
        frozen = torch.cat([~active, torch.zeros_like(mask[dimension:])])
        return torch.where(frozen, models, after)

    def _only(
        self, solver: LocalSolver, active: Tensor, shared: Tensor, params: Tensor, clients: int
    ) -> tuple[LocalSolver, Pull | None]:
        """A solver whose gradients are 0 where nothing is trained, and a pull in place of its weight decay and proximal term.

        Decay acts on what is trained; the proximal term pulls the shared parameters alone, which have a w^t to stay near.
        """
        pull, sgd = None, solver_traits(solver).sgd
        if sgd is not None and (sgd.weight_decay or sgd.prox):
            decay = torch.where(active, sgd.weight_decay, 0.0).to(params)
            prox = torch.where(active & shared, sgd.prox, 0.0).to(params)
            strength = decay + prox
            anchor = torch.where(strength > 0, prox / strength.clamp(min=1e-30), 0.0) * params
            solver = replace(cast(Any, solver), weight_decay=0.0, prox=0.0)
            pull = Pull(anchor.expand(clients, -1), strength.expand(clients, -1))
        if not bool(active.all()):
            solver = AdjustedSolver(solver, preconditioner=torch.where(active, 1.0, torch.inf).to(params))
        return solver, pull


def _of_phase(solver: LocalSolver, epochs: int | None) -> LocalSolver:
    """The solver of a phase with its number of epochs; None: the solver's own."""
    with_epochs = solver_traits(solver).with_epochs
    return solver if epochs is None or with_epochs is None else with_epochs(epochs)


def FedPer(kept: str | tuple[str, ...]) -> Split:  # noqa: N802 — the method's own name
    """Clients keep the head and train all parameters together.

    `kept` names the head by a pattern such as "head.*", or several patterns.

    Source: Arivazhagan et al. 2019 (arXiv 1912.00818).

    >>> FedPer("head.*") == Split("head.*")
    True
    """
    return Split(kept)


def FedRep(kept: str | tuple[str, ...], kept_epochs: int = 10, shared_epochs: int = 1) -> Split:  # noqa: N802
    """Clients keep the head: they train it for `kept_epochs` with the rest frozen, then the rest with the head frozen.

    `shared_epochs` are the epochs on the rest. `kept` names the head by a pattern such as "head.*", or several patterns.

    Source: Collins et al. 2021 (arXiv 2102.07078); 10 and 1 epochs as in the authors' scripts.

    >>> FedRep("head.*").phases
    (('kept', 10), ('shared', 1))
    """
    return Split(kept, (("kept", kept_epochs), ("shared", shared_epochs)))


def FedBABU(kept: str | tuple[str, ...], finetuning: int = 5) -> Split:  # noqa: N802
    """The head stays as it began while clients train the rest; each client finetunes the whole model at the end.

    `finetuning` are the epochs at the end. `kept` names the head by a pattern such as "head.*", or several patterns.

    Source: Oh, Kim, Yun 2022 (arXiv 2106.06042); 5 epochs are the default of the authors' code.

    >>> FedBABU("head.*").phases, FedBABU("head.*").finetuning
    ((('shared', None),), 5)
    """
    return Split(kept, (("shared", None),), finetuning)


def LGFedAvg(kept: str | tuple[str, ...]) -> Split:  # noqa: N802
    """Clients keep the body, the mirror image of FedPer: all share the head.

    `kept` names the body by a pattern such as "body.*", or several patterns.

    Source: Liang et al. 2020 (arXiv 2001.01523).

    >>> LGFedAvg("body.*").kept
    ('body.*',)
    """
    return Split(kept)


def FedBN() -> Split:  # noqa: N802
    """Clients keep their normalisation layers: scale, shift and running statistics.

    Source: Li et al. 2021 (FedBN). Its published code finds layers by the letters "bn" in their names, which misses some; here
    they are found by type.

    >>> FedBN().kept
    ('normalisation',)
    """
    return Split(NORMALISATION)
