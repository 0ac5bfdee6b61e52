"""HTTP towards engines and router: connections, errors by name, and the `/generate` call both share.

The wire format is SGLang's, which the simulated engine speaks too. Knows nothing of weights or processes.
Tested with sglang 0.5.23 and sglang-router 0.3.2; answers of 0.5.15 (no version spans) are read as well.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import aiohttp
import numpy as np

from services.common.errors import Code, ServiceError
from services.common.records import VersionSpan
from services.rollout.adapters.recordings import read_recording, wishes
from services.rollout.core.completion import Generation, GenerationRequest

KEEPALIVE_SECONDS = 3.0
"""Below the five seconds after which the servers close an idle connection: reusing one they are closing fails."""


class HttpClient:
    """JSON over pooled connections to one base URL. `subject` names the far side in messages."""

    def __init__(self, url: str, subject: str) -> None:
        self.url = url.rstrip("/")
        self.subject = subject
        self._session: aiohttp.ClientSession | None = None

    async def call(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, *, timeout: float
    ) -> tuple[int, Any]:
        """Status and decoded body (text when it is not JSON). Raises UNAVAILABLE/ENGINE_UNAVAILABLE when there is
        no answer and DEADLINE_EXCEEDED/ENGINE_TIMEOUT after `timeout` seconds."""
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_SECONDS)
            self._session = aiohttp.ClientSession(connector=connector)
        limit = aiohttp.ClientTimeout(total=timeout)
        try:
            async with self._session.request(method, self.url + path, json=body, timeout=limit) as response:
                raw = await response.read()
        except TimeoutError as error:
            raise ServiceError(
                Code.DEADLINE_EXCEEDED,
                "ENGINE_TIMEOUT",
                f"{self.subject} at {self.url} did not answer {path} within {timeout:g} s.",
                url=self.url,
                path=path,
                timeout=timeout,
            ) from error
        except (aiohttp.ClientError, OSError) as error:
            raise ServiceError(
                Code.UNAVAILABLE,
                "ENGINE_UNAVAILABLE",
                f"{self.subject} at {self.url} does not answer {path}: {str(error) or type(error).__name__}.",
                url=self.url,
                path=path,
            ) from error
        try:
            return response.status, json.loads(raw) if raw else None
        except ValueError:
            return response.status, raw.decode("utf-8", "replace")

    async def expect(self, method: str, path: str, body: Mapping[str, Any] | None = None, *, timeout: float) -> Any:
        """Body of a successful answer; `refused` otherwise, also for 200 with `success: false`."""
        status, answer = await self.call(method, path, body, timeout=timeout)
        if status >= 300 or (isinstance(answer, dict) and answer.get("success") is False):
            raise self.refused(path, status, answer)
        return answer

    def refused(self, path: str, status: int, answer: Any) -> ServiceError:
        """The error for an answer that is not a success, with the far side's own sentence."""
        code, reason = Code.INTERNAL, "ENGINE_REFUSED"
        if status in (502, 503, 504):
            code, reason = Code.UNAVAILABLE, "ENGINE_UNAVAILABLE"
        elif 400 <= status < 500:
            code = Code.INVALID_ARGUMENT if path == "/generate" else Code.FAILED_PRECONDITION
        said = sentence(answer)
        return ServiceError(
            code,
            reason,
            f"{self.subject} at {self.url} answered {status} to {path}: {said}",
            url=self.url,
            path=path,
            status=status,
            said=said,
        )

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None


def sentence(answer: Any) -> str:
    """What an error body says."""
    if isinstance(answer, dict):
        inner = answer.get("error", answer)
        if isinstance(inner, dict):
            inner = inner.get("message", inner)
        answer = inner
    return str(answer).strip() or "(no reason given)"


