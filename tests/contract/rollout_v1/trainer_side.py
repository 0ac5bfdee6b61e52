"""The trainer's end of the weight handshake, over a real weight group."""

from __future__ import annotations

import asyncio
import hashlib
from dataclasses import dataclass, field

import torch
from safetensors.torch import load_file
from tetrarch.common.v1 import tensor_pb2
from tetrarch.rollout.v1 import weight_service_pb2 as pb2

from tests.support.weight_group import TrainerSide, tensor_bytes


@dataclass
class Update:
    """One update of one engine, step by step."""

    client: object
    engine: object
    epoch: int
    version: int
    tensors: dict[str, torch.Tensor]
    group: TrainerSide | None = None
    """A group that stands; a new one when not given."""
    rules: list = field(default_factory=list)
    bucket_count: int = 2
    staged: bool = False

    def __post_init__(self) -> None:
        self.rank = self.group or TrainerSide(f"{self.client.run_id}-{self.epoch}-{self.engine.engine_id}")

    def prepare_request(self, **changes) -> pb2.PrepareUpdateRequest:
        values = {
            "run_id": self.client.run_id,
            "engine_id": self.engine.engine_id,
            "incarnation": self.engine.incarnation,
            "update_epoch": self.epoch,
            "version": self.version,
            "group_name": self.rank.spec.name,
            "backend": "gloo",
            "master_address": "127.0.0.1",
            "master_port": self.rank.spec.master_port,
            "world_size": 2,
            "rank_offset": 1,
            "torch_version": torch.__version__,
            "tensors": specs(self.tensors.items()),
            "bucket_tensor_counts": [len(bucket) for bucket in self.buckets],
        }
        return pb2.PrepareUpdateRequest(**(values | changes))

    async def prepare(self) -> None:
        asking = self.client.weights.PrepareUpdate(self.prepare_request(), timeout=40)
        joining = [] if self.group else [asyncio.to_thread(self.rank.join, 40.0)]
        answer, *_ = await asyncio.gather(asking, *joining)
        assert answer.checksum_algorithm == "sha256-64"
        self.rules, self.staged = list(answer.checksum_rules), answer.staged

    @property
    def buckets(self) -> list[dict[str, torch.Tensor]]:
        """What travels in each bucket."""
        items, size = list(self.tensors.items()), -(-len(self.tensors) // self.bucket_count)
        return [dict(items[start : start + size]) for start in range(0, len(items), size)]

    async def send(self) -> pb2.TransferWeightsResponse:
        """All buckets."""
        transfer = asyncio.ensure_future(self.transfer())
        for index in range(len(self.buckets)):
            await self.send_bucket(index)
        answer = await transfer
        assert answer.received_bytes == sum(tensor.nbytes for tensor in self.tensors.values())
        return answer

    async def send_half(self) -> asyncio.Future:
        """The first of two buckets; → the engine's side, which waits for the other."""
        transfer = asyncio.ensure_future(self.transfer())
        await self.send_bucket(0)
        return transfer

    async def transfer(self) -> pb2.TransferWeightsResponse:
        """The engine's side alone."""
        request = pb2.TransferWeightsRequest(engine_id=self.engine.engine_id, update_epoch=self.epoch)
        return await self.client.weights.TransferWeights(request, timeout=20)

    async def send_bucket(self, index: int) -> None:
        """The trainer's side of one bucket."""
        await asyncio.to_thread(self.rank.send, self.buckets[index])

    def _checksum(self, rule) -> str:
        data = b"".join(tensor_bytes(self.tensors[name]) for name in rule.source_names)
        return hashlib.sha256(data + bytes(rule.padding_bytes)).hexdigest()[:16]

    def commit_request(self, *, corrupt: str = "") -> pb2.CommitUpdateRequest:
        sums = {rule.engine_name: self._checksum(rule) for rule in self.rules}
        if corrupt:
            sums[corrupt] = "0" * 16
        return pb2.CommitUpdateRequest(
            engine_id=self.engine.engine_id,
            update_epoch=self.epoch,
            version=self.version,
            checksums=[pb2.TensorChecksum(engine_name=name, checksum=value) for name, value in sums.items()],
        )

    async def commit(self, *, keep: bool = False, **changes) -> pb2.CommitUpdateResponse:
        """`keep`: stay in the group."""
        try:
            return await self.client.weights.CommitUpdate(self.commit_request(**changes), timeout=20)
        finally:
            if not keep:
                self.rank.leave()

    async def tell_abort(self) -> None:
        """The engine's side alone."""
        request = pb2.AbortUpdateRequest(engine_id=self.engine.engine_id, update_epoch=self.epoch, reason="test")
        await self.client.weights.AbortUpdate(request, timeout=20)

    async def abort(self) -> None:
        await self.tell_abort()
        self.rank.leave()


def specs(items) -> list[tensor_pb2.TensorSpec]:
    """Wire specs of named float32 tensors."""
    return [
        tensor_pb2.TensorSpec(name=name, data_type=tensor_pb2.DATA_TYPE_FLOAT32, shape=tensor.shape)
        for name, tensor in items
    ]


async def push(client, engine, version: int) -> pb2.CommitUpdateResponse:
    """A whole update; epochs grow with every call."""
    update = new_update(client, engine, version)
    await update.prepare()
    await update.send()
    return await update.commit()


def new_update(client, engine, version: int, *, epoch: int | None = None, group: TrainerSide | None = None) -> Update:
    """An update of the checkpoint's tensors, moved a little by the version."""
    client.updates += 1
    tensors = load_file(client.world.checkpoint / "model.safetensors")
    tensors = {name: tensor + 0.001 * version for name, tensor in tensors.items()}
    return Update(client, engine, epoch or client.session * 1_000_000 + client.updates, version, tensors, group)
