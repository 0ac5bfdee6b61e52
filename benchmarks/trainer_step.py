"""`python -m benchmarks.trainer_step`: the trainer's step against a bare Megatron-Core loop doing the same work.

Ours is what a rank does for TrainStep: fetch the samples of a real buffer, pack, train, gather metrics. The bare loop
(`benchmarks.bare_megatron`) has the same weights and the same packs, made beforehand. Both run in one process, turn
about; that their first losses and gradient norms agree shows that the work is the same.

CPU: a rehearsal with a small random model, without a bar for the ratio, which would measure the machine's other work.
CUDA: `--model DIR` in bfloat16. `--profile` plays one more step, whose longest kernels it prints for both.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from google.protobuf.duration_pb2 import Duration
from tetrarch.buffer.v1 import buffer_service_pb2 as pb
from tetrarch.buffer.v1 import buffer_service_pb2_grpc

from benchmarks.report import Figure, finish, limit, parser
from services.common.channel import open_sync_channel
from services.common.convert import group_to_proto, prompt_from_proto
from services.common.process import free_port
from services.common.records import Group, Prompt, Sample, SampleStatus, VersionSpan
from services.common.run_spec import RunSpec
from services.console.supervisor import Supervisor
from services.console.tiers import Layout, Ports, embedded_tiers
from services.trainer.core import commands
from services.trainer.core.algorithms.estimators import ScoredSample, group_advantages
from services.trainer.core.schedule import SampleSize, ScheduleSettings, StepPlan, plan_step

RUN, SAMPLES, LIMIT_SECONDS = "trainer-step", 8, 900
PEAK_FLOPS = 989e12
"""Dense bfloat16 of an H200 by its data sheet."""
PARTS = ("fetch", "pack", "forward_backward", "optimizer", "metrics")


@dataclass(frozen=True)
class Size:
    """Of the work: tokens of a step, tokens of a micro-batch, mean length of a response, steps, of them unmeasured;
    whether one more step is profiled."""

    tokens: int
    pack: int
    response: int
    steps: int
    warm_up: int
    profile: bool = False

    @property
    def batches(self) -> int:
        """Steps with the profiled one."""
        return self.steps + self.profile


SIZES = {"cpu": Size(4096, 2048, 40, 8, 2), "cuda": Size(262144, 32768, 400, 13, 3)}


def small_model(directory: Path) -> Path:
    """A random Qwen3 of 3 million parameters, with the demo's tokenizer."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from examples.first_run.model import make_tokenizer

    torch.manual_seed(1)
    config = Qwen3Config(
        vocab_size=2048,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=32,
        tie_word_embeddings=True,
    )
    Qwen3ForCausalLM(config).float().save_pretrained(directory)
    make_tokenizer().save_pretrained(directory)
    return directory


def run_spec(model: Path, directory: Path, device: str, size: Size) -> RunSpec:
    """The run's settings; its batch is about `size.tokens` long."""
    rng = np.random.default_rng(0)
    groups = max(round(size.tokens / (SAMPLES * (size.response + 24))), 1)
    prompts = directory / "prompts.jsonl"
    lines = (json.dumps({"input": "+".join(map(str, rng.integers(0, 999, rng.integers(3, 9))))}) for _ in range(1000))
    prompts.write_text("\n".join(lines) + "\n")
    return RunSpec.model_validate(
        {
            "run_id": RUN,
            "run_dir": str(directory),
            "data": {"prompt_data": str(prompts)},
            "rollout": {
                "hf_checkpoint": str(model),
                "num_rollout": size.batches,
                "rollout_batch_size": groups,
                "n_samples_per_prompt": SAMPLES,
            },
            "trainer": {"max_tokens_per_gpu": size.pack, "bf16": device == "cuda", "max_staleness": size.batches},
        }
    )


