# ruff: noqa: E501, SIM905 (sentences and command lines stand as they are read and typed)
"""Bad input: one exact sentence, exit code 2, nothing started."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from services.common.process import free_port
from services.common.settings import SettingsError
from services.console.adapters.engine_arguments import check_engine_arguments
from services.console.cli.app import exit_code
from services.console.core.flags import parse_flags
from services.console.core.resolve import resolve
from services.console.core.show_spec import to_yaml
from services.console.core.validate import validate
from tests.unit.console.conftest import CONFIG, write_rows


def sentence(*tokens: str) -> str:
    """What `tetrarch train` says to a command line that it refuses."""
    with pytest.raises(SettingsError) as caught:
        validate(resolve(parse_flags(tokens or ("run.yaml",))))
    assert exit_code(caught.value) == 2
    return str(caught.value)


def test_the_run_itself_is_valid(run_folder):
    spec = resolve(parse_flags(["run.yaml", "--lr", "1e-5", "--no-use-dynamic-batch-size"]))
    validate(spec)
    assert spec.run_id == "run"
    assert spec.trainer.lr == 1e-5
    assert not spec.trainer.use_dynamic_batch_size
    assert spec.data.prompt_data == str(run_folder / "train.jsonl")
    assert spec.data.eval_datasets == {"held": str(run_folder / "eval.jsonl")}
    assert spec.trainer.save == str(run_folder / "runs" / "run" / "checkpoints")


def test_stored_form_gives_the_same_run(run_folder):
    spec = resolve(parse_flags(["run.yaml", "--sglang-mem-fraction-static", "0.5"]))
    (run_folder / "again.yaml").write_text(to_yaml(spec))
    assert resolve(parse_flags(["again.yaml"])) == spec


def test_no_checkpoints_when_the_file_says_so(edit):
    edit("trainer:", "trainer:\n  save: null")
    assert resolve(parse_flags(["run.yaml"])).trainer.save is None


# -- keys


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        (
            "num_rollout:",
            "num_rollot:",
            "run.yaml:7: unknown key rollout.num_rollot; did you mean 'num_rollout'?",
        ),
        (
            "  num_rollout: 3",
            "  num_rollout: 3\n  lr: 1e-5",
            "run.yaml:8: lr belongs to the group 'trainer', not 'rollout'; move it below 'trainer:'.",
        ),
        ("trainer:", "lr: 1e-5\ntrainer:", "run.yaml:10: lr belongs to the group 'trainer'; move it below 'trainer:'."),
        ("trainer:", "trianer:", "run.yaml:10: unknown key 'trianer'; did you mean 'trainer'?"),
        (
            "trainer:",
            "trainer:\n  colocate: true",
            "run.yaml:11: colocate does not apply: trainer and engines are separate services on separate devices;"
            " nothing is swapped in and out.",
        ),
        (
            "  num_rollout: 3",
            "  num_rollout: 3\n  sglang: {tp_size: 2}",
            "run.yaml:8: rollout.sglang.tp_size does not apply: set rollout_num_gpus_per_engine.",
        ),
        ("  num_rollout: 3\n", "", "run.yaml: missing key rollout.num_rollout; it has no default: set it in the run file or with --num-rollout."),
        ("num_rollout: 3", "num_rollout: x", "run.yaml:7: rollout.num_rollout is 'x': input should be a valid integer, unable to parse string as an integer."),
        ("num_rollout: 3", "num_rollout: 0", "run.yaml:7: rollout.num_rollout is 0: input should be greater than or equal to 1."),
        ("trainer:", "trainer:\n  lr: 1\n  lr: 2", "run.yaml:12: trainer.lr is given twice, first on line 11; keep one."),
        (
            "trainer:",
            "reward:\n  rm_type: exact_mach\ntrainer:",
            "run.yaml:10: rm_type 'exact_mach' is not a grader; use one of exact_match, math, custom; did you mean 'exact_match'?",
        ),
        (
            "trainer:",
            "trainer:\n  advantage_estimator: pppo",
            "run.yaml:11: trainer.advantage_estimator is 'pppo': not an advantage estimator; use one of grpo, dr_grpo, gspo, cispo, rloo, remax, reinforce_plus_plus, reinforce_plus_plus_baseline, ppo, custom; did you mean 'ppo'?",
        ),
        (
            "trainer:",
            "trainer:\n  kl_loss_type: low_var",
            "run.yaml:11: trainer.kl_loss_type is 'low_var': input should be 'k1', 'k2', 'k3' or 'low_var_kl'; did you"
            " mean 'low_var_kl'?",
        ),
        (
            "global_batch_size: 16",
            "global_batch_size: 8",
            "run.yaml: the batch law is violated: rollout_batch_size 4 × n_samples_per_prompt 4 = 16, but"
            " global_batch_size 8 × num_steps_per_rollout 1 = 8; change one so that both are equal.",
        ),
        (
            "trainer:",
            "trainer:\n  tensor_model_parallel_size: 2",
            "run.yaml:10: tensor_model_parallel_size 2 does not divide the 1 ranks of actor_num_nodes 1 ×"
            " actor_num_gpus_per_node 1.",
        ),
        ("data:", "data: [", "run.yaml:6: not valid YAML (did not find expected ',' or ']')."),
    ],
)  # fmt: skip
def test_keys_and_values_in_the_file(edit, old, new, expected):
    edit(old, new)
    found = sentence()
    if "not valid YAML" in expected:
        assert found.startswith("run.yaml:")
        assert "not valid YAML" in found
    else:
        assert found == expected


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--lr fast", "--lr is 'fast': input should be a valid number, unable to parse string as a number."),
        ("--eps-clip -1", "--eps-clip is -1: input should be greater than or equal to 0."),
        ("--advantage-estimator grppo", "--advantage-estimator is 'grppo': not an advantage estimator; use one of grpo, dr_grpo, gspo, cispo, rloo, remax, reinforce_plus_plus, reinforce_plus_plus_baseline, ppo, custom; did you mean 'grpo'?"),
        ("--rm-type mth", "run.yaml: rm_type 'mth' is not a grader; use one of exact_match, math, custom; did you mean 'math'?"),
        ("--run-id a/b", "--run-id is 'a/b': use 1 to 64 letters, digits, '-', '_' or '.', beginning with a letter or digit."),
        ("--num-steps-per-rollout 2", "run.yaml: the batch law is violated: rollout_batch_size 4 × n_samples_per_prompt 4 = 16, but global_batch_size 16 × num_steps_per_rollout 2 = 32; change one so that both are equal."),
    ],
)  # fmt: skip
def test_values_of_flags(run_folder, flags, expected):
    assert sentence("run.yaml", *flags.split()) == expected


def test_missing_run_file(run_folder):
    assert sentence("nope.yaml") == "Cannot read nope.yaml: No such file or directory."


# -- data


def test_missing_data(run_folder):
    (run_folder / "train.jsonl").unlink()
    assert sentence() == (
        f"prompt_data {run_folder}/train.jsonl does not exist; give the path of a JSONL file, one object a line, or of parquet."
    )


def test_no_data(edit):
    edit("  prompt_data: train.jsonl\n", "")
    assert sentence() == "prompt_data is not set; name the JSONL file of prompts with --prompt-data FILE."


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ('{"input": "a" "label"}', ":9: not valid JSON (Expecting ',' delimiter at column 15); correct the line."),
        ('["a"]', ":9: expected a JSON object, found a list; write {...}, one object a line."),
        ('{"prompt": "a", "label": "b"}', ":9: no field 'input', which input_key names; the fields of this row are 'prompt', 'label'. Set input_key or correct the row."),
        ('{"input": "a"}', ":9: no field 'label', which label_key names; the fields of this row are 'input'. Set label_key or correct the row."),
        ('{"input": 3, "label": "b"}', ":9: field 'input' (input_key) is a number; a prompt is a text or a list of messages with role and content."),
        ('{"input": "", "label": "b"}', ":9: field 'input' (input_key) is empty; a prompt is a text or a list of messages with role and content."),
    ],
)  # fmt: skip
def test_malformed_line(run_folder, line, expected):
    path = run_folder / "train.jsonl"
    path.write_text(path.read_text() + line + "\n")
    assert sentence() == f"{path}{expected}"


def test_line_that_is_no_text(run_folder):
    path = run_folder / "train.jsonl"
    path.write_bytes(path.read_bytes() + b'\n{"input": "\xff"}\n')
    assert sentence() == f"{path}:10: not UTF-8 text; convert the file."


def test_empty_data(run_folder):
    (run_folder / "train.jsonl").write_text("\n\n")
    assert sentence() == f"prompt_data {run_folder}/train.jsonl has no rows; write one JSON object a line."


def test_evaluation_data_with_a_field_of_its_own(run_folder):
    write_rows(run_folder / "eval.jsonl", [{"question": "a", "label": "b"}])
    assert sentence() == (
        f"{run_folder}/eval.jsonl:1: no field 'input', which input_key names; the fields of this row are 'question',"
        " 'label'. Set input_key or correct the row."
    )
    validate(resolve(parse_flags(["run.yaml", "--eval-input-key", "question"])))


def test_messages_and_slices_are_fine(run_folder):
    write_rows(run_folder / "train.jsonl", [{"input": [{"role": "user", "content": "a"}], "label": "b"}] * 4)
    validate(resolve(parse_flags(["run.yaml", "--prompt-data", "train.jsonl@[0:2]"])))


# -- checkpoints


def test_checkpoint_that_is_no_directory(run_folder):
    assert sentence("run.yaml", "--hf-checkpoint", "org/name") == (
        f"hf_checkpoint {run_folder}/org/name is no directory; give a Hugging Face checkpoint on this machine"
        " (hf download NAME --local-dir DIR fetches one)."
    )


def test_checkpoint_without_configuration(run_folder):
    (run_folder / "model" / "config.json").unlink()
    assert sentence() == (
        f"hf_checkpoint {run_folder}/model has no config.json; give the directory of a Hugging Face checkpoint."
    )


def test_checkpoint_without_weights(run_folder):
    (run_folder / "model" / "model.safetensors").unlink()
    assert sentence() == (
        f"hf_checkpoint {run_folder}/model has no weights (model.safetensors); download or export it completely."
    )


def test_tokenizer_larger_than_the_model(run_folder):
    (run_folder / "model" / "config.json").write_text(json.dumps(CONFIG | {"vocab_size": 290}))
    assert sentence() == (
        f"hf_checkpoint {run_folder}/model: the tokenizer's largest id is 290 (tokenizer.json) but the model has"
        " vocab_size 290 (config.json), so ids from 290 on have no embedding; use the tokenizer that belongs to the"
        " model."
    )


def test_reference_model_and_load(run_folder):
    assert "ref_load" in sentence("run.yaml", "--ref-load", "nothing")
    assert sentence("run.yaml", "--load", "nothing") == (
        f"load {run_folder}/nothing does not exist; give a directory of trainer checkpoints."
    )


def test_more_ranks_than_key_value_heads(run_folder):
    flags = "run.yaml --actor-num-gpus-per-node 4 --tensor-model-parallel-size 4".split()
    assert sentence(*flags) == (
        "tensor_model_parallel_size 4 is more than the 2 key-value heads of the model (config.json); use at most 2."
    )


def test_engine_ranks_that_do_not_divide_the_heads(run_folder):
    flags = "run.yaml --rollout-num-gpus 3 --rollout-num-gpus-per-engine 3".split()
    assert sentence(*flags) == (
        "rollout_num_gpus_per_engine 3 does not divide the 8 attention heads of the model (config.json)."
    )


# -- functions of the user


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("reward", "is no import path; write package.module.function."),
        ("rewards.score", ": there is no module 'rewards'; correct the path, or put its directory on PYTHONPATH."),
        ("mine.scor", ": {}/mine.py defines no 'scor'; did you mean 'score'?"),
        ("broken.score", "{}/broken.py:1: not valid Python ('(' was never closed); correct it."),
    ],
)
def test_functions_that_cannot_be_found(run_folder, path, expected):
    (run_folder / "mine.py").write_text("raise SystemExit('must not be imported')\ndef score(x): return 1.0\n")
    (run_folder / "broken.py").write_text("def score(\n")
    found = sentence("run.yaml", "--custom-rm-path", path)
    assert found.endswith(expected.format(run_folder))
    assert "broken" in path or found.startswith(f"custom_rm_path {path!r}")
    validate(resolve(parse_flags(["run.yaml", "--custom-generate-function-path", "mine.score"])))


def test_misspelt_engine_argument(run_folder):
    spec = resolve(parse_flags(["run.yaml", "--sglang-mem-fraction-statc", "0.5"]))
    with pytest.raises(SettingsError) as caught:
        check_engine_arguments(spec.rollout)
    assert str(caught.value) == (
        "rollout.sglang.mem_fraction_statc is no argument of sglang; did you mean 'mem_fraction_static'?"
    )
    spec = resolve(parse_flags(["run.yaml", "--sglang-router-max-payload-sise", "5"]))
    with pytest.raises(SettingsError, match="did you mean 'max_payload_size'"):
        check_engine_arguments(spec.rollout)
    flags = ["--sglang-mem-fraction-static", "0.5", "--sglang-disable-radix-cache", "--sglang-log-level", "info"]
    check_engine_arguments(resolve(parse_flags(["run.yaml", *flags])).rollout)


# -- the command itself


def call(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    root = Path(__file__).resolve().parents[3]
    env = {**os.environ, "PYTHONPATH": f"{root}:{root / 'proto/gen'}"}
    return subprocess.run(
        [sys.executable, "-m", "services.console", *arguments],
        cwd=folder, env=env, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


def test_the_command_says_one_sentence_and_starts_nothing(run_folder):
    result = call(run_folder, "train", "run.yaml", "--rollot-batch-size", "3")
    assert result.returncode == 2
    assert result.stderr == "tetrarch: Unknown flag --rollot-batch-size: did you mean --rollout-batch-size?\n"
    assert result.stdout == ""
    assert not (run_folder / ".tetrarch").exists()
    assert not (run_folder / "runs").exists()


def test_address_that_does_not_answer(run_folder, edit):
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
    edit("trainer:", f"services:\n  buffer: 127.0.0.1:{port}\n  trainer: 127.0.0.1:{port}\ntrainer:")
    result = call(run_folder, "train", "run.yaml")
    assert result.returncode == 2
    assert result.stderr == (
        f"tetrarch: services.buffer: 127.0.0.1:{port} does not answer (UNAVAILABLE); start the buffer there, or correct"
        " the address.\n"
    )


def test_only_some_addresses(run_folder, edit):
    edit("trainer:", "services:\n  buffer: 127.0.0.1:1\ntrainer:")
    result = call(run_folder, "train", "run.yaml")
    assert result.returncode == 2
    assert result.stderr == (
        "tetrarch: services names buffer but not trainer; name buffer and trainer, or none of them to start every tier"
        " on this machine.\n"
    )


def test_port_in_use(run_folder):
    flags = ["--store-port", "--buffer-port", "--trainer-port", "--rollout-port"]
    ports = [part for flag in flags for part in (flag, str(free_port()))]
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        result = call(run_folder, "up", *ports, "--reward-port", str(port))
    assert result.returncode == 2
    assert result.stderr == (
        f"tetrarch: --reward-port is {port}: the port is in use on 127.0.0.1; stop the process that has it, or choose"
        " another with --reward-port.\n"
    )
    assert not (run_folder / ".tetrarch" / "store").exists()


def test_check_only(run_folder):
    result = call(run_folder, "train", "run.yaml", "--check", "--lr", "3e-5")
    assert result.returncode == 0
    assert "lr 3e-05" in result.stdout
    assert not (run_folder / "runs").exists()


def test_help_is_light():
    code = "import sys; from services.console.cli.app import app; print([m for m in ('torch', 'grpc', 'yaml') if m in sys.modules])"
    root = Path(__file__).resolve().parents[3]
    result = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


# -- places


@pytest.mark.parametrize(("flag", "key"), [("--save", "save"), ("--run-dir", "run_dir")])
def test_a_place_below_a_file(run_folder, flag, key):
    (run_folder / "file").write_text("")
    place = run_folder / "file"
    assert sentence("run.yaml", flag, "file/x") == (
        f"{key} {place}/x: {place} is no directory; name another place with {flag}."
    )


def test_a_place_that_takes_no_files(run_folder):
    assert sentence("run.yaml", "--save", "/proc/x") == (
        "save /proc/x: /proc is not writable; permit it, or name another place with --save."
    )


def test_a_function_in_a_package_without_init(run_folder):
    folder = run_folder / "apart" / "inner"
    folder.mkdir(parents=True)
    (folder / "code.py").write_text("def generate(): ...\n")
    assert sentence("run.yaml", "--custom-generate-function-path", "apart.inner.code.generat") == (
        f"custom_generate_function_path 'apart.inner.code.generat': {folder / 'code.py'} defines no 'generat';"
        " did you mean 'generate'?"
    )


def test_none_unsets_a_list(run_folder):
    spec = resolve(parse_flags(["run.yaml", "--eval-prompt-data", "none", "--eval-interval", "none"]))
    assert spec.data.eval_prompt_data in ([], ())
