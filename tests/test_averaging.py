import pytest
import torch

from equipoise.averaging import Geometric, Last, Uniform
from equipoise.errors import InvalidParameter
from equipoise.testing import LawBroken, check_averaging


def reported(averaging, iterates):
    state = averaging.begin(iterates[0])
    for point in iterates[1:]:
        state = averaging.update(point, state)
    return averaging.iterate(iterates[-1], state)


def numbers(*values):
    return [torch.tensor([value], dtype=torch.float64) for value in values]


@pytest.mark.parametrize("part", [Last(), Uniform(), *(Geometric(rate) for rate in (0.0, 1e-12, 0.01, 0.5, 0.999))], ids=repr)
def test_law(part):
    check_averaging(part)


@pytest.mark.parametrize(
    ("part", "expected"),
    [
        (Last(), 7.0),
        (Uniform(), (1.0 + 4.0 + 7.0) / 3),
        (Geometric(0.0), (10.0 + 1.0 + 4.0 + 7.0) / 4),
        (Geometric(0.5), (10.0 + 2 * 1.0 + 4 * 4.0 + 8 * 7.0) / 15),
    ],
    ids=repr,
)
def test_by_hand(part, expected):
    assert float(reported(part, numbers(10.0, 1.0, 4.0, 7.0))) == pytest.approx(expected, rel=1e-14)


@pytest.mark.parametrize("part", [Last(), Uniform(), Geometric(0.3)], ids=repr)
def test_without_a_round_it_is_the_start(part):
    assert float(reported(part, numbers(10.0))) == 10.0


@pytest.mark.parametrize("rate", [0.0, 1e-9, 1e-3, 0.1, 0.7])
@pytest.mark.parametrize("rounds", [1, 2, 60])
def test_geometric_is_its_formula(rate, rounds):
    iterates = list(torch.randn(rounds + 1, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(rounds)))
    beta = (1 - rate) ** -(1 + torch.arange(rounds + 1, dtype=torch.float64))
    torch.testing.assert_close(reported(Geometric(rate), iterates), (beta / beta.sum()) @ torch.stack(iterates))


def test_thousands_of_rounds_do_not_overflow():
    # β would be 10^5000 at the end; the mean forgets all but the last rounds, whose weights are 0.9, 0.09, …
    iterates = [torch.tensor([float(i)]) for i in range(5001)]
    assert float(reported(Geometric(0.9), iterates)) == pytest.approx(5000 - 1 / 9, rel=1e-6)
    assert float(reported(Uniform(), iterates)) == 2500.5


def test_float32_iterates_are_averaged_without_drift():
    iterates = [torch.tensor([0.1])] * 10_000 + [torch.tensor([0.3])] * 10_000
    point = reported(Geometric(0.0), iterates)
    assert point.dtype == torch.float32
    assert float(point) == pytest.approx(0.2, rel=1e-7)


@pytest.mark.parametrize("rate", [-0.1, 1.0, 1.5, float("nan"), "fast", True])
def test_bad_rates_are_refused(rate):
    with pytest.raises(InvalidParameter, match=r"rate must lie in \[0, 1\)"):
        Geometric(rate)


class Drifting(Last):
    def iterate(self, params, state):
        return 1.001 * params


class Extrapolating(Uniform):
    def iterate(self, params, state):
        return 3 * params - 2 * super().iterate(params, state)


class InPlace(Uniform):
    def update(self, params, state):
        return state[0].lerp_(params.to(state[0].dtype), 0.5), state[1] + 1


class Shaking(Last):
    def update(self, params, state):
        params.mul_(2.0)


class Wide(Uniform):
    def iterate(self, params, state):
        return state[0].to(torch.float16)


@pytest.mark.parametrize(
    ("broken", "law"),
    [
        (Drifting(), "lies between"),
        (Extrapolating(), "lies between"),
        (InPlace(), "write to the state"),
        (Shaking(), "write to the parameters"),
        (Wide(), "form of the parameters"),
    ],
    ids=repr,
)
def test_check_averaging_catches(broken, law):
    with pytest.raises(LawBroken, match=law):
        check_averaging(broken)
