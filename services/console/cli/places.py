"""Where services are: named in a run file, held by a running supervisor, or started here for as long as needed."""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from services.common.run_spec import RunSpec, ServiceAddresses
from services.common.settings import SettingsError
from services.console.adapters.health import answers, serving
from services.console.state import Running, StateDir
from services.console.supervisor import Supervisor
from services.console.tiers import ALL, Layout, Ports, embedded_tiers

SERVICE_NAMES = {
    "buffer": "tetrarch.buffer.v1.BufferService",
    "reward": "tetrarch.reward.v1.RewardService",
    "trainer": "tetrarch.trainer.v1.TrainerService",
}


_BUFFER_STAGE = 1


@dataclass(frozen=True)
class Place:
    """Addresses by tier. `supervisor` is set when this process started the tiers."""

    addresses: dict[str, str]
    supervisor: Supervisor | None = None


async def check_addresses(services: ServiceAddresses) -> dict[str, str]:
    """Addresses of services that run elsewhere; empty when none are named, and a reward service may be named alone.

    Raises SettingsError for an address that does not answer, or when buffer or trainer is named without the other.
    """
    named = {tier: address for tier, address in services.model_dump().items() if address}
    if "buffer" in named or "trainer" in named:
        for tier in ("buffer", "trainer"):
            if tier not in named:
                raise SettingsError(
                    f"services names {', '.join(named)} but not {tier}; name buffer and trainer, or none of them to"
                    " start every tier on this machine."
                )
        if "reward" in named:
            raise SettingsError(
                "services.reward does not apply beside services.buffer: the rollout nodes there have a reward_address"
                " of their own; set it in their settings."
            )
    for tier, address in named.items():
        host, _, port = address.rpartition(":")
        if not host or not port.isdigit():
            raise SettingsError(f"services.{tier} is {address!r}; write host:port.")
        ready = answers(address) if tier == "reward" else serving(address, SERVICE_NAMES[tier], timeout=5.0)
        if why := await ready:
            raise SettingsError(f"services.{tier}: {why}; start the {tier} there, or correct the address.")
    return named


@contextlib.asynccontextmanager
async def services_for_run(
    spec: RunSpec, state: StateDir, console: Console, prepare: Callable[[str, bool], Awaitable[None]]
) -> AsyncIterator[Place]:
    """Services for a training run; starts every tier when none run. Raises SettingsError, TierFailed.

    `prepare` is called with the buffer's address, and whether this process owns it, before anything that costs time
    starts: a run that the buffer refuses starts no engine.
    """
    addresses = await check_addresses(spec.services)
    if "buffer" in addresses:
        await prepare(addresses["buffer"], False)
        yield Place(addresses)
        return
    running = state.running()
    reward = addresses.get("reward")
    if running and running.command == "up":
        if reward:
            raise SettingsError(
                f"services.reward {reward} does not apply: `tetrarch up` (pid {running.pid}) has its own reward"
                " service; stop it with `tetrarch down`, or give another --state-dir."
            )
        console.print(f"[bright_black]using the tiers of `tetrarch up` (pid {running.pid})[/]")
        await prepare(running.addresses["buffer"], False)
        yield Place(running.addresses)
        return
    if running:
        raise SettingsError(_busy(running, state))
    log_dir = Path(spec.directory) / "logs"
    tiers = [tier for tier in ALL if not (reward and tier == "reward")]
    async with started(state, tiers, log_dir, console, prepare, reward=reward) as place:
        state.write(Running(os.getpid(), "train", place.addresses, spec.run_id))
        yield place


@contextlib.asynccontextmanager
async def services_to_read(
    state: StateDir,
    buffer: str | None,
    trainer: str | None,
    console: Console,
    tiers: Collection[str] = ("store", "buffer"),
) -> AsyncIterator[Place]:
    """Services for a look: the given ones, those that run, else `tiers` started on the store of this directory."""
    if buffer:
        yield Place(
            await check_addresses(ServiceAddresses(buffer=buffer, trainer=trainer)) if trainer else {"buffer": buffer}
        )
        return
    if running := state.running():
        yield Place(running.addresses)
        return
    if not state.store_dir.is_dir():
        raise SettingsError(
            f"Nothing runs here and there is no earlier run in {state.path}; start one with `tetrarch train`, or name"
            " the services with --buffer and --trainer, or another directory with --state-dir."
        )
    async with started(state, tiers, state.log_dir, console) as place:
        yield place


@contextlib.asynccontextmanager
async def started(
    state: StateDir,
    tiers: Collection[str],
    log_dir: Path,
    console: Console,
    prepare: Callable[[str, bool], Awaitable[None]] | None = None,
    *,
    reward: str | None = None,
) -> AsyncIterator[Place]:
    """Tiers of this process's own, stopped at the end. `reward`: a reward service elsewhere, for the rollout node."""
    ports = Ports.free()

    async def on_stage(index: int) -> None:
        if prepare and index == _BUFFER_STAGE:
            await prepare(ports.addresses["buffer"], True)

    if not state.acquire():
        raise SettingsError(f"{state.path} is in use by another `tetrarch`; wait for it, or give another --state-dir.")
    supervisor = Supervisor(
        embedded_tiers(Layout(ports, state.store_dir, log_dir, resume=False, reward=reward), tiers),
        log_dir,
        on_note=lambda text: console.print(f"[yellow]{text}[/]"),
    )
    try:
        with console.status(f"starting {', '.join(tiers)}"):
            await supervisor.start(on_stage)
        yield Place({name: address for name, address in ports.addresses.items() if name in tiers}, supervisor)
    finally:
        try:
            await supervisor.stop()
        finally:
            state.release()


def _busy(running: Running, state: StateDir) -> str:
    return (
        f"Run {running.run_id!r} is in progress in {state.path} (pid {running.pid}); wait for it, stop it with"
        " `tetrarch stop`, or give this run another --state-dir."
    )
