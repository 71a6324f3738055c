"""Tables whose rows name their client: reading, types, the schema, checks, and predictions for rows.

What becomes of the rows afterwards is with `equipoise.data.clients`; oddities that no model suffers from are nobody's here.
"""

from __future__ import annotations

from equipoise.data.tables.checks import counting_missing
from equipoise.data.tables.column import CSV_DEFAULTS, TableColumn, shown_names
from equipoise.data.tables.frames import csv, from_frame, parquet
from equipoise.data.tables.predict import predict_by_client, predicted_table
from equipoise.data.tables.read import read_csv
from equipoise.data.tables.rules import MISSING, OTHER, predicted_columns
from equipoise.data.tables.schema import Schema, read_columns, read_rows

__all__ = [
    "CSV_DEFAULTS", "MISSING", "OTHER", "Schema", "TableColumn", "counting_missing", "csv", "from_frame", "parquet",
    "predict_by_client", "predicted_columns", "predicted_table", "read_columns", "read_csv", "read_rows", "shown_names",
]  # fmt: skip
