"""What pages and the HTTP API show of a folder: its runs, their models and clients, their studies, and answers of models."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

from equipoise.report.knob import written
from equipoise.serve.client_tables import ClientTables
from equipoise.serve.library import Library
from equipoise.serve.live import Streams
from equipoise.serve.model_store import ModelStore
from equipoise.serve.questions import Respondent
from equipoise.serve.refusals import Gone

WORDS = ("clients", "mean_over")  # of the figures of a run: what they are over


class Shown:
    """A served folder."""

    def __init__(self, root: Path) -> None:
        self.library = Library(root)
        self.models = ModelStore(self.library)
        self.tables = ClientTables(self.library, self.models)
        self.streams = Streams(self.library)
        self.respondent = Respondent(self.models)

    def overviews(self) -> list[dict[str, Any]]:
        """All runs in a few fields each; a run that has gone meanwhile is left out."""
        return [about for run in self.library.ids() if (about := self._overview(run)) is not None]

    def _overview(self, run: str) -> dict[str, Any] | None:
        with suppress(Gone):
            return self.library.overview(run)
        return None

    def figures(self, run: str) -> dict[str, str]:
        """The figures of a finished run by name, as people read them."""
        found, loss = self.tables.metrics(run), self.tables.error_is_loss(run)
        numbers = found["members"][0]["error"]
        first = f"mean {'loss' if loss else 'error'} of {numbers['clients']} {found['judged_on']} clients"
        names = {first: "mean", "90th percentile": "percentile_90", "worst tenth": "worst_10"}
        return {name: written(numbers[key], not loss) for name, key in names.items()}

    def study(self, study: str) -> dict[str, Any]:
        """A study: its runs and the figures of those that have ended."""
        inside = self.library.studies().get(study)
        if inside is None:
            raise Gone(f"There is no study {study[:100]!r} here.")
        runs, loss = [], False
        for run in inside:
            about = self._overview(run)
            if about is None:
                continue
            keys = ("id", "name", "seed", "status", "rounds_done", "rounds")
            row: dict[str, Any] = {key: about[key] for key in keys} | {"figures": None, "shown": {}}
            if about["status"] == "finished":
                with suppress(Gone):
                    row["figures"] = self.tables.metrics(run)["members"][0]["error"]
                    percent = not self.tables.error_is_loss(run)
                    loss = loss or not percent
                    row["shown"] = {key: written(value, percent) for key, value in row["figures"].items() if key not in WORDS}
            runs.append(row)
        ended = sum(row["status"] == "finished" for row in runs)
        return {"id": study, "noun": "loss" if loss else "error", "ended": ended, "runs": runs}
