"""What a round reports: the mean loss and the tail loss of its clients, who took part, and whose update was left out."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

import numpy as np
import torch

from equipoise.core.numbers import Numbers, numbers
from equipoise.data.clients import ClientSet
from equipoise.runs.crowded_tail import bins_of
from equipoise.types import LocalWork, RoundReport

if TYPE_CHECKING:
    from equipoise.round import Plan
    from equipoise.runs.setup import Setting

TAIL = 0.1  # the share of clients in a report's tail loss
_NOTHING = (torch.zeros(0), torch.zeros(0))


def report_of(setting: Setting, plan: Plan, began: float, work: LocalWork | None = None, *, runs: int = 1) -> RoundReport:
    """The report of a round, by the losses of the cohort if the risk asked for them, else by the losses seen during local work.

    The round began at `began`. Where several `runs` share it, each reports its part of the time so far.
    """
    at_work = _NOTHING if work is None else (work.losses, plan.weights)
    shown, share = map(numbers, at_work if plan.losses is None else (plan.losses, plan.cohort.weights))
    if not math.isfinite(shown.sum()):  # a client without a step saw no loss; one that is left out may have an infinite one
        known = np.isfinite(shown)
        shown, share = shown[known], share[known]
    if not share.any():  # of a buffer whose clients all found the weight 0
        shown, share = shown[:0], share[:0]
    share = share / share.sum()
    mean, tail = (float(share @ shown), worst_mean(shown, share, TAIL)) if len(shown) else (math.nan, math.nan)
    return RoundReport(
        round=plan.cohort.round, loss=mean, tail_loss=tail, loss_from="start" if plan.losses is not None else "work",
        risk=float(plan.risk.value) if plan.losses is not None else None, cohort=len(plan.cohort), trained=len(plan.workers),
        seconds=(time.perf_counter() - began) / runs, dropped=plan.dropped, run=setting.name,
        tail_share=share_in_tail(setting, plan),
        clients=setting.data.train.ids_at(plan.cohort.clients) if setting.protection.in_the_open else None,
    )  # fmt: skip


def share_in_tail(setting: Setting, plan: Plan) -> float | None:
    """The share of the cohort's clients in the tail, where bins of losses find it; None elsewhere.

    Over a network, under privacy, the server knows it only from the sums that it has: then these say it.
    """
    if plan.losses is None or not len(plan.cohort) or bins_of(setting.algorithm) is None:
        return None
    if setting.engine_traits.network is not None and not setting.protection.in_the_open:
        return None
    return float((plan.risk.weights > 0).double().mean())


def rejected_clients(plan: Plan, work: LocalWork | None, clients: ClientSet) -> tuple[str, ...]:
    """The ids of the clients whose update was left out."""
    if work is None or work.arrived.all():
        return ()
    return tuple(clients.ids[i] for i in plan.workers.clients[torch.from_numpy(~work.arrived)].tolist())


def worst_mean(values: Numbers, share: Numbers, tail: float) -> float:
    """The mean of the largest values up to a mass of `tail`; `share` sums to 1. It is `metrics.worst` in fewer operations."""
    values, share = np.asarray(values), np.asarray(share)
    order = (-values).argsort()
    values, share = values[order], share[order]
    above = share.cumsum()
    last = min(int(above.searchsorted(tail)), len(values) - 1)  # the one that the tail ends in
    rest = tail - float(above[last - 1]) if last else tail
    return (float(share[:last] @ values[:last]) + rest * float(values[last])) / tail
