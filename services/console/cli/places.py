"""Where services are: named in a run file, held by a running supervisor, or started here for as long as needed."""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from services.common.devices import visible_gpus
from services.common.run_spec import RunSpec, ServiceAddresses
from services.common.settings import SettingsError
from services.console.adapters.health import answers, serving
from services.console.core.placement import NO_GPUS, Placement, Wish, check_fit, deal, gpus_needed
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
    spec: RunSpec, state: StateDir, console: Console, prepare: Callable[[str, bool], Awaitable[None]], wish: Wish
) -> AsyncIterator[Place]:
    """Services for a training run; starts every tier when none run. Raises SettingsError, TierFailed.

    `wish`: which GPUs the tiers get that are started here.

    `prepare` is called with the buffer's address, and whether this process owns it, before anything that costs time
    starts: a run that the buffer refuses starts no engine.
    """
    addresses = await check_addresses(spec.services)
    placement = placement_for(spec, state, wish)
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
    if placement:
        console.print(f"[bright_black]{placement}[/]")
    own = Own(log_dir, tiers, reward, placement)
    async with started(state, own, console, prepare) as place:
        state.write(Running(os.getpid(), "train", place.addresses, spec.run_id, placement.by_tier))
        yield place


def placement_for(spec: RunSpec, state: StateDir, wish: Wish) -> Placement:
    """The GPUs that a run's tiers have, or get when they are started here. Raises SettingsError when it does not fit.

    Empty for a run on the CPU, and for tiers elsewhere, of which nothing is known here.
    """
    if spec.services.buffer:
        if wish:
            raise SettingsError(
                "--trainer-gpus and --rollout-gpus do not apply to services that run elsewhere (services.buffer); they"
                " use the GPUs that they were started with."
            )
        return NO_GPUS
    running = state.running()
    if running and running.command == "up":
        if wish:
            raise SettingsError(
                f"--trainer-gpus and --rollout-gpus do not apply: `tetrarch up` (pid {running.pid}) has dealt out the"
                " GPUs; give them to `tetrarch up`, or use another --state-dir."
            )
        placement = Placement.of(running.gpus)
    elif spec.rollout.device == "cpu":
        return NO_GPUS
    else:
        placement = deal(visible_gpus(), wish, gpus_needed(spec))
    if spec.rollout.device == "cuda" or (spec.rollout.device == "auto" and placement):
        check_fit(spec, placement)
    return placement


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
    async with started(state, Own(state.log_dir, tiers), console) as place:
        yield place


@dataclass(frozen=True)
class Own:
    """Tiers of this process's own. `reward`: a reward service elsewhere, for the rollout node."""

    log_dir: Path
    tiers: Collection[str]
    reward: str | None = None
    placement: Placement = NO_GPUS


@contextlib.asynccontextmanager
async def started(
    state: StateDir, own: Own, console: Console, prepare: Callable[[str, bool], Awaitable[None]] | None = None
) -> AsyncIterator[Place]:
    """Starts tiers, and stops them at the end. Raises SettingsError, TierFailed."""
    ports = Ports.free()

    async def on_stage(index: int) -> None:
        if prepare and index == _BUFFER_STAGE:
            await prepare(ports.addresses["buffer"], True)

    if not state.acquire():
        raise SettingsError(f"{state.path} is in use by another `tetrarch`; wait for it, or give another --state-dir.")
    layout = Layout(ports, state.store_dir, own.log_dir, False, own.reward, own.placement)
    supervisor = Supervisor(
        embedded_tiers(layout, own.tiers),
        own.log_dir,
        on_note=lambda text: console.print(f"[yellow]{text}[/]"),
    )
    try:
        with console.status(f"starting {', '.join(own.tiers)}"):
            await supervisor.start(on_stage)
        yield Place({name: address for name, address in ports.addresses.items() if name in own.tiers}, supervisor)
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
