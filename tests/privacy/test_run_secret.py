"""Noise and cohorts of a private run follow from a secret of its own, which is in its checkpoint alone, and erased."""

import base64
import dataclasses
import itertools
import json
import math
import os
import re
import shutil

import numpy as np
import pytest
import torch
from scipy.stats import kstest
from typer.testing import CliRunner

import equipoise as eq
from equipoise import sampling
from equipoise.cli import app
from equipoise.core import files
from equipoise.data.clients import FederatedData
from equipoise.errors import InvalidParameter
from equipoise.experiment import catalog
from equipoise.experiment.run_files import RunFolder
from equipoise.privacy.ledger import read_entries
from equipoise.privacy.noise_plan import NoisePlan, key_of_seed
from equipoise.privacy.random_source import SecretStream, gaussian
from equipoise.privacy.run_audit import audit_algorithm
from equipoise.runs.checkpoint import CheckpointError, Checkpoints, read_checkpoint
from equipoise.types import Observer, RunSize
from made_clients import make_clients
from rounds import draw_cohort

P = eq.privacy
SEED = 7_654_321
SIZE = RunSize(24, 8, 4, 15, SEED, tuple(map(str, range(24))))
ROUNDS = 4
DATA = FederatedData(make_clients([5] * 24), name="small")
TAIL = eq.risk.Superquantile(0.5, quantile=P.PrivateQuantile(2.0, 4))
FAR = sampling.MinSeparation(2)
CASES = {  # every private part of the catalogue, with every kind of release and of cohort
    "gaussian": {"privacy": P.GaussianMechanism(0.5, 1.0)},
    "budget": {"privacy": P.DifferentialPrivacy(5.0, 1e-2, 0.5, method="rdp")},
    "fixed cohorts": {"privacy": P.GaussianMechanism(0.5, 1.0), "sampler": sampling.Uniform()},
    "everybody": {"privacy": P.GaussianMechanism(0.5, 1.0), "sampler": sampling.Full()},
    "adaptive clip": {"privacy": P.GaussianMechanism(0.5, 1.0, clip_rule=P.AdaptiveClip())},
    "quantile": {"privacy": P.GaussianMechanism(0.5, 1.0), "risk": TAIL},
    "weights": {"privacy": P.GaussianMechanism(0.5, 1.0, loss_bound=2.0), "risk": eq.risk.Tilted(1.0)},
    "distributed": {"privacy": P.DifferentialPrivacy(None, 1e-2, 0.5, noise_multiplier=1.0, noise="distributed")},
    "coins of nodes": {
        "privacy": P.DifferentialPrivacy(None, 1e-2, 0.5, noise_multiplier=1.0, noise="distributed"),
        "sampler": sampling.NodePoisson(),
    },
    "correlated": {"privacy": P.DPFTRL(None, 1e-2, 0.5, 1.0, decays=(0.5,), scales=(0.3,)), "sampler": FAR},
    "buffered": {"privacy": P.DPFTRL(None, 1e-2, 0.5, 1.0, bands=(1.0, 0.5)), "sampler": sampling.FedBuff(3, apart=2)},
}
pytestmark = pytest.mark.filterwarnings("ignore::equipoise.errors.EquipoiseNotice")
PLANNED = {"everybody", "correlated", "buffered"}  # nobody is hidden by chance, or a sampler's promise needs one plan


@pytest.fixture(autouse=True)
def secrets_of_the_system(monkeypatch, known_secrets):
    monkeypatch.setattr("equipoise.privacy.noise_plan.urandom", os.urandom)


def algorithm_of(case, **privacy):
    parts = {"solver": eq.solvers.SGD(lr=0.1, batch_size=4)} | CASES[case]
    return eq.Algorithm(**parts | {"privacy": dataclasses.replace(parts["privacy"], **privacy)})


def trained(algorithm, **options):
    given = {"rounds": ROUNDS, "clients_per_round": 8, "seed": SEED, "progress": False} | options
    return eq.train(eq.models.Softmax(4, 3), DATA, algorithm, **given)


