"""Up to two turns with a checking tool, small enough to train on the demo's model.

The model drafts an answer. The tool checks it: a right one ends the sample, after a wrong one it repeats the question
and the model answers once more:

    69+86= <model> 441 <tool> 69+86= <model> 551

The tool's tokens are part of the response and left out of the loss. `python -m benchmarks.two_turn` trains it.
"""

from __future__ import annotations

from services.common.records import Prompt, SamplingParams
from services.rollout.core.generate import GenerateContext
from services.rollout.core.trajectory import Trajectory


async def generate(context: GenerateContext, prompt: Prompt, sampling: SamplingParams) -> Trajectory:
    """A draft and, where the tool finds it wrong and a turn is left, a second answer."""
    trajectory = context.start(prompt)
    trajectory.append_generation(await context.generate(trajectory.input_ids, sampling))
    draft = context.tokenizer.decode(trajectory.response_ids)
    if context.turns_left and not draft.startswith(prompt.label):
        trajectory.append_environment(list(prompt.tokens))
        trajectory.append_generation(await context.generate(trajectory.input_ids, sampling))
    return trajectory
