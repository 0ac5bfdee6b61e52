"""What becomes of stale groups, who picks a batch, how many groups are admitted, when a filter ends the run."""

from __future__ import annotations

import pytest
from tetrarch.buffer.v1 import run_pb2

from services.buffer.adapters.redis_connection import Connection, run_prefix
from tests.contract.buffer_v1 import chooser
from tests.contract.buffer_v1.driver import group_ids, refusal

pytestmark = pytest.mark.asyncio(loop_scope="module")
_HERE = "tests.contract.buffer_v1.chooser"


@pytest.fixture(autouse=True)
def _clean():
    chooser.ASKED.clear()


async def ordinals(driver, step, count=2):
    return [int(name.rpartition("-")[2]) for name in group_ids(await driver.take(step, count))]


async def test_kept_groups_are_trained_however_old(driver):
    await driver.start(trainer={"stale_policy": "keep"})
    await driver.produce()
    for step in range(3):
        await driver.publish(step)
    batch = await driver.take(0)
    assert [header.min_version for header in batch.samples] == [1] * 4
    assert batch.policy_version == 4
    assert dict((await driver.stats()).staleness_histogram) == {3: 2}


async def test_dropping_spares_what_a_rollback_gave_back(driver):
    await driver.start(trainer={"stale_policy": "drop", "max_staleness": 1})
    await driver.step(0)
    await driver.checkpoint(0)
    await driver.produce()
    trained = await ordinals(driver, 1)
    await driver.commit(1)
    await driver.session()
    await driver.restore(0)
    for _ in range(3):
        await driver.publish(1)
    stats = await driver.stats()
    assert (stats.evicted_count, stats.pending_count >= 2) == (0, True)
    again = [lease.prompt.ordinal for lease in await driver.produce()]
    assert set(trained) <= set(again)
    # Now they are of a new attempt, and drop like all others.
    for _ in range(2):
        await driver.publish(1)
    assert (await driver.stats()).evicted_by_reason["STALE"] == len(again)


async def test_a_function_of_the_user_judges_stale_groups(driver):
    await driver.start(trainer={"stale_policy_path": f"{_HERE}.by_reward"}, rollout={"rollout_batch_size": 4})
    leases = (await driver.lease(4)).leases
    rewards = (2.0, 1.0, 0.0, 2.0)
    await driver.put(*(driver.finished(a, 1, reward=reward) for a, reward in zip(leases, rewards, strict=True)))
    await driver.publish(0)
    assert await ordinals(driver, 0, 4) == []
    stats = await driver.stats()
    assert (stats.ready_count, stats.pending_count, stats.evicted_by_reason["STALE"]) == (2, 1, 1)
    await ordinals(driver, 0, 4)
    assert sorted(chooser.ASKED) == [0, 1, 2, 3], "nobody is asked twice at one version"
    await driver.produce()
    assert await ordinals(driver, 0, 4) == [0, 3, 1, 4]


async def test_a_policy_that_answers_nonsense_is_named(driver):
    await driver.start(trainer={"stale_policy_path": f"{_HERE}.unsure"})
    await driver.produce()
    await driver.publish(0)
    error = await refusal(driver.take(0))
    assert error.reason == "STALE_POLICY_FAILED"
    assert "chooser.unsure' returned 'perhaps'" in error.message
    assert (await driver.stats()).ready_count == 2


async def test_a_function_that_is_not_there_refuses_the_run(driver):
    error = await refusal(driver.create(trainer={"stale_policy_path": "tests.contract.buffer_v1.chooser.absent"}))
    assert error.reason == "FUNCTION_NOT_LOADABLE"
    assert "no function 'absent'" in error.message


async def test_a_function_of_the_user_picks_the_batch(driver):
    await driver.start(data={"buffer_filter_path": f"{_HERE}.newest_first"}, trainer={"max_staleness": 1})
    await driver.produce()
    assert await ordinals(driver, 0) == [3, 2]
    assert await ordinals(driver, 0) == [3, 2], "a reserved step is not asked about again"
    assert chooser.ASKED == [(2, 0, 4)]
    await driver.commit(0)
    assert await ordinals(driver, 1) == [1, 0]


async def test_a_filter_that_picks_nothing_is_asked_once_per_buffer(driver):
    await driver.start(data={"buffer_filter_path": f"{_HERE}.nothing"}, trainer={"max_staleness": 1})
    await driver.produce(2)
    for _ in range(3):
        assert not (await driver.take(0)).samples
    assert chooser.ASKED == [2]
    await driver.produce(1)
    assert not (await driver.take(0)).samples
    assert chooser.ASKED == [2, 3]
    assert (await driver.stats()).ready_count == 3


