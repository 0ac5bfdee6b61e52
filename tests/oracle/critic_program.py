"""What tests of the critic run inside ranks: `python -m tests.oracle.critic_program PROGRAM RANK WORLD PORT ROOT`.

Leaves ROOT/<program>.pt (rank 0).
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch

from services.common.records import Sample
from services.trainer.core.batches import schedule_settings
from services.trainer.core.critic import critic_spec, data_parallel_size
from services.trainer.core.schedule import SampleSize, plan_step
from services.trainer.ranks import runtime
from tests.oracle.rank_program import make_spec, random_samples

CLIP = 0.3
LAYOUTS = {"data": (1, 1), "tensor": (2, 1), "context": (1, 2)}
"""Tensor- and context-parallel sizes of two ranks."""


def returns_of(samples: dict[str, Sample]) -> dict[str, np.ndarray]:
    """What the values should be: a number that follows from the token before, so that it can be learned."""
    found = {}
    for name, sample in samples.items():
        before = sample.tokens[sample.prompt_length - 1 : -1]
        found[name] = (before % 7 / 7).astype(np.float32)[sample.loss_mask != 0]
    return {name: numbers for name, numbers in found.items() if samples[name].reward is not None}


class Critic:
    """A critic with its trainer, fed with random batches."""

    def __init__(self, root: Path, ranks: int, tensor: int = 1, context: int = 1, **options) -> None:
        from services.trainer.ranks.critic import CriticTrainer
        from services.trainer.ranks.policy import build_policy

        chosen = {
            "advantage_estimator": "ppo",
            "value_clip": CLIP,
            "critic_lr": 3e-2,
            "critic_num_gpus_per_node": ranks,
            "critic_tensor_model_parallel_size": tensor,
            "critic_context_parallel_size": context,
        }
        self.spec = critic_spec(make_spec(root / "qwen3", 1, 1, **chosen | options))
        device = torch.device("cpu")
        self.policy = build_policy(self.spec, device, values=True)
        self.trainer = CriticTrainer(self.spec, self.policy, device)

    def values(self, samples: dict[str, Sample]) -> dict[str, np.ndarray]:
        """This rank's."""
        from services.trainer.ranks.timing import PartTimer

        advantages = {s.sample_id: s.reward for s in samples.values() if s.reward is not None}
        sizes = [
            SampleSize(s.sample_id, len(s.tokens), int(s.loss_mask.sum()) if s.reward is not None else 0)
            for s in samples.values()
        ]
        plan = plan_step(sizes, schedule_settings(self.spec, data_parallel_size(self.spec)))
        return self.trainer.values(samples, plan, advantages, PartTimer())

    def step(self, seed: int) -> dict[str, float]:
        """One step on the batch of a seed; its metrics."""
        from services.trainer.ranks.timing import PartTimer

        samples = random_samples(seed)
        self.values(samples)
        return self.trainer.train(returns_of(samples), PartTimer())


def _with_head(root: Path) -> Path:
    """The model with a value head in its checkpoint."""
    from safetensors.torch import load_file, save_file

    place = root / "with_head"
    place.mkdir(exist_ok=True)
    for name in ("config.json", "tokenizer.json"):
        (place / name).write_bytes((root / "qwen3" / name).read_bytes())
    tensors = load_file(root / "qwen3" / "model.safetensors")
    width = tensors["model.norm.weight"].shape[0]
    tensors["score.weight"] = torch.randn(1, width, generator=torch.Generator().manual_seed(11)) / width**0.5
    save_file(tensors, place / "model.safetensors")
    return place


def _by_autograd(place: Path) -> tuple[dict[str, np.ndarray], dict[str, float]]:
    """transformers' values of batch 0, and the value loss and its gradient's norm, by sample mean."""
    from safetensors.torch import load_file
    from transformers import AutoModel

    model = AutoModel.from_pretrained(place, dtype=torch.float32, attn_implementation="eager")
    head = load_file(place / "model.safetensors")["score.weight"].clone().requires_grad_()
    samples = random_samples(0)
    returns, found, loss = returns_of(samples), {}, torch.zeros(())
    for name, sample in samples.items():
        if name not in returns:
            continue
        tokens = torch.from_numpy(sample.tokens.astype(np.int64))
        hidden = model(tokens[None]).last_hidden_state[0, sample.prompt_length - 1 : -1]
        values = (hidden @ head[0])[torch.from_numpy(sample.loss_mask != 0)]
        found[name] = values.detach().numpy()
        loss = loss + (values - torch.from_numpy(returns[name])).square().mean() / len(samples)
    loss.backward()
    gradients = [p.grad.norm() for p in [*model.parameters(), head] if p.grad is not None]
    return found, {"value_loss": loss.item(), "critic_grad_norm": torch.stack(gradients).norm().item()}


def single(root: Path) -> dict:
    """World of one: against transformers, training, both parts of a checkpoint, resume."""
    from services.trainer.ranks import checkpoint
    from services.trainer.ranks.policy import build_policy

    place = _with_head(root)
    headed = Critic(root, 1, critic_load=str(place))
    out: dict = {"hf": _by_autograd(place), "ours": (headed.values(random_samples(0)), headed.step(0))}
    critic = Critic(root, 1)
    out["fresh"] = critic.values(random_samples(0))
    out["first"] = [critic.step(seed) for seed in (0, 0, 0)]
    directory = root / "checkpoints"
    actor = build_policy(make_spec(root / "qwen3", 1, 1), torch.device("cpu"))
    checkpoint.save_critic(critic.policy, directory, 3)
    out["hidden"] = not list(directory.glob("step_*")) and not (directory / "latest").exists()
    checkpoint.save_checkpoint(actor, directory, 3, with_critic=True)
    out["left"] = sorted(path.name for path in directory.iterdir())
    out["uninterrupted"] = [critic.step(seed) for seed in (0, 1)]
    resumed = Critic(root, 1)
    out["counters"] = checkpoint.load_critic(resumed.policy, directory)
    checkpoint.load_checkpoint(actor, directory)
    out["resumed"] = [resumed.step(seed) for seed in (0, 1)]
    checkpoint.save_checkpoint(actor, root / "alone", 2)
    out["new_run"] = checkpoint.load_critic(resumed.policy, root / "alone", new_run=True)
    try:
        checkpoint.load_critic(resumed.policy, root / "alone")
    except Exception as error:
        out["refused"] = str(error)
    return out


def pair(root: Path) -> dict:
    """World of two in every layout: the training of one rank, then its checkpoint taken up."""
    from megatron.core import parallel_state, tensor_parallel

    from services.trainer.ranks import checkpoint

    out: dict = {}
    for name, (tensor, context) in LAYOUTS.items():
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(
            tensor, context_parallel_size=context, create_gloo_process_groups=False
        )
        tensor_parallel.model_parallel_cuda_manual_seed(1, inference_rng_tracker=True, force_reset_rng=True)
        critic = Critic(root, 2, tensor, context)
        first = [critic.step(seed) for seed in (0, 0, 0)]
        checkpoint.load_critic(critic.policy, root / "checkpoints")
        out[name] = first, [critic.step(seed) for seed in (0, 1)]
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
