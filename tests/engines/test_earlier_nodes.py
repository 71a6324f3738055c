"""Nodes that do not read tensors inside a call."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'equipoise[flower]'")

from fake_grid import federation
from test_federation_points import BAD, run, softmax, some_data
from test_flower_faults import altered, introduce_as


def with_a_node_without_compact_messages():
    grid = federation(some_data(), softmax)
    hello = lambda d: d.client == BAD and d.action == "query.hello"  # noqa: E731
    grid.fault = lambda d: altered(d.answer(), introduce_as(versions=None, compact=None)) if hello(d) else d.answer()
    return grid


def test_a_node_without_compact_messages_takes_part_in_a_plain_run():
    assert run(with_a_node_without_compact_messages(), rounds=1).history.rounds[0].trained == 4


def test_a_node_without_compact_messages_is_sent_messages_that_it_can_read():
    """Tensors beside the call; all others get them inside it."""
    grid = with_a_node_without_compact_messages()
    run(grid, rounds=1)
    beside = {name for name, message in grid.raw if message.metadata.message_type != "query.hello" and len(message.content) > 1}
    assert beside == {BAD}


def test_a_node_that_goes_back_to_an_earlier_version_misses_one_round():
    """It has Flower's id of before, and does not know tensors inside a call."""
    grid = federation(some_data(), softmax)

    def went_back(delivery):
        if delivery.client == BAD and delivery.round == 1 and len(delivery.message.content) == 1:
            return altered(delivery.answer(), refused_as("BadMessage"))
        return delivery.answer()

    grid.fault = went_back
    found = run(grid, rounds=3, retries=0)
    assert [set(report.missing) for report in found.history.rounds] == [set(), {BAD}, set()]
    last = [message for name, message in grid.raw if name == BAD][-1]
    assert len(last.content) == 2


def refused_as(reason: str):
    """A change that makes an answer a refusal."""

    def change(content):
        content["call"]["values"] = json.dumps({"refused": reason})

    return change
