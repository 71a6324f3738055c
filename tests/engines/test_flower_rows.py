"""What clients keep for their solver on nodes of a network: SCAFFOLD, FedDyn, momentum, Adam; and FedNova by secure sums."""

from dataclasses import replace

import pytest
import torch
from fake_grid import federation
from test_flower_engine import SGD, killed_after, run, simulate, softmax, some_data
from torch import nn

import equipoise as eq
from equipoise.aggregators import FedNova, NormClip
from equipoise.data.clients import FederatedData
from equipoise.errors import EquipoiseNotice, IncompatibleParts
from equipoise.privacy import DPFTRL, DifferentialPrivacy, SecureAggregation
from equipoise.solvers import Adam, FedDyn, Scaffold
from made_clients import make_clients

pytestmark = pytest.mark.usefixtures("batches_of_the_simulation")
STEPS = SGD(steps=3, batch_size=4)
GROUPS = eq.risk.GroupDRO(0.5, {f"client-{k}": str(k % 2) for k in range(5)})
SECURE = SecureAggregation(step=2.0**-30)
NO_NOISE = {"epsilon": None, "delta": 1e-5, "clip": 0.05, "noise_multiplier": 0.0}
UNIFORM = eq.sampling.Uniform()
KEEPS = {
    "SCAFFOLD": eq.Algorithm(solver=Scaffold(SGD(batch_size=4))),
    "SCAFFOLD, median": eq.Algorithm(solver=Scaffold(STEPS), aggregator=eq.aggregators.Median()),
    "FedDyn": eq.Algorithm(solver=FedDyn(0.5, SGD(batch_size=4))),
    "client momentum": eq.Algorithm(solver=SGD(momentum=0.9, steps=1, state="kept")),
    "Adam, Δ-FL": eq.Algorithm(solver=Adam(lr=0.05, state="kept"), risk=eq.risk.Superquantile(0.5)),
    "SCAFFOLD, secure": eq.Algorithm(solver=Scaffold(STEPS), privacy=SECURE),
    "FedDyn, secure": eq.Algorithm(solver=FedDyn(0.5, SGD(batch_size=4)), privacy=SECURE),
    "SCAFFOLD, DP": eq.Algorithm(solver=Scaffold(STEPS), privacy=DifferentialPrivacy(**NO_NOISE), sampler=UNIFORM),
    "SCAFFOLD, distributed DP": eq.Algorithm(
        solver=Scaffold(STEPS), privacy=DifferentialPrivacy(**NO_NOISE, noise="distributed", step=2.0**-30), sampler=UNIFORM
    ),
    "DP-FTRL": eq.Algorithm(
        solver=SGD(batch_size=4), sampler=eq.sampling.Full(),
        privacy=DPFTRL(None, 1e-5, 0.05, 0.0, decays=(0.5,), scales=(0.3,)),
    ),
    "pFedMe": eq.Algorithm(solver=SGD(batch_size=4), personal=eq.personal.PFedMe(2.0, 3)),
    "pFedMe, Δ-FL": eq.Algorithm(
        solver=SGD(batch_size=4), personal=eq.personal.PFedMe(2.0, 3), risk=eq.risk.Superquantile(0.5)
    ),
    "FedPer": eq.Algorithm(solver=SGD(batch_size=4), personal=eq.personal.FedPer("bias")),
    "FedPer, median": eq.Algorithm(
        solver=SGD(batch_size=4), personal=eq.personal.FedPer("bias"), aggregator=eq.aggregators.Median()
    ),
    "FedPer, DP": eq.Algorithm(
        solver=SGD(batch_size=4), personal=eq.personal.FedPer("bias"), privacy=DifferentialPrivacy(**NO_NOISE), sampler=UNIFORM
    ),
    "pFedMe, DP": eq.Algorithm(
        solver=SGD(batch_size=4), personal=eq.personal.PFedMe(2.0, 3), privacy=DifferentialPrivacy(**NO_NOISE), sampler=UNIFORM
    ),
    "FedRep": eq.Algorithm(solver=SGD(batch_size=4), personal=eq.personal.FedRep("bias", 2, 1)),
    "FedBABU": eq.Algorithm(solver=SGD(batch_size=4), personal=eq.personal.FedBABU("bias", 2)),
    "LG-FedAvg": eq.Algorithm(solver=SGD(batch_size=4), personal=eq.personal.LGFedAvg("weight")),
    "kept alone": eq.Algorithm(solver=SGD(batch_size=4), personal=eq.personal.Split("bias", (("kept", 2), ("all", None)))),
    "GroupDRO": eq.Algorithm(solver=SGD(batch_size=4), risk=GROUPS),
    "FedNova": eq.Algorithm(solver=SGD(batch_size=4), aggregator=FedNova()),
    "FedNova, secure": eq.Algorithm(solver=SGD(batch_size=4), aggregator=FedNova(), privacy=SECURE),
    "FedNova of a public length, secure": eq.Algorithm(
        solver=SGD(batch_size=4), aggregator=FedNova(NormClip(0.2), steps=3.0), privacy=SECURE
    ),
    "FedNova, distributed DP": eq.Algorithm(
        solver=SGD(batch_size=4), aggregator=FedNova(steps=3.0), sampler=UNIFORM,
        privacy=DifferentialPrivacy(**NO_NOISE, noise="distributed", step=2.0**-30),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", KEEPS)
def test_a_federation_keeps_what_a_simulation_keeps(name):
    data, algorithm = some_data(), KEEPS[name]
    wanted = simulate(algorithm, data, rounds=4, clients_per_round=5)
    found, grid = run(algorithm, data, rounds=4, clients_per_round=5)
    torch.testing.assert_close(found.params, wanted.params, rtol=1e-5, atol=1e-6)
    if algorithm.personal is not None:
        torch.testing.assert_close(found.clients.personal_loss, wanted.clients.personal_loss, rtol=1e-5, atol=1e-6)
    if "secure" in name or "distributed" in name:
        assert not any(action == "train.update" for _, action, _ in grid.log)  # nothing of one client alone


def normalised():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))


