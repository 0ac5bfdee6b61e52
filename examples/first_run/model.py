"""The demo's model: a Qwen3 architecture small enough for two CPU cores, with a tokenizer of 16 characters.

`python -m examples.first_run.model DIRECTORY SEED` writes a Hugging Face checkpoint with random weights.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

SPECIAL = ("<pad>", "<bos>", "<eos>", "<unk>")
CHARACTERS = "0123456789+="
CHAT_TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'user' %}{{ bos_token + message['content'] + '=' }}"
    "{% else %}{{ message['content'] + eos_token }}{% endif %}{% endfor %}"
)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One id per character."""
    vocabulary = {text: number for number, text in enumerate([*SPECIAL, *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", unk_token="<unk>"
    )
    wrapped.chat_template = CHAT_TEMPLATE
    return wrapped


def make_config() -> Qwen3Config:
    """About 0.1 million parameters; two key-value heads, so tensor parallel 2 works too."""
    return Qwen3Config(
        vocab_size=16,
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        initializer_range=0.1,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )


def write_model(directory: Path, seed: int) -> int:
    """Writes the checkpoint; returns the number of parameters."""
    import torch

    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(make_config()).float()
    # Transformers zeroes the padding row; a sampled <pad> would then meet RMSNorm's 1/√eps in the gradient.
    torch.nn.init.normal_(model.model.embed_tokens.weight.data[0], std=model.config.initializer_range)
    model.save_pretrained(directory)
    make_tokenizer().save_pretrained(directory)
    return sum(parameter.numel() for parameter in model.parameters())


if __name__ == "__main__":
    print(write_model(Path(sys.argv[1]), int(sys.argv[2])))
