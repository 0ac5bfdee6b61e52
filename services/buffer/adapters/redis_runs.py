"""Runs in a Redis or Valkey server: their settings, their life, their deletion. Knows nothing of groups.

Every change is one script (lua/), hence atomic. A run is a hash `run` under tetrarch:{run_id}: and a member of the
sorted set tetrarch:runs, whose score is when it was opened last.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence

from services.buffer.adapters.redis_connection import ROOT, Connection, run_not_found, run_prefix
from services.buffer.adapters.redis_refusals import refusal
from services.buffer.core.plan import RunPlan
from services.buffer.core.ports import Dataset
from services.buffer.core.records import Checkpoint, RunRecord, RunState

_RUNS = ROOT + "runs"
_SUMMARY_LIMIT = 1000
_DELETE_MS = 120_000
_DELETE_CHUNK = 500
_RUN_FIELDS = (
    "state", "reason", "created", "policy_version", "committed_step", "checkpoint_step", "checkpoint_path",
    "trainer_epoch", "reserved_version", "spec", "row_count", "skipped_count", "checkpoints",
)  # fmt: skip


class RedisRuns:
    """Runs over a connection."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._client = connection.client

    async def create_run(self, run_id: str, spec_json: str, plan: RunPlan, dataset: Dataset) -> bool:
        """False when the run is there already; nothing is changed then. Raises RUN_DELETING."""
        token = secrets.token_hex(4)
        skipped_key = f"{run_prefix(run_id)}skipped:{token}"
        async with self._connection.errors():
            await self._client.set(skipped_key, dataset.skipped_rows())
            # Listed before it exists: a run must never exist unlisted.
            await self._client.zadd(_RUNS, {run_id: await self._connection.now_ms()}, nx=True)
        values = {
            "state": RunState.ACTIVE.value, "reason": "", "policy_version": 0, "reserved_version": 0,
            "committed_step": -1, "checkpoint_step": -1, "checkpoint_path": "", "trainer_epoch": 0, "drawn": 0,
            "base": 0, "open": 0, "lease_expired": 0, "stale": 0, "stale_since_take": 0,
            "payload_bytes": 0, "summary_limit": _SUMMARY_LIMIT, "row_count": dataset.row_count,
            "skipped_count": dataset.skipped_count, "skipped_token": token,
            "sft": int(plan.sft), "batch": plan.batch, "samples": plan.samples, "interval": plan.interval,
            "max_staleness": plan.max_staleness, "stale_policy": plan.stale_policy,
            "draw_limit": plan.draw_limit(dataset.row_count), "spec": spec_json, **_changeable(plan),
        }  # fmt: skip
        status, *values = await self._connection.run_script("create", run_id, _flat(values))
        # A run with our own token was created by this very call: the first answer got lost.
        if status == "OK" or (status == "EXISTS" and await self._field(run_id, "skipped_token") == token.encode()):
            return True
        async with self._connection.errors():
            await self._client.unlink(skipped_key)
        if status != "EXISTS":
            raise refusal(status, values, run_id, {})
        return False

    async def update_run(self, run: RunRecord, spec_json: str, plan: RunPlan) -> bool:
        """Sets what may change and reopens an ended run; False when the stored spec is another by now."""
        values = {"spec": spec_json, **_changeable(plan)}
        answer = await self._connection.run_script("update", run.run_id, [run.spec_json, *_flat(values)])
        if answer[0] != "OK":
            return False
        # Nodes serve the newest active run: the one opened last.
        now = await self._connection.now_ms()
        async with self._connection.errors():
            await self._client.zadd(_RUNS, {run.run_id: now})
        return True

    async def delete_run(self, run_id: str, *, force: bool) -> int:
        """Deletes every key of the run; → how many. The run is unknown from the first moment on.

        Raises RUN_ACTIVE, RUN_DELETING. A deletion that dies half-way is finished by the next one.
        """
        token = secrets.token_hex(8)
        (gone,) = await self._run("delete", run_id, [token, _DELETE_MS, int(force)])
        # The token of this deletion is among the keys, and nothing may create the run before all others are gone.
        count = await self._connection.delete_all(run_prefix(run_id), _DELETE_CHUNK, but="deleting")
        async with self._connection.errors():
            await self._client.zrem(_RUNS, run_id)
        await self._run("deleted", run_id, [token])
        return count + int(gone)

    async def find_run(self, run_id: str) -> RunRecord | None:
        """The run, or None."""
        async with self._connection.errors():
            values = await self._client.hmget(run_prefix(run_id) + "run", _RUN_FIELDS)
        return _run_record(run_id, values)

    async def get_run(self, run_id: str) -> RunRecord:
        """The run. Raises RUN_NOT_FOUND."""
        run = await self.find_run(run_id)
        if run is None:
            raise run_not_found(run_id)
        return run

    async def list_runs(self, states: Sequence[RunState], start: int, count: int) -> tuple[list[RunRecord], bool]:
        """(runs, whether more follow), the one opened last first."""
        wanted = {state.value.encode() for state in states}
        async with self._connection.errors():
            names = [name.decode() for name in await self._client.zrevrange(_RUNS, 0, -1)]
            pipe = self._client.pipeline(transaction=False)
            for name in names:
                pipe.hget(run_prefix(name) + "run", "state")
            present = await pipe.execute()
            names = [n for n, state in zip(names, present, strict=True) if state and (not wanted or state in wanted)]
            page = names[start : start + count]
            for name in page:
                pipe.hmget(run_prefix(name) + "run", _RUN_FIELDS)
            values = await pipe.execute()
        runs = [_run_record(name, value) for name, value in zip(page, values, strict=True)]
        return [run for run in runs if run], start + count < len(names)

    async def run_incarnation(self, run_id: str) -> tuple[int, int]:
        """(when the run was created, how often it was opened again): tells a new run from an old one of the same id,
        and new settings from old ones. Raises RUN_NOT_FOUND."""
        async with self._connection.errors():
            created, revision = await self._client.hmget(run_prefix(run_id) + "run", "created", "revision")
        if created is None:
            raise run_not_found(run_id)
        return int(created), int(revision or 0)

    async def samples_per_group(self, run_id: str) -> int:
        """Samples of a complete group. Raises RUN_NOT_FOUND."""
        return int(await self._field(run_id, "samples"))

    async def skipped_rows(self, run_id: str) -> bytes:
        """What the data set packed when the run was created."""
        token = await self._field(run_id, "skipped_token")
        async with self._connection.errors():
            return await self._client.get(f"{run_prefix(run_id)}skipped:{token.decode()}") or b""

    async def finish_run(self, run_id: str, state: RunState, reason: str, trainer_epoch: int) -> None:
        """Ends the run. Raises FENCED."""
        await self._run("finish", run_id, [state.value, reason, trainer_epoch], epoch=trainer_epoch)

    async def begin_session(self, run_id: str, caller: str) -> int:
        """The new trainer epoch. Not idempotent. Raises RUN_FINISHED."""
        return int((await self._run("session", run_id, [caller]))[0])

    async def _field(self, run_id: str, name: str) -> bytes:
        """One value of the run's hash. Raises RUN_NOT_FOUND."""
        async with self._connection.errors():
            value = await self._client.hget(run_prefix(run_id) + "run", name)
        if value is None:
            raise run_not_found(run_id)
        return value

    async def _run(self, script: str, run_id: str, args: Sequence[str | int], **context: object) -> list:
        """Values of a script's answer; its refusals become ServiceErrors."""
        status, *values = await self._connection.run_script(script, run_id, args)
        if status != "OK":
            raise refusal(status, values, run_id, context)
        return values


