"""Weight groups in memory, and weights that are words, for random histories of the update protocol.

Tensor `a` of version 3 is "a@3", so that what an engine holds tells where it came from.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from random import Random

from services.rollout.core.engine_port import TensorSpec

NAMES = ("a", "b", "c", "d")
"""Tensors of the model; a and b are one tensor, "ab", inside an engine."""
TENSORS = tuple(TensorSpec(name, "float32", (size,)) for name, size in zip(NAMES, (4, 8, 2, 6), strict=True))
RULES = {"ab": ("a", "b"), "c": ("c",), "d": ("d",)}


@functools.cache
def contents(version: int) -> Mapping[str, str]:
    """A version's tensors."""
    return {name: f"{name}@{version}" for name in NAMES}


def checksums(tensors: Mapping[str, str]) -> dict[str, str]:
    """By the engine's names."""
    return {held: "+".join(tensors[name] for name in sources) for held, sources in RULES.items()}


@dataclass
class Group:
    """A communicator: the sender's end, and one receiver. `hangs`: a member that goes away is not noticed (NCCL)."""

    name: str
    hangs: bool
    sender_there: asyncio.Event = field(default_factory=asyncio.Event)
    receiver_there: asyncio.Event = field(default_factory=asyncio.Event)
    broken: asyncio.Event = field(default_factory=asyncio.Event)
    left: asyncio.Event = field(default_factory=asyncio.Event)
    """By the receiver."""
    wire: asyncio.Queue[dict[str, str]] = field(default_factory=asyncio.Queue)

    async def meet(self, other: asyncio.Event, timeout: float) -> None:
        """Waits for the other side. Raises TimeoutError."""
        async with asyncio.timeout(timeout):
            await other.wait()

    async def take(self) -> dict[str, str]:
        """The next bucket. Raises ConnectionError when the sender has gone, unless the group hangs, or the receiver."""
        taking = asyncio.ensure_future(self.wire.get())
        broken = asyncio.ensure_future((self.left if self.hangs else self.broken).wait())
        try:
            await asyncio.wait({taking, broken}, return_when=asyncio.FIRST_COMPLETED)
            if taking.done():
                return taking.result()
            raise ConnectionError("the connection was closed by the peer")
        finally:
            taking.cancel()
            broken.cancel()


class Wires:
    """All groups by name, and the chance behind everything."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.groups: dict[str, Group] = {}
        self.calm = False

    def strike(self, probability: float) -> bool:
        """Whether something goes wrong here; nothing does once it is `calm`."""
        return not self.calm and self.random.random() < probability

    def group(self, name: str) -> Group:
        """A group; made by whoever comes first."""
        return self.groups.setdefault(name, Group(name, self.strike(0.3)))

    def moment(self, longest: float = 0.2) -> float:
        """Seconds that something takes: mostly none or little, now and then `longest` and more."""
        return self.random.choice((0.0, 0.0, 0.001, 0.01, longest, self.random.random() * longest))
