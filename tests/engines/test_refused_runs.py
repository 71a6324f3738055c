"""Runs that nodes refuse by their policies, and what is told of rounds in which nobody trained."""

from __future__ import annotations

import json

import pytest
from fake_grid import federation, run_app
from typer.testing import CliRunner

import equipoise as eq
from equipoise.cli.federation_commands import app
from equipoise.data.clients import FederatedData
from equipoise.engines.flower import server_app
from equipoise.engines.flower.apps.node_policy import NodePolicy
from equipoise.engines.flower.apps.run_control import give_order
from equipoise.engines.flower.operate.fetching import publish
from equipoise.engines.flower.transport.messenger import TooFewClients
from equipoise.errors import CheckpointError, ConfigError, IncompatibleParts, InvalidParameter
from equipoise.experiment.folder import read_record
from equipoise.experiment.predicted_run import predict_rows
from made_clients import make_clients

P = eq.privacy
DATA = FederatedData(make_clients([6, 9, 12]), test=make_clients([5, 9, 14], seed=1), name="three")
QUANTILE = P.PrivateQuantile(bound=2.0, bins=2)


def softmax():
    return eq.models.Softmax(4, 3)


def private(noise="distributed", risk=None):
    return eq.Algorithm(
        risk=risk or eq.risk.Superquantile(0.5, quantile=QUANTILE), sampler=eq.sampling.Full(),
        privacy=P.DifferentialPrivacy(None, 1e-2, 0.5, noise_multiplier=1.0, noise=noise),
    )  # fmt: skip


def run(algorithm, grid, *, rounds=2, **options):
    found = []
    options = {"timeout": 30.0, "pause": 1.0, "retries": 1, "seed": 3, "clients": 3, "minimum": 2, **options}
    run_app(server_app(algorithm, model=softmax, rounds=rounds, on_result=found.append, **options), grid)
    return found[0]


ALLOWED = ("risk.superquantile", "quantile.private", "aggregator.weighted_mean", "solver.sgd")


@pytest.mark.parametrize(("noise", "part"), [*(("distributed", part) for part in ALLOWED), ("central", "solver.sgd")])
def test_a_private_run_that_every_policy_refuses_stops(noise, part, tmp_path):
    """Before, its rounds went by without anybody training, and the run finished with the model that it began with."""
    parts = tuple(name for name in ALLOWED if name != part)
    grid = federation(DATA, softmax, policy=NodePolicy(only_sums=False, parts=parts))
    with pytest.raises(TooFewClients, match="not among `parts` of its policy") as failure:
        run(private(noise), grid, folder=tmp_path / "run")
    assert "client-0" in str(failure.value)
    if part != "solver.sgd":  # the nodes are told of it before anything is released
        assert not any('"release"' in line for line in (tmp_path / "run" / "ledger.jsonl").read_text().splitlines())
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    assert status["state"] == "failed"
    assert "policy" in status["text"]


@pytest.mark.filterwarnings("ignore:Nobody was trained")
def test_a_round_whose_sum_is_lost_has_trained_nobody_and_is_not_published(tmp_path, caplog):
    grid = federation(DATA, softmax)
    grid.fault = lambda d: None if d.action == "train.masked" and "private update" in text_of(d.message) else d.answer()
    with caplog.at_level("INFO", logger="flwr"):
        found = run(private(), grid, rounds=1, folder=tmp_path / "run")
    assert [report.trained for report in found.history.rounds] == [0]
    lines = [record.getMessage() for record in caplog.records if "Round 1:" in record.getMessage()]
    assert any("0 trained" in line for line in lines)
    with pytest.raises(ConfigError, match="In no round"):
        publish([tmp_path / "run"], tmp_path / "out")


def test_the_log_leaves_out_losses_that_nobody_knows_and_counts_who_trained(caplog):
    grid = federation(DATA, softmax)
    grid.fault = lambda d: None if d.client == "client-2" and d.action == "train.masked" else d.answer()
    with caplog.at_level("INFO", logger="flwr"):
        run(private(risk=eq.risk.Mean()), grid, rounds=1, minimum=2)
    text = "\n".join(record.getMessage() for record in caplog.records)
    assert "nan" not in text
    assert "Round 1: 2 trained" in text


def test_more_rounds_than_the_noise_is_for_are_refused_and_change_nothing(tmp_path):
    algorithm, folder = private(risk=eq.risk.Mean()), tmp_path / "run"
    run(algorithm, federation(DATA, softmax), rounds=1, folder=folder)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    shown = CliRunner().invoke(app, ["extend", str(folder), "--rounds", "2"])
    assert shown.exit_code != 0
    assert isinstance(shown.exception, CheckpointError)
    assert "calibrated for 1 rounds" in str(shown.exception)
    with pytest.raises(CheckpointError, match="calibrated for 1 rounds"):
        run(algorithm, federation(DATA, softmax), rounds=2, folder=folder)
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    assert publish([folder], tmp_path / "out") == ["run"]


