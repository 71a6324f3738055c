"""Folders that others made, on purpose or by accident: nothing of them brings the server down or leads out of the folder."""

import io
import json
import os
import shutil
import threading
import time
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
import torch
from served import Client, Running

from equipoise.client_table import COLUMNS
from equipoise.core.screen import Screen
from equipoise.serve.terminal import watch

ADDRESSES = (
    "/run/{}", "/run/{}/clients", "/run/{}/report", "/api/runs/{}", "/api/runs/{}/rounds", "/api/runs/{}/metrics",
    "/api/runs/{}/family", "/api/runs/{}/clients", "/api/runs/{}/clients?format=csv", "/api/runs/{}/models",
    "/api/runs/{}/schema", "/api/runs/{}/models/model/latest/model.safetensors", "/api/runs/{}/models/0.6/latest/score.onnx",
)  # fmt: skip


def look(ask, run):
    """Ask everything about a run; every answer is one of those that the API promises, and none is of the server's failing."""
    for address in ADDRESSES:
        answer = ask.get(address.format(run))
        assert answer.status_code in (200, 403, 404, 409), (address, answer.status_code, answer.text[:200])
        assert "root:x:" not in answer.text
    for address in ("/api/runs", "/?all"):
        assert ask.get(address).status_code == 200


def run_folder(root, name, config="[train]\nrounds = 4\n", log=""):
    place = root / name if isinstance(name, str) else Path(os.fsdecode(os.fsencode(root) + b"/" + name))
    place.mkdir(parents=True)
    (place / "config.toml").write_text(config)
    (place / "rounds.jsonl").write_text(log)
    return place


@pytest.mark.parametrize("name", [
    "a~b", "~", "a b%2F..%2F", "%2e%2e", "..hidden?", "a&b=<i>", "é 方法 🙂", "x" * 200, "a#b", "a;b", "a\\b",
    b"caf\xe9", "esc\x1b[31m\n", "'\"", "con.toml",
])  # fmt: skip
def test_names_of_folders(tmp_path, name):
    try:
        run_folder(tmp_path / "runs", name)
    except OSError:
        pytest.skip("this file system has no such names")
    ask = Client(tmp_path / "runs")
    listed = ask.get("/api/runs").json()["runs"]
    if str(name).startswith(".."):
        assert listed == []  # hidden
        return
    (run,) = listed
    answer = ask.get("/", headers={"accept": "text/html"})
    assert answer.status_code == 307
    page = ask.get(answer.headers["location"], headers={"accept": "text/html"})
    assert page.status_code == 200
    assert "<i>" not in page.text
    assert "\x1b" not in page.text
    assert (
        ask.get("/api/runs/" + httpx.URL(answer.headers["location"]).raw_path.decode().split("/")[2]).json()["id"] == run["id"]
    )
    screen = io.StringIO()
    watch(tmp_path / "runs", console=Screen(width=300, force_terminal=False, file=screen), once=True)
    assert "0/4" in screen.getvalue()
    assert "\x1b" not in screen.getvalue()


def test_names_with_a_tilde_are_not_those_of_folders_inside(tmp_path):
    for name in ("a~b", "a/b", "a~/b", "a/~b", "a/.b"):
        run_folder(tmp_path / "runs", name)
    ask = Client(tmp_path / "runs")
    found = [run["id"] for run in ask.get("/api/runs").json()["runs"]]
    assert len(found) == len(set(found)) == 4  # all but the hidden one


@pytest.mark.parametrize("config", [
    "", "[train]\nrounds = " + "9" * 400, "[train]\nrounds = -5\nseed = nan", "[train]\nname = [1, 2]",
    "train = 3\nalgorithm = []", "[family]\ntails = [nan, inf, -inf, 'x', " + "9" * 400 + "]", "[family]\ntails = 'x'",
    "[algorithm]\nprivacy = 3", "[" * 3000,
    "[train]\nname = '" + "x" * 100_000 + "'", "#" * 2_000_000, "[python]\ndata = {a = 1}\nmodel = [[[]]]",
])  # fmt: skip
def test_configurations(tmp_path, config):
    run_folder(tmp_path, "r", config)
    look(Client(tmp_path), "r")


