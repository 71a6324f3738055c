"""The pages in a browser: Debian's Chromium, driven by Playwright."""

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from served import Running
from test_choose import own_file
from test_serve_models import CASES, Sentences, clients, sentences, trained

import equipoise as eq
from equipoise.metrics import summarise
from equipoise.serve.choose import choose
from equipoise.serve.verdict import share_interval, student_interval

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine to open pages with (apt-get install chromium)"),
]
CONFIG = """
[data]
name = "label_shift"
train_clients = 60
validation_clients = 0
test_clients = 30
examples = 20
[model]
name = "softmax"
[family]
tails = [1.0, 0.5]
[train]
rounds = 400
clients_per_round = 10
evaluate_every = 20
engine = "loop"
"""


@pytest.fixture
def opened(browser):
    """A function that opens a page; at the end nothing was complained of, and no request has left the machine."""
    contexts, wrong, asked = [], [], []

    def open_page(url, ready, width=1280, **options):
        context = browser.new_context(viewport={"width": width, "height": 900}, **options)
        contexts.append(context)
        page = context.new_page()
        page.requests = []
        page.on("request", lambda request: asked.append(request.url))
        page.on("console", lambda message: wrong.append(f"console: {message.text}"))
        page.on("pageerror", lambda failure: wrong.append(f"failure: {failure}"))
        page.on("request", lambda request: page.requests.append((request.method, request.url, request.post_data_buffer)))
        page.goto(url)
        if ready:
            page.wait_for_selector(f"html[data-{ready}=ready]", state="attached", timeout=60_000)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert [url for url in asked if not url.startswith(("http://127.0.0.1:", "data:", "blob:"))] == []
    assert wrong == []


def serious(page):
    """What axe-core finds that is serious or worse."""
    from axe_playwright_python.sync_playwright import Axe

    found = Axe().run(page).response["violations"]
    return [(each["id"], each["nodes"][0]["html"][:120]) for each in found if each["impact"] in ("serious", "critical")]


def errors_at(family, data, value):
    """Mean, 90th percentile and worst tenth with the model `family.at(value)`, client by client in plain torch."""
    model = family.at(value)
    with torch.no_grad():
        errors = [(model(x).argmax(1) != y).double().mean() for x, y in (data.test.client(at=k) for k in range(len(data.test)))]
    found = summarise(torch.stack(errors), data.test.sizes)
    return found.mean, found.percentiles[90], found.worst_10


def shown(page):
    return tuple(float(page.get_attribute(f"#knob-{key}", "data-value")) for key in ("mean", "percentile_90", "worst_10"))


