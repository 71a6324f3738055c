import json
import sys
import warnings

import pytest

import equipoise as eq
from equipoise.engines.flower.apps.node_ledger import NodeLedger
from equipoise.export.model_card import privacy_words
from equipoise.privacy.accounting import epsilon_of, gaussian_epsilon
from equipoise.privacy.ledger import LedgerEntry
from equipoise.privacy.ledger_report import summarise_ledgers
from equipoise.privacy.releases import CohortEvent, FixedSampling, PoissonSampling, Release, fold

with warnings.catch_warnings():  # typer 0.20 imports names that click 8.5 deprecates; only that import is excused
    warnings.filterwarnings("ignore", message="'click", category=DeprecationWarning)
    import typer
    from typer.testing import CliRunner

    from equipoise.cli.commands import ClearErrors
    from equipoise.cli.privacy_commands import app

root = typer.Typer(cls=ClearErrors)  # errors are shown as the whole command line shows them
root.add_typer(app, name="privacy")


def call(*arguments):
    return CliRunner().invoke(root, ["privacy", *arguments])


def answer(*arguments):
    result = call(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def refused(*arguments):
    result = call(*arguments)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert result.stderr.startswith("Error: ")
    return result.stderr


RUN = ("--delta", "1e-5", "--rounds", "50", "--sampling-rate", "0.1")


def test_epsilon_of_two_releases_is_that_of_one_event():
    found = answer("epsilon", "--noise", "3", "--quantile-noise", "4", *RUN)
    event = CohortEvent((Release("update", 3.0), Release("quantile", 4.0)), PoissonSampling(0.1))
    assert found["epsilon"] == pytest.approx(epsilon_of([(event, 50)], 1e-5))
    assert found["noise_multiplier"] == pytest.approx(2.4)
    assert (found["method"], found["rounds"], found["delta"]) == ("pld", 50, 1e-5)
    assert found["epsilon_server"] > found["epsilon"]


def test_epsilon_in_words():
    result = call("epsilon", "--noise", "1", "--quantile-noise", "1", "--delta", "4e-4", "--rounds", "1000",
                  "--sampling-rate", "0.04", "--method", "rdp")  # fmt: skip
    assert result.exit_code == 0
    first, second = result.stdout.splitlines()
    assert first.startswith("ε = 16.61 at δ = 0.0004 (add or remove one client, RDP accounting, 1000 rounds)")
    assert "0.70711" in second


def test_fixed_cohorts_replace_and_double():
    run = ("--delta", "1e-5", "--rounds", "20", "--cohort", "20", "--population", "500")
    found = answer("epsilon", "--noise", "2", *run)
    event = CohortEvent((Release("update", 2.0),), FixedSampling(20, 500))
    assert found["epsilon"] == pytest.approx(epsilon_of([(event, 20)], 1e-5))
    assert (found["adjacency"], found["method"]) == ("replace one client", "rdp")
    assert "2 × clip" in call("epsilon", "--noise", "2", *run).stdout


def test_no_sampling_and_no_noise_are_said_so():
    assert "every client in every round" in call("epsilon", "--noise", "2", "--delta", "1e-5", "--rounds", "2").stdout
    assert "ε = inf" in call("epsilon", "--noise", "0", *RUN).stdout
    assert answer("epsilon", "--noise", "0", *RUN)["epsilon"] is None


def test_noise_is_the_inverse_and_its_first_line_is_the_number():
    result = call("noise", "--epsilon", "0.5", *RUN)
    assert result.exit_code == 0
    multiplier = float(result.stdout.splitlines()[0])
    spent = answer("epsilon", "--noise", str(multiplier), *RUN)["epsilon"]
    assert 0.998 * 0.5 <= spent <= 0.5  # rounded up to five digits
    assert "standard deviation" in result.stdout


def test_noise_is_shared_with_a_quantile():
    found = answer("noise", "--epsilon", "0.5", "--quantile-ratio", "0.25", *RUN)
    quantile, update = found["quantile_noise_multiplier"], found["update_noise_multiplier"]
    assert fold(quantile, update) == pytest.approx(found["noise_multiplier"], rel=1e-4)
    assert fold(quantile, update) >= found["noise_multiplier"] * (1 - 1e-9)
    assert (update / quantile) ** 2 == pytest.approx(0.25, rel=1e-3)
    assert found["epsilon"] <= 0.5


def test_an_honest_mechanism_passes_its_audit():
    result = call("audit", "--noise", "1", "--delta", "1e-5", "--runs", "20000")
    assert result.exit_code == 0
    assert "not refuted" in result.stdout
    assert "ε = 4.377" in result.stdout  # the analytic Gaussian mechanism at multiplier 1


def test_half_the_noise_fails_the_audit_of_what_was_claimed():
    result = call("audit", "--noise", "0.5", "--delta", "1e-5", "--epsilon", "4.377")
    assert result.exit_code == 1
    assert "REFUTED" in result.stdout
    result = call("audit", "--noise", "0.5", "--delta", "1e-5", "--epsilon", "4.377", "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["refuted"] is True


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("noise", "--epsilon", "1", "--delta", "2", "--rounds", "5"), "delta must lie in (0, 1)"),
        (("noise", "--epsilon", "-1", "--delta", "1e-5", "--rounds", "5"), "epsilon must be a positive"),
        (("noise", "--epsilon", "1", "--delta", "1e-5", "--rounds", "0"), "rounds must be"),
        (("noise", "--epsilon", "1", "--delta", "1e-5", "--rounds", "5", "--sampling-rate", "0"), "sampling_rate must lie"),
        (("noise", "--epsilon", "1", "--delta", "1e-5", "--rounds", "5", "--cohort", "5"), "not a mixture"),
        (("noise", "--epsilon", "1", "--delta", "1e-5", "--rounds", "5", "--method", "x"), "method must be"),
        (("noise", "--epsilon", "1", *RUN, "--quantile-ratio", "0"), "quantile_ratio must be"),
        (("epsilon", "--noise", "-1", *RUN), "must be a number ≥ 0"),
        (("epsilon", "--noise", "1", "--delta", "1e-5", "--rounds", "0"), "must be a whole number of at least 1"),
        (("audit", "--noise", "0", "--delta", "1e-5"), "noise_multiplier must be"),
        (("audit", "--noise", "1", "--delta", "1e-5", "--runs", "3"), "runs must be"),
        (("audit", "--noise", "1", "--delta", "1e-5", "--epsilon", "-2"), "epsilon must be"),
    ],
)
def test_wrong_input_is_one_message_and_exit_code_2(arguments, message):
    assert message in refused(*arguments)


