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

import grpc
from tetrarch.buffer.v1 import run_pb2
from tetrarch.rollout.v1 import engine_pb2
from tetrarch.rollout.v1 import rollout_service_pb2 as rollout_pb
from tetrarch.rollout.v1.rollout_service_pb2_grpc import RolloutServiceStub

from benchmarks.recovery.world import WORLDS, World
from services.common.channel import open_channel
from services.common.run_spec import RunSpec
from services.console.adapters.health import serving
from services.console.supervisor import Tier
from services.console.tiers import ALL, Layout, Ports, embedded_tiers
from tests.support.netns import Network

NAME, TWO_NODES = "hosts", "two nodes"
PLACES = {"store": "a", "buffer": "a", "reward": "a", "trainer": "a", "rollout": "b"}
"""Host of every tier."""
_SERVING = (engine_pb2.ENGINE_STATE_READY, engine_pb2.ENGINE_STATE_UPDATING)
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
        self.network = Network(self.hosts())
        self.network.open()
        places = {name: self.network.address(host) for name, host in PLACES.items()}
        try:
            super().__init__(spec, replace(layout, ports=HostPorts(hosts=places)), fault_dir)
        except BaseException:
            self.network.close()
            raise

    def hosts(self) -> tuple[str, ...]:
        """Names of all hosts."""
        return ("a", "b")

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
        return {engine.url.rstrip("/") for engine in node.engines if engine.state in _SERVING} if node else None

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


def _current(node: engine_pb2.Node, run: run_pb2.Run) -> bool:
    return all(
        engine.state in _SERVING and engine.weight_version >= run.policy_version - 1 > -1 for engine in node.engines
    )


def _listening(pid: int, port: int) -> bool:
    """Whether a port is bound in the network that a process sees."""
    with contextlib.suppress(OSError):
        return f":{port:04X} 00000000:0000 0A" in Path(f"/proc/{pid}/net/tcp").read_text()
    return False


class TwoNodesWorld(HostsWorld):
    """A second rollout node on a third host; each node has half of the engines. What the world says of "the node" is
    said of the first."""

    SECOND = "rollout-c"

    def __init__(self, spec: RunSpec, layout: Layout, fault_dir: Path) -> None:
        super().__init__(spec, layout, fault_dir)
        self._second_channel = open_channel(f"{self.network.address('c')}:{self.ports.rollout}", "rollout")
        self._second = RolloutServiceStub(self._second_channel)

    def hosts(self) -> tuple[str, ...]:
        """Names of all hosts."""
        return ("a", "b", "c")

    def tiers(self, layout: Layout) -> list[list[Tier]]:
        """All processes, each on its host."""
        *before, last = super().tiers(layout)
        share = ("--set", f"engine_count={self.spec.rollout.engine_count // 2}")
        first = next(tier for tier in last if tier.name == "rollout")
        address = self.network.address("c")
        moved = [part.replace(self.network.address("b"), address) for part in first.argv[4:]]
        second = replace(
            first,
            name=self.SECOND,
            argv=tuple(self.network.command("c", (*moved, *share, "--set", "node_id=second"))),
            ready=lambda: serving(f"{address}:{self.ports.rollout}", "tetrarch.rollout.v1.RolloutService"),
        )
        self.lines[self.SECOND] = []
        kept = [replace(tier, argv=(*tier.argv, *share)) if tier is first else tier for tier in last]
        return [*before, [*kept, second]]

    async def second_node(self) -> engine_pb2.Node | None:
        """The node on the third host."""
        with contextlib.suppress(grpc.aio.AioRpcError):
            return (await self._second.GetNode(rollout_pb.GetNodeRequest(), timeout=5)).node
        return None

    async def second_serves(self) -> bool:
        """The engines of the second node have weights at most one version old."""
        node, run = await self.second_node(), await self.run()
        return bool(node and run and node.engines) and _current(node, run)

    async def healthy(self, name: str) -> bool:
        """A tier runs and its service can be used."""
        return await self.second_node() is not None if name == self.SECOND else await super().healthy(name)

    async def serving(self, engine_id: str = "") -> bool:
        """The engines of the first node, or one, serve weights at most one version old."""
        del engine_id
        node, run = await self.node(), await self.run()
        return bool(node and run and node.engines) and _current(node, run)

    async def stop(self) -> None:
        """Ends everything, the hosts as well."""
        await self._second_channel.close()
        await super().stop()


WORLDS[NAME] = HostsWorld
WORLDS[TWO_NODES] = TwoNodesWorld
