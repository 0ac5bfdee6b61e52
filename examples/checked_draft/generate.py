"""Two turns with a checking tool, small enough to train on the demo's model: a draft, the tool's marks, a final answer.

The model drafts a sum; the tool marks every digit (1 right, 0 wrong) and asks again; the model answers for good:

    69+86=441 <tool> =110=  <model> 551

The tool's tokens are part of the response and left out of the loss. Only the final answer is rewarded, so the model
learns to read the marks as well as to add. `python -m benchmarks.two_turn` trains it.
"""

from __future__ import annotations

from services.common.records import Prompt, SamplingParams
from services.rollout.core.generate import GenerateContext
from services.rollout.core.trajectory import Trajectory


def marks(draft: str, label: str) -> str:
    """One digit per digit of the label: 1 where the draft is right."""
    return "".join(str(int(draft[place : place + 1] == digit)) for place, digit in enumerate(label))


async def generate(context: GenerateContext, prompt: Prompt, sampling: SamplingParams) -> Trajectory:
    """A draft and a final answer. Without a second turn (`max_turns` 1) the draft is the answer."""
    trajectory = context.start(prompt)
    trajectory.append_generation(await context.generate(trajectory.input_ids, sampling))
    if context.turns_left:
        draft = context.tokenizer.decode(trajectory.response_ids)
        trajectory.append_environment(context.tokenizer.encode(f"={marks(draft, prompt.label)}="))
        trajectory.append_generation(await context.generate(trajectory.input_ids, sampling))
    return trajectory
