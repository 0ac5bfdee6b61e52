"""Large tensors beside samples: stored in rows, read in rows, deleted with their group.

A side payload is put in pieces under the lease of its prompt, before the group itself, in a hash that expires unless
the group is stored: x:<ordinal>:<lease count>.<rollback>, with a field "<sample>/<name>/<first row>/<rows>" per piece
and "<sample>/<name>" for what it is. Invariant: a READY group has all rows of every side payload its samples name.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

from services.buffer.adapters.redis_connection import Connection, run_prefix
from services.buffer.core.ids import LeaseId
from services.buffer.core.records import SideRows, SideShape
from services.common.errors import Code, ServiceError

_UNFLIPPED_MS = 3_600_000


class SidePayloads:
    """Side payloads over a connection."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._client = connection.client

    @staticmethod
    def suffix(lease: LeaseId) -> str:
        """Name of all that was put under a lease; a lease never comes twice."""
        return f"{lease.count}.{lease.rollback}"

    async def put(self, run_id: str, lease: LeaseId, shape: SideShape, meta: bytes, rows: Sequence[SideRows]) -> None:
        """Stores rows; the same rows again change nothing. Raises LEASE_LOST."""
        prefix = run_prefix(run_id)
        key = f"{prefix}x:{lease.ordinal:012d}:{self.suffix(lease)}"
        fields = {f"{shape.index}/{shape.name}": meta}
        fields |= {f"{shape.index}/{shape.name}/{one.start}/{one.count}": one.data for one in rows}
        async with self._connection.errors():
            state, held = await self._client.hmget(f"{prefix}g:{lease.ordinal:012d}", "state", "lease")
            if state != b"LEASED" or held != lease.text.encode():
                raise ServiceError(
                    Code.FAILED_PRECONDITION,
                    "LEASE_LOST",
                    f"Lease {lease.text} of run {run_id} is not held any more; lease a prompt again.",
                    run_id=run_id,
                    lease_id=lease.text,
                )
            pipe = self._client.pipeline(transaction=False)
            pipe.hset(key, mapping=fields)
            pipe.pexpire(key, _UNFLIPPED_MS)
            await pipe.execute()

    async def problem(self, run_id: str, lease: LeaseId, wanted: Sequence[SideShape]) -> str:
        """One sentence about rows that were not put under the lease, or an empty string."""
        pieces = await self._pieces(run_id, lease.ordinal, self.suffix(lease))
        for shape in wanted:
            reached = 0
            for start, count in pieces.get((shape.index, shape.name), ()):
                if start > reached:
                    break
                reached = max(reached, start + count)
            if reached < shape.row_count:
                return (
                    f"sample {shape.index} names the side payload {shape.name!r} of {shape.row_count} rows, but under"
                    f" lease {lease.text} only its first {reached} are stored; put the others first."
                )
        return ""

    async def meta(self, run_id: str, ordinal: int, index: int, name: str) -> bytes | None:
        """What was said of a payload of a stored group."""
        suffix = await self._suffix_of(run_id, ordinal)
        if suffix is None:
            return None
        async with self._connection.errors():
            return await self._client.hget(f"{run_prefix(run_id)}x:{ordinal:012d}:{suffix}", f"{index}/{name}")

    async def rows(self, run_id: str, ordinal: int, shape: SideShape, start: int, end: int) -> AsyncIterator[SideRows]:
        """Rows [start, end) of a payload of a stored group, in the pieces they were put in."""
        suffix = await self._suffix_of(run_id, ordinal) or ""
        key = f"{run_prefix(run_id)}x:{ordinal:012d}:{suffix}"
        pieces = await self._pieces(run_id, ordinal, suffix)
        reached = start
        for first, count in pieces.get((shape.index, shape.name), ()):
            last = min(first + count, end)
            if last <= reached or first > reached:
                continue
            async with self._connection.errors():
                data = await self._client.hget(key, f"{shape.index}/{shape.name}/{first}/{count}")
            if data is None:
                return
            size = shape.row_bytes
            yield SideRows(reached, last - reached, data[(reached - first) * size : (last - first) * size])
            reached = last

    async def _suffix_of(self, run_id: str, ordinal: int) -> str | None:
        async with self._connection.errors():
            suffix = await self._client.hget(f"{run_prefix(run_id)}g:{ordinal:012d}", "side")
        return suffix.decode() if suffix else None

    async def _pieces(self, run_id: str, ordinal: int, suffix: str) -> dict[tuple[int, str], list[tuple[int, int]]]:
        """(first row, rows) of all pieces by (sample, name), in order."""
        async with self._connection.errors():
            fields = await self._client.hkeys(f"{run_prefix(run_id)}x:{ordinal:012d}:{suffix}")
        found: dict[tuple[int, str], list[tuple[int, int]]] = {}
        for field in fields:
            parts = field.decode().split("/")
            if len(parts) == 4:
                found.setdefault((int(parts[0]), parts[1]), []).append((int(parts[2]), int(parts[3])))
        return {key: sorted(places) for key, places in found.items()}
