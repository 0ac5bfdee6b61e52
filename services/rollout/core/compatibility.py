"""Can a trainer and an engine share a collective? A pure comparison of what both say of themselves.

Refused is only what cannot work, since a group that cannot work does not fail: it hangs until a deadline.
- Backend: both ends must speak it.
- NCCL: the releases must be equal to the last number. NCCL compares them itself as a communicator is made and gives up.
- gloo: it has no release of its own but comes inside torch, so torch must be equal in its first two numbers.
- Variables: `COLLECTIVE_VARIABLES` choose how NCCL moves bytes between two processes; both ends must choose alike.
  Unset is a value as well, for NCCL's defaults differ from what SGLang sets.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from services.common.devices import COLLECTIVE_VARIABLES
from services.common.errors import Code, ServiceError
from services.rollout.core.engine_port import EngineInfo

_HOW = "set it alike for trainer and rollout node (0 in both, unless you know better)"


@dataclass(frozen=True)
class TrainerSide:
    """What the trainer says of itself. `collective_env`: those of COLLECTIVE_VARIABLES that are set."""

    backend: str
    torch_version: str
    nccl_version: str = ""
    collective_env: Mapping[str, str] = field(default_factory=dict)


def check_compatible(engine_id: str, info: EngineInfo, trainer: TrainerSide) -> None:
    """Raises FAILED_PRECONDITION/INCOMPATIBLE naming both sides' values. A version that one side leaves out matches."""
    if trainer.backend not in info.backends:
        known = "/".join(info.backends) or "none"
        raise _incompatible(engine_id, "backend", trainer.backend, known, "put both on the same kind of device")
    if trainer.backend != "nccl":
        if _differ(trainer.torch_version, info.torch_version, 2):
            how = "install the same torch for both, as their gloo is part of it"
            raise _incompatible(engine_id, "torch", trainer.torch_version, info.torch_version, how)
        return
    if _differ(trainer.nccl_version, info.nccl_version, 3):
        how = "install the torch that brings the same NCCL for both, as NCCL takes no other release into a group"
        raise _incompatible(engine_id, "NCCL", trainer.nccl_version, info.nccl_version, how)
    for name in COLLECTIVE_VARIABLES:
        ours, theirs = trainer.collective_env.get(name, "unset"), info.collective_env.get(name, "unset")
        if ours != theirs:
            raise _incompatible(engine_id, name, ours, theirs, _HOW)


def _differ(one: str, other: str, numbers: int) -> bool:
    """By the first `numbers` numbers of two releases; a build's name after + does not count."""
    short = [version.split("+")[0].split(".")[:numbers] for version in (one, other)]
    return bool(one) and bool(other) and short[0] != short[1]


def _incompatible(engine_id: str, what: str, trainer: str, engine: str, how: str) -> ServiceError:
    return ServiceError(
        Code.FAILED_PRECONDITION,
        "INCOMPATIBLE",
        f"Engine {engine_id} cannot join the trainer's weight group: {what} is {trainer!r} at the trainer and"
        f" {engine!r} at the engine; {how}.",
        engine_id=engine_id,
        what=what,
        trainer=trainer,
        engine=engine,
    )
