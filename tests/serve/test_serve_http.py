"""The HTTP API: what it gives, and what it refuses."""

import hashlib
import json
import os
import shutil
import socket
import threading
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch
from served import Client
from typer.testing import CliRunner

import equipoise as eq
from equipoise.cli.commands import app as command_line
from equipoise.errors import ConfigError
from equipoise.export.onnx_runs import OnnxModel
from equipoise.serve import connections, guard, live, predictions, questions
from equipoise.serve.library import Library
from equipoise.serve.run_server import ServerOptions, listen, serve
from equipoise.serve.terminal import frame

TOKEN = "open-sesame-123"  # noqa: S105 — of this test
EVIL = '<img src=x onerror=alert(1)></script><script>alert("x")</script>'


@pytest.fixture(scope="module")
def ask(root):
    return Client(root)


# ------------------------------------------------------------------------------------------------------------- what is there


def test_runs_studies_and_the_knob(ask, family):
    listed = ask.get("/api/runs").json()
    assert [run["id"] for run in listed["runs"]] == ["knob", "study~tail-0.6-0", "study~tail-1.0-0"]
    assert listed["studies"] == {"study": ["study~tail-1.0-0", "study~tail-0.6-0"]}
    knob = ask.get("/api/runs/knob/family").json()
    assert [member["value"] for member in knob["members"]] == [1.0, 0.6, 0.2]
    for member in knob["members"]:
        error = family.results[member["value"]].summary().error
        assert (member["mean"], member["percentile_90"], member["worst_10"]) == pytest.approx(
            (error.mean, error.percentiles[90], error.worst_10)
        )
        assert sum(member["counts"]) == 25
    first, last = (family.results[value].clients.where("test").error for value in (1.0, 0.2))
    assert knob["members"][2]["gains"] == int((last < first - 1e-12).sum())
    assert knob["members"][2]["loses"] == int((last > first + 1e-12).sum())
    study = ask.get("/api/studies/study").json()
    assert (study["ended"], [row["name"] for row in study["runs"]]) == (2, ["tail 1", "tail 0.6"])
    assert study["runs"][0]["figures"]["mean"] == pytest.approx(family.results[1.0].summary().error.mean)
    rounds = ask.get("/api/runs/knob/rounds").json()
    losses = [report.loss for report in family.results[1.0].history.rounds]
    assert [row[1] for row in rounds["curves"]["tail 1"]] == pytest.approx(losses)


def test_models_by_value_and_version_with_checksums(ask, family):
    models = ask.get("/api/runs/knob/models").json()
    version = models["versions"][0]
    assert models["latest"] == version["version"]
    for member in version["models"]:
        for about in member["files"].values():
            answer = ask.get(about["url"])
            assert hashlib.sha256(answer.content).hexdigest() == about["sha256"] == answer.headers["etag"].strip('"')
            assert len(answer.content) == about["bytes"]
            assert "immutable" in answer.headers["cache-control"]
    latest = ask.get("/api/runs/knob/models/0.6/latest/model.safetensors")
    assert latest.headers["cache-control"] == "no-cache"
    assert latest.headers["x-model-version"] == version["version"]
    known = {"if-none-match": latest.headers["etag"]}
    again = ask.get("/api/runs/knob/models/tail-0.6/latest/model.safetensors", headers=known)
    assert (again.status_code, again.content) == (304, b"")
    assert ask.get("/api/runs").headers["etag"] == ask.get("/api/runs").headers["etag"]
    tag = ask.get("/api/runs").headers["etag"]
    assert ask.get("/api/runs", headers={"if-none-match": tag}).status_code == 304


def test_a_prediction_is_the_models(ask, family, data):
    x, _ = data.test.client(at=0)
    answer = ask.post("/predict", json={"run": "knob", "model": "0.2", "inputs": x[:3].tolist()}).json()
    np.testing.assert_allclose(answer["outputs"], family.at(0.2)(x[:3]).detach().numpy(), rtol=1e-4, atol=1e-5)


