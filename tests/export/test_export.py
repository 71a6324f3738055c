"""Exported models beside the originals, for every model of the library and for users' own; others say why not."""

import io
import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

import equipoise as eq
from equipoise.client_metrics import macro_f1
from equipoise.core.signature import Signature, TensorSpec
from equipoise.core.task import Task
from equipoise.errors import ConfigError, InvalidData, InvalidParameter
from equipoise.export import model_card, onnx_files, torch_program
from equipoise.export.modules import NotExported
from equipoise.export.onnx_runs import OnnxModel

pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

FRAME = {
    "who": ["a", "b"] * 12, "age": list(range(24)), "town": [f"t{k % 20}" for k in range(24)],
    "ill": ["no", "yes", "no"] * 8, "cost": [k * k % 17 + 0.5 * (k % 3) + 0.1 for k in range(24)],
}  # fmt: skip


def table(target):
    schema = eq.data.Schema.fit(
        FRAME, target=target, client="who", kinds={"town": "category"}, one_hot=4, columns=["age", "town"]
    )
    return eq.models.Tabular(schema, hidden=(5,)), schema.transform(FRAME), schema.targets(FRAME)


def library():
    """Every model of the library with a batch of inputs and targets."""
    gen = torch.Generator().manual_seed(0)
    x, tokens = torch.randn(6, 4, generator=gen), torch.randint(0, 9, (6, 4), generator=gen)
    two, three = torch.randint(0, 2, (6,), generator=gen), torch.randint(0, 3, (6,), generator=gen)
    words = torch.randn(9, 3, generator=gen)
    m = eq.models
    return {
        "Softmax": (m.Softmax(4, 3), x, three),
        "MLP": (m.MLP(4, 3, hidden=(5,)), x, three), "Logistic": (m.Logistic(4), x, two), "LinearSVM": (m.LinearSVM(4), x, two),
        "LinearRegression": (m.LinearRegression(4), x, x.sum(1)), "MeanEstimator": (m.MeanEstimator(4), x, x),
        "ConvNet": (m.ConvNet(classes=3), torch.randn(6, 28, 28, generator=gen), three),
        "CharGRU": (m.CharGRU(vocabulary=9, hidden=4, padding=0), tokens, tokens[:, 0]),
        "CharLSTM": (m.CharLSTM(vocabulary=9, hidden=4, layers=1, embedding=None), tokens, tokens[:, 0]),
        "EmbeddingLSTM": (m.EmbeddingLSTM(words, hidden=4), tokens, two),
        "Tabular": table("ill"), "Tabular, a number": table("cost"),
    }  # fmt: skip


def test_every_model_of_the_library_is_tried():
    classes = {name for name in eq.models.__all__ if isinstance(vars(eq.models)[name], type)}
    assert {name.partition(",")[0] for name in library()} == classes


def signature_of(x, y):
    data = eq.FederatedData(eq.ClientSet.pack([("a", x, y)]), classes=int(y.max()) + 1 if not y.is_floating_point() else 0)
    return Signature.of(data, torch.float32)


def randomised(model):
    """Models whose parameters start at zero agree on anything."""
    gen = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=gen))
    return model.eval()


