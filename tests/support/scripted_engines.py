"""Engine processes in memory, for random histories of the update protocol; their weights and groups are
`scripted_wires`.

A process carries out what it was asked also when the caller has gone, late or never, as over HTTP. Chance decides how
long everything takes; all of it comes from one `random.Random`. Runs on `virtual_time`.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from services.common.errors import Code, ServiceError
from services.rollout.core.engine_port import (
    Activation,
    Buckets,
    ChecksumRule,
    EngineInfo,
    EngineLaunch,
    GroupSpec,
    LaunchSpec,
    TensorSpec,
)
from tests.support.scripted_wires import NAMES, RULES, Group, Wires, checksums

CONTROL_SECONDS = 30.0
"""How long an engine's client waits for an answer, as the real one does."""


def unavailable(why: str) -> ServiceError:
    """What a client says of a process that is gone."""
    return ServiceError(Code.UNAVAILABLE, "ENGINE_UNAVAILABLE", f"The engine does not answer: {why}.")


class Process:
    """One life of an engine: stands in for `services.common.process.ManagedProcess` too."""

    pid = 0

    def __init__(self, wires: Wires) -> None:
        self.wires = wires
        self.held = {name: f"{name}@checkpoint" for name in NAMES}
        self.label = 0
        self.paused = self.updating = False
        self.groups: dict[str, Group] = {}
        self.names_used: list[str] = []
        self.running = False
        self.ended = asyncio.Event()
        self.moving = asyncio.Event()
        self.moving.set()
        self.scheduler = asyncio.Lock()
        self.lies = False
        """Buckets are answered for, and never written."""
        self.broken_promises: list[str] = []
        self._arrival = 0.0
        self._tasks: set[asyncio.Task] = set()

    def note(self, kept: bool, promise: str) -> None:
        """Something the node must never do to a process."""
        if not kept:
            self.broken_promises.append(promise)

    async def start(self) -> None:
        self.running = True

    async def wait(self) -> int:
        await self.ended.wait()
        return -9

    async def stop(self, grace_seconds: float = 0.0) -> int:
        self.die()
        return -9

    @property
    def busy(self) -> int:
        """Things it was asked for and has not done."""
        return len(self._tasks)

    def tail(self, count: int = 20) -> list[str]:
        return []

    def die(self) -> None:
        """SIGKILL."""
        self.running = False
        self.ended.set()
        for task in self._tasks:
            task.cancel()
        for group in self.groups.values():
            group.broken.set()

    async def ask(self, effect: Callable[[], Awaitable[Any]], limit: float, *, ordered: bool = True) -> Any:
        """Has something done; the caller's end ends the wait alone. What is `ordered` begins in the order it was asked.

        Raises:
            ServiceError: ENGINE_UNAVAILABLE, ENGINE_TIMEOUT, or what the effect raises.
        """
        if not self.running:
            raise unavailable("connection refused")
        task = asyncio.create_task(self._carry_out(effect, ordered))
        self._tasks.add(task)
        task.add_done_callback(self._forget)
        await asyncio.wait({task}, timeout=limit)
        if not task.done():
            raise ServiceError(Code.DEADLINE_EXCEEDED, "ENGINE_TIMEOUT", f"No answer within {limit:g} s.")
        if task.cancelled():
            raise unavailable("connection reset")
        return task.result()

    async def _carry_out(self, effect: Callable[[], Awaitable[Any]], ordered: bool) -> Any:
        arrival = time.monotonic() + self.wires.moment(0.02)
        if ordered:
            arrival = self._arrival = max(self._arrival + 1e-6, arrival)
        await asyncio.sleep(arrival - time.monotonic())
        await self.moving.wait()
        answer = await effect()
        await asyncio.sleep(self.wires.moment(0.02))
        await self.moving.wait()
        return answer

    def _forget(self, task: asyncio.Task) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # the caller may have gone


