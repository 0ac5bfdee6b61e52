"""A teacher behind SGLang's `/generate`: log-probs of a given response, nothing generated.

Asked are no new tokens, and the log-probs of the input from the last prompt token on: an engine lists every token from
there with the log-prob that the tokens before it gave it (none for the first), and the most likely tokens at its place.
These are of temperature 1. Tested with sglang 0.5.23.

Invariant: what is returned is of the sample's own tokens, one finite number each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from services.common.errors import Code, ServiceError
from services.common.records import Sample, TeacherLogProbs
from services.rollout.adapters.engine_http import HttpClient, sentence

_PASSING = (408, 429, 502, 503, 504)
"""Statuses of a server, or of a proxy before it, that may answer later."""


class HttpTeacher:
    """A teacher at a base URL."""

    def __init__(self, url: str) -> None:
        self._client = HttpClient(url, "The teacher")

    async def log_probs(self, sample: Sample, top_k: int, timeout: float) -> TeacherLogProbs:
        """Log-probs of a sample's response and of the `top_k` most likely tokens at each of its places.

        Raises:
            ServiceError: UNAVAILABLE or DEADLINE_EXCEEDED when asking again makes sense, TEACHER_REFUSED or
                TEACHER_ANSWER_UNUSABLE when it does not.
        """
        status, answer = await self._client.call("POST", "/generate", _body(sample, top_k), timeout=timeout)
        if status in _PASSING:
            raise self._client.refused("/generate", 503, answer)
        if status >= 300:
            raise ServiceError(
                Code.FAILED_PRECONDITION,
                "TEACHER_REFUSED",
                f"The teacher at {self._client.url} answered {status} for sample {sample.sample_id} of"
                f" {len(sample.tokens)} tokens: {sentence(answer)} It must have the policy's vocabulary and a context"
                " longer than that.",
                url=self._client.url,
                sample_id=sample.sample_id,
                status=status,
            )
        return self._read(sample, top_k, answer)

    def _read(self, sample: Sample, top_k: int, answer: Any) -> TeacherLogProbs:
        length, count = sample.response_length, top_k
        try:
            meta = answer["meta_info"]
            ids, sampled = _columns(meta["input_token_logprobs"][-length:])
            tops = [_columns(row) for row in (meta["input_top_logprobs"][-length:] if count else ())]
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise self._unusable(sample, f"it has no input log-probs ({type(error).__name__}: {error})") from error
        if not np.array_equal(ids, sample.tokens[sample.prompt_length :]):
            raise self._unusable(sample, f"its {len(ids)} log-probs are not of the {length} response tokens")
        if any(len(row) != count for row, _ in tops) or len(tops) != (length if count else 0):
            raise self._unusable(sample, f"it has not {count} most likely tokens for each of {length} places")
        top_ids = np.array([row for row, _ in tops], np.int32).reshape(length, count)
        top = np.array([values for _, values in tops], np.float32).reshape(length, count)
        if not (np.isfinite(sampled).all() and np.isfinite(top).all()):
            raise self._unusable(sample, "it has log-probs that are no finite numbers")
        return TeacherLogProbs(sampled, top_ids, top)

    def _unusable(self, sample: Sample, why: str) -> ServiceError:
        return ServiceError(
            Code.INTERNAL,
            "TEACHER_ANSWER_UNUSABLE",
            f"The answer of the teacher at {self._client.url} for sample {sample.sample_id} cannot be used: {why}."
            " opd_teacher_url must be an engine with SGLang's /generate.",
            url=self._client.url,
            sample_id=sample.sample_id,
        )

    async def close(self) -> None:
        """Closes the connections."""
        await self._client.close()


def _body(sample: Sample, top_k: int) -> dict[str, Any]:
    return {
        "input_ids": sample.tokens.tolist(),
        "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
        "return_logprob": True,
        "logprob_start_len": sample.prompt_length - 1,
        "top_logprobs_num": top_k,
        "return_text_in_logprobs": False,
        "stream": False,
    }


def _columns(rows: Sequence[Sequence[Any]]) -> tuple[np.ndarray, np.ndarray]:
    """(log-prob, id, …) rows → ids int32 [n], log-probs float32 [n]. Raises ValueError or TypeError."""
    return np.array([row[1] for row in rows], np.int32), np.array([float(row[0]) for row in rows], np.float32)
