"""Batcher: one outcome per item, bounded batches."""

import asyncio

import pytest

from services.rollout.core.batching import Batcher


async def test_items_that_arrive_while_senders_are_busy_share_a_batch():
    sizes, gate = [], asyncio.Event()

    async def flush(items):
        sizes.append(len(items))
        await gate.wait()
        return [item * 2 for item in items]

    batcher = Batcher(flush, max_items=4, concurrency=1)
    tasks = [asyncio.create_task(batcher.submit(0))]
    await asyncio.sleep(0.01)
    tasks += [asyncio.create_task(batcher.submit(i)) for i in range(1, 7)]
    await asyncio.sleep(0.01)
    gate.set()
    assert await asyncio.gather(*tasks) == [0, 2, 4, 6, 8, 10, 12]
    assert sizes == [1, 4, 2]


async def test_weight_bounds_a_batch_but_a_heavy_item_still_goes():
    sizes = []

    async def flush(items):
        sizes.append(list(items))
        return items

    batcher = Batcher(flush, max_items=10, concurrency=1, max_weight=5, weigh=float)
    assert await asyncio.gather(*(batcher.submit(i) for i in (9, 2, 3, 1))) == [9, 2, 3, 1]
    assert sizes == [[9], [2, 3], [1]]


async def test_a_failed_batch_fails_its_items_only():
    async def flush(items):
        if "bad" in items:
            raise ValueError("bad")
        return items

    batcher = Batcher(flush, max_items=1, concurrency=2)
    good, bad = await asyncio.gather(batcher.submit("good"), batcher.submit("bad"), return_exceptions=True)
    assert good == "good"
    assert isinstance(bad, ValueError)


async def test_a_missing_result_is_an_error():
    async def flush(items):
        return []

    with pytest.raises(RuntimeError, match="0 results came for a batch of 1"):
        await Batcher(flush, max_items=1, concurrency=1).submit(1)


async def test_an_item_that_comes_the_moment_a_sender_ends_is_sent():
    async def flush(items):
        return items

    batcher = Batcher(flush, max_items=4, concurrency=1)
    async with asyncio.timeout(5):
        assert await batcher.submit(1) == 1
        # This runs before the loop has told the batcher that its sender is done.
        assert await batcher.submit(2) == 2
