"""Buckets of a weight update: which tensors travel together as one flat byte tensor.

Pure arithmetic over names, dtypes and shapes; it never sees a tensor. A bucket is the concatenation of the raw bytes
of its tensors in order.

Invariants: order is kept and nothing is left out; a bucket holds at most `bucket_bytes` bytes unless one tensor is
larger by itself; every tensor starts at a multiple of its element size, so that a receiver can view it in place.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of an element by dtype name."""


@dataclass(frozen=True)
class TensorSpec:
    """Name (Hugging Face's), dtype name and shape of a full, unsharded tensor."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        """Bytes of the tensor."""
        return math.prod(self.shape) * ELEMENT_BYTES[self.dtype]


@dataclass(frozen=True)
class BucketPlan:
    """Tensors of every bucket, in order."""

    buckets: tuple[tuple[TensorSpec, ...], ...]

    @property
    def total_bytes(self) -> int:
        """Bytes of all buckets."""
        return sum(spec.size_bytes for bucket in self.buckets for spec in bucket)


def plan_buckets(specs: Sequence[TensorSpec], bucket_bytes: int) -> BucketPlan:
    """Fills buckets in order. A change of dtype opens a new bucket, which keeps every tensor aligned."""
    buckets: list[list[TensorSpec]] = []
    used = 0
    for spec in specs:
        if not buckets or used + spec.size_bytes > bucket_bytes or buckets[-1][0].dtype != spec.dtype:
            buckets.append([])
            used = 0
        buckets[-1].append(spec)
        used += spec.size_bytes
    return BucketPlan(tuple(tuple(bucket) for bucket in buckets))


def plan_digest(specs: Sequence[TensorSpec]) -> str:
    """16 hex digits over names, dtypes and shapes in order; both sides of an update compare it."""
    lines = "".join(f"{spec.name} {spec.dtype} {'x'.join(map(str, spec.shape))}\n" for spec in specs)
    return hashlib.sha256(lines.encode()).hexdigest()[:16]
