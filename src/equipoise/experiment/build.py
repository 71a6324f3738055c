"""Makes the objects that a checked configuration names: data, a model that fits them, and the algorithm."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from equipoise.errors import ConfigError, EquipoiseError
from equipoise.experiment import catalog
from equipoise.experiment.config import RunConfig
from equipoise.experiment.config_tables import refusals_at
from equipoise.experiment.part_config import FROM_DATA, OBJECTS_FROM_DATA

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from torch import nn

    from equipoise.algorithm import Algorithm
    from equipoise.data import FederatedData
    from equipoise.result import Result
    from equipoise.runs.family import Family
    from equipoise.types import Observer


@dataclass(frozen=True, eq=False)
class PreparedRun:
    """A run that is ready to train. `config` is complete: what the model reads from the data is filled in."""

    config: RunConfig
    data: FederatedData
    model: nn.Module
    algorithm: Algorithm

    @property
    def evaluated_clients(self) -> int:
        """The number of rows in the table of clients: of all clients, or of the sample."""
        most = self.config.train.evaluate_clients
        return sum(len(clients) if most is None else min(most, len(clients)) for clients in self.data.splits.values())

    def train(
        self,
        *,
        name: str = "run",
        observers: Sequence[Observer] = (),
        progress: bool | None = None,
        checkpoint: Path | None = None,
        ledger: Path | None = None,
    ) -> Result | Family:
        """Train as the configuration says, from `checkpoint` if that file exists: a model, or a family of them."""
        import torch

        from equipoise.engines.simulator.workers import threads
        from equipoise.runs.checkpoint import Checkpoints
        from equipoise.runs.family import train_family
        from equipoise.train import train

        config, options = self.config, self.config.train
        given: dict[str, Any] = {
            **self._given(), "evaluate_every": options.evaluate_every, "evaluate_clients": options.evaluate_clients,
            "checkpoint": None if checkpoint is None else Checkpoints(checkpoint, every=options.checkpoint_every),
            "metrics": config.metrics(), "observers": observers, "progress": progress, "stop": options.stop,
        }  # fmt: skip
        # Sums depend on the number of threads in the last bits, so a run keeps it.
        with threads(options.threads or torch.get_num_threads()):
            if config.family is not None:
                with refusals_at("family", (config.family.key,), "family"):
                    given[config.family.key] = config.family.values
                    return train_family(self.model, self.data, self.algorithm, **given)
            result = train(self.model, self.data, self.algorithm, name=options.name or name, ledger=ledger, **given)
            return result if options.conformal is None else result.with_conformal(self.data, miss=options.conformal)

    def explain(self) -> str:
        """How clients' local work is done and why not in another way, in words, after one round that is dropped."""
        import torch

        from equipoise.engines.simulator.workers import threads
        from equipoise.explain import explained
        from equipoise.runs.setup import set_up

        with threads(self.config.train.threads or torch.get_num_threads()):
            return explained(set_up(self.model, self.data, self.algorithm, **self._given()))

    def _given(self) -> dict[str, Any]:
        """What the set-up of a run is given besides its parts."""
        config, options = self.config, self.config.train
        return {
            "rounds": options.rounds, "clients_per_round": options.clients_per_round, "seed": options.seed,
            "loss": config.loss(), "error": config.error(), "engine": options.chosen_engine(),
        }  # fmt: skip


def build(config: RunConfig) -> PreparedRun:
    """Make the run that a configuration describes; what cannot run is refused before anything is trained or written."""
    import torch

    from equipoise.core.devices import usable_device
    from equipoise.privacy.lookers import data_to_try

    with refusals_at("train", ("device",), "device"):
        usable_device(config.train.device)  # one that this machine does not have is refused
    config.train.chosen_engine()
    algorithm = config.algorithm()
    data = make_data(config)
    if config.attack is not None:
        from equipoise import attacks

        data = attacks.apply(data, config.attack.make("attack"))
    if config.train.attributes is not None:
        from equipoise.subgroups import read_attributes

        data = data.with_attributes(read_attributes(config.train.attributes))
    check_cohort(config, algorithm, data)
    if config.train.stop is not None:
        with refusals_at("train.stop", ("figure",), "EarlyStopping"):
            config.train.stop.refuse_unknown(data.splits, tuple(config.metrics()))
    config = config.with_model(**read_from_data(config, data))
    config = replace(config, train=replace(config.train, threads=config.train.threads or torch.get_num_threads()))
    model = make_model(config, data)
    check_fit(config, model, data_to_try(data, algorithm))
    return PreparedRun(config, data, model, algorithm)


