"""A world in which every pair of tiers speaks through a proxy of its own, and strikes at these connections.

The node is known to the trainer by another address of the loopback, behind which its proxy listens.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

from benchmarks.recovery.measure import Row, Struck
from benchmarks.recovery.world import WORLDS, Shape, World
from services.common.process import free_port
from services.common.run_spec import RunSpec
from services.console.supervisor import Tier
from services.console.tiers import Layout
from tests.support.tcp_proxy import TcpProxy

NAME = "links"
_NODE_ALIAS = "127.0.0.2"
PAIRS = {
    "trainer-buffer": "trainer and buffer",
    "node-buffer": "rollout node and buffer",
    "node-reward": "rollout node and reward service",
    "trainer-node": "trainer and rollout node",
}


class LinksWorld(World):
    """See the module."""

    def __init__(self, spec: RunSpec, layout: Layout, fault_dir: Path) -> None:
        at = layout.ports.addresses
        self.links = {
            "trainer-buffer": TcpProxy(at["buffer"], port=free_port()),
            "node-buffer": TcpProxy(at["buffer"], port=free_port()),
            "node-reward": TcpProxy(at["reward"], port=free_port()),
            "trainer-node": TcpProxy(at["rollout"], _NODE_ALIAS, layout.ports.rollout),
        }
        super().__init__(spec, layout, fault_dir)

    def tiers(self, layout: Layout) -> list[list[Tier]]:
        """All processes; trainer and node are told the proxies' addresses."""
        told = {
            "trainer": {"buffer_address": self.links["trainer-buffer"].address},
            "rollout": {
                "buffer_address": self.links["node-buffer"].address,
                "reward_address": self.links["node-reward"].address,
                "advertise_host": _NODE_ALIAS,
            },
        }

        def through_proxies(tier: Tier) -> Tier:
            settings = [f"{key}={value}" for key, value in told.get(tier.name, {}).items()]
            return replace(tier, argv=(*tier.argv, *(part for one in settings for part in ("--set", one))))

        return [[through_proxies(tier) for tier in stage] for stage in super().tiers(layout)]

    async def start(self) -> None:
        """Starts proxies, tiers and the run."""
        for link in self.links.values():
            await link.open()
        await super().start()

    async def stop(self) -> None:
        """Ends everything, proxies last."""
        await super().stop()
        for link in self.links.values():
            await link.close()


def link_of(world: World, pair: str) -> TcpProxy:
    """The proxy between a pair of tiers."""
    assert isinstance(world, LinksWorld), "this row needs proxies"
    return world.links[pair]


def steps_after(world: World, at: float) -> int:
    """Steps that ended after a moment."""
    return len(world.history.since(at, "step"))


def cut(pair: str) -> Callable[[World], Awaitable[Struck]]:
    """Every connection of a pair is reset in the middle of the work."""

    async def strike(world: World) -> Struck:
        link = link_of(world, pair)
        await world.until(lambda: link.open_count, 30.0, f"a connection between {PAIRS[pair]}")
        before = link.accepted_count
        link.cut()
        at = time.time()

        async def detected() -> float | None:
            """Its client connects again."""
            return time.time() if link.accepted_count > before else None

        async def back() -> bool:
            return link.accepted_count > before and steps_after(world, at) > 0 and await world.serving()

        return Struck(at, detected, back)

    return strike


def silent(pair: str, seconds: float) -> Callable[[World], Awaitable[Struck]]:
    """A pair's connections stay open, and nothing comes through for so long."""

    async def strike(world: World) -> Struck:
        link = link_of(world, pair)
        link.stall()
        at = time.time()
        mended = asyncio.get_running_loop().call_later(seconds, link.mend)

        async def detected() -> float | None:
            said = [world.wrote(tier, at, text) for tier in ("rollout", "trainer") for text in _SAID]
            return min(filter(None, said), default=None)

        async def back() -> bool:
            now = time.time()
            return now > mended_at and steps_after(world, mended_at) > 0 and await world.serving()

        mended_at = at + seconds
        del mended
        return Struck(at, detected, back)

    return strike


_SAID = (
    "cannot be leased",
    "cannot be listed",
    "not registered",
    "does not answer",
    "did not answer",
    "cannot be looked",
)
"""What a tier says that waits for another in vain."""

WORLDS[NAME] = LinksWorld
LINKS = Shape(where=NAME)
ROWS = [
    *(Row(f"cut-{pair}", f"connection between {who}", "reset (RST)", cut(pair), LINKS) for pair, who in PAIRS.items()),
    Row("silent-node-buffer", "connection between rollout node and buffer", "open but silent for 15 s",
        silent("node-buffer", 15.0), LINKS),
]  # fmt: skip
