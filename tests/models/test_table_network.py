"""The network for tables: what it computes, that it vectorises over clients, and what it refuses."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.func import functional_call, grad, stack_module_state, vmap

import equipoise as eq
from equipoise.errors import InvalidParameter

DRAW = np.random.default_rng(0)
FRAME = {
    "who": [f"client {k % 8}" for k in range(96)],
    "age": DRAW.normal(40, 10, 96).round().tolist(),
    "ward": [None if k % 7 == 0 else str(k % 5) for k in range(96)],
    "smoker": (DRAW.random(96) < 0.5).tolist(),
}
FRAME["ill"] = [("yes" if age > 40 else "no") for age in FRAME["age"]]
FRAME["cost"] = [1e6 + 3e4 * (age - 40) + 1e5 * smoker for age, smoker in zip(FRAME["age"], FRAME["smoker"], strict=True)]
INPUTS = ["age", "ward", "smoker"]


def load(target="ill", **options):
    return eq.data.from_frame(FRAME, client="who", target=target, columns=INPUTS, test=0.25, **options)


def by_hand(model, numbers, codes):
    """Embeddings beside numbers, then ReLU(Wx + b) and Wx + b."""
    layers = [layer for layer in model.layers if isinstance(layer, torch.nn.Linear)]
    tables = [embedding.weight[codes[:, place]] for place, embedding in enumerate(model.embeddings)]
    x = torch.cat([numbers, *tables], 1)
    for layer in layers[:-1]:
        x = torch.relu(x @ layer.weight.t() + layer.bias)
    return x @ layers[-1].weight.t() + layers[-1].bias


@pytest.mark.parametrize("hidden", [(), (6,), (6, 5)])
def test_outputs(hidden):
    data = load(one_hot=2)
    model = eq.models.Tabular(data.schema, hidden=hidden)
    x = data.train.inputs(slice(0, 5))
    torch.testing.assert_close(model(**x), by_hand(model, **x))
    assert model(**x).shape == (5, 2)
    plain = load()
    model = eq.models.Tabular(plain.schema, hidden=hidden)
    x = plain.train.inputs(slice(0, 5))
    torch.testing.assert_close(model(x), by_hand(model, x, torch.empty(5, 0, dtype=torch.int64)))
    only = load(one_hot=2, kinds={"age": "left out", "smoker": "left out"})
    assert eq.models.Tabular(only.schema, hidden=hidden)(**only.train.inputs(slice(0, 5))).shape == (5, 2)


def test_parameters_depend_on_the_seed_alone():
    schema = load(one_hot=2).schema
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first, same, other = (eq.models.Tabular(schema, seed=seed).state_dict() for seed in (0, 0, 1))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(first[name], same[name]) for name in first)
    assert not torch.equal(first["layers.0.weight"], other["layers.0.weight"])
    assert (first["embeddings.0.weight"][:2] == 0).all()  # other, missing
    assert (first["embeddings.0.weight"][2:] != 0).all()


@pytest.mark.parametrize(("target", "one_hot"), [("ill", 2), ("ill", 16), ("cost", 2), ("cost", 16)])
def test_vectorised_over_clients(target, one_hot):
    data = load(target, one_hot=one_hot)
    models = [eq.models.Tabular(data.schema, hidden=(6,), seed=seed) for seed in range(3)]
    batches = [slice(4 * k, 4 * k + 4) for k in range(3)]
    inputs, targets = [data.train.inputs(rows) for rows in batches], torch.stack([data.train.targets(rows) for rows in batches])
    given = [x if isinstance(x, dict) else {"numbers": x} for x in inputs]
    stacked = {name: torch.stack([each[name] for each in given]) for name in given[0]}
    params, buffers = stack_module_state(models)
    task = eq.core.task.Task.of(models[0])

    def loss(p, b, x, y):
        outputs = functional_call(models[0], (p, b), kwargs=x)
        return task.loss(outputs, y).mean()

    together = vmap(grad(loss))(params, buffers, stacked, targets)
    for k, model in enumerate(models):
        alone = grad(loss)(dict(model.named_parameters()), dict(model.named_buffers()), given[k], targets[k])
        for name, value in alone.items():
            torch.testing.assert_close(together[name][k], value)


def test_a_number_is_learned_in_its_own_unit():
    """The loss is in units of the target's deviation, so that the usual learning rate does not diverge at 10⁶."""
    data = load("cost")
    model = eq.models.Tabular(data.schema, hidden=(16,))
    deviation = data.schema.target.deviation
    outputs, y = model(data.train.inputs(slice(0, 3))), data.train.targets(slice(0, 3))
    torch.testing.assert_close(model.loss(outputs, y), ((outputs - y) / deviation) ** 2, rtol=1e-3, atol=1e-6)
    torch.testing.assert_close(model.error(outputs, y), (outputs - y) ** 2)
    assert outputs.shape == (3,)
    assert data.classes == 0
    solver = eq.solvers.SGD(lr=0.1, batch_size=8)
    result = eq.train(model, data, eq.Algorithm(solver=solver), rounds=40, clients_per_round=6, seed=0)
    assert float(result.clients.error.sqrt().mean()) < 0.2 * deviation


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_it_trains(dropout):
    data = load()
    model = eq.models.Tabular(data.schema, hidden=(16,), dropout=dropout)
    work = eq.Algorithm(solver=eq.solvers.SGD(lr=0.3, batch_size=4))
    engines = [eq.engines.Loop(), eq.engines.Simulator()]
    results = [eq.train(model, data, work, rounds=20, clients_per_round=6, seed=0, engine=engine) for engine in engines]
    assert float(results[0].clients.error.mean()) < 0.15
    for result in results[1:]:
        torch.testing.assert_close(result.clients.loss, results[0].clients.loss, rtol=1e-4, atol=1e-5)


