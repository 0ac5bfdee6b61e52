"""Lease, generate, score, put; evaluation; user functions; supervised runs; drains."""

from __future__ import annotations

import asyncio
import textwrap

import grpc
import numpy as np
import pytest
from tetrarch.buffer.v1 import buffer_service_pb2, registry_service_pb2
from tetrarch.common.v1 import sample_pb2
from tetrarch.rollout.v1 import engine_pb2
from tetrarch.rollout.v1 import rollout_service_pb2 as pb2

from services.common.channel import service_error
from services.common.convert import sample_from_proto
from services.common.tensors import to_proto
from tests.contract.rollout_v1.conftest import until
from tests.contract.rollout_v1.trainer_side import push

STALE, READY = engine_pb2.ENGINE_STATE_STALE, engine_pb2.ENGINE_STATE_READY


async def serving(client, **groups) -> engine_pb2.Engine:
    """A run whose only engine serves version 1, published."""
    await client.create_run(**groups)
    (engine,) = await client.engines(STALE)
    await push(client, engine, 1)
    (engine,) = await client.engines(READY)
    await client.publish(1)
    return engine


async def test_a_supervised_run_needs_no_engine(client):
    await client.create_run(
        rollout={"n_samples_per_prompt": 1, "rollout_batch_size": 16}, trainer={"loss_type": "sft_loss"}
    )
    groups = await client.ready_groups(16)
    for got in groups:
        (sample,) = (sample_from_proto(message) for message in got.group.samples)
        assert sample.response == got.prompt.label
        assert (sample.reward, sample.versions, sample.log_probs.any()) == (0.0, (), False)
        assert sample.response_length == len(got.prompt.label) + 1
    assert not (await client.node()).engines


async def test_prompts_become_scored_groups_of_the_published_version(client):
    engine = await serving(client)
    groups = await client.ready_groups(8)
    assert len(groups) == 8
    for got in groups:
        samples = [sample_from_proto(message) for message in got.group.samples]
        assert [sample.index for sample in samples] == [0, 1]
        for sample in samples:
            assert not sample.problem()
            assert (sample.min_version, sample.max_version) == (1, 1)
            assert sample.reward is not None
            assert sample.loss_mask.all()
            assert (sample.log_probs < 0).all()
            assert sample.engine_id == engine.engine_id
            assert (
                sample.tokens[: sample.prompt_length].tolist()
                == np.frombuffer(got.prompt.tokens.data, np.int32).tolist()
            )
    node = await client.node()
    assert node.finished_group_count >= 8
    assert node.generated_token_count >= sum(s.response_length for got in groups for s in got.group.samples)
    assert not node.problem
    stats = await client.stats()
    assert (stats.ready_count, stats.leased_count) == (8, 0)


async def test_a_node_is_listed_in_the_registry(client):
    await client.create_run()

    async def listed() -> bool:
        answer = await client.registry.ListMembers(registry_service_pb2.ListMembersRequest(tier="rollout"))
        return [(m.member_id, m.address) for m in answer.members] == [("node", client.world.node.address)]

    await until(listed, 10)


async def test_engines_are_reused_by_the_next_run_but_know_no_version_of_it(client):
    first = await serving(client)
    await client.finish_run()
    await client.create_run(rollout={"n_samples_per_prompt": 3})
    (second,) = await client.engines(STALE)
    assert (second.pid, second.incarnation, second.weight_version) == (first.pid, first.incarnation, 0)
    client.updates = 0  # epochs of another run start over
    await push(client, second, 1)
    await client.publish(1)
    groups = await client.ready_groups(8)
    assert all(len(got.group.samples) == 3 for got in groups)


async def test_evaluation_counts_every_prompt(client):
    await serving(client, rollout={"eval_temperature": 0, "n_samples_per_eval_prompt": 2})
    messages = [m async for m in client.rollout.Evaluate(pb2.EvaluateRequest(run_id=client.run_id, dataset="held"))]
    assert [m.done_prompt_count for m in messages[:-1]] == list(range(11))
    result = messages[-1].result
    assert (result.scored_count, result.unscored_count, result.min_version, result.max_version) == (20, 0, 1, 1)
    first, second = result.examples[:2]
    assert first.group_id == second.group_id
    assert first.response == second.response  # greedy
    assert not first.HasField("tokens")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        [m async for m in client.rollout.Evaluate(pb2.EvaluateRequest(run_id=client.run_id, dataset="no"))]
    error = service_error(caught.value)
    assert error.reason == "DATASET_NOT_FOUND"
    assert "held" in str(error)


