"""What the simulated engine says of routing and sampling, as SGLang would: it follows from the tokens alone."""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

_MOST_KEPT = 4


def recording(body: Mapping[str, Any], output_ids: Sequence[int], config: Mapping[str, Any]) -> dict[str, Any]:
    """Keys of `meta_info` that the body of a request asks for; `config` is the checkpoint's."""
    meta: dict[str, Any] = {}
    experts = config.get("num_local_experts") or config.get("num_experts")
    if body.get("return_routed_experts") and experts:
        shape = config["num_hidden_layers"], config["num_experts_per_tok"]
        ids = routed_experts([*body["input_ids"], *output_ids][:-1], *shape, experts)
        meta["routed_experts"] = base64.b64encode(ids.tobytes()).decode()
    if body.get("return_sampling_mask"):
        masks = [kept_ids(token, config["vocab_size"]) for token in output_ids]
        meta["output_token_sampling_mask"] = masks
        meta["output_token_sampling_logprobs"] = [-math.log(len(mask)) for mask in masks]
        meta["output_token_sampling_mask_length"] = len(masks)
    return meta


def routed_experts(tokens: Sequence[int], layers: int, per_token: int, experts: int) -> np.ndarray:
    """int32 [n, layers, per_token]: experts of every token, which follow from its id, its place and the layer."""
    first = 7 * np.array(tokens, np.int64)[:, None] + 3 * np.arange(len(tokens))[:, None] + np.arange(layers)[None]
    return ((first[:, :, None] + np.arange(per_token)) % experts).astype(np.int32)


def kept_ids(token: int, vocab_size: int) -> list[int]:
    """One to four tokens with the sampled one among them."""
    return [(token + offset) % vocab_size for offset in range(1 + token % _MOST_KEPT)]
