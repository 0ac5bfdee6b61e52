"""Rules of the engine adapters that need no engine: tensor names, command lines, version spans."""

from __future__ import annotations

import json

import pytest

from services.common.errors import Code, ServiceError
from services.common.records import VersionSpan
from services.rollout.adapters.engine_http import read_generations, read_spans, sentence
from services.rollout.adapters.sglang import match_tensors
from services.rollout.adapters.sglang_launch import SGLangFactory, command_line
from services.rollout.adapters.simulated import SimulatedFactory
from services.rollout.core.engine_port import LaunchSpec

LAYER = "model.layers.0"
SENT = [
    "model.embed_tokens.weight",
    f"{LAYER}.self_attn.q_proj.weight",
    f"{LAYER}.self_attn.k_proj.weight",
    f"{LAYER}.self_attn.v_proj.weight",
    f"{LAYER}.self_attn.q_proj.bias",
    f"{LAYER}.self_attn.k_proj.bias",
    f"{LAYER}.self_attn.v_proj.bias",
    f"{LAYER}.mlp.gate_proj.weight",
    f"{LAYER}.mlp.up_proj.weight",
    f"{LAYER}.mlp.down_proj.weight",
]
HELD = [
    "model.embed_tokens.weight",
    f"{LAYER}.self_attn.qkv_proj.weight",
    f"{LAYER}.self_attn.qkv_proj.bias",
    f"{LAYER}.mlp.gate_up_proj.weight",
    f"{LAYER}.mlp.down_proj.weight",
]


@pytest.fixture
def spec(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 320, "max_position_embeddings": 512}))
    return LaunchSpec(model_path=tmp_path, device="cpu")


def test_fused_tensors_are_concatenations_in_the_engines_order():
    rules = {rule.engine_name: rule.source_names for rule in match_tensors(HELD, SENT, tied=True)}
    assert list(rules) == HELD
    assert rules[f"{LAYER}.self_attn.qkv_proj.bias"] == tuple(f"{LAYER}.self_attn.{x}_proj.bias" for x in "qkv")
    assert rules[f"{LAYER}.mlp.gate_up_proj.weight"] == tuple(SENT[7:9])


def test_tied_embeddings_may_have_either_name_on_either_side():
    embedding, head = "model.embed_tokens.weight", "lm_head.weight"
    assert [rule.engine_name for rule in match_tensors([embedding], [embedding, head], tied=True)] == [embedding]
    rules = match_tensors([embedding, head], [embedding], tied=True)
    assert [(rule.engine_name, rule.source_names) for rule in rules] == [
        (embedding, (embedding,)),
        (head, (embedding,)),
    ]


def test_a_tensor_without_a_place_is_named():
    with pytest.raises(ServiceError, match=r"lm_head\.weight") as caught:
        match_tensors(HELD, [*SENT, "lm_head.weight"], tied=False)
    assert caught.value.reason == "TENSORS_UNKNOWN"


def test_half_a_fused_tensor_has_no_place():
    with pytest.raises(ServiceError, match="gate_proj"):
        match_tensors(HELD, SENT[:8] + SENT[9:], tied=True)


def test_spans_are_cut_to_the_output_and_older_releases_have_one():
    meta = {"weight_versions": [{"version": "3", "start": 0, "end": 2}, {"version": "4", "start": 2, "end": 9}]}
    assert read_spans(meta, 5) == (VersionSpan(3, 0, 2), VersionSpan(4, 2, 5))
    assert read_spans({"weight_version": "default"}, 3) == (VersionSpan(0, 0, 3),)
    assert read_spans(meta, 0) == ()


def test_an_abort_before_the_first_token_is_an_empty_generation():
    (generation,) = read_generations({"text": "", "meta_info": {"finish_reason": {"type": "abort"}}}, None)
    assert (generation.finish_reason, len(generation.output_ids), generation.versions) == ("abort", 0, ())


def test_error_bodies_give_their_sentence():
    assert sentence({"error": {"message": "too long"}}) == "too long"
    assert sentence({"success": False, "message": "no group"}) == "no group"
    assert sentence("") == "(no reason given)"


def test_pass_through_arguments_become_flags_and_win_over_defaults(spec):
    user = {"max-running-requests": 8, "dtype": "bfloat16", "disable_cuda_graph": False, "lora_paths": ["a", "b"]}
    argv = SGLangFactory().build(0, 1234, LaunchSpec(spec.model_path, "cpu", sglang=user)).argv
    assert argv[argv.index("--max-running-requests") + 1] == "8"
    assert argv[argv.index("--max-total-tokens") + 1] == str(8 * 512)
    assert argv[argv.index("--dtype") + 1] == "bfloat16"
    assert argv[argv.index("--lora-paths") + 1 :][:2] == ("a", "b")
    assert "--disable-cuda-graph" not in argv
    assert command_line({"flag": True, "off": False, "none": None, "map": {"a": 1}}) == ["--flag", "--map", '{"a": 1}']


def test_cuda_engines_run_sglangs_own_entry_point_on_their_devices(spec):
    launch = SGLangFactory().build(2, 1234, LaunchSpec(spec.model_path, "cuda", rank_count=2))
    assert launch.argv[1:3] == ("-m", "sglang.launch_server")
    assert launch.argv[launch.argv.index("--base-gpu-id") + 1] == "4"
    assert launch.env["NCCL_CUMEM_ENABLE"] == "0"


@pytest.mark.parametrize("key", ["port", "model-path", "--tp-size", "context_length"])
def test_an_argument_the_node_sets_is_refused(spec, key):
    with pytest.raises(ServiceError, match="sets this argument itself") as caught:
        SGLangFactory().build(0, 1234, LaunchSpec(spec.model_path, "cpu", sglang={key: "x"}))
    assert caught.value.code is Code.INVALID_ARGUMENT


def test_a_misspelt_simulation_setting_is_refused(spec):
    with pytest.raises(ServiceError, match="tokens_per_secnd"):
        SimulatedFactory().build(0, 1234, LaunchSpec(spec.model_path, simulated={"tokens_per_secnd": 3}))
