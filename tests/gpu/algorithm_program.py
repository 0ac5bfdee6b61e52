"""Steps of the algorithms on a device: `python -m tests.gpu.algorithm_program PROGRAM DEVICE RANK WORLD PORT ROOT`.

All float32. The samples are the same on every device: what their engine says is computed by transformers
on the CPU. Every step makes two optimizer steps, so that the policy is not always its own old policy.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from services.common.records import Sample, VersionSpan
from services.common.run_spec import RunSpec
from tests.gpu.rank_program import SMOOTH, main
from tests.oracle.critic_program import CLIP, Critic
from tests.oracle.distillation_program import COEF, ON_RANKS, TEMPERATURE, TOP_K
from tests.oracle.rank_program import Trainee, make_spec
from tests.oracle.replay_program import MODEL as EXPERTS
from tests.oracle.replay_program import samples_with_side, spec_of
from tests.oracle.test_distillation import TEACHER, load, log_probs
from tests.oracle.training_program import ALGORITHMS, KL

DENSE, STEPS = "qwen3", 2
NOISE = 0.15
"""Of an engine's log-probs: large enough that corrections have something to bound and to leave out."""
TWICE = SMOOTH | {"num_steps_per_rollout": 2}
MOVING = {"ref_update_interval": 1, "kl_controller": "adaptive", "kl_target": 1e-4, "kl_horizon": 100}
DISTILLED = {"use_opd": True, "opd_kl_coef": COEF}
FROM_ALGORITHMS = ("grpo", "gspo", "cispo", "reinforce_plus_plus", "tis", "tis_normalized", "opsm", "decoupled")
CASES: dict[str, dict[str, Any]] = {
    **{name: ALGORITHMS[name] for name in FROM_ALGORITHMS},
    "whitened": ALGORITHMS["reinforce_plus_plus"] | {"normalize_advantages": True, "gamma": 0.99},
    "mis": ALGORITHMS["mis"] | {"rs_clip": 1.05},
    "moving": KL | MOVING,
    "kept_actor": KL | {"keep_old_actor": True, "max_staleness": 1, "use_tis": True},
    "distilled": DISTILLED | ON_RANKS,
    "distilled, top": DISTILLED | ON_RANKS | {"opd_top_k": TOP_K},
}
"""Trainer settings of a dense model."""
REPLAYS: dict[str, dict[str, Any]] = {
    "nucleus": KL | {"use_top_p_replay": True},
    "engine_routing": {"use_rollout_routing_replay": True},
    "trainer_routing": {"use_routing_replay": True},
}
"""Those of a mixture of experts."""


def engine_samples(root: Path, model: str, seed: int) -> dict[str, Sample]:
    """The samples of a seed as an engine with slightly other numbers would have made them from a model's weights:
    of the first, second, and a third version in turn; with experts and kept tokens."""
    policy, rng, found = load(root / model), np.random.default_rng(seed), {}
    for index, (name, sample) in enumerate(samples_with_side(seed).items()):
        chosen = torch.from_numpy(sample.tokens[sample.prompt_length :].astype(np.int64))[:, None]
        with torch.no_grad():
            said = log_probs(policy, sample, TEMPERATURE).gather(-1, chosen)[:, 0].numpy()
        said = (said + rng.normal(0, NOISE, len(said))) * sample.loss_mask
        spans = (VersionSpan(1 + index % 3, 0, sample.response_length),)
        found[name] = replace(sample, log_probs=said.astype(np.float32), versions=spans)
    return found


def train(spec: RunSpec, batches: list[dict[str, Sample]], device: str) -> list[dict[str, float]]:
    """Metrics of a step on each batch. The weights of the first two steps are kept as versions 1 and 2."""
    trainee, found = Trainee(spec, device), []
    for version, samples in enumerate(batches, 1):
        trainee.policy.beside.pushed_as(version, trainee.policy.optimizer_steps)
        found.append(trainee.step(samples))
    return found


class _DeviceCritic(Critic):
    """The critic of a run on a device."""

    def __init__(self, spec: RunSpec, device: torch.device) -> None:
        from services.trainer.core.critic import critic_spec
        from services.trainer.ranks.critic import CriticTrainer
        from services.trainer.ranks.policy import build_policy

        self.spec = critic_spec(spec)
        self.policy = build_policy(self.spec, device, values=True)
        self.trainer = CriticTrainer(self.spec, self.policy, device)


def with_critic(root: Path, batches: list[dict[str, Sample]], device: str) -> list[dict[str, float]]:
    """Metrics of steps of PPO, the critic's among them: it gives the values of a step, then learns its returns."""
    from services.trainer.ranks.timing import PartTimer

    options = {"value_clip": CLIP, "critic_lr": 3e-2, "critic_num_gpus_per_node": 1}
    spec = make_spec(root / DENSE, 1, 1, **TWICE | ALGORITHMS["ppo"] | options)
    trainee = Trainee(spec, device)
    critic, returns, found = _DeviceCritic(spec, trainee.device), {}, []
    prepare = trainee.trainer.prepare

    def prepare_with_values(samples: Mapping[str, Sample], plan, advantages, _zeros, timer):
        work = prepare(samples, plan, advantages, critic.values(samples), timer)
        returns.update(trainee.trainer.returns(work))
        return work

    trainee.trainer.prepare = prepare_with_values
    for samples in batches:
        metrics = trainee.step(samples)
        found.append(metrics | critic.trainer.train(returns, PartTimer()))
        returns.clear()
    return found


def _attempted(action: Callable[[], list[dict[str, float]]]) -> list[dict[str, float]] | str:
    """What an action returns, or how it failed: one case's mistake shall not hide those of others."""
    try:
        return action()
    except Exception:
        return traceback.format_exc()


def algorithms(root: Path, device: str) -> dict[str, list[dict[str, float]] | str]:
    """Metrics of every step of every case."""
    dense, experts = ([engine_samples(root, model, seed) for seed in range(STEPS)] for model in (DENSE, EXPERTS))
    out = {"ppo": _attempted(lambda: with_critic(root, dense, device))}
    for name, settings in CASES.items():
        place = {"opd_teacher_load": str(root / TEACHER)} if "opd_teacher_load" in settings else {}
        spec = make_spec(root / DENSE, 1, 1, **TWICE | settings | place)
        out[name] = _attempted(partial(train, spec, dense, device))
    for name, settings in REPLAYS.items():
        spec = spec_of(root, "single", **TWICE | settings)
        out[name] = _attempted(partial(train, spec, experts, device))
    return out


if __name__ == "__main__":
    main({"algorithms": algorithms})
