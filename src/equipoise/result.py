"""The result of `train`: the record of the run with its trained model, and the files that are made of it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor, nn

from equipoise.algorithm import Algorithm
from equipoise.data.clients import FederatedData
from equipoise.personal_models import PersonalModels
from equipoise.run_record import RunRecord

if TYPE_CHECKING:
    from equipoise.core.signature import Signature
    from equipoise.core.task import Task
    from equipoise.data.tables import Schema
    from equipoise.risk.groups import Groups


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class Result(RunRecord):
    """A finished run: the trained `model`, `clients` (one row each), `history`, `summary()` and `report(path)`.

    `train` gives it. Source: ours.

    >>> import equipoise as eq
    >>> data = eq.data.label_shift(train_clients=5, validation_clients=0, test_clients=3, examples=20)
    >>> result = eq.train(eq.models.Softmax(data.features, data.classes), data, rounds=2, clients_per_round=3)
    >>> result.judged_on, len(result.clients), len(result.history.rounds), type(result.model).__name__
    ('test', 8, 2, 'Softmax')
    >>> 0 <= result.summary().error.percentiles[90] <= 1
    True
    """

    algorithm: Algorithm  # what was minimised, and how
    model: nn.Module  # the trained model, a copy of the one that was given
    params: Tensor  # (D,) its parameters as one vector
    carried: Tensor | None = None  # (C,) values that training changes besides parameters, e.g. running statistics
    personal: PersonalModels | None = None  # the clients' own models, if the algorithm gives them any
    schema: Schema | None = None  # how each column was encoded, if the data are a table
    signature: Signature | None = None  # what the model takes, where the data are on this machine
    task: Task | None = field(default=None, repr=False)  # loss and error per example

    def export(self, path: str | Path, *, groups: Groups | None = None) -> Path:
        """Write the model for other programs, by the suffix of `path`: .onnx, .pt2 (torch.export) or .safetensors.

        Beside it go <name>.card.md and <name>.card.json: what the model was trained on and how, the figures of groups of
        clients, whom it leaves behind, and what privacy it has. `groups` names the group of each client, such as its
        region, and the card has a row for each. ONNX needs `equipoise[serve]`. A model that a format cannot hold is refused
        with the reason.
        """
        from equipoise.export.model_files import export_result

        return export_result(self, path, groups=groups)

    def with_conformal(self, data: FederatedData, *, miss: float = 0.1, per_client: bool = False) -> Result:
        """The result with conformal sets of the shared model: columns `coverage` and `set_size` of clients with test examples.

        `miss` ζ and `per_client` are those of `conformal_sets`. Tables and reports show the coverage of each client then.
        """
        from equipoise.conformal import conformal_columns, conformal_sets

        return replace(
            self, clients=conformal_columns(self.clients, conformal_sets(self.model, data, miss=miss, per_client=per_client))
        )

    def save(self, folder: str | Path) -> Path:
        """Write the folder of a run: config.toml, rounds.jsonl, clients.parquet, model.safetensors and report.html.

        With a table as data there is schema.json, too. Beside the model go model.json, its card and, with `equipoise[serve]`,
        model.onnx and score.onnx.

        `equipoise report` reads it like any other. The folder must be new or empty, and appears whole or not at all. Parts of
        your own are recorded by their class and repr; a folder that was saved is read, but not run again.
        """
        from equipoise.experiment.saved_run import save_result

        return save_result(self, folder)
