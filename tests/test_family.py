"""A family equals its members trained alone, and serves each client the member it chooses."""

import pytest
import torch

import equipoise as eq
from equipoise.data.clients import ClientSet, FederatedData
from equipoise.errors import Diverged, EquipoiseNotice, InvalidData, InvalidParameter
from made_clients import make_clients

TAILS = [1.0, 0.8, 0.5, 0.1]
OPTIONS = {"rounds": 6, "clients_per_round": 5, "seed": 3}


def softmax():
    model = eq.models.Softmax(4, 3).double()
    with torch.no_grad():  # at zero all losses are equal, and no tail is worth telling apart
        model.weight.copy_(torch.randn(3, 4, generator=torch.Generator().manual_seed(0)))
    return model


def point(model):
    return float(model.point.detach())


@pytest.fixture
def data():
    train = make_clients([1, 2, 3, 7, 10, 11, 20, 25], dtype=torch.float64)
    return FederatedData(train, test=make_clients([5, 9, 14], seed=1, prefix="unseen", dtype=torch.float64), name="ragged")


@pytest.mark.parametrize("engine", ["loop", "simulator", eq.engines.Simulator(chunk_size=2)], ids=repr)
@pytest.mark.parametrize(
    ("knob", "values", "make"),
    [
        ("tails", TAILS, lambda v: eq.risk.Superquantile(v)),
        ("qs", [0.0, 0.5, 2.0], lambda v: eq.risk.QFair(v)),
        ("tilts", [-1.0, 0.0, 3.0], lambda v: eq.risk.Tilted(v)),
    ],
)
def test_each_member_equals_the_run_of_it_alone(engine, knob, values, make, data):
    algorithm = eq.Algorithm(solver=eq.solvers.SGD(lr=0.2, batch_size=4, prox=0.1), server=eq.server_opt.Momentum())
    family = eq.train_family(softmax(), data, algorithm, **{knob: values}, engine=engine, **OPTIONS)
    assert family.values == tuple(values)
    for value, member in family.results.items():
        alone = eq.train(softmax(), data, eq.Algorithm(risk=make(value), solver=algorithm.solver, server=algorithm.server),
                         engine="loop", **OPTIONS)  # fmt: skip
        torch.testing.assert_close(member.params, alone.params, rtol=1e-9, atol=1e-12)
        assert [r.trained for r in member.history.rounds] == [r.trained for r in alone.history.rounds]
        assert [r.loss for r in member.history.rounds] == pytest.approx([r.loss for r in alone.history.rounds])
        torch.testing.assert_close(member.clients.error, alone.clients.error)


@pytest.mark.parametrize(
    "algorithm",
    [
        eq.Algorithm(risk=eq.risk.Superquantile(smoothing="kl", nu=0.1)),
        eq.Algorithm(solver=eq.solvers.SGD(epochs=3, straggler_share=0.5, stragglers="drop")),
        eq.Algorithm(solver=eq.solvers.MAML()),
        eq.Algorithm(solver=eq.solvers.AdaptiveProx(eq.solvers.SGD())),
        eq.Algorithm(sampler=eq.sampling.Poisson()),
        eq.Algorithm(averaging=eq.averaging.Uniform()),
    ],
    ids=repr,
)
def test_other_parts_compose(algorithm, data):
    family = eq.train_family(softmax(), data, algorithm, tails=[1.0, 0.3], **OPTIONS)
    for value, member in family.results.items():
        alone = eq.train(softmax(), data, member.algorithm, engine="loop", **OPTIONS)
        assert member.algorithm.risk.tail == value
        torch.testing.assert_close(member.params, alone.params, rtol=1e-9, atol=1e-12)


def test_aggregators_that_are_not_linear(data):
    class Halved:
        linear = False

        def __call__(self, updates, weights, *, losses=None, state=None):
            return (weights.to(updates.dtype) @ updates) / 2, (state or 0) + 1

    algorithm = eq.Algorithm(aggregator=Halved())
    family = eq.train_family(softmax(), data, algorithm, tails=[1.0, 0.3], **OPTIONS)
    alone = eq.train(softmax(), data, eq.Algorithm(risk=eq.risk.Superquantile(0.3), aggregator=Halved()), **OPTIONS)
    torch.testing.assert_close(family.results[0.3].params, alone.params)


# ------------------------------------------------------------------------------------------------- the knob and the choice


def line(*centres, examples=4, prefix="c"):
    """Clients on a line around different centres; mean estimation, so that each member is a point that can be computed."""
    clients = [(f"{prefix}{i}", torch.full((examples, 1), float(c), dtype=torch.float64)) for i, c in enumerate(centres)]
    return ClientSet.pack((name, x, x) for name, x in clients)


