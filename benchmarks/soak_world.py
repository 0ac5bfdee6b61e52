"""The soak's run from outside: its processes by tier, its history as it is written, and what its services say.

Knows nothing of strikes. Every look may fail while a tier is down; who asks then looks again.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from tetrarch.buffer.v1 import run_pb2
from tetrarch.rollout.v1 import engine_pb2
from tetrarch.trainer.v1 import trainer_service_pb2 as trainer_pb

from examples.first_run.__main__ import ROOT, Workspace
from services.common.errors import ServiceError
from services.console.adapters.clients import Clients, GroupQuery
from services.console.core.history import METRICS_FILE
from services.console.state import Running

TIERS = ("store", "buffer", "reward", "rollout", "trainer")
"""What the supervisor started and starts again."""
_MARKS = {name: f"services.{name}" for name in TIERS} | {"store": "valkey"}
_ALL_GROUPS = 10_000_000


class Journal:
    """metrics.jsonl of the run, read as it grows. Only whole lines count: a cut one is removed by the next trainer."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._position = 0
        self.rows: list[dict[str, Any]] = []

    def read(self) -> list[dict[str, Any]]:
        """All rows so far."""
        with contextlib.suppress(FileNotFoundError), self._path.open("rb") as file:
            file.seek(self._position)
            new = file.read()
            whole = new[: new.rfind(b"\n") + 1]
            self._position += len(whole)
            self.rows += [json.loads(line) for line in whole.splitlines()]
        return self.rows

    def step_times(self) -> list[float]:
        """When each step ended, repeated ones too. Wall time."""
        return [row["time"] for row in self.read() if row["kind"] == "step"]


@dataclass
class Seen:
    """What was seen of engines and versions during the run."""

    incarnations: dict[str, list[str]] = field(default_factory=dict)
    """By engine, in order."""
    held: dict[tuple[str, str], int] = field(default_factory=dict)
    """Newest version by engine and incarnation."""
    policy_version: int = 0
    went_back: list[str] = field(default_factory=list)
    """Versions that became smaller, in words."""
    broken_identities: list[str] = field(default_factory=list)
    """Counts of the buffer that do not add up."""
    looks: int = 0
    pids: dict[int, float] = field(default_factory=dict)
    """Every process of the run by pid, with its start time."""

    def take_node(self, node: engine_pb2.Node) -> None:
        """Notes the engines of a node."""
        for engine in node.engines:
            known = self.incarnations.setdefault(engine.engine_id, [])
            if engine.incarnation and engine.incarnation not in known:
                known.append(engine.incarnation)
            key, version = (engine.engine_id, engine.incarnation), engine.weight_version
            if version and version < self.held.get(key, 0):
                self.went_back.append(f"engine {engine.engine_id}: {self.held[key]} to {version}")
            self.held[key] = max(version, self.held.get(key, 0))

    def take_stats(self, stats: run_pb2.RunStats) -> None:
        """Notes the buffer's counts."""
        self.looks += 1
        if stats.drawn_count != in_hand(stats) + stats.consumed_count + stats.evicted_count:
            self.broken_identities.append(str(stats).replace("\n", " "))
        if stats.policy_version < self.policy_version:
            self.went_back.append(f"published: {self.policy_version} to {stats.policy_version}")
        self.policy_version = max(self.policy_version, stats.policy_version)


def in_hand(stats: run_pb2.RunStats) -> int:
    """Groups that are neither trained nor dropped."""
    return stats.pending_count + stats.leased_count + stats.ready_count + stats.reserved_count


