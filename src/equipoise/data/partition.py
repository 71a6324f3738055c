"""Ways to deal examples out to clients: pure functions from labels to one tensor of row numbers per client.

Every partitioner is called `partitioner(labels, clients, *, seed, …)`, uses each example exactly once, and leaves no client
empty unless `allow_empty=True` is asked for. Give options with `functools.partial(dirichlet, concentration=0.1)`.

>>> labels = torch.tensor([0, 0, 0, 1, 1, 1])
>>> [sorted(rows.tolist()) for rows in by_classes(labels, 2, classes_per_client=1)]
[[0, 1, 2], [3, 4, 5]]
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from equipoise.core.rng import generator
from equipoise.core.trees import leaves, map_tree, named_leaves
from equipoise.data.clients.client_set import ClientSet, prefix
from equipoise.data.clients.leaves import first_bad_row, offsets_of
from equipoise.errors import InvalidData, InvalidParameter, require, unknown_name

Partitioner = Callable[..., list[Tensor]]
_Indices = NDArray[np.int64]


def _check(labels: Tensor, clients: int, allow_empty: bool) -> _Indices:
    """The labels as an array; labels and numbers of clients that no partitioner can deal out are refused."""
    require(labels.dim() == 1 and len(labels) > 0, "labels", "must be a vector with at least one entry", tuple(labels.shape))
    require(clients >= 1, "clients", "must be at least 1", clients)
    if not allow_empty:
        fix = f"There are {len(labels)} examples. Ask for fewer clients, or allow_empty=True."
        require(clients <= len(labels), "clients", "must be at most the number of examples", clients, fix)
    return np.asarray(labels.cpu().numpy())


def _shares(total: int, weights: NDArray[np.float64]) -> _Indices:
    """Integers that sum to `total`, each within 1 of its share total · w/Σw (method of largest remainders)."""
    exact = total * (weights / weights.sum())
    shares: _Indices = np.floor(exact).astype(np.int64)
    missing = total - int(shares.sum())
    shares[np.argsort(shares - exact, kind="stable")[:missing]] += 1
    return shares


def _deal(order: _Indices, sizes: _Indices) -> list[_Indices]:
    """Rows in this order, dealt out in pieces of these sizes."""
    return np.split(order, np.cumsum(sizes)[:-1])


def _top_up(owned: list[_Indices], least: int) -> list[_Indices]:
    """Move single examples from the largest clients until every client has `least`; at most clients · least moves."""
    moved: list[list[int]] = [[] for _ in owned]
    largest = [(-len(rows), k) for k, rows in enumerate(owned)]
    heapq.heapify(largest)
    for k in range(len(owned)):
        while len(owned[k]) + len(moved[k]) < least:
            _, giver = heapq.heappop(largest)
            # Rows are shuffled, so that the last example is a random one of the giver's.
            moved[k].append(int(owned[giver][-1]))
            owned[giver] = owned[giver][:-1]
            heapq.heappush(largest, (-len(owned[giver]), giver))
    return [np.concatenate([rows, np.array(extra, np.int64)]) for rows, extra in zip(owned, moved, strict=True)]


def _sorted_rows(owned: list[_Indices]) -> list[Tensor]:
    """The rows of each client as a sorted tensor."""
    return [torch.from_numpy(np.sort(rows).astype(np.int64)) for rows in owned]


def iid(labels: Tensor, clients: int, *, seed: int = 0, allow_empty: bool = False) -> list[Tensor]:
    """Equal shares of a random order (to within one example): all clients have the same distribution.

    `labels` (N,) are the examples' classes, `clients` is the number of clients, and `seed` decides the draw. `allow_empty`
    permits clients without examples. Returns the row numbers of each client, a sorted int64 tensor.

    >>> [len(rows) for rows in iid(torch.zeros(10), 3)]
    [4, 3, 3]
    """
    rows = len(_check(labels, clients, allow_empty))
    order = generator(seed, "partition").permutation(rows)
    return _sorted_rows(_deal(order, _shares(rows, np.ones(clients))))


def power_law(
    labels: Tensor, clients: int, *, exponent: float = 1.0, min_examples: int = 1, seed: int = 0, allow_empty: bool = False
) -> list[Tensor]:
    """Sizes ∝ rank^(−exponent), the ranks dealt to clients at random; which examples a client gets is random too.

    Each client first receives `min_examples` (0 with `allow_empty`), and the rest is shared by the power law with `exponent` ≥
    0; 0 gives equal sizes. `labels` (N,) are the examples' classes, `clients` is the number of clients, and `seed` decides the
    draw. Returns the row numbers of each client, a sorted int64 tensor.

    >>> sorted(len(rows) for rows in power_law(torch.zeros(14), 3, exponent=1.0))  # one each; 11 as 1 : 1/2 : 1/3
    [3, 4, 7]
    """
    rows = len(_check(labels, clients, allow_empty))
    require(np.isfinite(exponent) and exponent >= 0, "exponent", "must be at least 0", exponent)
    least = 0 if allow_empty else min_examples
    _check_least(least, rows, clients)
    rng = generator(seed, "partition")
    weights = rng.permutation(np.arange(1, clients + 1, dtype=np.float64) ** -exponent)
    return _sorted_rows(_deal(rng.permutation(rows), least + _shares(rows - least * clients, weights)))


def _check_least(least: int, rows: int, clients: int) -> None:
    fix = f"{clients} clients share {rows} examples."
    require(least >= 0 and least * clients <= rows, "min_examples", "must be at most examples / clients", least, fix)


def dirichlet(
    labels: Tensor, clients: int, *, concentration: float = 0.5, min_examples: int = 1, seed: int = 0, allow_empty: bool = False
) -> list[Tensor]:
    """Each class is shared among the clients in proportions from Dir(concentration · 1): small means few labels each.

    `labels` (N,) are the examples' classes, `clients` is the number of clients, and `seed` decides the draw. `concentration` >
    0 is the parameter of the Dirichlet law. Returns the row numbers of each client, a sorted int64 tensor.

    Sizes vary as well. Clients left with fewer than `min_examples` (0 with `allow_empty`) get random examples of the largest
    clients, which takes at most clients · min_examples moves; the usual "draw again until it fits" may never end.

    Source: Yurochkin et al., Bayesian Nonparametric Federated Learning of Neural Networks (2019), section 4.

    >>> labels = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1])  # a huge concentration: equal shares of each class
    >>> [labels[rows].tolist() for rows in dirichlet(labels, 2, concentration=1e9)]
    [[0, 0, 1, 1], [0, 0, 1, 1]]
    """
    values = _check(labels, clients, allow_empty)
    require(np.isfinite(concentration) and concentration > 0, "concentration", "must be positive", concentration)
    least = 0 if allow_empty else min_examples
    _check_least(least, len(values), clients)
    rng = generator(seed, "partition")
    owned: list[list[_Indices]] = [[] for _ in range(clients)]
    for value in np.unique(values):
        rows = rng.permutation(np.flatnonzero(values == value))
        share = rng.dirichlet(np.full(clients, float(concentration)))
        for k, dealt in enumerate(_deal(rows, _shares(len(rows), share))):
            owned[k].append(dealt)
    return _sorted_rows(_top_up([rng.permutation(np.concatenate(pieces)) for pieces in owned], least))


def by_classes(
    labels: Tensor,
    clients: int,
    *,
    classes_per_client: int = 2,
    exponent: float = 0.0,
    seed: int = 0,
    allow_empty: bool = False,
) -> list[Tensor]:
    """At most `classes_per_client` classes per client, each class shared among its owners in proportion to rank^(−exponent).

    `labels` (N,) are the examples' classes, `clients` is the number of clients, and `seed` decides the draw. `exponent` 0 gives
    equal shares. A positive one gives power-law sizes. Classes are dealt so that every one has an owner and larger ones have
    more. A client that would stay empty gets one example of the largest client, unless `allow_empty`. Returns the row numbers
    of each client, a sorted int64 tensor.

    Source: Li 2023 (thesis), section 3.4: the MNIST data, with two digits per client and sizes by a power law.

    >>> labels = torch.tensor([0, 0, 0, 1, 1, 1])
    >>> sorted(labels[rows].tolist() for rows in by_classes(labels, 2, classes_per_client=1))
    [[0, 0, 0], [1, 1, 1]]
    """
    values = _check(labels, clients, allow_empty)
    names, counts = np.unique(values, return_counts=True)
    k, total = classes_per_client, len(names)
    require(1 <= k <= total, "classes_per_client", f"must lie between 1 and the number of classes ({total})", k)
    fix = f"{clients} clients with {k} classes each cannot hold all {total} classes: ask for more of either."
    require(clients * k >= total, "clients", "must be enough to own every class", clients, fix)
    require(np.isfinite(exponent) and exponent >= 0, "exponent", "must be at least 0", exponent)
    rng = generator(seed, "partition")
    owners: list[list[int]] = [[] for _ in names]
    held = np.zeros(total, np.int64)
    for client in range(clients):
        # Classes without an owner come first, then those with most examples per owner; k different ones by construction.
        chosen = np.lexsort((rng.uniform(size=total), -counts / (held + 1), held > 0))[:k]
        held[chosen] += 1
        for c in chosen:
            owners[c].append(client)
    weights = rng.permutation(np.arange(1, clients + 1, dtype=np.float64) ** -exponent)
    owned: list[list[_Indices]] = [[np.empty(0, np.int64)] for _ in range(clients)]
    for name, mine in zip(names, owners, strict=True):
        rows = rng.permutation(np.flatnonzero(values == name))
        for client, dealt in zip(mine, _deal(rows, _shares(len(rows), weights[mine])), strict=True):
            owned[client].append(dealt)
    # One example from elsewhere keeps the law: a client that had none then has one class.
    return _sorted_rows(_top_up([rng.permutation(np.concatenate(pieces)) for pieces in owned], 0 if allow_empty else 1))


def by_id(ids: Sequence[Any] | NDArray[Any] | Tensor) -> tuple[list[Tensor], tuple[str, ...]]:
    """The natural partition: one client per distinct id in `ids` (N,), in sorted order; the rows of each, and the names.

    >>> by_id(["b", "a", "b"])
    ([tensor([1]), tensor([0, 2])], ('a', 'b'))
    """
    values = ids.cpu().numpy() if isinstance(ids, Tensor) else np.asarray(ids)
    require(values.ndim == 1 and len(values) > 0, "ids", "must be a vector with at least one entry", values.shape)
    names, which = np.unique(values, return_inverse=True)
    order = np.argsort(which, kind="stable")
    owned = _deal(order, np.bincount(which, minlength=len(names)))
    return [torch.from_numpy(rows) for rows in owned], tuple(str(name) for name in names)


PARTITIONERS: dict[str, Partitioner] = {"iid": iid, "dirichlet": dirichlet, "classes": by_classes, "power_law": power_law}


def partitioner(which: str | Partitioner) -> Partitioner:
    """The partitioner with the name `which`: "iid", "dirichlet", "classes" or "power_law"; a function is returned as it is.

    >>> partitioner("classes") is by_classes
    True
    """
    if not isinstance(which, str):
        return which
    if which not in PARTITIONERS:
        raise InvalidParameter(
            "partition", "must be a function or a known name", which, unknown_name("partition", which, PARTITIONERS)
        )
    return PARTITIONERS[which]


def to_clients(
    x: Any,
    y: Any,
    assignment: Sequence[Tensor],
    *,
    ids: Sequence[str] | None = None,
    scale: Any = None,
    shift: Any = 0.0,
    source: str = "",
) -> ClientSet:
    """The clients of an assignment: client k gets the rows assignment[k] of `x` and `y`. Clients without rows are left out.

    `x` (N, …) are the inputs and `y` (N, …) the targets; trees of tensors are allowed. `assignment` holds the row numbers of
    each client, as a partitioner returns them. `ids` are the names of the clients (None: client-0, client-1, …). Models get x ·
    `scale` + `shift`. `source` names the data in errors.

    >>> to_clients(torch.zeros(4, 2), torch.zeros(4), [torch.tensor([0, 3]), torch.tensor([1])])
    ClientSet(2 clients, 3 examples of shape (2,))
    """
    names = [f"client-{k}" for k in range(len(assignment))] if ids is None else list(ids)
    require(len(names) == len(assignment), "ids", f"must be {len(assignment)}, one per client", len(names))
    nonempty = [k for k, rows in enumerate(assignment) if len(rows)]
    if not nonempty:
        raise InvalidData(f"{prefix(source)}the assignment gives no client an example.")
    rows = torch.cat([assignment[k] for k in nonempty])
    lowest, highest, count = int(rows.min()), int(rows.max()), len(leaves(x)[0])
    require(lowest >= 0 and highest < count, "assignment", f"must name rows 0 … {count - 1}", (lowest, highest))
    for name, values in (named_leaves("x", x) | named_leaves("y", y)).items():  # here, where rows are the caller's
        if (row := first_bad_row(values)) is not None:
            raise InvalidData(f"{prefix(source)}row {row} of {name} holds NaN or infinity. Repair or drop that example.")
    sizes = torch.tensor([len(assignment[k]) for k in nonempty])
    x, y = (map_tree(lambda leaf: leaf[rows], tree) for tree in (x, y))
    return ClientSet(x, y, offsets_of(sizes), tuple(names[k] for k in nonempty), scale, shift, source)
