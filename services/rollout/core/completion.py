"""One completion: what an engine is asked, what it answers, and what it cannot take.

Knows no engine and no HTTP. Shapes: P prompt tokens, R response tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from services.common.errors import Code, ServiceError
from services.common.records import SamplingParams, VersionSpan


@dataclass(frozen=True)
class Recording:
    """What training wants to know of a generation besides tokens and log-probs: where tokens were routed, and which
    tokens top-p and top-k left to choose from."""

    experts: bool = False
    kept: bool = False

    def __bool__(self) -> bool:
        return self.experts or self.kept


NOTHING = Recording()


@dataclass(frozen=True)
class GenerationRequest:
    """One prompt to complete `sample_count` times.

    Args:
        request_id: unique; sample i is known to the engine as `request_id` with a suffix.
        input_ids: P token ids.
        sampling: `max_new_tokens` must be set.
        extra: engine-specific sampling keys of the user (`min_p`, `repetition_penalty`, …).
        record: what the engine is to tell beside tokens and log-probs; only engines that are asked directly can.
        oldest_version: oldest version that an engine it may reach holds as it is sent; tokens count as made by it
            where the engine reports no spans. None: unknown.
    """

    request_id: str
    input_ids: tuple[int, ...]
    sampling: SamplingParams
    sample_count: int = 1
    extra: Mapping[str, Any] = field(default_factory=dict)
    oldest_version: int | None = None
    record: Recording = NOTHING


@dataclass(frozen=True)
class KeptTokens:
    """What top-p and top-k left to the sampler. counts: int32 [R]; ids: int32 [sum of counts], token by token."""

    counts: np.ndarray
    ids: np.ndarray


@dataclass(frozen=True)
class Generation:
    """One completion. `output_ids`: int32 [R], the stop token included; `log_probs`: float32 [R]."""

    text: str
    output_ids: np.ndarray
    log_probs: np.ndarray
    finish_reason: str
    """"stop" (stop token or string), "length", or "abort" (what was produced before the abort is kept)."""
    versions: tuple[VersionSpan, ...]
    engine_url: str | None = None
    cached_tokens: int = 0
    routed_experts: np.ndarray | None = None
    """int32 [P + R − 1, layers · experts per token]; where every token but the last was sent; None: not asked for, or
    lost as an engine ended the request early."""
    kept: KeptTokens | None = None
    """None: not asked for. `log_probs` are of the distribution over these tokens else."""


@dataclass(frozen=True)
class RequestLimits:
    """What an engine can take; beyond it an engine answers with an obscure error or dies."""

    vocab_size: int
    context_length: int

    def check(self, request: GenerationRequest) -> None:
        """Raise `ServiceError` INVALID_ARGUMENT (INVALID_FIELD, TOKEN_OUT_OF_RANGE or PROMPT_TOO_LONG)."""
        name, length = request.request_id, len(request.input_ids)
        budget = request.sampling.max_new_tokens
        if not length:
            raise ServiceError(
                Code.INVALID_ARGUMENT, "INVALID_FIELD", f"Request {name} has no prompt tokens.", request_id=name
            )
        if budget is None or budget < 1 or request.sample_count < 1:
            raise ServiceError(
                Code.INVALID_ARGUMENT,
                "INVALID_FIELD",
                f"Request {name} asks for {request.sample_count} samples of {budget} tokens: both must be at least 1.",
                request_id=name,
            )
        worst = max(request.input_ids, key=lambda token: token if token >= 0 else self.vocab_size - token)
        if not 0 <= worst < self.vocab_size:
            raise ServiceError(
                Code.INVALID_ARGUMENT,
                "TOKEN_OUT_OF_RANGE",
                f"Request {name} has token id {worst}, but the model's vocabulary ends at {self.vocab_size - 1}: "
                "use the tokenizer that belongs to the checkpoint.",
                request_id=name,
                token=worst,
                vocab_size=self.vocab_size,
            )
        if length + budget > self.context_length:
            raise ServiceError(
                Code.INVALID_ARGUMENT,
                "PROMPT_TOO_LONG",
                f"Request {name} needs {length} prompt + {budget} new tokens, but the engine's context is "
                f"{self.context_length}: shorten the prompt or lower rollout_max_response_len.",
                request_id=name,
                prompt_length=length,
                max_new_tokens=budget,
                context_length=self.context_length,
            )
