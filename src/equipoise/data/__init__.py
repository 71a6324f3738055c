"""Federated data in four rooms: `clients` (sets, splits, batches), `tables`, `store` (out of core), `datasets`.

`partition` deals examples out to clients, `tabular` has tables without clients. Models and training are elsewhere.
"""

from __future__ import annotations

from equipoise.data import partition, tabular
from equipoise.data.clients import (
    ClientSet,
    FederatedData,
    Ragged,
    from_arrays,
    from_datasets,
    from_dict,
    split_clients,
    split_examples,
)
from equipoise.data.datasets.bridges import from_folders, from_hugging_face, from_partitions
from equipoise.data.datasets.data_files import npz
from equipoise.data.datasets.generators import digits, gaussian_means, label_shift, synthetic
from equipoise.data.datasets.leaf import leaf
from equipoise.data.datasets.loaders import adult, fashion_mnist, femnist, imdb, mocha, omniglot, shakespeare, texts, vehicle
from equipoise.data.datasets.text import WordVectors, from_texts, glove
from equipoise.data.partition import to_clients
from equipoise.data.store import check_store, open_store, refuse_changed_store, write_store, write_table_store
from equipoise.data.tables import Schema, csv, from_frame, parquet

__all__ = [
    "ClientSet", "FederatedData", "Ragged", "Schema", "WordVectors", "adult", "check_store", "csv", "digits",
    "fashion_mnist", "femnist", "from_arrays", "from_datasets", "from_dict", "from_folders", "from_frame",
    "from_hugging_face", "from_partitions", "from_texts", "gaussian_means", "glove", "imdb", "label_shift", "leaf",
    "mocha", "npz", "omniglot", "open_store", "parquet", "partition", "refuse_changed_store", "shakespeare",
    "split_clients", "split_examples", "synthetic", "tabular", "texts", "to_clients", "vehicle", "write_store",
    "write_table_store",
]  # fmt: skip
