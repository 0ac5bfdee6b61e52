"""`python -m benchmarks.buffer_scaling`: what an operation costs with 10^3, 10^5 and 10^6 groups in the store.

One step goes through the server's own calls. Its trained groups are then copied in the store under further ordinals,
in the same keys and sets, until the run is as large as asked: such a run has trained for a long time. All sizes live
in stores of their own and are measured in turn, so that a busy moment of the machine meets all of them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import redis

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

BATCH, SAMPLES, ROWS = 4, 2, 1000
FILL = 2_000
"""Groups that one script copies."""
PER_STATE = 2000
"""Groups whose memory is measured in every state."""
BAR = 2.0
_COPY = """
local prefix, from, to, batch = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])
local record = redis.call('HGETALL', prefix .. 'g:000000000000')
for ordinal = from, to do
  local name, step = string.format('%012d', ordinal), string.format('%d', math.floor(ordinal / batch))
  redis.call('HSET', prefix .. 'g:' .. name, unpack(record))
  redis.call('HSET', prefix .. 'g:' .. name, 'step', step)
  redis.call('ZADD', prefix .. 'consumed', step, name)
end
local drawn = to + 1
redis.call('HSET', prefix .. 'run', 'drawn', string.format('%d', drawn), 'base', string.format('%d', drawn),
  'committed_step', string.format('%d', math.floor(drawn / batch) - 1))
"""


class Filled:
    """A run with many groups behind it, its store and its server."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.seconds: dict[str, list[float]] = {}
        self.step = 0

    async def open(self, directory: Path, stack: AsyncExitStack) -> None:
        """Starts everything and fills the run."""
        store = await Store(directory / "store").start()
        stack.push_async_callback(store.kill)
        server, port = await start_server(store.url, directory)
        stack.push_async_callback(kill, server)
        channel = await stack.enter_async_context(channel_to([port]))
        self.client = Client(channel, "scaling", SAMPLES)
        await self.client.create(
            *write_data(directory / "data", ROWS), rollout={"rollout_batch_size": BATCH},
            trainer={"save_interval": None, "save": None},
        )  # fmt: skip
        await self.client.session()
        await self.client.publish(0)
        await self.round()
        self.seconds = {}
        with redis.Redis.from_url(store.url, socket_timeout=60) as connection:
            script = connection.register_script(_COPY)
            for start in range(BATCH, self.size, FILL):
                await asyncio.to_thread(
                    script, args=["tetrarch:{scaling}:", start, min(start + FILL, self.size) - 1, BATCH]
                )
        self.step = self.size // BATCH
        if (await self.client.stats()).drawn_count != self.size:
            raise AssertionError(f"the run has not {self.size} groups")
        await self.client.publish(self.step)

    async def _timed(self, name: str, call: Callable[[], Awaitable]) -> object:
        started = time.perf_counter()
        answer = await call()
        self.seconds.setdefault(name, []).append(time.perf_counter() - started)
        return answer

    async def round(self) -> None:
        """A step with one call of each kind timed."""
        client = self.client
        for _ in range(BATCH):
            answer = await self._timed("lease", lambda: client.lease(1))
            groups = [finished(answer.leases[0], SAMPLES, answer.policy_version)]
            await self._timed("put", lambda groups=groups: client.put(groups))
        await self._timed("take", lambda: client.take(self.step, BATCH))
        commit = {"trainer_epoch": client.epoch, "step": self.step}
        await self._timed("stats", client.stats)
        await self._timed("commit", lambda: client.call("CommitStep", **commit))
        await self._timed("list, first page", lambda: client.call("ListGroups"))
        await self._timed("list, of the step", lambda: client.call("ListGroups", step=self.step))
        await self._timed("list, pending", lambda: client.call("ListGroups", states=[1]))
        self.step += 1
        await self._timed("publish", lambda: client.publish(self.step))


