"""A world over two hosts: store, buffer, reward service and trainer on one, the rollout node on the other.

Hosts are network namespaces on a switch (needs root); this process sits on the switch too and sees both while they do
not see each other. The router and the engines listen on the loopback of their host, so the node says who is routed.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from tetrarch.rollout.v1 import engine_pb2

from benchmarks.recovery.world import WORLDS, World
from services.common.run_spec import RunSpec
from services.console.supervisor import Tier
from services.console.tiers import ALL, Layout, Ports, embedded_tiers
from tests.support.netns import Network

NAME = "hosts"
PLACES = {"store": "a", "buffer": "a", "reward": "a", "trainer": "a", "rollout": "b"}
"""Host of every tier."""
_PUBLIC = ("--set", "allow_insecure_bind=true")


@dataclass(frozen=True)
class HostPorts(Ports):
    """The usual ports, on hosts of their own."""

    hosts: Mapping[str, str] = field(default_factory=dict)
    """Address of every tier's host."""

    @property
    def addresses(self) -> dict[str, str]:
        """The buffer finds the store on its own loopback."""
        found = {name: f"{self.hosts[name]}:{getattr(self, name)}" for name in ALL}
        return found | {"store": f"127.0.0.1:{self.store}"}


class HostsWorld(World):
    """See the module."""

    def __init__(self, spec: RunSpec, layout: Layout, fault_dir: Path) -> None:
        self.network = Network(("a", "b"))
        self.network.open()
        hosts = {name: self.network.address(host) for name, host in PLACES.items()}
        super().__init__(spec, replace(layout, ports=HostPorts(hosts=hosts)), fault_dir)

    def tiers(self, layout: Layout) -> list[list[Tier]]:
        """All processes, each on its host."""
        return [[self._placed(tier) for tier in stage] for stage in embedded_tiers(layout)]

    def _placed(self, tier: Tier) -> Tier:
        argv = tier.argv if tier.name == "store" else (*tier.argv, *_PUBLIC)
        placed = replace(tier, argv=tuple(self.network.command(PLACES[tier.name], argv)))
        return replace(placed, ready=self._store_listens) if tier.name == "store" else placed

    async def _store_listens(self) -> str:
        """The store's port is bound, as its host sees it; nobody elsewhere can ask."""
        bound = await asyncio.to_thread(_listening, self.supervisor.pid("store"), self.ports.store)
        return "" if bound else "the store does not listen yet"

    async def stop(self) -> None:
        """Ends everything, the hosts as well."""
        try:
            await super().stop()
        finally:
            self.network.close()

    async def routed(self) -> set[str] | None:
        """Engines that the node takes for ready."""
        node = await self.node()
        ready = (engine_pb2.ENGINE_STATE_READY, engine_pb2.ENGINE_STATE_UPDATING)
        return {engine.url.rstrip("/") for engine in node.engines if engine.state in ready} if node else None

    async def healthy(self, name: str) -> bool:
        """A tier runs and its service can be used."""
        if name in ("buffer", "rollout"):
            return await super().healthy(name)
        if not self.supervisor.pid(name):
            return False
        return not await self._store_listens() if name == "store" else await self._listens(name)

    async def _listens(self, name: str) -> bool:
        host, _, port = self.ports.addresses[name].rpartition(":")
        with contextlib.suppress(OSError, TimeoutError):
            _, writer = await asyncio.wait_for(asyncio.open_connection(host, int(port)), 1.0)
            writer.close()
            return True
        return False


def _listening(pid: int, port: int) -> bool:
    """Whether a port is bound in the network that a process sees."""
    with contextlib.suppress(OSError):
        return f":{port:04X} 00000000:0000 0A" in Path(f"/proc/{pid}/net/tcp").read_text()
    return False


WORLDS[NAME] = HostsWorld
