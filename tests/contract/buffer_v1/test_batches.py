"""The life of prompts: leases, puts, batches, staleness, checkpoints, restores."""

from __future__ import annotations

import asyncio
import math
import time

import numpy as np
import pytest
from tetrarch.buffer.v1 import run_pb2

from services.common.convert import prompt_from_proto, sample_from_proto
from services.common.errors import Code
from tests.contract.buffer_v1.driver import Driver, group_ids, make_group, refusal

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_nothing_is_leased_before_the_first_weights(driver):
    await driver.create()
    assert not (await driver.lease()).leases
    assert (await driver.stats()).capacity == 0


async def test_one_step_carries_every_value_through(driver):
    await driver.start()
    leased = await driver.lease()
    assert [lease.prompt.group_id for lease in leased.leases] == [f"{driver.run_id}-0", f"{driver.run_id}-1"]
    prompt = leased.leases[1].prompt
    assert (prompt.text, prompt.label, prompt.row, prompt.metadata_json) == ("1+1=", "2", 1, '{"row": 1}')
    assert leased.policy_version == 1
    assert await driver.put(*(driver.finished(lease, 1) for lease in leased.leases)) == ["STORED", "STORED"]
    batch = await driver.take(0)
    header = batch.samples[1]
    assert (header.sample_id, header.index) == (f"{driver.run_id}-0-1", 1)
    assert (header.prompt_length, header.response_length, header.trained_token_count) == (4, 4, 3)
    assert (header.reward, header.min_version, header.max_version) == (1.0, 1, 1)
    assert (batch.policy_version, batch.ready_group_count, batch.stale_group_count) == (1, 0, 0)
    ids = [sample.sample_id for sample in batch.samples]
    samples = [sample_from_proto(message) for message in await driver.fetch(ids[::-1])]
    assert [sample.sample_id for sample in samples] == ids[::-1]
    expected = make_group(prompt_from_proto(prompt), 2, 1).samples[1]
    np.testing.assert_array_equal(samples[0].tokens, expected.tokens)
    np.testing.assert_array_equal(samples[0].loss_mask, expected.loss_mask)
    np.testing.assert_array_equal(samples[0].log_probs, expected.log_probs)
    assert (samples[0].response, samples[0].versions) == (expected.response, expected.versions)
    assert await driver.commit(0) == 2
    assert await driver.commit(0) == 2  # committing twice is not an error
    stats = await driver.stats()
    assert (stats.drawn_count, stats.consumed_count) == (2, 2)
    assert dict(stats.staleness_histogram) == {0: 2}


@pytest.mark.parametrize(("staleness", "interval", "expected"), [(0, 1, 2), (1, 1, 4), (3, 1, 8), (0, 2, 4)])
async def test_admission_follows_the_staleness_bound(driver, staleness, interval, expected):
    await driver.start(trainer={"max_staleness": staleness, "update_weights_interval": interval})
    assert (await driver.stats()).capacity == expected
    assert len((await driver.lease()).leases) == expected
    assert not (await driver.lease()).leases


async def test_the_buffer_size_and_the_end_of_the_run_bound_admission(driver):
    await driver.start(data={"async_buffer_size": 3}, trainer={"max_staleness": 9})
    assert len(await driver.produce()) == 3
    await driver.create(rollout={"num_rollout": 2}, data={"async_buffer_size": 100})
    assert len(await driver.produce()) == 1  # two steps of two groups are all that will be trained


async def test_the_same_request_gets_the_same_leases(driver):
    await driver.start()
    first = await driver.lease(request_id="a-request")
    again = await driver.lease(request_id="a-request", wait=5)
    assert [lease.lease_id for lease in first.leases] == [lease.lease_id for lease in again.leases]
    assert (await driver.stats()).drawn_count == 2


