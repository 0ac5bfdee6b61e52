"""A deliberately mismatched engine: it samples at another temperature than the trainer is told.

`softmax(logits / TEMPERATURE)` is what the tokens come from and what the engine's log-probs are of; the trainer goes on
to take its own softmax of the logits as they are. Greedy evaluations are what they were.
"""

from __future__ import annotations

from dataclasses import replace

from services.common.records import Prompt, SamplingParams
from services.rollout.core.generate import GenerateContext
from services.rollout.core.trajectory import Trajectory

TEMPERATURE = 1.5


async def generate(context: GenerateContext, prompt: Prompt, sampling: SamplingParams) -> Trajectory:
    """One turn, as without a function, at `TEMPERATURE` times the run's temperature."""
    trajectory = context.start(prompt)
    told = replace(sampling, temperature=(1.0 if sampling.temperature is None else sampling.temperature) * TEMPERATURE)
    trajectory.append_generation(await context.generate(trajectory.input_ids, told))
    return trajectory
