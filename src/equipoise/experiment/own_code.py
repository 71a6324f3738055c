"""The one place where a configuration's import path, "module:name", becomes a class or function.

An import path names what an installed package has registered under `ENTRY_POINTS`, or what a module of the user's own folder
defines. Nothing else that is installed can be named: numpy.load, say, reads pickles.

Trust is for a whole folder: all that a module there can import from it (`CodeFolder`). Finding it imports nothing, and the
bytes that were hashed are the bytes that run: modules are compiled from them, and nothing else of the folder is imported. No
compiled file (`__pycache__`) is read, and no file there hides a module of Python or of an installed package.
"""

from __future__ import annotations

import inspect
import os
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, cached_property
from importlib import import_module
from importlib.abc import ExecutionLoader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.metadata import entry_points
from importlib.util import decode_source, spec_from_loader
from keyword import iskeyword
from pathlib import Path
from site import getsitepackages, getusersitepackages
from sysconfig import get_path
from types import ModuleType
from typing import Any, Literal

from equipoise.core.plain_text import made_of
from equipoise.errors import ConfigError, EquipoiseError
from equipoise.experiment.catalog import CatalogPart, Entry, own_signature
from equipoise.experiment.trusted_code import INIT, CodeFolder, extend_list, trusted_pairs

ENTRY_POINTS = "equipoise.parts"  # the group of entry points: NAME = "module:name", one for each part
Recorded = Mapping[str, Mapping[str, str]]  # folder → file → SHA-256


@dataclass(frozen=True)
class OwnCode:
    """The code that a configuration may name.

    Without `recorded` it is that of the configuration's own `folder`, which is trusted from now on, because the user runs this
    configuration. With `recorded`, a section [code] that a run has written, it is that of the folders there, if their code has
    not changed and is in the user's list; `trust` puts it there.
    """

    folder: Path
    recorded: Recorded | None = None
    trust: bool = False

    def part(self, kind: str, import_path: str, where: str) -> CatalogPart:
        """The class or function "module:name" as a part of a configuration; `where` is the dotted key that names it."""
        module, attribute = split_import_path(import_path, where)
        code: Mapping[str, Any]
        found, code = registered(import_path, where)
        if not code:
            folder = next((each for each in self._folders if module in each.modules), None)
            if folder is None:
                raise self._not_found(import_path, where)
            self._admit(folder, import_path, where)
            found, code = _attribute(folder, module, attribute, where), {str(folder.path): folder.hashes}
        try:
            own_signature(found)
        except (TypeError, ValueError) as failure:
            raise ConfigError(f"{where}: the parameters of {import_path} cannot be read: {failure}.") from failure
        return CatalogPart(kind, import_path, Entry(import_path), own=found, code=code)

    @cached_property
    def _folders(self) -> list[CodeFolder]:
        """The code there is, read once for all parts of a configuration."""
        return [CodeFolder.read(Path(each)) for each in ((self.folder,) if self.recorded is None else self.recorded)]

    def _not_found(self, import_path: str, where: str) -> ConfigError:
        module = import_path.partition(":")[0]
        place = f"the section [code] of this run has no file of {module!r}"
        if self.recorded is None:
            place = f"there is no {module.replace('.', '/')}.py in {self.folder} or in a package there with an {INIT}"
        return ConfigError(
            f"{where}: {import_path} was not found: {place}, and no installed package has registered it (group {ENTRY_POINTS})."
        )

    def _admit(self, folder: CodeFolder, import_path: str, where: str) -> None:
        """Refuse code that has changed since it was recorded, or that the user does not trust."""
        before = folder.hashes if self.recorded is None else next(
            hashes for path, hashes in self.recorded.items() if Path(path).resolve() == folder.path
        )  # fmt: skip
        if changed := sorted(name for name, _ in before.items() ^ folder.hashes.items()):
            was, now = (hashes.get(changed[0], "that of no file") for hashes in (before, folder.hashes))
            raise ConfigError(
                f"{where}: {folder.path / changed[0]} has changed since the run began: its SHA-256 was {was} and is {now}. "
                "Put the former file back, or begin a new run from your configuration."
            )
        if self.recorded is None or self.trust:
            extend_list(folder.pair)
        elif folder.pair not in trusted_pairs():
            shown = ", ".join(f"{folder.path / name} (SHA-256 {digest})" for name, digest in folder.hashes.items())
            raise ConfigError(
                f"{where}: {import_path} is code of its own, and your list of trusted code does not have this content of its "
                f"folder: {shown}. Read all of it; if you trust it, give the same command with --trust."
            )