def test_a_run_that_is_no_family_is_asked_and_downloaded_like_one(ask, family, data):
    x, y = data.test.client(at=0)
    run = "study~tail-0.6-0"
    answer = ask.post("/predict", json={"run": run, "inputs": x[:3].tolist()}).json()
    np.testing.assert_allclose(answer["outputs"], family.at(0.6)(x[:3]).detach().numpy(), rtol=1e-4, atol=1e-5)
    about = ask.get(f"/api/runs/{run}/models").json()
    assert (about["knob"], about["latest"]) == (None, answer["version"])
    files = about["versions"][0]["models"][0]["files"]
    assert set(files) == {"model.safetensors", "model.onnx", "score.onnx", "model.card.md", "model.card.json"}
    for file in files.values():
        assert hashlib.sha256(ask.get(file["url"]).content).hexdigest() == file["sha256"]
    score = OnnxModel(ask.get(files["score.onnx"]["url"]).content, source="score.onnx")
    loss, _ = score([x.numpy(), y.numpy()])
    assert float(loss.mean()) == pytest.approx(family.losses((x, y))[0.6], abs=1e-4)
    assert "model.onnx" in ask.get(f"/run/{run}").text
    wrong = ask.post("/predict", json={"run": run, "model": "0.6", "inputs": x[:3].tolist()})
    assert (wrong.status_code, "The models are model." in wrong.json()["error"]) == (404, True)  # never another model
    without = ask.post("/predict", json={"run": "study~tail-1.0-0", "inputs": x[:3].tolist()})
    assert (without.status_code, "EQUIPOISE_ONNX=0" in without.json()["error"]) == (404, True)
    assert "There is no ONNX: the run was told to leave none" in ask.get("/run/study~tail-1.0-0").text


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        ({"inputs": [[0.0] * 20]}, 422, "run is missing"),
        ({"run": "knob", "model": "0.2"}, 422, "inputs are missing"),
        (
            {"run": "knob", "model": "0.3", "inputs": [[0.0] * 20]},
            404,
            "There is no model at '0.3'. The models are 1, 0.6, 0.2.",
        ),
        ({"run": "knob", "model": "0.2", "version": "9", "inputs": [[0.0] * 20]}, 404, "has no version '9'"),
        ({"run": "nobody", "inputs": [[0.0] * 20]}, 404, "There is no run 'nobody' here"),
        ({"run": "knob", "model": "0.2", "inputs": [[0.0] * 19]}, 422, "must be of shape (examples, 20)"),
        ({"run": "knob", "model": "0.2", "inputs": [[0.0] * 20, [0.0]]}, 422, "must be numbers, each example of shape (20)"),
        ({"run": "knob", "model": "0.2", "inputs": "text"}, 422, "must be a list of 1 to 256 examples"),
        ({"run": "knob", "model": "0.2", "inputs": [[0.0] * 20] * 257}, 422, "must be a list of 1 to 256 examples"),
        ({"run": "knob", "model": "0.2", "inputs": [["a"] * 20]}, 422, "must be numbers"),
        ({"run": "knob", "model": "0.2", "inputs": [[1e39] * 20]}, 422, "hold NaN or infinity"),
        ({"run": "knob", "model": "0.2", "rows": [{"a": 1}]}, 422, "rows are for models on a table"),
        ({"run": "knob", "more": 1}, 422, "more"),
    ],
)
def test_a_bad_question_is_answered_in_words(ask, body, status, words):
    answer = ask.post("/predict", json=body)
    assert answer.status_code == status, answer.text
    assert words in answer.json()["error"]


def endless_model():
    """An ONNX model that counts to 10¹² before it gives its inputs back."""
    from onnx import TensorProto, helper

    value = helper.make_tensor_value_info
    many = helper.make_tensor("many", TensorProto.INT64, [], [10**12])
    yes = helper.make_tensor("yes", TensorProto.BOOL, [], [True])
    body = helper.make_graph(
        [helper.make_node("Identity", ["go"], ["on"]), helper.make_node("Identity", ["carried"], ["next"])], "body",
        [value("k", TensorProto.INT64, []), value("go", TensorProto.BOOL, []), value("carried", TensorProto.FLOAT, None)],
        [value("on", TensorProto.BOOL, []), value("next", TensorProto.FLOAT, None)],
    )  # fmt: skip
    graph = helper.make_graph(
        [helper.make_node("Loop", ["many", "yes", "x"], ["output"], body=body)], "endless",
        [value("x", TensorProto.FLOAT, ["batch", 20])], [value("output", TensorProto.FLOAT, None)], [many, yes],
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9).SerializeToString()


