"""What an operator and a site do with their folders: kits, units, checks, backups, models. No network is needed."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sqlite3
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest
from typer.testing import CliRunner

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'equipoise[flower]'")

from fake_grid import FakeGrid, run_app

import equipoise as eq
from equipoise.cli import federation_commands
from equipoise.cli.federation_commands import use_kit
from equipoise.cli.flower_commands import app as flower_commands
from equipoise.engines.flower.apps.node_keys import read_node_list
from equipoise.engines.flower.apps.node_policy import read_policy
from equipoise.engines.flower.apps.run_control import give_order
from equipoise.engines.flower.apps.run_status import moment
from equipoise.engines.flower.apps.template import write_app
from equipoise.engines.flower.operate import registered_nodes
from equipoise.engines.flower.operate.authority import new_node_key
from equipoise.engines.flower.operate.backups import back_up, restore
from equipoise.engines.flower.operate.fetching import fetch, publish, read_entries, warn_of_trivial
from equipoise.engines.flower.operate.kit_questions import name_comparison, refused_parts, show_gaps, strange_columns
from equipoise.engines.flower.operate.kits import Kit, OperatorFolder
from equipoise.engines.flower.operate.node_check import Checks
from equipoise.engines.flower.operate.run_view import RunView
from equipoise.errors import ConfigError
from equipoise.experiment.folder import read_record
from equipoise.experiment.run_model import export_run


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))  # commands with --kit put its app there
    write_app(tmp_path / "made-kits")
    folder = OperatorFolder(tmp_path / "made-kits")
    folder.set_up(["fed.example.org"], 47091)
    folder.make_kit("client-0")
    return folder


def test_a_second_site_touches_nothing_of_the_first(place):
    """A further client once replaced the authority and the server's key."""
    kept = [*(place.path / "certificates").iterdir(), place.path / "sites" / "client-0" / "node.key"]
    before = {file: file.read_bytes() for file in kept}
    place.set_up([], 1)
    place.make_kit("client-5")
    place.make_kit("client-0")
    assert {file: file.read_bytes() for file in kept} == before
    assert set(read_node_list(place.path / "nodes.toml")) == {"client-0", "client-5"}
    key = read_node_list(place.path / "nodes.toml")["client-0"]
    place.make_kit("client-0", renew=True)
    assert read_node_list(place.path / "nodes.toml")["client-0"] != key
    assert len(list((place.path / "sites" / "client-0").glob("node.key.until-*"))) == 1
    place.retire("client-5")
    assert set(read_node_list(place.path / "nodes.toml")) == {"client-0"}
    assert (place.path / "sites" / "client-0" / "node.key").stat().st_mode & 0o777 == 0o600
    assert Kit.read(place.path / "sites" / "client-0").superlink == "fed.example.org:47091"


def test_who_renews_the_certificate_is_told_to_start_the_superlink_again(place):
    assert any("start them again" in line for line in place.set_up([], 1, renew=True))
    assert not any("start them again" in line for line in place.set_up([], 1))


def test_a_kit_is_made_again_when_its_private_key_has_gone_to_the_site(place):
    """The guide has operators delete it, and a change of the app needs the kit once more. Some sites make their own key."""
    kit, listed = place.path / "sites" / "client-0", read_node_list(place.path / "nodes.toml")
    (kit / "node.key").unlink()
    app = next((kit / "app").glob("*/task.py"))
    app.write_text("# another\n")
    place.make_kit("client-0")
    assert app.read_text() != "# another\n"
    new_node_key(place.path / "own.key", place.path / "own.pub")
    place.list_key("client-7", (place.path / "own.pub").read_text())
    place.make_kit("client-7")
    assert not (kit / "node.key").exists()
    assert not (place.path / "sites" / "client-7" / "node.key").exists()
    now = read_node_list(place.path / "nodes.toml")
    assert now["client-0"] == listed["client-0"] == " ".join((kit / "node.pub").read_text().split()[:2])
    place.make_kit("client-0", renew=True)
    assert (kit / "node.key").exists()
    assert read_node_list(place.path / "nodes.toml")["client-0"] != listed["client-0"]
    assert set(registered_nodes.names_by_key(place.path).values()) == {"client-0", "client-7"}
    assert registered_nodes.names_by_key(place.path)[listed["client-0"]] == "client-0"


