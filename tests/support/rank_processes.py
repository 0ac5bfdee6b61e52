"""Programs that run as the ranks of a world, in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from services.common.process import free_port


def run_ranks(module: str, *before: str, world: int, root: Path, seconds: float) -> None:
    """`python -m MODULE BEFORE... RANK WORLD PORT ROOT` for every rank, to the end. What they print is kept in `root`,
    and told when one fails; one that is not done after `seconds` fails the test as well."""
    port, name = free_port(), "-".join((module.rpartition(".")[2], *before, str(world)))
    logs = [root / f"{name}-{rank}.log" for rank in range(world)]
    processes = []
    for rank, path in enumerate(logs):
        command = [sys.executable, "-m", module, *before, str(rank), str(world), str(port), str(root)]
        with path.open("w") as log:
            processes.append(subprocess.Popen(command, stdout=log, stderr=log, env=dict(os.environ)))
    try:
        codes = [process.wait(seconds) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert codes == [0] * world, "\n".join(path.read_text()[-3000:] for path in logs)