def test_a_model_that_takes_too_long_is_stopped_and_others_are_answered(root, tmp_path, monkeypatch):
    own = Path(shutil.copytree(root, tmp_path / "runs"))
    place, content = own / "study" / "tail-0.6-0", endless_model()
    (place / "model.onnx").write_bytes(content)
    table = json.loads((place / "model.json").read_text())
    about = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    table["members"][0]["files"]["model.onnx"] = about
    (place / "model.json").write_text(json.dumps(table))
    monkeypatch.setattr(predictions, "SECONDS", 0.5)
    monkeypatch.setattr(questions, "WAIT_SECONDS", 0.1)
    ask = Client(own)
    question = {"run": "study~tail-0.6-0", "inputs": [[0.0] * 20]}
    answer = ask.post("/predict", json=question)
    assert (answer.status_code, "took longer than 0.5 seconds" in answer.json()["error"]) == (503, True)
    monkeypatch.setattr(predictions, "SECONDS", 3.0)
    threads = [threading.Thread(target=ask.post, args=("/predict",), kwargs={"json": question}) for _ in range(2)]
    for thread in threads:
        thread.start()
    time.sleep(0.5)
    busy = ask.post("/predict", json={"run": "knob", "model": "0.2", "inputs": [[0.0] * 20]})
    assert (busy.status_code, "Too many predictions" in busy.json()["error"]) == (503, True)
    assert busy.headers["retry-after"] == "5"
    assert ask.get("/api/runs").status_code == 200
    for thread in threads:
        thread.join()
    assert ask.post("/predict", json={"run": "knob", "model": "0.2", "inputs": [[0.0] * 20]}).status_code == 200


def test_no_json_and_huge_uploads(ask, server):
    assert ask.post("/predict", content=b"{", headers={"content-type": "application/json"}).status_code == 422
    assert ask.post("/predict", content=b"[" * 100_000, headers={"content-type": "application/json"}).status_code == 400
    huge = ask.post("/predict", content=b"0" * (guard.LARGEST_BODY + 1))
    assert (huge.status_code, "larger than 1 MB" in huge.json()["error"]) == (413, True)

    def pieces():
        for _ in range(40):
            yield b"0" * 65536

    streamed = httpx.post(f"{server.url}/predict", content=pieces(), headers={"content-type": "application/json"})
    assert streamed.status_code == 413  # without a length, counted as it comes


def test_pages_are_there_without_javascript_and_the_api_is_described(ask):
    page = ask.get("/run/knob").text
    assert page.count("<tr>") > 5
    assert "All positions of the knob" in page
    for address in ("/", "/run/knob/clients", "/study/study", "/run/study~tail-0.6-0", "/docs"):
        assert ask.get(address).status_code == 200
    assert "/predict" in ask.get("/openapi.json").json()["paths"]
    report = ask.get("/run/study~tail-0.6-0/report")
    assert report.headers["content-security-policy"].startswith("sandbox")
    wrong = ask.get("/nowhere", headers={"accept": "text/html"})
    assert (wrong.status_code, "<h1>Not here</h1>" in wrong.text) == (404, True)


def test_static_files_are_compressed_and_never_change(ask):
    from equipoise.serve.static_files import static_files

    runtime = static_files()["ort-wasm-simd-threaded.wasm"]
    assert len(runtime.packed) < 4_000_000
    answer = ask.get(runtime.address, headers={"accept-encoding": "gzip"})
    assert (answer.headers["content-encoding"], answer.headers["content-type"]) == ("gzip", "application/wasm")
    assert answer.content[:4] == b"\0asm"
    assert ask.get(runtime.address, headers={"accept-encoding": "identity"}).content == answer.content
    assert ask.get(runtime.address.replace(runtime.digest, "0" * 16)).status_code == 404


# ------------------------------------------------------------------------------------------------------------------ who may ask


