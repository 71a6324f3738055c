import importlib
import inspect
import tomllib

import pytest

import equipoise as eq
from equipoise.errors import ConfigError
from equipoise.experiment import catalog, toml
from equipoise.experiment.part_config import OBJECTS_FROM_DATA, check_part
from equipoise.experiment.recorded import describe_part

HOMES = {
    "risk": "equipoise.risk",
    "solver": "equipoise.solvers",
    "aggregator": "equipoise.aggregators",
    "server": "equipoise.server_opt",
    "sampler": "equipoise.sampling",
    "averaging": "equipoise.averaging",
    "engine": "equipoise.engines",
    "model": "equipoise.models",
}
NOT_PARTS = {"RiskValue"}  # values that pass between parts
ALL = [part for kind in catalog.kinds() for part in catalog.parts(kind)]


def public_classes(module):
    names = getattr(module, "__all__", None) or [n for n in vars(module) if not n.startswith("_")]
    found = [getattr(module, name) for name in names]
    own = [c for c in found if inspect.isclass(c) and c.__module__.startswith(module.__name__)]
    return [c for c in own if c.__name__ not in NOT_PARTS and not inspect.isabstract(c)]


@pytest.mark.parametrize(("kind", "home"), HOMES.items())
def test_every_public_part_is_in_the_catalogue(kind, home):
    listed = {part.target for other in (kind, "schedule") for part in catalog.parts(other)}  # schedules live with solvers
    listed |= {catalog.CatalogPart("function", name, catalog.Entry(name)).target for name in catalog.FUNCTIONS}  # Python only
    missing = [c.__name__ for c in public_classes(importlib.import_module(home)) if c not in listed]
    assert not missing, f"add a line to [parts.{kind}] of catalog.toml for {missing}"


@pytest.mark.parametrize("part", ALL, ids=lambda p: f"{p.kind}-{p.name}")
def test_every_part_can_be_read_and_described(part):
    assert callable(part.target)
    assert part.summary
    for parameter in part.all_parameters:
        assert parameter.in_config or not parameter.required or parameter.name in OBJECTS_FROM_DATA, parameter.name
        assert parameter.text.startswith(parameter.name)


class Described:
    """What it is.

    More of it. Source: Someone 2020,
    over two lines.

    And more.
    """


def test_a_source_ends_with_its_paragraph_and_a_first_line_is_the_summary():
    described = catalog.CatalogPart("risk", "described", catalog.Entry(f"{__name__}:Described"))
    assert (described.summary, described.source) == ("What it is.", "Someone 2020, over two lines.")
    part = catalog.part("risk", "superquantile")
    assert part.source.startswith("Pillutla et al. 2023, (5)–(7)")
    assert part.summary == "The mean loss of the worst tail of clients (CVaR), which Δ-FL minimises."
    assert part.parameters["tail"].text == "tail: float = 0.5"
    assert part.parameters["nu"].text == "nu: float or none = none"


def test_entries_can_fix_and_rename_parameters():
    assert "folder" in catalog.part("data", "leaf").parameters
    assert "path" not in catalog.part("data", "leaf").parameters
    clothing = catalog.part("data", "clothing")
    assert "name" not in clothing.parameters
    assert 'name = "clothing"' in clothing.summary
    assert "vectors" not in clothing.parameters  # an object, which only Python code can give


def test_an_unknown_name_is_answered_with_the_nearest_and_all():
    with pytest.raises(
        ConfigError,
        match=r"algorithm\.risk\.name: Unknown risk 'maen'\. Did you mean 'mean'\? Allowed: .*mean, mix",
    ):
        catalog.part("risk", "maen", where="algorithm.risk.name")


def test_defaults_of_an_algorithm_are_known_parts():
    for kind, name in catalog.ALGORITHM_PARTS.items():
        assert name in catalog.names(kind)


@pytest.mark.parametrize("part", ALL, ids=lambda part: f"{part.kind} {part.name}")
def test_every_part_says_what_it_is_and_where_it_comes_from(part):
    assert part.summary
    assert part.source


@pytest.mark.parametrize("function", catalog.FUNCTIONS)
def test_every_listed_function_is_described_with_its_source(function):
    part = catalog.CatalogPart("function", function, catalog.Entry(function))
    assert callable(part.target)
    assert part.summary
    assert part.source


PHASES = (("all", None), ("kept", 2), ("shared", None))


@pytest.mark.parametrize("personal", [
    eq.personal.FedPer("head"), eq.personal.FedRep("head", 3, 2), eq.personal.FedBABU("head", 4), eq.personal.LGFedAvg("body"),
    eq.personal.FedBN(), eq.personal.Split(("a", "b"), PHASES, finetuning=1),
], ids=repr)  # fmt: skip
def test_a_split_model_is_the_same_when_it_is_read_back(personal):
    """FedRep was written down as FedPer, because no configuration held its phases; nodes then trained FedPer."""
    text = toml.dumps(describe_part("personal", personal))
    assert check_part("personal", tomllib.loads(text), "personal").make("personal") == personal


@pytest.mark.parametrize("part", [p for p in ALL if p.kind not in ("model", "data")], ids=lambda p: f"{p.kind}-{p.name}")
def test_a_configuration_holds_every_parameter_of_an_algorithms_part(part):
    assert [p.name for p in part.all_parameters if not p.in_config] == []
