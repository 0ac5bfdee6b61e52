"""Can a trainer and an engine share a collective? A pure comparison of what both say of themselves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from services.common.errors import Code, ServiceError
from services.rollout.core.engine_port import EngineInfo


@dataclass(frozen=True)
class TrainerSide:
    """What the trainer says of itself. `collective_env` names variables a group must agree on."""

    backend: str
    torch_version: str
    nccl_version: str = ""
    collective_env: Mapping[str, str] = field(default_factory=dict)


def check_compatible(engine_id: str, info: EngineInfo, trainer: TrainerSide) -> None:
    """Raises FAILED_PRECONDITION/INCOMPATIBLE naming both sides' values. Values one side leaves out match.

    torch is compared by its first two numbers (2.13.0+cpu equals 2.13.1), NCCL likewise and only for "nccl".
    """
    if trainer.backend not in info.backends:
        raise _incompatible(engine_id, "backend", trainer.backend, "/".join(info.backends) or "none")
    if _differ(_release(trainer.torch_version), _release(info.torch_version)):
        raise _incompatible(engine_id, "torch", trainer.torch_version, info.torch_version)
    if trainer.backend == "nccl" and _differ(_release(trainer.nccl_version), _release(info.nccl_version)):
        raise _incompatible(engine_id, "NCCL", trainer.nccl_version, info.nccl_version)
    for name in sorted(trainer.collective_env.keys() & info.collective_env.keys()):
        if trainer.collective_env[name] != info.collective_env[name]:
            raise _incompatible(engine_id, name, trainer.collective_env[name], info.collective_env[name])


def _release(version: str) -> str:
    return ".".join(version.split("+")[0].split(".")[:2])


def _differ(one: str, other: str) -> bool:
    return bool(one) and bool(other) and one != other


def _incompatible(engine_id: str, what: str, trainer: str, engine: str) -> ServiceError:
    return ServiceError(
        Code.FAILED_PRECONDITION,
        "INCOMPATIBLE",
        f"Engine {engine_id} cannot join the trainer's weight group: {what} is {trainer!r} at the trainer and"
        f" {engine!r} at the engine; make both equal.",
        engine_id=engine_id,
        what=what,
        trainer=trainer,
        engine=engine,
    )
