"""The Flower engine without faults: what travels, who takes part, and agreement with the loop engine, bit for bit."""

from __future__ import annotations

import ast
import json
import logging
import math
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from fake_grid import FakeGrid, federation, inflated, one_client, run_app
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from hypothesis import given
from hypothesis import strategies as st

import equipoise as eq
from equipoise.data.clients import FederatedData
from equipoise.engines import flower
from equipoise.engines.flower import client_app, server_app
from equipoise.engines.flower.apps.members import Member, make_stand_in
from equipoise.engines.flower.apps.model_source import make_model
from equipoise.engines.flower.apps.node_data import read_node_data
from equipoise.engines.flower.personal.kept_rows import RECORD
from equipoise.engines.flower.transport import messages, part_messages
from equipoise.engines.flower.transport.messages import BadMessage
from equipoise.engines.flower.transport.messenger import TooFewClients
from equipoise.errors import ConfigError, EquipoiseNotice, IncompatibleParts, InvalidData, InvalidParameter
from equipoise.experiment.folder import RunFolder, read_record
from equipoise.experiment.recorded import read_config
from equipoise.solvers.prepared import AdjustedSolver
from equipoise.types import Observer
from made_clients import make_clients

logging.getLogger("flwr").setLevel("ERROR")
SGD = eq.solvers.SGD


def some_data(*, inside=True):
    """Five clients with further examples of their own, or with two unseen clients to test on."""
    test = make_clients([5, 9, 14, 3, 7], seed=1) if inside else make_clients([5, 9], seed=1, prefix="unseen")
    return FederatedData(make_clients([6, 9, 12, 15, 20]), make_clients([4, 4, 5, 4, 4], seed=2), test, name="ragged")


def softmax():
    return eq.models.Softmax(4, 3)


def run(algorithm, clients_data, grid=None, *, model=softmax, rounds=3, clients_per_round=4, clients=5, config=None, **options):
    """A federated run in memory: its result and its grid."""
    grid = grid or federation(clients_data, model)
    found = []
    options = {"timeout": 20.0, "pause": 0.0, "seed": 3, **options}
    app = server_app(
        algorithm, model=model, rounds=rounds, clients_per_round=clients_per_round, clients=clients, on_result=found.append,
        **options,
    )  # fmt: skip
    run_app(app, grid, **(config or {}))
    return found[0], grid


def simulate(algorithm, data, *, model=softmax, rounds=3, clients_per_round=4, **options):
    """The same in a simulation: `model` is made under the seed, as the server makes it."""
    maker = (lambda seed: model()) if not isinstance(model, torch.nn.Module) else model
    return eq.train(
        maker, data, algorithm, rounds=rounds, clients_per_round=clients_per_round, seed=3, engine="loop", **options
    )  # fmt: skip


def same_table(first, second):
    assert first.client == second.client
    assert first.split == second.split
    for column in ("seen", "size", "loss", "error"):
        assert torch.equal(first[column], second[column]), column


# ------------------------------------------------------------------------------------------------------------------ messages


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.uint8])
def test_tensors_come_back_as_they_were(dtype):
    tensor = (torch.arange(6).reshape(2, 3) * 3).to(dtype)
    array = messages.tensor_to_array(tensor)
    back = messages.array_to_tensor(array, "t", dtype, (2, 3))
    assert torch.equal(back, tensor)
    assert back.dtype == dtype
    assert len(array.data) == tensor.numel() * tensor.element_size()


def test_bytes_are_little_endian():
    assert messages.tensor_to_array(torch.tensor([1.0])).data == b"\x00\x00\x80\x3f"
    assert messages.tensor_to_array(torch.tensor([258])).data == b"\x02\x01" + bytes(6)


@given(st.lists(st.floats(width=32, allow_nan=True, allow_infinity=True), max_size=5))
def test_every_float_travels(values):
    tensor = torch.tensor(values, dtype=torch.float32)
    content = messages.write_message(4, "token", {"a": 1, "b": [True, None, "text"], "c": 0.1}, {"t": tensor})
    parcel = messages.read_message(content)
    back = parcel.tensor("t", torch.float32, (len(values),))
    assert back.numpy().tobytes() == tensor.numpy().tobytes()
    assert (parcel.round, parcel.token) == (4, "token")
    assert parcel.values == {"a": 1, "b": [True, None, "text"], "c": 0.1}


