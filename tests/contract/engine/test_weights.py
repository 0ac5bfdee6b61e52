"""Weight updates over a real group, with the trainer's side of it in this process.

What an engine must hold is computed by the trainer's own function: both ends are compared for real."""

from __future__ import annotations

import asyncio
import time

import numpy as np
import pytest

from services.checksums.compute import ALGORITHMS, digest
from services.common.errors import Code, ServiceError
from services.rollout.core.engine_port import TensorSpec
from tests.contract.engine.conftest import NUMBERS, meet, part
from tests.contract.engine.test_generation import (
    PROMPT,
    SECONDS,
    assert_close,
    long_request,
    reference_log_probs,
    request,
)
from tests.contract.engine.test_pause import assert_aborted, assert_versions
from tests.support.weight_group import TrainerSide, in_thread, raw_bytes, tensor_specs


async def push(engine, trainer: TrainerSide, tensors: dict, bucket_count: int = 3) -> None:
    """One update of `tensors` in flat buckets."""
    await engine.begin_update()
    names = list(tensors)
    for start in range(bucket_count):
        bucket = {name: tensors[name] for name in names[start::bucket_count]}
        receiving = engine.receive_bucket(tensor_specs(bucket), trainer.spec.name, SECONDS)
        await asyncio.gather(receiving, in_thread(trainer.send, bucket, seconds=SECONDS))
    await engine.end_update()


def expected(engine, rules, tensors: dict) -> dict[str, str]:
    """What the trainer expects of each rule's tensor, from what was sent."""
    return {
        rule.engine_name: digest(
            [raw_bytes(tensors[name]) for name in rule.source_names], rule.padding_bytes, engine.checksum_algorithm
        )
        for rule in rules
    }


def changed(tensors: dict, amount: float) -> dict:
    """Other weights of the same shapes: noise of `amount` times each matrix's spread (a tenth for vectors)."""
    import torch

    source = torch.Generator().manual_seed(1)
    return {
        name: (tensor + amount * (tensor.std() if tensor.dim() > 1 else 0.1) * _noise(tensor, source)).to(tensor.dtype)
        for name, tensor in tensors.items()
    }


def _noise(tensor, source):
    import torch

    return torch.randn(tensor.shape, generator=source)


async def test_an_update_is_held_bit_for_bit_and_restores(engine, tensors, joined):
    rules = await engine.checksum_rules(tensor_specs(tensors))
    assert engine.checksum_algorithm in ALGORITHMS
    assert {name for rule in rules for name in rule.source_names} == set(tensors)
    assert {rule.engine_name for rule in rules} == set(await engine.checksums())
    for weights in (changed(tensors, 0.01), tensors):
        await engine.pause("retract")
        await push(engine, joined, weights)
        held = await engine.checksums()
        assert held == expected(engine, rules, weights)
        await engine.set_version(await engine.version() + 1)
        await engine.resume()


async def test_new_weights_change_what_is_generated(engine, tensors, joined):
    await push(engine, joined, tensors)
    await engine.set_version(100)
    before = (await engine.generate(request(temperature=0.0), SECONDS))[0]
    await push(engine, joined, changed(tensors, 0.5))
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


async def test_an_update_passes_under_a_request_in_flight(engine, engine_process, tensors, joined):
    await engine.set_version(200)
    running = asyncio.create_task(engine.generate(long_request(engine_process), SECONDS))
    await asyncio.sleep(0.3)
    await engine.pause("in_place")
    await push(engine, joined, tensors)
    await engine.set_version(201)
    await engine.resume()
    (generation,) = await running
    assert_versions(engine_process, generation, 200, 201)
    assert len(generation.output_ids) == engine_process.traits.long_tokens


