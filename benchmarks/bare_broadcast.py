"""Processes that broadcast buckets of given sizes, and nothing else: what the link and the library can do.

One sender, N receivers, a group of two for each receiver, all groups at once: the topology of weight groups.
`python -m benchmarks.bare_broadcast RANK PORT BACKEND RECEIVERS ROUNDS SIZE...`; rank 0 prints each round's seconds as
JSON. `measure` starts them all.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from services.common.process import ManagedProcess, free_port


def broadcast(rank: int, port: int, backend: str, receivers: int, rounds: int, sizes: Sequence[int]) -> list[float]:
    """Seconds by round, until the last byte is there for the last receiver. One buffer for every bucket, as each has
    its own memory in an update."""
    import torch
    import torch.distributed as dist

    device = torch.device("cuda", 0) if backend == "nccl" else torch.device("cpu")
    if backend == "nccl":
        torch.cuda.set_device(device)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=1 + receivers)
    pairs = [dist.new_group([0, receiver], backend=backend) for receiver in range(1, 1 + receivers)]
    mine = pairs if rank == 0 else [pairs[rank - 1]]
    buffers = [torch.zeros(size, dtype=torch.uint8, device=device) for size in sizes]
    seconds = []
    for _ in range(rounds):
        dist.barrier()
        began = time.perf_counter()
        works = [dist.broadcast(each, src=0, group=pair, async_op=True) for each in buffers for pair in mine]
        for work in works:
            work.wait()
        if backend == "nccl":
            torch.cuda.synchronize()
        dist.barrier()
        seconds.append(time.perf_counter() - began)
    dist.destroy_process_group()
    return seconds


async def measure(
    backend: str, receivers: int, rounds: int, sizes: Sequence[int], envs: Sequence[Mapping[str, str]], log_dir: Path
) -> list[float]:
    """Seconds by round, of the sender. `envs`: of sender and receivers. Raises SystemExit."""
    port = free_port()
    processes = []
    for rank in range(1 + receivers):
        numbers = map(str, (receivers, rounds, *sizes))
        argv = [sys.executable, "-m", "benchmarks.bare_broadcast", str(rank), str(port), backend, *numbers]
        log_path = log_dir / f"bare-{rank}.log"
        processes.append(ManagedProcess(f"bare {rank}", argv, env=envs[min(rank, 1)], log_path=log_path))
    try:
        for process in processes:
            await process.start()
        statuses = await asyncio.wait_for(asyncio.gather(*(process.wait() for process in processes)), 180)
    finally:
        for process in processes:
            await process.stop(0.0)
    if any(statuses):
        tail = "\n".join(line for process in processes for line in process.tail(10))
        raise SystemExit(f"The bare broadcast failed with exit statuses {statuses}:\n{tail}")
    return json.loads(next(line for line in reversed(processes[0].tail()) if line.startswith("[")))


if __name__ == "__main__":
    rank_, port_, backend_, receivers_, rounds_, *sizes_ = sys.argv[1:]
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    result = broadcast(int(rank_), int(port_), backend_, int(receivers_), int(rounds_), [int(size) for size in sizes_])
    if rank_ == "0":
        print(json.dumps(result), flush=True)
