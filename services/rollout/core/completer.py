"""Completes token sequences on the engines of a node, whatever happens to the engines meanwhile.

A request waits while no engine serves, is tried again when an engine fails, and goes on from the tokens
already produced when an engine gave it up half way (finish_reason "abort"). Everything ends at the deadline.

Invariant: log-probs and version spans of a completion are what the engines reported, piece by piece; where a release
reports no spans, a piece counts as made by the oldest version that an engine could hold when it was asked for.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from services.common.errors import Code, ServiceError
from services.common.records import SamplingParams, VersionSpan
from services.rollout.core.completion import NOTHING, Generation, GenerationRequest, Recording
from services.rollout.core.counters import Counters
from services.rollout.core.fleet import Fleet
from services.rollout.core.ports import Tokenizer
from services.rollout.core.recorded import join_experts, join_kept
from services.rollout.core.trajectory import merge_spans

_RETRY_SECONDS = (0.1, 2.0)
"""First and longest pause between tries."""


class Halt:
    """Whether unfinished work is to be handed over instead of being gone on with."""

    def __init__(self) -> None:
        self.called = False

    def call(self) -> None:
        """From now on completions that an engine ends half way are returned as they are."""
        self.called = True


@dataclass(frozen=True)
class Completer:
    """Completions for one run.

    Args:
        fleet: engines and router.
        tokenizer: decodes completions that were made in several pieces.
        counters: generated tokens, retries and continuations are added here.
        max_context_length: further bound on prompt plus completion; None leaves the engines' own.
        record: what engines are to tell of every completion.
    """

    fleet: Fleet
    tokenizer: Tokenizer
    counters: Counters
    max_context_length: int | None = None
    halt: Halt = field(default_factory=Halt)
    record: Recording = NOTHING

    async def complete(
        self, input_ids: Sequence[int] | np.ndarray, sampling: SamplingParams, sample_count: int, deadline: float
    ) -> list[Generation]:
        """`sample_count` completions of one prompt before `deadline` (time.monotonic()).

        `max_new_tokens` is lowered to what the context allows. Raises PROMPT_TOO_LONG, TOKEN_OUT_OF_RANGE or
        ENGINE_REFUSED (INVALID_ARGUMENT: trying again is useless), NO_ENGINE_READY, ENGINE_UNAVAILABLE or
        ENGINE_TIMEOUT (the deadline passed), HALTED. After a halt a completion may end with finish_reason "abort".
        """
        if not await self.fleet.wait_serving(deadline - time.monotonic()):
            raise ServiceError(
                Code.UNAVAILABLE,
                "NO_ENGINE_READY",
                "No engine of this node became READY in time: it waits for the trainer's weights or for a restart.",
            )
        request = GenerationRequest(
            request_id=uuid.uuid4().hex,
            input_ids=tuple(int(token) for token in input_ids),
            sampling=replace(
                sampling, max_new_tokens=self._budget(len(input_ids), sampling), top_k=self._top_k(sampling)
            ),
            sample_count=sample_count,
            record=self.record,
        )
        pieces = await self._try(request, deadline)
        done = await asyncio.gather(*(self._go_on(request, piece, deadline) for piece in pieces))
        self.counters.generated_token_count += sum(len(generation.output_ids) for generation in done)
        return list(done)

    def _budget(self, prompt_length: int, sampling: SamplingParams) -> int:
        """New tokens that fit; at least 1, so that the engine's own check names a prompt that is too long."""
        bounds = [limit for limit in (self.max_context_length, self._engine_context()) if limit]
        room = min(bounds, default=prompt_length + 1 << 30) - prompt_length
        return max(1, min(sampling.max_new_tokens or room, room))

    def _top_k(self, sampling: SamplingParams) -> int | None:
        """The sampler's; all of the vocabulary as a number where engines tell of finite ones only."""
        limits = self.fleet.limits()
        unbounded = sampling.top_k in (None, -1)
        return limits.vocab_size if self.record.kept and unbounded and limits else sampling.top_k

    def _engine_context(self) -> int | None:
        limits = self.fleet.limits()
        return limits.context_length if limits else None

    async def _try(self, request: GenerationRequest, deadline: float) -> list[Generation]:
        """One request, again and again while the failure may pass."""
        pause, longest = _RETRY_SECONDS
        while True:
            remaining = deadline - time.monotonic()
            if self.halt.called:
                raise ServiceError(Code.UNAVAILABLE, "HALTED", "The node gives its unfinished work back.")
            if remaining <= 0:
                raise _timed_out(request)
            try:
                sent = replace(request, oldest_version=self.fleet.oldest_version())
                return await self.fleet.router.generate(sent, remaining)
            except ServiceError as error:
                if not may_pass(error) or deadline - time.monotonic() <= pause:
                    raise
            await asyncio.sleep(pause)
            pause = min(2 * pause, longest)
            await self.fleet.wait_serving(deadline - time.monotonic())
            self.counters.retried_request_count += 1
            # An engine may have kept the id of the request whose connection broke.
            request = replace(request, request_id=uuid.uuid4().hex)

    async def _go_on(self, request: GenerationRequest, piece: Generation, deadline: float) -> Generation:
        """Continues one completion until it ends by itself."""
        budget = request.sampling.max_new_tokens or 0
        while piece.finish_reason == "abort":
            made = len(piece.output_ids)
            if made >= budget:
                return replace(piece, finish_reason="length")
            if self.halt.called:
                return piece
            self.counters.continued_sample_count += 1
            await asyncio.sleep(_RETRY_SECONDS[0])
            rest = replace(
                request,
                request_id=uuid.uuid4().hex,
                input_ids=request.input_ids + tuple(int(token) for token in piece.output_ids),
                sampling=replace(request.sampling, max_new_tokens=budget - made),
                sample_count=1,
            )
            try:
                (more,) = await self._try(rest, deadline)
            except ServiceError:
                if self.halt.called:
                    return piece
                raise
            piece = self._join(piece, more)
        return piece

    def _join(self, one: Generation, two: Generation) -> Generation:
        made = len(one.output_ids)
        if not made:
            return two
        ids = np.concatenate([one.output_ids, two.output_ids])
        shifted = [VersionSpan(span.version, span.start + made, span.end + made) for span in two.versions]
        return Generation(
            text=self.tokenizer.decode(ids.tolist()),
            output_ids=ids,
            log_probs=np.concatenate([one.log_probs, two.log_probs]),
            finish_reason=two.finish_reason,
            versions=merge_spans([*one.versions, *shifted]),
            engine_url=two.engine_url,
            cached_tokens=one.cached_tokens,
            routed_experts=join_experts(one.routed_experts, two.routed_experts),
            kept=join_kept(one.kept, two.kept),
        )


def may_pass(error: ServiceError) -> bool:
    """True for a failure that is over when tried again: an engine that went away, a queue that was full."""
    return error.code is Code.UNAVAILABLE or error.metadata.get("status") in ("408", "429")


def _timed_out(request: GenerationRequest) -> ServiceError:
    return ServiceError(
        Code.DEADLINE_EXCEEDED,
        "ENGINE_TIMEOUT",
        f"Request {request.request_id} was not answered before its deadline (generate_timeout of the run).",
        request_id=request.request_id,
    )
