"""`tetrarch runs`, `tetrarch delete-run` and `tetrarch watch`: what the store holds, and its counts as they change."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from rich.console import Console
from rich.table import Table
from rich.text import Text
from tetrarch.buffer.v1 import run_pb2

from services.common.settings import SettingsError
from services.console.cli.look import Source, pick_run, state_name, total_steps

_STATES = ("pending", "leased", "ready", "reserved", "consumed", "evicted")
_MOST_RUNS = 1000


def show_runs(source: Source, console: Console) -> int:
    """Prints every run of the store; returns the exit code."""
    asyncio.run(_runs(source, console))
    return 0


async def _runs(source: Source, console: Console) -> None:
    async with source.open(console) as (clients, _):
        runs = await clients.runs(_MOST_RUNS)
        if not runs:
            console.print("No runs yet; start one with `tetrarch train run.yaml`.")
            return
        table = Table(box=None, header_style="bright_black", padding=(0, 2))
        for title in ("run", "state", "steps", "groups", "payload", "checkpoint", "created", "reason"):
            table.add_column(title, justify="right" if title in ("steps", "groups", "payload") else "left")
        for run in runs:
            stats = await clients.stats(run.run_id)
            table.add_row(
                Text(run.run_id, style="bold"),
                state_name(run),
                f"{run.committed_step + 1}/{total_steps(run)}",
                f"{stats.drawn_count:,}",
                size(stats.payload_bytes),
                f"step {run.checkpoint_step + 1}" if run.checkpoint_step >= 0 else "–",
                run.create_time.ToDatetime().strftime("%d %b %H:%M UTC"),
                Text(run.reason),
            )
        console.print(table)
        bound = f" of {size(stats.store_limit_bytes)}" if stats.store_limit_bytes else ""
        console.print(f"the store uses {size(stats.store_used_bytes)}{bound}", style="bright_black")


def size(count: float) -> str:
    """Bytes for people: 1.5 MB."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def delete_run(source: Source, name: str, *, force: bool, ask: Callable[[str], bool], console: Console) -> int:
    """Deletes a run from the store; returns the exit code. Files in its directory stay."""
    return asyncio.run(_delete(source, name, force, ask, console))


async def _delete(source: Source, name: str, force: bool, ask: Callable[[str], bool], console: Console) -> int:
    async with source.open(console) as (clients, _):
        run = await pick_run(clients, name)
        stats = await clients.stats(run.run_id)
        question = f"Delete {run.run_id} ({state_name(run)}, {stats.drawn_count:,} groups) from the store?"
        if not force and not ask(question):
            console.print("nothing was deleted")
            return 1
        count = await clients.delete_run(run.run_id, force)
        console.print(f"run {run.run_id} is deleted: {count:,} keys; the files in its directory stay")
        return 0


def watch_counts(source: Source, name: str | None, interval: float, console: Console) -> int:
    """Prints a line whenever the counts change, until the run ends; returns the exit code."""
    if interval < 0.1:
        raise SettingsError(f"--interval {interval:g} is too short; use 0.1 seconds or more.")
    asyncio.run(_watch(source, name, interval, console))
    return 0


async def _watch(source: Source, name: str | None, interval: float, console: Console) -> None:
    async with source.open(console) as (clients, _):
        run = await pick_run(clients, name)
        async for answer in clients.watch_stats(run.run_id, interval):
            console.print(f"{time.strftime('%H:%M:%S')}  {counts_line(answer.stats)}", soft_wrap=True)
            state = run_pb2.RunState.Name(answer.state).removeprefix("RUN_STATE_").lower()
        console.print(f"run {run.run_id} is {state}")


def counts_line(stats: run_pb2.RunStats) -> str:
    """The identity with its numbers, and what else a watcher wants to know."""
    parts = " + ".join(f"{name} {getattr(stats, f'{name}_count')}" for name in _STATES)
    facts = [f"capacity {stats.capacity}", size(stats.payload_bytes)]
    facts += [f"expired {stats.lease_expired_count}"] if stats.lease_expired_count else []
    facts += [f"stale {stats.stale_count}"] if stats.stale_count else []
    ages = [f"{state.lower()} for {age:.0f} s" for state, age in sorted(stats.oldest_age_seconds.items())]
    return f"drawn {stats.drawn_count} = {parts}   {', '.join(facts)}" + (
        f"   oldest {', '.join(ages)}" if ages else ""
    )
