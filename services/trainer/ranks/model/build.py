"""Builds megatron-core's GPTModel for a Hugging Face configuration.

Megatron's local layer spec (no TransformerEngine, even where it is installed) with modules swapped: packed attention,
which also does the rotary positions, SwiGLU, and RMS norms that know sequence parallelism. With tensor parallelism the
sequence is split too, up to the last layer.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from services.common.errors import Code, ServiceError
from services.trainer.ranks.model.attention import PackedAttention, RmsNorm, SwiGlu
from services.trainer.ranks.model.experts import expert_options, set_activation
from services.trainer.ranks.model.hf_config import HfConfig, inverse_frequencies


class PackedGpt(GPTModel):
    """A GPTModel that computes logits only at the rows that the pack's layout names: [1, k, vocabulary shard]."""

    def __init__(self, *arguments, **options) -> None:
        super().__init__(*arguments, **options)
        # The sequence is put together here, before rows are taken of it.
        self.output_layer.sequence_parallel = False

    def _postprocess(self, hidden_states, *arguments, packed_seq_params, **options):
        if self.config.sequence_parallel:
            hidden_states = gather_from_sequence_parallel_region(hidden_states, tensor_parallel_output_grad=False)
        if packed_seq_params.rows is not None:
            hidden_states = hidden_states.index_select(0, packed_seq_params.rows)
        return super()._postprocess(hidden_states, *arguments, packed_seq_params=packed_seq_params, **options)


def padded_vocab_size(vocab_size: int, tensor_parallel_size: int) -> int:
    """Rows of the embedding: the vocabulary rounded up so that ranks have equal shards."""
    return -(-vocab_size // tensor_parallel_size) * tensor_parallel_size


def transformer_config(hf: HfConfig, *, bf16: bool, device: torch.device) -> TransformerConfig:
    """megatron's configuration of the model under the current parallel layout.

    Raises:
        ServiceError: MODEL_UNSUPPORTED when heads do not divide over the tensor-parallel ranks.
    """
    ranks = parallel_state.get_tensor_model_parallel_world_size()
    if hf.kv_heads % ranks:
        raise ServiceError(
            Code.INVALID_ARGUMENT,
            "MODEL_UNSUPPORTED",
            f"tensor_model_parallel_size {ranks} does not divide the model's {hf.kv_heads} key-value heads;"
            " use a divisor of them.",
        )
    dtype = torch.bfloat16 if bf16 else torch.float32
    return TransformerConfig(
        num_layers=hf.layers,
        hidden_size=hf.hidden_size,
        ffn_hidden_size=hf.intermediate_size,
        num_attention_heads=hf.heads,
        num_query_groups=hf.kv_heads,
        kv_channels=hf.head_dim,
        layernorm_epsilon=hf.norm_eps,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=F.silu,
        use_te_activation_func=True,  # the module of the layer spec, which is not TransformerEngine's
        add_bias_linear=False,
        add_qkv_bias=hf.family.qkv_bias,
        qk_layernorm=hf.family.qk_norm,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=ranks,
        sequence_parallel=ranks > 1,
        context_parallel_size=parallel_state.get_context_parallel_world_size(),
        params_dtype=dtype,
        bf16=bf16,
        variable_seq_lengths=True,
        # Loss functions return sums and a count; megatron divides by the count of the whole optimizer step.
        calculate_per_token_loss=True,
        finalize_model_grads_func=finalize_model_grads,
        moe_token_dispatcher_type="alltoall",  # the default is refused together with variable lengths
        # Initialisation also marks which parameters are cut over ranks; without it gradient norms are wrong.
        perform_initialization=True,
        use_cpu_initialization=device.type == "cpu",
        # Fusions that need apex or TransformerEngine, or compile at the first call.
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        **expert_options(hf, ranks),
    )


def build_model(hf: HfConfig, config: TransformerConfig, device: torch.device) -> GPTModel:
    """The model with random weights on `device`; fill it with `hf_weights.load_weights`."""
    dense = _layer_spec(hf, config, experts=None)
    sparse = _layer_spec(hf, config, experts=hf.experts.count) if hf.experts else dense
    with_experts = hf.experts.layers if hf.experts else ()
    model = PackedGpt(
        config,
        TransformerBlockSubmodules(
            layer_specs=[sparse if layer in with_experts else dense for layer in range(hf.layers)], layer_norm=RmsNorm
        ),
        vocab_size=padded_vocab_size(hf.vocab_size, config.tensor_model_parallel_size),
        max_sequence_length=hf.max_positions,
        position_embedding_type="none",  # attention rotates by itself
        share_embeddings_and_output_weights=hf.tied,
    )
    return model.to(device)


def _layer_spec(hf: HfConfig, config: TransformerConfig, experts: int | None) -> ModuleSpec:
    spec = get_gpt_layer_local_spec(num_experts=experts, qk_layernorm=config.qk_layernorm, normalization="RMSNorm")
    layer, attention = spec.submodules, spec.submodules.self_attention.submodules
    attention.core_attention = ModuleSpec(PackedAttention, params={"inverse_frequencies": inverse_frequencies(hf)})
    for owner, names in (
        (layer, ("input_layernorm", "pre_mlp_layernorm")),
        (attention, ("q_layernorm", "k_layernorm")),
    ):
        for name in names:
            if getattr(owner, name) is not IdentityOp and getattr(owner, name) is not None:
                setattr(owner, name, RmsNorm)
    set_activation(layer.mlp, SwiGlu)
    return spec
