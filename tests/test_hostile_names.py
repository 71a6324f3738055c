"""Names that data, files and other machines give: none moves a cursor, sets a colour, begins a line or hides its letters.

Every command is run on data, configurations, folders and servers with such names, with a terminal as its output.
"""

import csv
import json
import logging
import os
import pty
import re
import shutil
import subprocess
import sys
import unicodedata
import warnings
from pathlib import Path

import pytest
import torch

import equipoise as eq
from equipoise.cli import commands
from equipoise.core.screen import Screen
from equipoise.core.words import cells, clean_record, printable, table_lines
from equipoise.errors import EquipoiseError, InvalidData
from equipoise.serve.choose import FamilyClient

with warnings.catch_warnings():  # typer 0.20 imports names that click 8.5 deprecates; only that import is excused
    warnings.filterwarnings("ignore", message="'click", category=DeprecationWarning)
    from typer.testing import CliRunner

    from equipoise.cli.commands import app

EVIL = "\x1b[2J\x1b]0;owned\x07\x1b[38;5;201m\x9b31m\x7f\u202eevil\u2066\u2028\u2029\x85\r[red]x[link=http://z]y"
LINE = "a\nFORGED: all is well"
NAMES = [f"{k} {EVIL}" for k in range(6)] + [f"{k} {LINE}" for k in range(3)] + ["東京病院", "ne\u0301e", "x" * 3000]
IN_A_FOLDER = EVIL.replace("/", "∕")
RICH = re.compile(r"\x1b\[(?:[0-9;]*m|\?25[lh]|[0-9]*[AK])")  # what the library itself sends to a terminal


def assert_clean(text):
    assert "38;5;201" not in "".join(RICH.findall(text))
    hidden = {letter for letter in RICH.sub("", text.replace("\r\x1b", "\x1b")) if unicodedata.category(letter)[0] in "CZ"}
    assert hidden <= set("\n \xa0"), hidden
    assert not [line for line in text.splitlines() if line.startswith("FORGED")]


def write_table(path):
    rows = [[name, f"{(7 * k + i) % 10}", f"{(3 * k + 5 * i) % 10}", ("ok" + EVIL, LINE)[(k + i) % 2]]
            for i, name in enumerate(NAMES) for k in range(20)]  # fmt: skip
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([["site", f"age {EVIL}", LINE, "y"], *rows])


CONFIG = f"""
[data]
name = "csv"
path = "d.csv"
client = "site"
target = "y"
split_by = "examples"
[model]
name = "tabular"
[train]
name = {json.dumps(EVIL + LINE)}
rounds = 2
clients_per_round = 4
"""
STUDY = f"""{CONFIG}
[study]
seeds = 1
[methods.{json.dumps(EVIL)}]
[methods.{json.dumps(LINE)}]
risk = {{name = "superquantile", tail = 0.5}}
"""
SEARCH = f"""{CONFIG}
[search]
criterion = "train_loss"
seeds = 1
[search.space]
"algorithm.solver.lr" = [0.1, 0.2]
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a table, configurations, a finished run, a store and a federation's status, all with hostile names."""
    place = tmp_path_factory.mktemp("hostile")
    write_table(place / "d.csv")
    for name, text in (("c", CONFIG), ("study", STUDY), ("search", SEARCH)):
        (place / f"{name}.toml").write_text(text, encoding="utf-8")
    now = Path.cwd()
    os.chdir(place)
    try:
        warnings.simplefilter("ignore")
        for arguments in (["run", "c.toml", "--out", f"runs/{IN_A_FOLDER}"], ["data", "convert", "d.csv", "d.store", *TABLE]):
            done = CliRunner().invoke(app, arguments)
            assert done.exit_code == 0, done.output
    finally:
        os.chdir(now)
    (place / "federated").mkdir()
    entry = {"rounds": 2, "failed": 1, "state": EVIL, "node": LINE, "fault": EVIL + LINE, "versions": {"equipoise": EVIL}}
    status = {
        "run": EVIL, "state": "finished", "round": 2, "rounds": 2, "text": LINE, "updated": "2026-01-01T00:00:00Z",
        "alerts": [{"time": LINE, "client": EVIL, "text": LINE}], "clients": dict.fromkeys(NAMES, entry), "notes": [EVIL, LINE],
        "arrivals": {"there": NAMES, "missing": NAMES, "turned_away": {LINE: EVIL}, "wanted": 3}, "protected": False,
        "evaluation": {"after_round": 2, "clients": {"test": 3}, "not_evaluated": {LINE: EVIL}},
    }  # fmt: skip
    (place / "federated" / "status.json").write_text(json.dumps(status))
    return place


