"""The last k checkpoints: each can be gone back to without losing or repeating a group."""

from __future__ import annotations

import pytest

from services.common.errors import Code, ServiceError
from tests.contract.buffer_v1.driver import group_ids, refusal

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def checkpoints(driver):
    run = (await driver.call("GetRun")).run
    return [(one.step, one.path, one.frontier_ordinal) for one in run.checkpoints]


async def trained_and_saved(driver, count):
    """Groups by step of `count` steps, each with a checkpoint."""
    groups = {}
    for step in range(count):
        groups[step] = await driver.step(step)
        await driver.checkpoint(step)
    return groups


async def test_the_last_k_are_kept_with_their_payload(driver):
    await driver.start(trainer={"keep_checkpoints": 2, "stale_policy": "keep"})
    groups = await trained_and_saved(driver, 4)
    assert await checkpoints(driver) == [(2, "ckpt/2", 6), (3, "ckpt/3", 8)]
    for step, names in groups.items():
        for name in names:
            group = (await driver.call("GetGroup", group_id=name)).group
            assert group.samples[0].HasField("tokens") == (step > 2), f"step {step}"
    await driver.session()
    answer = await driver.restore(2)
    assert answer.returned_group_count == 2
    assert await checkpoints(driver) == [(2, "ckpt/2", 6)]
    assert (await driver.call("GetRun")).run.checkpoint_path == "ckpt/2"
    await driver.publish(3)
    assert group_ids(await driver.take(3)) == groups[3]


@pytest.mark.parametrize("back_to", [1, 2, 3])
async def test_going_back_loses_and_repeats_nothing(driver, back_to):
    await driver.start(trainer={"keep_checkpoints": 3, "stale_policy": "drop", "max_staleness": 1})
    history = await trained_and_saved(driver, 4)
    await driver.produce()
    await driver.session()
    await driver.restore(back_to)
    await driver.publish(back_to + 1)
    trained = [name for step in range(back_to + 1) for name in history[step]]
    for step in range(back_to + 1, 8):
        trained += await driver.step(step)
        await driver.checkpoint(step)
    numbers = sorted(int(name.rpartition("-")[2]) for name in trained)
    assert numbers == list(range(16))
    stats = await driver.stats()
    assert (stats.consumed_count, stats.evicted_count) == (16, 0)


async def test_an_older_record_changes_nothing(driver):
    await driver.start(trainer={"keep_checkpoints": 2})
    await trained_and_saved(driver, 3)
    before = await checkpoints(driver)
    await driver.checkpoint(1)
    assert await checkpoints(driver) == before
    await driver.checkpoint(2)
    assert await checkpoints(driver) == before


async def test_a_run_from_before_there_was_a_list_goes_on(driver, valkey_url):
    from services.buffer.adapters.redis_connection import Connection, run_prefix

    await driver.start(trainer={"keep_checkpoints": 2, "stale_policy": "keep"})
    groups = await trained_and_saved(driver, 2)
    groups[2] = await driver.step(2)
    connection = Connection(valkey_url)
    prefix = run_prefix(driver.run_id)
    await connection.client.hdel(prefix + "run", "checkpoints", "holds", "keep_checkpoints", "revision", "admitted")
    await connection.client.delete(prefix + "held", *(f"{prefix}{name}:since" for name in ("ready", "leased")))
    await connection.close()
    assert await checkpoints(driver) == [(1, "ckpt/1", 0)]
    await driver.checkpoint(2)
    assert await checkpoints(driver) == [(2, "ckpt/2", 6)]
    group = (await driver.call("GetGroup", group_id=groups[2][0])).group
    assert not group.samples[0].HasField("tokens")
    await driver.step(3)


async def test_a_rollback_that_was_cut_off_goes_on(driver, monkeypatch):
    from services.buffer.adapters import redis_store

    await driver.start(trainer={"keep_checkpoints": 3, "stale_policy": "keep"})
    history = await trained_and_saved(driver, 4)
    monkeypatch.setattr(redis_store, "RESTORE_CHUNK", 3)
    once, answers = redis_store.RedisStore._run, []

    async def dies(self, script, run_id, args, **context):
        if script == "restore" and answers:
            raise ServiceError(Code.UNAVAILABLE, "STORE_UNAVAILABLE", "gone")
        answers.append(await once(self, script, run_id, args, **context))
        return answers[-1]

    await driver.session()
    with monkeypatch.context() as patch:
        patch.setattr(redis_store.RedisStore, "_run", dies)
        assert (await refusal(driver.restore(1))).reason == "STORE_UNAVAILABLE"
    stats = await driver.stats()
    assert (stats.consumed_count, stats.ready_count) == (5, 3)
    version = (await driver.call("ReserveVersion", trainer_epoch=driver.epoch)).version
    error = await refusal(driver.call("PublishVersion", trainer_epoch=driver.epoch, version=version, step_count=2))
    assert error.reason == "RESTORING"
    assert (await refusal(driver.take(2))).reason == "RESTORING"
    await driver.session()
    assert (await driver.restore(1)).returned_group_count == 1
    await driver.publish(2)
    assert group_ids(await driver.take(2)) == history[2]
    assert (await driver.stats()).consumed_count == 4
