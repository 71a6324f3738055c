"""Local work of a chunk of clients: what is asked for, what comes out, and what every path that does it offers."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from equipoise.core import rng
from equipoise.core.task import Task
from equipoise.data.clients import ClientSet, FederatedData
from equipoise.engines.simulator.client_queue import ClientQueue
from equipoise.engines.simulator.local_rule import LocalRule
from equipoise.engines.simulator.precision import FULL, Precision
from equipoise.solvers.batches import BatchCursor, SplitCursor

ONLY_FASTEST = "it is taken only where measuring finds it the fastest"


class Workspace:
    """Memory that is used again and again: fresh megabytes cost page faults, which can take longer than the arithmetic."""

    def __init__(self) -> None:
        self._held: dict[tuple[str, torch.dtype], Tensor] = {}

    def empty(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """An uninitialised tensor, valid until the same name is asked for again."""
        count = math.prod(shape)
        held = self._held.get((name, dtype))
        if held is None or held.numel() < count or held.device != device or held.requires_grad:  # a model wrote to it
            held = self._held[name, dtype] = torch.empty(count, dtype=dtype, device=device)
        return held[:count].view(shape)


@dataclass(frozen=True, eq=False)
class Workplace:
    """What local work in a process is done on: the task and the clients, on a device."""

    task: Task
    data: FederatedData
    clients: ClientSet  # the training clients, on the engine's device
    precision: Precision = FULL
    compiled: bool = True  # whether compiled code may be used

    @property
    def device(self) -> torch.device:
        """Where the clients' examples are."""
        return self.clients.device


class LocalPath(ABC):
    """One implementation of local work. A worker has one object of every path, which may keep memory and measurements.

    Both `supports` methods give the reason why the path does not do some work, in words that a user understands, or None.
    """

    name: ClassVar[str]
    whole_rounds: ClassVar[bool] = False  # it does rounds as a whole, and never a chunk
    batches: ClassVar[bool] = True  # it works on several clients at once
    unpadded: ClassVar[bool] = False  # it can work without padding, and on models with carried values
    measured: ClassVar[bool] = False  # on a GPU it is tried before the first round, against the first path that is not
    sums_each_job_alone: ClassVar[bool] = False  # with one thread no bit of a job's sum depends on other jobs of the chunk
    threaded: ClassVar[bool] = False  # it shares a chunk among threads of its own, so that one process does all the work

    def __init__(self, place: Workplace) -> None:
        self.place = place

    @abstractmethod
    def supports_rule(self, rule: LocalRule) -> str | None:
        """Why not, by model, data, device and rule: asked once for a rule."""

    def supports(self, work: ChunkWork) -> str | None:
        """Why not, by the clients of a chunk: asked for every chunk whose rule is supported."""
        return None

    def run(self, work: ChunkWork) -> ChunkResult | None:
        """Do the work. The updates are valid until the next chunk; None if it turns out that another path must do it."""
        raise NotImplementedError(f"{self.name} does no chunks")

    def decline(self, reason: str) -> None:  # noqa: B027  only those that are measured may have to
        """Do no work from now on."""

    def release(self) -> None:  # noqa: B027  most keep nothing
        """Free what it keeps for the next chunk: another path does the work."""

    def most_clients(self, queue: ClientQueue, chunk_size: int | None, *, sums: bool) -> int | None:
        """How many clients of a queue it takes as one chunk, given the chunk size; `sums`: only sums of updates are wanted."""
        return chunk_size


