"""Federated data: client sets, generators, partitioners, splits and loaders."""

from __future__ import annotations

from equipoise.data import partition, tabular
from equipoise.data.clients.client_set import ClientSet
from equipoise.data.clients.convert import from_arrays, from_datasets, from_dict
from equipoise.data.clients.federated_data import FederatedData
from equipoise.data.clients.ragged import Ragged
from equipoise.data.clients.splits import split_clients, split_examples
from equipoise.data.datasets.bridges import from_folders, from_hugging_face, from_partitions
from equipoise.data.datasets.data_files import npz
from equipoise.data.datasets.generators import digits, gaussian_means, label_shift, synthetic
from equipoise.data.datasets.leaf import leaf
from equipoise.data.datasets.loaders import adult, fashion_mnist, femnist, imdb, mocha, omniglot, shakespeare, texts, vehicle
from equipoise.data.datasets.text import WordVectors, from_texts, glove
from equipoise.data.partition import to_clients
from equipoise.data.store.store_reader import check_store, open_store, refuse_changed_store
from equipoise.data.store.store_writer import write_store
from equipoise.data.store.table_store import write_table_store
from equipoise.data.tables.frames import csv, from_frame, parquet
from equipoise.data.tables.schema import Schema

__all__ = [
    "ClientSet",
    "FederatedData",
    "Ragged",
    "Schema",
    "WordVectors",
    "adult",
    "check_store",
    "csv",
    "digits",
    "fashion_mnist",
    "femnist",
    "from_arrays",
    "from_datasets",
    "from_dict",
    "from_folders",
    "from_frame",
    "from_hugging_face",
    "from_partitions",
    "from_texts",
    "gaussian_means",
    "glove",
    "imdb",
    "label_shift",
    "leaf",
    "mocha",
    "npz",
    "omniglot",
    "open_store",
    "parquet",
    "partition",
    "refuse_changed_store",
    "shakespeare",
    "split_clients",
    "split_examples",
    "synthetic",
    "tabular",
    "texts",
    "to_clients",
    "vehicle",
    "write_store",
    "write_table_store",
]
