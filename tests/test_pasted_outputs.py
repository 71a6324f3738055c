"""Outputs that pages show, and that building the site does not make: each is compared with what is printed now."""

import logging
import re
import shutil
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "docs" / "_ext"))

import blocks as blocks_of  # noqa: E402

import equipoise as eq  # noqa: E402
from equipoise.cli.commands import app  # noqa: E402


def pasted(page: str, beginning: str) -> list[str]:
    """The lines of the block of a page that begins with these words."""
    found = [
        f.text for f in blocks_of.fences((ROOT / "docs" / page).read_text(encoding="utf-8")) if f.text.startswith(beginning)
    ]
    assert len(found) == 1, f"{page} has {len(found)} blocks that begin with {beginning!r}"
    return found[0].splitlines()


def assert_shown(lines: list[str], printed: str) -> None:
    """Each line is printed, in this order; `…` stands for what is left out, also for whole lines."""
    rest = [" ".join(line.split()) for line in printed.splitlines()]
    for line in lines:
        words = " ".join(line.split())
        if words == "…":
            continue
        pattern = re.compile(".*".join(re.escape(part) for part in words.split("…")).replace(r"\ .*", ".*"))
        at = next((n for n, other in enumerate(rest) if pattern.fullmatch(other)), None)
        assert at is not None, f"{words!r} is not printed (any more), or at another place:\n{printed}"
        rest = rest[at + 1 :]


def test_the_encoding_of_a_table(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    data = eq.data.csv("examples/adult-by-country.csv", client="country", target="income", test=0.25, seed=0)
    assert_shown(pasted("howto/tables.md", "column "), data.schema.describe())


def test_the_paths_of_a_run(tmp_path, monkeypatch):
    shutil.copytree(ROOT / "examples", tmp_path / "examples", ignore=shutil.ignore_patterns("flower", "gallery"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("EQUIPOISE_CACHE", str(tmp_path / "cache"))
    command, *lines = pasted("howto/faster.md", "$ equipoise run")
    printed = CliRunner().invoke(app, command.removeprefix("$ equipoise ").split())
    assert printed.exit_code == 0, printed.output
    same = [line for line in lines if "threads of each" not in line and "In a trial" not in line]  # these are of the machine
    assert_shown(same, printed.stdout)
    assert "Chunks of as many clients as memory allows; processes: 1; threads of each: " in printed.stdout
    assert "In a trial, batched and plain gradients differ by " in " ".join(printed.stdout.split())


def test_the_table_of_a_comparison_under_attack():
    blocks = blocks_of.executed_blocks((ROOT / "docs" / "howto" / "report.md").read_text(encoding="utf-8"))
    (block,) = (each for each in blocks if "under_attack" in each)
    names: dict[str, object] = {"eq": eq}
    exec(block.partition("under_attack.report")[0], names)  # noqa: S102
    assert_shown(pasted("howto/report.md", "0-1 error over"), names["under_attack"].summary())


def test_the_errors_of_groups_of_rows(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    blocks = blocks_of.executed_blocks((ROOT / "docs" / "howto" / "results.md").read_text(encoding="utf-8"))
    names: dict[str, object] = {"eq": eq}
    first = next(n for n, block in enumerate(blocks) if "adult-by-country.csv" in block)
    for block in blocks[first : first + 3]:
        exec(compile(block, "results.md", "exec"), names)  # noqa: S102
    printed = capsys.readouterr().out
    assert_shown(pasted("howto/results.md", "           wrong"), printed)
    assert_shown(pasted("howto/results.md", "Female ["), printed)


def test_the_log_of_a_node(monkeypatch):
    """The lines of the guide are those that the filter puts in the place of Flower's."""
    pytest.importorskip("flwr")
    from equipoise.engines.flower.apps import node_log

    words, lines = node_log.PlainWords(), []

    def say(message, *values):
        record = logging.LogRecord("flwr", logging.INFO, __file__, 1, message, values, None)
        if words.filter(record):
            lines.append(record.getMessage())

    say("SuperNode ID: %s", 18152866996567994142)
    for index, action in (("", "query.hello"), ("0", "train.update")):
        say(node_log.RUN_AND_ROUND, 8842503462038345118, index)
        say(node_log.RECEIVING, action, "1")
        say(node_log.SENT)
    shown = [line.partition("Z ")[2] for line in pasted("operate-federation.md", "2026-")][1:]
    assert [re.sub(r"\d+\.\d s", "… s", line) for line in shown] == [re.sub(r"\d+\.\d s", "… s", line) for line in lines]
