"""The safetensors format in a few lines: a length, a JSON header, then the numbers. Every such file is read here.

Source: the format's description, https://github.com/huggingface/safetensors.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from equipoise.core.plain_text import parse_json
from equipoise.errors import is_integer

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool, "U16": torch.uint16,
    "U32": torch.uint32, "U64": torch.uint64, "C64": torch.complex64, "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
LONGEST_HEADER = 100_000_000  # bytes, as in the format
MOST_AXES = 64  # of a tensor, as in PyTorch; the product of more sizes takes long


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


def read_plainly(content: bytes) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors and the metadata of a safetensors file; an error where what its header claims is not what there is.

    Tensors follow each other without a gap, up to the end of the file, so that no two of them share bytes.
    """
    length = int.from_bytes(content[:8], "little")
    if len(content) < 8 or length > min(LONGEST_HEADER, len(content) - 8):
        raise ValueError("it has no safetensors header")
    header = parse_json(content[8 : 8 + length], finite=True)
    metadata = header.pop("__metadata__", {})
    values, place, tensors = memoryview(content)[8 + length :], 0, {}
    for name, about in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        dtype, shape, (first, last) = DTYPES[about["dtype"]], about["shape"], about["data_offsets"]
        there = first == place and last <= len(values) and all(is_integer(n) and n >= 0 for n in shape)
        there &= len(shape) <= MOST_AXES
        if not there or last - first != math.prod(shape) * dtype.itemsize:
            raise ValueError(f"the bytes of {name!r} are not those that its header says")
        part = bytearray(values[first:last])
        tensors[name] = torch.frombuffer(part, dtype=dtype).reshape(shape) if part else torch.empty(shape, dtype=dtype)
        place = last
    if place != len(values):
        raise ValueError("it has more bytes than its header says")
    return tensors, metadata
