"""The page in a browser: Debian's Chromium, driven by Playwright."""

import csv
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from axe_playwright_python.sync_playwright import Axe
from report_cases import ALL_TRAINED, EVIL, FIGURES, federated, private, regressed, rejecting, softmax

import equipoise as eq
from equipoise.metrics import summarise
from equipoise.report import write_report

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine to open the page with (apt-get install chromium)"),
]

# Text that leaves the page or, inside a figure, the figure; a box that scrolls may hold wider text.
OVERFLOWING = """() => {
  const found = [];
  for (const element of document.querySelectorAll("main *")) {
    if (element.closest(".scroll") || element.closest("svg") || !element.innerText) continue;
    if (element.getBoundingClientRect().right > innerWidth + 1) found.push(element.innerText.slice(0, 60));
  }
  for (const text of document.querySelectorAll(".plot text")) {
    const inner = text.getBoundingClientRect(), outer = text.closest(".plot").getBoundingClientRect();
    const outside = inner.left < outer.left - 2 || inner.right > outer.right + 2 || inner.bottom > outer.bottom + 2;
    if (inner.width && outside) found.push(text.textContent);
  }
  return found;
}"""
# The names of an axis must not lie on its numbers, nor the legend on either.
OVERLAPPING = """() => {
  const found = [];
  const box = (element) => element.getBoundingClientRect();
  const cross = (a, b) => Math.min(a.right, b.right) - Math.max(a.left, b.left) > 1
    && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 2;
  for (const plot of document.querySelectorAll(".plot")) {
    const titles = [...plot.querySelectorAll(".g-xtitle text, .g-x2title text")];
    const others = [...plot.querySelectorAll(".xtick text, .x2tick text, .legend")];
    for (const title of titles) for (const other of others)
      if (title.textContent && cross(box(title), box(other))) found.push([plot.dataset.figure, title.textContent]);
  }
  return found;
}"""


@pytest.fixture
def opened(browser):
    """A function that opens a page; at the end nothing was complained of and nothing was fetched."""
    contexts, wrong = [], []

    def open_page(path, width=1280, height=800, **options):
        context = browser.new_context(viewport={"width": width, "height": height}, **options)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: wrong.append(f"console: {message.text}"))
        page.on("pageerror", lambda failure: wrong.append(f"failure: {failure}"))
        page.on("request", lambda request: wrong.append(request.url) if not allowed(request.url) else None)
        page.goto(Path(path).as_uri())
        page.wait_for_selector("html[data-figures=drawn]", state="attached", timeout=30_000)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert wrong == []


def allowed(url):
    return url.startswith(("file:", "data:", "blob:"))


def readable(page, width):
    """All figures drawn, nothing cut off, nothing over something else, no scrolling sideways."""
    drawn = page.evaluate(
        """() => [...document.querySelectorAll(".plot")].map((plot) =>
          [plot.dataset.figure, plot.querySelectorAll("svg.main-svg .trace, svg.main-svg .point").length,
           plot.getBoundingClientRect().width])"""
    )
    for name, traces, wide in drawn:
        assert traces > 0, name
        assert wide <= width, name
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert page.evaluate(OVERFLOWING) == []
    assert page.evaluate(OVERLAPPING) == []
    return {name for name, _, _ in drawn}


@pytest.mark.parametrize("width", [1280, 390])
def test_a_comparison(comparison, tmp_path, opened, width):
    page = opened(comparison.report(tmp_path / "r.html"), width)
    assert readable(page, width) == FIGURES
    # The first screen shows the headline and the histogram's first bars.
    top = page.evaluate("document.querySelector('#figure-histogram .bars').getBoundingClientRect().top")
    assert top < 500