def test_other_hosts_and_origins_are_refused(ask):
    for host in ("evil.example", "127.0.0.1.evil.example", "", "127.0.0.1@evil.example", "localhost evil"):
        answer = ask.get("/api/runs", headers={"host": host})
        assert (answer.status_code, "runs" in answer.json()) == (421, False), host
    assert ask.get("/api/runs", headers={"host": "localhost:9"}).status_code == 200
    for origin in ("http://evil.example", "null", "https://127.0.0.1", "http://127.0.0.1:1"):
        assert ask.get("/api/runs", headers={"origin": origin}).status_code == 403, origin
    allowed = ask.get("/api/runs", headers={"origin": "http://127.0.0.1"})
    assert allowed.status_code == 200
    assert not any(name.startswith("access-control") for name in allowed.headers)
    assert ask.request("OPTIONS", "/api/runs", headers={"origin": "http://evil.example"}).status_code == 403
    for method in ("put", "delete", "patch"):
        assert ask.request(method.upper(), "/api/runs").status_code == 405
    assert "script-src 'self'" in allowed.headers["content-security-policy"]
    assert "unsafe-inline" not in allowed.headers["content-security-policy"]


def test_a_token_is_asked_for_and_compared_in_constant_time(root, monkeypatch):
    compared = []
    real = guard.hmac.compare_digest
    monkeypatch.setattr(guard.hmac, "compare_digest", lambda a, b: compared.append((len(a), len(b))) or real(a, b))
    ask = Client(root, token=TOKEN)
    for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "Bearer"}, {"cookie": "equipoise=open-sesame-123"},
                    {"authorization": "Basic open-sesame-123"}, {"cookie": "\x00=;;"}):  # fmt: skip
        answer = ask.get("/api/runs", headers=headers)
        assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")
    assert ask.get("/api/runs?token=wrong").status_code == 401
    assert compared
    assert all(one == other for one, other in compared)  # digests: no length, no prefix is told by the time
    assert ask.get("/api/runs", headers={"authorization": "Bearer open-sesame-123"}).status_code == 200
    page = ask.get("/run/knob", headers={"accept": "text/html"})
    assert (page.status_code, 'type="password"' in page.text) == (401, True)
    assert ask.post("/login", data={"token": "wrong"}).status_code == 401
    entered = ask.get("/run/knob?token=open-sesame-123")
    assert (entered.status_code, entered.headers["location"]) == (303, "/run/knob")
    cookie = entered.headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=strict" in cookie
    assert "open-sesame" not in cookie
    assert ask.get("/api/runs").status_code == 200  # the cookie


def test_beyond_this_machine_there_is_a_token(root, monkeypatch):
    said = []
    monkeypatch.setattr("uvicorn.Server.run", lambda self, sockets: [each.close() for each in sockets])
    anywhere = "0.0.0.0"  # noqa: S104
    serve(root, ServerOptions(host=anywhere, port=0), say=said.append)
    assert "?token=" in said[0]
    assert "plain text" in said[2]
    said.clear()
    serve(root, ServerOptions(port=0), say=said.append)
    assert "token" not in said[0]
    with pytest.raises(ConfigError, match="at least 12 characters"):
        ServerOptions(token=TOKEN[:5])
    with pytest.raises(ConfigError, match="TLS needs both"):
        ServerOptions(certificate=Path("a.pem"))
    with pytest.raises(ConfigError, match="is no folder"):
        serve(root / "nowhere", ServerOptions(port=0), say=said.append)


def test_a_port_in_use_is_refused_with_another(root):
    taken = listen("127.0.0.1", 0)
    port = taken.getsockname()[1]
    done = CliRunner().invoke(command_line, ["serve", str(root), "--port", str(port)])
    taken.close()
    assert done.exit_code == 2
    assert f"Port {port} is in use" in done.output
    with pytest.raises(ConfigError, match="is not known"):
        listen("no-such-host.invalid", 0)


# ----------------------------------------------------------------------------------------------------------- folders of others


@pytest.fixture
def own(root, tmp_path):
    """A copy of the served folder that a test may change."""
    return Path(shutil.copytree(root, tmp_path / "runs"))


@pytest.mark.parametrize("path", [
    "/api/runs/..", "/api/runs/%2e%2e%2f%2e%2e%2fetc", "/api/runs/..~..", "/api/runs/knob/models/../latest/model.onnx",
    "/api/runs/knob/models/0.2/latest/..%2f..%2f..%2fconfig.toml", "/api/runs/knob/models/0.2/latest/clients.parquet",
    "/api/runs/knob/models/0.2/latest/%00", "/run/..%2f..", "/static/x/..%2f..%2fapp.py",
    "/api/runs/knob/models/0.2/..%2f2/model.onnx",
])  # fmt: skip
def test_no_path_leads_out(ask, path):
    answer = ask.get(path)
    assert answer.status_code == 404
    assert "root:" not in answer.text
    assert "[data]" not in answer.text


