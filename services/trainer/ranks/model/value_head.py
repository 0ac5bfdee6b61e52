"""A critic's model: the policy's architecture with one number per token in place of the logits.

The head is the same on every tensor-parallel rank, and every rank computes all of it: it is `hidden_size` numbers.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig

from services.trainer.ranks.model.build import build_model
from services.trainer.ranks.model.hf_config import HfConfig


class ValueHead(torch.nn.Module):
    """value = w · hidden, float32 whatever the model's type, in the place of megatron's output layer. w begins at zero,
    so that a fresh critic says 0 everywhere."""

    def __init__(self, hidden_size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1, hidden_size, dtype=dtype))

    def forward(self, hidden: torch.Tensor, **_) -> tuple[torch.Tensor, None]:
        """[n, 1, hidden_size] → [n, 1, 1]."""
        return F.linear(hidden.float(), self.weight.float()), None


def build_value_model(hf: HfConfig, config: TransformerConfig, device: torch.device) -> GPTModel:
    """A model of values: called like the policy's, it gives [1, rows, 1]."""
    # With tied weights there is no output layer of the vocabulary's size that would have to be thrown away.
    model = build_model(replace(hf, tied=True), config, device)
    model.output_layer = ValueHead(hf.hidden_size, config.params_dtype).to(device)
    model.share_embeddings_and_output_weights = False
    return model
