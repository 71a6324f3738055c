"""What pages say of the files of a federation: whom they name, and how a site that was not in it predicts with them."""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from fake_grid import federation, run_app

import equipoise as eq
from equipoise.data.clients import FederatedData
from equipoise.engines.flower import server_app
from equipoise.experiment.folder import read_record
from made_clients import make_clients

logging.getLogger("flwr").setLevel("CRITICAL")
ROOT, P = Path(__file__).parents[2], eq.privacy
pytestmark = pytest.mark.filterwarnings("ignore::equipoise.errors.EquipoiseNotice")
SITES = [f"client-{k}" for k in range(4)]
NOISE = {"epsilon": 5.0, "delta": 1e-2, "clip": 1.0}
HISTOGRAM = P.SecureHistogram(bound=2.0, bins=64)
ALGORITHMS = {
    "plain": eq.Algorithm(),
    "sums": eq.Algorithm(
        risk=eq.risk.Superquantile(tail=0.6, quantile=HISTOGRAM), privacy=P.SecureAggregation(), weights="uniform"
    ),
    "distributed": eq.Algorithm(
        sampler=eq.sampling.NodePoisson(), privacy=P.DifferentialPrivacy(noise="distributed", **NOISE), weights="uniform"
    ),
    "central": eq.Algorithm(privacy=P.DifferentialPrivacy(**NOISE), weights="uniform"),
}


@pytest.mark.parametrize("kind", ALGORITHMS)
def test_whom_the_files_of_a_federation_name(kind, tmp_path):
    """ "Which files may I hand over?" of docs/reference/files.md, and "Which files name clients" of docs/privacy.md."""
    data = FederatedData(make_clients([10] * 4), test=make_clients([8] * 4, seed=1), name="four")
    options = {"timeout": 30.0, "pause": 1.0, "retries": 0, "clients": 4, "clients_per_round": 3, "seed": 5}
    app = server_app(ALGORITHMS[kind], model=softmax, rounds=3, folder=tmp_path / "run", **options)
    run_app(app, federation(data, softmax))
    protected, sums = kind != "plain", kind in ("sums", "distributed")

    files = {str(path.relative_to(tmp_path / "run")): path for path in (tmp_path / "run").rglob("*") if path.is_file()}
    naming = {name for name, path in files.items() if any(site.encode() in path.read_bytes() for site in SITES)}
    always = {"checkpoint/state.safetensors", "federation.json", "status.json", "rounds.jsonl"}
    also = {"ledger.jsonl"} if protected else {"model.card.md", "model.card.json"}
    report = set() if protected else {"report.html"}
    sometimes = {"clients.parquet", "events.jsonl"}  # packed; those that something happened to
    assert naming - sometimes == always | also | report
    rows = eq.ClientTable.from_parquet(files["clients.parquet"]).client
    assert set(rows) == ({"mean of 4 clients"} if sums else set(SITES))
    assert ("batches.key" in files) is protected
    record = read_record(tmp_path / "run")
    assert [report.clients is None for report in record.history.rounds] == [protected] * 3
    assert protected or all(len(cohort) == 3 and set(cohort) < set(SITES) for cohort in record.cohorts)
    card = json.loads(files["model.card.json"].read_text())["left_behind"]
    assert protected or all(row["examples"] == 8 for row in card["worst_clients"])
    assert not re.search(r"client-\d, 8|8 examples", files["model.card.md"].read_text())

    if protected:
        entries = [json.loads(line) for line in files["ledger.jsonl"].read_text().splitlines()]
        cohorts = [entry["cohort"] for entry in entries if entry["kind"] == "cohort"]
        assert len(cohorts) == 3
        assert all(set(cohort) <= set(SITES) for cohort in cohorts)
        if kind == "distributed":  # who was invited: each draws for itself
            assert all(set(cohort) == set(SITES) for cohort in cohorts)
        values = {entry["purpose"]: entry["value"] for entry in entries if entry["kind"] == "outcome" and "value" in entry}
        assert ("histogram" in values) is (kind == "sums")
        if kind == "sums":
            assert len(values["histogram"]) == 64
            assert sum(values["histogram"]) == 3  # exact counts of losses
        assert ("scores test" in values) is sums  # exact means
        if sums:
            (row,) = (row for row in eq.ClientTable.from_parquet(files["clients.parquet"]).where("test"))
            assert values["scores test"]["pair"] == pytest.approx([row["loss"], row["error"]])


def softmax():
    return eq.models.Softmax(4, 3)


def section(page: str, heading: str) -> str:
    return (ROOT / "docs" / page).read_text(encoding="utf-8").split(f"\n## {heading}\n")[1].split("\n## ")[0]


def test_a_site_that_was_not_in_the_federation_predicts(tmp_path):
    """The commands of that section of docs/after-federation.md, as the operator and the site give them."""
    rows = {"age": [24, 41, 58, 83] * 3, "sex": ["f", "m"] * 6, "outcome": ["well", "well", "ill", "ill"] * 3}
    schema = eq.data.Schema.fit(rows, target="outcome")
    (tmp_path / "my_federation").mkdir()
    schema.save(tmp_path / "my_federation" / "schema.json")
    data = eq.data.from_frame(
        rows | {"site": ["a", "b", "c"] * 4}, client="site", target="outcome", schema=schema, split_by="examples", test=0.25
    )

    def net():
        return eq.models.Tabular(schema, hidden=(5,))

    folder = tmp_path / "runs" / "federation"
    options = {"timeout": 30.0, "pause": 1.0, "retries": 0, "clients": 3}
    run_app(server_app(eq.Algorithm(), model=net, rounds=1, folder=folder, **options), federation(data, net))
    table = [f"{sex},{age},{outcome}" for sex, age, outcome in [("m", 71, "ill"), ("f", 30, "well"), ("f", 66, "well")]]
    (tmp_path / "new.csv").write_text("\n".join(["sex,age,outcome", *table]) + "\n")

    blocks = re.findall(
        r"^```\n(.*?)^```$", section("after-federation.md", "A site that was not in the federation"), re.M | re.S
    )
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = os.environ | {"PATH": path, "PYTHONPATH": str(ROOT / "src")}
    printed = []
    for block in blocks:
        if "--model" in block:
            continue  # for a model of the app's own
        lines = [line for line in block.splitlines() if not line.startswith(("python3 -m venv", "pip install"))]
        done = subprocess.run(["bash", "-ec", "\n".join(lines)], cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        printed.append(done.stdout)
    handed = {each.name for each in (tmp_path / "handed-over").iterdir()}
    assert handed == {"model.safetensors", "model.card.md", "schema.json"}
    assert (tmp_path / "predictions.csv").read_text().startswith('"outcome","ill","well"\n"ill",')
    assert "of the trivial answer 33.3 %, 3 rows" in printed[-1]
