"""Weights in files, through real processes: node, engines, buffer. The trainer's side writes as rank 0 does."""

from __future__ import annotations

import hashlib
import os
import signal
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file
from tetrarch.rollout.v1 import engine_pb2
from tetrarch.rollout.v1 import weight_service_pb2 as pb2

from services.common.channel import translate_errors
from services.common.errors import ServiceError
from services.common.weight_files.manifest import Expected, Tensor, rules_key, version_directory, write_expected
from services.common.weight_files.write import Base, Bucket, Place, add_full, write_delta, write_full
from tests.contract.rollout_v1.conftest import until
from tests.contract.rollout_v1.trainer_side import push, specs
from tests.support.weight_group import tensor_bytes

READY, STALE = engine_pb2.ENGINE_STATE_READY, engine_pb2.ENGINE_STATE_STALE


class Files:
    """Versions of one run, and updates of engines by them."""

    def __init__(self, client, root: Path) -> None:
        self.client, self.root = client, root
        self.epoch = 0
        self.tensors = load_file(client.world.checkpoint / "model.safetensors")
        self.rules: list = []

    def at(self, version: int) -> dict:
        """The tensors of a version: a few elements change each time."""
        changed = {name: tensor.clone() for name, tensor in self.tensors.items()}
        for tensor in changed.values():
            tensor.view(-1)[:: max(tensor.numel() // 7, 1)] += 0.01 * version
        return changed

    def buckets(self, version: int) -> list[Bucket]:
        items = list(self.at(version).items())
        made = []
        for part in (items[: len(items) // 2], items[len(items) // 2 :]):
            data = np.frombuffer(b"".join(tensor_bytes(tensor) for _, tensor in part), np.uint8)
            made.append(Bucket(tuple(Tensor(n, "float32", tuple(t.shape), "", 0, 0) for n, t in part), data))
        return made

    def place(self, version: int) -> Place:
        return Place(self.root, self.client.run_id, version, "plan")

    def write(self, version: int, base: int = 0) -> None:
        if base:
            before = Base(base, [bucket.data for bucket in self.buckets(base)])
            assert write_delta(self.place(version), self.buckets(version), before, "xor")
        else:
            write_full(self.place(version), self.buckets(version))

    def path(self, version: int) -> Path:
        return version_directory(self.root, self.client.run_id, version)

    async def update(self, engine, version: int) -> pb2.CommitUpdateResponse:
        """Prepare to Commit; the bytes are in files."""
        self.client.updates += 1
        self.epoch = self.client.session * 1_000_000 + self.client.updates
        buckets = self.buckets(version)
        async with translate_errors():
            prepared = await self.client.weights.PrepareUpdate(
                pb2.PrepareUpdateRequest(
                    run_id=self.client.run_id,
                    engine_id=engine.engine_id,
                    incarnation=engine.incarnation,
                    update_epoch=self.epoch,
                    version=version,
                    tensors=specs(self.at(version).items()),
                    bucket_tensor_counts=[len(bucket.tensors) for bucket in buckets],
                    weights_path=str(self.path(version)),
                ),
                timeout=20,
            )
            self.rules = list(prepared.checksum_rules)
            named = {"engine_id": engine.engine_id, "update_epoch": self.epoch}
            await self.client.weights.TransferWeights(pb2.TransferWeightsRequest(**named), timeout=20)
            sums = [pb2.TensorChecksum(engine_name=n, checksum=c) for n, c in self.checksums(version).items()]
            request = pb2.CommitUpdateRequest(**named, version=version, checksums=sums)
            return await self.client.weights.CommitUpdate(request, timeout=20)

    def checksums(self, version: int) -> dict[str, str]:
        tensors = self.at(version)
        parts = {r.engine_name: b"".join(tensor_bytes(tensors[n]) for n in r.source_names) for r in self.rules}
        padding = {rule.engine_name: bytes(rule.padding_bytes) for rule in self.rules}
        return {name: hashlib.sha256(data + padding[name]).hexdigest()[:16] for name, data in parts.items()}

    def expect(self, version: int) -> None:
        """What the trainer leaves beside a published version."""
        rules = [(rule.engine_name, tuple(rule.source_names), rule.padding_bytes) for rule in self.rules]
        found = Expected(version, {rules_key("sha256-64", rules): self.checksums(version)})
        write_expected(self.path(version), found)


@pytest.fixture
async def files(client, tmp_path):
    async def make(**rollout: object) -> Files:
        trainer = {"update_weight_disk_dir": str(tmp_path / "shared"), "max_staleness": 1}
        if local := rollout.pop("local", ""):
            trainer["update_weight_local_checkpoint_dir"] = local
        await client.create_run(rollout=rollout, trainer=trainer)
        return Files(client, tmp_path / "shared")

    return make


@pytest.mark.parametrize("staging", ["auto", "off"])
async def test_an_engine_takes_full_files_and_then_deltas(client, files, staging, tmp_path):
    scene = await files(weight_staging=staging, local=str(tmp_path / "local"))
    (engine,) = await client.engines(STALE)
    scene.write(1)
    assert (await scene.update(engine, 1)).verified_tensor_count == len(scene.rules) > 0
    for version in (2, 3):
        scene.write(version, base=version - 1)
        answer = await scene.update(engine, version)
        assert answer.verified_tensor_count == len(scene.rules)
    (engine,) = await client.engines(READY)
    assert engine.weight_version == 3
    assert await push(client, engine, 4)  # the same engine, over a collective again


async def test_damaged_files_touch_no_engine_and_full_ones_help(client, files):
    scene = await files()
    (engine,) = await client.engines(STALE)
    scene.write(1)
    await scene.update(engine, 1)
    scene.write(2, base=1)
    (delta,) = scene.path(2).glob("delta-00001-*.bin")
    data = bytearray(delta.read_bytes())
    data[len(data) // 2] ^= 0x20
    delta.write_bytes(data)
    with pytest.raises(ServiceError) as caught:
        await scene.update(engine, 2)
    assert caught.value.reason in ("BASE_MISMATCH", "FILES_CORRUPT")
    (engine,) = await client.engines(READY)
    assert engine.weight_version == 1  # it serves on
    add_full(scene.place(2), scene.buckets(2))
    await scene.update(engine, 2)
    with pytest.raises(ServiceError) as caught:
        await scene.update(engine, 7)
    assert caught.value.reason == "FILES_MISSING"
    (engine,) = await client.engines(READY)
    assert engine.weight_version == 2


async def test_an_engine_comes_up_at_the_published_version_while_no_trainer_lives(client, files):
    scene = await files()
    (engine,) = await client.engines(STALE)
    scene.write(1)
    await scene.update(engine, 1)
    scene.expect(1)
    await client.publish(1)
    scene.write(2, base=1)
    await scene.update(engine, 2)
    scene.expect(2)
    await client.publish(2)
    os.kill(engine.pid, signal.SIGKILL)

    async def up_again() -> bool:
        (now,) = (await client.node()).engines
        return now.incarnation != engine.incarnation and now.state == READY

    await until(up_again, 30)
    (engine,) = await client.engines(READY)
    assert engine.weight_version == 2
    await client.ready_groups(1)
    # The trainer is back: it pushes as ever, at a newer epoch.
    scene.write(3, base=2)
    await scene.update(engine, 3)
    (engine,) = await client.engines(READY)
    assert engine.weight_version == 3
