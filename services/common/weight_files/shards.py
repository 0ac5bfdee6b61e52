"""Shards of a full version: safetensors files whose data is one bucket of an update, byte for byte.

Only the format's frame is known here: eight bytes with the length of a JSON header, the header, the tensors. Invariant:
the data begins at a multiple of 64 bytes, so that any element can be viewed in place.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from services.common.weight_files.manifest import Tensor, VersionFile

_NAMES = {"float64": "F64", "float32": "F32", "bfloat16": "BF16", "float16": "F16", "float8_e4m3fn": "F8_E4M3",
          "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8", "uint8": "U8"}  # fmt: skip
_ALIGN = 64
INDEX = "model.safetensors.index.json"


def shard_name(index: int, count: int) -> str:
    """Name of shard number `index`, from 0."""
    return f"model-{index + 1:05d}-of-{count:05d}.safetensors"


def shard_of(name: str, tensors: Sequence[Tensor]) -> tuple[bytes, VersionFile]:
    """Header of a shard that holds `tensors` in order, and the shard with every tensor in its place in it."""
    said: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for tensor in tensors:
        end = at + tensor.size_bytes
        said[tensor.name] = {
            "dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [at, end]
        }  # fmt: skip
        at = end
    text = json.dumps(said).encode()
    text += b" " * (-(len(text) + 8) % _ALIGN)
    header = struct.pack("<Q", len(text)) + text
    placed, position = [], len(header)
    for tensor in tensors:
        placed.append(replace(tensor, offset=position, length=tensor.size_bytes))
        position += tensor.size_bytes
    return header, VersionFile(name, position, tuple(placed))


def index_of(files: Sequence[VersionFile]) -> bytes:
    """Content of the index file that Hugging Face's loaders and engines read."""
    names = {tensor.name: file.name for file in files for tensor in file.tensors}
    total = sum(tensor.size_bytes for file in files for tensor in file.tensors)
    return json.dumps({"metadata": {"total_size": total}, "weight_map": names}, indent=2).encode()
