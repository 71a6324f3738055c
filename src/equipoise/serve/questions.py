"""Small questions to the models of runs: which model, inputs or rows of a table, and the outputs as JSON."""

from __future__ import annotations

import json
import threading
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from equipoise.data.tables import Schema
from equipoise.errors import InvalidData
from equipoise.export.onnx_files import MODEL
from equipoise.export.onnx_runs import OnnxModel, TookTooLong
from equipoise.serve.cached import Cached
from equipoise.serve.model_store import LATEST, ModelStore, ModelVersion
from equipoise.serve.predictions import MOST_ROWS, input_arrays, predict
from equipoise.serve.refusals import Busy, Gone

AT_ONCE = 2  # predictions
WAIT_SECONDS = 5.0  # for one's turn
LARGEST_MODEL = 512 * 2**20  # bytes of a model that is held in memory to be asked
KEPT_MODELS = 8


class Question(BaseModel):
    """The body of a prediction: which model, and inputs, or rows of a table for a model on one."""

    model_config = ConfigDict(extra="forbid")
    run: str | None = Field(None, description="The id of a run; not needed if there is one alone.", max_length=500)
    model: str = Field(
        "model", description='A value of the knob, such as "0.5"; "model" for a run that is no family.', max_length=100
    )
    version: str = Field(LATEST, max_length=64)
    inputs: Any = Field(None, description=f"Up to {MOST_ROWS} examples, or a list of them for each input by name.")
    rows: list[dict[str, Any]] | None = Field(None, description="Rows of a table, by column.", max_length=MOST_ROWS)


class Respondent:
    """Answers questions with the models of a store; those asked last stay in memory."""

    def __init__(self, models: ModelStore) -> None:
        self.models = models
        self._running, self._turn = Cached(KEPT_MODELS), threading.Semaphore(AT_ONCE)

    def answer(self, question: Question) -> dict[str, Any]:
        """A prediction."""
        run = question.run or self._only_run()
        version = self.models.version(run, question.version)
        member = version.member(question.model)
        signature = version.manifest.signature
        if MODEL not in member.files or signature is None:
            why = member.no_onnx or "the inputs of this model are not known: it was saved without ONNX"
            raise Gone(f"{member.name or 'This model'} cannot be asked here: {why.rstrip('.')}.")
        given = question.inputs
        if question.rows is not None:
            if given is not None:
                raise InvalidData("Give either inputs or rows, not both.")
            given = self._transformed(run, version, question.rows)
        if given is None:
            raise InvalidData("inputs are missing: give a list of examples.")
        arrays = input_arrays(signature, given)
        if not self._turn.acquire(timeout=WAIT_SECONDS):
            raise Busy("Too many predictions are asked for at once. Ask again in a moment.")
        try:
            outputs = predict(self._model(run, version, question.model), arrays)
        except TookTooLong as failure:
            raise Busy(f"{failure} Ask with fewer examples, or download the model.") from failure
        finally:
            self._turn.release()
        about = {"run": run, "model": member.folder, "version": version.name}
        return about | {"outputs": outputs[0] if len(outputs) == 1 else outputs, "classes": list(version.manifest.classes)}

    def _model(self, run: str, version: ModelVersion, value: str) -> OnnxModel:
        opened, stored = self.models.open(run, version, version.member(value), MODEL)
        with opened:
            if stored.bytes > LARGEST_MODEL:
                raise InvalidData(f"This model is larger than {LARGEST_MODEL // 2**20} MB. Download it, and ask it there.")
            return self._running.get(stored.sha256, None, lambda: OnnxModel(opened.read(), source=MODEL))

    def _only_run(self) -> str:
        runs = [run for run in self.models.library.ids() if self.models.versions(run)]
        if len(runs) != 1:
            raise InvalidData(f"run is missing: there are {len(runs)} runs with models here. Name one of /api/runs.")
        return runs[0]

    def _transformed(self, run: str, version: ModelVersion, rows: list[dict[str, Any]]) -> Any:
        import pyarrow as pa

        stored = self.models.schema(run, version)
        if stored is None:
            raise InvalidData("rows are for models on a table; this model takes inputs.")
        try:
            table = pa.Table.from_pylist(rows)
        except (pa.ArrowException, TypeError, ValueError, OverflowError) as failure:
            raise InvalidData(f"rows cannot be read as a table: {failure}.") from failure
        tree, _ = Schema.from_json(json.dumps(stored)).inputs_of(table, "rows")
        return {name: values.tolist() for name, values in tree.items()} if isinstance(tree, dict) else tree.tolist()
