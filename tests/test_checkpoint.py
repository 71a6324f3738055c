"""A run that stops and goes on ends as if it had never stopped."""

import re
from dataclasses import dataclass

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import nn

import equipoise as eq
from equipoise.errors import InvalidParameter, NotWritten, ObserverFailed
from equipoise.runs.checkpoint import CheckpointError, Checkpoints, packed, read_checkpoint, unpacked
from equipoise.types import Observer, RunSize

CPU = torch.device("cpu")


class Stop(Exception):
    pass


class StopsAt(Observer):
    def __init__(self, round_index):
        self.round_index = round_index

    def on_state(self, state):
        if state.round == self.round_index:
            raise Stop


ALGORITHMS = {
    "plain": eq.Algorithm(),
    "adam and a slow quantile": eq.Algorithm(
        risk=eq.risk.Superquantile(0.5, eta_every=3), server=eq.server_opt.Adam(lr=0.1), averaging=eq.averaging.Geometric(0.1)
    ),
    "tracked tilt and adaptive mu": eq.Algorithm(
        risk=eq.risk.Tilted(1.0, tracked=True), solver=eq.solvers.AdaptiveProx(eq.solvers.SGD(lr=0.3)),
        server=eq.server_opt.Momentum(),
    ),
    "AFL": eq.Algorithm(risk=eq.risk.WorstCase(), sampler=eq.sampling.Full()),
    "mixture": eq.Algorithm(risk=eq.risk.Mixture((0.5, eq.risk.Mean()), (0.5, eq.risk.Superquantile(0.2, eta_every=2)))),
    "stragglers": eq.Algorithm(solver=eq.solvers.SGD(epochs=3, straggler_share=0.5)),
}  # fmt: skip


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("stop", [1, 4, 7])
def test_stopping_and_going_on_changes_nothing(name, stop, ragged, tmp_path):
    options = {"rounds": 7, "clients_per_round": 4, "seed": 5, "evaluate_every": 2}
    whole = eq.train(eq.models.Softmax(4, 3), ragged, ALGORITHMS[name], **options)
    file = tmp_path / "state.safetensors"
    with pytest.raises(ObserverFailed):
        eq.train(eq.models.Softmax(4, 3), ragged, ALGORITHMS[name], observers=[StopsAt(stop)],
                 checkpoint=Checkpoints(file, every=1), **options)  # fmt: skip
    assert read_checkpoint(file).runs[0].state.round == stop - 1  # the observer stopped before this round's was written
    resumed = eq.train(eq.models.Softmax(4, 3), ragged, ALGORITHMS[name], checkpoint=file, **options)
    assert torch.equal(resumed.params, whole.params)
    assert [r.loss for r in resumed.history.rounds] == [r.loss for r in whole.history.rounds]
    assert [r.trained for r in resumed.history.rounds] == [r.trained for r in whole.history.rounds]
    assert resumed.history.points == whole.history.points
    assert torch.equal(resumed.clients.error, whole.clients.error)


def test_a_finished_run_is_not_run_again_and_can_be_extended(ragged, tmp_path):
    file = tmp_path / "state.safetensors"
    first = eq.train(eq.models.Softmax(4, 3), ragged, rounds=3, clients_per_round=4, checkpoint=file)
    again = eq.train(eq.models.Softmax(4, 3), ragged, rounds=3, clients_per_round=4, checkpoint=file)
    assert torch.equal(first.params, again.params)
    longer = eq.train(eq.models.Softmax(4, 3), ragged, rounds=6, clients_per_round=4, checkpoint=file)
    whole = eq.train(eq.models.Softmax(4, 3), ragged, rounds=6, clients_per_round=4)
    assert torch.equal(longer.params, whole.params)
    with pytest.raises(CheckpointError, match="already at round 6, beyond rounds = 3"):
        eq.train(eq.models.Softmax(4, 3), ragged, rounds=3, clients_per_round=4, checkpoint=file)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"seed": 1}, "differs in seed: 0 there, 1 here"),
        ({"clients_per_round": 3}, "differs in clients_per_round: 4 there, 3 here"),
        ({"algorithm": eq.Algorithm(risk=eq.risk.QFair())}, "differs in algorithm: "),
        ({"model": eq.models.Softmax(4, 3, bias=False)}, "differs in model: Softmax with 15 parameters there, Softmax with 12"),
    ],
)
def test_the_checkpoint_of_another_run_is_refused(change, words, ragged, tmp_path):
    file = tmp_path / "state.safetensors"
    options = {"model": eq.models.Softmax(4, 3), "data": ragged, "rounds": 2, "clients_per_round": 4, "checkpoint": file}
    eq.train(**options)
    with pytest.raises(CheckpointError) as caught:
        eq.train(**(options | change))
    assert words in str(caught.value)