def test_a_run_by_secure_sums_without_noise_may_have_more_rounds(tmp_path):
    algorithm, folder = eq.Algorithm(privacy=P.SecureAggregation()), tmp_path / "run"
    run(algorithm, federation(DATA, softmax), rounds=1, folder=folder)
    assert give_order(folder, rounds=2).rounds == 2
    assert len(run(algorithm, federation(DATA, softmax), rounds=1, folder=folder).history.rounds) == 2


@pytest.mark.parametrize("noise", ["distributed", "central"])
def test_noise_that_drowns_the_sum_is_told_before_the_run_and_on_the_card(tmp_path, caplog, noise):
    """σ = 1 × clip in each of 15 parameters: a norm of √15 ≈ 3.87 × clip. With z = 4: 15.5 × clip, and 3 clients have 3."""
    budget = P.DifferentialPrivacy(None, 1e-2, 0.5, noise_multiplier=4.0, noise=noise)
    algorithm = eq.Algorithm(sampler=eq.sampling.Full(), privacy=budget)
    with caplog.at_level("WARNING", logger="flwr"):
        run(algorithm, federation(DATA, softmax), rounds=1, folder=tmp_path / "run")
    said = [record.getMessage() for record in caplog.records if "Noise drowns" in record.getMessage()]
    assert len(said) == 1
    assert "4 × clip in each of 15 parameters, a norm of about 15.5 × clip" in said[0]
    assert "Noise drowns the sum" in (tmp_path / "run" / "model.card.md").read_text()


