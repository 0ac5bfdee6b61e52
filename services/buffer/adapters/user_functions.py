"""Functions of users that decide about groups: what becomes of stale ones, which ones a batch is made of.

They run on a thread of this server, so they must be importable here; they see headers, not tokens. Invariants: whatever
a function does, the caller gets an answer or an error that names it, within `_SECONDS`; nothing is held in the store
meanwhile.

    def stale_policy(group: StaleGroup) -> str:            # stale_policy_path: "keep", "requeue" or "drop"
    def buffer_filter(args, rollout_id, buffer, n):        # buffer_filter_path: at most n of the lists in `buffer`
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from tetrarch.buffer.v1 import buffer_service_pb2 as pb
from tetrarch.common.v1 import sample_pb2

from services.buffer.core.plan import flatten
from services.buffer.core.records import GroupKey, ReadyGroup
from services.common.errors import Code, ServiceError
from services.common.import_path import load_function

VERDICTS = ("keep", "requeue", "drop")
_SECONDS = 30.0
_KEYS = {"stale_policy_path": "trainer", "buffer_filter_path": "data"}


@dataclass(frozen=True)
class BufferedSample:
    """A sample as a filter sees it; names as users of this kind of system know them. Lengths in tokens."""

    group_index: int
    """Ordinal of its group."""
    index: int
    sample_id: str
    group_id: str
    reward: float | None
    status: str
    """completed, truncated, aborted or failed."""
    prompt_length: int
    response_length: int
    weight_versions: tuple[int, int]
    """Oldest and newest."""


@dataclass(frozen=True)
class StaleGroup:
    """A group that fell behind the published version by more than max_staleness."""

    ordinal: int
    policy_version: int
    min_version: int
    restored: bool
    """A rollback gave it back: it was trained once already, in a history that is gone."""
    samples: tuple[BufferedSample, ...]

    @property
    def staleness(self) -> int:
        """Versions between its oldest token and the published weights."""
        return self.policy_version - self.min_version


class UserFunctionRunner:
    """UserFunctions over import paths in the settings of runs."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(max_workers=4, thread_name_prefix="user-function")

    async def check(self, spec_json: str) -> None:
        """Loads what the settings name. Raises FUNCTION_NOT_LOADABLE."""
        for key in _KEYS:
            path = _path(spec_json, key)
            if path:
                await asyncio.to_thread(_load, path, key)

    async def judge(self, spec_json: str, policy_version: int, groups: Sequence[ReadyGroup]) -> list[str]:
        """keep, requeue or drop for each group. Raises STALE_POLICY_FAILED."""
        path = _path(spec_json, "stale_policy_path") or ""
        function = await asyncio.to_thread(_load, path, "stale_policy_path")
        stale = [
            StaleGroup(group.key.ordinal, policy_version, group.min_version, group.restored, _samples(group))
            for group in groups
        ]
        failed = _Failure("STALE_POLICY_FAILED", "stale_policy_path", path)
        verdicts = await self._call(lambda: [function(group) for group in stale], failed)
        for verdict in verdicts:
            if verdict not in VERDICTS:
                raise failed.error(f"returned {verdict!r}; return one of {', '.join(VERDICTS)}")
        return verdicts

    async def pick(self, spec_json: str, step: int, groups: Sequence[ReadyGroup], count: int) -> list[GroupKey]:
        """At most `count` of the groups. Raises BUFFER_FILTER_FAILED."""
        path = _path(spec_json, "buffer_filter_path") or ""
        function = await asyncio.to_thread(_load, path, "buffer_filter_path")
        keys = {group.key.ordinal: group.key for group in groups}
        buffer = [list(_samples(group)) for group in groups]
        args = SimpleNamespace(**{name.rpartition(".")[2]: v for name, v in flatten(json.loads(spec_json)).items()})
        failed = _Failure("BUFFER_FILTER_FAILED", "buffer_filter_path", path)
        picked = await self._call(lambda: list(function(args, step, buffer, count) or ()), failed)
        try:
            ordinals = [group[0].group_index for group in picked]
        except (TypeError, IndexError, AttributeError) as error:
            raise failed.error("returned something that is no list of groups of `buffer`") from error
        if len(set(ordinals)) != len(ordinals) or not set(ordinals) <= keys.keys():
            raise failed.error("returned a group twice, or one that is not in `buffer`")
        if len(ordinals) > count:
            raise failed.error(f"returned {len(ordinals)} groups; at most n = {count} were asked for")
        return [keys[ordinal] for ordinal in ordinals]

    async def _call(self, call: Callable[[], Any], failed: _Failure) -> Any:
        future = asyncio.get_running_loop().run_in_executor(self._executor, call)
        try:
            return await asyncio.wait_for(future, _SECONDS)
        except TimeoutError:
            raise failed.error(f"did not answer within {_SECONDS:.0f} s") from None
        except Exception as error:
            raise failed.error(f"raised {type(error).__name__}: {error}") from error

    def close(self) -> None:
        """Waits for nothing: a function that never returns must not hold the server."""
        self._executor.shutdown(wait=False, cancel_futures=True)


@dataclass(frozen=True)
class _Failure:
    reason: str
    key: str
    path: str

    def error(self, what: str) -> ServiceError:
        message = f"{self.key} {self.path!r} {what}."
        return ServiceError(Code.FAILED_PRECONDITION, self.reason, message, key=self.key, path=self.path)


def _path(spec_json: str, key: str) -> str | None:
    return (json.loads(spec_json).get(_KEYS[key]) or {}).get(key)


def _samples(group: ReadyGroup) -> tuple[BufferedSample, ...]:
    return tuple(
        BufferedSample(
            group_index=group.key.ordinal,
            index=header.index,
            sample_id=header.sample_id,
            group_id=header.group_id,
            reward=header.reward if header.HasField("reward") else None,
            status=sample_pb2.SampleStatus.Name(header.status).removeprefix("SAMPLE_STATUS_").lower(),
            prompt_length=header.prompt_length,
            response_length=header.response_length,
            weight_versions=(header.min_version, header.max_version),
        )
        for header in pb.TakeBatchResponse.FromString(group.headers).samples
    )


def _load(path: str, key: str) -> Callable[..., Any]:
    return load_function(path, key, "the buffer")
