"""Fills the receiver's staging memory from files: one bucket a piece of a file, byte for byte.

Who asks has checked the files; what an engine then holds is compared once more at the end of the update. Invariant: a
file that is read too slowly costs its deadline, not the thread for ever, unless the system call itself hangs.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence

import torch

_CHUNK_BYTES = 64 * 2**20
"""On a GPU a chunk is copied while the next is read."""

Piece = tuple[str, int, int]
"""Path, offset and length of a bucket."""


def fill(
    buffers: Sequence[torch.Tensor], pieces: Sequence[Piece], timeout: float, before: Callable[[int], None]
) -> None:
    """Reads `pieces` into `buffers`, uint8 and flat, in order. `before(i)` is called ahead of the i-th. Raises
    RuntimeError, OSError or TimeoutError; the buffers hold anything then."""
    if [flat.numel() for flat in buffers] != [size for _, _, size in pieces]:
        raise RuntimeError("the files have other buckets than the plan")
    deadline = time.monotonic() + timeout
    for index, (flat, (path, offset, _)) in enumerate(zip(buffers, pieces, strict=True)):
        before(index)
        with open(path, "rb", buffering=0) as file:
            read = _into_gpu if flat.is_cuda else _into_host
            read(file.fileno(), flat, offset, deadline)


def _into_host(file: int, flat: torch.Tensor, offset: int, deadline: float) -> None:
    _read(file, memoryview(flat.numpy()), offset, deadline)


def _into_gpu(file: int, flat: torch.Tensor, offset: int, deadline: float) -> None:
    stream, size = torch.cuda.Stream(flat.device), flat.numel()
    chunk = min(_CHUNK_BYTES, size)
    hosts = [torch.empty(chunk, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    copied: list[torch.cuda.Event | None] = [None, None]
    with torch.cuda.stream(stream):
        for turn, start in enumerate(range(0, size, chunk)):
            host, count = hosts[turn % 2], min(chunk, size - start)
            if (event := copied[turn % 2]) is not None:
                event.synchronize()
            _read(file, memoryview(host.numpy())[:count], offset + start, deadline)
            flat[start : start + count].copy_(host[:count], non_blocking=True)
            copied[turn % 2] = stream.record_event()
    stream.synchronize()


def _read(file: int, view: memoryview, offset: int, deadline: float) -> None:
    done = 0
    while done < len(view):
        if time.monotonic() > deadline:
            raise TimeoutError("not all files were read in time")
        count = os.preadv(file, [view[done : done + _CHUNK_BYTES]], offset + done)
        if not count:
            raise RuntimeError("a file ends within a bucket")
        done += count
