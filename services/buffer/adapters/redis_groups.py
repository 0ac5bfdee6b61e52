"""Reading groups and their payload from the store. Changes nothing."""

from __future__ import annotations

from collections.abc import Sequence

from services.buffer.adapters.redis_connection import Connection, run_not_found, run_prefix
from services.buffer.core import ids
from services.buffer.core.records import (
    Grant,
    GroupFilter,
    GroupKey,
    GroupRecord,
    GroupState,
    ReadyGroup,
    StoredGroup,
)
from services.common.errors import Code, ServiceError

_FIELDS = (
    "state", "step", "caller", "reason", "leases", "min_version", "rewards", "mean_length", "token", "samples",
)  # fmt: skip
_SCAN = 500
"""Groups read at a time once the first read, of as many as are asked for, was not enough."""


class GroupReader:
    """Groups of a run, by ordinal or filtered."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._client = connection.client

    async def samples(self, run_id: str, wanted: Sequence[tuple[int, int]]) -> list[bytes | None]:
        """Whole samples by (ordinal, index), None where not stored."""
        prefix = run_prefix(run_id)
        indices: dict[int, list[int]] = {}
        for ordinal, index in wanted:
            indices.setdefault(ordinal, []).append(index)
        async with self._connection.errors():
            pipe = self._client.pipeline(transaction=False)
            for ordinal in indices:
                pipe.hget(f"{prefix}g:{ordinal:012d}", "token")
            tokens = await pipe.execute()
            # One answer a group: what the client spends on an answer exceeds what it spends on a sample's bytes.
            for (ordinal, some), token in zip(indices.items(), tokens, strict=True):
                names = [f"{kind}{index}" for index in some for kind in "mt"]
                pipe.hmget(f"{prefix}p:{ordinal:012d}:{(token or b'-').decode()}", names)
            answers = await pipe.execute()
        found: dict[tuple[int, int], bytes | None] = {}
        for (ordinal, some), parts in zip(indices.items(), answers, strict=True):
            for at, index in enumerate(some):
                head, tensors = parts[2 * at], parts[2 * at + 1]
                # The wire form of a message is the concatenation of the wire forms of its parts.
                found[ordinal, index] = head + tensors if head is not None and tensors is not None else None
        return [found[place] for place in wanted]

    async def one(self, run_id: str, ordinal: int) -> tuple[GroupRecord, StoredGroup | None]:
        """State and payload of a group. Raises GROUP_NOT_FOUND."""
        records, places = await self._read(run_id, [ordinal])
        if not records:
            raise ServiceError(
                Code.NOT_FOUND, "GROUP_NOT_FOUND", f"No prompt with ordinal {ordinal} was drawn in run {run_id} yet.",
                run_id=run_id, group_id=ids.group_id(run_id, ordinal),
            )  # fmt: skip
        token, count = places[0]
        if token is None:
            return records[0], None
        names = [f"{kind}{index}" for index in range(int(count)) for kind in "mt"]
        async with self._connection.errors():
            key = f"{run_prefix(run_id)}p:{ordinal:012d}:{token.decode()}"
            summary, *parts = await self._client.hmget(key, ["s", *names])
        return records[0], _stored([summary, *parts])

    async def partials(self, run_id: str, grants: Sequence[Grant]) -> list[StoredGroup | None]:
        """What unfinished attempts had made; None where nothing is stored."""
        found = [grant for grant in grants if grant.partial]
        async with self._connection.errors():
            pipe = self._client.pipeline(transaction=False)
            for grant in found:
                names = [f"{kind}{index}" for index in range(grant.partial.sample_count) for kind in "mt"]
                pipe.hmget(f"{run_prefix(run_id)}p:{grant.ordinal:012d}:{grant.partial.token}", ["s", *names])
            answers = await pipe.execute() if found else []
        stored = {grant.lease_id: _stored(parts) for grant, parts in zip(found, answers, strict=True)}
        return [stored.get(grant.lease_id) for grant in grants]

    async def headers(self, run_id: str, keys: Sequence[GroupKey]) -> list[bytes | None]:
        """Packed headers of groups, None where the payload is gone."""
        async with self._connection.errors():
            pipe = self._client.pipeline(transaction=False)
            for key in keys:
                pipe.hget(f"{run_prefix(run_id)}p:{key.ordinal:012d}:{key.token}", "h")
            return await pipe.execute() if keys else []

    async def ready(self, run_id: str, keys: Sequence[GroupKey] | None) -> list[ReadyGroup]:
        """READY groups with their headers; `keys` None: all of them, oldest version first."""
        prefix = run_prefix(run_id)
        async with self._connection.errors():
            if keys is None:
                ordinals = [int(name) for name in await self._client.zrange(prefix + "ready", 0, -1)]
            else:
                ordinals = [key.ordinal for key in keys]
            pipe = self._client.pipeline(transaction=False)
            for ordinal in ordinals:
                pipe.hmget(f"{prefix}g:{ordinal:012d}", "state", "token", "min_version", "restored")
            rows = await pipe.execute() if ordinals else []
        found = [
            (GroupKey(ordinal, token.decode()), int(version), restored is not None)
            for ordinal, (state, token, version, restored) in zip(ordinals, rows, strict=True)
            if state == b"READY"
        ]
        headers = await self.headers(run_id, [key for key, _, _ in found])
        return [
            ReadyGroup(key, packed, version, restored)
            for (key, version, restored), packed in zip(found, headers, strict=True)
            if packed is not None
        ]

    async def page(self, run_id: str, start: int, count: int, wanted: GroupFilter) -> tuple[list[GroupRecord], bool]:
        """(groups from ordinal `start` on in order, whether more follow)."""
        prefix = run_prefix(run_id)
        async with self._connection.errors():
            drawn, committed = await self._client.hmget(prefix + "run", "drawn", "committed_step")
        if drawn is None:
            raise run_not_found(run_id)
        states = {GroupState.EVICTED} if wanted.evict_reasons else set(wanted.states)
        if wanted.states:
            states &= set(wanted.states)
            if not states:
                return [], False
        if wanted.step is None and (not states or GroupState.CONSUMED in states):
            candidates: Sequence[int] = range(start, int(drawn))
        else:
            candidates = await self._members(prefix, states or set(GroupState), wanted.step, int(committed))
            candidates = sorted(ordinal for ordinal in candidates if ordinal >= start)
        found: list[GroupRecord] = []
        at, size = 0, min(count + 1, _SCAN)
        while at < len(candidates) and len(found) <= count:
            records, _ = await self._read(run_id, candidates[at : at + size])
            # A group may have moved on since its set was read.
            found += [record for record in records if _fits(record, states, wanted)]
            at, size = at + size, _SCAN
        return found[:count], len(found) > count

    async def _members(self, prefix: str, states: set[GroupState], step: int | None, committed: int) -> list[int]:
        """Ordinals in the sets of some states, in no order."""
        async with self._connection.errors():
            pipe = self._client.pipeline(transaction=False)
            for state in states:
                key = prefix + state.value.lower()
                if step is None:
                    pipe.zrange(key, 0, -1)
                elif state is GroupState.CONSUMED:
                    pipe.zrangebyscore(key, step, step)
                elif state is GroupState.RESERVED and step == committed + 1:
                    pipe.zrange(key, 0, -1)
            return [int(name) for names in await pipe.execute() for name in names]

    async def _read(
        self, run_id: str, ordinals: Sequence[int]
    ) -> tuple[list[GroupRecord], list[tuple[bytes | None, bytes | None]]]:
        """(records of the drawn ones among `ordinals`, their payload tokens and sample counts)."""
        prefix = run_prefix(run_id)
        async with self._connection.errors():
            rows = int(await self._client.hget(prefix + "run", "row_count") or 1)
            pipe = self._client.pipeline(transaction=False)
            for ordinal in ordinals:
                pipe.hmget(f"{prefix}g:{ordinal:012d}", _FIELDS)
                pipe.zscore(prefix + "leased", f"{ordinal:012d}")
            answers = await pipe.execute()
        records, places = [], []
        for at, ordinal in enumerate(ordinals):
            values, deadline = answers[2 * at], answers[2 * at + 1]
            if values[0] is not None:
                records.append(_record(run_id, ordinal, ordinal // rows, values, deadline))
                places.append((values[8], values[9]))
        return records, places


def _stored(parts: Sequence[bytes | None]) -> StoredGroup | None:
    """Group of its summary and, per sample, its head and its tensors."""
    summary, *parts = parts
    if summary is None:
        return None
    return StoredGroup(summary, tuple((parts[i] or b"") + (parts[i + 1] or b"") for i in range(0, len(parts), 2)))


def _fits(record: GroupRecord, states: set[GroupState], wanted: GroupFilter) -> bool:
    if states and record.state not in states:
        return False
    if wanted.evict_reasons and record.evict_reason not in wanted.evict_reasons:
        return False
    return wanted.step is None or record.step == wanted.step


def _record(
    run_id: str, ordinal: int, epoch: int, values: Sequence[bytes | None], deadline: float | None
) -> GroupRecord:
    state, step, caller, reason, leases, version, rewards, length = (
        value.decode() if value is not None else None for value in values[:8]
    )
    return GroupRecord(
        group_id=ids.group_id(run_id, ordinal),
        ordinal=ordinal,
        epoch=epoch,
        state=GroupState(state),
        step=int(step) if step is not None else None,
        caller=caller or "",
        expire_ms=int(deadline) if deadline is not None else None,
        evict_reason=reason or "",
        lease_count=int(leases or 0),
        min_version=int(version) if version is not None else None,
        rewards=tuple(float(r) if r else None for r in rewards.split(",")) if rewards is not None else (),
        mean_response_length=float(length) if length is not None else None,
    )
