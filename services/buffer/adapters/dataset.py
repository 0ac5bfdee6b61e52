"""The prompts of a run: rows of a JSONL file, rendered and tokenized when they are drawn.

Knows files and tokenizers, not leases. Invariants: the same ordinal gives the same prompt on every server, and
text is tokenized here and nowhere else. Rows longer than `rollout_max_prompt_len` are left out when the run is
created; which ones is kept with the run, so that another server need not tokenize the file again.
"""

from __future__ import annotations

import asyncio
import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from services.buffer.adapters.jsonl import JsonlFile, malformed
from services.buffer.adapters.tokenizer import CheckpointTokenizer, TextTokenizer
from services.buffer.core import ids
from services.buffer.core.permutation import RowOrder
from services.common.errors import Code, ServiceError, invalid_field
from services.common.records import Prompt
from services.common.run_spec import RunSpec
from services.common.settings import suggest

_LENGTH_BATCH = 512
_RENDER_CHECKS = 100_000
"""Rows whose rendering is tried when a run is created; the template of a longer file proves itself on these."""


@dataclass(frozen=True)
class Columns:
    """Which fields of a row are what, and how a prompt becomes text."""

    input_key: str
    label_key: str | None
    metadata_key: str | None
    chat_template: bool
    template_options: dict[str, Any]


@dataclass(frozen=True)
class RenderedRow:
    """A row as text, before tokenizing."""

    line: int
    text: str
    label: str
    metadata_json: str
    messages_json: str


class PromptFile:
    """Rows of one file as prompts."""

    def __init__(self, source: str, key: str, columns: Columns, tokenizer: TextTokenizer) -> None:
        self.file = JsonlFile(source, key)
        self._columns = columns
        self._tokenizer = tokenizer

    def __len__(self) -> int:
        return len(self.file)

    def check(self, max_length: int | None, *, metadata_required: bool = True) -> np.ndarray:
        """Reads every row; mask of those whose prompt is not longer than `max_length`. Raises DATA_MALFORMED.

        A row may lack metadata, but a `metadata_key` that no row has is a mistake.
        """
        keep = np.ones(len(self.file), bool)
        texts: list[str] = []
        has_metadata = not metadata_required or self._columns.metadata_key is None

        def measure(start: int) -> None:
            for index, tokens in enumerate(self._tokenizer.encode(texts)):
                keep[start + index] = len(tokens) <= max_length  # pyright: ignore[reportOperatorIssue]
            texts.clear()

        position = -1
        for position, (line, row) in enumerate(self.file):
            if max_length is not None:
                texts.append(self._render(line, row).text)
            elif position < _RENDER_CHECKS:
                self._render(line, row)
            else:
                self._fields(line, row)
            has_metadata = has_metadata or self._columns.metadata_key in row
            if max_length is not None and len(texts) == _LENGTH_BATCH:
                measure(position + 1 - len(texts))
        if max_length is not None and texts:
            measure(position + 1 - len(texts))
        if not has_metadata:
            raise self._missing(int(self.file.lines[0]), "metadata_key", self._columns.metadata_key or "", {})
        return keep

    def prompts(self, places: Sequence[tuple[str, int, int, int]]) -> list[Prompt]:
        """Prompts at (group id, ordinal, epoch, position)."""
        rows = self.file.read([position for *_, position in places])
        rendered = [self._render(line, row) for line, row in rows]
        tokens = self._tokenizer.encode([row.text for row in rendered])
        return [
            Prompt(
                group_id=group_id,
                ordinal=ordinal,
                epoch=epoch,
                row=row.line,
                text=row.text,
                label=row.label,
                tokens=np.array(token_ids, np.int32),
                metadata_json=row.metadata_json,
                messages_json=row.messages_json,
            )
            for (group_id, ordinal, epoch, _), row, token_ids in zip(places, rendered, tokens, strict=True)
        ]

    def _fields(self, line: int, row: dict[str, Any]) -> tuple[str | list, str, str]:
        """(input, label, metadata JSON) of a row. Raises DATA_MALFORMED."""
        columns = self._columns
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
        if not self._columns.chat_template:
            return RenderedRow(line, str(content), label, metadata_json, "")
        messages = content if isinstance(content, list) else [{"role": "user", "content": content}]
        try:
            text = self._tokenizer.render(messages, self._columns.template_options)
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


def _is_prompt(content: Any) -> bool:
    if isinstance(content, str):
        return True
    return isinstance(content, list) and all(
        isinstance(message, dict) and isinstance(message.get("role"), str) and "content" in message
        for message in content
    )