TABLE = ["--client", "site", "--target", "y"]
RUN = f"runs/{IN_A_FOLDER}"
COMMANDS = {  # command → calls of it
    "run": [["c.toml", "--out", "new"], ["c.toml", "--explain"], ["--resume", RUN], [f"{EVIL}.toml"], [f"--{EVIL}"],
            ["--resume", LINE],            ["c.toml", "--set", f"{EVIL}=1"], ["c.toml", "--set", f"data.target={LINE}"]],
    "compare": [["study.toml", "--workers", "1"], [LINE]],
    "tune": [["search.toml"], [EVIL]],
    "report": [[RUN, "--table", "t.md"], [EVIL], [LINE]],
    "plan": [[LINE]],  # a plan takes half a minute and names nobody
    "watch": [["runs", "--once"], [EVIL]],
    "export": [[RUN], [LINE]],
    "predict": [[RUN, "d.csv", "--out", f"{IN_A_FOLDER}.csv"], [RUN, EVIL], [RUN, "d.csv", "--keep", LINE, "--out", "p.csv"]],
    "serve": [[IN_A_FOLDER, "--port", "0"], [LINE]],
    "choose": [["http://127.0.0.1:9", "d.csv"], [LINE, "d.csv"]],
    "data show": [["d.store"], [RUN], ["csv", "--set", "path=d.csv", "--set", "client=site", "--set", "target=y"], [EVIL],
                  ["csv", "--set", "path=d.csv", "--set", f"client={LINE}", "--set", "target=y"]],
    "data convert": [["d.csv", IN_A_FOLDER, *TABLE], ["d.csv", "s", "--client", EVIL, "--target", "y"], [LINE, "s"]],
    "data check": [["d.store"], [LINE]],
    "privacy ledger": [["runs"], [LINE]],
    "privacy observers": [[RUN], [EVIL]],
    "privacy audit": [[RUN], [LINE]],
    "flower status": [["federated"], ["federated", "--json"], [LINE]],
    "flower backup": [[RUN, f"{IN_A_FOLDER}.tar.gz"], [LINE, "b.tar.gz"]],
    "flower restore": [[EVIL, "new-folder"]],
    "flower init": [[f"{IN_A_FOLDER}-app"]],
    "flower key": [[f"{IN_A_FOLDER}.key", "--name", LINE]],
    "flower publish": [[RUN, "--out", f"{IN_A_FOLDER}-out"], [LINE]],
    "flower check": [["--kit", LINE]],
    "flower node": [["--kit", LINE]],
    "flower fetch": [[EVIL, "--kit", LINE]],
    "flower authority": [["--folder", f"{IN_A_FOLDER}-f"]],
    "flower site": [[EVIL, LINE, "--folder", "f"]],
    **{f"flower {name}": [["--folder", LINE, *more]] for name, more in
       (("nodes", []), ("register", [EVIL]), ("unregister", [EVIL]), ("superlink", []), ("run", []))},
    **{f"flower {name}": [[LINE, *more]] for name, more in
       (("pause", []), ("resume", []), ("stop", []), ("extend", ["--rounds", "9"]))},
}  # fmt: skip
NO_NAMES = {"demo", "reproduce", "methods", "data list", "privacy epsilon", "privacy noise"}  # these print the library's own


def all_commands(group, before=""):
    for command in group.registered_commands:
        yield f"{before}{command.name or command.callback.__name__.rpartition('.')[2].removeprefix('data_')}"
    for inner in group.registered_groups:
        yield from all_commands(inner.typer_instance, f"{before}{inner.name} ")