class Worker:
    """The local work of one process: a workplace, memory, and the paths in the order in which they are asked."""

    def __init__(self, place: Workplace, paths: Sequence[Callable[[Workplace], LocalPath]] = ()) -> None:
        self.place, self.space = place, Workspace()
        self.task, self.data, self.clients = place.task, place.data, place.clients
        self.taken: Counter[str] = Counter()  # chunks of the last call, by the path that did them
        self.summed = 0  # those of them that gave nothing but sums
        self._makers, self.paths = tuple(paths), tuple(make(place) for make in paths)
        self._named = {path.name: path for path in self.paths}
        self._asked: tuple[LocalRule | None, str | None] = (None, None)
        self._candidates: list[LocalPath] = []
        self.unbatchable: str | None = None  # why clients of this task cannot be batched

    def renewed(self) -> Worker:
        """A worker for another process, with memory of its own."""
        other = Worker(self.place, self._makers)
        other.unbatchable = self.unbatchable
        return other

    def why_not(self, path: LocalPath, rule: LocalRule) -> str | None:
        """Why a path does not do work of a rule, in general; None if it does."""
        if self.unbatchable is not None and path.batches:
            return "the model cannot be vectorised over clients (see below)"
        if self.task.mixes and not path.unpadded:
            return "the model uses statistics of each batch, which padding would change"
        return path.supports_rule(rule)

    def path(self, name: str | None) -> LocalPath | None:
        """The path of this name, if there is one."""
        return self._named.get(name) if name is not None else None

    def candidates(self, rule: LocalRule, chosen: str | None) -> list[LocalPath]:
        """The paths that support a rule, in order; one that was chosen by name comes first."""
        if self._asked != (rule, chosen):
            able = [path for path in self.paths if not path.whole_rounds and self.why_not(path, rule) is None]
            self._asked, self._candidates = (rule, chosen), sorted(able, key=lambda path: path.name != chosen)
        return self._candidates

    def train(self, work: ChunkWork) -> ChunkResult:
        """Local work of a chunk by the first path that supports it. Its updates are valid until the worker's next chunk."""
        chunk, models = work.chunk, work.chunk.models
        if int(chunk.steps[0]) == 0:
            nothing = torch.zeros(len(chunk), models.shape[1], dtype=models.dtype, device=models.device)
            unknown = torch.full((len(chunk), 1 + self.task.carried.size), float("nan"), dtype=torch.float64)
            return ChunkResult(chunk, nothing, unknown[:, 0], chunk.rows, unknown[:, 1:])
        if not self.task.scorer.training:
            self.task.scorer.train()
        for path in self.candidates(work.rule, work.chosen):
            if path.supports(work) is None and (result := path.run(work)) is not None:
                self.taken[path.name] += 1
                self.summed += isinstance(result.updates, WeightedSums)
                return result
        raise RuntimeError(f"No path supports the local work of {work.rule.solver!r}.")


@dataclass(frozen=True, eq=False)
class ClippedSum:
    """A sum of updates that are clipped first: Σ_k π_k u_k · min(1, bound/‖u_k‖) with `weights` π (k,)."""

    weights: Tensor
    bound: float


class ChunkWork:
    """Local work of the clients of a chunk."""

    def __init__(
        self, worker: Worker, chunk: ClientQueue, rule: LocalRule, space: Workspace, weights: Tensor | None = None,
        chosen: str | None = None, threads: int = 0, clipped: ClippedSum | None = None,
    ) -> None:  # fmt: skip
        self.worker, self.chunk, self.rule, self.space = worker, chunk, rule, space
        self.weights = weights  # (k,): weighted sums of updates are enough, where that is faster
        self.chosen = chosen  # the path that a measurement or a user has named
        self.threads = threads  # of a path that has its own
        self.clipped = clipped  # this sum is enough, where a path finds it
        self.starts = chunk.starts()
        self.positions = chunk.clients.to(chunk.models.device)  # (k,) in the training set, on the engine's device
        solver, traits = rule.solver, rule.traits
        self.cursor: BatchCursor | SplitCursor  # the examples of each step
        if traits.split is None:
            self.cursor = BatchCursor(chunk.keys, chunk.sizes, solver.batch_size, chunk.steps, traits.repeats)
        else:
            self.cursor = SplitCursor(chunk.keys, chunk.sizes, traits.split, chunk.steps)

    @property
    def batches(self) -> BatchCursor:
        """The examples of each step of a rule that splits no client's examples, such as SGD."""
        if not isinstance(self.cursor, BatchCursor):
            raise TypeError(f"{self.rule.solver!r} splits the examples of a client")
        return self.cursor

    @property
    def first_rows(self) -> Tensor:
        """The row of each client's first example, (k, 1)."""
        return self.worker.clients.starts[self.positions].unsqueeze(1)

    @property
    def mask_keys(self) -> Tensor:
        """The key of every client's masks of dropout at every step, (T, k); repeated gradients of a batch share theirs."""
        steps = torch.arange(int(self.chunk.steps.max()), device=self.chunk.keys.device) // self.rule.traits.repeats
        return rng.step_keys(self.chunk.keys, steps.unsqueeze(1))

    @property
    def largest(self) -> int:
        """The most examples that one of the clients has."""
        return int(self.chunk.sizes.max())

    def new_updates(self) -> Tensor:
        """Memory for the updates, (k, D)."""
        models = self.chunk.models
        return self.space.empty("updates", (len(self.chunk), models.shape[1]), models.dtype, models.device)

    def rows_after(self, updates: Tensor, left_out: int = 0) -> Tensor | None:
        """The rows that clients keep whose gradients were shifted, by their updates (k, D); None if they were not."""
        traits, kept, pull = self.rule.traits, self.chunk.rows, self.starts.pull
        if traits.shift is None or traits.next_rows is None or kept is None:
            return None
        own_prox = None if pull is None else pull.strength
        return traits.next_rows(kept.to(updates), updates, self.chunk.steps - left_out, self.rule.lr, own_prox)

    def result(
        self, updates: ChunkUpdates, seen: Tensor, rows: Tensor | None = None, carried: Tensor | None = None
    ) -> ChunkResult:
        """The result, from the summed batch losses (k,), or the last ones of a rule with a finish; `rows` are kept."""
        count = self.chunk.steps if self.rule.traits.finish is None else 1
        return ChunkResult(self.chunk, updates, seen.cpu() / count, rows, carried)  # NaN for a client without a step

    def other(self, chunk: ClientQueue, rule: LocalRule) -> ChunkWork:
        """Work beside this one, in other memory and by whichever path."""
        return ChunkWork(self.worker, chunk, rule, Workspace())


