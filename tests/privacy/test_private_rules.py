"""What goes together under differential privacy and secure aggregation, and what is refused, with the reason and a way out."""

import math
import warnings
from dataclasses import dataclass

import pytest
import torch

import equipoise as eq
from equipoise import aggregators, personal, risk, sampling, solvers
from equipoise.data.clients import FederatedData
from equipoise.errors import EquipoiseNotice, IncompatibleParts, InvalidParameter
from equipoise.privacy import (
    AdaptiveClip,
    DifferentialPrivacy,
    GaussianMechanism,
    PrivateQuantile,
    SecureAggregation,
    SecureSums,
)
from equipoise.types import RunSize
from made_clients import make_clients

BUDGET = DifferentialPrivacy(5.0, 1e-3, 1.0, loss_bound=3.0)
SECURE = SecureAggregation(loss_bound=3.0)
HIDDEN = risk.Superquantile(0.5, quantile=PrivateQuantile(2.0, 16))


def private_run(algorithm, *, clients=40, clients_per_round=10, rounds=3, dimension=5):
    size = RunSize(clients, clients_per_round, rounds, dimension, seed=0)
    return algorithm.privacy.protect(algorithm, size).noise


# ------------------------------------------------------------------------------------------------ what a budget must look like


@pytest.mark.parametrize(
    ("change", "parameter"),
    [
        ({"epsilon": 0.0}, "epsilon"),
        ({"epsilon": math.inf}, "epsilon"),
        ({"epsilon": "5"}, "epsilon"),
        ({"epsilon": None}, "epsilon"),  # and no noise: neither privacy nor noise is said
        ({"delta": 0.0}, "delta"),
        ({"delta": 1.0}, "delta"),
        ({"clip": 0.0}, "clip"),
        ({"clip": math.inf}, "clip"),  # nothing bounds what the noise has to hide
        ({"clip": math.inf, "noise_multiplier": 0.1}, "clip"),
        ({"clip": math.inf, "noise_multiplier": 0.0, "clip_rule": AdaptiveClip()}, "clip"),
        ({"clip": math.nan}, "clip"),
        ({"quantile_ratio": 0.0}, "quantile_ratio"),
        ({"noise_multiplier": -1.0}, "noise_multiplier"),
        ({"noise_multiplier": math.inf}, "noise_multiplier"),
        ({"loss_bound": 0.0}, "loss_bound"),
        ({"step": 0.0}, "step"),
        ({"fewest": 0}, "fewest"),
        ({"fewest": 2.5}, "fewest"),
        ({"noise": "local"}, "noise"),
        ({"noise_seed": -1}, "noise_seed"),
        ({"noise_seed": 0.5}, "noise_seed"),
        ({"method": "moments"}, "method"),
        ({"clip_rule": AdaptiveClip}, "clip_rule"),
        ({"clip_rule": 0.5}, "clip_rule"),
    ],
)
def test_wrong_values_are_named(change, parameter):
    with pytest.raises(InvalidParameter) as caught:
        DifferentialPrivacy(**{"epsilon": 5.0, "delta": 1e-3, "clip": 1.0} | change)
    assert caught.value.parameter == parameter


@pytest.mark.parametrize("change", [{"quantile": 0.0}, {"quantile": 1.0}, {"rate": 0.0}, {"ratio": 0.0}, {"ratio": math.inf}])
def test_wrong_values_of_an_adaptive_clip_are_named(change):
    with pytest.raises(InvalidParameter, match=next(iter(change))):
        AdaptiveClip(**change)


@pytest.mark.parametrize(
    "change", [{"step": 0.0}, {"modulus": 1}, {"modulus": 1 << 63}, {"modulus": 8.0}, {"loss_bound": -1.0}]
)
def test_wrong_values_of_secure_aggregation_are_named(change):
    with pytest.raises(InvalidParameter, match=next(iter(change))):
        SecureAggregation(**change)


def test_distributed_noise_needs_one_clip_bound():
    with pytest.raises(IncompatibleParts, match="grid made for one clip bound"):
        DifferentialPrivacy(5.0, 1e-3, 1.0, clip_rule=AdaptiveClip(), noise="distributed")
    with pytest.raises(IncompatibleParts, match="grid made for one clip bound"):
        DifferentialPrivacy(None, 1e-3, math.inf, noise_multiplier=0.0, noise="distributed")


