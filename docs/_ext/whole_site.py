"""Beside the pages: their text in one file (llms-full.txt) with an index (llms.txt), for language models and for searching."""

import re
from pathlib import Path


def write(app, error) -> None:
    """Write the two files, and what keyboards and screen readers need and the tools leave out."""
    if error or app.builder.name != "html":
        return
    out, env = Path(app.outdir), app.env
    names = sorted(name for name in env.titles if not name.startswith("reference/generated/api/"))
    head = f"# Equipoise {app.config.version}\n\n> Federated learning for clients that are not average. A Python library on PyTorch.\n\n"
    index = "\n".join(f"- [{env.titles[name].astext()}]({name}.html)" for name in names)
    (out / "llms.txt").write_text(
        f"{head}The text of all pages: [llms-full.txt](llms-full.txt).\n\n{index}\n", encoding="utf-8"
    )
    texts = [f"==== {name}.html ====\n\n{Path(env.doc2path(name)).read_text(encoding='utf-8')}" for name in names]
    (out / "llms-full.txt").write_text(head + "\n\n".join(texts), encoding="utf-8")
    for page in out.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        if (mended := accessible(text)) != text:
            page.write_text(mended, encoding="utf-8")


def accessible(text: str) -> str:
    """The HTML of a page with levels of headings, formulas that keyboards reach, and pictures named by their page."""
    text = text.replace('role="heading">', 'role="heading" aria-level="2">')  # captions of the sidebar
    text = text.replace('class="math-wrapper docutils container"', 'class="math-wrapper docutils container" tabindex="0"')
    title = re.search(r"<h1>(.*?)<a ", text, flags=re.S)
    if title:
        words = re.sub(r"<[^>]+>", "", title[1]).strip().replace('"', "&quot;")
        text = re.sub(r'(<img src="[^"]*/sphx_glr_plot_[^>]* alt=)"plot \d[^"]*"', lambda found: f'{found[1]}"{words}"', text)
    return re.sub(
        r'<a class="reference internal" href="(plot_[^"]+)"><span class="(?:doc|std std-ref)">([^<]+)</span></a>',
        r'<a class="reference internal" href="\1" aria-label="\2"><span class="doc">\2</span></a>',
        text,
    )


def setup(app):
    """Register the writer."""
    app.connect("build-finished", write, priority=900)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