async def test_a_lease_waits_for_new_weights_and_no_longer_than_asked(driver):
    await driver.start()
    await driver.produce()
    started = time.monotonic()
    assert not (await driver.lease(wait=0.3)).leases
    assert 0.25 < time.monotonic() - started < 2
    waiting = asyncio.create_task(driver.lease(wait=20))
    await asyncio.sleep(0.05)
    await driver.take(0)
    await driver.commit(0)
    await driver.publish(1)
    assert len((await asyncio.wait_for(waiting, 5)).leases) == 2


async def test_a_batch_waits_for_enough_groups(driver):
    await driver.start()
    waiting = asyncio.create_task(driver.take(0, wait=20))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    await driver.produce()
    assert len((await asyncio.wait_for(waiting, 5)).samples) == 4


async def test_expired_leases_are_given_out_again_and_the_first_put_wins(driver):
    await driver.start()
    first = (await driver.lease(1, ttl=0.05)).leases[0]
    await asyncio.sleep(0.1)
    stats = await driver.stats()
    assert (stats.pending_count, stats.lease_expired_count) == (1, 1)
    extended = await driver.call("ExtendLeases", lease_ids=[first.lease_id, "nonsense"], ttl={"seconds": 60})
    assert sorted(extended.lost_lease_ids) == sorted([first.lease_id, "nonsense"])
    second = (await driver.lease(1)).leases[0]
    assert (second.prompt.ordinal, second.attempt) == (first.prompt.ordinal, 1)
    assert second.lease_id != first.lease_id
    assert await driver.put(driver.finished(first, 1)) == ["LEASE_LOST"]  # another node holds the prompt
    assert await driver.put(driver.finished(second, 1)) == ["STORED"]
    assert await driver.put(driver.finished(second, 1), driver.finished(first, 1)) == ["DUPLICATE", "DUPLICATE"]
    assert (await driver.stats()).ready_count == 1
    assert len(await driver.fetch([f"{second.prompt.group_id}-0"])) == 1  # the duplicates destroyed nothing


async def test_a_late_put_wins_while_nobody_holds_the_prompt(driver):
    await driver.start()
    lease = (await driver.lease(1, ttl=0.05)).leases[0]
    await asyncio.sleep(0.1)
    assert await driver.put(driver.finished(lease, 1)) == ["STORED"]
    assert (await driver.stats()).ready_count == 1


async def test_extended_leases_live_on(driver):
    await driver.start()
    lease = (await driver.lease(1, ttl=0.2)).leases[0]
    answer = await driver.call("ExtendLeases", lease_ids=[lease.lease_id], ttl={"seconds": 60})
    assert not answer.lost_lease_ids
    await asyncio.sleep(0.25)
    assert (await driver.stats()).leased_count == 1


async def test_released_prompts_are_tried_again_until_they_count_as_failed(driver):
    await driver.start(data={"max_prompt_attempts": 2})
    for attempt in range(2):
        lease = (await driver.lease(1)).leases[0]
        assert (lease.prompt.ordinal, lease.attempt) == (0, attempt)
        assert (await driver.call("ReleaseLeases", lease_ids=[lease.lease_id])).released_count == 1
        assert (await driver.call("ReleaseLeases", lease_ids=[lease.lease_id])).lost_lease_ids == [lease.lease_id]
    assert await driver.put(driver.finished(lease, 1)) == ["LEASE_LOST"]
    assert dict((await driver.stats()).evicted_by_reason) == {"FAILED": 1}


async def test_every_eviction_draws_exactly_one_more(driver):
    await driver.start()
    leases = (await driver.lease()).leases
    await driver.call("ReleaseLeases", lease_ids=[leases[0].lease_id], evict_reason="UNSCORED")
    assert [lease.prompt.ordinal for lease in (await driver.lease()).leases] == [2]
    stats = await driver.stats()
    assert (stats.drawn_count, stats.evicted_by_reason["UNSCORED"]) == (3, 1)
    error = await refusal(driver.call("ReleaseLeases", lease_ids=[leases[1].lease_id], evict_reason="not ok"))
    assert error.reason == "INVALID_FIELD"


