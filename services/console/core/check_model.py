"""Can the checkpoint be used, by itself and by the parallel layout of the run? Reads JSON files, no weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from services.common.run_spec import RunSpec
from services.common.settings import SettingsError

_WEIGHTS = ("*.safetensors", "pytorch_model*.bin")


def check_model(spec: RunSpec) -> None:
    """Checks hf_checkpoint, ref_load, load and the tensor parallel sizes. Raises SettingsError."""
    config = check_checkpoint(spec.rollout.hf_checkpoint, "hf_checkpoint", tokenizer=True)
    for key in ("use_routing_replay", "use_rollout_routing_replay"):
        if getattr(spec.trainer, key) and not (_text(config, "num_local_experts") or _text(config, "num_experts")):
            raise SettingsError(
                f"{key}: the model in hf_checkpoint {spec.rollout.hf_checkpoint} has no experts (config.json), so there"
                " is no routing to replay; leave it out."
            )
    if spec.trainer.ref_load:
        check_checkpoint(spec.trainer.ref_load, "ref_load", tokenizer=False)
    if spec.trainer.use_opd:
        check_teacher(spec, config)
    if spec.trainer.load and not Path(spec.trainer.load).is_dir():
        raise SettingsError(f"load {spec.trainer.load} does not exist; give a directory of trainer checkpoints.")
    check_heads(config, "tensor_model_parallel_size", spec.trainer.tensor_model_parallel_size, key_value=True)
    # SGLang copies key-value heads when it has more ranks than heads; attention heads it must be able to deal out.
    check_heads(config, "rollout_num_gpus_per_engine", spec.rollout.rollout_num_gpus_per_engine, key_value=False)


def check_teacher(spec: RunSpec, config: dict[str, Any]) -> None:
    """Policy and teacher must have one vocabulary, and opd_top_k must fit it. Raises SettingsError."""
    size, count = _text(config, "vocab_size"), spec.trainer.opd_top_k
    if count and isinstance(size, int) and count > size:
        raise SettingsError(f"opd_top_k {count} is more than the model's vocab_size {size} (config.json).")
    path = spec.trainer.opd_teacher_load
    if not path:
        return
    teacher = check_checkpoint(path, "opd_teacher_load", tokenizer=False)
    check_heads(teacher, "tensor_model_parallel_size", spec.trainer.tensor_model_parallel_size, key_value=True)
    files = Path(path) / "tokenizer.json", Path(spec.rollout.hf_checkpoint) / "tokenizer.json"
    if not all(file.is_file() for file in files):
        return
    of_teacher, of_policy = (token_ids(_read(file, "opd_teacher_load")) for file in files)
    if of_teacher != of_policy:
        raise SettingsError(
            f"opd_teacher_load {path} has another tokenizer than hf_checkpoint {spec.rollout.hf_checkpoint}: a teacher"
            " grades token ids, so both need the same vocabulary; use a teacher of the same family."
        )


def check_checkpoint(path: str, key: str, *, tokenizer: bool) -> dict[str, Any]:
    """Configuration of a Hugging Face checkpoint. Raises SettingsError."""
    directory = Path(path)
    if not directory.is_dir():
        raise SettingsError(
            f"{key} {path} is no directory; give a Hugging Face checkpoint on this machine"
            " (hf download NAME --local-dir DIR fetches one)."
        )
    if not (directory / "config.json").is_file():
        raise SettingsError(f"{key} {path} has no config.json; give the directory of a Hugging Face checkpoint.")
    config = _read(directory / "config.json", key)
    if not any(any(directory.glob(pattern)) for pattern in _WEIGHTS):
        raise SettingsError(f"{key} {path} has no weights (model.safetensors); download or export it completely.")
    if tokenizer:
        check_vocabulary(directory, key, config)
    return config


def _read(file: Path, key: str) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SettingsError(f"{key}: {file} is not readable JSON ({error}); restore the file.") from error
    if not isinstance(value, dict):
        raise SettingsError(f"{key}: {file} holds no JSON object; restore the file.")
    return value


def _text(config: dict[str, Any], name: str) -> Any:
    """A value of the language model's part of a configuration."""
    inner = config.get("text_config")
    return inner.get(name, config.get(name)) if isinstance(inner, dict) else config.get(name)


def check_vocabulary(directory: Path, key: str, config: dict[str, Any]) -> None:
    """Every token id of the tokenizer must have a row in the embedding. Raises SettingsError."""
    file, size = directory / "tokenizer.json", _text(config, "vocab_size")
    if not file.is_file():
        if not any((directory / name).is_file() for name in ("tokenizer.model", "vocab.json", "vocab.txt")):
            raise SettingsError(f"{key} {directory} has no tokenizer.json; copy the model's tokenizer files there.")
        return
    largest = largest_id(_read(file, key))
    if isinstance(size, int) and largest >= size:
        raise SettingsError(
            f"{key} {directory}: the tokenizer's largest id is {largest} (tokenizer.json) but the model has vocab_size"
            f" {size} (config.json), so ids from {size} on have no embedding; use the tokenizer that belongs to the"
            " model."
        )


def largest_id(tokenizer: dict[str, Any]) -> int:
    """Largest token id of a tokenizer.json; -1 when it has none."""
    model = tokenizer.get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    ids = [entry["id"] for entry in tokenizer.get("added_tokens") or ()]
    if isinstance(vocabulary, dict):
        ids.extend(vocabulary.values())
    elif isinstance(vocabulary, list):  # Unigram: pieces in order of id
        ids.append(len(vocabulary) - 1)
    return max(ids, default=-1)


def token_ids(tokenizer: dict[str, Any]) -> dict[str, int]:
    """Id by token of a tokenizer.json."""
    model = tokenizer.get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    added = {entry["content"]: entry["id"] for entry in tokenizer.get("added_tokens") or ()}
    if isinstance(vocabulary, list):
        vocabulary = {piece[0]: index for index, piece in enumerate(vocabulary)}
    return {**(vocabulary or {}), **added}


def check_heads(config: dict[str, Any], key: str, size: int, *, key_value: bool) -> None:
    """Attention heads (and key-value heads) must divide over `size` ranks. Raises SettingsError."""
    heads = _text(config, "num_attention_heads")
    groups = _text(config, "num_key_value_heads") or heads
    if not isinstance(heads, int) or size == 1:
        return
    if key_value and size > groups:
        raise SettingsError(
            f"{key} {size} is more than the {groups} key-value heads of the model (config.json); use at most {groups}."
        )
    for count, name in ((heads, "attention"), *(((groups, "key-value"),) if key_value else ())):
        if count % size:
            raise SettingsError(f"{key} {size} does not divide the {count} {name} heads of the model (config.json).")
