"""The safetensors format in a few lines, for machines without that package: a length, a JSON header, then the numbers.

Source: the format's description, https://github.com/huggingface/safetensors.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
LONGEST_HEADER = 100_000_000  # bytes, as in the format


def save_plainly(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> bytes:
    """The content of a safetensors file with these tensors, which are contiguous and on the CPU."""
    names = {dtype: name for name, dtype in DTYPES.items()}
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    parts, place = [], 0
    for name, value in sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0])):  # numbers stay aligned
        content = value.reshape(-1).view(torch.uint8).numpy().tobytes() if value.numel() else b""
        header[name] = {"dtype": names[value.dtype], "shape": list(value.shape), "data_offsets": [place, place + len(content)]}
        parts.append(content)
        place += len(content)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return b"".join([len(text).to_bytes(8, "little"), text, *parts])


def read_plainly(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors and the metadata of a safetensors file; ValueError where it is none."""
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    if len(content) < 8 or length > min(LONGEST_HEADER, len(content) - 8):
        raise ValueError("it has no safetensors header")
    try:
        header = json.loads(content[8 : 8 + length])
        metadata = header.pop("__metadata__", {})
        tensors = {name: _read_tensor(content, 8 + length, about) for name, about in header.items()}
    except (KeyError, TypeError, AttributeError, RuntimeError) as failure:
        raise ValueError(f"its header is damaged: {failure}") from failure
    return tensors, metadata


def _read_tensor(content: bytes, start: int, about: Mapping[str, Any]) -> Tensor:
    """One tensor of a file, where the header says that it is."""
    dtype, (first, last) = DTYPES[about["dtype"]], about["data_offsets"]
    if not 0 <= first <= last <= len(content) - start:
        raise ValueError("a tensor lies outside the file")
    values = bytearray(content[start + first : start + last])
    flat = torch.frombuffer(values, dtype=torch.uint8).view(dtype) if values else torch.empty(0, dtype=dtype)
    return flat.reshape(about["shape"])
