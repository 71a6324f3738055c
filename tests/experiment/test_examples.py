"""The table files of examples/: each is on the page beside them, and each of their methods trains."""

import tomllib
from pathlib import Path

import pytest

from equipoise.experiment.build import build
from equipoise.experiment.config import RunConfig
from equipoise.experiment.config_tables import override
from equipoise.experiment.search import read_search
from equipoise.experiment.study import read_study

EXAMPLES = Path(__file__).parents[2] / "examples"
FILES = sorted(EXAMPLES.glob("*.toml"))
SMALL = {
    "label_shift": ["data.train_clients=12", "data.validation_clients=2", "data.test_clients=3", "train.clients_per_round=6"],
    "digits": [],
}


def configs(file, out):
    """The checked configurations of one round that a file describes: of a study with one seed, of a search, or of a run."""
    table = tomllib.loads(file.read_text())
    settings = ["train.rounds=1", *SMALL[table["data"]["name"]]]
    if "search" in table:
        search = read_search(file, settings)
        return [run.config for run in search.plan(search.points[0], out)]
    if "study" not in table:
        return [RunConfig.of(override(table, settings))]
    return [run.config for run in read_study(file, [*settings, "study.seeds=1"], out=out)]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_every_method_of_a_table_file_trains(file, tmp_path):
    found = configs(file, tmp_path)
    assert found
    for config in found:
        result = build(config).train(progress=False)
        assert len(result.history.rounds) == 1
        assert bool(result.params.isfinite().all())


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_table_file_is_on_the_page_of_examples(file):
    table = tomllib.loads(file.read_text())
    command = "tune" if "search" in table else "compare" if "study" in table else "run"
    assert f"`equipoise {command} examples/{file.name}" in (EXAMPLES / "README.md").read_text()
