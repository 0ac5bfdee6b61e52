"""The weight handshake against real collectives: fences, verification, aborts, deaths."""

from __future__ import annotations

import asyncio
import os
import signal
import time

import grpc
import pytest
from tetrarch.rollout.v1 import engine_pb2
from tetrarch.rollout.v1 import rollout_service_pb2 as pb2

from services.common.channel import service_error
from services.common.convert import sample_from_proto
from tests.contract.rollout_v1.conftest import until
from tests.contract.rollout_v1.trainer_side import new_update, push

STALE, READY, UPDATING = (
    engine_pb2.ENGINE_STATE_STALE,
    engine_pb2.ENGINE_STATE_READY,
    engine_pb2.ENGINE_STATE_UPDATING,
)
FLEET = {"rollout_num_gpus": 2, "simulated": {"tokens_per_second": 40, "response_len_spread": 0}}
"""All tests share two engines, started once; most update only the first, so that it alone decides who is served."""


async def refused(call) -> str:
    """Reason of a call that must fail; the sentence after a colon."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    error = service_error(caught.value)
    return f"{error.reason}: {error}"


async def first_engine(client, rollout=None, **trainer) -> engine_pb2.Engine:
    """Engine 0 of a new run, STALE."""
    await client.create_run(rollout=FLEET | (rollout or {}), trainer=trainer)
    return (await client.engines(STALE, 2))[0]


async def state_of(client, index: int = 0) -> int:
    return (await client.node()).engines[index].state


async def served(client) -> bool:
    """True when the router has an engine."""
    request = pb2.GenerateRequest(run_id=client.run_id, prompt={"text": "1"}, sampling={"max_new_tokens": 1})
    try:
        await client.rollout.Generate(request, timeout=1.0)
    except grpc.aio.AioRpcError:
        return False
    return True


async def test_prepare_fences_and_checks_before_it_joins(client):
    engine = await first_engine(client)
    update = new_update(client, engine, 1)
    prepare = client.weights.PrepareUpdate
    assert "ENGINE_NOT_FOUND" in await refused(prepare(update.prepare_request(engine_id="node-7")))
    assert "was restarted" in await refused(prepare(update.prepare_request(incarnation="old")))
    sentence = await refused(prepare(update.prepare_request(backend="nccl")))
    assert sentence.startswith("INCOMPATIBLE")
    assert "'nccl' at the trainer and 'gloo' at the engine" in sentence
    assert "torch is '1.0.0' at the trainer" in await refused(prepare(update.prepare_request(torch_version="1.0.0")))
    assert "RUN_NOT_SERVED" in await refused(prepare(update.prepare_request(run_id="another")))
    assert "EPOCH_NOT_PREPARED" in await refused(client.weights.CommitUpdate(update.commit_request()))
    await push(client, engine, 1)
    assert (await client.engines(READY))[0].weight_version == 1
    older = new_update(client, engine, 2, epoch=update.epoch)
    assert "FENCED" in await refused(prepare(older.prepare_request()))
    assert await state_of(client) == READY


async def test_a_commit_can_be_repeated(client):
    engine = await first_engine(client)
    update = new_update(client, engine, 1)
    await update.prepare()
    await update.send()
    first = await update.commit()
    assert first == await client.weights.CommitUpdate(update.commit_request())
    assert first.verified_tensor_count == len(update.rules) > 0


async def test_a_group_outlives_updates_until_one_fails(client):
    engine = await first_engine(client)
    first = new_update(client, engine, 1)
    await first.prepare()
    await first.send()
    await first.commit(keep=True)
    (engine,) = await client.engines(READY)
    second = new_update(client, engine, 2, group=first.rank)
    await second.prepare()  # both sides are in the group: nobody meets anybody
    await second.send()
    await second.commit(keep=True)
    assert (await client.engines(READY))[0].weight_version == 2
    third = new_update(client, engine, 3, group=first.rank)
    await third.prepare()
    await third.tell_abort()
    again = new_update(client, engine, 3, group=first.rank)
    assert "GROUP_LEFT" in await refused(client.weights.PrepareUpdate(again.prepare_request(), timeout=20))
    first.rank.leave()
    await push(client, engine, 3)
    assert (await client.engines(READY))[0].weight_version == 3


async def test_an_engine_leaves_a_dead_trainers_group(client):
    engine = await first_engine(client)
    dead = new_update(client, engine, 1)
    await dead.prepare()
    await dead.send()
    await dead.commit()  # its end is closed, which the engine is not told
    (engine,) = await client.engines(READY)
    await push(client, engine, 2)
    (after,) = await client.engines(READY)
    assert (after.weight_version, after.incarnation) == (2, engine.incarnation)


async def test_every_token_knows_its_version_when_weights_change_in_mid_answer(client):
    engine = await first_engine(client, max_staleness=1)
    await push(client, engine, 1)
    await client.publish(1)

    async def generating() -> bool:
        return (await client.stats()).leased_count == 16

    await until(generating, 10)
    await asyncio.sleep(0.3)
    result = await push(client, engine, 2)
    assert 0 < result.pause_seconds < 5
    groups = await client.ready_groups(16)
    samples = [sample_from_proto(message) for got in groups for message in got.group.samples]
    assert {(sample.min_version, sample.max_version) for sample in samples} == {(1, 2)}
    assert all([span.version for span in sample.versions] == [1, 2] for sample in samples)
    assert all(not sample.problem() for sample in samples)


async def test_a_mismatch_names_the_tensor_and_takes_the_engine_out(client):
    engine = await first_engine(client)
    await push(client, engine, 1)
    assert await served(client)
    update = new_update(client, engine, 2)
    await update.prepare()
    await update.send()
    name = update.rules[3].engine_name
    sentence = await refused(update.commit(corrupt=name))
    assert sentence.startswith("CHECKSUM_MISMATCH")
    assert name in sentence
    engine = (await client.engines(STALE, 2))[0]
    assert engine.weight_version == 0
    assert not await served(client)
    await push(client, engine, 3)
    assert (await client.engines(READY))[0].weight_version == 3
    assert await served(client)


async def test_an_abort_before_the_first_bucket_leaves_the_engine_ready(client):
    engine = await first_engine(client)
    await push(client, engine, 1)
    update = new_update(client, engine, 2)
    await update.prepare()
    await update.abort()
    (engine,) = await client.engines(READY)
    assert engine.weight_version == 1
    assert await served(client)
    assert "EPOCH_NOT_PREPARED" in await refused(client.weights.CommitUpdate(update.commit_request()))
    await update.abort()  # once more is fine
    await push(client, engine, 2)


async def test_an_abort_in_mid_transfer_leaves_the_old_version_serving(client):
    engine = await first_engine(client)
    await push(client, engine, 1)
    update = new_update(client, engine, 2)
    await update.prepare()
    assert update.staged
    transfer = await update.send_half()
    assert await state_of(client) == READY
    assert await served(client)
    await update.abort()
    assert "keeps version 1" in await refused(transfer)
    (engine,) = await client.engines(READY)
    assert engine.weight_version == 1
    assert await served(client)
    await push(client, engine, 2)
    assert (await client.engines(READY))[0].weight_version == 2


async def test_without_staging_an_engine_stands_still_from_the_first_byte_on(client):
    engine = await first_engine(client, {"weight_staging": "off"})
    await push(client, engine, 1)
    update = new_update(client, engine, 2)
    await update.prepare()
    assert not update.staged
    transfer = await update.send_half()
    assert await state_of(client) == UPDATING
    await update.abort()
    assert "is STALE now" in await refused(transfer)
    engine = (await client.engines(STALE, 2))[0]
    assert not await served(client)
    await push(client, engine, 2)
    assert await served(client)


async def test_a_silent_trainer_is_given_up_and_a_newer_epoch_replaces_an_update(client):
    engine = await first_engine(client, update_timeout=12.0)  # the first join loads torch
    await push(client, engine, 1)
    silent = new_update(client, engine, 2)
    await silent.prepare()
    newer = new_update(client, engine, 2)
    await newer.prepare()
    silent.rank.leave()
    transfer = await newer.send_half()
    assert "TRANSFER_FAILED" in await refused(transfer)  # nothing more came
    newer.rank.leave()
    (engine,) = await client.engines(READY)
    assert (engine.weight_version, engine.incarnation) == (1, silent.engine.incarnation)
    await push(client, engine, 3)
    assert (await client.engines(READY))[0].weight_version == 3


async def test_a_newer_epoch_ends_a_transfer_under_way(client):
    engine = await first_engine(client)
    await push(client, engine, 1)
    stale = new_update(client, engine, 2)
    await stale.prepare()
    transfer = await stale.send_half()
    newer = new_update(client, engine, 3)
    await newer.prepare()
    assert "TRANSFER_FAILED" in await refused(transfer)
    stale.rank.leave()
    await newer.send()
    result = await newer.commit()
    assert 0 < result.pause_seconds < 2
    assert (await client.engines(READY))[0].weight_version == 3
    assert "FENCED" in await refused(client.weights.CommitUpdate(stale.commit_request()))


async def test_a_killed_engine_costs_the_others_nothing_and_comes_back(client):
    await client.create_run(rollout=FLEET, trainer={"max_staleness": 3})
    engines = await client.engines(STALE, 2)
    for engine in engines:
        await push(client, engine, 1)
    await client.engines(READY, 2)
    await client.publish(1)

    async def generating() -> bool:
        return (await client.stats()).leased_count >= 16

    await until(generating, 10)
    dead = engines[0]
    os.killpg(dead.pid, signal.SIGKILL)
    killed = time.monotonic()
    (left,) = await client.engines(READY, 1, seconds=5)
    assert left.engine_id == engines[1].engine_id
    assert time.monotonic() - killed < 5
    groups = await client.ready_groups(32)
    assert all(sample_from_proto(s).problem() == "" for got in groups for s in got.group.samples)
    stats = await client.stats()
    assert (stats.evicted_count, stats.lease_expired_count) == (0, 0)
    (back,) = await client.engines(STALE, 1)
    assert back.engine_id == dead.engine_id
    assert back.incarnation != dead.incarnation
    assert back.restart_count == dead.restart_count + 1
    await push(client, back, 1)
    await client.engines(READY, 2)


async def test_an_engine_killed_in_a_transfer_fails_that_update_alone(client):
    await client.create_run(rollout=FLEET)
    engines = await client.engines(STALE, 2)
    await push(client, engines[1], 1)
    update = new_update(client, engines[0], 1)
    await update.prepare()
    transfer = await update.send_half()
    os.killpg(engines[0].pid, signal.SIGKILL)
    assert "TRANSFER_FAILED" in await refused(transfer)
    sentence = await refused(client.weights.CommitUpdate(update.commit_request()))
    assert sentence.split(":")[0] in ("ENGINE_UNAVAILABLE", "EPOCH_NOT_PREPARED")
    update.rank.leave()
    assert await served(client)
    (back,) = await client.engines(STALE, 1)
    await push(client, back, 1)
    await client.engines(READY, 2)


async def test_an_engine_that_is_stopped_in_a_transfer_costs_that_transfer_alone(client):
    await client.create_run(rollout=FLEET, trainer={"max_staleness": 3})
    engines = await client.engines(STALE, 2)
    for engine in engines:
        await push(client, engine, 1)
    update = new_update(client, engines[0], 2)
    await update.prepare()
    transfer = await update.send_half()
    await client.publish(1)

    async def generating() -> bool:
        return (await client.stats()).leased_count >= 16

    await until(generating, 10)
    os.killpg(engines[0].pid, signal.SIGSTOP)
    stopped = time.monotonic()
    assert "TRANSFER_FAILED" in await refused(transfer)
    assert time.monotonic() - stopped < 5
    update.rank.leave()
    await client.ready_groups(32)  # those that were under way on the stopped one as well
    (back,) = await client.engines(STALE, 1)
    assert (back.engine_id, back.restart_count) == (engines[0].engine_id, engines[0].restart_count + 1)
    await push(client, back, 2)
    assert {engine.weight_version for engine in await client.engines(READY, 2)} == {1, 2}


async def test_an_engine_that_is_stopped_leaves_the_router_and_is_replaced(client):
    await client.create_run(rollout=FLEET | {"rollout_num_gpus": 1})
    (engine,) = await client.engines(STALE)
    await push(client, engine, 1)
    assert await served(client)
    os.killpg(engine.pid, signal.SIGSTOP)
    (back,) = await client.engines(STALE, seconds=30)
    assert (back.engine_id, back.restart_count) == (engine.engine_id, 1)
    assert not await served(client)
