"""What the buffer's benchmarks share: a store and servers that can be killed, and a lean client of one run.

Groups carry their ordinal in every token, so that a reader can tell whose payload it got.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import signal
import sys
import tempfile
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from google.protobuf.duration_pb2 import Duration
from tetrarch.buffer.v1 import buffer_service_pb2 as pb
from tetrarch.buffer.v1 import buffer_service_pb2_grpc, run_pb2
from tetrarch.common.v1 import sample_pb2
from tokenizers import Tokenizer, models, pre_tokenizers

from examples.first_run.__main__ import ROOT
from services.common.channel import open_channel, translate_errors
from services.common.errors import Code, ServiceError
from services.common.healthcheck import check
from services.common.process import ManagedProcess, free_port
from services.common.tensors import to_proto
from services.console.adapters.valkey import ping, valkey_arguments

BUFFER = "tetrarch.buffer.v1.BufferService"
GROUP_STATES = ("pending", "leased", "ready", "reserved", "consumed", "evicted")
START_SECONDS = 60.0


class DidNotStart(RuntimeError):
    """A store or a server that does not come up."""


@contextlib.contextmanager
def workspace(keep: Path | None = None) -> Iterator[Path]:
    """A directory for stores, logs and data; removed at the end unless it was named."""
    if keep:
        keep.mkdir(parents=True, exist_ok=True)
        yield keep
        return
    path = Path(tempfile.mkdtemp(prefix="tetrarch-buffer-"))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def write_data(directory: Path, rows: int) -> tuple[Path, Path]:
    """(JSONL of `rows` prompts, directory with a byte tokenizer)."""
    directory.mkdir(parents=True, exist_ok=True)
    data, checkpoint = directory / f"prompts-{rows}.jsonl", directory / "checkpoint"
    with data.open("w") as out:
        out.writelines(json.dumps({"input": f"{row}+1=", "label": str(row + 1)}) + "\n" for row in range(rows))
    checkpoint.mkdir(exist_ok=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={char: index for index, char in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.add_special_tokens(["<eos>"])
    backend.save(str(checkpoint / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>"}
    (checkpoint / "tokenizer_config.json").write_text(json.dumps(config))
    return data, checkpoint


class Store:
    """One Valkey server; `start` after `kill` continues with the same port and data.

    Args:
        directory: of its append-only file.
        fsync: "everysec" or "always".
    """

    def __init__(self, directory: Path, fsync: str = "everysec") -> None:
        self.directory, self.port = directory, free_port()
        argv = [*valkey_arguments(self.port, directory), "--appendfsync", fsync]
        self.process = ManagedProcess("store", argv, log_path=directory / "valkey.log")

    @property
    def url(self) -> str:
        """Address for buffer servers."""
        return f"redis://127.0.0.1:{self.port}"

    async def start(self) -> Store:
        """Starts it and returns when it answers."""
        self.directory.mkdir(parents=True, exist_ok=True)
        await self.process.start()
        deadline = time.monotonic() + START_SECONDS
        while problem := await ping(self.port):
            if time.monotonic() > deadline or not self.process.running:
                raise DidNotStart(f"The store did not start: {problem} {' '.join(self.process.tail())}")
            await asyncio.sleep(0.01)
        return self

    async def kill(self) -> None:
        """SIGKILL."""
        await kill(self.process)


async def kill(process: ManagedProcess) -> None:
    """SIGKILL; returns when the process is gone."""
    process.signal(signal.SIGKILL)
    if process.pid:
        await process.wait()


def server_process(store_url: str, port: int, directory: Path, **settings: object) -> ManagedProcess:
    """A buffer server as users start it."""
    chosen = {"port": port, "store_url": store_url, "sweep_seconds": 0.5, "log_level": "warning"} | settings
    argv = [sys.executable, "-m", "services.buffer"]
    for key, value in chosen.items():
        argv += ["--set", f"{key}={value}"]
    return ManagedProcess("buffer", argv, env=environment(), log_path=directory / f"buffer-{port}.log")


def environment() -> dict[str, str]:
    """What child processes need to find the packages."""
    return {"PYTHONPATH": f"{ROOT}:{ROOT / 'proto' / 'gen'}", "OMP_NUM_THREADS": "1"}


async def start_server(
    store_url: str, directory: Path, port: int = 0, **settings: object
) -> tuple[ManagedProcess, int]:
    """(a buffer server that is ready, its port)."""
    port = port or free_port()
    process = server_process(store_url, port, directory, **settings)
    await process.start()
    deadline = time.monotonic() + START_SECONDS
    while problem := await asyncio.to_thread(check, f"127.0.0.1:{port}", BUFFER, 1.0):
        if not process.running or time.monotonic() > deadline:
            raise DidNotStart(f"The buffer server did not start: {problem} {' '.join(process.tail())}")
        await asyncio.sleep(0.05)
    return process, port


async def insist(call: Callable[[], Awaitable[Any]], seconds: float = 60.0) -> Any:
    """Repeats a call while the service or its store is away, as every client of the buffer must."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            return await call()
        except ServiceError as error:
            if error.code not in (Code.UNAVAILABLE, Code.RESOURCE_EXHAUSTED) or time.monotonic() > deadline:
                raise
        await asyncio.sleep(0.05)