def registered(import_path: str, where: str) -> tuple[Any, dict[str, str]]:
    """What an installed package has registered under this import path, and the name and version of the package."""
    for each in entry_points(group=ENTRY_POINTS):
        if each.value == import_path:
            with own_failures(where, import_path):
                return each.load(), {import_path: f"{each.dist.name} {each.dist.version}" if each.dist else "installed"}
    return None, {}


def _attribute(folder: CodeFolder, module: str, attribute: str, where: str) -> Any:
    """What a module of an admitted folder defines under a name; what it has imported from elsewhere is refused."""
    import_path, file = f"{module}:{attribute}", folder.path / folder.modules[module]
    found = vars(run_module(folder, module, where, import_path)).get(attribute)
    if not callable(found):
        what = f"is a {type(found).__name__}" if found is not None else "is not there"
        raise ConfigError(f"{where}: {import_path} must be a class or function of {file}, but {attribute} {what}.")
    home = str(found.__module__) if inspect.isroutine(found) or inspect.isclass(found) else module
    if home not in folder.modules and home.partition(".")[0] != "equipoise":
        cure = f"Define it there: a function {attribute} that calls it."
        raise ConfigError(f"{where}: {import_path} must be a class or function of {file}, but is one of {home}. {cure}")
    return found


def recorded_folders(table: Mapping[str, Any]) -> Recorded:
    """The folders in the section [code] of a configuration that a run has written; packages there are only named."""
    try:
        section = made_of(dict[str, str | dict[str, str]], table.get("code", {}), strict=True)
    except ValueError as failure:
        fix = "Leave it out, or do not edit it."
        raise ConfigError(f"[code] must hold folders with SHA-256 by file, as a run writes it. {fix}") from failure
    folders = {path: entry for path, entry in section.items() if isinstance(entry, Mapping)}
    if relative := next((path for path in folders if not Path(path).is_absolute()), None):
        raise ConfigError(f"[code] must name folders by their absolute path, but has {relative!r}. Begin a new run.")
    return folders


def split_import_path(import_path: str, where: str) -> tuple[str, str]:
    """Module and attribute of "package.module:name"; other forms, and modules of Python itself, are refused."""
    module, _, attribute = import_path.partition(":")
    if not all(name.isidentifier() and not iskeyword(name) for name in (*module.split("."), attribute)):
        raise ConfigError(f'{where} must have the form "module:name" or "package.module:name", but is "{import_path}".')
    if module.partition(".")[0] in sys.stdlib_module_names or module == "__main__":
        raise ConfigError(f'{where}: "{module}" is the name of a module of Python itself. Give your file another name.')
    return module, attribute


# ------------------------------------------------------------------------------------------------------------- running it


@dataclass(frozen=True)
class CheckedLoader(ExecutionLoader):
    """Runs the source of one module as it was read and hashed, and reads nothing else."""

    path: Path
    content: bytes

    def is_package(self, fullname: str) -> bool:
        """Whether the file is that of a package."""
        return self.path.name == INIT

    def get_filename(self, fullname: str) -> str:
        """The path of the file, for `__file__` and tracebacks."""
        return str(self.path)

    def get_source(self, fullname: str) -> str:
        """The source that was checked."""
        return decode_source(self.content)


class CheckedSources(MetaPathFinder):
    """Finds modules in the folders that were admitted; Python asks it before it looks at the disk."""

    def __init__(self) -> None:
        self.files: dict[str, CheckedLoader] = {}  # by module
        self.folders: set[Path] = set()

    def admit(self, folder: CodeFolder) -> None:
        """Take the modules of a folder. If one runs with another source, or from another folder, it is forgotten."""
        self.folders.add(folder.path)
        new = {name: CheckedLoader(folder.path / file, folder.sources[file]) for name, file in folder.modules.items()}
        there = {name for name, file in self.files.items() if file.path.is_relative_to(folder.path)}
        if {name: self.files[name] for name in there} != new:
            for name in there | (self.files.keys() & new.keys()):
                del self.files[name]
                if name in sys.modules and isinstance(vars(sys.modules[name]).get("__loader__"), CheckedLoader):
                    del sys.modules[name]
            self.files |= new
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """How to load a module: an admitted one, or one from elsewhere, which is meant if it has the name of an admitted one.

        What is in an admitted folder and was not admitted is refused, whoever else would find it there and in what form.
        """
        others = (finder.find_spec(name, path, target) for finder in sys.meta_path if finder is not self)
        other, file, package = next((each for each in others if each), None), self.files.get(name), name.rpartition(".")[0]
        places: list[Any] = (
            [] if other is None else [*([other.origin] * other.has_location), *(other.submodule_search_locations or ())]
        )
        inside = any(map(self._is_inside, places))
        known = name.partition(".")[0] in sys.stdlib_module_names or (other is not None and bool(other.origin) and not inside)
        if file is None or known or (path is not None and str(self.files[package].path.parent) not in path):
            if inside:
                raise ModuleNotFoundError(f"{places[0]} is no source of {name!r} that was checked", name=name)
            return other
        spec = spec_from_loader(name, file, origin=str(file.path), is_package=file.is_package(name))
        if spec is not None:
            spec.has_location = True  # the module has a __file__
            if file.is_package(name):
                spec.submodule_search_locations = [str(file.path.parent)]
        return spec

    def _is_inside(self, place: str) -> bool:
        """Whether the way to a place leads through an admitted folder, and not through packages installed below it."""
        whole = Path(place).absolute()
        ways = whole.resolve().parents, [step.resolve() for step in whole.parents]
        known = self.folders | _installed()
        return any(next((step for step in way if step in known), None) in self.folders for way in ways)


