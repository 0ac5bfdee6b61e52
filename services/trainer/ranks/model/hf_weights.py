"""Hugging Face weights ⇄ megatron weights, by one table.

Loading reads each rank's own slices from the safetensors files, without communication. Gathering yields full tensors
under Hugging Face's names in a fixed order; all tensor-parallel ranks must iterate together, and only rank 0 of
them gets tensors.

To add a layer parameter: one line in `_LAYER`. Kinds, by how tensor parallelism cuts them:
    whole      the same on every rank
    columns    cut along dimension 1
    vocabulary cut along dimension 0 after padding
    gate_up    gate and up projections, each cut along dimension 0, one above the other
    qkv        per key-value head: its query heads, its key, its value; heads cut along dimension 0
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from safetensors import SafetensorError, safe_open

from services.common.errors import Code, ServiceError
from services.trainer.core.buckets import TensorSpec
from services.trainer.ranks.model.hf_config import HfConfig
from services.trainer.ranks.model.value_head import ValueHead

_ATTENTION, _MLP = "self_attn.", "mlp."
_LAYER: dict[str, tuple[str, tuple[str, ...]]] = {
    "input_layernorm.weight": ("whole", ("input_layernorm.weight",)),
    "self_attention.linear_qkv.weight": ("qkv", tuple(f"{_ATTENTION}{x}_proj.weight" for x in "qkv")),
    "self_attention.linear_qkv.bias": ("qkv", tuple(f"{_ATTENTION}{x}_proj.bias" for x in "qkv")),
    "self_attention.q_layernorm.weight": ("whole", (f"{_ATTENTION}q_norm.weight",)),
    "self_attention.k_layernorm.weight": ("whole", (f"{_ATTENTION}k_norm.weight",)),
    "self_attention.linear_proj.weight": ("columns", (f"{_ATTENTION}o_proj.weight",)),
    "pre_mlp_layernorm.weight": ("whole", ("post_attention_layernorm.weight",)),
    "mlp.linear_fc1.weight": ("gate_up", (f"{_MLP}gate_proj.weight", f"{_MLP}up_proj.weight")),
    "mlp.linear_fc2.weight": ("columns", (f"{_MLP}down_proj.weight",)),
    "mlp.router.weight": ("whole", (f"{_MLP}gate.weight",)),
}
_EXPERT = "mlp.experts.local_experts."
"""Every expert has an MLP's parameters behind its number."""
_TOP: dict[str, tuple[str, tuple[str, ...]]] = {
    "embedding.word_embeddings.weight": ("vocabulary", ("model.embed_tokens.weight",)),
    "decoder.final_layernorm.weight": ("whole", ("model.norm.weight",)),
    "output_layer.weight": ("vocabulary", ("lm_head.weight",)),
}
_VALUE_HEAD = ("whole", ("score.weight",))
"""A critic's output layer; a checkpoint of a policy has none."""


@dataclass(frozen=True)
class _Entry:
    parameter: torch.nn.Parameter
    kind: str
    names: tuple[str, ...]


def _entries(model: torch.nn.Module, hf: HfConfig) -> Iterator[_Entry]:
    """Every parameter with its kind and its Hugging Face names, in the model's order."""
    for name, parameter in model.named_parameters():
        if name == "output_layer.weight" and isinstance(model.output_layer, ValueHead):
            kind, names = _VALUE_HEAD
        elif name in _TOP:
            kind, names = _TOP[name]
        else:
            _, _, layer, rest = name.split(".", 3)  # decoder.layers.<n>.<rest>
            kind, short = _layer_names(rest)
            names = tuple(f"model.layers.{layer}.{n}" for n in short)
        yield _Entry(parameter, kind, names)


def _layer_names(rest: str) -> tuple[str, tuple[str, ...]]:
    """Kind and Hugging Face names of a layer's parameter, by its name within the layer."""
    if not rest.startswith(_EXPERT):
        return _LAYER[rest]
    number, inner = rest.removeprefix(_EXPERT).split(".", 1)
    kind, names = _LAYER[_MLP + inner]
    return kind, tuple(name.replace(_MLP, f"{_MLP}experts.{number}.", 1) for name in names)


