"""`tetrarch up` and `tetrarch down`: every tier on this machine under one supervisor."""

from __future__ import annotations

import asyncio
import os
import signal
import time

from rich.console import Console
from rich.text import Text

from services.common.devices import visible_gpus
from services.common.settings import SettingsError
from services.console.core.placement import SHARING, Wish, deal
from services.console.state import Running, StateDir
from services.console.supervisor import Supervisor
from services.console.tiers import ALL, Layout, Ports, embedded_tiers

_COLORS = {"store": "bright_black", "buffer": "cyan", "reward": "magenta", "rollout": "yellow", "trainer": "green"}
_WIDTH = max(map(len, ALL))


def up(state: StateDir, ports: Ports, wish: Wish, console: Console) -> int:
    """Runs until it is stopped; returns the exit code. Raises SettingsError, TierFailed."""
    if running := state.running():
        raise SettingsError(
            f"`tetrarch {running.command}` (pid {running.pid}) uses {state.path} already; stop it with `tetrarch down`,"
            " or give another --state-dir."
        )
    if not state.acquire():
        raise SettingsError(f"{state.path} is in use by another `tetrarch`; wait for it, or give another --state-dir.")
    try:
        ports.check()
        placement = deal(visible_gpus(), wish)
        layout = Layout(ports, state.store_dir, state.log_dir, resume=True, placement=placement)
        return asyncio.run(_run(state, layout, console))
    finally:
        state.release()


async def _run(state: StateDir, layout: Layout, console: Console) -> int:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def show(tier: str, line: str) -> None:
        text = Text(f"{tier:<{_WIDTH}} │ ", style=_COLORS[tier])
        text.append_text(Text.from_ansi(line, style="default"))
        console.print(text, soft_wrap=True, highlight=False)

    def note(text: str) -> None:
        console.print(Text(f"{'up':<{_WIDTH}} │ {text}", style="bold"), soft_wrap=True)

    addresses, placement = layout.ports.addresses, layout.placement
    supervisor = Supervisor(embedded_tiers(layout), state.log_dir, on_line=show, on_note=note)

    def interrupt() -> None:
        if stop.is_set():
            supervisor.hurry()
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, interrupt)
    starting = asyncio.create_task(supervisor.start())
    stopping = asyncio.create_task(stop.wait())
    began = time.monotonic()
    try:
        await asyncio.wait([starting, stopping], return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            return 0
        starting.result()
        state.write(Running(os.getpid(), "up", addresses, gpus=placement.by_tier))
        places = "  ".join(f"{name} {address}" for name, address in addresses.items())
        note(f"ready after {time.monotonic() - began:.1f} s: {places}")
        if placement:
            note(f"{placement}" + (f"; {SHARING}" if placement.shared else ""))
        note("start a run with `tetrarch train run.yaml` in another terminal; Ctrl-C stops every tier")
        failing = asyncio.create_task(supervisor.wait_failed())
        await asyncio.wait([failing, stopping], return_when=asyncio.FIRST_COMPLETED)
        if failing.done():
            raise failing.result()
        failing.cancel()
        return 0
    finally:
        note("stopping; Ctrl-C again to stop at once")
        starting.cancel()
        stopping.cancel()
        await asyncio.gather(starting, stopping, return_exceptions=True)
        await supervisor.stop()


def down(state: StateDir, console: Console, wait_seconds: float = 60.0) -> int:
    """Stops the supervisor of a directory; returns the exit code."""
    running = state.running()
    if running is None:
        console.print(f"Nothing runs in {state.path}.")
        return 0
    os.kill(running.pid, signal.SIGTERM)
    deadline = time.monotonic() + wait_seconds
    while time.monotonic() < deadline:
        if state.running() is None:
            console.print(f"Stopped `tetrarch {running.command}` (pid {running.pid}).")
            return 0
        time.sleep(0.1)
    console.print(f"`tetrarch {running.command}` (pid {running.pid}) did not end within {wait_seconds:.0f} s.")
    return 1
