"""DP-FTRL in training: the noise that rounds add, what the run costs, both engines, resume, and what is refused."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import equipoise as eq
from equipoise import privacy, sampling
from equipoise.data.clients import FederatedData
from equipoise.errors import CheckpointError, EquipoiseNotice, IncompatibleParts, InvalidParameter
from equipoise.experiment import catalog
from equipoise.privacy import correlated_noise as cn
from equipoise.privacy.accounting import gaussian_epsilon
from equipoise.privacy.run_audit import audit_algorithm
from equipoise.runs.checkpoint import Checkpoints
from equipoise.testing import check_protection
from equipoise.types import RunSize
from made_clients import make_clients

DATA = FederatedData(make_clients([5] * 12, dtype=torch.float64), classes=3)
MODEL = eq.models.Softmax(4, 3).double()
BLT = {"decays": (0.5, 0.9), "scales": (0.2, 0.1)}
BANDED = {"bands": (1.0, 0.5, 0.25)}


def private(z=1.0, clip=0.5, **given):
    return privacy.DPFTRL(given.pop("epsilon", None), 1e-4, clip, noise_multiplier=z, **given)


def trained(part, rounds=6, apart=3, **given):
    sampler = given.pop("sampler", sampling.MinSeparation(apart))
    algorithm = eq.Algorithm(privacy=part, sampler=sampler, solver=eq.solvers.SGD(lr=0.3, batch_size=2))
    return eq.train(MODEL, DATA, algorithm, rounds=rounds, clients_per_round=4, progress=False, **given)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.floats(0, 2), max_size=4), st.floats(0.1, 3), st.integers(1, 9))
def test_banded_noise_round_by_round_is_that_of_the_dense_inverse(rest, first, rounds):
    banded = cn.Banded((first, *rest))
    matrix = cn.toeplitz_matrix(banded.coefficients(rounds))
    z = torch.randn(rounds, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    buffers, streamed = banded.begin(z[0]), []
    for independent in z:
        noise, buffers = banded.step(independent, buffers)
        streamed.append(noise)
    wanted = torch.from_numpy(np.linalg.solve(matrix, z.numpy()))
    assert torch.allclose(torch.stack(streamed), wanted, rtol=1e-6, atol=1e-9 * float(wanted.abs().max()))


def test_sensitivity_of_bands_by_hand():
    # (1, ½), rounds 2 apart, T = 4: two columns of norm² 1.25 that share no row, 2.5. In 3 rounds the end of the run cuts
    # the second one off: 1.25 + 1. In one: 1.
    banded = cn.Banded((1.0, 0.5))
    for rounds, squared in ((4, 2.5), (3, 2.25), (2, 1.25), (1, 1.0)):
        assert banded.sensitivity(rounds, separation=2, participations=9) ** 2 == pytest.approx(squared)
    assert banded.sensitivity(4, separation=2, participations=9) == pytest.approx(
        cn.banded_sensitivity(cn.toeplitz_matrix(banded.coefficients(4)), separation=2, participations=2)
    )
    with pytest.raises(InvalidParameter, match="number of bands, 2"):
        banded.sensitivity(4, separation=1, participations=2)
    for wrong in ({"rounds": 0}, {"participations": 0}):
        with pytest.raises(InvalidParameter, match=next(iter(wrong))):
            banded.sensitivity(**{"rounds": 4, "separation": 2, "participations": 2, **wrong})


@pytest.mark.parametrize(
    ("matrix", "rounds", "squared"),
    [({}, 6, 2), (BLT, 6, None), (BANDED, 6, 2 * 1.3125), (BANDED, 7, 2 * 1.3125 + 1), (BANDED, 5, 1.3125 + 1.25)],
)
def test_rounds_add_the_noise_of_the_matrix(matrix, rounds, squared):
    """Updates of at most 1e-9 in noise of 1: the model after T rounds is the sum of the noise over the clients per round."""
    part = private(1e9, clip=1e-9, noise_seed=0, **matrix)
    result = trained(part, rounds)
    algorithm = result.algorithm
    plan = part.protect(algorithm, RunSize(12, 4, rounds, 15, 0, tuple(DATA.train.ids))).noise
    found = part.matrix.sensitivity(rounds, separation=3, participations=-(-rounds // 3))
    assert plan.sensitivity == found
    if squared is not None:
        assert found**2 == pytest.approx(squared)
    z = torch.stack([plan.gaussian("update", t, 15) for t in range(rounds)]) * found
    inverse = cn.inverse_coefficients(part.matrix.coefficients(rounds))
    wanted = cn.correlated_noise(inverse, z).sum(0) / 4
    assert torch.allclose(result.params, wanted, atol=1e-7)


@pytest.mark.parametrize("noise_seed", [0, None], ids=["seeded", "secret"])
@pytest.mark.parametrize("matrix", [BLT, BANDED], ids=["BLT", "banded"])
def test_a_run_keeps_the_number_of_rounds_that_its_noise_is_for(matrix, noise_seed, tmp_path):
    """One more round would be one more participation, which the noise of the rounds before does not hide."""
    part, path = private(noise_seed=noise_seed, **matrix), tmp_path / "run.ckpt"
    trained(part, rounds=6, checkpoint=path)
    before = path.read_bytes()
    for rounds in (7, 9):
        with pytest.raises(CheckpointError, match="differs in privacy: "):
            trained(part, rounds=rounds, checkpoint=path)
    assert path.read_bytes() == before


def test_without_correlation_it_is_the_server_view_of_independent_noise():
    """C = I and everyone in T rounds: sens √T, so the multiplier z is that of T rounds of z√T each, known cohorts."""
    rounds, z = 6, 2.0
    everyone = sampling.Full()
    ours = trained(private(z), rounds, sampler=everyone)
    plain = trained(privacy.GaussianMechanism(0.5, z * math.sqrt(rounds), 1e-4), rounds, sampler=everyone)
    assert ours.epsilon.epsilon == pytest.approx(gaussian_epsilon(z, 1e-4))
    assert ours.epsilon.epsilon == pytest.approx(plain.epsilon.epsilon_server, rel=1e-3)


def test_the_law_of_protections():
    for matrix in ({}, BLT, BANDED):
        for sampler in (sampling.MinSeparation(2), sampling.Full()):
            if matrix is not BANDED:
                noiseless = private(0.0, math.inf, **matrix)
                check_protection(private(2.0, **matrix), noiseless=noiseless, sampler=sampler)
    check_protection(private(2.0, bands=(1.0, 0.5)), noiseless=private(0.0, math.inf), sampler=sampling.MinSeparation(2))


@pytest.mark.parametrize("matrix", [BLT, BANDED], ids=["BLT", "banded"])
def test_engines_agree_and_runs_resume_bit_for_bit(matrix, tmp_path):
    part = private(noise_seed=0, **matrix)
    whole = trained(part)
    loop = trained(part, engine="loop")
    torch.testing.assert_close(loop.params, whole.params, rtol=1e-9, atol=1e-9)
    trained_part = Checkpoints(tmp_path / "run.ckpt", every=1)

    class Stop(eq.types.Observer):
        def on_round(self, report):
            if report.round == 3:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        trained(part, observers=[Stop()], checkpoint=trained_part)
    again = trained(part, checkpoint=Checkpoints(tmp_path / "run.ckpt", every=1))
    assert torch.equal(again.params, whole.params)
    assert again.epsilon == whole.epsilon
    assert again.privacy.releases == 1


def test_the_whole_run_is_one_release():
    result = trained(privacy.DPFTRL(3.0, 1e-4, 0.5, **BLT))
    assert 0.99 * 3.0 < result.epsilon.epsilon <= 3.0
    assert [report.epsilon for report in result.history.rounds] == [result.epsilon.epsilon] * 6
    assert result.privacy["public"].adjacency == "one client's contribution zeroed"
    assert result.privacy["server"].epsilon is None
    assert result.epsilon.participations == 2  # 6 rounds, 3 apart


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"bands": (1.0,), "decays": (0.5,), "scales": (0.5,)}, "bands"),
        ({"scales": (0.5,)}, "scales"),
        ({"bands": (0.0, 1.0)}, "bands"),
        ({"noise_seed": -1}, "noise_seed"),
        ({"clip": math.inf}, "clip"),
        ({"z": None}, "epsilon"),
    ],
)
def test_wrong_values(given, words):
    with pytest.raises(InvalidParameter, match=words):
        private(**{"z": 1.0, **given})


def test_too_little_noise_for_the_budget_and_too_many_bands_are_refused_before_the_run():
    with pytest.raises(InvalidParameter, match="noise_multiplier"):
        trained(private(0.5, epsilon=1.0))
    with pytest.raises(InvalidParameter, match="number of bands"):
        trained(private(bands=(1.0, 0.5, 0.4, 0.3)))


def test_a_configuration_names_it():
    made = catalog.part("privacy", "dp_ftrl").make({"epsilon": 2.0, "delta": 1e-4, "clip": 0.5, "bands": [1.0, 0.5]})
    assert made == privacy.DPFTRL(2.0, 1e-4, 0.5, bands=(1.0, 0.5))
    assert made.matrix == cn.Banded((1.0, 0.5))


def test_drift_correction_and_split_models_go_with_it():
    steps = eq.solvers.SGD(lr=0.1, batch_size=2, steps=2)
    for parts in ({"solver": eq.solvers.Scaffold(steps)}, {"solver": steps, "personal": eq.personal.FedPer("bias")},
                  {"solver": steps, "server": eq.server_opt.Adam(0.1)}):  # fmt: skip
        algorithm = eq.Algorithm(sampler=sampling.MinSeparation(3), privacy=private(noise_seed=0, **BLT), **parts)
        one, other = (
            eq.train(MODEL, DATA, algorithm, rounds=4, clients_per_round=4, engine=engine, progress=False).params
            for engine in ("loop", "simulator")
        )
        torch.testing.assert_close(one, other, rtol=1e-7, atol=1e-8)


def test_an_audit_says_that_it_looks_at_rounds_one_by_one():
    result = trained(private(**BLT))
    with pytest.raises(IncompatibleParts, match="correlated over rounds"):
        audit_algorithm(result.algorithm, clients=12, clients_per_round=4, rounds=6, trials=10)


# ------------------------------------------------------------------------------------------ clients that come and go: FedBuff

CLOCK = sampling.FedBuff(buffer=3, spread=0.8, apart=3)


def buffered(part, rounds=7, **given):
    return trained(part, rounds, sampler=given.pop("sampler", CLOCK), **given)


@pytest.mark.parametrize("engine", ["loop", "simulator"])
@pytest.mark.parametrize("clip", [math.inf, 1e6])
def test_without_noise_and_clipping_it_is_the_plain_buffer(engine, clip):
    private_run = buffered(private(0.0, clip), rounds=9, engine=engine)
    plain = eq.Algorithm(sampler=CLOCK, solver=eq.solvers.SGD(lr=0.3, batch_size=2), weights="uniform")
    open_run = eq.train(MODEL, DATA, plain, rounds=9, clients_per_round=4, progress=False, engine=engine)
    torch.testing.assert_close(private_run.params, open_run.params, rtol=1e-9, atol=1e-12)
    found, wanted = private_run.history.rounds, open_run.history.rounds
    assert [report.arrivals for report in found] == [report.arrivals for report in wanted]
    assert [report.loss for report in found] == pytest.approx([report.loss for report in wanted])
    assert any(age > 0 for report in found for _, _, age in report.arrivals)
    assert math.isinf(private_run.epsilon.epsilon)


@pytest.mark.parametrize("engine", ["loop", "simulator"])
def test_staleness_comes_before_clipping_and_a_step_is_divided_by_the_buffer(engine):
    """Updates ½(x − w): x_A = 200 gives 100, clipped to 1, x_B = 1 gives ½. A takes 1, B 3, a buffer of 1, 2 apart.

    Step 0: A, w = 1. B began at w = 0: ½ · 2^(−½), within the clip bound. With a buffer of 2, A and B at once: (1 + ½)/2.
    """
    two = eq.data.ClientSet.pack([(name, torch.tensor([[x]]), torch.tensor([[x]])) for name, x in (("A", 200.0), ("B", 1.0))])
    data, solver = FederatedData(two, name="points"), eq.solvers.SGD(lr=0.25, batch_size=None, epochs=1)

    def moved(sampler, rounds, clip=1.0):
        algorithm = eq.Algorithm(sampler=sampler, solver=solver, privacy=private(0.0, clip))
        options = {"rounds": rounds, "clients_per_round": 2, "progress": False, "engine": engine}
        return float(eq.train(eq.models.MeanEstimator(1), data, algorithm, **options).params)

    slow = sampling.FedBuff(buffer=1, durations={"A": 1, "B": 3}, apart=2)
    assert moved(slow, 1) == pytest.approx(1.0)
    assert moved(slow, 2) == pytest.approx(1 + 0.5 * 2**-0.5)
    # Clipped after the factor: ½ · 2^(−½) = 0.354 is clipped to 0.3, not ½ to 0.3 and then to 0.212.
    assert moved(slow, 2, clip=0.3) == pytest.approx(0.6)
    assert moved(sampling.FedBuff(buffer=2, spread=0.0, apart=1), 1) == pytest.approx(0.75)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_an_update_that_cannot_be_used_counts_nothing_and_scales_nothing(bad):
    """Zeroed, as the neighbour's: the other's weight stays ½ of a buffer of 2."""

    class Sends:
        share, seed = 0.5, 0

        def corrupt(self, sent):
            return torch.full_like(sent.updates, bad)

    two = eq.data.ClientSet.pack([(name, torch.tensor([[1.0]]), torch.tensor([[1.0]])) for name in "AB"])
    data = eq.attacks.apply(FederatedData(two, name="points"), Sends())
    algorithm = eq.Algorithm(
        sampler=sampling.FedBuff(2, apart=1), privacy=private(0.0, 9.0), solver=eq.solvers.SGD(lr=0.25, batch_size=None)
    )
    result = eq.train(eq.models.MeanEstimator(1), data, algorithm, rounds=1, clients_per_round=2, progress=False)
    assert float(result.params) == pytest.approx(0.25)
    assert result.history.rounds[0].rejected == ()


@pytest.mark.parametrize("matrix", [{}, BLT, BANDED], ids=["identity", "BLT", "banded"])
def test_steps_add_the_noise_of_the_matrix_over_the_buffer(matrix):
    """Updates of at most 1e-9 in noise of 1: the model after T steps is its sum over the buffer, not over those at work."""
    part, rounds = private(1e9, clip=1e-9, noise_seed=0, **matrix), 7
    result = buffered(part, rounds)
    plan = part.protect(result.algorithm, RunSize(12, 3, rounds, 15, 0, tuple(DATA.train.ids))).noise
    assert plan.sensitivity == part.matrix.sensitivity(rounds, separation=3, participations=3)  # ⌈7/3⌉
    z = torch.stack([plan.gaussian("update", t, 15) for t in range(rounds)]) * plan.sensitivity
    inverse = cn.inverse_coefficients(part.matrix.coefficients(rounds))
    assert torch.allclose(result.params, cn.correlated_noise(inverse, z).sum(0) / 3, atol=1e-7)


@pytest.mark.parametrize("matrix", [{}, BLT, BANDED], ids=["identity", "BLT", "banded"])
@pytest.mark.parametrize("budget", [None, 2.0])
def test_it_costs_what_separated_rounds_cost(matrix, budget):
    part = private(None if budget else 0.8, epsilon=budget, **matrix)
    clock, turns = buffered(part), trained(part, 7)
    assert clock.epsilon.epsilon == turns.epsilon.epsilon
    assert [r.epsilon for r in clock.history.rounds] == [r.epsilon for r in turns.history.rounds] == [turns.epsilon.epsilon] * 7
    assert clock.privacy.releases == turns.privacy.releases == 1
    assert clock.privacy["public"].epsilon == turns.privacy["public"].epsilon
    counts = {}
    for report in clock.history.rounds:
        for client, _, _ in report.arrivals:
            counts[client] = counts.get(client, 0) + 1
    assert max(counts.values()) <= clock.epsilon.participations == 3


@pytest.mark.parametrize("engine", ["loop", "simulator"])
@pytest.mark.parametrize("matrix", [BLT, BANDED], ids=["BLT", "banded"])
def test_buffered_runs_resume_bit_for_bit_after_a_kill(matrix, engine, tmp_path):
    part = private(noise_seed=0, **matrix)
    whole = buffered(part, rounds=9, engine=engine)

    class Stop(eq.types.Observer):
        def on_round(self, report):
            if report.round == 4:
                raise KeyboardInterrupt

    saving = Checkpoints(tmp_path / "run.ckpt", every=3)
    with pytest.raises(KeyboardInterrupt):
        buffered(part, rounds=9, engine=engine, observers=[Stop()], checkpoint=saving)
    with pytest.warns(EquipoiseNotice, match="Going on from round"):
        again = buffered(part, rounds=9, engine=engine, checkpoint=Checkpoints(tmp_path / "run.ckpt", every=3))
    assert torch.equal(again.params, whole.params)
    assert [r.arrivals for r in again.history.rounds] == [r.arrivals for r in whole.history.rounds]
    assert again.epsilon == whole.epsilon
    assert again.privacy.releases == 1


def test_buffers_of_one_client_release_too_and_too_many_bands_are_refused():
    one = sampling.FedBuff(buffer=1, apart=4)
    assert float(buffered(private(**BLT), sampler=one).params.abs().sum()) > 0
    with pytest.raises(InvalidParameter, match="number of bands"):
        buffered(private(bands=(1.0, 0.5, 0.4, 0.3)))