def test_every_command_is_tried():
    assert set(all_commands(app)) == COMMANDS.keys() | NO_NAMES


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_no_name_reaches_a_terminal_as_it_is(command, place, tmp_path, monkeypatch):
    shutil.copytree(place, tmp_path / "here")
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(os.path.abspath, [Path(eq.__file__).parents[1]])))
    monkeypatch.setattr("uvicorn.Server.run", lambda _, sockets: sockets[0].close())
    families = [{"id": name, "kind": "family", "status": "finished"} for name in (EVIL, LINE)]
    monkeypatch.setattr(FamilyClient, "json", lambda *_: {"runs": families})
    (Path.cwd() / IN_A_FOLDER).mkdir()
    if command == "data convert":
        (Path.cwd() / IN_A_FOLDER).rmdir()
    for arguments in COMMANDS[command]:
        done = CliRunner().invoke(app, [*command.split(), *arguments])
        assert done.exit_code in (0, 1, 2, 3, 4), (arguments, done.exit_code)
        assert done.exception is None or isinstance(done.exception, SystemExit), (arguments, done.exception)
        assert done.output, arguments
        assert_clean(done.output)


@pytest.mark.slow
@pytest.mark.parametrize(("arguments", "words"), [
    (["run", "c.toml", "--out", "new"], "worst 10 %"), (["predict", RUN, "d.csv", "--keep", "site"], "site"),
])  # fmt: skip
def test_no_name_reaches_a_terminal_of_its_own(arguments, words, place, tmp_path):
    """With a progress bar, and with the rows that a pipe gets as they are."""
    shutil.copytree(place, tmp_path / "here")
    ours, theirs = pty.openpty()
    path = os.pathsep.join([os.path.abspath(Path(eq.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    with subprocess.Popen(
        [sys.executable, "-m", "equipoise", *arguments], cwd=tmp_path / "here",
        env=os.environ | {"PYTHONPATH": path, "TERM": "xterm"}, stdin=subprocess.DEVNULL, stdout=theirs, stderr=theirs,
    ) as process:  # fmt: skip
        os.close(theirs)
        parts = []
        while part := read_or_end(ours):
            parts.append(part)
    os.close(ours)
    assert process.returncode == 0
    text = b"".join(parts).decode().replace("\r\n", "\n")
    assert words in text
    assert_clean(text)


def test_a_pipe_gets_data_as_they_are(place, monkeypatch):
    monkeypatch.chdir(place)
    said = CliRunner().invoke(app, ["predict", RUN, "d.csv", "--keep", "site"]).stdout
    assert {row["site"] for row in csv.DictReader(said.splitlines(keepends=True))} >= {"東京病院"}
    assert NAMES[0].partition("\r")[0] in said


@pytest.mark.parametrize("failure", [ValueError(EVIL + LINE), eq.errors.ConfigError(EVIL + LINE), OSError(5, EVIL, LINE)])
def test_no_name_reaches_a_terminal_in_a_failure_that_nobody_foresaw(failure, monkeypatch, capsys):
    def fail():
        raise failure

    monkeypatch.setattr(commands, "app", fail)
    with pytest.raises(SystemExit) as end:
        commands.main()
    assert end.value.code == 1
    said = capsys.readouterr().err
    assert type(failure).__name__ in said
    assert_clean(said)


def test_no_name_reaches_a_terminal_in_the_warning_of_another_library(monkeypatch, place):
    def warn(*_, **__):
        warnings.warn(EVIL + LINE, RuntimeWarning, stacklevel=1)

    monkeypatch.setattr("equipoise.experiment.folder.finished_runs", warn)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        said = CliRunner().invoke(app, ["report", "x"]).stderr
    assert "RuntimeWarning" in said
    assert_clean(said)


def read_or_end(terminal):
    try:
        return os.read(terminal, 65536)
    except OSError:  # the other end is closed
        return b""


@pytest.fixture(scope="module")
def comparison():
    generator = torch.Generator().manual_seed(0)

    def some(rows):
        made = (torch.randn(rows, 3, generator=generator), torch.randint(0, 2, (rows,), generator=generator))
        return eq.ClientSet.pack([(name, *made) for name in NAMES])

    data = eq.FederatedData(some(9), test=some(5), name=LINE)
    data = data.with_attributes({EVIL: dict.fromkeys(NAMES, LINE) | {NAMES[0]: EVIL}})
    methods = {EVIL: eq.Algorithm(), LINE: eq.Algorithm(risk=eq.risk.Superquantile(tail=0.5)), "東京": eq.Algorithm()}
    return eq.compare(methods, eq.models.Softmax(3, 2), data, rounds=2, clients_per_round=3, seeds=3, progress=False)


def test_no_text_that_python_prints_has_names_as_they_are(comparison):
    result = comparison.results[LINE][0]
    texts = [
        result.summary(), repr(result), repr(result.clients), result.clients.worst(20), comparison.summary(), repr(comparison),
        comparison.differences(), comparison.to_markdown(), comparison.to_latex(),
    ]  # fmt: skip
    for text in texts:
        assert_clean(str(text))


def test_a_name_is_one_cell_of_a_table_in_markdown(comparison):
    lines = comparison.to_markdown().splitlines()
    rows = [line for line in lines if line.startswith("|")]
    assert len(rows) >= 5
    assert len({len(re.findall(r"(?<!\\)\|", row)) for row in rows}) == 1
    assert "[link" not in comparison.to_markdown().replace("\\[link", "")


@pytest.mark.parametrize("name", [EVIL, LINE])
def test_no_message_has_names_as_they_are(name):
    diverged = eq.errors.Diverged(0, [name], "loss")
    for failure in (InvalidData(f"client {name} has no rows."), eq.errors.ConfigError(name), diverged):
        assert isinstance(failure, EquipoiseError)
        assert_clean(str(failure))
    assert diverged.clients == (name,)  # whoever handles it gets the name as it is
    with pytest.warns(eq.errors.EquipoiseNotice) as given:
        eq.errors.notify(f"client {name} is small.")
    assert_clean(str(given[0].message))


def test_the_second_line_of_a_message_stays():
    failure = eq.errors.IncompatibleParts("These two do not go together.", "Leave one out.")
    assert "together.\n  Leave" in str(failure)


@pytest.mark.parametrize("logger", ["flwr", "equipoise.node"])
def test_no_line_of_a_log_has_names_as_they_are(logger, caplog, monkeypatch):
    pytest.importorskip("flwr")
    import equipoise.engines.flower  # noqa: F401

    log = logging.getLogger(logger)
    monkeypatch.setattr(log, "handlers", [caplog.handler])  # Flower's own may write to a stream that an earlier test closed
    with caplog.at_level("ERROR", logger=logger):  # other tests silence Flower
        log.error("%s refused, %s, in %d rounds: %s %.1f", EVIL, LINE, 3, ValueError(EVIL), 0.5)
        log.error(f"{LINE} {EVIL}")
        try:
            raise ValueError(f"{EVIL}{LINE}")
        except ValueError:
            log.exception("It failed.")
    assert "in 3 rounds" in caplog.text
    assert "ValueError" in caplog.text
    assert_clean(caplog.text)


def test_names_of_wide_letters_and_of_accents_keep_columns_straight():
    lines = table_lines([("client", "size"), ("東京病院", "3"), ("ne\u0301e", "4"), (EVIL, "5"), ("x" * 500, "6")])
    assert len({cells(line[: line.rindex(size)]) for line, size in zip(lines[1:], "3456", strict=True)}) == 1
    assert all(len(line) < 200 for line in lines)


def test_names_that_people_have_stay_as_they_are():
    for name in ("Ærøskøbing", "東京", "نیم\u200cفاصله", "👩\u200d⚕️ ward", "q_0 [a] (b)"):
        assert printable(name) == name


def test_a_screen_reads_no_markup(capsys):
    Screen().print("[red]a[/red] :smile: [link=http://z]b[/link]")
    assert capsys.readouterr().out == "[red]a[/red] :smile: [link=http://z]b[/link]\n"


def test_a_filter_of_records_keeps_numbers():
    record = logging.LogRecord("x", 20, "f", 1, "%d %.2f %s", (3, 0.5, "a"), None)
    assert clean_record(record)
    assert record.getMessage() == "3 0.50 a"