async def test_broken_groups_are_refused_by_name_and_others_stored(driver):
    await driver.start(trainer={"max_staleness": 4})
    leases = (await driver.lease(7)).leases
    groups = [driver.finished(lease, 1) for lease in leases]
    del groups[0].group.samples[1]
    groups[1].group.samples[0].loss_mask.CopyFrom(groups[1].group.samples[0].tokens)
    groups[2].group.samples[0].versions[0].end = 2
    groups[3].lease_id = leases[4].lease_id
    groups[4].group.samples[1].sample_id = "another"
    groups[5].group.samples[0].reward = math.nan
    response = await driver.call("PutGroups", groups=groups)
    outcomes = [result.outcome for result in response.results]
    assert outcomes == [4, 4, 4, 4, 4, 4, 1]
    for result, words in zip(
        response.results,
        ("has samples of 1 rollouts", "loss_mask has", "do not cover", "does not belong", "'another'", "reward nan"),
        strict=False,
    ):
        assert words in result.message
    assert (await driver.stats()).leased_count == 6


async def test_the_same_step_returns_the_same_groups_and_steps_come_in_order(driver):
    await driver.start(trainer={"max_staleness": 1})
    await driver.produce()
    assert (await refusal(driver.take(1))).reason == "STEP_OUT_OF_ORDER"
    assert (await refusal(driver.commit(0))).reason == "STEP_OUT_OF_ORDER"
    first, again = await driver.take(0), await driver.take(0)
    assert group_ids(first) == group_ids(again) == [f"{driver.run_id}-0", f"{driver.run_id}-1"]
    assert (await driver.stats()).reserved_count == 2
    assert (await refusal(driver.commit(1))).reason == "STEP_OUT_OF_ORDER"
    await driver.commit(0)
    assert (await refusal(driver.take(0))).reason == "STEP_OUT_OF_ORDER"
    assert (await refusal(driver.checkpoint(1))).reason == "STEP_OUT_OF_ORDER"
    assert (await refusal(driver.take(1, count=0))).reason == "INVALID_FIELD"


async def test_a_batch_is_given_whole_or_not_at_all(driver):
    await driver.start()
    await driver.produce(1)
    batch = await driver.take(0)
    assert not batch.samples
    assert batch.ready_group_count == 1
    assert (await driver.stats()).reserved_count == 0


@pytest.mark.parametrize("policy", ["requeue", "drop"])
async def test_stale_groups_never_reach_the_trainer(driver, policy):
    await driver.start(trainer={"max_staleness": 0, "stale_policy": policy, "update_weights_interval": 2})
    await driver.produce()  # four groups of version 1
    await driver.take(0)
    await driver.commit(0)
    await driver.publish(1)
    stats = await driver.stats()
    assert (stats.stale_count, stats.ready_count) == (2, 0)
    assert dict(stats.evicted_by_reason) == ({"STALE": 2} if policy == "drop" else {})
    again = await driver.produce()
    assert [lease.prompt.ordinal for lease in again[:2]] == ([4, 5] if policy == "drop" else [2, 3])
    assert {lease.attempt for lease in again} == {0}  # stale is not failed
    batch = await driver.take(1)
    assert {header.min_version for header in batch.samples} == {2}
    assert batch.stale_group_count == 2


async def test_a_repeated_put_of_a_stale_group_does_not_come_back(driver):
    await driver.start(trainer={"update_weights_interval": 2})
    response = await driver.lease()
    late = [driver.finished(lease, 1) for lease in response.leases]
    await driver.put(*late)
    await driver.take(0)
    await driver.commit(0)
    await driver.publish(1)
    assert await driver.put(*late) == ["DUPLICATE"] * 4
    assert (await driver.stats()).ready_count == 0


