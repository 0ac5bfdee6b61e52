"""Rank processes of `benchmarks.invariance`: `python -m benchmarks.invariance_ranks ROOT RANK WORLD PORT`.

One batch under every algorithm and layout of a world: the trainer plans, packs and trains it as in a run, but instead
of an update the gradients are kept, put together by Hugging Face name. Rank 0 leaves them in ROOT/world-<n>.pt.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from services.common.records import Sample, SampleStatus
from services.common.run_spec import RunSpec
from services.trainer.core.batches import schedule_settings, step_inputs
from services.trainer.core.records import Batch, SampleHeader
from services.trainer.ranks import runtime

VOCABULARY = 131  # not divisible by two: with tensor parallelism the embedding is padded
GROUP_SIZES = (4, 4, 1, 3, 4)
LONGEST = 60
CAPTURE_SEED, LOG_PROB_NOISE = 7, 0.15

POLICY = {"use_rollout_logprobs": True, "eps_clip": 0.1}
UNCORRECTED = "uncorrected"
ALGORITHMS: dict[str, dict[str, Any]] = {
    "grpo": POLICY,
    "grpo, KL and entropy": POLICY
    | {"use_kl_loss": True, "kl_loss_coef": 0.1, "entropy_coef": 0.05, "eps_clip_high": 0.15},
    "token_mean": POLICY | {"calculate_per_token_loss": True},
    "rollout_mean": POLICY | {"loss_normalizer": "rollout_mean"},
    "gspo": POLICY | {"advantage_estimator": "gspo"},
    "cispo": POLICY | {"advantage_estimator": "cispo"},
    "dr_grpo": POLICY | {"advantage_estimator": "dr_grpo", "loss_constant": 50.5},
    "whitening": POLICY
    | {"advantage_estimator": "reinforce_plus_plus", "normalize_advantages": True, "kl_coef": 0.05, "gamma": 0.99},
    "opsm": POLICY | {"use_opsm": True},
    UNCORRECTED: {},
    "tis": {"use_tis": True, "tis_clip": 1.1, "tis_batch_normalize": True},
    "mis": {"use_tis": True, "tis_level": "sequence", "use_rs": True, "rs_clip": 1.02, "rs_veto_threshold": 0.5},
    "sft": {"loss_type": "sft_loss"},
}
"""Trainer settings by name."""
AGAINST = dict.fromkeys(ALGORITHMS, "grpo") | {"tis": UNCORRECTED, "mis": UNCORRECTED}
"""Which algorithm differs in nothing but what is tried, by algorithm."""


@dataclass(frozen=True)
class Layout:
    """How the batch is laid out. order: seed of the order of groups, or None for theirs."""

    tensor: int = 1
    context: int = 1
    order: int | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)


def _tokens(count: int) -> dict[str, Any]:
    return {"max_tokens_per_gpu": count}


def _samples(count: int) -> dict[str, Any]:
    return {"use_dynamic_batch_size": False, "micro_batch_size": count}


REFERENCE = "one sample after the other"
LAYOUTS: dict[int, dict[str, Layout]] = {
    1: {
        REFERENCE: Layout(settings=_samples(1)),
        "micro-batches of 3 samples": Layout(settings=_samples(3)),
        "packs of 100 tokens": Layout(settings=_tokens(100)),
        "one pack": Layout(settings=_tokens(4096)),
        "another order, packs of 150 tokens": Layout(order=3, settings=_tokens(150)),
    },
    2: {
        "DP 2": Layout(settings=_tokens(150)),
        "TP 2": Layout(tensor=2, settings=_tokens(100)),
        "CP 2": Layout(context=2, settings=_tokens(75)),
        "CP 2, another order, one sample after the other": Layout(context=2, order=5, settings=_samples(1)),
    },
    4: {
        "DP 4": Layout(settings=_tokens(100)),
        "DP 2, TP 2": Layout(tensor=2, settings=_tokens(100)),
        "DP 2, CP 2": Layout(context=2, settings=_tokens(75)),
        "TP 2, CP 2": Layout(tensor=2, context=2, settings=_tokens(75)),
        "CP 4": Layout(context=4, settings=_tokens(50)),
    },
}
"""By ranks."""


def random_samples() -> list[Sample]:
    """Ragged samples with holes in the mask, by group: one without trained tokens, one unscored, one group with two
    samples of one rollout."""
    rng = np.random.default_rng(CAPTURE_SEED)
    samples = []
    for group, size in enumerate(GROUP_SIZES):
        for index in range(size):
            prompt, response = int(rng.integers(2, 9)), int(rng.integers(1, LONGEST))
            mask = (rng.random(response) < 0.8).astype(np.uint8)
            mask[-1] = 1
            if (group, index) == (1, 2):
                mask[:] = 0
            samples.append(
                Sample(
                    sample_id=f"g{group}s{index}",
                    group_id=f"g{group}",
                    index=index,
                    status=SampleStatus.COMPLETED,
                    prompt_length=prompt,
                    tokens=rng.integers(2, VOCABULARY, prompt + response).astype(np.int32),
                    loss_mask=mask,
                    log_probs=np.zeros(response, np.float32),
                    reward=None if (group, index) == (3, 1) else float(rng.normal()),
                    rollout_index=(0, 0, 1, 2)[index] if group == 4 else None,
                )
            )
    return samples


def run_spec(root: Path, layout: Layout, world: int, settings: Mapping[str, Any]) -> RunSpec:
    """A run of one step over the batch."""
    parallel = {
        "actor_num_gpus_per_node": world,
        "tensor_model_parallel_size": layout.tensor,
        "context_parallel_size": layout.context,
    }
    rollout = {"hf_checkpoint": str(root / "model"), "num_rollout": 1, "rollout_batch_size": len(GROUP_SIZES)}
    rollout["n_samples_per_prompt"] = max(GROUP_SIZES)
    trainer = {**parallel, **layout.settings, **settings}
    if trainer.get("use_kl_loss") or trainer.get("kl_coef"):
        trainer["ref_load"] = str(root / "reference")
    return RunSpec.model_validate({"data": {"label_key": "label"}, "rollout": rollout, "trainer": trainer})


def _header(sample: Sample) -> SampleHeader:
    return SampleHeader(
        sample_id=sample.sample_id,
        group_id=sample.group_id,
        prompt_length=sample.prompt_length,
        response_length=sample.response_length,
        trained_token_count=int(sample.loss_mask.sum()),
        reward=sample.reward,
        min_version=sample.min_version,
        max_version=sample.max_version,
        status=sample.status,
        index=sample.index,
        rollout_index=sample.rollout_index,
    )


def _ordered(samples: Sequence[Sample], order: int | None) -> list[Sample]:
    if order is None:
        return list(samples)
    groups = {sample.group_id for sample in samples}
    place = dict(zip(sorted(groups), np.random.default_rng(order).permutation(len(groups)), strict=True))
    return sorted(samples, key=lambda sample: place[sample.group_id])


class Measured:
    """The trainer of one algorithm and layout, whose update keeps the gradients."""

    def __init__(self, spec: RunSpec) -> None:
        from services.trainer.ranks.policy import add_companions, build_policy
        from services.trainer.ranks.train import StepTrainer

        device = torch.device("cpu")
        self.spec, self.policy = spec, build_policy(spec, device)
        add_companions(spec, self.policy, device)
        self.trainer = StepTrainer(spec, self.policy, device)
        self.gradients: dict[str, torch.Tensor] = {}
        self.policy.update = self._keep

    def _keep(self) -> float:
        from services.trainer.ranks.model.hf_weights import gather_weights

        model = self.policy.model
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(parameter.main_grad)
        gathered = gather_weights(model, self.policy.hf)
        self.gradients = {name: tensor.clone() for name, tensor in gathered if tensor is not None}
        return 0.0

    def step(self, samples: Sequence[Sample]) -> dict[str, float]:
        """Trains the batch up to its gradients; the metrics."""
        from megatron.core import parallel_state

        from services.trainer.ranks.timing import PartTimer

        batch = Batch(tuple(map(_header, samples)), len(GROUP_SIZES), 0, 0)
        settings = schedule_settings(self.spec, parallel_state.get_data_parallel_world_size())
        inputs = step_inputs(batch, self.spec, settings)
        by_id = {sample.sample_id: sample for sample in samples}
        return self.trainer.train(by_id, inputs.plan, inputs.advantages, PartTimer())


def _regroup(layout: Layout) -> None:
    from megatron.core import parallel_state, tensor_parallel

    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        layout.tensor, context_parallel_size=layout.context, create_gloo_process_groups=False
    )
    tensor_parallel.model_parallel_cuda_manual_seed(1, inference_rng_tracker=True, force_reset_rng=True)


def _engine_log_probs(root: Path, samples: Sequence[Sample]) -> list[Sample]:
    """The samples with log-probs near the model's own, so that some ratios are clipped and some are not. One rank
    computes them for all worlds."""
    file = root / "log_probs.npy"
    if not file.exists():
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(root / "model", dtype=torch.float32)
        rng = np.random.default_rng(CAPTURE_SEED)
        found = []
        for sample in samples:
            tokens = torch.from_numpy(sample.tokens.astype(np.int64))
            with torch.no_grad():
                scores = model(tokens[None]).logits[0, sample.prompt_length - 1 : -1].log_softmax(-1)
            exact = scores.gather(-1, tokens[sample.prompt_length :, None])[:, 0].numpy()
            found.append(exact + rng.normal(0, LOG_PROB_NOISE, len(exact)))
        np.save(file, np.concatenate(found).astype(np.float32))
    parts = np.split(np.load(file), np.cumsum([sample.response_length for sample in samples])[:-1])
    return [replace(s, log_probs=part * s.loss_mask) for s, part in zip(samples, parts, strict=True)]


def measurements(root: Path, world: int, algorithms: Sequence[str]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Layout, algorithm, and its gradients and metrics."""
    samples = _engine_log_probs(root, random_samples())
    for layout_name, layout in LAYOUTS[world].items():
        _regroup(layout)
        for name in algorithms:
            measured = Measured(run_spec(root, layout, world, ALGORITHMS[name]))
            metrics = measured.step(_ordered(samples, layout.order))
            yield layout_name, name, {"gradients": measured.gradients, "metrics": metrics}


def main() -> None:
    """Runs as one rank."""
    root, (rank, world, port) = Path(sys.argv[1]), map(int, sys.argv[2:5])
    runtime.start(runtime.Layout(rank, world, port, 1), "cpu", seed=1)
    algorithms = json.loads((root / "algorithms.json").read_text())
    found: dict[str, dict[str, Any]] = {name: {} for name in algorithms}
    for layout, algorithm, result in measurements(root, world, algorithms):
        found[algorithm][layout] = result
    if rank == 0:
        torch.save(found, root / f"world-{world}.pt")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
