"""Checkpoints that an earlier version wrote are gone on from, and end where that version ended."""

import dataclasses
import json
import shutil

import pytest
import torch

import equipoise as eq
from equipoise.errors import EquipoiseNotice
from equipoise.types import Observer
from stored_runs import FOLDER, INDEX, RUNS, STATES, classes_in, clients, softmax, written

STORED = json.loads(INDEX.read_text())


class SeesStates(Observer):
    """Which dataclasses the states of runs are made of: all of them, or those that runs begin with."""

    def __init__(self, *, all_rounds):
        self.all_rounds, self.kinds, self.first_round = all_rounds, set(), None

    def on_start(self, run):
        self.first_round = run.first_round

    def on_state(self, state):
        if self.all_rounds or state.round == self.first_round:
            for part in dataclasses.fields(state):
                self.look(getattr(state, part.name))

    def look(self, value):
        if dataclasses.is_dataclass(value):
            self.kinds.add(type(value))
            for part in dataclasses.fields(value):
                self.look(getattr(value, part.name))
        elif isinstance(value, tuple | list):
            for inner in value:
                self.look(inner)
        elif isinstance(value, dict):
            self.look(list(value.values()))


def resumed(name, folder, **more):
    """The run of a stored checkpoint, gone on with in a folder."""
    for file in (STORED[name]["file"], STORED[name]["rows"]):
        if file is not None:
            shutil.copy(FOLDER / file, folder / file)
    return RUNS[name]().train(checkpoint=folder / STORED[name]["file"], **more)


def near(found, expected):
    """Equal to six digits of the largest number; to five where numbers are float32."""
    expected = torch.tensor(expected, dtype=found.dtype)
    slack = (1e-6 if found.dtype == torch.float64 else 1e-5) * float(expected.abs().max())
    return found.shape == expected.shape and bool(((found - expected).abs() <= slack).all())


def test_every_run_is_stored():
    assert list(STORED) == list(RUNS)
    files = {file for entry in STORED.values() for file in (entry["file"], entry["rows"]) if file is not None}
    assert {path.name for path in FOLDER.iterdir()} == files | {INDEX.name}


@pytest.mark.parametrize("name", STORED)
def test_a_stored_checkpoint_ends_where_the_version_that_wrote_it_ended(name, tmp_path):
    stored, before = STORED[name], written(FOLDER / STORED[name]["file"])["rounds"]
    with pytest.warns(EquipoiseNotice, match="Going on from round 3 of 6.* written by an earlier version"):
        result = resumed(name, tmp_path)
    assert len(before) == stored["rounds_done"]
    assert result.rounds == len(result.history.rounds) == stored["rounds"]
    # Reports of rounds before are those of the file, to the second: nothing was trained again.
    kept = result.history.rounds[: len(before)]
    assert [(r.seconds, r.loss, r.trained) for r in kept] == [(r["seconds"], r["loss"], r["trained"]) for r in before]
    assert near(result.params, stored["params"])
    if stored["own_models"] is not None:
        assert near(result.personal.params(result.personal.ids), stored["own_models"])


def test_files_hold_the_classes_that_are_listed():
    found = {name: classes_in(written(FOLDER / entry["file"])["state"]) for name, entry in STORED.items()}
    assert {name: sorted(classes) for name, classes in found.items()} == {n: e["classes"] for n, e in STORED.items()}
    assert set().union(*found.values()) == STATES


def parts_of(module, **given):
    """All parts that a module names, as made by default or as given; None leaves one out."""
    names = getattr(module, "__all__", [n for n, v in vars(module).items() if isinstance(v, type)])
    kinds = [n for n in names if isinstance(getattr(module, n), type) and getattr(module, n).__module__.startswith("equipoise")]
    parts = {name: given[name] if name in given else getattr(module, name)() for name in kinds if not name.startswith("_")}
    return [part for part in parts.values() if part is not None]


def algorithms():
    """An algorithm with every part that keeps its state, each with the options by which it has one if it can."""
    r, full = eq.risk, eq.sampling.Full()
    slow = r.Superquantile(eta_every=2)
    risks = parts_of(
        r, Superquantile=slow, Tilted=r.Tilted(tracked=True), Mixture=r.Mixture((1.0, slow)), RiskValue=None,
        HierarchicalTilt=r.HierarchicalTilt(lambda client: client[-1]), GroupDRO=r.GroupDRO(0.1, lambda client: client[-1]),
    )  # fmt: skip
    for risk in risks:
        yield eq.Algorithm(risk=risk, sampler=full)
    schedules = dict.fromkeys(("Constant", "Cosine", "LinearDecay", "Step"))
    kept, given = eq.solvers.Adam(state="kept"), eq.solvers.AdaDPS({"weight": torch.ones(3)})
    for solver in parts_of(eq.solvers, AdaDPS=given, Adam=kept, **schedules):
        yield eq.Algorithm(solver=solver, sampler=full)
    inner = eq.aggregators.Median()
    for aggregator in parts_of(eq.aggregators, NNM=eq.aggregators.NNM(inner), Bucketing=eq.aggregators.Bucketing(inner)):
        yield eq.Algorithm(aggregator=aggregator, sampler=full)
    for server in parts_of(eq.server_opt, ABC=None):
        yield eq.Algorithm(server=server, sampler=full)
    for averaging in parts_of(eq.averaging, Geometric=eq.averaging.Geometric(0.1)):
        yield eq.Algorithm(averaging=averaging, sampler=full)
    mocha = eq.personal.Mocha(0.1, solver=eq.solvers.SGD(lr=0.01))
    for personal in parts_of(eq.personal, Mocha=mocha, Split=eq.personal.Split("bias")):
        yield eq.Algorithm(personal=personal, sampler=full)
    yield eq.Algorithm(privacy=eq.privacy.SecureAggregation(), sampler=full)


def test_every_class_that_a_state_can_hold_is_in_a_stored_file(tmp_path):
    read, held = SeesStates(all_rounds=False), SeesStates(all_rounds=True)
    for name in STORED:
        resumed(name, tmp_path, observers=[read])
    for algorithm in algorithms():
        eq.train(softmax(), clients(), algorithm, rounds=2, progress=False, observers=[held])
    assert held.kinds, "no run had a state"
    missing = {kind.__qualname__ for kind in held.kinds - read.kinds}
    assert not missing, f"add a run with a state of {missing} to tests/stored_runs.py, and write it"
