"""Generate functions written for slime: `async def generate(args, sample, sampling_params[, evaluation])`.

Such a function talks HTTP to the router by itself and fills a sample object. This module builds `args` and
the sample, and reads the result back into a `Trajectory`. What is different from ours:

- Versions: the engine's report does not pass through here. Unless the function kept spans
  (`weight_version_spans`), the whole response counts as produced by the oldest version that the router held
  between begin and end of the call, so staleness is never understated.
"""

from __future__ import annotations

import enum
import inspect
import json
import math
import uuid
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import urlsplit

from services.common.errors import Code, ServiceError
from services.common.records import Prompt, Sample, SampleStatus, SamplingParams, VersionSpan
from services.rollout.core.completer import Completer
from services.rollout.core.run_settings import RunSettings
from services.rollout.core.trajectory import Trajectory
from services.rollout.core.user_loop import UserLoop


class SlimeArgs:
    """Attribute access to the keys of the run and to the router's address. Read-only by intent."""

    def __init__(self, keys: Mapping[str, Any], **more: Any) -> None:
        self.__dict__.update(keys)
        self.__dict__.update(more)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"args has no {name!r}: it is no key of this run")


class SlimeSample:
    """The sample object such a function receives and returns."""

    class Status(enum.Enum):
        """How it ended."""

        PENDING = "pending"
        COMPLETED = "completed"
        TRUNCATED = "truncated"
        ABORTED = "aborted"
        FAILED = "failed"

    def __init__(self, prompt: Prompt, index: int) -> None:
        self.group_index = prompt.ordinal
        self.index = index
        self.rollout_id = index
        self.session_id = uuid.uuid4().hex
        self.prompt: Any = json.loads(prompt.messages_json) if prompt.messages_json else prompt.text
        self.text = prompt.text
        self.tokens: list[int] = []
        self.response = ""
        self.response_length = 0
        self.label = prompt.label or None
        self.reward: Any = None
        self.loss_mask: list[int] | None = None
        self.weight_versions: list[str] = []
        self.weight_version_spans: list[tuple[int, int, int]] | None = None
        self.rollout_log_probs: list[float] | None = None
        self.status: Any = SlimeSample.Status.PENDING
        self.metadata: dict[str, Any] = json.loads(prompt.metadata_json) if prompt.metadata_json else {}
        self.train_metadata: dict[str, Any] | None = None
        self.remove_sample = False
        self.non_generation_time = 0.0
        self.apply_chat_template_kwargs: dict[str, Any] = {}
        self.multimodal_inputs: Any = None

    def get_reward_value(self, args: Any) -> Any:
        """The reward; a mapping gives the entry that `args.reward_key` names."""
        key = getattr(args, "reward_key", None)
        return self.reward[key] if key and isinstance(self.reward, Mapping) else self.reward


def finished_sample(prompt: Prompt, sample: Sample) -> SlimeSample:
    """A finished sample as functions written for slime see it."""
    seen = SlimeSample(prompt, sample.index)
    seen.rollout_id = sample.index if sample.rollout_index is None else sample.rollout_index
    seen.tokens = sample.tokens.tolist()
    seen.response, seen.response_length = sample.response, sample.response_length
    seen.reward = sample.reward
    seen.loss_mask = sample.loss_mask.tolist()
    seen.rollout_log_probs = sample.log_probs.tolist()
    seen.weight_version_spans = [(span.version, span.start, span.end) for span in sample.versions]
    seen.weight_versions = [str(span.version) for span in sample.versions]
    seen.status = SlimeSample.Status[sample.status.name]
    seen.metadata |= json.loads(sample.metadata_json) if sample.metadata_json else {}
    seen.non_generation_time = sample.tool_seconds
    return seen