class Feeder:
    """Plays nodes and controller towards the buffer: random responses in, one batch a step out."""

    def __init__(self, address: str, spec: RunSpec, size: Size, vocabulary: int) -> None:
        self._stub = buffer_service_pb2_grpc.BufferServiceStub(open_sync_channel(address, "buffer"))
        self._spec, self._size, self._vocabulary = spec, size, vocabulary
        self._rng = np.random.default_rng(1)
        self._call("CreateRun", spec_json=spec.model_dump_json())
        self._epoch = self._call("BeginSession", caller="benchmark").trainer_epoch
        version = self._call("ReserveVersion", trainer_epoch=self._epoch).version
        self._call("PublishVersion", trainer_epoch=self._epoch, version=version, step_count=0)

    def _call(self, method: str, **fields):
        return getattr(self._stub, method)(getattr(pb, f"{method}Request")(run_id=RUN, **fields), timeout=60)

    def steps(self) -> Iterator[tuple[int, list[Sample]]]:
        """Step after step with the samples that the buffer reserves for it."""
        for step in range(self._size.batches):
            samples = {sample.sample_id: sample for sample in self._produce()}
            batch = self._call(
                "TakeBatch",
                trainer_epoch=self._epoch,
                step=step,
                group_count=self._spec.rollout.rollout_batch_size,
                max_wait=Duration(seconds=10),
            )
            yield step, [samples[header.sample_id] for header in batch.samples]
            self._call("CommitStep", trainer_epoch=self._epoch, step=step)

    def _produce(self) -> Iterator[Sample]:
        left = self._spec.rollout.rollout_batch_size
        while left:
            answer = self._call(
                "LeasePrompts",
                request_id=str(uuid.uuid4()),
                caller="benchmark",
                max_prompt_count=min(left, 16),
                max_wait=Duration(seconds=10),
                ttl=Duration(seconds=600),
            )
            left -= len(answer.leases)
            for lease in answer.leases:
                group = self._group(prompt_from_proto(lease.prompt), answer.policy_version)
                leased = pb.LeasedGroup(lease_id=lease.lease_id, group=group_to_proto(group))
                self._call("PutGroups", groups=[leased])
                yield from group.samples

    def _group(self, prompt: Prompt, version: int) -> Group:
        samples = []
        for index in range(SAMPLES):
            length = int(self._rng.integers(self._size.response // 4, self._size.response * 7 // 4))
            response = self._rng.integers(4, self._vocabulary, length).astype(np.int32)
            samples.append(
                Sample(
                    sample_id=f"{prompt.group_id}-{index}",
                    group_id=prompt.group_id,
                    index=index,
                    status=SampleStatus.COMPLETED,
                    prompt_length=len(prompt.tokens),
                    tokens=np.concatenate([prompt.tokens, response]),
                    loss_mask=np.ones(length, np.uint8),
                    log_probs=np.full(length, -np.log(self._vocabulary), np.float32),
                    reward=float(index % 2),
                    versions=(VersionSpan(version, 0, length),),
                )
            )
        return Group(prompt.group_id, prompt.ordinal, tuple(samples), generate_seconds=0.0)


def make_plan(samples: Sequence[Sample], spec: RunSpec) -> tuple[StepPlan, Mapping[str, float]]:
    """Plan and advantages, as the controller makes them."""
    sizes = [SampleSize(s.sample_id, len(s.tokens), s.response_length) for s in samples]
    plan = plan_step(sizes, ScheduleSettings(max_tokens=spec.trainer.max_tokens_per_gpu))
    return plan, group_advantages([ScoredSample(s.sample_id, s.group_id, s.reward) for s in samples])


@dataclass
class Turn:
    """One step of both: seconds, seconds by part, losses and gradient norms; its work."""

    ours: float
    bare: float
    our_parts: Mapping[str, float]
    bare_parts: Mapping[str, float]
    losses: tuple[float, float]
    norms: tuple[float, float]
    lengths: list[tuple[int, int]]
    micro_batches: int


class Match:
    """Both trainers in this process, on one device."""

    def __init__(self, spec: RunSpec, device: str, address: str) -> None:
        from services.trainer.ranks.worker import RankWorker

        self._spec, self._address = spec, address
        self._worker = RankWorker(0, 1, "127.0.0.1", free_port())
        self._ask(commands.Setup(spec.model_dump_json(), device))
        import torch

        from benchmarks.bare_megatron import BareTrainer

        self._device = torch.device(device, 0) if device == "cuda" else torch.device(device)
        self._wait = torch.cuda.synchronize  # megatron_setup makes it do nothing on a CPU
        self._bare = BareTrainer(
            Path(spec.rollout.hf_checkpoint), self._device, bf16=spec.trainer.bf16, lr=spec.trainer.lr
        )

    def _ask(self, command: commands.Command):
        answer = self._worker.execute(command)
        if isinstance(answer, commands.Failure):
            raise SystemExit(f"{answer.error}\n{answer.traceback}")
        return answer.value

    def close(self) -> None:
        """Leaves the process group."""
        self._ask(commands.Shutdown())

    def profile(self, step: int, samples: list[Sample]) -> None:
        """Prints the longest kernels of one step of both."""
        from benchmarks.device_profile import print_profile

        for name, player in zip(("Tetrarch", "bare Megatron-Core"), self._players(step, samples)[0], strict=True):
            print_profile(name, player, self._wait)

    def _players(self, step: int, samples: list[Sample]) -> tuple[tuple[Callable, Callable], int]:
        """Our step and the bare one, ready to run; the number of micro-batches."""
        from benchmarks.bare_megatron import micro_batch

        plan, advantages = make_plan(samples, self._spec)
        by_id = {sample.sample_id: sample for sample in samples}
        batches = []
        for ids in plan.optimizer_steps[0].micro_batches[0]:
            own = [by_id[i] for i in ids]
            parts = [s.tokens for s in own], [s.prompt_length for s in own], [advantages[s.sample_id] for s in own]
            batches.append(micro_batch(*parts, self._device))
        command = commands.TrainStep(step, RUN, self._address, plan, advantages)
        return (lambda: self._ask(command), lambda: self._bare.step(batches)), len(batches)

    def play(self, step: int, samples: list[Sample]) -> Turn:
        """One step of both; who begins alternates."""
        players, micro_batches = self._players(step, samples)
        order = (0, 1) if step % 2 else (1, 0)
        seconds, results = {}, {}
        for player in order:
            self._wait()
            began = time.perf_counter()
            results[player] = players[player]()
            self._wait()
            seconds[player] = time.perf_counter() - began
        result, (loss, norm, parts) = results[0], results[1]
        return Turn(
            ours=seconds[0],
            bare=seconds[1],
            our_parts=result.seconds,
            bare_parts=parts,
            losses=(result.metrics["loss"], loss),
            norms=(result.metrics["grad_norm"], norm),
            lengths=[(len(s.tokens), s.response_length) for s in samples],
            micro_batches=micro_batches,
        )


def model_flops(spec: RunSpec, lengths: Sequence[tuple[int, int]]) -> float:
    """Floating-point operations of a step by the model's shape: 6 per weight and token (the output layer: per trained
    token), and causal attention's two products, whose masked half does not count."""
    from services.trainer.ranks.model.hf_config import read_hf_config

    hf = read_hf_config(spec.rollout.hf_checkpoint)
    width, narrow = hf.heads * hf.head_dim, hf.kv_heads * hf.head_dim
    layer = hf.hidden_size * (2 * width + 2 * narrow + 3 * hf.intermediate_size)
    head = hf.hidden_size * hf.vocab_size
    return sum(
        6 * (hf.layers * layer * tokens + head * trained) + 6 * hf.layers * width * tokens**2
        for tokens, trained in lengths
    )


def figures_of(spec: RunSpec, turns: Sequence[Turn], first: Turn, device: str) -> list[Figure]:
    """Medians over turns."""

    def median(value) -> float:
        return statistics.median(value(turn) for turn in turns)

    tokens = median(lambda t: sum(length for length, _ in t.lengths))
    own, whole = median(lambda t: t.ours - t.our_parts["fetch"]), median(lambda t: t.ours)
    bare, flops = median(lambda t: t.bare), median(lambda t: model_flops(spec, t.lengths))
    figures = [
        Figure("tokens of a step", tokens),
        Figure("micro-batches of a step", median(lambda t: t.micro_batches)),
        Figure("gradient norm of the first step, relative difference", _apart(first.norms), "", "<= 0.02"),
        Figure("loss of the first step, difference", abs(first.losses[0] - first.losses[1]), "", "<= 0.01"),
        Figure("Tetrarch, without fetching", own, "s"),
        Figure("Tetrarch, with fetching", whole, "s"),
        Figure("bare Megatron-Core", bare, "s"),
        Figure("Tetrarch, without fetching", tokens / own, "tokens/s"),
        Figure("Tetrarch, with fetching", tokens / whole, "tokens/s"),
        Figure("bare Megatron-Core", tokens / bare, "tokens/s"),
        Figure("Tetrarch : bare, without fetching", median(_ratio), "", ">= 0.97" if device == "cuda" else ""),
        Figure("Tetrarch : bare, with fetching", median(lambda t: t.bare / t.ours)),
        Figure("Tetrarch, model FLOP/s", flops / own / 1e12, "TFLOP/s"),
    ]
    if device == "cuda":
        figures.append(Figure(f"  share of {PEAK_FLOPS / 1e12:.0f} TFLOP/s", flops / own / PEAK_FLOPS))
    for name in PARTS:
        mine = median(lambda t, name=name: t.our_parts.get(name, 0.0))
        figures.append(Figure(f"  part {name}: Tetrarch", mine, "s"))
        if name in first.bare_parts:
            figures.append(Figure(f"  part {name}: bare", median(lambda t, name=name: t.bare_parts[name]), "s"))
    return figures


def _ratio(turn: Turn) -> float:
    return turn.bare / (turn.ours - turn.our_parts["fetch"])


def _apart(pair: tuple[float, float]) -> float:
    return abs(pair[0] - pair[1]) / abs(pair[1])


async def play_all(spec: RunSpec, directory: Path, device: str, size: Size) -> list[Turn]:
    """Every turn, with a store and a buffer that live as long."""
    ports = Ports.free()
    layout = Layout(ports, directory / "store", directory / "logs", resume=False)
    tiers = Supervisor(embedded_tiers(layout, ("store", "buffer")), layout.log_dir, on_note=print)
    await tiers.start()
    try:
        return await asyncio.to_thread(_play, spec, ports.addresses["buffer"], device, size)
    finally:
        await tiers.stop()


def _play(spec: RunSpec, address: str, device: str, size: Size) -> list[Turn]:
    vocabulary = json.loads((Path(spec.rollout.hf_checkpoint) / "config.json").read_text())["vocab_size"]
    feeder = Feeder(address, spec, size, vocabulary)
    match = Match(spec, device, address)
    turns = []
    for step, samples in feeder.steps():
        if step == size.steps:
            match.profile(step, samples)
            break
        turns.append(match.play(step, samples))
        print(f"step {step}: {turns[-1].ours:.3f} s, bare {turns[-1].bare:.3f} s", flush=True)
    match.close()
    return turns


def main() -> int:
    """Command line entry."""
    arguments = parser(__doc__)
    arguments.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="cpu is a rehearsal")
    arguments.add_argument("--model", type=Path, help="Hugging Face checkpoint; without it a small random one")
    arguments.add_argument("--tokens", type=int, help="tokens of a step")
    arguments.add_argument("--max-tokens-per-gpu", type=int, help="tokens of a micro-batch")
    arguments.add_argument("--steps", type=int, help="steps, at most half of them not measured; at least 2")
    arguments.add_argument("--profile", action="store_true", help="print the longest kernels of one more step")
    chosen = arguments.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    limit(LIMIT_SECONDS)
    usual = SIZES[chosen.device]
    steps = max(chosen.steps or usual.steps, 2)
    size = Size(
        tokens=chosen.tokens or usual.tokens,
        pack=chosen.max_tokens_per_gpu or usual.pack,
        response=usual.response,
        steps=steps,
        warm_up=min(usual.warm_up, steps // 2),
        profile=chosen.profile,
    )
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        model = chosen.model.absolute() if chosen.model else small_model(directory / "model")
        spec = run_spec(model, directory, chosen.device, size)
        turns = asyncio.run(play_all(spec, directory, chosen.device, size))
        figures = figures_of(spec, turns[size.warm_up :], turns[0], chosen.device)
    context = {"device": chosen.device, "model": model.name, "tokens_per_micro_batch": size.pack}
    return finish("trainer_step", figures, chosen.json, **context)


if __name__ == "__main__":
    raise SystemExit(main())
