"""The state machine of prompts in a Redis or Valkey server.

Every transition is one script (lua/), hence atomic; payload never passes through a script: it is written under
a key of its own with an expiry, and the script that makes the group READY removes the expiry. A put that dies
half-way therefore leaves nothing behind, and no READY group is without its payload.

Keys of a run, all under tetrarch:{run_id}:  run (hash), g:<ordinal> (hash), p:<ordinal>:<token> (hash, payload),
x:<ordinal>:<lease> (hash, side payloads), pending leased ready reserved consumed evicted held (sorted sets), the
first four also with :since, reasons staleness (hashes), kept (list), q:<request_id> skipped:<token> deleting (strings).
"""

from __future__ import annotations

import math
import secrets
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Any

from services.buffer.adapters.redis_connection import Connection, run_prefix
from services.buffer.adapters.redis_groups import GroupReader
from services.buffer.adapters.redis_memory import StoreMemory
from services.buffer.adapters.redis_refusals import refusal
from services.buffer.adapters.redis_runs import RedisRuns
from services.buffer.adapters.redis_side import SidePayloads
from services.buffer.core import ids
from services.buffer.core.records import (
    Batch,
    Grant,
    Grants,
    GroupFilter,
    GroupKey,
    GroupRecord,
    LeaseRequest,
    PackedGroup,
    PartialKey,
    PutOutcome,
    PutResult,
    Question,
    ReadyGroup,
    RunState,
    SideRows,
    SideShape,
    Stats,
    StoredGroup,
)
from services.common.errors import Code, ServiceError

_UNFLIPPED_PAYLOAD_MS = 3_600_000
_REQUEST_MEMORY_MS = 600_000
_FREE_CHUNK = 100
RESTORE_CHUNK = 200
"""Groups that a rollback moves in one script."""
_PUT_MESSAGES = {
    "ROLLED_BACK": "the run was rolled back after the lease was given",
    "LEASED": "the lease is gone and another node holds the prompt",
    "PENDING": "the prompt was finished under a later lease and sent back since",
    "EVICTED": "the prompt was evicted",
    "UNKNOWN_LEASE": "no such lease was ever given",
    "REQUEUED": "it was stored before, and has been sent back for newer weights since",
    "SIDE_EXPIRED": "the side payloads that its samples name are not stored under this lease any more",
}


def member(ordinal: int) -> str:
    """Ordinal as a member of a state's set: equal scores then order by ordinal."""
    return f"{ordinal:012d}"