@pytest.mark.parametrize(("width", "scheme"), [(1280, "dark"), (390, "light")])
def test_who_gains_and_who_pays_is_readable_and_accessible(comparison, tmp_path, opened, width, scheme):
    runs = comparison.results["FedAvg"] + [
        replace(run, name=f"method {k}") for k in range(4) for run in comparison.results["Δ-FL 0.5"]
    ]
    page = opened(write_report(runs, tmp_path / "r.html"), width, color_scheme=scheme)
    readable(page, width)
    closed = page.locator("details:not([open])")
    before = closed.count()
    closed.first.locator("summary").focus()
    page.keyboard.press("Enter")
    assert closed.count() == before - 1
    readable(page, width)
    found = Axe().run(page).response["violations"]
    assert [each["id"] for each in found if each["impact"] in ("serious", "critical")] == []


def test_a_method_is_hidden_in_all_figures_and_a_figure_is_saved(comparison, tmp_path, opened):
    page = opened(comparison.report(tmp_path / "r.html"))
    page.locator("#figure-percentiles .legendtoggle").nth(1).click()
    hidden = (
        "() => [...document.querySelectorAll('.plot')].filter((p) => p.data.some((t) => t.visible === 'legendonly')).length"
    )
    page.wait_for_function(f"({hidden})() === 6")  # all but the histogram, whose panels have names
    page.locator("#figure-percentiles .plot").hover()
    with page.expect_download() as download:
        page.locator("#figure-percentiles .modebar-btn").click()
    assert download.value.suggested_filename == "equipoise-percentiles.svg"
    assert Path(download.value.path()).read_text().startswith("<svg")
    assert page.locator(".modebar-btn").count() == 7  # nothing but saving, once a figure


def test_words_appear_under_the_pointer(comparison, tmp_path, opened):
    page = opened(comparison.report(tmp_path / "r.html"))
    plot = page.locator("#figure-percentiles .plot")
    plot.scroll_into_view_if_needed()
    box = plot.bounding_box()
    for step in range(2):
        page.mouse.move(box["x"] + box["width"] / 2 + step, box["y"] + 120)
    page.wait_for_selector("#figure-percentiles .hoverlayer text")
    words = page.locator("#figure-percentiles .hoverlayer").text_content()
    assert re.search(r"[\d.]+ % of the clients see at most", words)
    assert re.search(r"FedAvg : [\d.]+ % \(seeds [\d.]+ to [\d.]+\)", words)


def test_one_run_dark_and_on_paper(run, tmp_path, opened):
    page = opened(run.report(tmp_path / "r.html"), 390, color_scheme="dark")
    readable(page, 390)
    paper = "() => document.querySelector('.plot')._fullLayout.paper_bgcolor"
    assert page.evaluate(paper) == "#1d232c"
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert page.evaluate(paper) in ("#fff", "#ffffff")
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert page.evaluate(paper) == "#1d232c"
    page.set_viewport_size({"width": 1280, "height": 800})
    page.wait_for_function("() => document.querySelector('.plot').dataset.narrow === 'false'")
    readable(page, 1280)


@pytest.mark.parametrize("width", [1280, 390])
def test_personal_models_attack_rejected_updates_and_privacy(attacked, tmp_path, opened, width):
    page = opened(write_report([private(rejecting(run)) for run in attacked.all_results], tmp_path / "r.html"), width)
    assert readable(page, width) == {
        *(FIGURES - ALL_TRAINED), "own", "privacy",
    }  # fmt: skip
    row = page.locator("#table-numbers tbody tr")
    assert row.nth(2).locator("th").inner_text() == "shared model"
    assert page.locator("#attack, #rejected, #privacy").count() == 3
    tall = page.evaluate("[...document.querySelectorAll('tr.below th')].map((e) => e.getBoundingClientRect().height)")
    assert max(tall) < 60  # on a telephone, too, the name does not break into many lines


def test_a_client_of_the_own_models_figure_says_who_it_is(attacked, tmp_path, opened):
    page = opened(attacked.results["Ditto"][0].report(tmp_path / "r.html"))
    plot = page.locator("#figure-own .plot")
    plot.scroll_into_view_if_needed()
    point = page.locator("#figure-own .trace.scatter .point").first.bounding_box()
    for step in range(2):
        page.mouse.move(point["x"] + point["width"] / 2 + step, point["y"] + point["height"] / 2)
    page.wait_for_selector("#figure-own .hoverlayer text")
    words = page.locator("#figure-own .hoverlayer").text_content()
    assert re.search(r"clients: \d+ \(c\d+.*shared model [\d.]+ %.*own model [\d.]+ %", words)