@pytest.mark.parametrize("name", library())
def test_a_model_of_the_library_as_onnx_and_its_scores(name):
    model, x, y = library()[name]
    model, signature = randomised(model), signature_of(x, y)
    run = OnnxModel(onnx_files.model_onnx(model, signature), source=name)
    named = signature.named(x)
    assert run.names == list(named)
    (got,) = run([value.numpy() for value in named.values()])
    with torch.no_grad():
        wanted = model(**x) if isinstance(x, dict) else model(x)
    np.testing.assert_allclose(got, wanted.detach().numpy(), rtol=1e-4, atol=1e-5)
    if name in ("Softmax", "LinearSVM", "Tabular, a number", "MeanEstimator"):
        task = Task.of(model)
        scores = OnnxModel(onnx_files.score_onnx(task, model, signature), source=name)
        loss, error = scores([*(value.numpy() for value in named.values()), y.numpy()])
        wanted_loss, wanted_error = task.scores(task.layout.read(model), x, y)
        np.testing.assert_allclose(loss, wanted_loss.detach().numpy(), rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(error, wanted_error.detach().numpy(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", library())
def test_a_model_as_a_torch_program(name):
    model, x, y = library()[name]
    model, signature = randomised(model), signature_of(x, y)
    loaded = torch.export.load(io.BytesIO(torch_program.model_program(model, signature))).module()
    with torch.no_grad():
        wanted = model(**x) if isinstance(x, dict) else model(x)
        torch.testing.assert_close(loaded(*signature.named(x).values()), wanted, rtol=1e-5, atol=1e-6)


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(2, 3), nn.Linear(4, 3)

    def forward(self, first, second):
        return {"sum": self.a(first) + self.b(second), "first": self.a(first)}["sum"]


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x):
        return self.linear(x) if float(x.sum()) > 0 else self.linear(-x)


def test_users_own_models_of_several_inputs_and_one_that_cannot_be_exported():
    x = (torch.randn(3, 2), torch.randn(3, 4))
    model, signature = Pair(), signature_of(x, torch.tensor([0, 1, 2]))
    (got,) = OnnxModel(onnx_files.model_onnx(model, signature), source="Pair")([each.numpy() for each in x])
    np.testing.assert_allclose(got, model(*x).detach().numpy(), rtol=1e-4, atol=1e-5)
    plain = signature_of(torch.randn(3, 4), torch.tensor([0, 1, 2]))
    for export in (onnx_files.model_onnx, torch_program.model_program):
        with pytest.raises(NotExported, match=r"Branches cannot be written as .*: .{10,}\. Use model\.safetensors"):
            export(Branches(), plain)


def test_a_file_that_gives_other_outputs_is_refused(monkeypatch):
    """The check of exports fails on a broken exporter: here one that keeps another model's parameters."""
    one, two = randomised(eq.models.Softmax(4, 3)), eq.models.Softmax(4, 3)
    signature = signature_of(torch.randn(3, 4), torch.tensor([0, 1, 2]))
    broken = onnx_files.model_onnx(one, signature)
    with pytest.raises(NotExported, match="differs in its outputs"):
        onnx_files._compare(onnx_files.CalledByPosition(two, signature), broken, signature.inputs)
    monkeypatch.setattr(nn.Module, "state_dict", lambda self: {})  # parameters that find no place: the model is traced again
    assert onnx_files.model_onnx(two, signature, like=broken) != broken


@pytest.fixture(scope="module")
def result():
    data = eq.data.label_shift(train_clients=20, validation_clients=0, test_clients=20, examples=10)
    return eq.train(eq.models.Softmax(data.features, data.classes), data, rounds=2, clients_per_round=5, progress=False)


def test_a_result_is_exported_with_its_card(result, tmp_path):
    for suffix in (".onnx", ".pt2", ".safetensors"):
        assert result.export(tmp_path / suffix[1:] / f"model{suffix}").exists()
        card = json.loads((tmp_path / suffix[1:] / "model.card.json").read_text())
        assert card["metrics"]["test"]["mean"] == pytest.approx(result.summary().error.mean)
        assert card["metrics"]["test"]["percentile_90"] == pytest.approx(result.summary().error.percentiles[90])
        assert [row["client"] for row in card["left_behind"]["worst_clients"]] == [
            r["client"] for r in result.clients.where("test").worst(5)
        ]
        text = (tmp_path / suffix[1:] / "model.card.md").read_text()
        assert "## Who is left behind" in text
        assert "no privacy guarantee" in text
    with pytest.raises(InvalidParameter, match=r"path must end in one of \.onnx, \.pt2"):
        result.export(tmp_path / "model.pkl")


def test_a_card_names_no_client_of_a_private_run_and_no_html(result, tmp_path):
    named = replace(result.clients, client=tuple(f"<b>*x*</b> {k}" for k in range(len(result.clients))))
    text = model_card.card_markdown(model_card.card(replace(result, clients=named))).decode()
    assert "<b>" not in text
    assert "&lt;b&gt;\\*x\\*" in text
    private = replace(result, algorithm=eq.Algorithm(privacy=eq.privacy.SecureAggregation()))
    card = model_card.card(private)
    assert card["left_behind"]["worst_clients"] is None
    assert not any(client in json.dumps(card) for client in result.clients.client)


def test_a_card_of_own_models_tells_them_from_the_shared_model_in_the_file():
    """Before, figures of own models stood without a label under a note that the file holds the shared model."""
    data = eq.data.split_examples(eq.data.label_shift(train_clients=20, test_clients=2, seed=0).train, test=0.3)
    model = eq.models.Softmax(data.features, data.classes)
    algorithm = eq.Algorithm(personal=eq.personal.Ditto())
    run = eq.train(model, data, algorithm, rounds=3, clients_per_round=10, seed=0, progress=False)
    card = model_card.card(run, about={"note": "the shared model"})
    summary = run.summary()
    assert card["metrics"]["test"]["mean"] == pytest.approx(summary.error.mean)
    assert card["shared_metrics"]["test"]["mean"] == pytest.approx(summary.shared_error.mean)
    text = model_card.card_markdown(card).decode()
    assert f"| test clients, own models | 20 | {100 * summary.error.mean:.1f} %" in text
    assert f"| test clients, shared model | 20 | {100 * summary.shared_error.mean:.1f} %" in text
    assert "The file of this card holds the shared model." in text
    assert "own models" not in model_card.card_markdown(model_card.card(replace(run, clients=shared_of(run)))).decode()


def shared_of(run):
    return replace(run.clients, personal_error=None, personal_loss=None, personal_metrics={})


def rows_of(errors, sizes):
    count = len(errors)
    return eq.ClientTable(
        tuple(f"c{k}" for k in range(count)), ("test",) * count, torch.zeros(count, dtype=torch.bool), torch.tensor(sizes),
        torch.ones(count).double(), torch.tensor(errors).double(),
    )  # fmt: skip


def test_subgroups_by_size_have_the_figures_of_their_clients(result):
    """Seven clients each of 3, 9 and 30 examples with errors 0, 0.05, …, 1: means 0.15, 0.5 and 0.85."""
    rows = rows_of([k / 20 for k in range(21)], [3] * 7 + [9] * 7 + [30] * 7)
    found = model_card.card(replace(result, clients=rows))
    assert [row["mean"] for row in found["subgroups"]] == pytest.approx([0.15, 0.5, 0.85])
    assert found["subgroups"][0]["group"] == "clients with the fewest examples (3 to 3)"
    assert found["small_groups"] == 0


def test_the_card_of_a_protected_run_has_no_figure_of_fewer_than_five_clients(result):
    """The worst tenth of 21 clients are three, that of 50 five; of four clients nothing is said."""
    protected = replace(result, algorithm=eq.Algorithm(privacy=eq.privacy.SecureAggregation()))

    def card_of(errors, sizes):
        found = model_card.card(replace(protected, clients=rows_of(errors, sizes)))
        return found, model_card.card_markdown(found).decode()

    found, text = card_of([k / 20 for k in range(21)], [3] * 7 + [9] * 7 + [30] * 7)
    for row in (found["metrics"]["test"], *found["subgroups"]):
        assert (row["percentile_90"], row["worst_10"]) == (None, None)
        assert row["mean"] is not None
    assert found["left_behind"]["worst_tenth_mean"] is None
    assert "– stands for a figure that rests on fewer than 5 clients" in text
    assert [row["group"] for row in found["subgroups"]] == [
        f"the third of clients with {name} examples" for name in ("the fewest", "a middling number of", "the most")
    ]
    found, text = card_of([k / 50 for k in range(50)], [40] * 50)
    assert found["metrics"]["test"]["worst_10"] == pytest.approx((0.90 + 0.98) / 2)
    assert "– stands for" not in text
    found, text = card_of([0.11, 0.12, 0.13, 0.94], [40] * 4)
    assert all(found["metrics"]["test"][key] is None for key in model_card.KEYS)
    assert "94" not in text


def test_errors_of_numbers_are_never_written_in_percent(result):
    """Errors of 0.952 and 2.334 kWh, and a whole table below 1: as numbers. Shares of wrong examples: all in percent."""
    for errors in ([0.952, 2.334], [0.2, 0.952]):
        made = replace(result, clients=rows_of(errors, [40, 40]), error_name="absolute error", target="kWh_used")
        card = model_card.card(made)
        text = model_card.card_markdown(card).decode()
        assert not card["in_percent"]
        assert "| absolute error of kWh\\_used | clients | mean |" in text
        figures = [line for line in text.splitlines() if line.startswith("| test clients")]
        assert not any(" % |" in line for line in figures)
        assert "c1 (95.2 %)" not in text
    own = replace(result, clients=rows_of([0.952, 2.334], [40, 40]), error_name="mae")  # not known by its name
    assert "95.2 %" not in model_card.card_markdown(model_card.card(own)).decode()
    shares = model_card.card_markdown(model_card.card(replace(result, clients=rows_of([0.2, 0.4], [40, 40])))).decode()
    assert "| test clients | 2 | 30.0 % |" in shares


def test_groups_of_ones_own_and_of_the_risk_are_on_the_card(result, tmp_path):
    """Errors 0.1 in the north (6 clients), 0.4 in the south (5), 0.9 on an island of 4 clients, too few to be shown."""
    rows = rows_of([0.1] * 6 + [0.4] * 5 + [0.9] * 4, [10] * 15)
    where = {f"c{k}": "north" if k < 6 else "<b>south|" if k < 11 else "island" for k in range(15)}
    made = replace(result, clients=rows)
    made.export(tmp_path / "model.safetensors", groups=where)
    card = json.loads((tmp_path / "model.card.json").read_text())
    found = {row["group"]: (row["clients"], row["mean"]) for row in card["subgroups"]}
    assert found == {"group north": (6, pytest.approx(0.1)), "group <b>south|": (5, pytest.approx(0.4))}
    assert card["small_groups"] == 1
    text = (tmp_path / "model.card.md").read_text()
    assert "| group &lt;b&gt;south\\| | 5 | 40.0 % |" in text
    # A run that protects clients: 15 times the mean of all less 6 times the north's and 5 times the south's is the island's.
    protected = model_card.card(replace(made, algorithm=eq.Algorithm(privacy=eq.privacy.SecureAggregation())), groups=where)
    assert [row["group"] for row in protected["subgroups"]] == ["group north"]
    assert protected["withheld_groups"] == 1
    by_function = model_card.card(made, groups=where.get)
    assert by_function["subgroups"] == card["subgroups"]
    for groups in (where, where.__getitem__):
        tilted = eq.risk.HierarchicalTilt(groups=groups, tilt=1.0, inner_tilt=1.0)
        for risk in (eq.risk.GroupDRO(step=0.1, groups=groups), tilted):
            of_risk = model_card.card(replace(made, algorithm=eq.Algorithm(risk=risk)))
            assert of_risk["subgroups"] == card["subgroups"]
    with pytest.raises(InvalidParameter, match="groups"):
        made.export(tmp_path / "other.safetensors", groups={"c0": 3})
    assert not (tmp_path / "other.safetensors").exists()


def test_metrics_of_ones_own_are_on_the_card():
    data = eq.data.label_shift(train_clients=12, validation_clients=0, test_clients=8, examples=10)
    model = eq.models.Softmax(data.features, data.classes)
    made = eq.train(model, data, rounds=1, clients_per_round=4, metrics={"macro_f1": macro_f1}, progress=False)
    found = model_card.card(made)["metrics"]["test"]
    assert found["mean_macro_f1"] == pytest.approx(made.summary().metrics["macro_f1"].mean)


def test_onnx_without_its_libraries_says_what_to_install(result, tmp_path, monkeypatch):
    monkeypatch.setattr(onnx_files, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r'pip install "equipoise\[serve\]"'):
        result.export(tmp_path / "model.onnx")
    assert not (tmp_path / "model.onnx").exists()


def test_a_model_from_elsewhere_may_not_read_files():
    import onnx

    weight = onnx.numpy_helper.from_array(np.zeros((2, 2), dtype=np.float32), "w")
    weight.ClearField("raw_data")
    weight.data_location = onnx.TensorProto.EXTERNAL
    weight.external_data.add(key="location", value="/etc/passwd")
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node("MatMul", ["x", "w"], ["y"])], "g",
        [onnx.helper.make_tensor_value_info("x", 1, ["b", 2])],
        [onnx.helper.make_tensor_value_info("y", 1, ["b", 2])], [weight],
    )  # fmt: skip
    with pytest.raises(InvalidData, match="reads parameters from other files"):
        OnnxModel(onnx.helper.make_model(graph).SerializeToString(), source="a stranger's model")
    for broken in (b"", b"\x00\x01nonsense", b"PK\x03\x04"):
        with pytest.raises(InvalidData, match="is no ONNX model"):
            OnnxModel(broken, source="a stranger's model")


