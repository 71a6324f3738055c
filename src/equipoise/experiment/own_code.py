"""Code of the user's own that a configuration names by import path, "module:name": found, hashed and checked, then run.

Finding a file imports nothing: the path follows from the names. The bytes that were hashed are the bytes that run: modules are
compiled from them, and no compiled file (`__pycache__`) is read. Every `__init__.py` of a package on the way is code, too, and
is hashed and checked by the package's name. Further modules that the code imports are not covered.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from importlib import import_module
from importlib.abc import ExecutionLoader
from importlib.machinery import ModuleSpec
from importlib.util import decode_source, spec_from_loader
from keyword import iskeyword
from pathlib import Path
from types import ModuleType
from typing import Any

from equipoise.errors import ConfigError, EquipoiseError
from equipoise.experiment.catalog import CatalogPart, CodeFile, Entry, own_signature
from equipoise.experiment.trusted_code import extend_list, trusted_pairs

NOT_COVERED = "Other modules that it imports, also those in its folder, are not covered by this check: read them, too."


@dataclass(frozen=True)
class SourceFile:
    """The source of one module, as it was read: `key` is its import path, or the name of a package on the way."""

    key: str
    module: str
    path: Path
    content: bytes

    @property
    def sha256(self) -> str:
        """The SHA-256 of the content, as `sha256sum` prints it."""
        return sha256(self.content).hexdigest()

    @property
    def is_package(self) -> bool:
        """Whether the file is that of a package."""
        return self.path.name == "__init__.py"


@dataclass(frozen=True)
class OwnCode:
    """The code that a configuration may name.

    Without `recorded`, modules are found beside the configuration (in `folder`) or on sys.path, and are trusted from now on,
    because the user runs this configuration. With `recorded`, a section [code] that a run has written, only its files are
    used, if they have not changed and are in the user's list of trusted code; `trust` puts them there.
    """

    folder: Path
    recorded: Mapping[str, CodeFile] | None = None
    trust: bool = False

    def part(self, kind: str, import_path: str, where: str) -> CatalogPart:
        """The class or function "module:name" as a part of a configuration; `where` is the dotted key that names it."""
        module, attribute = split_import_path(import_path, where)
        files = self._find(import_path, module, where) if self.recorded is None else self._recorded(import_path, module, where)
        pairs = {(file.key, file.sha256) for file in files}
        if self.recorded is None or self.trust:
            extend_list(pairs)
        elif unknown := pairs - trusted_pairs():
            shown = ", ".join(f"{f.path} (SHA-256 {f.sha256})" for f in files if (f.key, f.sha256) in unknown)
            raise ConfigError(
                f"{where}: {import_path} is code of its own, and your list of trusted code does not have {shown}. Read the "
                f"code; if you trust it, give the same command with --trust. {NOT_COVERED}"
            )
        found = vars(run_module(files, where, import_path)).get(attribute)
        if not callable(found):
            what = f"is a {type(found).__name__}" if found is not None else "is not there"
            raise ConfigError(
                f"{where}: {import_path} must be a class or function of {files[-1].path}, but {attribute} {what}."
            )
        try:
            own_signature(found)
        except (TypeError, ValueError) as failure:
            raise ConfigError(f"{where}: the parameters of {import_path} cannot be read: {failure}.") from failure
        recorded = {file.key: CodeFile(str(file.path), file.sha256) for file in files}
        return CatalogPart(kind, import_path, Entry(import_path), own=found, files=recorded)

    def _find(self, import_path: str, module: str, where: str) -> list[SourceFile]:
        """The files of a module beside the configuration, or else on sys.path."""
        roots = [self.folder, *(Path(entry).absolute() for entry in sys.path if entry)]
        top = module.partition(".")[0]
        root = next((r for r in roots if (r / top / "__init__.py").is_file() or (r / f"{top}.py").is_file()), None)
        if root is None:
            raise ConfigError(
                f"{where}: {import_path} was not found: there is neither {self.folder / top}.py nor a package {top} with an "
                f"__init__.py in {self.folder} or on sys.path."
            )
        files: list[SourceFile] = []
        for key, name in steps(import_path, module):
            stem = root.joinpath(*name.split("."))
            path = next((p for p in (stem / "__init__.py", stem.with_name(f"{stem.name}.py")) if p.is_file()), None)
            if path is None or (key != import_path and path.name != "__init__.py"):
                raise ConfigError(f"{where}: {import_path} was not found: {stem} has no __init__.py, and is no module.")
            files.append(SourceFile(key, name, path, read_source(path, where)))
        return files

    def _recorded(self, import_path: str, module: str, where: str) -> list[SourceFile]:
        """The files of a module that the section [code] records, unchanged."""
        files: list[SourceFile] = []
        for key, name in steps(import_path, module):
            entry = (self.recorded or {}).get(key)
            if entry is None:
                raise ConfigError(
                    f"{where}: {import_path} is code of its own, but the section [code] of this run has no {key!r}. Run it "
                    "anew from your own configuration."
                )
            path = Path(entry.file)
            if not path.is_absolute():
                raise ConfigError(f"code.{key}.file must be an absolute path, but is {entry.file!r}.")
            file = SourceFile(key, name, path, read_source(path, where))
            if file.sha256 != entry.sha256:
                raise ConfigError(
                    f"{where}: {path} has changed since the run began: its SHA-256 was {entry.sha256} and is {file.sha256}. "
                    "Put the former file back, or begin a new run from your configuration."
                )
            if key != import_path and not file.is_package:
                raise ConfigError(f"code.{key}.file must be the __init__.py of a package, but is {entry.file!r}.")
            files.append(file)
        return files


def recorded_files(table: Mapping[str, Any]) -> dict[str, CodeFile]:
    """The section [code] of a configuration that a run has written."""
    section = table.get("code", {})
    good = isinstance(section, Mapping) and all(
        isinstance(entry, Mapping) and entry.keys() == {"file", "sha256"} and all(isinstance(v, str) for v in entry.values())
        for entry in section.values()
    )
    if not good:
        raise ConfigError("[code] must hold tables with file and sha256, as a run writes it. Leave it out, or do not edit it.")
    return {name: CodeFile(**entry) for name, entry in section.items()}


def split_import_path(import_path: str, where: str) -> tuple[str, str]:
    """Module and attribute of "package.module:name"; other forms, and modules of Python itself, are refused."""
    module, _, attribute = import_path.partition(":")
    if not all(name.isidentifier() and not iskeyword(name) for name in (*module.split("."), attribute)):
        raise ConfigError(f'{where} must have the form "module:name" or "package.module:name", but is "{import_path}".')
    if module.partition(".")[0] in sys.stdlib_module_names or module == "__main__":
        raise ConfigError(f'{where}: "{module}" is the name of a module of Python itself. Give your file another name.')
    return module, attribute


def steps(import_path: str, module: str) -> Iterator[tuple[str, str]]:
    """What runs on the way to an import path: keys in [code] and names of modules, packages first.

    >>> list(steps("a.b:f", "a.b"))
    [('a', 'a'), ('a.b:f', 'a.b')]
    """
    names = module.split(".")
    for count in range(1, len(names)):
        package = ".".join(names[:count])
        yield package, package
    yield import_path, module


def read_source(path: Path, where: str) -> bytes:
    """The content of a file of code; only a regular file is read."""
    try:
        if path.is_file():
            return path.read_bytes()
        reason = "it is not a file" if path.exists() else "it does not exist"
    except (OSError, ValueError) as failure:
        reason = str(failure)
    raise ConfigError(f"{where}: the code {path} cannot be read: {reason}. Put it back, or begin a new run.")


# ------------------------------------------------------------------------------------------------------------- running it


class CheckedSources:
    """Finds and loads modules from sources that were checked; Python asks it before it looks at the disk."""

    def __init__(self) -> None:
        self.files: dict[str, SourceFile] = {}

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """How to load a module, if it is one of the checked; None for any other."""
        file = self.files.get(name)
        if file is None:
            return None
        spec = spec_from_loader(name, CheckedLoader(file), origin=str(file.path), is_package=file.is_package)
        if spec is not None:
            spec.has_location = True  # the module has a __file__
            if file.is_package:
                spec.submodule_search_locations = [str(file.path.parent)]
        return spec


class CheckedLoader(ExecutionLoader):
    """Runs the source that was checked, and reads nothing else."""

    def __init__(self, file: SourceFile) -> None:
        self.file = file

    def is_package(self, fullname: str) -> bool:
        """Whether the module is a package."""
        return self.file.is_package

    def get_filename(self, fullname: str) -> str:
        """The path of the file, for `__file__` and tracebacks."""
        return str(self.file.path)

    def get_source(self, fullname: str) -> str:
        """The source that was checked."""
        return decode_source(self.file.content)


_CHECKED = CheckedSources()


def run_module(files: Sequence[SourceFile], where: str, import_path: str) -> ModuleType:
    """Import the last of the files, after the packages that it lies in; a module that runs already is used as it is."""
    for file in files:
        present, checked = sys.modules.get(file.module), _CHECKED.files.get(file.module)
        if present is not None and checked is None:
            origin = vars(present).get("__file__")
            if origin is None or Path(origin).resolve() != file.path.resolve():
                raise ConfigError(
                    f"{where}: another module {file.module!r} is in use, {origin}. Give {file.path} another name."
                )
            continue
        if checked is not None and checked != file:
            for name in [n for n in sys.modules if n == file.module or n.startswith(f"{file.module}.")]:
                del sys.modules[name]
        _CHECKED.files[file.module] = file
    if _CHECKED not in sys.meta_path:
        sys.meta_path.insert(0, _CHECKED)
    root = str(files[0].path.parents[1 if files[0].is_package else 0])
    if root not in sys.path:
        sys.path.append(root)  # last: modules beside the code can be imported, but hide no others
    with own_failures(where, import_path, files):
        return import_module(files[-1].module)


@contextmanager
def own_failures(where: str, import_path: str, files: Sequence[SourceFile | CodeFile]) -> Iterator[None]:
    """Turn what the user's own code raises into a ConfigError with the line of that code."""
    try:
        yield
    except EquipoiseError:
        raise
    except (Exception, SystemExit) as failure:
        own = {str(f.path) if isinstance(f, SourceFile) else f.file for f in files}
        lines = [f"{s.filename}, line {s.lineno}" for s in traceback.extract_tb(failure.__traceback__) if s.filename in own]
        place = f" ({lines[-1]})" if lines else ""
        raise ConfigError(f"{where}: {import_path} failed: {type(failure).__name__}: {failure}{place}") from failure