def test_a_damaged_file_is_refused_with_its_path(ragged, tmp_path):
    file = tmp_path / "state.safetensors"
    for content in (b"", b"not a checkpoint at all", b"\x08\x00\x00\x00\x00\x00\x00\x00{}      "):
        file.write_bytes(content)
        with pytest.raises(CheckpointError, match=r"state\.safetensors is no checkpoint of a run"):
            eq.train(eq.models.Softmax(4, 3), ragged, rounds=2, clients_per_round=4, checkpoint=file)


@pytest.mark.parametrize(
    ("parts", "ending"),
    [({"solver": eq.solvers.Scaffold(eq.solvers.SGD())}, "solver"), ({"personal": eq.personal.Ditto()}, "clients")],
    ids=["solver", "personal"],
)
@pytest.mark.filterwarnings("ignore::equipoise.errors.EquipoiseNotice")
def test_a_missing_file_beside_a_checkpoint_is_named_with_the_cure(parts, ending, ragged, tmp_path):
    def go(rounds):
        eq.train(
            eq.models.Softmax(4, 3), ragged, eq.Algorithm(**parts), rounds=rounds, clients_per_round=4, progress=False,
            checkpoint=tmp_path / "run.safetensors",
        )  # fmt: skip

    go(1)
    (tmp_path / f"run.{ending}.npy").unlink()
    with pytest.raises(eq.errors.EquipoiseError, match=rf"run\.{ending}\.npy, which holds .* is missing\. Copy it there"):
        go(2)


def test_an_unwritable_place_fails_before_any_round(ragged, tmp_path):
    (tmp_path / "file").write_text("")
    seen = []

    class Counts(Observer):
        def on_round(self, report):
            seen.append(report)

    with pytest.raises(NotWritten, match="could not be written"):
        eq.train(eq.models.Softmax(4, 3), ragged, rounds=2, clients_per_round=4, checkpoint=tmp_path / "file" / "state",
                 observers=[Counts()])  # fmt: skip
    assert not seen


@dataclass(frozen=True, eq=False)
class Own:
    tensor: torch.Tensor
    inner: object


@given(
    value=st.recursive(
        st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | st.text(),
        lambda inner: st.lists(inner, max_size=3) | st.tuples(inner, inner) | st.dictionaries(st.text(), inner, max_size=3),
        max_leaves=8,
    )
)
def test_states_survive_packing(value):
    tensors = {}
    whole = Own(torch.arange(3.0), value)
    found = unpacked(packed(whole, tensors, "risk"), tensors, CPU)
    assert torch.equal(found.tensor, whole.tensor)
    assert found.inner == value
    assert type(found.inner) is type(value)


def test_what_cannot_be_kept_is_named():
    with pytest.raises(NotWritten, match="The state of aggregator holds a set"):
        packed({1, 2}, {}, "aggregator")


def test_a_file_does_not_decide_what_is_imported():
    for path in ("antigravity:Anything", "os:system", "builtins:dict", "equipoise.types:no_such"):
        with pytest.raises(InvalidParameter, match="must hold states of known dataclasses"):
            unpacked({"class": path, "fields": {}}, {}, CPU)


def test_a_state_is_read_by_the_module_that_its_class_was_in_before():
    """A risk of the user's own may keep such a state; `equipoise.types` was one module."""
    fields = {"clients": 3, "clients_per_round": 2, "rounds": 1, "dimension": 4, "seed": 0, "ids": {"tuple": []}}
    for path in ("equipoise.types:RunSize", packed(RunSize(3, 2, 1, 4, 0), {}, "risk")["class"]):
        assert unpacked({"class": path, "fields": fields}, {}, CPU) == RunSize(3, 2, 1, 4, 0)


def test_a_checkpoint_that_lacks_a_mark_of_its_run_is_refused_by_the_name_of_it(tmp_path, ragged):
    model, path = nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5)), tmp_path / "run.ckpt"
    options = {"clients_per_round": 4, "progress": False}
    eq.train(model, ragged, rounds=1, checkpoint=path, **options)
    whole = path.read_bytes()
    marks = list(read_checkpoint(path).runs[0].identity)
    assert {"dropout", "seed", "data"} <= set(marks)
    for mark in marks:
        path.write_bytes(whole)
        saved = read_checkpoint(path)
        del saved.runs[0].identity[mark]
        path.write_bytes(saved.bytes())
        with pytest.raises(CheckpointError, match=f"differs in {re.escape(mark)}: …?nothing"):
            eq.train(model, ragged, rounds=2, checkpoint=path, **options)
