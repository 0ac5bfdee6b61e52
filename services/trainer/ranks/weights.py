"""Weight updates, the sending side: full tensors as flat byte buckets, and what engines must hold of them.

Knows megatron's model through `model.hf_weights`, and nothing of groups (`groups`) or engines. Invariant: the staged
bytes are a copy: they stay as they are while the model trains on, for engines that join late. On a GPU that is a second
copy of the model's weights (in the dtype they are sent in) beside the model, on rank 0 alone.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from megatron.core import parallel_state

from services.common.errors import Code, ServiceError
from services.trainer.core.buckets import BucketPlan, plan_buckets
from services.trainer.core.commands import ChecksumRule
from services.trainer.ranks import checksums
from services.trainer.ranks.model.hf_config import HfConfig
from services.trainer.ranks.model.hf_weights import gather_weights, list_weights


class StagedWeights:
    """The weights of one version as flat uint8 buckets on the device."""

    def __init__(self, plan: BucketPlan, buckets: list[torch.Tensor]) -> None:
        self.plan, self.buckets = plan, buckets
        self._digests: dict[tuple[ChecksumRule, str], str] = {}
        self._places = {}
        for bucket, specs in zip(buckets, plan.buckets, strict=True):
            offset = 0
            for spec in specs:
                self._places[spec.name] = bucket[offset : offset + spec.size_bytes]
                offset += spec.size_bytes

    def checksums(self, rules: Mapping[str, ChecksumRule], algorithm: str) -> dict[str, str]:
        """Checksum by rule name, over the named tensors' bytes, in order, and the padding. `algorithm`: see
        `services.trainer.ranks.checksums`.

        Raises:
            ServiceError: UNKNOWN_TENSOR when a rule names a tensor that is not sent.
        """
        new = {rule: name for name, rule in rules.items() if (rule, algorithm) not in self._digests}
        contents = [checksums.Content(self._parts(name, rule), rule.padding_bytes) for rule, name in new.items()]
        for rule, value in zip(new, checksums.digests(contents, algorithm), strict=True):
            self._digests[rule, algorithm] = value
        return {name: self._digests[rule, algorithm] for name, rule in rules.items()}

    def _parts(self, name: str, rule: ChecksumRule) -> list[torch.Tensor]:
        missing = [source for source in rule.sources if source not in self._places]
        if missing:
            raise ServiceError(
                Code.INVALID_ARGUMENT,
                "UNKNOWN_TENSOR",
                f"Checksum rule {name} needs tensor {missing[0]}, which the trainer does not have.",
                rule=name,
                tensor=missing[0],
            )
        return [self._places[source] for source in rule.sources]


@torch.no_grad()
def stage_weights(
    model: torch.nn.Module, hf: HfConfig, bucket_bytes: int, device: torch.device
) -> StagedWeights | None:
    """Collects the full tensors; the result is on global rank 0 alone. All tensor-parallel ranks must call it."""
    if parallel_state.get_data_parallel_rank() > 0:
        return None  # the same weights as data-parallel rank 0
    first = parallel_state.get_tensor_model_parallel_rank() == 0
    plan = plan_buckets(list_weights(model, hf), bucket_bytes)
    sizes = [sum(spec.size_bytes for spec in specs) for specs in plan.buckets] if first else []
    staged = StagedWeights(plan, [torch.empty(n, dtype=torch.uint8, device=device) for n in sizes]) if first else None
    for name, tensor in gather_weights(model, hf):
        if staged is not None and tensor is not None:
            staged._places[name].copy_(tensor.contiguous().view(-1).view(torch.uint8))
    return staged