class Sees(Observer):
    """The setting of a run, its secret and its cohorts, seen before the first round."""

    def on_start(self, run):
        self.setting, self.secret = run.setting, run.setting.secret
        self.cohorts = [draw_cohort(run.setting, t).clients.tolist() for t in range(ROUNDS)]


class Copies(Observer):
    """Copies a checkpoint as it is when the second round has ended: what a kill then would leave."""

    def __init__(self, path, copy):
        self.path, self.copy = path, copy

    def on_state(self, state):
        if state.round == 3:  # an observer sees a state before the checkpoint of it is written
            shutil.copy(self.path, self.copy)


def forms(secret):
    return secret, secret.hex().encode(), secret.hex().upper().encode(), base64.b64encode(secret).rstrip(b"=")


def test_the_cases_are_all_private_parts_of_the_catalogue():
    known = {part.target for part in catalog.parts("privacy")}
    assert {type(parts["privacy"]) for parts in CASES.values()} == known - {P.SecureAggregation}


@pytest.mark.parametrize("engine", ["loop", "simulator"])
@pytest.mark.parametrize("case", CASES)
def test_two_runs_with_one_seed_have_other_noise_and_other_cohorts(case, engine):
    one, other = Sees(), Sees()
    first, second = (trained(algorithm_of(case), engine=engine, observers=[seen]) for seen in (one, other))
    assert one.secret != other.secret
    assert not torch.equal(first.params, second.params)
    if case != "buffered":
        assert (one.cohorts == other.cohorts) == (case in PLANNED)
    epsilons = first.epsilon.epsilon, second.epsilon.epsilon
    assert epsilons[0] == epsilons[1] < math.inf


@pytest.mark.parametrize("case", CASES)
def test_models_of_two_runs_do_not_subtract_to_an_update(case):
    """The difference of two runs that clients hardly move is as long as independent noise: √2 of one of them."""
    idle = dataclasses.replace(algorithm_of(case), solver=eq.solvers.SGD(epochs=0))
    moved = torch.stack([trained(idle, seed=seed).params - trained(idle, seed=seed).params for seed in range(6)])
    alone = torch.stack([trained(idle, seed=seed).params for seed in range(6)])
    assert float(moved.norm()) > 0.5 * float((alone - alone.mean(0)).norm())


@pytest.mark.parametrize("engine", ["loop", "simulator"])
@pytest.mark.parametrize("case", CASES)
def test_a_killed_run_goes_on_with_the_bits_of_the_unkilled_one(case, engine, tmp_path):
    whole, part, seen = tmp_path / "whole.ckpt", tmp_path / "part.ckpt", Sees()
    options = {"engine": engine, "checkpoint": Checkpoints(whole, every=1)}
    first = trained(algorithm_of(case), observers=[Copies(whole, part), seen], **options)
    released = (tmp_path / "whole.ledger.jsonl").read_text()
    (tmp_path / "part.ledger.jsonl").write_text(released)  # as if it was killed when all was released
    again = Sees()
    second = trained(algorithm_of(case), engine=engine, checkpoint=Checkpoints(part, every=1), observers=[again], ledger=None)
    assert again.secret == seen.secret
    assert again.cohorts == seen.cohorts
    assert torch.equal(first.params, second.params)
    assert second.epsilon == first.epsilon  # what was released twice has the same bits, and counts once
    noisy = [[entry for entry in read_entries(path) if entry.kind == "release"] for path in tmp_path.glob("*.jsonl")]
    assert noisy[0] == noisy[1]