def duration(seconds: float) -> Duration:
    """Message of a time."""
    message = Duration()
    message.FromNanoseconds(int(seconds * 1e9))
    return message


class Client:
    """Calls on one run; those of a trainer carry its session."""

    def __init__(self, channel: grpc.aio.Channel, run_id: str, samples: int = 2, caller: str = "node") -> None:
        self.stub = buffer_service_pb2_grpc.BufferServiceStub(channel)
        self.run_id, self.samples, self.caller = run_id, samples, caller
        self.epoch = 0

    async def call(self, method: str, **fields: Any) -> Any:
        """Any unary call. Raises ServiceError."""
        async with translate_errors():
            return await getattr(self.stub, method)(getattr(pb, f"{method}Request")(run_id=self.run_id, **fields))

    async def create(self, prompts: Path, checkpoint: Path, **groups: dict[str, Any]) -> None:
        """CreateRun; `groups` are keys by group, as in trainer={"max_staleness": 1}."""
        spec = {
            "run_id": self.run_id,
            "data": {"prompt_data": str(prompts), "label_key": "label"} | groups.get("data", {}),
            "rollout": {"hf_checkpoint": str(checkpoint), "num_rollout": 1_000_000, "rollout_batch_size": 4,
                        "n_samples_per_prompt": self.samples} | groups.get("rollout", {}),
            "trainer": {"save": "checkpoints", "save_interval": 1} | groups.get("trainer", {}),
        }  # fmt: skip
        await self.call("CreateRun", spec_json=json.dumps(spec))

    async def session(self) -> None:
        """Begins a trainer session."""
        self.epoch = (await self.call("BeginSession", caller=self.caller)).trainer_epoch

    async def reserve(self) -> int:
        """A new version."""
        return (await self.call("ReserveVersion", trainer_epoch=self.epoch)).version

    async def publish_version(self, version: int, step_count: int) -> None:
        """Makes a reserved version current."""
        await self.call("PublishVersion", trainer_epoch=self.epoch, version=version, step_count=step_count)

    async def publish(self, step_count: int) -> int:
        """Reserves and publishes a version."""
        version = await self.reserve()
        await self.publish_version(version, step_count)
        return version

    async def lease(self, count: int, *, ttl: float = 60, wait: float = 0) -> pb.LeasePromptsResponse:
        """LeasePrompts under a new request id."""
        return await self.call(
            "LeasePrompts", request_id=str(uuid.uuid4()), caller=self.caller, max_prompt_count=count,
            max_wait=duration(wait), ttl=duration(ttl),
        )  # fmt: skip

    async def put(self, groups: list[pb.LeasedGroup]) -> list[str]:
        """Outcomes of PutGroups."""
        response = await self.call("PutGroups", groups=groups)
        return [pb.PutOutcome.Name(result.outcome).removeprefix("PUT_OUTCOME_") for result in response.results]

    async def take(self, step: int, count: int, wait: float = 0) -> pb.TakeBatchResponse:
        """TakeBatch."""
        return await self.call(
            "TakeBatch", trainer_epoch=self.epoch, step=step, group_count=count, max_wait=duration(wait)
        )

    async def fetch(self, sample_ids: list[str]) -> list[sample_pb2.Sample]:
        """FetchSamples."""
        async with translate_errors():
            request = pb.FetchSamplesRequest(run_id=self.run_id, sample_ids=sample_ids)
            return [sample async for part in self.stub.FetchSamples(request) for sample in part.samples]

    async def stats(self) -> run_pb2.RunStats:
        """GetStats. Raises AssertionError when the accounting identity does not hold."""
        stats = (await self.call("GetStats")).stats
        total = sum(getattr(stats, f"{state}_count") for state in GROUP_STATES)
        if stats.drawn_count != total:
            raise AssertionError(f"run {self.run_id}: drawn {stats.drawn_count} but {total} in the states: {stats}")
        return stats

    async def groups(self, **filters: Any) -> AsyncIterator[run_pb2.GroupInfo]:
        """Every group that passes the filters of ListGroups."""
        token = ""
        while True:
            page = await insist(lambda token=token: self.call("ListGroups", page_size=500, page_token=token, **filters))
            for info in page.groups:
                yield info
            token = page.next_page_token
            if not token:
                return