async def test_older_versions_are_taken_first(driver):
    await driver.start(trainer={"max_staleness": 2})
    leases = (await driver.lease()).leases
    await driver.put(driver.finished(leases[0], 1))
    await driver.publish()
    fresh = (await driver.lease(1)).leases
    await driver.put(driver.finished(leases[3], 2), driver.finished(leases[2], 1))
    assert group_ids(await driver.take(0)) == [f"{driver.run_id}-0", f"{driver.run_id}-2"]
    assert (await driver.stats()).staleness_histogram == {1: 2}
    assert not fresh


async def test_restoring_a_checkpoint_loses_and_doubles_nothing(driver):
    await driver.start(trainer={"max_staleness": 1})
    trained = [await driver.step(step) for step in range(3)]
    assert await driver.checkpoint(0) == 2
    await driver.take(3)
    held = (await driver.lease()).leases
    await driver.session()
    answer = await driver.restore(0)
    assert (answer.returned_group_count, answer.released_lease_count) == (6, len(held))
    run = (await driver.call("GetRun")).run
    assert (run.committed_step, run.checkpoint_step, run.checkpoint_path) == (0, 0, "ckpt/0")
    assert (await driver.stats()).capacity == 0  # until the restored trainer publishes its weights
    if held:
        assert await driver.put(driver.finished(held[0], 4)) == ["LEASE_LOST"]
    await driver.publish(1)
    again = trained[:1] + [await driver.step(step) for step in range(1, 6)]
    flat = [group for groups in again for group in groups]
    assert len(flat) == len(set(flat)) == 12
    assert set(flat) == {f"{driver.run_id}-{ordinal}" for ordinal in range(12)}


async def test_what_a_checkpoint_covers_is_freed_and_what_it_does_not_is_kept(driver):
    await driver.start(trainer={"max_staleness": 3})
    first = await driver.step(0)
    second = await driver.step(1)
    before = (await driver.stats()).payload_bytes
    await driver.checkpoint(0)
    after = (await driver.stats()).payload_bytes
    assert 0 < after < before
    assert (await refusal(driver.fetch([f"{first[0]}-0"]))).reason == "SAMPLE_NOT_FOUND"
    assert len(await driver.fetch([f"{second[0]}-0"])) == 1
    kept = await driver.call("GetGroup", group_id=first[0])
    assert kept.group.samples[0].response == f"answer 0 of {first[0]}"
    assert not kept.group.samples[0].HasField("tokens")
    # Back to the beginning: what was freed is generated again, what is still there is not.
    await driver.restore(-1)
    states = await driver.states()
    assert [states[0], states[1], states[2], states[3]] == ["PENDING", "PENDING", "READY", "READY"]
    assert (await driver.call("GetRun")).run.checkpoint_step == -1


async def test_a_run_without_checkpoints_on_the_way_frees_payload_at_the_commit(driver):
    await driver.start(trainer={"save_interval": None})
    groups = await driver.step(0)
    assert (await driver.stats()).payload_bytes == 0
    assert (await refusal(driver.fetch([f"{groups[0]}-0"]))).reason == "SAMPLE_NOT_FOUND"
    await driver.restore(-1)
    assert set((await driver.states()).values()) == {"PENDING"}


async def test_a_checkpoint_written_before_its_commit_counts(driver):
    await driver.start()
    await driver.produce()
    await driver.take(0)
    assert (await driver.restore(0)).returned_group_count == 0
    assert (await driver.stats()).consumed_count == 2
    error = await refusal(driver.restore(1))
    assert (error.code, error.reason) == (Code.FAILED_PRECONDITION, "STEP_NOT_RESTORABLE")


async def test_epochs_end_by_name_and_every_prompt_is_trained_once(driver):
    await driver.start(data={"num_epoch": 1, "rollout_shuffle": True})
    trained = [group for step in range(10) for group in await driver.step(step)]
    assert len(set(trained)) == 20
    rows = {(await driver.call("GetGroup", group_id=group)).prompt.row for group in trained}
    assert rows == set(range(20))
    error = await refusal(driver.take(10, wait=5))
    assert (error.code, error.reason) == (Code.FAILED_PRECONDITION, "DATA_EXHAUSTED")


