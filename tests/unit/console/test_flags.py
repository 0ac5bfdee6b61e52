# ruff: noqa: SIM905 (sentences and command lines stand as they are read and typed)
"""Flags of `train`."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.common.run_spec import key_groups
from services.common.settings import SettingsError
from services.console.core.flags import parse_flags
from services.console.core.keys import all_keys
from services.console.core.refused import REFUSED, refusal
from services.console.flag_docs import document

ISSUE_FLAGS = """prompt-data input-key label-key apply-chat-template hf-checkpoint load save save-interval num-rollout
rollout-batch-size n-samples-per-prompt global-batch-size num-steps-per-rollout rollout-max-response-len
rollout-temperature actor-num-nodes actor-num-gpus-per-node rollout-num-gpus rollout-num-gpus-per-engine
advantage-estimator use-kl-loss kl-loss-coef kl-loss-type entropy-coef eps-clip eps-clip-high lr
custom-generate-function-path max-turns rm-type custom-rm-path async-buffer-size update-weights-interval
sglang-router-strategy use-fault-tolerance eval-prompt-data eval-interval""".split()


@pytest.mark.parametrize("flag", ISSUE_FLAGS)
def test_usual_flags_exist(flag):
    assert flag.replace("-", "_") in all_keys()


def test_every_key_of_the_model_is_a_flag_and_none_is_refused():
    assert set(all_keys()) == set(key_groups())
    assert not set(all_keys()) & set(REFUSED)


def test_values_by_kind():
    line = parse_flags(
        "run.yaml --rollout-batch-size 32 --lr=1e-5 --use-kl-loss --no-use-fault-tolerance --rollout-top-k -1"
        " --advantage-estimator grpo --save-interval none --rollout-stop-token-ids 1,2 --rollout-stop-token-ids 3"
        " --run-id a".split()
    )
    assert line.run_file == "run.yaml"
    assert line.values == {
        "": {"run_id": "a"},
        "rollout": {
            "rollout_batch_size": 32,
            "use_fault_tolerance": False,
            "rollout_top_k": -1,
            "rollout_stop_token_ids": [1, 2, 3],
        },
        "trainer": {"lr": 1e-5, "use_kl_loss": True, "advantage_estimator": "grpo", "save_interval": None},
    }


def test_lists_of_text_keep_commas():
    line = parse_flags(["--rollout-stop", "a,b", "</s>", "--lr", "1"])
    assert line.values["rollout"]["rollout_stop"] == ["a,b", "</s>"]


def test_evaluation_sets_are_pairs():
    line = parse_flags("--eval-prompt-data math m.jsonl aime a.jsonl --lr 1".split())
    assert line.values["data"]["eval_prompt_data"] == ["math", "m.jsonl", "aime", "a.jsonl"]


def test_arguments_of_the_engine_and_its_router_pass_through():
    line = parse_flags(
        "--sglang-mem-fraction-static 0.8 --sglang-disable-radix-cache run.yaml --sglang-router-max-payload-size 9"
        " --sglang-router-strategy cache_aware --sglang-attention-backend fa3".split()
    )
    rollout = line.values["rollout"]
    assert rollout["sglang"] == {"mem_fraction_static": 0.8, "disable_radix_cache": True, "attention_backend": "fa3"}
    assert rollout["sglang_router"] == {"max_payload_size": 9}
    assert rollout["sglang_router_strategy"] == "cache_aware"
    assert line.run_file == "run.yaml"


def test_mappings():
    line = parse_flags(["--rm-options", "{strip: true}", "--rm-options", '{"lower": false}'])
    assert line.values["reward"]["rm_options"] == {"strip": True, "lower": False}


@pytest.mark.parametrize(
    ("tokens", "sentence"),
    [
        ("--rollot-batch-size 3", "Unknown flag --rollot-batch-size: did you mean --rollout-batch-size?"),
        ("--no-use-kl-los", "Unknown flag --no-use-kl-los: did you mean --no-use-kl-loss?"),
        ("--zzz 3", "Unknown flag --zzz: every key is listed in docs/flags.md."),
        ("--lr", "--lr needs a value, as in --lr 1e-06."),
        ("--lr --use-kl-loss", "--lr needs a value, as in --lr 1e-06."),
        ("--engine", "--engine needs a value, one of sglang, simulated."),
        ("a.yaml b.yaml", "Unexpected argument 'b.yaml': the run file is 'a.yaml' already, and settings are flags."),
        ("--rm-options x", "--rm-options is 'x': write a mapping, as in --rm-options '{name: value}'."),
        ("--sglang-tp-size 2", "--sglang-tp-size does not apply: set rollout_num_gpus_per_engine."),
        ("--sglang-router-policy x", "--sglang-router-policy does not apply: set sglang_router_strategy."),
        (
            "--colocate",
            "--colocate does not apply: trainer and engines are separate services on separate devices; nothing is"
            " swapped in and out.",
        ),
        (
            "--num-gpus-per-node 8",
            "--num-gpus-per-node does not apply: node width follows from actor_num_gpus_per_node and"
            " rollout_num_gpus_per_engine.",
        ),
        (
            "--wandb-project x",
            "--wandb-project does not apply: a run writes metrics.jsonl and TensorBoard files in its directory.",
        ),
        (
            "--skip-eval-before-train",
            "--skip-eval-before-train does not apply: evaluation before training is a switch of its own: write"
            " --no-eval-before-train.",
        ),
    ],
)
def test_mistakes(tokens, sentence):
    with pytest.raises(SettingsError) as caught:
        parse_flags(tokens.split())
    assert str(caught.value) == sentence


@pytest.mark.parametrize(
    "name",
    "offload use_distributed_post pipeline_model_parallel_size"
    " update_weight_delta_checksum"
    " partial_rollout no_offload_train router_cache_threshold teacher_port".split(),
)
def test_known_flags_that_do_not_apply_have_a_reason(name):
    assert refusal(name)


def test_the_page_of_flags_is_up_to_date():
    page = Path(__file__).resolve().parents[3] / "docs" / "flags.md"
    assert page.read_text() == document(), "run: python -m services.console.flag_docs > docs/flags.md"