@pytest.mark.parametrize("case", CASES)
def test_nothing_has_the_secret_after_the_last_round(case, tmp_path):
    path, seen, copy = tmp_path / "run.ckpt", Sees(), tmp_path / "copy"
    result = trained(algorithm_of(case), observers=[seen, Copies(path, copy)], checkpoint=Checkpoints(path, every=1))
    assert len(seen.secret) == 16
    assert seen.secret.hex().encode() in copy.read_bytes()  # before that it is in the checkpoint
    copy.unlink()
    result.save(tmp_path / "saved")
    result.report(tmp_path / "report.html")
    result.export(tmp_path / "model.safetensors")
    told = [repr(result), repr(seen.setting), repr(seen.setting.noise), str(result.privacy), repr(read_checkpoint(path))]
    contents = [place.read_bytes() for place in tmp_path.rglob("*") if place.is_file()] + [text.encode() for text in told]
    assert len(contents) > 8
    assert not [text for text in contents for form in forms(seen.secret) if form in text]
    assert seen.setting.secret == b""
    with pytest.raises(InvalidParameter, match="key"):
        seen.setting.noise.gaussian("update", 0, 1)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("none", ["planned", "within the budget"])
def test_a_run_without_a_round_has_no_secret(none, case, tmp_path):
    budget = {} if none == "planned" else {"epsilon": 1e-3, "noise_multiplier": 1.0}
    if budget and type(CASES[case]["privacy"]) is not P.DifferentialPrivacy:
        return  # no budget that a later round could exceed
    path, seen = tmp_path / "run.ckpt", Sees()
    rounds = 0 if none == "planned" else ROUNDS
    assert trained(algorithm_of(case, **budget), rounds=rounds, observers=[seen], checkpoint=path).rounds == 0
    assert (seen.setting.secret, read_checkpoint(path).runs[0].secret) == (b"", "")


@pytest.mark.parametrize("case", CASES)
def test_what_is_told_of_a_run_does_not_follow_its_cohorts(case):
    """Two rounds of few clients: who came how often differs from run to run, and is as secret as the cohorts."""
    results = [trained(algorithm_of(case), rounds=2, clients_per_round=3) for _ in range(6)]
    assert len({str(each.epsilon) for each in results}) == len({str(each.privacy) for each in results}) == 1
    assert len({each.epsilon for each in results}) == 1


@pytest.mark.parametrize("purpose", ["update", "cohort", "quantile"])
def test_another_run_that_goes_on_from_a_secret_has_other_noise(purpose):
    words = []
    for bound in (b"", b"one run", b"one run", b"another"):
        plan = NoisePlan(P.GaussianMechanism(0.5, 1.0).as_budget(), algorithm_of("gaussian"), SIZE)
        plan.secret, plan.bound_to = bytes(16), bound
        words.append(plan.source(purpose, 1).words(4).tolist())
    assert words[1] == words[2]
    assert len(set(map(tuple, words))) == 3


def test_a_folder_of_a_run_has_no_secret_when_it_is_finished(tmp_path):
    (tmp_path / "run.toml").write_text(table())
    assert CliRunner().invoke(app, ["run", str(tmp_path / "run.toml"), "--out", str(tmp_path / "run")]).exit_code == 0
    place = RunFolder(tmp_path / "run")
    assert place.finished
    (saved,) = read_checkpoint(place.checkpoint).runs
    assert saved.secret == ""
    assert '"secret": ""' in place.checkpoint.read_bytes().decode(errors="replace")


@pytest.mark.parametrize("case", ["gaussian", "correlated"])
def test_only_its_owner_reads_a_checkpoint_also_before_it_has_its_name(case, tmp_path, monkeypatch):
    modes = []

    def see(operation, path, *details):
        if operation == "rename" and details[0].suffix == ".ckpt":
            modes.extend(place.stat().st_mode & 0o777 for place in (path, details[0]) if place.exists())

    monkeypatch.setattr(files, "recorder", see)
    before = os.umask(0)
    try:
        trained(algorithm_of(case), checkpoint=Checkpoints(tmp_path / "run.ckpt", every=1))
    finally:
        os.umask(before)
    assert len(modes) > ROUNDS
    assert set(modes) == {0o600}