def test_the_unit_and_the_command_keep_a_nodes_state_in_one_place(place, monkeypatch):
    """The secret of the data's hash and the ledger: in the kit, so that a backup of it has them."""
    kit = place.path / "sites" / "client-0"
    monkeypatch.setenv("EQUIPOISE_CONFIG", "")
    monkeypatch.delenv("EQUIPOISE_CONFIG")
    use_kit(kit)
    assert os.environ["EQUIPOISE_CONFIG"] == str(kit.resolve() / "state")
    unit = (kit / "equipoise-node.service").read_text()
    assert "WorkingDirectory=/etc/equipoise/client-0\n" in unit
    assert " EQUIPOISE_CONFIG=/etc/equipoise/client-0/state\n" in unit
    assert "ReadWritePaths=-/etc/equipoise/client-0/state\n" in unit
    assert "/var/lib" not in unit


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not here")
def test_units_pass_systemd_analyze(place, tmp_path):
    units = [*(place.path / "deploy").glob("*.service"), place.path / "sites" / "client-0" / "equipoise-node.service"]
    assert len(units) == 4
    here = str(Path(sys.executable).with_name("equipoise"))
    for unit in units:  # as they are, but for programs that are elsewhere on this machine: verify wants them to exist
        text = unit.read_text().replace("/usr/local/bin/equipoise", here)
        copy = tmp_path / unit.name
        copy.write_text(text if Path("/usr/sbin/nginx").exists() else text.replace("/usr/sbin/nginx", "/bin/true"))
        done = subprocess.run(["systemd-analyze", "verify", str(copy)], capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr
        assert unit.name not in done.stderr, done.stderr


def test_the_compose_file_is_one_and_runs_commands_that_exist(place):
    yaml = pytest.importorskip("yaml")
    services = yaml.safe_load((place.path / "deploy" / "compose.yaml").read_text())["services"]
    assert set(services) == {"superlink", "status", "proxy"}
    for service in services.values():
        assert service["restart"] == "unless-stopped"
        assert service["cap_drop"] == ["ALL"]
        if service["command"][0] != "nginx":
            assert service["command"][:2] == ["equipoise", "flower"]
            done = CliRunner().invoke(flower_commands, [service["command"][2], "--help"])
            assert done.exit_code == 0
    proxy = (place.path / "deploy" / "nginx.conf").read_text()
    assert "location /v1/fleet {" in proxy
    assert "location / { return 404; }" in proxy


def test_check_finds_faults_and_sends_nothing(place):
    """Nobody listens at the SuperLink's address, and the key can be read by others."""
    kit = place.path / "sites" / "client-0"
    text = (kit / "node.toml").read_text().replace("fed.example.org:47091", "127.0.0.1:9")
    (kit / "node.toml").write_text(text)
    (kit / "node.key").chmod(0o644)
    command = [sys.executable, "-c", "from equipoise.cli.flower_commands import app; app()", "check", "--kit", ".", "--json"]
    done = subprocess.run(command, cwd=kit, capture_output=True, text=True, timeout=120, check=False)
    found = {each["what"]: each for each in json.loads(done.stdout)["findings"]}
    assert done.returncode == 1
    assert found["key"]["verdict"] == "fault"
    assert "chmod 600" in found["key"]["text"]
    assert found["reachable"]["verdict"] == "fault"
    assert {found[what]["verdict"] for what in ("data", "values", "training", "app", "policy", "certificate")} == {"good"}
    assert "80 to train on" in found["data"]["text"]


def test_check_refuses_the_key_of_another_site(place):
    """A node with it would be let in as the other site, or not at all."""
    kit, other = place.path / "sites" / "client-0", place.make_kit("client-5")
    look = Checks(Kit.read(kit)).key
    assert look()[0] == "good"
    own = (kit / "node.key").read_bytes()
    (kit / "node.key").write_bytes((other / "node.key").read_bytes())
    verdict, text = look()
    assert verdict == "fault"
    assert "is not the private half of" in text
    (kit / "node.pub").write_bytes((other / "node.pub").read_bytes())  # both are those of the other site
    verdict, text = look()
    assert verdict == "fault"
    assert "is the key of client-5, and node.toml says client-id = 'client-0'" in text
    (kit / "node.key").write_bytes(own)
    (kit / "node.pub").unlink()
    assert look()[0] == "warning"


def test_the_guides_loader_reads_one_csv_file_per_site(tmp_path):
    """The three blocks of the guide, in an app; the check runs elsewhere, and `file` is seen from the kit."""
    pytest.importorskip("pandas")
    guide = (Path(__file__).parents[2] / "docs" / "operate-federation.md").read_text(encoding="utf-8")
    part = guide.partition("## One CSV file per site")[2].partition("## On each site")[0]
    schema, loader, net = (block.partition("```")[0] for block in part.split("```python\n")[1:])
    write_app(tmp_path / "app")
    package = tmp_path / "app" / OperatorFolder(tmp_path / "app").package
    (package / "data.py").write_text(loader)
    (package / "task.py").write_text(net)
    subprocess.run([sys.executable, "-c", schema], cwd=package, check=True, timeout=60)
    trial = f"from {package.name}.data import simulated; print(len(simulated().train))"
    tried = subprocess.run([sys.executable, "-c", trial], cwd=package.parent, capture_output=True, timeout=120, check=False)
    assert tried.stdout.strip() == b"4", tried.stderr
    place = OperatorFolder(tmp_path / "app")
    place.set_up(["127.0.0.1"], 9)
    kit = place.make_kit("hospital-a")
    rows = [f"{30 + k},{'fm'[k % 2]},{110 + k},{'well' if k < 10 else 'ill'}" for k in range(20)]
    (kit / "patients.csv").write_text("\n".join(["age,sex,pressure,outcome", *rows]) + "\n")
    text = (kit / "node.toml").read_text().replace("preload = []", 'preload = ["pandas"]') + 'file = "patients.csv"\n'
    (kit / "node.toml").write_text(text)
    program = "from equipoise.cli.flower_commands import app; app()"
    command = [sys.executable, "-c", program, "check", "--kit", str(kit), "--json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    found = {each["what"]: each for each in json.loads(done.stdout)["findings"]}
    assert {found[what]["verdict"] for what in ("app", "data", "values", "training")} == {"good"}, done.stdout
    assert "client 'hospital-a': 16 to train on, 4 to test" in found["data"]["text"]


def test_the_app_is_simulated_with_fewer_sites_than_a_round_has(tmp_path):
    """Before, data of three sites of one's own were refused, as the template has four clients per round."""
    write_app(tmp_path / "app")
    package = tmp_path / "app" / OperatorFolder(tmp_path / "app").package
    loader = (package / "data.py").read_text()
    (package / "data.py").write_text(loader.replace(', "client-3")', ")"))
    command = [sys.executable, "-m", f"{package.name}.simulate"]
    done = subprocess.run(command, cwd=package.parent, capture_output=True, text=True, timeout=120, check=False)
    assert "simulation: 3 test clients" in done.stdout, done.stderr


def looked(kit):
    """What the check finds in a kit, by what it looked at; nothing is asked of a network."""
    program = "from equipoise.cli.flower_commands import app; app()"
    command = [sys.executable, "-c", program, "check", "--kit", str(kit), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    return {each["what"]: each for each in json.loads(done.stdout)["findings"]}


def test_check_names_what_a_policy_gets_wrong(place):
    """Before, a typo in `parts` was READY, a part that is missing too, and a wrong key counted as five faults."""
    kit = place.path / "sites" / "client-0"
    (kit / "node.toml").write_text((kit / "node.toml").read_text().replace("fed.example.org:47091", "127.0.0.1:9"))
    policy = (kit / "policy.toml").read_text()
    assert "secure sums over 3 clients or more; at most 1000 rounds; no noise demanded" in looked(kit)["policy"]["text"]
    (kit / "policy.toml").write_text(policy.replace("risk.superquantile", "risk.superquantil"))
    found = looked(kit)["policy"]
    assert found["verdict"] == "fault"
    assert "Did you mean 'superquantile'?" in found["text"]
    (kit / "policy.toml").write_text(policy.replace(', "solver.sgd"', ""))
    found = looked(kit)["parts"]
    assert (found["verdict"], "lacks solver.sgd" in found["text"]) == ("fault", True)
    (kit / "policy.toml").write_text(policy.replace("only_sums = false", "only_sums = true"))
    assert "asks for single updates" in looked(kit)["parts"]["text"]
    (kit / "policy.toml").write_text(policy + "minimum_crow = 3\n")
    found = looked(kit)
    assert [what for what in found if found[what]["verdict"] == "fault"] == ["policy", "reachable"]
    assert found["parts"]["verdict"] == "skipped"


def test_a_kit_demands_sums_if_the_task_uses_them(place):
    """Before, kits of a run by secure sums let a server ask each node for its own update."""
    task = place.path / place.package / "task.py"
    plain = task.read_text()
    assert not read_policy(place.path / "sites" / "client-0" / "policy.toml").only_sums
    secure = plain.replace("    solver=", "    privacy=eq.privacy.SecureAggregation(),\n    solver=").replace(
        "tail=0.5", "tail=0.5, quantile=eq.privacy.SecureHistogram(bound=3.0)"
    )
    task.write_text(secure)
    before = set(sys.modules)
    done = CliRunner().invoke(flower_commands, ["site", "client-1", "client-0", "--folder", str(place.path)])
    assert done.exit_code == 0, done.output
    policy = place.path / "sites" / "client-1" / "policy.toml"
    assert read_policy(policy).only_sums
    assert policy.read_text() == (place.path / "policy.toml").read_text().replace("only_sums = false", "only_sums = true")
    # A policy that is there is the site's: it is not changed, and the command says what is wrong with it.
    assert not read_policy(policy.parents[1] / "client-0" / "policy.toml").only_sums
    (warned,) = [line for line in done.stderr.splitlines() if line.startswith("WARNING")]
    assert "client-0/policy.toml: only_sums = false, although task.py uses secure sums" in warned
    assert looked(policy.parent)["parts"]["verdict"] == "good"
    found = looked(policy.parents[1] / "client-0")["parts"]
    assert (found["verdict"], "Write only_sums = true" in found["text"]) == ("warning", True)
    assert not {name for name in set(sys.modules) - before if name.startswith(place.package)}
    assert not list(place.path.rglob("__pycache__"))
    task.write_text("raise ValueError\n")
    assert "no `algorithm` that can be loaded" in OperatorFolder(place.path).doubts("client-1")[0]


def test_check_names_columns_that_are_not_the_schemas():
    """Before, a pressure in kPa and categories that nobody knows were READY."""
    rows = {"pressure": [108.0, 121.5, 135.0, 149.5], "sex": ["f", "m", "f", "m"], "ill": ["n", "n", "y", "y"]}
    schema = eq.data.Schema.fit(rows, target="ill")

    def faults(**changed):
        table = {**rows, **changed, "site": ["a"] * 4}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", eq.errors.EquipoiseNotice)
            data = eq.data.from_frame(table, client="site", target="ill", schema=schema, split_by="examples", test=0.25)
        return list(strange_columns(data))

    assert faults() == []
    ((verdict, text),) = faults(pressure=[14.4, 16.2, 18.0, 19.9])
    assert (verdict, "'pressure'" in text, "standard deviations off" in text) == ("fault", True, True)
    ((verdict, text),) = faults(sex=["w", "x", "w", "x"])
    assert (verdict, "100% of its values are none" in text) == ("fault", True)


DEMANDS = {  # what a policy says, the algorithm of task.py, and the words of the fault; None: no fault
    "clip": ("clip = 0.5", {"clip": 1.0, "noise_multiplier": 2.0}, "clip = 0.5, and the algorithm of task.py clips to 1"),
    "a larger clip": ("clip = 1.5", {"clip": 1.0, "noise_multiplier": 2.0}, None),
    "noise": ("noise_multiplier = 3.0", {"noise_multiplier": 1.4}, "the least noise multiplier of task.py is 1.4"),
    "more noise": ("noise_multiplier = 1.0", {"noise_multiplier": 1.4}, None),
    "seed": ("epsilon = 5.0", {"noise_multiplier": 1.4, "noise_seed": 0}, "noise_seed"),
    "no noise": ("epsilon = 5.0", None, "the secure sums of task.py have no noise"),
}


@pytest.mark.parametrize("demand", DEMANDS)
def test_check_compares_noise_and_clip_of_the_policy_with_the_algorithm(demand, tmp_path):
    """Before, these were READY, and the node refused the run."""
    text, options, said = DEMANDS[demand]
    (tmp_path / "policy.toml").write_text(f"{text}\n")
    privacy = eq.privacy.SecureAggregation()
    if options is not None:
        given = {"clip": 1.0, "noise": "distributed", **options}
        privacy = eq.privacy.DifferentialPrivacy(None, 1e-3, **given)
    algorithm = eq.Algorithm(privacy=privacy)
    found = list(refused_parts(read_policy(tmp_path / "policy.toml"), algorithm))
    assert len(found) == (said is not None)
    assert said is None or said in found[0]


def test_check_says_what_only_the_run_decides(tmp_path):
    (tmp_path / "policy.toml").write_text("noise_multiplier = 3.0\nrounds = 9\n")
    private = eq.privacy.DifferentialPrivacy(5.0, 1e-3, 1.0, noise="distributed")
    compared, later = name_comparison(read_policy(tmp_path / "policy.toml"), eq.Algorithm(privacy=private))
    assert "noise_multiplier" not in compared
    assert "rounds" in later
    assert any(each.startswith("noise_multiplier (the noise follows from ε") for each in later)


def test_check_names_unknown_categories_and_missing_values(place):
    """Before, an empty column was READY without a word, and unknown categories were in no finding."""
    kit = place.path / "sites" / "client-0"
    (kit / "node.toml").write_text((kit / "node.toml").read_text().replace("fed.example.org:47091", "127.0.0.1:9"))
    loader = next((kit / "app").glob("*/data.py"))
    rows = {"age": [20.0, 30.0, 40.0, 50.0], "sex": ["f", "m", "f", "m"], "bmi": [20.0, 22.0, 24.0, 26.0]}
    eq.data.Schema.fit({**rows, "ill": ["n", "y"] * 2}, target="ill").save(kit / "schema.json")
    own = {"age": [20.0, None, 40.0, 50.0] * 5, "sex": ["f", "x", "m", "f"] * 5, "bmi": [None] * 20, "ill": ["n", "y"] * 10}
    loader.write_text(
        "import equipoise as eq\n\n\ndef load_data(context):\n"
        f"    table = {own!r} | {{'site': ['client-0'] * 20}}\n"
        f"    schema = {str(kit / 'schema.json')!r}\n"
        "    return eq.data.from_frame(table, client='site', target='ill', schema=schema, split_by='examples', test=0.2)\n"
    )
    found = looked(kit)["values"]
    assert found["verdict"] == "warning"
    assert "column 'bmi' is empty" in found["text"]
    assert "column 'sex' holds categories that training did not have: 'x'" in found["text"]
    assert "Is it the right column? " in found["text"]  # before, "column?."
    assert "Examples per class: 8, 8; missing values, which are filled in: age 5 of 20" in found["text"]  # before, hidden
    assert show_gaps({"age": (5, 20), "sex": (0, 20)}).endswith("age 5 of 20")


def test_check_says_which_setting_is_missing(place):
    kit = place.path / "sites" / "client-0"
    (kit / "node.toml").write_text((kit / "node.toml").read_text().replace("fed.example.org:47091", "127.0.0.1:9"))
    loader = next((kit / "app").glob("*/data.py"))
    loader.write_text(loader.read_text().replace("return made_up(str(", 'context.node_config["file"]; return made_up(str('))
    found = looked(kit)
    assert "Write file = … below [node-config]" in found["data"]["text"]
    assert {found[what]["verdict"] for what in ("values", "training")} == {"skipped"}


def test_a_backup_comes_back_whole_and_a_damaged_one_is_refused(place, tmp_path):
    database = sqlite3.connect(place.path / "superlink.db")
    database.execute("create table nodes (name text)")
    database.execute("insert into nodes values ('client-0')")
    database.commit()
    archive = tmp_path / "backup.tar.gz"
    count = back_up(place.path, archive)
    database.close()
    assert archive.stat().st_mode & 0o777 == 0o600
    assert restore(archive, tmp_path / "again") == count
    key = Path("certificates/ca.key")
    assert (tmp_path / "again" / key).read_bytes() == (place.path / key).read_bytes()
    assert (tmp_path / "again" / key).stat().st_mode & 0o777 == 0o600
    found = sqlite3.connect(tmp_path / "again" / "superlink.db")
    assert found.execute("select name from nodes").fetchall() == [("client-0",)]
    found.close()
    with pytest.raises(ConfigError, match="replaces none"):
        back_up(place.path, archive)
    archive.write_bytes(archive.read_bytes()[:-200])
    with pytest.raises(ConfigError):
        restore(archive, tmp_path / "third")


def test_manifests_cannot_name_files_elsewhere():
    good = {"name": "a", "file": "a.safetensors", "bytes": 5, "sha256": hashlib.sha256(b"").hexdigest()}
    assert read_entries(json.dumps({"models": [good]}).encode()) == [good]
    for wrong in ({"file": "../a.safetensors"}, {"sha256": "0"}, {"bytes": -1}, {"file": "a.txt"}):
        with pytest.raises(ConfigError, match="no list of published models"):
            read_entries(json.dumps({"models": [{**good, **wrong}]}).encode())


def test_a_site_fetches_the_published_model_that_serves_it_best(tmp_path, monkeypatch):
    """Two finished runs, one after a single round: the site compares checksums, tries both on its data and keeps the better."""
    folder = tmp_path / "fetch-federation"
    write_app(folder)
    place = OperatorFolder(folder)
    place.set_up(["fed.example.org"], 47091)
    kit = Kit.read(place.make_kit("client-1"))
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.chdir(tmp_path)
    from fetch_federation import client_app, server_app

    for name, rounds in (("short", 1), ("long", 8)):
        grid = FakeGrid({f"client-{i}": client_app.app for i in range(4)})
        run_app(server_app.app, grid, rounds=rounds, folder=f"runs/{name}")
    assert publish([Path("runs/short"), Path("runs/long")], Path("published")) == ["short", "long"]

    lines = fetch("published", kit, Path("model"))
    assert "long serves this node's data best (by its train loss)" in lines[-1]
    assert lines[-2].startswith("most frequent class for all: train error 0.")
    (warning,) = warn_of_trivial(
        "long", {"test": (2.0, 0.93)}, {"most frequent class": {"train": 0.4, "test": 0.4}}, {"test": 40}
    )
    assert "The model is of no use there" in warning
    few = {"test": 10}
    (chance,) = warn_of_trivial("long", {"test": (2.0, 0.5)}, {"most frequent class": {"test": 0.4}}, few)
    assert "only 10 examples, so that this may be chance" in chance
    assert "of no use" not in chance
    assert "WARNING: on this node's test examples long has an error of 0.93. The most frequent class for all" in warning
    (warning,) = warn_of_trivial(
        "long", {"train": (2.0, 0.5), "test": (2.0, 0.3)}, {"most frequent class": {"train": 0.4875, "test": 0.4}}, {}
    )
    assert (
        "on this node's train examples long has an error of 0.5. The most frequent class for all examples has 0.4875" in warning
    )
    assert not warn_of_trivial("long", {"test": (2.0, 0.3)}, {"most frequent class": {"train": 0.4, "test": 0.4}}, {})
    publish([Path("runs/long")], Path("one"))
    assert "long is in alone" in fetch("one", kit, Path("alone"))[-1]  # the best of one is no praise
    with pytest.raises(ConfigError, match=r"EQ4"):
        export_run(Path("runs/long"))
    choice = json.loads(Path("model/choice.json").read_text())
    assert choice["scores"]["long"]["train"][0] < choice["scores"]["short"]["train"][0]
    assert Path("model/model.safetensors").read_bytes() == Path("runs/long/model.safetensors").read_bytes()
    assert choice["sha256"] == hashlib.sha256(Path("model/model.safetensors").read_bytes()).hexdigest()
    loss, error = choice["scores"]["long"]["test"]
    table = read_record("runs/long").clients
    row = next(i for i, who in enumerate(zip(table.client, table.split, strict=True)) if who == ("client-1", "test"))
    assert (loss, error) == pytest.approx((float(table.loss[row]), float(table.error[row])), rel=1e-6)  # as in the run

    # A later fetch takes the folder again, and leaves what others have put there.
    Path("model/notes.txt").write_text("ours")
    publish([Path("runs/short")], Path("later"))
    assert fetch("later", kit, Path("model"))[-1] == "short is in model. It replaces the one before. Nothing was sent."
    assert Path("model/model.safetensors").read_bytes() == Path("runs/short/model.safetensors").read_bytes()
    assert "It was there already." in fetch("later", kit, Path("model"))[-1]
    assert Path("model/notes.txt").read_text() == "ours"
    # It was killed after it wrote the choice and before the model: the next one completes it.
    choice = json.loads(Path("model/choice.json").read_text())
    other = hashlib.sha256(Path("runs/long/model.safetensors").read_bytes()).hexdigest()
    Path("model/choice.json").write_text(json.dumps({**choice, "sha256": other, "replaces": choice["sha256"]}))
    assert "It replaces the one before." in fetch("one", kit, Path("model"))[-1]
    # The model of another site neither: before, two kits in one folder overwrote each other's choice.
    other_kit = Kit.read(place.make_kit("client-2"))
    with pytest.raises(ConfigError, match=r"was chosen for client-1, and this kit is that of client-2.*--out DIR"):
        fetch("one", other_kit, Path("model"))
    # A model that no fetch has written is not lost.
    Path("model/model.safetensors").write_bytes(b"trained here")
    for content in (Path("model/choice.json").read_text(), "{}", "no JSON", None):
        if content is None:
            Path("model/choice.json").unlink()
        else:
            Path("model/choice.json").write_text(content)
        with pytest.raises(ConfigError, match=r"model\.safetensors was not written by .*--overwrite"):
            fetch("one", kit, Path("model"))
        assert Path("model/model.safetensors").read_bytes() == b"trained here"
    assert "long is in model." in fetch("one", kit, Path("model"), overwrite=True)[-1]
    Path("file").write_text("")
    with pytest.raises(ConfigError, match="is a file"):
        fetch("one", kit, Path("file"))
    damaged = bytearray(Path("published/long.safetensors").read_bytes())
    damaged[-1] ^= 1
    Path("published/long.safetensors").write_bytes(damaged)
    with pytest.raises(ConfigError, match="damaged"):
        fetch("published", kit, Path("other"))
    assert not Path("other").exists()
    (tmp_path / "runs" / "begun").mkdir()
    with pytest.raises(ConfigError, match="no finished run"):
        publish([Path("runs/begun")], Path("again"))


def test_a_killed_server_whose_parent_does_not_look_is_gone(tmp_path):
    """Flower's SuperExec leaves the process of a killed run as a zombie, and the status once said that it was running."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    about = {"run": "a", "state": "running", "round": 1, "rounds": 2, "alerts": [], "clients": {}, "pid": child.pid}
    (tmp_path / "status.json").write_text(json.dumps({**about, "updated": moment()}))
    assert RunView(tmp_path).read()["exit_code"] == 0
    child.kill()
    while Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
        time.sleep(0.01)
    assert RunView(tmp_path).read()["exit_code"] == 2
    child.wait()
    assert RunView(tmp_path).read()["state"] == "gone"


def test_a_node_reports_nothing_to_the_makers_of_flower(place, monkeypatch):
    """The guide's line for a site says nothing of it, and each answer once waited for a report that was on its way."""
    from equipoise.engines.flower.apps import warm_node

    for name in ("FLWR_TELEMETRY_ENABLED", "FLWR_DISABLE_UPDATE_CHECK"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    said = {}
    monkeypatch.setattr(warm_node, "run", lambda *_, **__: said.update(os.environ) or 0)
    kit = str(place.path / "sites" / "client-0")
    assert CliRunner().invoke(flower_commands, ["node", "--kit", kit]).exit_code == 0
    assert (said["FLWR_TELEMETRY_ENABLED"], said["FLWR_DISABLE_UPDATE_CHECK"]) == ("0", "1")
    monkeypatch.setenv("FLWR_TELEMETRY_ENABLED", "1")
    assert CliRunner().invoke(flower_commands, ["node", "--kit", kit]).exit_code == 0
    assert said["FLWR_TELEMETRY_ENABLED"] == "1"  # its owner's choice


def test_the_status_of_a_run_that_goes_on_knows_its_extension(tmp_path):
    about = {"run": "a", "state": "running", "round": 1, "rounds": 2, "alerts": [], "clients": {}, "pid": os.getpid()}
    (tmp_path / "status.json").write_text(json.dumps({**about, "updated": moment()}))
    give_order(tmp_path, rounds=7)
    assert RunView(tmp_path).read()["rounds"] == 7
    give_order(tmp_path, rounds=1)  # it was begun with more
    assert RunView(tmp_path).read()["rounds"] == 2
    (tmp_path / "control.json").write_text("{")
    assert RunView(tmp_path).read()["rounds"] == 2


class FakeRegistry:
    """The SuperLink's list of nodes, in memory."""

    def __init__(self) -> None:
        self.known: list[dict[str, object]] = []

    def nodes(self):
        return self.known

    def register(self, key, name):
        node = 10**19 + len(self.known)
        self.known.append({"id": node, "key": key, "name": name, "state": "registered", "since": ""})
        return node

    def unregister(self, node):
        next(entry for entry in self.known if entry["id"] == node)["state"] = "unregistered"


def test_nodes_are_named_as_their_sites(place):
    """Flower's own list has numbers of twenty digits alone. Also a key that was replaced has a name."""
    registry, folder = FakeRegistry(), place.path
    place.make_kit("client-1")
    found = registered_nodes.register(folder, ["client-0", "client-1"], registry)
    assert [new for _, new in found.values()] == [True, True]
    assert registered_nodes.register(folder, ["client-0"], registry) == {"client-0": (found["client-0"][0], False)}
    for entry in registry.known:
        entry["name"] = ""  # as when they were registered by Flower's command
    place.make_kit("client-0", renew=True)
    again = registered_nodes.register(folder, ["client-0"], registry)["client-0"][0]
    assert [(node.name, node.listed, node.id) for node in registered_nodes.list_nodes(folder, registry)] == [
        ("client-0", True, again), ("client-0", False, found["client-0"][0]), ("client-1", True, found["client-1"][0]),
    ]  # fmt: skip
    assert registered_nodes.table_of(registered_nodes.list_nodes(folder, registry))[2].split()[:3] == [
        "client-0", "registered", "not",
    ]  # fmt: skip
    assert registered_nodes.unregister(folder, ["client-0"], registry) == {"client-0": [found["client-0"][0]]}
    with pytest.raises(ConfigError, match=r"is the one on the list.*--retire"):
        registered_nodes.unregister(folder, ["client-0"], registry)
    place.retire("client-0")
    assert registered_nodes.unregister(folder, ["client-0"], registry) == {"client-0": [again]}
    with pytest.raises(ConfigError, match="knows no node of client-0, but: client-1"):
        registered_nodes.unregister(folder, ["client-0"], registry)
    with pytest.raises(ConfigError, match=r"not in .*nodes\.toml\. Make its kit first"):
        registered_nodes.register(folder, ["client-0"], registry)


def test_a_superlink_that_does_not_answer_is_told_of(monkeypatch):
    registry = FakeRegistry()
    monkeypatch.setattr(registry, "nodes", lambda: 1 / 0)
    with pytest.raises(ConfigError, match=r"does not answer .*Start it: equipoise flower superlink"):
        registered_nodes.await_superlink(registry, 0.0)
    told = []
    with pytest.raises(ConfigError):
        registered_nodes.await_superlink(registry, 0.6, told.append)
    assert told == ["The SuperLink does not answer yet. This command waits for it, 1 s at most."]  # once, at the first try


def test_a_superlink_finds_flowers_programs_without_a_shell(place, monkeypatch):
    """A unit has no virtual environment in its path, and Flower starts `flower-superexec` by its name."""
    begun = []
    monkeypatch.setattr(os, "execv", lambda *command: begun.append(command))
    monkeypatch.setattr(os, "environ", {"PATH": "/usr/bin", "FLWR_HOME": "/elsewhere"})
    monkeypatch.setattr(os, "umask", lambda _: None)
    done = CliRunner().invoke(flower_commands, ["superlink", "--folder", str(place.path)])
    assert done.exit_code == 0, done.output
    assert os.environ["PATH"].split(os.pathsep) == [str(Path(sys.executable).parent), "/usr/bin"]
    assert os.environ["FLWR_HOME"] == str(place.path / ".flwr")
    assert shutil.which("flower-superexec", path=os.environ["PATH"]) is not None
    assert begun[0][0] == sys.executable


def test_a_log_in_a_file_has_no_colours(tmp_path, capfd):
    """Flower colours the level of each line, also where nobody looks at a terminal."""
    program = "import sys; print('\\x1b[92mINFO \\x1b[0m: one'); print('two', file=sys.stderr); sys.exit(3)"
    code = federation_commands._show([sys.executable, "-u", "-c", program], dict(os.environ), tmp_path)
    assert code == 3
    assert sorted(capfd.readouterr().out.splitlines()) == ["INFO : one", "two"]
