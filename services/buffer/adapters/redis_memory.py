"""How much memory the store uses, and whether it may take more payload.

A store that is asked for more than its maxmemory refuses every write; payload is refused earlier, so that the calls
that free memory still pass. Invariant: a refusal is never made from an old reading.
"""

from __future__ import annotations

import time

from services.buffer.adapters.redis_connection import Connection

_FRESH_SECONDS = 0.5
_SHARE = 0.9
"""Share of maxmemory that payload may fill."""


class StoreMemory:
    """Readings of the store's memory, shared by all calls of this server.

    Args:
        connection: to the store.
        max_bytes: bound set by the user; None: 0.9 of the store's maxmemory alone.
    """

    def __init__(self, connection: Connection, max_bytes: int | None) -> None:
        self._connection = connection
        self._max_bytes = max_bytes
        self._used = self._limit = 0
        self._tightest = 0.0
        self._written = 0
        self._read_at = float("-inf")

    async def usage(self) -> tuple[int, int]:
        """(bytes used, bytes above which payload is refused; 0 without a bound)."""
        if time.monotonic() - self._read_at > _FRESH_SECONDS:
            await self._read()
        return self._used, self._limit

    async def admit(self, size: int) -> None:
        """Returns when `size` bytes of payload may be written. Raises STORE_FULL."""
        await self.usage()
        if not self._fits(size):
            await self._read()
            if not self._fits(size):
                raise self._connection.full(
                    f"uses {self._used:,} of the {self._limit:,} bytes that store_max_bytes or 0.9 of its maxmemory"
                    " allow"
                )
        self._written += size

    def _fits(self, size: int) -> bool:
        if not self._limit:
            return True
        # In a cluster the fullest server counts: a run lives on one of them.
        return self._used + self._written + size <= self._limit and self._tightest < 1.0

    async def _read(self) -> None:
        servers = await self._connection.info("memory")
        used = sum(int(one["used_memory"]) for one in servers)
        bounds = [(int(one["used_memory"]), _SHARE * int(one.get("maxmemory", 0))) for one in servers]
        shares = [taken / bound for taken, bound in bounds if bound]
        limits = [int(sum(bound for _, bound in bounds))] if shares else []
        if self._max_bytes is not None:
            limits.append(self._max_bytes)
        self._used, self._limit = used, min(limits, default=0)
        self._tightest = max(shares, default=0.0)
        self._written, self._read_at = 0, time.monotonic()
