"""Tables whose rows name their client: reading, types, the schema, checks, and predictions for rows."""

from __future__ import annotations

from equipoise.data.tables.client_predictions import predict_by_client, predicted_table
from equipoise.data.tables.column_rule import MISSING, OTHER
from equipoise.data.tables.csv_files import read_csv
from equipoise.data.tables.csv_reading import CSV_DEFAULTS
from equipoise.data.tables.frames import csv, from_frame, parquet
from equipoise.data.tables.missing_cells import counting_missing
from equipoise.data.tables.near_names import same_but_for_writing
from equipoise.data.tables.new_rows import read_columns, read_rows
from equipoise.data.tables.row_predictions import predicted_columns
from equipoise.data.tables.schema import Schema
from equipoise.data.tables.table_column import TableColumn, shown_names

__all__ = [
    "CSV_DEFAULTS", "MISSING", "OTHER", "Schema", "TableColumn", "counting_missing", "csv", "from_frame", "parquet",
    "predict_by_client", "predicted_columns", "predicted_table", "read_columns", "read_csv", "read_rows",
    "same_but_for_writing", "shown_names",
]  # fmt: skip