def test_links_out_of_the_folder_are_not_followed(own, tmp_path):
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "config.toml").write_text('[train]\nname = "secret"\n')
    (secret / "rounds.jsonl").write_text('{"event": "start", "name": "s", "rounds": 77, "seed": 0, "first_round": 0}\n')
    (own / "linked").symlink_to(secret)
    (own / "half").mkdir()
    (own / "half" / "config.toml").write_text("[train]\nrounds = 1\n")
    (own / "half" / "rounds.jsonl").symlink_to(secret / "rounds.jsonl")
    (own / "half" / "model.safetensors").symlink_to("/etc/passwd")
    (own / "half" / "report.html").symlink_to("/etc/passwd")
    model = own / "knob" / "members" / "tail-0.2" / "model.onnx"
    copy = tmp_path / "copy.onnx"
    shutil.move(model, copy)
    model.symlink_to(copy)
    (own / "study" / "tail-0.6-0" / "model.onnx").unlink()
    os.mkfifo(own / "study" / "tail-0.6-0" / "model.onnx")
    ask = Client(own)
    assert "linked" not in [run["id"] for run in ask.get("/api/runs").json()["runs"]]
    assert ask.get("/api/runs/half").json()["rounds"] == 1
    for address in (
        "/api/runs/half/models/model/latest/model.safetensors", "/run/half/report",
        "/api/runs/knob/models/0.2/latest/model.onnx", "/api/runs/study~tail-0.6-0/models/model/latest/model.onnx",
    ):  # fmt: skip
        answer = ask.get(address)
        assert answer.status_code == 404, address
        assert "root:" not in answer.text


def test_a_version_that_was_changed_is_not_served(own):
    ask = Client(own)
    address = "/api/runs/knob/models/0.2/latest/model.safetensors"
    assert ask.get(address).status_code == 200
    (own / "knob" / "members" / "tail-0.2" / "model.safetensors").write_bytes(b"other")
    answer = ask.get(address)
    assert (answer.status_code, "versions do not change" in answer.json()["error"]) == (409, True)


def test_latest_moves_and_versions_stay(own, data):
    ask = Client(own)
    before = ask.get("/api/runs/knob/models").json()["latest"]
    address = "/api/runs/knob/models/0.6/{}/model.safetensors"
    first = ask.get(address.format("latest")).content
    other = eq.train_family(
        eq.models.Softmax(data.features, data.classes),
        data,
        tails=[1.0, 0.6],
        rounds=2,
        clients_per_round=9,
        seed=1,
        progress=False,
    )
    other.publish(own / "knob")
    after = ask.get("/api/runs/knob/models").json()
    assert after["latest"] != before
    assert ask.get(address.format("latest")).content != first
    assert ask.get(address.format(before)).content == first
    assert [member["value"] for member in ask.get("/api/runs/knob/family").json()["members"]] == [1.0, 0.6]


def test_a_folder_that_is_deleted_or_damaged_meanwhile(own):
    ask = Client(own)
    assert ask.get("/run/knob").status_code == 200
    (own / "knob" / "family.json").write_text("{")
    assert ask.get("/run/knob").status_code == 200  # curves are there, the knob is not
    shutil.rmtree(own / "knob" / "members")
    assert ask.get("/api/runs/knob/models").status_code == 404
    (own / "study" / "tail-0.6-0" / "clients.parquet").write_bytes(b"PAR1 nonsense")
    assert ask.get("/api/runs/study~tail-0.6-0/clients").status_code == 404
    (own / "study" / "tail-0.6-0" / "config.toml").write_bytes(b"\xff\xfe[[[")
    assert ask.get("/run/study~tail-0.6-0").status_code == 200
    shutil.rmtree(own / "knob")
    gone = ask.get("/api/runs/knob")
    assert (gone.status_code, "moved or deleted" in gone.json()["error"]) == (404, True)
    shutil.rmtree(own)
    assert (
        ask.get("/api/runs").json() == {"runs": [], "studies": {}}
        or time.sleep(2.1)
        or ask.get("/api/runs").json()["runs"] == []
    )
    assert ask.get("/?all").status_code == 200


