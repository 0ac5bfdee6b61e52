"""The state machine of prompts in a Redis or Valkey server.

Every transition is one script (lua/), hence atomic; payload never passes through a script: it is written under
a key of its own with an expiry, and the script that makes the group READY removes the expiry. A put that dies
half-way therefore leaves nothing behind, and no READY group is without its payload.

Keys of a run, all under tetrarch:{run_id}:  run (hash), g:<ordinal> (hash), p:<ordinal>:<token> (hash, payload),
pending leased ready reserved consumed evicted (sorted sets), reasons staleness (hashes), kept (list),
q:<request_id> (string), skipped:<token> (string).
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence

from services.buffer.adapters.redis_connection import ROOT, Connection, run_not_found, run_prefix
from services.buffer.adapters.redis_groups import GroupReader
from services.buffer.core import ids
from services.buffer.core.plan import RunPlan
from services.buffer.core.ports import Dataset
from services.buffer.core.records import (
    Batch,
    Grant,
    Grants,
    GroupRecord,
    GroupState,
    LeaseRequest,
    PackedGroup,
    PutOutcome,
    PutResult,
    RunRecord,
    RunState,
    Stats,
    StoredGroup,
)
from services.common.errors import Code, ServiceError, invalid_field

_RUNS = ROOT + "runs"
_UNFLIPPED_PAYLOAD_MS = 3_600_000
_REQUEST_MEMORY_MS = 600_000
_SUMMARY_LIMIT = 1000
_RUN_FIELDS = (
    "state", "reason", "created", "policy_version", "committed_step", "checkpoint_step", "checkpoint_path",
    "trainer_epoch", "reserved_version", "spec", "row_count", "skipped_count",
)  # fmt: skip
_PUT_MESSAGES = {
    "ROLLED_BACK": "the run was rolled back after the lease was given",
    "LEASED": "the lease is gone and another node holds the prompt",
    "PENDING": "the prompt was finished under a later lease and sent back since",
    "EVICTED": "the prompt was evicted",
    "UNKNOWN_LEASE": "no such lease was ever given",
    "REQUEUED": "it was stored before, and has been sent back for newer weights since",
}


def member(ordinal: int) -> str:
    """Ordinal as a member of a state's set: equal scores then order by ordinal."""
    return f"{ordinal:012d}"


