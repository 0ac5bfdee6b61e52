"""Weight updates over a real gloo group, with the trainer's side of it in this process."""

from __future__ import annotations

import asyncio
import itertools
import time

import numpy as np
import pytest

from services.common.errors import Code, ServiceError
from services.rollout.adapters.sglang import checksum
from services.rollout.core.engine_port import TensorSpec
from tests.contract.engine.conftest import GROUP_SECONDS
from tests.contract.engine.test_generation import PROMPT, SECONDS, reference_log_probs, request
from tests.support.engine import TrainerSide, tensor_bytes, tensor_specs

NUMBERS = itertools.count()


@pytest.fixture
async def joined(engine):
    """A group with the engine in it."""
    trainer = TrainerSide(f"weights-{next(NUMBERS)}")
    await asyncio.gather(asyncio.to_thread(trainer.join), engine.join_group(trainer.spec, SECONDS))
    yield trainer
    await engine.leave_group(trainer.spec.name, SECONDS)
    trainer.leave()


async def push(engine, trainer: TrainerSide, tensors: dict, bucket_count: int = 3) -> None:
    """One update of `tensors` in flat buckets."""
    await engine.begin_update()
    names = list(tensors)
    for start in range(bucket_count):
        part = {name: tensors[name] for name in names[start::bucket_count]}
        receiving = engine.receive_bucket(tensor_specs(part), trainer.spec.name, SECONDS)
        await asyncio.gather(receiving, asyncio.to_thread(trainer.send, part))
    await engine.end_update()


def expected(rules, tensors: dict) -> dict[str, str]:
    """Checksum of each rule's tensor, of what was sent."""
    return {
        rule.engine_name: checksum(
            *(tensor_bytes(tensors[name]) for name in rule.source_names), bytes(rule.padding_bytes)
        )
        for rule in rules
    }


def changed(tensors: dict, amount: float) -> dict:
    """Other weights of the same shapes."""
    return {name: tensor + amount * (1 + index) for index, (name, tensor) in enumerate(tensors.items())}


async def test_an_update_is_held_bit_for_bit_and_restores(engine, tensors, joined):
    rules = await engine.checksum_rules(tensor_specs(tensors))
    assert engine.checksum_algorithm == "sha256-64"
    assert {name for rule in rules for name in rule.source_names} == set(tensors)
    assert {rule.engine_name for rule in rules} == set(await engine.checksums())
    for weights in (changed(tensors, 0.01), tensors):
        await engine.pause("retract")
        await push(engine, joined, weights)
        held = await engine.checksums()
        assert held == expected(rules, weights)
        await engine.set_version(await engine.version() + 1)
        await engine.resume()


async def test_new_weights_change_what_is_generated(engine, tensors, joined):
    await push(engine, joined, tensors)
    await engine.set_version(100)
    before = (await engine.generate(request(temperature=0.0), SECONDS))[0]
    await push(engine, joined, changed(tensors, 0.05))
    await engine.set_version(101)
    await engine.flush_cache()
    after = (await engine.generate(request(temperature=0.0), SECONDS))[0]
    await push(engine, joined, tensors)
    await engine.set_version(100)
    await engine.flush_cache()
    again = (await engine.generate(request(temperature=0.0), SECONDS))[0]
    assert before.output_ids.tolist() != after.output_ids.tolist()
    assert before.output_ids.tolist() == again.output_ids.tolist()
    assert [g.versions[0].version for g in (before, after, again)] == [100, 101, 100]


async def test_an_update_passes_under_a_request_in_flight(engine, tensors, joined):
    await engine.set_version(200)
    running = asyncio.create_task(engine.generate(request(tokens=300, extra={"ignore_eos": True}), SECONDS))
    await asyncio.sleep(0.3)
    await engine.pause("in_place")
    await push(engine, joined, tensors)
    await engine.set_version(201)
    await engine.resume()
    (generation,) = await running
    assert [span.version for span in generation.versions] == [200, 201]
    assert len(generation.output_ids) == 300


