"""Puts together what keeps a run's engines at its weights: the fleet, the updater, the files. Knows settings only."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from services.common.process import free_port
from services.common.run_spec import RunSpec
from services.trainer.core.commands import Command, SetupResult
from services.trainer.core.file_carrier import FileTransport
from services.trainer.core.fleet import EngineFleet, FleetSettings
from services.trainer.core.ports import Journal, Ranks, Rollout
from services.trainer.core.records import Session
from services.trainer.core.settings import LoopSettings
from services.trainer.core.weight_files import FilesSettings, VersionFiles, WeightStore
from services.trainer.core.weights import UpdateSettings, WeightUpdater

OpenStore = Callable[[str, str], WeightStore]
"""The store of a directory and a run."""
_COMMAND_SECONDS = 20.0
"""For commands that rank 0 answers at once."""


def make_fleet(
    run: tuple[Session, RunSpec],
    ports: tuple[Ranks, Rollout, Journal, OpenStore | None],
    setup: SetupResult,
    settings: LoopSettings,
    ranks_lock: asyncio.Lock,
) -> EngineFleet:
    """The engines of a run for one attempt at it."""
    session, spec = run
    ranks, rollout, journal, open_store = ports
    run_id, trainer = session.run.run_id, spec.trainer
    updates = UpdateSettings(
        run_id=run_id,
        session_epoch=session.epoch,
        bucket_bytes=trainer.update_weight_buffer_size,
        group_size=trainer.weight_group_size,
        timeout=trainer.update_timeout,
        join_timeout=min(trainer.update_timeout, settings.join_timeout),
        stage_timeout=settings.save_timeout,
        address=settings.address,
        free_port=free_port,
    )
    files = _files(ranks, journal, open_store, run_id, spec)
    updater = WeightUpdater(ranks, rollout, setup, updates, files)
    fleet = FleetSettings(run_id, spec.rollout.engine_count, settings.engines_timeout)
    return EngineFleet(rollout, updater, ranks_lock, journal, fleet)


def _files(
    ranks: Ranks, journal: Journal, open_store: OpenStore | None, run_id: str, spec: RunSpec
) -> FileTransport | None:
    trainer = spec.trainer
    if trainer.update_weight_disk_dir is None or open_store is None:
        return None

    async def ask(command: Command) -> object:
        return await ranks.call(0, command, _COMMAND_SECONDS)

    settings = FilesSettings(
        directory=trainer.update_weight_disk_dir,
        run_id=run_id,
        carries=trainer.update_weight_transport == "disk",
        delta=trainer.update_weight_mode == "delta",
        encoding=trainer.update_weight_delta_encoding,
        keep=trainer.update_weight_disk_keep_files,
        timeout=trainer.update_timeout,
    )
    store = open_store(trainer.update_weight_disk_dir, run_id)
    return FileTransport(VersionFiles(ask, store, journal, settings), journal)