class RedisStore:
    """Store over a connection."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._client = connection.client
        self._groups = GroupReader(connection)

    # -- runs

    async def create_run(self, run_id: str, spec_json: str, plan: RunPlan, dataset: Dataset) -> bool:
        """False when the run is there already; nothing is changed then."""
        token = secrets.token_hex(4)
        skipped_key = f"{run_prefix(run_id)}skipped:{token}"
        async with self._connection.errors():
            await self._client.set(skipped_key, dataset.skipped_rows())
            # Listed before it exists: a run must never exist unlisted.
            await self._client.zadd(_RUNS, {run_id: await self._connection.now_ms()}, nx=True)
        values = {
            "state": RunState.ACTIVE.value, "reason": "", "policy_version": 0, "reserved_version": 0,
            "committed_step": -1, "checkpoint_step": -1, "checkpoint_path": "", "trainer_epoch": 0, "drawn": 0,
            "base": 0, "open": 0, "rollback": 0, "lease_expired": 0, "stale": 0, "stale_since_take": 0,
            "payload_bytes": 0, "summary_limit": _SUMMARY_LIMIT, "row_count": dataset.row_count,
            "skipped_count": dataset.skipped_count, "skipped_token": token,
            "sft": int(plan.sft), "batch": plan.batch, "samples": plan.samples, "interval": plan.interval,
            "max_staleness": plan.max_staleness, "stale_policy": plan.stale_policy,
            "draw_limit": plan.draw_limit(dataset.row_count), "spec": spec_json, **_changeable(plan),
        }  # fmt: skip
        answer = await self._connection.run_script("create", run_id, _flat(values))
        # A run with our own token was created by this very call: the first answer got lost.
        if answer[0] == "OK" or await self._field(run_id, "skipped_token") == token.encode():
            return True
        async with self._connection.errors():
            await self._client.unlink(skipped_key)
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

    async def run_created_ms(self, run_id: str) -> int:
        """When the run was created; tells a new run from an old one of the same id. Raises RUN_NOT_FOUND."""
        return int(await self._field(run_id, "created"))

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

    # -- leases

    async def lease(self, run_id: str, request: LeaseRequest) -> Grants:
        """Leases within the admission limit, possibly none. Raises RUN_FINISHED."""
        ttl = math.ceil(request.ttl_seconds * 1000)
        version, now, repeated, *rest = await self._run(
            "lease", run_id, [request.request_id, request.caller, request.count, ttl, ttl + _REQUEST_MEMORY_MS]
        )
        grants = tuple(
            Grant(rest[at + 1].decode(), int(rest[at]), int(rest[at + 2]), int(float(rest[at + 3])))
            for at in range(0, len(rest), 4)
        )
        return Grants(grants, int(version), int(now), repeated == b"1")

    async def extend(self, run_id: str, leases: Sequence[ids.LeaseId], ttl_seconds: float) -> tuple[int, list[str]]:
        """(deadline in ms, ids of leases that are not held)."""
        args = [math.ceil(ttl_seconds * 1000), *_lease_args(leases)]
        deadline, *lost = await self._run("extend", run_id, args)
        return int(deadline), [text.decode() for text in lost]

    async def release(self, run_id: str, leases: Sequence[ids.LeaseId], reason: str) -> tuple[int, list[str]]:
        """(number given back, ids of leases that were not held)."""
        count, *lost = await self._run("release", run_id, [reason, *_lease_args(leases)])
        return int(count), [text.decode() for text in lost]

    async def put(self, run_id: str, groups: Sequence[PackedGroup]) -> list[PutResult]:
        """Writes payloads, then flips the groups; one result per group, in order."""
        parsed = [ids.parse_lease_id(group.lease_id) for group in groups]
        results: list[PutResult | None] = [None] * len(groups)
        args: list[str | int] = []
        keys: dict[int, str] = {}
        pipe = self._client.pipeline(transaction=False)
        for position, (group, lease) in enumerate(zip(groups, parsed, strict=True)):
            if lease is None or lease.ordinal != group.ordinal:
                message = f"lease {group.lease_id!r} does not belong to group {group.group_id}."
                results[position] = PutResult(group.group_id, PutOutcome.INVALID, message)
                continue
            token = secrets.token_hex(4)
            keys[position] = f"{run_prefix(run_id)}p:{member(group.ordinal)}:{token}"
            pipe.hset(keys[position], mapping=_payload(group))
            pipe.pexpire(keys[position], _UNFLIPPED_PAYLOAD_MS)
            rewards = ",".join("" if reward is None else repr(reward) for reward in group.rewards)
            version = "" if group.min_version is None else group.min_version
            args += [member(group.ordinal), lease.text, lease.count, lease.rollback, token, version]
            args += [len(group.heads), group.size_bytes, f"{rewards}|{group.mean_response_length!r}"]
        if args:
            async with self._connection.errors():
                await pipe.execute()
            answers = await self._run("put", run_id, args)
            for at, position in enumerate(keys):
                outcome, detail = answers[2 * at].decode(), answers[2 * at + 1].decode()
                results[position] = _put_result(groups[position].group_id, outcome, detail)
            refused = [keys[i] for i in keys if results[i].outcome is not PutOutcome.STORED]
            if refused:
                async with self._connection.errors():
                    await self._client.unlink(*refused)
        return results  # pyright: ignore[reportReturnType]

    # -- batches

    async def take(self, run_id: str, trainer_epoch: int, step: int, count: int) -> Batch:
        """Reserves groups for a step, or answers without headers when there are too few."""
        version, ready, stale, *rest = await self._run(
            "take", run_id, [trainer_epoch, step, count], epoch=trainer_epoch, step=step, count=count
        )
        async with self._connection.errors():
            pipe = self._client.pipeline(transaction=False)
            for at in range(0, len(rest), 2):
                pipe.hget(f"{run_prefix(run_id)}p:{rest[at].decode()}:{rest[at + 1].decode()}", "h")
            headers = await pipe.execute()
        if None in headers:
            ordinal = int(rest[2 * headers.index(None)])
            raise ServiceError(
                Code.INTERNAL,
                "PAYLOAD_LOST",
                f"Group {ids.group_id(run_id, ordinal)} is reserved but the store has lost its payload; restore the run"
                " from a checkpoint.",
                group_id=ids.group_id(run_id, ordinal),
            )
        return Batch(b"".join(headers), int(ready), int(stale), int(version))

    async def samples(self, run_id: str, wanted: Sequence[tuple[int, int]]) -> list[bytes | None]:
        """Whole samples by (ordinal, index), None where not stored."""
        return await self._groups.samples(run_id, wanted)

    async def commit(self, run_id: str, trainer_epoch: int, step: int) -> int:
        """Groups consumed by the step."""
        return int((await self._run("commit", run_id, [trainer_epoch, step], epoch=trainer_epoch, step=step))[0])

    async def record_checkpoint(self, run_id: str, trainer_epoch: int, step: int, path: str) -> int:
        """Lowest ordinal that is not finished."""
        args = [trainer_epoch, step, path]
        return int((await self._run("checkpoint", run_id, args, epoch=trainer_epoch, step=step))[0])

    async def restore(self, run_id: str, trainer_epoch: int, step: int) -> tuple[int, int]:
        """(groups returned, leases cancelled)."""
        returned, released = await self._run("restore", run_id, [trainer_epoch, step], epoch=trainer_epoch, step=step)
        return int(returned), int(released)

    # -- versions

    async def reserve_version(self, run_id: str, trainer_epoch: int) -> int:
        """A version above every one before. Not idempotent: repeating it skips a number."""
        return int((await self._run("reserve_version", run_id, [trainer_epoch], epoch=trainer_epoch))[0])

    async def publish_version(self, run_id: str, trainer_epoch: int, version: int, step_count: int) -> None:
        """Makes the version current and sends back what became too stale."""
        await self._run("publish", run_id, [trainer_epoch, version, step_count], epoch=trainer_epoch, version=version)

    # -- looking in

    async def stats(self, run_id: str) -> Stats:
        """Counts at one instant."""
        *counts, reasons, staleness = await self._run("stats", run_id, [])
        return Stats(
            *(int(count) for count in counts),
            evicted_by_reason={reasons[i].decode(): int(reasons[i + 1]) for i in range(0, len(reasons), 2)},
            staleness={int(staleness[i]): int(staleness[i + 1]) for i in range(0, len(staleness), 2)},
        )

    async def list_groups(
        self, run_id: str, start: int, count: int, states: Sequence[GroupState], step: int | None
    ) -> tuple[list[GroupRecord], bool]:
        """(groups from ordinal `start` on, whether more follow)."""
        return await self._groups.page(run_id, start, count, states, step)

    async def get_group(self, run_id: str, ordinal: int) -> tuple[GroupRecord, StoredGroup | None]:
        """State and payload of a group. Raises GROUP_NOT_FOUND."""
        return await self._groups.one(run_id, ordinal)

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
            raise _refusal(status, values, run_id, context)
        return values


def _changeable(plan: RunPlan) -> dict[str, int]:
    return {
        "steps": plan.steps, "most_ready": plan.most_ready, "max_attempts": plan.max_attempts,
        "saves": int(plan.saves),
    }  # fmt: skip


def _flat(values: dict[str, str | int]) -> list[str | int]:
    return [part for pair in values.items() for part in pair]


def _lease_args(leases: Sequence[ids.LeaseId]) -> list[str]:
    return [part for lease in leases for part in (member(lease.ordinal), lease.text)]


def _payload(group: PackedGroup) -> dict[str, bytes]:
    fields = {"h": group.headers, "s": group.summary}
    fields |= {f"m{index}": head for index, head in enumerate(group.heads)}
    return fields | {f"t{index}": tensors for index, tensors in enumerate(group.tensors)}


def _put_result(group_id: str, outcome: str, detail: str) -> PutResult:
    if outcome == "RETRY":
        raise ServiceError(
            Code.UNAVAILABLE, "STORE_UNAVAILABLE", f"The payload of {group_id} expired in the store; put it again.",
            retry_seconds=0.1, group_id=group_id,
        )  # fmt: skip
    message = f"Group {group_id}: {_PUT_MESSAGES[detail]}." if detail in _PUT_MESSAGES else ""
    return PutResult(group_id, PutOutcome(outcome), message)


def _run_record(run_id: str, values: Sequence[bytes | None]) -> RunRecord | None:
    if values[0] is None:
        return None
    text = [(value or b"").decode() for value in values]
    state, reason, created, policy, committed, step, path, epoch, reserved, spec, rows, skipped = text
    return RunRecord(
        run_id=run_id, state=RunState(state), reason=reason, created_ms=int(created), policy_version=int(policy),
        committed_step=int(committed), checkpoint_step=int(step), checkpoint_path=path, trainer_epoch=int(epoch),
        reserved_version=int(reserved), spec_json=spec, row_count=int(rows), skipped_count=int(skipped),
    )  # fmt: skip


def _refusal(status: str, values: Sequence[bytes], run_id: str, context: dict[str, object]) -> ServiceError:
    """The error of a script's refusal; `values[0]` is the store's side of the contradiction."""
    have = values[0].decode() if values else ""
    step = context.get("step")
    if status == "FENCED":
        message = (
            f"Trainer session {context.get('epoch')} of run {run_id} is over: session {have} holds the run; end this"
            " trainer, or begin a session."
        )
        return ServiceError(
            Code.FAILED_PRECONDITION, status, message, run_id=run_id, trainer_epoch=context.get("epoch"), newest=have
        )
    if status == "RUN_FINISHED":
        message = f"Run {run_id} is {have}; create it again with the same run_id to go on."
        return ServiceError(Code.FAILED_PRECONDITION, status, message, run_id=run_id, state=have)
    if status == "STEP_OUT_OF_ORDER":
        message = (
            f"Step {step} of run {run_id} does not follow: the last committed step is {have}, and a step is taken"
            " before it is committed."
        )
        return ServiceError(Code.FAILED_PRECONDITION, status, message, run_id=run_id, step=step, committed_step=have)
    if status == "STEP_NOT_RESTORABLE":
        message = f"Run {run_id} cannot be restored to step {step}: the last committed step is {have}."
        return ServiceError(Code.FAILED_PRECONDITION, status, message, run_id=run_id, step=step, committed_step=have)
    if status == "DATA_EXHAUSTED":
        message = (
            f"Run {run_id} has {have} prompts left, too few for the {context.get('count')} groups of step {step}; raise"
            " num_epoch, or lower num_rollout."
        )
        return ServiceError(Code.FAILED_PRECONDITION, status, message, run_id=run_id, step=step, left=have)
    if status == "VERSION_OUT_OF_ORDER":
        why = f"it must be above the published version {have} and at most the reserved version {values[1].decode()}"
        return invalid_field("version", context.get("version"), why)
    return ServiceError(Code.INTERNAL, "INTERNAL", f"The store answered {status} for run {run_id}.", run_id=run_id)
