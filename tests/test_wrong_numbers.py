"""Cases that once ended in a wrong number, or an empty one, without a word."""

import inspect
import math
import subprocess
import sys
import warnings

import numpy as np
import pytest
import torch

import equipoise as eq
from equipoise import aggregators, attacks, metrics, personal, risk, sampling, solvers
from equipoise.core.task import Task
from equipoise.data.clients import ClientSet, FederatedData
from equipoise.engines import Loop, Simulator
from equipoise.errors import ConfigError, EquipoiseError, EquipoiseNotice, IncompatibleParts, InvalidParameter, NotWritten
from equipoise.experiment import catalog
from equipoise.tilted import hierarchical_stochastic_descent, tilted_loss
from equipoise.types import Cohort

FULL = sampling.Full()
STEPS = solvers.SGD(lr=0.05, batch_size=None, steps=3)


def regression(clients=10, scale=None, seed=0):
    """Clients with linear targets of their own; `scale` makes the inputs of client 0 large."""
    rng, triples = np.random.default_rng(seed), []
    for k in range(clients):
        x = rng.normal(size=(6 + k % 3, 3)) * (scale if scale and k == 0 else 1)
        triples.append((f"c{k}", torch.tensor(x), torch.tensor(x @ rng.normal(size=3) + rng.normal())))
    return FederatedData(ClientSet.pack(triples), name="regression")


def train(algorithm, data, rounds=4, engine="loop", **options):
    model = eq.models.LinearRegression(3).double()
    return eq.train(model, data, algorithm, rounds=rounds, engine=engine, progress=False, **options)


# ------------------------------------------------------------------------------------------------ what clients send is attacked


@pytest.mark.parametrize("engine", ["loop", "simulator"])
@pytest.mark.parametrize("method", [personal.L2SGD(1.0), personal.Mocha(0.2)])
@pytest.mark.parametrize("attack", [attacks.RandomUpdates(0.5, scale=10.0), attacks.ModelReplacement(0.5, update="negated")])
def test_own_models_of_benign_clients_feel_an_attack_on_what_is_sent(method, attack, engine):
    data, algorithm = regression(), eq.Algorithm(solver=STEPS, sampler=FULL, personal=method)
    attacked = attacks.apply(data, attack)
    benign = [name for name in data.train.ids if name not in attacked.malicious]
    malicious = sorted(attacked.malicious)
    honest, found = train(algorithm, data, engine=engine), train(algorithm, attacked, engine=engine)
    change = (found.personal.params(benign) - honest.personal.params(benign)).abs().max()
    assert change > 0.003
    # One round: nobody has heard of the lie yet, and the liar's own model is that of its honest work.
    honest, found = train(algorithm, data, 1, engine=engine), train(algorithm, attacked, 1, engine=engine)
    assert torch.equal(found.personal.params(malicious), honest.personal.params(malicious))


def test_l2sgd_by_hand_under_an_attack():
    data = regression(4)
    attacked = attacks.apply(data, attacks.ModelReplacement(0.25, update="negated"))
    (liar,) = (data.train.ids.index(name) for name in attacked.malicious)
    solver = solvers.SGD(lr=0.05, batch_size=None, steps=1)
    found = train(eq.Algorithm(solver=solver, sampler=FULL, personal=personal.L2SGD(1.0)), attacked, 2)
    own, mean = torch.zeros(4, 4, dtype=torch.float64), torch.zeros(4, dtype=torch.float64)
    for _ in range(2):
        after = own.clone()
        for k in range(4):
            x, y = data.train.client(at=k)
            z = torch.cat([x.double(), torch.ones(len(x), 1, dtype=torch.float64)], 1)
            after[k] -= 0.05 * (2 * z.t() @ (z @ own[k] - y.double()) / len(x) + (own[k] - mean))
        sent = after - own
        sent[liar] *= -4  # the size of the cohort, negated
        mean, own = mean + sent.sum(0) / 4, after
    assert torch.allclose(found.personal.params(list(data.train.ids)), own, rtol=1e-9)


