"""What an engine tells of a generation beside tokens and log-probs, in the words of SGLang's `/generate`.

Routed experts need a model with experts and `--enable-return-routed-experts`; the sampling mask needs SGLang 0.5.19 and
a finite top_k of at most `--sampling-mask-max-tokens`. sglang-router 0.3.2 drops both wishes from a request, so they
are sent to engines directly. Read with sglang 0.5.23.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from services.common.errors import Code, ServiceError
from services.rollout.core.completion import Generation, GenerationRequest, KeptTokens, Recording


def wishes(record: Recording) -> dict[str, Any]:
    """Keys of a request's body."""
    keys = {"return_routed_experts": record.experts, "return_sampling_mask": record.kept}
    return {key: True for key, wanted in keys.items() if wanted}


def read_recording(generation: Generation, meta: Mapping[str, Any], request: GenerationRequest) -> Generation:
    """The generation with what the request wanted to be told. Raises RECORDING_MISSING with what the engine lacks."""
    length = len(generation.output_ids)
    if request.record.kept and length:
        kept, log_probs = _kept(meta, length, request)
        generation = replace(generation, kept=kept, log_probs=log_probs)
    if request.record.experts and length:
        rows = len(request.input_ids) + length - 1
        generation = replace(generation, routed_experts=_experts(meta, rows, generation.finish_reason, request))
    return generation


def _experts(meta: Mapping[str, Any], rows: int, finish_reason: str, request: GenerationRequest) -> np.ndarray | None:
    encoded = meta.get("routed_experts")
    if not encoded:
        if finish_reason == "abort":  # a request that waited when it was ended holds none any more
            return None
        raise _missing(
            request, "routed experts", "the model must have experts, and the engine be one that tells (SGLang 0.5.23)"
        )
    flat = np.frombuffer(base64.b64decode(encoded), np.int32)
    if len(flat) % rows:
        raise _missing(request, f"routed experts of {rows} tokens", f"it gave {len(flat)} numbers")
    return flat.reshape(rows, -1)


def _kept(meta: Mapping[str, Any], length: int, request: GenerationRequest) -> tuple[KeptTokens, np.ndarray]:
    """The kept tokens, and the log-probs over them, float32 [R]."""
    masks, log_probs = meta.get("output_token_sampling_mask"), meta.get("output_token_sampling_logprobs")
    if masks is None or log_probs is None:
        raise _missing(request, "sampling mask", "SGLang tells it from release 0.5.19 on")
    if not len(masks) == len(log_probs) == length:
        raise _missing(request, f"sampling mask of {length} tokens", f"it gave {len(masks)} and {len(log_probs)}")
    counts = np.array([len(mask) for mask in masks], np.int32)
    ids = np.array([token for mask in masks for token in mask], np.int32)
    return KeptTokens(counts, ids), np.array(log_probs, np.float32)


def _missing(request: GenerationRequest, what: str, why: str) -> ServiceError:
    return ServiceError(
        Code.FAILED_PRECONDITION,
        "RECORDING_MISSING",
        f"The engine returned no {what} for request {request.request_id}: {why}.",
        request_id=request.request_id,
    )
