"""What the node remembers of a weight update: what was asked for, how far it is, how it ended. Plain records."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from services.rollout.core.compatibility import TrainerSide
from services.rollout.core.engine_port import Buckets, ChecksumRule, GroupSpec, Staging, TensorSpec
from services.rollout.core.engine_state import EngineState


@dataclass(frozen=True)
class UpdateRequest:
    """What Prepare says. `epoch` grows with every update; `version` is the one to install."""

    engine_id: str
    incarnation: str
    epoch: int
    version: int
    group: GroupSpec | None
    """None: the bytes are in files."""
    trainer: TrainerSide
    buckets: Buckets
    weights_path: str = ""
    """Directory of the version's files."""

    @property
    def tensors(self) -> tuple[TensorSpec, ...]:
        """All tensors in order."""
        return tuple(spec for bucket in self.buckets for spec in bucket)


@dataclass(frozen=True)
class PrepareResult:
    """How the engine will verify what arrives. `staged`: it serves on during the transfer."""

    rules: list[ChecksumRule]
    algorithm: str
    staged: bool


@dataclass(frozen=True)
class TransferResult:
    """`seconds`: from the first byte that was asked for to the last that was there."""

    received_bytes: int
    seconds: float


@dataclass(frozen=True)
class CommitResult:
    """`pause_seconds`: how long generation stood still."""

    verified_tensor_count: int
    pause_seconds: float


@dataclass
class Update:
    """An update under way on one engine."""

    request: UpdateRequest
    incarnation: str
    rules: list[ChecksumRule]
    came_from: EngineState
    staging: Staging | None = None
    """Where the bytes go first; None: into the engine's weights."""
    received: bool = False
    """All bytes are there."""
    opened: bool = False
    """begin_update was sent."""
    touched: bool = False
    """The engine's weights may be others than before."""
    over: bool = False
    """It has failed or is given up; nothing but its end may follow."""
    paused_at: float | None = None
    running: asyncio.Task | None = None
    """The engine call in progress, so that Abort can end it."""
    watchdog: asyncio.TimerHandle | None = None

    def rest(self) -> None:
        """Stops the timer that ends an update whose trainer fell silent."""
        if self.watchdog is not None:
            self.watchdog.cancel()


@dataclass
class Lane:
    """Serialises the update calls of one engine."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    heard: float = 0.0
    """When a trainer spoke of the engine last, by `time.monotonic`."""
    update: Update | None = None
    last_commit: tuple[int, int, CommitResult] | None = None

    def drop(self, update: Update) -> None:
        """The update is over."""
        update.rest()
        if self.update is update:
            self.update = None
