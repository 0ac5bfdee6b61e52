"""`python -m benchmarks.weight_faults`: engines are killed and stopped in the middle of a weight update.

The victims are held at a named point between two buckets, then their whole process group gets SIGKILL or SIGSTOP; the
update goes on through the product's own path. Told is when the other engines serve the new version, when the router
stops using the victims, what the next update costs, and when the victims serve again.

CPU: four simulated engines over gloo. CUDA: two SGLang servers on the second GPU over NCCL.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import statistics
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
from tetrarch.rollout.v1 import engine_pb2

from benchmarks import weight_world
from benchmarks.report import Figure, finish, limit, parser
from benchmarks.weight_world import Wanted, World
from services.common import fault_points
from services.trainer.core.weights import UpdateReport

LIMIT_SECONDS = 1200
POINT = "engine.bucket"
POLL = 0.01
BACK_SECONDS = 200.0
CASES = {
    "SIGKILL": (signal.SIGKILL,),
    "SIGSTOP": (signal.SIGSTOP,),
    "SIGKILL and SIGSTOP": (signal.SIGKILL, signal.SIGSTOP),
}


@dataclass
class Strike:
    """One update with victims. Seconds since the strike, but for `next_update`, which is a duration."""

    case: str
    others_serve: float = float("nan")
    published: float = float("nan")
    out_of_router: float = float("nan")
    next_update: float = float("nan")
    back: float = float("nan")
    others_disturbed: int = 0
    wrongly_served: int = 0
    said: list[str] = field(default_factory=list)


class Watch:
    """Looks at node and router until told to stop; notes first times."""

    def __init__(self, world: World, victims: set[str], others: set[str], version: int) -> None:
        self._world, self._victims, self._others, self._version = world, victims, others, version
        self.others_serve: float | None = None
        self.out_of_router: float | None = None
        self.wrongly_served = 0

    async def run(self, struck: asyncio.Event) -> None:
        """Until cancelled."""
        await struck.wait()
        first = await self._world.node()
        urls = {engine.url.rstrip("/") for engine in first.engines if engine.engine_id in self._victims}
        began = time.monotonic()
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(5)) as session:
            while True:
                node = await self._world.node()
                self._look(node, time.monotonic() - began)
                async with session.get(f"{node.router_url}/workers") as answer:
                    workers = (await answer.json()).get("workers", [])
                routed = {worker["url"].rstrip("/") for worker in workers if worker.get("is_healthy", True)}
                if self.out_of_router is None and not routed & urls:
                    self.out_of_router = time.monotonic() - began
                await asyncio.sleep(POLL)

    def _look(self, node: engine_pb2.Node, seconds: float) -> None:
        ready = engine_pb2.ENGINE_STATE_READY
        serving = {e.engine_id for e in node.engines if e.state == ready and e.weight_version == self._version}
        if self.others_serve is None and serving >= self._others:
            self.others_serve = seconds
        if serving & self._victims:
            self.wrongly_served += 1


async def hold(directory: Path, victims: Mapping[str, signal.Signals]) -> dict[str, Path]:
    """Arms the point before the second bucket for every victim; → the files that will say it was reached."""
    files = {}
    for number, engine_id in enumerate(victims):
        armed = directory / f"{POINT}@{number}"
        armed.write_text(json.dumps({"engine": engine_id, "bucket": "1"}))
        files[engine_id] = armed.with_name(armed.name + fault_points.REACHED)
    return files


async def strike(files: Mapping[str, Path], victims: Mapping[str, signal.Signals]) -> float:
    """Waits until all victims are held in mid-transfer and signals their process groups; → when."""
    deadline = time.monotonic() + 30
    while not all(file.exists() for file in files.values()):
        if time.monotonic() > deadline:
            raise SystemExit("The victims did not come to the middle of the transfer within 30 s.")
        await asyncio.sleep(0.002)
    for engine_id, file in files.items():
        os.killpg(json.loads(file.read_text())["pgid"], victims[engine_id])
    struck = time.monotonic()
    for file in files.values():
        file.unlink()
    return struck


async def one_case(world: World, directory: Path, case: str, version: int, count: int) -> Strike:
    """An update with victims, the next one without them, and one with them back."""
    result = Strike(case)
    engines = await world.engines(count)
    victims = {engine.engine_id: sign for engine, sign in zip(engines, CASES[case], strict=False)}
    others = {engine.engine_id for engine in engines} - set(victims)
    files, struck = await hold(directory, victims), asyncio.Event()
    watch = Watch(world, set(victims), others, version)
    watching = asyncio.create_task(watch.run(struck))
    try:
        await world.updater.stage()
        pushing = asyncio.create_task(world.updater.push(version, engines))
        when = await strike(files, victims)
        struck.set()
        report: UpdateReport = await pushing
        result.published = time.monotonic() - when
        result.said = [f"{engine}: {why}" for engine, why in report.failed.items()]
        result.others_disturbed = len(others - set(report.committed))
        while watch.others_serve is None or watch.out_of_router is None:
            if time.monotonic() - when > 60:
                break
            await asyncio.sleep(POLL)
        left = [engine for engine in engines if engine.engine_id in others]
        began = time.monotonic()
        await world.updater.stage()
        again = await world.updater.push(version + 1, left)
        result.next_update = time.monotonic() - began
        result.others_disturbed += len(again.failed)
        await until_back(world, {e.engine_id: e.incarnation for e in engines if e.engine_id in victims}, version + 2)
        result.back = time.monotonic() - when
    finally:
        watching.cancel()
    result.wrongly_served = watch.wrongly_served
    result.others_serve = watch.others_serve or float("inf")
    result.out_of_router = watch.out_of_router or float("inf")
    return result


async def until_back(world: World, before: Mapping[str, str], version: int) -> None:
    """Brings everybody, the victims' successors too, to `version`."""
    deadline = time.monotonic() + BACK_SECONDS
    while time.monotonic() < deadline:
        engines = await world.engines(1)
        new = {engine.engine_id for engine in engines if before.get(engine.engine_id, "") != engine.incarnation}
        if new >= set(before):
            await world.updater.keep(engines)
            report = await world.updater.push(version, engines)
            if not report.failed:
                return
            print(f"  not yet: {report.failed}", flush=True)
        await asyncio.sleep(0.1)
    raise SystemExit(f"The victims did not come back within {BACK_SECONDS:.0f} s.")


