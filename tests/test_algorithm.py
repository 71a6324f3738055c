"""What an algorithm refuses at construction, and which iterate a run reports."""

import pytest
import torch

import equipoise as eq
from equipoise.data.clients import ClientSet, FederatedData
from equipoise.errors import ConfigError, InvalidParameter
from equipoise.experiment.config import RunConfig


def test_a_configuration_of_afl_without_everyone_is_refused_with_the_key():
    table = {"data": {"name": "label_shift"}, "model": {"name": "softmax"}, "algorithm": {"risk": "worst_case"},
             "train": {"rounds": 1, "clients_per_round": 2}}  # fmt: skip
    with pytest.raises(ConfigError, match=r"(?s)algorithm \(parts\).*WorstCase.*Full"):
        RunConfig.of(table)
    table["algorithm"] = {"risk": "worst_case", "sampler": "full"}
    assert RunConfig.of(table).algorithm().reported == eq.averaging.Uniform()


def test_a_mixture_with_afl_reports_the_average_also_from_a_configuration():
    terms = [{"coefficient": 0.5, "name": "mean"}, {"coefficient": 0.5, "name": "worst_case"}]
    table = {"data": {"name": "label_shift"}, "model": {"name": "softmax"}, "train": {"rounds": 1, "clients_per_round": 2},
             "algorithm": {"sampler": "full", "risk": {"name": "mixture", "terms": terms}}}  # fmt: skip
    assert RunConfig.of(table).algorithm().reported == eq.averaging.Uniform()


def test_a_client_without_a_group_is_refused_before_any_round(ragged):
    groups = dict.fromkeys(ragged.train.ids[:-2], "a")
    with pytest.raises(InvalidParameter, match="without 2: client-6, client-7"):
        eq.train(eq.models.Softmax(4, 3), ragged, eq.Algorithm(risk=eq.risk.HierarchicalTilt(groups)), rounds=1,
                 clients_per_round=1)  # fmt: skip


def test_a_run_in_which_nobody_takes_part_says_so(ragged):
    nobody = eq.Algorithm(sampler=eq.sampling.Availability(share=0.001))
    with pytest.warns(eq.errors.EquipoiseNotice, match="Nobody was trained in 4 of 4 rounds"):
        eq.train(eq.models.Softmax(4, 3), ragged, nobody, rounds=4, clients_per_round=2)


def test_a_wrong_averaging_is_named():
    with pytest.raises(InvalidParameter, match=r"averaging must offer begin, update, iterate"):
        eq.Algorithm(averaging="mean")
    with pytest.raises(InvalidParameter, match=r"Write equipoise\.averaging\.Uniform\(\)"):
        eq.Algorithm(averaging=eq.averaging.Uniform)


@pytest.mark.parametrize("engine", ["loop", "simulator"])
def test_averaged_iterates_by_hand(engine):
    # One client at 8, lr 0.25: w halves the distance every round, so w^1, w^2, w^3 = 4, 6, 7.
    x = torch.full((1, 1), 8.0, dtype=torch.float64)
    data = FederatedData(ClientSet.pack([("c", x, x)]))
    solver = eq.solvers.SGD(lr=0.25, batch_size=None, steps=1)

    def reported(averaging):
        algorithm = eq.Algorithm(solver=solver, averaging=averaging)
        result = eq.train(eq.models.MeanEstimator(1).double(), data, algorithm, rounds=3, clients_per_round=1, engine=engine)
        assert float(result.model.point.detach()) == float(result.params)
        assert float(result.clients.loss) == pytest.approx((8 - float(result.params)) ** 2)  # it is what is evaluated
        return float(result.params)

    assert reported(None) == 7.0
    assert reported(eq.averaging.Uniform()) == pytest.approx((4 + 6 + 7) / 3)
    # rate 1/2: weights 2, 4, 8, 16 of w^0 … w^3 = 0, 4, 6, 7
    assert reported(eq.averaging.Geometric(0.5)) == pytest.approx((4 * 4 + 8 * 6 + 16 * 7) / 30)


@pytest.mark.parametrize("engine", ["loop", "simulator"])
def test_two_afl_rounds_by_hand(engine):
    # Clients at 0, 1 and 4, w = 0, lr 0.1, step 0.1. Round 1: λ = 1/3 each, F = 0, 1, 16; the update is 0.1 · 2 · (5/3) = 1/3.
    # λ + 0.1 F = 1/3, 0.4333, 1.9333; the largest exceeds the second by more than 1: the projection is the corner (0, 0, 1).
    # Round 2: only the client at 4 is trained: w = 1/3 + 0.2 (4 − 1/3) = 16/15. Reported is the mean of 1/3 and 16/15.
    points = [(f"c{i}", torch.tensor([[v]], dtype=torch.float64)) for i, v in enumerate((0.0, 1.0, 4.0))]
    data = FederatedData(ClientSet.pack((name, x, x) for name, x in points))
    algorithm = eq.Algorithm(
        risk=eq.risk.WorstCase(step=0.1), sampler=eq.sampling.Full(), solver=eq.solvers.SGD(lr=0.1, batch_size=None, steps=1)
    )
    result = eq.train(eq.models.MeanEstimator(1).double(), data, algorithm, rounds=2, engine=engine)
    assert float(result.params) == pytest.approx((1 / 3 + 16 / 15) / 2)
    assert [r.trained for r in result.history.rounds] == [3, 1]


@pytest.mark.parametrize(
    ("part", "words"),
    [
        ({"solver": torch.optim.SGD}, "is 'torch.optim.sgd.SGD'. Write equipoise.solvers.SGD(lr=…)."),
        ({"server": eq.server_opt.Adam}, "is 'Adam'. Write equipoise.server_opt.Adam(lr=…)."),
        ({"risk": eq.risk.Mean}, "is 'Mean'. Write equipoise.risk.Mean()."),
        ({"personal": eq.personal.Ditto}, "is 'Ditto'. Write equipoise.personal.Ditto(strength=…)."),
        ({"aggregator": torch.nn.Linear}, "is 'torch.nn.modules.linear.Linear'. Write Linear(…), with its parameters."),
    ],
)
def test_a_class_in_place_of_an_object_is_refused_with_what_to_write(part, words):
    with pytest.raises(InvalidParameter) as refusal:
        eq.Algorithm(**part)
    assert words in str(refusal.value)
