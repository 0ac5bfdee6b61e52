"""The processes of the embedded mode: command lines, addresses and what "ready" means for each."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from services.common.process import free_port, port_in_use
from services.common.settings import SettingsError
from services.console.adapters.health import serving
from services.console.adapters.valkey import ping, valkey_arguments
from services.console.core.placement import NO_GPUS, Placement
from services.console.supervisor import Tier

HOST = "127.0.0.1"


@dataclass(frozen=True)
class Ports:
    """TCP ports by tier."""

    store: int = 50050
    buffer: int = 50051
    trainer: int = 50052
    rollout: int = 50053
    reward: int = 50054

    @classmethod
    def free(cls) -> Ports:
        """Ports that nobody uses now."""
        return cls(*(free_port(HOST) for _ in range(5)))

    @property
    def addresses(self) -> dict[str, str]:
        """host:port by tier."""
        return {name: f"{HOST}:{port}" for name, port in asdict(self).items()}

    def check(self) -> None:
        """Raises SettingsError when two are equal or one is in use."""
        seen: dict[int, str] = {}
        for name, port in asdict(self).items():
            if port in seen:
                raise SettingsError(
                    f"--{name}-port and --{seen[port]}-port are both {port}; give each a port of its own."
                )
            seen[port] = name
            if port_in_use(port, HOST):
                raise SettingsError(
                    f"--{name}-port is {port}: the port is in use on {HOST}; stop the process that has it, or choose"
                    f" another with --{name}-port."
                )


def _service(
    name: str,
    full_name: str,
    address: str,
    settings: Mapping[str, object],
    stop_seconds: float = 10.0,
    env: Mapping[str, str] | None = None,
) -> Tier:
    """A tier that is one of our services."""
    host, _, port = address.rpartition(":")
    settings = {"host": host, "port": port, **settings}
    arguments = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    return Tier(
        name,
        (sys.executable, "-m", f"services.{name}", *arguments),
        lambda: serving(address, full_name),
        env={"PYTHONUNBUFFERED": "1", "PYTHONPATH": _python_path(), **(env or {})},
        stop_seconds=stop_seconds,
    )


def _python_path() -> str:
    """Functions of the user are imported from the directory in which the console was called."""
    return os.pathsep.join(
        dict.fromkeys([os.getcwd(), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))])
    )


ALL = ("store", "buffer", "reward", "rollout", "trainer")


@dataclass(frozen=True)
class Layout:
    """Where the tiers of one machine live.

    `resume`: a trainer that starts takes up the newest active run. `reward`: host:port of a reward service elsewhere.
    `placement`: which GPUs the trainer and the rollout node see.
    """

    ports: Ports
    store_dir: Path
    log_dir: Path
    resume: bool
    reward: str | None = None
    placement: Placement = NO_GPUS


def embedded_tiers(layout: Layout, names: Collection[str] = ALL) -> list[list[Tier]]:
    """The named tiers of one machine, in the order of their start; the buffer is up after the second stage."""
    layout.store_dir.mkdir(parents=True, exist_ok=True)
    layout.log_dir.mkdir(parents=True, exist_ok=True)
    ports, at = layout.ports, layout.ports.addresses
    store = Tier(
        "store",
        tuple(valkey_arguments(ports.store, layout.store_dir)),
        lambda: ping(ports.store),
        patient=False,
    )
    buffer = _service(
        "buffer", "tetrarch.buffer.v1.BufferService", at["buffer"], {"store_url": f"redis://{at['store']}/0"}
    )
    reward = _service("reward", "tetrarch.reward.v1.RewardService", at["reward"], {})
    rollout = _service(
        "rollout",
        "tetrarch.rollout.v1.RolloutService",
        at["rollout"],
        {
            "buffer_address": at["buffer"],
            "reward_address": layout.reward or at["reward"],
            "node_id": "local",
            "log_dir": layout.log_dir,
        },
        stop_seconds=30.0,
        env=layout.placement.env("rollout", os.environ),
    )
    trainer = _service(
        "trainer",
        "tetrarch.trainer.v1.TrainerService",
        at["trainer"],
        {"buffer_address": at["buffer"], "resume_active": str(layout.resume).lower()},
        stop_seconds=75.0,  # the step in progress and its checkpoint
        env=layout.placement.env("trainer", os.environ),
    )
    stages = [[store], [buffer, reward], [rollout, trainer]]
    return [kept for stage in stages if (kept := [tier for tier in stage if tier.name in names])]