def test_private_runs_that_no_ledger_counts_are_named(tmp_path):
    """Result.save writes no ledger: what such a run has released is not in the sum, and the command says so."""
    data = eq.data.label_shift(train_clients=20, validation_clients=2, test_clients=2, seed=0)
    model = eq.models.Softmax(data.features, data.classes)
    privacy = eq.privacy.DifferentialPrivacy(None, 1e-2, clip=1.0, noise_multiplier=1.0, method="rdp")
    ledgers = {"saved": None, "plain": None, "study/run": tmp_path / "study" / "ledger.jsonl"}
    for name, ledger in ledgers.items():
        algorithm = eq.Algorithm(privacy=None if name == "plain" else privacy)
        options = {"rounds": 1, "clients_per_round": 5, "seed": 0, "progress": False, "ledger": ledger}
        eq.train(model, data, algorithm, **options).save(tmp_path / name)
    assert answer("ledger", str(tmp_path))["without_ledger"] == [str(tmp_path / "saved")]
    assert "Not counted" in call("ledger", str(tmp_path)).stdout
    assert "Not counted" not in call("ledger", str(tmp_path / "study")).stdout


def written_ledger(folder, run, entries, *, client="a", fingerprint="f", data="d"):
    """The folder of a federated run: its ledger, its configuration and who took part."""
    folder.mkdir(parents=True)
    name = "secure_aggregation" if all(kind == "exact" for kind, _ in entries) else "differential_privacy"
    (folder / "config.toml").write_text(f'[algorithm.privacy]\nname = "{name}"\n')
    roster = {"run": run, "clients": [{"client": client, "fingerprint": fingerprint}]}
    (folder / "federation.json").write_text(json.dumps(roster))
    noise = {"multiplier": 1.0, "zeroed": 1.0, "sampling": ["everyone"], "delta": 1e-3, "shares": 3}
    lines = [
        {"kind": kind, "data": data, "run": run, "round": 0, "purpose": purpose, "token": f"{run}{i}", **noise}
        for i, (kind, purpose) in enumerate(entries)
    ]
    (folder / "ledger.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_exact_releases_have_no_epsilon(tmp_path):
    """Before, a run by secure sums alone was told of with ε = 0, as if nobody could learn anything from its model."""
    written_ledger(tmp_path / "secure", "s", [("exact", "update"), ("exact", "scores test")])
    shown = call("ledger", str(tmp_path)).stdout
    assert "ε in all = none (exact releases in run secure)" in shown
    assert "= 0" not in shown
    written_ledger(tmp_path / "dp", "p", [("release", "update"), ("exact", "scores test")], data="other policies")
    shown, values = call("ledger", str(tmp_path)).stdout, answer("ledger", str(tmp_path))
    assert "2 runs, ε in all = none (exact releases in run secure; of the noisy releases alone" in shown
    (data,) = values["data"]  # the node had the same data in both
    assert (data["epsilon"], data["without_epsilon"]) == (None, ["secure"])
    assert {run["folder"]: run["epsilon"] is None for run in data["runs"]} == {"secure": True, "dp": False}
    assert data["epsilon_noisy"] > 0
    alone = answer("ledger", str(tmp_path / "dp"))["data"][0]
    assert alone["epsilon"] == data["epsilon_noisy"]
    written_ledger(tmp_path / "far", "q", [("release", "update")], client="b", fingerprint="g", data="elsewhere")
    assert len(answer("ledger", str(tmp_path))["data"]) == 2


def test_runs_without_privacy_are_listed(tmp_path):
    data = eq.data.label_shift(train_clients=8, validation_clients=2, test_clients=2, seed=0)
    model = eq.models.Softmax(data.features, data.classes)
    options = {"rounds": 1, "clients_per_round": 4, "progress": False}
    place = tmp_path / "plain"
    result = eq.train(model, data, checkpoint=place / "checkpoint" / "state.safetensors", **options)
    (place / "config.toml").write_text('[algorithm]\nprivacy = "none"\n')
    assert "ε in all = none (exact releases in run plain)" in call("ledger", str(tmp_path)).stdout
    privacy = eq.privacy.DifferentialPrivacy(None, 1e-2, clip=1.0, noise_multiplier=1.0, method="rdp")
    eq.train(model, data, eq.Algorithm(privacy=privacy), ledger=tmp_path / "dp" / "ledger.jsonl", **options)
    (found,) = answer("ledger", str(tmp_path))["data"]
    assert (found["epsilon"], len(found["runs"])) == (None, 2)
    result.save(tmp_path / "saved")
    assert answer("ledger", str(tmp_path))["exact_on_unknown_data"] == [str(tmp_path / "saved")]


@pytest.mark.filterwarnings("ignore::equipoise.errors.EquipoiseNotice")
@pytest.mark.parametrize("personal", ["Ditto", "Finetuning", "Local"])
def test_runs_with_personal_models_are_listed_with_the_others_on_their_data(tmp_path, monkeypatch, personal):
    """Also where nothing has imported the classes of their states, as in a command of its own."""
    data = eq.data.label_shift(train_clients=8, validation_clients=2, test_clients=2, seed=0)
    model = eq.models.Softmax(data.features, data.classes)
    chosen = {"Ditto": eq.personal.Ditto(strength=0.5), "Finetuning": eq.personal.Finetuning(), "Local": eq.personal.Local()}
    for name, algorithm in (("plain", eq.Algorithm()), ("own", eq.Algorithm(personal=chosen[personal]))):
        state = tmp_path / name / "checkpoint" / "state.safetensors"
        eq.train(model, data, algorithm, checkpoint=state, rounds=2, clients_per_round=4, progress=False)
        (tmp_path / name / "config.toml").write_text('[algorithm]\nprivacy = "none"\n')
    monkeypatch.delitem(sys.modules, "equipoise.personal.personal_run")
    found = answer("ledger", str(tmp_path))
    assert found["exact_on_unknown_data"] == []
    assert {run["folder"]: run["rounds"] for run in found["data"][0]["runs"]} == {"own": 2, "plain": 2}
    shown = call("ledger", str(tmp_path)).stdout
    assert "outside ε: of a run without ε, its exact releases: of secure sums each sum, else the model of each round." in shown
    assert "exact means of evaluations" not in shown


def test_the_ledger_counts_an_evaluation_as_no_round():
    """Four rounds by secure sums and an evaluation after the last were listed as five rounds."""
    sums = [LedgerEntry("exact", "d", "r", number, "update") for number in range(4)]
    (found,) = summarise_ledgers([*sums, LedgerEntry("exact", "d", "r", 4, "scores test")])
    assert [(run.rounds, run.exact, run.epsilon) for run in found.runs] == [(4, 5, None)]


def test_the_server_has_no_epsilon_where_clients_are_evaluated_exactly(tmp_path):
    """Before, the ledger and the card gave the noisy sums' ε for the server, and the table of observers "none"."""
    data = eq.data.label_shift(train_clients=20, validation_clients=2, test_clients=2, seed=0)
    model = eq.models.Softmax(data.features, data.classes)
    privacy = eq.privacy.DifferentialPrivacy(None, 1e-2, clip=1.0, noise_multiplier=8.0, noise="distributed", method="rdp")
    options = {"rounds": 1, "clients_per_round": 10, "seed": 0, "progress": False}
    result = eq.train(model, data, eq.Algorithm(privacy=privacy), ledger=tmp_path / "ledger.jsonl", **options)
    assert result.privacy["server"].epsilon is None
    assert "For the server of the run: ε = none; clients that train are evaluated exactly" in privacy_words(result)
    noisy = LedgerEntry("release", "d", "r", 0, "update", 1.0, 1.0, ("everyone",), 1e-3, shares=3)
    cohort = LedgerEntry("cohort", "d", "r", 0, cohort=("a", "b", "c"))
    (alone,) = summarise_ledgers([cohort, noisy])
    assert alone.runs[0].epsilon_server > 0
    (evaluated,) = summarise_ledgers([cohort, noisy, LedgerEntry("exact", "d", "r", 1, "scores test")])
    assert evaluated.runs[0].epsilon_server is None
    assert evaluated.runs[0].epsilon == alone.runs[0].epsilon
    assert "none, because it sees exact evaluations" in str(evaluated)


def test_the_ledger_of_a_node_needs_no_delta(tmp_path):
    """Before: "delta must lie in (0, 1), but is 0.0"; and the data had an empty name."""
    node = NodeLedger(tmp_path, "clinic a")
    node.begin("f00d", 0, "update", 2.0)
    node.begin_evaluation("f00d", "metrics", "hash", 3)
    shown, values = call("ledger", str(tmp_path)).stdout, answer("ledger", str(tmp_path))
    assert "Data of a node: 1 run, ε in all = " in shown
    assert 'names that the server\'s federation.json gives them ("run")' in shown
    assert "ε is stated at 1e-05" in shown
    assert values["data"][0]["epsilon"] == pytest.approx(gaussian_epsilon(2.0, 1e-5))
