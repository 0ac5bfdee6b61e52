"""Engines for tests: a tiny checkpoint (Qwen3, random weights, byte-level tokenizer), real engine processes on
it, and the trainer's side of a weight group."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from services.common.process import free_port
from services.rollout.adapters.sglang_launch import SGLangFactory
from services.rollout.adapters.simulated import SimulatedFactory
from services.rollout.core.engine_port import Engine, GroupSpec, LaunchSpec, TensorSpec

# No multiple of 64: SGLang then holds rows of zeros that the checkpoint does not have.
VOCAB_SIZE = 300
EOS_ID = 257
CONTEXT_LENGTH = 512


def write_checkpoint(
    directory: Path, *, hidden_size: int = 64, layers: int = 2, tied: bool = False, seed: int = 0
) -> Path:
    """Write a Hugging Face checkpoint and its tokenizer to `directory`; returns it. Needs neither torch nor
    transformers."""
    directory.mkdir(parents=True, exist_ok=True)
    head_dim = hidden_size // 4
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": hidden_size,
        "intermediate_size": 2 * hidden_size,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": head_dim,
        "max_position_embeddings": CONTEXT_LENGTH,
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
        "dtype": "float32",
    }
    (directory / "config.json").write_text(json.dumps(config, indent=2))
    save_file(_tensors(hidden_size, head_dim, layers, tied, seed), directory / "model.safetensors", {"format": "pt"})
    write_tokenizer(directory)
    return directory


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
        return FACTORIES[self.kind]().build(0, self.port, self.spec).engine

    def stop(self) -> None:
        """End the process and its children."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


FACTORIES = {"simulated": SimulatedFactory, "sglang-cpu": SGLangFactory}


def start_engine(kind: str, checkpoint: Path, directory: Path, **spec_options) -> EngineProcess:
    """Start an engine of a kind of FACTORIES on `checkpoint` and wait until it is healthy."""
    spec = LaunchSpec(model_path=checkpoint, device="cpu", **spec_options)
    port = free_port()
    launch = FACTORIES[kind]().build(0, port, spec)
    log_path = directory / f"{kind}-{port}.log"
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            launch.argv,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)} | dict(launch.env),
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    engine = EngineProcess(kind, checkpoint, port, spec, process, log_path)
    begun = time.monotonic()
    try:
        _wait_until_healthy(engine, begun + launch.start_seconds)
    except BaseException:
        engine.stop()
        raise
    engine.start_seconds = time.monotonic() - begun
    return engine


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


class TrainerSide:
    """Rank 0 of a weight group, as a trainer holds it: joins, broadcasts flat buckets, leaves."""

    def __init__(self, name: str) -> None:
        self.spec = GroupSpec(name, "gloo", "127.0.0.1", free_port(), world_size=2, rank_offset=1)
        self._group = None
        self._store = None

    def join(self, seconds: float = 20.0) -> None:
        """Join; blocks until the engine does."""
        from torch.distributed import TCPStore
        from torch.distributed import distributed_c10d as c10d

        wait = timedelta(seconds=seconds)
        store = TCPStore("127.0.0.1", self.spec.master_port, 2, True, wait, wait_for_workers=False)
        self._group, _ = c10d._new_process_group_helper(
            2,
            0,
            [],
            c10d.Backend("gloo"),
            c10d.PrefixStore(self.spec.name, store),
            group_name=self.spec.name,
            timeout=wait,
        )
        c10d._world.pg_group_ranks[self._group] = {0: 0, 1: 1}
        self._store = store

    def send(self, tensors: dict) -> None:
        """Broadcast the bytes of `tensors` (name -> torch tensor) one after the other, as one flat tensor."""
        import torch

        flat = torch.cat([tensor.contiguous().flatten().view(torch.uint8) for tensor in tensors.values()])
        self._group.broadcast(flat, 0).wait()

    def leave(self) -> None:
        """Leave the group and close its store; the engine's side sees closed connections."""
        import torch.distributed

        if self._group is not None:
            torch.distributed.destroy_process_group(self._group)
        self._group = None
        self._store = None
        gc.collect()


def tensor_specs(tensors: dict) -> list[TensorSpec]:
    """Specs of torch tensors by name."""
    return [TensorSpec(name, str(t.dtype).removeprefix("torch."), tuple(t.shape)) for name, t in tensors.items()]


def tensor_bytes(tensor) -> bytes:
    """Raw bytes of a torch tensor."""
    import torch

    return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()
