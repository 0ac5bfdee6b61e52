"""CreateRun, sessions, ends, versions and the registry."""

from __future__ import annotations

import json

import pytest
from google.protobuf.duration_pb2 import Duration
from tetrarch.buffer.v1 import buffer_service_pb2 as pb
from tetrarch.buffer.v1 import registry_service_pb2 as registry_pb
from tetrarch.buffer.v1 import registry_service_pb2_grpc, run_pb2

from services.common.channel import translate_errors
from services.common.errors import Code
from tests.contract.buffer_v1.driver import refusal

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_create_is_idempotent(driver):
    first, second = await driver.create(), await driver.create()
    assert first.created
    assert not second.created
    assert first.run == second.run
    assert first.row_count == second.row_count == 20
    assert first.run.committed_step == first.run.checkpoint_step == -1
    assert json.loads(first.run.spec_json)["rollout"]["rollout_batch_size"] == 2


async def test_other_settings_are_refused_by_name_but_some_may_change(driver):
    await driver.create()
    answer = await driver.create(rollout={"num_rollout": 200}, services={"buffer": "127.0.0.1:1"})
    assert json.loads(answer.run.spec_json)["rollout"]["num_rollout"] == 200
    error = await refusal(driver.create(trainer={"max_staleness": 3}, data={"rollout_seed": 7}))
    assert (error.code, error.reason) == (Code.ALREADY_EXISTS, "RUN_EXISTS")
    assert "trainer.max_staleness (0 → 3)" in error.message
    assert "data.rollout_seed (42 → 7)" in error.message
    assert "num_rollout" not in error.message


async def test_an_ended_run_is_opened_again_when_something_is_left_to_do(driver):
    await driver.create()

    async def end(state):
        return (await driver.call("FinishRun", state=state, reason="because")).run

    assert (await end(run_pb2.RUN_STATE_FAILED)).reason == "because"
    assert (await end(run_pb2.RUN_STATE_FINISHED)).state == run_pb2.RUN_STATE_FAILED  # the first end is kept
    assert (await refusal(driver.call("BeginSession", caller="t"))).reason == "RUN_FINISHED"
    assert (await refusal(driver.lease())).reason == "RUN_FINISHED"
    run = (await driver.create()).run
    assert run.state == run_pb2.RUN_STATE_ACTIVE
    assert run.reason == ""
    await end(run_pb2.RUN_STATE_FINISHED)
    assert (await driver.create()).run.state == run_pb2.RUN_STATE_FINISHED
    assert (await driver.create(rollout={"num_rollout": 101})).run.state == run_pb2.RUN_STATE_ACTIVE


async def test_a_newer_session_fences_the_older(driver):
    await driver.start()
    old = driver.epoch
    await driver.session()
    new, driver.epoch = driver.epoch, old
    assert new == old + 1
    for call in (
        driver.take(0),
        driver.commit(0),
        driver.checkpoint(0),
        driver.restore(-1),
        driver.publish(),
        driver.call("FinishRun", state=run_pb2.RUN_STATE_FAILED, trainer_epoch=old),
    ):
        error = await refusal(call)
        assert (error.code, error.reason) == (Code.FAILED_PRECONDITION, "FENCED")
    assert f"session {new} holds the run" in error.message


async def test_versions_only_grow(driver):
    await driver.start()
    versions = [(await driver.call("ReserveVersion", trainer_epoch=1)).version for _ in range(3)]
    assert versions == [2, 3, 4]
    await driver.call("PublishVersion", trainer_epoch=1, version=3, step_count=1)
    await driver.call("PublishVersion", trainer_epoch=1, version=3, step_count=1)
    for version in (2, 5):
        error = await refusal(driver.call("PublishVersion", trainer_epoch=1, version=version, step_count=1))
        assert error.reason == "INVALID_FIELD"
    run = (await driver.call("GetRun")).run
    assert (run.policy_version, run.reserved_version) == (3, 4)


async def test_runs_are_listed_newest_first_and_by_state(driver):
    await driver.create()
    finished = driver.run_id
    await driver.call("FinishRun", state=run_pb2.RUN_STATE_STOPPED)
    driver.run_id = finished + "-b"
    await driver.create()
    listed = await driver.stub.ListRuns(pb.ListRunsRequest(page_size=2))
    assert [run.run_id for run in listed.runs] == [driver.run_id, finished]
    active = await driver.stub.ListRuns(pb.ListRunsRequest(states=[run_pb2.RUN_STATE_ACTIVE]))
    assert driver.run_id in [run.run_id for run in active.runs]
    assert finished not in [run.run_id for run in active.runs]
    page = await driver.stub.ListRuns(pb.ListRunsRequest(page_size=1, page_token="1"))
    assert [run.run_id for run in page.runs] == [finished]
    driver.run_id = finished
    await driver.create()  # opened again: nodes serve it now
    assert (await driver.stub.ListRuns(pb.ListRunsRequest(page_size=1))).runs[0].run_id == finished