class RunDataset:
    """Training and evaluation prompts of a run."""

    def __init__(self, run_id: str, prompts: PromptFile, order: RowOrder, evals: dict[str, PromptFile]) -> None:
        self._run_id = run_id
        self._prompts = prompts
        self._order = order
        self._evals = evals
        self._skipped = np.zeros(0, np.int32)
        self.row_count = len(prompts)

    @property
    def skipped_count(self) -> int:
        """Rows left out because their prompt is too long."""
        return len(self._skipped)

    def set_skipped(self, rows: np.ndarray) -> None:
        """Row numbers left out, int32."""
        self._skipped = rows

    def skipped_rows(self) -> bytes:
        """Rows left out: differences as little-endian int32, deflated."""
        return zlib.compress(np.diff(self._skipped, prepend=0).astype("<i4").tobytes())

    async def prompts(self, ordinals: Sequence[int]) -> list[Prompt]:
        """Prompts of ordinals. Raises DATA_NOT_FOUND, DATA_MALFORMED."""
        if not ordinals:
            return []
        places = [(ids.group_id(self._run_id, ordinal), ordinal, *self._order.locate(ordinal)) for ordinal in ordinals]
        return await asyncio.to_thread(self._prompts.prompts, places)

    async def eval_prompts(self, name: str, start: int, count: int) -> tuple[list[Prompt], int]:
        """(prompts from row `start`, rows in all) of an evaluation set. Raises DATASET_NOT_FOUND."""
        found = self._evals.get(name)
        if found is None:
            known = ", ".join(sorted(self._evals)) or "none; set eval_prompt_data"
            raise ServiceError(
                Code.NOT_FOUND,
                "DATASET_NOT_FOUND",
                f"Run {self._run_id} has no evaluation set {name!r}; it has: {known}.",
                dataset=name,
                run_id=self._run_id,
            )
        rows = range(start, min(start + count, len(found)))
        places = [(f"eval-{name}-{row}", row, 0, row) for row in rows]
        return (await asyncio.to_thread(found.prompts, places) if places else []), len(found)


class JsonlLoader:
    """DatasetLoader for JSONL files beside a Hugging Face tokenizer; keeps tokenizers between runs."""

    def __init__(self) -> None:
        self._tokenizers: dict[tuple[str, int], CheckpointTokenizer] = {}

    async def load(self, run_id: str, spec_json: str, skipped: bytes | None) -> RunDataset:
        """Indexes the data of a run; checks every row when `skipped` is None. Raises DATA_*, INVALID_FIELD."""
        spec = RunSpec.model_validate_json(spec_json)
        return await asyncio.to_thread(self._load, run_id, spec, skipped)

    def _load(self, run_id: str, spec: RunSpec, skipped: bytes | None) -> RunDataset:
        data = spec.data
        if data.prompt_data is None:
            raise ServiceError(
                Code.INVALID_ARGUMENT,
                "INVALID_FIELD",
                "prompt_data is not set; give it a JSONL file of prompts, one object a line.",
                field="prompt_data",
            )
        columns = Columns(
            data.input_key,
            data.label_key,
            data.metadata_key,
            data.apply_chat_template,
            data.apply_chat_template_kwargs,
        )
        tokenizer = self._tokenizer(spec.rollout.hf_checkpoint)
        prompts = PromptFile(data.prompt_data, "prompt_data", columns, tokenizer)
        if skipped is None:
            mask = prompts.check(data.rollout_max_prompt_len)
        else:
            rows = np.cumsum(np.frombuffer(zlib.decompress(skipped), "<i4")) if skipped else np.zeros(0, np.int32)
            mask = ~np.isin(prompts.file.lines, rows)
        left_out = prompts.file.lines[~mask]
        if not mask.any():
            raise invalid_field(
                "rollout_max_prompt_len",
                data.rollout_max_prompt_len,
                f"every prompt of {data.prompt_data} is longer; raise it",
            )
        prompts.file.keep(mask)
        eval_columns = Columns(
            data.eval_input_key or data.input_key,
            data.eval_label_key or data.label_key,
            data.metadata_key,
            data.apply_chat_template,
            data.apply_chat_template_kwargs,
        )
        evals = {}
        for name, path in data.eval_datasets.items():
            evals[name] = PromptFile(path, f"eval_prompt_data {name!r}", eval_columns, tokenizer)
            evals[name].check(None, metadata_required=False)
        order = RowOrder(len(prompts), shuffle=data.rollout_shuffle, seed=data.rollout_seed)
        dataset = RunDataset(run_id, prompts, order, evals)
        dataset.set_skipped(left_out)
        return dataset

    def _tokenizer(self, directory: str) -> CheckpointTokenizer:
        path = Path(directory).expanduser() / "tokenizer.json"
        changed = path.stat().st_mtime_ns if path.is_file() else 0
        key = (directory, changed)
        if key not in self._tokenizers:
            self._tokenizers[key] = CheckpointTokenizer(Path(directory).expanduser())
        return self._tokenizers[key]
