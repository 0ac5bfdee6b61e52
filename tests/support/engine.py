"""A tiny checkpoint for engine tests: Qwen3 architecture, random weights, byte-level tokenizer."""

from __future__ import annotations

from pathlib import Path

VOCAB_SIZE = 320
EOS_ID = 257
CONTEXT_LENGTH = 512


def write_checkpoint(
    directory: Path, *, hidden_size: int = 64, layers: int = 2, tied: bool = False, seed: int = 0
) -> Path:
    """Write a Hugging Face checkpoint and its tokenizer to `directory`; returns it."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=hidden_size // 4,
        max_position_embeddings=CONTEXT_LENGTH,
        tie_word_embeddings=tied,
        bos_token_id=256,
        eos_token_id=EOS_ID,
        pad_token_id=258,
    )
    Qwen3ForCausalLM(config).save_pretrained(directory)
    write_tokenizer(directory)
    return directory


def write_tokenizer(directory: Path) -> None:
    """Byte-level: id = rank of the byte's printable character, specials from 256."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={char: index for index, char in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>"
    )
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}\n{% endfor %}"
    tokenizer.save_pretrained(directory)