async def test_an_unknown_run_is_named(driver):
    for call in (driver.stats(), driver.lease(), driver.take(0), driver.call("GetRun"), driver.fetch(["x-0-0"])):
        error = await refusal(call)
        assert (error.code, error.reason) == (Code.NOT_FOUND, "RUN_NOT_FOUND")
        assert repr(driver.run_id) in error.message


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"input": "1+1=", "label": "2"', ":2: not valid JSON"),
        ("[1, 2]", ":2: expected a JSON object, found list"),
        ('{"input": "1+1=", "lable": "2"}', ":2: no field 'label' (label_key); the row has input, lable; did you mean"),
        ('{"label": "2"}', ":2: no field 'input' (input_key)"),
        ('{"input": 5, "label": "2"}', ":2: field 'input' must be a string or a list of chat messages"),
        ('{"input": [{"role": "user", "content": "x"}], "label": "2"}', "set apply_chat_template"),
        ('{"input": "", "label": "2"}', ":2: field 'input' is empty"),
        ('{"input": "x", "label": "2", "metadata": 3}', ":2: field 'metadata' must be an object"),
    ],
)
async def test_bad_rows_are_named_by_file_and_line(driver, tmp_path, line, words):
    path = tmp_path / "bad.jsonl"
    path.write_text('{"input": "0+1=", "label": "1", "metadata": {}}\n' + line + "\n")
    error = await refusal(driver.create(data={"prompt_data": str(path)}))
    assert (error.code, error.reason) == (Code.INVALID_ARGUMENT, "DATA_MALFORMED")
    assert error.message.startswith(str(path))
    assert words in error.message
    assert (await refusal(driver.call("GetRun"))).reason == "RUN_NOT_FOUND"  # nothing was started


async def test_bad_settings_are_one_sentence_each(driver, data, tmp_path):
    missing = await refusal(driver.create(data={"prompt_data": str(tmp_path / "none.jsonl")}))
    assert (missing.code, missing.reason) == (Code.NOT_FOUND, "DATA_NOT_FOUND")
    assert "prompt_data: cannot read" in missing.message
    assert "prompt_data is not set" in (await refusal(driver.create(data={"prompt_data": None}))).message
    driver.spec["data"]["prompt_data"] = str(data[0])
    law = await refusal(driver.create(trainer={"global_batch_size": 3}))
    assert (law.reason, "batch law is violated" in law.message) == ("INVALID_FIELD", True)
    del driver.spec["trainer"]["global_batch_size"]
    small = await refusal(driver.create(data={"async_buffer_size": 1}))
    assert "async_buffer_size is 1: it is below rollout_batch_size 2" in small.message
    driver.spec["data"] |= {"async_buffer_size": None}
    where = await refusal(driver.create(rollout={"hf_checkpoint": str(tmp_path / "no-model")}))
    assert "there is no such directory" in where.message
    assert "Unknown key" in (await refusal(driver.create(rollout={"nonsense": 1}))).message
    driver.run_id = "no spaces"
    assert "run_id is 'no spaces'" in (await refusal(driver.create())).message


async def test_members_live_as_long_as_their_lease(channel):
    stub = registry_service_pb2_grpc.RegistryServiceStub(channel)

    async def register(name: str, tier: str, milliseconds: int) -> None:
        member = registry_pb.Member(
            member_id=name, tier=tier, address="127.0.0.1:1", incarnation="a", attributes={"run": "r"}
        )
        ttl = Duration(seconds=milliseconds // 1000, nanos=milliseconds % 1000 * 1_000_000)
        response = await stub.RegisterMember(registry_pb.RegisterMemberRequest(member=member, ttl=ttl))
        assert response.expire_time.seconds > 0

    async def names(tier: str = "") -> list[str]:
        members = (await stub.ListMembers(registry_pb.ListMembersRequest(tier=tier))).members
        # Under `tetrarch_contract` others may live in the same registry.
        return [member.member_id for member in members if member.attributes == {"run": "r"}]

    await register("node-b", "rollout", 60_000)
    await register("node-a", "rollout", 60_000)
    await register("grader", "reward", 60_000)
    await register("brief", "rollout", 1)
    await register("brief", "rollout", 1)
    assert [name for name in await names("rollout") if name != "brief"] == ["node-a", "node-b"]
    await stub.RemoveMember(registry_pb.RemoveMemberRequest(member_id="node-a"))
    await stub.RemoveMember(registry_pb.RemoveMemberRequest(member_id="unknown"))
    assert await names() == ["grader", "node-b"]
    async with translate_errors():
        members = (await stub.ListMembers(registry_pb.ListMembersRequest(tier="reward"))).members
    assert "grader" in [member.member_id for member in members if member.attributes == {"run": "r"}]
    await stub.RemoveMember(registry_pb.RemoveMemberRequest(member_id="node-b"))
    await stub.RemoveMember(registry_pb.RemoveMemberRequest(member_id="grader"))