async def test_supervised_runs_need_no_weights_and_never_grow_stale(driver):
    await driver.create(trainer={"loss_type": "sft_loss"})
    await driver.session()
    leases = (await driver.lease()).leases
    assert len(leases) == 8
    await driver.put(*(driver.finished(lease, None, reward=0.0) for lease in leases))
    await driver.publish()
    await driver.publish()
    assert len(group_ids(await driver.take(0))) == 2
    assert (await driver.stats()).staleness_histogram == {0: 2}


async def test_groups_without_engine_tokens_are_as_old_as_the_current_weights(driver):
    await driver.start()
    leases = (await driver.lease()).leases
    await driver.put(*(driver.finished(lease, None, reward=None) for lease in leases))
    batch = await driver.take(0)
    assert not batch.samples[0].HasField("reward")
    assert len(batch.samples) == 4


async def test_groups_are_listed_by_state_step_and_page(driver):
    await driver.start(trainer={"max_staleness": 2})
    await driver.step(0)
    lease = (await driver.lease(1)).leases[0]

    async def listed(**fields) -> list[int]:
        return [info.ordinal for info in (await driver.call("ListGroups", **fields)).groups]

    assert await listed(step=0) == [0, 1]
    assert await listed(states=[run_pb2.GROUP_STATE_LEASED]) == [lease.prompt.ordinal]
    assert await listed(states=[run_pb2.GROUP_STATE_CONSUMED]) == [0, 1]
    page = await driver.call("ListGroups", page_size=3)
    assert [info.ordinal for info in page.groups] == [0, 1, 2]
    assert page.next_page_token == "3"
    assert await listed(page_size=500, page_token="3") == list(range(3, len(await driver.states())))
    info = page.groups[0]
    assert (info.step, list(info.rewards), info.mean_response_length, info.lease_count) == (0, [1.0, 1.0], 4.0, 1)
    assert (await refusal(driver.call("GetGroup", group_id="other-0"))).reason == "GROUP_NOT_FOUND"
    assert (await refusal(driver.call("GetGroup", group_id=f"{driver.run_id}-999"))).reason == "GROUP_NOT_FOUND"
    assert (await refusal(driver.call("ListGroups", states=[0]))).reason == "INVALID_FIELD"


async def test_evaluation_sets_are_paged_in_file_order(driver, data, tmp_path):
    path = tmp_path / "held_out.jsonl"
    path.write_text('{"question": "2+2=", "label": "4"}\n\n{"question": "3+3=", "label": "6"}\n')
    await driver.create(data={"eval_prompt_data": ["sums", str(path)], "eval_input_key": "question"})
    page = await driver.call("ListEvalPrompts", dataset="sums", page_size=1)
    assert [(p.group_id, p.text, p.label) for p in page.prompts] == [("eval-sums-0", "2+2=", "4")]
    rest = await driver.call("ListEvalPrompts", dataset="sums", page_token=page.next_page_token)
    assert [(p.group_id, p.text) for p in rest.prompts] == [("eval-sums-1", "3+3=")]
    assert rest.next_page_token == ""
    error = await refusal(driver.call("ListEvalPrompts", dataset="sum"))
    assert (error.reason, "it has: sums" in error.message) == ("DATASET_NOT_FOUND", True)


async def test_runs_do_not_see_each_other(driver, channel, data):
    other = Driver(channel, driver.run_id + "-2", *data)
    await driver.start()
    await other.start()
    mine = await driver.produce()
    error = await refusal(other.fetch([f"{mine[0].prompt.group_id}-0"]))
    assert error.reason == "SAMPLE_NOT_FOUND"
    assert (await other.stats()).drawn_count == 0
