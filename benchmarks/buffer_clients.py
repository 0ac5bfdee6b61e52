"""What works while `benchmarks.buffer_kills` kills: producers, as rollout nodes are, and consumers with a ledger.

They heal as clients of the buffer must: a producer whose lease is unknown forgets it; a consumer whose step does not
follow restores its newest checkpoint that the store still knows, and goes on from there.
"""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import dataclass, field

from benchmarks.buffer_ledger import Ledger
from benchmarks.buffer_world import Client, channel_to, finished, group_ids, insist, wrong_payload
from services.common.errors import ServiceError

BATCH, SAMPLES = 4, 2
LEASE_SECONDS = 1.0
GENERATION_SECONDS = 0.1
DRAIN_SECONDS = 90.0
_GONE = ("STEP_OUT_OF_ORDER", "FENCED", "INVALID_FIELD", "STEP_NOT_RESTORABLE", "PAYLOAD_LOST", "SAMPLE_NOT_FOUND")
"""How a store that lost its last second contradicts a consumer."""


async def produce(ports: list[int], run_id: str, caller: str) -> None:
    """A producer, until it is killed: leases, generates for a while, puts."""
    async with channel_to(ports) as channel:
        client = Client(channel, run_id, SAMPLES, caller)
        chance = random.Random(caller)
        while True:
            try:
                answer = await insist(lambda: client.lease(2, ttl=LEASE_SECONDS, wait=0.5))
                await asyncio.sleep(chance.uniform(0.2, 1.8) * GENERATION_SECONDS)
                groups = [finished(lease, SAMPLES, answer.policy_version) for lease in answer.leases]
                if groups:
                    await insist(lambda groups=groups: client.put(groups))
            except ServiceError as error:
                print(error.message, flush=True)
                await asyncio.sleep(0.2)


@dataclass
class Consumer:
    """The trainer of one run, with its ledger. Its weights are what it has trained: they die and return with it."""

    client: Client
    chance: random.Random
    ledger: Ledger = field(default_factory=Ledger)
    healed: int = 0
    crashes: int = 0
    given_again: int = 0
    stop: bool = False
    _newest: dict[str, int] = field(default_factory=dict)
    _behind: bool = False

    async def run(self) -> None:
        """Trains until it is told to stop."""
        while not self.stop:
            await self.step()

    async def step(self) -> None:
        """One step, or a restore when the store contradicts."""
        try:
            if self.chance.random() < 0.03:
                self.crashes += 1
                self._behind = True
            if self._behind:
                await self.restore()
                self._behind = False
            await self._step(self.ledger.committed + 1)
        except ServiceError as error:
            if error.reason not in _GONE:
                raise
            self.healed += 1
            self._behind = True

    async def _step(self, step: int) -> None:
        client = self.client
        batch = await insist(lambda: client.take(step, BATCH, wait=0.5))
        groups = group_ids(batch)
        if not groups:
            return
        ids = [header.sample_id for header in batch.samples]
        for sample in await insist(lambda: client.fetch(ids)):
            self.ledger.wrong_payloads += wrong_payload(sample, sample.sample_id.rsplit("-", 1)[0])
        await asyncio.sleep(self.chance.uniform(0, 0.05))
        self.ledger.trained[step] = groups
        await insist(lambda: client.call("CommitStep", trainer_epoch=client.epoch, step=step))
        if step % 5 == 4:
            fields = {"trainer_epoch": client.epoch, "step": step, "path": f"checkpoints/{step}"}
            await insist(lambda: client.call("RecordCheckpoint", **fields))
            self.ledger.checkpoints.append(step)
        await self._publish(step + 1)

    async def _publish(self, step_count: int) -> None:
        """New weights under a number that no other weights may have."""
        self._is_new("version", version := await insist(lambda: self.client.reserve()))
        await insist(lambda: self.client.publish_version(version, step_count))

    def _is_new(self, kind: str, number: int) -> None:
        self.given_again += number <= self._newest.get(kind, 0)
        self._newest[kind] = max(number, self._newest.get(kind, 0))

    async def restore(self) -> None:
        """A new session from the newest checkpoint that the store can go back to."""
        await insist(self.client.session)
        self._is_new("session", self.client.epoch)
        for step in reversed(self.ledger.checkpoints):
            try:
                await insist(lambda step=step: self.client.call(
                    "RestoreRun", trainer_epoch=self.client.epoch, step=step
                ))  # fmt: skip
            except ServiceError as error:
                if error.reason != "STEP_NOT_RESTORABLE":
                    raise
                continue
            self.ledger.roll_back(step)
            break
        await self._publish(self.ledger.committed + 1)

    async def missing(self) -> set[int]:
        """Prompts drawn by now that the ledger lacks and that were not evicted."""
        drawn = (await insist(self.client.stats)).drawn_count
        evicted = {info.ordinal async for info in self.client.groups(states=[6])}
        return set(range(drawn)) - {int(group.rsplit("-", 1)[1]) for group in self.ledger.groups} - evicted

    async def finish(self) -> set[int]:
        """Trains on until every prompt that is drawn now is trained; the ordinals that never came."""
        drawn = (await insist(self.client.stats)).drawn_count
        deadline = time.monotonic() + DRAIN_SECONDS
        while missing := {ordinal for ordinal in await self.missing() if ordinal < drawn}:
            if time.monotonic() > deadline:
                return missing
            await self.step()
        return missing
