"""Engines for tests: a tiny checkpoint (Qwen3, random weights, byte-level tokenizer), real engine processes of
several kinds on it. Imports no torch before it is needed."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from services.common.devices import visible_gpus
from services.common.process import free_port
from services.rollout.adapters.checkpoint import installed_version
from services.rollout.adapters.sglang_launch import SGLangFactory
from services.rollout.adapters.sglang_release import RELEASES, Release, release_of
from services.rollout.adapters.simulated import SimulatedFactory
from services.rollout.core.engine_port import HIGHEST_PORT, Engine, LaunchSpec
from tests.support.weight_group import TrainerSide

# No multiple of 64: SGLang then holds rows of zeros that the checkpoint does not have.
VOCAB_SIZE = 300
EOS_ID = 257
CONTEXT_LENGTH = 512
START_SECONDS = 240.0
"""The longest a test waits for an engine."""


def write_checkpoint(
    directory: Path,
    *,
    hidden_size: int = 64,
    layers: int = 2,
    tied: bool = False,
    seed: int = 0,
    dtype: str = "float32",
    context_length: int = CONTEXT_LENGTH,
) -> Path:
    """Write a Hugging Face checkpoint and its tokenizer to `directory`; returns it. In float32 this needs neither torch
    nor transformers."""
    directory.mkdir(parents=True, exist_ok=True)
    head_dim = hidden_size // 4
    config = _config(hidden_size, layers, tied) | {"dtype": dtype, "max_position_embeddings": context_length}
    (directory / "config.json").write_text(json.dumps(config, indent=2))
    _save(_tensors(hidden_size, head_dim, layers, tied, seed), directory / "model.safetensors", dtype)
    write_tokenizer(directory)
    return directory


def _config(hidden_size: int, layers: int, tied: bool) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": hidden_size,
        "intermediate_size": 2 * hidden_size,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": hidden_size // 4,
        "tie_word_embeddings": tied,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "use_cache": True,
        "use_sliding_window": False,
        "bos_token_id": 256,
        "eos_token_id": EOS_ID,
        "pad_token_id": 258,
    }


def _save(tensors: dict[str, np.ndarray], path: Path, dtype: str) -> None:
    if dtype == "float32":
        save_file(tensors, path, {"format": "pt"})
        return
    import torch
    from safetensors.torch import save_file as save_torch_file

    converted = {name: torch.from_numpy(value).to(getattr(torch, dtype)) for name, value in tensors.items()}
    save_torch_file(converted, path, {"format": "pt"})


def _tensors(hidden: int, head_dim: int, layers: int, tied: bool, seed: int) -> dict[str, np.ndarray]:
    """Random weights by Hugging Face name, 4 query and 2 key heads."""
    rng = np.random.default_rng(seed)

    def matrix(*shape: int) -> np.ndarray:
        return (rng.standard_normal(shape) * 0.1).astype(np.float32)

    def ones(size: int) -> np.ndarray:
        return np.ones(size, dtype=np.float32)

    tensors = {"model.embed_tokens.weight": matrix(VOCAB_SIZE, hidden), "model.norm.weight": ones(hidden)}
    if not tied:
        tensors["lm_head.weight"] = matrix(VOCAB_SIZE, hidden)
    for layer in range(layers):
        weights = {
            "input_layernorm": ones(hidden),
            "post_attention_layernorm": ones(hidden),
            "self_attn.q_proj": matrix(4 * head_dim, hidden),
            "self_attn.k_proj": matrix(2 * head_dim, hidden),
            "self_attn.v_proj": matrix(2 * head_dim, hidden),
            "self_attn.o_proj": matrix(hidden, 4 * head_dim),
            "self_attn.q_norm": ones(head_dim),
            "self_attn.k_norm": ones(head_dim),
            "mlp.gate_proj": matrix(2 * hidden, hidden),
            "mlp.up_proj": matrix(2 * hidden, hidden),
            "mlp.down_proj": matrix(hidden, 2 * hidden),
        }
        tensors |= {f"model.layers.{layer}.{name}.weight": value for name, value in weights.items()}
    return tensors


def write_tokenizer(directory: Path) -> None:
    """Byte-level: id = rank of the byte's printable character, specials from 256."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={char: index for index, char in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<bos>", "<eos>", "<pad>"])
    backend.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "pad_token": "<pad>",
        "model_max_length": CONTEXT_LENGTH,
        "clean_up_tokenization_spaces": False,
        "chat_template": "{% for m in messages %}{{ m['content'] }}\n{% endfor %}",
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2))


