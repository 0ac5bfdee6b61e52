"""Rows of one data file as prompts: fields taken, rendered, tokenized when they are drawn.

Knows files and tokenizers, not leases. Invariants: text is tokenized here and nowhere else; the first
`CHECKED_ROWS` rows are looked at when the file is opened, every other when it is drawn.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from services.buffer.adapters.jsonl import JsonlFile
from services.buffer.adapters.parquet import ParquetFile
from services.buffer.adapters.rows import RowFile, malformed, split_slice
from services.buffer.adapters.tokenizer import TextTokenizer
from services.buffer.core.drawing import MALFORMED, TOO_LONG
from services.buffer.core.records import Drawn
from services.common.errors import Code, ServiceError
from services.common.records import Prompt, SamplingParams
from services.common.settings import suggest

CHECKED_ROWS = 10_000
_BATCH = 512


@dataclass(frozen=True)
class Columns:
    """Which fields of a row are what, and how a prompt becomes text."""

    input_key: str
    label_key: str | None
    metadata_key: str | None
    chat_template: bool
    template_options: dict[str, Any]


@dataclass(frozen=True)
class Traits:
    """What every prompt of a set carries; empty and None mean the run's."""

    dataset: str = ""
    sampling: SamplingParams | None = None
    rm_type: str = ""
    rm_options_json: str = ""


@dataclass(frozen=True)
class Place:
    """Which prompt a row becomes. `position` counts the rows that are kept."""

    group_id: str
    ordinal: int
    epoch: int
    position: int


@dataclass(frozen=True)
class RenderedRow:
    """A row as text, before tokenizing."""

    line: int
    text: str
    label: str
    metadata_json: str
    messages_json: str


