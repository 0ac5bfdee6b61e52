"""Checksums of weights on a GPU: the kernel against the passes in torch, its values, and how long it takes."""

from __future__ import annotations

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from services.checksums import compute
from services.checksums.compute import Content, digests
from tests.oracle import checksum_cases
from tests.unit.trainer.test_checksums import KERNEL_VALUES, data


def test_the_kernel_equals_the_passes_in_torch() -> None:
    assert compute._kernels(torch.device("cuda", 0)) is not None
    assert checksum_cases.differences("cuda") == []


def test_the_kernel_equals_the_engines() -> None:
    contents = [Content([data(count).cuda()]) for count in KERNEL_VALUES]
    assert digests(contents, "sglang-tiled-64") == list(KERNEL_VALUES.values())


def test_eight_gigabytes_take_less_than_sixty_milliseconds() -> None:
    """As 300 tensors of two parts each; 37 ms on an H200, about the time in which the bytes travel."""
    half = 8 * 10**9 // 600 // 16 * 16
    parts = torch.randint(0, 256, (600 * half,), dtype=torch.uint8, device="cuda").split(half)
    contents = [Content([parts[2 * index + 1], parts[2 * index]]) for index in range(300)]
    digests(contents, "sglang-tiled-64")
    best = float("inf")
    for _ in range(5):
        before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        before.record()
        digests(contents, "sglang-tiled-64")
        after.record()
        after.synchronize()
        best = min(best, before.elapsed_time(after))
    print(f"{600 * half / 1e9:.1f} GB in {best:.1f} ms")
    assert best < 60
