"""Mixtures of experts: megatron's own MoE layers and router, with this package's activation.

All experts are on every rank, cut over the tensor-parallel ranks like an MLP; each expert is a matrix product of its
own, which needs neither TransformerEngine nor a grouped kernel. There is no auxiliary loss: reinforcement learning
starts from a balanced model, and a loss that is not the objective would move it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.spec_utils import ModuleSpec

from services.trainer.ranks.model.hf_config import Experts, HfConfig


def expert_options(hf: HfConfig, tensor_parallel_size: int) -> dict[str, Any]:
    """What megatron's configuration says of experts; nothing for a dense model."""
    experts = hf.experts
    if experts is None:
        return {}
    return {
        "num_moe_experts": experts.count,
        "moe_router_topk": experts.per_token,
        "moe_ffn_hidden_size": experts.intermediate_size,
        "moe_router_pre_softmax": not experts.normalised,
        "moe_layer_freq": [int(layer in experts.layers) for layer in range(hf.layers)],
        "moe_router_load_balancing_type": "none",
        "moe_router_dtype": "fp32",
        "moe_grouped_gemm": False,
        "expert_tensor_parallel_size": tensor_parallel_size,
    }


def set_activation(mlp: ModuleSpec, activation: type) -> None:
    """Gives an MLP, or the experts that stand in its place, an activation."""
    owner = mlp.submodules.experts if mlp.module is MoELayer else mlp
    owner.submodules.activation_func = activation


def routers(model: GPTModel, experts: Experts) -> Iterator[tuple[int, TopKRouter]]:
    """Number and router of every layer with experts, in order."""
    for layer in experts.layers:
        yield layer, model.decoder.layers[layer].mlp.router