async def measure(chosen: Namespace, model: Path) -> tuple[list[float], list[Strike]]:
    """→ seconds of undisturbed updates, strikes."""
    points = chosen.directory / "points"
    points.mkdir()
    os.environ[fault_points.VARIABLE] = str(points)
    engine = chosen.engine or ("sglang" if chosen.device == "cuda" else "simulated")
    bucket = int(chosen.bucket_mib * 2**20)
    wanted = Wanted(chosen.device, engine, chosen.engines, model, bucket, {})
    calm, strikes, version = [], [], 1
    async with weight_world.started(wanted, chosen.directory / "world") as world:
        for _ in range(4):
            engines = await world.engines(chosen.engines)
            began = time.monotonic()
            await world.updater.stage()
            report = await world.updater.push(version, engines)
            if report.failed or report.bucket_count < 3:
                raise SystemExit(f"An undisturbed update of {report.bucket_count} buckets failed: {report.failed}")
            calm.append(time.monotonic() - began)
            version += 1
        for case in chosen.cases:
            for _ in range(chosen.repetitions):
                strikes.append(await one_case(world, points, case, version, chosen.engines))
                version += 3
                print(strikes[-1], flush=True)
    return calm[1:], strikes


def figures_of(calm: list[float], strikes: list[Strike]) -> list[Figure]:
    """p50 and largest by case."""
    usual = statistics.median(calm)
    figures = [Figure("undisturbed update", usual, "s")]
    for case in dict.fromkeys(strike.case for strike in strikes):
        mine = [strike for strike in strikes if strike.case == case]
        rows = (
            ("the others serve the new version after", "others_serve", "<= 10"),
            ("the update is over after", "published", "<= 10"),
            ("the router stops using the victims after", "out_of_router", "<= 5"),
            ("next update, without the victims", "next_update", f"<= {10 * usual + 1:.3g}"),
            ("the victims' successors serve after", "back", ""),
        )
        figures.append(Figure(f"{case}: repetitions", len(mine)))
        for name, key, bar in rows:
            values = [getattr(strike, key) for strike in mine]
            figures.append(Figure(f"{case}: {name}, p50", statistics.median(values), "s"))
            figures.append(Figure(f"{case}: {name}, max", max(values), "s", bar))
        figures.append(Figure(f"{case}: others disturbed", sum(each.others_disturbed for each in mine), "", "== 0"))
        served = sum(each.wrongly_served for each in mine)
        figures.append(Figure(f"{case}: looks at which a victim served the new version", served, "", "== 0"))
    return figures


def main() -> int:
    """Command line entry."""
    made = parser(__doc__)
    weight_world.add_arguments(made)
    made.add_argument("--random-qwen3", help="size of the random model; 30m, or 1.5b on CUDA")
    made.add_argument("--engines", type=int, help="four, or two on CUDA")
    made.add_argument("--cases", nargs="+", choices=CASES, help="all that leave an engine")
    made.add_argument("--repetitions", type=int, default=3)
    made.add_argument("--bucket-mib", type=float, help="update_weight_buffer_size; 16, or 256 on CUDA")
    chosen = made.parse_args()
    limit(LIMIT_SECONDS)
    cuda = chosen.device == "cuda"
    chosen.engines = chosen.engines or (2 if cuda else 4)
    chosen.cases = chosen.cases or [case for case, signals in CASES.items() if len(signals) < chosen.engines]
    chosen.bucket_mib = chosen.bucket_mib or (256 if cuda else 16)
    chosen.directory = Path(tempfile.mkdtemp(prefix="tetrarch-weight-faults-"))
    try:
        model = chosen.model or weight_world.random_model(
            chosen.directory / "model", chosen.random_qwen3 or ("1.5b" if cuda else "30m"), chosen.tokenizer
        )
        calm, strikes = asyncio.run(measure(chosen, model.resolve()))
    except BaseException:
        print(f"Logs are under {chosen.directory}.", file=sys.stderr)
        shutil.rmtree(chosen.directory / "model", ignore_errors=True)
        raise
    shutil.rmtree(chosen.directory)
    context = {"device": chosen.device, "engines": chosen.engines, "bucket_mib": chosen.bucket_mib}
    return finish(
        "weight_faults",
        figures_of(calm, strikes),
        chosen.json,
        **context,
        calm=calm,
        strikes=[vars(s) for s in strikes],
    )


if __name__ == "__main__":
    raise SystemExit(main())
