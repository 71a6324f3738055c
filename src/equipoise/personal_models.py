"""The clients' own models of a finished run with personalisation, by client."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from equipoise.core.files import DurableFile, move
from equipoise.errors import InvalidParameter, NotWritten
from equipoise.types import PersonalWork, ServerState

if TYPE_CHECKING:
    from equipoise.runs.setup import Setting


class PersonalModels:
    """The models of the training clients, by id. Models that are made after training (finetuning) are made on each call."""

    def __init__(self, setting: Setting, run: PersonalWork, state: ServerState, model: Tensor) -> None:
        self._setting, self._run, self._state, self._model = setting, run, state, model

    @property
    def ids(self) -> Sequence[str]:
        """The ids of the training clients, in order."""
        return self._setting.data.train.ids

    def __len__(self) -> int:
        return len(self._setting.data.train)

    def __repr__(self) -> str:
        return f"PersonalModels({len(self)} clients)"

    def params(self, clients: Sequence[str]) -> Tensor:
        """The parameters of the models of `clients`, a list of ids, one row each: (k, D)."""
        return self._setting.task.split(self._models(clients))[0]

    def _models(self, clients: Sequence[str]) -> Tensor:
        """Models of some clients, one row each: parameters, and then carried values if the model has any, (k, D + C)."""
        rule = f"must be ids of the {len(self)} training clients"
        odd = [name for name in clients if not isinstance(name, str)]
        if odd or isinstance(clients, str) or len(clients) == 0:
            raise InvalidParameter("clients", rule, odd or clients)
        positions = self._setting.data.train.positions_of(clients)
        if unknown := [name for name, k in zip(clients, positions.tolist(), strict=True) if k < 0]:
            ids = self.ids
            known = f"{', '.join(ids[k] for k in range(min(5, len(ids))))}{', …' * (len(ids) > 5)}"
            fix = f"Known are {known}. A client that took no part in training is served the shared model: result.model."
            raise InvalidParameter("clients", rule, unknown, fix)
        return self._run.models(self._state.personal, self._model, positions, self._state.round)

    def model(self, client: str) -> nn.Module:
        """A copy of the user's model with the parameters of one client, with its running statistics if the model has any.

        `client` is the client's id.
        """
        return self._setting.model_at(self._models([client])[0])

    def predict(self, frame: Any, *, client: str | None = None) -> Any:
        """What models say about each row of a table: its client's own model, or the shared one if the client has none.

        The columns are those of `Schema.predict`. A last column, "predicted by", says "own model" or "shared model". `frame`
        is a table, or the path of a CSV or Parquet file. `client` names the column that says whose a row is, None that of
        training. The run's data must be a table.
        """
        from equipoise.data.tables import predicted_table

        shared = self._setting.model_at(self._model)
        return predicted_table(frame, self.model, frozenset(self.ids), shared, self._setting.data.schema, client)

    def to_npy(self, path: str | Path) -> Path:
        """Write all models as one NumPy array (n, D), a few at a time, in the order of `ids`; the file is whole or absent.

        Where models carry values beside their parameters (running statistics), these follow in each row: (n, D + C).
        """
        import numpy as np

        path, part = Path(path), Path(f"{path}.part")
        header = io.BytesIO()
        kind, shape = self._model.cpu().numpy().dtype, (len(self), len(self._model))
        described = {"descr": np.lib.format.dtype_to_descr(kind), "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(header, described)
        try:
            file = DurableFile(part)
            try:
                file.write(header.getvalue())
                for _, models in self._run.all_models(self._state.personal, self._model, self._state.round):
                    file.write(models.cpu().contiguous().numpy())  # in the order of clients
                file.sync()
            finally:
                file.close()
            move(part, path)
        except OSError as failure:
            raise NotWritten(f"{path} could not be written: {failure.strerror or failure}.") from failure
        return path
