"""Was a prompt lost or trained twice? Two witnesses tell: the buffer's states, and what the trainer itself wrote down.

The trainer keeps the samples of every step in a file before it trains them (`save_debug_rollout_data`); a step that is
done again replaces its file. The files of the committed steps are therefore what the surviving history trained.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import grpc
from tetrarch.buffer.v1 import buffer_service_pb2 as buffer_pb
from tetrarch.buffer.v1 import run_pb2

from benchmarks.recovery.world import BATCH, Stuck, World

SETTLE_SECONDS = 90.0
_OPEN = [
    run_pb2.GROUP_STATE_PENDING,
    run_pb2.GROUP_STATE_LEASED,
    run_pb2.GROUP_STATE_READY,
    run_pb2.GROUP_STATE_RESERVED,
]


@dataclass(frozen=True)
class Verdict:
    """Of all prompts drawn until a moment. `lost`: neither trained nor in anybody's hands, or given up; `doubled`: once
    for each training too many; `faults`: sentences about counts that contradict each other."""

    drawn: int
    lost: int
    doubled: int
    faults: tuple[str, ...] = ()


class Ledger:
    """Reads the files of a world's run, each once as long as it is not replaced."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._read: dict[int, tuple[int, tuple[int, ...]]] = {}
        """Step → (time of its file in ns, ordinals)."""

    async def close(self) -> Verdict:
        """Waits until every prompt drawn by now has met its fate, then counts. Raises Stuck when one never does."""
        world = self._world
        drawn = (await world.until(world.stats, 30.0, "the counts")).drawn_count

        async def settled() -> bool:
            first = await self._first_open()
            return first is not None and first >= drawn

        await world.until(settled, SETTLE_SECONDS, f"the fate of {drawn} prompts")
        committed = (await world.until(world.run, 30.0, "the run")).committed_step
        trained = await asyncio.to_thread(self.trained, committed)
        stats = await world.until(world.stats, 30.0, "the counts")
        faults = tuple(_contradictions(stats))
        mine = {ordinal for ordinal in trained if ordinal < drawn}
        doubled = sum(count - 1 for count in trained.values())
        return Verdict(drawn, drawn - len(mine), doubled, faults)

    async def _first_open(self) -> int | None:
        """Lowest ordinal that is in somebody's hands or waits; one more than all drawn when there is none."""
        request = buffer_pb.ListGroupsRequest(run_id=self._world.spec.run_id, states=_OPEN, page_size=1)
        with contextlib.suppress(grpc.aio.AioRpcError):
            groups = (await self._world.buffer.ListGroups(request, timeout=5)).groups
            return groups[0].ordinal if groups else 1 << 62
        return None

    def trained(self, committed: int) -> Counter[int]:
        """How often each ordinal was trained in steps 0 to `committed`. Raises Stuck when a step has no file."""
        counts: Counter[int] = Counter()
        for step in range(committed + 1):
            path = self._world.samples_dir / f"{step}.jsonl"
            try:
                changed = path.stat().st_mtime_ns
                if self._read.get(step, (0, ()))[0] != changed:
                    self._read[step] = (changed, _ordinals(path))
            except FileNotFoundError as error:
                raise Stuck(f"step {step} was committed, but the trainer wrote down no samples of it") from error
            ordinals = self._read[step][1]
            if len(ordinals) != BATCH:
                raise Stuck(f"step {step} trained {len(ordinals)} groups instead of {BATCH}")
            counts.update(ordinals)
        return counts


def _ordinals(path: Path) -> tuple[int, ...]:
    with path.open() as lines:
        return tuple(sorted({json.loads(line)["ordinal"] for line in lines}))


def _contradictions(stats: run_pb2.RunStats) -> list[str]:
    """Sentences about counts that do not add up."""
    states = ("pending", "leased", "ready", "reserved", "consumed", "evicted")
    counts = {name: getattr(stats, f"{name}_count") for name in states}
    found = []
    if sum(counts.values()) != stats.drawn_count:
        found.append(f"{stats.drawn_count} drawn, but {counts} in all")
    if counts["evicted"]:
        found.append(f"prompts were given up: {dict(stats.evicted_by_reason)}")
    return found