def test_a_gaussian_mechanism_is_a_budget_without_a_limit():
    fixed = GaussianMechanism(2.0, 1.5, 1e-4, 0.5, AdaptiveClip(), 3.0)
    assert fixed.as_budget() == DifferentialPrivacy(
        None, 1e-4, 2.0, quantile_ratio=0.5, noise_multiplier=1.5, clip_rule=AdaptiveClip(), loss_bound=3.0
    )
    with pytest.raises(InvalidParameter, match="clip"):
        GaussianMechanism(math.inf, 1.0)


# ------------------------------------------------------------------------------------------------------------- under a budget


def test_the_defaults_are_poisson_cohorts_and_uniform_weights():
    data = make_clients([1, 5, 20])
    private, plain = eq.Algorithm(privacy=BUDGET), eq.Algorithm()
    assert private.drawn_by == sampling.Poisson()
    assert private.base_weights(data).tolist() == pytest.approx([1 / 3] * 3)
    assert plain.drawn_by == sampling.Uniform()
    assert plain.base_weights(data).tolist() == pytest.approx([1 / 26, 5 / 26, 20 / 26])
    secure = eq.Algorithm(privacy=SECURE)  # sums hide nobody's size by themselves, and need no noise made for a bound
    assert secure.drawn_by == sampling.Uniform()
    assert secure.base_weights(data).tolist() == plain.base_weights(data).tolist()


@dataclass(frozen=True)
class Unknown:
    """A risk that nobody has looked at."""

    def __call__(self, losses, base_weights, *, clients=None, state=None):
        return risk.RiskValue(losses.sum(), base_weights, state)

    def client_weight(self, loss, base_weight, public):
        return base_weight


@pytest.mark.parametrize("measure", [risk.Tilted(1.0), risk.Tilted(-1.0), risk.QFair(1.0)])
@pytest.mark.parametrize("privacy", [DifferentialPrivacy(5.0, 1e-3, 1.0), SecureAggregation()])
def test_weights_by_loss_need_a_bound(measure, privacy):
    with pytest.raises(IncompatibleParts, match="without bound") as caught:
        eq.Algorithm(risk=measure, privacy=privacy)
    assert "loss_bound" in caught.value.fix


def test_a_private_quantile_needs_a_budget():
    with pytest.raises(IncompatibleParts, match="there is none"):
        eq.Algorithm(risk=HIDDEN)
    with pytest.raises(IncompatibleParts, match="SecureAggregation has none"):
        eq.Algorithm(risk=HIDDEN, privacy=SECURE)


@pytest.mark.parametrize(
    "parts",
    [
        {},
        {"sampler": sampling.Full()},
        {"sampler": sampling.Uniform()},
        {"risk": HIDDEN},
        {"risk": risk.Tilted(2.0)},
        {"risk": risk.QFair(0.5)},
        {"solver": solvers.SGD(prox=0.1, momentum=0.9)},
        {"solver": solvers.MAML()},
        {"solver": solvers.AdaDPS({"weight": torch.ones(1)})},
        {"server": eq.server_opt.Adam(lr=0.01)},
        {"averaging": eq.averaging.Uniform()},
        {"personal": personal.Ditto()},
        {"personal": personal.Mapper()},
        {"personal": personal.Finetuning()},
    ],
)
def test_what_is_protected_is_allowed(parts):
    eq.Algorithm(privacy=BUDGET, **parts)


def test_a_family_is_refused_for_its_shared_rounds(ragged):
    with pytest.raises(InvalidParameter, match="privacy"):
        eq.train_family(
            eq.models.Softmax(4, 3), ragged, eq.Algorithm(HIDDEN, privacy=GaussianMechanism(1.0, 1.0)), tails=[1.0, 0.5],
            rounds=1, clients_per_round=4,
        )  # fmt: skip


# --------------------------------------------------------------------------------------------------- noise that a user chooses


