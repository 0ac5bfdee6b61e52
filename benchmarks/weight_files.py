"""`python -m benchmarks.weight_files`: what weights cost as files, in full and as deltas between consecutive steps.

A rank of the product trains a model on batches from a real buffer, as `benchmarks.trainer_step` does (random answers,
half of them rewarded: GRPO's gradients, the optimizer's steps). After every step the weights are staged and written by
the code that rank 0 runs: in full, and as a delta upon the step before; a node's code reads and checks the one and
applies the other. A delta that the product would not write, as nearly everything changed, is measured all the same.

On a CPU the model trains in float32. Its weights rounded to bfloat16 are what a bf16 run sends for the same float32
main weights, so both dtypes come from one training. On CUDA the model trains in bfloat16.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.report import Figure, finish, limit, parser
from benchmarks.trainer_step import RUN, SIZES, Feeder, make_plan, run_spec, small_model
from services.common.process import free_port
from services.common.run_spec import RunSpec
from services.common.weight_files import write
from services.common.weight_files.copy import LocalCopy
from services.common.weight_files.delta import ENCODINGS
from services.common.weight_files.manifest import Manifest, Tensor
from services.common.weight_files.read import verify
from services.common.weight_files.write import Base, Bucket, Place
from services.console.supervisor import Supervisor
from services.console.tiers import Layout, Ports, embedded_tiers
from services.trainer.core import commands

LIMIT_SECONDS = 900


@dataclass
class Cost:
    """Of one version in one dtype. Bytes and seconds by what was done; `changed`: share of the elements."""

    total_bytes: int
    changed: float
    sizes: dict[str, int]
    seconds: dict[str, float]


class Rank:
    """Rank 0 in this process."""

    def __init__(self, spec: RunSpec, device: str) -> None:
        from services.trainer.ranks.worker import RankWorker

        self.worker = RankWorker(0, 1, "127.0.0.1", free_port())
        self.ask(commands.Setup(spec.model_dump_json(), device))

    def ask(self, command: commands.Command) -> Any:
        answer = self.worker.execute(command)
        if isinstance(answer, commands.Failure):
            raise SystemExit(f"{answer.error}\n{answer.traceback}")
        return answer.value

    def buckets(self, bucket_bytes: int) -> list[Bucket]:
        """The weights as they are sent, in host memory."""
        plan = self.ask(commands.StageWeights(bucket_bytes))
        self.ask(commands.ListWeights())  # waits until all is gathered
        staged = self.worker._need_staged().buckets
        return [
            Bucket(tuple(Tensor(s.name, s.dtype, s.shape, "", 0, 0) for s in specs), bucket.cpu().numpy().copy())
            for specs, bucket in zip(plan.buckets, staged, strict=True)
        ]


def rounded(buckets: Sequence[Bucket]) -> list[Bucket]:
    """float32 weights as bfloat16, to the nearest, ties to even."""
    import torch

    made = []
    for bucket in buckets:
        halves = torch.from_numpy(bucket.data).view(torch.float32).to(torch.bfloat16).view(torch.uint8).numpy()
        made.append(Bucket(tuple(replace(tensor, dtype="bfloat16") for tensor in bucket.tensors), halves))
    return made


def steps(spec: RunSpec, address: str, device: str, vocabulary: int) -> Iterator[list[Bucket]]:
    """The weights before the first step and after every one."""
    size = replace(SIZES[device], steps=spec.rollout.num_rollout, profile=False)
    feeder, rank = Feeder(address, spec, size, vocabulary), Rank(spec, device)
    yield rank.buckets(spec.trainer.update_weight_buffer_size)
    for step, samples in feeder.steps():
        plan, advantages = make_plan(samples, spec)
        rank.ask(commands.TrainStep(step, RUN, address, plan, advantages))
        yield rank.buckets(spec.trainer.update_weight_buffer_size)
    rank.ask(commands.Shutdown())


def measure(before: list[Bucket], after: list[Bucket], directory: Path) -> Cost:
    """Writes and reads one step."""
    seconds: dict[str, float] = {}
    sizes: dict[str, int] = {}

    def timed(name: str, call: Callable[[], Any]) -> Any:
        began = time.perf_counter()
        value = call()
        seconds[name] = time.perf_counter() - began
        return value

    base, first = Base(1, [bucket.data for bucket in before]), Place(directory, "first", 1, "")
    write.write_full(first, before)
    full: Manifest = timed("write in full", lambda: write.write_full(Place(directory, "full", 2, ""), after))
    sizes["full"] = full.file_bytes
    timed("check in full", lambda: verify(Place(directory, "full", 2, "").directory, full))
    for encoding in ENCODINGS:
        place = Place(directory, encoding, 2, "")
        write.write_full(replace(place, version=1), before)
        copy = LocalCopy(directory / f"copy-{encoding}")
        copy.bring(replace(place, version=1).directory)
        made: Manifest = timed(f"write {encoding}", lambda p=place, e=encoding: write.write_delta(p, after, base, e))
        sizes[encoding] = made.file_bytes
        held = timed(f"apply {encoding}", lambda c=copy, p=place: c.bring(p.directory))
        verify(held.directory, held.manifest)
    elements = sum(tensor.size_bytes // tensor.item_bytes for tensor in made.tensors)
    changed = sum(tensor.changed for tensor in made.tensors)
    return Cost(full.total_bytes, changed / elements, sizes, seconds)


def figures_of(dtype: str, costs: Sequence[Cost]) -> list[Figure]:
    """Medians over steps; the first step of Adam is the largest, and told apart."""
    usual = costs[1:] or costs

    def median(value: Callable[[Cost], float]) -> float:
        return statistics.median(map(value, usual))

    total = costs[0].total_bytes
    figures = [
        Figure(f"{dtype}: bytes of the weights", total / 1e6, "MB"),
        Figure(f"{dtype}: elements that change in the first step", 100 * costs[0].changed, "%"),
        Figure(f"{dtype}: elements that change in a step", 100 * median(lambda cost: cost.changed), "%"),
    ]
    for encoding in ENCODINGS:
        share = 100 * median(lambda cost, e=encoding: cost.sizes[e] / total)
        figures.append(Figure(f"{dtype}: delta, {encoding}, of the weights' bytes", share, "%"))
    for name in costs[0].seconds:
        taken = median(lambda cost, n=name: cost.seconds[n])
        figures.append(Figure(f"{dtype}: {name}", taken, "s"))
    return figures


def play(spec: RunSpec, address: str, device: str, directory: Path) -> list[Figure]:
    """All steps, in every dtype."""
    import json

    vocabulary = json.loads((Path(spec.rollout.hf_checkpoint) / "config.json").read_text())["vocab_size"]
    write._DENSE = write._WORTHWHILE = float("inf")  # also what the product would rather write in full
    costs: dict[str, list[Cost]] = {}
    before: dict[str, list[Bucket]] = {}
    for number, buckets in enumerate(steps(spec, address, device, vocabulary)):
        dtype = buckets[0].tensors[0].dtype
        ways = {dtype: buckets} | ({"bfloat16": rounded(buckets)} if dtype == "float32" else {})
        for name, now in ways.items():
            if number:
                with tempfile.TemporaryDirectory(dir=directory) as scratch:
                    costs.setdefault(name, []).append(measure(before[name], now, Path(scratch)))
                cost = costs[name][-1]
                print(f"step {number}, {name}: {100 * cost.changed:.2f}% changed, {cost.sizes}", flush=True)
            before[name] = now
    return [figure for name, found in costs.items() for figure in figures_of(name, found)]


async def run(spec: RunSpec, device: str, directory: Path) -> list[Figure]:
    """With a store and a buffer that live as long."""
    ports = Ports.free()
    layout = Layout(ports, directory / "store", directory / "logs", resume=False)
    tiers = Supervisor(embedded_tiers(layout, ("store", "buffer")), layout.log_dir, on_note=print)
    await tiers.start()
    try:
        return await asyncio.to_thread(play, spec, ports.addresses["buffer"], device, directory)
    finally:
        await tiers.stop()


def main() -> int:
    """Command line entry."""
    arguments = parser(__doc__)
    arguments.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    arguments.add_argument("--model", type=Path, help="Hugging Face checkpoint; without it a small random one")
    arguments.add_argument("--steps", type=int, default=4, help="steps of training")
    arguments.add_argument("--tokens", type=int, help="tokens of a step")
    arguments.add_argument("--lr", type=float, default=1e-6, help="learning rate")
    chosen = arguments.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    limit(LIMIT_SECONDS)
    usual = SIZES[chosen.device]
    size = replace(usual, tokens=chosen.tokens or usual.tokens, steps=chosen.steps, profile=False)
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        model = chosen.model.absolute() if chosen.model else small_model(directory / "model")
        spec = run_spec(model, directory, chosen.device, size)
        spec = spec.model_copy(update={"trainer": spec.trainer.model_copy(update={"lr": chosen.lr})})
        figures = asyncio.run(run(spec, chosen.device, directory))
    context = {"device": chosen.device, "model": model.name, "lr": chosen.lr, "steps": chosen.steps}
    return finish("weight_files", figures, chosen.json, **context)


if __name__ == "__main__":
    raise SystemExit(main())
