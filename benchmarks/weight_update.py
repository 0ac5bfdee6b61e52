"""`python -m benchmarks.weight_update`: what it takes to bring engines to the trainer's weights, part by part.

A rollout node with its engines and a trainer's rank with everything that moves its weights: the processes, the RPCs
and the code of a run, without its training. In the same run processes of ours broadcast the same bytes in the same
buckets between the same devices, with nothing else: the bare broadcast.

CPU, over gloo: models and numbers of engines in a table, so that growth shows, on simulated engines (which hold real
tensors); the fixed cost is that of a tiny model on a real SGLang. There the trainer's copying of the weights and their
checksums take the time of the very cores that carry bytes, so the link is also measured alone, when both are done.
CUDA, over NCCL: one model (`--model DIR` or `--random-qwen3 1.5b`), one engine and two, idle and while they generate;
trainer on the first GPU, engines on the second.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import shutil
import statistics
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks import bare_broadcast, weight_world
from benchmarks.report import Figure, finish, limit, parser
from benchmarks.weight_world import Wanted, World
from services.trainer.core.weights import UpdateReport

LIMIT_SECONDS = 1500
CPU_TABLE = (("tiny", "sglang", (1,)), ("tiny", "simulated", (1, 2, 4)), ("30m", "simulated", (1, 2, 4)))
CPU_TABLE += (("120m", "simulated", (1, 2, 4)),)
LARGEST = "120m"
FINISH_SECONDS = 60.0
MIB = 2**20


@dataclass
class Measured:
    """Updates of one model on one number of engines. Each is its seconds by part; the first, in which groups are made,
    is kept apart."""

    model: str
    engine: str
    engine_count: int
    load: bool
    updates: list[dict[str, float]] = field(default_factory=list)
    bare: list[float] = field(default_factory=list)
    total_bytes: int = 0
    bucket_count: int = 0
    fewest_verified: int = 0
    alone: list[float] = field(default_factory=list)
    """Seconds of transfers that began when the weights were gathered and their checksums made; on a CPU."""

    def median(self, part: str) -> float:
        """Over all updates."""
        return statistics.median(update.get(part, 0.0) for update in self.updates)

    @property
    def share(self) -> float:
        """Seconds of the bare broadcast over those of the transfer."""
        return statistics.median(self.bare) / self.median("transfer")

    @property
    def name(self) -> str:
        """For the table."""
        engines = f"{self.engine_count} {self.engine} engine{'s' if self.engine_count > 1 else ''}"
        return f"{self.model}, {engines}{', generating' if self.load else ''}"


async def one_update(
    world: World, version: int, count: int, *, finished: bool = False
) -> tuple[dict[str, float], UpdateReport]:
    """Stage and push to `count` engines, as after a training step. `finished`: push when nothing else is to be done."""
    engines = (await world.engines(count))[:count]
    began = time.monotonic()
    staged = await world.updater.stage()
    if finished:
        await world.ranks.finish(FINISH_SECONDS)
    report = await world.updater.push(version, engines)
    seconds = time.monotonic() - began
    if report.late:  # an engine's first group takes longer than the others wait for it
        late = [engine for engine in engines if engine.engine_id in report.late]
        report = await world.updater.push(version, late)
        seconds = time.monotonic() - began
    if report.failed:
        raise SystemExit(f"Update {version} failed: {report.failed}")
    return report.seconds | {
        "wire": report.wire_seconds,
        "stage": staged,
        "pause": report.pause_seconds,
        "total": seconds,
    }, report


@asynccontextmanager
async def generating(world: World, count: int, requests: int) -> AsyncIterator[None]:
    """As many requests in flight at each engine as said, for as long as the block lasts."""
    urls = [engine.url for engine in (await world.node()).engines][:count]
    chance = random.Random(0)
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(120)) as session:

        async def ask(url: str) -> None:
            while True:
                ids = [chance.randrange(10, 1000) for _ in range(64)]
                body = {"input_ids": ids, "sampling_params": {"max_new_tokens": 256, "ignore_eos": True}}
                async with session.post(f"{url}/generate", json=body) as answer:
                    await answer.read()

        tasks = [asyncio.create_task(ask(url)) for url in urls for _ in range(requests)]
        await asyncio.sleep(2.0)
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def measure_updates(world: World, versions: range, count: int, measured: Measured) -> None:
    """Updates to `count` engines; the first version of the range is not counted."""
    for version in versions:
        seconds, report = await one_update(world, version, count)
        if version > versions.start:
            measured.updates.append(seconds)
            measured.total_bytes, measured.bucket_count = report.total_bytes, report.bucket_count
            measured.fewest_verified = report.verified_tensor_count // count


async def measure_link(world: World, versions: range, count: int, measured: Measured) -> None:
    """Transfers to `count` engines, and nothing else."""
    for version in versions:
        seconds, _ = await one_update(world, version, count, finished=True)
        measured.alone.append(seconds["transfer"])


async def measure_model(chosen: Namespace, wanted: Wanted, name: str, counts: Sequence[int]) -> list[Measured]:
    """All numbers of engines in one world."""
    found, version = [], 1
    directory = chosen.directory / f"{name}-{wanted.engine}"
    loads = (False, True) if wanted.device == "cuda" else (False,)
    async with weight_world.started(wanted, directory) as world:
        await world.engines(max(counts))
        for count in counts:
            for load in loads:
                measured = Measured(name, wanted.engine, count, load)
                versions = range(version, version + chosen.updates + 1)
                version = versions.stop
                async with generating(world, count, 16) if load else contextlib.nullcontext():
                    await measure_updates(world, versions, count, measured)
                if wanted.device == "cpu":
                    versions = range(version, version + chosen.updates)
                    version = versions.stop
                    await measure_link(world, versions, count, measured)
                print(f"{measured.name}: {measured.median('total'):.3f} s an update", flush=True)
                found.append(measured)
            bare = await measure_bare(world, wanted.device, count, chosen.updates)  # close by: machines are noisy
            for measured in found[-len(loads) :]:
                measured.bare = bare
    return found


async def measure_bare(world: World, device: str, count: int, rounds: int) -> list[float]:
    """Seconds of the same buckets between `1 + count` processes that do nothing else."""
    sizes = [sum(spec.size_bytes for spec in bucket) for bucket in world.updater.plan.buckets]
    backend = "nccl" if device == "cuda" else "gloo"
    return (await bare_broadcast.measure(backend, count, rounds + 1, sizes, world.envs, world.logs))[1:]


async def measure(chosen: Namespace) -> list[Measured]:
    """The table of a device."""
    if chosen.device == "cuda":
        name = chosen.random_qwen3 or "the model"
        model = chosen.model or weight_world.random_model(chosen.directory / "model", name, chosen.tokenizer)
        bucket = int((chosen.bucket_mib or 512) * MIB)
        counts = tuple(range(1, chosen.engines + 1))
        wanted = Wanted("cuda", chosen.engine or "sglang", chosen.engines, model.resolve(), bucket, {})
        return await measure_model(chosen, wanted, name, counts)
    found = []
    for name, engine, counts in CPU_TABLE:
        if chosen.random_qwen3 not in (None, name):
            continue
        model = chosen.directory / f"model-{name}"
        if not model.exists():
            weight_world.random_model(model, name, chosen.tokenizer)
        bucket = int((chosen.bucket_mib or (0.5 if name == "tiny" else 32)) * MIB)
        wanted = Wanted("cpu", engine, max(counts), model, bucket, {})
        found += await measure_model(chosen, wanted, name, counts)
    return found


def figures_of(measured: Measured, bars: dict[str, str]) -> list[Figure]:
    """Rows of one model and number of engines. `bars` by the name of a row."""
    size, bare = measured.total_bytes * measured.engine_count, statistics.median(measured.bare)
    whole, transfer = measured.median("total"), measured.median("transfer")
    rows = {
        "bytes to each engine": (measured.total_bytes / 1e9, "GB"),
        "update": (whole, "s"),
        "of it: stage": (measured.median("stage"), "s"),
        "of it: prepare": (measured.median("prepare"), "s"),
        "of it: checksums": (measured.median("checksums"), "s"),
        "of it: transfer": (transfer, "s"),
        "of it: transfer, as the engines saw it": (measured.median("wire"), "s"),
        "of it: commit": (measured.median("commit"), "s"),
        "generation paused": (measured.median("pause"), "s"),
        "transfer rate": (size / transfer / 1e9, "GB/s"),
        "bare broadcast": (bare, "s"),
        "bare broadcast rate": (size / bare / 1e9, "GB/s"),
        "share of bare: transfer": (measured.share, ""),
        "share of bare: the whole update": (bare / whole, ""),
        "tensors verified in each engine": (measured.fewest_verified, ""),
    }
    if measured.alone:
        rows["share of bare: transfer alone"] = (bare / statistics.median(measured.alone), "")
    bars = {"tensors verified in each engine": ">= 1"} | bars
    return [Figure(f"{measured.name}: {row}", *value, bars.get(row, "")) for row, value in rows.items()]


def bars_of(measured: Measured, device: str) -> dict[str, str]:
    """What the rows of one measurement have to meet."""
    if device == "cuda":
        paused = {"generation paused": "<= 0.1"} if measured.total_bytes < 3.5e9 else {}
        return {"share of bare: transfer": ">= 0.5"} | paused
    if measured.model == "tiny" and measured.engine_count == 1:
        return {"update": "<= 0.1"}
    return {"share of bare: transfer alone": ">= 0.8"} if measured.model == LARGEST else {}


def main() -> int:
    """Command line entry."""
    made = parser(__doc__)
    weight_world.add_arguments(made)
    made.add_argument("--random-qwen3", help="size of the random model; CPU: this row of the table alone")
    made.add_argument("--engines", type=int, default=2, help="engines on CUDA")
    made.add_argument("--updates", type=int, default=5, help="measured updates of each kind, after a first")
    made.add_argument("--bucket-mib", type=float, help="update_weight_buffer_size; 512, on a CPU 32, or 0.5 for tiny")
    chosen = made.parse_args()
    limit(LIMIT_SECONDS)
    if chosen.device == "cuda" and not (chosen.model or chosen.random_qwen3):
        made.error("--device cuda needs --model DIR or --random-qwen3 SIZE")
    chosen.directory = Path(tempfile.mkdtemp(prefix="tetrarch-weight-update-"))
    try:
        found = asyncio.run(measure(chosen))
    except BaseException:
        print(f"Logs are under {chosen.directory}.", file=sys.stderr)
        for model in chosen.directory.glob("model*"):
            shutil.rmtree(model, ignore_errors=True)
        raise
    shutil.rmtree(chosen.directory)
    figures = [figure for each in found for figure in figures_of(each, bars_of(each, chosen.device))]
    context: dict[str, Any] = {"device": chosen.device, "bucket_mib": chosen.bucket_mib}
    if chosen.model:
        context["model"] = json.loads((chosen.model / "config.json").read_text()).get("architectures")
    return finish("weight_update", figures, chosen.json, **context, measured=[vars(each) for each in found])


if __name__ == "__main__":
    raise SystemExit(main())
