"""Noise and cohorts of private runs follow from their seed: what is passed on does not tell it."""

import re

import pytest

import equipoise as eq
from equipoise.experiment import folder
from equipoise.experiment.config import RunConfig
from equipoise.experiment.study import read_study
from equipoise.privacy.noise_plan import digest_releases

SEED = 7_654_321
PRIVATE = eq.privacy.DifferentialPrivacy(epsilon=8.0, delta=1e-3, clip=0.01, source="system")
TABLE = f"""
[data]
name = "label_shift"
train_clients = 12
test_clients = 3
[model]
name = "softmax"
[train]
rounds = 1
clients_per_round = 6
seed = {SEED}
"""


def trained(seed=SEED, **parts):
    data = eq.data.label_shift(train_clients=12, test_clients=3, examples=20, seed=0)
    return eq.train(eq.models.Softmax(20, 10), data, eq.Algorithm(**parts), rounds=2, clients_per_round=4, seed=seed)


def words(result):
    return " ".join(str(result.epsilon).split())


def test_the_epsilon_that_needs_a_secret_seed_is_the_first():
    """With fixed cohorts it is the larger one, by another adjacency: "the smaller ε" named the wrong figure."""
    fixed = words(trained(privacy=PRIVATE, sampler=eq.sampling.Uniform()))
    assert "the first ε holds while the seed is secret" in fixed
    first, second = (float(number) for number in re.findall(r"ε = ([\d.]+)", fixed)[:2])
    assert first > second


def test_no_word_on_the_seed_where_no_chance_hides_anyone():
    ftrl = eq.privacy.DPFTRL(8.0, 1e-3, clip=0.01, source="system")
    assert "seed is secret" not in words(trained(privacy=ftrl, sampler=eq.sampling.MinSeparation(3)))


def test_a_report_shows_no_seed_beside_a_run_that_protects_clients(tmp_path):
    """Methods of a comparison share their seeds."""
    methods = {"open": eq.Algorithm(), "private": eq.Algorithm(privacy=PRIVATE)}
    data = eq.data.label_shift(train_clients=12, test_clients=3, examples=20, seed=0)
    seeds = [SEED, SEED + 1]
    compared = eq.compare(methods, eq.models.Softmax(20, 10), data, rounds=2, clients_per_round=6, seeds=seeds, progress=False)
    compared.report(tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert str(SEED) not in page
    assert "not shown" in page
    compared.save(tmp_path / "runs")
    assert not [place for place in (tmp_path / "runs").iterdir() if str(SEED) in place.name]


def test_the_folder_of_a_private_run_is_named_without_its_seed(tmp_path, monkeypatch):
    """Its name is the name of the run on pages and cards."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "open.toml").write_text(TABLE)
    private = TABLE + '[algorithm.privacy]\nname = "differential_privacy"\nepsilon = 8.0\ndelta = 1e-3\nclip = 0.1\n'
    (tmp_path / "private.toml").write_text(private)
    paths = [tmp_path / "open.toml", tmp_path / "private.toml"]
    names = [folder.free_folder(path, RunConfig.read(path)).name for path in paths]
    assert names == [f"open-{SEED}", "private"]
    open_study, mixed = '[study]\nseeds = [7654321, 7]\n[methods."A"]\n', '[methods."B".privacy]\nname = "secure_aggregation"\n'
    text = TABLE.replace(f"seed = {SEED}\n", "")
    both = {"A-run-1", "A-run-2", "B-run-1", "B-run-2"}
    for methods, wanted in ((open_study, {"A-7654321", "A-7"}), (open_study + mixed, both)):
        (tmp_path / "study.toml").write_text(text + methods)
        assert {run.folder.path.name for run in read_study(tmp_path / "study.toml", out=tmp_path / "runs")} == wanted


@pytest.mark.parametrize(
    ("whole", "part"),
    [
        ({"solver": eq.solvers.SGD(lr=1)}, {"solver": eq.solvers.SGD(lr=1.0)}),
        ({"solver": eq.solvers.SGD(weight_decay=1, prox=1)}, {"solver": eq.solvers.SGD(weight_decay=1.0, prox=1.0)}),
        ({"server": eq.server_opt.Adam(lr=1)}, {"server": eq.server_opt.Adam(lr=1.0)}),
        (
            {"solver": eq.solvers.Scaffold(eq.solvers.SGD(lr=1, steps=2))},
            {"solver": eq.solvers.Scaffold(eq.solvers.SGD(lr=1.0, steps=2))},
        ),
        (
            {"risk": eq.risk.Superquantile(0.5, quantile=eq.privacy.PrivateQuantile(bound=3))},
            {"risk": eq.risk.Superquantile(0.5, quantile=eq.privacy.PrivateQuantile(bound=3.0))},
        ),
    ],
    ids=["rate", "decay and prox", "server", "inner solver", "quantile"],
)
def test_whole_numbers_draw_the_noise_of_their_floats(whole, part):
    """A configuration file writes lr = 1 as 1.0; in Python it stays 1."""
    digests = [digest_releases(eq.Algorithm(privacy=PRIVATE, **each)) for each in (whole, part)]
    assert digests[0] == digests[1]


def test_settings_that_differ_draw_other_noise():
    made = [eq.Algorithm(privacy=PRIVATE, solver=eq.solvers.SGD(lr=1, epochs=epochs)) for epochs in (1, 2)]
    assert digest_releases(made[0]) != digest_releases(made[1])