def test_html_in_names_stays_text(family, tmp_path):
    table = family.results[1.0].clients
    named = tuple(f"{EVIL}{k}" for k in range(len(table)))
    shown = {v: replace(r, clients=replace(r.clients, client=named), data=EVIL) for v, r in family.results.items()}
    replace(family, results=shown).save(tmp_path / "<b>x")
    ask = Client(tmp_path)
    for address in ("/?all", "/run/%3Cb%3Ex", "/run/%3Cb%3Ex/clients", "/run/<script>", "/study/<script>"):
        page = ask.get(address, headers={"accept": "text/html"}).text
        assert "<img" not in page, address
        assert "<b>x" not in page
        assert page.count("<script") == page.count("</script>")
        assert "alert(1)></script>" not in page
    csv = ask.get("/api/runs/<b>x/clients?format=csv").text
    assert csv.splitlines()[0].startswith("client,split,examples")


@pytest.mark.parametrize("privacy", ["secure", "private"])
def test_single_clients_of_protected_runs_are_not_shown(privacy, data, tmp_path):
    part = eq.privacy.SecureAggregation()
    if privacy == "private":
        part = eq.privacy.DifferentialPrivacy(epsilon=8.0, delta=1e-2, clip=1.0)
    algorithm = eq.Algorithm(privacy=part)
    model = eq.models.Softmax(data.features, data.classes)
    result = eq.train(model, data, algorithm, rounds=2, clients_per_round=10, evaluate_every=1, progress=False)
    result.save(tmp_path / "run")
    ask = Client(tmp_path)
    for address in ("/api/runs/run/clients", "/api/runs/run/clients?format=csv", "/run/run/clients", "/run/run/report"):
        answer = ask.get(address)
        assert (answer.status_code, "protects single clients" in answer.text) == (403, True), address
    everything = ask.get("/run/run").text + ask.get("/api/runs/run/rounds").text + ask.get("/api/runs/run/metrics").text
    assert not any(name in everything for name in data.test.ids)
    assert '"counts"' not in everything
    assert (ask.get("/api/runs/run").json()["epsilon"] is not None) == (privacy == "private")


# --------------------------------------------------------------------------------------------------------------------- live


def write(path, *events, mode="a"):
    with path.open(mode) as file:
        file.writelines(event if isinstance(event, str) else json.dumps(event) + "\n" for event in events)


def round_event(number, **more):
    event = {"event": "round", "round": number, "loss": 1.0 / (1 + number), "tail_loss": 2.0, "loss_from": "work", "risk": None}
    return event | {"cohort": 5, "trained": 4, "seconds": 0.5} | more


def test_a_run_that_is_being_written(tmp_path):
    place = tmp_path / "run"
    place.mkdir()
    (place / "config.toml").write_text('[data]\nname = "x"\n[train]\nrounds = 10\n')
    library = Library(tmp_path)
    assert library.overview("run")["status"] == "waiting"
    log = place / "rounds.jsonl"
    write(log, {"event": "start", "name": "r", "rounds": 10, "seed": 0, "first_round": 0}, round_event(0), '{"event": "rou')
    follower = live.Follower(library, "run")
    first = follower.next_update()
    assert first["reset"]
    assert (first["state"]["status"], first["state"]["rounds_done"]) == ("running", 1)
    assert first["state"]["seconds_left"] == pytest.approx(4.5)
    assert follower.next_update() is None  # half a line is no event
    write(log, 'nd", "round": 1, "loss": null, "cohort": 5, "trained": 5, "seconds": 1.5}\n', "nonsense\n", "[1]\n")
    second = follower.next_update()
    assert not second["reset"]
    assert second["curves"] == {"": [(2, None, None, 5, None)]}
    write(log, {"event": "stopped", "why": "Stopped by Ctrl-C."})
    stopped = follower.next_update()["state"]
    assert (stopped["status"], stopped["why"]) == ("stopped", "Stopped by Ctrl-C.")
    assert stopped["resume"] == f"equipoise run --resume {place}"
    write(log, round_event(0), mode="w")  # resumed: the log is written anew
    assert follower.next_update()["reset"]
    os.utime(log, (time.time() - 60,) * 2)
    assert "killed" in library.state("run").why  # without a word, and without a process
    write(log, {"event": "end", "seconds": 3.0, "data": "x", "error_is_loss": False})
    assert follower.next_update()["state"]["status"] == "finished"
    shutil.rmtree(place)
    library.scan(force=True)
    with pytest.raises(Exception, match="moved or deleted"):
        follower.next_update()


