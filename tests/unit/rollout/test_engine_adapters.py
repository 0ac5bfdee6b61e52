"""Rules of the engine adapters that need no engine: tensor names, command lines, version spans."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from services.common import devices
from services.common.errors import Code, ServiceError
from services.common.records import SamplingParams, VersionSpan
from services.rollout.adapters.engine_http import read_generations, read_spans, sentence
from services.rollout.adapters.sglang_launch import SGLangFactory, command_line
from services.rollout.adapters.sglang_rules import match_tensors
from services.rollout.adapters.simulated import SimulatedFactory
from services.rollout.core.completion import GenerationRequest
from services.rollout.core.engine_port import LaunchSpec

LAYER = "model.layers.0"
REQUEST = GenerationRequest("r", (1, 2, 3), SamplingParams(max_new_tokens=8))
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
    config = {"vocab_size": 320, "max_position_embeddings": 512, "num_hidden_layers": 2, "hidden_size": 64}
    config |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return LaunchSpec(model_path=tmp_path, device="cpu")


def test_fused_tensors_are_concatenations_in_the_engines_order():
    rules = {rule.engine_name: rule.source_names for rule in match_tensors(HELD, SENT, tied=True)}
    assert list(rules) == HELD
    assert rules[f"{LAYER}.self_attn.qkv_proj.bias"] == tuple(f"{LAYER}.self_attn.{x}_proj.bias" for x in "qkv")
    assert rules[f"{LAYER}.mlp.gate_up_proj.weight"] == tuple(SENT[7:9])


def test_experts_are_one_after_the_other_gate_before_up():
    mlp = f"{LAYER}.mlp"
    parts = ("gate_proj", "up_proj", "down_proj")
    sent = [f"{mlp}.gate.weight", *(f"{mlp}.experts.{i}.{part}.weight" for i in range(11) for part in parts)]
    held = [f"{mlp}.gate.weight", f"{mlp}.experts.w13_weight", f"{mlp}.experts.w2_weight"]
    rules = {rule.engine_name: rule.source_names for rule in match_tensors(held, sent, tied=False)}
    assert rules[held[1]] == tuple(f"{mlp}.experts.{i}.{x}_proj.weight" for i in range(11) for x in ("gate", "up"))
    assert rules[held[2]] == tuple(f"{mlp}.experts.{i}.down_proj.weight" for i in range(11))


def test_experts_that_nobody_sends_are_missing_by_name():
    """An engine that takes a dense layer to have experts."""
    held = [f"{LAYER}.mlp.experts.w2_weight"]
    with pytest.raises(ServiceError, match=r"have no place in the engine, the first is .*down_proj"):
        match_tensors(held, [f"{LAYER}.mlp.down_proj.weight"], tied=False)
    with pytest.raises(ServiceError, match="1 tensors of the engine are not in the update"):
        match_tensors(held, [], tied=False)


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


def test_a_tensor_that_is_not_sent_is_named_also_as_a_part_of_a_fused_one():
    for index, inside in ((8, "gate_up_proj"), (5, r"qkv_proj\.bias"), (9, "down_proj")):
        with pytest.raises(ServiceError, match=rf"first is {SENT[index]} \(of the engine's .*{inside}") as caught:
            match_tensors(HELD, SENT[:index] + SENT[index + 1 :], tied=True)
        assert caught.value.reason == "TENSORS_MISSING"


def test_what_the_checkpoint_does_not_have_either_is_the_engines_own_business():
    rules = match_tensors([*HELD, f"{LAYER}.self_attn.scale"], SENT, set(SENT), tied=True)
    assert [rule.engine_name for rule in rules] == HELD
    with pytest.raises(ServiceError, match="scale"):
        match_tensors([*HELD, f"{LAYER}.self_attn.scale"], SENT, tied=True)


def test_spans_are_cut_to_the_output_and_older_releases_have_one():
    meta = {"weight_versions": [{"version": "3", "start": 0, "end": 2}, {"version": "4", "start": 2, "end": 9}]}
    assert read_spans(meta, 5) == (VersionSpan(3, 0, 2), VersionSpan(4, 2, 5))
    assert read_spans({"weight_version": "default"}, 3) == (VersionSpan(0, 0, 3),)
    assert read_spans(meta, 0) == ()


def test_without_spans_tokens_count_as_made_by_the_oldest_version_possible():
    """What was asked for at version 3 and answered at version 5 began at 3."""
    meta = {"weight_version": "5"}
    assert read_spans(meta, 4, oldest_version=3) == (VersionSpan(3, 0, 4),)
    assert read_spans(meta, 4, oldest_version=5) == (VersionSpan(5, 0, 4),)
    assert read_spans(meta, 4) == (VersionSpan(5, 0, 4),)
    spans = {"weight_versions": [{"version": "5", "start": 0, "end": 4}]}
    assert read_spans(spans, 4, oldest_version=3) == (VersionSpan(5, 0, 4),)


def test_an_abort_before_the_first_token_is_an_empty_generation():
    (generation,) = read_generations({"text": "", "meta_info": {"finish_reason": {"type": "abort"}}}, None, REQUEST)
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


@pytest.fixture
def gpus(tmp_path, monkeypatch):
    """A machine of eight GPUs; call it with those that are visible."""
    for index in range(8):
        (tmp_path / f"nvidia{index}").touch()
    monkeypatch.setattr(devices, "DEVICE_FILES", tmp_path)
    return lambda visible: monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)


def test_an_engine_on_the_cpu_sees_no_gpu(spec, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert SGLangFactory().build(0, 1234, replace(spec, device="cpu")).env["CUDA_VISIBLE_DEVICES"] == ""


def build_cuda(spec, index: int = 0, **changes):
    return SGLangFactory().build(index, 1234, replace(spec, device="cuda", **changes))


def option(launch, name: str) -> str:
    return launch.argv[launch.argv.index(name) + 1] if name in launch.argv else ""


def test_cuda_engines_take_their_devices_in_turn(spec, gpus):
    gpus("2,3,4,5,6,7")
    launch = build_cuda(spec, 2, rank_count=2, engine_count=3)
    assert option(launch, "--base-gpu-id") == "4"
    assert option(launch, "--dtype") == "bfloat16"
    assert "--mem-fraction-static" not in launch.argv
    assert launch.env["NCCL_CUMEM_ENABLE"] == "0"
    assert float(launch.env["TETRARCH_GROUP_TIMEOUT_SECONDS"]) == spec.group_timeout


def test_more_engines_than_devices_share_them(spec, gpus):
    gpus("1")
    launches = [build_cuda(spec, index, engine_count=2) for index in range(2)]
    assert [option(launch, "--base-gpu-id") for launch in launches] == ["0", "0"]
    assert [option(launch, "--mem-fraction-static") for launch in launches] == ["0.425"] * 2
    # 8 GiB at 2 layers x (key, value) x 2 heads x 16 numbers of 2 bytes.
    assert option(launches[0], "--max-total-tokens") == str(2**33 // 256)
    own = build_cuda(spec, 1, engine_count=2, sglang={"mem_fraction_static": 0.3, "max-total-tokens": 5})
    assert (option(own, "--mem-fraction-static"), option(own, "--max-total-tokens")) == ("0.3", "5")
    with pytest.raises(ServiceError, match="does not fit on the 1 that this node sees"):
        build_cuda(spec, rank_count=2)


def test_variables_of_the_node_hold_in_its_engines(spec, monkeypatch):
    monkeypatch.setenv("NCCL_CUMEM_ENABLE", "1")
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    env = build_cuda(spec).env
    assert [env[f"NCCL_{name}"] for name in ("CUMEM_ENABLE", "NVLS_ENABLE", "P2P_DISABLE")] == ["1", "0", "1"]


@pytest.mark.parametrize("key", ["port", "model-path", "--tp-size", "context_length"])
def test_an_argument_the_node_sets_is_refused(spec, key):
    with pytest.raises(ServiceError, match="sets this argument itself") as caught:
        SGLangFactory().build(0, 1234, LaunchSpec(spec.model_path, "cpu", sglang={key: "x"}))
    assert caught.value.code is Code.INVALID_ARGUMENT


def test_a_misspelt_simulation_setting_is_refused(spec):
    with pytest.raises(ServiceError, match="tokens_per_secnd"):
        SimulatedFactory().build(0, 1234, LaunchSpec(spec.model_path, simulated={"tokens_per_secnd": 3}))
