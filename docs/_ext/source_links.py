"""Links of pages to files of the repository: `../src/…` becomes a page with that file, its lines numbered."""

import html
import re
from pathlib import Path

from contrast import Dark, Light
from docutils import nodes
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import TextLexer, get_lexer_for_filename
from pygments.util import ClassNotFound

FOLDER = "files"  # of the built site
_LINK = re.compile(
    r"(\]\(|\]: )((?:\.\./)+)((?:src|tests|examples|benchmarks|deploy|\.ci)/[^)\s#]+|Makefile|pyproject\.toml)(#[^)\s]*)?"
)
_PAGES = {"README.md": "index.md", "CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md"}
_PAGE = """<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<meta name="viewport" content="width=device-width, initial-scale=1"><style>
body {{ font: 15px/1.5 system-ui, sans-serif; margin: 1rem auto; max-width: 72rem; padding: 0 1rem }}
pre {{ font-size: 13px; overflow-x: auto }} .linenos a {{ color: #57606a; text-decoration: none }}
{light}
@media (prefers-color-scheme: dark) {{ body {{ background: #131416; color: #e6e8eb }} a {{ color: #6cc5dd }}
.linenos a {{ color: #a5adb6 }} {dark} }}
</style></head><body><main><h1>{title}</h1><p><a href="{up}index.html">Equipoise documentation</a></p>{body}</main></body></html>
"""


def on_source(app, name: str, content: list[str]) -> None:
    """Point links at the pages of files, and at pages of the site where a file is one."""
    depth = name.count("/")
    root = Path(app.srcdir).parent

    def replaced(match: re.Match) -> str:
        path, fragment = match.group(3), match.group(4) or ""
        if (root / path).is_dir() or not (root / path).exists():
            return match.group()
        app.env.linked_files.add(path)
        line = re.fullmatch(r"#L(\d+)", fragment)
        if line is None and fragment:  # the name of a test
            number = _line_of(root / path, fragment[1:])
            fragment = f"#L-{number}" if number else ""
        elif line:
            fragment = f"#L-{line.group(1)}"
        return f"{match.group(1)}https://this.site/{'../' * depth}{FOLDER}/{path}.html{fragment}"

    content[0] = _LINK.sub(replaced, content[0])
    for file, page in _PAGES.items():
        content[0] = re.sub(rf"\]\((\.\./)+{re.escape(file)}", f"]({'../' * depth}{page}", content[0])


def _line_of(path: Path, name: str) -> int:
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if re.match(rf"\s*(async )?(def|class) {re.escape(name)}\b", line):
            return number
    return 0


def on_doctree(app, doctree, docname: str) -> None:
    """The placeholder host of such a link goes away again: what is left is relative to the page."""
    for node in doctree.findall(nodes.reference):
        if node.get("refuri", "").startswith("https://this.site/"):
            node["refuri"] = node["refuri"].removeprefix("https://this.site/")


def begin(app, env, docnames) -> None:
    """Every build collects the links of the pages that it reads; earlier ones are kept."""
    if not hasattr(env, "linked_files"):
        env.linked_files = set()


def write(app, error) -> None:
    """Write a page per linked file."""
    if error or app.builder.format != "html":
        return
    root = Path(app.srcdir).parent
    for path in sorted(app.env.linked_files):
        if not (root / path).is_file():
            continue
        target = Path(app.outdir) / FOLDER / f"{path}.html"
        target.parent.mkdir(parents=True, exist_ok=True)
        text = (root / path).read_text(encoding="utf-8")
        try:
            lexer = get_lexer_for_filename(path)
        except ClassNotFound:
            lexer = TextLexer()
        form = HtmlFormatter(style=Light, linenos="inline", lineanchors="L", anchorlinenos=True)
        dark = HtmlFormatter(style=Dark).get_style_defs(".highlight")
        body = highlight(text, lexer, form)
        up = "../" * (path.count("/") + 1)
        page = _PAGE.format(title=html.escape(path), light=form.get_style_defs(".highlight"), dark=dark, up=up, body=body)
        target.write_text(page, encoding="utf-8")


def setup(app):
    """Register the rewriting and the pages."""
    app.connect("env-before-read-docs", begin)
    app.connect("source-read", on_source)
    app.connect("doctree-resolved", on_doctree)
    app.connect("build-finished", write)
    return {"parallel_read_safe": False, "parallel_write_safe": True}
