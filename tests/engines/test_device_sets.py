"""Data that are larger than a device: training on a window of them equals training on all of them."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import equipoise as eq
from equipoise.data.clients import ClientSet, Ragged
from equipoise.data.store.mapped_files import pages
from equipoise.engines.device_sets import DataWindow, DeviceSets, moved_in_pieces, set_bytes

CPU = torch.device("cpu")


def clients(sizes, kind="tensor"):
    rows = sum(sizes)
    numbers = torch.arange(rows, dtype=torch.float32)
    x = torch.stack([numbers, numbers.sin()], 1)
    if kind == "dict":
        lengths = [1 + row % 5 for row in range(rows)]
        words = Ragged.of([torch.arange(row, row + length) for row, length in enumerate(lengths)])
        x = {"words": words, "numbers": x}
    y = torch.arange(rows) % 3
    offsets = torch.tensor([0, *sizes]).cumsum(0)
    return ClientSet(x, y, offsets, tuple(f"c{k}" for k in range(len(sizes))))


def same_rows(window, source, positions):
    for k in positions.tolist():
        here, there = window.clients.rows(k), source.rows(k)
        rows, own = (torch.arange(part.start, part.stop) for part in (here, there))
        for mine, wanted in (
            (window.clients.inputs(rows), source.inputs(own)),
            (window.clients.targets(rows), source.targets(own)),
        ):
            pairs = [(mine, wanted)] if isinstance(mine, torch.Tensor) else [(mine[name], wanted[name]) for name in wanted]
            assert all(torch.equal(a, b) for a, b in pairs)


@given(st.lists(st.integers(1, 5), min_size=4, max_size=12), st.data(), st.sampled_from(["tensor", "dict"]))
@settings(max_examples=40, deadline=None)
def test_held_clients_have_their_own_rows_whatever_is_asked_and_expected(sizes, draw, kind):
    source = clients(sizes, kind)
    window = DataWindow(source, CPU, 2 * set_bytes(source) // 3)
    for _ in range(6):
        asked, expected = (
            torch.tensor(draw.draw(st.lists(st.integers(0, len(sizes) - 1), min_size=1, max_size=3))) for _ in range(2)
        )
        if int(source.sizes[asked.unique()].sum()) > window.capacity:
            continue
        if int(source.sizes[expected.unique()].sum()) <= window.capacity and draw.draw(st.booleans()):
            window.expect(expected)
        window.hold(asked)
        same_rows(window, source, asked)
        if len(asked) > 1:  # a part of what is held
            window.hold(asked[:1])
            same_rows(window, source, asked)


def test_a_cohort_that_was_expected_is_not_read_again():
    source = clients([2] * 10)
    window = DataWindow(source, CPU, set_bytes(source) // 5)
    cohorts = [torch.tensor([k, k + 1]) for k in (0, 4, 2, 8)]
    for now, following in zip(cohorts, [*cohorts[1:], cohorts[0]], strict=True):
        window.expect(following)
        window.hold(now)
        same_rows(window, source, now)
    assert window.missed == 1  # the first


def test_a_cohort_beyond_the_memory_is_refused_with_the_cure():
    window = DataWindow(clients([2] * 10), CPU, 100)
    with pytest.raises(eq.errors.InvalidData, match=r"10 clients of a round have 20 examples.*Take fewer clients per round"):
        window.hold(torch.arange(10))


def test_parts_fill_a_half_each():
    source = clients([3, 1, 2, 2, 5, 1])
    window = DataWindow(source, CPU, 5 * 16)
    parts = window.parts(torch.arange(6))
    assert window.capacity == 5
    assert [part.tolist() for part in parts] == [[0, 1], [2, 3], [4], [5]]
    sets = DeviceSets(CPU, eq.FederatedData(source), resident=False)
    assert torch.cat(list(sets.in_parts(sets[source], None))).tolist() == list(range(6))


def test_sets_that_are_resident_stay_as_they_are():
    source = clients([2, 2])
    sets = DeviceSets(CPU, eq.FederatedData(source))
    assert sets[source] is source
    assert sets.expecting(source) is None


ALGORITHMS = {
    "mean": eq.Algorithm(solver=eq.solvers.SGD(lr=0.1, batch_size=2)),
    "tail": eq.Algorithm(risk=eq.risk.Superquantile(tail=0.5), solver=eq.solvers.SGD(lr=0.1, batch_size=2)),
    "ditto": eq.Algorithm(solver=eq.solvers.SGD(lr=0.1, batch_size=2), personal=eq.personal.Ditto(strength=0.5)),
    "median": eq.Algorithm(aggregator=eq.aggregators.Median(), solver=eq.solvers.SGD(lr=0.1, batch_size=2)),
    "momentum": eq.Algorithm(solver=eq.solvers.SGD(lr=0.1, batch_size=2, momentum=0.5)),
}


@pytest.mark.filterwarnings("ignore::equipoise.errors.EquipoiseNotice")
@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("vectorised", [True, False], ids=["batched", "fallback"])
def test_training_on_a_window_is_training_on_everything(name, vectorised, monkeypatch):
    source = clients([3, 1, 4, 2, 5, 2, 3, 4, 1, 2])
    data = eq.FederatedData(source, None, clients([2, 3, 1, 4]))
    monkeypatch.setattr("equipoise.engines.device_sets._HALF_ON_CPU", 16 * 14)  # rows of 16 bytes
    windows = []

    def recorded(self, *arguments, **options):
        first(self, *arguments, **options)
        windows.append(self)

    first = DataWindow.__init__
    monkeypatch.setattr(DataWindow, "__init__", recorded)
    if not vectorised:
        monkeypatch.setattr("equipoise.engines.simulator.engine.SimulatorEngine.why_not_vectorised", lambda _: "a test")
    results = []
    for resident in (True, False):
        engine = eq.engines.Simulator(chunk_size=3, workers=1, compiled=False, resident=resident)
        made = eq.models.Softmax(2, 3)
        results.append(
            eq.train(made, data, ALGORITHMS[name], rounds=8, clients_per_round=3, seed=1, engine=engine, progress=False)
        )
    assert len(windows) == 2
    assert windows[0].missed <= 4
    everything, window = results
    assert torch.equal(everything.params, window.params)
    for one, other in zip(everything.history.evaluations, window.history.evaluations, strict=True):
        assert str(one.clients["loss"].tolist()) == str(other.clients["loss"].tolist())


def test_a_store_is_moved_in_pieces(tmp_path):
    source = clients([3, 1, 4, 2, 5])
    eq.data.write_store(source, tmp_path / "s")
    data = eq.data.open_store(tmp_path / "s", test=0.4)
    moved = moved_in_pieces(data.train, CPU)
    assert torch.equal(moved.inputs(slice(0, moved.examples)), torch.cat([data.train.client(at=k)[0] for k in range(3)]))


def test_pages_of_rows():
    values = torch.zeros(4 * 4096, dtype=torch.uint8)
    at = values.data_ptr()
    found = pages(values.view(-1, 16), np.array([700, 0, 2]), np.array([702, 1, 5]))
    assert found[0][0] <= at < found[0][0] + 4096
    assert found[0][0] % 4096 == 0
    assert found[-1][0] <= at + 700 * 16
    assert found[-1][0] + found[-1][1] == at + 702 * 16
    assert len(found) == 2
