"""Unfinished groups that are put back and go on; leases that a leaving node gives back."""

from __future__ import annotations

import numpy as np
import pytest
from tetrarch.buffer.v1 import buffer_service_pb2 as pb

from services.common.convert import group_to_proto, prompt_from_proto
from services.common.records import Group, Sample, SampleStatus, VersionSpan
from tests.contract.buffer_v1.driver import refusal

pytestmark = pytest.mark.asyncio(loop_scope="module")


def unfinished(lease: pb.PromptLease, version: int, index: int = 1, length: int = 3) -> pb.LeasedGroup:
    """One aborted sample of a lease's group."""
    prompt = prompt_from_proto(lease.prompt)
    sample = Sample(
        sample_id=f"{prompt.group_id}-{index}", group_id=prompt.group_id, index=index, status=SampleStatus.ABORTED,
        prompt_length=len(prompt.tokens), tokens=np.concatenate([prompt.tokens, np.arange(length, dtype=np.int32)]),
        loss_mask=np.ones(length, np.uint8), log_probs=np.full(length, -0.5, np.float32), response="so far",
        versions=(VersionSpan(version, 0, length),),
    )  # fmt: skip
    return pb.LeasedGroup(
        lease_id=lease.lease_id, group=group_to_proto(Group(prompt.group_id, prompt.ordinal, (sample,)))
    )


async def give_back(driver, lease, *partials, **fields):
    return await driver.call("ReleaseLeases", lease_ids=[lease.lease_id], partial_groups=partials, **fields)


async def test_what_was_made_comes_with_the_next_lease_and_goes_with_the_put(driver):
    await driver.start(data={"max_prompt_attempts": 1})
    lease = (await driver.lease(1)).leases[0]
    made = unfinished(lease, 1)
    assert (await give_back(driver, lease, made)).released_count == 1
    before = (await driver.stats()).payload_bytes
    assert before > 0
    (again,) = (await driver.lease(1)).leases
    assert (again.prompt.ordinal, again.attempt) == (lease.prompt.ordinal, 0)
    assert [sample.sample_id for sample in again.partial.samples] == [f"{again.prompt.group_id}-1"]
    assert again.partial.samples[0].tokens == made.group.samples[0].tokens
    assert again.partial.samples[0].log_probs == made.group.samples[0].log_probs
    # The node dies: the next one gets the same, once more.
    await give_back(driver, again, drained=True)
    (third,) = (await driver.lease(1)).leases
    assert third.partial == again.partial
    assert await driver.put(driver.finished(third, 1)) == ["STORED"]
    stats = await driver.stats()
    assert (stats.ready_count, stats.evicted_count) == (1, 0)


async def test_a_newer_share_replaces_the_older_and_an_eviction_drops_it(driver):
    await driver.start()
    lease = (await driver.lease(1)).leases[0]
    await give_back(driver, lease, unfinished(lease, 1, length=3))
    (lease,) = (await driver.lease(1)).leases
    await give_back(driver, lease, unfinished(lease, 1, length=9))
    (lease,) = (await driver.lease(1)).leases
    assert lease.partial.samples[0].response_length == 9
    await give_back(driver, lease, evict_reason="FAILED")
    assert (await driver.stats()).payload_bytes == 0


async def test_a_share_too_old_to_train_is_not_handed_out(driver):
    await driver.start()
    lease = (await driver.lease(1)).leases[0]
    await give_back(driver, lease, unfinished(lease, 1))
    await driver.publish(1)
    (lease,) = (await driver.lease(1)).leases
    assert not lease.HasField("partial")
    assert (await driver.stats()).payload_bytes == 0


async def test_a_leaving_node_costs_no_attempt(driver):
    await driver.start(data={"max_prompt_attempts": 1})
    for _ in range(3):
        (lease,) = (await driver.lease(1)).leases
        assert (await give_back(driver, lease, drained=True)).released_count == 1
    assert (await driver.stats()).pending_count == 1
    (lease,) = (await driver.lease(1)).leases
    await give_back(driver, lease)
    assert (await driver.stats()).evicted_by_reason["FAILED"] == 1


async def test_a_share_must_belong_to_its_lease(driver):
    await driver.start()
    one, two = (await driver.lease(2)).leases
    assert (await refusal(give_back(driver, one, unfinished(two, 1)))).reason == "INVALID_FIELD"
    wrong = unfinished(one, 1)
    wrong.group.samples[0].index = 5
    assert "has no place" in (await refusal(give_back(driver, one, wrong))).message
    assert (await refusal(give_back(driver, one, unfinished(one, 1), evict_reason="FAILED"))).reason == "INVALID_FIELD"
    answer = await give_back(driver, one, unfinished(one, 1))
    assert answer.released_count == 1
    assert list((await give_back(driver, one, unfinished(one, 1))).lost_lease_ids) == [one.lease_id]
