"""Weights between a GPU and files: rank 0 writes what is staged there, a receiver reads into memory there."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from services.common.weight_files.copy import LocalCopy
from services.common.weight_files.manifest import version_directory
from services.rollout.receiver.files import fill
from services.trainer.core.buckets import TensorSpec, plan_buckets
from services.trainer.core.file_commands import WriteFiles
from services.trainer.ranks.weight_files import VersionFiles
from services.trainer.ranks.weights import StagedWeights

DEVICE = torch.device("cuda", 0)
SPECS = [TensorSpec(f"layer.{index}", "bfloat16", (4096, 4096)) for index in range(6)]
"""0.2 GB: a bucket is larger than a chunk of the receiver."""


def staged(plan, buckets: list) -> StagedWeights:
    made = StagedWeights(plan, buckets)
    for index in range(len(buckets)):
        made.filled(index)
    return made


def write(files: VersionFiles, source: StagedWeights, directory: Path, version: int, base: int):
    """The result, once it is there."""
    files.begin(source, WriteFiles(str(directory), "run", version, base, "xor", keeps_base=True))
    deadline = time.monotonic() + 60
    while files.state.result is None:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    assert not files.state.result.error
    return files.state.result


def test_staged_weights_come_back_bit_for_bit_in_full_and_by_a_delta(tmp_path):
    plan = plan_buckets(SPECS, 96 * 2**20)
    source = torch.Generator(DEVICE).manual_seed(1)
    sizes = [sum(spec.size_bytes for spec in bucket) for bucket in plan.buckets]
    first = [torch.randint(0, 256, (n,), dtype=torch.uint8, device=DEVICE, generator=source) for n in sizes]
    second = [bucket.clone() for bucket in first]
    for bucket in second:
        bucket[::100] ^= 1
    files, copy = VersionFiles(), LocalCopy(tmp_path / "local")
    for version, buckets, mode in ((1, first, "full"), (2, second, "delta")):
        result = write(files, staged(plan, buckets), tmp_path, version, version - 1)
        assert result.mode == mode
        held = copy.bring(version_directory(tmp_path, "run", version))
        targets = [torch.zeros_like(bucket) for bucket in buckets]
        pieces = [(str(piece.path), piece.offset, piece.size) for piece in held.pieces]
        fill(targets, pieces, 60.0, lambda index: None)
        assert all(torch.equal(target, bucket) for target, bucket in zip(targets, buckets, strict=True))
    assert result.file_bytes < 0.05 * result.total_bytes
