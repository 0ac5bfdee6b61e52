"""A world with small disks under the store, the checkpoints and the run's directory, and strikes that fill them.

The disks are tmpfs (needs root). A run never deletes checkpoints, so the world keeps the newest few only.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from benchmarks.recovery.measure import Row, Struck
from benchmarks.recovery.world import WORLDS, Shape, World
from services.common.run_spec import RunSpec
from services.console.tiers import Layout
from tests.support.small_disk import SmallDisk

NAME = "disks"
FULL_SECONDS = 5.0
_MEGABYTES = {"store": 64, "checkpoints": 64, "history": 16}
_KEPT = 4


class DisksWorld(World):
    """See the module."""

    def __init__(self, spec: RunSpec, layout: Layout, fault_dir: Path) -> None:
        assert spec.trainer.save
        places = {"store": layout.store_dir, "checkpoints": Path(spec.trainer.save), "history": Path(spec.directory)}
        self.disks = {name: SmallDisk(path, _MEGABYTES[name] << 20) for name, path in places.items()}
        for disk in self.disks.values():
            disk.mount()
        self._pruning: asyncio.Task[None] | None = None
        super().__init__(spec, layout, fault_dir)

    async def start(self) -> None:
        """Starts the tiers and the run."""
        self._pruning = asyncio.create_task(self._prune())
        await super().start()

    async def _prune(self) -> None:
        while True:
            await asyncio.sleep(1.0)
            written = await asyncio.to_thread(lambda: sorted(self.disks["checkpoints"].path.glob("step_*")))
            for path in written[:-_KEPT]:
                await asyncio.to_thread(shutil.rmtree, path, ignore_errors=True)

    async def stop(self) -> None:
        """Ends everything and gives the disks back."""
        if self._pruning:
            self._pruning.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._pruning
        try:
            await super().stop()
        finally:
            for disk in self.disks.values():
                disk.unmount()


def full(name: str, tier: str, sentence: str) -> Callable[[World], Awaitable[Struck]]:
    """A disk is full until some seconds after a tier has said so."""

    async def strike(world: World) -> Struck:
        assert isinstance(world, DisksWorld), "this row needs disks"
        disk = world.disks[name]
        await asyncio.to_thread(disk.fill)
        at = time.time()
        roomy_since: list[float] = []

        async def detected() -> float | None:
            written = [entry["time"] for entry in world.history.since(at, "notice") if sentence in entry["message"]]
            return min(filter(None, [*written, world.wrote(tier, at, sentence)]), default=None)

        async def back() -> bool:
            said = await detected()
            if said is None or time.time() < said + FULL_SECONDS:
                return False
            if not roomy_since:
                await asyncio.to_thread(disk.make_room)
                roomy_since.append(time.time())
            return bool(world.history.since(roomy_since[0], "checkpoint")) and await world.serving()

        return Struck(at, detected, back)

    return strike


WORLDS[NAME] = DisksWorld
DISKS = Shape(where=NAME)
ROWS = [
    Row("disk-checkpoints", "disk of the checkpoints", "full until 5 s after it is said",
        full("checkpoints", "trainer", "could not be written"), DISKS),
    Row("disk-store", "disk of Valkey's append-only file", "full until 5 s after it is said",
        full("store", "trainer", "takes no writes"), DISKS),
    Row("disk-history", "disk of the run's directory", "full until 5 s after it is said",
        full("history", "trainer", "cannot be written"), DISKS),
]  # fmt: skip
