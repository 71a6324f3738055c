"""The clients of a round in the order of their work, and in chunks of similar work."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from equipoise.core import rng
from equipoise.data.clients import ClientSet
from equipoise.engines.simulator.local_rule import LocalRule
from equipoise.solvers.batches import TABLE, BatchCursor, cursor_of
from equipoise.types import Cohort, Job, Pull

# Parameters, gradients and batch of a chunk: few enough clients to bound memory.
_CHUNK_BYTES = {"cpu": 64 * 2**20, "cuda": 2 * 2**30}


@dataclass(frozen=True, eq=False)
class StartModels:
    """The models (M, D) that k clients start from, which of them each client has (k,), and what pulls them elsewhere."""

    models: Tensor
    owners: Tensor
    pull: Pull | None = None  # its rows are those of the k clients
    each_its_own: bool = False  # whether there is a model per client
    carried: Tensor | None = None  # (M, C) of the models

    @property
    def shared(self) -> bool:
        """Whether all clients start from one model."""
        return len(self.models) == 1

    def rows(self) -> Tensor:
        """Each client's own copy of its start, (k, D); of a shared one (1, D)."""
        return self.models if self.shared else self.models.index_select(0, self.owners.to(self.models.device))

    def carried_rows(self) -> Tensor | None:
        """Each client's own copy of the carried values of its start, (k, C); None if models have none."""
        return None if self.carried is None else self.carried.index_select(0, self.owners.to(self.carried.device))


@dataclass(frozen=True, eq=False)
class ClientQueue:
    """The clients of all jobs of a round, by falling number of local steps.

    So the clients still at work are always the first of a chunk, and nothing is computed for one that has finished.
    """

    models: Tensor  # (M, D): one per job, or one per client
    owners: Tensor  # (K,) which job
    places: Tensor  # (K,) where in its cohort
    clients: Tensor  # (K,) positions in the training set
    keys: Tensor  # (K,) of their batches, on the engine's device
    sizes: Tensor  # (K,) examples
    steps: Tensor  # (K,)
    own: bool  # whether each client has a model of its own
    pull: Pull | None
    rows: Tensor | None = None  # (K, width), what each client has kept for its solver
    carried: Tensor | None = None  # (M, C), the carried values of the models, if they have any
    shares: Tensor | None = None  # (K,) π_k, for attacks

    @classmethod
    def of(cls, jobs: Sequence[Job], rule: LocalRule, clients: ClientSet, pull: Pull | None = None) -> ClientQueue:
        """The parameters of a job are one model (D,), or one for each of its clients (K, D): then it is the only job."""
        counts = [len(job.cohort) for job in jobs]
        owners = np.repeat(np.arange(len(jobs)), counts)
        places = np.concatenate([np.arange(count) for count in counts])
        positions = torch.cat([job.cohort.clients for job in jobs])
        keys = torch.cat([batch_keys(job.cohort, clients) for job in jobs])
        all_sizes = clients.host_sizes.numpy()
        sizes = all_sizes[positions.numpy()]
        steps = np.concatenate([rule.steps_each(all_sizes[job.cohort.clients.numpy()], job.cohort.effort) for job in jobs])
        # By steps; then by size, so that full batches of a chunk are padded least. Small batches need no padding: there each
        # model's clients stand together instead.
        second = sizes if rule.solver.batch_size is None else owners
        if len(jobs) == 1 and steps.min() == steps.max() and (second is owners or sizes.min() == sizes.max()):
            order = places  # as they come
        else:
            order = (-(steps * (int(second.max()) + 1) + second)).argsort(kind="stable")
        owner, place, size, taken = (torch.from_numpy(values[order]) for values in (owners, places, sizes, steps))
        picked, device, own = torch.from_numpy(order), clients.device, jobs[0].params.dim() == 2
        models = jobs[0].params if own else torch.stack([job.params for job in jobs])
        pull = None if pull is None else _pull_of(pull, picked.to(device))
        kept = [job.cohort.rows for job in jobs if job.cohort.rows is not None]
        rows = torch.cat(kept)[picked].to(device) if kept else None
        known = [job.cohort.shares for job in jobs if job.cohort.shares is not None]
        shares = torch.cat(known)[picked] if len(known) == len(jobs) else None
        keys = keys[picked].to(device)
        return cls(models, owner, place, positions[picked], keys, size, taken, own, pull, rows, shares=shares)

    def __len__(self) -> int:
        return len(self.clients)

    def take(self, part: slice) -> ClientQueue:
        """A stretch of the clients."""
        pull = None if self.pull is None else _pull_of(self.pull, part)
        names = ("owners", "places", "clients", "keys", "sizes", "steps")
        each: dict[str, Any] = {name: getattr(self, name)[part] for name in names}
        rows, shares = (None if values is None else values[part] for values in (self.rows, self.shares))
        return replace(self, **each, pull=pull, rows=rows, shares=shares)

    def share(self, count: int) -> list[ClientQueue]:
        """The queue dealt out to `count` processes: every count-th client each."""
        return [self.take(slice(i, None, count)) for i in range(count)] if count > 1 else [self]

    def starts(self) -> StartModels:
        """The models that the clients start from."""
        owners = self.places if self.own else self.owners
        return StartModels(self.models, owners, self.pull, each_its_own=self.own, carried=self.carried)


