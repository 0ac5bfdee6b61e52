"""What the oracle tests run inside rank processes: `python -m tests.oracle.rank_program PROGRAM RANK WORLD PORT ROOT`.

Importing megatron costs seconds and changes the process, so tests start one process world per size, run everything in
it, and compare the numbers it leaves in ROOT/<program>.pt (rank 0).
"""

from __future__ import annotations

import hashlib
import sys
import time
from pathlib import Path

import numpy as np
import torch

from services.common.records import Sample, SampleStatus
from services.common.run_spec import RunSpec
from services.trainer.core.algorithms.estimators import ScoredSample, advantages_of
from services.trainer.core.batches import schedule_settings
from services.trainer.core.schedule import SampleSize, plan_step
from services.trainer.ranks import runtime
from tests.oracle.models import NAMES, VOCAB_SIZE
from tests.oracle.stand_in_engine import stand_in_engine

LENGTHS = (24, 7, 41, 16, 7, 1, 9)
GROUPS, GROUP_SIZE = 4, 3


def make_spec(checkpoint: Path, world_size: int, tensor_parallel_size: int, **trainer) -> RunSpec:
    """A run of three steps of 12 samples."""
    options = {"lr": 1e-2, "lr_warmup_iters": 2, "lr_decay_style": "cosine", "clip_grad": 0.5, "weight_decay": 0.1}
    return RunSpec.model_validate(
        {
            "data": {"label_key": "label"},
            "rollout": {
                "hf_checkpoint": str(checkpoint),
                "num_rollout": 6,
                "rollout_batch_size": GROUPS,
                "n_samples_per_prompt": GROUP_SIZE,
                "rollout_temperature": 0.8,
            },
            "trainer": options
            | {"actor_num_gpus_per_node": world_size, "tensor_model_parallel_size": tensor_parallel_size}
            | {"max_tokens_per_gpu": 96}
            | trainer,
        }
    )


def random_samples(seed: int) -> dict[str, Sample]:
    """Ragged samples with holes in the mask; one is unscored."""
    rng = np.random.default_rng(seed)
    samples = {}
    for index in range(GROUPS * GROUP_SIZE):
        prompt, response = int(rng.integers(2, 9)), int(rng.integers(1, 40))
        mask = (rng.random(response) < 0.8).astype(np.uint8)
        mask[-1] = 1
        sample = Sample(
            sample_id=f"s{index}",
            group_id=f"g{index % GROUPS}",
            index=index // GROUPS,
            status=SampleStatus.COMPLETED,
            prompt_length=prompt,
            tokens=rng.integers(2, VOCAB_SIZE, prompt + response).astype(np.int32),
            loss_mask=mask,
            log_probs=(rng.normal(-4, 1, response) * mask).astype(np.float32),
            reward=None if index == 5 else float(rng.integers(0, 2)),
        )
        samples[sample.sample_id] = sample
    return samples


class Trainee:
    """A policy with its trainer, fed with random batches."""

    def __init__(self, spec: RunSpec, device: str = "cpu") -> None:
        from megatron.core import parallel_state

        from services.trainer.ranks.policy import add_companions, build_policy
        from services.trainer.ranks.train import StepTrainer

        self.device = torch.device(device)
        self.spec = spec
        self.policy = build_policy(spec, self.device)
        add_companions(spec, self.policy, self.device)
        self.trainer = StepTrainer(spec, self.policy, self.device)
        self.ranks = parallel_state.get_data_parallel_world_size()
        self.done = 0

    def step(self, batch: int | dict[str, Sample]) -> dict[str, float]:
        """One step on a batch, or on the batch of a seed; its metrics."""
        from services.trainer.ranks.timing import PartTimer

        samples = random_samples(batch) if isinstance(batch, int) else batch
        trainer = self.spec.trainer
        scored = [
            ScoredSample(s.sample_id, s.group_id, s.reward, greedy=trainer.needs_greedy_sample and s.index == 0)
            for s in samples.values()
        ]
        advantages = advantages_of(scored, trainer)
        trained = samples if trainer.loss_type == "sft_loss" else advantages
        sizes = [
            SampleSize(name, len(sample.tokens), int(sample.loss_mask.sum()) if name in trained else 0)
            for name, sample in samples.items()
        ]
        plan = plan_step(sizes, schedule_settings(self.spec, self.ranks))
        values = {size.sample_id: np.zeros(size.trained_tokens, np.float32) for size in sizes}
        work = self.trainer.prepare(samples, plan, advantages, values, timer := PartTimer())
        metrics = self.trainer.update(work, timer)
        self.done += 1
        self.policy.beside.end_step(self.policy.model, self.done)
        return metrics

    def weights(self) -> dict[str, torch.Tensor]:
        """Full tensors by Hugging Face name (tensor-parallel rank 0)."""
        from services.trainer.ranks.model.hf_weights import gather_weights

        return {n: t.clone() for n, t in gather_weights(self.policy.model, self.policy.hf) if t is not None}


