"""On-policy distillation: every key has an effect or is refused, with the remedy."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from services.common.run_spec import RunSpec
from services.common.settings import explain

ENGINE = {"use_opd": True, "opd_teacher_url": "http://teacher:30000"}
RANKS = {"use_opd": True, "opd_type": "megatron", "opd_teacher_load": "teacher"}


def build(trainer: dict, **rollout) -> RunSpec:
    base = {"hf_checkpoint": "model", "num_rollout": 3, "rollout_batch_size": 4, "n_samples_per_prompt": 2}
    return RunSpec.model_validate({"rollout": base | rollout, "trainer": trainer, "data": {"label_key": "label"}})


@pytest.mark.parametrize("trainer", [ENGINE, RANKS, ENGINE | {"opd_top_k": 8}, RANKS | {"opd_top_k": 8}])
def test_the_two_kinds_of_teacher(trainer):
    spec = build(trainer)
    assert spec.trainer.opd_sampled is ("opd_top_k" not in trainer)
    assert RunSpec.model_validate_json(spec.model_dump_json()) == spec


def test_without_distillation_a_stored_run_reads_back():
    spec = build({})
    assert not spec.trainer.opd_sampled
    assert RunSpec.model_validate_json(spec.model_dump_json()) == spec


def test_a_teacher_on_the_ranks_is_asked_at_the_temperature_of_the_run():
    assert build(RANKS, rollout_temperature=0.7)


@pytest.mark.parametrize(
    ("trainer", "rollout", "sentence"),
    [
        ({"use_opd": True}, {}, "opd_type sglang needs opd_teacher_url"),
        ({"use_opd": True, "opd_type": "megatron"}, {}, "opd_type megatron needs opd_teacher_load"),
        (ENGINE | {"opd_teacher_load": "t"}, {}, "leave it out, or set opd_type megatron"),
        (RANKS | {"opd_teacher_url": "http://t:1"}, {}, "leave it out, or set opd_type sglang"),
        (RANKS | {"opd_teacher_timeout": 3.0}, {}, "opd_teacher_timeout has no effect with opd_type megatron"),
        ({"opd_teacher_url": "http://t:1"}, {}, "opd_teacher_url http://t:1 has no effect without use_opd; set it too"),
        ({"opd_kl_coef": 0.5}, {}, "opd_kl_coef 0.5 has no effect without use_opd"),
        ({"opd_top_k": 4}, {}, "opd_top_k 4 has no effect without use_opd"),
        ({"opd_type": "megatron"}, {}, "opd_type megatron has no effect without use_opd"),
        (ENGINE | {"opd_kl_coef": 0.0}, {}, "opd_kl_coef"),
        (ENGINE | {"opd_top_k": 0}, {}, "opd_top_k"),
        (ENGINE | {"loss_type": "sft_loss"}, {}, "use_opd has no effect with loss_type sft_loss"),
        (
            ENGINE | {"opd_top_k": 4, "use_top_p_replay": True},
            {"rollout_top_p": 0.9},
            "opd_top_k 4 with use_top_p_replay",
        ),
        (ENGINE, {"rollout_temperature": 0.7}, "set rollout_temperature 1, or opd_type megatron"),
        *(
            (ENGINE | {"opd_teacher_url": url}, {}, "is no base URL; write it like http://host:30000")
            for url in ("teacher:30000", "http://", "http://t:99999", "http://t:1/?x=1", "ftp://t:1")
        ),
    ],
)
def test_what_has_no_effect_is_refused_with_the_remedy(trainer, rollout, sentence):
    with pytest.raises(ValidationError) as caught:
        build(trainer, **rollout)
    assert sentence in explain(caught.value, RunSpec)
