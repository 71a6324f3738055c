"""The law of personalisation methods: clients get models of their own, and the shared model does not notice."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from equipoise.algorithm import Algorithm
from equipoise.core.abilities import read
from equipoise.data.clients import FederatedData
from equipoise.errors import Diverged, EquipoiseNotice
from equipoise.personal.context import PersonalContext
from equipoise.round import Rounds, draw_cohort
from equipoise.runs.checkpoint import packed, unpacked
from equipoise.runs.setup import EngineChoice, Setting, choose_engine, set_up
from equipoise.solvers import SGD
from equipoise.testing.laws import close, equal_values, hold, is_finite, unchanged
from equipoise.testing.small_run import make_small_task
from equipoise.types import Cohort, LocalSolver, Personalisation, PersonalTraits, PersonalWork, ServerState

ROUNDS = 4
SAVED_AFTER = 2  # rounds, when the run that is resumed was saved


def check_personalisation(
    method: Personalisation,
    *,
    algorithm: Algorithm | None = None,
    model: nn.Module | None = None,
    data: FederatedData | None = None,
    engine: EngineChoice | str = "loop",
    tolerance: float = 1e-9,
    seed: int = 0,
) -> None:
    """Clients' rows and models are as promised, the shared model is that of the run without the method, and runs resume.

    Rows have `width(D)` finite numbers and models D. Calls repeat and write to nothing they are given. A client's row and
    model do not depend on who else is in the cohort; the rows of a method with `sums_models` may. A client that has not worked
    yet has the shared model. The shared model is that of the same run without the method, bit for bit, unless the method has
    `updates`, which must then be finite. A run that is resumed from what a checkpoint keeps ends with the same models.

    The method is tried in an `algorithm` (None: local SGD on batches of 5) for a few rounds, on the given model and data or on
    a small softmax model of eight clients.
    """
    task, small = make_small_task(seed)
    case = PersonalCase(
        method, algorithm or Algorithm(solver=SGD(batch_size=5)), model or task.module, data or small, engine, tolerance, seed
    )
    _check_calls(case)
    _check_runs(case)


@dataclass(frozen=True, eq=False)
class PersonalCase:
    """A method and the small run that it is tried in."""

    method: Personalisation
    algorithm: Algorithm
    model: nn.Module
    data: FederatedData
    engine: EngineChoice | str
    tolerance: float
    seed: int

    def set_up(self, method: Personalisation | None) -> Setting:
        """The run with a method, or without any."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", EquipoiseNotice)
            return set_up(
                self.model, self.data, replace(self.algorithm, personal=method), rounds=ROUNDS, clients_per_round=3,
                seed=self.seed, loss=None, error=None, engine=self.engine,
            )  # fmt: skip

    def hold(self, condition: bool, law: str, numbers: object = "") -> None:
        """Raise LawBroken unless the condition is true."""
        hold(condition, self.method, law, numbers)


# ------------------------------------------------------------------------------------------------------------ call by call


def _check_calls(case: PersonalCase) -> None:
    """`begin`, `work`, `updates` and `models` of a cohort, each called as in a round."""
    setting, method = case.set_up(case.method), case.method
    params, dimension = setting.first_params, setting.task.layout.dimension
    context = PersonalContext(
        setting.engine, setting.task, case.data, lambda other: choose_engine(case.engine).start(other, case.data)
    )
    width = method.width(dimension)
    case.hold(isinstance(width, int) and width >= 0, "width is an integer ≥ 0", width)
    with unchanged(method, "begin", params=params):
        first, shared = method.begin(context, params)
    good = first.shape == (width,) and first.dtype == params.dtype and is_finite(first)
    case.hold(good, "clients begin with `width` finite numbers of the parameters' type", (tuple(first.shape), width))
    cohort, solver = draw_cohort(setting, 0), setting.algorithm.solver
    rows = first.expand(len(cohort), -1).clone()
    if width:
        calls = PersonalCalls(case, context, params, solver, shared)
        start = calls.models(cohort, rows)
        same = close(start, params.expand_as(start), case.tolerance)
        case.hold(same, "a client that has not worked yet has the shared model", (start - params).abs().max())
        params = params + 0.05 * torch.linspace(-1, 1, dimension, dtype=params.dtype, device=params.device)  # w has moved
        calls = replace(calls, params=params)
        rows, shared = calls.work(cohort, rows)
    PersonalCalls(case, context, params, solver, shared).models(cohort, rows)
    updates = read(PersonalTraits, method).updates
    if updates is not None:
        with unchanged(method, "updates", params=params, rows=rows, cohort=cohort):
            sent, repeated = (updates(context, params, cohort, rows, solver) for _ in range(2))
        case.hold(sent.shape == (len(cohort), dimension), "each client sends an update of D numbers", tuple(sent.shape))
        case.hold(is_finite(sent), "the updates that clients send are finite", sent)
        case.hold(torch.equal(sent, repeated), "updates repeat")


