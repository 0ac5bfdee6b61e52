"""Process-wide state of a rank: device, process groups, random seeds. Nothing here knows models or losses."""

from __future__ import annotations

import datetime
import os
from dataclasses import dataclass

import torch
import torch.distributed as dist

from services.common.devices import COLLECTIVE_ENV
from services.trainer.ranks.groups import NCCL_WATCHDOG_OFF
from services.trainer.ranks.megatron_setup import prepare


@dataclass(frozen=True)
class Layout:
    """Where a rank stands: global rank and size, rendezvous port of the world, tensor- and context-parallel size."""

    rank: int
    world_size: int
    master_port: int
    tensor_parallel_size: int
    master_address: str = "127.0.0.1"
    context_parallel_size: int = 1


def start(layout: Layout, device: str, seed: int) -> torch.device:
    """Joins the world and megatron's groups, seeds everything; returns this rank's device. Call once."""
    if device == "cuda":
        for name, value in COLLECTIVE_ENV.items():
            os.environ.setdefault(name, value)
        # A weight group that an engine's death broke must not end this process.
        os.environ.update(NCCL_WATCHDOG_OFF)
        # Queues of the device, read when its context is made. Overlap of communication and matrix products counts on
        # the order of launches in one. Else there are as many as can be: in a queue that it shares, a broadcast to an
        # engine that has stopped holds up the training.
        queues = "1" if layout.tensor_parallel_size > 1 else "32"
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", queues)
        where = torch.device("cuda", int(os.environ.get("LOCAL_RANK", layout.rank)) % torch.cuda.device_count())
        torch.cuda.set_device(where)
    else:
        where = torch.device("cpu")
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    prepare(device)
    from megatron.core import parallel_state, tensor_parallel

    # No device_id: torch would then split every weight group from the world, which the engines are not in.
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo",
        init_method=f"tcp://{layout.master_address}:{layout.master_port}",
        rank=layout.rank,
        world_size=layout.world_size,
        timeout=datetime.timedelta(minutes=10),
    )
    parallel_state.initialize_model_parallel(
        layout.tensor_parallel_size,
        context_parallel_size=layout.context_parallel_size,
        create_gloo_process_groups=False,
    )
    torch.manual_seed(seed)
    # Without dropout megatron's generator state is never used; this form touches no CUDA state on a CPU.
    tensor_parallel.model_parallel_cuda_manual_seed(seed, inference_rng_tracker=device == "cpu", force_reset_rng=True)
    return where