class SlimeFunction:
    """A generate function of that signature.

    Args:
        function: the user's.
        completer: gives the router and the tokenizer.
        run: its keys become `args`.
    """

    def __init__(self, function: Callable[..., Any], completer: Completer, run: RunSettings) -> None:
        self._function = function
        self._completer = completer
        self._run = run
        self._takes_evaluation = "evaluation" in inspect.signature(function).parameters

    async def run(
        self, loop: UserLoop, prompt: Prompt, sampling: SamplingParams, index: int, timeout: float
    ) -> list[Trajectory]:
        """The samples of one rollout. Raises GENERATE_FAILED with what the result lacks."""
        router = urlsplit(self._completer.fleet.router.url)
        args = SlimeArgs(
            self._run.keys,
            sglang_router_ip=router.hostname,
            sglang_router_port=router.port,
            partial_rollout=False,
        )
        before = self._completer.fleet.oldest_version()
        sample = SlimeSample(prompt, index)
        extra = {"evaluation": False} if self._takes_evaluation else {}
        result = await loop.run(lambda: self._function(args, sample, _as_dict(sampling), **extra), timeout)
        versions = [version for version in (before, self._completer.fleet.oldest_version()) if version is not None]
        found = list(result) if isinstance(result, list | tuple) else [result]
        if not found:
            raise _failed("it returned no sample; return one at least")
        rollout = [read_sample(sample, prompt, oldest=min(versions, default=0)) for sample in found]
        self._completer.counters.generated_token_count += sum(int(one.loss_mask.sum()) for one in rollout)
        return rollout


def _as_dict(sampling: SamplingParams) -> dict[str, Any]:
    """Sampling settings in SGLang's names."""
    known = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "max_new_tokens": sampling.max_new_tokens,
        "stop": list(sampling.stop) or None,
        "stop_token_ids": list(sampling.stop_token_ids) or None,
    }
    flags = {"skip_special_tokens": False, "no_stop_trim": True, "spaces_between_special_tokens": False}
    return {key: value for key, value in known.items() if value is not None} | flags


def read_sample(sample: Any, prompt: Prompt, *, oldest: int) -> Trajectory:
    """Trajectory of a returned sample-like object. Raises GENERATE_FAILED with one sentence."""
    status = _status(getattr(sample, "status", None))
    tokens = [int(token) for token in getattr(sample, "tokens", None) or ()]
    length = int(getattr(sample, "response_length", 0) or 0)
    if not 0 <= length < len(tokens):
        raise _failed(f"response_length is {length} but tokens has {len(tokens)} entries (prompt and response)")
    log_probs = getattr(sample, "rollout_log_probs", None)
    if log_probs is None or len(log_probs) != length:
        found = "missing" if log_probs is None else f"of length {len(log_probs)}"
        raise _failed(f"rollout_log_probs is {found}; it needs one entry for each of the {length} response tokens")
    mask = getattr(sample, "loss_mask", None)
    mask = [1] * length if mask is None else [int(value) for value in mask]
    if len(mask) != length:
        raise _failed(f"loss_mask has {len(mask)} entries for {length} response tokens")
    return _trajectory(sample, tokens, length, (mask, log_probs), status, oldest)


def _trajectory(
    sample: Any, tokens: list[int], length: int, per_token: tuple[list[int], Any], status: SampleStatus, oldest: int
) -> Trajectory:
    mask, log_probs = per_token
    spans = getattr(sample, "weight_version_spans", None) or [(oldest, 0, length)]
    trajectory = Trajectory(tokens[: len(tokens) - length])
    trajectory.append_model(
        tokens[len(tokens) - length :], log_probs, [VersionSpan(int(v), int(a), int(b)) for v, a, b in spans]
    )
    trajectory.apply_mask([0] * length if getattr(sample, "remove_sample", False) else mask)
    trajectory.turn_count = sum(1 for at in range(length) if mask[at] and (at == 0 or not mask[at - 1]))
    trajectory.finish(status)
    trajectory.tool_seconds = float(getattr(sample, "non_generation_time", 0.0) or 0.0)
    trajectory.reward = _reward(getattr(sample, "reward", None))
    metadata = getattr(sample, "metadata", None)
    trajectory.metadata = dict(metadata) if isinstance(metadata, Mapping) else {}
    return trajectory


def _status(value: Any) -> SampleStatus:
    name = str(getattr(value, "value", value)).lower()
    known = {status.name.lower(): status for status in SampleStatus}
    if name not in known:
        raise _failed(f"status is {value!r}; set it to one of {', '.join(known)}")
    if known[name] is SampleStatus.FAILED:
        raise _failed("it set the status to failed")
    return known[name]


def _reward(value: Any) -> float | None:
    """A reward that the function gave by itself; a mapping gives its "score"."""
    if isinstance(value, Mapping):
        value = value.get("score")
    if value is None:
        return None
    reward = float(value)
    if not math.isfinite(reward):
        raise _failed(f"reward is {reward}; it must be a finite number or None")
    return reward


def _failed(why: str) -> ServiceError:
    return ServiceError(
        Code.FAILED_PRECONDITION, "GENERATE_FAILED", f"The result of the generate function cannot be used: {why}."
    )