@pytest.fixture
def points():
    """Training clients at 0, 0, 0, 8: the mean is 2; the worst half is the outlier and one client at 0: their middle, 4."""
    data = FederatedData(line(0, 0, 0, 8), test=line(0, 3, 9, prefix="t"), name="line")
    algorithm = eq.Algorithm(sampler=eq.sampling.Full(), solver=eq.solvers.SGD(lr=0.05, batch_size=None))
    return data, eq.train_family(eq.models.MeanEstimator(1).double(), data, algorithm, tails=[1.0, 0.5], rounds=300)


def test_members_land_on_their_answers(points):
    _, family = points
    assert point(family.at(1.0)) == pytest.approx(2.0, abs=1e-3)
    assert point(family.at(0.5)) == pytest.approx(4.0, abs=0.2)  # subgradient steps hover around the kink


def test_at_takes_the_nearest_and_interpolates_only_when_asked(points):
    _, family = points
    assert family.at(0.7) is family.at(0.5)
    assert family.at(0.05) is family.at(0.5)
    between = point(family.at(0.75, interpolate=True))
    assert between == pytest.approx((point(family.at(1.0)) + point(family.at(0.5))) / 2)
    with pytest.raises(InvalidParameter, match=r"tail must lie between 0.5 and 1 to be interpolated"):
        family.at(0.3, interpolate=True)
    with pytest.raises(InvalidParameter, match="tail must be a number"):
        family.at("half")


def test_select_serves_a_client_by_its_own_loss(points):
    data, family = points
    assert family.select(data.test.take([0])) is family.at(1.0)  # at 0: the mean's 2 is nearer than 4
    assert family.select(data.test.take([2])) is family.at(0.5)  # at 9
    assert family.choose(([[9.0], [8.5]], [[9.0], [8.5]])) == 0.5
    losses = family.losses((torch.tensor([[9.0]]), torch.tensor([[9.0]])))
    assert losses[1.0] == pytest.approx((9 - point(family.at(1.0))) ** 2)


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ("all", InvalidParameter, "client_data must hold one client"),
        ([1.0, 2.0, 3.0], InvalidParameter, "must be a pair"),
        (([9.0], [9.0]), InvalidData, "one row per example"),
    ],
)
def test_select_refuses_what_is_not_one_client(points, given, error, words):
    data, family = points
    with pytest.raises(error, match=words):
        family.select(data.test if given == "all" else given)


def test_the_family_is_judged_as_its_own_method(points):
    _, family = points
    comparison = family.comparison()
    assert list(comparison.results) == ["tail 1", "tail 0.5", "family"]
    errors = {name: runs[0].clients.error for name, runs in comparison.results.items()}
    # Half of each test client's equal examples choose, the others judge: the family is the better member client by client.
    torch.testing.assert_close(errors["family"], torch.minimum(errors["tail 1"], errors["tail 0.5"]))
    assert comparison.results["family"][0].clients.size.tolist() == [2, 2, 2]
    assert "EachClientsChoice(knob='tail', values=(1.0, 0.5))" in repr(comparison.results["family"][0].algorithm)
    assert family.comparison() is comparison


def test_clients_choose_by_validation_and_are_judged_by_test():
    # The validation examples of client c1 lie at 9 but its test examples at 0: its choice turns out badly, as it may.
    train = line(0, 8)
    validation, test = line(0, 9), line(0, 0)
    data = FederatedData(train, validation, test, name="line")
    algorithm = eq.Algorithm(sampler=eq.sampling.Full(), solver=eq.solvers.SGD(lr=0.05, batch_size=None), weights="uniform")
    family = eq.train_family(eq.models.MeanEstimator(1).double(), data, algorithm, tilts=[-1.0, 1.0], rounds=200)
    low, high = (point(family.at(t)) for t in (-1.0, 1.0))
    assert low < high
    rows = family.comparison().results
    assert rows["family"][0].clients.error.tolist() == pytest.approx([min(low**2, high**2), high**2])
    assert rows["tilt -1"][0].clients.error.tolist() == pytest.approx([low**2, low**2])


def test_a_test_client_with_one_example_cannot_choose(data):
    test = make_clients([5, 9, 14, 1], seed=1, prefix="unseen", dtype=torch.float64)
    family = eq.train_family(softmax(), FederatedData(data.train, test=test), tails=[1.0, 0.5], **OPTIONS)
    with pytest.warns(EquipoiseNotice, match="1 of 4 test clients have a single example"):
        rows = family.comparison().results
    assert rows["family"][0].clients.client == ("unseen-0", "unseen-1", "unseen-2")
    lonely = FederatedData(data.train, test=make_clients([1, 1], dtype=torch.float64, prefix="lonely"))
    family = eq.train_family(softmax(), lonely, tails=[1.0, 0.5], **OPTIONS)
    assert repr(family) == "Family(tails [1.0, 0.5], 6 rounds on 'data')"
    with pytest.raises(InvalidData, match="All test clients have a single example"):
        family.comparison()