class _Checkpoint:
    """The safetensors files of a directory, opened when first needed."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._files: dict[Path, object] = {}
        index = path / "model.safetensors.index.json"
        try:
            if index.exists():
                listed = json.loads(index.read_text())["weight_map"]
                self._where = {name: path / file for name, file in listed.items()}
            else:
                self._where = {name: file for file in sorted(path.glob("*.safetensors")) for name in self._names(file)}
        except (OSError, json.JSONDecodeError, KeyError, SafetensorError) as error:
            raise self._invalid(f"its safetensors files cannot be read ({error})") from error

    def _invalid(self, what: str) -> ServiceError:
        return ServiceError(
            Code.INVALID_ARGUMENT,
            "CHECKPOINT_INVALID",
            f"hf_checkpoint {self._path}: {what}; give a Hugging Face checkpoint in safetensors format.",
            path=self._path,
        )

    def _open(self, file: Path):
        if file not in self._files:
            self._files[file] = safe_open(file, framework="pt", device="cpu")
        return self._files[file]

    def _names(self, file: Path) -> list[str]:
        return list(self._open(file).keys())

    def __contains__(self, name: str) -> bool:
        return name in self._where

    def slice(self, name: str):
        """Lazy slice of a tensor, by name."""
        if name not in self._where:
            raise self._invalid(f"it has no tensor {name}")
        return self._open(self._where[name]).get_slice(name)


def _cut(source, dimension: int, ranks: int, rank: int) -> torch.Tensor:
    size = source.get_shape()[dimension] // ranks
    start, end = rank * size, (rank + 1) * size
    return source[start:end] if dimension == 0 else source[:, start:end]


@torch.no_grad()
def load_weights(model: torch.nn.Module, hf: HfConfig, checkpoint: str | Path) -> None:
    """Copies a Hugging Face checkpoint into the model, converting to the model's dtype. A value head that is not in it
    stays as it is.

    Raises:
        ServiceError: CHECKPOINT_INVALID when files or tensors are missing or have another shape.
    """
    files = _Checkpoint(Path(checkpoint))
    ranks, rank = parallel_state.get_tensor_model_parallel_world_size(), parallel_state.get_tensor_model_parallel_rank()
    for entry in _entries(model, hf):
        if entry.names == _VALUE_HEAD[1] and entry.names[0] not in files:
            continue
        sources = [files.slice(name) for name in entry.names]
        shard = _shard(entry, sources, hf, ranks, rank)
        if shard.shape != entry.parameter.shape:
            raise files._invalid(
                f"{', '.join(entry.names)} give a shard of shape {list(shard.shape)}, but the"
                f" configuration needs {list(entry.parameter.shape)}"
            )
        entry.parameter.copy_(shard)


def _shard(entry: _Entry, sources: list, hf: HfConfig, ranks: int, rank: int) -> torch.Tensor:
    kind = entry.kind
    if kind == "whole":
        return sources[0][:]
    if kind == "columns":
        return _cut(sources[0], 1, ranks, rank)
    if kind == "vocabulary":
        rows = entry.parameter.shape[0]
        part = sources[0][rank * rows : min((rank + 1) * rows, hf.vocab_size)]
        return torch.nn.functional.pad(part, (0, 0, 0, rows - part.shape[0]))
    parts = [_cut(source, 0, ranks, rank) for source in sources]
    if kind == "qkv":
        groups = hf.kv_heads // ranks
        stacked = torch.cat([part.reshape(groups, -1, *part.shape[1:]) for part in parts], dim=1)
        return stacked.reshape(-1, *parts[0].shape[1:])
    return torch.cat(parts)  # gate_up


def list_weights(model: torch.nn.Module, hf: HfConfig) -> tuple[TensorSpec, ...]:
    """Names, dtypes and full shapes of what `gather_weights` yields, in its order; no communication."""
    ranks = parallel_state.get_tensor_model_parallel_world_size()
    specs = []
    for entry in _entries(model, hf):
        dtype = str(entry.parameter.dtype).removeprefix("torch.")
        shapes = _full_shapes(entry, hf, ranks)
        specs += [TensorSpec(name, dtype, shape) for name, shape in zip(entry.names, shapes, strict=True)]
    return tuple(specs)


def _full_shapes(entry: _Entry, hf: HfConfig, ranks: int) -> list[tuple[int, ...]]:
    first, *rest = entry.parameter.shape
    if entry.kind == "whole":
        return [(first, *rest)]
    if entry.kind == "columns":
        return [(first, rest[0] * ranks)]
    if entry.kind == "vocabulary":
        return [(hf.vocab_size, *rest)]
    if entry.kind == "qkv":
        return [(heads * hf.head_dim, *rest) for heads in (hf.heads, hf.kv_heads, hf.kv_heads)]
    parts = len(entry.names)
    return [(first * ranks // parts, *rest)] * parts


@torch.no_grad()
def gather_weights(model: torch.nn.Module, hf: HfConfig) -> Iterator[tuple[str, torch.Tensor | None]]:
    """(Hugging Face name, full tensor on tensor-parallel rank 0, else None), one parameter at a time. A tensor may be a
    view of the parameter."""
    group = parallel_state.get_tensor_model_parallel_group()
    for entry in _entries(model, hf):
        shards = _gather(entry, group)
        if shards is None:
            yield from ((name, None) for name in entry.names)
        else:
            yield from zip(entry.names, _merge(entry.kind, shards, hf), strict=True)


def _gather(entry: _Entry, group) -> list[torch.Tensor] | None:
    own = entry.parameter.detach()
    if group.size() == 1 or entry.kind == "whole":
        return [own] if group.rank() == 0 else None
    shards = [torch.empty_like(own) for _ in range(group.size())]
    dist.all_gather(shards, own.contiguous(), group=group)
    return shards if group.rank() == 0 else None


def _merge(kind: str, shards: list[torch.Tensor], hf: HfConfig) -> list[torch.Tensor]:
    if kind == "whole":
        return shards
    if kind == "columns":
        return [_joined(shards, dim=1)]
    if kind == "vocabulary":
        return [_joined(shards)[: hf.vocab_size]]
    if kind == "gate_up":
        return [_joined(halves) for halves in zip(*(shard.chunk(2) for shard in shards), strict=True)]
    full = _joined(shards)
    by_group = full.reshape(hf.kv_heads, -1, *full.shape[1:])
    queries = hf.heads // hf.kv_heads * hf.head_dim
    parts = by_group.split([queries, hf.head_dim, hf.head_dim], dim=1)
    return [part.reshape(-1, *full.shape[1:]) for part in parts]


def _joined(parts: Sequence[torch.Tensor], dim: int = 0) -> torch.Tensor:
    """One after the other; a lone one as it is, without a copy."""
    return parts[0] if len(parts) == 1 else torch.cat(tuple(parts), dim=dim)
