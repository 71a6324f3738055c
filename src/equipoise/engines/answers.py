"""How an engine answers what rounds ask: equal questions of several runs become one call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from equipoise.core.equality import same_part
from equipoise.core.grouping import grouped
from equipoise.errors import Diverged
from equipoise.types import Engine, Job, LocalWork
from equipoise.types.round_contracts import Ask


def answer_all(engine: Engine, asks: Sequence[Ask]) -> list[Any]:
    """The answers to questions that rounds ask at the same time."""
    answers: dict[int, Any] = {}
    losses = [i for i, ask in enumerate(asks) if ask.what == "loss"]
    answers |= zip(losses, losses_of(engine, [asks[i] for i in losses]), strict=True)
    updates = [i for i, ask in enumerate(asks) if ask.what == "update"]
    answers |= zip(updates, updates_of(engine, [asks[i] for i in updates]), strict=True)
    return [answers[i] if i in answers else _own(ask) for i, ask in enumerate(asks)]


def _own(ask: Ask) -> Any:
    """What a function that clients know gives; work that diverges is the end of one run, and no error of the others."""
    try:
        return ask.rule()
    except Diverged as failure:
        return failure


def losses_of(engine: Engine, asks: Sequence[Ask]) -> list[Tensor]:
    """Losses (K,) of each question. Models asked of one cohort are scored in one pass over its examples."""
    found: dict[int, Tensor] = {}
    plain = [i for i, ask in enumerate(asks) if ask.rule is None]
    shared = plain if len(plain) > 1 else []
    for i in (i for i in range(len(asks)) if i not in shared):
        found[i] = engine.losses(asks[i].model, asks[i].clients, asks[i].rule)
    cohorts = {i: asks[i].clients.clients for i in shared}
    groups = grouped(shared, lambda i, j: cohorts[i] is cohorts[j] or torch.equal(cohorts[i], cohorts[j]))
    for same in (group for group in groups if len(group) > 1):
        found |= zip(same, engine.losses_of([asks[i].model for i in same], asks[same[0]].clients), strict=True)
    alone = [group[0] for group in groups if len(group) == 1]
    jobs = [Job(asks[i].model, asks[i].clients, asks[i].clients.weights) for i in alone]
    found |= zip(alone, engine.losses_each(jobs) if jobs else [], strict=True)
    return [found[i] for i in range(len(asks))]


def updates_of(engine: Engine, asks: Sequence[Ask]) -> list[LocalWork]:
    """Local work of each question, folded as it says. Sums under one rule and one fold are one call."""
    found: dict[int, LocalWork] = {}
    summed = [i for i, ask in enumerate(asks) if len(asks) > 1 and ask.fold.by is not None and not ask.fold.maps]
    groups = grouped(summed, lambda i, j: same_part(asks[i].rule, asks[j].rule) and same_part(asks[i].fold.by, asks[j].fold.by))
    for group in (group for group in groups if len(group) > 1):
        jobs = [Job(asks[i].model, asks[i].clients, asks[i].clients.shares) for i in group]
        found |= zip(group, engine.summed_updates(jobs, asks[group[0]].rule, asks[group[0]].fold.by), strict=True)
    return [found[i] if i in found else folded(engine, ask) for i, ask in enumerate(asks)]


def folded(engine: Engine, ask: Ask) -> LocalWork:
    """The answer to one question for updates: streamed into a sum where its fold allows it."""
    fold, weights, scales = ask.fold, ask.clients.shares, ask.fold.scales
    if fold.by is not None and not fold.maps:
        return engine.summed_update(ask.model, ask.clients, ask.rule, weights, fold.by)
    if fold.by is not None and all(each.numbers.get("streams") for each in fold.maps):
        work = engine.summed_update(ask.model, ask.clients, ask.rule, weights * scales, fold.by)
        return replace(work, sq_norms=work.sq_norms * scales.square())
    return fold.of(engine.updates(ask.model, ask.clients, ask.rule), weights)
