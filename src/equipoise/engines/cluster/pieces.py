"""How the work of a phase is cut into pieces, and how the sums of pieces are added up.

Both are pure functions of cohort, sizes, solver and model: neither the number of workers nor their speed plays a part, so that
a run has the same bits on one worker and on a hundred. The sums of pieces are added along one fixed binary tree. A worker
that has all pieces of a subtree adds them up by itself and sends one sum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from equipoise.core.numbers import Numbers

T = TypeVar("T")
Node = tuple[int, int]  # pieces first … last − 1


@dataclass(frozen=True)
class PieceSize:
    """How large a piece is at least, so that it is worth a call: examples × parameters, and clients that work as one batch."""

    cost: float
    clients: int
    most: int = 1024  # pieces of a job


TRAINING = {"cpu": PieceSize(1.2e8, 6), "cuda": PieceSize(4e9, 64)}  # by the kind of device
SCORING = {"cpu": PieceSize(2e8, 8), "cuda": PieceSize(4e10, 64)}
_HEAVY = 2e9  # examples × parameters of one client that is worth a piece of its own


@dataclass(frozen=True, eq=False)
class JobPieces:
    """The clients of one job in the order of their work, and where its pieces begin."""

    order: Tensor | None  # (K,) places in the cohort; None: as they are
    bounds: Numbers  # (P + 1,) of pieces, places in that order
    costs: Numbers  # (P,)

    def __len__(self) -> int:
        return len(self.costs)

    def places(self, first: int, last: int) -> Tensor:
        """The places in the cohort of the clients of pieces first … last − 1."""
        begin, end = int(self.bounds[first]), int(self.bounds[last])
        return torch.arange(begin, end) if self.order is None else self.order[begin:end]

    def lengths(self, first: int, last: int) -> list[int]:
        """Clients in each of these pieces."""
        lengths: list[int] = np.diff(self.bounds[first : last + 1]).tolist()
        return lengths


def cut_job(costs: Numbers, size: PieceSize, *, reorder: bool) -> JobPieces:
    """A job's clients, whose work costs (K,), in pieces of similar cost.

    With `reorder` clients stand by falling cost, so that those of a piece are alike and little is padded.
    """
    order = np.argsort(-costs, kind="stable") if reorder else None
    sums = np.concatenate([[0.0], np.cumsum(costs if order is None else costs[order])])
    count = piece_count(float(sums[-1]), len(costs), size)
    bounds = cut_evenly(sums, count)
    return JobPieces(None if order is None else torch.from_numpy(order), bounds, np.diff(sums[bounds]))


def piece_count(cost: float, clients: int, size: PieceSize) -> int:
    """The number of pieces: a power of two, so that workers find whole subtrees.

    >>> size = PieceSize(4e7, 6)
    >>> piece_count(4.9e8, 100, size), piece_count(1e10, 100, size), piece_count(1e12, 100, size), piece_count(1e3, 100, size)
    (8, 16, 64, 1)
    """
    fewest = 1 if clients and cost / clients >= _HEAVY else size.clients
    most = min(cost / size.cost, clients / fewest, size.most)
    return 1 << max(0, int(most).bit_length() - 1)


def cut_evenly(sums: Numbers, count: int) -> Numbers:
    """Where to cut items with cumulated costs `sums` (K + 1,) into `count` parts of similar cost and at least one item.

    >>> cut_evenly(np.array([0.0, 4, 5, 6, 7, 8]), 2).tolist()
    [0, 1, 5]
    """
    items = len(sums) - 1
    wanted = np.searchsorted(sums, sums[-1] * np.arange(1, count) / count, side="left")
    bounds = [0]
    for number, cut in enumerate(wanted.tolist(), start=1):
        near = cut - 1 if cut and sums[cut] + sums[cut - 1] > 2 * sums[-1] * number / count else cut
        bounds.append(min(max(near, bounds[-1] + 1), items - count + number))
    return np.array([*bounds, items])


def share_out(costs: Numbers, speeds: Sequence[float]) -> list[Node]:
    """Which pieces each worker gets: stretches in turn, by speed (cost per second), empty for some if there are few pieces.

    >>> share_out(np.ones(8), [1.0, 1.0]), share_out(np.ones(8), [3.0, 1.0])
    ([(0, 4), (4, 8)], [(0, 6), (6, 8)])
    """
    sums, total = np.cumsum(costs), float(sum(speeds))
    ends, done = [], 0.0
    for speed in speeds:
        done += speed
        ends.append(int(np.searchsorted(sums - costs / 2, sums[-1] * done / total, side="left")))
    ends[-1] = len(costs)
    return list(zip([0, *ends[:-1]], ends, strict=True))


def split_by_job(first: int, last: int, counts: Sequence[int]) -> list[tuple[int, int, int]]:
    """Pieces first … last − 1 of all jobs, of which job i has counts[i]: (job, its first piece, its last piece + 1).

    >>> split_by_job(1, 6, [2, 2, 4])
    [(0, 1, 2), (1, 0, 2), (2, 0, 2)]
    """
    found, start = [], 0
    for job, count in enumerate(counts):
        begin, end = max(first - start, 0), min(last - start, count)
        if begin < end:
            found.append((job, begin, end))
        start += count
    return found


def middle(node: Node) -> int:
    """Where a node of the tree is cut in two: the first half is the largest power of two below its size."""
    size = node[1] - node[0]
    return int(node[0] + (1 << ((size - 1).bit_length() - 1)))


def whole_nodes(root: Node, first: int, last: int) -> Iterator[Node]:
    """The largest nodes of the tree that lie within pieces first … last − 1.

    >>> list(whole_nodes((0, 8), 3, 8))
    [(3, 4), (4, 8)]
    """
    if first >= root[1] or last <= root[0]:
        return
    if first <= root[0] and root[1] <= last:
        yield root
        return
    cut = middle(root)
    yield from whole_nodes((root[0], cut), first, last)
    yield from whole_nodes((cut, root[1]), first, last)


def add_pieces(node: Node, value: Callable[[int], T], add: Callable[[T, T], T]) -> T:
    """The sum of a node's pieces along the tree; `value` is asked for each piece once, in turn."""
    if node[1] - node[0] == 1:
        return value(node[0])
    cut = middle(node)
    return add(add_pieces((node[0], cut), value, add), add_pieces((cut, node[1]), value, add))


def add_nodes(node: Node, known: Mapping[Node, T], add: Callable[[T, T], T]) -> T:
    """The sum of a node along the tree, of nodes whose sums are known."""
    if node in known:
        return known[node]
    cut = middle(node)
    return add(add_nodes((node[0], cut), known, add), add_nodes((cut, node[1]), known, add))