@pytest.mark.parametrize("case", CASES)
def test_more_rounds_have_no_secret_of_before(case, tmp_path):
    """A private run keeps its number of rounds. A checkpoint without a secret begins with a new one, as another run."""
    path, seen = tmp_path / "run.ckpt", Sees()
    trained(algorithm_of(case), checkpoint=path, observers=[seen])
    with pytest.raises(CheckpointError):
        trained(algorithm_of(case), rounds=ROUNDS + 1, checkpoint=path)
    part, again = tmp_path / "part.ckpt", Sees()
    trained(algorithm_of(case), checkpoint=Checkpoints(path := tmp_path / "again.ckpt", every=1),
            observers=[Copies(path, part), again])  # fmt: skip
    saved = read_checkpoint(part)
    dataclasses.replace(saved, runs=[dataclasses.replace(saved.runs[0], secret="")]).write(part)
    third = Sees()
    result = trained(algorithm_of(case), checkpoint=part, observers=[third])
    assert third.secret not in (again.secret, seen.secret, b"")
    assert third.setting.protection.book.run != again.setting.protection.book.run
    assert result.epsilon.epsilon < math.inf


def test_runs_of_several_seeds_have_secrets_of_their_own(tmp_path):
    secrets = {}

    class Each(Observer):
        def on_start(self, run):
            secrets[run.seed] = run.setting.secret

    saving = Checkpoints(tmp_path / "many.ckpt", every=1)
    given = {"rounds": 2, "clients_per_round": 8, "progress": False, "observers": [Each()]}
    made = eq.train_many(eq.models.Softmax(4, 3), DATA, algorithm_of("gaussian"), seeds=3, checkpoint=saving, **given)
    assert len(set(secrets.values())) == 3
    noise = [run.params for run in made.all_results]
    assert not any(torch.equal(a, b) for a, b in itertools.combinations(noise, 2))
    held = [run.secret for path in tmp_path.glob("*.ckpt") for run in read_checkpoint(path).runs]
    assert held == [""] * 3


def test_private_methods_of_a_comparison_draw_cohorts_of_their_own():
    methods = {"a": algorithm_of("gaussian"), "b": algorithm_of("gaussian"), "plain": eq.Algorithm(sampler=sampling.Poisson())}
    options = {"rounds": 1, "clients_per_round": 8, "seeds": 1, "progress": False}
    made = eq.compare(methods, eq.models.Softmax(4, 3), DATA, **options)
    assert "other-cohorts" in [each.code for each in made.differences("a").notices]
    fixed = {name: algorithm_of("gaussian", noise_seed=1) for name in "ab"}
    said = eq.compare(fixed, eq.models.Softmax(4, 3), DATA, **options).differences("a").notices
    assert "other-cohorts" not in [each.code for each in said]


# -------------------------------------------------------------------------------------------------------- noise from a seed


PRINTED = re.compile(r"ε\s*(≥|=|:)\s*\d|\"epsilon\w*\":\s*\d")


def table(extra=""):
    return f"""
[data]
name = "label_shift"
train_clients = 12
test_clients = 3
examples = 20
[model]
name = "softmax"
[algorithm.privacy]
name = "gaussian_mechanism"
clip = 0.5
noise_multiplier = 1.0
delta = 0.01
{extra}
[train]
rounds = 2
clients_per_round = 6
seed = 5
"""