def make_data(config: RunConfig) -> FederatedData:
    """The data of a configuration; code of the user's own must return a FederatedData."""
    from equipoise.data import FederatedData

    with seeded_torch(config.train.seed):
        data = config.data.make("data")
    if not isinstance(data, FederatedData):
        fix = "Make one by equipoise.data.from_arrays, from_dict, from_frame or FederatedData."
        raise ConfigError(f"data: {config.data.name} must return a FederatedData, but returned a {type(data).__name__}. {fix}")
    return data


def make_model(config: RunConfig, data: FederatedData) -> nn.Module:
    """The model of a configuration; code of the user's own must return an nn.Module.

    Initial parameters that torch draws from its global state depend on the seed of the run.
    """
    from torch import nn

    with seeded_torch(config.train.seed):
        model = config.model.make("model", **objects_from_data(config, data))
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model: {config.model.name} must make a torch.nn.Module, but made a {type(model).__name__}.")
    return model


@contextmanager
def seeded_torch(seed: int) -> Iterator[None]:
    """Seed torch's global state for code of the user's own that draws from it; the state before comes back."""
    import torch

    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        yield


def check_cohort(config: RunConfig, algorithm: Algorithm, data: FederatedData) -> None:
    """Refuse an impossible size of cohorts, by drawing the first one."""
    with refusals_at("train", ("clients_per_round",), "cohort"):
        algorithm.drawn_by(0, algorithm.base_weights(data.train), clients_per_round=config.train.clients_per_round, seed=0)


def read_from_data(config: RunConfig, data: FederatedData) -> dict[str, Any]:
    """The parameters of the model that the configuration leaves to the data: features, classes or vocabulary."""
    missing = [key for key in FROM_DATA if key in config.model.part.parameters and key not in config.model.parameters]
    sizes: dict[str, Any] = {"features": data.features, "classes": data.classes, "vocabulary": _vocabulary(data)}
    for key in missing:
        if not sizes[key]:
            kind = "classes" if key == "classes" else "tokens"
            raise ConfigError(
                f"model.{key} cannot be read from the data {config.data.name!r}, which hold no {kind}. "
                f"Give it, or choose another model than {config.model.name!r}."
            )
    return {key: sizes[key] for key in missing}


def _vocabulary(data: FederatedData) -> int:
    """The number of tokens: one more than the largest, and at least the number of classes; 0 for data without tokens."""
    from torch import Tensor

    if not isinstance(data.train.x, Tensor) or data.train.x.is_floating_point() or data.train.scale is not None:
        return 0
    return max(data.classes, *(int(clients.x.max()) + 1 for clients in data.splits.values()))


def objects_from_data(config: RunConfig, data: FederatedData) -> dict[str, Any]:
    """What a model takes that no configuration can hold: the schema of a table, and GloVe vectors for `embeddings`."""
    needed = {p.name for p in config.model.part.all_parameters if p.required and p.name not in config.model.parameters}
    found: dict[str, Any] = {}
    for name in needed.intersection(OBJECTS_FROM_DATA):
        texts = config.data.part.target is catalog.part("data", "clothing").target
        if (name == "schema" and data.schema is None) or (name == "embeddings" and not texts):
            fix = "Use it with csv or parquet." if name == "schema" else "Use it with clothing, stackoverflow or sent140."
            lacking = f"{name}, which the data {config.data.name!r} have not"
            raise ConfigError(f"model {config.model.name!r} reads {lacking}. {fix}")
        if name == "embeddings":
            from equipoise.data import glove

            found[name] = glove(config.data.parameters["folder"]).vectors
        else:
            found[name] = data.schema
    return found


def check_fit(config: RunConfig, model: nn.Module, data: FederatedData) -> None:
    """Refuse a model whose shape, type or number of classes does not fit the data, by trying it on them."""
    from equipoise.core.task import Task
    from equipoise.core.task_trial import try_task

    try:
        try_task(Task.of(model, config.loss(), config.error()), data)
    except EquipoiseError as failure:
        raise ConfigError(f"The model {config.model.name!r} does not fit the data {config.data.name!r}: {failure}") from failure
