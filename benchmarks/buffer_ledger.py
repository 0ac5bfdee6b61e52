"""`python -m benchmarks.buffer_ledger`: random histories of the buffer, kept in a ledger of the client's own.

Nodes lease, put (twice, late, in part), extend, release and die; leases of a blink expire; a trainer takes, commits,
records checkpoints, dies and restores; servers are replaced and the store is killed. After every round the counts of
the store must add up, and at the end the ledger, not the server's counters, says whether a prompt was lost or trained
twice. The sequence of operations follows from the seed.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.buffer_world import (
    Client,
    DidNotStart,
    Store,
    channel_to,
    finished,
    group_ids,
    insist,
    kill,
    start_server,
    workspace,
    write_data,
    wrong_payload,
)
from benchmarks.report import Figure, finish, parser
from services.common.errors import ServiceError
from services.common.process import ManagedProcess

BATCH, SAMPLES, ROWS, NODES = 4, 2, 50, 4
DRAIN_SECONDS = 60.0


@dataclass
class Ledger:
    """What the trainer trained in the surviving history of a run, and what nodes evicted, by ordinal."""

    trained: dict[int, list[str]] = field(default_factory=dict)
    checkpoints: list[int] = field(default_factory=lambda: [-1])
    wrong_payloads: int = 0

    @property
    def committed(self) -> int:
        """Last step trained; -1 before the first."""
        return max(self.trained, default=-1)

    @property
    def groups(self) -> list[str]:
        """Groups of all steps."""
        return [group for groups in self.trained.values() for group in groups]

    @property
    def doubled(self) -> int:
        """Groups trained more than once."""
        return sum(count - 1 for count in Counter(self.groups).values())

    def roll_back(self, step: int) -> None:
        """The trainer goes on from the checkpoint of a step."""
        self.trained = {known: groups for known, groups in self.trained.items() if known <= step}
        self.checkpoints = [known for known in self.checkpoints if known <= step]


@dataclass
class Node:
    """A client that holds leases."""

    client: Client
    held: list = field(default_factory=list)
    old: list = field(default_factory=list)


class Servers:
    """Two buffer servers over one store; any of them can be killed and started again at its address."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._running: list[tuple[ManagedProcess, int]] = []

    async def start(self) -> list[int]:
        """Their ports."""
        started = (start_server(self._store.url, self._store.directory) for _ in range(2))
        self._running = list(await asyncio.gather(*started))
        return [port for _, port in self._running]

    async def replace(self, index: int) -> None:
        """SIGKILL; the next one at its address knows nothing."""
        process, port = self._running[index]
        await kill(process)
        self._running[index] = await start_server(self._store.url, self._store.directory, port)

    async def stop(self) -> None:
        """Ends both."""
        for process, _ in self._running:
            await kill(process)


