"""Fine-tuning with low-rank adapters: plain torch, and transformers with peft; in simulations, with privacy, over Flower."""

import dataclasses
import importlib.util
import logging
import math
import sys
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

import equipoise as eq
from equipoise.errors import EquipoiseNotice, IncompatibleParts, InvalidParameter
from equipoise.models import language
from equipoise.models.adapters import lora_pairs, trains_lora_a
from equipoise.runs.checkpoint import Checkpoints

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "tests" / "engines"))

# ------------------------------------------------------------------------------------------------------------- plain torch


class LowRank(nn.Module):
    def __init__(self, into, out, rank=2):
        super().__init__()
        self.base = nn.Linear(into, out).requires_grad_(False)
        self.a, self.b = nn.Parameter(torch.randn(rank, into) / into**0.5), nn.Parameter(torch.zeros(out, rank))

    def forward(self, x):
        return self.base(x) + x @ self.a.T @ self.b.T


class Decoder(nn.Module):
    """A causal model over bytes whose adapters alone are trained: (B, T) → (B, V, T)."""

    def __init__(self, width=16):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(256, width).requires_grad_(False)
        self.mix, self.out = LowRank(width, width), LowRank(width, 256)

    def forward(self, x):
        h = self.embedding(x)
        return self.out(torch.tanh(self.mix(h.cumsum(1) / torch.arange(1, x.shape[1] + 1).unsqueeze(-1)))).transpose(1, 2)


def text_data(clients=4, length=12):
    gen = torch.Generator().manual_seed(0)
    rows = []
    for k in range(clients):
        tokens = torch.randint(97, 97 + 4 + k, (6, length + 1), generator=gen)
        rows.append((f"role-{k}", tokens[:, :-1], tokens[:, 1:]))
    return eq.FederatedData(eq.ClientSet.pack(rows), classes=256)


PRIVATE = eq.Algorithm(privacy=eq.privacy.DifferentialPrivacy(epsilon=8.0, delta=0.1, clip=1.0))


def values(model, *names):
    known = dict(model.named_parameters())
    return [known[name].detach().clone() for name in names]


@pytest.mark.parametrize("engine", ["loop", "simulator"])
def test_a_decoder_in_plain_torch_trains_its_adapters_alone(engine):
    model, data = Decoder(), text_data()
    options = {"rounds": 2, "clients_per_round": 2, "engine": engine, "metrics": {"ppl": eq.metrics.perplexity}}
    result = eq.train(model, data, **options)
    assert len(result.params) == 2 * (16 + 16) + 2 * (16 + 256)  # the adapters', of 9,000 numbers
    assert torch.equal(*values(model, "mix.base.weight"), *values(result.model, "mix.base.weight"))
    for row in result.clients:
        x, y = data.train.client(row["client"])
        losses = nn.functional.cross_entropy(result.model(x), y, reduction="none")
        assert row["ppl"] == pytest.approx(math.exp(float(losses.detach().mean())), rel=1e-4)


def test_differential_privacy_freezes_a_unless_told_otherwise():
    model, data = Decoder(), text_data()
    options = {"rounds": 2, "clients_per_round": 2, "engine": "loop"}
    private = eq.Algorithm(privacy=dataclasses.replace(PRIVATE.privacy, noise_seed=0))  # the same noise in all runs
    with pytest.warns(EquipoiseNotice, match="B alone is trained"):
        result = eq.train(model, data, private, **options)
    assert torch.equal(*values(model, "mix.a"), *values(result.model, "mix.a"))
    assert not torch.equal(*values(model, "mix.b"), *values(result.model, "mix.b"))
    assert model.mix.a.requires_grad  # the given model is not changed
    said = eq.train(eq.models.freeze_lora_a(model), data, private, **options)  # without a notice
    assert torch.equal(said.params, result.params)
    both = eq.train(eq.models.freeze_lora_a(model, freeze=False), data, private, **options)
    assert not torch.equal(*values(model, "mix.a"), *values(both.model, "mix.a"))
    plain = eq.train(model, data, **options)
    assert not torch.equal(*values(model, "mix.a"), *values(plain.model, "mix.a"))