def test_a_lock_says_that_a_run_works(tmp_path):
    from equipoise.core.files import locked
    from equipoise.serve.run_states import is_locked

    lock = tmp_path / ".lock"
    if not Path("/proc/locks").exists():
        pytest.skip("this system does not list its locks")
    with locked(lock, wait=False):
        assert is_locked(lock)
    assert not is_locked(lock)
    assert not is_locked(tmp_path / "absent")


def test_memory_stays_bounded_with_a_long_log(tmp_path):
    (tmp_path / "config.toml").write_text("[train]\nrounds = 100000\n")
    write(tmp_path / "rounds.jsonl", *(round_event(k) for k in range(30_000)))
    watched = Library(tmp_path).watched(tmp_path.name)
    curve = watched.log.curves[""]
    assert len(curve.rows) <= 2000
    assert curve.after(0)[-1][0] == 30_000
    assert len(curve.after(0)) < 2002


def test_events_grow_with_the_run(server, root):
    log = root / "live"
    log.mkdir()
    try:
        (log / "config.toml").write_text("[train]\nrounds = 3\n")
        write(log / "rounds.jsonl", {"event": "start", "name": "r", "rounds": 3, "seed": 0, "first_round": 0}, round_event(0))
        time.sleep(2.1)  # folders are looked for every two seconds
        with httpx.stream("GET", f"{server.url}/api/runs/live/events", timeout=10) as answer:
            lines = answer.iter_lines()
            got = []
            for line in lines:
                if line.startswith("data: "):
                    got.append(json.loads(line[6:]))
                    if len(got) == 1:
                        write(log / "rounds.jsonl", round_event(1))
                    else:
                        break
        assert got[0]["curves"][""][0][0] == 1
        assert [row[0] for row in got[1]["curves"][""]] == [2]
    finally:
        shutil.rmtree(log)


# ------------------------------------------------------------------------------------------------- slow and silent askers


@pytest.fixture
def connect(server):
    """Makes connections with a small buffer, on which lines are sent."""
    with ExitStack() as opened:

        def connection(*lines, buffer=4096):
            made = opened.enter_context(socket.socket())
            made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
            made.connect(("127.0.0.1", server.port))
            made.settimeout(20)
            made.sendall("".join(f"{line}\r\n" for line in lines).encode())
            return made

        yield connection


def take_all(connection):
    """What comes on a connection until it ends, in bytes."""
    total = 0
    try:
        while part := connection.recv(2**20):
            total += len(part)
    except ConnectionResetError:
        pass
    return total


def ended(server, before):
    """Whether the server has let go of all connections but those before, within a few seconds."""
    deadline = time.monotonic() + 15
    while len(server.server.server_state.connections) > before and time.monotonic() < deadline:
        time.sleep(0.05)
    return len(server.server.server_state.connections) <= before


@pytest.mark.parametrize("kind", ["file", "static"])
def test_a_slow_reader_is_let_go_and_holds_up_nobody(server, connect, monkeypatch, kind):
    """Readers who ask and take nothing: others are answered, and their connections end with a part of the answer."""
    from equipoise.serve.static_files import static_files

    monkeypatch.setattr(connections, "SEND_SECONDS", 0.5)
    path = "/run/knob/report" if kind == "file" else static_files()["ort-wasm-simd-threaded.wasm"].address
    held = len(server.server.server_state.connections)
    slow = [connect(f"GET {path} HTTP/1.1", "Host: 127.0.0.1", "") for _ in range(5)]
    began = time.monotonic()
    assert httpx.get(f"{server.url}/api/runs").status_code == 200
    assert time.monotonic() - began < 5
    assert ended(server, held)
    whole = len(httpx.get(server.url + path, headers={"accept-encoding": "identity"}).content)
    assert all(take_all(each) < whole for each in slow)