class History:
    """One random history of one run.

    Args:
        trainer: client of the trainer; nodes: clients of nodes.
    """

    def __init__(self, seed: int, trainer: Client, nodes: list[Client]) -> None:
        self.chance = random.Random(seed)
        self.trainer, self.nodes = trainer, [Node(client) for client in nodes]
        self.ledger = Ledger()
        self.reserved: list[str] = []
        self.counts: Counter[str] = Counter()
        self.observations = 0

    async def start(self, data: tuple[Path, Path]) -> None:
        """Creates the run with settings drawn from the seed."""
        chance = self.chance
        await self.trainer.create(
            *data,
            data={"max_prompt_attempts": chance.choice([3, 1000]), "rollout_shuffle": True},
            rollout={"rollout_batch_size": BATCH},
            trainer={"max_staleness": chance.choice([0, 1, 3]), "stale_policy": chance.choice(["requeue", "drop"]),
                     "save_interval": chance.choice([1, 2])},
        )  # fmt: skip
        await self.trainer.session()
        await self.trainer.publish(0)

    async def round(self) -> int:
        """Some nodes and the trainer act at once, then the counts are observed; returns the operations made."""
        before = self.counts.total()
        actors = [self._node(node) for node in self.chance.sample(self.nodes, self.chance.randint(1, len(self.nodes)))]
        await asyncio.gather(*actors, self._train())
        await self.observe()
        return self.counts.total() - before

    async def observe(self) -> None:
        """The identity, and the store's counts beside the ledger's. Raises AssertionError."""
        stats = await insist(self.trainer.stats)
        self.counts["stats"] += 1
        self.observations += 1
        mine = len(self.ledger.groups)
        if stats.consumed_count != mine or stats.reserved_count != len(self.reserved):
            raise AssertionError(f"the ledger has {mine} trained and {len(self.reserved)} reserved: {stats}")

    # -- nodes

    async def _node(self, node: Node) -> None:
        actions = {"lease": 6, "put": 8, "release": 1, "extend": 1, "crash": 1, "look": 1}
        action = self.chance.choices(list(actions), list(actions.values()))[0]
        self.counts[action] += 1
        await getattr(self, f"_{action}")(node)

    async def _lease(self, node: Node) -> None:
        ttl, count = self.chance.choice([0.002, 0.05, 30, 30, 30]), self.chance.randint(1, 6)
        answer = await insist(lambda: node.client.lease(count, ttl=ttl))
        node.held += [(lease, answer.policy_version) for lease in answer.leases]

    async def _put(self, node: Node) -> None:
        """Some of what is held, now and then twice at once, or together with leases long gone."""
        self.chance.shuffle(node.held)
        count = self.chance.choice([len(node.held), self.chance.randint(0, len(node.held))])
        chosen, node.held = node.held[:count], node.held[count:]
        chosen += self.chance.sample(node.old, min(len(node.old), self.chance.choice([0, 0, 2])))
        groups = [finished(lease, SAMPLES, version) for lease, version in chosen]
        if groups:
            repeats = self.chance.choice([1, 1, 1, 2])
            await asyncio.gather(*(insist(lambda: node.client.put(groups)) for _ in range(repeats)))
        node.old = (node.old + chosen)[-20:]

    async def _release(self, node: Node) -> None:
        if node.held:
            lease, _ = node.held.pop()
            reason = self.chance.choice(["", "", "FILTERED"])
            await insist(lambda: node.client.call("ReleaseLeases", lease_ids=[lease.lease_id], evict_reason=reason))

    async def _extend(self, node: Node) -> None:
        ids = [lease.lease_id for lease, _ in node.held]
        ttl = {"seconds": self.chance.choice([1, 30])}
        await insist(lambda: node.client.call("ExtendLeases", lease_ids=ids, ttl=ttl))

    async def _crash(self, node: Node) -> None:
        """It forgets everything; its leases expire, or live on until the trainer's restore."""
        node.old, node.held = (node.old + node.held)[-20:], []

    async def _look(self, node: Node) -> None:
        async for info in node.client.groups(states=[self.chance.randint(1, 6)]):
            if self.chance.random() < 0.1:
                await insist(lambda info=info: node.client.call("GetGroup", group_id=info.group_id))
                return

    # -- the trainer

    async def _train(self) -> None:
        chance = self.chance.random()
        if chance < 0.03:
            await self.restart()
        elif self.reserved:
            await self.commit()
        else:
            await self.take()

    async def take(self) -> None:
        """Takes the next step, looks at the same batch again, and reads every payload."""
        step = self.ledger.committed + 1
        self.counts["take"] += 1
        batch = await insist(lambda: self.trainer.take(step, BATCH))
        self.reserved = group_ids(batch)
        if not self.reserved:
            return
        if group_ids(await insist(lambda: self.trainer.take(step, BATCH))) != self.reserved:
            raise AssertionError(f"step {step}, taken again, is another batch")
        ids = [header.sample_id for header in batch.samples]
        self.counts["fetch"] += 1
        for sample in await insist(lambda: self.trainer.fetch(ids)):
            self.ledger.wrong_payloads += wrong_payload(sample, sample.sample_id.rsplit("-", 1)[0])

    async def commit(self) -> None:
        """Commits, sometimes twice; then checkpoint and new weights as a trainer would."""
        step = self.ledger.committed + 1
        for _ in range(self.chance.choice([1, 1, 2])):
            self.counts["commit"] += 1
            count = await insist(lambda: self.trainer.call("CommitStep", trainer_epoch=self.trainer.epoch, step=step))
            if count.group_count != BATCH:
                raise AssertionError(f"step {step} consumed {count.group_count} groups, not {BATCH}")
        self.ledger.trained[step], self.reserved = self.reserved, []
        if self.chance.random() < 0.5:
            self.counts["checkpoint"] += 1
            fields = {"trainer_epoch": self.trainer.epoch, "step": step, "path": f"checkpoints/{step}"}
            await insist(lambda: self.trainer.call("RecordCheckpoint", **fields))
            self.ledger.checkpoints.append(step)
        if self.chance.random() < 0.8:
            self.counts["publish"] += 1
            await insist(lambda: self.trainer.publish(step + 1))

    async def restart(self) -> None:
        """The trainer dies and comes back from its newest checkpoint, or now and then from an older one."""
        known = self.ledger.checkpoints
        step = known[-1] if self.chance.random() < 0.8 else self.chance.choice(known[-4:])
        self.counts["restore"] += 1
        await insist(self.trainer.session)
        await insist(lambda: self.trainer.call("RestoreRun", trainer_epoch=self.trainer.epoch, step=step))
        self.ledger.roll_back(step)
        self.reserved = []
        await insist(lambda: self.trainer.publish(step + 1))

    # -- the end

    async def drain(self) -> int:
        """Trains on until every prompt drawn by now is trained or evicted; returns how many are not."""
        drawn = (await insist(self.trainer.stats)).drawn_count
        deadline = time.monotonic() + DRAIN_SECONDS
        while time.monotonic() < deadline:
            missing = await self._missing(drawn)
            if not missing:
                return 0
            self.nodes[0].held = []
            answer = await insist(lambda: self.nodes[0].client.lease(64, ttl=30))
            if answer.leases:
                groups = [finished(lease, SAMPLES, answer.policy_version) for lease in answer.leases]
                await insist(lambda groups=groups: self.nodes[0].client.put(groups))
            await (self.commit() if self.reserved else self.take())
            if not answer.leases and not self.reserved:
                # Leases of dead nodes that live long: the restore cancels them.
                await self.restart()
            await self.observe()
        return len(missing)

    async def _missing(self, drawn: int) -> set[int]:
        """Ordinals below `drawn` that are neither in the ledger nor evicted for a reason."""
        done = {int(group.rsplit("-", 1)[1]) for group in self.ledger.groups}
        open_ = set(range(drawn)) - done
        if not open_:
            return open_
        async for info in self.trainer.groups(states=[6]):
            if info.evict_reason:
                if info.ordinal in done:
                    raise AssertionError(f"{info.group_id} is trained and evicted")
                open_.discard(info.ordinal)
        return open_


