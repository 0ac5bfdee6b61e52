"""Writes the weights as a Hugging Face checkpoint: configuration, tokenizer files, safetensors.

The export is complete or absent: it is written beside its place and then renamed.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from safetensors import SafetensorError
from safetensors.torch import save_file

from services.common.errors import Code, ServiceError
from services.trainer.core.buckets import BucketPlan, plan_buckets
from services.trainer.ranks.model.hf_config import HfConfig
from services.trainer.ranks.model.hf_weights import gather_weights, list_weights

_SHARD_BYTES = 4 * 1024**3
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json")


def export_hf(model: torch.nn.Module, hf: HfConfig, source: str | Path, target: str | Path) -> int:
    """Writes `target`, with everything but weights copied from the checkpoint `source`; returns the bytes of weights.

    All ranks must call it; global rank 0 writes. An export that is already there is replaced.
    """
    specs = list_weights(model, hf)
    plan = plan_buckets(specs, _SHARD_BYTES)
    if parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0:
        tensors = gather_weights(model, hf)
        if dist.get_rank() == 0:
            write_export(tensors, plan, Path(source), Path(target))
        else:
            for _ in tensors:
                pass
    dist.barrier()
    return plan.total_bytes


def write_export(tensors: Iterator[tuple[str, torch.Tensor]], plan: BucketPlan, source: Path, target: Path) -> None:
    """Writes beside `target`, then takes its place. Raises EXPORT_FAILED when the disk refuses it; nothing is left of
    it then, and what was in that place stays."""
    scratch = target.with_name(f".{target.name}.writing")
    try:
        _write(tensors, plan, source, scratch)
        shutil.rmtree(target, ignore_errors=True)
        scratch.rename(target)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(scratch, ignore_errors=True)
        raise ServiceError(
            Code.RESOURCE_EXHAUSTED,
            "EXPORT_FAILED",
            f"The Hugging Face checkpoint {target} could not be written ({error}); make room on that disk.",
            path=target,
        ) from error


def _write(tensors: Iterator[tuple[str, torch.Tensor]], plan: BucketPlan, source: Path, scratch: Path) -> None:
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    for file in source.iterdir():
        if file.is_file() and not file.name.endswith(_WEIGHT_SUFFIXES):
            shutil.copy2(file, scratch)
    count = len(plan.buckets)
    names: dict[str, str] = {}
    dtype = plan.buckets[0][0].dtype
    for index, specs in enumerate(plan.buckets):
        file = "model.safetensors" if count == 1 else f"model-{index + 1:05d}-of-{count:05d}.safetensors"
        shard = {}
        for spec in specs:
            name, tensor = next(tensors)
            assert name == spec.name
            shard[name] = tensor.detach().cpu().contiguous()
        save_file(shard, scratch / file, metadata={"format": "pt"})
        names |= dict.fromkeys(shard, file)
    if count > 1:
        index = {"metadata": {"total_size": plan.total_bytes}, "weight_map": names}
        (scratch / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    config = json.loads((source / "config.json").read_text())
    config.pop("torch_dtype", None)
    (scratch / "config.json").write_text(json.dumps(config | {"dtype": dtype}, indent=2) + "\n")