@dataclass(frozen=True, eq=False)
class PersonalCalls:
    """Calls of a method's `work` and `models` with the laws that hold for each call."""

    case: PersonalCase
    context: PersonalContext
    params: Tensor
    solver: LocalSolver
    shared: Any

    def work(self, cohort: Cohort, rows: Tensor) -> tuple[Tensor, Any]:
        """The rows after the work of a cohort, and the next shared state."""
        traits = read(PersonalTraits, self.case.method)
        width = self.case.method.width(len(self.params))
        after: tuple[Tensor, Any] = self._called("work", cohort, rows, width, lambda result: result[0], not traits.sums_models)
        return after

    def models(self, cohort: Cohort, rows: Tensor) -> Tensor:
        """The models of a cohort."""
        models: Tensor = self._called("models", cohort, rows, len(self.params), lambda result: result, True)
        return models

    def _called(
        self,
        name: Literal["work", "models"],
        cohort: Cohort,
        rows: Tensor,
        width: int,
        by_client: Callable[[Any], Tensor],
        alone_as_together: bool,
    ) -> Any:
        """The result of a call, (K, width) finite numbers `by_client`; another call and one per client alone give the same."""
        call = self.case.method.work if name == "work" else self.case.method.models
        given = {"params": self.params, "rows": rows, "shared": self.shared, "cohort": cohort}
        with unchanged(self.case.method, name, **given):
            result, repeated = (call(self.context, self.params, cohort, rows, self.solver, self.shared) for _ in range(2))
        self.case.hold(equal_values(result, repeated), f"a second call of {name} gives the same")
        values = by_client(result)
        self.case.hold(values.shape == (len(cohort), width), f"{name} gives each client {width} numbers", tuple(values.shape))
        self.case.hold(is_finite(values), f"{name} gives finite numbers", values)
        for k in range(len(cohort)) if alone_as_together else ():
            place = torch.tensor([k])
            alone = by_client(
                call(self.context, self.params, cohort.take(place), rows[place].clone(), self.solver, self.shared)
            )
            difference = (alone - values[place]).abs().max() if alone.numel() else 0.0
            same = close(alone, values[place], self.case.tolerance)
            self.case.hold(same, f"{name} of a client does not depend on who else is in the cohort", difference)
        return result


# ------------------------------------------------------------------------------------------------------------- whole runs


def _check_runs(case: PersonalCase) -> None:
    """The shared model beside a run without the method; clients that never took part; a run that is resumed."""
    setting, state = _run(case, case.method)
    _, plain = _run(case, None)
    if read(PersonalTraits, case.method).updates is None:
        same, largest = torch.equal(state.params, plain.params), (state.params - plain.params).abs().max()
        case.hold(same, "the shared model is that of the same run without the method", largest)
    models = _all_models(setting, state)
    if _personal(setting).keeps_rows:
        took_part = torch.cat([draw_cohort(setting, index).clients for index in range(ROUNDS)])
        never = torch.ones(len(models), dtype=torch.bool)
        never[took_part] = False
        served = models[never.to(models.device)]
        same = torch.equal(served, state.params.expand_as(served))
        case.hold(same, "a client that never took part is served the shared model", never.nonzero().flatten().tolist())
    resumed, later = _run(case, case.method, resumed=True)
    same = torch.equal(later.params, state.params) and torch.equal(_all_models(resumed, later), models)
    case.hold(same, "a run that is resumed from a checkpoint ends with the same models")


def _run(case: PersonalCase, method: Personalisation | None, *, resumed: bool = False) -> tuple[Setting, ServerState]:
    """All rounds; with `resumed` one more than saved is run and dropped, and a new run goes on from what was saved."""
    with tempfile.TemporaryDirectory(prefix="equipoise-", ignore_cleanup_errors=True) as folder:
        path = Path(folder) / "rows.npy"
        setting = case.set_up(method)
        state = setting.begin(path)
        while state.round < ROUNDS:
            if resumed and state.round == SAVED_AFTER:
                state = _saved(setting, state)
                _next(setting, state)
                setting = case.set_up(method)
                _personal(setting).resume(setting.first_params, state.personal, path)
                resumed = False
            state = _next(setting, state)
        return setting, state


def _next(setting: Setting, state: ServerState) -> ServerState:
    (outcome,) = Rounds([setting])([state])
    if isinstance(outcome, Diverged):
        raise outcome
    return outcome[0]


def _saved(setting: Setting, state: ServerState) -> ServerState:
    """The state as a checkpoint gives it back; the rows of clients are on the disk."""
    personal, tensors = _personal(setting), dict[str, Tensor]()
    personal.flush()
    saved = {name: packed(value, tensors, name) for name, value in vars(state).items()}
    personal.on_saved(state.personal)
    return ServerState(**{name: unpacked(value, tensors, state.params.device) for name, value in saved.items()})


def _personal(setting: Setting) -> PersonalWork:
    assert setting.personal is not None  # noqa: S101 — all callers set up a run with a method
    return setting.personal


def _all_models(setting: Setting, state: ServerState) -> Tensor:
    everyone = torch.arange(len(setting.data.train))
    return _personal(setting).models(state.personal, state.params, everyone, state.round)
