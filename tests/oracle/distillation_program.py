"""What the distillation tests run inside rank processes: `python -m tests.oracle.distillation_program RANK WORLD PORT
ROOT`. A step on the samples in ROOT/samples.pt under every case of its layouts; its gradients and metrics go to
ROOT/world-<n>.pt (rank 0).
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

from services.common.records import Sample
from services.common.run_spec import RunSpec
from services.trainer.core.batches import schedule_settings
from services.trainer.core.schedule import SampleSize, plan_step
from services.trainer.ranks import runtime

COEF, TOP_K, TEMPERATURE = 0.7, 5, 0.8
ON_RANKS = {"opd_type": "megatron", "opd_teacher_load": "teacher"}
OF_SAMPLES = {"opd_teacher_url": "http://127.0.0.1:1"}
CASES: dict[str, tuple[dict[str, Any], float]] = {
    "sampled": (ON_RANKS, 1.0),
    "top": (ON_RANKS | {"opd_top_k": TOP_K}, 1.0),
    "sampled, of samples": (OF_SAMPLES, 1.0),
    "top, of samples": (OF_SAMPLES | {"opd_top_k": TOP_K}, 1.0),
    "sampled, cooler": (ON_RANKS, TEMPERATURE),
    "top, cooler": (ON_RANKS | {"opd_top_k": TOP_K}, TEMPERATURE),
    "sampled, whitened": (ON_RANKS | {"normalize_advantages": True}, 1.0),
    "sampled, engine's": (ON_RANKS | {"use_rollout_logprobs": True, "eps_clip": 1e6}, 1.0),
}
"""Trainer settings, and temperature."""
LAYOUTS = {1: {"one": (1, 1)}, 2: {"data": (1, 1), "tensor": (2, 1), "context": (1, 2)}}
"""Tensor and context parallel size, by ranks."""
IN_LAYOUTS = ("sampled", "top", "top, of samples", "sampled, whitened")
"""Cases of two ranks."""


def make_spec(root: Path, world: int, layout: tuple[int, int], case: str) -> RunSpec:
    """A run of one step."""
    settings, temperature = CASES[case]
    settings = {key: str(root / value) if key == "opd_teacher_load" else value for key, value in settings.items()}
    parallel = {"tensor_model_parallel_size": layout[0], "context_parallel_size": layout[1]}
    rollout = {"hf_checkpoint": str(root / "policy"), "num_rollout": 1, "rollout_batch_size": 8}
    trainer = {"actor_num_gpus_per_node": world, "max_tokens_per_gpu": 64, "calculate_per_token_loss": True}
    trainer |= {"use_opd": True, "opd_kl_coef": COEF, **parallel, **settings}
    return RunSpec.model_validate({"rollout": rollout | {"rollout_temperature": temperature}, "trainer": trainer})


def step(spec: RunSpec, samples: list[Sample]) -> dict[str, Any]:
    """Metrics and gradients of a step; rewards serve as advantages."""
    from megatron.core import parallel_state

    from services.trainer.ranks.model.hf_weights import gather_weights
    from services.trainer.ranks.policy import build_policy
    from services.trainer.ranks.timing import PartTimer
    from services.trainer.ranks.train import StepTrainer

    device = torch.device("cpu")
    policy = build_policy(spec, device)
    gradients = {}

    def keep() -> float:
        with torch.no_grad():
            for parameter in policy.model.parameters():
                parameter.copy_(parameter.main_grad)
        gradients.update({n: t.clone() for n, t in gather_weights(policy.model, policy.hf) if t is not None})
        return 0.0

    policy.update = keep
    settings = schedule_settings(spec, parallel_state.get_data_parallel_world_size())
    advantages = {sample.sample_id: sample.reward for sample in samples if sample.reward is not None}
    sizes = [
        SampleSize(s.sample_id, len(s.tokens), int(s.loss_mask.sum()) if s.sample_id in advantages else 0)
        for s in samples
    ]
    trainer = StepTrainer(spec, policy, device)
    by_id = {sample.sample_id: sample for sample in samples}
    metrics = trainer.train(by_id, plan_step(sizes, settings), advantages, PartTimer())
    return {"metrics": metrics, "gradients": gradients}


def main() -> None:
    """Runs as one rank."""
    (rank, world, port), root = map(int, sys.argv[1:4]), Path(sys.argv[4])
    runtime.start(runtime.Layout(rank, world, port, 1), "cpu", seed=1)
    from megatron.core import parallel_state, tensor_parallel

    samples, found = torch.load(root / "samples.pt", weights_only=False), {}
    for name, layout in LAYOUTS[world].items():
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(
            layout[0], context_parallel_size=layout[1], create_gloo_process_groups=False
        )
        tensor_parallel.model_parallel_cuda_manual_seed(1, inference_rng_tracker=True, force_reset_rng=True)
        found[name] = {
            case: step(make_spec(root, world, layout, case), samples) for case in (CASES if world == 1 else IN_LAYOUTS)
        }
    if rank == 0:
        torch.save(found, root / f"world-{world}.pt")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
