"""Code of the user's own in configurations: what runs, what is checked before, and what never runs."""

import hashlib
import importlib.machinery
import json
import os
import py_compile
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from safetensors.torch import load_file
from typer.testing import CliRunner

from equipoise.cli.commands import app
from equipoise.errors import ConfigError
from equipoise.experiment import catalog, folder, own_code, trusted_code
from equipoise.experiment.build import build
from equipoise.experiment.config import RunConfig
from equipoise.experiment.trusted_code import CodeFolder

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
        if name.partition(".")[0] in (
            "my_parts",
            "my_helper",
            "my_gadgets",
            "pkg",
            "evil",
            "small_parts",
            "linked",
            "late",
            "loose",
        ):
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


def recorded(place, *names):
    """The section [code] of a run with code in a folder: every file that its modules may import, with its hash."""
    return {str(place): {name: digest(place / name) for name in names}}


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
    assert table["code"] == recorded(project, "my_helper.py", "my_parts.py")
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
    assert code == recorded(project, "my_helper.py", "my_parts.py")
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
            'train.error must be an import path, "module:name", or one of absolute_error',
        ),
        (
            "my_parts:focal",
            'my_parts:focal"\nerror = "my_parts:MyNet',
            "must be a function of (outputs, targets), but is a class",
        ),
        ("my_parts:sure", "sure", 'train.metrics must be an import path, "module:name", or one of macro_f1'),
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


