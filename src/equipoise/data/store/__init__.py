"""Data sets larger than memory: clients on disk, written so that a kill loses nothing, and mapped when they are read."""

from __future__ import annotations

from equipoise.data.store.mapped_files import MappedFile, ReadAhead, file_of, map_file
from equipoise.data.store.store_files import read_manifest
from equipoise.data.store.store_reader import RowCheck, check_store, open_store, refuse_changed_store
from equipoise.data.store.store_writer import write_store
from equipoise.data.store.table_store import holds_table, write_table_store

__all__ = [
    "MappedFile", "ReadAhead", "RowCheck", "check_store", "file_of", "holds_table", "map_file", "open_store", "read_manifest",
    "refuse_changed_store", "write_store", "write_table_store",
]  # fmt: skip
