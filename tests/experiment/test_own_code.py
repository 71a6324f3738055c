"""Code of the user's own in configurations: what runs, what is checked before, and what never runs."""

import hashlib
import os
import py_compile
import sys
import tomllib

import pytest
from safetensors.torch import load_file
from typer.testing import CliRunner

from equipoise.cli.commands import app
from equipoise.errors import ConfigError
from equipoise.experiment import folder, trusted_code
from equipoise.experiment.build import build
from equipoise.experiment.config import RunConfig
from equipoise.experiment.own_code import OwnCode

PARTS = '''
"""My parts."""
import torch
from torch import nn
import equipoise as eq
from my_helper import WIDTH

class MyNet(nn.Module):
    def __init__(self, features: int, classes, width: int = WIDTH, act=torch.relu):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(features, width), nn.ReLU(), nn.Linear(width, classes))

    def forward(self, x):
        return self.layers(x)

def load(clients: int = 6, *, seed=0):
    return eq.data.label_shift(train_clients=clients, validation_clients=2, test_clients=2, examples=10, seed=seed)

class MyRisk(eq.risk.Mean):
    pass

NUMBER = 3
def broken(): raise KeyError("colour")
def wrong(): return 7
def needs(tensor: torch.Tensor): return tensor
def focal(outputs, targets):
    loss = nn.functional.cross_entropy(outputs, targets, reduction="none")
    return (1 - torch.exp(-loss)) * loss
def sure(outputs, targets):
    return outputs.softmax(1).amax(1).mean()
'''
CONFIG = """
[data]
name = "my_parts:load"
clients = 5
[model]
name = "my_parts:MyNet"
width = 4
[train]
rounds = 2
clients_per_round = 3
threads = 1
engine = "loop"
"""


