"""What the store may do to the buffer: forget, fill up, go away; and what a draining server does to its callers."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest
from prometheus_client import REGISTRY

from services.buffer.adapters.redis_connection import Connection
from services.buffer.app import App
from services.buffer.config import BufferSettings
from services.common.channel import open_channel
from services.common.errors import Code
from tests.contract.buffer_v1.driver import Driver, refusal

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_a_store_that_may_lose_data_is_reported(connection):
    client = connection.client
    assert await connection.warnings() == []
    try:
        await client.config_set("appendfsync", "no")
        await client.config_set("maxmemory", "1gb")
        await client.config_set("maxmemory-policy", "allkeys-lru")
        slow, evicting = await connection.warnings()
        assert "appendfsync is 'no'" in slow
        assert "maxmemory-policy is 'allkeys-lru'" in evicting
        await client.config_set("appendonly", "no")
        assert "keeps no append-only file" in (await connection.warnings())[0]
    finally:
        await client.config_set("appendonly", "yes")
        await client.config_set("appendfsync", "everysec")
        await client.config_set("maxmemory-policy", "noeviction")
        await client.config_set("maxmemory", "0")


async def test_a_full_store_pushes_back_and_loses_nothing(driver, connection):
    await driver.start()
    lease = (await driver.lease(1)).leases[0]
    await connection.client.config_set("maxmemory", "1mb")
    try:
        error = await refusal(driver.put(driver.finished(lease, 1)))
        assert (error.code, error.reason, error.retry_seconds) == (Code.RESOURCE_EXHAUSTED, "STORE_FULL", 5.0)
    finally:
        await connection.client.config_set("maxmemory", "0")
    assert (await driver.stats()).leased_count == 1
    assert await driver.put(driver.finished(lease, 1)) == ["STORED"]


async def test_a_full_store_still_lets_the_trainer_make_room(driver, connection):
    await driver.start()
    await driver.produce()
    await connection.client.config_set("maxmemory", "1mb")
    try:
        assert len((await driver.take(0)).samples) == 4
        assert await driver.commit(0) == 2
        before = (await driver.stats()).payload_bytes
        await driver.checkpoint(0)
        assert (await driver.stats()).payload_bytes < before
        await driver.session()
        await driver.restore(0)
        await driver.publish(1)
        lease = (await driver.lease(1)).leases[0]
        assert (await refusal(driver.put(driver.finished(lease, 2)))).reason == "STORE_FULL"
    finally:
        await connection.client.config_set("maxmemory", "0")
    assert await driver.put(driver.finished(lease, 2)) == ["STORED"]


async def test_a_data_file_that_vanishes_fails_no_prompt(driver, data, tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(data[0].read_bytes())
    await driver.start(data={"prompt_data": str(path), "max_prompt_attempts": 1})
    path.rename(tmp_path / "elsewhere.jsonl")
    assert (await refusal(driver.lease())).reason == "DATA_NOT_FOUND"
    assert (await driver.stats()).pending_count == 2
    (tmp_path / "elsewhere.jsonl").rename(path)
    assert len((await driver.lease()).leases) == 2


async def test_a_draining_server_answers_its_waiting_callers(valkey_url: str, data: tuple[Path, Path]):
    app = App(BufferSettings(port=0, store_url=valkey_url, drain_seconds=10))
    await app.start()
    channel = open_channel(f"127.0.0.1:{app.server.port}", "buffer")
    driver = Driver(channel, "draining", *data)
    await driver.start()
    await driver.produce(1)
    waiting = asyncio.create_task(driver.take(0, wait=60))
    await asyncio.sleep(0.1)
    started = time.monotonic()
    await app.stop()
    assert not (await waiting).samples
    assert time.monotonic() - started < 5
    await channel.close()


async def test_a_store_that_forgot_the_scripts_is_taught_again(driver, connection):
    await driver.start()
    await connection.client.script_flush()
    assert len((await driver.lease()).leases) == 2


async def test_scripts_whose_answers_got_lost_may_run_again(driver, monkeypatch):
    once = Connection.run_script

    async def twice(self, name, run_id, args):
        await once(self, name, run_id, args)
        return await once(self, name, run_id, args)

    monkeypatch.setattr(Connection, "run_script", twice)
    assert (await driver.create(data={"rollout_max_prompt_len": 4})).skipped_row_count == 10
    await driver.start()
    answer = await driver.lease()
    finished = [driver.finished(lease, answer.policy_version) for lease in answer.leases]
    assert await driver.put(*finished) == ["STORED", "STORED"]
    batch = await driver.take(0)
    assert len(await driver.fetch([sample.sample_id for sample in batch.samples])) == 4
    assert await driver.commit(0) == 2
    assert (await driver.create()).skipped_row_count == 10
    assert (await driver.stats()).consumed_count == 2


async def test_the_sweep_reports_every_run_and_gives_expired_leases_back(driver, valkey_url):
    await driver.start()
    await driver.lease(1, ttl=0.01)
    app = App(BufferSettings(port=0, store_url=valkey_url, sweep_seconds=0.05, drain_seconds=0))
    await app.start()
    labels = {"run": driver.run_id, "state": "pending"}
    for _ in range(100):
        if REGISTRY.get_sample_value("tetrarch_buffer_groups", labels) == 1.0:
            break
        await asyncio.sleep(0.05)
    await app.stop()
    assert REGISTRY.get_sample_value("tetrarch_buffer_groups", labels) == 1.0
    assert REGISTRY.get_sample_value("tetrarch_buffer_leases_expired", {"run": driver.run_id}) == 1.0
    assert REGISTRY.get_sample_value("tetrarch_buffer_policy_version", {"run": driver.run_id}) == 1.0
