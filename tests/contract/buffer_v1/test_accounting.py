"""Random histories: leases that expire, racing puts, evictions, steps, checkpoints, restores, new weights.

A plain Python model follows what the trainer trained in the surviving history; the store must agree with it,
and the accounting identity must hold after every operation.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field

import pytest

from services.common.errors import ServiceError
from tests.contract.buffer_v1.driver import Driver, group_ids

pytestmark = pytest.mark.asyncio(loop_scope="module")


@dataclass
class History:
    """Plays one random history on a run and checks it."""

    driver: Driver
    random: random.Random
    held: list = field(default_factory=list)
    old: list = field(default_factory=list)
    trained: dict[int, list[str]] = field(default_factory=dict)
    reserved: list[str] = field(default_factory=list)
    committed: int = -1
    checkpoints: list[int] = field(default_factory=lambda: [-1])
    version: int = 1

    async def lease(self) -> None:
        # Some leases expire at once.
        ttl = self.random.choice([0.001, 60, 60, 60])
        response = await self.driver.lease(self.random.randint(1, 4), ttl=ttl)
        self.held += [(lease, response.policy_version) for lease in response.leases]

    async def put(self) -> None:
        """Puts some held groups, sometimes twice at once, sometimes together with leases long gone."""
        self.random.shuffle(self.held)
        count = self.random.randint(0, len(self.held))
        chosen, self.held = self.held[:count], self.held[count:]
        chosen += self.random.sample(self.old, min(len(self.old), 2))
        groups = [self.driver.finished(lease, version) for lease, version in chosen]
        if groups:
            await asyncio.gather(*(self.driver.put(*groups) for _ in range(self.random.choice([1, 1, 2]))))
        self.old = (self.old + chosen)[-20:]

    async def release(self) -> None:
        if self.held:
            lease, _ = self.held.pop(self.random.randrange(len(self.held)))
            reason = self.random.choice(["", "", "FILTERED"])
            await self.driver.call("ReleaseLeases", lease_ids=[lease.lease_id], evict_reason=reason)

    async def take(self) -> None:
        batch = await self.driver.take(self.committed + 1)
        assert not self.reserved or group_ids(batch) == self.reserved
        self.reserved = group_ids(batch)
        versions = {header.min_version for header in batch.samples}
        bound = self.driver.spec["trainer"]["max_staleness"]
        assert all(batch.policy_version - version <= bound for version in versions)
        if self.reserved:
            assert len(await self.driver.fetch([f"{group}-1" for group in self.reserved])) == 2

    async def commit(self) -> None:
        if self.reserved:
            assert await self.driver.commit(self.committed + 1) == 2
            self.committed += 1
            self.trained[self.committed], self.reserved = self.reserved, []
            await self.driver.commit(self.committed)

    async def publish(self) -> None:
        self.version = await self.driver.publish(self.committed + 1)

    async def checkpoint(self) -> None:
        if self.committed >= 0:
            await self.driver.checkpoint(self.committed)
            self.checkpoints.append(self.committed)

    async def restart(self) -> None:
        """A trainer dies and comes back from its newest checkpoint, or now and then from an older one."""
        step = self.checkpoints[-1] if self.random.random() < 0.8 else self.random.choice(self.checkpoints)
        await self.driver.session()
        await self.driver.restore(step)
        self.checkpoints = [known for known in self.checkpoints if known <= step]
        self.trained = {known: groups for known, groups in self.trained.items() if known <= step}
        self.committed, self.reserved = step, []
        await self.publish()

    async def check(self) -> None:
        stats = await self.driver.stats()  # checks the identity
        assert stats.consumed_count == 2 * len(self.trained)
        assert stats.reserved_count == len(self.reserved)
        flat = [group for groups in self.trained.values() for group in groups]
        assert len(flat) == len(set(flat)), "a prompt was trained twice"


@pytest.mark.parametrize("seed", range(4))
async def test_random_histories_lose_and_double_nothing(driver, seed):
    chance = random.Random(seed)
    await driver.start(
        trainer={"max_staleness": chance.choice([0, 1, 3]), "stale_policy": chance.choice(["requeue", "drop"])},
        data={"max_prompt_attempts": chance.choice([2, 100]), "rollout_shuffle": True},
    )
    history = History(driver, chance)
    moves = [history.lease] * 5 + [history.put] * 5 + [history.take] * 3 + [history.commit] * 3
    moves += [history.publish] * 2 + [history.release, history.checkpoint]
    for count in range(150):
        await (history.restart if count % 40 == 39 else chance.choice(moves))()
        await history.check()
    states = await driver.states()
    stats = await driver.stats()
    assert sorted(states) == list(range(stats.drawn_count))  # no ordinal was lost
    for step, groups in history.trained.items():
        page = await driver.call("ListGroups", step=step, page_size=500)
        assert sorted(info.group_id for info in page.groups if info.state == 5) == sorted(groups)


async def test_many_clients_at_once(driver):
    await driver.start(trainer={"max_staleness": 4}, rollout={"rollout_batch_size": 8, "num_rollout": 12})
    done = asyncio.Event()

    async def node() -> None:
        while not done.is_set():
            response = await driver.lease(3, wait=0.2, ttl=random.Random(1).choice([0.5, 60]))
            groups = [driver.finished(lease, response.policy_version) for lease in response.leases]
            if groups:
                await asyncio.gather(driver.put(*groups), driver.put(*groups[::-1]))

    nodes = [asyncio.create_task(node()) for _ in range(4)]
    trained = []
    try:
        for step in range(12):
            batch = await asyncio.wait_for(driver.take(step, count=8, wait=20), 25)
            trained += group_ids(batch)
            await driver.commit(step)
            await driver.publish(step + 1)
            await driver.stats()
    finally:
        done.set()
        await asyncio.gather(*nodes, return_exceptions=True)
    assert len(trained) == len(set(trained)) == 96
    stats = await driver.stats()
    # The run's last step is known, so nothing is generated in vain.
    assert stats.drawn_count == 96 + stats.evicted_count
    with pytest.raises(ServiceError, match="does not follow"):
        await driver.take(20)
