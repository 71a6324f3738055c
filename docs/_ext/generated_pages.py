"""Pages that are made from the code: the API, the command line, the configuration, the catalogue, the combinations."""

from pathlib import Path

import api_pages
import catalogue_page
import combinations_page
import command_page
import configuration_page
import error_page

FOLDER = "reference/generated"


def write_if_changed(path: Path, text: str) -> None:
    """Write a page unless it is already there as it should be, so that Sphinx need not read it again."""
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def pages() -> dict[str, str]:
    """File name → content of every generated page."""
    return {
        **api_pages.pages(),
        "commands.md": command_page.page(),
        "configuration.md": configuration_page.page(),
        "catalogue.md": catalogue_page.page(),
        "combinations.md": combinations_page.page(),
        "errors.md": error_page.page(),
    }


def generate(app) -> None:
    """Write the pages before Sphinx looks for files."""
    folder = Path(app.srcdir) / FOLDER
    made = pages()
    for name, text in made.items():
        write_if_changed(folder / name, text)
    for path in folder.rglob("*.md"):
        if str(path.relative_to(folder)) not in made:
            path.unlink()


def setup(app):
    """Register the generator."""
    app.connect("builder-inited", generate, priority=100)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
