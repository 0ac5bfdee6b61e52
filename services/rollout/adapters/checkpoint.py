"""What can be read of a checkpoint and of installed packages without loading either."""

from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path
from typing import Any

from services.common.errors import Code, ServiceError


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


def installed_version(package: str) -> str:
    """Release of an installed package; empty when it is absent."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""
