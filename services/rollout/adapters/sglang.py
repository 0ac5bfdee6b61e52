"""Client of one SGLang server: everything that is SGLang's own control API. What differs between releases is in
`sglang_release`, what `/generate` answers in `engine_http`.

What kills or confuses some release is never sent to any: `flush_cache: true` inside an update (0.5.15 dies of it
when requests wait), a bucket for a group the engine is not in (an assertion ends the scheduler), a sampling key it
does not know (status 500 without a reason).

Invariants: version strings sent to the engine are decimal integers; an update never names a version, the
node sets it after the checksums were compared.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from services.common.errors import Code, ServiceError
from services.common.telemetry import get_logger
from services.rollout.adapters import engine_http, sglang_rules
from services.rollout.adapters.checkpoint import installed_version, model_config, tensor_headers
from services.rollout.adapters.engine_http import HttpClient
from services.rollout.adapters.nccl_library import nccl_version
from services.rollout.adapters.sglang_release import RELEASES, Release, is_tested
from services.rollout.adapters.sglang_staging import SGLangStaging
from services.rollout.core.engine_port import (
    PAUSE_MODES,
    ChecksumRule,
    EngineInfo,
    Generation,
    GenerationRequest,
    GroupSpec,
    RequestLimits,
    TensorSpec,
)

CONTROL_SECONDS = 30.0
"""Deadline of control calls that only touch the engine's memory."""
COMPILE_SECONDS = 180.0
"""Of the first checksums on CUDA: two kernels are compiled for them."""

# fmt: off
SAMPLING_KEYS = frozenset({
    "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty", "min_new_tokens", "ignore_eos",
    "skip_special_tokens", "spaces_between_special_tokens", "no_stop_trim", "logit_bias", "sampling_seed",
    "custom_params", "stop_regex", "json_schema", "regex", "ebnf", "structural_tag",
})
# fmt: on
"""What a request may set beside its `SamplingParams`."""
FLUSH_TRIES, FLUSH_SECONDS = 40, 0.005

log = get_logger(__name__)


@dataclass(frozen=True)
class EngineFacts:
    """What the launch command settles about an engine before it runs."""

    kind: str
    device: str
    model_path: Path
    rank_count: int
    collective_env: Mapping[str, str]
    vocabulary_multiple: int = 1
    """Embeddings and output layer are held with rows of zeros up to a multiple of this."""
    release: Release = RELEASES[-1]
    receiver: Mapping[str, str] = field(default_factory=dict)
    """Environment of its weight receivers; empty: it has none."""