def test_a_damaged_signature_is_refused():
    good = Signature("tensor", (TensorSpec("x", "float32", (4,)),), (TensorSpec("y", "int64", ()),), 3)
    assert Signature.of_table(good.to_table()) == good
    for broken in (
        {},
        [],
        good.to_table() | {"form": "list"},
        good.to_table() | {"inputs": [{"name": "x", "dtype": "str", "shape": []}]},
    ):
        with pytest.raises(InvalidData, match="signature of a model"):
            Signature.of_table(broken)


@pytest.mark.parametrize("axes", [[2**31], [2**16, 2**16], [2**62]])
def test_a_small_onnx_model_takes_no_memory_without_end(axes):
    import onnx

    tensor = onnx.helper.make_tensor_value_info
    nodes = [
        onnx.helper.make_node("ConstantOfShape", ["axes"], ["zeros"]),
        onnx.helper.make_node("ReduceSum", ["zeros"], ["none"], keepdims=0),
        onnx.helper.make_node("Add", ["x", "none"], ["y"]),
    ]
    sizes = onnx.helper.make_tensor("axes", onnx.TensorProto.INT64, [len(axes)], axes)
    graph = onnx.helper.make_graph(nodes, "g", [tensor("x", 1, [1])], [tensor("y", 1, [1])], [sizes])
    content = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8).SerializeToString()
    with pytest.raises(InvalidData):
        OnnxModel(content, source="m")([np.zeros(1, np.float32)])
    sizes.int64_data[:] = [3] * len(axes)
    graph.initializer[0].CopyFrom(sizes)
    content = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8).SerializeToString()
    assert OnnxModel(content, source="m")([np.ones(1, np.float32)])[0].tolist() == [1.0]