@pytest.mark.parametrize("engine", ["loop", "simulator"])
def test_noise_falls_on_what_is_trained_alone(engine):
    # B of both adapters, 2 · 16 + 2 · 256 = D numbers. Updates are almost 0, so that the model moves by the noise of a sum over
    # 4 clients: ‖·‖ = z · clip · √D/4, here with a spread of 1/√(2D) = 3 %.
    model, width, z, clip = eq.models.freeze_lora_a(Decoder()), 2 * (16 + 256), 3.0, 0.5
    noisy = eq.Algorithm(
        solver=eq.solvers.SGD(lr=1e-12), sampler=eq.sampling.Full(),
        privacy=eq.privacy.GaussianMechanism(clip=clip, noise_multiplier=z),
    )  # fmt: skip
    result = eq.train(model, text_data(), noisy, rounds=1, engine=engine, progress=False)
    assert len(result.params) == width
    assert float(result.params.norm()) == pytest.approx(z * clip * width**0.5 / 4, rel=0.15)  # B begins at 0
    still = ["embedding.weight", "mix.a", "mix.base.weight", "out.a", "out.base.weight"]
    for before, after in zip(values(model, *still), values(result.model, *still), strict=True):
        assert torch.equal(before, after)


@pytest.mark.filterwarnings("ignore::equipoise.errors.EquipoiseNotice")
def test_adapters_with_a_frozen_agree_on_both_engines_and_resume(tmp_path):
    model, data, options = Decoder().double(), text_data(), {"clients_per_round": 3, "progress": False}
    algorithm = eq.Algorithm(privacy=eq.privacy.GaussianMechanism(clip=0.5, noise_multiplier=0.5, noise_seed=0))
    one, other = (eq.train(model, data, algorithm, rounds=4, engine=e, **options).params for e in ("loop", "simulator"))
    torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)

    class Stop(eq.types.Observer):
        def on_round(self, report):
            if report.round == 2:
                raise KeyboardInterrupt

    saving = {"rounds": 4, "checkpoint": Checkpoints(tmp_path / "run.ckpt", every=1)}
    with pytest.raises(KeyboardInterrupt):
        eq.train(model, data, algorithm, observers=[Stop()], **saving, **options)
    assert torch.equal(eq.train(model, data, algorithm, **saving, **options).params, other)


