"""The simulated engine's notion of time and tokens: no model, no HTTP, no torch.

Requests advance together at a set rate, as in continuous batching. What a request answers depends only on seed,
prompt, sample index and weight version (or the weights themselves), never on time or load; how long its answer is, on
seed, prompt and index. The state follows SGLang's: waiting and running requests, three pause modes, a prefix cache,
version spans.

Invariant: a finished request has `len(tokens) == len(log_probs)` and spans that cover them.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from services.common.settings import StrictModel

TICK_SECONDS = 0.005


class SimulatedSettings(StrictModel):
    """Behaviour of a simulated engine (`simulated:` of a run)."""

    tokens_per_second: float = 400.0
    """Decoding rate of each running request."""
    mean_response_len: float = 32.0
    """Median response length in tokens; max_new_tokens cuts it."""
    response_len_spread: float = 0.5
    """Sigma of the log-normal distribution of response lengths; 0 gives every response the same length."""
    prefill_seconds: float = 0.0
    """Delay of a request before its first token."""
    max_running_requests: int = 256
    """Requests decoded together; more wait."""
    seed: int = 0
    """Seed of tokens and lengths."""
    tokens_follow: Literal["version", "weights"] = "version"
    """What tokens change with: the number of the version, or the bytes of the weights, as a model's do. Equal weights
    then answer alike whatever their number is."""


@dataclass
class Request:
    """One sample in the making. `spans` are (version text, start, end)."""

    key: str
    input_ids: tuple[int, ...]
    index: int
    max_new: int
    greedy: bool
    stop_ids: frozenset[int]
    ignore_eos: bool
    eos: int
    done: asyncio.Future
    length: int = 0
    cached: int = 0
    produced: float = 0.0
    retractions: int = 0
    not_before: float = 0.0
    tokens: list[np.ndarray] = field(default_factory=list)
    log_probs: list[np.ndarray] = field(default_factory=list)
    spans: list[tuple[str, int, int]] = field(default_factory=list)
    planned: tuple[np.ndarray, np.ndarray, int, bool] | None = None

    @property
    def settled(self) -> int:
        """Tokens whose version is fixed."""
        return self.spans[-1][2] if self.spans else 0


class SimulatedModel:
    """Advances requests; every method runs on the event loop."""

    def __init__(self, settings: SimulatedSettings, vocab_size: int) -> None:
        self.settings = settings
        self.vocab_size = vocab_size
        self.version = "default"
        self._source = self.version
        self.running: dict[str, Request] = {}
        self.waiting: dict[str, Request] = {}
        self.paused = False
        self.frozen = False
        self._cache: set[tuple[int, ...]] = set()
        self._wake = asyncio.Event()
        self._numbers = itertools.count()

    async def submit(self, input_ids: tuple[int, ...], index: int, params: dict[str, Any], eos: int) -> Request:
        """Generate one sample; returns when it is finished or aborted. `done` then holds the finish reason."""
        greedy = params.get("temperature", 1.0) == 0
        request = Request(
            key=str(next(self._numbers)),
            input_ids=input_ids,
            index=0 if greedy else index,
            max_new=params.get("max_new_tokens") or 128,
            greedy=greedy,
            stop_ids=frozenset(params.get("stop_token_ids") or ()),
            ignore_eos=bool(params.get("ignore_eos")),
            eos=eos,
            done=asyncio.get_running_loop().create_future(),
        )
        request.length = self._draw_length(request)
        self.waiting[request.key] = request
        self._wake.set()
        try:
            await request.done
        finally:
            self.running.pop(request.key, None)
            self.waiting.pop(request.key, None)
        return request

    async def run(self) -> None:
        """The decoding loop; ends by cancellation."""
        loop = asyncio.get_running_loop()
        before = loop.time()
        while True:
            if self.paused or self.frozen or not (self.running or self.waiting):
                self._wake.clear()
                await self._wake.wait()
                before = loop.time()
            await asyncio.sleep(TICK_SECONDS)
            now = loop.time()
            if not (self.paused or self.frozen):
                self._admit(now)
                self._advance(now, now - before)
            before = now

    def pause(self, mode: str) -> None:
        """SGLang's pause modes; new requests wait in all of them."""
        self.paused = True
        if mode == "abort":
            self.abort_all()
        elif mode == "retract":
            for key, request in list(self.running.items()):
                self._settle(request)
                request.retractions += 1
                self.waiting[key] = self.running.pop(key)

    def resume(self) -> None:
        """Decode again."""
        self.paused = False
        self._wake.set()

    def freeze(self, frozen: bool) -> None:
        """While weights arrive nothing is decoded."""
        self.frozen = frozen
        self._wake.set()

    def abort_all(self) -> None:
        """End every request with what it has."""
        for request in [*self.running.values(), *self.waiting.values()]:
            self._settle(request)
            self._finish(request, {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None})

    def flush(self) -> bool:
        """Empty the prefix cache; False while requests hold it."""
        if self.running or (self.waiting and not self.paused):
            return False
        self._cache.clear()
        return True

    def set_version(self, version: str, fingerprint: str = "") -> None:
        """Tokens from now on carry `version`, and follow it, or the fingerprint of the weights when one is given."""
        for request in self.running.values():
            self._settle(request)
        self.version, self._source = version, fingerprint or version
        for request in self.running.values():
            request.planned = None

    def prompt_log_probs(
        self, input_ids: tuple[int, ...], first: int, top_k: int
    ) -> tuple[list[float], list[list[int]], list[list[float]]]:
        """Log-probs [n] of the input's tokens from `first` on, and the `top_k` most likely ids [n, top_k] with theirs.
        They depend on seed, input and version, and are consistent: no token is likelier than those listed before it."""
        digest = hashlib.blake2b(np.array(input_ids, dtype=np.int64).tobytes(), digest_size=16)
        digest.update(f"{self.settings.seed}/prompt/{self._source}".encode())
        rng = np.random.Generator(np.random.Philox(int.from_bytes(digest.digest(), "little")))
        sampled, top_ids, top = [], [], []
        for token in input_ids[first:]:
            logits = 2.0 * rng.standard_normal(self.vocab_size)
            log_probs = logits - np.log(np.exp(logits).sum())
            order = np.argsort(-log_probs, kind="stable")[:top_k]
            sampled.append(float(np.float32(log_probs[token])))
            top_ids.append(order.tolist())
            top.append(log_probs[order].astype(np.float32).tolist())
        return sampled, top_ids, top

    def _admit(self, now: float) -> None:
        for key, request in list(self.waiting.items()):
            if len(self.running) >= self.settings.max_running_requests:
                return
            self.running[key] = self.waiting.pop(key)
            request.planned = None
            request.not_before = now + self.settings.prefill_seconds
            if not request.settled:
                request.cached = len(request.input_ids) - 1 if request.input_ids in self._cache else 0
                self._cache.add(request.input_ids)

    def _advance(self, now: float, seconds: float) -> None:
        gain = self.settings.tokens_per_second * seconds
        for request in list(self.running.values()):
            if now < request.not_before:
                continue
            _, _, end, stops = self._plan(request)
            request.produced = min(request.produced + gain, float(end))
            if request.produced >= end:
                self._settle(request)
                last = int(request.tokens[-1][-1])
                self._finish(request, {"type": "stop", "matched": last} if stops else {"type": "length", "length": end})

    def _plan(self, request: Request) -> tuple[np.ndarray, np.ndarray, int, bool]:
        """Tokens and log-probs [max_new] under the present version, where they end, and whether by a stop token."""
        if request.planned is None:
            rng = self._rng(request, self._source)
            tokens = rng.integers(0, self.vocab_size, request.max_new, dtype=np.int32)
            log_probs = -rng.gamma(2.0, 0.5, request.max_new).astype(np.float32)
            tokens[tokens == request.eos] = (request.eos + 1) % self.vocab_size
            end, stops = request.max_new, False
            if not request.ignore_eos and request.length < request.max_new:
                end, stops = max(request.length, request.settled + 1), True
                tokens[end - 1] = request.eos
            hits = np.flatnonzero(np.isin(tokens[request.settled : end], list(request.stop_ids)))
            if len(hits):
                end, stops = request.settled + int(hits[0]) + 1, True
            request.planned = (tokens, log_probs, end, stops)
        return request.planned

    def _settle(self, request: Request) -> None:
        """Fix what was produced since the last settlement under the present version."""
        start, end = request.settled, int(request.produced)
        if end > start:
            tokens, log_probs, _, _ = self._plan(request)
            request.tokens.append(tokens[start:end])
            request.log_probs.append(log_probs[start:end])
            if request.spans and request.spans[-1][0] == self.version:
                start = request.spans.pop()[1]
            request.spans.append((self.version, start, end))

    def _finish(self, request: Request, reason: dict[str, Any]) -> None:
        self.running.pop(request.key, None)
        self.waiting.pop(request.key, None)
        if not request.done.done():
            request.done.set_result(reason)

    def _draw_length(self, request: Request) -> int:
        spread = self.settings.response_len_spread
        drawn = self.settings.mean_response_len * float(np.exp(spread * self._rng(request, "length").standard_normal()))
        return max(1, min(request.max_new, round(drawn)))

    def _rng(self, request: Request, purpose: str) -> np.random.Generator:
        digest = hashlib.blake2b(np.array(request.input_ids, dtype=np.int64).tobytes(), digest_size=16)
        digest.update(f"{self.settings.seed}/{request.index}/{purpose}".encode())
        return np.random.Generator(np.random.Philox(int.from_bytes(digest.digest(), "little")))
