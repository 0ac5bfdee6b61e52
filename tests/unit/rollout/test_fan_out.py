"""Rollouts that give several samples, and the greedy rollout that is a baseline."""

from __future__ import annotations

import json
import sys
import textwrap
from types import SimpleNamespace

import pytest

from services.common.errors import ServiceError
from services.common.run_spec import RunSpec
from services.rollout.convert import run_settings
from services.rollout.core.completer import Completer
from services.rollout.core.counters import Counters
from services.rollout.core.generate import Unfinished, make_generator
from services.rollout.core.ports import ActiveRun
from services.rollout.core.replay import ReplayMaker
from services.rollout.core.samples import build_sample
from tests.unit.rollout.parts import SAMPLING, Chars, ScriptedRouter, make_prompt, make_run, piece, serving_fleet

OURS = """
    async def generate(context, prompt, sampling):
        made = []
        for _ in range(2 if context.index == 0 else 1):
            trajectory = context.start(prompt)
            trajectory.append_generation(await context.generate(trajectory.input_ids, sampling))
            made.append(trajectory)
        return made if context.index == 0 else made[0]
"""
SLIME = """
    import copy

    async def generate(args, sample, sampling_params):
        sample.tokens, sample.response_length = [1, 97, 98], 2
        sample.rollout_log_probs, sample.status = [-0.5, -0.5], "completed"
        return [sample, copy.copy(sample)] if sample.index == 0 else sample
"""


def completer_of(script) -> Completer:
    return Completer(serving_fleet(ScriptedRouter(script)), Chars(), Counters())


@pytest.fixture
def generator_of(tmp_path, monkeypatch):
    """A generator with a function of the user."""
    monkeypatch.syspath_prepend(str(tmp_path))
    made = []

    def make(body: str):
        (tmp_path / "user_fan_out.py").write_text(textwrap.dedent(body))
        sys.modules.pop("user_fan_out", None)
        run = make_run(generate_path="user_fan_out.generate", max_turns=2)
        made.append(make_generator(completer_of([[piece("ab")]]), run))
        return made[-1]

    yield make
    for generator in made:
        generator.close()


@pytest.mark.parametrize("body", [OURS, SLIME], ids=["ours", "slime"])
async def test_a_function_may_return_several_samples_of_a_rollout(generator_of, body):
    made = await generator_of(body).generate(make_prompt(), SAMPLING, 2)
    assert [one.rollout_index for one in made] == [0, 0, 1]
    samples = [build_sample(make_prompt(), index, one, Chars(), "e") for index, one in enumerate(made)]
    assert [(s.sample_id, s.rollout_index) for s in samples] == [("g-0", 0), ("g-1", 0), ("g-2", 1)]


async def test_without_fan_out_no_rollout_is_named(generator_of):
    made = await generator_of(OURS.replace("2 if context", "1 if context")).generate(make_prompt(), SAMPLING, 2)
    assert [one.rollout_index for one in made] == [None, None]


async def test_a_list_without_samples_is_refused(generator_of):
    with pytest.raises(ServiceError, match="returned no Trajectory"):
        await generator_of("async def generate(context, prompt, sampling): return []").generate(
            make_prompt(), SAMPLING, 1
        )


async def test_a_halted_node_hands_over_rollouts_of_one_sample_only(generator_of):
    generator = generator_of(OURS)

    def halt(request):
        generator.completer.halt.call()
        return [piece("x", "abort")]

    generator.completer.fleet.router.script = [[piece("ab")], [piece("cd")], halt, halt]
    with pytest.raises(Unfinished) as stopped:
        await generator.generate(make_prompt(), SAMPLING, 3)
    assert 0 not in stopped.value.trajectories


async def test_the_first_rollout_is_decoded_greedily():
    completer = completer_of([[piece("a")], [piece("b"), piece("c")]])
    made = await make_generator(completer, make_run()).generate(make_prompt(), SAMPLING, 3, greedy_first=True)
    assert len(made) == 3
    asked = [(request.sampling.temperature, request.sample_count) for request in completer.fleet.router.requests]
    assert asked == [(0.0, 1), (SAMPLING.temperature, 2)]


@pytest.mark.parametrize(("estimator", "greedy"), [("remax", True), ("grpo", False)])
def test_nodes_are_told_by_the_estimator(estimator: str, greedy: bool) -> None:
    spec = RunSpec.model_validate(
        {
            "rollout": {"hf_checkpoint": "m", "num_rollout": 1, "rollout_batch_size": 1, "n_samples_per_prompt": 2},
            "trainer": {"advantage_estimator": estimator},
        }
    )
    assert run_settings(ActiveRun("r", spec.model_dump_json())).greedy_first is greedy


async def test_a_function_of_the_user_is_told_to_decode_greedily(generator_of):
    body = """
        async def generate(context, prompt, sampling):
            trajectory = context.start(prompt)
            trajectory.append_generation(await context.generate(trajectory.input_ids, sampling))
            trajectory.metadata["temperature"] = sampling.temperature
            return trajectory
    """
    made = await generator_of(body).generate(make_prompt(), SAMPLING, 2, greedy_first=True)
    assert [one.metadata["temperature"] for one in made] == [0.0, SAMPLING.temperature]


async def test_a_group_that_was_fanned_out_is_replayed_as_such(tmp_path):
    rows = [
        {
            "group_id": "old", "prompt_length": 1, "tokens": [1, 2], "loss_mask": [1], "log_probs": [-0.5],
            "status": "completed", "response": "x", "reward": 1.0, "unscored_reason": "", "rollout_index": rollout,
        }
        for rollout in (0, 0, 1)
    ]  # fmt: skip
    path = tmp_path / "step.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    keys = {"load_debug_rollout_data": str(path), "rollout_batch_size": 1}
    group = await ReplayMaker(SimpleNamespace(keys=keys, samples_per_prompt=2)).make(make_prompt())
    assert [sample.rollout_index for sample in group.samples] == [0, 0, 1]
