"""Large tensors beside samples: put in rows, read in rows, gone with their group."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tetrarch.buffer.v1 import buffer_service_pb2 as pb
from tetrarch.common.v1 import sample_pb2, tensor_pb2

from services.common.channel import translate_errors
from services.common.convert import prompt_from_proto
from services.common.tensors import to_numpy, to_proto
from services.rollout.adapters import side_payloads
from services.rollout.adapters.buffer_client import GrpcBuffer
from tests.contract.buffer_v1.driver import make_group, refusal

pytestmark = pytest.mark.asyncio(loop_scope="module")
EXPERTS = np.arange(1000 * 8, dtype=np.int32).reshape(1000, 8)
PAYLOAD = sample_pb2.SidePayload(name="experts", data_type=tensor_pb2.DATA_TYPE_INT32, shape=[1000, 8])


async def put(driver, lease, start, end, *, payload=PAYLOAD, lease_id=""):
    await driver.call(
        "PutSidePayload", lease_id=lease_id or lease.lease_id, sample_id=f"{lease.prompt.group_id}-1",
        payload=payload, row_start=start, rows=to_proto(EXPERTS[start:end]),
    )  # fmt: skip


async def fetch(driver, sample_id, start=0, end=0, name="experts"):
    request = pb.FetchSidePayloadsRequest(
        run_id=driver.run_id, sample_ids=[sample_id], name=name, row_start=start, row_end=end
    )
    async with translate_errors():
        parts = [part async for part in driver.stub.FetchSidePayloads(request)]
    assert [part.row_start for part in parts] == sorted(part.row_start for part in parts)
    return np.concatenate([to_numpy(part.rows) for part in parts])


def named(driver, lease):
    item = driver.finished(lease, 1)
    item.group.samples[1].side_payloads.append(PAYLOAD)
    return item


async def test_rows_come_back_as_they_were_put_and_go_with_their_group(driver):
    await driver.start(trainer={"keep_checkpoints": 1})
    one, two = (await driver.lease(2)).leases
    for start, end in ((600, 1000), (0, 600), (0, 600)):
        await put(driver, one, start, end)
    assert await driver.put(named(driver, one), driver.finished(two, 1)) == ["STORED", "STORED"]
    sample = f"{one.prompt.group_id}-1"
    np.testing.assert_array_equal(await fetch(driver, sample), EXPERTS)
    np.testing.assert_array_equal(await fetch(driver, sample, 590, 610), EXPERTS[590:610])
    (whole,) = await driver.fetch([sample])
    assert whole.side_payloads[0].name == "experts"
    assert (await refusal(fetch(driver, f"{one.prompt.group_id}-0"))).reason == "PAYLOAD_NOT_FOUND"
    assert (await refusal(fetch(driver, sample, name="images"))).reason == "PAYLOAD_NOT_FOUND"
    assert (await refusal(fetch(driver, sample, 10, 2000))).reason == "INVALID_FIELD"
    held = (await driver.stats()).payload_bytes
    assert held > EXPERTS.nbytes
    await driver.take(0)
    await driver.commit(0)
    await driver.checkpoint(0)
    assert (await refusal(fetch(driver, sample))).reason == "PAYLOAD_NOT_FOUND"
    assert (await driver.stats()).payload_bytes == 0


async def test_a_group_whose_rows_are_not_all_there_is_refused(driver):
    await driver.start()
    (lease,) = (await driver.lease(1)).leases
    await put(driver, lease, 0, 600)
    response = await driver.call("PutGroups", groups=[named(driver, lease)])
    assert response.results[0].outcome == pb.PUT_OUTCOME_INVALID
    assert "only its first 600 are stored" in response.results[0].message
    await put(driver, lease, 600, 1000)
    assert await driver.put(named(driver, lease)) == ["STORED"]


async def test_rows_need_the_lease_and_the_shape(driver):
    await driver.start()
    one, two = (await driver.lease(2)).leases
    assert (await refusal(put(driver, one, 0, 10, lease_id=two.lease_id))).reason == "INVALID_FIELD"
    wrong = sample_pb2.SidePayload(name="experts", data_type=tensor_pb2.DATA_TYPE_INT32, shape=[1000, 9])
    assert (await refusal(put(driver, one, 0, 10, payload=wrong))).reason == "INVALID_FIELD"
    await driver.call("ReleaseLeases", lease_ids=[one.lease_id])
    assert (await refusal(put(driver, one, 0, 10))).reason == "LEASE_LOST"


async def test_what_a_node_puts_beside_samples_is_stored_with_its_group(driver, channel, monkeypatch):
    monkeypatch.setattr(side_payloads, "_REQUEST_BYTES", EXPERTS[:300].nbytes)
    await driver.start()
    one, two = (await driver.lease(2)).leases
    kept = np.array([1, 2, 7, 8, 9], np.int32)
    groups = []
    for lease in (one, two):
        group = make_group(prompt_from_proto(lease.prompt), 2, 1)
        samples = [replace(group.samples[0], side={"experts": EXPERTS, "kept": kept}), group.samples[1]]
        groups.append((lease.lease_id, replace(group, samples=tuple(samples))))
    await driver.call("ReleaseLeases", lease_ids=[two.lease_id])
    results = await GrpcBuffer(channel, "node", 10.0).put_groups(driver.run_id, groups)
    assert [result.outcome for result in results] == ["STORED", "LEASE_LOST"]
    again = await GrpcBuffer(channel, "node", 10.0).put_groups(driver.run_id, groups[:1])
    assert [result.outcome for result in again] == ["DUPLICATE"]
    sample = f"{one.prompt.group_id}-0"
    np.testing.assert_array_equal(await fetch(driver, sample), EXPERTS)
    np.testing.assert_array_equal(await fetch(driver, sample, name="kept"), kept)
    (whole,) = await driver.fetch([sample])
    assert {payload.name: list(payload.shape) for payload in whole.side_payloads} == {"experts": [1000, 8], "kept": [5]}
