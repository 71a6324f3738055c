"""The files of models in run folders: a manifest, and for each model its parameters, ONNX files and card.

    family.json                     the knob, the members, what models take, and every file's size and SHA-256
    members/tail-0.5/clients.parquet
    members/tail-0.5/model.safetensors, model.onnx, score.onnx, model.card.md, model.card.json

A run that is no family has model.json, a manifest with one member, and that member's files in its own folder. model.onnx gives
a model's outputs, score.onnx its loss and error per example. Where a model cannot be ONNX, the libraries for it are absent, or
the environment says EQUIPOISE_ONNX=0, the manifest says why.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from equipoise.core.files import write_atomically
from equipoise.core.plain_text import content_of, made_of, parse_json
from equipoise.core.signature import Signature
from equipoise.errors import ConfigError, EquipoiseError, FileGuard, InvalidData
from equipoise.experiment.run_files import RunEnd, RunFolder, log_end, model_bytes
from equipoise.export import model_card, onnx_files
from equipoise.export.model_files import about_model, member_name

if TYPE_CHECKING:
    from equipoise.result import Result
    from equipoise.runs.family import Family

FORMAT = "equipoise family 1"
MANIFEST, MEMBERS = "family.json", "members"
SINGLE_MANIFEST, SINGLE = "model.json", "model"  # of a run that is no family; the name of its model, and of its knob
Content = bytes
CLIENTS, SAFETENSORS = "clients.parquet", "model.safetensors"
VERSIONS = "versions"  # in the folder of a family: further versions of it, 2, 3, …, each a folder like the first
SERVED = (SAFETENSORS, onnx_files.MODEL, onnx_files.SCORE, "model.card.md", "model.card.json")
LARGEST = 4 * 2**20  # bytes of a manifest that is read


@dataclass(frozen=True)
class StoredFile:
    """A file by its size and SHA-256."""

    sha256: str
    bytes: int

    @classmethod
    def of(cls, content: Content) -> StoredFile:
        """The entry of a file's content."""
        return cls(hashlib.sha256(content).hexdigest(), len(content))


@dataclass(frozen=True)
class StoredMember:
    """A member of a family on disk: the value of the knob, its name, its folder below members/, and its files."""

    value: float
    name: str
    folder: str
    files: dict[str, StoredFile]
    no_onnx: str | None = None  # why there is no model.onnx, or no score.onnx


@dataclass(frozen=True)
class FamilyManifest:
    """What family.json holds; or model.json, with one member and the knob "model"."""

    knob: str
    data: str
    judged_on: str
    error_is_loss: bool
    members: tuple[StoredMember, ...]
    signature: Signature | None = None
    classes: tuple[str, ...] = ()  # the names of the classes, where they have names
    features: tuple[str, ...] = ()  # the names of the inputs, where they have names
    format: str = field(default=FORMAT)

    @property
    def version(self) -> str:
        """The name of this version of the models: 16 digits of the hash of all their files. Other models, another name."""
        text = json.dumps([[m.value, m.folder, sorted((n, f.sha256) for n, f in m.files.items())] for m in self.members])
        return hashlib.sha256(f"{self.knob}{text}".encode()).hexdigest()[:16]

    def member(self, value: float) -> StoredMember | None:
        """The member at a value of the knob; None if there is none."""
        return next((member for member in self.members if member.value == value), None)

    def to_bytes(self) -> bytes:
        """The manifest as JSON."""
        return (json.dumps(asdict(self) | {"version": self.version}, indent=1, ensure_ascii=False) + "\n").encode()

    @classmethod
    def of_bytes(cls, content: bytes, source: str) -> FamilyManifest:
        """The manifest that `to_bytes` wrote; anything else is refused."""
        with FileGuard(source, InvalidData):
            table = parse_json(content, finite=True)
            if not isinstance(table, dict) or table.get("format") != FORMAT:
                raise InvalidData(f"{source} is no manifest in the format {FORMAT!r}.")
            table.pop("version", None)
            if (signature := table.pop("signature", None)) is not None:
                signature = Signature.of_table(signature)
            read: FamilyManifest = made_of(cls, table | {"signature": signature})
        for member in read.members:
            named = [member.folder, *member.files]
            if any("/" in name or "\\" in name or name in ("", ".", "..") or "\0" in name for name in named):
                raise InvalidData(f"{source} is damaged: it names a file outside its folder.")
            if not all(name.isascii() and name.isprintable() and '"' not in name for name in named):
                raise InvalidData(f"{source} is damaged: the name of a file must be of plain letters.")
            if not math.isfinite(member.value):
                raise InvalidData(f"{source} is damaged: a value of the knob is not finite.")
        if not read.members or len({member.value for member in read.members}) < len(read.members):
            raise InvalidData(f"{source} is damaged: it has no members, or two at one value.")
        return read