TRAINING = {
    "kl": {"use_kl_loss": True, "kl_loss_coef": 0.1, "entropy_coef": 0.05, "eps_clip_high": 0.28},
    "per_token": {"calculate_per_token_loss": True, "num_steps_per_rollout": 2},
    "sft": {"loss_type": "sft_loss"},
}
"""Settings trained under every layout."""


def _spec_of(name: str, root: Path, world: int, tensor_parallel_size: int) -> RunSpec:
    return make_spec(root / "qwen3", world, tensor_parallel_size, **TRAINING[name])


def train_all(root: Path, world: int, tensor_parallel_size: int) -> dict:
    """Three steps of every training setting; metrics by setting, weights of the first."""
    out = {}
    for name in TRAINING:
        trainee = Trainee(_spec_of(name, root, world, tensor_parallel_size))
        out[name] = [trainee.step(seed) for seed in range(3)]
        out[f"{name}_weights"] = trainee.weights()
    return out


def packed_logits(root: Path, name: str) -> torch.Tensor:
    """[tokens, vocabulary] of the packed ragged batch (rank 0's copy of the whole vocabulary)."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

    from services.trainer.ranks.model.packing import PackLayout

    trainee = Trainee(make_spec(root / name, torch.distributed.get_world_size(), _tensor_parallel_size()))
    lengths = list(LENGTHS)
    if sum(lengths) % parallel_state.get_tensor_model_parallel_world_size():
        lengths.append(1)
    layout = PackLayout(lengths, trainee.device)
    tokens = torch.nn.functional.pad(batch_tokens(), (0, sum(lengths) - sum(LENGTHS)))
    with torch.no_grad():
        local = trainee.policy.model(tokens[None], layout.positions[None], None, packed_seq_params=layout)
        full = gather_from_tensor_model_parallel_region(local)
    return full[0, : sum(LENGTHS), :VOCAB_SIZE]


def _tensor_parallel_size() -> int:
    from megatron.core import parallel_state

    return parallel_state.get_tensor_model_parallel_world_size()


def batch_tokens() -> torch.Tensor:
    """int64 tokens of the packed batch."""
    return torch.randint(2, VOCAB_SIZE, (sum(LENGTHS),), generator=torch.Generator().manual_seed(3))


def hf_logits_and_gradient(root: Path, name: str) -> tuple[torch.Tensor, dict[str, float]]:
    """transformers' logits of every segment, and loss and gradient norm of the SFT objective on batch 0."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(root / name, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        logits = torch.cat([model(segment[None]).logits[0] for segment in batch_tokens().split(LENGTHS)])
    loss = torch.zeros(())
    for sample in random_samples(0).values():
        tokens = torch.from_numpy(sample.tokens.astype(np.int64))
        mask = torch.from_numpy(sample.loss_mask.astype(np.float32))
        scores = model(tokens[None]).logits[0, sample.prompt_length - 1 : -1].log_softmax(-1)
        chosen = scores.gather(-1, tokens[sample.prompt_length :, None])[:, 0]
        loss = loss - (chosen * mask).sum() / mask.sum() / (GROUPS * GROUP_SIZE)
    loss.backward()
    norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
    return logits, {"loss": loss.item(), "grad_norm": norm.item()}


