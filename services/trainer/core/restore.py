"""Which weights a run goes on from, and how a checkpoint is written so that a death at any point loses nothing.

Order of a checkpoint: files, then `latest`, then the buffer's record. A death in between leaves files that are
newer than the record; the next start loads them, rolls the buffer back to them and records them. Files may also be
newer than the steps the store knows, when it lost its last second: the run goes on from the checkpoint it remembers.

Steps of the ranks and steps of the run differ by the steps that the loaded weights (`load`) already contained;
the marker beside the checkpoints remembers that number and whose checkpoints they are.
"""

from __future__ import annotations

from dataclasses import dataclass

from services.common.errors import Code, ServiceError
from services.common.telemetry import get_logger
from services.trainer.core.commands import Load, LoadResult, SaveCheckpoint, SaveResult
from services.trainer.core.ports import Buffer, CheckpointFiles, CheckpointMarker, Ranks, RanksFailed
from services.trainer.core.records import Run, Session

log = get_logger(__name__)


@dataclass(frozen=True)
class Restored:
    """Where a run goes on. `path` is empty when it starts from the Hugging Face checkpoint or from `load`."""

    step_count: int
    first_step: int
    path: str
    returned_group_count: int


@dataclass(frozen=True)
class CheckpointPlaces:
    """`save`: the run's own checkpoints. `load`: where a fresh run takes its first weights from, if anywhere."""

    save: str
    load: str | None


async def load_ranks(ranks: Ranks, path: str, timeout: float, *, new_run: bool = False) -> int:
    """Restores the ranks; → steps contained. A checkpoint the ranks refuse is the user's to replace.

    Raises:
        ServiceError: CHECKPOINT_UNUSABLE; RanksFailed when a rank died.
    """
    try:
        results: list[LoadResult] = await ranks.call_all(Load(path, new_run), timeout)
    except RanksFailed as error:
        if not error.answered:
            raise
        raise ServiceError(
            Code.FAILED_PRECONDITION, "CHECKPOINT_UNUSABLE", f"Checkpoint {path} cannot be used: {error.message}"
        ) from error
    return results[0].step_count


async def restore(
    session: Session, places: CheckpointPlaces, ranks: Ranks, buffer: Buffer, files: CheckpointFiles, timeout: float
) -> Restored:
    """Loads the newest checkpoint of the run, or its first weights, and rolls the buffer back to it.

    Raises:
        ServiceError: CHECKPOINT_FOREIGN, CHECKPOINT_UNUSABLE, CHECKPOINT_AHEAD, or the buffer's errors.
    """
    run = session.run
    own = _own_checkpoint(run, places, files)
    marker = files.marker(places.save)
    first_step = marker.first_step if own and marker else 0
    step_count, path = 0, ""
    if own:
        path = own
        step_count = await load_ranks(ranks, path, timeout) - first_step
        if step_count - 1 < run.checkpoint_step and run.checkpoint_path:
            path = run.checkpoint_path
            step_count = await load_ranks(ranks, path, timeout) - first_step
    elif places.load:
        first_step = await load_ranks(ranks, places.load, timeout, new_run=True)
    try:
        returned, _ = await buffer.restore_run(run.run_id, session.epoch, step_count - 1)
    except ServiceError as error:
        if error.reason != "STEP_NOT_RESTORABLE":
            raise
        if run.checkpoint_path in ("", path):
            raise _ahead(run, path, step_count) from error
        # A store that lost its last second has forgotten the steps of this checkpoint; the older one it remembers.
        log.warning("checkpoint is ahead of the store", run_id=run.run_id, path=path, taken=run.checkpoint_path)
        path = run.checkpoint_path
        step_count = await load_ranks(ranks, path, timeout) - first_step
        returned, _ = await buffer.restore_run(run.run_id, session.epoch, step_count - 1)
    if step_count and step_count - 1 > run.checkpoint_step:
        await buffer.record_checkpoint(run.run_id, session.epoch, step_count - 1, path)
    return Restored(step_count, first_step, path, returned)


async def resume_untrained(
    session: Session, places: CheckpointPlaces, ranks: Ranks, buffer: Buffer, _files: CheckpointFiles, timeout: float
) -> Restored:
    """`restore` of a run that trains nothing: its first weights, and on after the last committed step.

    Raises:
        ServiceError: CHECKPOINT_UNUSABLE, or the buffer's errors.
    """
    run = session.run
    first_step = await load_ranks(ranks, places.load, timeout, new_run=True) if places.load else 0
    returned, _ = await buffer.restore_run(run.run_id, session.epoch, run.committed_step)
    return Restored(run.committed_step + 1, first_step, "", returned)


def _ahead(run: Run, path: str, step_count: int) -> ServiceError:
    return ServiceError(
        Code.FAILED_PRECONDITION,
        "CHECKPOINT_AHEAD",
        f"Checkpoint {path} contains {step_count} steps, but the buffer has committed {run.committed_step + 1} of"
        f" run {run.run_id}: the buffer's store was lost or replaced. Start a run with another run_id and"
        f" --load {path}.",
        run_id=run.run_id,
        path=path,
    )


def _own_checkpoint(run: Run, places: CheckpointPlaces, files: CheckpointFiles) -> str | None:
    """Newest checkpoint in the run's directory. Raises CHECKPOINT_FOREIGN for another run's."""
    latest = files.latest(places.save)
    if latest is None:
        return run.checkpoint_path or None
    marker = files.marker(places.save)
    if marker is None or marker.run_id != run.run_id:
        owner = f"run {marker.run_id}" if marker else "another run"
        raise ServiceError(
            Code.FAILED_PRECONDITION,
            "CHECKPOINT_FOREIGN",
            f"save {places.save} holds checkpoints of {owner}; give run {run.run_id} another directory, with"
            f" --load {places.save} to start from those weights.",
            run_id=run.run_id,
            path=places.save,
        )
    return latest


async def save_checkpoint(
    session: Session, restored: Restored, step_count: int, save: str, ports: tuple[Ranks, Buffer, CheckpointFiles],
    timeout: float, *, must: bool,
) -> SaveResult:  # fmt: skip
    """Writes and records a checkpoint that contains `step_count` steps of the run.

    A disk that refuses it loses nothing: the checkpoints before it stay, and the buffer keeps what they do not cover.
    The result names the `problem` then. Raises CHECKPOINT_FAILED, SAVE_NOT_WRITABLE instead when it `must` be written.
    """
    ranks, buffer, files = ports
    try:
        files.mark(save, CheckpointMarker(session.run.run_id, restored.first_step))
    except ServiceError as error:
        if must:
            raise
        return SaveResult(save, 0.0, error.message)
    command = SaveCheckpoint(save, restored.first_step + step_count)
    result: SaveResult = (await ranks.call_all(command, timeout))[0]
    if not result.problem:
        await buffer.record_checkpoint(session.run.run_id, session.epoch, step_count - 1, result.path)
    elif must:
        raise ServiceError(Code.RESOURCE_EXHAUSTED, "CHECKPOINT_FAILED", result.problem, path=save)
    return result
