"""Strikes at one engine while another goes on: SIGKILL and SIGSTOP, serving and in the middle of a weight update."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Awaitable, Callable

import aiohttp
from tetrarch.rollout.v1 import engine_pb2

from benchmarks.recovery.measure import Row, Struck
from benchmarks.recovery.tiers import SECONDS_UNTIL
from benchmarks.recovery.world import UPDATE_SECONDS, Shape, World

OUT_SECONDS, STEADY_SECONDS = 5.0, 10.0
BARS = {"detect_seconds": OUT_SECONDS, "steady_seconds": STEADY_SECONDS}


async def victim_of(world: World) -> engine_pb2.Engine:
    """The engine that is struck: the last one."""
    node = await world.until(world.node, 10.0, "the rollout node's answer")
    return node.engines[-1]


async def load(engine: engine_pb2.Engine) -> int:
    """Requests inside an engine."""
    timeout = aiohttp.ClientTimeout(total=2)
    async with aiohttp.ClientSession(timeout=timeout) as session, session.get(f"{engine.url}/v1/loads") as answer:
        loads = (await answer.json())["loads"]
    return sum(one["num_running_reqs"] + one["num_waiting_reqs"] for one in loads)


def engine_struck(world: World, engine: engine_pb2.Engine, at: float) -> Struck:
    """Detected when the router does not list it any more; back when its successor serves."""

    async def detected() -> float | None:
        routed = await world.routed()
        return time.time() if routed is not None and engine.url.rstrip("/") not in routed else None

    async def back() -> bool:
        lives = await world.incarnations()
        return lives.get(engine.engine_id) != engine.incarnation and await world.serving(engine.engine_id)

    return Struck(at, detected, back, engines=1)


def strike_engine(engine: engine_pb2.Engine, number: int) -> float:
    """A signal to an engine with all its processes; → when."""
    at = time.time()
    os.killpg(engine.pid, number)
    return at


def when(busy: bool, number: int) -> Callable[[World], Awaitable[Struck]]:
    """The signal when the engine has requests, or none."""

    async def strike(world: World) -> Struck:
        engine = await victim_of(world)

        async def right() -> bool:
            return (await load(engine) > 0) is busy

        await world.until(right, SECONDS_UNTIL, f"an engine {'with' if busy else 'without'} requests")
        return engine_struck(world, engine, strike_engine(engine, number))

    return strike


def at_point(point: str, number: int) -> Callable[[World], Awaitable[Struck]]:
    """The signal when the engine, or its node for it, stands at a point of a weight update."""

    async def strike(world: World) -> Struck:
        engine = await victim_of(world)
        await world.caught(point, SECONDS_UNTIL, engine=engine.engine_id)
        at = strike_engine(engine, number)
        world.disarm(point)
        return engine_struck(world, engine, at)

    return strike


async def two_of_four(world: World) -> Struck:
    """In the middle of one update an engine is killed and another is stopped; two go on."""
    node = await world.until(world.node, 10.0, "the rollout node's answer")
    *others, killed, stopped = node.engines
    await world.caught("trainer.before_prepare", SECONDS_UNTIL)  # so that both are met in the same update
    published = (await world.until(world.run, 10.0, "the run")).policy_version
    points = {f"engine.bucket@{engine.engine_id}": engine for engine in (killed, stopped)}
    for point, engine in points.items():
        world.arm(point, engine=engine.engine_id)
    world.disarm("trainer.before_prepare")
    for point in points:
        await world.reached(point)
    strike_engine(stopped, signal.SIGSTOP)
    at = strike_engine(killed, signal.SIGKILL)
    for point in points:
        world.disarm(point)
    first, second = (engine_struck(world, engine, at) for engine in (killed, stopped))

    async def detected() -> float | None:
        return (await second.detected()) if await first.detected() else None

    async def back() -> bool:
        return await first.back() is True and await second.back() is True

    async def served() -> bool:
        now = await world.node()
        versions = {engine.engine_id: engine.weight_version for engine in (now.engines if now else [])}
        return all(versions.get(engine.engine_id, 0) > published for engine in others)

    return Struck(at, detected, back, engines=2, others=served)


def _row(name: str, moment: str, strike: Callable[[World], Awaitable[Struck]]) -> Row:
    return Row(f"engine-{name}", "engine, one of two", moment, strike, bars=BARS)


ROWS = [
    _row("idle", "SIGKILL, idle", when(False, signal.SIGKILL)),
    _row("serving", "SIGKILL, serving", when(True, signal.SIGKILL)),
    _row("transfer", "SIGKILL, mid-transfer", at_point("engine.bucket", signal.SIGKILL)),
    _row("committed", "SIGKILL after Commit, before its answer", at_point("node.after_commit", signal.SIGKILL)),
    _row("stop", "SIGSTOP, serving", when(True, signal.SIGSTOP)),
    _row("stop-transfer", "SIGSTOP, mid-transfer", at_point("engine.bucket", signal.SIGSTOP)),
    Row(
        "engines-two-of-four",
        "two engines of four",
        "one SIGKILL, one SIGSTOP, mid-transfer of the same update",
        two_of_four,
        Shape(engine_count=4),
        BARS | {"others_seconds": UPDATE_SECONDS},
    ),
]