def with_quantile(sigma, scale, *, noise_multiplier=0.1, epsilon=None, bins=16, **options):
    private = DifferentialPrivacy(epsilon, 1e-3, 1.0, noise_multiplier=noise_multiplier, **options)
    measure = risk.Superquantile(0.5, quantile=PrivateQuantile(2.0, bins, sigma=sigma, scale=scale))
    return eq.Algorithm(risk=measure, privacy=private)


def test_the_update_gets_what_a_given_quantile_leaves():
    run = private_run(with_quantile(10.0, 4, noise_multiplier=0.5))
    quantile = math.sqrt(10) * 10 / (4 * math.sqrt(4))  # √10 shares of σ = 10 over c √(log2 16)
    assert run.calibration.first == pytest.approx(quantile, rel=1e-9)
    assert run.calibration.update == pytest.approx((0.5**-2 - quantile**-2) ** -0.5, rel=1e-9)
    assert run.quantile is not None
    assert (run.quantile.sigma, run.quantile.scale) == (10.0, 4)


def test_a_given_quantile_that_takes_the_whole_budget_is_refused():
    with pytest.raises(InvalidParameter, match="must exceed 5"):
        private_run(with_quantile(10.0, 4, noise_multiplier=5.0))


def test_too_little_discrete_noise_for_the_accountant_is_refused():
    # √10 · 2 is below 20: as a Gaussian it is no good approximation.
    with pytest.raises(InvalidParameter, match=r"sigma of the private quantile must be at least 20/√10"):
        private_run(with_quantile(2.0, 1))
    private_run(with_quantile(20 / math.sqrt(10) * 1.0001, 1))


def test_a_quantile_without_noise_is_refused_under_a_budget_only():
    with pytest.raises(InvalidParameter, match="must be positive under a budget"):
        private_run(with_quantile(0.0, 1, epsilon=5.0))
    run = private_run(with_quantile(0.0, 1))
    assert run.epsilon_after(1) == math.inf  # said, where there is no budget
    nothing = private_run(with_quantile(5.0, 1, epsilon=5.0, noise_multiplier=0.0))
    assert nothing.rounds_allowed == 0  # a budget without noise allows nothing


def with_bins(bins):
    measure = risk.Superquantile(0.5, quantile=PrivateQuantile(2.0, bins))
    return eq.Algorithm(risk=measure, privacy=GaussianMechanism(1.0, 1.0))


def test_more_bins_than_clients_in_a_round_are_noticed():
    with pytest.warns(EquipoiseNotice, match=r"32 bins count the 10 clients of a round.*bins=8"):
        private_run(with_bins(32))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        private_run(with_bins(8))


@pytest.mark.parametrize(("sampler", "most"), [(None, 40), (sampling.Uniform(), 10), (sampling.Full(), 40)])
def test_more_shares_of_noise_than_clients_are_refused(sampler, most):
    def run(fewest):
        private = DifferentialPrivacy(None, 1e-3, 1.0, noise_multiplier=1.0, noise="distributed", fewest=fewest)
        size = 40 if isinstance(sampler, sampling.Full) else 10
        return private_run(eq.Algorithm(privacy=private, sampler=sampler), clients_per_round=size)

    assert run(most).fewest == most
    with pytest.raises(InvalidParameter, match=f"must not exceed the {most} clients"):
        run(most + 1)


def test_half_of_a_random_cohort_must_suffice_where_clients_add_the_noise():
    distributed = DifferentialPrivacy(None, 1e-3, 1.0, noise_multiplier=1.0, noise="distributed")
    central = DifferentialPrivacy(None, 1e-3, 1.0, noise_multiplier=1.0)
    found = {
        (noise.noise, type(sampler).__name__): private_run(eq.Algorithm(privacy=noise, sampler=sampler)).fewest
        for noise in (distributed, central)
        for sampler in (sampling.Poisson(), sampling.Uniform())
    }
    assert found == {
        ("distributed", "Poisson"): 5,
        ("distributed", "Uniform"): 10,
        ("central", "Poisson"): 10,
        ("central", "Uniform"): 10,
    }


def test_a_grid_too_coarse_for_its_noise_is_refused():
    private = DifferentialPrivacy(None, 1e-3, 1.0, noise_multiplier=1.0, noise="distributed", step=0.5)
    with pytest.raises(InvalidParameter, match="step must be so small"):
        _ = private_run(eq.Algorithm(privacy=private)).grid