@dataclass(frozen=True)
class EngineKind:
    """A kind of engine under test and what can be expected of it."""

    factory: type
    device: str = "cpu"
    dtype: str = "float32"
    checkpoint: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of `write_checkpoint`."""
    sglang: Mapping[str, Any] = field(default_factory=dict)
    context_length: int = CONTEXT_LENGTH
    long_tokens: int = 300
    """Of a request that still runs after half a second."""
    group_seconds: float = 4.0
    """Longest wait for a member of a weight group."""
    repeat_atol: float = 1e-5
    """Between log-probs of the same tokens in two requests."""
    mean_atol: float = 1e-5
    max_atol: float = 1e-4
    """Between its log-probs and those of transformers in float32 with the same weights: mean and largest."""


KINDS = {
    "simulated": EngineKind(SimulatedFactory),
    "sglang-cpu": EngineKind(SGLangFactory),
    # bfloat16, heads of 64 and cache rows of 256 bytes (2 heads): shapes whose kernels SGLang has ready or compiles
    # once. bfloat16 keeps 8 bits: the differences allowed are some three times what this model shows.
    "sglang-cuda": EngineKind(
        SGLangFactory,
        device="cuda",
        dtype="bfloat16",
        checkpoint={"hidden_size": 256, "dtype": "bfloat16", "context_length": 8192},
        sglang={
            "attention_backend": "triton",
            "sampling_backend": "pytorch",
            "grammar_backend": "none",
            "cuda_graph_backend_prefill": "disabled",
            "cuda_graph_max_bs_decode": 64,
            "mem_fraction_static": 0.3,
            "max_total_tokens": 200_000,
        },
        context_length=8192,
        long_tokens=4000,
        group_seconds=10.0,
        repeat_atol=0.1,
        mean_atol=0.06,
        max_atol=0.5,
    ),
}


def missing(kind: str) -> str:
    """Why an engine of this kind cannot run here; empty when it can."""
    if kind == "simulated":
        return ""
    if importlib.util.find_spec("sglang") is None:
        return "sglang is not installed"
    version, device = installed_version("sglang"), KINDS[kind].device
    if device == "cuda":
        return "" if visible_gpus() else "there is no CUDA device"
    return "" if release_of(version).checksums.get("cpu") else f"sglang {version} does not run on the CPU"


@dataclass
class EngineProcess:
    """A running engine; `client()` gives a fresh client, bound to the event loop that uses it first."""

    kind: str
    checkpoint: Path
    port: int
    spec: LaunchSpec
    process: subprocess.Popen
    log_path: Path
    start_seconds: float = 0.0

    def client(self) -> Engine:
        """A client of this engine."""
        return self.traits.factory().build(0, self.port, self.spec).engine

    @property
    def traits(self) -> EngineKind:
        """What can be expected of its kind."""
        return KINDS[self.kind]

    @property
    def release(self) -> Release:
        """What its release promises; the simulated engine promises what the newest does."""
        return RELEASES[-1] if self.kind == "simulated" else release_of(installed_version("sglang"))

    def trainer_side(self, name: str) -> TrainerSide:
        """The trainer's side of a group with this engine: over NCCL between two GPUs, else over gloo."""
        if self.traits.device == "cuda" and len(visible_gpus()) > 1:
            return TrainerSide(name, "nccl", "cuda:0")
        return TrainerSide(name)

    def stop(self) -> None:
        """End the process and its children."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def start_engine(kind: str, checkpoint: Path, directory: Path, **spec_options) -> EngineProcess:
    """Start an engine of one of KINDS on `checkpoint` and wait until it is healthy."""
    traits = KINDS[kind]
    options = {"group_timeout": traits.group_seconds, "sglang": traits.sglang} | spec_options
    spec = LaunchSpec(model_path=checkpoint, device=traits.device, **options)
    port = free_port(highest=HIGHEST_PORT)
    launch = traits.factory().build(0, port, spec)
    log_path = directory / f"{kind}-{port}.log"
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            launch.argv,
            env=os.environ | _placement(traits) | {"PYTHONPATH": os.pathsep.join(sys.path)} | dict(launch.env),
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    engine = EngineProcess(kind, checkpoint, port, spec, process, log_path)
    begun = time.monotonic()
    try:
        _wait_until_healthy(engine, begun + min(launch.start_seconds, START_SECONDS))
    except BaseException:
        engine.stop()
        raise
    engine.start_seconds = time.monotonic() - begun
    return engine


def _placement(traits: EngineKind) -> dict[str, str]:
    """The last visible device: with two, the first is the trainer's."""
    if traits.device != "cuda":
        return {}
    return {"CUDA_VISIBLE_DEVICES": visible_gpus()[-1]}


def _wait_until_healthy(engine: EngineProcess, deadline: float) -> None:
    while not _healthy(engine.port):
        if engine.process.poll() is not None or time.monotonic() > deadline:
            tail = engine.log_path.read_text(errors="replace")[-3000:]
            raise RuntimeError(f"{engine.kind} engine did not start:\n{tail}")
        time.sleep(0.2)


def _healthy(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2) as answer:
            return answer.status == 200
    except OSError:
        return False
