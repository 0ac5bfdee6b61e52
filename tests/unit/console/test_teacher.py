"""A teacher that cannot teach the policy is refused before anything starts."""

from __future__ import annotations

import json
import shutil

import pytest

from services.common.settings import SettingsError
from services.console.core.check_model import check_model
from services.console.core.flags import parse_flags
from services.console.core.resolve import resolve

ON_RANKS = ("run.yaml", "--use-opd", "--opd-type", "megatron", "--opd-teacher-load")


def check(*flags: str) -> None:
    check_model(resolve(parse_flags(flags)))


@pytest.fixture
def teacher(run_folder):
    """A checkpoint like the policy's."""
    return shutil.copytree(run_folder / "model", run_folder / "teacher")


def test_a_teacher_of_the_same_vocabulary(teacher):
    check(*ON_RANKS, "teacher", "--opd-top-k", "300")
    (teacher / "tokenizer.json").unlink()  # it is not needed
    check(*ON_RANKS, "teacher")


def test_no_checkpoint(run_folder):
    with pytest.raises(SettingsError, match=r"^opd_teacher_load .*nothing is no directory"):
        check(*ON_RANKS, "nothing")


def test_another_tokenizer(teacher):
    tokenizer = json.loads((teacher / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"] |= {"t1": 2, "t2": 1}
    (teacher / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(SettingsError, match=r"has another tokenizer than hf_checkpoint .*same family"):
        check(*ON_RANKS, "teacher")


def test_heads_that_do_not_divide_over_the_ranks(teacher):
    (teacher / "config.json").write_text(json.dumps({"vocab_size": 300, "num_attention_heads": 9}))
    parallel = ("--actor-num-gpus-per-node", "2", "--tensor-model-parallel-size", "2")
    with pytest.raises(SettingsError, match="does not divide the 9 attention heads"):
        check(*ON_RANKS, "teacher", *parallel)


def test_more_likely_tokens_than_there_are(run_folder):
    with pytest.raises(SettingsError, match=r"^opd_top_k 301 is more than the model's vocab_size 300"):
        check("run.yaml", "--use-opd", "--opd-teacher-url", "http://t:1", "--opd-top-k", "301")
