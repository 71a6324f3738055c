"""What an operator reads of a run that fails: one line with the cause and the cure, and the traceback in a file."""

from __future__ import annotations

import logging

import pytest
from fake_grid import federation, run_app

import equipoise as eq
from equipoise.cli.federation_commands import silent_superlink
from equipoise.data.clients import FederatedData
from equipoise.engines.flower import server_app
from equipoise.engines.flower.apps.kept_data import KeptData
from equipoise.engines.flower.apps.node_policy import NodePolicy
from equipoise.engines.flower.apps.run_control import StoppedByOperator
from equipoise.engines.flower.apps.server_log import EXIT, RAISED, PlainFailures, show_notice, speak_plainly
from equipoise.engines.flower.transport.messenger import TooFewClients
from equipoise.errors import InvalidData
from made_clients import make_clients

DATA = FederatedData(make_clients([6, 9, 12]), test=make_clients([5, 9, 14], seed=1), name="three")


def softmax():
    return eq.models.Softmax(4, 3)


def told(failure, folder):
    """The lines that an operator reads where Flower tells of a failed app, in the words of flwr 1.41."""
    lines, logger = [], logging.Logger("flwr")
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(handler.format(record))
    logger.addHandler(handler)
    logger.addFilter(PlainFailures(folder))
    try:
        raise failure
    except Exception as caught:
        logger.error(RAISED, "ServerApp", exc_info=caught)
    logger.error(f"{EXIT}201\n\nAn unhandled exception occurred in the ServerApp.\n\nFor more information, visit: <…>")
    logger.info("")
    return lines


def test_that_a_run_goes_on_is_no_warning(caplog):
    with caplog.at_level("INFO", logger="flwr"):
        show_notice("Going on from round 12 of 40, as runs/ops/checkpoint/state.safetensors has it.")
        show_notice("Going on from round 12 of 40, as runs/x has it. The model starts from other weights here.")
    assert [record.levelname for record in caplog.records] == ["INFO", "WARNING"]


def test_a_failed_run_is_one_line_and_a_file(tmp_path):
    """Before, a refusal by policies was 200 lines of frames of Flower and torch, an exit code and a link."""
    (line,) = told(TooFewClients("0 of 3 clients are left."), tmp_path)
    assert line == f"The run has failed: 0 of 3 clients are left. [EQ601] The traceback is in {tmp_path / 'error.txt'}."
    text = (tmp_path / "error.txt").read_text()
    assert text.startswith("Traceback")
    assert "TooFewClients" in text
    (line,) = told(ValueError("two\nlines"), tmp_path)
    assert line.startswith("The run has failed: ValueError: two lines The traceback")
    (line,) = told(StoppedByOperator("The run was stopped by its operator."), tmp_path)
    assert line == "The run was stopped by its operator. [EQ609]"
    (line,) = told(ZeroDivisionError("nothing"), None)  # nowhere else to look
    assert "Traceback" in line


def test_flower_still_tells_of_failures_in_these_words():
    import inspect

    from flwr.supercore.exit import exit as leaving
    from flwr.superlink.runtime import run_serverapp

    assert f'"{RAISED}"' in inspect.getsource(run_serverapp)
    assert EXIT in inspect.getsource(leaving)


def test_the_log_of_a_program_is_left_alone():
    before = logging.getLogger("flwr").filters[:]
    speak_plainly(None)  # pytest has its own handlers
    assert logging.getLogger("flwr").filters == before
    assert logging.getLogger("flwr").propagate


def test_a_node_tells_of_data_it_cannot_load_once_and_in_one_line(tmp_path, monkeypatch, caplog, capfd):
    """Before, each message printed 25 lines of traceback before the line that says what is wrong."""
    monkeypatch.setenv("EQUIPOISE_CONFIG", str(tmp_path))
    monkeypatch.setattr(logging.getLogger("equipoise.node"), "propagate", True)
    failures = [InvalidData("column 'pressure' is missing."), InvalidData("column 'pressure' is missing."), KeyError("file")]

    def load():
        raise failures.pop(0)

    kept = KeptData(load, lambda: None)
    with caplog.at_level("WARNING", logger="equipoise.node"):
        for _ in range(3):
            kept.refresh()
    first, second = (record.getMessage() for record in caplog.records)
    assert first.startswith("The data cannot be loaded: InvalidData: column 'pressure' is missing.")
    assert second == f"The data cannot be loaded: KeyError: 'file' The traceback is in {tmp_path / 'error.txt'}."
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize("privacy", [None, eq.privacy.SecureAggregation()])
def test_what_policies_refuse_is_not_tried_again(privacy):
    """Before, each round was asked for three times, ten seconds apart, though no policy changes by itself."""
    grid = federation(DATA, softmax, policy=NodePolicy(only_sums=False, parts=("risk.mean",)))
    app = server_app(eq.Algorithm(privacy=privacy), model=softmax, rounds=1, clients=3, minimum=2, retries=2, pause=10.0)
    with pytest.raises(TooFewClients, match="not tried again") as failure:
        run_app(app, grid)
    assert failure.value.code == "EQ601"  # and not that of masks
    asked = [action for client, action, _ in grid.log if client == "client-0" and action != "query.hello"]
    assert len(asked) == 1


def test_silence_is_tried_again():
    grid = federation(DATA, softmax, policy=NodePolicy(only_sums=False, parts=("risk.mean",)))
    grid.fault = lambda d: None if d.action == "train.update" else d.answer()
    app = server_app(eq.Algorithm(), model=softmax, rounds=1, clients=3, minimum=2, retries=1, pause=1.0, timeout=5.0)
    with pytest.raises(TooFewClients, match="tried 2 times"):
        run_app(app, grid)


def test_a_superlink_that_has_died_is_told_in_words():
    """Flower answers in JSON; `run` ended with it."""
    said = silent_superlink('{"success": false, "error-message": "Connection refused.\\nSee the log."}', "")
    assert said.startswith("The SuperLink does not say which runs there are: Connection refused. See the log. Is it running?")
    assert "give `run` again" in said
    assert silent_superlink("", "no flwr\n").startswith("The SuperLink does not say which runs there are: no flwr. Is it")
