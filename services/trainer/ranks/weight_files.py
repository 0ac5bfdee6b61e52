"""Rank 0 writes the staged weights as files, beside whatever it is asked meanwhile.

Knows staged buckets and the files' formats; which version is written, in which mode and upon which base is for the
controller to say. Host memory holds one copy of the weights for deltas, two while a version is held.

Invariants: one write at a time; the staged memory is read only until the copy is held; a failure is an answer, never
the end of the rank.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path

import torch

from services.common.errors import ServiceError
from services.common.weight_files.manifest import Manifest, Tensor
from services.common.weight_files.write import Base, Bucket, Place, add_full, write_delta, write_full
from services.trainer.core.buckets import BucketPlan, plan_digest
from services.trainer.core.file_commands import FilesState, WriteFiles, WriteResult
from services.trainer.ranks.weights import StagedWeights

_POLL_SECONDS = 0.0005


class VersionFiles:
    """Writes versions, one after the other."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._state = FilesState()
        self._held: tuple[int, BucketPlan, list[torch.Tensor]] | None = None
        self._base: tuple[int, list[torch.Tensor]] | None = None
        """The newest version that was written, and its bytes."""
        self._spare: list[torch.Tensor] = []
        self._stream: torch.cuda.Stream | None = None

    @property
    def reads_staged(self) -> bool:
        """Whether the staged memory is still read."""
        return self._thread is not None and self._thread.is_alive() and not self._state.held

    @property
    def state(self) -> FilesState:
        """How far the last write is."""
        return self._state

    def begin(self, staged: StagedWeights, order: WriteFiles) -> FilesState:
        """Begins to write; `state` tells the end. While an earlier write hangs it is refused there."""
        if self._thread is not None and self._thread.is_alive():
            return FilesState(held=True, result=WriteResult(error="an earlier version is still being written"))
        self._state = FilesState(version=order.version)
        self._thread = threading.Thread(target=self._run, args=(staged, order), name="weight files", daemon=True)
        self._thread.start()
        return self._state

    def _run(self, staged: StagedWeights, order: WriteFiles) -> None:
        began = time.monotonic()
        try:
            if self._held is None or self._held[0] != order.version:
                self._hold(staged, order.version)
            self._state = FilesState(held=True, version=order.version)
            manifest = self._write(order)
            result = WriteResult(
                mode=manifest.mode,
                file_bytes=manifest.file_bytes,
                total_bytes=manifest.total_bytes,
                changed=sum(tensor.changed for tensor in manifest.tensors),
                elements=sum(tensor.size_bytes // tensor.item_bytes for tensor in manifest.tensors),
                seconds=time.monotonic() - began,
            )
        except ServiceError as error:
            result = WriteResult(error=error.message)
        except Exception as error:
            result = WriteResult(error=f"{type(error).__name__}: {error}")
        self._state = FilesState(held=True, version=order.version, result=result)

    def _hold(self, staged: StagedWeights, version: int) -> None:
        """A copy of the staged bytes in host memory."""
        self._held = None
        spare, self._spare = self._spare, []
        if [bucket.numel() for bucket in spare] != [bucket.numel() for bucket in staged.buckets]:
            spare = [torch.empty(b.numel(), dtype=torch.uint8, pin_memory=b.is_cuda) for b in staged.buckets]
        for index, (bucket, host) in enumerate(zip(staged.buckets, spare, strict=True)):
            while not staged.gathered(index):  # ends with the thread that gathers
                time.sleep(_POLL_SECONDS)
            if (mark := staged.mark(index)) is None:
                host.copy_(bucket)
                continue
            torch.cuda.set_device(bucket.device)
            self._stream = self._stream or torch.cuda.Stream(bucket.device)  # beside whatever the model does
            self._stream.wait_event(mark)
            with torch.cuda.stream(self._stream):
                host.copy_(bucket, non_blocking=True)
            self._stream.synchronize()
        self._held = version, staged.plan, spare

    def _write(self, order: WriteFiles) -> Manifest:
        assert self._held
        version, plan, memory = self._held
        specs = tuple(spec for bucket in plan.buckets for spec in bucket)
        place = Place(Path(order.directory), order.run_id, version, plan_digest(specs))
        buckets = [
            Bucket(tuple(Tensor(spec.name, spec.dtype, spec.shape, "", 0, 0) for spec in specs), host.numpy())
            for specs, host in zip(plan.buckets, memory, strict=True)
        ]
        if order.beside:
            return add_full(place, buckets)
        manifest, base = None, self._base
        if order.base_version and base is not None and base[0] == order.base_version:
            before = Base(base[0], [host.numpy() for host in base[1]])
            manifest = write_delta(place, buckets, before, order.encoding)
        manifest = manifest or write_full(place, buckets)
        if order.keeps_base:
            self._spare = base[1] if base is not None else []
            self._base = version, memory
        else:
            self._held, self._spare = None, memory
        return manifest
