"""The built site (`make docs`) in a browser that has no network.

`EQUIPOISE_SCREENSHOTS=DIR` keeps a picture of every page that is opened.
"""

import functools
import os
import re
import shutil
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urljoin

import pytest

ROOT = Path(__file__).parents[2]
SITE = ROOT / "docs" / "_build" / "html"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
PAGES = {
    "home": "index.html",
    "tutorial": "tutorials/tail.html",
    "gallery": "gallery/index.html",
    "matrix": "reference/generated/combinations.html",
    "search": "search.html?q=superquantile",
    "numbers": "explanation/numbers.html",  # formulas
    "api": "reference/generated/api/equipoise.risk.html",
    "given": "reference/generated/api/equipoise.given.html",
    "start": "start.html",
    "tables": "howto/tables.html",
    "errors": "reference/generated/errors.html",
    "configuration": "reference/generated/configuration.html",
    "commands": "reference/generated/commands.html",
}
pytestmark = [
    pytest.mark.docs,
    pytest.mark.skipif(not (SITE / "index.html").exists(), reason="the site is not built (make docs-only)"),
]
browser_needed = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine (apt-get install chromium)")


@pytest.fixture(scope="module")
def address():
    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(SITE)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    server.server_close()


@pytest.fixture
def opened(browser, address):
    """Open pages with every other host blocked; at the end nothing was asked of another host, and no script failed."""
    elsewhere, failed, contexts = [], [], []

    def open_page(name: str, width: int = 1280, scheme: str = "light"):
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        contexts.append(context)
        page = context.new_page()

        def route(request):
            if request.request.url.startswith((address, "data:")):
                request.continue_()
            else:
                elsewhere.append(request.request.url)
                request.abort()

        page.route("**/*", route)
        page.on("pageerror", lambda error: failed.append(str(error)))
        page.goto(urljoin(address, PAGES.get(name, name)))
        page.wait_for_load_state("networkidle")
        if folder := os.environ.get("EQUIPOISE_SCREENSHOTS"):
            page.screenshot(path=str(Path(folder) / f"{name.replace('/', '-')}-{width}-{scheme}.png"))
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert not elsewhere, f"asked of other hosts: {elsewhere}"
    assert not failed, failed


@browser_needed
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("name", PAGES)
def test_pages_open_offline_fit_and_are_accessible(opened, name, width, scheme):
    from axe_playwright_python.sync_playwright import Axe

    page = opened(name, width, scheme)
    assert page.locator("article h1, article h2").first.is_visible()
    wide = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
    assert wide <= 1, f"{name} is {wide} pixels wider than the window"
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", dark)[:3])) < 200) == (scheme == "dark"), dark
    violations = Axe().run(page).response["violations"]
    serious = {v["id"]: [n["html"][:160] for n in v["nodes"][:3]] for v in violations if v["impact"] in ("serious", "critical")}
    assert not serious, serious


@browser_needed
def test_search_finds_pages_without_a_network(opened):
    page = opened("search")
    page.wait_for_selector("#search-results li a")
    assert page.locator("#search-results li").count() > 3


@browser_needed
def test_formulas_are_drawn(opened):
    page = opened("numbers")
    page.wait_for_selector("mjx-container svg")
    assert page.locator("mjx-container").count() > 5


@browser_needed
def test_the_table_of_refusals_filters_and_sorts(opened):
    page = opened("matrix")
    rows = page.locator("#refused tbody tr:visible")
    every = rows.count()
    page.get_by_label("Filter refused pairs").fill("scaffold median")
    assert 0 <= rows.count() < every
    page.get_by_label("Filter refused pairs").fill("Krum secure")
    assert 0 < rows.count() < every
    assert "Krum" in rows.first.inner_text()
    page.get_by_label("Filter refused pairs").fill("")
    head = page.locator("#refused th").nth(2)
    head.get_by_role("button").press("Enter")
    assert head.get_attribute("aria-sort") == "ascending"
    column = [row.split("\t")[2] for row in page.locator("#refused tbody").inner_text().splitlines()[:2] if row.count("\t") > 2]
    assert column == sorted(column, key=str.lower)


@browser_needed
def test_the_matrix_shows_the_kinds_that_are_chosen(opened):
    page = opened("matrix")
    assert page.locator("#pairs tbody tr:visible").count() < page.locator("#pairs tbody tr").count()
    boxes = page.locator("#matrix-kinds fieldset").first.get_by_role("checkbox")
    before = page.locator("#pairs tbody tr:visible").count()
    boxes.nth(2).check()
    assert page.locator("#pairs tbody tr:visible").count() > before
    assert page.locator("#pairs td.no").count() > 100


@browser_needed
def test_code_can_be_copied(opened):
    page = opened("start.html")
    assert page.locator("button.copybtn").count() > 3
