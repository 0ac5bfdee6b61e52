"""Two processes that broadcast buckets of given sizes, and nothing else: what the link and the library can do.

`python -m benchmarks.bare_broadcast RANK PORT BACKEND ROUNDS SIZE...`; rank 0 prints each round's seconds as JSON.
`measure` starts both.
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


def broadcast(rank: int, port: int, backend: str, rounds: int, sizes: Sequence[int]) -> list[float]:
    """Seconds by round; the last thing timed is that the bytes are there. One buffer of the largest size."""
    import torch
    import torch.distributed as dist

    device = torch.device("cuda", 0) if backend == "nccl" else torch.device("cpu")
    if backend == "nccl":
        torch.cuda.set_device(device)
    dist.init_process_group(backend, init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    buffer = torch.empty(max(sizes), dtype=torch.uint8, device=device)
    start = torch.zeros(1, dtype=torch.uint8, device=device)

    def wait() -> None:
        if backend == "nccl":
            torch.cuda.synchronize()

    seconds = []
    for _ in range(rounds):
        dist.broadcast(start, src=1)  # the receiver is ready
        wait()
        began = time.perf_counter()
        for size in sizes:
            dist.broadcast(buffer[:size], src=0)
            wait()
        seconds.append(time.perf_counter() - began)
    dist.destroy_process_group()
    return seconds


async def measure(
    backend: str, rounds: int, sizes: Sequence[int], envs: Sequence[Mapping[str, str]], log_dir: Path
) -> list[float]:
    """Seconds by round, of the sender. `envs`: of sender and receiver. Raises SystemExit."""
    port = free_port()
    processes = []
    for rank, env in enumerate(envs):
        argv = [sys.executable, "-m", "benchmarks.bare_broadcast", *map(str, (rank, port, backend, rounds, *sizes))]
        log_path = log_dir / f"bare-{rank}.log"
        processes.append(ManagedProcess(f"bare {rank}", argv, env=env, log_path=log_path))
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
    rank_, port_, backend_, rounds_, *sizes_ = sys.argv[1:]
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    result = broadcast(int(rank_), int(port_), backend_, int(rounds_), [int(size) for size in sizes_])
    if rank_ == "0":
        print(json.dumps(result), flush=True)