class World:
    """The run with its tiers.

    Args:
        workspace: of the demo, after SFT.
        running: the supervisor of the tiers.
        run_id: of a run that does not exist yet.
        fault_dir: where named moments are armed.
    """

    def __init__(self, workspace: Workspace, running: Running, run_id: str, fault_dir: Path) -> None:
        self.run_id = run_id
        self.run_dir = workspace.path / run_id
        self.fault_dir = fault_dir
        self.journal = Journal(self.run_dir / METRICS_FILE)
        self.seen = Seen()
        self.clients = Clients(running.addresses["buffer"], running.addresses["trainer"])
        self._supervisor = psutil.Process(running.pid)
        self._workspace = workspace
        self._command: subprocess.Popen | None = None
        self._looking: asyncio.Task | None = None

    # -- the run

    def start(self, flags: list[str]) -> None:
        """Gives the `tetrarch train` command of the run, and begins to look."""
        arguments = self._workspace.grpo(self.run_id, *flags)
        with (self._workspace.path / f"{self.run_id}.log").open("a") as out:
            command = [sys.executable, "-m", "services.console", *arguments]
            self._command = subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT)
        self._looking = asyncio.create_task(self._look_forever())

    @property
    def ended(self) -> bool:
        """True when the command has ended: nobody follows the run any more."""
        return self._command is not None and self._command.poll() is not None

    async def stop(self, timeout: float) -> int:
        """Interrupts the command once, as a user would, and waits for its exit status."""
        assert self._command
        self._command.send_signal(signal.SIGINT)
        try:
            return await asyncio.to_thread(self._command.wait, timeout)
        except subprocess.TimeoutExpired:
            self._command.kill()
            return -1

    async def close(self) -> None:
        """Ends the looks, and a command that still runs."""
        if self._looking:
            self._looking.cancel()
            await asyncio.gather(self._looking, return_exceptions=True)
        if self._command and self._command.poll() is None:
            self._command.kill()
            self._command.wait()
        await self.clients.__aexit__()

    # -- looks

    async def _look_forever(self) -> None:
        while True:
            self._note_processes()
            with contextlib.suppress(ServiceError, asyncio.TimeoutError):
                async with asyncio.timeout(5):
                    self.seen.take_stats(await self.clients.stats(self.run_id))
            node = await self.node()
            if node:
                self.seen.take_node(node)
            await asyncio.sleep(0.5)

    def _note_processes(self) -> None:
        with contextlib.suppress(psutil.Error):
            for process in self._supervisor.children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    self.seen.pids.setdefault(process.pid, process.create_time())

    async def node(self) -> engine_pb2.Node | None:
        """The rollout node now; None when it does not answer."""
        with contextlib.suppress(ServiceError, asyncio.TimeoutError):
            async with asyncio.timeout(5):
                nodes = await self.clients.nodes(2.0)
                return nodes[0] if nodes else None
        return None

    async def phase(self) -> int:
        """What the trainer does now; 0 when it does not answer."""
        with contextlib.suppress(ServiceError, asyncio.TimeoutError):
            async with asyncio.timeout(2):
                progress = await self.clients.progress(self.run_id)
                return progress.phase if progress else 0
        return 0

    async def phase_is(self, name: str) -> bool:
        """`name` as in the contract, without its prefix."""
        return await self.phase() == trainer_pb.Phase.Value(f"PHASE_{name}")

    async def groups(self) -> list[run_pb2.GroupInfo]:
        """All groups."""
        return await self.clients.groups(self.run_id, GroupQuery(), _ALL_GROUPS)

    # -- processes

    def tier(self, name: str) -> psutil.Process | None:
        """The process of a tier; None while it is down."""
        return self._child(self._supervisor, _MARKS[name])

    def below(self, name: str, mark: str = "") -> list[psutil.Process]:
        """Processes that a tier started, and theirs, whose command line has `mark`."""
        parent = self.tier(name)
        try:
            children = parent.children(recursive=True) if parent else []
        except psutil.Error:
            return []
        return [child for child in children if mark in _command_line(child)]

    @staticmethod
    def _child(parent: psutil.Process, mark: str) -> psutil.Process | None:
        try:
            children = parent.children()
        except psutil.Error:
            return None
        return next((child for child in children if mark in _command_line(child)), None)

    def left_over(self) -> list[int]:
        """Processes of the run that live although the supervisor is gone."""
        found = []
        for pid, started in self.seen.pids.items():
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(pid)
                if process.create_time() == started and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(pid)
        return found

    # -- waits

    async def until(self, happened: Callable[[], Any], timeout: float, poll: float = 0.1) -> bool:
        """Waits until `happened` is true; False when it is not in time, or when the command ended."""
        deadline = time.monotonic() + timeout
        while not happened():
            if time.monotonic() > deadline or self.ended:
                return False
            await asyncio.sleep(poll)
        return True

    async def step_after(self, moment: float, timeout: float) -> float | None:
        """Seconds from `moment` (wall time) to the end of the next step; None when there is none in time."""

        def later() -> list[float]:
            return [ended for ended in self.journal.step_times()[-50:] if ended > moment]

        return later()[0] - moment if await self.until(later, timeout) else None

    async def steps_more(self, count: int, timeout: float) -> bool:
        """Waits for so many further steps."""
        wanted = len(self.journal.step_times()) + count
        return await self.until(lambda: len(self.journal.step_times()) >= wanted, timeout, 0.02)


def _command_line(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error):
        return " ".join(process.cmdline()) or process.name()
    return ""


def kill(pid: int, number: int = signal.SIGKILL, *, group: bool = False) -> bool:
    """Sends a signal to a process or its group; False when it is gone."""
    try:
        (os.killpg if group else os.kill)(pid, number)
    except ProcessLookupError:
        return False
    return True
