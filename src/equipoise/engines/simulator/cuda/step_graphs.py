"""One local step of many clients as a CUDA graph: captured once for a number of clients and a batch, replayed at every step.

A step of a small network is hundreds of short kernels, and starting them one by one takes longer than running them. All that
changes from step to step lies on the device: a table of the examples of every step, the rates, and the number of the step. If
rounds have the same shape again and again, one graph does all of a round's work: tables, steps and the sum of updates.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor

from equipoise.core.update_checks import ABSURD
from equipoise.engines.simulator.batched_steps import Gradients, stacked_gradients
from equipoise.engines.simulator.client_queue import StartModels, batch_keys
from equipoise.engines.simulator.convnet_path import fastest_gradients
from equipoise.engines.simulator.cuda.adjusted_steps import StepKind
from equipoise.engines.simulator.cuda.graph_capacity import power_of_two, rounded_batch, rounded_up
from equipoise.engines.simulator.cuda.step_buffers import SMALL, ChunkPlan, StepBuffers, StepShape, working_clients
from equipoise.engines.simulator.linear_blocks import why_not_linear
from equipoise.engines.simulator.local_rule import LocalRule
from equipoise.engines.simulator.local_work import ChunkResult, ChunkWork, LocalPath, WeightedSums, Workplace
from equipoise.engines.simulator.precision import first_line
from equipoise.errors import notify
from equipoise.solvers.batches import BatchCursor
from equipoise.types import Job, LocalSolver, LocalWork, SgdRule

_GRAPHS = 512  # at most; then all are captured anew
_TABLE = 2**23  # numbers in the tables of all steps, of steps that only the largest client takes
_KINDS = 4  # of steps that have buffers at once, if models are not large
_LARGE = 2**28  # parameters of all clients of a chunk: there one kind of steps has buffers at a time


class StepGraphs(LocalPath):
    """SGD of clients that start from one model, a few, or each from its own, on a GPU. Works, uncaptured, on a CPU for tests.

    Gradients may be pulled, shifted or scaled (Ditto, SCAFFOLD, frozen parts), and a solver may take its steps by turns.
    """

    name = "step graphs"

    def __init__(self, place: Workplace) -> None:
        super().__init__(place)
        self.buffers: StepBuffers | None = None  # of the last chunk
        self._held: dict[tuple[bool, SgdRule, StepKind], StepBuffers] = {}
        self.obstacle = _obstacle(place)
        self._last: tuple[ChunkPlan, BatchCursor] | None = None
        self._solver: LocalSolver | None = None  # of the last chunk

    @property
    def computed(self) -> int:
        """Examples in the last chunk, padding included."""
        return 0 if self._last is None else sum(clients * batch for clients, batch in self._last[0].steps)

    @property
    def useful(self) -> int:
        """Examples in the last chunk without padding."""
        return 0 if self._last is None else int(self._last[1].counts[working_clients(self._last[1])].sum())

    @cached_property
    def drops(self) -> bool:
        """Whether the model draws masks of dropout."""
        return self.place.task.drops(self.place.data)

    @cached_property
    def gradients(self) -> Gradients:
        """The gradient that is captured."""
        if self.place.clients.why_not_plain is not None:
            return stacked_gradients
        return fastest_gradients(self.place.task, self.place.device, self.place.precision)

    def supports_rule(self, rule: LocalRule) -> str | None:
        """Steps of SGD, also by adjusted gradients, and steps by turns; of linear models and large batches the plain ones."""
        if self.obstacle is not None:
            return self.obstacle
        if rule.own_models or not StepKind.of(rule).is_plain:
            if why_not_linear(self.place.task) is None:
                return "linear models of clients have a path of their own"
            if rule.whole_clients:
                return "a step sees all examples of a client, and models are the clients' own"
        if rule.traits.by_turns and self.drops:
            return "steps by turns would need the masks of dropout of their first turn"
        return None if rule.traits.by_turns or rule.traits.adjusted_sgd is not None else rule.why_not_sgd()

    def supports(self, work: ChunkWork) -> str | None:
        """All batches must fit into one table. A model that could not be captured is not tried again."""
        return self.obstacle or (None if work.batches.at_once else "the batches of all steps are too many for one table")

    def run(self, work: ChunkWork) -> ChunkResult | None:
        """Replay a step as often as the clients take one; None if the model cannot be captured."""
        cursor, count = work.batches, len(work.chunk)
        buffers = self._buffers(work.rule, cursor, count, alone=work.starts.shared)
        plan = buffers.plan(cursor, whole_batches=work.rule.solver.batch_size is None)
        plain = buffers.shape.kind.is_plain
        weights = work.weights if work.starts.shared and plain else None
        try:
            first = work.first_rows.squeeze(1)
            buffers.load(work.starts, cursor.steps, cursor.sizes, cursor.keys, first, work.rule.lr, weights)
            buffers.load_kind(work)
            result = buffers.whole_chunk(plan) if buffers.turns is None else None
            if result is None:
                buffers.begin(plan, cursor)
                turns = work.rule.traits.repeats
                for number, (clients, batch) in enumerate(plan.steps):
                    buffers.step(clients, batch, number % turns)
                result = buffers.end(plan)
        except RuntimeError as failure:  # a forward pass that asks the device, say
            if self.obstacle is not None or isinstance(failure, torch.cuda.OutOfMemoryError):
                raise
            self.obstacle = f"steps cannot be captured as a CUDA graph ({first_line(failure)})"
            self.release()
            notify(f"Rounds of this model are slower: {self.obstacle}.")
            torch.cuda.synchronize()
            return None
        self._last, self._solver = (plan, cursor), work.rule.solver
        sq_norms, seen = result.answer()
        if weights is not None and bool((torch.isfinite(sq_norms) & (sq_norms > 0)).all()):
            return work.result(WeightedSums(result.total.clone().unsqueeze(0), sq_norms), seen)
        updates = work.new_updates().copy_(result.updates[:count])
        return work.result(updates, seen, work.rows_after(updates) if buffers.turns is None else buffers.turn_rows(work))

    @cached_property
    def alike(self) -> bool:
        """Whether all clients have as many examples, so that cohorts of one size are the same work."""
        sizes = self.place.clients.host_sizes
        return bool((sizes == sizes[0]).all()) and not self.place.data.malicious

    def sum_again(self, job: Job, rule: LocalRule) -> LocalWork | None:
        """The weighted sum of a cohort's updates by the graph of the last chunk, if that was the same work but for its
        numbers; else None. Nothing is sorted, cut into chunks or looked up again, which small models would feel.
        """
        buffers, last, cohort = self.buffers, self._last, job.cohort
        if buffers is None or last is None or not self.alike or rule.solver is not self._solver or job.params.dim() != 1:
            return None
        plan, cursor = last
        known = plan in buffers.whole and plan.clients == len(cohort) and buffers.shape.one_model
        plain = not rule.own_models and StepKind.of(rule).is_plain and buffers.shape.kind.is_plain
        if not known or not plain or cohort.effort is not None or cohort.rows is not None:
            return None
        keys, first = batch_keys(cohort, self.place.clients), self._first_rows(cohort.clients)
        buffers.load(StartModels(job.params.unsqueeze(0), cohort.clients), cursor.steps, cursor.sizes, keys, first, rule.lr,
                     job.weights)  # fmt: skip
        result = buffers.whole_chunk(plan)
        if result is None:
            return None
        total = result.total.clone()  # asked for while the device works
        sq_norms, seen = result.answer()
        numbers, losses = sq_norms.numpy(), seen.numpy() / cursor.steps.numpy()
        # NaN compares as False. To be left out, or a square that float32 does not hold: rare, and done in the ordinary way.
        if not (numbers.min() > 0 and numbers.max() <= ABSURD**2 and math.isfinite(losses.sum())):
            return None
        return LocalWork(total, sq_norms, torch.from_numpy(losses))

    @cached_property
    def _host_starts(self) -> Tensor | None:
        """The first row of every client, on the CPU; None if rows move, as those of cohorts that are read one at a time do."""
        clients = self.place.clients
        return clients.starts.cpu() if clients.in_turn else None

    def _first_rows(self, clients: Tensor) -> Tensor:
        """The row of the first example of each client at these positions, on the CPU where it is known there."""
        if self._host_starts is not None:
            return self._host_starts[clients]
        return self.place.clients.starts[clients.to(self.place.device, non_blocking=True)]

    def release(self) -> None:
        """Free memory and graphs."""
        self.buffers = None
        self._held.clear()

    def _buffers(self, rule: LocalRule, cursor: BatchCursor, clients: int, *, alone: bool) -> StepBuffers:
        """Buffers that hold this work, and larger work that is to be expected: other buffers need other graphs."""
        solver, batch, steps = rule.solver, rounded_batch(cursor.width), len(cursor.active)
        if solver.batch_size is not None:
            largest = int(self.place.clients.host_sizes.max())
            batch, most = min(solver.batch_size, largest), max(steps, solver.local_steps(largest))
            steps = most if most * clients * batch <= _TABLE else steps
        capacity = 2 * power_of_two(clients)
        if capacity * self.place.task.layout.dimension > SMALL:
            capacity = rounded_up(clients)
        sgd, kind = rule.traits.sgd or rule.traits.adjusted_sgd or SgdRule(0.0, 0.0, 0.0), StepKind.of(rule)
        shape = StepShape(capacity, power_of_two(steps), batch, alone, sgd, kind)
        held = self._held.get((alone, sgd, kind))
        if held is not None:
            sizes = {name: max(getattr(shape, name), getattr(held.shape, name)) for name in ("clients", "steps", "batch")}
            shape = replace(shape, **sizes)
            if held.shape == shape and len(held.graphs) < _GRAPHS:
                self.buffers = held
                return held
        few = len(self._held) >= _KINDS or shape.clients * self.place.task.layout.dimension > _LARGE
        self.buffers = held = None  # their memory goes first
        if few:
            self._held.clear()
        self._held.pop((alone, sgd, kind), None)
        self.buffers = self._held[alone, sgd, kind] = StepBuffers(self.place, shape, self.gradients, drops=self.drops)
        return self.buffers


def _obstacle(place: Workplace) -> str | None:
    """Why steps on a workplace cannot be captured, whatever they are; None if they can."""
    if place.device.type != "cuda":
        return "it needs a CUDA device"
    return "sequences of different lengths need batches of different shapes" if place.clients.has_sequences else None
