"""A deliberately mismatched engine, and advantages that feel it.

The engine samples at another temperature than the trainer is told: `softmax(logits / TEMPERATURE)` is what tokens come
from and what the engine's log-probs are of, while the trainer takes its own softmax of the logits as they are. Greedy
evaluations are what they were.

Why not GRPO: where the advantages of a group add up to 0, log-probs that are off change the size of what is learned
and hardly its direction. Without a baseline every sampled token is pulled up, and what the pull adds up to is 0 only
when tokens come from the policy that is trained; from a hotter one it makes the policy hotter, step by step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from services.common.records import Prompt, SamplingParams
from services.common.run_spec.algorithm import AlgorithmSettings
from services.rollout.core.generate import GenerateContext
from services.rollout.core.trajectory import Trajectory
from services.trainer.core.algorithms.estimators import ScoredSample

TEMPERATURE = 1.5


async def generate(context: GenerateContext, prompt: Prompt, sampling: SamplingParams) -> Trajectory:
    """One turn, as without a function, at `TEMPERATURE` times the run's temperature."""
    trajectory = context.start(prompt)
    told = replace(sampling, temperature=(1.0 if sampling.temperature is None else sampling.temperature) * TEMPERATURE)
    trajectory.append_generation(await context.generate(trajectory.input_ids, told))
    return trajectory


def no_baseline(samples: Sequence[ScoredSample], settings: AlgorithmSettings) -> dict[str, float]:
    """1 + reward of each sample that is trained: REINFORCE with rewards of 1 and 2 (Williams, 1992), by sample id."""
    return {one.sample_id: 1.0 + one.reward for one in samples if one.reward is not None and not one.removed}
