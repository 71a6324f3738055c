"""A client that misses an evaluation is named, and no mean over other clients passes for one over all."""

from __future__ import annotations

import json
import logging
import math
import re
from dataclasses import replace
from html import unescape

import pytest
import torch
from fake_grid import federation, run_app

import equipoise as eq
from equipoise.client_table import ClientTable
from equipoise.data.clients import FederatedData
from equipoise.engines.flower import server_app
from equipoise.engines.flower.apps.node_policy import NodePolicy
from equipoise.engines.flower.operate.run_view import RunView
from equipoise.engines.flower.transport import messages
from equipoise.errors import EquipoiseNotice
from equipoise.experiment.folder import read_record
from equipoise.export import model_card
from equipoise.report import write_report
from equipoise.runs.stopping import EarlyStopping, StopState
from equipoise.types import ServerState
from made_clients import make_clients

BAD = "client-2"
DATA = FederatedData(make_clients([6, 9, 12, 15]), test=make_clients([5, 9, 14, 3], seed=1), name="four")
SECURE = eq.Algorithm(privacy=eq.privacy.SecureAggregation())


def softmax():
    return eq.models.Softmax(4, 3)


def run(grid, algorithm=None, *, rounds=2, **options):
    found = []
    options = {"timeout": 30.0, "pause": 1.0, "retries": 0, "seed": 3, "clients": 4, "evaluate_every": 1, **options}
    run_app(server_app(algorithm or eq.Algorithm(), model=softmax, rounds=rounds, on_result=found.append, **options), grid)
    return found[0]


def silent_at_last(grid, rounds=2):
    """The last evaluation lacks a client: it is silent when it is asked for its scores a second time."""

    def fault(delivery):
        seconds = delivery.action in ("evaluate.scores",) and delivery.count >= rounds
        return None if delivery.client == BAD and seconds else delivery.answer()

    grid.fault = fault
    return grid


def test_a_site_that_misses_the_last_evaluation_is_named_everywhere(tmp_path, caplog):
    caplog.set_level(logging.WARNING, "flwr")
    folder = tmp_path / "run"
    with pytest.warns(EquipoiseNotice, match="could not be evaluated"):
        found = run(silent_at_last(federation(DATA, softmax)), folder=folder)
    why = "did not answer within 30 s"
    assert found.clients.not_evaluated == {"train": {BAD: why}, "test": {BAD: why}}
    first, last = found.history.points
    assert first.not_evaluated == {}
    assert last.not_evaluated["test"] == {BAD: why}
    # The figures are over the three others: their own errors say so.
    rows = found.clients.where("test")
    assert BAD not in rows.client
    assert found.summary().error.mean == pytest.approx(float(rows.error.mean()))
    said = f"test clients not evaluated: 1 of 4, {BAD} ({why}). Figures are over the others."
    assert found.summary().not_evaluated == {BAD: why}
    assert said in str(found.summary())
    assert f"Evaluation after round 2: {said}" in caplog.text
    # The same in the folder, read again.
    read = read_record(folder)
    assert said in str(read.summary())
    assert read.history.points[-1].not_evaluated["test"] == {BAD: why}
    told = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    evaluations = [each for each in told if each["event"] == "evaluation"]
    assert [each["not_evaluated"] for each in evaluations] == [{}, {BAD: why}]
    assert evaluations[-1]["clients"] == {"train": 3, "test": 3}
    lines = "\n".join(RunView(folder).lines())
    assert f"not evaluated then: {BAD} ({why}). Its figures are over the others" in lines
    assert BAD in RunView(folder).page()
    report = unescape(re.sub("<script.*?</script>", "", (folder / "report.html").read_text(), flags=re.DOTALL))
    assert said in report.replace("\u00a0", " ")
    assert f"After rounds 2, some test clients were not evaluated ({BAD})" in report
    card = model_card.card(found)
    assert card["not_evaluated"] == {"train": 1, "test": 1}
    assert said in model_card.card_markdown(card).decode()


def test_nobody_is_named_where_all_were_evaluated(tmp_path):
    found = run(federation(DATA, softmax), folder=tmp_path / "run")
    assert found.clients.not_evaluated == {}
    assert "not evaluated" not in str(found.summary()) + "\n".join(RunView(tmp_path / "run").lines())
    assert "not_evaluated" not in (tmp_path / "run" / "rounds.jsonl").read_text()


