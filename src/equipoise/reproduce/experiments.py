"""The entries of `equipoise reproduce`, read from experiments.toml and benchmarks.toml.

experiments.toml has the experiments of the Δ-FL papers and of the thesis, benchmarks.toml the tables of public benchmarks.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from importlib import resources
from typing import Any

from equipoise.core.plain_text import parse_toml
from equipoise.data.datasets.text import PADDING
from equipoise.experiment import catalog
from equipoise.models import CharGRU, ConvNet, EmbeddingLSTM, Logistic, Softmax
from equipoise.reproduce import data_sets, image_splits, tail_data
from equipoise.reproduce.entry import Choose, Claim, DataMaker, Experiment, Method, ModelMaker, Need, Scale
from equipoise.reproduce.networks import BucketingNet
from equipoise.reproduce.scores import MEASURES
from equipoise.solvers import SGD

MODELS: dict[str, ModelMaker] = {
    "emnist-linear": lambda data, folder, seed: Softmax(784, 62, bias=False),
    "emnist-convnet": lambda data, folder, seed: ConvNet(classes=62, seed=seed),
    "shakespeare-gru": lambda data, folder, seed: CharGRU(vocabulary=53, embedding=None, hidden=128, seed=seed),
    "synthetic-linear": lambda data, folder, seed: Softmax(60, 10),
    "text-linear": lambda data, folder, seed: Logistic(50, bias=False),
    "text-lstm": lambda data, folder, seed: EmbeddingLSTM(
        data_sets.word_vectors(folder).vectors, hidden=50, padding=PADDING, seed=seed
    ),
    "pfllib-network": lambda data, folder, seed: ConvNet(classes=10, hidden=512, seed=seed),
    "bucketing-network": lambda data, folder, seed: BucketingNet(),
}
DATA_MAKERS: dict[str, DataMaker] = {
    "emnist": data_sets.emnist,
    "emnist_varied": tail_data.emnist_varied,
    "roles": data_sets.roles,
    "tweets": data_sets.tweets,
    "reviews": data_sets.reviews,
    "synthetic_30": data_sets.synthetic_30,
    "synthetic_with_sizes_of_table_4_4": data_sets.synthetic_with_sizes_of_table_4_4,
    "pfllib_fashion": image_splits.pfllib_fashion,
    "bucketing_mnist": image_splits.bucketing_mnist,
}
PARTS = {"risk": "risk", "sampler": "sampler", "aggregator": "aggregator", "personal": "personal", "local": "solver"}


def read_part(kind: str, table: str | Mapping[str, Any]) -> Any:
    """A part of an algorithm from its table, or from its name alone; parts inside it are read alike."""
    given = {"name": table} if isinstance(table, str) else dict(table)
    found = catalog.part(kind, given.pop("name"))
    kinds = {name: parameter.part_kind for name, parameter in found.parameters.items()}
    return found.make({name: read_part(inner, value) if (inner := kinds[name]) else value for name, value in given.items()})


def read_method(name: str, row: Mapping[str, Any]) -> Method:
    """A method from its row of the file."""
    return Method(name, **{**row, **{key: read_part(kind, row[key]) for key, kind in PARTS.items() if key in row}})


def read_experiment(name: str, table: Mapping[str, Any], needs: Mapping[str, Need]) -> Experiment:
    """An experiment from its table of the file."""
    figures, measure = MEASURES[table["measure"]]
    data = dict(table["data"])
    rest = (
        "title", "paper_lr", "rate_from", "retuned", "rates", "decay_after", "differences", "paper_clients", "unseen",
        "evaluate_share", "evaluate_every", "same_data",
    )  # fmt: skip
    return Experiment(
        name=name,
        tables=tuple(table["tables"]),
        methods=tuple(read_method(*row) for row in table["methods"].items()),
        model=MODELS[table["model"]],
        data=partial(DATA_MAKERS[data.pop("maker")], **data),
        solver=SGD(**table["solver"]),
        scales={scale: Scale(**table[scale]) for scale in ("small", "paper")},
        figures=figures,
        measure=measure,
        needs=tuple(needs[path] for path in table.get("needs", ())),
        claims=tuple(Claim(*claim) for claim in table["claims"]),
        choose=Choose(**table["choose"]) if "choose" in table else None,
        **{key: _frozen(table[key]) for key in rest if key in table and table[key] != []},
    )


def _frozen(value: Any) -> Any:
    """A list as a tuple, and anything else as it is."""
    return tuple(value) if isinstance(value, list) else value


def read_experiments() -> tuple[dict[str, Experiment], dict[str, Need], dict[str, tuple[str, ...]]]:
    """All experiments by name, all files that they need by path, and experiments of several tables: a name for some others."""
    tables: dict[str, Any] = {}
    for file in ("experiments.toml", "benchmarks.toml"):
        content = parse_toml(resources.files(__package__).joinpath(file).read_bytes())
        tables = {**tables, **content, "files": {**tables.get("files", {}), **content["files"]}}
    needs = {path: Need(path, origin) for path, origin in tables.pop("files").items()}
    groups = {name: tuple(members) for name, members in tables.pop("several").items()}
    full = {name: {**tables.get(table.get("like", ""), {}), **table} for name, table in tables.items()}
    return {name: read_experiment(name, table, needs) for name, table in full.items()}, needs, groups


EXPERIMENTS, FILES, SEVERAL = read_experiments()
