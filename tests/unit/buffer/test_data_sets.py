"""Mixtures of real files, and curricula whose decisions live in a real store."""

from __future__ import annotations

import asyncio
import json
import sys
from collections import Counter

import pytest
import pytest_asyncio

from services.buffer.adapters.loader import PromptLoader
from services.buffer.adapters.redis_blocks import RedisBlocks
from services.buffer.adapters.redis_connection import Connection, run_prefix
from services.buffer.core.curriculum import CurriculumMixture, CurriculumSettings
from services.common.errors import ServiceError
from services.common.records import SamplingParams
from tests.support.engine import write_tokenizer
from tests.support.valkey import valkey, valkey_url  # noqa: F401


@pytest_asyncio.fixture
async def connection(valkey_url):  # noqa: F811
    found = Connection(valkey_url)
    await found.client.flushall()
    await found.client.hset(run_prefix("r") + "run", mapping={"state": "ACTIVE", "committed_step": -1})
    yield found
    await found.close()


@pytest.fixture
def spec(tmp_path):
    """Settings of a run with three sets of 10, 7 and 5 rows."""
    write_tokenizer_once(tmp_path / "model")
    for name, count, field in (("a", 10, "input"), ("b", 7, "question"), ("c", 5, "input")):
        rows = [{field: f"{name}{i}", "answer": f"{name.upper()}{i}"} for i in range(count)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sets = [
        {"name": "a", "path": str(tmp_path / "a.jsonl"), "weight": 0.5},
        {"name": "b", "path": str(tmp_path / "b.jsonl"), "weight": 0.3, "input_key": "question", "rm_type": "math"},
        {"name": "c", "path": str(tmp_path / "c.jsonl"), "weight": 0.2, "max_response_len": 7, "rm_options": {"x": 1}},
    ]
    return {
        "data": {"prompt_data_mixture": sets, "label_key": "answer", "rollout_shuffle": True},
        "rollout": {
            "hf_checkpoint": str(tmp_path / "model"),
            "num_rollout": 1,
            "rollout_batch_size": 4,
            "n_samples_per_prompt": 2,
        },
    }


def write_tokenizer_once(directory):
    directory.mkdir()
    write_tokenizer(directory)


async def open_run(spec, blocks=None, skipped=None):
    return await PromptLoader(blocks).load("r", json.dumps(spec), skipped)


async def test_every_set_has_its_share_its_order_its_epochs_and_its_settings(spec):
    dataset = await open_run(spec)
    assert dataset.row_count == 22
    prompts = [found.prompt for found in await dataset.draw(range(200))]
    assert Counter(prompt.dataset for prompt in prompts) == {"a": 100, "b": 60, "c": 40}
    assert await dataset.drawn_by_dataset(200) == {"a": 100, "b": 60, "c": 40}
    assert [p.ordinal for p in prompts] == list(range(200))
    for name, rows in (("a", 10), ("b", 7), ("c", 5)):
        own = [prompt for prompt in prompts if prompt.dataset == name]
        for epoch in range(len(own) // rows):
            part = own[epoch * rows : (epoch + 1) * rows]
            assert {prompt.epoch for prompt in part} == {epoch}
            assert sorted(prompt.row for prompt in part) == list(range(rows))
            assert all(p.text == f"{name}{p.row}" and p.label == f"{name.upper()}{p.row}" for p in part)
    traits = {p.dataset: (p.sampling, p.rm_type, p.rm_options_json) for p in prompts}
    assert traits == {
        "a": (None, "", ""), "b": (None, "math", ""), "c": (SamplingParams(max_new_tokens=7), "", '{"x": 1}'),
    }  # fmt: skip
    assert await dataset.origins([p.ordinal for p in prompts]) == [(p.dataset, p.epoch) for p in prompts]


async def test_another_server_draws_the_same_and_refuses_other_files(spec, tmp_path):
    spec["data"]["rollout_max_prompt_len"] = 2
    (tmp_path / "b.jsonl").write_text(json.dumps({"question": "too long", "answer": ""}) + "\n", "utf-8")
    with pytest.raises(ServiceError, match=r"every prompt of .*b\.jsonl is longer"):
        await open_run(spec)
    with (tmp_path / "b.jsonl").open("a") as out:
        out.write(json.dumps({"question": "b1", "answer": "B1"}) + "\n")
    one = await open_run(spec)
    assert (one.row_count, one.skipped_count) == (16, 1)
    two = await open_run(spec, skipped=one.skipped_rows())
    for left, right in zip(await one.draw(range(60)), await two.draw(range(60)), strict=True):
        assert (left.prompt.dataset, left.prompt.text) == (right.prompt.dataset, right.prompt.text)
    with (tmp_path / "c.jsonl").open("a") as out:
        out.write(json.dumps({"input": "c9", "answer": "C9"}) + "\n")
    with pytest.raises(ServiceError, match=r"c\.jsonl has 6 usable rows, but 5 when the run was created"):
        await open_run(spec, skipped=one.skipped_rows())


async def test_an_evaluation_set_named_as_a_set_takes_its_fields_and_grader(spec, tmp_path):
    spec["data"]["eval_prompt_data"] = ["b", str(tmp_path / "b.jsonl"), "other", str(tmp_path / "a.jsonl")]
    dataset = await open_run(spec)
    (first, *_), count = await dataset.eval_prompts("b", 0, 9)
    assert (first.text, first.rm_type, first.sampling, count) == ("b0", "math", None, 7)
    assert (await dataset.eval_prompts("other", 0, 1))[0][0].rm_type == ""


# -- curricula


def settings_of(function, size=4) -> CurriculumSettings:
    return CurriculumSettings("r", ("a", "b", "c"), (5.0, 3.0, 2.0), size, function, "rewards.plan")


def by_reward(state):
    """Twice the weight for what is solved least."""
    if not any(state.scored.values()):
        return state.weights
    hardest = min(state.weights, key=lambda name: state.mean_reward[name] or 0.0)
    return {name: 2.0 if name == hardest else 1.0 for name in state.weights}


async def test_weights_are_decided_once_a_block_from_the_rewards_in_the_store(connection):
    blocks, states = RedisBlocks(connection), []

    def plan(state):
        states.append(state)
        return by_reward(state)

    mixture = CurriculumMixture(settings_of(plan), blocks)
    sets = [await mixture.locate(ordinal) for ordinal in range(8)]
    prefix = run_prefix("r")
    await connection.client.hset(prefix + "run", "committed_step", 1)
    for ordinal, (part, _) in enumerate(sets):
        await connection.client.hset(f"{prefix}g:{ordinal:012d}", "rewards", "0.0,0.5" if part == 1 else "1.0,")
    assert await mixture.peek(8) is None
    counts = await mixture.counts(9)
    assert sum(counts) == 8
    drawn = Counter([(await mixture.locate(ordinal))[0] for ordinal in range(8, 12)])
    assert drawn == {0: 1, 1: 2, 2: 1}
    assert [state.block for state in states] == [0, 1, 2]
    assert states[0].weights == {"a": 5.0, "b": 3.0, "c": 2.0}
    last = states[2]
    assert (last.ordinal, last.step) == (8, 2)
    assert last.mean_reward == {"a": 1.0, "b": 0.25, "c": 1.0}
    assert sum(last.scored.values()) == sum(last.drawn.values()) == 8


async def test_servers_agree_and_a_restart_changes_nothing(connection):
    def stubborn(number):
        return lambda state: {"a": 1.0, "b": float(number), "c": state.block + 1.0}

    mixtures = [CurriculumMixture(settings_of(stubborn(i)), RedisBlocks(connection)) for i in range(4)]
    found = await asyncio.gather(*(mixture.locate(ordinal) for ordinal in range(60) for mixture in mixtures))
    assert all(len(set(found[at : at + 4])) == 1 for at in range(0, len(found), 4))
    again = CurriculumMixture(settings_of(lambda state: 1 / 0), RedisBlocks(connection))
    assert [await again.locate(ordinal) for ordinal in range(60)] == found[::4]
    assert await again.counts(60) == await mixtures[0].counts(60)
    with pytest.raises(ServiceError, match="ZeroDivisionError"):
        await again.locate(60)
    # A server that begins late, in a block that the others have not reached, decides those before it as well.
    late = CurriculumMixture(settings_of(stubborn(9)), RedisBlocks(connection))
    part, number = await late.locate(80)
    assert number == (await late.counts(80))[part]


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ([1, 2, 3], "it returned list; return a mapping of data set to weight"),
        ({"a": 1, "d": 1}, "it names 'd'; the data sets are a, b, c"),
        ({"a": -1, "b": 2}, "they must be finite, not below 0, and not all 0"),
        ({}, "they must be finite, not below 0, and not all 0"),
        ({"a": float("nan")}, "they must be finite"),
        ({"a": "much"}, "a weight is no number"),
    ],
)
async def test_what_a_curriculum_must_not_answer(connection, answer, words):
    mixture = CurriculumMixture(settings_of(lambda state: answer), RedisBlocks(connection))
    with pytest.raises(ServiceError) as caught:
        await mixture.locate(0)
    assert caught.value.reason == "CURRICULUM_FAILED"
    assert words in caught.value.message
    assert "\n" not in caught.value.message


async def test_a_run_finds_its_curriculum_by_its_path(spec, tmp_path, connection, monkeypatch):
    (tmp_path / "my_plan.py").write_text(
        "def weights(state):\n    return {'a': 1.0} if state.block == 0 else {'b': 1.0, 'c': 1.0}\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    spec["data"]["curriculum_path"] = "my_plan.weights"
    dataset = await open_run(spec, RedisBlocks(connection))
    prompts = [found.prompt for found in await dataset.draw(range(12))]
    assert "".join(prompt.dataset for prompt in prompts) == "aaaabcbcbcbc"
    assert await dataset.drawn_by_dataset(6) == {"a": 4, "b": 1, "c": 1}
    spec["data"]["curriculum_path"] = "my_plan.wieghts"
    with pytest.raises(ServiceError, match="module my_plan has no function 'wieghts'"):
        await open_run(spec, RedisBlocks(connection))
    sys.modules.pop("my_plan")