class CompactUpdates(Protocol):
    """Updates of k clients that are not held as (k, D) numbers."""

    def dense(self, update: Tensor) -> Tensor:
        """The updates (k, D), written to `update`."""

    def weighted_sum(self, rows: slice, weights: Tensor, space: Workspace) -> Tensor:
        """Σ_k π_k u_k over clients of one start, (D,)."""

    def squares(self) -> Tensor:
        """Squared norms, (k,)."""


@dataclass(frozen=True, eq=False)
class WeightedSums:
    """Σ_k π_k u_k of the clients of each start, (M, D), or their `ClippedSum`, and of every client ‖u_k‖² (k,).

    No client's update is kept.
    """

    totals: Tensor
    sq_norms: Tensor


ChunkUpdates = Tensor | CompactUpdates | WeightedSums


@dataclass(frozen=True, eq=False)
class ChunkResult:
    """What the clients of a chunk have done: updates, dense (k, D) or compact, and mean batch losses (k,)."""

    chunk: ClientQueue
    updates: ChunkUpdates
    losses: Tensor
    rows: Tensor | None = None  # (k, width), what clients keep for their solver until their next round
    carried: Tensor | None = None  # (k, C) of a model with carried values, as they are averaged; NaN where none count

    def dense(self, space: Workspace) -> Tensor:
        """The updates (k, D)."""
        if isinstance(self.updates, Tensor):
            return self.updates
        if isinstance(self.updates, WeightedSums):
            raise TypeError("only sums of these updates were kept")
        models = self.chunk.models
        return self.updates.dense(space.empty("updates", (len(self.chunk), models.shape[1]), models.dtype, models.device))

    def squared_norms(self, space: Workspace) -> Tensor:
        """Squared L2 norms of the updates, (k,) float64 on the CPU."""
        if isinstance(self.updates, Tensor):
            return squared_norms(self.updates)
        if isinstance(self.updates, WeightedSums):
            return self.updates.sq_norms
        return _exact_where_extreme(self.updates.squares(), lambda: self.dense(space))


def squared_norms(updates: Tensor) -> Tensor:
    """Squared L2 norms of the rows, (K,) float64 on the CPU."""
    norms: Tensor = torch.linalg.vector_norm(updates, dim=1)  # in float64 it would copy all updates first
    return _exact_where_extreme(norms.double().square(), lambda: updates)


def _exact_where_extreme(squares: Tensor, updates: Callable[[], Tensor]) -> Tensor:
    """Squared norms (K,) in float64 on the CPU, found again in float64 where they are beyond what squares of the type hold."""
    extreme = ~torch.isfinite(squares) | (squares == 0)
    if bool(extreme.any()):
        squares = squares.double()
        squares[extreme] = updates()[extreme].double().square().sum(1)
    return squares.double().cpu()
