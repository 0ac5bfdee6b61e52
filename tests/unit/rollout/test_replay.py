"""Groups of an exported file in place of generated ones."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from services.common.errors import ServiceError
from services.common.records import Prompt, SampleStatus
from services.rollout.core.replay import ReplayMaker, check_replay


def write(path: Path, groups: int, samples: int = 2, first: int = 0) -> None:
    rows = [
        {
            "group_id": f"old-{first + group}", "prompt_length": 2, "tokens": [1, 2, first + group, index],
            "loss_mask": [1, 0], "log_probs": [-0.5, 0.0], "status": "truncated", "response": "x",
            "reward": None if index else 0.5, "unscored_reason": "why" if index else "",
        }
        for group in range(groups)
        for index in range(samples)
    ]  # fmt: skip
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def run(path: Path | str, samples: int = 2):
    keys = {"load_debug_rollout_data": str(path), "rollout_batch_size": 2}
    return SimpleNamespace(keys=keys, samples_per_prompt=samples)


def prompt(ordinal: int) -> Prompt:
    return Prompt(
        group_id=f"new-{ordinal}", ordinal=ordinal, epoch=0, row=0, text="a", label="", tokens=np.array([9], np.int32)
    )


async def test_groups_come_in_turn_under_the_names_of_the_run(tmp_path):
    write(tmp_path / "step.jsonl", groups=3)
    maker = ReplayMaker(run(tmp_path / "step.jsonl"))
    group = await maker.make(prompt(4))  # the second time through: the file's group 1
    assert (group.group_id, group.ordinal) == ("new-4", 4)
    assert [sample.sample_id for sample in group.samples] == ["new-4-0", "new-4-1"]
    first, second = group.samples
    assert (first.tokens.tolist(), first.prompt_length, first.response_length) == ([1, 2, 1, 0], 2, 2)
    assert (first.loss_mask.tolist(), first.log_probs.tolist()) == ([1, 0], [-0.5, 0.0])
    assert (first.reward, second.reward, second.unscored_reason) == (0.5, None, "why")
    assert (first.status, first.versions) == (SampleStatus.TRUNCATED, ())


async def test_a_teachers_log_probs_come_along(tmp_path):
    write(tmp_path / "step.jsonl", groups=1)
    rows = [json.loads(line) for line in (tmp_path / "step.jsonl").read_text().splitlines()]
    rows[0]["teacher"] = {"log_probs": [-1, -2], "top_ids": [[7], [8]], "top_log_probs": [[-0.5], [-0.25]]}
    rows[1]["teacher"] = {"log_probs": [-3, -4], "top_ids": [], "top_log_probs": []}
    (tmp_path / "step.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    first, second = (await ReplayMaker(run(tmp_path / "step.jsonl")).make(prompt(0))).samples
    assert not first.problem()
    assert not second.problem()
    assert (first.teacher.top_ids.tolist(), first.teacher.top.tolist()) == ([[7], [8]], [[-0.5], [-0.25]])
    assert (second.teacher.sampled.tolist(), second.teacher.top.shape) == ([-3.0, -4.0], (2, 0))


async def test_every_step_may_have_a_file_of_its_own(tmp_path):
    for step in range(2):
        write(tmp_path / f"{step}.jsonl", groups=2, first=10 * step)
    maker = ReplayMaker(run(tmp_path / "{rollout_id}.jsonl"))
    made = [(await maker.make(prompt(ordinal))).samples[0].tokens[2] for ordinal in range(4)]
    assert made == [0, 1, 10, 11]
    with pytest.raises(ServiceError, match="cannot be read: No such file"):
        await maker.make(prompt(4))


async def test_a_file_that_does_not_fit_is_named(tmp_path):
    write(tmp_path / "step.jsonl", groups=1, samples=3)
    with pytest.raises(ServiceError, match="has 3 rollouts; set n_samples_per_prompt to that"):
        await ReplayMaker(run(tmp_path / "step.jsonl")).make(prompt(0))
    (tmp_path / "other.jsonl").write_text('{"input": "1+1="}\n')
    with pytest.raises(ServiceError, match="it is not what `tetrarch export-samples` writes"):
        check_replay(run(tmp_path / "other.jsonl"))
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(ServiceError, match="it has no samples"):
        check_replay(run(tmp_path / "empty.jsonl"))
    check_replay(SimpleNamespace(keys={}))
