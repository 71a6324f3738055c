"""Clients of runs with their errors: tables, figures over them, and the numbers of a family's knob."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

from equipoise.client_table import ClientTable
from equipoise.experiment.family_files import CLIENTS
from equipoise.export.model_card import figures
from equipoise.report.knob import MemberClients, knob_data
from equipoise.serve.cached import Cached
from equipoise.serve.library import MOST_RUNS, Library
from equipoise.serve.model_store import ModelStore, ModelVersion
from equipoise.serve.refusals import Gone, Withheld
from equipoise.serve.safe_files import mark_of, open_below

LARGEST_TABLE = 256 * 2**20  # bytes of a table of clients that is read


class ClientTables:
    """The tables of clients of a library's runs. Single clients of protected runs are withheld here, and nowhere else."""

    def __init__(self, library: Library, models: ModelStore) -> None:
        self.library, self.models = library, models
        self._kept, self._figures = Cached(64), Cached(MOST_RUNS)

    def tables(self, run: str, version: ModelVersion | None) -> list[MemberClients]:
        """The tables of a run, one per member."""
        path = self.library.path(run)
        try:
            if version is None or version.single:
                return [MemberClients(0.0, self.library.watched(run).about.name, _read_table(path, [CLIENTS]))]
            members = version.manifest.members
            found = [MemberClients(m.value, m.name, _read_table(path, version.place(m, CLIENTS))) for m in members]
            if any(each.clients.client != found[0].clients.client for each in found):
                raise ValueError("the members have other clients")
            return found
        except (OSError, ValueError, KeyError, TypeError) as failure:  # pyarrow's errors are of these kinds
            raise Gone(f"The clients of {run!r} cannot be read: the run has not ended, or a file is damaged.") from failure

    def _latest(self, run: str) -> tuple[ModelVersion | None, Any]:
        """The latest version of a run's models, and a mark of the tables that belong to it."""
        versions = self.models.versions(run)
        if versions and not versions[-1].single:
            return versions[-1], versions[-1].name
        return None, mark_of(self.library.path(run), [CLIENTS])

    def error_is_loss(self, run: str) -> bool:
        """Whether a finished run's task has no error besides its loss."""
        return bool((self.library.watched(run).log.end or {}).get("error_is_loss"))

    def metrics(self, run: str) -> dict[str, Any]:
        """The figures of a run over its clients, for each member."""
        version, mark = self._latest(run)
        private = self.library.watched(run).about.private

        def make() -> dict[str, Any]:
            members = self.tables(run, version)
            splits = members[0].clients.split
            split = next((name for name in ("test", "validation", "train") if name in splits), None)
            if split is None:
                raise Gone(f"The table of clients of {run!r} has no rows.")
            return {
                "run": run, "judged_on": split, "not_covered_by_epsilon": private,
                "members": [
                    {"name": member.name, "value": None if version is None else member.value,
                     "error": figures(member.clients.where(split))}
                    for member in members
                ],
            }  # fmt: skip

        return self._figures.get(run, (mark, private), make)

    def knob(self, run: str, version: ModelVersion) -> dict[str, Any]:
        """The numbers of a family's knob."""
        manifest, private = version.manifest, self.library.watched(run).about.private

        def make() -> dict[str, Any]:
            tables, split = self.tables(run, version), manifest.judged_on
            if split not in tables[0].clients.split:
                raise Gone(f"The tables of clients of {run!r} have no {split[:40]} clients, which it is judged on.")
            return knob_data(manifest.knob, tables, split, error_is_loss=manifest.error_is_loss, private=private)

        return self._kept.get((run, "knob"), (version.name, private), make)

    def clients(self, run: str) -> dict[str, Any]:
        """All clients of a run with their errors, as columns; refused where the run protects single clients."""
        about = self.library.watched(run).about
        if about.private:
            how = about.privacy or "its privacy"
            raise Withheld(f"This run protects single clients ({how}), so the server shows none of them.")
        version, mark = self._latest(run)
        return self._kept.get((run, "clients"), mark, lambda: client_columns(self.tables(run, version)))


def client_columns(members: list[MemberClients]) -> dict[str, Any]:
    """The columns of a table of all clients: client, split, examples, and an error per member."""
    first = members[0].clients
    columns: dict[str, Any] = {
        "client": list(first.client), "split": list(first.split), "examples": first.size.tolist(),
    }  # fmt: skip
    names = ["error"] if len(members) == 1 else [f"error, {member.name}" for member in members]
    for name, member in zip(names, members, strict=True):
        columns[name] = [
            value if value == value and abs(value) != float("inf") else None for value in member.clients.served_error.tolist()
        ]
    return columns


def _read_table(path: Path, steps: list[str]) -> ClientTable:
    with open_below(path, steps) as file:
        if os.fstat(file.fileno()).st_size > LARGEST_TABLE:
            raise ValueError("the table is too large")
        return ClientTable.from_parquet(io.BytesIO(file.read()))
