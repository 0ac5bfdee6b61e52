"""Versions of a small made-up model, as buckets that can be written to files."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from services.common.weight_files.manifest import Tensor
from services.common.weight_files.write import Base, Bucket, Place

SHAPES = (
    ("embed.weight", (50, 16)),
    ("layer.q.weight", (16, 16)),
    ("layer.norm.weight", (16,)),
    ("head.weight", (7, 3)),
)


def buckets(seed: int, dtype: str = "bfloat16", per_bucket: int = 2) -> list[Bucket]:
    """Random bytes for every tensor, hence NaNs too."""
    random, made = np.random.default_rng(seed), []
    tensors = [Tensor(name, dtype, shape, "", 0, 0) for name, shape in SHAPES]
    for start in range(0, len(tensors), per_bucket):
        some = tuple(tensors[start : start + per_bucket])
        size = sum(tensor.size_bytes for tensor in some)
        made.append(Bucket(some, random.integers(0, 256, size, dtype=np.uint8)))
    return made


def trained(before: list[Bucket], seed: int, share: float) -> list[Bucket]:
    """A later version: about `share` of the elements have other bytes."""
    random, made = np.random.default_rng(seed), []
    for bucket in before:
        data, item = bucket.data.copy(), bucket.tensors[0].item_bytes
        elements = data.reshape(-1, item)
        changed = np.flatnonzero(random.random(len(elements)) < share)
        elements[changed] ^= random.integers(1, 256, (len(changed), item), dtype=np.uint8)
        made.append(Bucket(bucket.tensors, data))
    return made


def place(root: Path, version: int, run_id: str = "run") -> Place:
    """Where a version goes."""
    return Place(root, run_id, version, "digest")


def base(version: int, held: list[Bucket]) -> Base:
    """What a delta builds upon."""
    return Base(version, [bucket.data for bucket in held])


def content(held: list[Bucket]) -> dict[str, bytes]:
    """Bytes by name."""
    return {tensor.name: data.tobytes() for bucket in held for tensor, data in bucket.parts()}
