"""`python -m benchmarks.buffer_kills`: servers, clients and the store get SIGKILL at random moments, many times each.

Two runs share a store and two buffer servers. Each has two producers, processes of their own that lease prompts, hold
them as long as a generation would and put groups, and one consumer, which trains, commits, records checkpoints and now
and then dies itself and restores. What the consumers trained in the surviving history is the ledger: at the end every
prompt that was drawn must be in it once.

A store that syncs every second may come back without what it acknowledged last. The law is the same; the clients heal
(`benchmarks.buffer_clients`).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import redis
from rich.console import Console
from rich.table import Table

from benchmarks.buffer_clients import BATCH, SAMPLES, Consumer, produce
from benchmarks.buffer_world import (
    Client,
    DidNotStart,
    Store,
    channel_to,
    environment,
    insist,
    kill,
    percentile,
    start_server,
    workspace,
    write_data,
)
from benchmarks.report import Figure, finish, parser
from services.common.errors import ServiceError
from services.common.process import ManagedProcess

VICTIMS = ("server", "client", "store, everysec", "store, always", "power, everysec")
"""The last one is what a power loss leaves: the store is killed, and what it had not synced yet is cut off its file."""
ROWS, RUNS = 200, 2
RECOVER_SECONDS = 60.0


class Place:
    """Store, servers, producers and consumers of one row of the table."""

    def __init__(self, directory: Path, fsync: str, seed: int) -> None:
        self.directory, self.chance = directory, random.Random(seed)
        self.store = Store(directory / "store", fsync)
        self.servers: list[tuple[ManagedProcess, int]] = []
        self.producers: dict[str, ManagedProcess] = {}
        self.consumers: list[Consumer] = []
        self._channels: list[grpc.aio.Channel] = []
        self._names = 0
        self.cut_bytes = 0

    @property
    def ports(self) -> list[int]:
        """Of the servers."""
        return [port for _, port in self.servers]

    async def __aenter__(self) -> Place:
        await self.store.start()
        try:
            start = (start_server(self.store.url, self.directory) for _ in range(2))
            self.servers = list(await asyncio.gather(*start))
            data = write_data(self.directory / "data", ROWS)
            for number in range(RUNS):
                # A channel that begins with the one server, and one that begins with the other.
                self._channels.append(channel_to(self.ports[::-1] if number else self.ports))
                client = Client(self._channels[-1], f"kills-{number}", SAMPLES, "trainer")
                await client.create(
                    *data, data={"max_prompt_attempts": 1_000_000}, rollout={"rollout_batch_size": BATCH},
                    trainer={"max_staleness": number, "save_interval": 5},
                )  # fmt: skip
                await client.session()
                await client.publish(0)
                self.consumers.append(Consumer(client, random.Random(number)))
                for _ in range(2):
                    await self.add_producer(client.run_id)
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        for channel in self._channels:
            await channel.close()
        for process in [*self.producers.values(), *(server for server, _ in self.servers)]:
            await kill(process)
        await self.store.kill()

    async def add_producer(self, run_id: str) -> str:
        """Starts a producer; its name."""
        self._names += 1
        name = f"{run_id}/node-{self._names}"
        argv = [sys.executable, "-m", "benchmarks.buffer_kills", "--produce", run_id, name, *map(str, self.ports)]
        log = self.directory / f"producer-{self._names}.log"
        self.producers[name] = ManagedProcess(name, argv, env=environment(), log_path=log)
        await self.producers[name].start()
        return name

    async def kill_server(self) -> float:
        """Seconds until every client has been answered again, the other server being there."""
        index = self.chance.randrange(len(self.servers))
        process, port = self.servers[index]
        await kill(process)
        seconds = await self._answered()
        self.servers[index] = await start_server(self.store.url, self.directory, port)
        return seconds

    async def kill_store(self) -> float:
        """Seconds until every client has been answered again, the restart of the store included."""
        started = time.monotonic()
        await self.store.kill()
        await asyncio.sleep(self.chance.uniform(0, 0.1))
        await self.store.start()
        return time.monotonic() - started + await self._answered()

    async def cut_power(self) -> float:
        """As kill_store, but the file loses a random part of what was written and not synced."""
        synced = await asyncio.to_thread(self._synced_bytes)
        await asyncio.sleep(self.chance.uniform(0, 1.0))
        started = time.monotonic()
        await self.store.kill()
        path = self._newest_file()
        size = path.stat().st_size
        with path.open("r+b") as file:
            file.truncate(self.chance.randint(min(synced, size), size))
        self.cut_bytes += size - path.stat().st_size
        await self.store.start()
        return time.monotonic() - started + await self._answered()

    def _newest_file(self) -> Path:
        """The append-only file that grows now."""
        return max(self.store.directory.glob("appendonlydir/*.incr.aof"), key=lambda path: path.stat().st_mtime)

    def _synced_bytes(self) -> int:
        """Length of the file's head that is on the disk for sure."""
        with redis.Redis.from_url(self.store.url) as connection:
            length = self._newest_file().stat().st_size
            connection.set("synced", length)
            connection.execute_command("WAITAOF", 1, 0, 5000)
        return length

    async def kill_client(self) -> float:
        """Seconds until the leases of a killed producer are another's or finished; it dies when it holds some."""
        name = self.chance.choice(list(self.producers))
        run_id = name.split("/")[0]
        client = next(consumer.client for consumer in self.consumers if consumer.client.run_id == run_id)
        deadline = time.monotonic() + RECOVER_SECONDS
        while not await self._held_by(client, name) and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        started = time.monotonic()
        await kill(self.producers.pop(name))
        held = await self._held_by(client, name)
        await self.add_producer(run_id)
        while held & await self._held_by(client, name):
            if time.monotonic() - started > RECOVER_SECONDS:
                raise TimeoutError(f"{len(held)} leases of a dead client are still held")
            await asyncio.sleep(0.02)
        return time.monotonic() - started

    @staticmethod
    async def _held_by(client: Client, name: str) -> set[int]:
        return {info.ordinal async for info in client.groups(states=[2]) if info.caller == name}

    async def _answered(self) -> float:
        started = time.monotonic()
        await asyncio.gather(*(insist(consumer.client.stats) for consumer in self.consumers))
        return time.monotonic() - started


