"""Deleting a run, watching it, filters of its groups, ages and memory."""

from __future__ import annotations

import asyncio

import pytest
from google.protobuf.duration_pb2 import Duration
from tetrarch.buffer.v1 import buffer_service_pb2 as pb
from tetrarch.buffer.v1 import registry_service_pb2, registry_service_pb2_grpc, run_pb2

from services.buffer.adapters.redis_connection import Connection, run_prefix
from services.common.channel import translate_errors
from services.common.errors import Code
from tests.contract.buffer_v1.driver import Driver, refusal

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def keys_of(connection: Connection, run_id: str) -> list[bytes]:
    return [key async for key in connection.client.scan_iter(match=run_prefix(run_id) + "*")]


async def test_a_run_is_deleted_with_every_key(driver, channel, data, connection):
    other = Driver(channel, f"{driver.run_id}-2", *data)
    await other.start()
    await driver.start()
    await driver.step(0)
    await driver.lease()
    error = await refusal(driver.call("DeleteRun"))
    assert (error.code, error.reason) == (Code.FAILED_PRECONDITION, "RUN_ACTIVE")
    assert (await driver.call("DeleteRun", force=True)).key_count > 10
    assert await keys_of(connection, driver.run_id) == []
    assert (await refusal(driver.call("GetRun"))).reason == "RUN_NOT_FOUND"
    assert driver.run_id not in {run.run_id for run in (await driver.stub.ListRuns(pb.ListRunsRequest())).runs}
    assert (await driver.call("DeleteRun")).key_count == 0
    assert (await other.stats()).capacity == 2


async def test_leases_of_a_deleted_run_are_none_of_its_namesake(driver):
    await driver.start()
    lease = (await driver.lease(1)).leases[0]
    await driver.call("DeleteRun", force=True)
    await driver.start()
    again = (await driver.lease(1)).leases[0]
    assert lease.lease_id != again.lease_id
    assert await driver.put(driver.finished(lease, 1)) == ["LEASE_LOST"]
    assert await driver.put(driver.finished(again, 1)) == ["STORED"]


async def test_counts_are_watched_until_the_run_ends(driver):
    await driver.start()
    request = pb.WatchStatsRequest(run_id=driver.run_id, min_interval=Duration(nanos=20_000_000))
    seen = []

    async def watch():
        async with translate_errors():
            async for answer in driver.stub.WatchStats(request):
                seen.append((answer.stats.leased_count, answer.state))

    task = asyncio.create_task(watch())
    await asyncio.sleep(0.1)
    await driver.lease(2)
    await asyncio.sleep(0.1)
    await driver.call("FinishRun", state=run_pb2.RUN_STATE_STOPPED, reason="enough")
    await asyncio.wait_for(task, 5)
    assert seen == [(0, run_pb2.RUN_STATE_ACTIVE), (2, run_pb2.RUN_STATE_ACTIVE), (2, run_pb2.RUN_STATE_STOPPED)]


async def test_groups_are_found_by_reason_and_ordinal(driver):
    await driver.start(trainer={"max_staleness": 2})
    leases = (await driver.lease(6)).leases
    for lease, reason in zip(leases[:3], ("FAILED", "FILTERED:zero_std_0.5", "UNSCORED"), strict=True):
        await driver.call("ReleaseLeases", lease_ids=[lease.lease_id], evict_reason=reason)
    found = await driver.call("ListGroups", evict_reasons=["FILTERED:zero_std_0.5", "UNSCORED"])
    assert [group.ordinal for group in found.groups] == [1, 2]
    assert [group.ordinal for group in (await driver.call("ListGroups", min_ordinal=4)).groups] == [4, 5]
    page = await driver.call("ListGroups", min_ordinal=1, page_size=2)
    assert [group.ordinal for group in page.groups] == [1, 2]
    page = await driver.call("ListGroups", min_ordinal=1, page_size=2, page_token=page.next_page_token)
    assert [group.ordinal for group in page.groups] == [3, 4]
    assert not (await driver.call("ListGroups", dataset="none")).groups
    assert dict((await driver.stats()).evicted_by_reason) == {"FAILED": 1, "FILTERED:zero_std_0.5": 1, "UNSCORED": 1}


