"""Opens the data of a run: files, tokenizer, mixture and curriculum, from its settings."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

from services.buffer.adapters.dataset import (
    Mixture,
    RowOrderSettings,
    RunDataset,
    SteadyMixture,
    open_part,
    unpack_found,
)
from services.buffer.adapters.prompt_file import Columns, PromptFile, Traits
from services.buffer.adapters.tokenizer import CheckpointTokenizer
from services.buffer.core.curriculum import BlockStore, CurriculumMixture, CurriculumSettings
from services.buffer.core.mixture import FixedMixture, whole_weights
from services.common.errors import Code, ServiceError
from services.common.import_path import load_function
from services.common.records import SamplingParams
from services.common.run_spec import DataSettings, PromptSet, RunSpec


class PromptLoader:
    """DatasetLoader for JSONL and parquet files beside a Hugging Face tokenizer; keeps tokenizers between runs."""

    def __init__(self, blocks: BlockStore) -> None:
        self._blocks = blocks
        self._tokenizers: dict[tuple[str, int], CheckpointTokenizer] = {}

    async def load(self, run_id: str, spec_json: str, skipped: bytes | None) -> RunDataset:
        """Indexes the data of a run; checks the first rows when `skipped` is None, else draws as was found then.

        Raises DATA_*, INVALID_FIELD, FUNCTION_NOT_LOADABLE.
        """
        spec = RunSpec.model_validate_json(spec_json)
        return await asyncio.to_thread(self._load, run_id, spec, skipped)

    def _load(self, run_id: str, spec: RunSpec, skipped: bytes | None) -> RunDataset:
        data = spec.data
        if data.prompt_data is None and not data.prompt_data_mixture:
            raise ServiceError(
                Code.INVALID_ARGUMENT,
                "INVALID_FIELD",
                "prompt_data is not set; give it a file of prompts, JSONL with one object a line or parquet (or give"
                " prompt_data_mixture several).",
                field="prompt_data",
            )
        found, old = unpack_found(skipped) if skipped is not None else ([], False)
        before = {part.name: part for part in found}
        tokenizer = self._tokenizer(spec.rollout.hf_checkpoint)
        order = RowOrderSettings(data.rollout_shuffle, data.rollout_seed, tables=old)
        if data.prompt_data is not None:
            prompts = PromptFile(
                data.prompt_data, "prompt_data", _columns(data), tokenizer, data.rollout_max_prompt_len
            )
            parts = [open_part(prompts, before.get(""), order)]
        else:
            parts = [
                open_part(self._of_set(data, part, tokenizer), before.get(part.name), order.seeded_for(part.name))
                for part in data.prompt_data_mixture
            ]
        evals = {name: self._eval(data, name, path, tokenizer) for name, path in data.eval_datasets.items()}
        return RunDataset(run_id, parts, self._mixture(run_id, spec), evals, data.max_malformed_rows)

    def _of_set(self, data: DataSettings, part: PromptSet, tokenizer: CheckpointTokenizer) -> PromptFile:
        key = f"prompt_data_mixture {part.name!r}"
        length = data.rollout_max_prompt_len
        return PromptFile(part.path, key, _columns(data, part), tokenizer, length, _traits(part))

    def _eval(self, data: DataSettings, name: str, path: str, tokenizer: CheckpointTokenizer) -> PromptFile:
        """An evaluation set; one named as a set of the mixture takes that set's fields and grader."""
        same = next((part for part in data.prompt_data_mixture if part.name == name), None)
        columns = _columns(data, same)
        columns = Columns(
            data.eval_input_key or columns.input_key,
            data.eval_label_key or columns.label_key,
            columns.metadata_key,
            columns.chat_template,
            columns.template_options,
        )
        traits = _traits(same) if same else Traits()
        prompts = PromptFile(path, f"eval_prompt_data {name!r}", columns, tokenizer, None, traits)
        prompts.check(metadata_required=False)
        return prompts

    def _mixture(self, run_id: str, spec: RunSpec) -> Mixture:
        sets = spec.data.prompt_data_mixture
        if not sets:
            return SteadyMixture(FixedMixture((1,)))
        weights = tuple(part.weight for part in sets)
        path = spec.data.curriculum_path
        if path is None:
            return SteadyMixture(FixedMixture(whole_weights(weights)))
        names = tuple(part.name for part in sets)
        function = load_function(path, "curriculum_path", "the buffer")
        size = spec.rollout.rollout_batch_size
        return CurriculumMixture(CurriculumSettings(run_id, names, weights, size, function, path), self._blocks)

    def _tokenizer(self, directory: str) -> CheckpointTokenizer:
        path = Path(directory).expanduser() / "tokenizer.json"
        changed = path.stat().st_mtime_ns if path.is_file() else 0
        key = (directory, changed)
        if key not in self._tokenizers:
            self._tokenizers[key] = CheckpointTokenizer(Path(directory).expanduser())
        return self._tokenizers[key]


def _columns(data: DataSettings, part: PromptSet | None = None) -> Columns:
    """Fields of the run, or of a set of its mixture."""

    def own(name: str):
        value = getattr(part, name) if part else None
        return getattr(data, name) if value is None else value

    return Columns(
        own("input_key"),
        own("label_key"),
        own("metadata_key"),
        own("apply_chat_template"),
        data.apply_chat_template_kwargs,
    )


def _traits(part: PromptSet) -> Traits:
    sampling = SamplingParams(
        top_p=part.top_p,
        top_k=part.top_k,
        max_new_tokens=part.max_response_len,
        stop=part.stop or (),
        stop_token_ids=part.stop_token_ids or (),
    )
    return Traits(
        dataset=part.name,
        sampling=None if sampling == SamplingParams() else sampling,
        rm_type=part.rm_type or "",
        rm_options_json="" if part.rm_options is None else json.dumps(part.rm_options),
    )
