"""Weights that arrive beside those that an engine serves, and become its own in a moment."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence

import pytest

from services.common.errors import Code, ServiceError
from services.rollout.core.engine_port import Activation
from tests.contract.engine.conftest import NUMBERS
from tests.contract.engine.test_generation import SECONDS, long_request, request
from tests.contract.engine.test_pause import assert_versions
from tests.contract.engine.test_weights import changed, expected, push
from tests.support.weight_group import TrainerSide, in_thread, tensor_specs

EPOCHS = iter(range(1, 1000))


@pytest.fixture
async def staging(engine):
    """The engine's receiver."""
    await engine.info()
    assert engine.staging is not None
    return engine.staging


@pytest.fixture
async def met(staging, engine_process):
    """A group with the receiver in it."""
    trainer = engine_process.trainer_side(f"staged-{next(NUMBERS)}")
    await asyncio.gather(in_thread(trainer.join, seconds=30.0), staging.join_group(trainer.spec, 30.0))
    yield trainer
    await asyncio.gather(in_thread(trainer.leave, seconds=20.0), staging.leave_group(trainer.spec.name, 20.0))


def split(tensors: dict, count: int = 3) -> list[dict]:
    """Buckets."""
    names = list(tensors)
    return [{name: tensors[name] for name in names[start::count]} for start in range(count)]


async def send(trainer: TrainerSide, buckets: list[dict]) -> None:
    for bucket in buckets:
        await in_thread(trainer.send, bucket, seconds=SECONDS)


async def reserve(staging, tensors: dict) -> None:
    await staging.reserve(tuple(tuple(tensor_specs(bucket)) for bucket in split(tensors)), SECONDS)


async def stage(staging, trainer: TrainerSide, tensors: dict) -> int:
    """A whole transfer; → its epoch."""
    epoch = next(EPOCHS)
    await reserve(staging, tensors)
    seconds, _ = await asyncio.gather(staging.receive(epoch, trainer.spec.name, SECONDS), send(trainer, split(tensors)))
    assert 0 < seconds < SECONDS
    return epoch


async def take_over(engine, epoch: int, *, repeat: bool = True, names: Sequence[str] = ()) -> Activation:
    """What Commit does to an engine."""
    await engine.pause("retract")
    await engine.flush_cache()
    await engine.begin_update()
    activation = await engine.staging.activate(epoch, SECONDS, repeat=repeat, names=names)
    await engine.end_update()
    await engine.set_version(await engine.version() + 1)
    await engine.resume()
    return activation


async def test_what_was_staged_is_held_bit_for_bit_and_later_ones_are_copied(engine, staging, tensors, met):
    rules = await engine.checksum_rules(tensor_specs(tensors))
    names, ways = [rule.engine_name for rule in rules], []
    for weights in (changed(tensors, 0.01), changed(tensors, 0.02), tensors):
        epoch = await stage(staging, met, weights)
        assert await engine.checksums() != expected(engine, rules, weights)
        activation = await take_over(engine, epoch, names=names)
        ways.append(activation.how)
        assert await engine.checksums() == activation.checksums == expected(engine, rules, weights)
    assert ways[1:] == ["copied", "copied"]


async def test_an_engine_serves_its_version_while_the_next_one_arrives(engine, engine_process, staging, tensors, met):
    await engine.set_version(500)
    before = await engine.checksums()
    for _ in range(2):  # a kernel's first use waits for the whole GPU; the second time the prompt is cached
        await engine.generate(request(), SECONDS)
        await engine.generate(long_request(engine_process), SECONDS)
    await reserve(staging, tensors)
    epoch = next(EPOCHS)
    buckets = split(changed(tensors, 0.1))
    receiving = asyncio.ensure_future(staging.receive(epoch, met.spec.name, SECONDS))
    await send(met, buckets[:1])
    (short,) = await engine.generate(request(), SECONDS)
    assert {span.version for span in short.versions} == {500}
    running = asyncio.ensure_future(engine.generate(long_request(engine_process), SECONDS))
    await asyncio.sleep(0.2)  # its first tokens are of the old version
    await send(met, buckets[1:])
    await receiving
    assert await engine.checksums() == before
    await engine.pause("in_place")
    await engine.begin_update()
    await staging.activate(epoch, SECONDS, repeat=True)
    await engine.end_update()
    await engine.set_version(501)
    await engine.resume()
    (generation,) = await running
    assert_versions(engine_process, generation, 500, 501)


