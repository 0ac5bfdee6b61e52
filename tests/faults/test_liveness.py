"""Liveness verdict: a run of which a part never comes back ends by its own deadline, and says which part and why.

Parts that are stopped (SIGSTOP) rather than killed are the harder case: their connections stay open, and no supervisor
sees a death. What needs no process of its own to be shown (no engine, no groups, ranks that always die) is in
tests/unit/trainer.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import pytest
from tetrarch.buffer.v1 import run_pb2
from tetrarch.rollout.v1 import engine_pb2

from services.common.errors import ServiceError
from services.common.run_spec import RunSpec
from tests.support.embedded import Embedded, embedded_tiers_up

SECONDS = 90.0
DEADLINE = 5.0
"""Of the run, for a batch; and of the trainer, for buffer, engines and ranks."""


ENV = {
    "TETRARCH_TRAINER_BUFFER_PATIENCE": str(DEADLINE),
    "TETRARCH_TRAINER_STEP_TIMEOUT": str(DEADLINE),
    "TETRARCH_TRAINER_JOIN_TIMEOUT": str(DEADLINE),
    "TETRARCH_TRAINER_ENGINES_TIMEOUT": "15",  # the first group costs an engine an import
}
"""Deadlines of the trainer's process that a run has no key for."""


def spec_of(tiers: Embedded, name: str) -> RunSpec:
    """An endless run."""
    changes = {"rollout": {"num_rollout": 10_000}, "reward": {"rm_timeout": 1.0}, "data": {"max_prompt_attempts": 2}}
    return tiers.spec(name, trainer={"batch_timeout": DEADLINE}, **changes)


async def begun(tiers: Embedded, name: str) -> RunSpec:
    """A run that has made a step."""
    spec = spec_of(tiers, name)
    await tiers.begin(spec)
    await tiers.steps(spec, 1, SECONDS)
    return spec


async def ended(tiers: Embedded, spec: RunSpec) -> str:
    """Why the run failed."""
    run = await tiers.end_of(spec, SECONDS)
    assert run.state == run_pb2.RUN_STATE_FAILED
    return run.reason


async def kill_engines_forever(tiers: Embedded) -> None:
    """Every start of an engine is its last."""
    while True:
        with contextlib.suppress(ServiceError):
            for node in await tiers.clients.nodes(1.0):
                for engine in node.engines:
                    if engine.state != engine_pb2.ENGINE_STATE_DEAD and engine.pid:
                        with contextlib.suppress(ProcessLookupError):
                            os.killpg(engine.pid, signal.SIGKILL)
        await asyncio.sleep(0.1)


async def engine_gone(tiers: Embedded) -> None:
    spec = await begun(tiers, "engine")
    killer = asyncio.create_task(kill_engines_forever(tiers))
    try:
        reason = await ended(tiers, spec)
    finally:
        killer.cancel()
        await asyncio.gather(killer, return_exceptions=True)
    assert "local-0" in reason, reason
    assert "signal" in reason or "status -9" in reason or "no engine" in reason.lower(), reason


async def reward_gone(tiers: Embedded) -> None:
    spec = await begun(tiers, "reward")
    os.kill(tiers.supervisor.pid("reward"), signal.SIGSTOP)
    try:
        reason = await ended(tiers, spec)
    finally:
        os.kill(tiers.supervisor.pid("reward"), signal.SIGCONT)
    assert "UNSCORED" in reason or "reward" in reason, reason


async def node_gone(tiers: Embedded) -> None:
    spec = await begun(tiers, "node")
    os.kill(tiers.supervisor.pid("rollout"), signal.SIGSTOP)
    try:
        reason = await ended(tiers, spec)
    finally:
        os.kill(tiers.supervisor.pid("rollout"), signal.SIGCONT)
    assert "no rollout node" in reason or "does not answer" in reason, reason


async def rank_gone(tiers: Embedded) -> None:
    """A rank that stands still ends the attempt, not the run: the next one has made a step before it stops again."""
    spec = await begun(tiers, "rank")
    before = len(tiers.history(spec))
    os.kill(tiers.rank_pid(), signal.SIGSTOP)

    def noticed() -> list[str]:
        return [entry["message"] for entry in tiers.history(spec)[before:] if entry["kind"] == "notice"]

    (said, *_) = await tiers.until(noticed, SECONDS, "a notice")
    assert "did not answer" in said, said
    await tiers.steps(spec, 1 + sum(entry["kind"] == "step" for entry in tiers.history(spec)), SECONDS)
    await tiers.clients.stop_run(spec.run_id, 30.0)


async def buffer_gone(tiers: Embedded) -> None:
    """The trainer cannot tell the buffer of the run's end; it tells whoever asks it."""
    spec = await begun(tiers, "buffer")
    os.kill(tiers.supervisor.pid("buffer"), signal.SIGSTOP)
    began = time.monotonic()
    try:

        async def reason() -> str:
            with contextlib.suppress(ServiceError):
                progress = await tiers.clients.progress(spec.run_id)
                return progress.reason if progress else ""
            return ""

        said = await tiers.until(reason, SECONDS, "the run's end")
    finally:
        os.kill(tiers.supervisor.pid("buffer"), signal.SIGCONT)
    assert "buffer" in said, said
    assert time.monotonic() - began < SECONDS


async def in_turn(directory: Path, parts: Sequence[Callable[[Embedded], Awaitable[None]]]) -> None:
    """Runs on the same tiers, one part after the other gone."""
    async with embedded_tiers_up(directory, ENV) as tiers:
        for part in parts:
            began = time.monotonic()
            await part(tiers)
            print(f"{part.__name__}: {time.monotonic() - began:.1f} s")


@pytest.mark.timeout(600)
async def test_a_run_ends_by_its_own_deadline_and_names_what_never_came_back(tmp_path):
    first, second = (engine_gone, reward_gone, buffer_gone), (node_gone, rank_gone)
    await asyncio.gather(in_turn(tmp_path / "first", first), in_turn(tmp_path / "second", second))