@dataclass
class PromptFile:
    """Prompts of one file. `key`: the setting that names it, for messages; `max_length`: longest prompt in tokens."""

    source: str
    key: str
    columns: Columns
    tokenizer: TextTokenizer
    max_length: int | None = None
    traits: Traits = field(default_factory=Traits)

    def __post_init__(self) -> None:
        self.file = _open(self.source, self.key, self.columns)

    def __len__(self) -> int:
        return len(self.file)

    def check(self, *, metadata_required: bool = True) -> np.ndarray:
        """Looks at the first rows; mask of all rows, False for those of them that are too long. Raises DATA_MALFORMED.

        A row may lack metadata, but a `metadata_key` that none of them has is a mistake.
        """
        keep = np.ones(len(self.file), bool)
        count = min(len(self.file), CHECKED_ROWS)
        metadata_key = self.columns.metadata_key
        has_metadata = not metadata_required or metadata_key is None
        for start in range(0, count, _BATCH):
            stored = self.file.read(range(start, min(start + _BATCH, count)))
            objects = [(line, self.file.parse(line, row)) for line, row in stored]
            texts = [self._render(line, row).text for line, row in objects]
            has_metadata = has_metadata or any(metadata_key in row for _, row in objects)
            if self.max_length is not None:
                lengths = [len(tokens) for tokens in self.tokenizer.encode(texts)]
                keep[start : start + len(lengths)] = np.array(lengths) <= self.max_length
        if not has_metadata:
            raise self._missing(self.file.read([0])[0][0], "metadata_key", metadata_key or "", {})
        return keep

    def draw(self, places: Sequence[Place]) -> list[Drawn]:
        """What rows have become. Raises DATA_NOT_FOUND, DATA_MALFORMED when the file cannot be used at all."""
        rendered: list[RenderedRow | ServiceError] = []
        stored = self.file.read([place.position for place in places])
        for line, row in stored:
            try:
                rendered.append(self._render(line, self.file.parse(line, row)))
            except ServiceError as error:
                if error.reason != "DATA_MALFORMED":
                    raise
                rendered.append(error)
        texts = [row.text if isinstance(row, RenderedRow) else "" for row in rendered]
        tokens = self.tokenizer.encode(texts)
        return [
            self._drawn(place, line, row, ids)
            for place, (line, _), row, ids in zip(places, stored, rendered, tokens, strict=True)
        ]

    def prompts(self, places: Sequence[Place]) -> list[Prompt]:
        """Prompts of rows that must all be usable. Raises DATA_NOT_FOUND, DATA_MALFORMED."""
        drawn = self.draw(places)
        for found in drawn:
            if found.reason == MALFORMED:
                raise ServiceError(Code.INVALID_ARGUMENT, "DATA_MALFORMED", found.message, row=found.prompt.row)
        return [found.prompt for found in drawn]

    def _drawn(self, place: Place, line: int, row: RenderedRow | ServiceError, tokens: list[int]) -> Drawn:
        if isinstance(row, ServiceError):
            return Drawn(self._prompt(place, RenderedRow(line, "", "", "", ""), []), MALFORMED, row.message)
        prompt = self._prompt(place, row, tokens)
        if self.max_length is not None and len(tokens) > self.max_length:
            message = f"{self.file.path}:{line + 1}: the prompt has {len(tokens)} tokens, more than {self.max_length}."
            return Drawn(prompt, TOO_LONG, message)
        return Drawn(prompt)

    def _prompt(self, place: Place, row: RenderedRow, tokens: list[int]) -> Prompt:
        return Prompt(
            group_id=place.group_id,
            ordinal=place.ordinal,
            epoch=place.epoch,
            row=row.line,
            text=row.text,
            label=row.label,
            tokens=np.array(tokens, np.int32),
            metadata_json=row.metadata_json,
            messages_json=row.messages_json,
            dataset=self.traits.dataset,
            sampling=self.traits.sampling,
            rm_type=self.traits.rm_type,
            rm_options_json=self.traits.rm_options_json,
        )

    def _fields(self, line: int, row: dict[str, Any]) -> tuple[str | list, str, str]:
        """(input, label, metadata JSON) of a row. Raises DATA_MALFORMED."""
        columns = self.columns
        content = row.get(columns.input_key)
        if content is None:
            raise self._missing(line, "input_key", columns.input_key, row)
        if not _is_prompt(content):
            why = f"field {columns.input_key!r} must be a string or a list of chat messages with 'role' and 'content'"
            raise malformed(self.file.path, line + 1, why)
        if isinstance(content, list) and not columns.chat_template:
            why = f"field {columns.input_key!r} is a list of chat messages; set apply_chat_template to render it"
            raise malformed(self.file.path, line + 1, why)
        if not content:
            raise malformed(self.file.path, line + 1, f"field {columns.input_key!r} is empty")
        label = ""
        if columns.label_key is not None:
            value = row.get(columns.label_key)
            if value is None:
                raise self._missing(line, "label_key", columns.label_key, row)
            label = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        metadata = row.get(columns.metadata_key) if columns.metadata_key else None
        if metadata is not None and not isinstance(metadata, dict):
            raise malformed(self.file.path, line + 1, f"field {columns.metadata_key!r} must be an object")
        return content, label, "" if metadata is None else json.dumps(metadata, ensure_ascii=False)

    def _render(self, line: int, row: dict[str, Any]) -> RenderedRow:
        content, label, metadata_json = self._fields(line, row)
        if not self.columns.chat_template:
            return RenderedRow(line, str(content), label, metadata_json, "")
        messages = content if isinstance(content, list) else [{"role": "user", "content": content}]
        try:
            text = self.tokenizer.render(messages, self.columns.template_options)
        except ValueError as error:
            raise malformed(self.file.path, line + 1, str(error)) from error
        return RenderedRow(line, text, label, metadata_json, json.dumps(messages, ensure_ascii=False))

    def _missing(self, line: int, setting: str, name: str, row: dict[str, Any]) -> ServiceError:
        known = sorted(row)
        has = f"; the row has {', '.join(known)}" if known else ""
        hint = suggest(name, known).strip(" .")
        return malformed(
            self.file.path, line + 1, f"no field {name!r} ({setting}){has}{'; ' + hint.lower() if hint else ''}"
        )


def _open(source: str, key: str, columns: Columns) -> RowFile:
    path, _ = split_slice(source)
    if path.suffix != ".parquet":
        return JsonlFile(source, key)
    named = {"input_key": columns.input_key, "label_key": columns.label_key, "metadata_key": columns.metadata_key}
    return ParquetFile(source, key, named)


def _is_prompt(content: Any) -> bool:
    if isinstance(content, str):
        return True
    return isinstance(content, list) and all(
        isinstance(message, dict) and isinstance(message.get("role"), str) and "content" in message
        for message in content
    )