def test_pairs_are_found_by_name_and_shape():
    assert lora_pairs(Decoder()) == [("mix.a", "mix.b"), ("out.a", "out.b")]
    assert trains_lora_a(Decoder())
    assert not trains_lora_a(eq.models.freeze_lora_a(Decoder()))

    class Unrelated(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Parameter(torch.zeros(3, 4)), nn.Parameter(torch.zeros(5, 6))

    assert lora_pairs(Unrelated()) == []
    with pytest.raises(InvalidParameter, match="must have adapters"):
        eq.models.freeze_lora_a(nn.Linear(3, 2))


class OneLayer(nn.Module):
    def __init__(self, rank=1, into=1, out=1):
        super().__init__()
        torch.manual_seed(0)
        self.layer = LowRank(into, out, rank)

    def forward(self, x):
        return self.layer(x)


def product(model):
    return (model.layer.b @ model.layer.a).detach()


def test_the_mean_of_factors_is_not_the_mean_of_products():
    # Rank 1, one number each: client 1 has A = B = 1, client 2 has A = B = −1. Both products are 1, and so is their mean. The
    # server averages A and B apart: 0 and 0, whose product is 0.
    models = [OneLayer().requires_grad_(False) for _ in range(3)]
    for model, number in zip(models[1:], (1.0, -1.0), strict=True):
        model.layer.a.fill_(number)
        model.layer.b.fill_(number)
    sent = torch.stack([torch.cat([model.layer.a.flatten(), model.layer.b.flatten()]) for model in models[1:]])
    mean, _ = eq.aggregators.WeightedMean()(sent, torch.full((2,), 0.5, dtype=torch.float64))
    models[0].layer.a.copy_(mean[:1].view(1, 1))
    models[0].layer.b.copy_(mean[1:].view(1, 1))
    assert product(models[0]).item() == 0.0
    assert torch.stack([product(model) for model in models[1:]]).mean().item() == 1.0
    # With A frozen at 1 the products are B_k = 1 and −1: the mean of B is 0, and 0 · A is the mean of the products.
    for model in (models[0], models[2]):
        model.layer.a.fill_(1.0)
    assert product(models[0]).item() == torch.stack([product(model) for model in models[1:]]).mean().item() == 0.0


@pytest.mark.parametrize("engine", ["loop", "simulator"])
@pytest.mark.parametrize("frozen", [True, False], ids=["A frozen", "both trained"])
def test_with_a_frozen_the_federation_has_the_mean_of_clients_products(frozen, engine):
    gen, names = torch.Generator().manual_seed(2), ("one", "two", "three")
    rows = [(name, torch.randn(4, 5, generator=gen).double(), torch.randint(0, 3, (4,), generator=gen)) for name in names]
    model = OneLayer(2, 5, 3).double()
    model = eq.models.freeze_lora_a(model) if frozen else model
    solver = eq.solvers.SGD(lr=1.0, batch_size=None, epochs=4)
    algorithm = eq.Algorithm(solver=solver, sampler=eq.sampling.Full(), weights="uniform")

    def trained(rows):
        data = eq.FederatedData(eq.ClientSet.pack(rows), classes=3)
        return product(eq.train(model, data, algorithm, rounds=1, engine=engine, progress=False).model)

    mean = torch.stack([trained([row]) for row in rows]).mean(0)
    assert float(mean.abs().max()) > 0.1
    assert torch.allclose(trained(rows), mean, rtol=1e-9, atol=1e-12) == frozen


# ------------------------------------------------------------------------------------------------------------------- language


def test_the_loss_of_the_next_token_is_a_mean_over_each_examples_tokens():
    logits, tokens = torch.zeros(3, 4, 8), torch.tensor([[1, 2, 3, 4], [5, 6, -100, -100], [7, -100, -100, -100]])
    logits[0, 1, 3] = math.log(7.0)  # token 3 has chance 1 / 2 there, all others 1 / 8
    by_hand = torch.tensor([(2 * math.log(8) + math.log(2)) / 3, math.log(8), 0.0])
    assert torch.allclose(language.next_token_loss(logits, tokens), by_hand)
    assert torch.allclose(language.next_token_loss({"logits": logits}, tokens), by_hand)
    assert float(language.perplexity(logits, tokens)) == pytest.approx(math.exp((3 * math.log(8) + math.log(2)) / 4))
    assert torch.allclose(language.next_token_error(logits, tokens), torch.tensor([2 / 3, 1.0, 0.0]))
    with pytest.raises(InvalidParameter, match="logits"):
        language.next_token_loss(torch.zeros(3, 8), tokens)


# ----------------------------------------------------------------------------------------------------- transformers and peft


@pytest.fixture(scope="module")
def example():
    reason = 'needs transformers and peft: pip install "equipoise[peft]"'
    for library in ("transformers", "peft"):
        if importlib.util.find_spec(library) is None:
            pytest.skip(reason)
    spec = importlib.util.spec_from_file_location("adapters_example", ROOT / "examples" / "adapters_on_shakespeare.py")
    module = importlib.util.module_from_spec(spec)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        spec.loader.exec_module(module)
        module.make_model()
    return module


def test_a_transformers_model_with_peft_adapters_trains_as_it_is(example):
    data, model = example.make_data(), example.make_model()
    result = eq.train(model, data, rounds=2, clients_per_round=2, engine="loop", **example.TASK)
    adapters = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert all("lora_" in name for name in adapters)
    assert len(result.params) == sum(p.numel() for p in model.parameters() if p.requires_grad) < 3000
    moved = [name for name, p in result.model.named_parameters() if not torch.equal(p, dict(model.named_parameters())[name])]
    assert moved
    assert set(moved) <= set(adapters)
    for row in result.clients.where("test"):  # as transformers computes it: a mean over all tokens
        x, y = data.test.client(row["client"])
        own = result.model(**x, labels=y).loss
        assert row["perplexity"] == pytest.approx(math.exp(float(own.detach())), rel=1e-4)
    again = eq.evaluate(result.model, data, **example.TASK)
    assert torch.allclose(again.clients.metrics["perplexity"], result.clients.metrics["perplexity"], rtol=1e-5)


def test_the_example_compares_methods_and_privacy_freezes_a(example):
    data, methods = example.make_data(), example.make_methods()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        compared = eq.compare(methods, example.make_model, data, rounds=1, clients_per_round=2, engine="loop", **example.TASK)
    assert any("B alone is trained" in str(each.message) for each in told)
    assert "perplexity over the same clients, less is better" in compared.summary()
    plain, private = (compared.results[name][0] for name in ("FedAvg", "Δ-FL 0.5, ε = 8"))
    assert len(private.params) < len(plain.params)
    start = dict(example.make_model().named_parameters())
    frozen = [name for name in start if "lora_A" in name]
    assert all(torch.equal(dict(private.model.named_parameters())[name], start[name]) for name in frozen)


def test_the_example_reads_the_plays(example, real_data):
    data = example.make_data(real_data, roles=4)
    assert len(data.train) == 3
    assert len(data.test) == 1
    assert data.train.x["input_ids"].longest == example.LENGTH


def test_the_example_runs_over_flower(example):
    pytest.importorskip("flwr", reason='needs Flower: pip install "equipoise[flower]"')
    from fake_grid import federation, run_app

    from equipoise.engines.flower import server_app

    logging.getLogger("flwr").setLevel("ERROR")
    whole, algorithm = example.make_data(), example.make_methods()["FedAvg"]
    order = sorted(range(len(whole.train)), key=whole.train.ids.__getitem__)  # as the server counts clients
    data = eq.FederatedData(whole.train.take(order), name=whole.name, classes=256)

    def run(algorithm, model):
        found, options = [], {key: example.TASK[key] for key in ("loss", "error", "metrics")}
        grid = federation(data, model, **options)
        app = server_app(
            algorithm, model=model, rounds=1, clients_per_round=2, clients=4, seed=0, on_result=found.append, **options
        )
        run_app(app, grid)
        return found[0]

    result = run(algorithm, example.make_model)
    alone = eq.train(example.make_model, data, algorithm, rounds=1, clients_per_round=2, engine="loop", **example.TASK)
    assert torch.equal(result.params, alone.params)
    by_role = [dict(zip(t.client, t.metrics["perplexity"].tolist(), strict=True)) for t in (result.clients, alone.clients)]
    assert by_role[0] == by_role[1]
    most = max(report.bytes_sent for report in result.history.rounds)
    assert most < 2 * 2 * (4 * len(result.params) + 4000)  # to two clients, losses and updates: adapters, not the decoder
    # The operating system draws cohorts: of Poisson's, one in sixteen would be empty.
    private = eq.Algorithm(solver=algorithm.solver, privacy=PRIVATE.privacy, sampler=eq.sampling.Uniform())
    with pytest.raises(IncompatibleParts, match="freeze_lora_a"):
        run(private, example.make_model)
    guarded = run(private, example.private_model)
    assert guarded.epsilon is not None