# ----------------------------------------------------------------------------------------------------- under secure aggregation


def test_the_refusal_that_is_promised():
    with pytest.raises(IncompatibleParts) as caught:
        eq.Algorithm(aggregator=aggregators.Median(), privacy=SecureAggregation())
    assert str(caught.value) == (
        "SecureAggregation reveals only the sum of updates, but Median() reads each one.\n"
        "  Use aggregators.WeightedMean(), or drop SecureAggregation. [EQ201]"
    )


@pytest.mark.parametrize(
    "parts",
    [
        {"weights": "examples"},
        {"aggregator": aggregators.NormClip(1.0)},
        {"risk": risk.Superquantile(0.5, quantile=SecureSums(), eta_every=3)},
        {"risk": risk.Tilted(2.0)},
        {"sampler": sampling.Proportional()},
        {"solver": solvers.SGD(epochs=2, straggler_share=0.5)},
        {"personal": personal.Ditto()},
    ],
)
def test_what_sums_suffice_for_is_allowed(parts):
    eq.Algorithm(privacy=SECURE, **parts)


def test_a_cohort_of_one_has_no_sum_to_hide_in():
    data = FederatedData(make_clients([3, 4, 5]))
    with pytest.raises(InvalidParameter, match="at least 2"):
        eq.train(
            eq.models.Softmax(4, 3), data, eq.Algorithm(privacy=SecureAggregation()), rounds=1, clients_per_round=1,
            progress=False,
        )  # fmt: skip


def test_something_else_is_no_privacy():
    @dataclass(frozen=True)
    class Trusting:
        def check(self, algorithm):
            pass

    data = FederatedData(make_clients([3, 4, 5]))
    with pytest.raises(InvalidParameter, match="privacy must offer protect"):
        eq.train(eq.models.Softmax(4, 3), data, eq.Algorithm(privacy=Trusting()), rounds=1, clients_per_round=2, progress=False)


def test_client_weights_are_at_most_the_base_weight_for_any_loss():
    # What a client adds to a sum is bounded because its weight is, whatever its loss.
    losses = torch.tensor([-5.0, 0.0, 1e-12, 1.0, 2.999, 3.0, 1e30, math.inf], dtype=torch.float64)
    ones = torch.ones(8, dtype=torch.float64)
    for measure in (risk.Tilted(4.0), risk.Tilted(-4.0), risk.QFair(2.0), risk.QFair(0.0)):
        weights = measure.client_weight(losses, ones, 3.0)
        assert bool(((weights >= 0) & (weights <= 1)).all())
    assert risk.Tilted(4.0).client_weight(losses, ones, 3.0)[-3:].tolist() == [1.0, 1.0, 1.0]
    assert risk.Tilted(-4.0).client_weight(losses, ones, 3.0)[:2].tolist() == [1.0, 1.0]


@pytest.mark.parametrize(("delta", "told"), [(0.5, True), (0.1, True), (0.09, False)])
def test_a_delta_of_one_over_the_clients_is_told(delta, told):
    """There are 10 clients: δ = 1/10 would allow to publish one of them whole."""
    data = FederatedData(make_clients([4] * 10), name="ten")
    model = eq.models.Softmax(data.features, data.classes)
    privacy = DifferentialPrivacy(None, delta, 1e-3, noise_multiplier=1.0, method="rdp")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        eq.train(model, data, eq.Algorithm(privacy=privacy), rounds=1, clients_per_round=5, seed=0, progress=False)
    said = [str(each.message) for each in caught if "delta is" in str(each.message)]
    assert len(said) == told
    assert all(f"delta is {delta:.3g}, and there are 10 training clients" in text for text in said)
    assert all("clearly below 1/10, such as 0.01" in text for text in said)


def test_a_delta_that_needs_no_noise_is_refused_by_its_name():
    """Before: "epsilon must be less than 0 at this delta"."""
    with pytest.raises(InvalidParameter, match=r"delta must be small.*but is 0\.999"):
        eq.privacy.noise_for(1.0, 0.999, rounds=5, sampling_rate=0.5)
