"""Tokenizer of a Hugging Face checkpoint, read with the `tokenizers` library: in milliseconds and without torch.

A checkpoint without `tokenizer.json` is read through `transformers`, which takes seconds and may import torch.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from services.common.errors import Code, ServiceError
from services.rollout.core.ports import Tokenizer


class FastTokenizer:
    """`Tokenizer` over `tokenizer.json`."""

    def __init__(self, directory: Path) -> None:
        from tokenizers import Tokenizer as Backend

        self._backend = Backend.from_file(str(directory / "tokenizer.json"))
        self._backend.no_truncation()
        self._backend.no_padding()
        self.eos_token_id = _eos_token_id(directory, self._backend.token_to_id)

    def encode(self, text: str) -> list[int]:
        """See `Tokenizer`."""
        return self._backend.encode(text, add_special_tokens=False).ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """See `Tokenizer`."""
        return self._backend.decode(list(token_ids), skip_special_tokens=True)


class SlowTokenizer:
    """`Tokenizer` through `transformers`."""

    def __init__(self, directory: Path) -> None:
        from transformers import AutoTokenizer

        self._backend: Any = AutoTokenizer.from_pretrained(str(directory))
        self.eos_token_id: int | None = self._backend.eos_token_id

    def encode(self, text: str) -> list[int]:
        """See `Tokenizer`."""
        return list(self._backend.encode(text, add_special_tokens=False))

    def decode(self, token_ids: Sequence[int]) -> str:
        """See `Tokenizer`."""
        return self._backend.decode(list(token_ids), skip_special_tokens=True)


def load_tokenizer(checkpoint: str) -> Tokenizer:
    """Tokenizer of a checkpoint directory. Raises NOT_FOUND/CHECKPOINT_NOT_FOUND naming what is missing."""
    directory = Path(checkpoint)
    if not (directory / "config.json").is_file():
        raise _unreadable(checkpoint, "has no config.json; give a Hugging Face checkpoint directory")
    try:
        return FastTokenizer(directory) if (directory / "tokenizer.json").is_file() else SlowTokenizer(directory)
    except Exception as error:
        raise _unreadable(checkpoint, f"has no usable tokenizer ({type(error).__name__}: {error})") from error


def _eos_token_id(directory: Path, token_to_id: Any) -> int | None:
    """The tokenizer's end token; else the model's."""
    tokenizer_config = _read_json(directory / "tokenizer_config.json")
    token = tokenizer_config.get("eos_token")
    token = token.get("content") if isinstance(token, dict) else token
    if token is not None and (known := token_to_id(token)) is not None:
        return known
    eos = _read_json(directory / "config.json").get("eos_token_id")
    return eos[0] if isinstance(eos, list) else eos


def _read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def _unreadable(checkpoint: str, why: str) -> ServiceError:
    return ServiceError(
        Code.NOT_FOUND,
        "CHECKPOINT_NOT_FOUND",
        f"hf_checkpoint {checkpoint!r} {why}.",
        key="hf_checkpoint",
        path=checkpoint,
    )
