"""Weights from files: into the staging memory beside those that are served, or loaded by the engine itself."""

from __future__ import annotations

import numpy as np
import pytest

from services.common.errors import ServiceError
from services.common.weight_files.manifest import Tensor
from services.common.weight_files.read import pieces_of
from services.common.weight_files.write import Bucket, Place, write_full
from services.rollout.core.engine_port import TensorSpec
from tests.contract.engine.test_generation import SECONDS, request
from tests.contract.engine.test_staging import EPOCHS, split, take_over
from tests.contract.engine.test_weights import changed, expected
from tests.support.weight_group import raw_bytes, tensor_specs


def written(root, tensors: dict, version: int) -> tuple[Place, tuple, tuple]:
    """A full version; → its place, the plan, where each bucket is."""
    buckets = []
    for part in split(tensors):
        specs = tuple(Tensor(spec.name, spec.dtype, spec.shape, "", 0, 0) for spec in tensor_specs(part))
        data = np.concatenate([raw_bytes(tensor).numpy() for tensor in part.values()])
        buckets.append(Bucket(specs, data))
    place = Place(root, "run", version, "plan")
    pieces = pieces_of(place.directory, write_full(place, buckets))
    plan = tuple(tuple(TensorSpec(t.name, t.dtype, t.shape) for t in piece.tensors) for piece in pieces)
    return place, plan, tuple((str(piece.path), piece.offset, piece.size) for piece in pieces)


async def test_staging_memory_is_filled_from_files_while_the_engine_serves(engine, tensors, tmp_path):
    await engine.info()
    rules = await engine.checksum_rules(tensor_specs(tensors))
    before = await engine.checksums()
    weights = changed(tensors, 0.04)
    _, plan, pieces = written(tmp_path, weights, 1)
    await engine.staging.reserve(plan, SECONDS)
    epoch = next(EPOCHS)
    assert 0 < await engine.staging.fill(epoch, pieces, SECONDS) < SECONDS
    assert await engine.checksums() == before
    assert len(await engine.generate(request(), SECONDS)) == 1
    await take_over(engine, epoch)
    assert await engine.checksums() == expected(engine, rules, weights)


async def test_files_that_do_not_fit_or_are_gone_leave_the_weights_alone(engine, tensors, tmp_path):
    await engine.info()
    before = await engine.checksums()
    _, plan, pieces = written(tmp_path, tensors, 1)
    await engine.staging.reserve(plan, SECONDS)
    with pytest.raises(ServiceError, match="other buckets than the plan"):
        await engine.staging.fill(next(EPOCHS), pieces[:-1], SECONDS)
    path, offset, size = pieces[0]
    with pytest.raises(ServiceError, match="ends within a bucket"):
        await engine.staging.fill(next(EPOCHS), ((path, offset + 8, size), *pieces[1:]), SECONDS)
    with pytest.raises(ServiceError, match="No such file"):
        await engine.staging.fill(next(EPOCHS), ((path + "x", offset, size), *pieces[1:]), SECONDS)
    epoch = next(EPOCHS)
    with pytest.raises(ServiceError, match="staged is epoch None"):
        await engine.staging.activate(epoch, SECONDS, repeat=True)
    assert await engine.checksums() == before
    await engine.staging.drop()


async def test_an_engine_loads_files_by_itself(engine, engine_process, tensors, tmp_path):
    rules = await engine.checksum_rules(tensor_specs(tensors))
    weights = changed(tensors, 0.05)
    place, _, _ = written(tmp_path, weights, 2)
    await engine.pause("retract")
    await engine.flush_cache()
    await engine.begin_update()
    await engine.load_files(place.directory, SECONDS)
    await engine.end_update()
    await engine.resume()
    assert await engine.checksums() == expected(engine, rules, weights)
    assert len(await engine.generate(request(), SECONDS)) == 1
    await engine.begin_update()
    with pytest.raises(ServiceError) as caught:
        await engine.load_files(tmp_path / "nowhere", SECONDS)
    assert caught.value.reason == "TRANSFER_FAILED"
    await engine.load_files(engine_process.checkpoint, SECONDS)  # other tests compare with it
    await engine.end_update()
    assert await engine.checksums() == expected(engine, rules, tensors)
    assert await engine.health(5.0)