def test_a_site_that_is_in_no_mean_of_secure_sums_is_named(tmp_path):
    """The client is lost after round 2, before the evaluation: the mean of the others is that of three."""
    grid = federation(DATA, softmax)

    def fault(delivery):
        late = delivery.action == "train.keys" and delivery.count > 3  # round 1, evaluation, round 2, evaluation
        return None if delivery.client == BAD and late else delivery.answer()

    grid.fault = fault
    found = run(grid, SECURE, folder=tmp_path / "run", minimum=3)
    rows = found.clients.where("test")
    assert rows.clients_in_mean == 3
    assert set(found.clients.not_evaluated["test"]) == {BAD}
    assert "test clients not evaluated: 1 of 4, client-2" in str(found.summary())
    assert BAD not in model_card.card_markdown(model_card.card(found)).decode()  # a card names nobody under secure sums
    for_others = json.dumps(RunView(tmp_path / "run", for_others=True).read())
    assert BAD not in for_others


def test_a_site_whose_policy_allows_no_evaluation_is_named_and_not_asked():
    """In a plain run, too: its scores alone are more than the mean that the policy refuses."""
    grid = federation(DATA, softmax)
    closed = federation(DATA, softmax, policy=NodePolicy(only_sums=False, evaluate=False))
    node = next(node for node, name in grid.names.items() if name == BAD)
    grid.apps[node] = closed.apps[node]
    found = run(grid)
    assert found.clients.not_evaluated["test"] == {BAD: "allows no evaluations by its policy"}
    assert not any(client == BAD and action.startswith("evaluate") for client, action, _ in grid.log)
    asked = next(each for _, each in grid.raw if each.metadata.message_type == "evaluate.scores")
    reply = grid.answer(node, asked)  # a server that asks all the same
    assert messages.read_message(reply.content).values["refused"] == "PolicyRefusal"


def test_a_run_that_nobody_may_evaluate_ends_with_unknown_scores():
    found = run(federation(DATA, softmax, policy=NodePolicy(only_sums=False, evaluate=False)))
    assert found.clients.client == ("not evaluated",)
    assert math.isnan(found.summary().error.mean)


def test_two_methods_over_different_sites_do_not_compare_silently(tmp_path):
    with pytest.warns(EquipoiseNotice):
        lacking = run(silent_at_last(federation(DATA, softmax)))
    whole = run(federation(DATA, softmax))
    page = write_report([whole, replace(lacking, name="other")], tmp_path / "report.html")
    text = unescape(page.read_text())
    assert "test clients not evaluated: 1 of 4" in text
    assert "Runs leave out different clients" in text


def table(errors, absent=()):
    """Test clients a, b, … with these errors; those in `absent` are in no row."""
    named = {client: error for client, error in zip("abcd", errors, strict=True) if client not in absent}
    count = len(named)
    values = torch.tensor(list(named.values()), dtype=torch.float64)
    missing = {"validation": dict.fromkeys(absent, "is not connected")} if absent else {}
    return ClientTable(
        tuple(named), ("validation",) * count, torch.zeros(count, dtype=torch.bool), torch.full((count,), 10), values, values,
        not_evaluated=missing,
    )  # fmt: skip


def states(rule, tables):
    state, found = StopState(), []
    for number, each in enumerate(tables, 1):
        state = rule.seen(state, each, ServerState(number, torch.zeros(1)))
        found.append(state)
    return found


def test_early_stopping_does_not_take_the_loss_of_a_bad_site_for_progress():
    """Errors do not change at all. Without d, whose error is 1, the mean is lower: that is no better model."""
    rule = EarlyStopping("validation.error", patience=3)
    same = [0.1, 0.2, 0.3, 1.0]
    found = states(rule, [table(same), table(same, "d"), table(same), table(same), table(same)])
    assert [state.best.round for state in found] == [1] * 5
    assert [state.waited for state in found] == [0, 0, 1, 2, 3]
    assert [state.over for state in found] == [False] * 4 + [True]


def test_early_stopping_begins_anew_when_a_site_has_gone_for_good():
    """After three evaluations without d the others decide: 0.2 is then the mean to improve on."""
    rule = EarlyStopping("validation.error", patience=3)
    errors = [0.1, 0.2, 0.3, 0.0]
    found = states(rule, [table(errors), *[table(errors, "d")] * 6])
    assert [state.best.round for state in found] == [1, 1, 1, 4, 4, 4, 4]
    assert found[3].value == pytest.approx(0.2)
    assert [state.over for state in found] == [False] * 6 + [True]


@pytest.mark.parametrize("absent", [(), ("d",)])
def test_the_file_of_a_table_keeps_who_was_not_evaluated(tmp_path, absent):
    pytest.importorskip("pyarrow")
    written = table([0.1, 0.2, 0.3, 0.4], absent)
    read = ClientTable.from_parquet(written.to_parquet(tmp_path / "clients.parquet"))
    assert read.not_evaluated == written.not_evaluated