def finished(lease: pb.PromptLease, samples: int, version: int, length: int = 4) -> pb.LeasedGroup:
    """A finished group of a leased prompt: every response token is the prompt's ordinal.

    Args:
        length: response tokens of a sample.
    """
    prompt = lease.prompt
    prompt_tokens = np.frombuffer(prompt.tokens.data, "<i4")
    tokens = to_proto(np.concatenate([prompt_tokens, np.full(length, prompt.ordinal, np.int32)]))
    mask, log_probs = to_proto(np.ones(length, np.uint8)), to_proto(np.full(length, -0.5, np.float32))
    group = sample_pb2.Group(group_id=prompt.group_id, ordinal=prompt.ordinal, generate_seconds=1.0)
    for index in range(samples):
        group.samples.add(
            sample_id=f"{prompt.group_id}-{index}", group_id=prompt.group_id, index=index,
            status=sample_pb2.SAMPLE_STATUS_COMPLETED, prompt_length=len(prompt_tokens), response_length=length,
            response="x", reward=1.0, versions=[sample_pb2.VersionSpan(version=version, start=0, end=length)],
            tokens=tokens, loss_mask=mask, log_probs=log_probs,
        )  # fmt: skip
    return pb.LeasedGroup(lease_id=lease.lease_id, group=group)


def wrong_payload(sample: sample_pb2.Sample, group_id: str) -> bool:
    """True when a fetched sample is not the one made for the group's prompt."""
    tokens = np.frombuffer(sample.tokens.data, "<i4")[sample.prompt_length :]
    return sample.group_id != group_id or not len(tokens) or bool((tokens != int(group_id.rsplit("-", 1)[1])).any())


def group_ids(batch: pb.TakeBatchResponse) -> list[str]:
    """Groups of a manifest, in order."""
    return list(dict.fromkeys(header.group_id for header in batch.samples))


def percentile(values: list[float], share: float) -> float:
    """The value below which `share` of them lie; NaN without any."""
    return float(np.quantile(values, share)) if values else float("nan")


def channel_to(ports: list[int]) -> grpc.aio.Channel:
    """Channel to any of some servers on this machine: one that dies is left out until it is back."""
    return open_channel("ipv4:" + ",".join(f"127.0.0.1:{port}" for port in ports), "buffer")