@pytest.mark.parametrize("log", [
    '{"event": "start", "rounds": 1e999}', '{"event": "start", "rounds": "x"}', '{"event": "round", "round": 1e308}',
    '{"event": "round", "round": null}', '{"event": "round", "round": 1, "seconds": 1e999, "loss": NaN, "trained": "x"}',
    '{"event": "round", "round": 1, "seconds": 1e300}\n{"event": "start", "rounds": 9007199254740993000}',
    '{"event": "evaluation", "round": 1, "splits": {"test": {"error": Infinity}}}', '{"event": "end", "seconds": NaN}',
    '{"event": "evaluation", "round": 1, "splits": {"test": {}}, "histogram": {"low": 0, "high": 1, "counts": [1e999]}}',
    '{"event": "evaluation", "round": 1, "splits": []}', '{"event": "end", "seconds": "soon"}', "[" * 100_000, '"end"',
    '{"event": "stopped", "why": {"a": [1]}}', '{"event": "round", "run": ["x"], "round": 3}', "\x00" * 10_000,
    '{"event": "evaluation", "round": 3, "splits": {"test": {}}, "histogram": {"low": 1, "high": 0, "counts": []}}',
])  # fmt: skip
def test_logs(tmp_path, log):
    run_folder(tmp_path, "r", log=log + "\n")
    look(Client(tmp_path), "r")


def test_a_log_with_endless_names_of_runs_stays_in_bounded_memory(tmp_path):
    lines = (json.dumps({"event": "round", "run": f"member {k}", "round": 0, "loss": 1.0}) for k in range(20_000))
    run_folder(tmp_path, "r", log="\n".join(lines) + "\n")
    assert len(Client(tmp_path).get("/api/runs/r/rounds").json()["curves"]) <= 200


@pytest.fixture
def own(root, tmp_path):
    """A copy of the served folder that a test may change."""
    return Path(shutil.copytree(root, tmp_path / "runs"))


def test_tables_of_clients(own, family):
    """Tables without rows, without columns, of other clients, with numbers that do not exist, and no tables at all."""
    ask = Client(own)
    table = family.results[0.2].clients
    member, single = own / "knob" / "members" / "tail-0.2" / "clients.parquet", own / "study" / "tail-0.6-0" / "clients.parquet"
    odd = replace(table, error=torch.where(torch.arange(len(table)) % 2 == 0, torch.nan, torch.inf).double())
    others = replace(table, client=tuple(reversed(table.client)))
    for made in (odd, table.take(torch.arange(0)), table.take(torch.arange(3)), others):
        for path in (member, single):
            path.unlink()
            made.to_parquet(path, method="x", seed=0)
        look(ask, "knob")
        look(ask, "study~tail-0.6-0")
        assert ask.get("/api/studies/study").status_code == ask.get("/study/study").status_code == 200
    import pyarrow as pa
    import pyarrow.parquet

    for content in ({"client": ["a"]}, {key: ["x"] for key in COLUMNS}):
        pyarrow.parquet.write_table(pa.table(content), single)
        look(ask, "study~tail-0.6-0")
    single.write_bytes(b"")
    look(ask, "study~tail-0.6-0")


@pytest.mark.parametrize("change", [
    {"members": []}, {"format": "equipoise family 9"}, {"knob": "<b>"}, {"signature": None}, {"classes": ["<script>"] * 50},
    {"judged_on": "nowhere"}, {"error_is_loss": True},
])  # fmt: skip
def test_manifests(own, change):
    for path in (own / "knob" / "family.json", own / "study" / "tail-0.6-0" / "model.json"):
        path.write_text(json.dumps(json.loads(path.read_text()) | change))
    ask = Client(own)
    look(ask, "knob")
    look(ask, "study~tail-0.6-0")
    page = ask.get("/run/knob").text
    assert "<script><" not in page
    for run, model in (("knob", "0.2"), ("study~tail-0.6-0", "model")):
        answer = ask.post("/predict", json={"run": run, "model": model, "inputs": [[0.0] * 20]})
        assert answer.status_code in (200, 404), answer.text