@dataclass
class Outcome:
    """What a number of histories showed."""

    counts: Counter[str] = field(default_factory=Counter)
    observations: int = 0
    lost: int = 0
    doubled: int = 0
    wrong_payloads: int = 0
    trained: int = 0
    restarts: Counter[str] = field(default_factory=Counter)


async def play(
    directory: Path, seed: int, operations: int, *, per_run: int = 1500, disturbance: float = 0.01
) -> Outcome:
    """Random histories, one run after another, until `operations` were made.

    Args:
        per_run: operations of one run.
        disturbance: how likely a process is killed after a round.
    """
    data = write_data(directory / "data", ROWS)
    store = await Store(directory / "store").start()
    servers = Servers(store)
    ports = await servers.start()
    channels = [channel_to([port, *ports]) for port in (ports * NODES)[: NODES + 1]]
    chance, outcome, made = random.Random(seed), Outcome(), 0
    try:
        while made < operations:
            run = f"ledger-{seed}-{made}"
            clients = [Client(channel, run, SAMPLES, f"node-{i}") for i, channel in enumerate(channels)]
            history = History(chance.randrange(1 << 30), clients[0], clients[1:])
            await history.start(data)
            target = min(per_run, operations - made)
            while history.counts.total() < target:
                await history.round()
                if chance.random() < disturbance:
                    await _disturb(chance, store, servers, outcome)
            outcome.lost += await history.drain()
            outcome.doubled += history.ledger.doubled
            outcome.wrong_payloads += history.ledger.wrong_payloads
            outcome.trained += len(history.ledger.groups)
            outcome.observations += history.observations
            outcome.counts += history.counts
            made += history.counts.total()
    finally:
        for channel in channels:
            await channel.close()
        await servers.stop()
        await store.kill()
    return outcome


async def _disturb(chance: random.Random, store: Store, servers: Servers, outcome: Outcome) -> None:
    """A server or the store is killed and started again, in turn; between rounds, so that a seed repeats a history."""
    if outcome.restarts.total() % 2:
        await store.kill()
        await store.start()
        outcome.restarts["store killed"] += 1
    else:
        await servers.replace(chance.randrange(2))
        outcome.restarts["server killed"] += 1


def main() -> int:
    """Command line entry."""
    arguments = parser(__doc__ or "")
    arguments.add_argument("--operations", type=int, default=10_000)
    arguments.add_argument("--seed", type=int, default=1)
    chosen = arguments.parse_args()
    started = time.monotonic()
    with workspace() as directory:
        try:
            outcome = asyncio.run(play(directory, chosen.seed, chosen.operations))
        except (AssertionError, DidNotStart, ServiceError) as error:
            raise SystemExit(f"seed {chosen.seed}: {error}") from error
    figures = [
        Figure("operations", outcome.counts.total(), "", f">= {chosen.operations}"),
        *(Figure(f"  {name}", count) for name, count in sorted(outcome.counts.items())),
        *(Figure(f"  {name}", count) for name, count in sorted(outcome.restarts.items())),
        Figure("observations of the identity", outcome.observations),
        Figure("groups trained", outcome.trained),
        Figure("prompts lost", outcome.lost, "", "== 0"),
        Figure("prompts trained twice", outcome.doubled, "", "== 0"),
        Figure("payloads of another prompt", outcome.wrong_payloads, "", "== 0"),
        Figure("seconds", time.monotonic() - started, "s"),
    ]
    return finish("buffer_ledger", figures, chosen.json, seed=chosen.seed)


if __name__ == "__main__":
    raise SystemExit(main())