@pytest.mark.parametrize("engine", ["loop", "simulator"])
def test_a_diverging_client_leaves_the_own_models_of_others_finite(engine):
    data = regression(8, scale=1e4)
    algorithm = eq.Algorithm(solver=solvers.SGD(lr=0.05, batch_size=None, steps=40), sampler=FULL, personal=personal.L2SGD(1.0))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = train(algorithm, data, engine=engine)
    own = found.personal.params([f"c{k}" for k in range(8)])
    assert torch.isfinite(own).all(1).tolist() == [False] + [True] * 7
    assert any("the own model of c0 is not finite or absurdly far" in str(each.message) for each in caught)


# ----------------------------------------------------------------------------------------------------------- rates and efforts


@pytest.mark.parametrize("engine", ["loop", "simulator"])
@pytest.mark.parametrize(
    "method", [personal.Finetuning(1), personal.EWC(0.0, epochs=1), personal.Ditto(0.0, when="finetuning", solver=None)]
)
@pytest.mark.parametrize(("rounds", "rate"), [(4, 0.05), (5, 0.05), (6, 0.005)])
def test_models_made_after_training_use_the_rate_of_the_last_round(method, rounds, rate, engine):
    data = regression(4)
    decaying = solvers.SGD(lr=0.05, batch_size=None, steps=1, lr_decay=0.1, lr_decay_every=5)
    found = train(eq.Algorithm(solver=decaying, sampler=FULL, personal=method), data, rounds, engine=engine)
    x, y = data.train.client(at=0)
    z = torch.cat([x.double(), torch.ones(len(x), 1, dtype=torch.float64)], 1)
    gradient = 2 * z.t() @ (z @ found.params - y.double()) / len(x)
    assert torch.allclose(found.personal.params(["c0"])[0], found.params - rate * gradient, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("engine", ["loop", "simulator"])
def test_stragglers_take_fewer_personal_steps_with_apfl(engine):
    data = regression(6)
    slow = solvers.SGD(lr=0.01, batch_size=None, epochs=6, straggler_share=0.9, stragglers="drop")
    algorithm = eq.Algorithm(solver=slow, sampler=FULL, personal=personal.APFL(1.0, mix_lr=0.0))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", EquipoiseNotice)
        found = train(algorithm, data, 1, engine=engine)
    moved = found.personal.params(list(data.train.ids)).abs().sum(1)  # α = 1: a client's model is its own, from zero
    quick = eq.Algorithm(solver=solvers.SGD(lr=0.01, batch_size=None, epochs=6), sampler=FULL, personal=algorithm.personal)
    everything = train(quick, data, 1, engine=engine).personal.params(list(data.train.ids)).abs().sum(1)
    assert int((moved < everything).sum()) == 5  # nine tenths of six clients


def test_the_final_evaluation_of_maml_is_of_the_adapted_model():
    data = regression(5)
    solver = solvers.MAML(lr=0.05, inner_lr=0.02, inner_steps=2)
    found = train(eq.Algorithm(solver=solver, sampler=FULL), data, 3)
    rows = found.clients.where("train")
    for k in range(5):
        x, y = data.train.client(at=k)
        z = torch.cat([x.double(), torch.ones(len(x), 1, dtype=torch.float64)], 1)
        own = found.params.clone()
        for _ in range(2):
            own = own - 0.02 * 2 * z.t() @ (z @ own - y.double()) / len(x)
        assert float(rows.served_loss[k]) == pytest.approx(float((z @ own - y.double()).square().mean()))
        assert float(rows.loss[k]) == pytest.approx(float((z @ found.params - y.double()).square().mean()))


# -------------------------------------------------------------------------------------------------------- risks without effect


@pytest.mark.parametrize("aggregator", [aggregators.Krum(1), aggregators.KLoss(1)])
@pytest.mark.parametrize(
    "weighing",
    [
        risk.Tilted(5.0),
        risk.Tilted(-5.0),
        risk.Superquantile(0.3, smoothing="kl", nu=10.0),
        risk.Mixture((0.01, risk.Mean()), (0.99, risk.Superquantile(0.2))),
        risk.HierarchicalTilt(lambda client: client[-1], 1.0),
    ],
)
def test_a_risk_that_would_have_no_effect_is_refused(aggregator, weighing):
    with pytest.raises(IncompatibleParts, match="it would have no effect"):
        eq.Algorithm(risk=weighing, aggregator=aggregator)


def test_a_tail_beside_k_loss_is_refused():
    for tail in (risk.Superquantile(0.5), risk.Mixture((0.5, risk.Superquantile(0.5)), (0.5, risk.Superquantile(0.2)))):
        with pytest.raises(IncompatibleParts, match="leaves out small losses"):
            eq.Algorithm(risk=tail, aggregator=aggregators.KLoss(1))


@pytest.mark.parametrize(
    ("aggregator", "acting"),
    [
        (aggregators.Krum(1), risk.QFair(1.0)),
        (aggregators.KLoss(1), risk.QFair(1.0)),
        (aggregators.Krum(1), risk.Superquantile(0.7)),
        (aggregators.Krum(1), risk.Tilted(5.0, tracked=True)),
    ],
)
def test_a_risk_that_acts_beside_krum_is_not_refused(aggregator, acting):
    data = regression(9)
    options = {"clients_per_round": 9, "rounds": 3}
    plain = train(eq.Algorithm(aggregator=aggregator, solver=STEPS), data, **options)
    found = train(eq.Algorithm(risk=acting, aggregator=aggregator, solver=STEPS), data, **options)
    assert not torch.equal(plain.params, found.params)


def test_a_mixture_does_not_hide_a_quantile_without_a_budget():
    hidden = risk.Superquantile(0.5, quantile=eq.privacy.PrivateQuantile(bound=1.5, bins=32))
    for whole in (risk.Mixture((0.5, risk.Mean()), (0.5, hidden)), risk.Mixture((1.0, risk.Mixture((1.0, hidden))))):
        with pytest.raises(IncompatibleParts, match="by a privacy budget, and there is none"):
            eq.Algorithm(risk=whole)


# ------------------------------------------------------------------------------------------------------------------- numbers


def test_dissimilarity_on_attacked_data_is_that_of_benign_clients():
    data, model = regression(), eq.models.LinearRegression(3).double()
    for attack in (attacks.ModelReplacement(0.2, update="honest"), attacks.RandomUpdates(0.2)):
        attacked = attacks.apply(data, attack)
        kept = [k for k, name in enumerate(data.train.ids) if name not in attacked.malicious]
        benign = eq.heterogeneity.dissimilarity(model, FederatedData(data.train.take(kept)))
        found = eq.heterogeneity.dissimilarity(model, attacked)
        assert found.variance == pytest.approx(benign.variance)
        assert found.ratio == pytest.approx(benign.ratio)


@pytest.mark.parametrize("engine", [Loop(), Simulator(workers=1)], ids=["loop", "simulator"])
@pytest.mark.parametrize("attack", [attacks.ModelReplacement(0.4, update="honest"), attacks.RandomUpdates(0.4)])
def test_inexactness_is_that_of_the_work_and_not_of_the_attack(attack, engine):
    """What malicious clients send is no local solution: a replaced model would be 'solved' tens of times worse than at w^t."""
    data, model = regression(), eq.models.LinearRegression(3).double()
    cohort = Cohort(0, 0, torch.arange(len(data.train)), torch.ones(len(data.train)), torch.ones(len(data.train)))
    slow, found = solvers.SGD(lr=0.01, batch_size=None, steps=2, prox=0.1), []
    for each in (data, attacks.apply(data, attack)):
        task = Task.of(model)
        found.append(eq.heterogeneity.inexactness(engine.start(task, each), task.read_model(), cohort, slow))
    assert torch.allclose(found[0], found[1], rtol=1e-12)
    assert bool((found[0] < 1).all())


@pytest.mark.parametrize(
    ("clients", "fraction"), [(10, 0.1), (10, 0.2), (10, 0.3), (20, 0.1), (30, 0.1), (100, 0.2), (7, 1 / 7)]
)
def test_a_trimmed_mean_forgets_exactly_its_fraction(clients, fraction):
    bad = round(fraction * clients)
    for weights in (torch.full((clients,), 1 / clients).double(), torch.full((clients,), 1 / clients).double() * (1 + 1e-15)):
        updates = torch.ones(clients, 2, dtype=torch.float64)
        updates[:bad, 0], updates[:bad, 1] = 1e30, -1e30
        for dtype in (torch.float64, torch.float32):
            total, _ = aggregators.TrimmedMean(fraction)(updates.to(dtype), weights)
            assert total.tolist() == pytest.approx([1.0, 1.0], rel=1e-6)


def test_infinite_values_in_a_tail():
    values = torch.tensor([1.0, 2.0, math.inf])
    assert metrics.worst(values, 0.1) == math.inf
    assert metrics.worst(values, 0.9) == math.inf
    assert metrics.best(values, 1 / 3) == pytest.approx(1.0)
    assert metrics.best(values, 0.5) == pytest.approx((1 / 3 * 1 + 1 / 6 * 2) / 0.5)
    assert metrics.worst(torch.tensor([-math.inf, 1.0, 3.0]), 2 / 3) == pytest.approx(2.0)


def test_hubers_value_where_the_range_of_losses_overflows():
    losses = torch.tensor([1e308, 5e307, -1e308], dtype=torch.float64)
    found = risk.Superquantile(0.3, smoothing="huber", nu=1.0)(losses, torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64))
    assert float(found.value) == pytest.approx(2 / 3 * 1e308 + 1 / 3 * 5e307)