def test_a_regression(tmp_path, opened):
    readable(opened(regressed().report(tmp_path / "r.html"), 390), 390)


def test_hostile_and_long_names(run, tmp_path, opened):
    ids = tuple(f"{EVIL}{k}" for k in range(len(run.clients)))
    names = [EVIL, "_$x$ %s", "方法 Δ-FL ½", "x" * 80, *(f"a method with quite a long name, number {k}" for k in range(6))]
    results = [replace(run, name=name, clients=replace(run.clients, client=ids)) for name in names]
    page = opened(write_report(results, tmp_path / "r.html"), 390)
    readable(page, 390)
    assert page.locator("#figure-percentiles .legendtext").nth(1).text_content() == "_$x$ %s"
    assert page.locator("main b").count() == 0


@pytest.fixture(scope="module")
def family():
    return eq.train_family(softmax(), federated(), tails=[1.0, 0.6, 0.3], rounds=6, clients_per_round=6, progress=False)


def figures_at(family, value):
    """Mean, 90th percentile and worst tenth with the model `family.at(value)`, client by client in plain torch."""
    model, clients = family.at(value), federated().test
    with torch.no_grad():
        errors = [(model(x).argmax(1) != y).double().mean() for x, y in (clients.client(at=k) for k in range(len(clients)))]
    found = summarise(torch.stack(errors), clients.sizes)
    return found.mean, found.percentiles[90], found.worst_10


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (390, "dark")])
def test_the_knob_of_a_family_in_its_report(family, tmp_path, opened, width, scheme):
    """The file alone, without a server: keyboard and mouse turn the knob, and its numbers are those of the models."""
    page = opened(family.report(tmp_path / "r.html"), width, color_scheme=scheme)

    def shown():
        return tuple(float(page.get_attribute(f"#knob-{key}", "data-value")) for key in ("mean", "percentile_90", "worst_10"))

    assert shown() == pytest.approx(figures_at(family, 1.0))
    page.focus("#knob-slider")
    for key, value in (("ArrowRight", 0.6), ("End", 0.3), ("ArrowLeft", 0.6), ("Home", 1.0)):
        page.keyboard.press(key)
        assert shown() == pytest.approx(figures_at(family, value))
        assert page.inner_text("#knob-value") == f"tail {value:g}"
        assert page.inner_text("#knob-table tr.here th") == f"{value:g}"
    box = page.locator("#knob-slider").bounding_box()
    page.mouse.click(box["x"] + box["width"] - 6, box["y"] + box["height"] / 2)
    assert shown() == pytest.approx(figures_at(family, 0.3))
    assert page.locator("#knob-histogram rect.bar").count() > 0
    assert page.locator("#knob-tradeoff .dot.here").count() == 1
    readable(page, width)
    found = Axe().run(page).response["violations"]
    assert [each["id"] for each in found if each["impact"] in ("serious", "critical")] == []


def test_the_table_of_all_clients_in_a_report(run, tmp_path, opened):
    page = opened(run.report(tmp_path / "r.html"), 390)
    names = page.locator("#clients-table thead th").all_inner_texts()
    column = next(k for k, name in enumerate(names) if name.startswith("error"))
    page.click(f"#clients-table th >> nth={column} >> button")
    errors = run.clients.served_error.tolist()  # of all splits
    assert (
        page.inner_text(f"#clients-table tbody tr:first-child >> :nth-child({column + 1})") == f"{100 * max(errors):.1f}\u00a0%"
    )
    page.fill("#clients-search", run.clients.client[0])
    wanted = [name for name in run.clients.client if run.clients.client[0] in name]
    assert page.locator("#clients-table tbody tr").count() == len(wanted)
    with page.expect_download() as download:
        page.click("#clients-save")
    with Path(download.value.path()).open(encoding="utf-8-sig", newline="") as file:
        saved = list(csv.DictReader(file))
    assert sorted(row["client"] for row in saved) == sorted(wanted)
