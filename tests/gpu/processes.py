"""Runs the programs of the GPU tests in rank processes of their own, each with a deadline."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch

from services.common.process import free_port

_DEADLINE_SECONDS = 150


def run(
    program: str, root: Path, device: str = "cuda", *, world: int = 1, module: str = "tests.gpu.rank_program"
) -> dict:
    """What a program of a module leaves on a device."""
    port = free_port()
    processes, logs = [], [root / f"{program}-{device}-{rank}.log" for rank in range(world)]
    for rank, path in enumerate(logs):
        arguments = [program, device, str(rank), str(world), str(port), str(root)]
        with path.open("w") as log:
            command = [sys.executable, "-m", module, *arguments]
            processes.append(subprocess.Popen(command, stdout=log, stderr=log, env=dict(os.environ)))
    try:
        codes = [process.wait(_DEADLINE_SECONDS) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert codes == [0] * world, "\n".join(path.read_text()[-3000:] for path in logs)
    return torch.load(root / f"{program}-{device}.pt", weights_only=False)