async def test_after_a_retract_each_token_has_the_log_prob_of_its_own_version(engine, engine_process, tensors, joined):
    """Tokens before the update under the old weights, tokens after it under the new: no old cache is read."""
    if engine_process.kind == "simulated":
        pytest.skip("it has no model")
    await push(engine, joined, tensors)
    await engine.flush_cache()
    running = asyncio.create_task(engine.generate(request(tokens=200, extra={"ignore_eos": True}), SECONDS))
    await asyncio.sleep(0.3)
    weights = changed(tensors, 0.02)
    await engine.pause("retract")
    await engine.flush_cache()
    await push(engine, joined, weights)
    await engine.set_version(await engine.version() + 1)
    await engine.resume()
    (generation,) = await running
    await push(engine, joined, tensors)
    await engine.flush_cache()
    border = generation.versions[0].end
    assert 0 < border < 200
    old, new = (
        reference_log_probs(engine_process.checkpoint, PROMPT, generation.output_ids, 1.0, held)
        for held in (tensors, weights)
    )
    np.testing.assert_allclose(generation.log_probs, np.concatenate([old[:border], new[border:]]), atol=1e-4)
    assert np.abs(old - new).max() > 1e-2


async def test_an_engine_joins_again_after_it_left(engine, tensors):
    name = f"again-{next(NUMBERS)}"
    for _ in range(2):
        trainer = TrainerSide(name)
        await asyncio.gather(asyncio.to_thread(trainer.join), engine.join_group(trainer.spec, SECONDS))
        await push(engine, trainer, tensors, bucket_count=1)
        await engine.leave_group(name, SECONDS)
        trainer.leave()
    await engine.leave_group(name, SECONDS)  # leaving twice is no error


async def test_a_bucket_outside_an_update_fails_at_once(engine, tensors, joined):
    begun = time.monotonic()
    with pytest.raises(ServiceError, match="begin_weight_update") as caught:
        await engine.receive_bucket(tensor_specs(tensors), joined.spec.name, SECONDS)
    assert caught.value.reason == "TRANSFER_FAILED"
    assert time.monotonic() - begun < 5.0
    assert await engine.health(5.0)


async def test_a_bucket_for_an_unknown_group_fails_at_once(engine, tensors):
    await engine.begin_update()
    with pytest.raises(ServiceError) as caught:
        await engine.receive_bucket(tensor_specs(tensors), "nowhere", 10.0)
    assert caught.value.reason == "TRANSFER_FAILED"
    await engine.end_update()
    assert await engine.health(5.0)


async def test_a_tensor_without_a_place_is_named_before_anything_is_sent(engine, tensors):
    specs = [*tensor_specs(tensors), TensorSpec("model.layers.9.mlp.up_proj.weight", "float32", (2, 2))]
    with pytest.raises(ServiceError, match=r"model\.layers\.9\.mlp\.up_proj") as caught:
        await engine.checksum_rules(specs)
    assert (caught.value.code, caught.value.reason) == (Code.FAILED_PRECONDITION, "TENSORS_UNKNOWN")


async def test_a_trainer_that_dies_in_a_transfer_breaks_only_that_group(engine, tensors):
    trainer = TrainerSide(f"dying-{next(NUMBERS)}")
    await asyncio.gather(asyncio.to_thread(trainer.join), engine.join_group(trainer.spec, SECONDS))
    await engine.begin_update()
    receiving = asyncio.create_task(engine.receive_bucket(tensor_specs(tensors), trainer.spec.name, SECONDS))
    await asyncio.sleep(0.3)
    trainer.leave()
    with pytest.raises(ServiceError) as caught:
        await receiving
    assert caught.value.reason == "TRANSFER_FAILED"
    await engine.leave_group(trainer.spec.name, SECONDS)
    await engine.end_update()
    assert await engine.health(5.0)
    other = TrainerSide(f"next-{next(NUMBERS)}")
    await asyncio.gather(asyncio.to_thread(other.join), engine.join_group(other.spec, SECONDS))
    await push(engine, other, tensors)
    assert await engine.checksums() == expected(await engine.checksum_rules(tensor_specs(tensors)), tensors)
    await engine.leave_group(other.spec.name, SECONDS)
    other.leave()


async def test_an_engine_that_waits_for_a_group_in_vain_serves_again(engine):
    trainer = TrainerSide("nobody")
    with pytest.raises(ServiceError):
        await engine.join_group(trainer.spec, GROUP_SECONDS + 12.0)
    assert await engine.health(5.0)
    assert len(await engine.generate(request(), SECONDS)) == 1


async def test_a_dtype_the_engine_would_convert_is_refused(engine, engine_process, tensors):
    if engine_process.kind == "simulated":
        pytest.skip("it holds what it is sent")
    specs = [TensorSpec(spec.name, "bfloat16", spec.shape) for spec in tensor_specs(tensors)]
    with pytest.raises(ServiceError, match=r"sent as bfloat16, but the engine .* holds float32"):
        await engine.checksum_rules(specs)
