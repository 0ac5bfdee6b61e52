"""Decided blocks of a changing mixture, and what a curriculum function is told, in a Redis or Valkey server.

One hash a run, tetrarch:{run_id}:blocks: block number → block as JSON; the first writer of a number wins. Its field
"last" is the highest number.
"""

from __future__ import annotations

from collections.abc import Sequence

from services.buffer.adapters.redis_connection import Connection, run_prefix

_PART = 256


class RedisBlocks:
    """BlockStore over a connection."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._client = connection.client

    async def read_block(self, run_id: str, index: int) -> str | None:
        """A decided block."""
        async with self._connection.errors():
            found = await self._client.hget(run_prefix(run_id) + "blocks", str(index))
        return None if found is None else found.decode()

    async def decide_block(self, run_id: str, index: int, text: str) -> str:
        """Keeps a block unless there is one; returns the one that is kept. Raises RUN_NOT_FOUND."""
        _, kept = await self._connection.run_script("block", run_id, [index, text])
        return kept.decode()

    async def last_block(self, run_id: str) -> tuple[int, str] | None:
        """The newest decided block."""
        async with self._connection.errors():
            last = await self._client.hget(run_prefix(run_id) + "blocks", "last")
        text = await self.read_block(run_id, int(last)) if last is not None else None
        return None if text is None else (int(last), text)

    async def rewards(self, run_id: str, ordinals: Sequence[int]) -> list[list[float]]:
        """Rewards of the samples of each group, empty where there are none (yet)."""
        prefix, found = run_prefix(run_id), []
        for at in range(0, len(ordinals), _PART):
            async with self._connection.errors():
                pipe = self._client.pipeline(transaction=False)
                for ordinal in ordinals[at : at + _PART]:
                    pipe.hget(f"{prefix}g:{ordinal:012d}", "rewards")
                answers = await pipe.execute()
            found += [[float(text) for text in (value or b"").split(b",") if text] for value in answers]
        return found

    async def trained_steps(self, run_id: str) -> int:
        """Steps committed so far."""
        async with self._connection.errors():
            return int(await self._client.hget(run_prefix(run_id) + "run", "committed_step") or -1) + 1
