"""Engine processes and weight groups in memory, for random histories of the update protocol. No torch, no sockets.

Weights are words: tensor `a` of version 3 is "a@3", so that what an engine holds tells where it came from. A process
carries out what it was asked also when the caller has gone, late or never, as over HTTP. Chance decides how long
everything takes; all of it comes from one `random.Random`. Runs on `virtual_time`.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from services.common.errors import Code, ServiceError
from services.rollout.core.engine_port import ChecksumRule, EngineInfo, EngineLaunch, GroupSpec, LaunchSpec, TensorSpec

NAMES = ("a", "b", "c", "d")
"""Tensors of the model; a and b are one tensor, "ab", inside an engine."""
TENSORS = tuple(TensorSpec(name, "float32", (size,)) for name, size in zip(NAMES, (4, 8, 2, 6), strict=True))
RULES = {"ab": ("a", "b"), "c": ("c",), "d": ("d",)}
CONTROL_SECONDS = 30.0
"""How long an engine's client waits for an answer, as the real one does."""


def contents(version: int) -> dict[str, str]:
    """A version's tensors."""
    return {name: f"{name}@{version}" for name in NAMES}


def checksums(tensors: Mapping[str, str]) -> dict[str, str]:
    """By the engine's names."""
    return {held: "+".join(tensors[name] for name in sources) for held, sources in RULES.items()}


def unavailable(why: str) -> ServiceError:
    """What a client says of a process that is gone."""
    return ServiceError(Code.UNAVAILABLE, "ENGINE_UNAVAILABLE", f"The engine does not answer: {why}.")


@dataclass
class Group:
    """A communicator: the sender's end, and one receiver. `hangs`: a member that goes away is not noticed (NCCL)."""

    name: str
    hangs: bool
    sender_there: asyncio.Event = field(default_factory=asyncio.Event)
    receiver_there: asyncio.Event = field(default_factory=asyncio.Event)
    broken: asyncio.Event = field(default_factory=asyncio.Event)
    wire: asyncio.Queue[dict[str, str]] = field(default_factory=asyncio.Queue)

    async def meet(self, other: asyncio.Event, timeout: float) -> None:
        """Waits for the other side. Raises TimeoutError."""
        async with asyncio.timeout(timeout):
            await other.wait()

    async def take(self) -> dict[str, str]:
        """The next bucket. Raises ConnectionError when the sender has gone, unless the group hangs."""
        taking = asyncio.ensure_future(self.wire.get())
        broken = asyncio.ensure_future(self.broken.wait())
        try:
            await asyncio.wait({taking, broken}, return_when=asyncio.FIRST_COMPLETED)
            if taking.done():
                return taking.result()
            if self.hangs:
                return await taking
            raise ConnectionError("the connection was closed by the peer")
        finally:
            taking.cancel()
            broken.cancel()


class Wires:
    """All groups by name, and the chance behind everything."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.groups: dict[str, Group] = {}
        self.calm = False

    def strike(self, probability: float) -> bool:
        """Whether something goes wrong here; nothing does once it is `calm`."""
        return not self.calm and self.random.random() < probability

    def group(self, name: str) -> Group:
        """A group; made by whoever comes first."""
        return self.groups.setdefault(name, Group(name, self.strike(0.3)))

    def moment(self, longest: float = 0.2) -> float:
        """Seconds that something takes: mostly none or little, now and then `longest` and more."""
        return self.random.choice((0.0, 0.0, 0.001, 0.01, longest, self.random.random() * longest))


class Process:
    """One life of an engine: stands in for `services.common.process.ManagedProcess` too."""

    pid = 0

    def __init__(self, wires: Wires) -> None:
        self.wires = wires
        self.held = {name: f"{name}@checkpoint" for name in NAMES}
        self.staged: dict[str, str] = {}
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

    async def ask(self, effect: Callable[[], Awaitable[Any]], limit: float) -> Any:
        """Has something done; the caller's end ends the wait alone.

        Raises:
            ServiceError: ENGINE_UNAVAILABLE, ENGINE_TIMEOUT, or what the effect raises.
        """
        if not self.running:
            raise unavailable("connection refused")
        task = asyncio.create_task(self._carry_out(effect))
        self._tasks.add(task)
        task.add_done_callback(self._forget)
        await asyncio.wait({task}, timeout=limit)
        if not task.done():
            raise ServiceError(Code.DEADLINE_EXCEEDED, "ENGINE_TIMEOUT", f"No answer within {limit:g} s.")
        if task.cancelled():
            raise unavailable("connection reset")
        return task.result()

    async def _carry_out(self, effect: Callable[[], Awaitable[Any]]) -> Any:
        # What was asked first arrives first: calls differ in how long they take, not in their order.
        self._arrival = max(self._arrival, time.monotonic() + self.wires.moment(0.02))
        await asyncio.sleep(self._arrival - time.monotonic())
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

    def __init__(self, process: Process, url: str, wait_seconds: float) -> None:
        self.process, self.url, self._wait = process, url, wait_seconds

    async def _control(self, effect: Callable[[], Awaitable[Any]], limit: float = CONTROL_SECONDS) -> Any:
        return await self.process.ask(effect, limit)

    async def health(self, timeout: float) -> bool:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await self.process.moving.wait()
                return self.process.running
        return False

    async def info(self) -> EngineInfo:
        return EngineInfo("scripted", "", "2.13", "", ("gloo",), {}, 64, 64, rank_count=1, max_running=8)

    async def generate(self, request, timeout):
        raise NotImplementedError

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


class ScriptedFactory:
    """Builds engines for the real supervisor, whose processes are `Process`es."""

    kind = "scripted"

    def __init__(self, wires: Wires, wait_seconds: float) -> None:
        self._wires, self._wait = wires, wait_seconds
        self.lives: dict[str, Process] = {}

    def build(self, index: int, port: int, spec: LaunchSpec) -> EngineLaunch:
        key = f"{index}/{len(self.lives)}"
        process = self.lives[key] = Process(self._wires)
        return EngineLaunch((key,), {}, ScriptedEngine(process, f"http://{key}", self._wait), 60.0)

    def process(self, _name: str, argv: Sequence[str], **_options: Any) -> Process:
        """In place of `ManagedProcess`."""
        return self.lives[argv[0]]