def test_angle_and_kl_are_given_over_accuracies_too():
    errors = torch.tensor([0.1, 0.3, 0.2, 0.6])
    found = metrics.summarise(errors, torch.ones(4))
    assert found.accuracy_angle == pytest.approx(metrics.angle(1 - errors))
    assert found.accuracy_kl_to_uniform == pytest.approx(metrics.kl_to_uniform(1 - errors))
    assert found.accuracy_angle != pytest.approx(found.angle)
    assert math.isnan(metrics.summarise(torch.tensor([0.5, 3.0]), torch.ones(2)).accuracy_angle)


def test_tracked_risks_of_groups_start_at_the_inner_tilt():
    seen = []

    def losses(theta, rows):
        values = torch.tensor([0.0, 4.0, 0.0, 4.0], dtype=torch.float64)[rows] + theta.sum()
        seen.append(values.detach())
        return values

    start = torch.zeros(1, dtype=torch.float64)
    options = {"inner_tilt": 1.0, "lr": 1e-12, "steps": 1, "batch_size": 8, "rho": 1e-9}
    found = hierarchical_stochastic_descent(losses, start, [0, 0, 1, 1], 0.0, **options)
    tilted = torch.stack([tilted_loss(batch, 1.0) for batch in seen[:2]]).mean()  # ρ ≈ 0: the first batches of both groups
    assert float(found.values[-1]) == pytest.approx(float(tilted), abs=1e-6)