def no_scrolling_sideways(page):
    return page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_the_knob_by_keyboard_and_mouse_shows_the_numbers_of_the_models(server, family, data, opened):
    page = opened(f"{server.url}/run/knob", "knob")
    assert shown(page) == pytest.approx(errors_at(family, data, 1.0))
    page.focus("#knob-slider")
    page.keyboard.press("ArrowRight")
    assert shown(page) == pytest.approx(errors_at(family, data, 0.6))
    assert page.inner_text("#knob-mean") == f"{100 * errors_at(family, data, 0.6)[0]:.1f}\u00a0%"
    assert page.get_attribute("#knob-slider", "aria-valuetext").startswith("tail 0.6, trained for the worse 60 %")
    page.keyboard.press("End")
    assert shown(page) == pytest.approx(errors_at(family, data, 0.2))
    before, after = (family.results[v].clients.where("test").error for v in (1.0, 0.2))
    assert page.inner_text("#knob-gains") == f"{int((after < before - 1e-12).sum())} of 25 clients gain"
    change = (after - before).tolist()
    if min(change) < 0:
        best = family.results[1.0].clients.where("test").client[change.index(min(change))]
        assert page.inner_text("#knob-gain li:first-child b") == best
    assert float(page.locator("#knob-tradeoff .dot.here").count()) == 1
    box = page.locator("#knob-slider").bounding_box()
    page.mouse.click(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    assert shown(page) == pytest.approx(errors_at(family, data, 0.6))
    page.click("#knob-ticks button >> nth=0")
    assert shown(page) == pytest.approx(errors_at(family, data, 1.0))
    assert serious(page) == []
    assert no_scrolling_sideways(page)


def test_choosing_with_own_data_sends_none_of_it(server, family, data, opened, tmp_path):
    """The same losses in the browser, by `choose`, and by PyTorch; every request is a GET of the server's own files."""
    page = opened(f"{server.url}/run/knob", "choose")
    before = len(server.asked)
    for name in ("mine.csv", "mine.npz"):
        file = own_file(data, tmp_path / name)
        page.set_input_files("#choose-file", file)
        page.click("#choose-form button")
        page.wait_for_selector("#choose-problem:not(:empty), #choose-answer:not([hidden])", timeout=60_000)
        assert page.inner_text("#choose-problem") == ""
        losses = [float(cell.get_attribute("data-loss")) for cell in page.locator("#choose-rows [data-loss]").all()]
        wanted = family.losses(tuple(part[:15] for part in data.test.client(at=3)))
        by_command = choose(f"{server.url}/run/knob", file)
        assert losses == pytest.approx([wanted[value] for value in (1.0, 0.6, 0.2)], abs=1e-4)
        assert losses == pytest.approx([row.mean for row in by_command.verdict.members], abs=1e-4)
        assert page.inner_text("#choose-verdict") == str(by_command).splitlines()[-1]
    (tmp_path / "bad.csv").write_text("a,b\n1,2\n")
    page.set_input_files("#choose-file", tmp_path / "bad.csv")
    page.click("#choose-form button")
    page.wait_for_selector("#choose-problem:not(:empty)")
    assert "the models take 20" in page.inner_text("#choose-problem")
    assert {method for method, _, _ in page.requests} == {"GET"}
    assert all(not body for _, _, body in page.requests)
    assert all("?" not in url for _, url, _ in page.requests)
    paths = {path.split("/")[-1] for _, path, _ in server.asked[before:]}
    known = {"models", "score.onnx", "model.onnx", "runs", "ort.wasm.min.mjs", "ort-wasm-simd-threaded.mjs"}
    assert paths <= known | {"ort-wasm-simd-threaded.wasm"}
    both = "[EquipoiseOwnData.meanInterval([1, 2, 4, 7], 0.95), EquipoiseOwnData.shareInterval(3, 12, 0.95)]"
    found = page.evaluate(both)
    ours = student_interval(np.array([1.0, 2, 4, 7])), share_interval(3, 12)
    for theirs, mine in zip(found, ours, strict=True):
        assert (theirs["low"], theirs["high"]) == pytest.approx((mine.low, mine.high), rel=1e-6)


@pytest.mark.usefixtures("onnx")
def test_a_table_becomes_the_same_inputs_in_the_browser(opened, tmp_path):
    rng = np.random.default_rng(0)
    count = 120
    frame = pd.DataFrame({
        "who": [f"c{k % 8}" for k in range(count)], "age": np.where(rng.random(count) < 0.1, np.nan, rng.normal(50, 9, count)),
        "town": rng.choice([f"town {k}" for k in range(20)], count), "sex": rng.choice(["f", "m"], count),
        "member": rng.choice([True, False], count),
        "since": pd.to_datetime("2020-01-01") + pd.to_timedelta(rng.integers(0, 900, count), "D"),
        "ill": rng.choice(["no", "yes"], count),
    })  # fmt: skip
    table = eq.data.from_frame(frame, client="who", target="ill", test=0.3, seed=0, one_hot=4)
    model = eq.models.Tabular(table.schema, hidden=(4,))
    family = eq.train_family(model, table, tails=[1.0, 0.5], rounds=3, clients_per_round=4, progress=False)
    family.save(tmp_path / "runs" / "table")
    own = frame.iloc[:40].assign(town=["elsewhere, <b>", *frame["town"][1:40]]).drop(columns="who")
    own.to_csv(tmp_path / "own.csv", index=False)
    with pytest.warns(eq.errors.EquipoiseNotice, match="elsewhere"):
        inputs = table.schema.transform(own)
    wanted = family.losses((inputs, table.schema.targets(own)))
    with Running(tmp_path / "runs") as server:
        with pytest.warns(eq.errors.EquipoiseNotice, match="elsewhere"):
            by_command = choose(server.url, tmp_path / "own.csv")
        assert [row.mean for row in by_command.verdict.members] == pytest.approx(list(wanted.values()), abs=1e-4)
        page = opened(f"{server.url}/run/table", "choose", width=390, color_scheme="dark")
        page.set_input_files("#choose-file", tmp_path / "own.csv")
        page.click("#choose-form button")
        page.wait_for_selector("#choose-problem:not(:empty), #choose-answer:not([hidden])", timeout=60_000)
        assert page.inner_text("#choose-problem") == ""
        losses = [float(cell.get_attribute("data-loss")) for cell in page.locator("#choose-rows [data-loss]").all()]
        assert losses == pytest.approx(list(wanted.values()), abs=1e-4)
        assert serious(page) == []
        assert no_scrolling_sideways(page)
        page.close()


@pytest.mark.usefixtures("onnx")
@pytest.mark.parametrize("kind", ["several inputs", "sequences"])
def test_models_of_several_inputs_and_of_sequences_are_tried_in_the_browser(opened, tmp_path, kind):
    if kind == "sequences":
        model, data = Sentences, sentences()
    else:
        model, make, _ = CASES["a dict"]
        data = eq.FederatedData(eq.ClientSet.pack(clients(make)), test=eq.ClientSet.pack(clients(make, count=5)))
    family = trained(model, data)
    family.save(tmp_path / "runs" / "own")
    x, y = data.test.client(at=0)
    arrays = data.test.inputs(slice(0, len(y)), torch.float32)
    np.savez_compressed(tmp_path / "mine.npz", **{name: values.numpy() for name, values in arrays.items()}, y=y.numpy())
    np.savez(tmp_path / "bad.npz", y=y.numpy())
    with Running(tmp_path / "runs") as server:
        page = opened(f"{server.url}/run/own", "choose")
        page.set_input_files("#choose-file", tmp_path / "bad.npz")
        page.click("#choose-form button")
        page.wait_for_selector("#choose-problem:not(:empty)")
        assert "The npz file has no array" in page.inner_text("#choose-problem")
        page.set_input_files("#choose-file", tmp_path / "mine.npz")
        page.click("#choose-form button")
        page.wait_for_selector("#choose-answer:not([hidden])", timeout=60_000)
        losses = [float(cell.get_attribute("data-loss")) for cell in page.locator("#choose-rows [data-loss]").all()]
        assert losses == pytest.approx(list(family.losses((x, y)).values()), abs=1e-4)
        assert {method for method, _, _ in page.requests} == {"GET"}
        page.close()


def test_a_finished_run_a_study_and_a_stop_without_a_way_on(server, root, family, opened):
    page = opened(f"{server.url}/run/study~tail-0.6-0", "live")
    error = family.results[0.6].summary().error
    tiles = page.locator(".tile output").all_inner_texts()
    assert tiles == [f"{100 * value:.1f}\u00a0%" for value in (error.mean, error.percentiles[90], error.worst_10)]
    page = opened(f"{server.url}/study/study", None, width=390)
    page.wait_for_selector("#study-rows tr >> nth=1")
    assert page.locator("#study-rows tr").nth(1).locator("td").nth(1).inner_text() == tiles[0]
    box = page.locator("#study-rows tr").nth(1).locator("td").nth(2).bounding_box()
    assert box["x"] + box["width"] <= 390  # figures are seen without scrolling
    place = Path(shutil.copytree(root / "study" / "tail-1.0-0", root / "cut"))
    try:
        lines = (place / "rounds.jsonl").read_text().splitlines(keepends=True)
        stop = json.dumps({"event": "stopped", "why": "The disk is full."})
        (place / "rounds.jsonl").write_text("".join([*lines[:6], f"{stop}\n"]))
        time.sleep(2.1)  # folders are looked for every two seconds
        page = opened(f"{server.url}/run/cut", "live")
        assert page.inner_text("#why") == "The disk is full."
        assert not page.locator("#resume").is_visible()  # saved by Python: no command goes on with it
    finally:
        shutil.rmtree(place)


def test_live_curves_grow_during_a_real_run_and_a_stop_is_explained(opened, tmp_path):
    (tmp_path / "family.toml").write_text(CONFIG)
    place = tmp_path / "runs" / "live"
    command = [sys.executable, "-m", "equipoise", "run", str(tmp_path / "family.toml"), "--out", str(place)]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with Running(tmp_path / "runs") as server, subprocess.Popen(command, **quiet) as run:
        try:
            while not (place / "rounds.jsonl").exists() and run.poll() is None:
                time.sleep(0.1)
            page = opened(f"{server.url}/run/live", "live", width=390, color_scheme="dark")
            page.wait_for_selector("#live-loss path.curve", timeout=30_000)

            def done():
                return int(page.inner_text("#newest tbody tr:first-child td:first-of-type"))

            def curve():
                return page.get_attribute("#live-loss path.curve >> nth=0", "d")

            first, path = done(), curve()  # the page may be drawn anew between the two
            deadline = time.monotonic() + 30
            while (done() <= first or curve() == path) and time.monotonic() < deadline:
                page.wait_for_timeout(200)
            assert done() > first
            assert curve() != path
            page.wait_for_selector("#live-spread rect.bar", timeout=30_000)
            assert "left" in page.inner_text("#left")
            assert page.inner_text("#badge") == "running"
            assert serious(page) == []
            assert no_scrolling_sideways(page)
        finally:
            run.send_signal(2)
            run.wait(60)
        page.wait_for_selector("#stopped:not([hidden])", timeout=20_000)
        assert page.inner_text("#badge") == "stopped"
        assert "Ctrl-C" in page.inner_text("#why")
        assert page.inner_text("#resume") == f"equipoise run --resume {place}"
        page.close()  # before its server


@pytest.mark.parametrize(("scheme", "width"), [("light", 390), ("dark", 1280)])
def test_all_pages_are_readable_in_dark_and_light_and_on_a_telephone(server, opened, scheme, width):
    for path, ready in (("/?all", None), ("/study/study", None), ("/run/study~tail-0.6-0", "live"), ("/docs", None)):
        page = opened(server.url + path, ready, width=width, color_scheme=scheme)
        assert serious(page) == [], path
        assert no_scrolling_sideways(page), path
        ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert ground == ("rgb(20, 24, 31)" if scheme == "dark" else "rgb(246, 247, 249)")


def test_the_list_shows_runs_as_they_come_and_go_on(opened, tmp_path):
    place = tmp_path / "runs" / "first"
    place.mkdir(parents=True)
    (place / "config.toml").write_text("[train]\nrounds = 9\n")
    line = {"event": "round", "loss": 1.0, "cohort": 5, "trained": 5, "seconds": 0.5}
    with Running(tmp_path / "runs") as server:
        page = opened(f"{server.url}/?all", "list", width=390)
        (place / "rounds.jsonl").write_text("".join(json.dumps(line | {"round": k}) + "\n" for k in range(3)))
        page.wait_for_selector("td.rounds:text-is('3 of 9')", timeout=20_000)
        assert page.inner_text(".badge") == "running"
        (tmp_path / "runs" / "second").mkdir()
        (tmp_path / "runs" / "second" / "config.toml").write_text("[train]\nrounds = 2\n")
        page.wait_for_selector("tr[data-run] >> nth=1", timeout=20_000)
        page.close()


def test_all_clients_are_sorted_searched_and_saved(server, family, opened):
    page = opened(f"{server.url}/run/knob/clients", "clients")
    page.click("#clients-table th >> nth=3 >> button")
    errors = family.results[1.0].clients.error.tolist()
    assert page.get_attribute("#clients-table th >> nth=3", "aria-sort") == "descending"
    assert page.inner_text("#clients-table tbody tr:first-child td >> nth=2") == f"{100 * max(errors):.1f}\u00a0%"
    page.fill("#clients-search", "test-1")
    wanted = [name for name in family.results[1.0].clients.client if "test-1" in name]
    assert page.inner_text("#clients-status") == f"{len(wanted)} of 55 rows"
    with page.expect_download() as download:
        page.click("#clients-save")
    saved = pd.read_csv(Path(download.value.path()), encoding="utf-8-sig")
    assert sorted(saved["client"]) == sorted(wanted)
    assert serious(page) == []


def test_without_javascript_there_are_tables(server, opened, family):
    page = opened(f"{server.url}/run/knob", None, java_script_enabled=False)
    assert page.locator("#knob-table tbody tr").count() == 3
    assert not page.locator("#knob-slider").is_visible()
    assert f"{100 * family.results[0.2].summary().error.mean:.1f}" in page.inner_text("#knob-table")
    assert "equipoise choose" in page.inner_text(".choose noscript")
    assert page.locator("#newest tbody tr").count() == 3
    assert json.dumps(page.inner_text("h1"))