def test_it_trains_on_codes_and_an_unseen_category():
    data = load(one_hot=2)
    model = eq.models.Tabular(data.schema, hidden=(16,))
    result, other = (
        eq.train(model, data, rounds=5, clients_per_round=6, engine=engine)
        for engine in (eq.engines.Loop(), eq.engines.Simulator())
    )
    torch.testing.assert_close(other.clients.loss, result.clients.loss, rtol=1e-4, atol=1e-5)
    with pytest.warns(eq.errors.EquipoiseNotice, match="categories that training did not have: 'unheard of'"):
        x = data.schema.transform({**{name: FRAME[name][:2] for name in INPUTS}, "ward": ["unheard of", None]})
    assert x["codes"].flatten().tolist() == [0, 1]
    assert torch.isfinite(result.model(**x)).all()


def test_codes_outside_their_column_give_nan_in_their_row_alone():
    data = load(one_hot=2)
    model = eq.models.Tabular(data.schema)
    x = data.train.inputs(slice(0, 4))
    x["codes"][1], x["codes"][2] = 99, -1
    assert torch.isnan(model(**x)).any(1).tolist() == [False, True, True, False]


def test_what_is_refused():
    data = load(one_hot=2)
    model = eq.models.Tabular(data.schema)
    x = data.train.inputs(slice(0, 4))
    with pytest.raises(
        InvalidParameter, match=r"codes must be integers of shape \(B, 1\), as the schema makes them, but is 'miss"
    ):
        model(x["numbers"])
    with pytest.raises(InvalidParameter, match=r"numbers must be floating numbers of shape \(B, 2\)"):
        model(numbers=x["numbers"][:, :1], codes=x["codes"])
    with pytest.raises(InvalidParameter, match="codes must be integers"):
        model(numbers=x["numbers"], codes=x["codes"].float())
    with pytest.raises(InvalidParameter, match=r"schema must be a data\.Schema, but is 'FederatedData'. Give data\.schema"):
        eq.models.Tabular(data)
    with pytest.raises(InvalidParameter, match="hidden must be the widths"):
        eq.models.Tabular(data.schema, hidden=64)
    with pytest.raises(InvalidParameter, match="hidden must be a whole number of at least 1"):
        eq.models.Tabular(data.schema, hidden=(0,))
    with pytest.raises(InvalidParameter, match="dropout must lie in"):
        eq.models.Tabular(data.schema, dropout=1.0)
    with pytest.raises(InvalidParameter, match="schema"):
        eq.models.Tabular(replace(data, schema=None).schema)