class ScriptedEngine:
    """The client of a process: `engine_port.Engine`. `wait_seconds`: longest wait for the members of a group."""

    checksum_algorithm = "sha256-64"
    staging = None

    def __init__(self, process: Process, url: str, wait_seconds: float, *, stages: bool) -> None:
        self.process, self.url, self._wait = process, url, wait_seconds
        self.staging = ScriptedStaging(process) if stages else None

    async def _control(self, effect: Callable[[], Awaitable[Any]], limit: float = CONTROL_SECONDS) -> Any:
        return await self.process.ask(effect, limit)

    async def health(self, timeout: float) -> bool:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await self.process.moving.wait()
                return self.process.running
        return False

    async def ended(self) -> None:
        await self.process.ended.wait()

    async def info(self) -> EngineInfo:
        return EngineInfo("scripted", "", "2.13", "", ("gloo",), {}, 64, 64, rank_count=1, max_running=8)

    async def generate(self, request, timeout):
        raise AssertionError("histories have no requests")

    async def pause(self, mode: str) -> None:
        await self._set("paused", True)

    async def resume(self) -> None:
        await self._set("paused", False)

    async def set_version(self, version: int) -> None:
        await self._set("label", version)

    async def _set(self, name: str, value: Any) -> None:
        async def effect() -> None:
            async with self.process.scheduler:
                setattr(self.process, name, value)

        await self._control(effect)

    async def flush_cache(self) -> bool:
        async def effect() -> bool:
            async with self.process.scheduler:
                return not self.process.wires.strike(0.1)

        return await self._control(effect)

    async def abort_all(self) -> None:
        await self._control(_nothing)

    async def version(self) -> int:
        return self.process.label

    async def close(self) -> None: ...

    async def join_group(self, group: GroupSpec, timeout: float) -> None:
        process, wire = self.process, self.process.wires.group(group.name)

        async def effect() -> None:
            async with process.scheduler:
                process.note(group.name not in process.names_used, f"group {group.name} is joined twice by one process")
                process.note(not process.groups, f"in {list(process.groups)} while it joins {group.name}")
                process.names_used.append(group.name)
                wire.receiver_there.set()
                try:
                    await wire.meet(wire.sender_there, self._wait)
                except TimeoutError:
                    raise _refused(f"group {group.name} was not complete in time") from None
                process.groups[group.name] = wire

        await self._control(effect, timeout)

    async def leave_group(self, name: str, timeout: float) -> None:
        async def effect() -> None:
            async with self.process.scheduler:
                group = self.process.groups.pop(name, None)
                if group is not None:
                    group.broken.set()

        await self._control(effect, timeout)

    async def checksums(self) -> dict[str, str]:
        async def effect() -> dict[str, str]:
            async with self.process.scheduler:
                return checksums(self.process.held)

        return await self._control(effect)

    async def checksum_rules(self, specs: Sequence[TensorSpec]) -> list[ChecksumRule]:
        await self._control(_nothing)
        return [ChecksumRule(name, sources) for name, sources in RULES.items()]

    async def begin_update(self) -> None:
        await self._bracket(True)

    async def end_update(self) -> None:
        await self._bracket(False)

    async def _bracket(self, opening: bool) -> None:
        async def effect() -> None:
            async with self.process.scheduler:
                if self.process.updating is opening:
                    raise _refused("the brackets of an update do not match")
                self.process.updating = opening

        await self._control(effect)

    async def receive_bucket(self, specs: Sequence[TensorSpec], group_name: str, timeout: float) -> None:
        process = self.process

        async def effect() -> None:
            async with process.scheduler:
                group = process.groups.get(group_name)
                if group is None or not process.updating:
                    raise _refused("it is in no such group, or in no update")
                try:
                    async with asyncio.timeout(self._wait):
                        bucket = await group.take()
                except (TimeoutError, ConnectionError) as error:
                    raise _refused(f"the broadcast failed: {error}") from None
                process.held |= dict.fromkeys(bucket, "uninitialised") if process.lies else bucket

        await self._control(effect, timeout)


async def _nothing() -> None: ...


def _refused(why: str) -> ServiceError:
    return ServiceError(Code.INTERNAL, "ENGINE_REFUSED", f"The engine refused: {why}.")