async def test_after_a_retract_each_token_has_the_log_prob_of_its_own_version(engine, engine_process, tensors, joined):
    """Tokens before the update under the old weights, tokens after it under the new: no old cache is read. Where a
    release ends the request at the flush, there are none after it: a second request makes them."""
    if engine_process.kind == "simulated":
        pytest.skip("it has no model")
    await push(engine, joined, tensors)
    await engine.flush_cache()
    running = asyncio.create_task(engine.generate(long_request(engine_process), SECONDS))
    await asyncio.sleep(0.3)
    weights = changed(tensors, 0.2)
    await engine.pause("retract")
    await engine.flush_cache()
    await push(engine, joined, weights)
    await engine.set_version(await engine.version() + 1)
    await engine.resume()
    (generation,) = await running
    (later,) = await engine.generate(request(tokens=40, extra={"ignore_eos": True}), SECONDS)
    await push(engine, joined, tensors)
    await engine.flush_cache()
    border = generation.versions[0].end
    if engine_process.release.flushes_retracted:
        assert 0 < border < len(generation.output_ids)
    else:
        assert_aborted(engine_process, generation)

    def reference(one, held):
        return reference_log_probs(engine_process.checkpoint, PROMPT, one.output_ids, 1.0, held)

    old, new = (reference(generation, held) for held in (tensors, weights))
    right = np.concatenate([old[:border], new[border:]])
    assert_close(engine_process, np.abs(generation.log_probs - right))
    assert_close(engine_process, np.abs(later.log_probs - reference(later, weights)))
    assert np.abs(old - new).mean() > 3 * engine_process.traits.mean_atol


async def test_an_engine_joins_again_after_it_left(engine, engine_process, tensors):
    name = f"again-{next(NUMBERS)}"
    for _ in range(2):
        trainer = engine_process.trainer_side(name)
        await meet(engine, trainer)
        await push(engine, trainer, tensors, bucket_count=1)
        await part(engine, trainer)
    await engine.leave_group(name, SECONDS)  # leaving twice is no error


async def test_a_bucket_outside_an_update_fails_at_once_where_updates_are_bracketed(
    engine, engine_process, tensors, joined
):
    begun = time.monotonic()
    if not engine_process.release.brackets_updates:
        receiving = engine.receive_bucket(tensor_specs(tensors), joined.spec.name, SECONDS)
        await asyncio.gather(receiving, in_thread(joined.send, tensors, seconds=SECONDS))
        return
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
    specs = tensor_specs(tensors)
    specs.append(TensorSpec("model.layers.9.mlp.up_proj.weight", specs[0].dtype, (2, 2)))
    with pytest.raises(ServiceError, match=r"model\.layers\.9\.mlp\.up_proj") as caught:
        await engine.checksum_rules(specs)
    assert (caught.value.code, caught.value.reason) == (Code.FAILED_PRECONDITION, "TENSORS_UNKNOWN")


async def test_a_trainer_that_dies_in_a_transfer_breaks_only_that_group(engine, engine_process, tensors):
    """Before its first byte: once NCCL's kernel waits for bytes, only the engine's end ends it."""
    trainer = engine_process.trainer_side(f"dying-{next(NUMBERS)}")
    await meet(engine, trainer)
    await engine.begin_update()
    receiving = asyncio.create_task(engine.receive_bucket(tensor_specs(tensors), trainer.spec.name, SECONDS))
    await asyncio.sleep(0.3)
    await in_thread(trainer.leave, seconds=SECONDS)
    with pytest.raises(ServiceError) as caught:
        await receiving
    assert caught.value.reason == "TRANSFER_FAILED"
    await engine.leave_group(trainer.spec.name, SECONDS)
    await engine.end_update()
    assert await engine.health(5.0)
    other = engine_process.trainer_side(f"next-{next(NUMBERS)}")
    await meet(engine, other)
    await push(engine, other, tensors)
    assert await engine.checksums() == expected(engine, await engine.checksum_rules(tensor_specs(tensors)), tensors)
    await part(engine, other)


async def test_an_engine_that_waits_for_a_group_in_vain_serves_again(engine, engine_process):
    trainer = engine_process.trainer_side("nobody")
    with pytest.raises(ServiceError):
        await engine.join_group(trainer.spec, engine_process.traits.group_seconds + 12.0)
    assert await engine.health(5.0)
    assert len(await engine.generate(request(), SECONDS)) == 1


async def test_a_dtype_the_engine_would_convert_is_refused(engine, engine_process, tensors):
    if engine_process.kind == "simulated":
        pytest.skip("it holds what it is sent")
    held = engine_process.traits.dtype
    other = "bfloat16" if held == "float32" else "float32"
    specs = [TensorSpec(spec.name, other, spec.shape) for spec in tensor_specs(tensors)]
    with pytest.raises(ServiceError, match=rf"sent as {other}, but the engine .* holds {held}"):
        await engine.checksum_rules(specs)