@cache
def _installed() -> frozenset[Path]:
    """The folders of Python's own modules, of installed packages, and of this one."""
    python = [get_path(kind) for kind in ("stdlib", "platstdlib", "purelib", "platlib")]
    packages: list[Any] = [*python, *getsitepackages(), getusersitepackages(), Path(inspect.getfile(EquipoiseError)).parent]
    return frozenset(Path(folder).resolve() for folder in packages)


_CHECKED = CheckedSources()


def run_module(folder: CodeFolder, module: str, where: str, import_path: str) -> ModuleType:
    """Import a module of a folder that was admitted; one that runs already from its file is used as it is."""
    _CHECKED.admit(folder)
    with own_failures(where, import_path):
        found = import_module(module)
        origin, file = vars(found).get("__file__"), folder.path / folder.modules[module]
        if origin is None or Path(origin).resolve() != file.resolve():
            raise ConfigError(f"{where}: another module {module!r} is in use, {origin}. Give {file} another name.")
        return found


@contextmanager
def own_failures(where: str, import_path: str) -> Iterator[None]:
    """Turn what code of the user's own, or of a package, raises into a ConfigError with the line of the user's code."""
    try:
        yield
    except EquipoiseError:
        raise
    except (Exception, SystemExit) as failure:
        own = {str(file.path) for file in _CHECKED.files.values()}
        lines = [f"{s.filename}, line {s.lineno}" for s in traceback.extract_tb(failure.__traceback__) if s.filename in own]
        place = f" ({lines[-1]})" if lines else ""
        raise ConfigError(f"{where}: {import_path} failed: {type(failure).__name__}: {failure}{place}") from failure


# ----------------------------------------------------------------------------------------- where a configuration was read

# "never" for reports and listings; "run" for a configuration that the user runs; "resume" for the folder of a run.
CodeUse = Literal["never", "run", "resume"]


@dataclass(frozen=True)
class Origin:
    """The folder of a configuration, if it has one, and its code, if that may run."""

    folder: Path | None = None
    code: OwnCode | None = None

    @classmethod
    def of(cls, path: str | Path, table: Mapping[str, Any], code: CodeUse, *, trust: bool = False) -> Origin:
        """The origin of the tables of a file.

        A configuration that the user runs may name code beside it, which the user trusts thereby. One that a run has written
        (it has a section [code], or lies in the folder of a run) may name only the recorded files, if they are trusted.
        """
        folder = Path(os.path.abspath(path)).parent
        if code == "never":
            return cls(folder)
        left_by_run = any((folder / name).exists() for name in ("rounds.jsonl", "checkpoint/state.safetensors"))
        by_a_run = code == "resume" or "code" in table or left_by_run
        return cls(folder, OwnCode(folder, recorded_folders(table) if by_a_run else None, trust=trust))

    def path(self, text: str) -> str:
        """A path of the configuration, absolute.

        A relative path starts from the folder of the configuration. If nothing is there, but something is there from the
        working directory, it is that.
        """
        if self.folder is None:
            return text
        try:
            given = Path(text).expanduser()
            beside, here = self.folder / given, Path.cwd() / given
            return os.path.abspath(here if here.exists() and not beside.exists() else beside)
        except (OSError, ValueError, RuntimeError):  # no such user, a name too long, a NUL: the reader of the file refuses it
            return text
