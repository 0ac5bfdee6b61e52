"""Strikes at the trainer: its controller at every step of its order of work, and one of its ranks."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from benchmarks.recovery.measure import Row, Struck
from benchmarks.recovery.tiers import SECONDS_UNTIL, kill, tier_struck
from benchmarks.recovery.world import World


def controller(point: str, undone: int = 0) -> Callable[[World], Awaitable[Struck]]:
    """The controller dies when it, or a rank of it, stands at a point; its ranks die with it."""

    async def strike(world: World) -> Struck:
        await world.caught(point, SECONDS_UNTIL)
        at = kill(world.supervisor.pid("trainer"))
        world.disarm(point)

        async def back() -> bool:
            return _pushed(world, at)

        return Struck(at, tier_struck(world, "trainer", at).detected, back, undone=undone)

    return strike


def _pushed(world: World, at: float) -> bool:
    """A trainer has restored a checkpoint and brought its weights to the engines."""
    return bool(world.history.since(at, "restore") and world.history.since(at, "update_weights"))


async def rank(world: World) -> Struck:
    """A rank dies; its controller starts all ranks anew from the last checkpoint."""
    at = kill(world.rank_pid())

    async def detected() -> float | None:
        said = [e["time"] for e in world.history.since(at, "notice") if "start anew" in e["message"]]
        return said[0] if said else None

    async def back() -> bool:
        return _pushed(world, at)

    return Struck(at, detected, back)


def _controller(name: str, moment: str, point: str, undone: int = 0) -> Row:
    return Row(f"trainer-{name}", "trainer", f"SIGKILL {moment}", controller(point, undone))


ROWS = [
    _controller("before-optimizer", "before the optimizer step (batch reserved)", "trainer.before_optimizer"),
    _controller("after-optimizer", "after the optimizer step, before CommitStep", "trainer.after_optimizer", 1),
    _controller("after-commit", "after CommitStep, weights not pushed", "trainer.after_commit_step"),
    _controller("checkpoint", "mid-checkpoint, files half written", "rank.mid_checkpoint"),
    _controller("after-checkpoint", "checkpoint complete, not recorded", "trainer.after_checkpoint"),
    _controller("before-prepare", "before Prepare", "trainer.before_prepare"),
    _controller("mid-transfer", "mid-transfer", "trainer.mid_transfer"),
    _controller("before-publish", "engines committed, version not published", "trainer.after_commit"),
    Row("rank", "trainer rank", "SIGKILL", rank),
]