async def test_ages_and_memory_are_counted(driver):
    await driver.start()
    leases = (await driver.lease(2)).leases
    await asyncio.sleep(0.05)
    await driver.put(driver.finished(leases[0], 1))
    stats = await driver.stats()
    assert set(stats.oldest_age_seconds) == {"LEASED", "READY"}
    assert stats.oldest_age_seconds["LEASED"] >= 0.05 > stats.oldest_age_seconds["READY"]
    assert stats.store_used_bytes > 100_000
    assert stats.store_limit_bytes == 0
    await driver.put(driver.finished(leases[1], 1))
    await driver.take(0)
    assert set((await driver.stats()).oldest_age_seconds) == {"RESERVED"}
    await driver.commit(0)
    assert not (await driver.stats()).oldest_age_seconds


async def test_a_member_that_was_replaced_stays_out(channel):
    stub = registry_service_pb2_grpc.RegistryServiceStub(channel)

    async def register(incarnation: str):
        member = registry_service_pb2.Member(
            member_id="n", tier="rollout", address=f"{incarnation}:1", incarnation=incarnation
        )
        request = registry_service_pb2.RegisterMemberRequest(member=member, ttl=Duration(seconds=60))
        async with translate_errors():
            await stub.RegisterMember(request)

    await register("first")
    await register("first")
    await register("second")
    error = await refusal(register("first"))
    assert (error.code, error.reason) == (Code.FAILED_PRECONDITION, "FENCED")
    await register("second")
    listed = (await stub.ListMembers(registry_service_pb2.ListMembersRequest())).members
    assert [member.address for member in listed if member.member_id == "n"] == ["second:1"]


async def test_what_a_node_held_that_was_started_again_is_leased_anew_at_once(driver, channel):
    stub = registry_service_pb2_grpc.RegistryServiceStub(channel)

    async def register(incarnation: str):
        member = registry_service_pb2.Member(
            member_id="node", tier="rollout", address="node:1", incarnation=incarnation
        )
        await stub.RegisterMember(registry_service_pb2.RegisterMemberRequest(member=member, ttl=Duration(seconds=60)))

    await driver.start()
    await register("first")
    held = (await driver.lease(2)).leases
    await register("first")
    assert (await driver.stats()).leased_count == len(held) == 2
    await register("second")
    stats = await driver.stats()
    assert (stats.leased_count, stats.pending_count, stats.lease_expired_count) == (0, 2, 2)
    again = (await driver.lease(2)).leases
    assert [lease.prompt.group_id for lease in again] == [lease.prompt.group_id for lease in held]
    await register("second")
    assert (await driver.stats()).leased_count == 2


async def test_groups_of_a_mixture_are_found_by_their_data_set(driver, data):
    parts = [{"name": "a", "path": str(data[0]), "weight": 3}, {"name": "b", "path": str(data[0]), "weight": 1}]
    driver.spec["data"].pop("prompt_data")
    await driver.start(data={"prompt_data_mixture": parts}, trainer={"max_staleness": 3})
    await driver.lease(8)
    every = (await driver.call("ListGroups")).groups
    of_b = [group.ordinal for group in every if group.dataset == "b"]
    assert len(of_b) == 2
    page = await driver.call("ListGroups", dataset="b", page_size=1)
    assert [group.ordinal for group in page.groups] == of_b[:1]
    page = await driver.call("ListGroups", dataset="b", page_size=1, page_token=page.next_page_token)
    assert [group.ordinal for group in page.groups] == of_b[1:]
    assert not page.next_page_token
    assert (await driver.call("GetGroup", group_id=every[of_b[0]].group_id)).info.dataset == "b"
    assert dict((await driver.stats()).drawn_by_dataset) == {"a": 6, "b": 2}
