"""Which GPUs this process may use, told by the driver's device files and CUDA_VISIBLE_DEVICES, without CUDA or torch.

Knows nothing of what runs on them. Invariant: `auto` means CUDA exactly when a GPU is visible, in every service alike.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

VISIBLE = "CUDA_VISIBLE_DEVICES"
DEVICE_FILES = Path("/dev")
COLLECTIVE_ENV = {"NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0"}
"""SGLang sets these in its engines, so trainer and node do where a user has not."""
COLLECTIVE_VARIABLES = (*COLLECTIVE_ENV, "NCCL_P2P_DISABLE")
"""They choose how NCCL moves bytes: a weight group whose members differ in one breaks ("invalid argument") or hangs."""


def visible_gpus(environ: Mapping[str, str] | None = None, directory: Path | None = None) -> tuple[str, ...]:
    """Ids of the GPUs, as CUDA_VISIBLE_DEVICES names them: that list where it is set, else 0, 1, ...

    `directory` is where the driver's device files are; the test's own.
    """
    directory = directory or DEVICE_FILES
    files = [path for path in directory.glob("nvidia[0-9]*") if path.name.removeprefix("nvidia").isdigit()]
    # Windows' subsystem for Linux has one file for all GPUs; CUDA numbers files from 0, whatever their names are.
    count = len(files) or int((directory / "dxg").exists())
    listed = (os.environ if environ is None else environ).get(VISIBLE)
    if not count or listed is None:
        return tuple(str(index) for index in range(count))
    gpus: list[str] = []
    for entry in listed.split(","):
        # CUDA reads the list up to the first entry that is no device: "" and "-1" hide them all.
        gpu = entry.strip()
        if not gpu or gpu.startswith("-") or (gpu.isdigit() and int(gpu) >= count):
            break
        gpus.append(gpu)
    return tuple(gpus)


def resolve_device(setting: str) -> str:
    """ "cpu" or "cuda" for a run's device setting."""
    if setting != "auto":
        return setting
    return "cuda" if visible_gpus() else "cpu"
