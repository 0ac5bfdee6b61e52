"""`python -m benchmarks.random_qwen3 DIRECTORY --size 4b`: a Hugging Face checkpoint of random weights, a Qwen3.

For benchmarks that need a model's size and shapes, not its knowledge. Written layer by layer, on a GPU where there is
one, so that 8 GB take seconds and little memory.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.json", "merges.txt")


@dataclass(frozen=True)
class Shape:
    """Of a Qwen3 model; embeddings are tied."""

    hidden: int
    layers: int
    heads: int
    key_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    dtype: torch.dtype = torch.bfloat16


SHAPES = {
    "tiny": Shape(128, 2, 4, 2, 32, 384, 1024, torch.float32),
    "30m": Shape(512, 6, 8, 4, 64, 1536, 16384, torch.float32),
    "120m": Shape(1024, 8, 16, 4, 64, 3072, 16384, torch.float32),
    "0.6b": Shape(1024, 28, 16, 8, 128, 3072, 151936),
    "1.5b": Shape(1536, 32, 16, 8, 128, 6144, 151936),
    "4b": Shape(2560, 36, 32, 8, 128, 9728, 151936),
}


def write_random_qwen3(directory: Path, shape: Shape, tokenizer: Path | None = None) -> int:
    """Writes the checkpoint; returns its bytes of weights. `tokenizer`: a directory to copy one from; the demo's when
    there is none."""
    directory.mkdir(parents=True, exist_ok=True)
    dtype = str(shape.dtype).removeprefix("torch.")
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": shape.vocabulary,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.key_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "use_sliding_window": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "dtype": dtype,
        "torch_dtype": dtype,
    }
    (directory / "config.json").write_text(json.dumps(config, indent=2))
    _write_tokenizer(directory, tokenizer)
    files = list(_parts(shape))
    places, total = {}, 0
    for number, tensors in enumerate(files, 1):
        name = f"model-{number:05d}-of-{shape.layers + 1:05d}.safetensors"
        made = {key: _random(size, shape.dtype) for key, size in tensors.items()}
        save_file(made, directory / name, {"format": "pt"})
        places |= dict.fromkeys(made, name)
        total += sum(tensor.nbytes for tensor in made.values())
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return total


def _parts(shape: Shape) -> Iterator[dict[str, tuple[int, ...]]]:
    """Shapes by name, a file at a time."""
    query, key = shape.heads * shape.head_dim, shape.key_heads * shape.head_dim
    yield {
        "model.embed_tokens.weight": (shape.vocabulary, shape.hidden),
        "model.norm.weight": (shape.hidden,),
    }
    for layer in range(shape.layers):
        sizes = {
            "input_layernorm": (shape.hidden,),
            "post_attention_layernorm": (shape.hidden,),
            "self_attn.q_proj": (query, shape.hidden),
            "self_attn.k_proj": (key, shape.hidden),
            "self_attn.v_proj": (key, shape.hidden),
            "self_attn.o_proj": (shape.hidden, query),
            "self_attn.q_norm": (shape.head_dim,),
            "self_attn.k_norm": (shape.head_dim,),
            "mlp.gate_proj": (shape.intermediate, shape.hidden),
            "mlp.up_proj": (shape.intermediate, shape.hidden),
            "mlp.down_proj": (shape.hidden, shape.intermediate),
        }
        yield {f"model.layers.{layer}.{name}.weight": size for name, size in sizes.items()}


def _random(size: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if len(size) == 1:
        return torch.ones(size, dtype=dtype)
    return (torch.randn(size, device=device, dtype=dtype) * 0.02).cpu()


def _write_tokenizer(directory: Path, source: Path | None) -> None:
    if source is None:
        from examples.first_run.model import make_tokenizer

        make_tokenizer().save_pretrained(directory)
        return
    for name in _TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copy(source / name, directory / name)


def main() -> None:
    """Command line entry."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.random_qwen3", description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--size", choices=SHAPES, default="4b")
    parser.add_argument("--tokenizer", type=Path, help="directory with a tokenizer; the demo's without one")
    chosen = parser.parse_args()
    torch.manual_seed(0)
    total = write_random_qwen3(chosen.directory, SHAPES[chosen.size], chosen.tokenizer)
    print(f"{total / 1e9:.2f} GB of weights in {chosen.directory}")


if __name__ == "__main__":
    main()
