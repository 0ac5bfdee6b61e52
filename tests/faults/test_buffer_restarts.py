"""The store or a buffer server is killed while nodes and a trainer work: nothing is lost, nothing trained twice."""

from __future__ import annotations

import asyncio
import random
import sys
from pathlib import Path

import pytest

from services.common.channel import open_channel
from services.common.errors import Code, ServiceError
from services.common.healthcheck import check
from services.common.process import ManagedProcess, free_port
from tests.contract.buffer_v1.driver import Driver, group_ids, write_data
from tests.support.valkey import ValkeyProcess

pytestmark = pytest.mark.asyncio(loop_scope="module")
ROOT = Path(__file__).resolve().parents[2]
ARGV = [sys.executable, "-m", "services.buffer"]
ENV = {"PYTHONPATH": f"{ROOT}:{ROOT / 'proto/gen'}"}
STEPS, BATCH = 10, 4


def buffer_process(port: int, store_url: str) -> ManagedProcess:
    """A buffer server as users start it."""
    settings = ["--set", f"port={port}", "--set", f"store_url={store_url}", "--set", "sweep_seconds=0.5"]
    return ManagedProcess("buffer", [*ARGV, *settings], env=ENV)


async def start(port: int, store_url: str) -> ManagedProcess:
    """A buffer server that is ready."""
    process = buffer_process(port, store_url)
    await process.start()
    for _ in range(300):
        if not await asyncio.to_thread(check, f"127.0.0.1:{port}", "tetrarch.buffer.v1.BufferService", 1.0):
            return process
        assert process.running, process.tail()
        await asyncio.sleep(0.1)
    raise AssertionError(f"the buffer server is not ready: {process.tail()}")


async def insist(call):
    """Repeats a call until the service answers, as every client of the buffer must."""
    for _ in range(200):
        try:
            return await call()
        except ServiceError as error:
            if error.code is not Code.UNAVAILABLE:
                raise
            await asyncio.sleep(0.1)
    raise AssertionError("the buffer did not come back")


class Workers:
    """Nodes and a trainer that survive failing calls."""

    def __init__(self, drivers: list[Driver]) -> None:
        self._drivers = drivers
        self._done = asyncio.Event()
        self.trained: list[str] = []

    async def run(self, disturb) -> None:
        """Trains all steps while `disturb(stop event)` does its work."""
        tasks = [asyncio.create_task(self._node(driver)) for driver in self._drivers]
        tasks.append(asyncio.create_task(disturb(self._done)))
        try:
            await asyncio.wait_for(self._train(self._drivers[0]), 80)
        finally:
            self._done.set()
            ended = await asyncio.gather(*tasks, return_exceptions=True)
        assert ended == [None] * len(tasks)

    async def _node(self, driver: Driver) -> None:
        while not self._done.is_set():
            try:
                response = await driver.lease(2, wait=0.3, ttl=2)
                groups = [driver.finished(lease, response.policy_version) for lease in response.leases]
                await asyncio.sleep(0.02)
                if groups:
                    await insist(lambda groups=groups: driver.put(*groups))
            except ServiceError as error:
                if error.code is not Code.UNAVAILABLE:
                    raise
                await asyncio.sleep(0.1)

    async def _train(self, driver: Driver) -> None:
        for step in range(STEPS):
            batch = None
            while batch is None or not batch.samples:
                batch = await insist(lambda step=step: driver.take(step, count=BATCH, wait=0.5))
            groups = group_ids(batch)
            again = await insist(lambda step=step: driver.take(step, count=BATCH, wait=0.5))
            assert group_ids(again) == groups
            assert len(await insist(lambda groups=groups: driver.fetch([f"{g}-0" for g in groups]))) == BATCH
            await asyncio.sleep(0.25)
            assert await insist(lambda step=step: driver.commit(step)) == BATCH
            self.trained += groups
            await insist(lambda step=step: driver.publish(step + 1))
            await insist(driver.stats)


async def finish(driver: Driver, trained: list[str]) -> None:
    """The accounts at the end."""
    assert len(trained) == len(set(trained)) == STEPS * BATCH
    stats = await driver.stats()
    assert stats.consumed_count == STEPS * BATCH
    states = await driver.states()
    assert sorted(states) == list(range(stats.drawn_count))


async def test_the_store_and_a_server_may_be_killed_at_any_moment(tmp_path):
    data = write_data(tmp_path / "data", rows=100)
    store = ValkeyProcess(tmp_path / "store").start()
    ports = [free_port(), free_port()]
    servers = [await start(port, store.url) for port in ports]
    channels = [open_channel(f"127.0.0.1:{port}", "buffer") for port in ports]
    drivers = [Driver(channel, "faulty", *data) for channel in channels]
    chance = random.Random(5)
    kills = {"store": 0, "server": 0}

    async def kill_store(done: asyncio.Event) -> None:
        while not done.is_set():
            await asyncio.sleep(chance.uniform(0.1, 0.5))
            store.kill()
            await asyncio.sleep(chance.uniform(0, 0.2))
            await asyncio.to_thread(store.start)
            kills["store"] += 1

    async def kill_server() -> None:
        servers[1].signal(9)
        await servers[1].wait()
        servers[1] = await start(ports[1], store.url)
        kills["server"] += 1

    async def disturb(done: asyncio.Event) -> None:
        await asyncio.gather(kill_store(done), kill_server())

    try:
        await drivers[0].start(
            trainer={"max_staleness": 1},
            rollout={"rollout_batch_size": BATCH, "num_rollout": STEPS},
            data={"max_prompt_attempts": 1000},
        )
        drivers[1].epoch, drivers[1].samples = drivers[0].epoch, drivers[0].samples
        workers = Workers(drivers)
        await workers.run(disturb)
        assert kills["store"] >= 3
        assert kills["server"] == 1
        await insist(drivers[0].stats)
        await finish(drivers[0], workers.trained)
        # A server that has never seen the run knows all about it.
        await insist(drivers[1].stats)
        group = await drivers[1].call("GetGroup", group_id=workers.trained[0])
        assert group.prompt.text.endswith("+1=")
    finally:
        for channel in channels:
            await channel.close()
        for server in servers:
            await server.stop(1.0)
        store.stop()


async def test_a_server_without_its_store_says_so(tmp_path):
    port = free_port()
    process = ManagedProcess(
        "buffer",
        [*ARGV, "--set", "port=0", "--set", f"store_url=redis://127.0.0.1:{port}", "--set", "store_wait_seconds=0.2"],
        env=ENV,
    )
    await process.start()
    assert await asyncio.wait_for(process.wait(), 30) == 2
    assert process.tail()[-1].startswith(f"tetrarch-buffer: The store at 127.0.0.1:{port} does not answer")
