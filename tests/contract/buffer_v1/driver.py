"""A client of the buffer for tests: plays nodes and a trainer of one run over gRPC."""

from __future__ import annotations

import json
import uuid
from pathlib import Path

import grpc
import numpy as np
from google.protobuf.duration_pb2 import Duration
from tetrarch.buffer.v1 import buffer_service_pb2 as pb
from tetrarch.buffer.v1 import buffer_service_pb2_grpc, run_pb2

from services.common.channel import translate_errors
from services.common.convert import group_to_proto, prompt_from_proto
from services.common.errors import ServiceError
from services.common.records import Group, Prompt, Sample, SampleStatus, VersionSpan
from tests.support.engine import write_tokenizer

RESPONSE_LENGTH = 4


def write_data(directory: Path, rows: int = 20) -> tuple[Path, Path]:
    """(JSONL of `rows` sums, checkpoint with a tokenizer) in a directory."""
    directory.mkdir(parents=True, exist_ok=True)
    data, checkpoint = directory / "prompts.jsonl", directory / "checkpoint"
    lines = (json.dumps({"input": f"{i}+1=", "label": str(i + 1), "metadata": {"row": i}}) for i in range(rows))
    data.write_text("\n".join(lines) + "\n")
    checkpoint.mkdir()
    write_tokenizer(checkpoint)
    return data, checkpoint


def make_group(prompt: Prompt, sample_count: int, version: int | None, *, reward: float | None = 1.0) -> Group:
    """A finished group of a prompt; `version` None makes it look like data that no engine produced."""
    samples = tuple(
        Sample(
            sample_id=f"{prompt.group_id}-{index}",
            group_id=prompt.group_id,
            index=index,
            status=SampleStatus.COMPLETED,
            prompt_length=len(prompt.tokens),
            tokens=np.concatenate([prompt.tokens, np.full(RESPONSE_LENGTH, index, np.int32)]),
            loss_mask=np.array([1, 1, 0, 1], np.uint8),
            log_probs=np.array([-0.5, -0.25, 0, -1], np.float32),
            response=f"answer {index} of {prompt.group_id}",
            reward=reward,
            versions=() if version is None else (VersionSpan(version, 0, RESPONSE_LENGTH),),
        )
        for index in range(sample_count)
    )
    return Group(prompt.group_id, prompt.ordinal, samples, generate_seconds=1.5)


