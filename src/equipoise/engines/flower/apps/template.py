"""The app that `equipoise flower init` writes: a Flower project with server, nodes, a loader for data, and certificates.

The files lie in the folder `template` of the package, each with `.txt` at the end of its name; `{{name}}` and `{{package}}` in
them stand for the names of the project and of its Python package.
"""

from __future__ import annotations

import keyword
import re
from importlib.util import find_spec
from pathlib import Path

from equipoise.errors import ConfigError, require

TEMPLATE = Path(__file__).parents[1] / "template"
_LONGEST = 32  # characters that Flower allows in the name of an app


def project_name(folder: Path) -> str:
    """The project's name, made of the folder's: letters, digits and hyphens, as Flower wants it.

    >>> project_name(Path("work/My federation_2"))
    'my-federation-2'
    """
    name = re.sub(r"[^a-z0-9]+", "-", folder.resolve().name.lower()).strip("-")[:_LONGEST].strip("-")
    package = name.replace("-", "_")
    good = re.match("[a-z]", name) is not None and not keyword.iskeyword(package)
    require(
        good, "DIR", "must have a name that begins with a letter and is no word of Python", folder.name, "E.g. my-federation."
    )
    taken = find_spec(package) is not None
    require(not taken, "DIR", "must not have the name of an installed Python package", folder.name, "E.g. my-federation.")
    return name


def render_app(name: str) -> dict[str, str]:
    """The files of a project, by their paths in it."""
    package = name.replace("-", "_")
    values = {"name": name, "package": package}
    rendered = {}
    for file in sorted(TEMPLATE.rglob("*.txt")):
        path = file.relative_to(TEMPLATE).as_posix().removesuffix(".txt").replace("package/", f"{package}/")
        path = ".gitignore" if path == "gitignore" else path
        rendered[path] = re.sub(r"\{\{(\w+)\}\}", lambda match: values[match[1]], file.read_text(encoding="utf-8"))
    return rendered


def write_app(folder: Path) -> list[Path]:
    """Write the project into a folder, which is made if it is not there and must be empty if it is; the files written."""
    texts = render_app(project_name(folder))
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} {'is not empty' if folder.is_dir() else 'is a file'}. Name a new folder.")
    written = []
    for path, text in texts.items():
        file = folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
        written.append(file)
    return written