async def test_generate_answers_text_and_refuses_what_an_engine_cannot_take(client):
    await serving(client)
    sampling = sample_pb2.SamplingParams(max_new_tokens=5)

    def request(run_id=client.run_id, **prompt):
        return pb2.GenerateRequest(run_id=run_id, prompt=prompt, sample_count=2, sampling=sampling)

    answer = await client.rollout.Generate(request(text="1+1="))
    assert [sample.prompt_length for sample in answer.samples] == [4, 4]
    assert all(1 <= sample.response_length <= 5 for sample in answer.samples)
    for prompt, reason in (
        ({"tokens": to_proto(np.array([5000], np.int32))}, "TOKEN_OUT_OF_RANGE"),
        ({"tokens": to_proto(np.zeros(600, np.int32))}, "PROMPT_TOO_LONG"),
        ({}, "INVALID_FIELD"),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await client.rollout.Generate(request(**prompt))
        assert service_error(caught.value).reason == reason
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await client.rollout.Generate(request("other", text="1"))
    assert service_error(caught.value).reason == "RUN_NOT_SERVED"


async def test_user_functions_of_both_signatures(client):
    (client.world.directory / "user_functions.py").write_text(
        textwrap.dedent(
            """
            import aiohttp

            async def two_turns(context, prompt, sampling):
                trajectory = context.start(prompt)
                trajectory.append_generation(await context.generate(trajectory.input_ids, sampling))
                trajectory.append_environment(context.tokenizer.encode("\\n"), seconds=0.5)
                trajectory.append_generation(await context.generate(trajectory.input_ids, sampling))
                return trajectory

            async def slime(args, sample, sampling_params):
                url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
                ids = [ord(char) % 256 for char in sample.prompt]
                body = {"input_ids": ids, "sampling_params": sampling_params, "return_logprob": True}
                async with aiohttp.ClientSession() as session, session.post(url, json=body) as response:
                    answer = await response.json()
                pairs = answer["meta_info"]["output_token_logprobs"]
                sample.tokens = ids + [pair[1] for pair in pairs]
                sample.response_length = len(pairs)
                sample.rollout_log_probs = [pair[0] for pair in pairs]
                sample.status = sample.Status.COMPLETED
                sample.reward = 0.25
                return sample
            """
        )
    )
    path = "user_functions.two_turns"
    await serving(client, rollout={"custom_generate_function_path": path, "max_turns": 2})
    for got in await client.ready_groups(8):
        sample = sample_from_proto(got.group.samples[0])
        assert (sample.turn_count, sample.tool_seconds) == (2, 0.5)
        assert (sample.loss_mask == 0).sum() == 1
        assert sample.log_probs[sample.loss_mask == 0].tolist() == [0.0]
        assert sample.versions[0].end == sample.response_length
    await client.finish_run()
    client.updates = 0
    await serving(client, rollout={"custom_generate_function_path": "user_functions.slime"})
    for got in await client.ready_groups(8):
        sample = sample_from_proto(got.group.samples[0])
        assert (sample.reward, sample.min_version, sample.max_version) == (0.25, 1, 1)
    await client.finish_run()
    client.updates = 0
    calculator = "examples.tool_calculator.generate.generate"
    await serving(client, rollout={"custom_generate_function_path": calculator, "max_turns": 2})
    for got in await client.ready_groups(8):
        assert sample_from_proto(got.group.samples[0]).turn_count == 1  # random tokens call no tool


async def test_a_function_that_cannot_be_loaded_is_the_nodes_problem(client):
    await client.create_run(rollout={"custom_generate_function_path": "no_such.module.f"})

    async def said() -> bool:
        return "there is no module 'no_such'" in (await client.node()).problem

    await until(said, 10)


async def test_a_node_that_stops_gives_its_leases_back(client):
    """Comes last: the node is told to stop while it generates."""
    world = client.world
    (world.directory / "endless.py").write_text(
        "import asyncio\nasync def generate(context, prompt, sampling): await asyncio.sleep(600)\n"
    )
    await serving(client, rollout={"custom_generate_function_path": "endless.generate"})

    async def leased(count: int) -> bool:
        return (await client.stats()).leased_count == count

    await until(lambda: leased(8), 10)
    assert world.node.stop() == 0
    stats = await client.stats()
    assert (stats.leased_count, stats.pending_count, stats.lease_expired_count) == (0, 8, 0)
    members = await client.registry.ListMembers(registry_service_pb2.ListMembersRequest(tier="rollout"))
    assert not members.members
    world.node = None


async def test_a_node_that_stops_hands_over_what_it_has_made(client):
    """Comes after the last: it needs a node of its own, and stops it."""
    world = client.world
    engine = {"tokens_per_second": 40, "mean_response_len": 2000}
    await serving(client, rollout={"rollout_max_response_len": 500, "simulated": engine})

    async def leased(count: int) -> bool:
        return (await client.stats()).leased_count == count

    await until(lambda: leased(8), 10)
    await asyncio.sleep(1.0)
    assert world.node.stop() == 0
    world.node = None
    stats = await client.stats()
    assert (stats.pending_count, stats.evicted_count, stats.lease_expired_count) == (8, 0, 0)
    request = buffer_service_pb2.LeasePromptsRequest(
        run_id=client.run_id, request_id="test", caller="test", max_prompt_count=8
    )
    request.ttl.FromSeconds(60)
    leases = (await client.buffer.LeasePrompts(request)).leases
    assert [lease.attempt for lease in leases] == [0] * 8
    shares = [sample_from_proto(sample) for lease in leases for sample in lease.partial.samples]
    assert len(shares) == 16
    assert min(share.response_length for share in shares) > 10
    assert {share.versions[0].version for share in shares} == {1}
