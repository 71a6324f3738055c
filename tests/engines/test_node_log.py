"""The log of a node, as an operator reads it."""

from __future__ import annotations

import io
import logging
import re

import pytest
import torch

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'equipoise[flower]'")

from equipoise.engines.flower.apps import node_app, node_log
from equipoise.engines.flower.apps.node_app import name_moment
from equipoise.engines.flower.transport.messages import MessageContent
from equipoise.engines.flower.transport.messenger import ClientRequest, name_group


@pytest.fixture
def flower_log(monkeypatch):
    """Flower's logger as in a node's process, and what it writes."""
    logger, written = logging.getLogger("flwr"), io.StringIO()
    handlers, level = list(logger.handlers), logger.level
    filters = {name: list(logging.getLogger(name).filters) for name in ("uvicorn", "uvicorn.error", "uvicorn.access")}
    monkeypatch.setattr("sys.stderr", written)
    monkeypatch.delenv("FLWR_LOG_LEVEL", raising=False)
    node_log.speak_plainly()
    logger.setLevel(logging.INFO)
    yield logger, written
    logger.handlers = handlers
    logger.setLevel(level)
    for name, before in filters.items():
        logging.getLogger(name).filters = before


def ask(logger: logging.Logger, action: str, index: int | str) -> None:
    """What Flower's SuperNode logs for a message and its answer."""
    logger.info("")
    logger.info("[RUN %s, ROUND %s]", 88, str(index))
    logger.info("Receiving: %s message (ID: %s)", action, "f" * 64)
    logger.info("Received successfully")
    logger.info("")
    logger.info("[RUN %s, ROUND %s]", 88, str(index))
    logger.info("Sending: %s message (ID: %s)", action, "e" * 64)
    logger.info("")
    logger.info("Sent successfully")


def test_two_lines_tell_of_a_message(flower_log):
    """Flower has nine, with ids of 64 digits, without the time, and counts rounds from 0."""
    logger, written = flower_log
    ask(logger, "query.hello", 0)
    ask(logger, "train.update", 2)
    lines = written.getvalue().splitlines()
    assert all(re.match(r"20\d\d-\d\d-\d\dT\d\d:\d\d:\d\dZ ", line) for line in lines)
    assert [re.sub(r"[\d.]+ s", "_ s", line.split(" ", 1)[1]) for line in lines] == [
        "Run 88: asked who it is.", "Run 88: answered after _ s.",
        "Run 88, round 3: asked for its update.", "Run 88, round 3: answered after _ s.",
    ]  # fmt: skip


def test_the_sums_of_an_evaluation_are_not_called_a_round(flower_log):
    """After round 6 the shared model is evaluated: its sums were called those of round 7."""
    logger, written = flower_log
    request = ClientRequest({}, {"sum.scores test": torch.zeros(1)})
    ask(logger, "train.keys", name_group("train.keys", request, 6))
    ask(logger, "train.keys", name_group("train.keys", ClientRequest({}, {"sum.update": torch.zeros(1)}), 6))
    asked = [line.split(" ", 1)[1] for line in written.getvalue().splitlines() if "asked" in line]
    assert asked == [
        "Run 88, evaluation after round 6: asked for its keys in a secure sum.",
        "Run 88, round 7: asked for its keys in a secure sum.",
    ]
    assert name_moment(MessageContent(6, "", arrays={"sum.scores test": None})) == "the evaluation after round 6"
    assert name_moment(MessageContent(6, "", arrays={"sum.update": None})) == "round 7"


def test_faults_and_unknown_lines_are_told_with_their_level(flower_log):
    logger, written = flower_log
    logger.error("Failed to send message %s: %s", "a", "no route")
    logger.warning("Connection attempt failed, retrying in %.2f seconds", 4.2)
    logger.info("SuperNode ID: %s", 17)
    said = [line.split(" ", 1)[1] for line in written.getvalue().splitlines()]
    assert said == [
        "ERROR: Failed to send message a: no route",
        "WARNING: The SuperLink cannot be reached. The next try is in 4.2 s.",
        "Connected to the SuperLink. SuperNode ID: 17",
    ]


def test_who_looks_for_a_fault_gets_flowers_own_log(monkeypatch):
    monkeypatch.setenv("FLWR_LOG_LEVEL", "DEBUG")
    before = list(logging.getLogger("flwr").handlers)
    node_log.speak_plainly()
    assert logging.getLogger("flwr").handlers == before


def test_there_are_words_for_all_that_a_node_is_asked():
    assert set(node_log.ASKED) == set(node_app.HANDLERS)


def test_an_app_whose_node_has_ended_does_not_blame_the_superlink(flower_log):
    """Before, "The SuperLink cannot be reached": an app speaks with its own SuperNode, which was stopped in a round."""
    logger, written = flower_log
    logger.warning("Connection attempt failed, retrying in %.2f seconds", 3.94)
    assert "The SuperLink cannot be reached. The next try is in 3.9 s." in written.getvalue()
    node_log.speak_plainly(least=logging.WARNING, of_app=True)
    logger.handlers[0].setStream(written)
    logger.warning("Connection attempt failed, retrying in %.2f seconds", 3.94)
    last = written.getvalue().splitlines()[-1]
    assert last.endswith("WARNING: An app cannot reach its own node, which may have ended. The next try is in 3.9 s.")