def most_clients(parameter_bytes: int, largest: int, clients: ClientSet, rule: LocalRule) -> int:
    """How many clients with up to `largest` examples fit into a chunk: their parameters, gradients, batch and order."""
    batch = largest if rule.whole_clients else min(rule.solver.batch_size or 1, largest)
    each = 3 * parameter_bytes + 4 * batch * clients.features + 24 * largest
    return max(1, _CHUNK_BYTES.get(clients.device.type, 2**26) // each)


def chunks_of(
    queue: ClientQueue, clients: ClientSet, rule: LocalRule, chunk_size: int | None, *, at_once: bool = False
) -> Iterator[ClientQueue]:
    """The queue in chunks of at most `chunk_size`, as equal as can be; None: as large as memory allows.

    With `at_once`, a chunk of several clients has few enough examples for all its batches to be made at once.
    """
    start = 0
    while start < len(queue):
        left = len(queue) - start
        largest = int(queue.sizes[start:].max())  # of all that are left: stragglers may be large and have few steps
        most = chunk_size or most_clients(queue.models[0].nbytes, largest, clients, rule)
        if at_once:  # clients come by falling number of steps
            seen = int(queue.steps[start]) * min(rule.solver.batch_size or largest, largest)
            most = max(1, min(most, TABLE // max(1, largest, seen)))
        size = -(-left // -(-left // most))
        yield queue.take(slice(start, start + size))
        start += size


def whole_jobs(jobs: Sequence[Job], most: int) -> Iterator[list[Job]]:
    """The jobs in turn, several together as long as they have at most `most` clients in all."""
    together: list[Job] = []
    for job in jobs:
        if together and sum(len(each.cohort) for each in (*together, job)) > most:
            yield together
            together = []
        together.append(job)
    if together:
        yield together


def padding_share(chunks: Iterable[ClientQueue], rule: LocalRule) -> float:
    """The share of examples that are computed for nothing: a step of a chunk is as wide as the widest batch in it."""
    computed = useful = 0
    for chunk in chunks:
        if len(chunk) and int(chunk.steps[0]) > 0:
            cursor = cursor_of(rule.solver, chunk.keys, chunk.sizes, chunk.steps)
            if isinstance(cursor, BatchCursor):
                working = torch.arange(len(cursor.active)).unsqueeze(1) < chunk.steps
                computed += sum(k * b for k, b in zip(cursor.active, cursor.widest, strict=True))
                useful += int(cursor.counts[working].sum())
    return 1 - useful / computed if computed else 0.0


def batch_keys(cohort: Cohort, clients: ClientSet) -> Tensor:
    """The keys of the cohort's batches in its round, (K,), on the CPU."""
    stream = rng.stream_key(cohort.seed, "batches", cohort.round)
    return rng.client_keys(stream, clients.host_keys[cohort.clients])


def owner_stretches(owners: Tensor) -> list[tuple[int, slice]]:
    """The stretches of equal owners: (owner, rows). Clients are sorted by work, so each owner has few of them.

    >>> owner_stretches(torch.tensor([0, 0, 2, 2, 2, 1]))
    [(0, slice(0, 2, None)), (2, slice(2, 5, None)), (1, slice(5, 6, None))]
    """
    values, counts = torch.unique_consecutive(owners, return_counts=True)
    ends = counts.cumsum(0)
    return [(v, slice(e - c, e)) for v, c, e in zip(values.tolist(), counts.tolist(), ends.tolist(), strict=True)]


def owner_rows(owners: Tensor) -> list[tuple[int, slice | Tensor]]:
    """The rows of each owner: a stretch, or where they are not one their numbers.

    >>> owner_rows(torch.tensor([0, 0, 2, 1, 2]))
    [(0, slice(0, 2, None)), (1, slice(3, 4, None)), (2, tensor([2, 4]))]
    """
    stretches: dict[int, list[slice]] = {}
    for owner, rows in owner_stretches(owners):
        stretches.setdefault(owner, []).append(rows)
    several = {owner: (owners == owner).nonzero().flatten() for owner, slices in stretches.items() if len(slices) > 1}
    return [(owner, several.get(owner, slices[0])) for owner, slices in sorted(stretches.items())]


def _pull_of(pull: Pull, here: Tensor | slice) -> Pull:
    """The pull on some of the clients."""
    return Pull(pull.anchor if pull.anchor.dim() == 1 else pull.anchor[here], pull.strength[here])


def pull_on_parameters(pull: Pull, dimension: int) -> Pull:
    """The pull on the first D numbers of models alone: nothing pulls at the carried values that follow."""
    strength = pull.strength if pull.strength.dim() == 1 else pull.strength[:, :dimension]
    return Pull(pull.anchor[..., :dimension], strength)
