"""Federated data: client sets, generators, partitioners, splits and loaders."""

from __future__ import annotations

from equipoise.data import partition, tabular
from equipoise.data.bridges import from_folders, from_hugging_face, from_partitions
from equipoise.data.clients import ClientSet
from equipoise.data.convert import from_arrays, from_datasets, from_dict
from equipoise.data.federated_data import FederatedData
from equipoise.data.file_access import npz
from equipoise.data.frames import csv, from_frame, parquet
from equipoise.data.generators import digits, gaussian_means, label_shift, synthetic
from equipoise.data.leaf import leaf
from equipoise.data.loaders import adult, fashion_mnist, femnist, imdb, mocha, omniglot, shakespeare, texts, vehicle
from equipoise.data.partition import to_clients
from equipoise.data.ragged import Ragged
from equipoise.data.schema import Schema
from equipoise.data.splits import split_clients, split_examples
from equipoise.data.store_reader import check_store, open_store, refuse_changed_store
from equipoise.data.store_writer import write_store
from equipoise.data.table_store import write_table_store
from equipoise.data.text import WordVectors, from_texts, glove

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
