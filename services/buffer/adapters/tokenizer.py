"""Text to token ids with the tokenizer of a Hugging Face checkpoint, without importing a machine-learning stack.

Reads tokenizer.json, tokenizer_config.json and the chat template directly. A checkpoint that has only an older
vocabulary format is converted by `transformers`, imported then and not before.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn, Protocol

from jinja2 import Template, TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from services.common.errors import ServiceError, invalid_field

_SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


class TextTokenizer(Protocol):
    """What the data sets need of a tokenizer."""

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of texts; no special tokens are added."""
        ...

    def render(self, messages: list[dict[str, Any]], options: dict[str, Any]) -> str:
        """Chat messages as the text that asks for the next answer. Raises ValueError with the reason."""
        ...


class CheckpointTokenizer:
    """Tokenizer of a checkpoint directory. Raises INVALID_FIELD when there is none, or none that fits the model."""

    def __init__(self, directory: str | Path) -> None:
        self._directory = Path(directory)
        if not self._directory.is_dir():
            raise self._unusable("there is no such directory; give the path of a Hugging Face checkpoint")
        config = self._read_json("tokenizer_config.json")
        self._backend = self._load_backend()
        self._check_vocabulary()
        self._specials = {name: _token_text(config[name]) for name in _SPECIAL if config.get(name)}
        self._template_text = self._find_template(config)
        self._template: Template | None = None

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of texts; no special tokens are added."""
        encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def render(self, messages: list[dict[str, Any]], options: dict[str, Any]) -> str:
        """Chat messages as the text that asks for the next answer. Raises ValueError, INVALID_FIELD."""
        if self._template is None:
            self._template = self._compile()
        values = {"add_generation_prompt": True, "tools": None, "documents": None, **self._specials, **options}
        try:
            return self._template.render(messages=messages, **values)
        except (TemplateError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"the chat template refuses the messages ({error})") from error

    def _load_backend(self) -> Tokenizer:
        path = self._directory / "tokenizer.json"
        try:
            if path.is_file():
                return Tokenizer.from_file(str(path))
            return self._convert()
        except ServiceError:
            raise
        except Exception as error:  # both libraries raise bare Exception
            raise self._unusable(f"its tokenizer cannot be read ({error})") from error

    def _convert(self) -> Tokenizer:
        names = ("tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "sentencepiece.bpe.model")
        if not any((self._directory / name).is_file() for name in names):
            raise self._unusable("it has no tokenizer.json")
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self._directory, use_fast=True).backend_tokenizer

    def _check_vocabulary(self) -> None:
        """A token id that the model's embedding lacks would fail in the middle of the run."""
        config = self._read_json("config.json")
        size = config.get("vocab_size", config.get("text_config", {}).get("vocab_size"))
        highest = max(self._backend.get_vocab(with_added_tokens=True).values(), default=-1)
        if isinstance(size, int) and highest >= size:
            raise self._unusable(
                f"its tokenizer has token id {highest}, but vocab_size in config.json is {size}; use the tokenizer that"
                " belongs to the model"
            )

    def _find_template(self, config: dict[str, Any]) -> str | None:
        path = self._directory / "chat_template.jinja"
        if path.is_file():
            return path.read_text(encoding="utf-8")
        template = config.get("chat_template")
        if isinstance(template, list):  # several by name
            named = {entry.get("name"): entry.get("template") for entry in template}
            template = named.get("default", next(iter(named.values()), None))
        return template

    def _compile(self) -> Template:
        if not self._template_text:
            raise self._unusable("it has no chat template; leave out apply_chat_template, or add chat_template.jinja")

        def refuse(message: str) -> NoReturn:
            raise TemplateError(message)

        def to_json(value: Any, indent: int | None = None, **_: Any) -> str:
            return json.dumps(value, ensure_ascii=False, indent=indent)

        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        environment.filters["tojson"] = to_json
        environment.globals |= {
            "raise_exception": refuse,
            "strftime_now": lambda form: datetime.now().astimezone().strftime(form),
        }
        try:
            return environment.from_string(self._template_text)
        except TemplateError as error:
            raise self._unusable(f"its chat template is not valid ({error})") from error

    def _read_json(self, name: str) -> dict[str, Any]:
        path = self._directory / name
        if not path.is_file():
            return {}
        try:
            return json.loads(path.read_text(encoding="utf-8"))
        except (ValueError, OSError) as error:
            raise self._unusable(f"{name} cannot be read ({error})") from error

    def _unusable(self, why: str) -> ServiceError:
        return invalid_field("hf_checkpoint", str(self._directory), why)


def _token_text(token: str | dict[str, Any]) -> str:
    return token if isinstance(token, str) else token["content"]
