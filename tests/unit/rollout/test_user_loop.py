"""Functions of the user can block, crash and never end without harm to the node's loop."""

import asyncio
import time

import pytest

from services.common.errors import ServiceError
from services.rollout.core.user_loop import UserLoop


@pytest.fixture
def loop():
    user_loop = UserLoop("mine.generate", stall_seconds=0.2)
    yield user_loop
    user_loop.close()


async def test_a_result_comes_back(loop):
    async def work():
        await asyncio.sleep(0)
        return 3

    assert await loop.run(work, 1.0) == 3


@pytest.mark.parametrize("error", [ValueError("boom"), SystemExit("boom"), KeyboardInterrupt("boom")])
async def test_whatever_is_raised_is_one_sentence_with_the_line(loop, error):
    async def crash():
        raise error

    with pytest.raises(ServiceError, match=rf"raised {type(error).__name__}: boom .*test_user_loop.py:\d+"):
        await loop.run(crash, 1.0)
    assert await loop.run(lambda: asyncio.sleep(0, 5), 1.0) == 5


async def test_a_blocking_function_is_named_and_the_node_goes_on(loop):
    async def block():
        time.sleep(1.5)  # noqa: ASYNC251 - this is the mistake that is tested

    turns = 0

    async def count():
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0.01)

    counter = asyncio.create_task(count())
    with pytest.raises(ServiceError, match=r"did not end within 1 s .*blocks at .*time.sleep\(1.5\)"):
        await loop.run(block, 0.8)
    counter.cancel()
    assert turns > 20
    assert loop.abandoned_count == 1
    assert await loop.run(lambda: asyncio.sleep(0, 7), 0.5) == 7


async def test_a_function_that_never_ends_meets_its_deadline(loop):
    with pytest.raises(ServiceError, match="did not end within") as caught:
        await loop.run(lambda: asyncio.sleep(60), 0.1)
    assert caught.value.reason == "GENERATE_TIMEOUT"
    assert loop.abandoned_count == 0