@pytest.mark.parametrize("engine", ["loop", "simulator"])
@pytest.mark.parametrize("case", CASES)
def test_a_noise_seed_repeats_noise_and_cohorts_and_no_epsilon_is_told(case, engine, tmp_path):
    one, other, third = Sees(), Sees(), Sees()
    seeded, ledger = algorithm_of(case, noise_seed=3), tmp_path / "ledger.jsonl"
    first = trained(seeded, engine=engine, observers=[one], ledger=ledger)
    second = trained(seeded, engine=engine, observers=[other])
    assert torch.equal(first.params, second.params)
    assert one.cohorts == other.cohorts
    assert not torch.equal(first.params, trained(algorithm_of(case, noise_seed=4), engine=engine, observers=[third]).params)
    assert (first.epsilon.epsilon, first.epsilon.epsilon_server, first.epsilon.nominal) == (math.inf, math.inf, True)
    assert [report.epsilon for report in first.history.rounds] == [None] * ROUNDS
    assert [row.epsilon for row in first.privacy.rows] == [None] * 3
    assert {row.shown for row in first.privacy.rows} == {"nominal"}
    assert first.privacy.node(colluding=2).epsilon is None
    first.report(tmp_path / "report.html")
    first.export(tmp_path / "model.safetensors")
    first.save(tmp_path / "run")
    shown = [CliRunner().invoke(app, ["privacy", *words]) for words in (
        ["observers", str(tmp_path / "run")], ["observers", str(tmp_path / "run"), "--json"],
        ["ledger", str(ledger)], ["ledger", str(ledger), "--json"])]  # fmt: skip
    assert [each.exit_code for each in shown] == [0] * 4
    told = [str(first.summary()), repr(first), str(first.epsilon), str(first.privacy), *(each.output for each in shown)]
    told += [p.read_text(encoding="utf-8") for p in tmp_path.rglob("*") if p.suffix in (".html", ".md", ".json", ".jsonl")]
    assert not [found.group() for text in told for found in PRINTED.finditer(text.replace("&quot;", '"'))]
    assert sum("nominal" in text for text in told) >= 8


def test_no_command_tells_an_epsilon_of_a_run_with_a_noise_seed(tmp_path):
    (tmp_path / "run.toml").write_text(table("noise_seed = 1"))
    said = CliRunner().invoke(app, ["run", str(tmp_path / "run.toml"), "--out", str(tmp_path / "run")])
    assert said.exit_code == 0, said.output
    (tmp_path / "study.toml").write_text(table("noise_seed = 1").replace("seed = 5\n", "") + "[study]\nseeds = 2\n")
    study = CliRunner().invoke(app, ["compare", str(tmp_path / "study.toml"), "--out", str(tmp_path / "out"), "--workers", "1"])
    assert study.exit_code == 0, study.output
    told = [
        said.output,
        study.output,
        *(p.read_text(errors="replace") for p in tmp_path.rglob("*.*") if p.is_file() and p.suffix != ".toml"),
    ]
    assert not [found.group() for text in told for found in PRINTED.finditer(text)]
    assert "nominal" in said.output
    assert "nominal" in study.output
    audited = CliRunner().invoke(app, ["privacy", "audit", str(tmp_path / "run")])
    assert isinstance(audited.exception, InvalidParameter) or audited.exit_code == 2, audited.output


def test_a_comparison_with_a_noise_seed_is_nominal(tmp_path):
    methods = {"seeded": algorithm_of("gaussian", noise_seed=1), "secret": algorithm_of("gaussian")}
    made = eq.compare(methods, eq.models.Softmax(4, 3), DATA, rounds=1, clients_per_round=8, progress=False)
    assert "nominal" in made.privacy
    assert not PRINTED.search(made.privacy)
    assert PRINTED.search(str(made.results["secret"][0].epsilon))


def test_an_audit_refuses_a_noise_seed():
    with pytest.raises(InvalidParameter, match="noise_seed"):
        audit_algorithm(algorithm_of("gaussian", noise_seed=0), clients=24, clients_per_round=8, rounds=2, trials=20)


PRIVATE = P.DifferentialPrivacy(None, 1e-3, 0.5, noise_multiplier=1.0, noise_seed=2)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"solver": eq.solvers.SGD(lr=1)}, {"solver": eq.solvers.SGD(lr=1.0)}),
        ({"sampler": None, "averaging": None}, {"sampler": sampling.Poisson(), "averaging": eq.averaging.Last()}),
        ({"weights": None}, {"weights": "uniform"}),
        ({"personal": None}, {"personal": eq.personal.Ditto()}),
    ],
    ids=["whole numbers", "defaults", "weights", "models that stay with clients"],
)
def test_the_same_algorithm_has_the_same_key(one, other):
    assert key_of_seed(eq.Algorithm(privacy=PRIVATE, **one), 0) == key_of_seed(eq.Algorithm(privacy=PRIVATE, **other), 0)