def write_family(family: Family, folder: RunFolder, *, report: bool = True) -> None:
    """Write the members, the manifest and the report of a finished family; the last event of the log comes last."""
    results = list(family.results.values())
    members, tables, files = [], {}, dict[str, bytes]()
    for value, member in family.results.items():
        name = member_name(family.knob, value)
        place = folder.path / MEMBERS / name
        tables[f"{MEMBERS}/{name}/{CLIENTS}"] = member.clients.to_parquet(place / CLIENTS, method=member.name, seed=member.seed)
        files, why = member_files(member, like=files)  # like those of the member before
        members.append(StoredMember(float(value), member.name, name, _write(files, place), why))
    manifest = manifest_of(family.knob, results[0], members)
    if report:
        family.report(folder.report)
    write_atomically(folder.path / MANIFEST, manifest.to_bytes())
    stops = {each.name: each.history.stopped for each in results if each.history.stopped is not None}
    seconds = sum(each.seconds for each in results)
    log_end(folder, RunEnd.of(results[0], tables, seconds=seconds, stopped=None, stopped_members=stops).event())


def _write(files: Mapping[str, bytes], place: Path) -> dict[str, StoredFile]:
    """Write the files of a model into a folder; returns their sizes and checksums."""
    for file, content in files.items():
        write_atomically(place / file, content)
    return {file: StoredFile.of(content) for file, content in files.items()}


def manifest_of(knob: str, first: Result, members: Sequence[StoredMember]) -> FamilyManifest:
    """The manifest of models that were trained on the same data; `first` is any one of them."""
    target = None if first.schema is None else first.schema.target
    return FamilyManifest(
        knob, first.data, first.judged_on, first.error_is_loss, tuple(members), first.signature,
        () if target is None else target.classes, () if first.schema is None else first.schema.feature_names,
    )  # fmt: skip


def write_single(result: Result, folder: RunFolder, *, no_onnx: str | None = None) -> None:
    """Write the model of a run that is no family for other programs: parameters, ONNX, card, and at last model.json.

    `no_onnx` is a reason to leave ONNX out.
    """
    files, why = member_files(result, no_onnx=no_onnx)
    manifest = manifest_of(SINGLE, result, [StoredMember(0.0, result.name, SINGLE, _write(files, folder.path), why)])
    write_atomically(folder.path / SINGLE_MANIFEST, manifest.to_bytes())


def member_files(
    member: Result, *, like: Mapping[str, bytes] | None = None, no_onnx: str | None = None
) -> tuple[dict[str, bytes], str | None]:
    """The files of a model by name, and why ONNX is missing among them, if it is; `like` are those of a model of its class."""
    files, why, like = {SAFETENSORS: model_bytes(member)}, no_onnx or _why_no_onnx(member), like or {}
    if why is None and member.signature is not None and member.task is not None:
        try:
            model = member.model.cpu().eval()
            files[onnx_files.MODEL] = onnx_files.model_onnx(model, member.signature, like=like.get(onnx_files.MODEL))
            files[onnx_files.SCORE] = onnx_files.score_onnx(
                member.task, model, member.signature, like=like.get(onnx_files.SCORE)
            )
        except EquipoiseError as failure:
            why = str(failure)
    card = model_card.card(member, about=about_model(member) | ({} if why is None else {"no_onnx": why}))
    files["model.card.md"], files["model.card.json"] = model_card.card_markdown(card), model_card.card_json(card)
    return files, why


def _why_no_onnx(member: Result) -> str | None:
    """Why a run leaves no ONNX files, before it is tried; None if it should."""
    if os.environ.get("EQUIPOISE_ONNX") == "0":
        return "the run was told to leave none, by EQUIPOISE_ONNX=0"
    if member.signature is None or member.task is None:
        return "the data of this run are not on this machine"
    return onnx_files.why_no_onnx()


def read_manifest(folder: Path, name: str = MANIFEST) -> FamilyManifest:
    """The manifest of a folder: family.json, or model.json of a run that is no family."""
    path = folder / name
    try:
        if path.stat().st_size > LARGEST:
            raise InvalidData(f"{path} is too large to be a manifest.")
        return FamilyManifest.of_bytes(content_of(path), str(path))
    except OSError as failure:
        raise ConfigError(f"{path} cannot be read: {failure.strerror}.") from failure