@pytest.mark.filterwarnings("ignore:.*which is left out:equipoise.errors.EquipoiseNotice")
@pytest.mark.parametrize("name", ["SCAFFOLD", "FedDyn", "FedNova", "FedNova, secure"])
def test_batches_that_a_model_leaves_out_are_no_steps_of_a_federation(name):
    # Batches of 4: of the clients with 9 and 5 the last batch is left out, and a client with 1 example takes no step.
    data = FederatedData(make_clients([6, 9, 1, 5, 20]), test=make_clients([5, 9], seed=1, prefix="unseen"), name="small")
    options = {"model": normalised, "rounds": 3, "clients_per_round": 5}
    wanted = simulate(KEEPS[name], data, **options)
    found, _ = run(KEEPS[name], data, **options)
    torch.testing.assert_close(found.params, wanted.params, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found.carried, wanted.carried, rtol=1e-5, atol=1e-6)


def test_correlated_noise_of_a_federation_comes_from_the_operating_system():
    """A seed would tell nodes the noise. Two runs have other noise, and each round's ε is that of the whole run."""
    data = some_data()
    mechanism = DPFTRL(None, 1e-5, 0.05, 1.0, decays=(0.5,), scales=(0.3,))
    algorithm = eq.Algorithm(solver=SGD(batch_size=4), sampler=eq.sampling.Full(), privacy=mechanism)
    first, second = (run(algorithm, data, rounds=3, clients_per_round=5)[0] for _ in range(2))
    assert not torch.equal(first.params, second.params)
    simulated = simulate(algorithm, data, rounds=3, clients_per_round=5)
    assert {report.epsilon for report in first.history.rounds} == {report.epsilon for report in simulated.history.rounds}
    seeded = eq.Algorithm(solver=SGD(batch_size=4), sampler=eq.sampling.Full(), privacy=replace(mechanism, noise_seed=0))
    with pytest.raises(IncompatibleParts, match="noise_seed"):
        run(seeded, data, rounds=1, clients_per_round=5)