@pytest.fixture(autouse=True)
def own_list(tmp_path, monkeypatch):
    """An empty list of trusted code, and modules that are forgotten afterwards."""
    monkeypatch.setenv("EQUIPOISE_CONFIG", str(tmp_path / "settings"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    modules = set(sys.modules)
    yield
    for name in set(sys.modules) - modules:
        if name.partition(".")[0] in ("my_parts", "my_helper", "pkg", "evil", "trick"):
            del sys.modules[name]


@pytest.fixture
def project(tmp_path):
    """A folder with a configuration and code beside it; nothing else finds that code."""
    place = tmp_path / "project"
    place.mkdir()
    (place / "my_parts.py").write_text(PARTS)
    (place / "my_helper.py").write_text("WIDTH = 3\n")
    (place / "run.toml").write_text(CONFIG)
    return place


def command(*arguments):
    return CliRunner().invoke(app, list(map(str, arguments)))


def digest(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def refusal(text, project, **options):
    (project / "wrong.toml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        build(RunConfig.read(project / "wrong.toml", code="run", **options))
    return str(caught.value)


# --------------------------------------------------------------------------------------------------------------- what runs


def test_a_run_of_own_code_leaves_a_complete_folder_and_resumes_from_anywhere(project, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    first = command("run", project / "run.toml", "--out", tmp_path / "a")
    assert first.exit_code == 0, first.output
    table = tomllib.loads((tmp_path / "a" / "config.toml").read_text())
    assert table["data"] == {"name": "my_parts:load", "clients": 5, "seed": 0}
    assert table["model"] == {"name": "my_parts:MyNet", "features": 20, "classes": 10, "width": 4}
    parts = {"file": str(project / "my_parts.py"), "sha256": digest(project / "my_parts.py")}
    assert table["code"] == {"my_parts:load": parts, "my_parts:MyNet": parts}
    # The same from the folder of the run, elsewhere: the user has run this code, so that it is trusted.
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "config.toml").write_bytes((tmp_path / "a" / "config.toml").read_bytes())
    monkeypatch.chdir(tmp_path / "settings")
    again = command("run", "--resume", tmp_path / "b")
    assert again.exit_code == 0, again.output
    models = [load_file(tmp_path / name / "model.safetensors") for name in "ab"]
    assert all(models[0][name].equal(models[1][name]) for name in models[0])  # torch's global state is seeded
    assert command("report", tmp_path / "a", tmp_path / "b", "--out", tmp_path / "r.html").exit_code == 0
    assert "layers.0.weight" in models[0]


OWN_FUNCTIONS = CONFIG + 'loss = "my_parts:focal"\nmetrics = ["macro_f1", "my_parts:sure"]\n'


def test_a_loss_and_a_metric_of_ones_own_are_named_by_import_path(project, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    plain, own = (tmp_path / name for name in ("plain", "own"))
    (project / "config.toml").write_text(OWN_FUNCTIONS)
    done = command("run", project / "config.toml", "--out", own)
    assert done.exit_code == 0, done.output
    code = tomllib.loads((own / "config.toml").read_text())["code"]
    assert {"my_parts:focal", "my_parts:sure"} <= set(code)
    assert {"macro_f1", "sure"} <= set(folder.read_record(own).clients.metrics)
    (project / "config.toml").write_text(CONFIG)
    command("run", project / "config.toml", "--out", plain)
    trained, usual = (load_file(place / "model.safetensors") for place in (own, plain))
    assert any(not value.equal(usual[name]) for name, value in trained.items())


def test_wrong_losses_and_metrics_are_refused(project):
    for old, new, words in (
        ("my_parts:focal", "focal", 'train.loss must be an import path, "module:name"'),
        ("my_parts:focal", "my_parts:MyNet", "must be a function of (outputs, targets), but is a class"),
        (
            "my_parts:focal",
            'my_parts:focal"\nerror = "mae',
            'train.error must be an import path, "module:name", or absolute_error',
        ),
        (
            "my_parts:focal",
            'my_parts:focal"\nerror = "my_parts:MyNet',
            "must be a function of (outputs, targets), but is a class",
        ),
        ("my_parts:sure", "sure", "train.metrics must be names of macro_f1"),
        ("my_parts:sure", "my_parts:macro_f1", "train.metrics must have different names"),
    ):
        assert words in refusal(OWN_FUNCTIONS.replace(old, new), project)
    with pytest.raises(ConfigError, match=r"train.loss: my_parts:focal is code of the user's own, which is not run here"):
        RunConfig.of(
            {
                "data": "label_shift",
                "model": "softmax",
                "train": {"rounds": 1, "clients_per_round": 2, "loss": "my_parts:focal"},
            }
        )


def test_explain_runs_own_code(project, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = command("run", project / "run.toml", "--explain")
    assert found.exit_code == 0, found.output
    assert "one client after another" in found.output


def test_a_study_of_own_code_runs_in_its_workers(project, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = CONFIG + '[study]\nseeds = 1\n[methods.FedAvg]\n[methods.Mine]\nrisk = "my_parts:MyRisk"\n'
    (project / "study.toml").write_text(text)
    found = command("compare", project / "study.toml", "--out", tmp_path / "out")
    assert found.exit_code == 0, found.output
    record = folder.read_record(tmp_path / "out" / "Mine-0")
    assert "risk=my_parts:MyRisk()" in repr(record.algorithm)
    assert "Mine" in (tmp_path / "out" / "report.html").read_text()
    # Other code does not go on in the same folders, and both hashes are named.
    before = digest(project / "my_parts.py")
    (project / "my_parts.py").write_text(PARTS + "\n# changed\n")
    refused = command("compare", project / "study.toml", "--out", tmp_path / "out")
    assert refused.exit_code == 2
    assert before in refused.output
    assert digest(project / "my_parts.py") in refused.output


def test_a_search_over_own_models_can_be_given_again_from_its_folder(project, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (project / "search.toml").write_text(CONFIG + '[search]\n[search.space]\n"model.name" = ["my_parts:MyNet"]\n')
    found = command("tune", project / "search.toml", "--out", tmp_path / "out")
    assert found.exit_code == 0, found.output
    again = command("tune", tmp_path / "out" / "search.toml", "--out", tmp_path / "out")
    assert again.exit_code == 0, again.output
    best = RunConfig.read(tmp_path / "out" / "best.toml", code="run")
    assert build(best).model.layers[0].out_features == 4


def test_a_package_runs_with_every_init_on_the_way_recorded(project):
    inner = project / "pkg" / "sub"
    inner.mkdir(parents=True)
    (project / "pkg" / "__init__.py").write_text("ORDER = ['pkg']\n")
    (inner / "__init__.py").write_text("from .parts import load\n")
    (inner / "parts.py").write_text("import equipoise as eq\nload = eq.data.label_shift\n")
    text = CONFIG.replace("my_parts:load", "pkg.sub.parts:load").replace("clients = 5", "train_clients = 5", 1)
    (project / "run.toml").write_text(text)
    config = RunConfig.read(project / "run.toml", code="run")
    code = config.table()["code"]
    assert list(code) == ["pkg", "pkg.sub", "pkg.sub.parts:load", "my_parts:MyNet"]
    assert code["pkg.sub"]["file"] == str(inner / "__init__.py")
    assert code["pkg.sub"]["sha256"] == digest(inner / "__init__.py")
    assert len(build(config).data.train) == 5


# --------------------------------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("clients = 5", "client = 5", "data.client: Unknown key 'client'. Did you mean 'clients'? Allowed: clients, name, "),
        ("clients = 5", 'clients = "5"', 'data.clients must be a whole number, but is "5".'),
        ("width = 4", "act = 3", "model.act: Unknown key 'act'"),
        ("my_parts:MyNet", "my_parts:NUMBER", "must be a class or function of"),
        ("my_parts:MyNet", "my_parts:Absent", "but Absent is not there."),
        ("my_parts:MyNet", "no_such_module:Net", "there is neither"),
        ("my_parts:MyNet", "my_parts.deep:Net", "has no __init__.py"),
        ("my_parts:MyNet", "my_parts:MyNet.forward", 'must have the form "module:name"'),
        ("my_parts:MyNet", "../my_parts:MyNet", 'must have the form "module:name"'),
        ("my_parts:MyNet", "..my_parts:MyNet", 'must have the form "module:name"'),
        ("my_parts:MyNet", ":MyNet", 'must have the form "module:name"'),
        ("my_parts:MyNet", "os:system", '"os" is the name of a module of Python itself'),
        ('my_parts:load"\nclients = 5', 'my_parts:wrong"', "must return a FederatedData, but returned a int"),
        ('my_parts:MyNet"\nwidth = 4', 'my_parts:wrong"', "must make a torch.nn.Module, but made a int"),
        ('my_parts:load"\nclients = 5', 'my_parts:broken"', "data: my_parts:broken failed: KeyError: 'colour' ("),
        ('my_parts:load"\nclients = 5', 'my_parts:needs"', "needs tensor, but no value of TOML fits it"),
    ],
)  # fmt: skip
def test_wrong_names_and_parameters_are_refused(project, old, new, words):
    assert words in refusal(CONFIG.replace(old, new), project)


def test_code_that_cannot_be_imported_is_refused_with_its_line(project):
    (project / "my_parts.py").write_text("import torch\n\nraise RuntimeError('no')\n")
    assert f"RuntimeError: no ({project / 'my_parts.py'}, line 3)" in refusal(CONFIG, project)


def test_a_file_that_hides_a_module_in_use_is_refused(project):
    (project / "torch.py").write_text("def load(): pass\n")
    assert "another module 'torch' is in use" in refusal(CONFIG.replace("my_parts:load", "torch:load"), project)


# ------------------------------------------------------------------------------------------------------ folders of strangers

EVIL = 'from pathlib import Path\nPath(r"{marker}").write_text("ran")\ndef load(**_): raise SystemExit\n'


@pytest.fixture
def stranger(tmp_path):
    """A run folder from someone else; its code leaves a marker when it runs."""
    place, marker = tmp_path / "stranger", tmp_path / "marker"
    place.mkdir()
    (place / "evil.py").write_text(EVIL.format(marker=marker))

    def write(name="evil:load", code=True, file=None, sha256=None, finished=False):
        file = file or place / "evil.py"
        entry = f'[code."{name}"]\nfile = "{file}"\nsha256 = "{sha256 or digest(file)}"\n' if code else ""
        text = CONFIG.replace('"my_parts:load"\nclients = 5', f'"{name}"').replace('"my_parts:MyNet"\nwidth = 4', '"softmax"')
        (place / "config.toml").write_text(text + entry)
        (place / "study.toml").write_text(text + entry + "[study]\nseeds = 1\n")
        (place / "search.toml").write_text(text + entry + '[search.space]\n"algorithm.solver.lr" = [0.1]\n')
        if finished:
            (place / "rounds.jsonl").write_text('{"event": "end", "seconds": 1, "data": "x", "error_is_loss": false}\n')
        return place

    write.marker = marker
    return write


def attempts(place):
    """Every command that a user may give with a folder that came from elsewhere."""
    yield "run", "--resume", place
    yield "run", "--resume", place, "--explain"
    yield "report", place
    yield "data", "show", "evil:load"
    yield "run", place / "config.toml"
    yield "run", place / "config.toml", "--explain"
    yield "compare", place / "study.toml"
    yield "tune", place / "search.toml"


@pytest.mark.parametrize("finished", [False, True])
def test_code_of_a_strangers_folder_never_runs_without_trust(stranger, finished, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path / "stranger")
    place = stranger(finished=finished)
    for arguments in attempts(place):
        assert command(*arguments).exit_code == 2, arguments
    with pytest.raises(ConfigError):
        folder.read_record(place)
    assert not stranger.marker.exists()
    assert trusted_code.trusted_pairs() == set()


def test_the_refusal_names_file_hash_cure_and_what_is_not_covered(stranger):
    place = stranger()
    found = command("run", "--resume", place)
    for words in (str(place / "evil.py"), digest(place / "evil.py"), "--trust", "not covered"):
        assert words in found.output


def test_a_folder_that_records_no_code_runs_none(stranger):
    place = stranger(code=False)
    assert "the section [code] of this run has no 'evil:load'" in command("run", "--resume", place).output
    (place / "rounds.jsonl").write_text("{}\n")  # a configuration in the folder of a run is not the user's own
    assert command("run", place / "config.toml").exit_code == 2
    assert not stranger.marker.exists()


@pytest.mark.parametrize(
    "name", ["random:load", "json.decoder:load", "__main__:load", "torch:load", "numpy.evil:load", "this:load"]
)
def test_trusting_does_not_let_a_file_stand_for_a_known_module(stranger, name):
    place = stranger(name)
    assert command("run", "--resume", place, "--trust").exit_code == 2
    assert not stranger.marker.exists()


@pytest.mark.parametrize("trick", ["symlink", "dots", "relative", "device", "folder", "absent"])
def test_tricks_with_paths_run_nothing(stranger, tmp_path, trick, monkeypatch):
    place = stranger()
    monkeypatch.chdir(place)
    good = tmp_path / "good.py"
    good.write_text("def load(): pass\n")
    trusted_code.extend_list([("evil:load", digest(good))])
    link = place / "link.py"
    link.symlink_to(place / "evil.py")
    files = {
        "symlink": link, "dots": f"{tmp_path}/good/../stranger/evil.py", "relative": "evil.py", "device": "/dev/zero",
        "folder": place, "absent": place / "none.py",
    }  # fmt: skip
    for sha256 in (digest(good), digest(place / "evil.py")):  # a hash that is trusted, and the file's own
        stranger(file=files[trick], sha256=sha256)
        assert command("run", "--resume", place).exit_code == 2
    assert not stranger.marker.exists()


def test_a_package_whose_init_is_hostile_does_not_run_by_trust_in_its_module(stranger, tmp_path):
    package = tmp_path / "stranger" / "pkg"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(EVIL.format(marker=stranger.marker))
    (package / "good.py").write_text("def load(): pass\n")
    place = stranger("pkg.good:load", file=package / "good.py")
    trusted_code.extend_list([("pkg.good:load", digest(package / "good.py"))])
    assert "has no 'pkg'" in command("run", "--resume", place).output
    with (place / "config.toml").open("a") as file:
        init = package / "__init__.py"
        file.write(f'[code.pkg]\nfile = "{init}"\nsha256 = "{digest(init)}"\n')
    found = command("run", "--resume", place)
    assert found.exit_code == 2
    assert digest(init) in found.output
    assert not stranger.marker.exists()


def test_a_compiled_file_beside_trusted_code_is_not_run(project, stranger):
    """Python itself would take `__pycache__`, if time and size of the source fit."""
    evil = stranger()
    source = project / "my_parts.py"
    code = (evil / "evil.py").read_text()
    size = max(len(PARTS), len(code))
    source.write_text(code.ljust(size))
    py_compile.compile(str(source), doraise=True)
    stamp = source.stat()
    source.write_text(PARTS.ljust(size))
    os.utime(source, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    build(RunConfig.read(project / "run.toml", code="run"))
    assert not stranger.marker.exists()


def test_trust_is_for_one_import_path_and_one_content(project, stranger):
    place = stranger()
    pair = ("evil:load", digest(place / "evil.py"))
    trusted_code.extend_list([("evil:other", pair[1]), ("evil:load", "0" * 64)])
    assert command("run", "--resume", place).exit_code == 2
    assert not stranger.marker.exists()
    found = command("run", "--resume", place, "--trust")  # now it runs, and does what the user has allowed
    assert "failed: SystemExit" in found.output
    assert stranger.marker.exists()
    assert pair in trusted_code.trusted_pairs()
    (place / "evil.py").write_text("# changed\n")
    for arguments in (["--trust"], []):
        found = command("run", "--resume", place, *arguments)
        assert "has changed since the run began" in found.output
        assert pair[1] in found.output
        assert digest(place / "evil.py") in found.output


def test_a_damaged_section_of_code_is_refused(stranger):
    place = stranger(code=False)
    text = (place / "config.toml").read_text()
    for wrong in ("code = 3\n", '[code]\nevil = "x"\n', '[code.evil]\nfile = "x"\n', '[code.evil]\nfile = 3\nsha256 = "x"\n'):
        (place / "config.toml").write_text(wrong + text if wrong.startswith("code =") else text + wrong)
        assert "[code] must hold tables with file and sha256" in command("run", "--resume", place).output


# ------------------------------------------------------------------------------------------------------------- the list


def test_the_list_grows_and_is_read_back(tmp_path):
    trusted_code.extend_list([("a:b", "1"), ("a.c:d", "2")])
    trusted_code.extend_list([("a:b", "3")])
    assert trusted_code.trusted_pairs() == {("a:b", "1"), ("a:b", "3"), ("a.c:d", "2")}
    assert trusted_code.list_path() == tmp_path / "settings" / "equipoise" / "trusted.toml"


@pytest.mark.parametrize("content", [b"\xff", b"a = ", b"a = 3\n", b"a = [3]\n"])
def test_a_damaged_list_is_refused_with_its_path(project, content):
    trusted_code.list_path().parent.mkdir(parents=True)
    trusted_code.list_path().write_bytes(content)
    assert str(trusted_code.list_path()) in refusal(CONFIG, project)


def test_a_list_that_cannot_be_written_is_refused_with_the_cure(project, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("EQUIPOISE_CONFIG", str(tmp_path / "file"))
    found = command("run", project / "run.toml", "--out", tmp_path / "out")
    assert found.exit_code == 2
    assert "EQUIPOISE_CONFIG" in found.output


def test_nothing_is_found_by_importing(project, monkeypatch):
    """The files of a module are known before any of it, or of its packages, runs."""
    (project / "pkg").mkdir()
    (project / "pkg" / "__init__.py").write_text("raise SystemExit\n")
    (project / "pkg" / "parts.py").write_text("raise SystemExit\n")
    found = OwnCode(project)._find("pkg.parts:load", "pkg.parts", "data.name")
    assert [(file.key, file.module, file.path.name) for file in found] == [
        ("pkg", "pkg", "__init__.py"), ("pkg.parts:load", "pkg.parts", "parts.py"),
    ]  # fmt: skip
    assert "pkg" not in sys.modules