def _changeable(plan: RunPlan) -> dict[str, int]:
    return {
        "steps": plan.steps, "most_ready": plan.most_ready, "max_attempts": plan.max_attempts,
        "saves": int(plan.saves), "admitted": plan.admitted, "max_rejections": plan.max_rejections,
        "max_bytes": plan.max_bytes, "keep_checkpoints": plan.keep_checkpoints, "picks": int(plan.picks),
    }  # fmt: skip


def _flat(values: dict[str, str | int]) -> list[str | int]:
    return [part for pair in values.items() for part in pair]


def _run_record(run_id: str, values: Sequence[bytes | None]) -> RunRecord | None:
    if values[0] is None:
        return None
    text = [(value or b"").decode() for value in values]
    state, reason, created, policy, committed, step, path, epoch, reserved, spec, rows, skipped, listed = text
    if listed:
        checkpoints = tuple(Checkpoint(one["step"], one["path"], one["frontier"]) for one in json.loads(listed))
    else:  # a run from before there was a list
        checkpoints = (Checkpoint(int(step), path, 0),) if int(step) >= 0 else ()
    return RunRecord(
        run_id=run_id, state=RunState(state), reason=reason, created_ms=int(created), policy_version=int(policy),
        committed_step=int(committed), checkpoint_step=int(step), checkpoint_path=path, trainer_epoch=int(epoch),
        reserved_version=int(reserved), spec_json=spec, row_count=int(rows), skipped_count=int(skipped),
        checkpoints=checkpoints,
    )  # fmt: skip
