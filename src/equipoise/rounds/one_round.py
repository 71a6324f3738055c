"""One round of one run: it asks clients by `yield`, and names no feature. Features are stages; who answers is the driver's."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import replace
from inspect import isgenerator
from typing import Any

import numpy as np
import torch

from equipoise.core.numbers import has_weight, numbers
from equipoise.types import Cohort, RoundReport, ServerState
from equipoise.types.round_contracts import Ask, Kept, Round, View, Weights


def asked(hook: str, view: View) -> Generator[Ask, Any, View]:
    """A hook of each stage that has it, in turn: what one gives back is in the view of the next."""
    for stage in view.run.hooks[hook]:
        given = getattr(stage, hook)(view)
        if isgenerator(given):
            given = yield from given
        if isinstance(given, Kept):
            view = replace(view, after={**view.after, stage.name: given.state})
            given = given.value
        if given is not None:
            view = replace(view, **{hook: given})
    return view


def one_round(run: Any, state: ServerState, draw: Callable[[], Cohort]) -> Round:
    """The state after one more round, and its report, to be told later."""
    view = View(run, state, draw(), run.algorithm.solver, params=state.params)
    view = yield from asked("rule", view)
    view = yield from asked("cohort", view)
    view = yield from asked("weights", view)
    view = replace(view, workers=working(view))
    view = yield from asked("workers", view)
    view = replace(view, workers=sharing(view.workers, view.weights))
    view = yield from asked("fold", view)
    view = yield from asked("send", view)
    if view.fold is not None and view.send is not None:
        view = replace(view, answer=view.fold.of(view.send, view.workers.shares))
    elif view.fold is not None and len(view.workers):
        view = replace(view, answer=(yield Ask("update", state.model, view.workers, view.rule, view.fold)))
    view = yield from asked("answer", view)
    view = replace(view, total=None if view.answer is None else view.answer.update)
    view = yield from asked("total", view)
    view = yield from asked("params", view)
    view = yield from asked("keep", view)
    after = replace(state, **{**view.after, "round": state.round + 1, "params": view.params})

    def tell(seconds: float) -> RoundReport:
        counts = {"cohort": len(view.cohort), "trained": len(view.workers)}
        told: dict[str, Any] = {"round": state.round, "seconds": seconds, "run": run.name, **counts}
        for stage in run.hooks["tell"]:
            told |= stage.tell(view)
        return RoundReport(**told)

    return after, tell


def working(view: View) -> Cohort:
    """The clients with a weight: the others are not trained, which is where the tail's speed comes from."""
    chosen = has_weight(numbers(view.weights.each))
    cohort = view.cohort.having(shares=view.weights.each)
    return cohort if chosen.all() else cohort.take(torch.from_numpy(np.flatnonzero(chosen)))


def sharing(workers: Cohort, weights: Weights) -> Cohort:
    """The clients at work with their share of the sum: their weights over what these are divided by."""
    each = numbers(workers.shares)
    return workers.having(shares=torch.from_numpy(each / (each.sum() if weights.over is None else weights.over)))
