"""Large tensors beside samples: put in rows under the lease of their prompt, read in rows once the group is stored."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

from services.buffer.core import ids
from services.buffer.core.ports import Store
from services.buffer.core.records import SideRows, SideShape
from services.common.errors import Code, ServiceError, invalid_field


class SideUse:
    """Use cases of side payloads over a store."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def put(
        self, run_id: str, lease_id: str, sample_id: str, part: tuple[SideShape, bytes, Sequence[SideRows]]
    ) -> None:
        """Stores rows of a side payload: (its shape, what it is, rows). Raises LEASE_LOST, SAMPLE_NOT_FOUND."""
        shape, meta, rows = part
        ordinal, index = ids.parse_sample_id(run_id, sample_id)
        lease = ids.parse_lease_id(lease_id)
        if lease is None or lease.ordinal != ordinal:
            raise invalid_field("lease_id", lease_id, f"it is no lease of the prompt of sample {sample_id}")
        await self._store.put_side(run_id, lease, replace(shape, index=index), meta, rows)

    async def meta(self, run_id: str, sample_id: str, name: str) -> bytes:
        """What a stored side payload is. Raises SAMPLE_NOT_FOUND, PAYLOAD_NOT_FOUND."""
        await self._store.run_incarnation(run_id)
        meta = await self._store.side_meta(run_id, *ids.parse_sample_id(run_id, sample_id), name)
        if meta is None:
            raise ServiceError(
                Code.NOT_FOUND,
                "PAYLOAD_NOT_FOUND",
                f"Sample {sample_id!r} of run {run_id} has no side payload {name!r}, or it was freed.",
                sample_id=sample_id,
                name=name,
            )
        return meta

    async def rows(
        self, run_id: str, sample_id: str, shape: SideShape, start: int, end: int
    ) -> AsyncIterator[SideRows]:
        """Rows [start, end) of a side payload. Raises PAYLOAD_NOT_FOUND when it was freed meanwhile."""
        ordinal, index = ids.parse_sample_id(run_id, sample_id)
        reached = start
        async for rows in self._store.side_rows(run_id, ordinal, replace(shape, index=index), start, end):
            reached = rows.start + rows.count
            yield rows
        if reached < end:
            await self.meta(run_id, sample_id, shape.name)
            raise ServiceError(
                Code.INTERNAL, "PAYLOAD_LOST", f"Rows {reached} to {end} of {shape.name!r} of {sample_id} are gone."
            )