class RedisStore(RedisRuns):
    """Store over a connection.

    Args:
        connection: to the store.
        max_bytes: memory of the store above which payload is refused; None: 0.9 of its maxmemory.
    """

    def __init__(self, connection: Connection, max_bytes: int | None = None) -> None:
        super().__init__(connection)
        self._groups = GroupReader(connection)
        self._memory = StoreMemory(connection, max_bytes)
        self._side = SidePayloads(connection)

    # -- leases

    async def lease(self, run_id: str, request: LeaseRequest) -> Grants:
        """Leases within the admission limit, possibly none. Raises RUN_FINISHED."""
        ttl = math.ceil(request.ttl_seconds * 1000)
        version, now, repeated, *rest = await self._run(
            "lease", run_id, [request.request_id, request.caller, request.count, ttl, ttl + _REQUEST_MEMORY_MS]
        )
        grants = tuple(_grant(rest[at : at + 6]) for at in range(0, len(rest), 6))
        return Grants(grants, int(version), int(now), repeated == b"1")

    async def extend(self, run_id: str, leases: Sequence[ids.LeaseId], ttl_seconds: float) -> tuple[int, list[str]]:
        """(deadline in ms, ids of leases that are not held)."""
        args = [math.ceil(ttl_seconds * 1000), *_lease_args(leases)]
        deadline, *lost = await self._run("extend", run_id, args)
        return int(deadline), [text.decode() for text in lost]

    async def reclaim(self, run_id: str, caller: str) -> int:
        """Has every lease of a caller expire now; → how many."""
        return int((await self._run("reclaim", run_id, [caller]))[0])

    async def release(
        self,
        run_id: str,
        leases: Sequence[ids.LeaseId],
        reason: str,
        partials: Mapping[str, PackedGroup] | None = None,
    ) -> tuple[int, list[str]]:
        """(number given back, ids of leases that were not held).

        `reason`: of the eviction, "" for another attempt, or UNDO. `partials`: what was made so far, by lease id; such
        a lease is no failed attempt. Raises STORE_FULL.
        """
        partials = partials or {}
        args: list[str | int] = [reason]
        keys: dict[str, str] = {}
        pipe = self._client.pipeline(transaction=False)
        for lease in leases:
            made = partials.get(lease.text)
            args += [member(lease.ordinal), lease.text]
            if made is None:
                args += ["", 0, "", 0]
                continue
            token = secrets.token_hex(4)
            keys[lease.text] = self._write(pipe, run_id, made, token)
            args += [token, len(made.heads), "" if made.min_version is None else made.min_version, made.size_bytes]
        if keys:
            await self._memory.admit(sum(made.size_bytes for made in partials.values()))
            async with self._connection.errors():
                await pipe.execute()
        count, *lost = await self._run("release", run_id, args)
        refused = [text.decode() for text in lost]
        if unused := [keys[text] for text in refused if text in keys]:
            async with self._connection.errors():
                await self._client.unlink(*unused)
        return int(count), refused

    async def partials(self, run_id: str, grants: Sequence[Grant]) -> list[StoredGroup | None]:
        """What unfinished attempts at granted prompts had made, in order."""
        return await self._groups.partials(run_id, grants)

    def _write(self, pipe: Any, run_id: str, group: PackedGroup, token: str) -> str:
        """Queues the payload of a group under a key that expires unless a script takes it over; the key."""
        key = f"{run_prefix(run_id)}p:{member(group.ordinal)}:{token}"
        pipe.hset(key, mapping=_payload(group))
        pipe.pexpire(key, _UNFLIPPED_PAYLOAD_MS)
        return key

    async def put(self, run_id: str, groups: Sequence[PackedGroup]) -> list[PutResult]:
        """Writes payloads, then flips the groups; one result per group, in order. Raises STORE_FULL, RUN_FULL."""
        await self._memory.admit(sum(group.size_bytes for group in groups))
        results: list[PutResult | None] = [None] * len(groups)
        args: list[str | int] = []
        keys: dict[int, str] = {}
        pipe = self._client.pipeline(transaction=False)
        for position, group in enumerate(groups):
            lease = ids.parse_lease_id(group.lease_id)
            if lease is None or lease.ordinal != group.ordinal:
                message = f"lease {group.lease_id!r} does not belong to group {group.group_id}."
                results[position] = PutResult(group.group_id, PutOutcome.INVALID, message)
                continue
            if group.side_payloads and (problem := await self._side.problem(run_id, lease, group.side_payloads)):
                results[position] = PutResult(group.group_id, PutOutcome.INVALID, problem)
                continue
            token = secrets.token_hex(4)
            keys[position] = self._write(pipe, run_id, group, token)
            args += _put_args(group, lease, token)
        if args:
            async with self._connection.errors():
                await pipe.execute()
            answers = await self._run("put", run_id, args)
            outcomes = [(answers[2 * at].decode(), answers[2 * at + 1].decode()) for at in range(len(keys))]
            refused = [key for key, (outcome, _) in zip(keys.values(), outcomes, strict=True) if outcome != "STORED"]
            if refused:
                async with self._connection.errors():
                    await self._client.unlink(*refused)
            for position, (outcome, detail) in zip(keys, outcomes, strict=True):
                results[position] = _put_result(run_id, groups[position].group_id, outcome, detail)
        return results  # pyright: ignore[reportReturnType]

    async def put_side(self, run_id: str, lease: ids.LeaseId, shape: SideShape, meta: bytes, rows: Sequence[SideRows]):
        """Stores rows of a side payload under a lease. Raises LEASE_LOST, STORE_FULL."""
        await self._memory.admit(sum(len(one.data) for one in rows))
        await self._side.put(run_id, lease, shape, meta, rows)

    async def side_meta(self, run_id: str, ordinal: int, index: int, name: str) -> bytes | None:
        """What was said of a side payload when it was put; None when there is none."""
        return await self._side.meta(run_id, ordinal, index, name)

    def side_rows(self, run_id: str, ordinal: int, shape: SideShape, start: int, end: int) -> AsyncIterator[SideRows]:
        """Rows [start, end) of a stored side payload, in pieces."""
        return self._side.rows(run_id, ordinal, shape, start, end)

    # -- batches

    async def take(
        self, run_id: str, trainer_epoch: int, step: int, count: int, picks: Sequence[GroupKey] = ()
    ) -> Batch | Question:
        """Reserves groups for a step, or answers without headers when there are too few; or asks first.

        `picks`: what the run's own filter picked, in order.
        """
        args = [trainer_epoch, step, count, *(part for key in picks for part in (member(key.ordinal), key.token))]
        status, *values = await self._connection.run_script("take", run_id, args)
        if status in ("JUDGE", "PICK"):
            keys = [GroupKey(int(values[at]), values[at + 1].decode()) for at in range(1, len(values), 2)]
            return Question(int(values[0]), tuple(keys), pick=status == "PICK")
        if status != "OK":
            raise refusal(status, values, run_id, {"epoch": trainer_epoch, "step": step, "count": count})
        version, ready, stale, *rest = values
        keys = [GroupKey(int(rest[at]), rest[at + 1].decode()) for at in range(0, len(rest), 2)]
        headers = await self._groups.headers(run_id, keys)
        if None in headers:
            lost = ids.group_id(run_id, keys[headers.index(None)].ordinal)
            raise ServiceError(
                Code.INTERNAL,
                "PAYLOAD_LOST",
                f"Group {lost} is reserved but the store has lost its payload; restore the run from a checkpoint.",
                group_id=lost,
            )
        return Batch(b"".join(headers), int(ready), int(stale), int(version))  # pyright: ignore[reportArgumentType]

    async def ready_groups(self, run_id: str, keys: Sequence[GroupKey] | None) -> list[ReadyGroup]:
        """READY groups with their headers, oldest version first; `keys` None: all of them."""
        return await self._groups.ready(run_id, keys)

    async def judge(self, run_id: str, policy_version: int, verdicts: Mapping[GroupKey, str]) -> None:
        """Does with stale groups what was said of them at a published version; one that moved on is left alone."""
        args = [part for key, verdict in verdicts.items() for part in (member(key.ordinal), key.token, verdict)]
        await self._run("judge", run_id, [policy_version, *args])

    async def samples(self, run_id: str, wanted: Sequence[tuple[int, int]]) -> list[bytes | None]:
        """Whole samples by (ordinal, index), None where not stored."""
        return await self._groups.samples(run_id, wanted)

    async def commit(self, run_id: str, trainer_epoch: int, step: int) -> int:
        """Groups consumed by the step."""
        return int((await self._run("commit", run_id, [trainer_epoch, step], epoch=trainer_epoch, step=step))[0])

    async def record_checkpoint(self, run_id: str, trainer_epoch: int, step: int, path: str) -> int:
        """Lowest ordinal that is not finished. What no retained checkpoint needs is freed afterwards, in pieces."""
        args = [trainer_epoch, step, path]
        frontier = int((await self._run("checkpoint", run_id, args, epoch=trainer_epoch, step=step))[0])
        while int((await self._run("free", run_id, [_FREE_CHUNK]))[0]) == _FREE_CHUNK:
            pass
        return frontier

    async def restore(self, run_id: str, trainer_epoch: int, step: int) -> tuple[int, int]:
        """(groups returned, leases cancelled)."""
        returned, released, more = 0, 0, b"1"
        while more == b"1":
            args = [trainer_epoch, step, RESTORE_CHUNK]
            given, cancelled, more = await self._run("restore", run_id, args, epoch=trainer_epoch, step=step)
            returned, released = returned + int(given), released + int(cancelled)
        return returned, released

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
        state, *counts, reasons, staleness, ages = await self._run("stats", run_id, [])
        used, limit = await self._memory.usage()
        return Stats(
            RunState(state.decode()),
            *(int(count) for count in counts),
            evicted_by_reason={name.decode(): int(count) for name, count in _pairs(reasons)},
            staleness={int(lag): int(count) for lag, count in _pairs(staleness)},
            oldest_age_seconds={name.decode(): int(age) / 1000 for name, age in _pairs(ages)},
            store_used_bytes=used,
            store_limit_bytes=limit,
        )

    async def list_groups(
        self, run_id: str, start: int, count: int, wanted: GroupFilter
    ) -> tuple[list[GroupRecord], bool]:
        """(groups from ordinal `start` on, whether more follow); the data set is not looked at."""
        return await self._groups.page(run_id, start, count, wanted)

    async def get_group(self, run_id: str, ordinal: int) -> tuple[GroupRecord, StoredGroup | None]:
        """State and payload of a group. Raises GROUP_NOT_FOUND."""
        return await self._groups.one(run_id, ordinal)