@pytest.mark.parametrize(
    ("array", "said"),
    [
        (Array("float32", (3,), messages.RAW, bytes(12)), "shape"),
        (Array("float64", (2,), messages.RAW, bytes(16)), "float64"),
        (Array("float32", (2,), messages.RAW, bytes(7)), "7 bytes"),
        (Array("float32", (2,), messages.RAW, bytes(4_000)), "4000 bytes"),
        (Array(np.zeros(2, dtype=np.float32)), "numpy.ndarray"),  # Flower's own form, which is read by numpy.load
    ],
)
def test_tensors_that_are_not_as_asked_are_refused(array, said):
    parcel = messages.MessageContent(0, "", {}, {"t": array})
    with pytest.raises(BadMessage, match=said):
        parcel.tensor("t", torch.float32, (2,))


def test_messages_that_are_none_are_refused():
    def content(**call):
        right = {"protocol": messages.PROTOCOL, "round": 1, "token": "t", "values": "{}"}
        return RecordDict({"call": ConfigRecord({**right, **call}), "tensors": ArrayRecord()})

    messages.read_message(content())
    bad = [
        RecordDict(), RecordDict({"call": ConfigRecord({"a": 1})}), content(protocol=99), content(round="1"), content(token=3),
        content(values="[]"), content(values="{"), content(values='{"a": NaN}'), content(values="[" * 100_000),
        content(values='"' + "x" * messages.LARGEST_TEXT + '"'),
    ]  # fmt: skip
    for each in bad:
        with pytest.raises(BadMessage):
            messages.read_message(each)


