"""`python -m benchmarks.buffer_throughput`: put → take → fetch → commit beside the same bytes through bare redis-py.

Both sides move the same tensors from this process into a Valkey and back, in turn, round by round: the bare side as
pipelines of HSET, HGETALL and UNLINK, the buffer as its calls over gRPC with a server between. The CPU seconds of the
three processes say where the rest goes.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import redis
from tetrarch.buffer.v1 import buffer_service_pb2 as pb

from benchmarks.buffer_world import (
    Client,
    Store,
    channel_to,
    finished,
    kill,
    percentile,
    start_server,
    workspace,
    write_data,
)
from benchmarks.report import Figure, finish, parser
from services.common.memory import keep_freed_memory

SAMPLES, ROWS = 8, 1000
PUT_BYTES = 4 << 20
"""Of one PutGroups call or pipeline."""
IN_FLIGHT = 2
BAR = {512: "", 8192: ">= 0.6"}


@dataclass
class Side:
    """Seconds of the rounds of one side, and CPU seconds by process."""

    put: list[float] = field(default_factory=list)
    get: list[float] = field(default_factory=list)
    rest: list[float] = field(default_factory=list)
    cpu: dict[str, float] = field(default_factory=dict)

    @property
    def rounds(self) -> list[float]:
        """Whole rounds."""
        return [sum(parts) for parts in zip(self.put, self.get, self.rest, strict=True)]


class Watch:
    """CPU seconds of this process, the server and the store between two moments."""

    def __init__(self, pids: dict[str, int]) -> None:
        self._pids = pids
        self._tick = os.sysconf("SC_CLK_TCK")

    def _read(self) -> dict[str, float]:
        found = {"client": time.process_time()}
        for name, pid in self._pids.items():
            fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
            found[name] = (int(fields[11]) + int(fields[12])) / self._tick
        return found

    @asynccontextmanager
    async def into(self, side: Side) -> AsyncIterator[None]:
        """Adds what is used inside."""
        before = self._read()
        yield
        for name, seconds in self._read().items():
            side.cpu[name] = side.cpu.get(name, 0.0) + seconds - before[name]


class Buffer:
    """Steps of a run through the buffer."""

    def __init__(self, client: Client, batch: int, length: int) -> None:
        self._client, self._batch, self._length = client, batch, length
        self.step = 0
        self.lease_seconds: list[float] = []
        self.take_seconds: list[float] = []

    async def lease(self) -> list[pb.LeasedGroup]:
        """A step's finished groups, each leased by a call of its own; making them is not part of any time."""
        groups = []
        for _ in range(self._batch):
            started = time.perf_counter()
            answer = await self._client.lease(1)
            self.lease_seconds.append(time.perf_counter() - started)
            groups += [finished(lease, SAMPLES, answer.policy_version, self._length) for lease in answer.leases]
        if len(groups) != self._batch:
            raise AssertionError(f"{len(groups)} prompts were leased, not {self._batch}")
        return groups

    async def round(self, side: Side, groups: list[pb.LeasedGroup]) -> None:
        """One step with the groups of `lease`."""
        limit = asyncio.Semaphore(IN_FLIGHT)

        async def put(part: list[pb.LeasedGroup]) -> None:
            async with limit:
                outcomes = await self._client.put(part)
            if set(outcomes) != {"STORED"}:
                raise AssertionError(f"groups were not stored: {outcomes}")

        size = max(1, PUT_BYTES // groups[0].ByteSize())
        started = time.perf_counter()
        await asyncio.gather(*(put(groups[at : at + size]) for at in range(0, len(groups), size)))
        side.put.append(time.perf_counter() - started)
        started = time.perf_counter()
        batch = await self._client.take(self.step, self._batch)
        took = time.perf_counter() - started
        self.take_seconds.append(took)
        ids = [header.sample_id for header in batch.samples]
        started = time.perf_counter()
        fetched = await self._client.fetch(ids)
        side.get.append(time.perf_counter() - started)
        if len(fetched) != self._batch * SAMPLES:
            raise AssertionError(f"{len(fetched)} samples were fetched")
        started = time.perf_counter()
        await self._client.call("CommitStep", trainer_epoch=self._client.epoch, step=self.step)
        side.rest.append(time.perf_counter() - started + took)
        self.step += 1
        await self._client.publish(self.step)


def bare_round(connection: redis.Redis, groups: list[dict[str, bytes]], side: Side) -> None:
    """The same bytes, written, read and removed."""
    size = max(1, PUT_BYTES // sum(map(len, groups[0].values())))
    names = [f"bare:{index}" for index in range(len(groups))]
    parts = [range(at, min(at + size, len(groups))) for at in range(0, len(groups), size)]
    started = time.perf_counter()
    for part in parts:
        pipe = connection.pipeline(transaction=False)
        for index in part:
            pipe.hset(names[index], mapping=groups[index])
        pipe.execute()
    side.put.append(time.perf_counter() - started)
    started = time.perf_counter()
    for part in parts:
        pipe = connection.pipeline(transaction=False)
        for index in part:
            pipe.hgetall(names[index])
        if any(len(found) != SAMPLES * 3 for found in pipe.execute()):
            raise AssertionError("a group came back without some of its fields")
    side.get.append(time.perf_counter() - started)
    started = time.perf_counter()
    connection.unlink(*names)
    side.rest.append(time.perf_counter() - started)


def bare_group(length: int) -> dict[str, bytes]:
    """Tokens, masks and log-probs of a group, a field each."""
    sizes = {"t": 4 * length, "m": length, "p": 4 * length}
    return {f"{name}{index}": bytes(size) for index in range(SAMPLES) for name, size in sizes.items()}


async def measure(directory: Path, length: int, rounds: int, batch: int) -> list[Figure]:
    """Figures of one length of response."""
    store = await Store(directory / "store").start()
    server, port = await start_server(store.url, directory)
    connection = redis.Redis.from_url(store.url)
    ours, bare = Side(), Side()
    try:
        async with channel_to([port]) as channel:
            client = Client(channel, f"throughput-{length}", SAMPLES)
            data = write_data(directory / "data", ROWS)
            await client.create(
                *data, rollout={"rollout_batch_size": batch}, trainer={"save_interval": None, "save": None}
            )
            await client.session()
            await client.publish(0)
            buffer, groups = Buffer(client, batch, length), [bare_group(length)] * batch
            # Connections, scripts and code paths warm up outside the figures.
            await buffer.round(Side(), await buffer.lease())
            bare_round(connection, groups, Side())
            watch = Watch({"server": server.pid, "store": store.process.pid})
            for _ in range(rounds):
                finished_groups = await buffer.lease()
                async with watch.into(ours):
                    await buffer.round(ours, finished_groups)
                async with watch.into(bare):
                    bare_round(connection, groups, bare)
            buffer_bytes = sum(map(len, groups[0].values())) * batch
            return figures_of(length, batch, buffer_bytes, (ours, bare)) + latencies(length, buffer)
    finally:
        connection.close()
        await kill(server)
        await store.kill()


def figures_of(length: int, batch: int, size: int, sides: tuple[Side, Side]) -> list[Figure]:
    """Rates and where the time goes; `size` is the payload of a round in bytes."""
    figures, rate = [], {}
    for name, side in zip(("buffer", "bare"), sides, strict=True):
        rate[name] = batch / median(side.rounds)
        figures += [
            Figure(f"{length} tokens, {name}: groups", rate[name], "/s"),
            Figure(f"{length} tokens, {name}: payload", size / median(side.rounds) / 1e6, "MB/s"),
            Figure(f"{length} tokens, {name}: put {batch} groups", median(side.put) * 1e3, "ms"),
            Figure(f"{length} tokens, {name}: fetch", median(side.get) * 1e3, "ms"),
            Figure(f"{length} tokens, {name}: take and commit", median(side.rest) * 1e3, "ms"),
        ]
        figures += [
            Figure(f"{length} tokens, {name}: CPU of {process}", seconds / len(side.put) * 1e3, "ms a round")
            for process, seconds in side.cpu.items()
        ]
    ratio = rate["buffer"] / rate["bare"]
    return [*figures, Figure(f"{length} tokens: buffer / bare", ratio, "", BAR.get(length, ""))]


def latencies(length: int, buffer: Buffer) -> list[Figure]:
    """Of single calls."""
    return [
        Figure(f"{length} tokens: {name}, {label}", percentile(values, share) * 1e3, "ms")
        for name, values in (("lease", buffer.lease_seconds), ("take", buffer.take_seconds))
        for label, share in (("median", 0.5), ("99 %", 0.99))
    ]


def main() -> int:
    """Command line entry."""
    arguments = parser(__doc__ or "")
    arguments.add_argument("--lengths", type=int, nargs="+", default=[512, 8192], help="response tokens of a sample")
    arguments.add_argument("--rounds", type=int, default=30)
    arguments.add_argument("--batch", type=int, default=32, help="groups of a step")
    chosen = arguments.parse_args()
    # As every process of ours that serves gRPC, a node among them; the bare side shares this process.
    keep_freed_memory()
    figures = []
    for length in chosen.lengths:
        with workspace() as directory:
            figures += asyncio.run(measure(directory, length, chosen.rounds, chosen.batch))
    return finish("buffer_throughput", figures, chosen.json, samples=SAMPLES, batch=chosen.batch)


if __name__ == "__main__":
    raise SystemExit(main())