def _pairs(flat: Sequence[bytes]) -> Iterator[tuple[bytes, bytes]]:
    return zip(flat[::2], flat[1::2], strict=True)


def _grant(values: Sequence[bytes]) -> Grant:
    ordinal, lease_id, attempt, deadline, token, samples = values
    partial = PartialKey(token.decode(), int(samples)) if token else None
    return Grant(lease_id.decode(), int(ordinal), int(attempt), int(float(deadline)), partial)


def _lease_args(leases: Sequence[ids.LeaseId]) -> list[str]:
    return [part for lease in leases for part in (member(lease.ordinal), lease.text)]


def _payload(group: PackedGroup) -> dict[str, bytes]:
    fields = {"h": group.headers, "s": group.summary}
    fields |= {f"m{index}": head for index, head in enumerate(group.heads)}
    return fields | {f"t{index}": tensors for index, tensors in enumerate(group.tensors)}


def _put_args(group: PackedGroup, lease: ids.LeaseId, token: str) -> list[str | int]:
    rewards = ",".join("" if reward is None else repr(reward) for reward in group.rewards)
    return [
        member(group.ordinal), lease.text, lease.count, lease.rollback, token,
        "" if group.min_version is None else group.min_version, len(group.heads), group.size_bytes + group.side_bytes,
        f"{rewards}|{group.mean_response_length!r}", SidePayloads.suffix(lease) if group.side_payloads else "",
    ]  # fmt: skip


def _put_result(run_id: str, group_id: str, outcome: str, detail: str) -> PutResult:
    if outcome == "FULL":
        raise ServiceError(
            Code.RESOURCE_EXHAUSTED, "RUN_FULL",
            f"Group {group_id} would take run {run_id} above its run_max_bytes {int(detail):,}; raise it, or write"
            " checkpoints more often so that payloads are freed.",
            retry_seconds=5.0, run_id=run_id, group_id=group_id,
        )  # fmt: skip
    if outcome == "RETRY":
        raise ServiceError(
            Code.UNAVAILABLE, "STORE_UNAVAILABLE", f"The payload of {group_id} expired in the store; put it again.",
            retry_seconds=0.1, group_id=group_id,
        )  # fmt: skip
    message = f"Group {group_id}: {_PUT_MESSAGES[detail]}." if detail in _PUT_MESSAGES else ""
    return PutResult(group_id, PutOutcome(outcome), message)
