"""Your own data: from arrays with a client per row, from one pair of arrays per client, or from torch Datasets."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from equipoise.core.abilities import is_part
from equipoise.core.trees import leaves, map_tree
from equipoise.data.clients.arrays import (
    Exact,
    as_tree,
    client_of_rows,
    first_line,
    row_counts,
    rows_by_client,
    tell_of_rounding,
)
from equipoise.data.clients.client_set import ClientSet
from equipoise.data.clients.federated_data import FederatedData
from equipoise.data.clients.leaves import IGNORE, first_bare_row, offsets_of, per_leaf, taken
from equipoise.data.clients.ragged import Ragged, Visited, read_example
from equipoise.data.clients.splits import How, split, tell_of_untested
from equipoise.errors import InvalidData, is_integer, notify, require

_LARGER = 1.5  # times the share of clients to test on that was asked for
_MOST_CLASSES = 100_000
_MANY = 100  # integers below this are taken for classes without a word
_SPARSE = 1000  # integers below this are taken for classes, however few occur
_SUSPICIOUS = 3  # clients with one example each, of which a notice tells
_PER_CLIENT = "If x and y hold an array for each client, write data.from_dict({id: (x, y), …})."
_READ_TWICE = 4  # examples of every client, to find random augmentation


def from_arrays(
    x: Any,
    y: Any,
    client: Any,
    *,
    split_by: How = "clients",
    validation: float = 0.0,
    test: float = 0.2,
    scale: Any = None,
    shift: Any = 0.0,
    seed: int = 0,
    name: str = "arrays",
    classes: int = 0,
    ignore_index: int = IGNORE,
) -> FederatedData:
    """Examples x (N, …), targets y (N, …) and the client of each row (N,), as arrays, tensors or lists.

    Several inputs are a tuple or a dict of arrays, with a `scale` each. Sequences of different lengths are `Ragged`, in a
    dict. `split_by="clients"` keeps a share `test` of the clients apart, unseen in training; "examples" keeps a share of each
    client's examples. Raw pixels: give `scale=1/255`, and they stay uint8 in memory. `classes` is needed only where the
    targets do not show all of them.

    `client` names the client of each row: numbers or texts, (N,).

    >>> from_arrays([[0.0], [1.0], [2.0], [3.0]], [0, 1, 0, 1], ["a", "a", "b", "b"], test=0.5)
    FederatedData('arrays', train: 1 client / 2 examples, test: 1 client / 2 examples)
    """
    clients = pack_rows(x, y, client, scale=scale, shift=shift, name=name, classes=classes, ignore_index=ignore_index)
    if len(clients) >= _SUSPICIOUS and clients.examples == len(clients):
        notify(f"{name}: every client has exactly one example. {_PER_CLIENT}")
    return _split(clients, split_by, validation, test, seed, name, classes, ignore_index)


def pack_rows(
    x: Any,
    y: Any,
    client: Any,
    *,
    scale: Any = None,
    shift: Any = 0.0,
    name: str = "arrays",
    classes: int = 0,
    ignore_index: int = IGNORE,
) -> ClientSet:
    """The clients of arrays with one client per row, in the order of their names."""
    rounding: Exact = {}
    try:
        which, ids = client_of_rows(client)
        x, y = as_tree("x", x, len(which), rounding), as_tree("y", y, len(which), rounding)
    except InvalidData as failure:
        hint = f" {_PER_CLIENT}" if isinstance(x, list) and isinstance(x[0] if x else 0, Tensor | np.ndarray) else ""
        raise InvalidData(f"{name}: {failure}{hint}") from None
    counts = row_counts(x=x, y=y) | {"client": len(which)}
    if len(set(counts.values())) > 1:
        shown = ", ".join(f"{leaf} {count}" for leaf, count in counts.items())
        raise InvalidData(f"{name}: the numbers of rows differ ({shown}); each example needs all of them.")
    _refuse_odd_targets(y, name, classes, ignore_index, lambda row: f"row {row} of y")
    tell_of_rounding(name, rounding)
    rows, sizes = rows_by_client(which, len(ids))
    made = ClientSet.trusted(
        x=map_tree(lambda leaf: taken(leaf, rows), x),
        y=map_tree(lambda leaf: taken(leaf, rows), y),
        offsets=offsets_of(sizes),
        ids=ids,
        scale=per_leaf("scale", scale, x, None),
        shift=per_leaf("shift", shift, x, 0.0),
        source=name,
    )
    made.check_leaves()
    return made


def from_dict(
    clients: Mapping[str, tuple[Any, Any]],
    *,
    split_by: How = "clients",
    validation: float = 0.0,
    test: float = 0.2,
    scale: Any = None,
    shift: Any = 0.0,
    seed: int = 0,
    name: str = "clients",
    classes: int = 0,
    ignore_index: int = IGNORE,
) -> FederatedData:
    """One pair (x, y) per client id, as arrays, tensors or lists; splits as in `from_arrays`.

    >>> from_dict({"a": ([[0.0], [1.0]], [0, 1]), "b": ([[2.0]], [1])}, test=0.5)
    FederatedData('clients', train: 1 client / 2 examples, test: 1 client / 1 example)
    """
    good, fix = isinstance(clients, Mapping) and len(clients) > 0, ""
    if isinstance(clients, list | tuple) and len(clients) > 0:
        fix = "Write dict(enumerate(…)) for a list of pairs (x, y)."
    require(good, "clients", "must map client ids to (x, y)", type(clients).__name__, fix)
    triples: list[tuple[str, Any, Any]] = []
    rounding: Exact = {}
    for owner, pair in clients.items():
        if not (isinstance(pair, Sequence) and not isinstance(pair, str) and len(pair) == 2):
            raise InvalidData(f"{name}: client {owner!r} must be a pair (x, y), but is {type(pair).__name__}.")
        _, (who,) = client_of_rows([owner])
        try:
            y = as_tree("y", pair[1], rounding=rounding)
            x = as_tree("x", pair[0], len(leaves(y)[0]), rounding) if len(leaves(y)[0]) else None
        except InvalidData as failure:
            raise InvalidData(f"{name}: client {who!r}: {failure}") from None
        if x is None:
            raise InvalidData(f"{name}: client {who!r} has no example. Drop it, or give it data.")
        triples.append((who, x, y))
    packed = ClientSet.pack(triples, scale=scale, shift=shift, source=name)
    _refuse_odd_targets(packed.y, name, classes, ignore_index, packed.place)
    tell_of_rounding(name, rounding)
    return _split(packed, split_by, validation, test, seed, name, classes, ignore_index)


def _split(
    clients: ClientSet, how: How, validation: float, test: float, seed: int, name: str, classes: int, ignore_index: int
) -> FederatedData:
    """The split. A notice says if few clients make the test share much larger than asked, or leave clients untested."""
    data = split(
        clients, how, validation=validation, test=test, seed=seed, name=name, classes=classes, ignore_index=ignore_index
    )
    if not classes:
        refuse_untrained_classes(data)
    if how == "examples":
        tell_of_untested(data, (validation, test))
    elif data.test is not None and len(data.test) > _LARGER * test * len(clients):
        text = f"{name}: test={test:g} keeps {len(data.test)} of {len(clients)} clients, which are not trained on."
        notify(f'{text} split_by="examples" keeps examples of every client instead.')
    return data


def _refuse_odd_targets(y: Any, name: str, classes: int, ignore: int, place: Callable[[int], str]) -> None:
    """Refuse targets that are all ignored, and, unless `classes` are named, integers that are hardly classes."""
    require(is_integer(ignore), "ignore_index", "must be an integer", ignore, "Without targets to ignore, leave it away.")
    if not isinstance(y, Tensor | Ragged) or y.is_floating_point():
        return
    values = y.values if isinstance(y, Ragged) else y
    lowest, highest = int(values.min()), int(values.max())
    if lowest <= ignore <= highest and (row := first_bare_row(y, values != ignore)) is not None:
        raise InvalidData(
            f"{name}: {place(row)} has no target that counts: all are of the ignored class {ignore}. Drop that example."
        )
    if classes or highest < _MANY or values.dim() > 1 or isinstance(y, Ragged):
        return
    known = values[values >= 0]
    found = torch.bincount(known).nonzero().flatten() if highest < _MOST_CLASSES else torch.unique(known)
    gap, row = int(found.diff(prepend=found.new_tensor([-1])).max()), int(values.argmax())
    text = f"{name}: {place(row)} is {highest}, but y has {len(found)} different integers"
    if highest < _SPARSE and gap > highest / 2 and 10 * len(found) < highest + 1:
        notify(f"{text}. Repair that example, or give classes={highest + 1}.")
    elif highest >= _SPARSE and (highest >= 10 * len(values) or gap > highest / 2):
        raise InvalidData(
            f"{text}, and integers are classes from 0 on. Number them by np.unique(y, return_inverse=True)[1], give "
            f"y.astype(float) if they are quantities, or classes={highest + 1}."
        )


def refuse_untrained_classes(data: FederatedData) -> None:
    """Refuse a class that some split has and no training client: a model cannot learn it."""
    if data.train.label_range(data.ignore_index) is None or data.classes > _MOST_CLASSES:
        return
    present = {name: _present(clients.y, data) for name, clients in data.splits.items()}
    for split_name, has in present.items():
        if strange := (has & ~present["train"]).nonzero().flatten().tolist():
            raise InvalidData(
                f"{data.name}: {split_name} has the class {strange[0]}, which no training client has. Split with another seed, "
                f'or by split_by="examples"; if that is meant, give classes={data.classes}.'
            )


def _present(y: Any, data: FederatedData) -> Tensor:
    """Which classes occur among targets, (C,) bool."""
    values = (y.values if isinstance(y, Ragged) else y).flatten()
    return torch.bincount(values[values != data.ignore_index].long(), minlength=data.classes) > 0


def from_datasets(datasets: Mapping[str, Any], *, each_visit: bool = False, **options: Any) -> FederatedData:
    """One torch Dataset of (x, y) examples per client id; options as in `from_dict`. Every example is read once, now.

    A dataset that augments its examples at random is refused, since reading it once would freeze them. With `each_visit=True`
    inputs are read again whenever a batch holds them, which only the loop engine does: train(…, engine="loop").

    `datasets` has a torch Dataset by client id.

    >>> from torch.utils.data import TensorDataset
    >>> ones = TensorDataset(torch.ones(4, 2), torch.tensor([0, 1, 0, 1]))
    >>> from_datasets({"a": ones, "b": ones}, test=0.5)
    FederatedData('clients', train: 1 client / 4 examples, test: 1 client / 4 examples)
    """
    require(isinstance(datasets, Mapping), "datasets", "must map client ids to Datasets", type(datasets).__name__)
    pairs = {}
    for owner, dataset in datasets.items():
        if not is_part(dataset, "__getitem__", "__len__"):
            raise InvalidData(f"client {owner!r}: {type(dataset).__name__} must have a length, and examples by their number.")
        if len(dataset) == 0:
            raise InvalidData(f"client {owner!r} has no example. Drop it, or give it data.")
        examples = [read_example(dataset, i, f"client {owner!r}") for i in range(len(dataset))]
        x, y = stack_examples(f"client {owner!r}", examples)
        if each_visit:
            places = torch.stack([torch.zeros(len(examples), dtype=torch.int64), torch.arange(len(examples))], 1)
            x = Visited([dataset], places)
        elif any(
            _differs(read_example(dataset, i, f"client {owner!r}")[0], examples[i][0])
            for i in range(min(_READ_TWICE, len(examples)))
        ):
            raise InvalidData(
                f"client {owner!r}: its Dataset gives another input whenever it is read (random augmentation), and would be "
                'frozen as it was read first. Give each_visit=True and train with engine="loop", or leave the augmentation out.'
            )
        pairs[owner] = (x, y)
    return from_dict(pairs, **options)


def _differs(first: Any, second: Any) -> bool:
    """Whether two readings of one input differ."""
    pairs = zip(leaves(first), leaves(second), strict=True)
    return any(not torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in pairs)


def stack_examples(owner: str, examples: Sequence[Any]) -> tuple[Any, Any]:
    """Examples (x, y) of one client, each a tensor or a tree of tensors, as two trees with a row per example."""
    if any(not isinstance(example, Sequence) or len(example) < 2 for example in examples):
        raise InvalidData(f"{owner}: examples of a Dataset must be pairs (x, y).")
    try:
        x, y = (
            map_tree(lambda *parts: torch.stack([torch.as_tensor(part) for part in parts]), *(each[part] for each in examples))
            for part in (0, 1)
        )
        return x, y
    except (TypeError, ValueError, RuntimeError, KeyError) as failure:
        raise InvalidData(
            f"{owner}: its examples cannot be packed: {first_line(failure)}. Give tensors of one shape, or Ragged."
        ) from failure
