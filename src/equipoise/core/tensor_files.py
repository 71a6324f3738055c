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
from equipoise.core.plain_text import content_of, parse_json
from equipoise.errors import FileGuard, InvalidData

TEXT = "text"  # the tensor that holds the text
ABOUT = "equipoise"  # the only entry of the metadata: several have no fixed order, and equal content should make equal files


class DamagedFile(InvalidData):
    """A file of tensors whose content is not what was written."""


class TensorFile(NamedTuple):
    """What a file of tensors holds; no words about them where another program has written it."""

    tensors: dict[str, Tensor]
    text: str | None
    about: dict[str, str]


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
    """What a file of tensors holds; DamagedFile where it is none, or its checksum says that it is not what was written."""
    with FileGuard(path, DamagedFile):
        tensors, metadata = read_plainly(content_of(path))
        about = parse_json(metadata.get(ABOUT, "{}"))  # another program may have written it
        if ABOUT in metadata and about.pop("sha256", None) != checksum(tensors):
            raise ValueError("its checksum differs: the file is not what was written")
        text = tensors.pop(TEXT).numpy().tobytes().decode() if TEXT in tensors and about else None
        return TensorFile(tensors, text, about)


def checksum(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 of the names, types, shapes and bytes of tensors."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        value = tensors[name].detach().cpu().contiguous()
        digest.update(json.dumps([name, str(value.dtype), list(value.shape)]).encode())
        if value.numel():
            digest.update(memoryview(value.reshape(-1).view(torch.uint8).numpy()))  # type: ignore[arg-type]
    return digest.hexdigest()
