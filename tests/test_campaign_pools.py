"""Every part of the catalogue, and every function that `equipoise methods` lists, is tried by a driver of the campaign."""

import inspect
import sys
from dataclasses import fields, is_dataclass
from pathlib import Path

import pytest

from equipoise.experiment import catalog

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
if not (BENCHMARKS / "campaign.py").is_file():
    pytest.skip("the benchmarks are not part of this copy", allow_module_level=True)
sys.path.insert(0, str(BENCHMARKS))

import campaign  # noqa: E402, F401 — from benchmarks; it sets threads before torch is used
from campaign_drivers import functions, killed_runs, random_parts, scenes  # noqa: E402

DOWNLOADED = "its files are those of others, and have to be fetched; its reader is tested on small copies of them"
THEIRS = "femnist fashion_mnist omniglot shakespeare clothing stackoverflow sent140 adult vehicle mocha"
NOT_DRAWN = dict.fromkeys(THEIRS.split(), DOWNLOADED)
COVERED_OTHERWISE = {
    "equipoise:train_family": "a mode of the driver of kills",
    "equipoise:train_many": "a mode of the driver of kills, and a check of combinations",
    "equipoise:compare": "studies in the driver of kills train what it trains; it formats tables",
    "equipoise.solvers:AdaDPS": "in the pool of solvers",
}


def parts_in(drawn):
    """The classes of a part and of the parts in its parameters."""
    found = {type(drawn)}
    if is_dataclass(drawn):
        for value in (getattr(drawn, field.name) for field in fields(drawn)):
            found |= parts_in(value)
    elif isinstance(drawn, list | tuple):
        found |= {each for value in drawn for each in parts_in(value)}
    return found


def drawn_classes():
    pools = [part for pool in random_parts.POOLS.values() for part in pool]
    return {each for part in [*pools, *scenes.ATTACKS] for each in parts_in(part)}


def parts_of(*kinds):
    return [pytest.param(part, id=f"{part.kind} {part.name}") for kind in kinds for part in catalog.parts(kind)]


ALGORITHM = [kind for kind in catalog.kinds() if kind not in ("engine", "model", "data")]


@pytest.mark.parametrize("part", parts_of(*ALGORITHM))
def test_a_part_is_drawn(part):
    if inspect.isfunction(part.target):  # it makes a part of another class, such as FedBN a Split
        known = f"{part.kind}.{part.target.__name__}(" in inspect.getsource(random_parts)
    else:
        known = part.target in drawn_classes()
    assert known, f"add {part.python_path} to benchmarks/campaign_drivers/random_parts.py"


@pytest.mark.parametrize("part", parts_of("model"))
def test_a_model_is_trained(part):
    made = {type(model()) for _, model, _ in scenes.KINDS.values()}
    assert part.target in made, f"add a scene with {part.python_path} to benchmarks/campaign_drivers/scenes.py"


@pytest.mark.parametrize("part", parts_of("data"))
def test_data_are_trained_on(part):
    configured = {data["name"] for data, _ in killed_runs.configured().values()}
    listed = part.name in NOT_DRAWN
    assert (part.name in configured) != listed, f"add {part.name} to benchmarks/campaign_drivers/killed_runs.py, or a reason"


@pytest.mark.parametrize("name", catalog.FUNCTIONS)
def test_a_function_has_a_law(name):
    known = {each for law in functions.LAWS.values() for each in law}
    assert (name in known) != (name in COVERED_OTHERWISE), f"add a law of {name} to benchmarks/campaign_drivers/functions.py"


def test_engines_are_the_ones_that_are_compared():
    """Ray has tests of its own (tests/engines/test_ray_catalogue.py): starting a cluster for each case would take too long."""
    assert set(catalog.names("engine")) == {"simulator", "loop", "ray"}, "a new engine belongs into the drivers, too"


def test_parts_inside_parts_count():
    """The pools hold FedNova around a median: the search finds both, and no part that is in no pool."""
    from equipoise import aggregators

    assert parts_in(aggregators.FedNova(aggregators.Median())) >= {aggregators.FedNova, aggregators.Median}
    assert aggregators.Krum not in parts_in(aggregators.FedNova(aggregators.Median()))