def test_a_reader_who_takes_its_time_gets_the_whole_file(server, connect, monkeypatch):
    """The limit is for a piece, not for the answer: who takes a little all the time is not cut off."""
    monkeypatch.setattr(connections, "SEND_SECONDS", 0.6)
    whole = len(httpx.get(f"{server.url}/run/knob/report").content)
    patient = connect("GET /run/knob/report HTTP/1.1", "Host: 127.0.0.1", "Connection: close", "", buffer=100_000)
    total, began = 0, time.monotonic()
    while part := patient.recv(100_000):
        total += len(part)
        time.sleep(0.03)
    assert total > whole
    assert time.monotonic() - began > 0.6  # longer than the limit, in all


def test_a_request_that_never_comes_or_never_ends_is_let_go(server, connect, monkeypatch):
    monkeypatch.setattr(connections, "REQUEST_SECONDS", 0.4)
    held = len(server.server.server_state.connections)
    silent = connect()
    half = connect("GET /api/runs HTTP/1.1", "Host: 127.0.0.1", "X-Slow: 1")
    second = connect("GET /openapi.json HTTP/1.1", "Host: 127.0.0.1", "")
    assert b" 200 " in second.recv(4096)
    second.sendall(b"GET /api/runs HTTP/1.1")  # on a connection that has been served
    assert ended(server, held)
    assert (take_all(silent), take_all(half)) == (0, 0)
    monkeypatch.setattr(guard, "BODY_SECONDS", 0.4)
    head = ["POST /predict HTTP/1.1", "Host: 127.0.0.1", "Content-Type: application/json", "Content-Length: 50", "", '{"run"']
    answer = connect(*head)
    assert b" 408 " in answer.recv(4096)
    endless = connect("GET /api/runs HTTP/1.1", "Host: 127.0.0.1", *(f"X-{k}: {'a' * 900}" for k in range(90)))
    assert b" 400 " in endless.recv(4096)


def test_watch_in_a_terminal(root, own):
    done = CliRunner().invoke(command_line, ["watch", str(root), "--once"], env={"COLUMNS": "200"})
    assert done.exit_code == 0, done.output
    assert "finished" in done.output
    assert "12/12" in done.output
    log = own / "study" / "tail-0.6-0" / "rounds.jsonl"
    log.write_text("".join(log.read_text().splitlines(keepends=True)[:-3]))
    os.utime(log, (time.time() - 60,) * 2)
    done = CliRunner().invoke(command_line, ["watch", str(own), "--once"], env={"COLUMNS": "200"})
    assert "stopped" in done.output
    assert CliRunner().invoke(command_line, ["watch", str(own / "nowhere")]).exit_code == 2
    library = Library(own)
    assert library.ids()
    shutil.rmtree(own)  # after it was listed
    shown, going = frame(library)
    assert (going, "no run" in str(shown)) == (True, True)


@pytest.mark.usefixtures("onnx")
def test_predictions_of_a_table_take_rows(tmp_path):
    frame = {
        "who": [f"c{k % 6}" for k in range(48)],
        "age": list(range(48)),
        "town": ["a", "b", "c"] * 16,
        "ill": ["no", "yes"] * 24,
    }
    import pandas as pd

    table = eq.data.from_frame(pd.DataFrame(frame), client="who", target="ill", test=0.3, seed=0)
    model = eq.models.Tabular(table.schema, hidden=())
    made = eq.train_family(model, table, tails=[1.0, 0.5], rounds=2, clients_per_round=3, progress=False)
    made.save(tmp_path / "table")
    ask = Client(tmp_path)
    rows = [{"age": 3, "town": "a"}, {"age": None, "town": "z"}]
    answer = ask.post("/predict", json={"model": "0.5", "rows": rows}).json()
    wanted = made.at(0.5)(table.schema.inputs_of(pd.DataFrame(rows))[0])  # without a notice, as the server
    np.testing.assert_allclose(answer["outputs"], wanted.detach().numpy(), rtol=1e-4, atol=1e-5)
    assert answer["classes"] == ["no", "yes"]
    assert ask.post("/predict", json={"model": "0.5", "rows": [{"age": 1}]}).status_code == 422
    assert torch.is_tensor(wanted)