def test_a_federation_keeps_rounds_of_a_client_apart(tmp_path):
    """What the noise of DP-FTRL is made for. Each round used to draw its cohort by another seed, and groups mixed."""
    data = FederatedData(make_clients([6, 9, 12, 15, 20, 8]), test=make_clients([5] * 6, seed=1), name="six")
    mechanism = DPFTRL(None, 1e-5, 0.05, 0.0, decays=(0.5,), scales=(0.3,))
    algorithm = eq.Algorithm(solver=SGD(batch_size=4), sampler=eq.sampling.MinSeparation(3), privacy=mechanism)
    grid = federation(data, softmax)
    options = {"rounds": 9, "clients_per_round": 2, "clients": 6, "folder": tmp_path / "run"}
    killed_after(5, algorithm, data, grid, **options)
    grid.new_run()
    run(algorithm, data, grid, **options)
    cohorts = [{client for client, action, r in grid.log if action == "train.update" and r == index} for index in range(9)]
    assert all(len(cohort) == 2 for cohort in cohorts), cohorts
    assert all(cohorts[t].isdisjoint(cohorts[t + 1] | cohorts[t + 2]) for t in range(7)), cohorts


@pytest.mark.parametrize("name", ["SCAFFOLD", "FedDyn", "client momentum", "FedPer", "GroupDRO"])
def test_a_killed_server_goes_on_with_the_rows_of_its_nodes(name, tmp_path):
    data, algorithm = some_data(), KEEPS[name]
    wanted, _ = run(algorithm, data, rounds=5)
    grid = federation(data, softmax, keep=tmp_path / "nodes")
    killed_after(3, algorithm, data, grid, rounds=5, folder=tmp_path / "run")
    grid.new_run()
    found, _ = run(algorithm, data, grid, rounds=5, folder=tmp_path / "run")
    assert torch.equal(found.params, wanted.params)
    if algorithm.personal is not None:
        assert torch.equal(found.clients.personal_loss, wanted.clients.personal_loss)


def test_a_node_without_its_row_says_so_and_begins_anew(tmp_path):
    data, algorithm = some_data(), KEEPS["SCAFFOLD"]
    grid = federation(data, softmax)
    killed_after(2, algorithm, data, grid, rounds=3, folder=tmp_path, clients_per_round=5)
    grid.new_run()  # and the nodes' owners have named no folder
    with pytest.warns(EquipoiseNotice, match="5 clients lost what is kept for the solver"):
        run(algorithm, data, grid, rounds=3, folder=tmp_path, clients_per_round=5)


def test_group_sums_are_refused_over_a_network():
    with pytest.raises(IncompatibleParts, match="which nodes do not make"):
        run(eq.Algorithm(risk=GROUPS, privacy=SECURE), some_data(), rounds=1)


SPLIT = {"solver": SGD(batch_size=4), "personal": eq.personal.FedPer("bias")}


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ({"sampler": eq.sampling.FedBuff(2)}, "simulates a clock"),
        (SPLIT | {"risk": eq.risk.Superquantile(0.5)}, "not asked for over a network"),
        (SPLIT | {"privacy": SECURE}, "not summed securely"),
        ({"solver": SGD(), "personal": eq.personal.PFedMe(2.0, 3), "privacy": SECURE}, "not summed securely"),
        ({"aggregator": eq.aggregators.CentredClipping(0.1, 1), "privacy": SECURE}, "nodes are not told"),
    ],
    ids=["FedBuff", "split, tail", "split, secure", "pFedMe, secure", "centred clipping, secure"],
)
def test_what_goes_together_in_a_simulation_alone_is_refused(parts, words):
    with pytest.raises(IncompatibleParts, match=words):
        run(eq.Algorithm(**parts), some_data(), rounds=1)


def test_a_clip_in_units_of_an_unknown_length_is_refused():
    with pytest.raises(IncompatibleParts, match="nobody knows before the secure sum"):
        run(eq.Algorithm(aggregator=FedNova(NormClip(0.2)), privacy=SECURE), some_data(), rounds=1)