def test_a_search_over_own_models_leaves_the_best_as_a_configuration(project, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (project / "search.toml").write_text(CONFIG + '[search]\n[search.space]\n"model.name" = ["my_parts:MyNet"]\n')
    found = command("tune", project / "search.toml", "--out", tmp_path / "out")
    assert found.exit_code == 0, found.output
    best = RunConfig.read(tmp_path / "out" / "best.toml", code="run")
    assert build(best).model.layers[0].out_features == 4


def test_a_package_runs_with_all_its_files_recorded(project):
    inner = project / "pkg" / "sub"
    inner.mkdir(parents=True)
    (project / "pkg" / "__init__.py").write_text("ORDER = ['pkg']\n")
    (inner / "__init__.py").write_text("from .parts import load\n")
    (inner / "parts.py").write_text("import equipoise as eq\nload = eq.data.label_shift\n")
    text = CONFIG.replace("my_parts:load", "pkg.sub.parts:load").replace("clients = 5", "train_clients = 5", 1)
    (project / "run.toml").write_text(text)
    config = RunConfig.read(project / "run.toml", code="run")
    code = config.table()["code"]
    files = "my_helper.py", "my_parts.py", "pkg/__init__.py", "pkg/sub/__init__.py", "pkg/sub/parts.py"
    assert code == recorded(project, *files)
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
        ("my_parts:MyNet", "no_such_module:Net", "there is no no_such_module.py in"),
        ("my_parts:MyNet", "my_parts.deep:Net", "there is no my_parts/deep.py in"),
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

    def write(name="evil:load", code=True, folder=place, finished=False, **hashes):
        """The files of the run, with a section [code] for all code of `folder`, with other `hashes` of some modules."""
        files = {} if not code else CodeFolder.read(Path(folder)).hashes | {f"{each}.py": h for each, h in hashes.items()}
        entry = f'[code."{folder}"]\n' + "".join(f'"{each}" = "{sha256}"\n' for each, sha256 in files.items()) if code else ""
        text = CONFIG.replace('"my_parts:load"\nclients = 5', f'"{name}"').replace('"my_parts:MyNet"\nwidth = 4', '"softmax"')
        (place / "config.toml").write_text(text + entry)
        (place / "study.toml").write_text(text + entry + "[study]\nseeds = 1\n")
        (place / "search.toml").write_text(text + entry + '[search.space]\n"algorithm.solver.lr" = [0.1]\n')
        if finished:
            (place / "rounds.jsonl").write_text('{"event": "end", "seconds": 1, "data": "x", "error_is_loss": false}\n')
        return place

    write.marker, write.place = marker, place
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
    yield "export", place
    yield "predict", place, place / "config.toml"


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


def test_the_refusal_names_every_file_with_its_hash_and_the_cure(stranger):
    place = stranger.place
    (place / "pkg").mkdir()
    (place / "pkg" / "__init__.py").write_text("")
    found = command("run", "--resume", stranger())
    for file in (place / "evil.py", place / "pkg" / "__init__.py"):
        assert str(file) in found.output
        assert digest(file) in found.output
    assert "--trust" in found.output


def test_a_folder_that_records_no_code_runs_none(stranger):
    place = stranger(code=False)
    assert "the section [code] of this run has no file of 'evil'" in command("run", "--resume", place).output
    (place / "rounds.jsonl").write_text("{}\n")  # a configuration in the folder of a run is not the user's own
    assert command("run", place / "config.toml").exit_code == 2
    assert not stranger.marker.exists()


@pytest.mark.parametrize(
    "name", ["random:load", "json.decoder:load", "__main__:load", "torch:load", "numpy.evil:load", "this:load", "onnx:load"]
)
def test_trusting_does_not_let_a_file_stand_for_a_known_module(stranger, name):
    module = name.partition(":")[0].partition(".")[0]
    (stranger.place / f"{module}.py").write_text((stranger.place / "evil.py").read_text())
    place = stranger(name)
    assert command("run", "--resume", place, "--trust").exit_code == 2
    assert not stranger.marker.exists()


@pytest.mark.parametrize("trick", ["symlink", "dots", "relative", "device", "file", "absent"])
def test_tricks_with_paths_run_nothing(stranger, project, tmp_path, trick, monkeypatch):
    place = stranger.place
    monkeypatch.chdir(place)
    (project / "evil.py").write_text("def load(): pass\n")
    trusted_code.extend_list(CodeFolder.read(project).pair)
    link = tmp_path / "link"
    link.symlink_to(place)
    folders = {
        "symlink": link, "dots": f"{project}/../stranger", "relative": "../stranger", "device": "/dev",
        "file": place / "evil.py", "absent": place / "none",
    }  # fmt: skip
    for hashes in (CodeFolder.read(project).hashes, CodeFolder.read(place).hashes):  # those that are trusted, and its own
        stranger(code=False)
        with (place / "config.toml").open("a") as file:
            file.write(f'[code."{folders[trick]}"]\n' + "".join(f'"{name}" = "{h}"\n' for name, h in hashes.items()))
        assert command("run", "--resume", place).exit_code == 2
    assert not stranger.marker.exists()


HOSTILE = "from pathlib import Path\nPath(r'{marker}').write_text('ran')\nWIDTH = 3\n"


def library_of(text, folder):
    """A C library with this Python code in its initialisation, as a module `my_helper`; None without a compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        return None
    name = f"my_helper{importlib.machinery.EXTENSION_SUFFIXES[0]}"
    source = folder / "source.c"
    source.write_text(
        "#include <stdlib.h>\nextern int PyRun_SimpleStringFlags(const char *, void *);\n"
        f"void *PyInit_my_helper(void) {{ PyRun_SimpleStringFlags({json.dumps(text)}, 0); return 0; }}\n"
    )
    subprocess.run([compiler, "-shared", "-fPIC", "-o", folder / name, source], check=True)
    source.unlink()
    return folder / name


@pytest.mark.parametrize(
    "what", ["elsewhere", "changed", "added", "package", "compiled", "stale", "extension", "pth", "stdlib"]
)
def test_trust_covers_what_a_trusted_module_imports_from_its_folder(project, stranger, tmp_path, monkeypatch, what):
    """A trusted module beside something hostile, in another folder or afterwards in its own, runs nothing of that."""
    monkeypatch.chdir(tmp_path)
    assert command("run", project / "run.toml", "--out", tmp_path / "run").exit_code == 0  # trusted from now on
    for name in ("my_parts", "my_helper"):
        sys.modules.pop(name)
    shutil.rmtree(tmp_path / "run" / "checkpoint")
    for name in ("rounds.jsonl", "model.safetensors"):
        (tmp_path / "run" / name).unlink()
    hostile, refused = HOSTILE.format(marker=stranger.marker), what in ("elsewhere", "changed", "added", "package", "stdlib")
    if what == "elsewhere":  # a byte-identical copy of the module beside another helper
        other = tmp_path / "other"
        shutil.copytree(project, other)
        (other / "my_helper.py").write_text(hostile)
        text = (tmp_path / "run" / "config.toml").read_text().replace(str(project), str(other))
        text = text.replace(digest(project / "my_helper.py"), digest(other / "my_helper.py"))
        (tmp_path / "run" / "config.toml").write_text(text)
    elif what == "changed":
        (project / "my_helper.py").write_text(hostile)
    elif what == "added":
        (project / "other.py").write_text(hostile)
    elif what == "package":  # Python takes a package before a file of its name
        (project / "my_helper").mkdir()
        (project / "my_helper" / "__init__.py").write_text(hostile)
    elif what == "stdlib":  # a module that the code may import later
        (project / "colorsys.py").write_text(hostile)
    elif what == "compiled":  # where there is no source, Python takes such a file beside it
        (project / "source.py").write_text(hostile)
        py_compile.compile(str(project / "source.py"), cfile=str(project / "unknown.pyc"), doraise=True)
        (project / "source.py").unlink()
        (project / "my_helper.py").rename(project / "kept")
        py_compile.compile(str(project / "kept"), cfile=str(project / "my_helper.pyc"), doraise=True)
        (project / "kept").rename(project / "my_helper.py")
    elif what == "stale":  # Python would take it, if time and size of the source fit
        source = project / "my_helper.py"
        good, stamp = source.read_text(), source.stat()
        source.write_text(hostile)
        os.utime(source, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
        made = Path(py_compile.compile(str(source), doraise=True))
        source.write_text(good)
        os.utime(source, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
        made.write_bytes(made.read_bytes()[:12] + len(good).to_bytes(4, "little") + made.read_bytes()[16:])
    elif what == "extension" and library_of(hostile, project) is None:
        pytest.skip("there is no compiler")
    elif what == "pth":
        (project / "evil.pth").write_text(f"import sys; exec({hostile!r})\n")
    found = command("run", "--resume", tmp_path / "run")
    assert found.exit_code == (2 if refused else 0), found.output
    assert not stranger.marker.exists()


LATER = """
import importlib, pathlib
here = pathlib.Path(__file__).parent
(here / "late").mkdir(exist_ok=True)
for file in ("late/inner.py", "late/__init__.py", "later.py"):
    (here / file).write_text({hostile!r})
importlib.invalidate_caches()
WIDTH, refused = 3, []
for name in {names!r}:
    try:
        importlib.import_module(name)
    except ImportError:
        refused.append(name)
"""
NAMES = [
    "compiled", "pkg.compiled", "extended", "pkg.extended", "loose", "loose.inner", "pkg.loose.inner", "linked",
    "late", "late.inner", "later", "absent",
]  # fmt: skip


@pytest.mark.parametrize("way", ["nowhere", "here", "path", "link", "package"])
def test_only_checked_sources_of_the_folder_are_imported_from_it(project, stranger, tmp_path, monkeypatch, way):
    """Whatever finds it there: no compiled file, extension, link or later file, nor one in a folder that is no package."""
    hostile, link, pkg = HOSTILE.format(marker=stranger.marker), tmp_path / "link", project / "pkg"
    link.symlink_to(project)
    (pkg / "loose").mkdir(parents=True)
    (pkg / "__init__.py").write_text("")
    (project / "loose").mkdir()
    (tmp_path / "elsewhere.py").write_text(hostile)
    (project / "loose" / "inner.py").write_text(hostile)
    (pkg / "loose" / "inner.py").write_text(hostile)
    py_compile.compile(str(tmp_path / "elsewhere.py"), cfile=str(project / "compiled.pyc"), doraise=True)
    shutil.copy(project / "compiled.pyc", pkg / "compiled.pyc")
    for place in (project, pkg):
        (place / f"extended{importlib.machinery.EXTENSION_SUFFIXES[0]}").write_bytes(b"")
    (project / "linked").symlink_to(tmp_path)
    (project / "my_helper.py").write_text(LATER.format(hostile=hostile, names=[*NAMES, "linked.elsewhere"]))
    if way == "here":
        monkeypatch.chdir(project)
    known = {"here": "", "path": project, "link": link, "package": link / "pkg"}
    if way in known:
        sys.path.insert(0, str(known[way]))
    build(RunConfig.read(project / "run.toml", code="run"))
    assert sys.modules["my_helper"].refused == [*NAMES, "linked.elsewhere"]
    assert not stranger.marker.exists()


@pytest.mark.parametrize("place", ["project/env/lib", "env/lib"])
def test_packages_installed_inside_of_the_folder_are_not_part_of_it(project, tmp_path, monkeypatch, place):
    inner = tmp_path / place / "my_gadgets"
    inner.mkdir(parents=True)
    (inner / "__init__.py").write_text("")
    (inner / "more.py").write_text("WIDTH = 3\n")
    (project / "my_helper.py").write_text("from my_gadgets.more import WIDTH\n")
    monkeypatch.syspath_prepend(inner.parent)
    monkeypatch.setattr(own_code, "_installed", lambda: frozenset([inner.parent]))
    assert build(RunConfig.read(project / "run.toml", code="run"))


@pytest.mark.parametrize("name", ["colorsys", "onnx"])
def test_no_file_of_the_folder_hides_a_module_from_elsewhere(project, stranger, name):
    (project / f"{name}.py").write_text(HOSTILE.format(marker=stranger.marker))
    (project / "my_helper.py").write_text(f"import {name}\nWIDTH = 3\n")
    build(RunConfig.read(project / "run.toml", code="run"))
    assert not stranger.marker.exists()


@pytest.mark.parametrize("folder", ["/a\0b", "/" + "a" * 5000, "{loop}", "/proc/self/mem", "/dev/null/x"])
def test_a_folder_of_code_that_is_none_is_refused(stranger, tmp_path, folder):
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    place = stranger(code=False)
    with (place / "config.toml").open("a") as file:
        file.write(f"[code.{json.dumps(folder.format(loop=tmp_path / 'loop'))}]\n'evil.py' = '00'\n")
    with pytest.raises(ConfigError):
        RunConfig.read(place / "config.toml", code="run")
    assert command("run", "--resume", place).exit_code == 2


def test_trust_is_for_one_folder_and_one_content(project, stranger):
    place = stranger()
    code = CodeFolder.read(place)
    trusted_code.extend_list((str(project), code.pair[1]))
    trusted_code.extend_list((str(place), "0" * 64))
    assert command("run", "--resume", place).exit_code == 2
    assert not stranger.marker.exists()
    found = command("run", "--resume", place, "--trust")  # now it runs, and does what the user has allowed
    assert "failed: SystemExit" in found.output
    assert stranger.marker.exists()
    assert code.pair in trusted_code.trusted_pairs()
    (place / "evil.py").write_text("# changed\n")
    for arguments in (["--trust"], []):
        found = command("run", "--resume", place, *arguments)
        assert "has changed since the run began" in found.output
        assert code.hashes["evil.py"] in found.output
        assert digest(place / "evil.py") in found.output


def test_a_link_to_a_trusted_folder_is_that_folder(project, stranger, tmp_path):
    (project / "evil.py").write_text("def load(): raise KeyError('trusted')\n")
    trusted_code.extend_list(CodeFolder.read(project).pair)
    link = tmp_path / "link"
    link.symlink_to(project)
    assert "trusted" in command("run", "--resume", stranger(folder=link)).output
    link.unlink()
    link.symlink_to(stranger.place)
    assert command("run", "--resume", stranger.place).exit_code == 2
    assert not stranger.marker.exists()


# ------------------------------------------------------------------------------------------------- what an import path may name


def install(folder, monkeypatch, *entries):
    """A small package `small_parts`, installed, that registers these entry points."""
    (folder / "small_parts").mkdir(parents=True)
    code = "import equipoise as eq\nfrom numpy import load\ndef few(clients: int = 6, *, seed=0):\n"
    code += (
        "    return eq.data.label_shift(train_clients=clients, validation_clients=2, test_clients=2, examples=10, seed=seed)\n"
    )
    code += "def focal(outputs, targets):\n    import torch\n"
    code += "    return torch.nn.functional.cross_entropy(outputs, targets, reduction='none')\n"
    (folder / "small_parts" / "__init__.py").write_text(code)
    about = folder / "small_parts-1.5.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: small-parts\nVersion: 1.5\n")
    (about / "entry_points.txt").write_text("\n".join(["[equipoise.parts]", *entries]) + "\n")
    monkeypatch.syspath_prepend(folder)


INSTALLED = CONFIG.replace("my_parts:load", "small_parts:few").replace('"my_parts:MyNet"\nwidth = 4', '"softmax"')


def test_an_installed_package_registers_its_parts_by_entry_points(tmp_path, monkeypatch):
    install(tmp_path / "site", monkeypatch, "few = small_parts:few", "focal = small_parts:focal")
    (tmp_path / "run.toml").write_text(INSTALLED + 'loss = "small_parts:focal"\n')
    found = command("run", tmp_path / "run.toml", "--out", tmp_path / "out")
    assert found.exit_code == 0, found.output
    code = tomllib.loads((tmp_path / "out" / "config.toml").read_text())["code"]
    assert code == {"small_parts:few": "small-parts 1.5", "small_parts:focal": "small-parts 1.5"}
    assert trusted_code.trusted_pairs() == set()  # whoever installs a package lets it run
    assert command("report", tmp_path / "out", "--out", tmp_path / "r.html").exit_code == 0  # which runs none of it
    (tmp_path / "again").mkdir()
    (tmp_path / "again" / "config.toml").write_bytes((tmp_path / "out" / "config.toml").read_bytes())
    assert command("run", "--resume", tmp_path / "again").exit_code == 0


@pytest.mark.parametrize("entry", ["", "other = small_parts:focal", "few = small_parts", "few = small_parts:load"])
def test_what_an_installed_package_has_not_registered_cannot_be_named(tmp_path, monkeypatch, entry):
    install(tmp_path / "site", monkeypatch, entry)
    assert "no installed package has registered it" in refusal(INSTALLED, tmp_path)


KEYS = {  # every key of a configuration that may be an import path
    "data": ('name = "my_parts:load"', 'name = "{}"'),
    "model": ('name = "my_parts:MyNet"', 'name = "{}"'),
    "loss": ('engine = "loop"', 'engine = "loop"\nloss = "{}"'),
    "error": ('engine = "loop"', 'engine = "loop"\nerror = "{}"'),
    "metrics": ('engine = "loop"', 'engine = "loop"\nmetrics = ["{}"]'),
    "attack": ("[train]", '[attack]\nname = "{}"\n[train]'),
    "term": ("[train]", '[algorithm.risk]\nname = "mixture"\nterms = [{{coefficient = 1.0, name = "{}"}}]\n[train]'),
    "inner": ("[train]", '[algorithm.aggregator]\nname = "bucketing"\naggregator = "{}"\n[train]'),
} | {
    part: ("[train]", f'[algorithm.{part}]\nname = "{{}}"\n[train]')
    for part in (*catalog.ALGORITHM_PARTS, *catalog.OPTIONAL_PARTS)
}  # fmt: skip
GADGETS = (
    "numpy:load",
    "torch:load",
    "pandas:read_pickle",
    "torch.hub:load",
    "my_gadgets:load",
    "my_gadgets:run",
    "equipoise.cli:main",
)


@pytest.mark.parametrize("key", KEYS)
def test_an_import_path_names_only_the_users_own_or_what_is_registered(project, stranger, monkeypatch, key):
    """A module of the user's own does not lend its imports either: numpy.load reads pickles, and others write files."""
    (project / "my_gadgets.py").write_text("from numpy import load\nfrom os import system as run\n")
    install(project / "site", monkeypatch, "few = small_parts:few")
    old, new = KEYS[key]
    for gadget in (*GADGETS, "small_parts:load"):
        words = refusal(CONFIG.replace(old, new.format(gadget), 1), project)
        assert "no installed package has registered it" in words or "but is one of" in words, gadget


def test_a_damaged_section_of_code_is_refused(stranger):
    place = stranger(code=False)
    text = (place / "config.toml").read_text()
    for wrong in ("code = 3\n", "[code]\nevil = 3\n", '[code."/evil"]\n"evil.py" = 3\n', '[code.evil]\n"evil.py" = "0"\n'):
        (place / "config.toml").write_text(wrong + text if wrong.startswith("code =") else text + wrong)
        assert "[code] must " in command("run", "--resume", place).output


# ------------------------------------------------------------------------------------------------------------- the list


def test_the_list_grows_and_is_read_back(tmp_path):
    pairs = {("/a", "1"), ("/b/c", "2"), ("/a", "3")}
    for pair in sorted(pairs):
        trusted_code.extend_list(pair)
    assert trusted_code.trusted_pairs() == pairs
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


def test_nothing_is_found_by_importing(project):
    """All files of a folder are known before any of them runs."""
    (project / "pkg").mkdir()
    (project / "pkg" / "__init__.py").write_text("raise SystemExit\n")
    (project / "pkg" / "parts.py").write_text("raise SystemExit\n")
    assert {"pkg", "pkg.parts", "my_parts", "my_helper"} == set(CodeFolder.read(project).modules)
    assert "pkg" not in sys.modules
