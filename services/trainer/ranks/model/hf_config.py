"""Reads a Hugging Face `config.json` into the few facts that a decoder needs.

Independent of transformers (whose import costs seconds in every rank) and of megatron. Accepts the RoPE keys of
transformers 4 (`rope_theta`, `rope_scaling`) and 5 (`rope_parameters`).
To add a family with the same architecture: one line in `FAMILIES`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from services.common.errors import Code, ServiceError


@dataclass(frozen=True)
class Family:
    """What sets a family apart: bias on q, k, v; RMS norm on q and k per head; experts in place of the MLP."""

    qkv_bias: bool
    qk_norm: bool
    experts: bool = False


FAMILIES = {
    "llama": Family(qkv_bias=False, qk_norm=False),
    "mistral": Family(qkv_bias=False, qk_norm=False),
    "qwen2": Family(qkv_bias=True, qk_norm=False),
    "qwen3": Family(qkv_bias=False, qk_norm=True),
    "qwen3_moe": Family(qkv_bias=False, qk_norm=True, experts=True),
}


@dataclass(frozen=True)
class Experts:
    """A mixture of experts: every token goes to `per_token` of `count`, weighted by the softmax of their logits.

    normalised: the softmax is over those chosen only, so that weights sum to 1; layers: which layers have experts, by
    number; the others have an MLP.
    """

    count: int
    per_token: int
    intermediate_size: int
    normalised: bool
    layers: tuple[int, ...]


@dataclass(frozen=True)
class HfConfig:
    """A decoder-only model."""

    model_type: str
    family: Family
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    max_positions: int
    tied: bool
    rope_theta: float
    rope: Mapping[str, float]
    experts: Experts | None = None


def _unsupported(path: Path, what: str, remedy: str) -> ServiceError:
    return ServiceError(
        Code.INVALID_ARGUMENT, "MODEL_UNSUPPORTED", f"hf_checkpoint {path.parent}: {what}; {remedy}.", path=path.parent
    )


def read_hf_config(checkpoint: str | Path) -> HfConfig:
    """Reads `checkpoint`/config.json.

    Raises:
        ServiceError: CHECKPOINT_INVALID (no readable config.json), MODEL_UNSUPPORTED (family, activation or RoPE kind).
    """
    path = Path(checkpoint) / "config.json"
    try:
        raw = json.loads(path.read_text())
        return _parse(path, raw)
    except (OSError, json.JSONDecodeError, KeyError) as error:
        what = f"has no key {error}" if isinstance(error, KeyError) else f"cannot be read ({error})"
        raise ServiceError(
            Code.INVALID_ARGUMENT,
            "CHECKPOINT_INVALID",
            f"hf_checkpoint {checkpoint}: config.json {what}; give the directory of a Hugging Face checkpoint.",
            path=checkpoint,
        ) from error


def _parse(path: Path, raw: Mapping) -> HfConfig:
    model_type = raw["model_type"]
    if model_type not in FAMILIES:
        raise _unsupported(path, f"model_type {model_type!r} is unknown", f"use one of {', '.join(FAMILIES)}")
    if raw.get("hidden_act", "silu") != "silu":
        raise _unsupported(path, f"hidden_act {raw['hidden_act']!r} is not supported", "use a model with silu")
    if raw.get("use_sliding_window") or (model_type == "mistral" and raw.get("sliding_window")):
        raise _unsupported(path, "sliding window attention is not supported", "switch it off in config.json")
    rope = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
    rope["rope_type"] = rope.get("rope_type", rope.get("type", "default"))
    if rope["rope_type"] not in ("default", "linear", "llama3"):
        raise _unsupported(path, f"RoPE of type {rope['rope_type']!r}", "use default, linear or llama3")
    heads = raw["num_attention_heads"]
    return HfConfig(
        model_type=model_type,
        family=FAMILIES[model_type],
        vocab_size=raw["vocab_size"],
        hidden_size=raw["hidden_size"],
        intermediate_size=raw["intermediate_size"],
        layers=raw["num_hidden_layers"],
        heads=heads,
        kv_heads=raw.get("num_key_value_heads") or heads,
        head_dim=raw.get("head_dim") or raw["hidden_size"] // heads,
        norm_eps=raw.get("rms_norm_eps", 1e-6),
        max_positions=raw.get("max_position_embeddings", 32768),
        tied=raw.get("tie_word_embeddings", False),
        rope_theta=float(rope.get("rope_theta") or raw.get("rope_theta") or 10000.0),
        rope=rope,
        experts=_experts(raw) if FAMILIES[model_type].experts else None,
    )


def _experts(raw: Mapping) -> Experts | None:
    """None when no layer has experts."""
    every, dense = raw.get("decoder_sparse_step", 1), set(raw.get("mlp_only_layers") or ())
    layers = tuple(i for i in range(raw["num_hidden_layers"]) if i not in dense and (i + 1) % every == 0)
    count = raw["num_local_experts"] if "num_local_experts" in raw else raw["num_experts"]  # transformers 5; before
    if not layers or not count:
        return None
    return Experts(
        count=count,
        per_token=raw["num_experts_per_tok"],
        intermediate_size=raw["moe_intermediate_size"],
        normalised=raw.get("norm_topk_prob", False),
        layers=layers,
    )


def inverse_frequencies(config: HfConfig) -> list[float]:
    """RoPE frequencies by pair of channels: [head_dim / 2], in radians per position.

    Scaling of type linear divides all by `factor`; llama3 (Llama 3.1) divides those with a wavelength above
    original_length / low_freq_factor, leaves those below original_length / high_freq_factor, and blends between.
    """
    plain = [config.rope_theta ** (-2 * i / config.head_dim) for i in range(config.head_dim // 2)]
    rope, kind = config.rope, config.rope["rope_type"]
    if kind == "default":
        return plain
    factor = float(rope["factor"])
    if kind == "linear":
        return [frequency / factor for frequency in plain]
    low, high = float(rope["low_freq_factor"]), float(rope["high_freq_factor"])
    length = float(rope["original_max_position_embeddings"])
    scaled = []
    for frequency in plain:
        turns = length * frequency / (2 * math.pi)
        blend = min(max((turns - low) / (high - low), 0.0), 1.0)
        scaled.append((1 - blend) * frequency / factor + blend * frequency)
    return scaled
