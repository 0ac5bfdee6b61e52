"""Connections that are cut, silent or slow, between real servers and the clients that the tiers use."""

from __future__ import annotations

import asyncio
import sys
import time

import grpc
import pytest
import pytest_asyncio
from tetrarch.buffer.v1 import buffer_service_pb2 as pb
from tetrarch.buffer.v1 import buffer_service_pb2_grpc

from services.buffer.adapters import redis_address
from services.buffer.adapters.redis_connection import Connection
from services.common import channel as channels
from services.common.channel import open_channel
from services.common.convert import prompt_from_proto
from services.common.errors import Code, ServiceError
from services.common.process import ManagedProcess, free_port
from services.common.records import Group, Sample
from services.rollout.adapters import buffer_client as node_side
from services.rollout.adapters.reward_client import GrpcScorer
from services.rollout.core.run_settings import ScoreSettings
from services.rollout.core.scoring import Scoring
from services.trainer.adapters import buffer_client as trainer_side
from tests.contract.buffer_v1.driver import Driver, make_group, write_data
from tests.faults.test_buffer_restarts import ENV, start
from tests.support.tcp_proxy import TcpProxy
from tests.support.valkey import ValkeyProcess

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world(tmp_path_factory):
    """(address of a buffer server, prompts, checkpoint)."""
    directory = tmp_path_factory.mktemp("connections")
    store = ValkeyProcess(directory / "store").start()
    port = free_port()
    server = await start(port, store.url)
    yield f"127.0.0.1:{port}", *write_data(directory / "data", rows=100)
    await server.stop(1.0)
    store.stop()


@pytest_asyncio.fixture(loop_scope="module")
async def run(world, request):
    """A run with a published version, and its driver on a connection that nobody disturbs."""
    address, *data = world
    async with open_channel(address, "buffer") as channel:
        driver = Driver(channel, request.node.name[:40], *data)
        await driver.start(trainer={"max_staleness": 1})
        yield driver


@pytest_asyncio.fixture(loop_scope="module")
async def link(world):
    """A proxy in front of the buffer."""
    async with TcpProxy(world[0]) as proxy:
        yield proxy


async def test_a_lease_whose_answer_is_lost_is_not_nobodys(run, link, monkeypatch):
    monkeypatch.setattr(node_side, "_CALL_SLACK", 0.3)
    async with open_channel(link.address, "buffer") as channel:
        node = node_side.GrpcBuffer(channel, "node", 10.0)
        await node.newest_active_run()
        link.stall("down")
        with pytest.raises(ServiceError) as caught:
            await node.lease_prompts(run.run_id, 2, 0.2, 60.0)
        assert caught.value.code is Code.DEADLINE_EXCEEDED
        assert (await run.stats()).leased_count == 2, "the request came through"
        link.mend()
        leases = await node.lease_prompts(run.run_id, 2, 0.2, 60.0)
        assert len(leases) == (await run.stats()).leased_count == 2
        others = await node.lease_prompts(run.run_id, 2, 0.2, 60.0)
        assert not {lease.lease_id for lease in leases} & {lease.lease_id for lease in others}


async def test_a_put_whose_connection_is_cut_is_the_same_put(run, link):
    async with open_channel(link.address, "buffer") as channel:
        node = node_side.GrpcBuffer(channel, "node", 10.0)
        (lease,) = await node.lease_prompts(run.run_id, 1, 0.2, 60.0)
        groups = [(lease.lease_id, make_group(lease.prompt, run.samples, 1))]
        link.stall("down")
        put = asyncio.create_task(node.put_groups(run.run_id, groups))
        async with asyncio.timeout(10):
            while (await run.stats()).ready_count != 1:
                await asyncio.sleep(0.02)
        link.cut()
        link.mend()
        # gRPC itself makes the call again: the store has the group, so it is no second one.
        (result,) = await put
        assert result.outcome == "DUPLICATE"
        assert (await run.stats()).ready_count == 1


async def lease_that_expires(run):
    """A prompt in the hands of a node that is cut off until its lease is over."""
    (lease,) = (await run.lease(1, ttl=1)).leases
    async with asyncio.timeout(10):
        while (await run.stats()).leased_count:
            await asyncio.sleep(0.05)
    return lease


async def test_a_put_after_the_lease_is_refused_while_another_has_the_prompt(run):
    late = await lease_that_expires(run)
    (again,) = (await run.lease(1)).leases
    assert again.prompt.group_id == late.prompt.group_id
    first = await run.put(run.finished(late, 1))
    second = await run.put(run.finished(again, 1))
    assert (first, second) in ((["LEASE_LOST"], ["STORED"]), (["STORED"], ["DUPLICATE"])), "the first complete put wins"
    assert await run.put(run.finished(late, 1)) == ["DUPLICATE"]
    assert (await run.stats()).ready_count == 1


async def test_a_put_after_the_lease_counts_while_nobody_has_the_prompt(run):
    late = await lease_that_expires(run)
    assert await run.put(run.finished(late, 1)) in (["STORED"], ["LEASE_LOST"])
    stats = await run.stats()
    assert stats.drawn_count == stats.ready_count + stats.pending_count == 1