class ScriptedStaging:
    """`engine_port.Staging` of a process: a receiver beside the scheduler. What it is told overtakes what it was told
    before, now and then; `activate` waits for the scheduler and tells checksums, unless it cannot."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._groups: dict[str, Group] = {}
        self._left: set[str] = set()
        self._busy = asyncio.Lock()
        self._bytes: dict[str, str] = {}
        self._epoch: int | None = None
        self.trusted = False

    async def reserve(self, buckets: Buckets, timeout: float) -> None:
        async def effect() -> None:
            if self._process.wires.strike(0.05):
                raise ServiceError(Code.RESOURCE_EXHAUSTED, "ENGINE_REFUSED", "There is no room beside the weights.")
            async with self._busy:
                self._bytes, self._epoch = {}, None

        await self._process.ask(effect, timeout)

    async def drop(self) -> None:
        await self._process.ask(_nothing, CONTROL_SECONDS)

    async def join_group(self, group: GroupSpec, timeout: float) -> None:
        process, wire = self._process, self._process.wires.group(group.name)

        async def effect() -> None:
            if group.name in self._left:
                raise _refused("it has left that group")
            process.note(group.name not in process.names_used, f"group {group.name} is joined twice by one process")
            process.note(not self._groups, f"in {list(self._groups)} while it joins {group.name}")
            process.names_used.append(group.name)
            self._groups[group.name] = wire
            wire.receiver_there.set()
            try:
                await wire.meet(wire.sender_there, timeout)
            except TimeoutError:
                self._groups.pop(group.name, None)
                raise _refused(f"group {group.name} was not complete in time") from None

        await process.ask(effect, timeout + 1.0, ordered=False)

    async def leave_group(self, name: str, timeout: float) -> None:
        async def effect() -> None:
            self._left.add(name)
            if group := self._groups.pop(name, None):
                group.broken.set()
                group.left.set()
            async with self._busy:
                self._epoch = None

        await self._process.ask(effect, timeout, ordered=False)

    async def receive(self, epoch: int, group_name: str, timeout: float) -> float:
        async def effect() -> None:
            async with self._busy:
                self._epoch, self._bytes = None, {}
                if group_name not in self._groups:
                    raise _refused("it is in no such group")
                group = self._groups[group_name]
                try:
                    async with asyncio.timeout(timeout):
                        while len(self._bytes) < len(NAMES):
                            bucket = await group.take()
                            self._bytes |= dict.fromkeys(bucket, "uninitialised") if self._process.lies else bucket
                except (TimeoutError, ConnectionError) as error:
                    self._groups.pop(group_name, None)
                    raise _refused(f"the broadcast failed: {error}") from None
                self._epoch = epoch

        await self._process.ask(effect, timeout + 1.0, ordered=False)
        return 0.1

    async def activate(self, epoch: int, timeout: float, *, repeat: bool, names: Sequence[str] = ()) -> Activation:
        async def effect() -> Activation:
            async with self._process.scheduler:
                if self._epoch != epoch or self._busy.locked():
                    raise _refused(f"epoch {epoch} is not staged")
                async with self._busy:
                    for name, word in self._bytes.items():
                        await asyncio.sleep(self._process.wires.moment(0.01))
                        self._process.held[name] = "old" if repeat and self._process.wires.strike(0.02) else word
                    told = {} if self._process.wires.strike(0.2) else checksums(self._process.held)
            return Activation("copied" if repeat else "loaded", {name: told[name] for name in names if told})

        return await self._process.ask(effect, timeout)


class ScriptedFactory:
    """Builds engines for the real supervisor, whose processes are `Process`es."""

    kind = "scripted"

    def __init__(self, wires: Wires, wait_seconds: float, *, stages: bool) -> None:
        self._wires, self._wait, self._stages = wires, wait_seconds, stages
        self.lives: dict[str, Process] = {}

    def build(self, index: int, port: int, spec: LaunchSpec) -> EngineLaunch:
        key = f"{index}/{len(self.lives)}"
        process = self.lives[key] = Process(self._wires)
        engine = ScriptedEngine(process, f"http://{key}", self._wait, stages=self._stages)
        return EngineLaunch((key,), {}, engine, 60.0)

    def process(self, _name: str, argv: Sequence[str], **_options: Any) -> Process:
        """In place of `ManagedProcess`."""
        return self.lives[argv[0]]
