"""Modules for megatron's layer specs that need no TransformerEngine; first, causal attention over packed sequences.

Megatron's own local attention refuses packed batches, and its rotary code loops over the segments in every layer. This
one rotates queries and keys itself, and handles grouped query heads, tensor parallelism (each rank has its own heads),
context parallelism (each rank has its own queries, and gets all keys and values) and packs laid out by `PackLayout`; no
dropout, no sliding window.

Two ways, equal up to rounding: on CUDA in half precision torch's variable-length flash attention; elsewhere the
segments are put into a few padded batches of similar length. Padding is to the right, and a causal query never
looks right, so no mask is needed and padded cells receive no gradient. A segment that another rank's tokens begin has a
mask.
"""

from __future__ import annotations

import inspect
import math

import torch
import torch.nn.functional as F
from megatron.core.transformer.module import MegatronModule

from services.trainer.ranks.model.context import gather_keys_values
from services.trainer.ranks.model.packing import PackLayout

try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:  # torch before 2.10
    varlen_attn = None

# The kernel has always had grouped heads; releases whose wrapper checks the counts want to be told.
_GROUPED = {"enable_gqa": True} if varlen_attn and "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
_KERNEL_HEAD_DIM = 256
"""Largest head_dim of the kernel, which also must be a multiple of 8."""


class PackedAttention(MegatronModule):
    """softmax(R(q) R(k)ᵀ / √d) v within every segment of a pack, R being the rotation by position.

    Query [own, heads, d], key and value [own, kv_heads, d] (this rank's tokens and heads) → [own, heads · d].
    """

    def __init__(
        self, config, layer_number, attn_mask_type, attention_type, inverse_frequencies, softmax_scale=None, **_
    ) -> None:
        super().__init__(config=config)
        if config.attention_dropout:
            raise ValueError("packed attention has no dropout; set attention_dropout to 0")
        del layer_number, attn_mask_type, attention_type
        self.scale = softmax_scale or 1 / math.sqrt(config.kv_channels)
        frequencies = torch.tensor(inverse_frequencies, dtype=torch.float32, device=torch.cuda.current_device())
        # A plain attribute: buffers of a half-precision model would be rounded with it.
        self._inverse_frequencies, self._frequencies = frequencies, tuple(inverse_frequencies)

    def forward(
        self, query, key, value, attention_mask=None, attn_mask_type=None, attention_bias=None, packed_seq_params=None
    ):
        """See the class; masks are ignored: attention is causal by segment."""
        if not isinstance(packed_seq_params, PackLayout):
            raise TypeError("packed attention needs a PackLayout as packed_seq_params")
        rotation = packed_seq_params.rotation(self._frequencies, self._inverse_frequencies)
        query, key = _Rotate.apply(query, *rotation), _Rotate.apply(key, *rotation)
        if packed_seq_params.cut.size > 1:
            key, value = gather_keys_values(key, value)
        way = self._variable_length if self._has_kernel(query) else self._padded
        out = way(query, key, value, packed_seq_params)
        return out.reshape(out.size(0), -1)

    @staticmethod
    def _has_kernel(query: torch.Tensor) -> bool:
        half, width = query.dtype in (torch.bfloat16, torch.float16), query.size(-1)
        return varlen_attn is not None and query.is_cuda and half and width % 8 == 0 and width <= _KERNEL_HEAD_DIM

    def _variable_length(self, query, key, value, layout: PackLayout):
        options = _GROUPED if query.size(1) != key.size(1) else {}
        outs = [
            varlen_attn(
                query[chunk.queries].contiguous(),
                key[chunk.keys].contiguous(),
                value[chunk.keys].contiguous(),
                *chunk.starts,
                *chunk.longest,
                scale=self.scale,
                window_size=(-1, 0),
                **options,
            )
            for chunk in layout.chunks()
        ]
        return outs[0] if len(outs) == 1 else torch.cat(outs)

    def _padded(self, query, key, value, layout: PackLayout):
        batches, rests, back = layout.batches()
        options = {"scale": self.scale, "enable_gqa": query.size(1) != key.size(1)}
        outs = []
        for batch in batches:
            q, k, v = (
                x.index_select(0, cells).view(batch.count, batch.width, x.size(1), x.size(2)).transpose(1, 2)
                for x, cells in ((query, batch.gather), (key, batch.keys), (value, batch.keys))
            )
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, **options)
            outs.append(out.transpose(1, 2).flatten(0, 1).index_select(0, batch.valid))
        for rest in rests:
            q, k, v = (x[None].transpose(1, 2) for x in (query[rest.queries], key[rest.keys], value[rest.keys]))
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=rest.mask, **options)
            outs.append(out.transpose(1, 2)[0])
        return torch.cat(outs).index_select(0, back)

    def sharded_state_dict(self, *_, **__):
        """No parameters, so nothing in a checkpoint."""
        return {}


class _Rotate(torch.autograd.Function):
    """Rotates channel i with channel i + d/2 by the angle of position and i; backward is the opposite rotation.

    x [t, heads, d]; cos, sin float32 [t, 1, d/2]. Computed in float32 and rounded once, as engines do.
    Formula: Su et al., RoFormer (2021), eq. 34, halves instead of pairs.
    """

    @staticmethod
    def forward(ctx, x, cos, sin):
        ctx.save_for_backward(cos, sin)
        return _rotate(x, cos, sin, 1)

    @staticmethod
    def backward(ctx, grad):
        return _rotate(grad, *ctx.saved_tensors, -1), None, None


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, direction: int) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    out_first, out_second = out.chunk(2, dim=-1)
    torch.addcmul(first * cos, second, sin, value=-direction, out=out_first)
    torch.addcmul(second * cos, first, sin, value=direction, out=out_second)
    return out


class SwiGlu(torch.nn.Module):
    """silu(gate) · up of [..., gate ‖ up]: an activation for megatron's MLP that keeps nothing but its input."""

    def __init__(self, config) -> None:
        super().__init__()
        del config

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., 2 f] → [..., f]."""
        return _SwiGlu.apply(x)

    def sharded_state_dict(self, *_, **__):
        """No parameters, so nothing in a checkpoint."""
        return {}


class _SwiGlu(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        gate, up = x.chunk(2, dim=-1)
        out = torch.empty_like(x)
        out_gate, out_up = out.chunk(2, dim=-1)
        torch.mul(grad, F.silu(gate), out=out_up)
        torch.ops.aten.silu_backward.grad_input(grad * up, gate, grad_input=out_gate)
        return out


class RmsNorm(torch.nn.RMSNorm):
    """RMS norm whose weight is marked as shared by the parts of a split sequence: megatron sums its gradients."""

    def __init__(self, config, hidden_size, eps=1e-5, **_) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel
