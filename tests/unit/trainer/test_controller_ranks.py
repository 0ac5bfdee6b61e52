"""Rank processes: real ones, which have not been given a model, so that they start in seconds."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from services.trainer.adapters.local_ranks import LocalRanks
from services.trainer.core.commands import ListWeights, Shutdown
from services.trainer.core.ports import RanksFailed


@pytest.fixture
async def ranks(tmp_path):
    made = LocalRanks(2, tmp_path, start_timeout=50.0)
    await made.start()
    yield made
    await made.stop()


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def test_stop_leaves_nothing_behind(ranks):
    pids, directory = ranks.pids, Path(ranks._directory)
    assert await ranks.call_all(Shutdown(), 30.0) == [None, None]
    await ranks.stop()
    assert not any(alive(pid) for pid in pids)
    assert not await asyncio.to_thread(directory.exists)
    with pytest.raises(RanksFailed):
        await ranks.call(0, ListWeights(), 5.0)


async def test_a_reported_error_names_rank_command_and_error(ranks):
    with pytest.raises(RanksFailed, match=r"Rank 1 failed in ListWeights: .*before Setup") as caught:
        await ranks.call(1, ListWeights(), 30.0)
    assert caught.value.answered
    assert caught.value.cause == "COMMAND_OUT_OF_ORDER"
    assert ranks.failure is caught.value
    with pytest.raises(RanksFailed, match="Rank 1 failed"):
        await ranks.call(0, ListWeights(), 5.0)


async def test_a_killed_rank_ends_the_call_of_the_others(ranks):
    os.kill(ranks.pids[0], signal.SIGSTOP)
    call = asyncio.create_task(ranks.call_all(ListWeights(), 60.0))
    await asyncio.sleep(0.1)
    # The stopped rank 0 would never answer; that rank 1 dies must end the call at once.
    os.kill(ranks.pids[1], signal.SIGKILL)
    with pytest.raises(RanksFailed, match="Rank 1 ") as caught:
        await asyncio.wait_for(call, 10.0)
    assert "rank-1.log" in caught.value.message


async def test_a_silent_rank_is_given_up(ranks):
    os.kill(ranks.pids[0], signal.SIGSTOP)
    with pytest.raises(RanksFailed, match="Rank 0 did not answer ListWeights within 0 s") as caught:
        await ranks.call(0, ListWeights(), 0.2)
    assert not caught.value.answered


async def test_an_idle_rank_that_dies_is_noticed(ranks):
    os.kill(ranks.pids[1], signal.SIGKILL)
    for _ in range(100):
        if ranks.failure:
            break
        await asyncio.sleep(0.05)
    assert ranks.failure
    assert "Rank 1 was ended by signal 9" in ranks.failure.message


async def test_a_rank_that_cannot_start_says_why(tmp_path):
    made = LocalRanks(1, tmp_path, start_timeout=50.0, module="services.trainer.no_such_module")
    try:
        with pytest.raises(RanksFailed, match=r"No module named services\.trainer\.no_such_module"):
            await made.start()
    finally:
        await made.stop()
