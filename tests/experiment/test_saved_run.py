"""Results that were made in Python as folders of runs."""

from dataclasses import dataclass

import pytest
from safetensors.torch import load_file
from typer.testing import CliRunner

import equipoise as eq
from equipoise.cli.commands import app
from equipoise.errors import ConfigError, InvalidParameter, NotWritten
from equipoise.experiment import family_files, folder
from equipoise.experiment.config import RunConfig


@dataclass(frozen=True)
class Halved(eq.risk.Mean):
    """A risk that no catalogue has."""

    by: float = 2.0


def result(algorithm=None, **options):
    data = eq.data.label_shift(train_clients=6, validation_clients=2, test_clients=2, examples=10)
    model = eq.models.Softmax(data.features, data.classes)
    return eq.train(
        model, data, algorithm or eq.Algorithm(), rounds=3, clients_per_round=3, progress=False, engine="loop", **options
    )


def command(*arguments):
    return CliRunner().invoke(app, list(map(str, arguments)))


def test_a_saved_result_is_read_like_any_run(tmp_path):
    ours = result(eq.Algorithm(risk=eq.risk.Superquantile(tail=0.5)), name="tail", evaluate_every=1)
    place = ours.save(tmp_path / "deep" / "run")
    assert place == tmp_path / "deep" / "run"
    names = {"clients.parquet", "config.toml", "model.safetensors", "report.html", "rounds.jsonl"}
    about = {"model.json", "model.card.md", "model.card.json"}
    assert {path.name for path in place.iterdir()} == names | about
    assert [path.name for path in place.parent.iterdir()] == ["run"]
    record = folder.read_record(place)
    assert (record.name, record.seed, record.rounds, record.clients_per_round, record.data) == ("tail", 0, 3, 3, ours.data)
    assert record.algorithm == ours.algorithm
    assert [r.round for r in record.history.rounds] == [0, 1, 2]
    assert record.history.points == ours.history.points
    assert str(record.summary()) == str(ours.summary())
    saved = load_file(place / "model.safetensors")
    assert all(saved[name].equal(value) for name, value in ours.model.state_dict().items())


def test_reports_put_saved_results_beside_runs_of_configurations(tmp_path):
    result(name="python").save(tmp_path / "a")
    (tmp_path / "run.toml").write_text(
        '[train]\nrounds=3\nclients_per_round=3\nname="file"\nengine="loop"\n[model]\nname="softmax"\n'
        '[data]\nname="label_shift"\ntrain_clients=6\nvalidation_clients=2\ntest_clients=2\nexamples=10\n'
    )
    assert command("run", tmp_path / "run.toml", "--out", tmp_path / "b").exit_code == 0
    found = command("report", tmp_path / "a", tmp_path / "b", "--out", tmp_path / "page.html")
    assert found.exit_code == 0, found.output
    page = (tmp_path / "page.html").read_text()
    assert "python" in page
    assert "file" in page
    first, second = (folder.read_record(tmp_path / name) for name in "ab")
    assert first.clients.error.equal(second.clients.error)


@pytest.mark.parametrize(
    "algorithm",
    [
        eq.Algorithm(risk=Halved(by=3.0)),
        eq.Algorithm(solver=eq.solvers.AdaptiveProx(eq.solvers.SGD(lr=0.2))),
        eq.Algorithm(risk=eq.risk.Mixture((0.5, eq.risk.Mean()), (0.5, eq.risk.Superquantile(tail=0.5)))),
        eq.Algorithm(personal=eq.personal.Ditto(strength=1.0)),
    ],
    ids=["own risk", "solver in a solver", "mixture", "personal"],
)
@pytest.mark.filterwarnings("ignore::equipoise.errors.EquipoiseNotice")
def test_any_algorithm_is_recorded_and_shown(tmp_path, algorithm):
    ours = result(algorithm)
    place = ours.save(tmp_path / "run")
    record = folder.read_record(place)
    assert repr(record.algorithm) == repr(algorithm)
    assert (place / "personal.npy").exists() == (algorithm.personal is not None)
    assert command("report", place, "--out", tmp_path / "page.html").exit_code == 0
    again = folder.read_record(place)
    assert record.algorithm == again.algorithm
    record.report(tmp_path / "again.html")


def test_a_record_cannot_be_run(tmp_path):
    place = result().save(tmp_path / "run")
    with pytest.raises(ConfigError, match=r"result\.save wrote this file: a record, which cannot be run"):
        RunConfig.read(place / "config.toml")
    assert "has ended" in command("run", "--resume", place).output


def test_a_taken_folder_is_refused_and_left_alone(tmp_path):
    ours = result()
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "mine.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")
    for name in ("taken", "file"):
        with pytest.raises(InvalidParameter, match="must be a new or empty folder"):
            ours.save(tmp_path / name)
    (tmp_path / "empty").mkdir()
    ours.save(tmp_path / "empty")
    with pytest.raises(InvalidParameter, match="never overwrites"):
        ours.save(tmp_path / "empty")
    with pytest.raises(NotWritten, match="could not be written"):
        ours.save(tmp_path / "file" / "run")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "file", "taken"]


def test_a_folder_is_whole_or_absent(tmp_path, monkeypatch):
    def fail(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(family_files, "model_bytes", fail)
    with pytest.raises(NotWritten, match="No space left on device"):
        result().save(tmp_path / "run")
    assert list(tmp_path.iterdir()) == []


def test_a_saved_comparison_is_read_like_a_study(tmp_path):
    data = eq.data.label_shift(train_clients=6, validation_clients=2, test_clients=4, examples=10)
    tail = eq.Algorithm(risk=eq.risk.Superquantile(tail=0.5))
    methods = {"Δ-FL 0.5": tail, "a b": eq.Algorithm(), "A-b": eq.Algorithm(aggregator=eq.aggregators.Median())}
    made = eq.compare(
        methods, eq.models.Softmax(data.features, data.classes), data, rounds=2, clients_per_round=3, seeds=2, engine="loop"
    )
    place = made.save(tmp_path / "study")
    runs = ["Δ-FL-0.5-0", "Δ-FL-0.5-1", "a-b-0", "a-b-1", "A-b-method2-0", "A-b-method2-1"]
    assert sorted(path.name for path in place.iterdir()) == sorted([*runs, "order.txt", "report.html"])
    assert (place / "order.txt").read_text(encoding="utf-8").split() == runs
    records = [folder.read_record(path) for path in folder.finished_runs([place])]
    assert [(record.name, record.seed) for record in records] == [(name, seed) for name in methods for seed in (0, 1)]
    assert [str(record.summary()) for record in records] == [str(run.summary()) for run in made.all_results]
    assert command("report", place, "--out", tmp_path / "page.html", "--table", tmp_path / "t.md").exit_code == 0
    assert (tmp_path / "t.md").read_text(encoding="utf-8").strip() == made.to_markdown(percent=True)
    with pytest.raises(InvalidParameter, match="must be a new or empty folder"):
        made.save(place)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