class SGLangEngine:
    """An `Engine` over SGLang's HTTP API."""

    def __init__(self, url: str, facts: EngineFacts) -> None:
        self.url = url
        # A sharded tensor has a checksum per rank, which cannot be compared with one of the bytes that were sent.
        self.checksum_algorithm = facts.release.checksums.get(facts.device, "") if facts.rank_count == 1 else ""
        self._facts = facts
        self._client = HttpClient(url, f"The {facts.kind} engine")
        self._receivers = (
            SGLangStaging(self._client, facts.receiver, facts.rank_count, self.checksum_algorithm)
            if facts.receiver
            else None
        )
        self.staging: SGLangStaging | None = None
        self._attaching = asyncio.Lock()
        self._limits: RequestLimits | None = None
        self._paused = ""
        self._groups: set[str] = set()

    async def health(self, timeout: float) -> bool:
        answers, moves = await asyncio.gather(self._answers(timeout), self._moves(timeout))
        return answers and moves

    async def _answers(self, timeout: float) -> bool:
        try:
            status, _ = await self._client.call("GET", "/health", timeout=timeout)
        except ServiceError:
            return False
        return status == 200

    async def _moves(self, timeout: float) -> bool:
        """The HTTP server answers for itself: its schedulers are other processes, which may be stopped or gone."""
        return self.staging is None or await self.staging.alive(timeout)

    async def ended(self) -> None:
        if self.staging is None:
            await asyncio.Event().wait()
        else:
            await self.staging.ended()

    async def info(self) -> EngineInfo:
        said = await self._client.expect("GET", "/server_info", timeout=CONTROL_SECONDS)
        config = model_config(self._facts.model_path)
        on_gpu = self._facts.device == "cuda"
        version = str(said.get("version", ""))
        if self._limits is None and self._facts.kind == "sglang" and not is_tested(version, self._facts.device):
            known = self._facts.release.version
            log.warning("untested SGLang release", version=version, device=self._facts.device, taken_for=known)
        info = EngineInfo(
            kind=self._facts.kind,
            engine_version=version,
            torch_version=installed_version("torch"),
            nccl_version=await asyncio.to_thread(nccl_version) if on_gpu else "",
            backends=("nccl", "gloo") if on_gpu else ("gloo",),
            collective_env=dict(self._facts.collective_env),
            vocab_size=config["vocab_size"],
            context_length=int(said.get("context_length") or config["max_position_embeddings"]),
            rank_count=self._facts.rank_count,
            max_running=_max_running(said),
        )
        if self._limits is None and on_gpu and self.checksum_algorithm:
            await self._ask_checksums(COMPILE_SECONDS)  # now, not while the first update waits
        if self._receivers is not None:
            async with self._attaching:
                if self.staging is None:
                    await self._attach(self._receivers)
        self._limits = info.limits
        return info

    async def _attach(self, receivers: SGLangStaging) -> None:
        """Without receivers the engine stands still while weights arrive."""
        try:
            await self.begin_update()
            try:
                await receivers.attach()
            finally:
                await self.end_update()
        except ServiceError as error:
            log.warning("engine cannot stage weights", url=self.url, why=str(error))
            return
        self.staging = receivers

    async def generate(self, request: GenerationRequest, timeout: float) -> list[Generation]:
        if self._limits is None:
            await self.info()
        self._limits.check(request)
        _check_sampling_keys(request)
        if request.oldest_version is None and not self._facts.release.version_spans:
            request = replace(request, oldest_version=await self.version())
        return await engine_http.generate(self._client, request, timeout, self.url)

    async def pause(self, mode: str) -> None:
        if mode not in PAUSE_MODES:
            raise ServiceError(
                Code.INVALID_ARGUMENT,
                "INVALID_FIELD",
                f"pause_mode is {mode!r}: use one of {', '.join(PAUSE_MODES)}.",
                mode=mode,
            )
        await self._post("/pause_generation", {"mode": mode})
        self._paused = mode

    async def resume(self) -> None:
        await self._post("/continue_generation", {"torch_empty_cache": False})
        self._paused = ""

    async def flush_cache(self) -> bool:
        for _ in range(FLUSH_TRIES):
            if await self._flush():
                return True
            if self._paused == "in_place":
                return False
            if self._paused == "retract" and not self._facts.release.flushes_retracted:
                # Retracted requests hold nothing of the cache, yet this release does not flush while they wait. Ended
                # now, they return what they made so far, and their sender goes on from there.
                await self.abort_all()
            await asyncio.sleep(FLUSH_SECONDS)  # the scheduler comes to rest a moment after its last answer
        return False

    async def _flush(self) -> bool:
        status, answer = await self._client.call("POST", "/flush_cache", timeout=CONTROL_SECONDS)
        if status >= 500:
            raise self._client.refused("/flush_cache", status, answer)
        return status == 200

    async def abort_all(self) -> None:
        await self._post("/abort_request", {"rid": "", "abort_all": True})

    async def join_group(self, group: GroupSpec, timeout: float) -> None:
        body = {
            "master_address": group.master_address,
            "master_port": group.master_port,
            "rank_offset": group.rank_offset,
            "world_size": group.world_size,
            "group_name": group.name,
            "backend": group.backend,
        }
        await self._client.expect("POST", "/init_weights_update_group", body, timeout=timeout)
        self._groups.add(group.name)

    async def leave_group(self, name: str, timeout: float) -> None:
        self._groups.discard(name)
        # An engine that is not in the group answers 400: it has left already.
        path, body = "/destroy_weights_update_group", {"group_name": name}
        status, answer = await self._client.call("POST", path, body, timeout=timeout)
        if status >= 500:
            raise self._client.refused(path, status, answer)

    async def begin_update(self) -> None:
        await self._bracket("/begin_weight_update")

    async def end_update(self) -> None:
        await self._bracket("/end_weight_update")

    async def _bracket(self, path: str) -> None:
        if self._facts.release.brackets_updates:
            await self._post(path, {})

    async def receive_bucket(self, specs: Sequence[TensorSpec], group_name: str, timeout: float) -> None:
        body = {
            "names": [spec.name for spec in specs],
            "dtypes": [spec.dtype for spec in specs],
            "shapes": [list(spec.shape) for spec in specs],
            "group_name": group_name,
            "load_format": "flattened_bucket",
            "flush_cache": False,
            "abort_all_requests": False,
        }
        try:
            self._require_membership(group_name)
            await self._client.expect("POST", "/update_weights_from_distributed", body, timeout=timeout)
        except ServiceError as error:
            raise ServiceError(
                Code.INTERNAL,
                "TRANSFER_FAILED",
                f"A bucket of {len(specs)} tensors from {specs[0].name} did not reach the engine over group "
                f"{group_name}: {error.message} Its weights are unknown now: abort this update and send a new one.",
                url=self.url,
                group=group_name,
                cause=error.reason,
            ) from error

    async def load_files(self, directory: Path, timeout: float) -> None:
        body = {"model_path": str(directory), "flush_cache": False, "abort_all_requests": False}
        try:
            await self._client.expect("POST", "/update_weights_from_disk", body, timeout=timeout)
        except ServiceError as error:
            raise ServiceError(
                Code.INTERNAL,
                "TRANSFER_FAILED",
                f"The engine did not load the files in {directory}: {error.message} Its weights are unknown now: abort"
                " this update and send a new one.",
                url=self.url,
                directory=directory,
                cause=error.reason,
            ) from error

    def _require_membership(self, group_name: str) -> None:
        if group_name not in self._groups:
            raise ServiceError(Code.FAILED_PRECONDITION, "ENGINE_REFUSED", "It is not a member of that group.")

    async def checksums(self) -> dict[str, str]:
        return await self._ask_checksums(CONTROL_SECONDS)

    async def _ask_checksums(self, timeout: float) -> dict[str, str]:
        answer = await self._client.expect("POST", "/weights_checker", {"action": "checksum"}, timeout=timeout)
        ranks = (answer or {}).get("ranks") or []
        if len(ranks) != 1:
            raise ServiceError(
                Code.FAILED_PRECONDITION,
                "CHECKSUMS_UNSUPPORTED",
                f"The {self._facts.kind} engine at {self.url} gives checksums of {len(ranks)} ranks; only an engine "
                "of one rank can be verified.",
                url=self.url,
                rank_count=len(ranks),
            )
        return dict(ranks[0]["checksums"])

    async def checksum_rules(self, specs: Sequence[TensorSpec]) -> list[ChecksumRule]:
        if not self.checksum_algorithm:
            return []
        said = await self._client.expect("GET", "/server_info", timeout=CONTROL_SECONDS)
        dtype = said.get("dtype", "auto")
        own = await asyncio.to_thread(tensor_headers, self._facts.model_path)
        tied = bool(model_config(self._facts.model_path).get("tie_word_embeddings"))
        held, multiple = list(await self.checksums()), self._facts.vocabulary_multiple
        rules = sglang_rules.checksum_rules(held, specs, own, tied=tied, vocabulary_multiple=multiple)
        sglang_rules.check_shapes(specs, own)
        if dtype != "auto":
            sglang_rules.check_dtypes(specs, dtype, own, self.url)
        return rules

    async def set_version(self, version: int) -> None:
        await self._post("/update_weight_version", {"new_version": str(version), "abort_all_requests": False})

    async def version(self) -> int:
        said = await self._client.expect("GET", "/model_info", timeout=CONTROL_SECONDS)
        return engine_http.read_version(said.get("weight_version"))

    async def close(self) -> None:
        await self._client.close()

    async def _post(self, path: str, body: Mapping[str, Any]) -> Any:
        return await self._client.expect("POST", path, body, timeout=CONTROL_SECONDS)


def _max_running(said: Mapping[str, Any]) -> int:
    """Requests decoded at once; chosen by the scheduler when no argument sets it."""
    inner = next(iter(said.get("internal_states") or ()), {})
    return int(said.get("max_running_requests") or inner.get("effective_max_running_requests_per_dp") or 0)


def _check_sampling_keys(request: GenerationRequest) -> None:
    lost = sorted(set(request.extra) - SAMPLING_KEYS)
    if lost:
        raise ServiceError(
            Code.INVALID_ARGUMENT,
            "INVALID_FIELD",
            f"Request {request.request_id} sets the sampling key {lost[0]}, which no engine knows: use "
            f"{', '.join(sorted(SAMPLING_KEYS))}, or the keys of the run.",
            request_id=request.request_id,
            key=lost[0],
        )
