"""Beside the pages: all of them on one page, as plain text (llms-full.txt), and an index for language models (llms.txt)."""

import html
import re
import textwrap
from pathlib import Path

from bs4 import BeautifulSoup

LEFT_OUT = ("reference/generated/api/", "search", "genindex", "py-modindex")  # of the single page and of the full text


def order(app) -> list[str]:
    """Every page once, in the order of the table of contents."""
    env, seen = app.env, []

    def visit(name: str) -> None:
        if name not in seen:
            seen.append(name)
            for inner in env.toctree_includes.get(name, ()):
                visit(inner)

    visit(app.config.root_doc)
    return seen


def write(app, error) -> None:
    """Write the three files after the pages."""
    if error or app.builder.name != "html":
        return
    for page in Path(app.outdir).rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        if (mended := accessible(text)) != text:
            page.write_text(mended, encoding="utf-8")
    out, titles = Path(app.outdir), {name: node.astext() for name, node in app.env.titles.items()}
    articles, texts, index = [], [], []
    for name in order(app):
        page = out / f"{name}.html"
        if not page.exists():
            continue
        soup = BeautifulSoup(page.read_text(encoding="utf-8"), "html.parser")
        article = soup.find("article")
        if article is None:
            continue
        index.append(f"- [{titles[name]}]({name}.html): {lead(article)}")
        if any(name.startswith(start) for start in LEFT_OUT):
            continue
        texts.append(f"\n\n==== {titles[name]} ({name}.html) ====\n\n" + plain_text(article))
        articles.append(on_one_page(article, name))
    head = f"# Equipoise {app.config.version}\n\n> Federated learning for clients that are not average: tail risk, fairness, " \
           "robustness, personalisation\n> and privacy that compose. A Python library on PyTorch.\n\n"  # fmt: skip
    full = "The text of all pages is in [llms-full.txt](llms-full.txt).\n\n## Pages\n\n"
    (out / "llms.txt").write_text(head + full + "\n".join(index) + "\n", encoding="utf-8")
    (out / "llms-full.txt").write_text(head + "".join(texts), encoding="utf-8")
    frame = BeautifulSoup((out / f"{app.config.root_doc}.html").read_text(encoding="utf-8"), "html.parser")
    frame.find("article").replace_with(
        BeautifulSoup(f"<article role='main' id='furo-main-content'>{''.join(articles)}</article>", "html.parser")
    )
    for aside in frame.select(".toc-drawer, .related-pages"):
        aside.clear()
    frame.title.string = f"Equipoise {app.config.version} on one page"
    (out / "one-page.html").write_text(str(frame), encoding="utf-8")


def lead(article, most: int = 160) -> str:
    """How a page begins: its first paragraph, without the gallery's note on where to download an example."""
    paragraphs = (p for p in article.find_all("p") if not p.find_parent(class_="sphx-glr-download-link-note"))
    first = next((text for p in paragraphs if len(text := " ".join(p.get_text().split())) > 40), "")
    return textwrap.shorten(first, most, placeholder=" …")


def accessible(text: str) -> str:
    """The HTML of a page with what screen readers and keyboards need and the tools leave out."""
    text = text.replace('role="heading">', 'role="heading" aria-level="2">')  # captions of the sidebar
    text = text.replace(
        '<div class="math-wrapper docutils container">', '<div class="math-wrapper docutils container" tabindex="0">'
    )
    title = re.search(r"<h1>(.*?)<a ", text, flags=re.S)
    if title:  # the gallery names a picture by its file, or by a heading in the picture
        words = html.escape(re.sub(r"<[^>]+>", "", title.group(1)).strip(), quote=True)
        text = _PICTURE.sub(lambda m: m.group() if m[2].startswith(words) else f'{m[1]}"{_described(words, m[2])}"', text)
    # Links of thumbnails: their text is hidden behind the picture.
    return re.sub(
        r'<a class="reference internal" href="(plot_[^"]+)"><span class="(?:doc|std std-ref)">([^<]+)</span></a>',
        r'<a class="reference internal" href="\1" aria-label="\2"><span class="doc">\2</span></a>',
        text,
    )


_PICTURE = re.compile(r'(<img src="[^"]*/sphx_glr_plot_[^>]* alt=)"([^"]*)"')


def _described(title: str, alt: str) -> str:
    return title if re.match(r"plot \d", alt) else f"{title}: {alt}"


def plain_text(article) -> str:
    """The text of a page, blank lines between blocks; what only a browser uses is left out."""
    copy = BeautifulSoup(str(article), "html.parser")
    for node in copy.select(".headerlink, script, style, .matrix-box"):
        node.decompose()
    return re.sub(r"\n\s*\n+", "\n\n", copy.get_text("\n" if copy.find("pre") is None else "", strip=False)).strip()


def on_one_page(article, name: str) -> str:
    """A page as a section: its anchors get the page's name, its links point at sections, its images are found."""
    folder = Path(name).parent
    mark = name.replace("/", "-")
    for node in article.find_all(id=True):
        node["id"] = f"{mark}--{node['id']}"
    for node in article.find_all(attrs={"aria-labelledby": True}):
        node["aria-labelledby"] = " ".join(f"{mark}--{label}" for label in node["aria-labelledby"].split())
    for node in article.find_all(["img", "source"]):
        if node.get("src") and "://" not in node["src"] and not node["src"].startswith("data:"):
            node["src"] = normal(folder / node["src"])
        if node.get("srcset"):
            pairs = [pair.split() for pair in node["srcset"].split(",")]
            node["srcset"] = ", ".join(" ".join([normal(folder / pair[0]), *pair[1:]]) for pair in pairs)
    for node in article.find_all("a", href=True):
        target = node["href"]
        if "://" in target or target.startswith("mailto:"):
            continue
        path, _, fragment = target.partition("#")
        page = normal(folder / path) if path else f"{name}.html"
        if page.endswith(".html") and not page.startswith(("files/", "one-page", "genindex", "reference/generated/api/")):
            node["href"] = f"#{page[:-5].replace('/', '-')}" + (f"--{fragment}" if fragment else "")
        else:
            node["href"] = page + (f"#{fragment}" if fragment else "")
    inner = article.decode_contents()
    return f"<section id='{mark}'>{inner}</section><hr>"


def normal(path: Path) -> str:
    """A relative path without "..": from the top of the site."""
    steps: list[str] = []
    for step in path.parts:
        if step == ".." and steps:
            steps.pop()
        elif step != ".":
            steps.append(step)
    return "/".join(steps)


def setup(app):
    """Register the writer."""
    app.connect("build-finished", write, priority=900)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
