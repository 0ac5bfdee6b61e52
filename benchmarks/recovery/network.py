"""Strikes at the network between two hosts: silence for a while, idle and in the middle of a weight update."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace

from benchmarks.recovery import hosts
from benchmarks.recovery.measure import Row, Struck
from benchmarks.recovery.tiers import SECONDS_UNTIL
from benchmarks.recovery.world import Shape, World

PARTITION_SECONDS = 30.0
_SAID = ("cannot be leased", "cannot be listed", "is not registered")
"""What a node says that does not reach the buffer."""


def partition(seconds: float, point: str = "", **labels: str) -> Callable[[World], Awaitable[Struck]]:
    """The hosts do not hear each other for so long, from any moment or from a named point on."""

    async def strike(world: World) -> Struck:
        assert isinstance(world, hosts.HostsWorld), "this row needs hosts"
        if point:
            await world.caught(point, SECONDS_UNTIL, **labels)
        at = time.time()
        world.network.partition()
        world.disarm(point or "none")
        healed = asyncio.get_running_loop().call_later(seconds, world.network.heal)

        async def detected() -> float | None:
            said = [moment for text in _SAID if (moment := world.wrote("rollout", at, text))]
            return min(said, default=None)

        async def back() -> bool:
            if time.time() < at + seconds:
                return False
            node = await world.node()
            return node is not None and not node.problem and await world.serving()

        del healed
        return Struck(at, detected, back)

    return strike


def slow(bytes_per_second: int, seconds: float) -> Callable[[World], Awaitable[Struck]]:
    """The second node's link is slow from any moment on, until some time after its engine was left out of an update."""

    async def strike(world: World) -> Struck:
        assert isinstance(world, hosts.TwoNodesWorld), "this row needs two nodes"
        world.network.limit("c", bytes_per_second)
        at = time.time()
        mended: list[float] = []

        async def detected() -> float | None:
            left_out = [e["time"] for e in world.history.since(at, "notice") if "was left out of" in e["message"]]
            return left_out[0] if left_out else None

        async def back() -> bool:
            left_out = await detected()
            if left_out is None or time.time() < left_out + seconds:
                return False
            if not mended:
                world.network.unlimit("c")
                mended.append(time.time())
            return await world.second_serves()

        return Struck(at, detected, back)

    return strike


HOSTS = Shape(where=hosts.NAME)
_SHORT_LEASES = replace(HOSTS, more=(("rollout", "lease_ttl", 10.0),))
ROWS = [
    Row("partition", "network between two hosts", "30 s of silence", partition(PARTITION_SECONDS), HOSTS),
    Row("partition-transfer", "network between two hosts", "30 s of silence from mid-transfer on",
        partition(PARTITION_SECONDS, "engine.bucket"), HOSTS),
    Row("partition-leases", "network between two hosts", "30 s of silence, longer than leases (10 s)",
        partition(PARTITION_SECONDS), _SHORT_LEASES),
    Row("slow-engine", "link of one engine of two", "slow: an update takes 8 s; mended 5 s after it is left out",
        slow(50_000, 5.0), Shape(where=hosts.TWO_NODES)),
]  # fmt: skip