def test_iid_data_of_table_4_10_have_unit_variance():
    from equipoise.reproduce.data_sets import synthetic_with_sizes_of_table_4_4

    x = synthetic_with_sizes_of_table_4_4(None, 0, clients=40, iid=True).train.x
    assert x.std(0).numpy() == pytest.approx(np.ones(60), abs=0.08)


@pytest.mark.parametrize("name", ["label_poisoning", "random_updates", "model_replacement"])
def test_attacks_are_cited_from_where_they_are_defined(name):
    source = catalog.part("attack", name).source
    assert "section 2.3, Definition 2" in source
    assert "5.2" not in source


def test_the_base_of_a_fair_component_is_a_mean_and_said_to_be():
    from equipoise.tilted import FairPCA, pca

    x = np.random.default_rng(0).normal(size=(12, 3))
    groups = [0] * 5 + [1] * 7
    losses = FairPCA(1, tilt=0.0, inner_tilt=4.0).fit(x, groups=groups)
    rest = x - x.mean(0)
    across = rest - rest @ losses.components_.T @ losses.components_
    by_hand = []
    for rows in (slice(0, 5), slice(5, 12)):
        own = np.linalg.eigh(rest[rows].T @ rest[rows])[0][:2].sum()  # what the best direction of the group leaves
        by_hand.append((np.square(across[rows]).sum() - own) / len(rest[rows]))
    assert losses.group_losses_ == pytest.approx(by_hand)
    said = inspect.getdoc(pca.best_errors)
    assert "mean error" in said
    assert "inner-tilted" not in said


# ------------------------------------------------------------------------------------------------------------------ messages


def test_an_error_shows_no_whole_array():
    for value in (np.zeros((1000, 100)), torch.zeros(1000), list(range(100_000)), "x" * 100_000, {i: i for i in range(10_000)}):
        assert len(str(InvalidParameter("weights", "must be positive", value))) < 1000
    assert "shape (1000,) and type torch.float32" in str(InvalidParameter("weights", "must be positive", torch.zeros(1000)))
    assert str(InvalidParameter("tail", "must be positive", -0.5)) == "tail must be positive, but is -0.5. [EQ100]"


