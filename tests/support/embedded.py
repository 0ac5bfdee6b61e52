"""The product's own tiers as `tetrarch up` starts them, with runs of a tiny model, for tests that strike them.

Use `embedded_tiers_up`. Everything is a real process; the engine is the simulated one, whose tokens follow the bytes of
its weights, so that what a run learns depends on nothing but its settings and data.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
from tetrarch.buffer.v1 import run_pb2

from services.common.errors import ServiceError
from services.common.fault_points import REACHED, VARIABLE
from services.common.run_spec import RunSpec
from services.console.adapters.clients import Clients
from services.console.core.placement import NO_GPUS
from services.console.supervisor import Supervisor
from services.console.tiers import Layout, Ports, embedded_tiers
from tests.support.engine import write_checkpoint

SIMULATED = {"tokens_per_second": 2000.0, "mean_response_len": 1e6, "tokens_follow": "weights"}
_POLL = 0.02


def by_response(sample: Any) -> float:
    """A reward that follows from the answer alone: how often the letters a to m are in it."""
    letters = [letter for letter in sample.response.lower() if letter.isalpha()]
    return sum(letter <= "m" for letter in letters) / max(len(letters), 1)


class Embedded:
    """Tiers of one machine.

    Args:
        directory: for the store, logs, and a directory per run.
        env: further variables of every tier.
    """

    def __init__(self, directory: Path, env: Mapping[str, str]) -> None:
        self.directory = directory
        self.fault_dir = directory / "faults"
        self.fault_dir.mkdir(parents=True)
        self.model = write_checkpoint(directory / "model")
        ports = Ports.free()
        layout = Layout(ports, directory / "store", directory / "logs", resume=True, placement=NO_GPUS)
        env = {VARIABLE: str(self.fault_dir), **env}
        stages = [[replace(tier, env={**tier.env, **env}) for tier in stage] for stage in embedded_tiers(layout)]
        self.supervisor = Supervisor(stages, layout.log_dir)
        self.clients = Clients(ports.addresses["buffer"], ports.addresses["trainer"])

    def spec(self, run_id: str, *, prompts: int = 256, **changes: dict[str, Any]) -> RunSpec:
        """A run of six short steps with a checkpoint after every second; `changes` by group."""
        data = self.directory / "prompts.jsonl"
        rows = ({"input": f"question {number:04}: ", "label": f"answer {number % 7}"} for number in range(prompts))
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        groups: dict[str, Any] = {
            "run_id": run_id,
            "run_dir": str(self.directory / "runs"),
            "data": {"prompt_data": str(data), "label_key": "label", "rollout_shuffle": True},
            "rollout": {
                "hf_checkpoint": str(self.model),
                "engine": "simulated",
                "device": "cpu",
                "num_rollout": 6,
                "rollout_batch_size": 4,
                "n_samples_per_prompt": 4,
                "rollout_max_response_len": 12,
                "rollout_health_check_interval": 0.5,
                "simulated": SIMULATED,
            },
            "reward": {"custom_rm_path": f"{__name__}.{by_response.__name__}"},
            "trainer": {
                "save": str(self.directory / "runs" / run_id / "checkpoints"),
                "save_interval": 2,
                "lr": 1e-3,
                "update_timeout": 20.0,
            },
        }
        for group, keys in changes.items():
            groups[group] |= keys
        return RunSpec.model_validate(groups)

    async def begin(self, spec: RunSpec) -> None:
        """Creates a run and has it trained."""
        await self.clients.create_run(spec.run_id, spec.model_dump_json())
        await self.clients.start_run(spec.run_id)

    async def end_of(self, spec: RunSpec, timeout: float) -> run_pb2.Run:
        """The run once it is not active any more."""

        async def ended() -> run_pb2.Run | None:
            with contextlib.suppress(ServiceError):
                run = await self.clients.find_run(spec.run_id)
                return run if run and run.state != run_pb2.RUN_STATE_ACTIVE else None
            return None

        return await self.until(ended, timeout, f"the end of run {spec.run_id}")

    def history(self, spec: RunSpec) -> list[dict[str, Any]]:
        """Entries of the run's history so far."""
        with contextlib.suppress(FileNotFoundError):
            raw = (Path(spec.directory) / "metrics.jsonl").read_text()
            return [json.loads(line) for line in raw[: raw.rfind("\n") + 1].splitlines()]
        return []

    async def steps(self, spec: RunSpec, count: int, timeout: float) -> None:
        """Waits until so many steps are in the history, repeated ones counted."""
        done = lambda: sum(entry["kind"] == "step" for entry in self.history(spec)) >= count  # noqa: E731
        await self.until(done, timeout, f"{count} steps of run {spec.run_id}")

    async def until(self, condition: Callable[[], Any], timeout: float, what: str) -> Any:
        """The first truth of a condition, plain or async."""
        deadline = time.monotonic() + timeout
        while True:
            found = condition()
            if asyncio.iscoroutine(found):
                found = await found
            if found:
                return found
            assert time.monotonic() < deadline, f"{what}: not within {timeout:.0f} s; logs in {self.directory}/logs"
            await asyncio.sleep(_POLL)

    async def caught(self, point: str, timeout: float = 60.0, **labels: str) -> dict[str, Any]:
        """Arms a fault point and waits until a process stands still there; → its pid and process group."""
        reached = self.fault_dir / f"{point}{REACHED}"
        reached.unlink(missing_ok=True)
        (self.fault_dir / f".{point}").write_text(json.dumps(labels))
        (self.fault_dir / f".{point}").rename(self.fault_dir / point)
        await self.until(reached.exists, timeout, f"somebody at {point}")
        return json.loads(reached.read_text())

    def let_go(self, point: str) -> None:
        """Whoever stands at the point goes on."""
        (self.fault_dir / f"{point}{REACHED}").unlink(missing_ok=True)

    def rank_pid(self) -> int:
        """Process id of the trainer's rank."""
        children = psutil.Process(self.supervisor.pid("trainer")).children(recursive=True)
        return next(child.pid for child in children if "services.trainer.ranks" in child.cmdline())


@contextlib.asynccontextmanager
async def embedded_tiers_up(directory: Path, env: Mapping[str, str] | None = None) -> AsyncIterator[Embedded]:
    """Tiers for as long as the block lasts."""
    made = Embedded(directory, env or {})
    try:
        await made.supervisor.start()
        yield made
    finally:
        made.supervisor.hurry()
        await made.supervisor.stop()
        await made.clients.__aexit__()