async def test_an_aborted_transfer_leaves_the_weights_alone(engine, engine_process, staging, tensors):
    """The receiver leaves in mid-transfer, although the sender is there and silent, and joins the next group."""
    before = await engine.checksums()
    trainer = engine_process.trainer_side(f"given-up-{next(NUMBERS)}")
    await asyncio.gather(in_thread(trainer.join, seconds=30.0), staging.join_group(trainer.spec, 30.0))
    await reserve(staging, tensors)
    receiving = asyncio.ensure_future(staging.receive(next(EPOCHS), trainer.spec.name, SECONDS))
    await send(trainer, split(tensors)[:1])
    begun = time.monotonic()
    await staging.leave_group(trainer.spec.name, 10.0)
    with pytest.raises(ServiceError, match="was left"):
        await receiving
    assert time.monotonic() - begun < 5.0
    assert await engine.checksums() == before
    assert len(await engine.generate(request(), SECONDS)) == 1
    await in_thread(trainer.leave, seconds=SECONDS)
    await whole_update(engine, engine_process, staging, changed(tensors, 0.03))


async def whole_update(engine, engine_process, staging, weights: dict) -> None:
    """In a group of its own."""
    trainer = engine_process.trainer_side(f"next-{next(NUMBERS)}")
    await asyncio.gather(in_thread(trainer.join, seconds=30.0), staging.join_group(trainer.spec, 30.0))
    await take_over(engine, await stage(staging, trainer, weights))
    assert await engine.checksums() == expected(engine, await engine.checksum_rules(tensor_specs(weights)), weights)
    await asyncio.gather(in_thread(trainer.leave, seconds=20.0), staging.leave_group(trainer.spec.name, 20.0))


async def test_a_trainer_that_dies_in_a_transfer_fails_that_transfer_alone(engine, engine_process, staging, tensors):
    before = await engine.checksums()
    trainer = engine_process.trainer_side(f"dying-{next(NUMBERS)}")
    await asyncio.gather(in_thread(trainer.join, seconds=30.0), staging.join_group(trainer.spec, 30.0))
    await reserve(staging, tensors)
    receiving = asyncio.ensure_future(staging.receive(next(EPOCHS), trainer.spec.name, 4.0))
    await send(trainer, split(tensors)[:1])
    await in_thread(trainer.leave, seconds=SECONDS)
    with pytest.raises(ServiceError) as caught:
        await receiving
    assert caught.value.reason == "ENGINE_REFUSED"
    assert await engine.checksums() == before
    await whole_update(engine, engine_process, staging, tensors)


async def test_only_what_was_staged_for_this_epoch_is_activated(engine, staging, tensors, met):
    epoch = await stage(staging, met, tensors)
    with pytest.raises(ServiceError, match=f"staged is epoch {epoch}, not {epoch + 1}"):
        await staging.activate(epoch + 1, SECONDS, repeat=True)
    await reserve(staging, tensors)  # the next update begins
    with pytest.raises(ServiceError, match="staged is epoch None"):
        await staging.activate(epoch, SECONDS, repeat=True)
    await staging.drop()


async def test_memory_that_does_not_suffice_is_refused_in_a_sentence(engine, staging, tensors):
    (spec, *_) = tensor_specs(tensors)
    too_much = type(spec)(spec.name, spec.dtype, (1 << 20, 1 << 24))
    with pytest.raises(ServiceError, match="GiB are free") as caught:
        await staging.reserve(((too_much,),), SECONDS)
    assert caught.value.code is Code.RESOURCE_EXHAUSTED
    assert await engine.health(5.0)


async def test_both_ways_of_updating_go_together(engine, staging, tensors, joined, met):
    """Staged, direct, staged: what the direct one wrote does not mislead the copies noted before."""
    rules = await engine.checksum_rules(tensor_specs(tensors))
    await take_over(engine, await stage(staging, met, changed(tensors, 0.01)))
    await push(engine, joined, changed(tensors, 0.02))
    epoch = await stage(staging, met, tensors)
    await take_over(engine, epoch)
    if await engine.checksums() != expected(engine, rules, tensors):
        assert (await take_over(engine, epoch, repeat=False)).how == "loaded"
    assert await engine.checksums() == expected(engine, rules, tensors)


async def test_a_dead_process_of_the_engine_would_be_noticed(engine, staging):
    """`ended` waits while all processes live."""
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(engine.ended(), 0.3)
        pytest.fail("nothing has ended")
    assert await staging.alive(5.0)
