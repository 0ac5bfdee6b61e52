"""What the engine's side of a weight update answers when it cannot go on; each names the engine and what to do."""

from __future__ import annotations

from collections.abc import Sequence

from services.common.errors import Code, ServiceError
from services.rollout.core.fleet import EngineSlot


def fenced(slot: EngineSlot, epoch: int) -> ServiceError:
    """A newer update was seen."""
    return ServiceError(
        Code.FAILED_PRECONDITION,
        "FENCED",
        f"Engine {slot.engine_id} has seen update epoch {slot.fence}; epoch {epoch} is refused.",
        engine_id=slot.engine_id,
        update_epoch=epoch,
        fence=slot.fence,
    )


def unavailable(slot: EngineSlot, why: str) -> ServiceError:
    """The process that the caller means is not there."""
    return ServiceError(
        Code.UNAVAILABLE, "ENGINE_UNAVAILABLE", f"Engine {slot.engine_id} {why}.", engine_id=slot.engine_id
    )


def transfer_failed(slot: EngineSlot, why: str, *, staged: bool) -> ServiceError:
    """The bytes did not arrive; what that means for the engine depends on where they were going."""
    outcome = f"keeps version {slot.version}" if staged else "is STALE now"
    return ServiceError(
        Code.INTERNAL,
        "TRANSFER_FAILED",
        f"Engine {slot.engine_id} did not receive the weights and {outcome}: {why}",
        engine_id=slot.engine_id,
    )


def not_prepared(slot: EngineSlot, epoch: int, why: str) -> ServiceError:
    """A step of an update for which the steps before are missing. `why` goes on after "Engine X"."""
    return ServiceError(
        Code.FAILED_PRECONDITION,
        "EPOCH_NOT_PREPARED",
        f"Engine {slot.engine_id} {why}",
        engine_id=slot.engine_id,
        update_epoch=epoch,
    )


def checksum_mismatch(slot: EngineSlot, wrong: Sequence[str], count: int) -> ServiceError:
    """The engine holds other bytes than were sent, in `wrong` of `count` tensors."""
    shown = ", ".join(wrong[:5]) + (f" and {len(wrong) - 5} more" if len(wrong) > 5 else "")
    return ServiceError(
        Code.FAILED_PRECONDITION,
        "CHECKSUM_MISMATCH",
        f"Engine {slot.engine_id} holds other bytes than were sent in {len(wrong)} of {count} tensors"
        f" ({shown}): it is STALE; send the weights again.",
        engine_id=slot.engine_id,
        tensors=",".join(wrong[:100]),
        count=len(wrong),
    )


def engine_timeout(engine_id: str, epoch: int, seconds: float) -> ServiceError:
    """A call to the engine took too long."""
    return ServiceError(
        Code.DEADLINE_EXCEEDED,
        "ENGINE_TIMEOUT",
        f"Engine {engine_id} did not answer within {seconds:.0f} s in update {epoch}.",
        engine_id=engine_id,
    )


def update_aborted(engine_id: str, epoch: int) -> ServiceError:
    """The update was given up while a call of it was under way."""
    return ServiceError(
        Code.ABORTED,
        "UPDATE_ABORTED",
        f"Update {epoch} of engine {engine_id} was aborted.",
        engine_id=engine_id,
    )


def group_left(slot: EngineSlot, name: str) -> ServiceError:
    """Prepare names a group that this process was in before."""
    return ServiceError(
        Code.FAILED_PRECONDITION,
        "GROUP_LEFT",
        f"Engine {slot.engine_id} has left weight group {name} after an update that failed: name a new group.",
        engine_id=slot.engine_id,
        group_name=name,
    )


def checksum_unknown(slot: EngineSlot, path: str) -> ServiceError:
    """Files without what an engine of this kind must hold of them."""
    return ServiceError(
        Code.FAILED_PRECONDITION,
        "CHECKSUM_UNKNOWN",
        f"The trainer left in {path} no checksums for engines like {slot.engine_id}: it waits for the trainer.",
        engine_id=slot.engine_id,
        path=path,
    )