async def test_a_filter_that_picks_wrongly_is_named(driver):
    await driver.start(data={"buffer_filter_path": f"{_HERE}.foreign"})
    await driver.produce()
    error = await refusal(driver.take(0))
    assert error.reason == "BUFFER_FILTER_FAILED"
    assert "a group twice" in error.message


async def test_the_surplus_of_over_sampling_waits_for_the_next_step(driver):
    await driver.start(rollout={"over_sampling_batch_size": 5}, trainer={"max_staleness": 0, "stale_policy": "keep"})
    assert len(await driver.produce()) == 5
    assert await ordinals(driver, 0) == [0, 1]
    await driver.commit(0)
    await driver.publish(1)
    assert len(await driver.produce()) == 2, "three of the last step are there already"
    assert await ordinals(driver, 1) == [2, 3]
    stats = await driver.stats()
    assert (stats.ready_count, stats.evicted_count) == (3, 0)


async def reject(driver, count):
    leases = (await driver.lease(count)).leases
    for lease in leases:
        await driver.call("ReleaseLeases", lease_ids=[lease.lease_id], evict_reason="FILTERED:zero_std_1.0")
    return len(leases)


async def test_each_rejected_group_draws_one_more_and_too_many_end_the_run(driver):
    await driver.start(rollout={"max_filter_rejections": 3})
    assert await reject(driver, 2) == 2
    assert (await driver.stats()).capacity == 2
    await driver.produce(1)
    assert await reject(driver, 1) == 1
    assert await reject(driver, 1) == 1
    assert (await driver.call("GetRun")).run.state == run_pb2.RUN_STATE_ACTIVE, "a stored group begins the count anew"
    assert await reject(driver, 1) == 1
    run = (await driver.call("GetRun")).run
    assert run.state == run_pb2.RUN_STATE_FAILED
    assert "rejected 3 groups in a row, the last one as FILTERED:zero_std_1.0" in run.reason
    error = await refusal(driver.take(0))
    assert error.reason == "RUN_FINISHED"
    assert "rejected 3 groups in a row" in error.message
    await driver.create(rollout={"max_filter_rejections": 30})
    assert (await driver.lease(1)).leases


async def test_reasons_are_counted_apart_up_to_a_bound(driver):
    await driver.start(trainer={"max_staleness": 200}, rollout={"max_filter_rejections": 1000})
    for at in range(103):
        (lease,) = (await driver.lease(1)).leases
        await driver.call("ReleaseLeases", lease_ids=[lease.lease_id], evict_reason=f"FILTERED:r{at}")
    counts = dict((await driver.stats()).evicted_by_reason)
    assert counts["FILTERED"] == 3
    assert len(counts) == 101


async def test_versions_that_a_restart_of_the_store_skipped_make_no_group_stale(driver, valkey_url):
    await driver.start(trainer={"stale_policy": "drop", "max_staleness": 1}, rollout={"rollout_batch_size": 3})
    leases = (await driver.lease(6)).leases
    await driver.put(*(driver.finished(lease, 1) for lease in leases[:3]))
    connection = Connection(valkey_url)
    # As a store does that may have forgotten the last it gave.
    await connection.client.hincrby(run_prefix(driver.run_id) + "run", "reserved_version", 100_000)
    await connection.close()
    assert await driver.publish(0) == 100_002
    await driver.put(driver.finished(leases[3], 1))
    stats = await driver.stats()
    assert (stats.ready_count, stats.evicted_count) == (4, 0)
    assert await ordinals(driver, 0, 3) == [0, 1, 2]
    assert dict((await driver.stats()).staleness_histogram) == {1: 3}
    await driver.commit(0)
    await driver.publish(1)
    assert (await driver.stats()).evicted_by_reason["STALE"] == 1, "from then on versions count as ever"


async def test_the_same_version_after_more_steps_moves_admission_on_and_makes_nothing_older(driver):
    await driver.start()
    version = (await driver.call("GetRun")).run.policy_version
    for step in range(3):
        assert len(await driver.produce()) == 2
        await driver.take(step)
        await driver.commit(step)
        for steps, room in ((step, 0), (step + 1, 2), (step + 1, 2)):
            await driver.call("PublishVersion", trainer_epoch=driver.epoch, version=version, step_count=steps)
            leases = (await driver.lease()).leases
            assert len(leases) == room
            await driver.call("ReleaseLeases", lease_ids=[lease.lease_id for lease in leases])
    stats = await driver.stats()
    assert (stats.policy_version, stats.consumed_count, dict(stats.evicted_by_reason)) == (version, 6, {})