def files_of(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("changed", ["algorithm", "model", "privacy"])
def test_another_run_is_refused_in_the_folder_of_a_finished_one_and_changes_nothing(tmp_path, changed):
    """Before, status said "failed", the log ended in "stopped", and the finished run could not be published."""
    folder, grid = tmp_path / "run", federation(DATA, softmax)
    run(eq.Algorithm(), grid, rounds=2, folder=folder)
    before, asked = files_of(folder), len(grid.log)
    given = {"algorithm": eq.Algorithm(risk=eq.risk.Superquantile(0.5)), "privacy": eq.Algorithm(privacy=P.SecureAggregation())}
    options = {"clients": 3, "minimum": 2, "seed": 3, "rounds": 4, "folder": folder}
    model = (lambda: eq.models.Softmax(4, 4)) if changed == "model" else softmax
    with pytest.raises(CheckpointError, match="checkpoint of another run"):
        run_app(server_app(given.get(changed, eq.Algorithm()), model=model, **options), grid)
    assert files_of(folder) == before
    assert len(grid.log) == asked
    assert publish([folder], tmp_path / "out") == ["run"]


def test_a_private_run_with_another_number_of_bins_says_what_differs_and_names_another_folder(tmp_path):
    """Before: "its privacy is not what it is here", more rounds as the reason, and another file as the cure."""
    folder, grid = tmp_path / "run", federation(DATA, softmax)
    run(private(), grid, rounds=1, folder=folder)
    other = private(risk=eq.risk.Superquantile(0.5, quantile=P.PrivateQuantile(bound=2.0, bins=4)))
    (folder / "rounds.jsonl").write_text((folder / "rounds.jsonl").read_text().rsplit('{"event": "end"', 1)[0])
    with pytest.raises(CheckpointError, match=r"differs in algorithm: .*bins=2.* there, .*bins=4.* here") as failure:
        run_app(server_app(other, model=softmax, clients=3, minimum=2, seed=3, rounds=1, folder=folder), grid)
    assert "more of them" not in str(failure.value)
    with pytest.raises(ConfigError, match=r"has not ended.*`equipoise flower run` again"):
        read_record(folder)


def test_rows_are_predicted_by_the_run_of_a_federation_with_the_schema_of_its_app(tmp_path):
    """Before: "are no table", although the app has a schema. `Tabular` follows from the parameters; others need --model."""
    rows = {"age": [24.0, 41.0, 58.0, 83.0] * 15, "sex": ["f", "m", "f", "m", "m", "f"] * 10, "ill": ["n", "n", "y", "y"] * 15}
    table = {**rows, "site": [f"client-{row % 3}" for row in range(60)]}
    schema = eq.data.Schema.fit(rows, target="ill")
    data = eq.data.from_frame(table, client="site", target="ill", schema=schema, split_by="examples", test=0.2)

    def net():
        return eq.models.Tabular(schema, hidden=(4,))

    grid, folder, found = federation(data, net), tmp_path / "run", []
    options = {"timeout": 30.0, "seed": 3, "clients": 3, "rounds": 2, "folder": folder}
    run_app(server_app(eq.Algorithm(), model=net, on_result=found.append, **options), grid)
    (tmp_path / "new.csv").write_text("age,sex\n30,f\n70,m\n")
    with pytest.raises(ConfigError, match=r"is of a federation, whose data are with its sites.* --schema my_federation/schema"):
        predict_rows(folder, tmp_path / "new.csv")
    schema.save(tmp_path / "schema.json")
    told = predict_rows(folder, tmp_path / "new.csv", schema_file=tmp_path / "schema.json").table
    wanted = schema.predict(found[0].model, {"age": [30.0, 70.0], "sex": ["f", "m"]})
    assert told.column("y").to_pylist() == pytest.approx(wanted.column("y").to_pylist(), rel=1e-5)
    # Whoever took no part is handed model and schema in one folder; before, config.toml was needed, which tells more.
    (tmp_path / "handed").mkdir()
    (tmp_path / "handed" / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    with pytest.raises(ConfigError, match=r"no folder of a run: it has no config\.toml"):
        predict_rows(tmp_path / "handed", tmp_path / "new.csv")
    schema.save(tmp_path / "handed" / "schema.json")
    alone = predict_rows(tmp_path / "handed", tmp_path / "new.csv").table
    assert alone.column("y").to_pylist() == told.column("y").to_pylist()


def test_the_log_has_the_figures_of_an_evaluation_and_who_is_worst(caplog):
    with caplog.at_level("INFO", logger="flwr"):
        found = run(eq.Algorithm(), federation(DATA, softmax), rounds=1)
    errors = {
        c: float(e)
        for c, s, e in zip(found.clients.client, found.clients.split, found.clients.error, strict=True)
        if s == "test"
    }
    worst = max(errors, key=errors.get)
    line = f"Evaluation after round 1: mean test error {sum(errors.values()) / 3:.4g}, worst {worst} {errors[worst]:.4g}."
    assert line in [record.getMessage() for record in caplog.records]
    caplog.clear()
    with caplog.at_level("INFO", logger="flwr"):
        run(eq.Algorithm(privacy=P.SecureAggregation()), federation(DATA, softmax), rounds=1)
    (line,) = [text for record in caplog.records if "mean test error" in (text := record.getMessage())]
    assert "worst" not in line


def test_a_finished_run_that_cannot_go_on_stays_finished(tmp_path):
    folder, grid = tmp_path / "run", federation(DATA, softmax)
    run(eq.Algorithm(), grid, rounds=2, folder=folder)
    grid.offline |= set(grid.names.values())
    with pytest.raises(TooFewClients):
        run(eq.Algorithm(), grid, rounds=4, folder=folder)
    status = json.loads((folder / "status.json").read_text())
    assert (status["state"], status["round"], status["rounds"]) == ("finished", 2, 2)
    assert "could not go on" in status["text"]
    assert publish([folder], tmp_path / "out") == ["run"]
    with pytest.raises(ConfigError, match=r"ended after 2 rounds.* more than 2 rounds"):
        run(eq.Algorithm(), grid, rounds=1, folder=folder)


@pytest.mark.parametrize(("config", "said"), [({"minimum": 6}, "clients"), ({"minimum": 3, "begin-with": 2}, "begin-with")])
def test_a_minimum_that_no_round_can_have_is_refused(config, said):
    """Before, minimum=6 of four clients was ignored, and the run went on with four."""
    grid = federation(DATA, softmax)
    server = server_app(eq.Algorithm(), model=softmax, rounds=1, clients=4)
    with pytest.raises(InvalidParameter, match=rf"minimum must not exceed {said} .*EQ"):
        run_app(server, grid, **config)
    assert not grid.log


def test_privacy_that_nodes_would_refuse_is_refused_before_any_node_is_asked(tmp_path):
    """Noise from a seed and Poisson cohorts: both are named in one message, and the folder is not begun."""
    budget = P.DifferentialPrivacy(None, 1e-2, 0.5, noise_multiplier=1.0, noise="distributed", noise_seed=0)
    algorithm = eq.Algorithm(privacy=budget)
    grid = federation(DATA, softmax)
    with pytest.raises(IncompatibleParts, match="noise_seed") as failure:
        run(algorithm, grid, folder=tmp_path / "run")
    assert "Poisson" in str(failure.value)
    assert "sampling.NodePoisson()" in str(failure.value)
    assert not grid.log
    assert not (tmp_path / "run").exists()


def text_of(message):
    return message.content["call"]["values"]