def test_a_manifest_that_lies_about_its_files(own):
    path = own / "study" / "tail-0.6-0" / "model.json"
    table = json.loads(path.read_text())
    files = table["members"][0]["files"]
    files["model.onnx"]["bytes"] += 1
    files["config.toml"] = {"bytes": 1, "sha256": "0" * 64}
    files["../../secret"] = files["model.onnx"]
    path.write_text(json.dumps(table))
    ask = Client(own)
    assert "names a file outside its folder" in ask.get("/api/runs/study~tail-0.6-0/models").json()["error"]
    del files["../../secret"]
    path.write_text(json.dumps(table))
    here = "/api/runs/study~tail-0.6-0/models/model/latest"
    assert ask.get(f"{here}/model.onnx").status_code == 409
    assert ask.get(f"{here}/config.toml").status_code == 404  # the settings of a run are no model


def test_a_run_whose_privacy_cannot_be_read_shows_no_client(own):
    (own / "study" / "tail-0.6-0" / "config.toml").write_text("[[[")
    ask = Client(own)
    assert ask.get("/api/runs/study~tail-0.6-0/clients").status_code == 403
    assert ask.get("/run/study~tail-0.6-0/report").status_code == 403
    assert "config.toml cannot be read" in ask.get("/api/runs/study~tail-0.6-0/clients").json()["error"]


def test_questions_at_once_while_the_folder_is_moved_about(own):
    """Many ask for all pages while runs are deleted, damaged and put back: no answer says that the server failed."""
    saved = own.parent / "saved"
    shutil.copytree(own, saved)
    answers, stop, ask = [], threading.Event(), Client(own)

    def asking():
        while not stop.is_set():
            for run in ("knob", "study~tail-0.6-0"):
                answers.extend(ask.get(address.format(run)).status_code for address in ADDRESSES[:9])

    threads = [threading.Thread(target=asking) for _ in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(6):
        shutil.rmtree(own / "knob")
        shutil.copytree(saved / "knob", own / "knob")
        (own / "study" / "tail-0.6-0" / "rounds.jsonl").write_bytes(b'{"event": "round", "ro')
        time.sleep(0.05)
        shutil.copy(saved / "study" / "tail-0.6-0" / "rounds.jsonl", own / "study" / "tail-0.6-0" / "rounds.jsonl")
        shutil.rmtree(own)
        time.sleep(0.05)
        shutil.copytree(saved, own)
    stop.set()
    for thread in threads:
        thread.join()
    assert len(answers) > 50
    assert set(answers) <= {200, 403, 404, 409}


def test_a_thousand_runs_are_listed_at_once(tmp_path):
    """Finished runs are read once: the second list of 1,000 runs takes a fraction of a second."""
    line = json.dumps({"event": "round", "round": 0, "loss": 1.0, "seconds": 0.1})
    lines = [line.replace('"round": 0', f'"round": {k}') for k in range(200)]
    log = "\n".join([*lines, '{"event": "end", "seconds": 1.0}', ""])
    for k in range(1000):
        run_folder(tmp_path / "runs", f"r{k}", log=log)
    ask = Client(tmp_path / "runs")
    assert len(ask.get("/api/runs").json()["runs"]) == 1000
    began = time.process_time()
    ask.get("/api/runs")
    assert time.process_time() - began < 1.0


def test_tokens_are_asked_for_on_every_address(root):
    ask = Client(root, token="open-sesame-123")  # noqa: S106 — of this test
    listed = Client(root).get("/openapi.json").json()["paths"]
    pages = ("/", "/run/{run}", "/run/{run}/clients", "/run/{run}/report", "/study/{study}", "/docs", "/openapi.json")
    for path in (*listed, *pages):
        where = path.format(run="knob", study="study", model="0.2", version="latest", file="model.onnx")
        for method in ("GET", "POST", "HEAD", "PUT", "OPTIONS"):
            answer = ask.request(method, where)
            assert answer.status_code == 401, (method, path)
            assert "knob" not in answer.text
    assert ask.get("//api/runs").status_code == 401
    assert ask.get("/login/../api/runs").status_code in (401, 404, 405)
    assert ask.get("/static/x/../../api/runs").status_code in (401, 404)
    with Running(root, token="open-sesame-123") as server:  # noqa: S106 — as a real server reads paths
        for path in ("/login/%2e%2e/api/runs", "/static/%2e%2e/api/runs", "/static/../api/runs", "/login/../api/runs"):
            answer = httpx.get(httpx.URL(server.url).copy_with(raw_path=path.encode()))
            assert answer.status_code in (401, 404, 405), path
            assert "study" not in answer.text
