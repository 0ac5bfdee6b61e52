"""Contents on which the checksum's kernel and its passes in torch must agree."""

from __future__ import annotations

import torch

from services.checksums import compute, kernels
from services.checksums.compute import Content


def contents(device: str) -> list[Content]:
    """Empty, odd and even sizes; padding; fused parts that adjoin, do not, and break words; across tiles."""
    generator = torch.Generator().manual_seed(11)
    data = torch.randint(0, 256, (400_000,), dtype=torch.uint8, generator=generator).to(device)
    apart = torch.randint(0, 256, (70_000,), dtype=torch.uint8, generator=generator).to(device)
    tile = 4 * kernels.TILE_WORDS
    return [
        Content([data[:0]]),
        *(Content([data[:size]]) for size in (1, 3, 4, 5, 1024, tile - 4, tile, tile + 4, 3 * tile + 1)),
        Content([data[:8]], padding_bytes=777),
        Content([data[: tile + 8]], padding_bytes=2 * tile),
        Content([data[:40_000], data[40_000:60_000], data[60_000:100_000]]),  # q, k, v beside each other
        Content([data[:100_000], apart]),  # a bucket's end in between
        Content([apart[:4], data[8:12], apart[tile : tile + 8]]),
        Content([data[2:100_002]]),  # at no whole address
        Content([data[:6], apart[:tile]], padding_bytes=10),
        Content([data[:11], data[11:70_001]]),
        Content([data[:0], data[4:8], data[:0]], padding_bytes=1),
    ]


def differences(device: str) -> list[int]:
    """Contents, by index, of which the two say different things."""
    cases = contents(device)
    kernel = compute._sums_by_kernel(kernels, cases)
    passes = compute._sums_by_torch(cases)
    assert len(set(passes)) == len(passes), "no two cases are alike"
    return [index for index, (one, other) in enumerate(zip(kernel, passes, strict=True)) if one != other]


if __name__ == "__main__":
    print(differences("cpu"))
