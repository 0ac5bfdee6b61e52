"""Brings engines up from files while no trainer speaks to them.

A trainer that lives tells an engine within a second or two what to load. When it is silent for longer, an engine that
came up, or lost its weights, takes the newest published version from the files by itself, checked by the checksums that
the trainer left beside them. Knows the files and the updates through their ports. Invariants: no version is taken that
is newer than the published one, or too old for samples to be used; a trainer's Prepare ends what goes on here.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from services.common.backoff import Backoff
from services.common.errors import ServiceError
from services.common.telemetry import get_logger
from services.rollout.core.engine_port import TensorSpec
from services.rollout.core.engine_state import EngineState
from services.rollout.core.fleet import EngineSlot, Fleet
from services.rollout.core.weight_files import VersionFiles
from services.rollout.core.weights import WeightUpdates

log = get_logger(__name__)

SILENCE_SECONDS = 3.0
"""Of the trainer, before an engine helps itself."""
_LOOK_SECONDS = 0.5
_FIRST_BACKOFF, _LONGEST_BACKOFF = 2.0, 60.0


class Unattended:
    """Watches over the engines of one run.

    Args:
        fleet: the engines.
        updates: installs weights.
        files: the run's versions.
        published: newest published version, 0 before the first.
        max_staleness: versions that a sample may lag behind.
    """

    def __init__(
        self,
        fleet: Fleet,
        updates: WeightUpdates,
        files: VersionFiles,
        published: Callable[[], int],
        max_staleness: int,
    ) -> None:
        self._fleet = fleet
        self._updates = updates
        self._files = files
        self._published = published
        self._max_staleness = max_staleness
        self._idle_since: dict[tuple[str, str], float] = {}
        self._backoff = Backoff(_FIRST_BACKOFF, _LONGEST_BACKOFF)

    async def watch(self) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            await asyncio.gather(*map(self._try, self._idle()))

    async def _try(self, slot: EngineSlot) -> None:
        try:
            await self._bring_up(slot)
        except ServiceError as error:
            self._later(slot, error.message)
        except Exception as error:  # files are others' work: nothing in them ends the watch
            log.exception("an engine could not be brought up from files", engine=slot.engine_id)
            self._later(slot, f"{type(error).__name__}: {error}")

    def _idle(self) -> list[EngineSlot]:
        """Engines without weights to which nobody has spoken for a while."""
        now = time.monotonic()
        stale = {
            (slot.engine_id, slot.incarnation): slot for slot in self._fleet.slots if slot.state is EngineState.STALE
        }
        self._idle_since = {process: self._idle_since.get(process, now) for process in stale}
        return [
            slot
            for process, slot in stale.items()
            if now - max(self._idle_since[process], self._updates.heard(slot.engine_id)) > SILENCE_SECONDS
            and self._backoff.due(slot.engine_id)
        ]

    async def _bring_up(self, slot: EngineSlot) -> None:
        published = self._published()
        path = await self._files.newest(published, published - self._max_staleness) if published else ""
        if not path:
            return
        manifest, expected = await self._files.plan(path)
        buckets = tuple(
            tuple(TensorSpec(tensor.name, tensor.dtype, tensor.shape) for tensor in file.tensors)
            for file in manifest.files
        )
        await self._updates.take_alone(slot.engine_id, path, buckets, expected)
        self._backoff.succeeded(slot.engine_id)
        log.info("engine came up from files without a trainer", engine=slot.engine_id, version=manifest.version)

    def _later(self, slot: EngineSlot, why: str) -> None:
        seconds = self._backoff.failed(slot.engine_id)
        log.warning("engine did not come up from files", engine=slot.engine_id, why=why, again_in=seconds)