def test_without_other_clients_the_training_clients_are_judged(data):
    alone = FederatedData(data.train, name="alone")
    family = eq.train_family(softmax(), alone, tails=[1.0, 0.5], **OPTIONS)
    assert set(family.comparison().results["family"][0].clients.split) == {"train"}


def test_the_familys_history_is_the_work_of_all(data):
    family = eq.train_family(softmax(), data, tails=[1.0, 0.2], **OPTIONS)
    whole = family.comparison().results["family"][0].history.rounds
    parts = [member.history.rounds for member in family.results.values()]
    assert [r.trained for r in whole] == [a.trained + b.trained for a, b in zip(*parts, strict=True)]


def test_the_report_of_a_family(data, tmp_path):
    family = eq.train_family(softmax(), data, tails=[1.0, 0.5], **OPTIONS)
    page = family.report(tmp_path / "family.html").read_text()
    assert "family" in page
    assert "tail 0.5" in page


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "tails, qs, tilts must be given one at a time"),
        ({"tails": [0.5], "qs": [1.0]}, "must be given one at a time, but is 'tails, qs'"),
        ({"tails": 0.5}, "tails must be a list of numbers, but is 0.5"),
        ({"tails": ["half"]}, "tails must be a list of numbers"),
        ({"tails": []}, "tails must be one or more different numbers"),
        ({"tails": [0.5, 0.5]}, "tails must be one or more different numbers"),
        ({"tails": [0.5, 2.0]}, "tail must lie in (0, 1]"),
        ({"qs": [1.0], "algorithm": eq.Algorithm(risk=eq.risk.Tilted())}, "algorithm must have a QFair risk"),
    ],
)
def test_what_is_no_family_is_refused(options, words, data):
    with pytest.raises(InvalidParameter) as caught:
        eq.train_family(softmax(), data, **options, **OPTIONS)
    assert words in str(caught.value)


def test_a_member_that_diverges_is_named(data):
    algorithm = eq.Algorithm(solver=eq.solvers.SGD(lr=1e200))
    with pytest.raises(Diverged) as caught:
        eq.train_family(softmax(), data, algorithm, tails=[1.0, 0.5], **OPTIONS)
    assert caught.value.__notes__ == ["This was the member with tail 1."]
    assert caught.value.history is not None


def test_values_that_look_alike_keep_their_names(data):
    family = eq.train_family(softmax(), data, tails=torch.tensor([0.5, 0.50000001, 0.1], dtype=torch.float64), **OPTIONS)
    assert [member.name for member in family.results.values()] == ["tail 0.5", "tail 0.50000001", "tail 0.1"]


class WritesToItsInputs(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.shift = torch.nn.Parameter(torch.full((4,), 0.1, dtype=torch.float64))
        self.linear = softmax()

    def forward(self, x):
        x -= self.shift
        return self.linear(x)


def test_models_that_cannot_share_inputs_are_scored_one_by_one(data):
    family = eq.train_family(WritesToItsInputs(), data, tails=[1.0, 0.3], **OPTIONS)
    for member in family.results.values():
        alone = eq.train(WritesToItsInputs(), data, member.algorithm, engine="loop", **OPTIONS)
        torch.testing.assert_close(member.params, alone.params, rtol=1e-9, atol=1e-12)


def test_a_clients_pixels_are_scaled_once():
    gen = torch.Generator().manual_seed(0)
    x, y = torch.randint(0, 256, (40, 4), generator=gen), torch.randint(0, 3, (40,), generator=gen)
    for raw in (x.to(torch.uint8), x.float()):
        pixels = eq.data.from_arrays(raw, y, [f"c{i % 8}" for i in range(40)], scale=1 / 255)
        family = eq.train_family(eq.models.Softmax(4, 3), pixels, tails=[1.0, 0.5], rounds=3, clients_per_round=3)
        wanted = family.losses(pixels.test.take([0]))
        assert family.losses(pixels.test.client(at=0)) == pytest.approx(wanted)
    with pytest.raises(InvalidParameter, match="client_data must have whole targets from 0 to 2"):
        family.losses((torch.rand(2, 4), torch.tensor([0, 99])))
    with pytest.raises(InvalidParameter, match="client_data must have whole targets"):
        family.losses((torch.rand(2, 4), torch.tensor([0.5, 1.0])))


def test_the_summary_says_if_the_90th_percentile_is_the_worst_of_few_clients(data):
    family = eq.train_family(softmax(), data, tails=[1.0, 0.5], **OPTIONS)
    title, first, second, *_, few = family.summary().splitlines()
    assert "over 3 unseen test clients" in title
    assert first.split()[2] == first.split()[3]  # the 90th percentile and the worst 10 %
    assert second.split()[0] == "0.5"
    assert few.startswith("Fewer than 10 clients are judged (3)")
