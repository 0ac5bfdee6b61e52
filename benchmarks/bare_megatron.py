"""A training loop written directly on Megatron-Core, for comparison: forward, backward, clip, Adam, and nothing else.

Of Tetrarch it uses the model builder (and with it the attention over packed sequences). Its micro-batches are made and
lie on the device before the clock starts; it gathers no metrics but the loss and the gradient norm.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy
from megatron.core.transformer.module import Float16Module

from services.trainer.ranks.model.build import build_model, transformer_config
from services.trainer.ranks.model.hf_config import read_hf_config
from services.trainer.ranks.model.hf_weights import load_weights
from services.trainer.ranks.model.packing import PackLayout

_CLIP = 0.2


@dataclass(frozen=True)
class MicroBatch:
    """Sequences one after another, all on the device."""

    layout: PackLayout
    tokens: torch.Tensor
    targets: torch.Tensor
    advantages: torch.Tensor
    weights: torch.Tensor
    sequences: torch.Tensor


def micro_batch(
    sequences: Sequence[np.ndarray], prompts: Sequence[int], advantages: Sequence[float], device: torch.device
) -> MicroBatch:
    """Packs sequences; all tokens after each prompt are trained, every sequence with the same weight."""
    lengths = [len(tokens) for tokens in sequences]
    offsets = np.cumsum([0, *lengths[:-1]])
    rows = [o + np.arange(p - 1, n - 1) for o, p, n in zip(offsets, prompts, lengths, strict=True)]
    counts = np.array([len(part) for part in rows])
    tokens = torch.from_numpy(np.concatenate(sequences).astype(np.int64)).to(device)
    where = torch.from_numpy(np.concatenate(rows)).to(device)
    return MicroBatch(
        PackLayout(lengths, device, where),
        tokens[None],
        tokens[where + 1][None],
        torch.from_numpy(np.repeat(np.array(advantages, np.float32), counts)).to(device),
        torch.from_numpy(np.repeat(1 / counts, counts).astype(np.float32)).to(device),
        torch.tensor(len(lengths), dtype=torch.int, device=device),
    )


class BareTrainer:
    """The model of a Hugging Face checkpoint with Megatron's data-parallel wrapper and optimizer."""

    def __init__(self, checkpoint: Path, device: torch.device, *, bf16: bool, lr: float) -> None:
        hf = read_hf_config(checkpoint)
        config = transformer_config(hf, bf16=bf16, device=device)
        model = build_model(hf, config, device)
        load_weights(model, hf, checkpoint)
        self._model = DistributedDataParallel(
            config,
            DistributedDataParallelConfig(grad_reduce_in_fp32=True),
            Float16Module(config, model) if bf16 else model,
        )
        config.no_sync_func = self._model.no_sync
        settings = OptimizerConfig(
            optimizer="adam",
            lr=lr,
            weight_decay=0.01,
            adam_beta2=0.95,
            clip_grad=1.0,
            bf16=bf16,
            params_dtype=config.params_dtype,
        )
        self._optimizer = get_megatron_optimizer(settings, [self._model], use_gloo_process_groups=False)
        if device.type == "cuda":
            for group in self._optimizer.param_groups:
                group["fused"] = True
        self._options = {"fp32_output": False} if bf16 else {}

    def step(self, batches: Sequence[MicroBatch]) -> tuple[float, float, dict[str, float]]:
        """One optimizer step: loss, gradient norm, seconds by part."""
        start = time.perf_counter()
        self._model.zero_grad_buffer()
        self._optimizer.zero_grad()
        losses = get_forward_backward_func()(
            forward_step_func=self._forward,
            data_iterator=iter(batches),
            model=self._model,
            num_microbatches=len(batches),
            seq_length=1,
            micro_batch_size=1,
            forward_only=False,
        )
        middle = time.perf_counter()
        _, norm, _ = self._optimizer.step()
        end = time.perf_counter()
        loss = torch.stack(losses).sum().item() / sum(len(batch.layout.lengths) for batch in batches)
        return loss, float(norm), {"forward_backward": middle - start, "optimizer": end - middle}

    def _forward(self, iterator, model):
        batch = next(iterator)
        logits = model(
            batch.tokens, batch.layout.positions[None], None, packed_seq_params=batch.layout, **self._options
        )

        def loss_function(output):
            log_probs = -vocab_parallel_cross_entropy(output, batch.targets)[0]
            ratio = (log_probs - log_probs.detach()).exp()
            free, bound = ratio * batch.advantages, ratio.clamp(1 - _CLIP, 1 + _CLIP) * batch.advantages
            loss = -(torch.minimum(free, bound) * batch.weights).sum()
            return loss, batch.sequences, loss.detach()

        return logits, loss_function