class Driver:
    """Calls on one run; the methods of a trainer carry its session."""

    def __init__(self, channel: grpc.aio.Channel, run_id: str, data: Path, checkpoint: Path) -> None:
        self.stub = buffer_service_pb2_grpc.BufferServiceStub(channel)
        self.run_id = run_id
        self.spec: dict = {
            "run_id": run_id,
            "data": {"prompt_data": str(data), "label_key": "label", "metadata_key": "metadata"},
            "rollout": {
                "hf_checkpoint": str(checkpoint),
                "num_rollout": 100,
                "rollout_batch_size": 2,
                "n_samples_per_prompt": 2,
            },
            "trainer": {"save": "checkpoints", "save_interval": 1},
        }
        self.epoch = 0
        self.samples = 2

    async def create(self, **groups: dict) -> pb.CreateRunResponse:
        """CreateRun with keys set by group, e.g. trainer={"max_staleness": 1}."""
        for group, values in groups.items():
            self.spec.setdefault(group, {}).update(values)
        self.samples = self.spec["rollout"]["n_samples_per_prompt"]
        return await self.call("CreateRun", spec_json=json.dumps(self.spec))

    async def call(self, method: str, **fields):
        """Any unary call; raises ServiceError."""
        request = getattr(pb, f"{method}Request")(run_id=self.run_id, **fields)
        async with translate_errors():
            return await getattr(self.stub, method)(request)

    async def start(self, **groups: dict) -> None:
        """Creates the run, opens a session and publishes a first version."""
        await self.create(**groups)
        await self.session()
        await self.publish()

    async def session(self) -> None:
        """Begins a trainer session."""
        self.epoch = (await self.call("BeginSession", caller="trainer")).trainer_epoch

    async def publish(self, step_count: int = 0) -> int:
        """Reserves and publishes a version."""
        version = (await self.call("ReserveVersion", trainer_epoch=self.epoch)).version
        await self.call("PublishVersion", trainer_epoch=self.epoch, version=version, step_count=step_count)
        return version

    async def lease(self, count: int = 100, *, ttl: float = 60, wait: float = 0, request_id: str = ""):
        """LeasePrompts."""
        return await self.call(
            "LeasePrompts",
            request_id=request_id or str(uuid.uuid4()),
            caller="node",
            max_prompt_count=count,
            max_wait=_duration(wait),
            ttl=_duration(ttl),
        )

    def finished(self, lease: pb.PromptLease, version: int | None, **options) -> pb.LeasedGroup:
        """A finished group for a lease."""
        group = make_group(prompt_from_proto(lease.prompt), self.samples, version, **options)
        return pb.LeasedGroup(lease_id=lease.lease_id, group=group_to_proto(group))

    async def put(self, *groups: pb.LeasedGroup) -> list[str]:
        """Outcomes of PutGroups."""
        response = await self.call("PutGroups", groups=groups)
        return [pb.PutOutcome.Name(result.outcome).removeprefix("PUT_OUTCOME_") for result in response.results]

    async def produce(self, count: int = 100) -> list[pb.PromptLease]:
        """Leases and finishes as many prompts as the limit allows."""
        response = await self.lease(count)
        if response.leases:
            await self.put(*(self.finished(lease, response.policy_version) for lease in response.leases))
        return list(response.leases)

    async def take(self, step: int, count: int = 2, wait: float = 0) -> pb.TakeBatchResponse:
        """TakeBatch."""
        return await self.call(
            "TakeBatch", trainer_epoch=self.epoch, step=step, group_count=count, max_wait=_duration(wait)
        )

    async def commit(self, step: int) -> int:
        """CommitStep."""
        return (await self.call("CommitStep", trainer_epoch=self.epoch, step=step)).group_count

    async def checkpoint(self, step: int) -> int:
        """RecordCheckpoint."""
        response = await self.call("RecordCheckpoint", trainer_epoch=self.epoch, step=step, path=f"ckpt/{step}")
        return response.frontier_ordinal

    async def restore(self, step: int) -> pb.RestoreRunResponse:
        """RestoreRun."""
        return await self.call("RestoreRun", trainer_epoch=self.epoch, step=step)

    async def step(self, step: int) -> list[str]:
        """One synchronous step; the groups it trained."""
        await self.produce()
        groups = group_ids(await self.take(step))
        await self.commit(step)
        await self.publish(step + 1)
        return groups

    async def fetch(self, sample_ids: list[str]) -> list:
        """FetchSamples."""
        async with translate_errors():
            request = pb.FetchSamplesRequest(run_id=self.run_id, sample_ids=sample_ids)
            return [sample async for part in self.stub.FetchSamples(request) for sample in part.samples]

    async def stats(self) -> run_pb2.RunStats:
        """GetStats, with the accounting identity checked."""
        stats = (await self.call("GetStats")).stats
        check_identity(stats)
        return stats

    async def states(self) -> dict[int, str]:
        """State of every drawn ordinal."""
        found, token = {}, ""
        while True:
            page = await self.call("ListGroups", page_size=500, page_token=token)
            for info in page.groups:
                found[info.ordinal] = run_pb2.GroupState.Name(info.state).removeprefix("GROUP_STATE_")
            token = page.next_page_token
            if not token:
                return found


def check_identity(stats: run_pb2.RunStats) -> None:
    """Every drawn group is in exactly one state."""
    parts = ("pending", "leased", "ready", "reserved", "consumed", "evicted")
    assert stats.drawn_count == sum(getattr(stats, f"{name}_count") for name in parts), stats
    assert stats.evicted_count == sum(stats.evicted_by_reason.values()), stats


def group_ids(batch: pb.TakeBatchResponse) -> list[str]:
    """Groups of a manifest, in order."""
    return list(dict.fromkeys(header.group_id for header in batch.samples))


async def refusal(awaitable) -> ServiceError:
    """The error that a call raises."""
    try:
        await awaitable
    except ServiceError as error:
        return error
    raise AssertionError("the call was expected to be refused")


def _duration(seconds: float) -> Duration:
    message = Duration()
    message.FromNanoseconds(int(seconds * 1e9))
    return message
