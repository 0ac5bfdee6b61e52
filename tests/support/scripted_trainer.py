"""A trainer whose ranks and network are scripted: the real fleet, updater, groups and client, beside `scripted_node`.

Runs on `virtual_time`.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from services.common.errors import Code, ServiceError
from services.rollout.convert import engine_to_proto
from services.trainer import convert
from services.trainer.adapters.rollout_client import GrpcRollout
from services.trainer.core import commands
from services.trainer.core.buckets import BucketPlan, TensorSpec, plan_buckets
from services.trainer.core.fleet import EngineFleet, FleetSettings
from services.trainer.core.ports import RanksFailed
from services.trainer.core.records import NodeView
from services.trainer.core.weights import UpdateSettings, WeightUpdater
from tests.support.scripted_node import RUN, Network, ScriptedNode
from tests.support.scripted_wires import TENSORS, Wires, contents

_PORTS = itertools.count(20000)
_SETUP = commands.SetupResult("2.13", "", ("gloo",), {}, 14, 1, 0, 1, 0.0)


class ScriptedBuffer:
    """What the buffer knows of a run: sessions and versions."""

    def __init__(self) -> None:
        self.session = self.version = self.published = 0

    def begin_session(self) -> int:
        self.session += 1
        return self.session

    def reserve(self, session: int) -> int:
        """The next version. Raises FENCED."""
        self._check(session)
        self.version += 1
        return self.version

    def publish(self, session: int, version: int) -> None:
        """Raises FENCED."""
        self._check(session)
        assert version > self.published
        self.published = version

    def _check(self, session: int) -> None:
        if session != self.session:
            raise ServiceError(Code.FAILED_PRECONDITION, "FENCED", "A newer trainer holds the run.")


class ScriptedRanks:
    """Ranks whose weights are the words of `version`. Rank 0 sends them over the wires."""

    def __init__(self, wires: Wires) -> None:
        self._wires = wires
        self.version = 0
        self.failure: RanksFailed | None = None
        self._staged: Mapping[str, str] = {}
        self._plan: BucketPlan | None = None
        self._tasks: dict[str, list[asyncio.Task]] = {}
        self._errors: dict[str, str] = {}
        self._names: set[str] = set()

    async def start(self) -> None: ...

    async def stop(self) -> None:
        self.failure = self.failure or RanksFailed(0, "Rank 0 was ended.", answered=False)
        self._LeaveGroups(commands.LeaveGroups(tuple(self._tasks)))

    async def call_all(self, command: Any, timeout: float) -> list[Any]:
        return [await self.call(0, command, timeout)]

    async def call(self, rank: int, command: Any, timeout: float) -> Any:
        if self.failure:
            raise self.failure
        await asyncio.sleep(self._wires.moment())
        if self.failure:
            raise self.failure
        return getattr(self, f"_{type(command).__name__}")(command)

    def _StageWeights(self, command: commands.StageWeights) -> BucketPlan:
        self._staged = contents(self.version)
        specs = [TensorSpec(spec.name, spec.dtype, spec.shape) for spec in TENSORS]
        self._plan = plan_buckets(specs, command.bucket_bytes)
        return self._plan

    def _Checksums(self, command: commands.Checksums) -> dict[str, str]:
        return {name: "+".join(self._staged[s] for s in rule.sources) for name, rule in command.rules.items()}

    def _JoinGroups(self, command: commands.JoinGroups) -> None:
        for spec in command.groups:
            assert spec.name not in self._names, f"{spec.name} is used twice"
            self._names.add(spec.name)
            self._tasks[spec.name] = []
            self._begin(spec.name, self._join(spec.name, command.timeout))

    def _SendWeights(self, command: commands.SendWeights) -> None:
        for name in command.group_names:
            if name in self._tasks:
                self._begin(name, self._send(name, dict(self._staged), command.timeout))

    def _GroupErrors(self, command: commands.GroupErrors) -> dict[str, str | None]:
        gone = "it was not joined, or has been left"
        return {name: self._errors.get(name) if name in self._tasks else gone for name in command.group_names}

    def _LeaveGroups(self, command: commands.LeaveGroups) -> None:
        for name in command.group_names:
            for task in self._tasks.pop(name, ()):
                task.cancel()
            self._wires.group(name).broken.set()

    def _begin(self, name: str, work: Any) -> None:
        before = [task for task in self._tasks[name] if not task.done()]

        async def run() -> None:
            if before:
                await asyncio.wait(before)
            try:
                await work
            except (ConnectionError, TimeoutError) as error:
                self._errors[name] = f"the broadcast failed: {error}"
                self._wires.group(name).broken.set()

        self._tasks[name] = [*before, asyncio.create_task(run())]

    async def _join(self, name: str, timeout: float) -> None:
        group = self._wires.group(name)
        await asyncio.sleep(self._wires.moment())
        group.sender_there.set()
        await group.meet(group.receiver_there, timeout)

    async def _send(self, name: str, words: dict[str, str], timeout: float) -> None:
        group, deadline = self._wires.group(name), time.monotonic() + timeout
        for bucket in self._plan.buckets:
            await asyncio.sleep(self._wires.moment())
            if group.broken.is_set() and not group.hangs:
                raise ConnectionError("the connection was closed by the peer")
            if time.monotonic() > deadline:
                raise TimeoutError
            flipped = self._wires.strike(0.02)
            group.wire.put_nowait({spec.name: "flipped" if flipped else words[spec.name] for spec in bucket})


class _Client(GrpcRollout):
    """The real client over a scripted network."""

    def __init__(self, node: ScriptedNode, network: Network) -> None:
        super().__init__(_nowhere)
        self._node, self._network = node, network

    def _weights(self, engine: Any) -> Any:
        return self._network

    async def nodes(self) -> list[NodeView]:
        await asyncio.sleep(self._node.wires.moment())
        if self._network.cut:
            return []
        messages = [engine_to_proto(slot, "scripted") for slot in self._node.fleet.slots]
        engines = tuple(convert._engine(message, "n:1") for message in messages)
        return [NodeView("n", "n:1", RUN, engines, 0, 0, 0, 0.0, 0.0, 0.0, "")]


async def _nowhere() -> list[str]:
    return []


class ScriptedTrainer:
    """One life of a trainer: pushes a version now and then, and brings late joiners up in between."""

    def __init__(self, node: ScriptedNode, buffer: ScriptedBuffer, timeout: float) -> None:
        wires = node.wires
        self._random, self._buffer = wires.random, buffer
        self.session = buffer.begin_session()
        self.network = Network(node)
        self.ranks = ScriptedRanks(wires)
        settings = UpdateSettings(
            run_id=RUN,
            session_epoch=self.session,
            bucket_bytes=48,
            group_size=1,
            timeout=timeout,
            join_timeout=timeout,
            stage_timeout=30.0,
            address="127.0.0.1",
            free_port=_PORTS.__next__,
        )
        client = _Client(node, self.network)
        updater = WeightUpdater(self.ranks, client, _SETUP, settings)
        journal = SimpleNamespace(write=lambda *_: None)
        self.fleet = EngineFleet(client, updater, asyncio.Lock(), journal, FleetSettings(RUN, 1, 200.0))
        self.why_ended = ""
        self._stopping = False
        self._tasks: list[asyncio.Task] = []

    def start(self) -> None:
        """Begins to push."""
        self._tasks = [asyncio.create_task(self._train()), asyncio.create_task(self.fleet.catch_up_forever())]

    async def push(self) -> None:
        """A new version, published when an engine has it. Raises ServiceError."""
        version = self.ranks.version = self._buffer.reserve(self.session)

        async def publish(pushed: int) -> None:
            await asyncio.sleep(self.network.node.wires.moment())
            self._buffer.publish(self.session, pushed)

        await self.fleet.push(version, version, publish, lambda: None)

    async def _train(self) -> None:
        try:
            while not self._stopping:
                await self.push()
                await asyncio.sleep(self._random.choice((0.0, 1.0, 5.0, 30.0)))
        except ServiceError as error:
            self.why_ended = error.reason
            for task in self._tasks[1:]:
                task.cancel()

    async def stop(self) -> None:
        """Pushes no more; late joiners are still brought up."""
        self._stopping = True
        await self._tasks[0]

    async def die(self) -> None:
        """SIGKILL: it tells nobody, its connections break."""
        self.network.cut = True
        await self.ranks.stop()
        await self._end(self._tasks)

    async def _end(self, tasks: list[asyncio.Task]) -> None:
        for task in tasks:
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(*tasks, return_exceptions=True)