async def test_a_trainer_outlasts_cuts_and_refusals(run, link):
    await run.produce(4)
    async with open_channel(link.address, "buffer") as channel:
        trainer = trainer_side.GrpcBuffer(channel, link.address, patience=20.0)
        take = asyncio.create_task(trainer.take_batch(run.run_id, run.epoch, 0, 2, 5.0))
        link.cut(refuse=True)
        await asyncio.sleep(1.0)
        assert not take.done()
        link.mend()
        mended = time.monotonic()
        batch = await take
        assert time.monotonic() - mended < 5
        link.cut()
        again = await trainer.take_batch(run.run_id, run.epoch, 0, 2, 5.0)
        assert {s.group_id for s in again.samples} == {s.group_id for s in batch.samples}
        link.cut()
        assert await trainer.commit_step(run.run_id, run.epoch, 0) == 2
        link.cut(refuse=True)
        impatient = trainer_side.GrpcBuffer(channel, link.address, patience=0.5)
        with pytest.raises(ServiceError, match=f"The buffer at {link.address} did not answer for 0 s") as caught:
            await impatient.get_run(run.run_id)
        assert caught.value.reason == "BUFFER_UNREACHABLE"


async def test_a_silent_peer_is_found_without_any_call(run, link, monkeypatch):
    assert channels.KEEPALIVE_SECONDS + channels.KEEPALIVE_TIMEOUT_SECONDS <= 30
    monkeypatch.setattr(channels, "KEEPALIVE_SECONDS", 1)
    monkeypatch.setattr(channels, "KEEPALIVE_TIMEOUT_SECONDS", 1)
    async with open_channel(link.address, "buffer") as channel:
        stub = buffer_service_pb2_grpc.BufferServiceStub(channel)
        watch = stub.WatchStats(pb.WatchStatsRequest(run_id=run.run_id), timeout=60)
        assert await watch.read() is not grpc.aio.EOF
        link.stall()
        began = time.monotonic()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await _read_all(watch)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert time.monotonic() - began < 6


async def test_a_store_that_is_silent_has_a_deadline_and_is_found_again(tmp_path, monkeypatch):
    monkeypatch.setattr(redis_address, "_CALL_SECONDS", 0.5)
    store = ValkeyProcess(tmp_path / "store").start()
    try:
        async with TcpProxy(f"127.0.0.1:{store.port}") as link:
            connection = Connection(f"redis://{link.address}")
            await connection.ping()
            link.cut()
            await connection.ping()
            link.stall()
            began = time.monotonic()
            with pytest.raises(ServiceError, match=f"The store at {link.address} does not answer") as caught:
                await connection.ping()
            assert (caught.value.code, caught.value.reason) == (Code.UNAVAILABLE, "STORE_UNAVAILABLE")
            assert time.monotonic() - began < 3
            link.mend()
            await connection.ping()
            await connection.close()
    finally:
        store.stop()


async def _read_all(call) -> None:
    while await call.read() is not grpc.aio.EOF:
        pass


async def test_a_slow_link_is_slow_and_no_error(run, link):
    async with open_channel(link.address, "buffer") as channel:
        node = node_side.GrpcBuffer(channel, "node", 10.0)
        await node.newest_active_run()
        link.limit(20_000)
        link.delay(0.02)
        leases = await node.lease_prompts(run.run_id, 4, 0.2, 60.0)
        results = await node.put_groups(
            run.run_id, [(lease.lease_id, make_group(lease.prompt, run.samples, 1)) for lease in leases]
        )
        assert [result.outcome for result in results] == ["STORED"] * len(leases)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def reward(tmp_path_factory):
    """Address of a reward service."""
    port = free_port()
    argv = [sys.executable, "-m", "services.reward", "--set", f"port={port}", "--set", "workers=1"]
    process = ManagedProcess("reward", argv, env=ENV)
    await process.start()
    async with asyncio.timeout(60), grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        await channel.channel_ready()
    yield f"127.0.0.1:{port}"
    await process.stop(1.0)


async def score(address: str, run: Driver, timeout: float) -> tuple[list[Sample], float]:
    """Samples of a group, scored over a connection, and seconds it took."""
    (lease,) = (await run.lease(1)).leases
    prompt = prompt_from_proto(lease.prompt)
    group: Group = make_group(prompt, 2, 1, reward=None)
    async with open_channel(address, "reward") as channel:
        began = time.monotonic()
        scored = await Scoring(GrpcScorer(channel), ScoreSettings("exact_match", timeout=timeout)).score(
            prompt, group.samples
        )
        return scored, time.monotonic() - began


@pytest.mark.parametrize("fault", ["silent", "refused", "slow"])
async def test_scoring_has_a_deadline_and_no_reward_is_no_zero(run, reward, fault):
    async with TcpProxy(reward) as link:
        {"silent": link.stall, "refused": lambda: link.cut(refuse=True), "slow": lambda: link.delay(2.0)}[fault]()
        samples, seconds = await score(link.address, run, timeout=1.0)
        assert [sample.reward for sample in samples] == [None, None]
        assert {sample.unscored_reason for sample in samples} <= {"TIMEOUT", "REWARD_UNAVAILABLE"}
        assert seconds < 3


async def test_scoring_outlasts_a_cut(run, reward):
    async with TcpProxy(reward) as link:
        link.cut(refuse=True)
        asyncio.get_running_loop().call_later(0.5, link.mend)
        samples, _ = await score(link.address, run, timeout=10.0)
        assert [sample.reward for sample in samples] == [0.0, 0.0]
