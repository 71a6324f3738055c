"""Named tensors and one text in a safetensors file, with a checksum of all of it: a file with a flipped bit is refused.

The text is a tensor of bytes, since the header of a safetensors file may not be larger than 100 MB.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from equipoise.core.plain_safetensors import read_plainly, save_plainly

TEXT = "text"  # the tensor that holds the text
ABOUT = "equipoise"  # the only entry of the metadata: several have no fixed order, and equal content should make equal files


class DamagedFile(ValueError):
    """A file of tensors whose content is not what was written."""


class TensorFile(NamedTuple):
    """What a file of tensors holds. Files of earlier versions have no checksum; their metadata are there."""

    tensors: dict[str, Tensor]
    text: str | None
    about: dict[str, str]
    metadata: dict[str, str]

    @property
    def checked(self) -> bool:
        """Whether the file has a checksum."""
        return ABOUT in self.metadata


def tensor_file_bytes(tensors: Mapping[str, Tensor], *, text: str | None = None, **about: str) -> bytes:
    """The content of a file with these tensors, a text of any length, and a few words about them."""
    # Copies, because tensors that share memory cannot be saved.
    named = {name: value.detach().cpu().clone().contiguous() for name, value in tensors.items()}
    if text is not None:
        named[TEXT] = torch.frombuffer(bytearray(text.encode() or b" "), dtype=torch.uint8)
    words = json.dumps({**about, "sha256": checksum(named)}, sort_keys=True)
    try:
        from safetensors.torch import save
    except ImportError:  # a bare GPU machine
        return save_plainly(named, {ABOUT: words})
    content: bytes = save(named, metadata={ABOUT: words})
    return content


def read_tensor_file(path: Path) -> TensorFile:
    """What a file of tensors holds; DamagedFile where its checksum says that it is not what was written."""
    tensors, metadata = _read_file(path)
    if ABOUT not in metadata:
        return TensorFile(tensors, None, {}, metadata)
    about = json.loads(metadata[ABOUT])
    if not isinstance(about, dict) or about.pop("sha256", None) != checksum(tensors):
        raise DamagedFile("its checksum differs: the file is not what was written")
    text = tensors.pop(TEXT).numpy().tobytes().decode() if TEXT in tensors else None
    return TensorFile(tensors, text, about, metadata)


def _read_file(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors and the metadata of a safetensors file, also where that package is not installed."""
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError:
        try:
            return read_plainly(path)
        except ValueError as failure:
            raise DamagedFile(str(failure)) from failure
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 — not a dictionary
            return tensors, dict(file.metadata() or {})
    except SafetensorError as failure:
        raise DamagedFile(str(failure)) from failure


def checksum(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 of the names, types, shapes and bytes of tensors."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        value = tensors[name].detach().cpu().contiguous()
        digest.update(json.dumps([name, str(value.dtype), list(value.shape)]).encode())
        if value.numel():
            digest.update(memoryview(value.reshape(-1).view(torch.uint8).numpy()))  # type: ignore[arg-type]
    return digest.hexdigest()