def test_other_settings_seeds_and_noise_seeds_have_other_keys():
    keys = {
        key_of_seed(eq.Algorithm(privacy=PRIVATE, solver=eq.solvers.SGD(lr=lr)), seed) for lr in (1, 2) for seed in (0, 2**60)
    }
    keys |= {key_of_seed(eq.Algorithm(privacy=dataclasses.replace(PRIVATE, noise_seed=n)), 0) for n in (0, 2**60, 2**60 + 1)}
    assert len(keys) == 7


def test_a_renamed_class_and_another_repr_draw_the_same_noise(monkeypatch):
    algorithm = eq.Algorithm(privacy=PRIVATE, solver=eq.solvers.SGD(lr=0.5))
    before = key_of_seed(algorithm, 0)
    monkeypatch.setattr(eq.solvers, "Descent", eq.solvers.SGD, raising=False)
    monkeypatch.setitem(catalog.CATALOG["solver"], "sgd", "equipoise.solvers:Descent")
    monkeypatch.setattr(eq.solvers.SGD, "__repr__", lambda self: "another")
    try:
        eq.solvers.SGD.__name__ = "Descent"
        assert key_of_seed(algorithm, 0) == before
    finally:
        eq.solvers.SGD.__name__ = "SGD"


@dataclasses.dataclass(frozen=True)
class OwnServer:
    """A part that the catalogue does not have, and whose text shows where it lies."""

    def begin(self, params):
        return None

    def step(self, params, total, state):
        return params + total, state

    __repr__ = object.__repr__


def test_own_parts_are_known_by_their_import_path():
    first, second = (key_of_seed(eq.Algorithm(privacy=PRIVATE, server=OwnServer()), 0) for _ in range(2))
    assert first == second != key_of_seed(eq.Algorithm(privacy=PRIVATE), 0)


# ------------------------------------------------------------------------------------------------------------- the stream


def test_a_stream_is_a_function_of_key_purpose_round_and_call():
    key = bytes(range(16))
    one, same = SecretStream(key, "update", 3), SecretStream(key, "update", 3)
    calls = [one.words(100), one.words(100)]
    assert all(np.array_equal(words, same.words(100)) for words in calls)
    others = [
        SecretStream(key[::-1], "update", 3), SecretStream(key, "count", 3), SecretStream(key, "update", 4),
        SecretStream(key, "update\0", 3),
    ]  # fmt: skip
    words = np.concatenate([*calls, *(each.words(100) for each in others)])
    assert len(set(words.tolist())) == len(words)
    ones = np.unpackbits(SecretStream(key, "bits").words(20_000).view(np.uint8)).reshape(-1, 64).mean(0)
    assert np.abs(ones - 0.5).max() < 5 * 0.5 / math.sqrt(20_000)


def test_more_words_than_one_hash_gives(monkeypatch):
    monkeypatch.setattr("equipoise.privacy.random_source._BLOCK", 7)
    words = SecretStream(bytes(16), "update").words(50)
    assert len(words) == len(set(words.tolist())) == 50


def test_gaussian_numbers_of_a_stream():
    drawn = gaussian(20_000, SecretStream(bytes(16), "update"))
    assert kstest(drawn.numpy(), "norm").statistic < 0.02  # exceeded once in 10^6 times


@pytest.mark.parametrize("key", [b"", bytes(8), bytes(17)])
def test_a_key_of_another_length_is_refused_and_no_key_is_shown(key):
    with pytest.raises(InvalidParameter, match="key"):
        SecretStream(key, "update")
    shown = repr(SecretStream(bytes(range(16)), "update", 2))
    assert "update" in shown
    assert not [form for form in forms(bytes(range(16))) if form.decode("latin-1") in shown]
    assert json.dumps(shown)
