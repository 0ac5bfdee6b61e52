"""Which kernels a piece of work spends its time in, by torch's profiler."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile

_NAME = 100


def print_profile(title: str, work: Callable[[], object], wait: Callable[[], None], rows: int = 15) -> None:
    """Runs `work` once and prints its longest kernels; on a CPU, its longest operators. `wait` waits for the device."""
    cuda = torch.cuda.is_available()
    with profile(activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU], acc_events=True) as recorded:
        wait()
        began = time.perf_counter()
        work()
        wait()
        seconds = time.perf_counter() - began
    kernels = []
    for event in recorded.key_averages():
        own = event.self_device_time_total if cuda else event.self_cpu_time_total
        if own and (event.device_type == torch.autograd.DeviceType.CUDA) == cuda:
            kernels.append((own / 1e3, event.count, event.key))
    kernels.sort(reverse=True)
    busy = sum(kernel[0] for kernel in kernels)
    print(f"\n{title}: {seconds * 1e3:.0f} ms, of them {busy:.0f} ms in {sum(k[1] for k in kernels)} kernels")
    for own, count, name in kernels[:rows]:
        print(f"{own:9.2f} ms {own / max(busy, 1e-9):5.1%} {count:6d} x {name[:_NAME]}")
    print(f"{sum(kernel[0] for kernel in kernels[rows:]):9.2f} ms in others", flush=True)
