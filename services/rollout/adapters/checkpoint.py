"""What can be read of a checkpoint and of installed packages without loading either."""

from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path
from typing import Any

from services.common.errors import Code, ServiceError

_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
"""As safetensors names them."""


def model_config(model_path: Path) -> dict[str, Any]:
    """The checkpoint's config.json; the text part of it where there are several."""
    path = model_path / "config.json"
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ServiceError(
            Code.FAILED_PRECONDITION,
            "CHECKPOINT_UNREADABLE",
            f"{path} cannot be read ({error}): hf_checkpoint must be a Hugging Face checkpoint directory.",
            path=path,
        ) from error
    return config | config.get("text_config", {})


def tensor_headers(model_path: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Dtype and shape of every tensor in the checkpoint's safetensors files, by name; empty without such files."""
    found: dict[str, tuple[str, tuple[int, ...]]] = {}
    for path in model_path.glob("*.safetensors"):
        with path.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        for name, entry in header.items():
            if name != "__metadata__":
                found[name] = _DTYPES.get(entry["dtype"], entry["dtype"]), tuple(entry["shape"])
    return found


def installed_version(package: str) -> str:
    """Release of an installed package; empty when it is absent."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""
