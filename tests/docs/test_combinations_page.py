"""The page of what goes with what: a part that needs another one has it."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "docs" / "_ext"))

import combinations_page

PARTS = combinations_page.examples()
DEFAULTS = [("risk", "Mean"), ("solver", "SGD"), ("aggregator", "WeightedMean"), ("server", "SGD"), ("averaging", "Last")]


@pytest.mark.parametrize(("kind", "name"), DEFAULTS)
def test_what_an_algorithm_has_anyway_goes_with_every_part(kind, name):
    default = (kind, name, PARTS[kind][name])
    others = [(k, n, part) for k, parts in PARTS.items() if k != kind for n, part in parts.items()]
    assert {n: reason for k, n, part in others if (reason := combinations_page.tried(default, (k, n, part)))} == {}