async def measure(directory: Path, sizes: list[int], rounds: int) -> list[Figure]:
    """Times of every operation at every size, and of the largest against the smallest."""
    runs = [Filled(size) for size in sizes]
    async with AsyncExitStack() as stack:
        for run in runs:
            await run.open(directory / str(run.size), stack)
        for _ in range(rounds):
            for run in runs:
                await run.round()
    figures = []
    for name in runs[0].seconds:
        medians = [percentile(run.seconds[name], 0.5) * 1e3 for run in runs]
        for run, median in zip(runs, medians, strict=True):
            figures.append(Figure(f"{name}: {run.size:,} groups, median", median, "ms"))
        figures.append(
            Figure(f"{name}: {runs[-1].size:,} / {runs[0].size:,}", medians[-1] / medians[0], "", f"<= {BAR}")
        )
    return figures


async def memory(directory: Path) -> list[Figure]:
    """Bytes of the store a group takes in every state, its payload left out."""
    figures = []
    async with AsyncExitStack() as stack:
        store = await Store(directory / "store").start()
        stack.push_async_callback(store.kill)
        server, port = await start_server(store.url, directory)
        stack.push_async_callback(kill, server)
        client = Client(await stack.enter_async_context(channel_to([port])), "memory", SAMPLES)
        await client.create(
            *write_data(directory / "data", ROWS), rollout={"rollout_batch_size": PER_STATE},
            trainer={"save_interval": None, "save": None},
        )  # fmt: skip
        connection = stack.enter_context(redis.Redis.from_url(store.url))
        await client.session()
        await client.publish(0)

        async def leases() -> list:
            answers = [await client.lease(1000) for _ in range(PER_STATE // 1000)]
            return [lease for answer in answers for lease in answer.leases]

        async def release(held: list, reason: str) -> None:
            ids = [lease.lease_id for lease in held]
            await client.call("ReleaseLeases", lease_ids=ids, evict_reason=reason)

        empty = _used(connection)
        held = await leases()
        figures.append(_per_group("leased", _used(connection) - empty))
        await release(held, "")
        figures.append(_per_group("pending", _used(connection) - empty))
        held = await leases()
        for at in range(0, PER_STATE, 200):
            await client.put([finished(lease, SAMPLES, 1) for lease in held[at : at + 200]])
        payload = (await client.stats()).payload_bytes
        figures.append(_per_group("ready", _used(connection) - empty - payload))
        await client.take(0, PER_STATE)
        figures.append(_per_group("reserved", _used(connection) - empty - payload))
        await client.call("CommitStep", trainer_epoch=client.epoch, step=0)
        figures.append(_per_group("consumed (texts of the last 1,000 kept)", _used(connection) - empty))
        await client.publish(1)
        before = _used(connection)
        await release(await leases(), "FILTERED")
        figures.append(_per_group("evicted", _used(connection) - before))
    return figures


def _used(connection: redis.Redis) -> int:
    """Bytes of data, what requests are remembered by left out."""
    for key in connection.scan_iter("tetrarch:{memory}:q:*"):
        connection.delete(key)
    return int(connection.info("memory")["used_memory_dataset"])


def _per_group(state: str, size: int) -> Figure:
    return Figure(f"memory of a group: {state}", size / PER_STATE, "bytes")


def main() -> int:
    """Command line entry."""
    arguments = parser(__doc__ or "")
    arguments.add_argument("--sizes", type=int, nargs="+", default=[1000, 100_000, 1_000_000])
    arguments.add_argument("--rounds", type=int, default=100)
    chosen = arguments.parse_args()
    with workspace() as directory:
        figures = asyncio.run(measure(directory, chosen.sizes, chosen.rounds))
        figures += asyncio.run(memory(directory / "memory"))
    return finish("buffer_scaling", figures, chosen.json, batch=BATCH, samples=SAMPLES)


if __name__ == "__main__":
    raise SystemExit(main())
