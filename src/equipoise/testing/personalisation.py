"""The law of personalisation methods: clients get models of their own, and the shared model does not notice."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from equipoise.algorithm import Algorithm
from equipoise.core.abilities import read
from equipoise.data.clients import FederatedData
from equipoise.personal.context import PersonalContext
from equipoise.rounds.drivers import play
from equipoise.runs.carried_rules import withheld_carried
from equipoise.runs.checkpoint import packed, unpacked
from equipoise.runs.setup import EngineChoice, Setting, choose_engine
from equipoise.runs.tried_calls import same_state
from equipoise.solvers import SGD
from equipoise.testing.laws import agree, check_of, hold, is_finite, unchanged
from equipoise.testing.small_run import make_small_task, set_up_quietly
from equipoise.types import Personalisation, PersonalTraits, PersonalWork, ServerState

ROUNDS = 4
SAVED_AFTER = 2  # rounds, when the run that is resumed was saved


@check_of("a personal method", "width", "begin", "work", "models")
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
    yet has the shared model, unless the method `finetunes`. The shared model is that of the same run without the method, bit
    for bit, unless the method has `updates`, which must then be finite; carried values that clients send beside them are none
    that they keep. A run that is resumed from what a checkpoint keeps ends with the same models.

    The method is tried in an `algorithm` (None: local SGD on batches of 5) for a few rounds, on the given model and data or on
    a small softmax model of eight clients.

    `method` is the personalisation that is checked, `model` the torch module.

    >>> import equipoise as eq
    >>> check_personalisation(eq.personal.Ditto())  # nothing is returned: all laws hold
    """
    task, small = make_small_task(seed)
    algorithm = algorithm or Algorithm(solver=SGD(batch_size=5))
    case = PersonalCase(method, algorithm, model or task.module, data or small, engine, tolerance, seed)
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
        algorithm = replace(self.algorithm, personal=method)
        return set_up_quietly(self.model, self.data, algorithm, 3, rounds=ROUNDS, seed=self.seed, engine=self.engine)


# ------------------------------------------------------------------------------------------------------------ call by call


def _check_calls(case: PersonalCase) -> None:
    """`begin`, `work`, `updates` and `models` of a cohort, each called as in a round."""
    setting, method, traits = case.set_up(case.method), case.method, read(PersonalTraits, case.method)
    params, dimension = setting.first_model, setting.task.width
    start = lambda other: choose_engine(case.engine).start(other, case.data)  # noqa: E731
    context = PersonalContext(setting.engine, setting.task, case.data, start)
    cohort, solver, width = setting.draw(0), setting.algorithm.solver, method.width(dimension)

    def call(name: Literal["work", "models"], rows: Tensor, shared: Any) -> Any:
        """The result of a call at `params`; another call, and one per client alone, give the same finite numbers."""
        function: Callable[..., Any] = method.work if name == "work" else method.models
        with unchanged(method, params=params, rows=rows, shared=shared, cohort=cohort):
            result, repeated = (function(context, params, cohort, rows, solver, shared) for _ in range(2))
        hold(same_state(result, repeated), method, "second_call", call=name)
        values, count = (result[0], width) if name == "work" else (result, dimension)
        hold(values.shape == (len(cohort), count), method, "numbers_each", tuple(values.shape), call=name, count=count)
        hold(is_finite(values), method, "finite_call", values, call=name)
        for k in range(len(cohort)) if name == "models" or not traits.sums_models else ():
            place = torch.tensor([k])
            alone = function(context, params, cohort.take(place), rows[place].clone(), solver, shared)
            agree(method, "client_alone", alone[0] if name == "work" else alone, values[place], case.tolerance, call=name)
        return result

    hold(isinstance(width, int) and width >= 0, method, "width", width)
    with unchanged(method, params=params):
        first, shared = method.begin(context, params)
    good = first.shape == (width,) and first.dtype == params.dtype and is_finite(first)
    hold(good, method, "first_row", (tuple(first.shape), width))
    rows = first.expand(len(cohort), -1).clone()
    if width:
        start = call("models", rows, shared)
        if not traits.finetunes:
            agree(method, "not_worked", start, params.expand_as(start), case.tolerance)
        params = params + 0.05 * torch.linspace(-1, 1, dimension, dtype=params.dtype, device=params.device)  # w has moved
        rows, shared = call("work", rows, shared)
    call("models", rows, shared)

    def sent_by(name: str, count: int) -> Tensor | None:
        """What clients send beside their rows, `count` numbers each; None if it is what they send without the method."""
        function: Any = getattr(traits, name)
        with unchanged(method, params=params, rows=rows, cohort=cohort):
            sent, repeated = (function(context, params, cohort, rows, solver) for _ in range(2))
        hold(same_state(sent, repeated), method, "second_call", call=name)
        good = sent is None or sent.shape == (len(cohort), count)
        hold(good, method, "numbers_each", None if sent is None else tuple(sent.shape), call=name, count=count)
        return sent  # type: ignore[no-any-return]

    task = setting.task
    updates = None if traits.updates is None else sent_by("updates", task.layout.dimension)  # carried values go another way
    hold(updates is None or is_finite(updates), method, "finite_call", updates, call="updates")
    if traits.sends_carried is not None and updates is not None:
        sent, kept = sent_by("sends_carried", task.carried.size), withheld_carried(task, setting.algorithm)
        hold((sent is None) == bool(kept.all()), method, "sends_carried")
        own = task.carried.to_moments(task.split(params)[1]).cpu()
        hidden = sent is None or bool((torch.isnan(sent) | (sent == own) | ~kept).all())
        hold(hidden, method, "keeps_carried", sent)


# ------------------------------------------------------------------------------------------------------------- whole runs


def _check_runs(case: PersonalCase) -> None:
    """The shared model beside a run without the method; clients that never took part; a run that is resumed."""
    setting, state = _run(case, case.method)
    _, plain = _run(case, None)
    if read(PersonalTraits, case.method).updates is None:
        agree(case.method, "plain_run", state.params, plain.params)
    models = _all_models(setting, state)
    if _personal(setting).keeps_rows and not read(PersonalTraits, case.method).finetunes:
        took_part = torch.cat([setting.draw(index).clients for index in range(ROUNDS)])
        never = ~torch.isin(torch.arange(len(models)), took_part)
        served = models[never.to(models.device)]
        agree(case.method, "never_took_part", served, state.model.expand_as(served))
    resumed, later = _run(case, case.method, resumed=True)
    same = torch.equal(later.params, state.params) and torch.equal(_all_models(resumed, later), models)
    hold(same, case.method, "resumed")


def _run(case: PersonalCase, method: Personalisation | None, *, resumed: bool = False) -> tuple[Setting, ServerState]:
    """All rounds; with `resumed` one more than saved is run and dropped, and a new run goes on from what was saved."""
    with tempfile.TemporaryDirectory(prefix="equipoise-", ignore_cleanup_errors=True) as folder:
        path = Path(folder) / "rows.npy"
        setting = case.set_up(method)
        state = setting.begin(path)
        while state.round < ROUNDS:
            if resumed and state.round == SAVED_AFTER:
                state = _saved(setting, state)
                play(setting, state)
                setting = case.set_up(method)
                _personal(setting).resume(setting.first_model, state.personal, path)
                resumed = False
            state, _ = play(setting, state)
        return setting, state


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
    return _personal(setting).models(state.personal, state.model, everyone, state.round)
