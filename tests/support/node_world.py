"""A rollout node with what it needs, all as processes, for tests of weight updates; and the engines it may have."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.contract.rollout_v1.conftest import Client, Tier, World
from tests.support.engine import missing, write_checkpoint
from tests.support.valkey import ValkeyProcess

MODES = {
    "simulated": {"engine": "simulated", "rollout_num_gpus": 2},
    "simulated-direct": {"engine": "simulated", "rollout_num_gpus": 2, "weight_staging": "off"},
    "sglang-cpu": {"engine": "sglang", "device": "cpu", "rollout_num_gpus": 1},
}
"""Settings of a run's engines."""
_SIMULATED = {"tokens_per_second": 2000}


@contextlib.contextmanager
def node_world(directory: Path) -> Iterator[World]:
    """Store, buffer, reward service and node."""
    for name in ("data", "eval"):
        (directory / f"{name}.jsonl").write_text('{"input": "1+1=", "label": "2"}\n')
    valkey = ValkeyProcess(directory / "valkey").start()
    buffer = Tier("buffer", directory, store_url=valkey.url)
    reward = Tier("reward", directory, workers=1)
    world = World(directory, write_checkpoint(directory / "model"), buffer.address, reward.address)
    try:
        buffer.wait_ready("buffer")
        reward.wait_ready("reward")
        world.start_node()
        yield world
    finally:
        for tier in (world.node, reward, buffer):
            if tier is not None:
                tier.stop()
        valkey.stop()


@contextlib.asynccontextmanager
async def run_on(world: World, mode: str, **trainer: object):
    """A client of a new run with engines of `mode`; the run is ended at the end."""
    if mode.startswith("sglang") and missing(mode):
        pytest.skip(missing(mode))
    client = Client(world)
    await client.create_run(rollout=MODES[mode] | {"simulated": _SIMULATED}, trainer=trainer)
    try:
        yield client
    finally:
        await client.finish_run()
        for channel in client.channels:
            await channel.close()
