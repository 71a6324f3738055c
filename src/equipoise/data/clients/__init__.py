"""Client sets in memory, data of several splits, and how examples become both. No tables, no files."""

from __future__ import annotations

from equipoise.data.clients.arrays import as_tree
from equipoise.data.clients.client_set import ClientSet, prefix
from equipoise.data.clients.convert import from_arrays, from_datasets, from_dict, stack_examples
from equipoise.data.clients.federated_data import FederatedData
from equipoise.data.clients.leaves import IGNORE, LabelRange, as_leaf, offsets_of, rows_in_turn, shown_shape
from equipoise.data.clients.ragged import Ragged, Visited
from equipoise.data.clients.splits import How, split, split_clients, split_examples
from equipoise.data.clients.store_state import StoredIds

__all__ = [
    "IGNORE",
    "ClientSet",
    "FederatedData",
    "How",
    "LabelRange",
    "Ragged",
    "StoredIds",
    "Visited",
    "as_leaf",
    "as_tree",
    "from_arrays",
    "from_datasets",
    "from_dict",
    "offsets_of",
    "prefix",
    "rows_in_turn",
    "shown_shape",
    "split",
    "split_clients",
    "split_examples",
    "stack_examples",
]  # fmt: skip
