"""Prompts of a mixture: each set's own sampling settings and grader reach the engine and the reward service."""

from __future__ import annotations

import json

from services.common.convert import prompt_from_proto, prompt_to_proto
from services.common.records import SamplingParams
from services.rollout.core.run_settings import ScoreSettings
from tests.unit.rollout.parts import FixedScorer, ListBuffer, make_prompt, make_run
from tests.unit.rollout.test_generation_loop import both, build, running, until


async def test_sampling_of_a_set_overlays_the_runs():
    prompts = [
        make_prompt("1", "g1"),
        make_prompt("2", "g2", sampling=SamplingParams(top_p=0.5, max_new_tokens=3, stop=("x",))),
    ]
    buffer = ListBuffer(prompts)
    loop, _ = build(buffer, [both], inflight=1)
    async with running(loop):
        await until(lambda: len(buffer.put) == 2)
    sent = [request.sampling for request in loop._maker.fleet.router.requests]
    assert sent[0] == SamplingParams(temperature=1.0, max_new_tokens=8)
    assert sent[1] == SamplingParams(temperature=1.0, top_p=0.5, max_new_tokens=3, stop=("x",))


async def test_every_set_is_scored_by_its_own_grader_with_its_own_options():
    score = ScoreSettings("custom", "rewards.ours", '{"a": 1}', timeout=1.0, grouped=True)
    scorer = FixedScorer()
    prompts = [
        make_prompt("1", "g1"),
        make_prompt("2", "g2", rm_type="math"),
        make_prompt("3", "g3", rm_type="math", rm_options_json='{"b": 2}'),
        make_prompt("4", "g4", rm_options_json='{"c": 3}'),
    ]
    buffer = ListBuffer(prompts)
    loop, _ = build(buffer, [both], make_run(score=score), scorer)
    async with running(loop):
        await until(lambda: len(buffer.put) == 4)
    calls = {
        (call.grader, call.custom_path, call.options_json, call.grouped, items[0].group_id)
        for call, items in scorer.calls
    }
    assert calls == {
        ("custom", "rewards.ours", '{"a": 1}', True, "g1"),
        ("math", "", "{}", False, "g2"),
        ("math", "", '{"b": 2}', False, "g3"),
        ("custom", "rewards.ours", '{"c": 3}', True, "g4"),
    }


def test_the_settings_of_a_set_survive_the_wire():
    sampling = SamplingParams(top_k=5, stop_token_ids=(7,))
    sent = make_prompt(dataset="easy", sampling=sampling, rm_type="math", rm_options_json=json.dumps({"a": 1}))
    got = prompt_from_proto(prompt_to_proto(sent))
    assert (got.dataset, got.sampling, got.rm_type, got.rm_options_json) == ("easy", sampling, "math", '{"a": 1}')
    assert prompt_from_proto(prompt_to_proto(make_prompt())).sampling is None
