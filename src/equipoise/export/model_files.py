"""Writes a trained model, or a family of them, as files for other programs, each with its card."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from equipoise.core.files import write_atomically
from equipoise.core.signature import Signature
from equipoise.errors import ConfigError, InvalidParameter
from equipoise.experiment.run_files import model_bytes
from equipoise.export import model_card, onnx_files, torch_program
from equipoise.export.modules import NotExported
from equipoise.risk.groups import Groups

if TYPE_CHECKING:
    from equipoise.result import Result
    from equipoise.runs.family import Family

SUFFIXES = (".onnx", ".pt2", ".safetensors")


def export_result(result: Result, path: str | Path, *, groups: Groups | None = None) -> Path:
    """Write the trained model by the suffix of `path`, and its card beside it as .card.md and .card.json.

    Each file appears whole or not at all; cards come after the model. The card has a row for each of `groups`.

    `result` is what `train` returns. The suffix is .onnx, .pt2 (torch.export) or .safetensors. `groups` gives each client id
    the name of its group: a mapping, or a function.
    """
    target = Path(path)
    if target.suffix not in SUFFIXES:
        raise InvalidParameter("path", f"must end in one of {', '.join(SUFFIXES)}", str(path), 'E.g. "model.onnx".')
    about = model_card.card(result, about=about_model(result), groups=groups)
    written = write_atomically(target, exported_bytes(result, target.suffix))
    write_card(target.with_suffix(""), about)
    return written


def exported_bytes(result: Result, suffix: str) -> bytes:
    """The trained model in the format of a suffix."""
    if suffix == ".safetensors":
        return model_bytes(result)
    signature = signature_of(result)
    model = result.model.cpu().eval()
    if suffix == ".pt2":
        return torch_program.model_program(model, signature)
    return onnx_files.model_onnx(model, signature)


def signature_of(result: Result) -> Signature:
    """The signature of a result's model; a result of a federation, whose data nobody has here, is refused."""
    if result.signature is None:
        raise InvalidParameter(
            "result", "must know the inputs of its model to be written in this format", result.name,
            "The data of this run are not on this machine. Use model.safetensors.",
        )  # fmt: skip
    return result.signature


def about_model(result: Result) -> dict[str, Any]:
    """The class of a model, the number of its parameters, and the names and shapes of its inputs."""
    parameters = sum(p.numel() for p in result.model.parameters())
    about: dict[str, Any] = {"class": type(result.model).__name__, "parameters": parameters}
    if result.signature is not None:
        about["inputs"] = "; ".join(
            f"{spec.name} {spec.dtype} ({', '.join(['batch', *('any' if n < 0 else str(n) for n in spec.shape)])})"
            for spec in result.signature.inputs
        )
    if result.personal is not None:
        about["note"] = "the shared model; clients were served models of their own, which are not in this file"
    return about


def write_card(stem: Path, content: dict[str, Any]) -> None:
    """Write a card as Markdown and as JSON: <stem>.card.md and <stem>.card.json."""
    write_atomically(stem.with_name(f"{stem.name}.card.md"), model_card.card_markdown(content))
    write_atomically(stem.with_name(f"{stem.name}.card.json"), model_card.card_json(content))


def export_family(family: Family, folder: str | Path, *, groups: Groups | None = None) -> Path:
    """Write every member of a family into one new folder: <knob>-<value>.safetensors, .onnx where it can be, and cards.

    A member that cannot be ONNX has no such file, and its card says why.

    `family` is what `train_family` returns, and `folder` is new or empty. The cards have a row for each of `groups`, which
    gives each client id the name of its group: a mapping, or a function.
    """
    target = Path(folder)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise InvalidParameter("folder", "must be a new or empty folder", str(folder))
    for value, member in family.results.items():
        stem = target / member_name(family.knob, value)
        about = about_model(member)
        write_atomically(stem.with_name(f"{stem.name}.safetensors"), model_bytes(member))
        try:
            write_atomically(stem.with_name(f"{stem.name}.onnx"), exported_bytes(member, ".onnx"))
        except (NotExported, ConfigError, InvalidParameter) as failure:
            about["no_onnx"] = str(failure)
        write_card(stem, model_card.card(member, about=about, groups=groups))
    return target


def member_name(knob: str, value: float) -> str:
    """The name of a member in files and addresses.

    >>> member_name("tail", 0.5), member_name("tilt", -1.0)
    ('tail-0.5', 'tilt--1.0')
    """
    return f"{knob}-{value!r}"