def softmax_differences() -> dict[str, float]:
    """Largest differences of log-probs, entropies and their gradients from a plain softmax in float64."""
    from megatron.core import parallel_state

    from services.trainer.ranks import log_probs, softmax_torch

    softmax_torch._CHUNK_ELEMENTS = 1000
    ranks, rank = _tensor_parallel_size(), parallel_state.get_tensor_model_parallel_rank()
    shard = -(-VOCAB_SIZE // ranks)
    generator = torch.Generator().manual_seed(5)
    full = torch.randn(40, shard * ranks, generator=generator) * 3
    targets = torch.randint(0, VOCAB_SIZE, (40,), generator=generator)
    weights = torch.rand(2, 40, generator=generator)
    plain = full[:, :VOCAB_SIZE].double().requires_grad_()
    scores = (plain / 0.7).log_softmax(-1)
    expected = scores.gather(-1, targets[:, None])[:, 0], -(scores.exp() * scores).sum(-1)
    (expected[0] @ weights[0].double() + expected[1] @ weights[1].double()).backward()
    own = full.chunk(ranks, -1)[rank].clone().requires_grad_()
    before = own.detach().clone()
    got = log_probs.log_probs_and_entropy(own, targets, vocab_size=VOCAB_SIZE, temperature=0.7)
    (got[0] @ weights[0] + got[1] @ weights[1]).backward()
    gradient = torch.nn.functional.pad(plain.grad, (0, shard * ranks - VOCAB_SIZE)).chunk(ranks, -1)[rank]
    return {
        "log_probs": (got[0] - expected[0]).abs().max().item(),
        "entropy": (got[1] - expected[1]).abs().max().item(),
        "gradient": (own.grad - gradient).abs().max().item(),
        "logits_changed": (own.detach() - before).abs().max().item(),
    }


def weight_groups(root: Path) -> dict:
    """Rank 0 sends the staged weights over groups in which rank 1 stands for engines; returns what each saw."""
    from services.common.process import free_port
    from services.trainer.core.buckets import plan_buckets
    from services.trainer.core.commands import ChecksumRule, GroupSpec
    from services.trainer.ranks.groups import WeightGroups
    from services.trainer.ranks.model.hf_weights import list_weights
    from services.trainer.ranks.weights import Staging

    policy = Trainee(make_spec(root / "qwen3", 2, 1)).policy
    staged = (staging := Staging(policy.model, policy.hf, 20_000, torch.device("cpu"))).staged
    names = ["good", "broken", "absent"]
    box = [{name: free_port() for name in names}]
    torch.distributed.broadcast_object_list(box, src=0)
    if torch.distributed.get_rank() == 1:
        plan = plan_buckets(list_weights(policy.model, policy.hf), 20_000)
        sizes = [sum(spec.size_bytes for spec in bucket) for bucket in plan.buckets]
        box = [stand_in_engine(box[0], sizes)]
        torch.distributed.broadcast_object_list(box, src=1)
        return {}
    groups = WeightGroups(torch.device("cpu"))
    out: dict = {"plan": staged.plan}
    sources = tuple(f"model.layers.0.self_attn.{x}_proj.weight" for x in "qkv")
    out["rules"] = {"fused": ChecksumRule(sources), "padded": ChecksumRule(("lm_head.weight",), padding_bytes=96)}
    out["checksums"] = staged.checksums(out["rules"], "sha256-64")
    specs = tuple(GroupSpec(name, "gloo", "127.0.0.1", box[0][name], 2) for name in names)
    start = time.perf_counter()
    groups.join(specs, timeout=8)
    groups.send(staged, names, timeout=8)
    staging.finish()
    out["staged"] = [hashlib.sha256(bucket.numpy()).hexdigest() for bucket in staged.buckets]
    while groups.at_work:
        time.sleep(0.01)
    out["errors"], out["seconds"] = groups.errors(names), time.perf_counter() - start
    groups.leave_all()
    torch.distributed.broadcast_object_list(box, src=1)
    return out | {"received": box[0]}


def percentiles() -> tuple[float, float, float]:
    """99th percentile of 0..999 dealt unevenly over the data-parallel ranks, median of the same, and of nothing."""
    from megatron.core import parallel_state

    from services.trainer.ranks.statistics import percentile

    group = parallel_state.get_data_parallel_group()
    values = torch.randperm(1000, generator=torch.Generator().manual_seed(7)).float()
    own = values if group.size() == 1 else values.split([300, 700])[group.rank()]
    return percentile(own, 0.99, group), percentile(own, 0.5, group), percentile(own[:0], 0.99, group)


def half_precision(root: Path) -> dict:
    """Training in bfloat16, interrupted and not; the optimizer's parameters beside the model's."""
    from services.trainer.ranks.checkpoint import load_checkpoint, save_checkpoint

    spec = make_spec(root / "qwen3", 1, 1, bf16=True, use_kl_loss=True, kl_loss_coef=0.1)
    trainee, resumed = Trainee(spec), Trainee(spec)
    first = [trainee.step(seed) for seed in range(2)]
    save_checkpoint(trainee.policy, root / "half", 2)
    resumed.step(7)  # elsewhere, so that the checkpoint has something to restore
    load_checkpoint(resumed.policy, root / "half")
    parameters = [p for g in trainee.policy.optimizer.param_groups for p in g["params"]]
    weights = [p for g in trainee.policy.optimizer.float16_groups for p in g]
    return {
        "first": first,
        "uninterrupted": [trainee.step(seed) for seed in range(2, 4)],
        "resumed": [resumed.step(seed) for seed in range(2, 4)],
        "weights": (trainee.weights(), resumed.weights()),
        "types": {(p.dtype, w.dtype) for p, w in zip(parameters, weights, strict=True)},
        "rounded": all(torch.equal(p.bfloat16(), w) for p, w in zip(parameters, weights, strict=True)),
        "fine": any(not torch.equal(p, w.float()) for p, w in zip(parameters, weights, strict=True)),
    }


def single(root: Path) -> dict:
    """World of one: parity with transformers, export, training, resume."""
    from services.trainer.ranks.checkpoint import load_checkpoint, save_checkpoint
    from services.trainer.ranks.export import export_hf

    out: dict = {"logits": {}, "hf": {}, "ours": {}}
    for name in NAMES:
        out["logits"][name] = packed_logits(root, name)
        out["hf"][name] = hf_logits_and_gradient(root, name)
        trainee = Trainee(make_spec(root / name, 1, 1, loss_type="sft_loss"))
        export_hf(trainee.policy.model, trainee.policy.hf, root / name, root / f"export_{name}")
        out["ours"][name] = trainee.step(0)
    out["training"] = train_all(root, 1, 1)
    out["softmax"] = softmax_differences()

    trainee = Trainee(_spec_of("kl", root, 1, 1))
    empty = save_checkpoint(trainee.policy, root / "checkpoints", 0)
    first = [trainee.step(seed) for seed in range(2)]
    start = time.perf_counter()
    save_checkpoint(trainee.policy, root / "checkpoints", 2)
    out["save_seconds"] = time.perf_counter() - start
    uninterrupted = [trainee.step(seed) for seed in range(2, 4)]
    out["decays"] = {
        (parameter.dim() == 1, group["weight_decay"])
        for group in trainee.policy.optimizer.param_groups
        for parameter in group["params"]
    }
    resumed = Trainee(_spec_of("kl", root, 1, 1))
    counters = load_checkpoint(resumed.policy, root / "checkpoints")
    out["resume"] = {
        "counters": (counters.step_count, counters.optimizer_steps),
        "uninterrupted": uninterrupted,
        "resumed": [resumed.step(seed) for seed in range(2, 4)],
        "weights": (trainee.weights(), resumed.weights()),
    }
    out["half"] = half_precision(root)
    out["percentiles"] = percentiles()
    other = Trainee(make_spec(root / "qwen3", 1, 1, weight_decay=0.5, adam_beta2=0.99, lr_warmup_iters=4))
    load_checkpoint(other.policy, root / "checkpoints", new_run=True)
    groups = other.policy.optimizer.param_groups
    out["new_run"] = (other.policy.next_learning_rate(), [(group["weight_decay"], group["betas"]) for group in groups])
    load_checkpoint(resumed.policy, empty)
    out["from_empty"] = (first, [resumed.step(seed) for seed in range(2)])
    return out


def pair(root: Path) -> dict:
    """World of two: data parallel, then tensor parallel, then a checkpoint of one rank loaded by two."""
    from megatron.core import parallel_state, tensor_parallel

    from services.trainer.ranks.checkpoint import load_checkpoint
    from services.trainer.ranks.export import export_hf

    out = {"data_parallel": train_all(root, 2, 1), "groups": weight_groups(root)}
    out["percentiles"] = percentiles()
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(2, create_gloo_process_groups=False)
    tensor_parallel.model_parallel_cuda_manual_seed(1, inference_rng_tracker=True, force_reset_rng=True)
    out["tensor_parallel"] = train_all(root, 2, 2)
    out["softmax"] = softmax_differences()
    out["logits"] = {name: packed_logits(root, name) for name in NAMES}
    for name in NAMES:
        policy = Trainee(make_spec(root / name, 2, 2)).policy
        export_hf(policy.model, policy.hf, root / name, root / f"export2_{name}")
    trainee = Trainee(_spec_of("kl", root, 2, 2))
    load_checkpoint(trainee.policy, root / "checkpoints" / "step_000002")
    out["resharded"] = [trainee.step(seed) for seed in range(2, 4)]
    return out


def main() -> None:
    """Runs one program as one rank."""
    program, rank, world, port, root = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), sys.argv[5]
    runtime.start(runtime.Layout(rank, world, port, 1), "cpu", seed=1)
    result = {"single": single, "pair": pair}[program](Path(root))
    if rank == 0:
        torch.save(result, Path(root) / f"{program}.pt")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