def test_small_tensors_travel_inside_the_call_and_come_out_as_they_were():
    tensors = {"update": torch.randn(3, 5), "loss": torch.tensor([math.pi], dtype=torch.float64), "none": torch.zeros(0)}
    loose = messages.write_message(4, "token", {"a": 1}, tensors, "mark")
    packed = inflated(messages.compacted(loose))
    assert list(packed) == ["call"]
    read = messages.read_message(packed)
    assert (read.round, read.token, read.values, read.data, read.compact) == (4, "token", {"a": 1}, "mark", True)
    assert read.size == messages.count_bytes(loose) == messages.read_message(loose).size
    assert not messages.read_message(loose).compact
    for name, tensor in tensors.items():
        assert torch.equal(read.tensor(name, tensor.dtype, tuple(tensor.shape)), tensor)
    large = messages.write_message(0, "t", {}, {"w": torch.zeros(messages.LARGEST_COMPACT // 4 + 1)})
    assert messages.compacted(large) is large  # Flower sends it to the SuperLink once for all nodes


@pytest.mark.parametrize(
    ("table", "data"),
    [
        ("{}", b""), ("[", b""), ("[[]]", b""), ('[["w","float32",[2],"raw",9]]', bytes(8)), ("[" * 100_000, b""),
        ('[["w","float32",[2],"raw",-1]]', bytes(8)), ('[["w","float32",[-2],"raw",8]]', bytes(8)), ("[]", "text"),
        ('[["w","float32",2,"raw",8]]', bytes(8)), ('[[1,"float32",[2],"raw",8]]', bytes(8)), (3, b""),
        ('[["w","float32",[2],"raw",true]]', bytes(8)), (str([["w"]] * (messages.MOST_TENSORS + 1)), b""),
    ],
)  # fmt: skip
def test_tables_of_tensors_that_make_no_sense_are_refused(table, data):
    call = {"protocol": messages.PROTOCOL, "round": 1, "token": "t", "values": "{}", "arrays": table, "bytes": data}
    with pytest.raises(BadMessage):
        messages.read_message(RecordDict({"call": ConfigRecord(call)}))


def test_bytes_of_a_message_are_counted():
    content = messages.write_message(0, "t", {}, {"w": torch.zeros(10)})
    names = len("protocol") + len("round") + len("token") + len("values") + len("w")
    assert messages.count_bytes(content) == names + 8 + 8 + 1 + len("{}") + 40


# --------------------------------------------------------------------------------------------------------------------- parts


def travelled(kind, part, allow=()):
    tensors = {}
    text = json.dumps(part_messages.pack_part(kind, part, tensors), allow_nan=False)
    return part_messages.unpack_part(json.loads(text), tensors, allow)


@pytest.mark.parametrize(
    ("kind", "part"),
    [
        ("solver", SGD(lr=0.3, steps=4, momentum=0.5, batch_size=None)),
        ("solver", eq.solvers.MAML(lr=0.2)),
        (
            "solver",
            eq.solvers.AdamW(lr=0.01, clip_norm=1.0, schedule=eq.solvers.Cosine(9, warmup=2), rates={"layer.*": 0.5}),
        ),
        ("solver", SGD(momentum=0.5, nesterov=True, local_schedule=eq.solvers.Step(3))),
        ("personal", eq.personal.Ditto(strength=0.5, choices=(0.1, 1.0), solver=SGD(lr=0.01))),
        ("personal", eq.personal.APFL()),
        ("aggregator", eq.aggregators.NormClip(2.0)),
        ("risk", eq.risk.Superquantile(tail=0.3, quantile=eq.privacy.SecureSums(iterations=7))),
        ("risk", eq.risk.Superquantile(quantile=eq.privacy.PrivateQuantile(bound=1.5, bins=8))),
        ("risk", eq.risk.Mixture((0.3, eq.risk.Mean()), (0.7, eq.risk.Tilted(tilt=2.0)))),
    ],
)
def test_parts_travel_by_name(kind, part):
    assert part_messages.pack_part(kind, part, {})["table"]["name"]
    assert travelled(kind, part) == part


@dataclass(frozen=True)
class OwnSolver:
    """Plain gradient steps with a rate for each parameter."""

    rates: torch.Tensor
    inner: SGD
    weights: tuple[float, ...] = (1.0, float("inf"))

    batch_size = None

    def local_steps(self, size, effort=None):
        return self.inner.local_steps(size, effort)

    def learning_rate(self, round_index):
        return self.inner.learning_rate(round_index)

    def begin(self, weights):
        return ()

    def step(self, weights, gradient, memory, *, anchor, lr):
        weights.sub_(lr * self.rates * gradient)


def test_own_parts_travel_by_path_where_they_are_allowed():
    own = OwnSolver(torch.tensor([1.0, 2.0]), SGD(lr=0.2))
    with pytest.raises(part_messages.PartNotSent, match="not allowed on this node"):
        travelled("solver", own)
    back = travelled("solver", own, allow=[__name__])
    assert isinstance(back, OwnSolver)
    assert torch.equal(back.rates, own.rates)
    assert (back.inner, back.weights) == (own.inner, own.weights)


def test_what_looks_around_before_a_round_travels_with_its_tensor():
    made = travelled("solver", AdjustedSolver(SGD(lr=0.2), torch.arange(3.0)))
    assert isinstance(made, AdjustedSolver)
    assert torch.equal(made.shared_gradient, torch.arange(3.0))


@pytest.mark.parametrize(
    "sent",
    [
        {"class": "os:system", "fields": {}},
        {"class": "subprocess:Popen", "fields": {"args": "true"}},
        {"class": "equipoise.risks_of_mine:Thing", "fields": {}},  # a name that only begins like ours
        {"class": "equipoise.solvers.sgd:stragglers", "fields": {}},  # no class
        {"class": "equipoise.solvers.no_such_module:SGD", "fields": {}},
        {"class": "equipoise.solvers.sgd:SGD", "fields": {"lr": 0.1, "shell": "true"}},
        {"kind": "data", "table": {"name": "digits"}},
        {"kind": "engine", "table": {"name": "loop"}},
        "text",
        {"class": "equipoise.solvers.sgd:SGD", "fields": {"lr": {"tensor": "missing"}}},
    ],
)
def test_parts_that_a_node_does_not_make(sent):
    with pytest.raises(part_messages.PartNotSent):
        part_messages.unpack_part(sent, {})


def test_bad_values_are_refused_by_the_part_itself():
    with pytest.raises(InvalidParameter, match="lr"):
        part_messages.unpack_part({"class": "equipoise.solvers.sgd:SGD", "fields": {"lr": -1.0}}, {})
    with pytest.raises(ConfigError, match="lr"):
        part_messages.unpack_part({"kind": "solver", "table": {"name": "sgd", "lr": -1.0}}, {})


def test_a_part_that_cannot_travel_says_so():
    local = type("Local", (), {"local_steps": None})()
    with pytest.raises(part_messages.PartNotSent, match="dataclass"):
        part_messages.pack_part("solver", local, {})


# --------------------------------------------------------------------------------------------------------- nodes and their data


def context(**config):
    return SimpleNamespace(node_id=11, node_config=config, run_config={}, state=RecordDict())


def test_what_load_data_may_give():
    x, y = torch.randn(5, 2), torch.tensor([0, 1, 0, 1, 1])
    alone = read_node_data((x, y), context())
    assert (alone.client, alone.sizes) == ("11", {"train": 5})
    both = read_node_data(((x, y), (x[:2], y[:2])), context(**{"partition-id": 4}))
    assert (both.client, both.sizes) == ("4", {"train": 5, "test": 2})
    named = read_node_data(
        {"train": (x, y), "validation": (x[:1], y[:1]), "test": None, "id": "ward 3"}, context(**{"client-id": "a"})
    )
    assert (named.client, named.sizes) == ("ward 3", {"train": 5, "validation": 1})
    tested = read_node_data({"test": (x.numpy(), y.numpy())}, context(**{"client-id": "a"}))
    assert (tested.client, tested.sizes, tested.trains) == ("a", {"test": 5}, False)
    dataset = torch.utils.data.TensorDataset(x, y)
    assert torch.equal(read_node_data(dataset, context()).data.train.x, x)
    assert torch.equal(read_node_data((dataset, dataset), context()).data.test.y, y)
    assert read_node_data(one_client(some_data(), "client-2"), context()).client == "client-2"


@pytest.mark.parametrize("given", [{}, {"training": 1}, "text", (1, 2, 3), {"train": (torch.zeros(3, 2),)}, some_data(), []])
def test_what_load_data_may_not_give(given):
    with pytest.raises((InvalidParameter, InvalidData)):
        read_node_data(given, context())


def test_nested_trees_of_load_data_are_refused_with_the_cure():
    x, y = torch.zeros(3, 2), torch.tensor([0, 1, 0])
    nested = ({"a": {"b": x}}, y)
    for each in (nested, {"train": nested}, (nested, nested)):
        with pytest.raises(InvalidData, match=r"x\['a'\] is a dict, but trees have one level"):
            read_node_data(each, context())
    assert read_node_data((({"a": x}, y), ({"a": x}, y)), context()).sizes == {"train": 3, "test": 3}


def test_models_may_be_made_in_several_ways():
    class Net(torch.nn.Linear):
        def __init__(self):
            super().__init__(3, 2)

    module = Net()
    assert make_model(module, 1) is module
    first, again, other = make_model(Net, 1), make_model(lambda: Net(), 1), make_model(Net, 2)
    assert torch.equal(first.weight, again.weight)
    assert not torch.equal(first.weight, other.weight)
    assert torch.equal(make_model(lambda seed: Net(), 1).weight, first.weight)
    for bad in (3, lambda: 4, lambda a, b: Net()):
        with pytest.raises(InvalidParameter, match="model"):
            make_model(bad, 0)


def member(name, train=3, test=2, **more):
    x, y = {"shape": [4], "dtype": "float32"}, {"shape": [], "dtype": "int64"}
    return Member(name, {"train": train, "test": test}, x, y, 3, f"mark {name}", **more)


def test_stand_ins_have_real_names_and_sizes_and_no_examples():
    data = make_stand_in([member("10", 7), member("9", 5), member("2", 10**6)], "mine")
    assert data.train.ids == ("2", "9", "10")
    assert data.train.sizes.tolist() == [10**6, 5, 7]
    assert data.features == 4
    assert data.classes == 3
    assert data.train.x.untyped_storage().nbytes() == 4  # one example, for a million
    assert float(data.train.x[-1].abs().sum()) == 0
    other = make_stand_in([member("10", 7), member("9", 5), replace(member("2", 10**6), fingerprint="changed")], "mine")
    assert data.fingerprint != other.fingerprint
    with pytest.raises(InvalidData, match="different shape"):
        make_stand_in([member("1"), replace(member("2"), x={"shape": [5], "dtype": "float32"})], "mine")
    with pytest.raises(InvalidData, match="train"):
        make_stand_in([replace(member("1"), splits={"test": 4})], "mine")


# ----------------------------------------------------------------------------------------------------------------- agreement

ALGORITHMS = {
    "FedAvg": eq.Algorithm(),
    "Δ-FL": eq.Algorithm(risk=eq.risk.Superquantile(tail=0.5)),
    "q-fair, Adam": eq.Algorithm(risk=eq.risk.QFair(q=1.0), server=eq.server_opt.Adam(lr=0.05)),
    "median, stragglers": eq.Algorithm(
        aggregator=eq.aggregators.Median(), solver=SGD(epochs=3, momentum=0.3, straggler_share=0.5)
    ),
    "μ that adapts": eq.Algorithm(solver=eq.solvers.AdaptiveProx(SGD(prox=0.5))),
    "FedDane": eq.Algorithm(solver=eq.solvers.FedDane()),
    "MAML": eq.Algorithm(risk=eq.risk.QFair(q=1.0), solver=eq.solvers.MAML()),
}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_federation_ends_with_the_model_of_the_loop_engine(name):
    data = some_data(inside=False)
    wanted = simulate(ALGORITHMS[name], data)
    found, grid = run(ALGORITHMS[name], data, clients=7)
    assert torch.equal(found.params, wanted.params)
    same_table(found.clients, wanted.clients)
    assert not found.clients.where("test").seen.any()
    for ours, theirs in zip(found.history.rounds, wanted.history.rounds, strict=True):
        assert (ours.loss, ours.tail_loss, ours.trained) == (theirs.loss, theirs.tail_loss, theirs.trained)
        assert ours.missing == {}
        assert ours.bytes_sent == sum(sent for sent, _ in ours.bytes_by_client.values()) > 0
        assert ours.bytes_received == sum(received for _, received in ours.bytes_by_client.values()) > 0
    assert {client for client, action, _ in grid.log if action == "train.update"} <= set(data.train.ids)


def test_filtered_clients_are_not_asked_to_train():
    data = some_data()
    found, grid = run(ALGORITHMS["Δ-FL"], data, rounds=2)
    asked = [sum(a == "train.update" and r == t for _, a, r in grid.log) for t in range(2)]
    assert asked == [report.trained for report in found.history.rounds]
    assert asked[1] < 4


def test_updates_travel_as_raw_floats():
    data = some_data()
    _, grid = run(eq.Algorithm(), data, rounds=1)
    client, _, reply = next(each for each in grid.replies if each[1] == "train.update")
    array = reply.content["tensors"]["update"]
    assert (array.stype, array.dtype, tuple(array.shape), len(array.data)) == (messages.RAW, "float32", (15,), 60)
    assert client in data.train.ids


def test_a_model_with_random_weights_and_a_frozen_part():
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = torch.nn.Linear(4, 6), torch.nn.Linear(6, 3)
            self.first.requires_grad_(False)

        def forward(self, x):
            return self.second(torch.relu(self.first(x)))

    data = some_data()
    found, _ = run(eq.Algorithm(), data, model=Net)
    assert torch.equal(found.params, simulate(eq.Algorithm(), data, model=Net).params)
    assert torch.equal(found.model.first.weight, make_model(Net, 3).first.weight)


def test_an_own_solver_runs_where_nodes_allow_it():
    data, solver = some_data(), OwnSolver(torch.linspace(0.5, 2, 15), SGD(batch_size=None), (1.0,))
    algorithm = eq.Algorithm(solver=solver)
    found, _ = run(algorithm, data, federation(data, softmax, allow=[__name__]), rounds=2)
    assert torch.equal(found.params, simulate(algorithm, data, rounds=2).params)
    with pytest.raises(TooFewClients, match="PartNotSent"):
        run(algorithm, data, rounds=1, retries=0)


# --------------------------------------------------------------------------------------------------------- models of their own

PERSONAL = {
    "Ditto": eq.Algorithm(personal=eq.personal.Ditto(strength=0.5)),
    "Ditto with choices, Δ-FL": eq.Algorithm(
        risk=eq.risk.Superquantile(tail=0.5), personal=eq.personal.Ditto(choices=(0.1, 1.0), solver=SGD(lr=0.05))
    ),
    "finetuning": eq.Algorithm(personal=eq.personal.Finetuning(epochs=2)),
    "Mapper, which sends other updates": eq.Algorithm(personal=eq.personal.Mapper()),
    "APFL": eq.Algorithm(personal=eq.personal.APFL()),
    "APFL, stragglers": eq.Algorithm(
        solver=SGD(lr=0.1, batch_size=4, epochs=4, straggler_share=0.7), personal=eq.personal.APFL(0.7, mix_lr=0.1)
    ),
}


@pytest.mark.parametrize("name", PERSONAL)
def test_own_models_are_those_of_the_loop_engine_and_stay_on_the_nodes(name):
    data = some_data()
    wanted = simulate(PERSONAL[name], data)
    found, grid = run(PERSONAL[name], data)
    assert torch.equal(found.params, wanted.params)
    same_table(found.clients, wanted.clients)
    for column in ("personal_loss", "personal_error"):
        assert torch.equal(found.clients[column], wanted.clients[column])
    assert found.personal is None
    for _, action, reply in grid.replies:
        if action == "train.own" and "send" not in json.loads(reply.content["call"]["values"]):
            assert set(reply.content["tensors"]) <= {"update"}  # what Mapper sends for the shared model
        if action == "evaluate.own":
            assert all(tuple(array.shape) == (2,) for array in reply.content["tensors"].values())


def test_a_node_keeps_its_own_model_in_flowers_state():
    data = some_data()
    wanted = simulate(PERSONAL["Ditto"], data)
    _, grid = run(PERSONAL["Ditto"], data)
    for node, client in grid.names.items():
        rows = grid.contexts[node].state.get(RECORD)
        assert 1 <= len(rows) <= 2
        latest = max(rows, key=lambda key: int(key.rsplit(" ", 1)[1]))
        own = messages.array_to_tensor(rows[latest], "row", torch.float32, (15,))
        assert torch.equal(own, wanted.personal.params([client])[0])


def test_methods_that_need_everybodys_models_are_refused():
    data = some_data()
    with pytest.raises(IncompatibleParts, match="stay on their nodes"):
        run(eq.Algorithm(personal=eq.personal.L2SGD()), data)


# ------------------------------------------------------------------------------------------------------------------ run folder


class Killed(Exception):
    pass


class AsksSome(Observer):
    """Has the engine evaluate two clients at every evaluation."""

    def on_start(self, run):
        self.setting = run.setting

    def on_evaluation(self, evaluation):
        test, which = self.setting.data.test, torch.tensor([3, 0])
        self.found = self.setting.engine.evaluate(evaluation.params, test, which)
        rows = evaluation.clients.where("test")
        self.expected = rows.loss[which], rows.error[which]


# ------------------------------------------------------------------------------------------- metrics and early stopping


METRICS = {"f1": eq.metrics.macro_f1, "odd": lambda outputs, targets: float("nan") if len(targets) % 2 else 1.0}


@pytest.mark.parametrize("personal", [None, eq.personal.Ditto(strength=0.5)])
def test_metrics_are_computed_on_the_nodes(personal):
    data, algorithm = some_data(), eq.Algorithm(personal=personal)
    result, _ = run(algorithm, data, federation(data, softmax, metrics=METRICS), metrics=METRICS)
    simulated = simulate(algorithm, data, metrics=METRICS)
    same_table(result.clients, simulated.clients)
    known = [name for name in simulated.clients.columns if name != "trivial_error"]  # a server sees no training targets
    assert list(result.clients.columns) == known
    for name in METRICS:
        assert torch.equal(result.clients.metrics[name].nan_to_num(-1), simulated.clients.metrics[name].nan_to_num(-1))
    assert result.summary().metrics == simulated.summary().metrics


def test_nodes_without_a_metric_and_secure_sums_are_refused():
    data = some_data()
    with pytest.raises(IncompatibleParts, match=r"client-\d, client-\d.* cannot compute the metric 'f1'"):
        run(eq.Algorithm(), data, metrics=METRICS)
    secure = eq.Algorithm(privacy=eq.privacy.SecureAggregation())
    with pytest.raises(IncompatibleParts, match="figures of single clients"):
        run(secure, data, federation(data, softmax, metrics=METRICS), metrics=METRICS)
    with pytest.raises(IncompatibleParts, match=r'Use "validation\.error"'):
        run(secure, data, stop=eq.EarlyStopping("validation.error_90"))


def test_a_federation_stops_early_as_a_simulation_does(tmp_path):
    data, algorithm = some_data(), eq.Algorithm(solver=SGD(lr=4.0, batch_size=2))
    options = {"rounds": 20, "stop": eq.EarlyStopping("validation.error", patience=2)}
    result, _ = run(algorithm, data, folder=tmp_path / "run", **options)
    simulated = simulate(algorithm, data, **options)
    assert result.history.stopped == simulated.history.stopped
    assert result.history.stopped.rounds < 20
    assert torch.equal(result.params, simulated.params)
    same_table(result.clients, simulated.clients)
    assert read_record(tmp_path / "run").history.stopped == result.history.stopped


def test_some_clients_can_be_evaluated():
    asks = AsksSome()
    run(eq.Algorithm(), some_data(), observers=[asks])
    assert all(torch.equal(*pair) for pair in zip(asks.found, asks.expected, strict=True))


class KillAfter(Observer):
    """Ends the server's process, as far as a test can, once a round has been saved."""

    def __init__(self, round_index):
        self.round = round_index

    def on_state(self, state):
        if state.round == self.round:
            raise Killed


def killed_after(round_index, *arguments, **options):
    """Run until the server dies. The checkpoint of that round is written before: observers come first, so die one later."""
    with pytest.raises(eq.errors.ObserverFailed):
        run(*arguments, observers=[KillAfter(round_index)], **options)


def test_the_run_folder_is_that_of_a_simulation(tmp_path):
    data = some_data()
    found, _ = run(ALGORITHMS["Δ-FL"], data, folder=tmp_path / "run", evaluate_every=1, data="ragged")
    place = RunFolder(tmp_path / "run")
    for file in (place.config, place.rounds, place.checkpoint, place.clients, place.model, place.report):
        assert file.exists(), file
    events = [json.loads(line) for line in place.rounds.read_text().splitlines()]
    rounds = [event for event in events if event["event"] == "round"]
    assert [event["bytes_sent"] for event in rounds] == [report.bytes_sent for report in found.history.rounds]
    assert set(rounds[0]["bytes_by_client"]) <= set(data.train.ids)
    assert place.finished
    same_table(eq.ClientTable.from_parquet(place.clients), found.clients)
    config = read_config(place.config)
    assert "federation" in config.sections
    assert config.algorithm() == ALGORITHMS["Δ-FL"]
    assert (config.train.rounds, config.train.clients_per_round, config.train.seed) == (3, 4, 3)
    with pytest.raises(ConfigError, match="has ended"):
        run(ALGORITHMS["Δ-FL"], data, folder=tmp_path / "run")


@pytest.mark.parametrize(
    ("name", "where"), [("Δ-FL", "nowhere"), ("Ditto", "in a folder of the node"), ("Ditto", "in Flower's state")]
)
def test_a_server_that_was_killed_goes_on_from_its_folder(tmp_path, name, where):
    """Nodes have already done the round after the checkpoint; the row before it is still there."""
    algorithm, data = {**ALGORITHMS, **PERSONAL}[name], some_data()
    wanted, _ = run(algorithm, data, rounds=5)
    grid = federation(data, softmax, keep=tmp_path / "nodes" if "folder" in where else None)
    killed_after(3, algorithm, data, grid, rounds=5, folder=tmp_path / "run")
    if "Flower" not in where:
        grid.new_run()
    found, _ = run(algorithm, data, grid, rounds=5, folder=tmp_path / "run")
    assert torch.equal(found.params, wanted.params)
    assert [report.round for report in found.history.rounds] == list(range(5))
    same_table(found.clients, wanted.clients)
    if name == "Ditto":
        assert torch.equal(found.clients.personal_loss, wanted.clients.personal_loss)


def test_a_node_without_its_own_model_says_so_and_begins_anew(tmp_path):
    data = some_data()
    grid = federation(data, softmax)
    killed_after(2, PERSONAL["Ditto"], data, grid, rounds=3, folder=tmp_path, clients_per_round=5)
    grid.new_run()  # and the nodes' owners have named no folder
    with pytest.warns(EquipoiseNotice, match="has lost its own model"):
        found, _ = run(PERSONAL["Ditto"], data, grid, rounds=3, folder=tmp_path, clients_per_round=5)
    assert torch.equal(found.params, simulate(PERSONAL["Ditto"], data, clients_per_round=5).params)  # the shared one is safe


def test_a_run_goes_on_without_a_node_but_not_with_other_data(tmp_path):
    data = some_data()
    grid = federation(data, softmax)
    killed_after(2, eq.Algorithm(), data, grid, folder=tmp_path / "a", clients_per_round=5)
    grid.offline.add("client-4")
    with pytest.warns(EquipoiseNotice, match="client-4 is not connected"):
        found, _ = run(eq.Algorithm(), data, grid, folder=tmp_path / "a", clients_per_round=5, retries=0)
    assert found.history.rounds[-1].missing == {"client-4": "is not connected"}
    killed_after(2, eq.Algorithm(), data, federation(data, softmax), folder=tmp_path / "b")
    changed = replace(data, train=replace(data.train, x=data.train.x + 1))
    with pytest.raises(TooFewClients, match=r"0 nodes came .* other data than when the run began"):
        run(eq.Algorithm(), changed, folder=tmp_path / "b")


def test_the_run_configuration_of_flower_counts(tmp_path):
    data = some_data()
    config = {"rounds": 1, "clients-per-round": 2, "seed": 9, "folder": str(tmp_path / "x"), "timeout": 30}
    found, _ = run(eq.Algorithm(), data, config=config)
    assert (found.rounds, found.clients_per_round, found.seed) == (1, 2, 9)
    assert (tmp_path / "x" / "federation.json").exists()
    with pytest.raises(ConfigError, match="rounds of the run configuration must be a whole number"):
        run(eq.Algorithm(), data, config={"rounds": "many"})


# ------------------------------------------------------------------------------------------------------------------ beginnings


def test_a_run_waits_for_its_nodes_and_says_who_did_not_come():
    data = some_data()
    grid = federation(data, softmax)
    grid.offline |= {"client-0", "client-1"}
    with pytest.raises(TooFewClients, match="3 nodes came within 600 s, and 5 are needed"):
        run(eq.Algorithm(), data, grid)


def test_nodes_with_another_model_are_named():
    data = some_data()
    apps = {n: client_app(model=softmax, load_data=lambda _, n=n: one_client(data, n)) for n in data.train.ids}
    other = lambda: eq.models.Softmax(4, 5)  # noqa: E731
    apps["client-1"] = client_app(model=other, load_data=lambda _: one_client(data, "client-1"))
    with pytest.raises(TooFewClients, match="client-1 has another model"):
        run(eq.Algorithm(), data, FakeGrid(apps))


def test_two_nodes_with_one_name_are_refused():
    data = some_data()
    apps = {n: client_app(model=softmax, load_data=lambda _: one_client(data, "client-0")) for n in ("a", "b")}
    with pytest.raises(TooFewClients, match=r"1 node came .* has the client name 'client-0', which node 100 has already"):
        run(eq.Algorithm(), data, FakeGrid(apps), clients=2, clients_per_round=2)


@pytest.mark.parametrize(
    "wrong",
    [{"rounds": -1}, {"minimum": 0}, {"minimum": 9}, {"timeout": 0}, {"pause": -1.0}, {"retries": 1.5}, {"clients": 0}],
)
def test_options_are_checked_before_anything_runs(wrong):
    with pytest.raises(InvalidParameter, match=next(iter(wrong))):
        server_app(eq.Algorithm(), **{"model": softmax, "rounds": 1, "clients_per_round": 4, **wrong})


def test_flower_is_not_imported_with_equipoise():
    import subprocess
    import sys

    code = "import sys, equipoise as eq; eq.engines.flower.server_app; sys.exit('flwr' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_network_variants_are_composed_not_overridden():
    """No class of the package extends a protection, a personalisation or an engine; contracts, Flower's own, errors it may."""
    allowed = {
        "Observer",
        "Engine",
        "Stage",
        "NamedTuple",
        "Protocol",
        "IntEnum",
        "SubprocessExecutor",
        "BaseHTTPRequestHandler",
        "ClientApp",
        "logging.Filter",
        "logging.Formatter",
        "EquipoiseError",
        "RuntimeError",
        "MaskingError",
    }
    for file in Path(flower.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                assert {ast.unparse(base) for base in node.bases} <= {*allowed, "RefusedMessage"}, node.name


@pytest.mark.usefixtures("onnx")
def test_a_federation_leaves_onnx_by_the_shapes_that_its_nodes_have_said(tmp_path):
    """Before, `equipoise export` of a federated run failed with "Unknown key 'federation'"."""
    from equipoise.experiment.run_model import export_run

    run(eq.Algorithm(), some_data(), rounds=1, folder=tmp_path / "run")
    names = {path.name for path in export_run(tmp_path / "run")}
    assert {"model.onnx", "score.onnx", "model.safetensors", "model.card.md"} <= names
    assert all(path.exists() for path in export_run(tmp_path / "run"))
