"""Attention of the SGLang CPU engine: all requests of a batch in one call.

SGLang's `torch_native` backend calls scaled_dot_product_attention once per request and layer, which at 128
requests is nine tenths of a decode step of a small model. This backend pads the batch to a rectangle and calls
it once per layer. It is registered under the same name through SGLang's own registry, and hands everything it
does not cover (sliding windows, cross attention, encoders, very ragged batches) to the backend it extends.

With B requests, Q new tokens (1 when decoding), K tokens of context, H query heads in groups of G per key head:
queries are laid out as [B, H/G, G·Q, D] so that keys and values [B, H/G, K, D] need no repetition.

Tested with sglang 0.5.23.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from sglang.srt.layers.attention.attention_registry import register_attention_backend
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from torch.nn.functional import scaled_dot_product_attention

MOST_PADDING = 4
"""Padded work over real work beyond which one call per request is cheaper."""
SMALL_WORK = 1 << 17
"""Query-key pairs below which padding never matters."""


@dataclass
class BatchPlan:
    """Index tables of one forward pass, shared by its layers."""

    slots: torch.Tensor
    """int64 [B, K]: place of each context token in the KV pool; 0, the pool's padding slot, where there is none."""
    visible: torch.Tensor
    """bool [B, Q, K]."""
    rows: torch.Tensor | None
    """int64 [T]: place of each new token in the padded [B·Q]; None when B·Q == T already."""
    query_length: int
    masks: dict[tuple[int, torch.dtype], torch.Tensor] = field(default_factory=dict)

    def mask(self, group: int, dtype: torch.dtype) -> torch.Tensor:
        """Additive mask [B, 1, G·Q, K]."""
        key = (group, dtype)
        if key not in self.masks:
            count, _, context = self.visible.shape
            bias = torch.zeros(self.visible.shape, dtype=dtype).masked_fill_(~self.visible, torch.finfo(dtype).min)
            bias = bias.unsqueeze(1).expand(count, group, self.query_length, context)
            self.masks[key] = bias.reshape(count, 1, group * self.query_length, context)
        return self.masks[key]


def plan_batch(
    table: torch.Tensor, pool_rows: torch.Tensor, context: torch.Tensor, new: torch.Tensor
) -> BatchPlan | None:
    """Index tables for requests at `pool_rows` [B] of `table` with `context` [B] tokens, the last `new` [B] of them
    being this pass's; None when padding would cost too much."""
    count, longest, most_new = len(context), int(context.max()), int(new.max())
    padded = count * longest * most_new
    if padded > SMALL_WORK and padded > MOST_PADDING * int((context * new).sum()):
        return None
    positions = torch.arange(longest)
    held = positions < context.unsqueeze(1)
    slots = table[pool_rows, :longest].to(torch.int64).masked_fill_(~held, 0)
    offsets = torch.arange(most_new)
    # Padding queries see the first token, so that no row of the softmax is empty.
    last_seen = (context - new).unsqueeze(1) + offsets
    visible = positions <= last_seen.unsqueeze(2)
    rows = None
    if int(new.sum()) != count * most_new:
        rows = (offsets < new.unsqueeze(1)).flatten().nonzero().flatten()
    return BatchPlan(slots, visible & held.unsqueeze(1), rows, most_new)


def attend(
    plan: BatchPlan, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float
) -> torch.Tensor:
    """Attention output [T, H, Dv] of `query` [T, H, D] over the pools `keys` [S, Hk, D] and `values` [S, Hk, Dv]."""
    count, length = plan.slots.shape[0], plan.query_length
    heads, key_heads = query.shape[1], keys.shape[1]
    group = heads // key_heads
    if plan.rows is None:
        padded = query
    else:
        padded = query.new_zeros(count * length, heads, query.shape[2])
        padded[plan.rows] = query
    padded = padded.view(count, length, key_heads, group, -1).permute(0, 2, 3, 1, 4)
    result = scaled_dot_product_attention(
        padded.reshape(count, key_heads, group * length, -1),
        _gather(keys, plan.slots).to(query.dtype).transpose(1, 2),
        _gather(values, plan.slots).to(query.dtype).transpose(1, 2),
        attn_mask=plan.mask(group, query.dtype),
        scale=scale,
    )
    result = result.view(count, key_heads, group, length, -1).permute(0, 3, 1, 2, 4)
    result = result.reshape(count * length, heads, -1)
    return result if plan.rows is None else result[plan.rows]


def _gather(pool: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """pool [S, H, D], slots [B, K] -> [B, K, H, D]; whole rows, which torch copies three times faster than by index."""
    return pool.flatten(1).index_select(0, slots.flatten()).view(*slots.shape, *pool.shape[1:])


class BatchedTorchBackend(TorchNativeAttnBackend):
    """`torch_native` with one attention call per layer."""

    def __init__(self, model_runner) -> None:
        super().__init__(model_runner)
        self.plan: BatchPlan | None = None

    def init_forward_metadata(self, forward_batch) -> None:
        super().init_forward_metadata(forward_batch)
        self.plan = None
        mode = forward_batch.forward_mode
        if self.use_sliding_window_kv_pool or forward_batch.encoder_lens is not None or not len(forward_batch.seq_lens):
            return
        context = forward_batch.seq_lens
        if mode.is_decode():
            new = torch.ones_like(context)
        elif mode.is_extend() and forward_batch.extend_seq_lens is not None:
            new = forward_batch.extend_seq_lens.to(context.dtype)
        else:
            return
        self.plan = plan_batch(self.req_to_token_pool.req_to_token, forward_batch.req_pool_indices, context, new)

    def forward_extend(self, q, k, v, layer, forward_batch, save_kv_cache=True):
        if not self._covers(layer):
            return super().forward_extend(q, k, v, layer, forward_batch, save_kv_cache)
        return self._forward(q, k, v, layer, forward_batch, save_kv_cache)

    def forward_decode(self, q, k, v, layer, forward_batch, save_kv_cache=True):
        if not self._covers(layer):
            return super().forward_decode(q, k, v, layer, forward_batch, save_kv_cache)
        return self._forward(q, k, v, layer, forward_batch, save_kv_cache)

    def _covers(self, layer) -> bool:
        window = layer.sliding_window_size
        return (
            self.plan is not None
            and not layer.is_cross_attention
            and layer.attn_type == AttentionType.DECODER
            and (window is None or window < 0)
        )

    def _forward(self, q, k, v, layer, forward_batch, save_kv_cache):
        if save_kv_cache and k is not None and v is not None:
            where = KVWriteLoc(forward_batch.out_cache_loc, self.swa_out_cache_loc)
            self.token_to_kv_pool.set_kv_buffer(layer, where, k, v)
        output = attend(
            self.plan,
            q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim),
            self.token_to_kv_pool.get_key_buffer(layer.layer_id),
            self.token_to_kv_pool.get_value_buffer(layer.layer_id),
            layer.scaling,
        )
        return output.reshape(len(output), -1)


def register() -> None:
    """Serve `--attention-backend torch_native` in this process and its forks."""
    register_attention_backend("torch_native")(BatchedTorchBackend)