def generate_body(request: GenerationRequest) -> dict[str, Any]:
    """Body of `/generate`. All samples of a prompt go in one request: the prompt is then read once."""
    sampling = request.sampling
    params: dict[str, Any] = {"max_new_tokens": sampling.max_new_tokens, **request.extra}
    for key in ("temperature", "top_p", "top_k"):
        value = getattr(sampling, key)
        if value is not None:
            params[key] = value
    if sampling.stop:
        params["stop"] = list(sampling.stop)
    if sampling.stop_token_ids:
        params["stop_token_ids"] = list(sampling.stop_token_ids)
    if request.sample_count > 1:
        params["n"] = request.sample_count
    named = {"rid": request.request_id} if request.record.kept else {}
    return named | {
        "input_ids": list(request.input_ids),
        "sampling_params": params,
        "return_logprob": True,
        "logprob_start_len": -1,
        "return_text_in_logprobs": False,
        "stream": False,
        **wishes(request.record),
    }


def read_generations(answer: Any, url: str | None, request: GenerationRequest) -> list[Generation]:
    """Completions in an answer of `/generate`. Raises RECORDING_MISSING."""
    return [_read_one(item, url, request) for item in (answer if isinstance(answer, list) else [answer])]


def _read_one(item: Mapping[str, Any], url: str | None, request: GenerationRequest) -> Generation:
    meta = item["meta_info"]
    pairs = meta.get("output_token_logprobs") or []
    ids = np.array([pair[1] for pair in pairs], dtype=np.int32)
    log_probs = np.array([pair[0] for pair in pairs], dtype=np.float32)
    plain = Generation(
        text=item.get("text", ""),
        output_ids=ids,
        log_probs=log_probs,
        finish_reason=(meta.get("finish_reason") or {}).get("type", "abort"),
        versions=read_spans(meta, len(ids), request.oldest_version),
        engine_url=url,
        cached_tokens=meta.get("cached_tokens") or 0,
    )
    return read_recording(plain, meta, request)


def read_spans(meta: Mapping[str, Any], length: int, oldest_version: int | None = None) -> tuple[VersionSpan, ...]:
    """Version of each of `length` output tokens.

    Releases without spans report the version at the end only. All tokens then count as made by `oldest_version`, the
    oldest that can have made the first of them: too old a label costs a sample, too new a one breaks the staleness law.
    """
    spans = meta.get("weight_versions")
    if not spans:
        last = read_version(meta.get("weight_version"))
        version = last if oldest_version is None else min(last, oldest_version)
        spans = [{"version": version, "start": 0, "end": length}]
    result: list[VersionSpan] = []
    for span in spans:
        start, end = result[-1].end if result else 0, min(span["end"], length)
        if end > start:
            result.append(VersionSpan(read_version(span["version"]), start, end))
    if result and result[-1].end < length:
        last = result.pop()
        result.append(VersionSpan(last.version, last.start, length))
    return tuple(result)


def read_version(text: Any) -> int:
    """Our versions are written as decimal numbers; whatever an engine starts with ("default") is 0."""
    text = str(text)
    return int(text) if text.isdigit() else 0


async def generate(client: HttpClient, request: GenerationRequest, timeout: float, url: str | None) -> list[Generation]:
    """POST `/generate`; completions in order of sample. The caller has checked the request's limits."""
    if request.record.kept and request.sample_count > 1:
        # For several samples SGLang 0.5.23 first reads the prompt without sampling, misses the mask of that, and fails.
        singles = [
            replace(request, request_id=f"{request.request_id}#{index}", sample_count=1)
            for index in range(request.sample_count)
        ]
        answers = await asyncio.gather(*(generate(client, single, timeout, url) for single in singles))
        return [generation for (generation,) in answers]
    answer = await client.expect("POST", "/generate", generate_body(request), timeout=timeout)
    generations = read_generations(answer, url, request)
    if len(generations) != request.sample_count:
        raise ServiceError(
            Code.INTERNAL,
            "ENGINE_REFUSED",
            f"{client.subject} at {client.url} returned {len(generations)} completions for request "
            f"{request.request_id}, which asked for {request.sample_count}.",
            request_id=request.request_id,
        )
    return generations


async def poll(condition, timeout: float, interval: float = 0.05) -> bool:
    """Await `condition()` until it is true; False after `timeout` seconds."""
    deadline = asyncio.get_running_loop().time() + timeout
    while not await condition():
        if asyncio.get_running_loop().time() > deadline:
            return False
        await asyncio.sleep(interval)
    return True