@dataclass
class Row:
    """What the kills of one victim showed."""

    victim: str
    seconds: list[float] = field(default_factory=list)
    lost: int = 0
    doubled: int = 0
    wrong: int = 0
    trained: int = 0
    healed: int = 0
    crashes: int = 0
    cut_bytes: int = 0
    given_again: int = 0


async def kill_often(directory: Path, victim: str, times: int, seed: int = 1) -> Row:
    """Kills a victim `times` times while the runs go on, then lets them finish."""
    row = Row(victim)
    fsync = "always" if victim.endswith("always") else "everysec"
    async with Place(directory, fsync, seed) as place:
        strikes = {"server": place.kill_server, "client": place.kill_client, "power, everysec": place.cut_power}
        strike = strikes.get(victim, place.kill_store)
        training = [asyncio.create_task(consumer.run()) for consumer in place.consumers]
        for _ in range(times):
            await asyncio.sleep(place.chance.uniform(0.05, 1.0))
            row.seconds.append(await strike())
            failed = [task for task in training if task.done()]
            if failed:
                await asyncio.gather(*failed)
        for consumer in place.consumers:
            consumer.stop = True
        await asyncio.gather(*training)
        for consumer in place.consumers:
            row.lost += len(await consumer.finish())
            row.doubled += consumer.ledger.doubled
            row.wrong += consumer.ledger.wrong_payloads
            row.trained += len(consumer.ledger.groups)
            row.healed += consumer.healed
            row.crashes += consumer.crashes
            row.given_again += consumer.given_again
        row.cut_bytes = place.cut_bytes
    return row


def show(rows: list[Row]) -> None:
    """Prints the table."""
    table = Table(title="SIGKILL while 4 producers and 2 consumers run")
    for name in ("victim", "kills", "prompts trained", "lost", "trained twice", "restores", "p50 s", "p99 s"):
        table.add_column(name, justify="left" if name == "victim" else "right")
    for row in rows:
        p50, p99 = (f"{percentile(row.seconds, share):.2f}" for share in (0.5, 0.99))
        restores = f"{row.crashes + row.healed}"
        table.add_row(
            row.victim, str(len(row.seconds)), str(row.trained), str(row.lost), str(row.doubled), restores, p50, p99
        )
    Console(width=120).print(table)


def figures_of(row: Row, times: int) -> list[Figure]:
    """Of one row."""
    name = row.victim
    return [
        Figure(f"{name}: kills", len(row.seconds), "", f">= {times}"),
        Figure(f"{name}: prompts trained", row.trained, "", ">= 1"),
        Figure(f"{name}: prompts lost", row.lost, "", "== 0"),
        Figure(f"{name}: trained twice", row.doubled, "", "== 0"),
        Figure(f"{name}: payloads of another prompt", row.wrong, "", "== 0"),
        Figure(f"{name}: versions and sessions given twice", row.given_again, "", "== 0"),
        Figure(f"{name}: consumers' own crashes", row.crashes),
        Figure(f"{name}: restores after lost acknowledgements", row.healed),
        Figure(f"{name}: acknowledged bytes cut off", row.cut_bytes, "bytes"),
        Figure(f"{name}: recovery, median", percentile(row.seconds, 0.5), "s"),
        Figure(f"{name}: recovery, 99 %", percentile(row.seconds, 0.99), "s"),
    ]


def main() -> int:
    """Command line entry."""
    arguments = parser(__doc__ or "")
    arguments.add_argument("--times", type=int, default=100, help="kills of each victim")
    arguments.add_argument("--victims", nargs="+", choices=VICTIMS, default=list(VICTIMS))
    arguments.add_argument("--keep", type=Path, help="directory for logs and stores, kept")
    arguments.add_argument("--produce", nargs="+", help=argparse.SUPPRESS)
    chosen = arguments.parse_args()
    if chosen.produce:
        run_id, name, *ports = chosen.produce
        with contextlib.suppress(KeyboardInterrupt):
            asyncio.run(produce([int(port) for port in ports], run_id, name))
        return 0
    rows = []
    with workspace(chosen.keep) as directory:
        for number, victim in enumerate(chosen.victims):
            try:
                rows.append(asyncio.run(kill_often(directory / str(number), victim, chosen.times)))
            except (AssertionError, DidNotStart, ServiceError, TimeoutError) as error:
                show(rows)
                raise SystemExit(f"{victim}: {error}") from error
    show(rows)
    figures = [figure for row in rows for figure in figures_of(row, chosen.times)]
    return finish("buffer_kills", figures, chosen.json, times=chosen.times)


if __name__ == "__main__":
    raise SystemExit(main())
