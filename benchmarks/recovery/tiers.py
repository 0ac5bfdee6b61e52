"""Strikes at whole tiers: store, buffer server, reward service and plug-in, rollout node, router."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Awaitable, Callable

from benchmarks.recovery import grader
from benchmarks.recovery.measure import Row, Struck
from benchmarks.recovery.world import World

SECONDS_UNTIL = 60.0


def tier_struck(world: World, name: str, at: float) -> Struck:
    """A tier that its supervisor must start again."""

    async def detected() -> float | None:
        return world.noted(at, f"{name} ended")

    async def back() -> float | None:
        since = world.noted(at, f"{name} is back")
        return since if since and await world.healthy(name) else None

    return Struck(at, detected, back)


def kill(pid: int) -> float:
    """SIGKILL; → when."""
    at = time.time()
    os.kill(pid, signal.SIGKILL)
    return at


def plain(name: str) -> Callable[[World], Awaitable[Struck]]:
    """SIGKILL of a tier in the middle of its work."""

    async def strike(world: World) -> Struck:
        return tier_struck(world, name, kill(world.supervisor.pid(name)))

    return strike


def at_point(name: str, point: str) -> Callable[[World], Awaitable[Struck]]:
    """SIGKILL of a tier that stands still at a named point."""

    async def strike(world: World) -> Struck:
        caught = await world.caught(point, SECONDS_UNTIL)
        assert caught["pid"] == world.supervisor.pid(name), f"{point} was reached by {caught}, not by the {name}"
        at = kill(caught["pid"])
        world.disarm(point)
        return tier_struck(world, name, at)

    return strike


def node(point: str = "") -> Callable[[World], Awaitable[Struck]]:
    """SIGKILL of the rollout node; its engines and its router die with it, and it is back when its engines serve."""

    async def strike(world: World) -> Struck:
        pid = (await world.caught(point, SECONDS_UNTIL))["pid"] if point else world.supervisor.pid("rollout")
        at = kill(pid)
        world.disarm(point or "none")
        struck = tier_struck(world, "rollout", at)

        async def back() -> bool:
            return bool(await struck.back()) and await world.serving()

        return Struck(at, struck.detected, back, world.spec.rollout.engine_count)

    return strike


async def reward_while_scoring(world: World) -> Struck:
    """The reward service dies while a worker of it is at a sample."""
    await world.caught(grader.POINT, SECONDS_UNTIL)
    at = kill(world.supervisor.pid("reward"))
    world.disarm(grader.POINT)
    return tier_struck(world, "reward", at)


async def plugin(world: World) -> Struck:
    """The process that runs the user's reward function dies at a sample; the reward service starts another."""
    pid = (await world.caught(grader.POINT, SECONDS_UNTIL))["pid"]
    at = kill(pid)
    world.disarm(grader.POINT)
    children = _children(world)

    async def replaced() -> float | None:
        return None if pid in _children(world) else time.time()

    async def back() -> bool:
        now = _children(world)
        return pid not in now and len(now) >= len(children)

    return Struck(at, replaced, back)


def _children(world: World) -> set[int]:
    """Live worker processes of the reward service."""
    import psutil

    return {
        child.pid
        for child in psutil.Process(world.supervisor.pid("reward")).children(recursive=True)
        if child.status() != psutil.STATUS_ZOMBIE
    }


async def router(world: World) -> Struck:
    """The router dies; its node starts another with the same workers."""
    await world.node()
    before = await world.routed()
    at = kill(world.router_pid())

    async def detected() -> float | None:
        return world.wrote("rollout", at, "router ended")

    async def back() -> bool:
        return world.wrote("rollout", at, "router ended") is not None and await world.routed() == before

    return Struck(at, detected, back)


ROWS = [
    Row("node", "rollout node", "SIGKILL, engines and router with it", node()),
    Row("node-leases", "rollout node", "SIGKILL holding leases, nothing put", node("node.holding_leases")),
    Row("node-put", "rollout node", "SIGKILL mid-put: stored, answer not seen", node("node.mid_put")),
    Row("reward", "reward service", "SIGKILL while scoring", reward_while_scoring),
    Row("plugin", "user's reward function", "SIGKILL of its process at a sample", plugin),
    Row("buffer", "buffer server", "SIGKILL", plain("buffer")),
    Row("buffer-commit", "buffer server", "SIGKILL after CommitStep, before its answer",
        at_point("buffer", "buffer.after_commit_step")),
    Row("buffer-put", "buffer server", "SIGKILL after PutGroups, before its answer",
        at_point("buffer", "buffer.after_put")),
    Row("store", "Valkey", "SIGKILL", plain("store")),
    Row("router", "router", "SIGKILL", router),
]  # fmt: skip
