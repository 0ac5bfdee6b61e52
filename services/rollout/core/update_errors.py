"""What the engine's side of a weight update answers when it cannot go on; each names the engine and what to do."""

from __future__ import annotations

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


def transfer_failed(slot: EngineSlot, why: str) -> ServiceError:
    """What the engine holds is no version any more."""
    return ServiceError(
        Code.INTERNAL,
        "TRANSFER_FAILED",
        f"Engine {slot.engine_id} did not receive the weights and is STALE now: {why}",
        engine_id=slot.engine_id,
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
