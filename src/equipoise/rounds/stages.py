"""Makes the stages of a run of the parts of its algorithm: the one place that asks parts what they offer to a round."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from equipoise.aggregators.stages import Linear, Normalised, Robust
from equipoise.averaging import Last
from equipoise.core.abilities import read, solver_traits
from equipoise.personal.stages import OwnLosses, OwnModels
from equipoise.risk.stages import Losses, OpenRisk, ScaledStep, TailShare
from equipoise.rounds.clock_stages import Stale, WeightsAtStart
from equipoise.rounds.server_stages import Averaged, Buffers, Finite, Seen, ServerStep
from equipoise.runs.crowded_tail import bins_of
from equipoise.runs.tried_releases import Watched
from equipoise.solvers.stages import Correction, CountedSteps, KeptRows, PreparedRule, Stragglers
from equipoise.types import AggregatorTraits
from equipoise.types.round_contracts import PLACES, Stage

HOOKS = ("rule", "cohort", "weights", "workers", "fold", "send", "answer", "total", "params", "keep", "commit", "tell")


def stages_of(run: Any) -> Iterator[Stage]:
    """The stages of a run, in the order in which their hooks are called."""
    algorithm, traits, protected = run.algorithm, run.algorithm.traits, run.protection.stages(run)
    solver, aggregator, is_open = traits.solver, algorithm.aggregator, not protected
    if solver.prepare is not None:
        yield PreparedRule(solver, always=run.protection.without_clients, hidden=not is_open)
    yield Seen()
    buffered = traits.sampler.buffered
    if traits.needs_losses and buffered is None:
        own = run.personal is not None and traits.personal.losses is not None
        yield OwnLosses(run.personal) if own else Losses()
        if bins_of(algorithm) is not None and (is_open or run.engine_traits.network is None):
            yield TailShare()
    yield from run.engine_traits.stages
    if is_open:
        yield Finite()
    inner = solver_traits(solver.solver) if solver.prepare is not None else solver
    if inner.efforts is not None and inner.straggler_share > 0:
        yield Stragglers()
    if is_open:
        at_once = OpenRisk(algorithm.risk, traits.risk)
        yield at_once if buffered is None else WeightsAtStart(traits.risk, buffered.loss_bound)
        rule, offers = traits.aggregator.normalises or aggregator, traits.aggregator
        yield Linear(rule, offers.weighted_sum) if aggregator.linear else Robust(rule, offers.needs_keys)
    if protected and run.engine_traits.network is None:
        yield Watched(run.engine.task, algorithm)
    yield from protected
    if buffered is not None and not traits.privacy.sums_alone:
        yield Stale(is_open and aggregator.linear)
    if traits.counts_steps:
        yield CountedSteps(solver.plain_mean)
    if traits.aggregator.normalises is not None:
        inside = read(AggregatorTraits, traits.aggregator.normalises)
        streams = is_open and inside.weighted_sum and not run.task.carried.names
        yield Normalised(traits.aggregator.steps, streams)
    if run.personal is not None:
        yield OwnModels(run.personal)
    if run.kept is not None:
        yield KeptRows(run.kept, solver.own_prox)
    if is_open and traits.risk.server_step is not None:
        yield ScaledStep(traits.risk, aggregator.linear)
    if solver.after_total is not None:
        by_rows = is_open and traits.aggregator.weighted_sum
        yield Correction(solver, run.kept, by_rows, hidden=not is_open, private=algorithm.private)
    yield ServerStep(algorithm.server, aggregator, traits.server.linear_rate)
    if run.task.carried.names:
        withholds = traits.personal.withholds_carried
        none = torch.zeros(run.task.carried.size, dtype=torch.bool)
        yield Buffers(run.task.carried, none if withholds is None else withholds(run.task).cpu())
    if not isinstance(algorithm.reported, Last):
        yield Averaged(run.averaged, traits.averaging.pure)


def hooks_of(stages: Sequence[Stage]) -> Mapping[str, tuple[Stage, ...]]:
    """For each hook the stages that have it, in order; totals by their place on the server."""
    hooks = {hook: tuple(s for s in stages if getattr(type(s), hook) is not getattr(Stage, hook)) for hook in HOOKS}
    return hooks | {"total": tuple(sorted(hooks["total"], key=lambda stage: PLACES.index(stage.place)))}
