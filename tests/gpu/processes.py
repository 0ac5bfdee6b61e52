"""Runs the programs of the GPU tests in rank processes of their own, each with a deadline."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.support.rank_processes import run_ranks

_DEADLINE_SECONDS = 150


def run(
    program: str, root: Path, device: str = "cuda", *, world: int = 1, module: str = "tests.gpu.rank_program"
) -> dict:
    """What a program of a module leaves on a device."""
    run_ranks(module, program, device, world=world, root=root, seconds=_DEADLINE_SECONDS)
    return torch.load(root / f"{program}-{device}.pt", weights_only=False)