@pytest.mark.parametrize("asked", [["--help"], ["run", "--help"], ["serve", "--help"], ["flower", "--help"], ["--version"]])
def test_help_does_not_wait_for_torch(asked):
    code = "import sys; from equipoise.cli.commands import app; app(sys.argv[1:], standalone_mode=False)\n"
    code += "if 'torch' in sys.modules: sys.exit('torch was imported')"
    found = subprocess.run([sys.executable, "-c", code, *asked], check=False, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr


def test_train_and_compare_are_functions_whatever_was_imported_first():
    code = (
        "import equipoise.train, equipoise.compare, equipoise as eq; from equipoise import train; assert callable(eq.train); "
    )
    code += "assert callable(eq.compare) and eq.train is train and eq.Algorithm().risk is not None"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# ------------------------------------------------------------------------------------------------------------ data of strangers


class Pixels(torch.nn.Module):
    """Three scores for every pixel."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Conv2d(1, 3, 1)

    def forward(self, x):
        return self.layer(x)


@pytest.mark.parametrize("engine", ["loop", "simulator"])
@pytest.mark.parametrize("where", ["the first client", "the last client", "a test client"])
def test_a_label_out_of_range_in_segmentation_is_refused(where, engine):
    """Also where the trial of the loss before the first round does not look."""

    def clients(odd=None):
        masks = torch.zeros(6, 4, 5, 5, dtype=torch.int64)
        if odd is not None:
            masks[odd, 2, 1, 3] = 3  # three classes: 0, 1 and 2
        return ClientSet.pack([(f"c{k}", torch.zeros(4, 1, 5, 5), mask) for k, mask in enumerate(masks)])

    train = clients({"the first client": 0, "the last client": 5}.get(where))
    data = FederatedData(train, test=clients(5) if where == "a test client" else None)
    with pytest.raises(EquipoiseError, match="3"):
        eq.train(Pixels(), data, rounds=1, clients_per_round=6, engine=engine, progress=False)


@pytest.mark.parametrize("ids", [[1, 1.0, 2], np.array([1, 1.0, 2], dtype=object), ["1", 1, 2]])
def test_ids_that_are_one_in_words_are_one_client(ids):
    """1 and 1.0 are the same number, and "1" is its name."""
    data = eq.data.from_arrays(np.zeros((3, 2)), np.array([0, 1, 0]), ids, test=0.0)
    assert data.train.ids == ("1", "2")
    assert data.train.sizes.tolist() == [2, 1]


class Unequal(torch.utils.data.Dataset):
    """Images of two sizes."""

    def __len__(self):
        return 3

    def __getitem__(self, place):
        return torch.zeros(2 + place % 2, 3), place % 2


def test_a_dataset_of_unequal_shapes_is_refused_with_the_example():
    with pytest.raises(EquipoiseError, match=r"a\b.*shape"):
        eq.data.from_datasets({"a": Unequal(), "b": Unequal()}, test=0.0)


@pytest.mark.parametrize("name", ["test", "validation"])
@pytest.mark.parametrize("value", [None, "half", math.nan, True])
def test_a_share_that_is_no_number_is_refused(name, value):
    frame = {"who": ["a", "a", "b", "b"], "age": [1.0, 2.0, 3.0, 4.0], "y": ["n", "y", "n", "y"]}
    for make in (
        lambda **given: eq.data.from_frame(frame, client="who", target="y", **given),
        lambda **given: eq.data.from_arrays(np.zeros((4, 2)), np.array([0, 1, 0, 1]), frame["who"], **given),
    ):
        with pytest.raises(InvalidParameter, match=rf"{name} must lie in \[0, 1\)"):
            make(**{name: value})


# --------------------------------------------------------------------------------------------------------- files of others


RUN = """
[data]
name = "label_shift"
train_clients = 6
validation_clients = 2
test_clients = 2
[model]
name = "softmax"
[algorithm.solver]
name = "sgd"
[train]
rounds = {rounds}
clients_per_round = 3
"""


def test_a_study_does_not_write_over_the_report_of_a_run(tmp_path, monkeypatch):
    from typer.testing import CliRunner

    from equipoise.cli.commands import app

    monkeypatch.chdir(tmp_path)
    (tmp_path / "plan.toml").write_text(RUN.format(rounds=1))
    runner = CliRunner()
    assert runner.invoke(app, ["run", "plan.toml", "--out", "runs/plan"]).exit_code == 0
    before = (tmp_path / "runs/plan/report.html").read_bytes()
    found = runner.invoke(app, ["compare", "plan.toml"])
    assert found.exit_code == 2
    assert (tmp_path / "runs/plan/report.html").read_bytes() == before


def test_a_full_disk_in_the_middle_of_a_command_names_resume(tmp_path, monkeypatch):
    from equipoise.core import files
    from equipoise.experiment import folder
    from equipoise.experiment.build import build
    from equipoise.experiment.config import RunConfig

    (tmp_path / "plan.toml").write_text(RUN.format(rounds=30) + "checkpoint_every = 5\n")
    logged = []

    def full(operation, path, *details):
        logged.append(path.name == "rounds.jsonl" and operation == "write")
        if sum(logged) > 12:
            raise OSError(28, "No space left on device")

    run_folder = folder.claim(tmp_path / "out")
    monkeypatch.setattr(files, "recorder", full)
    with pytest.raises(NotWritten, match="No space left on device") as caught:
        folder.run(build(RunConfig.read(tmp_path / "plan.toml")), run_folder, progress=False)
    assert f"equipoise run --resume {tmp_path / 'out'}" in " ".join(caught.value.__notes__)
    assert "Observer" not in str(caught.value)
    monkeypatch.setattr(files, "recorder", None)
    folder.run(build(RunConfig.read(run_folder.config)), folder.to_resume(run_folder.path), progress=False)
    whole = folder.claim(tmp_path / "whole")
    folder.run(build(RunConfig.read(tmp_path / "plan.toml")), whole, progress=False)
    assert whole.model.read_bytes() == run_folder.model.read_bytes()


@pytest.mark.parametrize("name", ["model.safetensors", "clients.parquet"])
def test_a_flipped_byte_in_a_finished_folder_is_noticed(name, ragged, tmp_path):
    from equipoise.experiment.folder import read_record

    result = eq.train(eq.models.Softmax(4, 3), ragged, rounds=1, clients_per_round=4, progress=False)
    result.save(tmp_path / "run")
    read_record(tmp_path / "run")
    file = tmp_path / "run" / name
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=f"{name} is damaged"):
        read_record(tmp_path / "run")


def test_a_search_does_not_judge_own_models_by_what_they_were_trained_on(tmp_path):
    from equipoise.experiment.search import check_first_trial, read_search

    text = RUN.format(rounds=1) + '[algorithm.personal]\nname = "ditto"\n[search.space]\n"algorithm.solver.lr" = [0.1, 1.0]\n'
    (tmp_path / "search.toml").write_text(text)
    with pytest.raises(ConfigError, match=r"closest fit would win\. Judge clients' own models by validation_90"):
        check_first_trial(read_search(tmp_path / "search.toml"))
    (tmp_path / "search.toml").write_text(text + '[search]\ncriterion = "validation_90"\n')
    check_first_trial(read_search(tmp_path / "search.toml"))


def test_a_learning_rate_is_not_chosen_on_test_clients_of_reported_seeds():
    from types import SimpleNamespace

    from equipoise.reproduce.chosen_rates import CHOOSING_SEED
    from equipoise.reproduce.experiment_runs import ExperimentRuns

    everyone = regression(12).train

    def data(method, seed):  # half of the clients are for testing, drawn again for each seed
        order = np.random.default_rng(seed).permutation(12)
        return FederatedData(everyone.take(sorted(order[:6].tolist())), test=everyone.take(sorted(order[6:].tolist())))

    runs = SimpleNamespace(entry=SimpleNamespace(needs=["file"]), scale=SimpleNamespace(seeds=2), seeds=range(2), data=data)
    tested = {name for seed in runs.seeds for name in data(None, seed).test.ids}
    assert tested & set(data(None, CHOOSING_SEED).train.ids)
    kept = ExperimentRuns.tuning_data(runs, None).train.ids
    assert len(kept) > 0
    assert not tested & set(kept)
