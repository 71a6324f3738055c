"""A node's own examples, in whatever form its owner gives them, as data with one client."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from equipoise.core.abilities import is_part
from equipoise.core.trees import leaves
from equipoise.data.clients import ClientSet, FederatedData, Ragged, as_tree, stack_examples
from equipoise.errors import InvalidData, InvalidParameter, require

if TYPE_CHECKING:
    from flwr.app import Context


@dataclass(frozen=True, eq=False)
class NodeData:
    """A node's examples as data with one client; `trains` is False for a node that is only evaluated on."""

    data: FederatedData
    trains: bool = True

    @property
    def client(self) -> str:
        """The client's name."""
        return self.data.train.ids[0]

    @property
    def sizes(self) -> dict[str, int]:
        """Examples by split, of the splits that the client really has."""
        splits = self.data.splits.items()
        return {name: clients.examples for name, clients in splits if self.trains or name != "train"}


def read_node_data(given: Any, context: Context) -> NodeData:
    """What `load_data` returned, as data with one client."""
    if isinstance(given, ClientSet):
        given = FederatedData(given)
    if isinstance(given, FederatedData):
        ids = {name: clients.ids for name, clients in given.splits.items()}
        good = all(len(names) == 1 and names == given.train.ids for names in ids.values())
        require(good, "load_data", "must give the data of one client", ids, "One node is one client.")
        return NodeData(given)
    splits = _splits(given)
    name = str(splits.pop("id", None) or name_client(context))
    unknown = set(splits) - {"train", "validation", "test"}
    require(not unknown, "load_data", 'must give splits named "train", "validation" or "test"', sorted(map(str, unknown)))
    require(bool({"train", "test"} & set(splits)), "load_data", 'must give "train" or "test" examples', sorted(splits))
    sets = {split: ClientSet.pack([(name, *_pair(split, pair))], source=name) for split, pair in splits.items()}
    trains = "train" in sets
    return NodeData(FederatedData(sets.get("train", sets.get("test")), sets.get("validation"), sets.get("test"), name), trains)  # type: ignore[arg-type]


def _splits(given: Any) -> dict[str, Any]:
    if isinstance(given, Mapping):
        return {name: pair for name, pair in given.items() if pair is not None}
    if isinstance(given, tuple | list) and len(given) == 2 and not _is_pair(given):
        return {"train": given[0], "test": given[1]}
    return {"train": given}


def _pair(split: str, given: Any) -> tuple[Any, Any]:
    """Inputs and targets, of a pair of arrays (or of tuples or dicts of them) or of a dataset whose items are pairs."""
    if _is_pair(given):
        y = as_tree("y", given[1])
        return as_tree("x", given[0], len(leaves(y)[0])), y
    if is_part(given, "__getitem__", "__len__") and not isinstance(given, tuple | list | str | Mapping):
        if len(given) == 0:
            raise InvalidData(f"The {split} data of this node are empty.")
        return stack_examples(f"the {split} data", [given[i] for i in range(len(given))])
    raise InvalidParameter(
        "load_data", f"must give {split!r} as a pair of arrays x, y or as a dataset of pairs", type(given).__name__
    )


def _is_pair(given: Any) -> bool:
    """Whether something is inputs and targets, and not a training and a test set."""
    if not isinstance(given, tuple | list) or len(given) != 2:
        return False
    entries = [leaf for part in given for leaf in leaves(part)]
    return all(_is_array(leaf) or isinstance(leaf, Mapping) for leaf in entries) and not all(map(_is_pair, given))


def _is_array(value: Any) -> bool:
    return isinstance(value, Ragged) or is_part(value, "shape", "dtype")


def name_client(context: Context) -> str:
    """The client's name where the data bring none."""
    for key in ("client-id", "partition-id"):
        if key in context.node_config:
            return str(context.node_config[key])
    return str(context.node_id)
