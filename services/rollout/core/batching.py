"""Batches of calls without a timer: while all senders are busy, what arrives meanwhile forms the next batch.

With little traffic every item leaves at once and alone; with much, batches grow. Nothing is known of what
the items are. Invariants: every submitted item gets exactly one outcome (its result, or the exception of its
batch); a batch never exceeds `max_items` and, unless a single item does, `max_weight`.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")


class Batcher(Generic[ItemT, ResultT]):
    """Collects items into batches.

    Args:
        flush: sends a batch and returns one result per item, in order.
        max_items: most items of a batch.
        max_weight: most weight of a batch, as measured by `weigh`.
        concurrency: batches under way at the same time.
        weigh: weight of an item (bytes, say).
    """

    def __init__(
        self,
        flush: Callable[[list[ItemT]], Awaitable[Sequence[ResultT]]],
        *,
        max_items: int,
        concurrency: int,
        max_weight: float = float("inf"),
        weigh: Callable[[ItemT], float] = lambda item: 0.0,
    ) -> None:
        self._flush = flush
        self._max_items = max_items
        self._max_weight = max_weight
        self._concurrency = concurrency
        self._weigh = weigh
        self._queue: deque[tuple[ItemT, asyncio.Future[ResultT]]] = deque()
        self._senders: set[asyncio.Task[None]] = set()
        # Not len(_senders): a task leaves that set a turn of the loop after it found the queue empty, and an item that
        # comes in between would wait for a sender that sends no more.
        self._sending = 0

    async def submit(self, item: ItemT) -> ResultT:
        """Result of one item. A cancelled caller's item is still sent when its batch has left."""
        future: asyncio.Future[ResultT] = asyncio.get_running_loop().create_future()
        self._queue.append((item, future))
        if self._sending < self._concurrency:
            self._sending += 1
            task = asyncio.create_task(self._send())
            self._senders.add(task)
            task.add_done_callback(self._senders.discard)
        return await future

    def _next_batch(self) -> list[tuple[ItemT, asyncio.Future[ResultT]]]:
        batch: list[tuple[ItemT, asyncio.Future[ResultT]]] = []
        weight = 0.0
        while self._queue and len(batch) < self._max_items:
            item, future = self._queue[0]
            if future.done():  # its caller has gone
                self._queue.popleft()
                continue
            weight += self._weigh(item)
            if batch and weight > self._max_weight:
                break
            batch.append(self._queue.popleft())
        return batch

    async def _send(self) -> None:
        try:
            await asyncio.sleep(0)  # let the callers of this turn of the loop join the batch
            await self._send_all()
        finally:
            self._sending -= 1

    async def _send_all(self) -> None:
        while batch := self._next_batch():
            try:
                results = await self._flush([item for item, _ in batch])
                if len(results) != len(batch):
                    raise RuntimeError(f"{len(results)} results came for a batch of {len(batch)}")  # noqa: TRY301
            except asyncio.CancelledError:
                for _, future in batch:
                    future.cancel()
                raise
            except Exception as error:  # every caller of the batch must learn of it
                for _, future in batch:
                    if not future.done():
                        future.set_exception(error)
            else:
                for (_, future), result in zip(batch, results, strict=True):
                    if not future.done():
                        future.set_result(result)
